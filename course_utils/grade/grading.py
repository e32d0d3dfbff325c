"""Grades submissions: one job for each exercise, several at once."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from course_utils.checks.framework import Exercise, judge
from course_utils.checks.learner import render
from course_utils.checks.statements import Cell
from course_utils.grade import answer, submission
from course_utils.grade.limits import Limits
from course_utils.grade.marks import Grade, Mark

DEFAULT_VARIANT = "0"  # the same inputs in every run, so that marks can be repeated


def grade_file(
    path: Path | str, *, variant: str = DEFAULT_VARIANT, limits: Limits | None = None
) -> Grade:
    """Grades one notebook. Never raises for what is in it: Grade.reason says what is wrong."""
    return next(grade_files([path], variant=variant, limits=limits))


def grade_files(
    paths: Sequence[Path | str],
    *,
    jobs: int = 1,
    variant: str = DEFAULT_VARIANT,
    limits: Limits | None = None,
    progress: Callable[[Mark], None] | None = None,
) -> Iterator[Grade]:
    """Grades notebooks, `jobs` exercises at once; yields a Grade for each, in their order.

    progress is called with each Mark as soon as it is known.
    """
    limits = limits or Limits()
    for path in paths:
        try:
            handed_in = submission.read_file(Path(path), limits.notebook)
        except submission.NotGradable as error:
            yield Grade(str(path), reason=str(error))
        else:
            yield _grade(str(path), handed_in, variant)


def grade_notebook(
    notebook: dict,
    name: str,
    *,
    variant: str = DEFAULT_VARIANT,
    limits: Limits | None = None,
) -> Grade:
    """Grades the content of a notebook, as `json.load` gives it; `name` is its file's."""
    try:
        return _grade(name, submission.read(notebook, name), variant)
    except submission.NotGradable as error:
        return Grade(name, reason=str(error))


def _grade(path: str, handed_in: submission.Submission, variant: str) -> Grade:
    marks = [_mark(e, handed_in.cells, variant) for e in handed_in.exercises]
    return Grade(path, handed_in.chapter, marks)


def _mark(exercise: Exercise, cells: list[Cell], variant: str) -> Mark:
    started = time.monotonic()
    outcome = judge(exercise, answer.load(exercise, cells), variant)
    seconds = time.monotonic() - started
    return Mark(
        exercise.id, exercise.name, exercise.points, outcome.status, render(outcome), seconds
    )
