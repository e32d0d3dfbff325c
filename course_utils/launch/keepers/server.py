"""The fork server: one process that has imported torch, and forks each rank from its memory.

A rank then starts in milliseconds and shares the memory of the libraries, where a process that
`spawn` starts imports torch again: seconds, and hundreds of megabytes. The kernel itself is
never forked: it has threads and perhaps a CUDA context, which a fork would break.
"""

import contextlib
import importlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from multiprocessing import connection, forkserver, spawn, util

from course_utils.launch.keepers import family, sockets
from course_utils.launch.keepers.janitor import janitor

# What ranks import sooner or later, as it is known here and by others (`course_utils.preloaded`, functions
# that return names of modules). An optimizer imports torch._dynamo when it is first used; a module that
# is missing is skipped.
_PRELOADED = [
    "course_utils.launch.ranks.rank",
    "torch._dynamo",
    "multiprocessing.popen_forkserver",
    "torchvision",
    *(name for each in entry_points(group="course_utils.preloaded") for name in each.load()()),
    "course_utils.launch.ranks.preloaded",
]
# What only the fork server itself does, not a process from which others are forked.
_SERVER_ONLY = ["course_utils.launch.keepers.guardian"]
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
_NAME = "course_utils rank"

context = multiprocessing.get_context(_METHOD)
if _METHOD == "forkserver":
    context.set_forkserver_preload([*_PRELOADED, *_SERVER_ONLY])
_ready = threading.Lock()
_warm = None  # the process id of the fork server that is known to have finished its imports
_owner = None  # the process that has started it
_starting = threading.Lock()  # held while the fork server has a child that nobody knows yet
_known = set()  # the process ids of the ranks that have been started and have not been closed
_MANY_FILES = 2**20
_PATIENCE = 120  # seconds after which a fork server that does not answer is given up
IDLE = 300  # seconds without a launch after which the fork server leaves: it holds 400 MB
_LOOK = 30.0  # seconds between two looks whether it is time
_launches = set()  # those that go on at this moment
_used = time.monotonic()  # when the last one ended


def preload() -> None:
    """Where cells are executed, starts the fork server in the background: it imports torch while the
    learner reads. Any other process, such as a program or a rank, may never call launch: there the
    first call starts it."""
    ipython = sys.modules.get("IPython")
    if _METHOD == "forkserver" and ipython and ipython.get_ipython():
        threading.Thread(target=_keep, name="preload", daemon=True).start()


def _keep():
    """Starts the fork server, and ends it whenever nobody has needed it for long."""
    with contextlib.suppress(OSError):  # a full disk, say; the first launch explains it
        ensure_running()
    while True:
        time.sleep(_LOOK)
        leave_if_idle()


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """A fork server runs in this block, and does not leave."""
    with _noted():
        ensure_running()
        yield


@contextlib.contextmanager
def _noted():
    global _used
    launch = object()
    try:
        # Before the lock: whoever holds it either sees that, or is done leaving.
        _launches.add(launch)
        yield
    finally:
        _used = time.monotonic()
        _launches.discard(launch)


def leave_if_idle() -> None:
    """Ends the fork server if no launch goes on, none did for long, and nothing lives below it, such
    as a process that the learner has started with multiprocessing. The next launch starts another."""
    global _warm
    running = forkserver._forkserver
    with _ready, running._lock:
        idle = not _launches and time.monotonic() - _used > IDLE
        if not idle or _owner != os.getpid() or running._forkserver_pid != _warm:
            return
        if _warm is None or family.children(_warm):
            return
        os.kill(
            _warm, signal.SIGKILL
        )  # it is ours and not reaped; stopped, it would keep us waiting
        running._stop_unlocked()
        janitor.forget("server", _warm)
        _warm = None


def ensure_running() -> None:
    """Returns when the fork server has finished its imports. Can be interrupted."""
    if context.get_start_method() != "forkserver":
        return
    global _warm, _owner
    with _ready:
        if _owner not in (None, os.getpid()):
            _leave_to_the_parent()
        sockets.keep_paths_short()
        _calm_objective_c()
        forkserver.ensure_running()
        server = forkserver._forkserver._forkserver_pid
        if _warm != server:
            janitor.keep("server", server)  # by itself it takes its time to end
            janitor.keep("socket", util.get_temp_dir())  # the folder in which its socket lies
            first = start(_nothing, (), 0)
            end(first)
            _warm, _owner = server, os.getpid()


def _leave_to_the_parent():
    """In a fork of the process that has started it, the fork server is the parent's, and so are its
    ranks and the folder of its sockets."""
    global _warm, _owner
    inherited = forkserver._forkserver
    if inherited._forkserver_alive_fd is not None:
        os.close(inherited._forkserver_alive_fd)
    inherited.__init__()
    multiprocessing.current_process()._config.pop("tempdir", None)
    _known.clear()
    _launches.clear()
    _warm = _owner = None


def _renew_locks():
    """In a fork: who held them is not there."""
    global _ready, _starting
    _ready, _starting = threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def import_preloaded() -> None:
    """Imports what the fork server does: in a process from which others are forked."""
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def without(prefix: str) -> None:
    """From now on a fork server imports no module whose name begins so."""
    _PRELOADED[:] = [name for name in _PRELOADED if not name.startswith(prefix)]


def fork_from_here() -> None:
    """Starts the fork server as a fork of this process, which has imported all that it needs, and
    nothing that ranks must not see: milliseconds instead of seconds. Should it die, the next one
    is started as usual."""
    context.set_forkserver_preload([*_PRELOADED, *_SERVER_ONLY])
    usually, util.spawnv_passfds = util.spawnv_passfds, _fork_interpreter
    try:
        ensure_running()
    finally:
        util.spawnv_passfds = usually


def _fork_interpreter(_, arguments, fds):
    """Stands in for util.spawnv_passfds, which starts `python -c PROGRAM` with some of our files."""
    process = os.fork()
    if process == 0:
        try:
            close_files_but(fds)
            exec(arguments[-1], {})  # noqa: S102 - multiprocessing's own line
        finally:
            os._exit(0)
    return process


def close_files_but(fds: Iterable[int]) -> None:
    """Closes what a forked process has inherited, but for these and the three standard files."""
    kept = sorted({0, 1, 2, *fds, _highest_file()})
    for before, after in itertools.pairwise(kept):
        os.closerange(before + 1, after)


def _highest_file() -> int:
    """A number above those of all open files; where there is no limit, macOS gives one that closerange
    does not take."""
    limit = os.sysconf("SC_OPEN_MAX")
    return limit if 0 < limit < _MANY_FILES else _MANY_FILES


def _calm_objective_c() -> None:
    """On macOS, Apple's libraries end a process that was forked after they were used, unless told
    otherwise before they are loaded (Python's documentation, multiprocessing, on macOS and fork)."""
    if sys.platform == "darwin":
        os.environ.setdefault("OBJC_DISABLE_INITIALIZE_FORK_SAFETY", "YES")


def _nothing():
    pass


def start(target, args: tuple, number: int) -> multiprocessing.Process:
    """Starts and returns the process of rank `number`."""
    for attempts_left in reversed(range(20)):
        # Not daemonic: a rank may start processes of its own, such as a DataLoader's workers.
        process = context.Process(target=target, args=args, name=f"{_NAME} {number}")
        try:
            with _starting:
                process.start()
                _known.add(process.pid)
            return process
        except (EOFError, ConnectionError):
            # The fork server is dying at this moment; multiprocessing replaces it when it is dead.
            if not attempts_left:
                raise
            time.sleep(0.1)


def end(process: multiprocessing.Process) -> None:
    """Waits for the end of a process that ends by itself or was killed, and forgets it."""
    _patient(lambda seconds: process.join(seconds) or process.exitcode is not None)
    _known.discard(process.pid)
    with contextlib.suppress(ValueError):  # it has not ended, whatever keeps it
        process.close()


def died() -> bool:
    """True if the fork server of this process has ended; another is started then."""
    if _owner != os.getpid() or not _warm:
        return False
    forkserver.ensure_running()  # takes note of its end
    return forkserver._forkserver._forkserver_pid != _warm


def end_strays() -> None:
    """Ends what dead ranks have left behind: the fork server has adopted it."""
    if _owner != os.getpid() or forkserver._forkserver._forkserver_pid is None:
        return
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        with _starting:
            below = family.children(forkserver._forkserver._forkserver_pid)
            strays = [child for child in below if child not in _known and _of_a_rank(child)]
        for handle in map(family.Handle, strays):
            handle.send(signal.SIGKILL)
            handle.close()
        if not strays:
            return
        time.sleep(0.002)


def _of_a_rank(child):
    """Whether a child of the fork server was left behind by a rank, which has a session of its own.
    What a learner starts with multiprocessing is in the fork server's."""
    try:
        return os.getsid(child) != os.getsid(forkserver._forkserver._forkserver_pid)
    except ProcessLookupError:
        return False


def _patient(wait):
    """Calls `wait(seconds)` until it returns true, or nothing helps; returns whether it did. A fork
    server that was stopped (SIGSTOP) is told to go on. One that still imports what it preloads may
    take its time: it ends, or answers."""
    waited = 0
    while waited < _PATIENCE:
        if wait(1.0):
            return True
        server = forkserver._forkserver._forkserver_pid
        if _owner == os.getpid() and server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGCONT)
        waited += 1 if server == _warm else 0.2
    return False


def _read_patiently(fd, read=forkserver.read_signed):
    """Stands in for multiprocessing's read of what the fork server answers, which has no limit."""
    if not _patient(lambda seconds: connection.wait([fd], seconds)):
        raise RuntimeError(
            "the process from which launch starts the ranks does not answer: restart the kernel."
        )
    return read(fd)


forkserver.read_signed = _read_patiently


def _connect(fds, connect=forkserver.connect_to_new_process):
    # A process that the learner starts with multiprocessing: the fork server does not leave meanwhile.
    with _noted():
        return connect(fds)


forkserver.connect_to_new_process = _connect


def import_path() -> list[str]:
    """Where this process looks for modules, whatever the working folder of another process is."""
    # Python passes over what is no string, too.
    return [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]


def _with_this_path(path, arguments, fds, spawn=util.spawnv_passfds):
    # Until Python 3.13 the fork server looks for modules in its working folder before all others,
    # and the learner may have a queue.py there.
    if arguments[-2] == "-c":
        arguments = [*arguments[:-1], f"import sys; sys.path[:] = {import_path()}; {arguments[-1]}"]
    return spawn(path, arguments, fds)


util.spawnv_passfds = _with_this_path


def _without_main(name, prepare=spawn.get_preparation_data):
    # multiprocessing runs the learner's script a second time in each process that it starts, to
    # make the script's functions importable. cloudpickle sends them by value, so ranks need not.
    data = prepare(name)
    if name.startswith(_NAME):
        data.pop("init_main_from_path", None)
        data.pop("init_main_from_name", None)
    return data


spawn.get_preparation_data = _without_main
