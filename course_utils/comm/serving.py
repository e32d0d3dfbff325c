"""A thread that only carries out what a queue gives it: it moves no rank on by itself.

`launch` knows such a thread by this file in its stack.
"""

from collections.abc import Callable


def serve(call: Callable, *args) -> None:
    """Calls it, on that thread."""
    call(*args)
