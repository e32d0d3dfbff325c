"""Reads the quick reference and the chapters, for the tests that hold one against the other."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from course_exercises.sources import chapters

PAGE = chapters.ROOT / "solutions" / "quick_reference.py"
# a chapter's section, and a heading there: in its lesson, or in the notebook that goes further
PLACE = re.compile(r"(\d\d(?: further)?): (\d)(?:, \*(.+?)\*)?")


def prose(source: Path) -> str:
    """The markdown of a source."""
    cells = re.split(r"(?m)^# %%", source.read_text(encoding="utf-8"))
    return "\n".join(
        re.sub(r"(?m)^# ?", "", cell.split("\n", 1)[1])
        for cell in cells
        if cell.startswith(" [markdown]")
    )


def table(*columns: str) -> Iterator[list[str]]:
    """The rows of all tables of the page that begin with these columns."""
    inside = False
    for line in prose(PAGE).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            inside = False
        elif cells[: len(columns)] == list(columns):
            inside = True
        elif inside and set(cells[0]) != {"-"}:
            yield cells


def formulas() -> list[list[str]]:
    """The rows of the formulas' tables."""
    return [*table("what", "bytes"), *table("what", "how many"), *table("what", "formula")]


def chapter(name: str) -> Path:
    """The source of a lesson, "03", or of what goes beyond it, "03 further"."""
    number, *further = name.split()
    found = chapters.chapter(number)
    return found.further if further else found.lesson


def sections(number: str) -> dict[str, list[str]]:
    """The headings of a chapter: its sections' numbers, each with all headings inside."""
    found: dict[str, list[str]] = {}
    for level, title in re.findall(r"(?m)^(##+) (.+)$", prose(chapter(number))):
        if level == "##":
            section = title.split(".")[0]
        found.setdefault(section, []).append(title)
    return found


def printed(number: str) -> str:
    """What the cells of a chapter's learner's copy print."""
    notebook = chapters.ROOT / "notebooks" / f"{chapter(number).stem}.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "\n".join("".join(output.get("text", [])) for output in outputs)


def plain(cell: str) -> str:
    return cell.replace("\\_", "_").replace("`", "")


def quotes(cell: str) -> list[str]:
    """The words in italics and the names of signals of a cell, as they stand in a message."""
    found = re.findall(r"\*(.+?)\*|(`[A-Z]+`)", cell)
    return [plain(italic or code) for italic, code in found]


def tells(message: str) -> bool:
    """Whether a row of the page explains this message of `launch`: all that it quotes stands there,
    of alternatives ("..., or ...") one."""
    text = " ".join(message.split())
    rows = [cells[0] for cells in table("it says", "what happened")]
    alternatives = [quotes(part) for row in rows for part in re.split(r", or |; (?=`)", row)]
    return any(all(words in text for words in said) for said in alternatives)
