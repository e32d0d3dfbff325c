"""What the fork server does for the processes below it: it adopts what its ranks leave behind, and
when it ends, because the kernel is gone, all below it ends first.

This needs neither the kernel nor its janitor, nor any Python in a rank. Only the fork server
imports this module.
"""

import atexit
import contextlib
import os
import resource
import signal
import time
import warnings

from course_utils.launch.keepers import family

_PATIENCE = 1.0  # seconds
_SERVER = os.getpid()

family.adopt_orphans()
# multiprocessing wonders when a child ends that it has not started.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
# The kernel may have few files left; its fork server must not end for that.
_, _most = resource.getrlimit(resource.RLIMIT_NOFILE)
with contextlib.suppress(ValueError, OSError):
    resource.setrlimit(resource.RLIMIT_NOFILE, (_most, _most))


def _end_all():
    if os.getpid() != _SERVER:
        return  # a fork
    end = time.monotonic() + _PATIENCE
    with contextlib.suppress(ChildProcessError):  # when there is none any more
        while time.monotonic() < end:
            for child in family.children(_SERVER):
                os.kill(child, signal.SIGKILL)  # ours, and not reaped: the number is its own
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
    os._exit(0)  # to take the libraries down would take longer than anybody wants to wait


atexit.register(_end_all)
