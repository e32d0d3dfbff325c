"""The fork server itself: it forks ranks, tells of their ends, and ends what they leave behind.

A request is the number of a rank, and with it come four open files: its channel, its output, its stacks, and the pipe
for the answers: its process id, or an OSError, and when it has ended, its exit code. By then nothing lives that it has
left. Requests come through a socket whose other end the kernel holds (server.py). When that is closed, all below this
process ends, and then the process itself, which needs neither the kernel nor its janitor, nor any Python in a rank.
"""

import contextlib
import importlib
import itertools
import os
import resource
import signal
import socket
import time
from collections.abc import Iterable
from importlib.metadata import entry_points
from multiprocessing import connection, resource_tracker

from course_utils.comm import private
from course_utils.launch.keepers import family

BYTES = 4  # of a request, the lowest first
_RANK = "course_utils.launch.ranks.rank"
# What ranks import sooner or later, as it is known here and by others (`course_utils.preloaded`, functions that return
# names of modules). An optimizer imports the compiler when it is first used; a module that is missing is skipped.
_PRELOADED = [
    _RANK,
    private.COMPILER,
    "torchvision",
    *(name for each in entry_points(group="course_utils.preloaded") for name in each.load()()),
    "course_utils.launch.ranks.preloaded",
]
_MANY_FILES = 2**20
_PATIENCE = 60.0  # seconds until what was killed has ended


def main(control: int) -> None:
    """The whole life of the fork server; `control` is its end of the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the kernel's to handle
    family.adopt_orphans()
    # The kernel may have few files left; its fork server must not end for that.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # All ranks share it, and it outlives them: what one that is killed leaves in /dev/shm is removed.
    resource_tracker.ensure_running()
    lasting = set(family.children())
    import_preloaded()
    own = socket.socket(fileno=control)
    own.send(b"r")  # ready
    _Forks(own, lasting).serve()
    os._exit(0)  # to take the libraries down would take longer than anybody wants to wait


def import_preloaded() -> None:
    """Imports what ranks need: in a process from which others are forked."""
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def without(prefix: str) -> None:
    """From now on a fork server imports no module whose name begins so."""
    _PRELOADED[:] = [name for name in _PRELOADED if not name.startswith(prefix)]


class _Forks:
    def __init__(self, control: socket.socket, lasting: set[int]):
        self._control, self._lasting = control, lasting
        self._pipes = {}  # of the ranks that live, by their process ids
        # Python writes to the second when a child has ended, if there is a handler at all.
        self._ended, self._ends = socket.socketpair()
        self._ends.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._ends.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the kernel is gone, and then all below this process."""
        going_on = True
        while going_on:
            ready = connection.wait([self._control, self._ended])
            if self._ended in ready:
                self._ended.recv(4096)
                self._take_ends()
            if self._control in ready:
                going_on = self._fork()
        self._pipes.clear()
        self._take_ends()

    def _fork(self):
        number, files, *_ = socket.recv_fds(self._control, BYTES, 4)
        if not number:
            return False
        for file in files:
            os.set_inheritable(file, False)
        channel = socket.socket(fileno=files[0])
        ends = [connection.Connection(file, readable=False) for file in files[1:]]
        try:
            process = os.fork()
        except OSError as error:  # no memory, or too many processes
            _tell(ends[2], error)
            return True
        if process == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (self._control, self._ended, self._ends, ends[2], *self._pipes.values()):
                each.close()
            rank = importlib.import_module(_RANK)
            rank.main(int.from_bytes(number, "little"), channel, *ends[:2])
        self._pipes[process] = ends[2]
        _tell(ends[2], process)
        for each in (channel, *ends[:2]):
            each.close()
        return True

    def _take_ends(self):
        """Ends all children but the ranks that live, also those that come to this process by that."""
        ended, end = _reap(), time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            strays = family.children(self._lasting | self._pipes.keys())
            if not strays:
                break
            for each in strays:
                os.kill(each, signal.SIGKILL)  # ours, and not reaped: the number is its own
            time.sleep(0.002)
            ended += _reap()
        for process, status in ended:
            if pipe := self._pipes.pop(process, None):
                _tell(pipe, os.waitstatus_to_exitcode(status))


def _reap():
    ended = []
    with contextlib.suppress(ChildProcessError):  # when there is none any more
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(found)
    return ended


def _tell(pipe, answer):
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        pipe.send(answer)


def close_files_but(fds: Iterable[int]) -> None:
    """Closes what a forked process has inherited, but for these and the three standard files."""
    # Where there is no limit, macOS gives one that closerange does not take.
    limit = os.sysconf("SC_OPEN_MAX")
    kept = sorted({0, 1, 2, *fds, limit if 0 < limit < _MANY_FILES else _MANY_FILES})
    for before, after in itertools.pairwise(kept):
        os.closerange(before + 1, after)
