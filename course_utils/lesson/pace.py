"""Ranks that keep a pace: more of them than a machine has cores show what separate devices would do.

The work is really done, which takes much less than its slots; then the rank sleeps, like a process
that waits for its device. What is measured so is called emulated.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from course_utils import hardware
from course_utils.lesson.schedules import Op
from course_utils.trace import Trace

SLOT = 0.02  # seconds


@contextmanager
def paced(trace: Trace, name: str, slots: float) -> Iterator[None]:
    """Records the block as the compute span `name`, and lets it last that many slots."""
    hardware.settle()  # on a GPU, waiting for what arrives has only queued what comes after it
    with trace.span(name):
        begin = time.perf_counter()
        yield
        hardware.settle()
        time.sleep(max(0.0, begin + slots * SLOT - time.perf_counter()))


def at_pace(
    trace: Trace, slots: Mapping[str, float]
) -> Callable[[Op], AbstractContextManager[None]]:
    """Returns a context for an op of a schedule, which lasts as many slots as its kind takes."""
    return lambda op: paced(trace, str(op), slots[op.kind])
