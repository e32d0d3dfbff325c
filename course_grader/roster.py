"""A class: who handed in what, when, and what that comes to.

roster.csv has a row for each student, with the columns `name`, `email` and `file`; `file` is a path, or
a part of one, that only this student's submissions have ("first", "first_1815"). `id` is optional and
goes into the exports; without it the e-mail address does.

A path begins with what the instructor or the LMS has called it, and ends with what the student has:
the name of the file, and all that is in an archive. So the place that comes first says whose it is,
and nobody hands in for somebody else by a name that is further behind.
"""

import csv
import datetime
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

_COLUMNS = ("name", "email", "file")


@dataclass(frozen=True)
class Student:
    """A row of the roster."""

    name: str
    email: str
    file: str
    id: str


@dataclass
class Total:
    """What a student has: points, after the days late, and what could be had, by chapter; the days
    late; all points. `files` are the submissions that count."""

    student: Student
    files: list[str] = field(default_factory=list)
    chapters: dict[str, tuple[float, float]] = field(default_factory=dict)
    days_late: int = 0
    points: float = 0.0


@dataclass(frozen=True)
class Deadline:
    """When a submission is due, how many days late are free, and the share of the points that each
    further one costs."""

    due: datetime.datetime | None = None
    free_days: int = 0
    penalty: float = 0.1


def read(path: Path) -> list[Student]:
    """Reads a roster. Raises ValueError with a sentence."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    rows = list(csv.DictReader(text.splitlines()))
    missing = [c for c in _COLUMNS if rows and c not in rows[0]]
    if not rows or missing:
        raise ValueError(f"{path} needs a row for each student and the columns name, email, file.")
    students = [_student({key: text or "" for key, text in row.items()}) for row in rows]
    empty = [student.name for student in students if not student.file]
    if empty:
        raise ValueError(f"{path}: {empty[0]} has no file; write what only their paths hold.")
    return students


def _student(row):
    return Student(*(row[c].strip() for c in _COLUMNS), (row.get("id") or row["email"]).strip())


def _composed(text):
    """An umlaut is one character here, also where macOS has made two of it."""
    return unicodedata.normalize("NFC", text)


def owner(path: str, students: list[Student]) -> Student | None:
    """The student whose `file` is in the path: that which begins first, and of these the longest.
    None where nobody's is, or two are the same."""
    path, names = _composed(path), [(_composed(s.file), s) for s in students]
    fitting = sorted(
        ((path.index(name), -len(name), name, s) for name, s in names if name in path),
        key=lambda found: found[:2],
    )
    if len(fitting) > 1 and fitting[0][2] == fitting[1][2]:
        return None
    return fitting[0][3] if fitting else None


def days_late(path: Path, due: datetime.datetime | None) -> int:
    """Whole days, begun ones counted, that a file was changed after the due time."""
    if due is None or not path.exists():
        return 0
    late = path.stat().st_mtime - due.timestamp()
    return max(0, -int(-late // 86400)) if late > 0 else 0


def totals(
    submitted: list[tuple[str, str, float, float, int]],
    students: list[Student],
    deadline: Deadline,
) -> tuple[list[Total], list[str]]:
    """The total of each student, and the files that belong to nobody. A submission is (path, chapter,
    earned, points, days late); of several for one chapter the best counts, after its days."""
    found = {id(student): Total(student) for student in students}
    nobodys = []
    best: dict[tuple[int, str], tuple[float, tuple]] = {}
    for one in submitted:
        student = owner(one[0], students)
        if student is None:
            nobodys.append(one[0])
            continue
        late = max(0, one[4] - deadline.free_days)
        worth = one[2] * max(0.0, 1 - deadline.penalty * late)
        key = id(student), one[1]
        if key not in best or worth > best[key][0]:
            best[key] = worth, one
    for (student, chapter), (worth, one) in best.items():
        total = found[student]
        total.files.append(one[0])
        total.chapters[chapter] = (round(worth, 4), one[3])
        total.days_late += one[4]
        total.points = round(total.points + worth, 4)
    return [found[id(student)] for student in students], nobodys
