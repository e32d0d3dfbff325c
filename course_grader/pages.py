"""Feedback to hand back: a page for each student, a screen for each exercise, nothing from outside.

feedback/ has the pages, index.html beside it lists them, and feedback.zip holds them under the names
that Moodle and Canvas gave the submissions, so that they take them back. A page has each requirement
with what became of it, what was expected and what came, and the hint. It loads nothing.
"""

import html
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

from course_grader import lms
from course_grader.marks import Mark
from course_grader.report import one_line, printable
from course_grader.totals import HandedIn, Total

_STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; overflow-wrap: anywhere; }
h1 + p { color: #555; margin-top: 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .2rem; border-top: 1px solid #ccc; padding-top: 1rem; }
section { border-left: .4rem solid #888; padding: .2rem 1rem; margin: 1.2rem 0; }
section.passed, section.by { border-color: #0072b2; }
section.failed, section.stopped { border-color: #d55e00; }
h2, h3 { display: flex; flex-wrap: wrap; justify-content: space-between; }
h3 { font-size: 1.1rem; margin: .2rem 0; } h2 span, h3 span { font-weight: normal; }
.late { background: #fff3e0; padding: .4rem 1rem; }
.said { font: .85rem/1.5 ui-monospace, monospace; max-height: 70vh; overflow-y: auto; margin: .4rem 0; }
.said div { white-space: pre-wrap; overflow-wrap: anywhere; padding-left: calc(var(--indent) * 1ch); }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .3rem .8rem .3rem 0; }
td:first-child { min-width: 11rem; overflow-wrap: anywhere; }
tr { border-bottom: 1px solid #ddd; vertical-align: top; }
@media (max-width: 40rem) { .said div { padding-left: calc(var(--indent) * .4ch); } }
"""
_MOST, _MOST_LINES = 4000, 200  # characters and lines of what a check says


def write(totals: Sequence[Total], folder: Path) -> list[Path]:
    """Writes feedback/, index.html and, where names came from an LMS, feedback.zip; returns the pages."""
    (folder / "feedback").mkdir(parents=True, exist_ok=True)
    for old in (*(folder / "feedback").glob("*.html"), folder / "feedback.zip"):
        old.unlink(missing_ok=True)  # of somebody who has left the class, or has another name now
    names = _names(totals)
    pages = [folder / "feedback" / name for name in names]
    for total, path in zip(totals, pages, strict=True):
        path.write_text(page(total), encoding="utf-8", errors="replace")
    index = _index(totals, names)
    (folder / "index.html").write_text(index, encoding="utf-8", errors="replace")
    sent = [(_for_lms(total), path) for total, path in zip(totals, pages, strict=True)]
    if any(name for name, _ in sent):
        with zipfile.ZipFile(folder / "feedback.zip", "w") as archive:
            for name, path in sent:
                if name:
                    archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return pages


def _names(totals: Sequence[Total]) -> list[str]:
    """A file's name for each page: the student's name and id, and a number where two would be one, also
    for a file system that knows no capitals."""
    names: dict[str, str] = {}
    for total in totals:
        parts = (total.student.name.removesuffix(".ipynb"), total.student.id)
        stem = "_".join(_safe(part) for part in parts if part)
        name, number = stem, 1
        while name.casefold() in names:
            number += 1
            name = f"{stem}_{number}"
        names[name.casefold()] = f"{name}.html"
    return list(names.values())


def _safe(text):
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in text)[:28] or "-"


def _for_lms(total: Total) -> str:
    files = [one.found for one in total.counting or total.handed_in if one.found]
    return next(filter(None, (lms.for_feedback(found.inside) for found in files)), "")


def page(total: Total) -> str:
    """The page of a student."""
    name, id = total.student.name, total.student.id
    head = f"<p>{_escaped(id)}</p>" if id else ""
    body = "".join(_notebook(one) for one in total.counting)
    rest = [one for one in total.handed_in if not one.counts]
    body += "".join(f"<p>{_escaped(f'{one.name}: {_why_not(one)}')}</p>" for one in rest)
    return _document(name, f"{head}{body or '<p>Nothing was handed in.</p>'}")


def _why_not(one):
    """For the student: what the grader itself could not do is the instructor's, with its paths."""
    if one.grade.chapter and one.grade.reason:
        return "it could not be graded; please tell your instructor."
    return one.grade.reason or f"{one.worth:g} points; another one counts."


def _notebook(one: HandedIn) -> str:
    grade = one.grade
    head = (
        f"<h2>{_escaped(grade.chapter)}<span>{one.worth:g} of {grade.points:g} points</span></h2>"
    )
    head += (
        f"<p>{_escaped(one.name)}</p>" if one.found and one.name != f"{grade.chapter}.ipynb" else ""
    )
    if one.late.why:
        before = f" {grade.earned:g} points before that." if one.late.left < 1 else ""
        head += f'<p class="late">{_escaped(one.late.why + before)}</p>'
    return head + "".join(_section(mark) for mark in grade.exercises)


def _section(mark: Mark) -> str:
    head = (
        f"<h3>{_escaped(f'{mark.exercise} {mark.name}')}"
        f"<span>{mark.status}, {mark.earned:g} of {mark.points:g}</span></h3>"
    )
    said = "" if mark.status == "passed" else f'<div class="said">{_body(mark)}</div>'
    return f'<section class="{mark.status.split()[0]}">{head}{said}</section>'


def _body(mark):
    """What the check says, line by line: one that is too long goes on below its own beginning. Without
    the characters that turn the direction of a line round, or delete it."""
    title = f"{mark.exercise} {mark.name}"
    head = re.compile(rf"{re.escape(title)} +\(.*\)")  # "3.1 average_gradients      (2 points)"
    lines = printable(mark.feedback[:_MOST].removeprefix(title)).lstrip(": ").splitlines()
    return "".join(
        f'<div style="--indent: {len(line) - len(line.lstrip(" "))}">{html.escape(line.strip(" "))}</div>'
        for line in lines[:_MOST_LINES]
        if not head.fullmatch(line) and not head.fullmatch(f"{title} {line}")
    )


def _index(totals, names):
    rows = "".join(
        f'<tr><td><a href="feedback/{html.escape(name)}">{_escaped(total.student.name)}</a></td>'
        f"<td>{_escaped(total.student.id)}</td><td>{total.points:g}</td>"
        f"<td>{'<br>'.join(map(_escaped, total.remarks(named=len(total.handed_in) > 1)))}</td></tr>"
        for total, name in zip(totals, names, strict=True)
    )
    head = "<tr><th>student</th><th>id</th><th>points</th><th>remarks</th></tr>"
    return _document("Feedback", f"<table>{head}{rows}</table>")


def _escaped(text):
    return html.escape(one_line(text))


def _document(title, body):
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escaped(title)}</title><style>{_STYLE}</style><h1>{_escaped(title)}</h1>{body}</html>\n"
    )
