"""Grades as text for the terminal, as CSV for a spreadsheet, as JSON for a program.

Nothing in them differs from run to run: the same files and the same variant give the same bytes.
"""

import csv
import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from course_grader.marks import Grade, Mark

_COLUMNS = ("file", "chapter", "exercise", "name", "points", "earned", "status", "feedback")
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


def _points(number):
    return f"{number} point{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Without the control characters with which code could write anything into a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def one_line(text: str) -> str:
    """The same for a file's name, in which a line break could begin a line about somebody else."""
    return printable(text).replace("\n", "?")


def write_csv(grades: Sequence[Grade], path: Path) -> None:
    """A row for each exercise, and one for each file that could not be graded."""
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for grade in grades:
            writer.writerows([in_a_table(cell) for cell in row] for row in _rows(grade))


def in_a_table(cell: object) -> object:
    """A cell that a spreadsheet takes for a text, not for a formula, without control characters."""
    if not isinstance(cell, str):
        return cell
    return _BEGINS.sub("'", printable(cell))


def _rows(grade: Grade) -> Iterator[tuple]:
    if grade.reason:
        yield grade.path, "", "", "", 0, 0, "not graded", grade.reason
    for m in grade.exercises:
        mark = (m.exercise, m.name, m.points, m.earned, m.status, m.feedback)
        yield grade.path, grade.chapter, *mark


def write_json(grades: Sequence[Grade], variant: str, path: Path) -> None:
    """{"variant": ..., "files": [{"file": ..., "points": ..., "exercises": [...]}, ...]}"""
    content = {"variant": variant, "files": [_described(grade) for grade in grades]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _described(grade: Grade) -> dict:
    return {
        "file": grade.path,
        "chapter": grade.chapter,
        "points": grade.points,
        "earned": grade.earned,
        "reason": grade.reason,
        "exercises": [_entry(mark) for mark in grade.exercises],
    }


def _entry(mark: Mark) -> dict:
    entry = dataclasses.asdict(mark) | {"earned": mark.earned}
    for key in ("seconds", "partial"):
        del entry[key]
    return entry
