"""What a learner calls: `check`, `hint`, and `reset` and its like for the progress.

All print, return None and never raise. Only where nbgrader runs the notebook does `check` raise:
see `NotPassed`.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from course_exercises.authoring.framework import Exercise, Line, Outcome, judge
from course_exercises.checks import catalogue, pictures, points, progress
from course_utils.hardware.columns import clipped, wrapped

_hints_shown: dict[str, int] = {}  # per kernel: a stored notebook shows the same hint in every run


class NotPassed(AssertionError):
    """What `check` raises where nbgrader runs the notebook, which counts a cell as passed unless
    it raises. nbgrader says so in the kernel's environment, for `validate` and for `autograde`."""

    def __init__(self, exercise: Exercise) -> None:
        super().__init__(
            f"{exercise.id} {exercise.name} is not solved yet; "
            "run its check in the notebook and read what it says."
        )

    def _render_traceback_(self) -> list[str]:
        return [f"NotPassed: {self}"]  # the sentence alone, without the frames of this package


def check(exercise_id: str | float, answer: Any = None) -> None:
    """Checks your answer to an exercise and prints a line for each requirement; of some, a notebook also
    shows what a right answer gives."""
    try:
        outcome = examine(exercise_id, answer)
    except LookupError as error:
        print(error.args[0])
        return
    print(render(outcome, _shares(outcome.exercise)))
    if outcome.status != "not attempted":
        progress.record(outcome.exercise, outcome.status == "passed")
    if outcome.status == "passed":
        pictures.show(outcome.exercise.id, answer)
    elif outcome.exercise.points and "NBGRADER_EXECUTION" in os.environ:
        raise NotPassed(outcome.exercise)


def _shares(exercise: Exercise) -> list[float] | None:
    """What the instructor gives for each requirement, where a points.toml lies beside the notebook."""
    try:
        return points.read(points.BESIDE).get(exercise.id) if points.BESIDE.exists() else None
    except ValueError as error:
        print(f"Without points for requirements: {error}")
        return None


def examine(exercise_id: str | float, answer: Any, seed: str | None = None) -> Outcome:
    """Checks an answer and returns what came of it, printing nothing.

    Raises LookupError where there is no such exercise. `seed` gives the inputs of an earlier
    Outcome again; without it they come from COURSE_SEED, or are fresh.
    """
    return judge(catalogue.find(exercise_id), answer, seed)


def hint(exercise_id: str | float) -> None:
    """Prints the next hint of an exercise; a restarted kernel begins again with the first."""
    try:
        exercise = catalogue.find(exercise_id)
    except LookupError as error:
        print(error.args[0])
        return
    number = _hints_shown.get(exercise.id, 0) + 1
    count = len(exercise.hints)
    if number > count:
        print(f"{exercise.id} {exercise.name}: you have seen all {count} hints. The last was:")
        print(_wrap(exercise.hints[-1], "  "))
        return
    _hints_shown[exercise.id] = number
    print(f"{exercise.id} {exercise.name}, hint {number} of {count}:")
    print(_wrap(exercise.hints[number - 1], "  "))


def reset(what: object = None) -> None:
    """Forgets that you passed an exercise, a chapter or all: reset("3.1"), reset(3), reset("all").

    What was there before is kept in a file. Your answers in the notebooks stay as they are.
    """
    if _print_result(progress.reset, what):
        _hints_shown.clear()


def export_progress(file: Path | str) -> None:
    """Writes your progress into one new file, to take to another machine."""
    _print_result(progress.export, file)


def import_progress(file: Path | str) -> None:
    """Adds the progress in a file that `export_progress` wrote to yours."""
    _print_result(progress.import_from, file)


def _print_result(action: Callable[[Any], str], argument: Any) -> bool:
    """Prints what an action did, or why it could not; returns whether it was done."""
    try:
        print(action(argument))
    except (LookupError, OSError) as error:
        print(progress.sentence(error))
        return False
    return True


def render(outcome: Outcome, shares: Sequence[float] | None = None) -> str:
    """The text that `check` prints. shares: the points of each requirement, where these have some."""
    exercise = outcome.exercise
    title = f"{exercise.id} {exercise.name}"
    worth = f"{exercise.points} point{'s' if exercise.points != 1 else ''}"
    if outcome.status == "not attempted":
        return f"{title}: not attempted yet"
    parts = [f"{title:<54} ({worth})" if exercise.points else title]
    causes = [_cause(line, exercise.misconceptions) for line in outcome.lines]
    for place, (line, cause) in enumerate(zip(outcome.lines, causes, strict=True)):
        if cause and cause in causes[:place]:
            continue  # one cause is told once
        parts += _render_line(line, exercise.misconceptions)
        if more := cause and causes[place + 1 :].count(cause):
            parts.append(f"      the same in {more} more requirement{'s' if more > 1 else ''}")
    if outcome.status == "passed":
        return "\n".join([*parts, f"  passed: {worth}" if exercise.points else "  passed"])
    if any(line.silent for line in outcome.lines):
        parts.append("  Repair the likely mistake first: other lines may fail for the same reason.")
    if shares is not None:
        earned = points.met(shares, (line.ok for line in outcome.lines))
        parts.append(f"  so far: {earned:g} of {worth}")
    if outcome.printed:
        parts.append("  your code printed:")
        printed = list(dict.fromkeys(map(_without_folders, outcome.printed)))  # each line once
        parts += [f"      {clipped(line)}" for line in printed[:8]]
        if len(printed) > 8:
            parts.append("      ...")
    left = len(exercise.hints) > _hints_shown.get(exercise.id, 0)
    parts.append(f'  next: hint("{exercise.id}")' if left else "  next: read the last hint again")
    return "\n".join(parts)


def _without_folders(line: str) -> str:
    """A line of output with the paths of installed packages cut short, as in a warning."""
    return re.sub(r"\S*/site-packages/", "", line)


def _cause(line: Line, sentences: dict[str, str]) -> str:
    """What the check says of why a requirement failed, or ""."""
    return sentences.get(line.misconception, "") or line.cause


def _render_line(line: Line, sentences: dict[str, str]) -> list[str]:
    if line.ok is None:
        return [_wrap(f"--  {line.requirement} (not looked at yet)", "  ", "      ")]
    if line.ok:
        return [_wrap(f"ok  {line.requirement}", "  ", "      ")]
    parts = [_wrap(f"no  {line.requirement}", "  ", "      ")]
    if line.text:
        parts.append(_wrap(line.text, "      "))
    if line.expected is not None:
        parts.append(_wrap(f"expected: {line.expected}", "      ", "                "))
    if line.got is not None:
        parts.append(_wrap(f"got:      {line.got}", "      ", "                "))
    if sentence := sentences.get(line.misconception):
        parts.append(_wrap(f"likely:   {sentence}", "      ", "                "))
    return parts


def _wrap(text: str, first: str, rest: str | None = None) -> str:
    """Wraps the sentences of a text; an indented line, which is code, stays one line."""
    lines = []
    for i, line in enumerate(_paragraphs(text)):
        indent = first if i == 0 or rest is None else rest
        if line.startswith("  "):
            lines.append(indent + clipped(line))
        elif line.strip():
            lines.append(wrapped(line, indent, rest))
    return "\n".join(lines)


def _paragraphs(text: str) -> list[str]:
    """The lines of a text, put together where a sentence goes on."""
    found: list[str] = []
    for line in text.splitlines():
        before = found[-1] if found else ""
        goes_on = before and before[-1] not in ".:" and line
        if goes_on and " " not in (before[0], line[0]):
            found[-1] = f"{before} {line}"
        else:
            found.append(line)
    return found
