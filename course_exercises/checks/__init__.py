"""What learners use: `check`, `hint` and their progress.

Exercises are written with `course_exercises.authoring`.
"""

from course_exercises.checks import mine
from course_exercises.checks.learner import (
    check,
    examine,
    export_progress,
    hint,
    import_progress,
    reset,
)
from course_exercises.checks.play import play
from course_exercises.checks.progress import progress_text

__all__ = [
    "check",
    "examine",
    "export_progress",
    "hint",
    "import_progress",
    "mine",
    "play",
    "progress_text",
    "reset",
]
