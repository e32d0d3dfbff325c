"""The kernel's hold on the fork server (forks.py): one process that has imported torch, and forks each
rank from its memory.

A rank then starts in milliseconds and shares the memory of the libraries, where a process that
begins anew imports torch again: seconds, and hundreds of megabytes. The kernel itself is never
forked: it has threads and perhaps a CUDA context, which a fork would break.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import connection

from course_utils.comm.interrupts import uninterrupted
from course_utils.launch.keepers import forks
from course_utils.launch.keepers.janitor import Handle, janitor

# Where modules are looked for comes first: the learner may have a queue.py in the working folder.
_PROGRAM = """import sys; sys.path[:] = {path}
import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)
from course_utils.launch.keepers import forks; forks.main({control})"""
IDLE = 300  # seconds without a launch after which the fork server leaves: it holds 400 MB
_LOOK = 30.0  # seconds between two looks whether it is time
_PATIENCE = 120  # seconds after which a fork server that does not answer is given up
_NAME = "the process from which launch starts the ranks"

_server = None
_shared = False  # whether forks of this process start ranks, too
_ready = threading.Lock()  # held while it starts or leaves
_launches = set()  # those that go on at this moment
_used = time.monotonic()  # when the last one ended


def preload() -> None:
    """Where cells are executed, starts the fork server in the background: it imports torch while the learner reads. Any
    other process, such as a program or a rank, may never call launch: there the first call starts it."""
    ipython = sys.modules.get("IPython")
    if ipython and ipython.get_ipython():
        threading.Thread(target=_keep, name="preload", daemon=True).start()


def _keep():
    """Starts the fork server, and ends it whenever nobody has needed it for long."""
    with contextlib.suppress(OSError, RuntimeError):  # the first launch explains it
        ensure_running()
    while True:
        time.sleep(_LOOK)
        leave_if_idle()


def hold(opened: contextlib.ExitStack) -> None:
    """A fork server runs, and does not leave before `opened` is closed."""
    # Before the lock: whoever holds it either sees that, or is done leaving.
    _launches.add(opened)
    opened.callback(_let_leave, opened)
    ensure_running()


def _let_leave(launch):
    global _used
    _used = time.monotonic()
    _launches.discard(launch)


def leave_if_idle() -> None:
    """Ends the fork server if no launch goes on and none did for long. The next starts another."""
    global _server
    with _ready:
        if _server and not _launches and time.monotonic() - _used >= IDLE:
            _server.end()
            _server = None


def ensure_running(begin: Callable | None = None) -> "_Server":
    """Returns when the fork server has finished its imports. Can be interrupted."""
    global _server
    with _ready:
        if _server and not _server.ready():  # it has died
            _server.end()
            _server = None
        if not _server:
            with uninterrupted():  # one that was started but is not known would stay
                _server = _Server(begin or _begin)
        if not _server.ready():
            raise RuntimeError(f"{_NAME} has ended while it imported PyTorch: call launch again.")
        return _server


def fork_from_here() -> None:
    """Starts the fork server as a fork of this process, which has imported all that it needs, and nothing that ranks
    must not see: milliseconds instead of seconds. Should it die, the next one is started as usual."""
    ensure_running(_fork)


def share() -> None:
    """From now on forks of this process use its fork server, one of them at a time."""
    global _shared
    _shared = True


def died() -> bool:
    """True if the fork server has ended by itself."""
    return bool(_server and _server.dead())


def start(number: int, *ends: int) -> "Process":
    """Starts rank `number`; `ends` are the open files of its channel, its output and its stacks."""
    for attempts_left in reversed(range(5)):
        try:
            return Process(ensure_running(), number, ends)
        except (EOFError, ConnectionError):  # it was dying: another takes its place
            if not attempts_left:
                raise


class Process:
    """A process that the fork server forks. `sentinel` can be read when it has ended, and nothing that
    it has left lives any more."""

    def __init__(self, server: "_Server", number: int, ends: tuple[int, ...]):
        self._server = server
        self.sentinel, theirs = multiprocessing.Pipe(duplex=False)
        with theirs:
            request = number.to_bytes(forks.BYTES, "little")
            socket.send_fds(server.control, [request], [*ends, theirs.fileno()])
        self.pid = self._answer()
        if isinstance(self.pid, OSError):
            raise self.pid

    def _answer(self):
        try:
            self._server.wait_for(self.sentinel)
            return self.sentinel.recv()
        except EOFError:
            self._server.reap()  # only its end closes a pipe without a word
            raise

    def wait(self) -> int:
        """Returns, once, the exit code of a process that ends by itself or was killed: below 0 the
        number of a signal, 255 if the fork server has died, or if the process does not end."""
        try:
            return self._answer()
        except (EOFError, TimeoutError):
            return 255


class _Server:
    def __init__(self, begin: Callable):
        self.control, theirs = socket.socketpair()
        with theirs:
            self._handle, self._wait = begin(theirs.fileno())
        self.pid = self._handle.pid
        self._warm = False
        janitor.keep("server", self.pid)  # it may be busy when the kernel goes

    def ready(self) -> bool:
        """Whether it lives, and has finished its imports. All that it writes is that it has."""
        if not self._warm:
            self.wait_for(self.control)
            self._warm = bool(self.control.recv(1))
            atexit.register(self.end)  # before the janitor's end, which would wait for this one's
        return self._warm and not self.dead()

    def dead(self) -> bool:
        return self._warm and bool(connection.wait([self.control], 0))

    def wait_for(self, answers: socket.socket | connection.Connection) -> None:
        """Returns when there is something to read. A fork server that was stopped (SIGSTOP) is told to
        go on. One that still imports what it preloads may take its time: it ends, or answers."""
        waited = 0
        while not connection.wait([answers], 1.0):
            if waited >= _PATIENCE:
                raise TimeoutError(f"{_NAME} does not answer: restart the kernel.")
            self._handle.send(signal.SIGCONT)
            waited += 1 if self._warm else 0.2

    def end(self) -> None:
        """With no rank below it."""
        self._handle.send(signal.SIGKILL)  # stopped, it would take no notice of the other
        self.let_go()
        self.reap()
        janitor.forget("server", self.pid)

    def let_go(self) -> None:
        atexit.unregister(self.end)
        self.control.close()
        self._handle.close()

    def reap(self) -> None:
        """When it ends."""
        with contextlib.suppress(ChildProcessError):  # somebody has done it
            self._wait()
        self._handle.close()


def _begin(control):
    """In a session of its own: an interrupt from a terminal or from Jupyter is for the kernel's group."""
    program = _PROGRAM.format(path=import_path(), control=control)
    options = [f"-W{each}" for each in sys.warnoptions] + ["-O"] * sys.flags.optimize
    process = subprocess.Popen(
        [sys.executable, *options, "-c", program],
        pass_fds=[control],
        stdin=subprocess.DEVNULL,
        # On macOS, Apple's libraries end a process that was forked after they were used, unless told
        # otherwise before they are loaded (Python's documentation, multiprocessing, on macOS and fork).
        env={"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"} | os.environ,
        start_new_session=True,
    )
    return Handle(process.pid), process.wait


def _fork(control):
    process = os.fork()
    if process == 0:
        try:
            forks.close_files_but([control])
            forks.main(control)
        finally:
            os._exit(1)
    return Handle(process), lambda: os.waitpid(process, 0)


def _in_a_fork():
    """The fork server and its ranks are the parent's, and who held the lock is not there."""
    global _ready, _server
    _ready = threading.Lock()
    if _server and not _shared:
        _server.let_go()
        _server = None
    _launches.clear()


os.register_at_fork(after_in_child=_in_a_fork)


def import_path() -> list[str]:
    """Where this process looks for modules, whatever the working folder of another process is."""
    # Python passes over what is no string, too.
    return [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
