"""Where the sockets of ranks lie, through which their processes share memory: a socket's address has
room for a short path only."""

import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from multiprocessing import util

from course_utils.launch.keepers.janitor import janitor

_LONGEST = 103 if sys.platform == "darwin" else 107  # bytes: sun_path of unix(7), and its last zero
_SOCKET = "pymp-12345678/listener-12345678"  # as multiprocessing names them


def near(opened: ExitStack, folder: str) -> str:
    """A folder for the sockets of a launch's ranks: the launch's own, or one in /tmp, until `opened` is closed,
    where the name of that is too long: on clusters TMPDIR names job, user and node."""
    if len(os.fsencode(os.path.join(folder, _SOCKET))) <= _LONGEST:
        return folder
    own = tempfile.mkdtemp(prefix="course-sockets-", dir="/tmp")
    janitor.keep_with(opened, "folder", own)
    opened.callback(shutil.rmtree, own, ignore_errors=True)
    return own


def use(folder: str) -> None:
    """In a rank: its sockets, and those of the processes that it starts, lie below this folder."""
    usually, tempfile.tempdir = tempfile.tempdir, folder
    util.get_temp_dir()  # multiprocessing makes one when it is first asked, and keeps it
    tempfile.tempdir = usually
