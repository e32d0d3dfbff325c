"""Whether an answer called what its exercise forbids: the built-in that it is about."""

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType


@contextlib.contextmanager
def called(*functions: Callable) -> Iterator[list[str]]:
    """Within the block, notes the names of those of `functions` that run, in this thread or in one
    that is started meanwhile. They are known by their code, so it does not matter under which name
    the answer has them, nor whether it calls them itself. They must be written in Python; a class
    counts where one is made of it, or of a class made from it.

        with forbidden.called(schedules.gpipe) as names:
            answer(4, 8)
    """
    codes = {_code(function): function.__qualname__ for function in functions}
    names: list[str] = []
    before, in_threads = sys.getprofile(), threading.getprofile()

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in codes:
            names.append(codes[frame.f_code])
        if before is not None:
            before(frame, event, argument)

    sys.setprofile(on_call)
    threading.setprofile(on_call)
    try:
        yield names
    finally:
        sys.setprofile(before)
        threading.setprofile(in_threads)


def _code(function: Callable) -> CodeType:
    """What runs when it is called, below decorators."""
    return inspect.unwrap(function.__init__ if isinstance(function, type) else function).__code__
