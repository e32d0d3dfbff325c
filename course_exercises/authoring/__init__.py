"""What exercises are written with: their requirements, comparisons, ranks and forbidden calls.

docs/checks.md says how to write an exercise. Nothing here knows learners, their
progress or the list of exercises: that is `course_exercises.checks`, which is built on this.
"""

from course_exercises.authoring.compare import Wrong, any_of, expect, expect_type, same
from course_exercises.authoring.framework import Exercise, Line, Outcome, run
from course_exercises.authoring.vocabulary import expect_from_each, signs
from course_exercises.sources.answers import load_answer, load_code
from course_utils.launch.ranks.arguments import OwnPart

__all__ = [
    "Exercise",
    "Line",
    "Outcome",
    "OwnPart",
    "Wrong",
    "any_of",
    "expect",
    "expect_from_each",
    "expect_type",
    "load_answer",
    "load_code",
    "run",
    "same",
    "signs",
]
