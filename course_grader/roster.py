"""A class: who is in it, and whose a submission is.

roster.csv has a row for each student with the columns `name`, `email` and `id`. The id is what the LMS
writes into the names of submissions: Canvas's or Moodle's number, nbgrader's folder, or whatever stands
in front ("ada" in ada_03_ddp.ipynb). Canvas's gradebook and Moodle's grading worksheet are rosters, too.
"""

import csv
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from course_grader import lms
from course_grader.gathering import Found

_COLUMNS = {  # as we, Canvas and Moodle call them
    "name": ("name", "student", "full name"),
    "email": ("email", "email address", "sis login id"),
    "id": ("id", "identifier"),
}
_NO_STUDENT = re.compile(r"\s*Points Possible|$")  # a row of Canvas's


@dataclass(frozen=True)
class Student:
    """A row of the roster."""

    name: str
    email: str
    id: str


def read(path: Path) -> dict[str, Student]:
    """Reads a roster: the students by id. Raises ValueError with a sentence."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    rows = [_row(row) for row in csv.DictReader(text.splitlines())]
    if not rows or not all(_column(rows[0], key) for key in _COLUMNS):
        raise ValueError(f"{path} needs a row for each student and the columns name, email, id.")
    students: dict[str, Student] = {}
    for row in rows:
        student = Student(*(row[_column(row, key)] for key in _COLUMNS))
        if _NO_STUDENT.match(student.name) and not student.id:
            continue
        if not student.id:
            raise ValueError(f"{path}: {student.name} has no id; write what the LMS calls them.")
        if other := students.get(student.id):
            raise ValueError(
                f"{path}: {other.name} and {student.name} have the same id, {student.id}."
            )
        students[student.id] = student
    if not students:
        raise ValueError(f"{path} has no student.")
    return students


def _row(row):
    cells = {key: text for key, text in row.items() if isinstance(key, str)}
    return {
        key.strip().lower(): unicodedata.normalize("NFC", (text or "").strip()).removeprefix(
            "Participant "
        )  # Moodle's
        for key, text in cells.items()
    }


def _column(row, key):
    return next((name for name in _COLUMNS[key] if name in row), "")


def owner(found: Found, students: Mapping[str, Student]) -> Student | str:
    """Whose a submission is; a sentence where it is nobody's, or could be two students'."""
    part = lms.first(found.inside)
    fitting = _named(part, students)
    if len(fitting) == 1:  # a folder of one student's, and in it a file with another's name?
        fitting += [one for one in _named(found.typed, students)[:1] if one not in fitting]
    if not fitting:
        number = next(iter(lms.ids(part)), "")
        what = f"the number {number}" if number else f"what it begins with, {part!r},"
        return (
            f"{found.name} is nobody's: {what} is no id of the roster. Name the folder or archive in "
            "which the students' own folders and files lie."
        )
    if len(fitting) > 1:
        names = " or ".join(f"{one.name} ({one.id})" for one in fitting)
        return f"{found.name} is nobody's: it could be {names}. Rename it."
    return fitting[0]


def _named(part: str, students: Mapping[str, Student]) -> list[Student]:
    """The students whose id the part is, or whose number the LMS may have written there, or whose id
    it begins with."""
    for whole in (part, re.sub(r"\.\w+\s*$", "", part)):
        if whole in students:
            return [students[whole]]
    numbers = lms.ids(part)
    if numbers and numbers[0] not in students:
        return []
    return [students[id] for id in dict.fromkeys(numbers or lms.plain(part)) if id in students]
