"""Where sockets lie, the fork server's and those of ranks: a socket's address has room for a short
path only."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import process, util

_LONGEST = 103 if sys.platform == "darwin" else 107  # bytes: sun_path of unix(7), and its last zero
_LISTENER = "listener-12345678"  # as multiprocessing names them
_DEEPEST = os.path.join("pymp-12345678", "tmp12345678", _LISTENER)
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def keep_paths_short() -> None:
    """Gives multiprocessing a folder with a short name, where the temporary folder's is too long.

    To be called before the first socket; on clusters TMPDIR names job, user and node. What launch
    itself writes stays in the temporary folder.
    """
    settings = process.current_process()._config
    if _fits(tempfile.gettempdir(), _DEEPEST) or settings.get("tempdir"):
        return
    writable = [folder for folder in _SHORT if os.access(folder, os.W_OK | os.X_OK)]
    if not writable:
        raise OSError(
            f"the temporary folder's name is too long for a socket ({tempfile.gettempdir()}), and "
            "/tmp cannot be written: set TMPDIR to a folder with a shorter name and restart the "
            "kernel."
        )
    settings["tempdir"] = folder = tempfile.mkdtemp(prefix="pymp-", dir=writable[0])
    util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)


@contextlib.contextmanager
def near(folder: str) -> Iterator[str]:
    """A folder for the sockets of a launch's ranks: the launch's own, or, where the name of that is
    too long, one beside the fork server's sockets that is gone after the block."""
    keep_paths_short()
    if _fits(folder, _LISTENER):
        yield folder
        return
    own = tempfile.mkdtemp(dir=util.get_temp_dir())
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _fits(folder, name):
    return len(os.fsencode(os.path.join(folder, name))) <= _LONGEST
