"""Processes and those below them: looking at them, and ending them all."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable

import psutil

_QUIET_LOOKS = 3  # what forks and exits at once may be missed by one look, not by all


def below(process: psutil.Process | None = None) -> list[psutil.Process]:
    """The living processes below one, or below this one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [p for p in (process or psutil.Process()).children(recursive=True) if alive(p)]
    return []


def alive(process: psutil.Process) -> bool:
    """Whether it still runs, or could."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def memory(processes: list[psutil.Process], inherited: int) -> int:
    """Bytes that they hold together, each beyond `inherited`: what it got when it was forked.
    Quick; may count twice what they share among each other."""
    return sum(max(0, own_memory(process) - inherited) for process in processes)


def own_memory(process: psutil.Process) -> int:
    """Bytes of a process that are in no file; on macOS, all that it has in memory."""
    try:
        if not psutil.LINUX:
            return process.memory_info().rss
        with open(f"/proc/{process.pid}/status", "rb") as file:
            return 1024 * sum(map(int, re.findall(rb"Rss(?:Anon|Shmem):\s*(\d+) kB", file.read())))
    except (psutil.Error, OSError):
        return 0  # it has ended


def seconds_used(processes: list[psutil.Process]) -> float:
    """Processor time that they have had, with that of their children which have ended."""
    own = os.times()
    found = own.children_user + own.children_system
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found += times.user + times.system
            found += getattr(times, "children_user", 0) + getattr(times, "children_system", 0)
    return found


def wants_processor(process: psutil.Process) -> bool:
    """Whether it computes, or would if it had a processor."""
    with contextlib.suppress(psutil.Error):
        return process.status() == psutil.STATUS_RUNNING
    return False


def exact_memory(processes: list[psutil.Process], inherited: int) -> int:
    """Bytes that they hold together; what several share is divided among them. Slow."""
    field, found = ("pss" if psutil.LINUX else "uss"), 0
    for process in processes:
        try:
            found += getattr(process.memory_full_info(), field)
        except psutil.AccessDenied:  # a process can make itself unreadable, but for its status
            found += memory([process], inherited)
        except psutil.Error:
            pass  # it has ended
    return found


def end(look: Callable[[], list[psutil.Process]]) -> dict[int, int]:
    """Ends the processes that `look` finds, until it finds none. Returns what `reap` gives, of all
    children of this process that have ended meanwhile.

    A process can start others faster than one can kill. So each is frozen first: what is frozen
    starts nothing, and when several looks find no new one, all of them can be killed.
    """
    ended = {}
    while found := _freeze(look):
        for process in found:
            _send(process, signal.SIGKILL)
        while any(alive(process) for process in found):
            time.sleep(0.005)
        ended |= reap()
    return ended


def _freeze(look):
    frozen, quiet = set(), 0
    while quiet < _QUIET_LOOKS:
        new = set(look()) - frozen
        for process in new:
            _send(process, signal.SIGSTOP)
        frozen |= new
        quiet = 0 if new else quiet + 1
    return frozen


def _send(process, number):
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def reap() -> dict[int, int]:
    """Takes note of the children of this process that have ended: wait status by process id."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    return ended
