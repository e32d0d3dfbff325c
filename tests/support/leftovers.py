"""What a call of `launch` may have left behind: processes, temporary files, listening ports.

`with nothing_left(folder):` fails if something that began inside is still there two seconds
after the block. `folder` is the temporary folder that this process uses.
"""

import contextlib
import os
import time
from pathlib import Path

import psutil

# The fork server and its resource tracker, and the janitor: one of each for the life of this process,
# not for one call.
_LASTING = ("launch.keepers import forks", "launch/keepers/janitor.py")
_TRACKER = "multiprocessing.resource_tracker"


@contextlib.contextmanager
def nothing_left(folder: Path):
    processes, files = _processes(), _files(folder)
    yield
    deadline = time.monotonic() + 2
    while found := _found(folder, processes, files):
        if time.monotonic() > deadline:
            raise AssertionError(f"left behind: {found}")
        time.sleep(0.02)


def _found(folder, processes, files):
    return [
        *(_processes() - processes),
        *(_files(folder) - files),
        *_listening(),
    ]


def _processes():
    """Processes below this one, except those that are there once for its whole life."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and not _lasting(process):
                found.add((process.pid, " ".join(process.cmdline())[:80]))
    return found


def living(process: psutil.Process) -> bool:
    """Whether it has not ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _lasting(process):
    command = " ".join(process.cmdline())
    # A rank has the fork server's command line: it is a fork of it. The tracker is the fork server's.
    above = process.parent() if _TRACKER in command else process
    return above.ppid() == os.getpid() and any(name in command for name in (*_LASTING, _TRACKER))


def _files(folder):
    lasting = "torchinductor_"  # PyTorch's own cache
    return {str(path) for path in folder.iterdir() if not path.name.startswith(lasting)}


def _listening():
    ours = psutil.Process().net_connections("inet")
    return [c.laddr for c in ours if c.status == psutil.CONN_LISTEN]
