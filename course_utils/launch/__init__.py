"""Real ranks from a notebook cell: `launch(fn, nprocs, *args)`."""

import sys

from course_utils.launch.failure import RankFailure
from course_utils.launch.parent import launch, preload

__all__ = ["RankFailure", "launch"]

# The fork server imports this package too; it must not start a fork server of its own.
if not any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    preload()
