"""The exercise checks: `check` and `hint` for learners, the rest for those who write exercises.

`course_utils.checks.framework` says how to write an exercise.
"""

from course_utils.checks.answers import load_answer, load_code
from course_utils.checks.compare import Wrong, expect, expect_type, same
from course_utils.checks.framework import Exercise, Line, Outcome, run
from course_utils.checks.learner import check, examine, hint
from course_utils.checks.progress import progress_map

__all__ = [
    "Exercise",
    "Line",
    "Outcome",
    "Wrong",
    "check",
    "examine",
    "expect",
    "expect_type",
    "hint",
    "load_answer",
    "load_code",
    "progress_map",
    "run",
    "same",
]
