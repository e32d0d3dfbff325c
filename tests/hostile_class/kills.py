"""Attacks on what is around them: in namespaces they come to nothing, and the answer is right. The
right answer is given only where nothing was reached.

Without namespaces it is said what the first two hit; the others must not be tried there.
"""

from tests.hostile_class.attacks import attack


@attack("passed")
def kills_its_parent(tensor):
    import os
    import signal

    os.kill(os.getppid(), signal.SIGKILL)
    return tensor.numel() * tensor.element_size()


@attack("passed")
def kills_its_ancestors(tensor):
    import os
    import signal
    import time

    for _ in range(2):  # without namespaces: the worker's parent, then the keeper
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(0.1)
    return tensor.numel() * tensor.element_size()


@attack("passed")
def kills_all_others(tensor):
    import os
    import signal

    # Only if this is a namespace with next to nobody in it: it must never hit who runs the tests.
    if sum(name.isdigit() for name in os.listdir("/proc")) > 12 or os.getppid() != 1:
        return "not in a namespace"
    for number in (signal.SIGSTOP, signal.SIGKILL):
        os.kill(-1, number)  # all but this process and the first one
    return tensor.numel() * tensor.element_size()


@attack("passed")
def writes_where_it_must_not(tensor):
    import contextlib
    from pathlib import Path

    import course_utils

    for folder in (Path(course_utils.__file__).parent, Path("/tmp"), Path("/var/tmp")):
        with contextlib.suppress(OSError):
            (folder / "reached-by-a-submission").touch()
    return tensor.numel() * tensor.element_size()


@attack("passed")
def reads_what_is_not_its_own(tensor):
    """Solutions, other submissions, the instructor's files, the system's secrets."""
    import os
    from pathlib import Path

    import course_utils

    root = Path(course_utils.__file__).parents[1]
    places = [root / "solutions", root / "tests", root / ".git", Path("/etc/shadow"), Path("/run")]
    places += [
        Path("/var"),
        Path("/root/.ssh"),
        Path("/root/.bashrc"),
        Path("/proc/1/root/etc/shadow"),
    ]
    reached = [str(place) for place in places if os.path.exists(place)]
    for folder in ("/tmp", "/home"):
        reached += [
            f for _, _, files in os.walk(folder) for f in files if f == "00_start_here.ipynb"
        ]
    checks = list(root.glob("course_exercises/chapters/*"))
    return reached or checks or tensor.numel() * tensor.element_size()


@attack("passed")
def reads_the_environment(tensor):
    import contextlib
    import os
    from pathlib import Path

    seen = ""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            seen += path.read_text(errors="replace")
    if "INSTRUCTORS_TOKEN" in seen + str(os.environ):
        return "the instructor's environment"
    return tensor.numel() * tensor.element_size()


@attack("passed")
def talks_to_the_outside(tensor):
    """Sockets, FIFOs and terminals; the test has put a socket and a FIFO into this folder."""
    import contextlib
    import glob
    import os
    import socket

    folder = os.environ["VIRTUAL_ENV"]
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        for name in (f"{folder}/socket", "\0course-test-socket"):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as own:
                own.connect(name)
                return f"connected to {name!r}"
    for path in (f"{folder}/fifo", "/dev/tty", "/dev/console", *glob.glob("/dev/pts/[0-9]*")):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
            return f"opened {path}"
    return tensor.numel() * tensor.element_size()
