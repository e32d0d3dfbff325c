"""The exercise checks: `check`, `hint` and the progress for learners, the rest for those who write
exercises.

`course_utils.checks.framework` says how to write an exercise.
"""

from course_utils.checks.compare import Wrong, expect, expect_type, same
from course_utils.checks.framework import Exercise, Line, Outcome, run
from course_utils.checks.learner import (
    check,
    examine,
    export_progress,
    hint,
    import_progress,
    reset,
)
from course_utils.checks.progress import progress_text
from course_utils.launch.arguments import OwnPart
from course_utils.sources.answers import load_answer, load_code

__all__ = [
    "Exercise",
    "Line",
    "Outcome",
    "OwnPart",
    "Wrong",
    "check",
    "examine",
    "expect",
    "expect_type",
    "export_progress",
    "hint",
    "import_progress",
    "load_answer",
    "load_code",
    "progress_text",
    "reset",
    "run",
    "same",
]
