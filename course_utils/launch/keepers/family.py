"""Processes below others: handles that never mean another process, and what was left behind.

A descendant of a rank can leave its group and its session, and its parent can die. On Linux both
are answered by subreapers: an orphan becomes the child of the nearest ancestor that has asked for
orphans. Each rank asks, so what it starts stays below it as long as it lives; the fork server
asks, so what a dead rank has left becomes its child. No cgroup is needed, which an ordinary user
may not make, and no scan of all processes, which misses orphans.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

import psutil

_LINUX = sys.platform == "linux"
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # <sys/prctl.h>


def adopt_orphans() -> None:
    """Descendants of this process whose parent dies become its children, where the system can."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """This process is killed when its parent ends, where the system can do that."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def children(process: int, but: Collection[int] = ()) -> list[int]:
    """The living children of a process but these, by their numbers; none if it is gone."""
    found = []
    with contextlib.suppress(psutil.Error, OSError):
        try:
            tasks = list(Path(f"/proc/{process}/task").iterdir())
            found = [
                int(word) for task in tasks for word in (task / "children").read_text().split()
            ]
        except FileNotFoundError:  # no Linux, or one that does not tell
            found = [child.pid for child in psutil.Process(process).children()]
    return [child for child in found if child not in but and not _zombie(child)]


def _zombie(process):
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True  # not even that any more


class Handle:
    """A process that may end, and whose number another process may then have: a signal reaches
    this one or none, where the system has pidfds."""

    def __init__(self, process: int):
        self.pid = process
        self._gone = False
        self._fd = None
        try:
            self._fd = os.pidfd_open(process)
        except ProcessLookupError:
            self._gone = True
        except (AttributeError, OSError):
            pass  # no pidfds here

    def send(self, number: int) -> bool:
        """Sends a signal; False if the process is gone. Number 0 only asks."""
        if self._gone:
            return False
        try:
            if self._fd is None:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            self._gone = True
        return not self._gone

    def forget(self) -> None:
        """To be called when the process is known to have ended: nothing is sent any more."""
        self._gone = True

    def close(self) -> None:
        self.forget()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
