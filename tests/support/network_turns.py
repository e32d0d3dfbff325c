"""Who changes this machine's network interfaces, and who must not see that, take turns.

A browser gives up what it loads when an interface comes or goes (ERR_NETWORK_CHANGED), and the tests
run two at a time.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_FILE = Path(tempfile.gettempdir(), f"course-tests-network-{os.getuid()}")
_PATIENCE = 60.0  # seconds until the system has taken away what was in a namespace


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """In this block no test adds or removes an interface; many may be in such a block at once."""
    with _turn(fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def changed() -> Iterator[None]:
    """In this block alone interfaces may come and go, and go they must."""
    with _turn(fcntl.LOCK_EX):
        before = psutil.net_if_addrs().keys()
        yield
        end = time.monotonic() + _PATIENCE
        while more := psutil.net_if_addrs().keys() - before:
            assert time.monotonic() < end, f"interfaces are left: {more}"
            time.sleep(0.05)


@contextlib.contextmanager
def _turn(kind):
    with _FILE.open("a") as file:
        fcntl.flock(file, kind)  # ends with the file, and with this process
        yield
