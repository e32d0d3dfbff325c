"""Parts and candidates in processes of their own, so that one that hangs takes nothing else with it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable


class Hung(Exception):
    """A candidate did not come back in time, or its process has ended."""


class Apart:
    """A candidate in a process of its own: `python -m MODULE WORDS`, which calls `serve`. A round of
    it that takes longer than `limit` seconds raises Hung; `reason` says then what happened."""

    def __init__(self, module: str, *words: str, limit: float = 60.0):
        self.reason = None
        self._limit = limit
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def __call__(self) -> float:
        """Runs the candidate once; returns its seconds."""
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            if select.select([self._process.stdout], [], [], self._limit)[0]:
                return float(self._process.stdout.readline())
            self.reason = f"did not come back within {self._limit:g} seconds"
        except (BrokenPipeError, ValueError):
            self.reason = "its process has ended"
        raise Hung(self.reason)

    def close(self) -> None:
        """Ends the process, which may tidy up for a moment, with all that it has started in its group."""
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(10)
        _end(self._process)


def run(program: str, limit: float) -> str | None:
    """Runs a Python program, which prints where this process does; returns what kept it from its
    end, such as `limit` seconds that were too few, None if nothing did."""
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"did not come back within {limit:g} seconds"
    finally:
        _end(process)
    return f"its process has ended with code {code}" if code else None


def _end(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def serve(candidate: Callable[[], float | None]) -> None:
    """In the process of an Apart: runs the candidate for each line that comes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the candidate prints is no answer
    for _ in sys.stdin:
        start = time.perf_counter()
        own = candidate()
        print(own or time.perf_counter() - start, file=answers, flush=True)
