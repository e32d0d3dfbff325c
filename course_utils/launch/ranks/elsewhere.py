"""Ranks that are not on this machine: what starts them in its place."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import entry_points

from course_utils.launch.ranks.job import Launch
from course_utils.launch.story.view import Rank

# With a call, and each rank's function and arguments: the ranks, until the stack is closed.
Start = Callable[[ExitStack, Launch, list[list]], list[Rank]]
_start: Start | None = None


def starts() -> Start | None:
    """What starts the ranks of a launch: what the block around it says (`started_by`), else what the
    environment's COURSE_CLUSTER asks for; None: this machine."""
    if _start is None and (value := os.environ.get("COURSE_CLUSTER", "").strip()):
        (found,) = entry_points(group="course_utils.hosts", name="start")
        return found.load()(value)
    return _start


@contextmanager
def started_by(start: Start) -> Iterator[None]:
    """In this block, `start` starts the ranks of a launch."""
    global _start
    before, _start = _start, start
    try:
        yield
    finally:
        _start = before
