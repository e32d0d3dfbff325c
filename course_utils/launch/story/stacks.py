"""Where each rank is right now, told by the rank's own interpreter on a signal.

faulthandler writes all stacks from C, in the signal's handler, so it also works while a rank is inside of a
collective, in a long matmul, or in C code that never gives Python's lock back. The same handler writes a last stack
when a rank crashes.
"""

import faulthandler
import os
import re
import signal
import threading
import time
from multiprocessing import connection

from course_utils.comm import private
from course_utils.launch.story.frames import Frame, is_compiled, is_own, own, passes_through

# A signal that nobody uses: SIGUSR1 and SIGUSR2 are the learner's (SLURM sends them before it ends a job). macOS has
# no others to offer.
ASK = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
# The last: of a process that was started with `-m`, as the grader's is.
_OUTERMOST = (" in <module>\n", "\n  ...\n", " in _run_module_as_main\n")
_AGAIN = 0.25  # seconds after which a rank that has not answered is asked again

# On another host PyTorch may lie in another folder.
_TORCH = "/torch/"
_C10D = "/torch/distributed/distributed_c10d.py"
_OPERATORS = "/" + "/".join(private.OPERATORS_FILE)
# Where PyTorch waits for disks and processes; another rank cannot end that.
_ALONE = re.compile("/torch/(distributed/checkpoint|utils/data|multiprocessing|serialization|hub)")
_WAIT = "course_utils/comm/intercept.py"  # Work.wait, and a store's
_HOST = "course_utils/comm/host_waits.py"


def answer_with_stacks(pipe) -> str:
    """In a rank: writes its stacks into `pipe` when it is asked (`ask`) and when it crashes. Returns the name of the
    rank's main thread in these stacks."""
    os.set_blocking(pipe.fileno(), False)  # a full pipe must not stop the rank
    faulthandler.enable(pipe.fileno(), all_threads=True)
    faulthandler.register(ASK, pipe.fileno(), all_threads=True)
    return f"{threading.main_thread().ident:016x}"


class Stacks:
    """The threads of a rank, each with its stack, innermost frame first; `main_thread` is the name of the main one,
    `main` its stack."""

    def __init__(self, text: str, main: str):
        self.main_thread = main
        self.threads = {}
        frames = []
        for line in text.splitlines():
            if thread := _THREAD.match(line):
                # A later dump replaces an earlier one.
                frames = self.threads[thread[1]] = []
            elif frame := _FRAME.match(line):
                frames.append(Frame(frame[1], int(frame[2]), frame[3]))
                if _polls(frames[-1]):  # where in its loop a host is, is chance
                    frames[:] = [frames[-1]._replace(line=0)]
        self.main = self.threads.get(main, [])

    @property
    def own_path(self) -> list[Frame]:
        """The learner's own lines in the main thread, the innermost last; without the decorator in whose line a
        compiled function stands."""
        path = own(self.main[::-1])
        return [frame for frame in path if not frame.source.startswith("@")] or path


def waits(frames: list[Frame]) -> str | None:
    """Returns in what PyTorch waits where a stack ends: "all_reduce", "backward", "wait" for the result of an earlier
    call; "" if nothing in the stack says so; None if the stack does not end in PyTorch.

    This alone does not say that a rank waits for others. That it uses no processor time, and that its newest call
    lacks another rank, does. Where in PyTorch it ends is not asked: every version puts other frames between.
    """
    if not frames or frames[0].function == "wait_for_some_time":
        return None
    file = frames[0].file
    ours = file.endswith(_WAIT) or _polls(frames[0])
    inside = _TORCH in file and not is_own(file) and not _ALONE.search(file)
    if not (ours or inside or is_compiled(file)):
        return None
    name = "wait" if ours else ""
    for frame in frames:  # the outermost one has the name that the learner has written
        if is_own(frame.file):
            break
        name = passes_through(frame.file, frame.function) or name
    return name


def _polls(frame):
    return frame.file.endswith(_HOST) and frame.function == "behind_a_collective"


def called(frames: list[Frame]) -> str | None:
    """Returns the function of torch.distributed that waits for what it has called itself, such as "all_reduce", if a
    stack ends in one. What waits for an earlier call is none."""
    rest = [frame for frame in frames if not frame.file.endswith((_WAIT, _OPERATORS))]
    return rest[0].function if rest and rest[0].file.endswith(_C10D) else None


def ask(ranks: list[tuple], patience: float = 2.0) -> list[str]:
    """Asks several ranks for their stacks, all at the same time; returns what each wrote, empty for one that has not
    answered in `patience` seconds.

    Asks again who is silent: if a rank is still in the handler of the request before, the system gives the signal to
    another of its threads, gloo's for example, where faulthandler sees that it is at work, and writes nothing.

    ranks: for each its pipe, a function that sends it a signal, and the name of its main thread.
    """
    waiting = {pipe: (send_signal, main) for pipe, send_signal, main in ranks}
    for pipe in waiting:
        drain(pipe)
    texts = dict.fromkeys(waiting, "")
    for _ in range(round(patience / _AGAIN)):
        for send_signal, _ in waiting.values():
            send_signal(ASK)
        _read_answers(texts, waiting)
    return ["" if pipe in waiting else texts[pipe] for pipe, _, _ in ranks]


def _read_answers(texts, waiting):
    """Adds to `texts` what ranks write in the next moment, and takes those that have answered out of `waiting`. What
    is there is read even if this process was held up meanwhile."""
    end = time.monotonic() + _AGAIN
    while waiting and (ready := connection.wait(waiting, max(0.0, end - time.monotonic()))):
        for pipe in ready:
            text = drain(pipe)
            texts[pipe] += text
            if not text or _complete(texts[pipe], waiting[pipe][1]):  # it is gone; all is there
                del waiting[pipe]


def _complete(text, main):
    """True if the stack of the main thread, which is the last one, is there to its outermost frame, or to where
    faulthandler cuts a very deep one."""
    _, found, stack = text.rpartition(main)
    return bool(found) and stack.endswith(_OUTERMOST)


def drain(pipe) -> str:
    """Returns what lies in the pipe, without waiting."""
    text = b""
    while pipe.poll(0) and (data := os.read(pipe.fileno(), 1 << 16)):
        text += data
    return text.decode(errors="replace")
