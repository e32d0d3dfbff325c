"""The memory of a process from which others are forked, in pages of 2 MB instead of 4 kB.

A fork copies the table of the parent's pages, and an end takes the copy down. For the 400 MB of the fork server that is
most of what starting and ending a rank costs. A process that writes to a large page still gets 4 kB of its own.
"""

import ctypes
import re
from pathlib import Path

_COLLAPSE = 25  # MADV_COLLAPSE of linux/mman.h (madvise(2)), since Linux 6.1
# Private memory that can be written and is in no file: its first and last address.
_ANONYMOUS = re.compile(r"^(\w+)-(\w+) rw-p \w+ \S+ 0 *(?:\[heap\]|\[anon\S*)?$", re.MULTILINE)


def gather() -> None:
    """Moves this process's memory onto large pages, where the system has them; elsewhere, and where
    a part cannot be moved, it stays as it is."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    for first, last in _ANONYMOUS.findall(maps.read_text()):
        move(int(first, 16), int(last, 16) - int(first, 16))


def move(start: int, size: int) -> bool:
    """Moves `size` bytes from the address `start` onto large pages; whether the system did it."""
    advise = ctypes.CDLL(None).madvise
    return advise(ctypes.c_void_p(start), ctypes.c_size_t(size), _COLLAPSE) == 0
