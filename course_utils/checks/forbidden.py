"""Whether an answer called a function that its exercise forbids: the built-in that it is about."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def called(*functions: Callable) -> Iterator[list[str]]:
    """Within the block, notes the names of those of these Python functions that this thread calls,
    by whatever name and way. A class counts where one is made of it, or of a class made from it.

        with forbidden.called(schedules.gpipe) as names:
            answer(4, 8)
    """
    names: list[str] = []
    codes = {_code(function): function.__name__ for function in functions}
    before = sys.getprofile()

    def hear(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in codes:
            names.append(codes[frame.f_code])
        if before is not None:
            before(frame, event, argument)

    sys.setprofile(hear)
    try:
        yield names
    finally:
        sys.setprofile(before)


def _code(function: Callable):
    """What runs when it is called, below decorators."""
    return inspect.unwrap(function.__init__ if isinstance(function, type) else function).__code__
