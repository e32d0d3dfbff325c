"""Notes whether an answer called what its exercise forbids: the built-in that it is about."""

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def called(*functions: Callable) -> Iterator[list[str]]:
    """Within the block, notes the names of those `functions` that run, in this thread or in one
    that is started meanwhile. They are known by their code, so it does not matter under which name
    the answer has them, nor whether it calls them itself. They must be written in Python; of a
    class, name a method: `DistributedSampler.__init__`."""
    codes = {inspect.unwrap(function).__code__: function.__qualname__ for function in functions}
    found: list[str] = []

    def note(frame, event, argument) -> None:
        if event == "call" and frame.f_code in codes:
            found.append(codes[frame.f_code])

    before, in_threads = sys.getprofile(), threading.getprofile()
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
        threading.setprofile(in_threads)
