"""Feedback to hand back: a page for each submission, a screen for each exercise, nothing from outside.

Name, points, each requirement with what became of it, what was expected and what came, the hint. An
exercise that passed is one line. A page is some kilobytes and loads nothing.
"""

import hashlib
import html
from collections.abc import Sequence
from pathlib import Path

from course_grader.marks import Grade, Mark
from course_grader.report import one_line, printable

_STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
section { border-left: .4rem solid #888; padding: .2rem 1rem; margin: 1.2rem 0; }
section.passed { border-color: #0072b2; } section.failed, section.stopped { border-color: #d55e00; }
h2 { font-size: 1.1rem; margin: .2rem 0; display: flex; flex-wrap: wrap; justify-content: space-between; }
h2 span { font-weight: normal; }
.said { font: .85rem/1.5 ui-monospace, monospace; max-height: 70vh; overflow-y: auto; margin: .4rem 0; }
.said div { white-space: pre-wrap; overflow-wrap: anywhere; padding-left: calc(var(--indent) * 1ch); }
@media (max-width: 40rem) { .said div { padding-left: calc(var(--indent) * .4ch); } }
"""
_DIGITS = 20  # so many that nobody finds a name whose page takes the place of a classmate's
_MOST, _MOST_LINES = 4000, 200  # characters and lines of what a check says


def write(grades: Sequence[Grade], names: Sequence[str], folder: Path) -> list[Path]:
    """Writes a page for each grade; returns their paths. `names` tell the submissions apart."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for grade, name in zip(grades, names, strict=True):
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGITS]
        stem = "".join(c if c.isalnum() or c in "-_" else "_" for c in Path(name).stem)[:40]
        paths.append(folder / f"{stem}-{digest}.html")
        paths[-1].write_text(page(grade, name), encoding="utf-8", errors="replace")
    return paths


def page(grade: Grade, name: str) -> str:
    """The page of a submission."""
    title = html.escape(f"{one_line(name)}: {grade.earned:g} of {grade.points:g} points")
    body = f"<p>{html.escape(one_line(grade.reason))}</p>" if grade.reason else ""
    body += "".join(_section(mark) for mark in grade.exercises)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>{body}</html>\n"
    )


def _section(mark: Mark) -> str:
    head = (
        f"<h2>{html.escape(f'{mark.exercise} {mark.name}')}"
        f"<span>{mark.status}, {mark.earned:g} of {mark.points:g}</span></h2>"
    )
    said = "" if mark.status == "passed" else f'<div class="said">{_body(mark)}</div>'
    return f'<section class="{mark.status.split()[0]}">{head}{said}</section>'


def _body(mark):
    """What the check says, line by line: one that is too long goes on below its own beginning. Without
    the characters that turn the direction of a line round, or delete it."""
    lines = printable(mark.feedback[:_MOST]).splitlines()
    if lines and lines[0].startswith(f"{mark.exercise} {mark.name}  "):
        lines = lines[1:]  # the title again
    return "".join(
        f'<div style="--indent: {len(line) - len(line.lstrip(" "))}">{html.escape(line.strip(" "))}</div>'
        for line in lines[:_MOST_LINES]
    )
