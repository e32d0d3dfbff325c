"""What exercises are written with: their requirements, comparisons, ranks and forbidden calls.

`course_utils.authoring.framework` says how to write an exercise. Nothing here knows learners, their
progress or the list of exercises: that is `course_utils.checks`, which is built on this.
"""

from course_utils.authoring.compare import Wrong, expect, expect_type, same
from course_utils.authoring.framework import Exercise, Line, Outcome, run
from course_utils.launch.arguments import OwnPart
from course_utils.sources.answers import load_answer, load_code

__all__ = [
    "Exercise",
    "Line",
    "Outcome",
    "OwnPart",
    "Wrong",
    "expect",
    "expect_type",
    "load_answer",
    "load_code",
    "run",
    "same",
]
