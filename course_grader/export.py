"""Totals as files that a learning management system reads.

canvas       the gradebook import: Student, ID, SIS Login ID, Section, one column for each chapter
moodle       the grade import: Email address, one column for each chapter
gradescope   Email, Name, one column for each chapter
"""

import csv
from collections.abc import Sequence
from pathlib import Path

from course_grader.report import in_a_table
from course_grader.roster import Total

KINDS = ("canvas", "moodle", "gradescope")


def write(totals: Sequence[Total], kind: str, path: Path) -> None:
    """Writes the points of each student and chapter."""
    chapters = sorted({chapter for total in totals for chapter in total.chapters})
    most = {c: max(t.chapters[c][1] for t in totals if c in t.chapters) for c in chapters}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows(
            [in_a_table(cell) for cell in row] for row in _rows(totals, kind, chapters, most)
        )


def _rows(totals, kind, chapters, most):
    if kind == "canvas":
        yield ["Student", "ID", "SIS Login ID", "Section", *chapters]
        yield ["    Points Possible", "", "", "", *(f"{most[c]:g}" for c in chapters)]
    elif kind == "moodle":
        yield ["Email address", *chapters]
    else:
        yield ["Email", "Name", *chapters]
    for total in totals:
        student = total.student
        points = [f"{total.chapters.get(c, (0, 0))[0]:g}" for c in chapters]
        before = {
            "canvas": [student.name, "", student.id, ""],
            "moodle": [student.email],
            "gradescope": [student.email, student.name],
        }
        yield [*before[kind], *points]
