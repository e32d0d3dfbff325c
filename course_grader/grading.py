"""Grades submissions: reads them, has their exercises checked, and puts the marks in order."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from course_grader import submission
from course_grader.checking import Task, check_all
from course_grader.limits import Limits
from course_grader.marks import Grade, Mark
from course_grader.submission import NotGradable, Submission

DEFAULT_VARIANT = "0"  # the same inputs in every run, so that marks can be repeated
DEFAULT_LIMITS = Limits()
SHARE = 1800.0  # seconds for all that one student hands in


def grade_file(
    path: Path | str,
    *,
    variant: str = DEFAULT_VARIANT,
    limits: Limits = DEFAULT_LIMITS,
    isolated: bool | None = True,
) -> Grade:
    """Grades one notebook. Never raises for what is in it: Grade.reason says what is wrong."""
    return next(grade_files([path], variant=variant, limits=limits, isolated=isolated))


@dataclass(frozen=True)
class Request:
    """A file to be graded.

    reason: why it cannot be, else empty. known: the marks that it has already, by exercise.
    variant: chooses the inputs of its checks. whose: the requests of one student have one share of time.
    """

    path: Path
    reason: str = ""
    variant: str = DEFAULT_VARIANT
    whose: str = ""
    known: Mapping[str, Mark] = field(default_factory=dict)


def grade_files(
    paths: Sequence[Path | str], *, variant: str = DEFAULT_VARIANT, **options: object
) -> Iterator[Grade]:
    """Grades notebooks; the options are those of grade_all."""
    requests = [Request(Path(path), variant=variant, whose=str(path)) for path in paths]
    return grade_all(requests, **options)


def grade_all(
    requests: Sequence[Request],
    *,
    jobs: int = 1,
    limits: Limits = DEFAULT_LIMITS,
    isolated: bool | None = True,
    progress: Callable[[int, int], None] = lambda done, of: None,
    chapter: int | None = None,
    unprotected: Callable[[], None] = lambda: None,
) -> Iterator[Grade]:
    """Grades `jobs` exercises at once; yields a Grade for each request, in their order.

    isolated: True needs namespaces (isolation.py); None takes them where the system has them; False
        does without.
    progress: called with the number of exercises that are graded, and of all.
    chapter: the only one that is graded. unprotected: called where there are no namespaces.
    Raises RuntimeError where nothing can be graded here.
    """
    handed_in = [_read(one, limits, chapter) for one in requests]
    tasks, places = [], []
    for place, (one, read) in enumerate(zip(requests, handed_in, strict=True)):
        for exercise in read.exercises if isinstance(read, Submission) else ():
            if exercise.id not in one.known:
                tasks.append(Task(read, exercise, one.variant))
                places.append(place)
    progress(0, len(tasks))
    marks: dict[int, dict[str, Mark | NotGradable]] = {
        place: dict(one.known) for place, one in enumerate(requests)
    }
    done, spent = 0, dict.fromkeys((one.whose for one in requests), 0.0)
    with contextlib.closing(check_all(tasks, jobs, limits, isolated, unprotected)) as coming:
        for place, (one, read) in enumerate(zip(requests, handed_in, strict=True)):
            if isinstance(read, NotGradable):
                yield Grade(str(one.path), reason=str(read))
                continue
            while not marks[place].keys() >= {exercise.id for exercise in read.exercises}:
                number, mark = next(coming)
                whose, task = requests[places[number]].whose, tasks[number]
                if isinstance(mark, Mark) and spent[whose] > SHARE:
                    mark = _too_much(mark)
                marks[places[number]][task.exercise.id] = mark
                spent[whose] += getattr(mark, "seconds", 0.0)
                if spent[whose] > SHARE:
                    _empty(tasks, [requests[i].whose == whose for i in places])
                done += 1
                progress(done, len(tasks))
            yield _grade(one.path, read, [marks[place][e.id] for e in read.exercises])


def _empty(tasks: list[Task], own: list[bool]) -> None:
    """Takes the code out of what a student has beyond the share: its checks are over at once."""
    for number, task in enumerate(tasks):
        if own[number] and task.submission.cells:
            tasks[number] = replace(task, submission=replace(task.submission, cells=[]))


def _too_much(mark: Mark) -> Mark:
    said = f"all that was handed in together ran for more than {SHARE / 60:g} minutes."
    feedback = f"{mark.exercise} {mark.name}: {said}"
    return replace(mark, status="stopped", feedback=feedback, lines=[], seconds=0.0)


def _grade(path: Path, read: Submission, marks: list[Mark | NotGradable]) -> Grade:
    for mark in marks:
        if isinstance(mark, NotGradable):
            return Grade(str(path), read.chapter, reason=str(mark))
    return Grade(str(path), read.chapter, marks)


def _read(one: Request, limits: Limits, chapter: int | None) -> Submission | NotGradable:
    try:
        if one.reason:
            raise NotGradable(one.reason)
        return submission.read_file(one.path, limits.notebook, chapter)
    except NotGradable as reason:
        return reason
