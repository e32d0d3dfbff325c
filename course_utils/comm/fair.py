"""Time that counts against a limit: not that in which a busy machine has no processor for a program."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


class FairClock:
    """Counts the seconds in which a process and those below it compute, or wait for something other
    than a processor.

    Linux says of each thread how long it has computed, and how long it was ready to and could not, in
    nanoseconds (docs.kernel.org/scheduler/sched-stats.html, /proc/<pid>/schedstat). The delay of the
    thread that was delayed most does not count. Their share of the machine's processors counts at
    least: threads that delay each other use up their own time. Where a system does not say this, all
    time counts; of this process itself, only the time that it computed where it did compute.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid or os.getpid()
        self._free, self._share, self._counted = 0.0, 0.0, 0.0
        self._seen = self._look()

    def passed(self) -> float:
        """The seconds that count since the last call; below 0 where Linux told of a delay late."""
        before, self._seen = self._seen, self._look()
        passed, used = (self._seen[i] - before[i] for i in (0, 1))
        then, now = before[2], self._seen[2]
        if not now:
            return passed if used < 0.01 * passed else min(used, passed)
        known = now.keys() & then
        ran = sum(now[thread][0] - then[thread][0] for thread in known)
        self._free += passed - max(
            (now[thread][1] - then[thread][1] for thread in known), default=0
        )
        self._share += min(passed, ran / (os.cpu_count() or 1))
        counted, self._counted = self._counted, max(self._free, self._share)
        return self._counted - counted

    def _look(self):
        own = time.process_time() if self._pid == os.getpid() else 0.0
        return time.monotonic(), own, dict(_threads(self._pid))


def longest_delay(pids: Iterable[int]) -> float:
    """The seconds in which a thread of these processes, or of those below them, has been ready to run
    and got no processor, since it began: of the one that was delayed most."""
    return max((delay for pid in pids for _, (_, delay) in _threads(pid)), default=0.0)


def _threads(pid: int) -> Iterator[tuple[str, tuple[float, float]]]:
    """The threads of a process and of those below it, with the seconds in which each has computed, and
    those in which it was ready to."""
    for folder in _PROC.glob(f"{pid}/task/*"):
        with suppress(OSError, ValueError):
            ran, delayed, _ = map(int, (folder / "schedstat").read_text().split())
            yield str(folder), (ran / 1e9, delayed / 1e9)
        with suppress(OSError):  # a thread that has ended
            for child in (folder / "children").read_text().split():
                yield from _threads(int(child))
