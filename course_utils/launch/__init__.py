"""Real ranks from a notebook cell: `launch(fn, nprocs, *args)`."""

from course_utils.launch.failure import RankFailure
from course_utils.launch.parent import launch, preload

__all__ = ["RankFailure", "launch"]

preload()
