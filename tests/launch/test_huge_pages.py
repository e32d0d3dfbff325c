"""A rank is forked from memory in large pages."""

import ctypes
import mmap
import re
from multiprocessing import forkserver
from pathlib import Path

import pytest

from course_utils.launch import huge_pages, server


def _possible() -> bool:
    """Whether the system moves eight megabytes of this process onto large pages."""
    room = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.write(b"x" * len(room))
    return huge_pages.move(ctypes.addressof(ctypes.c_char.from_buffer(room)), len(room))


def _kilobytes(process: int) -> dict[str, int]:
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return {name: int(n) for name, n in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}


@pytest.mark.skipif(not _possible(), reason="this system has no MADV_COLLAPSE (Linux 6.1)")
def test_the_fork_server_lies_on_large_pages():
    server.ensure_running()
    held = _kilobytes(forkserver._forkserver._forkserver_pid)
    assert held["AnonHugePages"] > held["Anonymous"] / 4
