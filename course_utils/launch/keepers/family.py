"""Processes below others, and what they leave behind.

A descendant of a rank can leave its group and its session, and its parent can die. On Linux both are answered by
subreapers: an orphan becomes the child of the nearest ancestor that has asked for orphans. Each rank asks, so what it
starts stays below it as long as it lives; the fork server asks, so what a dead rank has left becomes its child. No
cgroup is needed, which an ordinary user may not make, and no scan of all processes, which misses orphans.
"""

import ctypes
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


def children(but: Collection[int] = ()) -> list[int]:
    """The children of this process but these, by their numbers."""
    try:
        tasks = list(Path("/proc/self/task").iterdir())
        found = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except FileNotFoundError:  # no Linux, or one that does not tell
        found = [child.pid for child in psutil.Process().children()]
    return [child for child in found if child not in but]
