"""Attacks on what is around them: in namespaces they come to nothing, and the answer is right.

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
