"""A rank is forked from memory in large pages."""

import ctypes
import mmap

import pytest

from course_utils.launch.keepers import server
from course_utils.launch.ranks import huge_pages
from tests.support import memory_held


def _possible() -> bool:
    """Whether the system moves eight megabytes of this process onto large pages."""
    room = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.write(b"x" * len(room))
    return huge_pages.move(ctypes.addressof(ctypes.c_char.from_buffer(room)), len(room))


@pytest.mark.skipif(not _possible(), reason="this system has no MADV_COLLAPSE (Linux 6.1)")
def test_the_fork_server_lies_on_large_pages():
    server.ensure_running()
    held = memory_held.held(server._server.pid)
    assert held["AnonHugePages"] > held["Anonymous"] / 4
