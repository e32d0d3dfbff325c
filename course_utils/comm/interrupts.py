"""What an interrupt must not break off: starting and ending ranks."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted(number: int = signal.SIGINT) -> Iterator[None]:
    """Keeps an interrupt (the stop button, Ctrl-C), or another signal, waiting until the block is done."""
    handler = signal.getsignal(number)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # Python hands signals to the main thread, and only if it has a handler
        return
    waiting = []
    signal.signal(number, lambda *received: waiting.append(received))
    try:
        yield
    finally:
        signal.signal(number, handler)
    if waiting:
        handler(*waiting[0])
