"""What a rank holds, whatever gloo's threads are doing at that moment."""

import time
from pathlib import Path

from course_utils.trace.meters import Sampling


class PatientSampling(Sampling):
    """A new peak counts if it stands when gloo's threads rest.

    A thread tells the program first that a call is over, and lets go of its tensors then. On a busy
    machine an operation of the program fits in between: once in 48 steps a loss was read with the
    last all-reduce's 2,048 bytes.
    """

    def held(self) -> int:
        if (found := super().held()) > self.peak:
            wait_for_gloo()
            found = super().held()
        return found


def wait_for_gloo(seconds: float = 10) -> None:
    """Until none of gloo's threads is at work: one that waits for another rank sleeps too, and one that waits for
    the interpreter, to let go of a tensor, gets it here."""
    until = time.monotonic() + seconds
    time.sleep(0.0005)
    while any(map(_works, Path("/proc/self/task").glob("*/stat"))) and time.monotonic() < until:
        time.sleep(0.0005)


def _works(stat: Path) -> bool:
    """Whether a thread is one of gloo's that runs, or would if it had a processor (proc(5))."""
    try:
        text = stat.read_text()
    except OSError:
        return False  # a thread that has just ended
    name, _, state = text.partition("(")[2].rpartition(")")
    return name == "pt_gloo_runloop" and state.split()[0] == "R"
