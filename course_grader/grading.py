"""Grades submissions: reads them, has their exercises checked, and puts the marks in order."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from course_grader import submission
from course_grader.checking import Task, check_all
from course_grader.limits import Limits
from course_grader.marks import Grade, Mark
from course_grader.submission import NotGradable, Submission

DEFAULT_VARIANT = "0"  # the same inputs in every run, so that marks can be repeated
DEFAULT_LIMITS = Limits()


def grade_file(
    path: Path | str,
    *,
    variant: str = DEFAULT_VARIANT,
    limits: Limits = DEFAULT_LIMITS,
    isolated: bool | None = True,
) -> Grade:
    """Grades one notebook. Never raises for what is in it: Grade.reason says what is wrong."""
    return next(grade_files([path], variant=variant, limits=limits, isolated=isolated))


def grade_files(
    paths: Sequence[Path | str],
    *,
    jobs: int = 1,
    variant: str = DEFAULT_VARIANT,
    limits: Limits = DEFAULT_LIMITS,
    isolated: bool | None = True,
    progress: Callable[[int, int], None] = lambda done, of: None,
    reasons: Mapping[int, str] = MappingProxyType({}),
    variants: Mapping[int, str] = MappingProxyType({}),
    chapter: int | None = None,
    unprotected: Callable[[], None] = lambda: None,
) -> Iterator[Grade]:
    """Grades notebooks, `jobs` exercises at once; yields a Grade for each file, in their order.

    variant: any string; it chooses the inputs of the checks, as COURSE_SEED does.
    isolated: True needs namespaces (isolation.py); None takes them where the system has them; False
        does without.
    progress: called with the number of exercises that are graded, and of all.
    reasons: why files, by their place, cannot be graded. chapter: the only one that is graded.
    variants: what takes the place of `variant` for files, by their place.
    unprotected: called where there are no namespaces.
    Raises RuntimeError where nothing can be graded here.
    """
    handed_in = [
        NotGradable(reasons[i]) if i in reasons else _read(Path(path), limits, chapter)
        for i, path in enumerate(paths)
    ]
    tasks = [
        Task(one, exercise, variants.get(i, variant))
        for i, one in enumerate(handed_in)
        if isinstance(one, Submission)
        for exercise in one.exercises
    ]
    progress(0, len(tasks))
    known: dict[int, Mark | NotGradable] = {}
    graded = 0
    coming_marks = check_all(tasks, jobs, limits, isolated, unprotected)
    with contextlib.closing(coming_marks) as coming:
        for path, read in zip(paths, handed_in, strict=True):
            if isinstance(read, NotGradable):
                yield Grade(str(path), reason=str(read))
                continue
            own = range(graded, graded + len(read.exercises))
            graded = own.stop
            while not known.keys() >= set(own):
                number, mark = next(coming)
                known[number] = mark
                progress(len(known), len(tasks))
            yield _grade(path, read, [known[number] for number in own])


def _grade(path: Path | str, read: Submission, marks: list[Mark | NotGradable]) -> Grade:
    for mark in marks:
        if isinstance(mark, NotGradable):
            return Grade(str(path), read.chapter, reason=str(mark))
    return Grade(str(path), read.chapter, marks)


def _read(path: Path, limits: Limits, chapter: int | None) -> Submission | NotGradable:
    try:
        return submission.read_file(path, limits.notebook, chapter)
    except NotGradable as reason:
        return reason
