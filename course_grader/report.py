"""Grades as text for the terminal and as CSV for a spreadsheet, as JSON for a program.

Nothing in them differs from run to run: the same files and the same variant give the same bytes.
"""

import csv
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from course_grader.marks import Grade
from course_grader.totals import Total

_COLUMNS = (
    *("student", "id", "file", "chapter", "exercise", "name"),
    *("points", "earned", "status", "days late", "feedback"),
)
_FORMULAS = re.escape("=+-@\uff1d\uff0b\uff0d\uff20")  # also as wide as a Chinese character
# In many countries a semicolon ends a cell, and a line break a row, in quotation marks as well.
_BEGINS = re.compile(rf"^(?=[{_FORMULAS}])|(?<=[;\n])[ ]*(?=[{_FORMULAS}]\S)")


def text(grade: Grade, details: bool) -> str:
    """A line for the file and one for each exercise; `details` adds what the checks say."""
    if grade.reason:
        return f"{one_line(grade.path)}: not graded\n  {one_line(grade.reason)}"
    path = one_line(grade.path)
    lines = [f"{path}: {grade.chapter}, {grade.earned:g} of {_points(grade.points)}"]
    for mark in grade.exercises:
        title = f"{mark.exercise} {mark.name}"
        lines.append(f"  {title:<44} {mark.earned:g} of {mark.points:g}  {mark.status}")
        if mark.status in ("missing", "stopped"):
            lines.append(textwrap.indent(mark.feedback.removeprefix(f"{title}: "), " " * 6))
        elif details and mark.status == "failed":
            lines.append(textwrap.indent(mark.feedback, " " * 6))
    return printable("\n".join(lines))


def as_json(grade: Grade) -> str:
    """A line for a program: {"file": ..., "chapter": ..., "reason": ..., "exercises": [...]}"""
    exercises = [mark.described() | {"earned": mark.earned} for mark in grade.exercises]
    entry = {"file": grade.path, "chapter": grade.chapter, "reason": grade.reason}
    return json.dumps(entry | {"exercises": exercises})


def _points(number):
    return f"{number} point{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Without the control characters with which code could write anything into a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def one_line(text: str) -> str:
    """The same for a file's name, in which a line break could begin a line about somebody else."""
    return printable(text).replace("\n", "?")


def write_csv(totals: Sequence[Total], nobodys: Sequence[str], path: Path) -> None:
    """A row for each exercise that counts, and one for what could not be graded, or is nobody's."""
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for row in _rows(totals, nobodys):
            writer.writerow([in_a_table(cell) for cell in row])


def in_a_table(cell: object) -> object:
    """A cell that a spreadsheet takes for a text, not for a formula, without control characters."""
    if not isinstance(cell, str):
        return cell
    return _BEGINS.sub("'", printable(cell))


def _rows(totals: Sequence[Total], nobodys: Sequence[str]) -> Iterator[tuple]:
    for total in totals:
        who = total.student.name, total.student.id
        for one in total.handed_in:
            file = *who, one.name, one.grade.chapter
            if one.grade.reason:
                yield *file, "", "", 0, 0, "not graded", 0, one.grade.reason
            for m in one.grade.exercises if one.counts else ():
                mark = (m.exercise, m.name, m.points, m.earned, m.status, one.late.days, m.feedback)
                yield *file, *mark
        if not total.handed_in:
            yield *who, "", "", "", "", 0, 0, "not graded", 0, "Nothing was handed in."
    for sentence in nobodys:
        yield "", "", "", "", "", "", 0, 0, "not graded", 0, sentence
