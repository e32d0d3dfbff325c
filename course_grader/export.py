"""Totals as files that a learning management system reads: a column for each notebook.

canvas       the gradebook import, by Canvas's number where it was in the names, and by the login
moodle       the grade import, by the e-mail address
gradescope   Email, Name
"""

import csv
from collections.abc import Sequence
from pathlib import Path

from course_grader import lms
from course_grader.report import in_a_table
from course_grader.totals import Total


def write(totals: Sequence[Total], folder: Path) -> None:
    """Writes canvas.csv, moodle.csv and gradescope.csv."""
    points = [{h.grade.chapter: h for h in total.counting} for total in totals]
    most = {title: h.grade.points for of_one in points for title, h in of_one.items()}
    titles = sorted(most)
    earned = [[f"{of[t].worth:g}" if t in of else "0" for t in titles] for of in points]
    people = [total.student for total in totals]
    files = [h.found.inside for t in totals for h in t.handed_in if h.found]
    numbered = any(lms.late(inside) is not None for inside in files)
    canvas = [
        ["Student", "ID", "SIS Login ID", "Section", *titles],
        ["    Points Possible", "", "", "", *(f"{most[t]:g}" for t in titles)],
        *([s.name, s.id if numbered else "", s.email, ""] for s in people),
    ]
    moodle = [["Email address", *titles], *([s.email] for s in people)]
    gradescope = [["Email", "Name", *titles], *([s.email, s.name] for s in people)]
    for name, rows in (("canvas", canvas), ("moodle", moodle), ("gradescope", gradescope)):
        for row, own in zip(rows[-len(people) :], earned, strict=True):
            row += own
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([in_a_table(cell) for cell in row] for row in rows)
