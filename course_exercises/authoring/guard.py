"""Runs a learner's code in this process so that it cannot hang it, flood it or change it."""

import contextlib
import ctypes
import io
import itertools
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Self

import torch

from course_utils.comm.fair import FairClock
from course_utils.launch.story.frames import is_own

# Within a trace C++ calls Python back at any time, and ends the process over an exception there. So time is
# up where only these stand between the learner's line and the one that runs, and at the latest so late.
_TRACED = "course_planner/fake.py"
_CALLED = ("torch/nn/", "torch/optim/")
_LATEST = 5.0  # seconds


class TimeIsUp(BaseException):
    """Raised inside code that runs longer than its limit; not an Exception, so that a learner's
    `except Exception` does not swallow it."""


class Deadline:
    """Ends the calling thread's code with `TimeIsUp` after `seconds`, again and again until it
    gives in.

    The time counts in which a learner's code computes or waits. That in which a busy machine has no
    processor for it does not count, and of what a check does by itself, such as looking for a rare case,
    a tenth does: a right answer must not fail because something else is slow. Time inside `paused()`
    does not count either.

    In the main thread an alarm signal wakes Python from sleeping and from waiting for a lock;
    where there is no such signal (Windows, other threads) Python raises between two bytecodes.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._tick = min(0.25, max(0.02, seconds / 4))
        self._by_signal = (
            hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
        )
        self._thread = threading.get_ident()
        self._active = False
        self._wake: threading.Event | None = None
        self._watcher: threading.Thread | None = None
        self._before = None
        self._outside: set[FrameType] = set()

    def __enter__(self) -> Self:
        self._outside = set(_outwards(sys._getframe(1)))
        if self._by_signal:
            self._before = signal.signal(signal.SIGALRM, self.ring)
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._outside.clear()
        if self._by_signal:
            signal.signal(signal.SIGALRM, self._before)

    @property
    def left(self) -> float:
        """The seconds that are left, as of the last look."""
        return self._left

    def spend(self, seconds: float) -> None:
        """Counts time that was used elsewhere. Raises TimeIsUp where none is left."""
        self._left -= max(0.0, seconds)
        if self._left <= 0:
            raise TimeIsUp

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock while something runs that has a clock of its own."""
        self._stop()
        try:
            yield
        finally:
            self._start()

    def _start(self) -> None:
        self._clock = FairClock()
        self._active = True
        if self._by_signal:
            signal.setitimer(signal.ITIMER_REAL, self._tick, self._tick)
        else:
            self._wake = threading.Event()
            self._watcher = threading.Thread(target=self._watch, args=(self._wake,), daemon=True)
            self._watcher.start()

    def _stop(self) -> None:
        self._active = False  # from here on a late alarm does nothing
        if self._by_signal:
            signal.setitimer(signal.ITIMER_REAL, 0)
        else:
            self._end_watcher()

    def _end_watcher(self) -> None:
        """Ends it, and takes what it has raised late: here, in the thread that it raised it in. (To take
        it back with NULL leaves Python 3.11 looking for an exception for ever, and a profiler hangs.)"""
        while self._watcher is not None:
            try:  # contextlib.suppress is a call, in which it could be raised
                self._wake.set()
                self._watcher.join()
                _look_for_exceptions()
                self._watcher = None
            except TimeIsUp:
                pass

    def ring(self, _: int, frame: FrameType | None) -> None:
        """What the alarm calls."""
        if not self._active:
            return
        if self._is_up(frame):
            raise TimeIsUp
        if self._left <= 0:
            signal.setitimer(signal.ITIMER_REAL, self._tick, self._tick)

    def _watch(self, wake: threading.Event) -> None:
        while not wake.wait(self._tick):
            if self._is_up(sys._current_frames().get(self._thread)):
                _raise_in(self._thread, TimeIsUp)

    def _is_up(self, frame: FrameType | None) -> bool:
        """`frame` is the innermost one. The cell that called the check lies outside of it."""
        inside = itertools.takewhile(lambda each: each not in self._outside, _outwards(frame))
        files = [each.f_code.co_filename for each in inside]
        called = list(itertools.takewhile(lambda file: not is_own(file), files))
        self._left -= self._clock.passed() * (1.0 if len(called) < len(files) else 0.1)
        if self._left > 0:
            return False
        self._tick = 0.005
        return self._left <= -_LATEST or _may_end(files, called)


def _may_end(files: list[str], called: list[str]) -> bool:
    """Whether an exception may be raised in the first of `files`. Each is called by the next, and `called`
    by the learner's code."""
    if not any(file.endswith(_TRACED) for file in files):
        return True
    return all(any(part in file for part in _CALLED) for file in called)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that wait for it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Makes another thread raise where it next looks for exceptions: at calls and in loops."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _look_for_exceptions() -> None:
    """Python looks for them where a function begins."""


class Printed(io.TextIOBase):
    """Keeps the first `limit` characters written to it and forgets the rest."""

    def __init__(self, limit: int = 2000) -> None:
        self._parts: list[str] = []
        self._left = limit

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._left > 0:
            self._parts.append(text[: self._left])
            self._left -= len(text)
        return len(text)

    def lines(self) -> list[str]:
        return "".join(self._parts).splitlines()


@contextlib.contextmanager
def undisturbed() -> Iterator[Printed]:
    """Gives the code inside a known state (float32, gradients on, default device CPU, one thread:
    two that share a busy core make tiny models many times slower), keeps what it prints, and
    restores the caller's state: random numbers, dtype, threads, grad mode, default device,
    environment, working folder, warnings."""
    printed = Printed()
    before = _snapshot()
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            warnings.catch_warnings(),
            torch.inference_mode(False),
        ):
            warnings.simplefilter("ignore")
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)
            torch.set_default_device(None)
            torch.set_num_threads(1)
            yield printed
    finally:
        _restore(before)


def _snapshot() -> dict:
    return {
        "rng": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
        "random": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "environ": dict(os.environ),
        "folder": os.getcwd(),
    }


def _restore(state: dict) -> None:
    torch.set_rng_state(state["rng"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["random"])
    torch.set_default_dtype(state["dtype"])
    torch.set_default_device(None if state["device"].type == "cpu" else state["device"])
    if torch.get_num_threads() != state["threads"]:
        torch.set_num_threads(state["threads"])
    torch.set_grad_enabled(state["grad"])
    for name in set(os.environ) - set(state["environ"]):
        del os.environ[name]
    os.environ.update(state["environ"])
    os.chdir(state["folder"])
