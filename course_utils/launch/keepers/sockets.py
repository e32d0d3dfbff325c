"""Where the sockets of ranks lie, through which their processes share memory: a socket's address has
room for a short path only."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import util

from course_utils.launch.keepers.janitor import janitor

_LONGEST = 103 if sys.platform == "darwin" else 107  # bytes: sun_path of unix(7), and its last zero
_SOCKET = "pymp-12345678/listener-12345678"  # as multiprocessing names them


@contextlib.contextmanager
def near(folder: str) -> Iterator[str]:
    """A folder for the sockets of a launch's ranks: the launch's own, or one in /tmp where the name of
    that is too long: on clusters TMPDIR names job, user and node."""
    if len(os.fsencode(os.path.join(folder, _SOCKET))) <= _LONGEST:
        yield folder
        return
    with contextlib.ExitStack() as opened:
        own = tempfile.mkdtemp(prefix="course-sockets-", dir="/tmp")
        janitor.keep_with(opened, "folder", own)
        opened.callback(shutil.rmtree, own, ignore_errors=True)
        yield own


def use(folder: str) -> None:
    """In a rank: its sockets, and those of the processes that it starts, lie below this folder."""
    usually, tempfile.tempdir = tempfile.tempdir, folder
    util.get_temp_dir()  # multiprocessing makes one when it is first asked, and keeps it
    tempfile.tempdir = usually
