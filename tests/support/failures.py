"""What a check says first: no requirement is run after it."""

import os
from typing import Any

from course_exercises.authoring.framework import Line, attempt
from course_exercises.authoring.guard import undisturbed
from course_exercises.checks.catalogue import find

SEED = os.environ.get("COURSE_SEED", "0")


def failures(exercise_id: str, answer: Any) -> list[Line]:
    """The lines that say no, up to the first one that names a mistake."""
    failed = []
    with undisturbed():
        for line in attempt(find(exercise_id), answer, SEED):
            if line.ok is False:
                failed.append(line)
            if line.misconception:
                break
    return failed
