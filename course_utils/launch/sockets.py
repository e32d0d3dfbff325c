"""Where the fork server's sockets lie: a socket's address has room for a short path only."""

import os
import shutil
import sys
import tempfile
from multiprocessing import process, util

_LONGEST = 103 if sys.platform == "darwin" else 107  # bytes: sun_path of unix(7), and its last zero
_AS_MULTIPROCESSING_NAMES_IT = os.path.join("pymp-12345678", "listener-12345678")
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def keep_paths_short() -> None:
    """Gives multiprocessing a folder with a short name, where the temporary folder's is too long.

    To be called before the first socket; on clusters TMPDIR names job, user and node. What launch
    itself writes stays in the temporary folder.
    """
    path = os.path.join(tempfile.gettempdir(), _AS_MULTIPROCESSING_NAMES_IT)
    settings = process.current_process()._config
    if len(os.fsencode(path)) <= _LONGEST or settings.get("tempdir"):
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
