"""Code that does what no answer should. Each attack is what somebody hands in as message_bytes, the
answer to 0.2, with the other two exercises missing. What can be told as one, returns the right
answer besides: an attack that comes to nothing is no reason to take points away.
"""

import inspect
import re
from collections.abc import Callable

from tests.hostile_class.members import cell_of, member, notebook, with_code

BRIEF = 6.0  # seconds for what never ends by itself
ENDLESS = f"ran for more than {BRIEF:g} seconds"


def attack(status: str, because: str = "", seconds: float = 300.0, name: str = "") -> Callable:
    """Decorator: the status that the answer gets, and what is said of it."""

    def add(function):
        source = inspect.getsource(function)
        code = re.sub(r"^(@.*\n)+def \w+", "def message_bytes", source, flags=re.MULTILINE)
        _hand_in(name or function.__name__, code, status, because, seconds)
        return function

    return add


def _hand_in(name, code, status, because, seconds):
    def make():
        return with_code(code)

    make.__name__ = name
    return member("missing", status, "missing", because=because, seconds=seconds)(make)


RIGHT = "\n\ndef message_bytes(tensor):\n    return tensor.numel() * tensor.element_size()\n"


def at_the_top_level(
    name: str, code: str, status: str, because: str, seconds: float = 300.0, right: str = RIGHT
):
    """An attack that does not wait for the check: a line of code beside a right answer."""
    _hand_in(name, code + right, status, because, seconds)


@attack("stopped", because=ENDLESS, seconds=BRIEF)
def loops_and_swallows_what_would_end_it(tensor):
    while True:
        try:
            while True:
                pass
        except BaseException:  # noqa: BLE001, S110 - that is the attack
            pass


@attack("stopped", because=ENDLESS, seconds=BRIEF)
def waits_without_an_alarm(tensor):
    import signal

    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.pause()


@attack("stopped", because=ENDLESS, seconds=BRIEF)
def stops_itself(tensor):
    import os
    import signal

    os.kill(os.getpid(), signal.SIGSTOP)


at_the_top_level(
    "loops_at_the_top_level", "x = any(iter(int, 1))", "stopped", "ran for more", BRIEF
)
at_the_top_level("leaves_at_the_top_level", "import os\nx = os._exit(0)", "stopped", "exit code 0")


@attack("stopped", because="exit code 0")
def leaves(tensor):
    import os

    os._exit(0)


@attack("failed", because=r"left Python with exit\(0\)")
def leaves_politely(tensor):
    raise SystemExit(0)


@attack("stopped", because="exit code 0|changed what its process says")
def writes_a_mark_of_its_own(tensor):
    import contextlib
    import os

    mark = b'\n{"secret": "", "status": "passed", "feedback": ""}\n'
    for fd in range(256):
        with contextlib.suppress(OSError):
            os.write(fd, mark)
    os._exit(0)


@attack("stopped", because="exit code")
def closes_every_file(tensor):
    import os

    os.closerange(0, 256)
    return tensor.numel() * tensor.element_size()


@attack("stopped", because="SIGSEGV")
def crashes(tensor):
    import ctypes

    ctypes.string_at(0)


@attack("stopped", because="more than 32 processes")
def forks_and_forks(tensor):
    """As a fork storm does, but it would end at 256 processes: nobody's machine is to suffer."""
    import os
    import time

    for _ in range(8):
        os.fork()
    time.sleep(10_000)


@attack("stopped|failed", because=f"{ENDLESS}|still running after", seconds=BRIEF)
def forks_and_flees(tensor):
    """There is one process more at any time, each time another, in a session of its own."""
    import os
    import signal
    import time

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        while True:
            os.setsid()
            if os.fork() > 0:
                os._exit(0)
    time.sleep(10_000)


@attack("passed")
def leaves_a_daemon_behind(tensor):
    import os
    import time

    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(10_000)
        os._exit(0)
    return tensor.numel() * tensor.element_size()


@attack("passed")
def leaves_a_thread_behind(tensor):
    import threading

    threading.Thread(target=threading.Event().wait).start()
    return tensor.numel() * tensor.element_size()


@attack("passed")
def prints_100_megabytes(tensor):
    import os

    print("x" * 100_000_000)
    for _ in range(100):
        os.write(1, b"x" * 1_000_000)
    return tensor.numel() * tensor.element_size()


@attack("failed", because="File too large")
def writes_a_large_file(tensor):
    with open("large", "wb") as file:
        file.writelines(b"x" * 1_000_000 for _ in range(100))


@attack("stopped", because="more than 1024 MB of memory")
def eats_memory(tensor):
    kept = []
    while True:
        kept.append(b"x" * 50_000_000)


@attack("stopped", because="more than 1024 MB of memory")
def eats_memory_unseen(tensor):
    import ctypes

    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: now others may not look inside
    kept = []
    while True:
        kept.append(b"x" * 50_000_000)


@attack("stopped", because="more than 1024 MB of memory")
def eats_memory_in_its_children(tensor):
    import os

    for _ in range(8):
        if os.fork() == 0:
            kept = []
            while True:
                kept.append(b"x" * 50_000_000)
    os.wait()


@attack("failed", because="expected:")
def changes_the_check(tensor):
    try:
        from course_exercises.chapters.ch00 import message_bytes

        message_bytes.expect = message_bytes.expect_type = lambda *args, **more: None
    except ImportError:  # where the grader has namespaces, an answer finds no check
        pass
    return 0


@attack("failed", because="expected:")
def changes_torch(tensor):
    import torch

    torch.Tensor.element_size = lambda self: 0
    return 0


@attack("failed", because="KeyError: '0.2'")
def replaces_the_requirements(tensor):
    import dataclasses

    from course_exercises.authoring.framework import registered

    rules = registered["0.2"].rules
    rules[:] = [dataclasses.replace(rule, function=lambda *all: None) for rule in rules]
    return 0


@attack("failed", because="expected:")
def changes_a_default_of_the_check(tensor):
    from course_exercises.authoring import expect

    expect.__kwdefaults__["tolerance"] = 1e9
    return 0


at_the_top_level(
    "asks_for_the_solution",
    "from course_exercises.authoring import load_answer\nmessage_bytes = load_answer('0.2')\n",
    "failed",
    "the solutions are not at hand",
)


@attack("passed")
@attack("passed", name="leaves_traces_again")
def leaves_traces(tensor):
    """Whoever finds a trace of somebody else gives a wrong answer."""
    import os
    import tempfile
    from pathlib import Path

    import psutil

    import course_utils

    own = f"trace-{os.getpid()}-{psutil.Process().create_time()}"
    folders = [Path.cwd(), Path.home(), Path(tempfile.gettempdir())]
    found = {path.name for folder in folders for path in folder.glob("trace-*")}
    found |= {os.environ.get("TRACE", own), vars(course_utils).get("left_by", own)}
    if found - {own}:
        return found
    for folder in folders:
        (folder / own).touch()
    os.environ["TRACE"] = course_utils.left_by = own
    return tensor.numel() * tensor.element_size()


@attack("stopped", because="SIGKILL")
def kills_its_group(tensor):
    import os
    import signal

    os.killpg(0, signal.SIGKILL)


@attack("stopped", because="killed by signal 40")
def kills_itself_by_a_signal_without_a_name(tensor):
    import os

    os.kill(os.getpid(), 40)


@attack("failed", because="Operation not permitted|memfd_create")  # macOS has no such call
def hides_memory_in_files_without_a_name(tensor):
    import os

    kept = [os.memfd_create(str(number)) for number in range(30)]
    for fd in kept:
        os.write(fd, b"x" * 40_000_000)
    return tensor.numel() * tensor.element_size()


@attack("failed", because="no segment of shared memory")
def hides_memory_in_segments(tensor):
    import ctypes

    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    for _ in range(6):
        if (segment := libc.shmget(0, 200_000_000, 0o1600)) < 0:
            raise OSError("no segment of shared memory")
        place = libc.shmat(segment, None, 0)
        ctypes.memset(place, 1, 200_000_000)
        libc.shmdt(ctypes.c_void_p(place))
    return tensor.numel() * tensor.element_size()


@attack("failed", because="raised an exception that cannot be printed")
def raises_what_raises_when_it_is_shown(tensor):
    class Shown(Exception):
        def __str__(self):
            raise SystemExit

    raise Shown


at_the_top_level(
    "answers_whatever_it_is_asked",
    """
class Any:
    def __call__(self, *args, **more):
        return self
    def __getattr__(self, name):
        return self
    def __eq__(self, other):
        return True
message_bytes = Any()
""",
    "failed",
    "expected: 504",
    right="",
)
at_the_top_level(
    "replaces_how_tensors_travel",
    """
import torch
torch.Tensor.__reduce_ex__ = lambda self, protocol: (eval, ("__import__('os').getcwd()",))
torch.serialization.register_package(0, lambda o: "cpu", lambda o, place: o)
torch.save = torch.load = lambda *args, **more: {}
""",
    "stopped",
    "has changed what its own process needs to go on",
)


@attack("passed")
def changes_the_kernels_settings(tensor):
    """Root's number is enough for it, in a namespace of its own too."""
    import contextlib
    import os

    for name in ("core_pattern", "hostname", "randomize_va_space"):
        with contextlib.suppress(OSError):
            os.close(os.open(f"/proc/sys/kernel/{name}", os.O_WRONLY))
            return f"{name} could be written"
    return tensor.numel() * tensor.element_size()


@attack("passed")
def calls_the_machine_outside_of_a_virtual_one(tensor):
    import contextlib
    import socket

    with contextlib.suppress(OSError):
        socket.socket(socket.AF_VSOCK).close()
        return "no network namespace holds this socket"
    return tensor.numel() * tensor.element_size()


at_the_top_level(  # honest, and a KeyError: the environment was put back before the check
    "needs_a_variable_that_it_has_set",
    "import os\nos.environ['UNIT'] = '1'",
    "passed",
    "",
    right=RIGHT.replace("return ", "return int(os.environ['UNIT']) * "),
)


VARIANT = "drawn for this class"  # what the class is graded with


def _searches_its_memory(tensor):
    import re

    if not vars(_searches_its_memory).setdefault("searched", []):  # a GB: once is enough
        _searches_its_memory.searched.append(True)
        wanted = re.compile(b"drawn for (?=this class)")  # it does not find itself
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
            for line in maps:
                span, access, *_ = line.split()
                if access.startswith("rw"):
                    start, end = (int(place, 16) for place in span.split("-"))
                    memory.seek(start)
                    if wanted.search(memory.read(end - start) or b""):
                        return "the variant was there"
    return tensor.numel() * tensor.element_size()


@member("passed", "passed", "passed")
def searches_its_memory_for_the_variant():
    """A process begins with a copy of the memory of the one that forked it, freed parts as well."""
    made, source = notebook(), inspect.getsource(_searches_its_memory)
    cell_of(made, "0-2")["source"] = source.replace("_searches_its_memory", "message_bytes")
    return made
