"""How long the notebooks take, computed and not claimed.

python tools/minutes.py          the table: reading, running and exercises of each notebook
python tools/minutes.py write    put it into course_exercises/minutes.json and the README

Reading: 130 words of prose a minute, 10 lines of code; of imports, of drawing and of scripts, which
one skims, 30. Each number to predict takes 40 s, each figure a minute; a folded table of `compare`
takes nothing. What stands under the heading of an exercise, or under "Exercises", is the exercises'
time, which is their authors' estimate (`Exercise(minutes=...)`). Running is measured when a
notebook is built, in whole minutes, and kept in course_exercises/minutes.json: a build that is some
seconds faster changes nothing.

The table also says after how much of a lesson the first exercise stands, and how many of the lines
that a notebook prints are a bare truth value.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import predictions
import printed
import registrations
from source import Cell, read_source

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from course_exercises.sources import chapters

WORDS, LINES, SKIMMED = 130, 10, 30  # a minute
NUMBER, FIGURE = 40 / 60, 1.0  # minutes
SLACK = 0.5  # minutes by which a build must leave the minute that is kept, to change it
TABLE = chapters.MINUTES
SKIM = re.compile(r"\s*(from \S+ )?import |.*\b(plt|plots|figures?|ax|axes)\b")
SHOWS = re.compile(r"\bplt\.show\(|\bExplorer\(")
STAGE = re.compile(r'\bcheck\("(\d+\.\d+)", mine\.script\(')
EXERCISE = re.compile(r"\d+\.\d+ |.*\bExercises?\b")
Table = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Minutes:
    """Of one notebook. `read` is the text and the code without the part "Exercises", whose time,
    solving included, is `exercises`."""

    read: float
    run: int
    exercises: int

    @property
    def lesson(self) -> int:
        """Reading and running, in whole minutes."""
        return math.ceil(self.read) + self.run

    def line(self) -> str:
        """What stands under the title of the notebook."""
        said = f"Read and run: {self.lesson} minutes."
        return f"{said} Exercises: {self.exercises} minutes." if self.exercises else said


def of(root: Path, name: str, cells: list[Cell]) -> Minutes:
    """The minutes of a notebook whose source has these cells."""
    known = registrations.of(root, name[:2])
    asked = {c.nbgrader["grade_id"] for c in cells if c.is_answer and "grade_id" in c.nbgrader}
    asked |= {id for c in cells if c.kind == "code" for id in STAGE.findall(c.source)}
    exercises = sum(known[id].minutes for id in asked if id in known)
    return Minutes(minutes(lesson(cells)), kept(root).get(name, {}).get("run", 1), exercises)


# --- reading -----------------------------------------------------------------------------------


def minutes(cells: list[Cell]) -> float:
    """Minutes that it takes to read these cells once, answers left out."""
    return sum(map(_of_prose_or_code, cells))


def lesson(cells: list[Cell]) -> list[Cell]:
    """The cells of a notebook without its exercises: each reaches from its heading to the next one
    of the same rank or a higher one."""
    kept, inside = [], 0  # the rank of the heading with which exercises began
    for cell in cells:
        heading = re.match(r"(##+) (.*)", cell.source) if cell.kind == "markdown" else None
        if heading and EXERCISE.match(heading[2]):
            inside = min(inside or len(heading[1]), len(heading[1]))
        elif heading and len(heading[1]) <= inside:
            inside = 0
        kept += [] if inside else [cell]
    return kept


def first_written(cells: list[Cell]) -> float:
    """The share of the lesson that one has read when the first exercise comes; 1 without any."""
    first = next((i for i, cell in enumerate(cells) if cell.is_answer), len(cells))
    return minutes(lesson(cells[:first])) / minutes(lesson(cells))


def _of_prose_or_code(cell: Cell) -> float:
    if cell.kind == "markdown":
        return len(re.findall(r"\w[\w'-]*", cell.source)) / WORDS
    if predictions.only_compares(cell.source):
        return 0.0
    lines = [line for line in cell.source.split("\n") if line.strip()]
    if cell.is_answer:
        lines = lines[: next(i for i, line in enumerate(lines) if "BEGIN SOLUTION" in line)]
    if lines and lines[0].startswith("%%writefile"):
        return len(lines) / SKIMMED
    skimmed = sum(bool(SKIM.match(line)) for line in lines)
    numbers = predictions.predictions(cell.source) if predictions.TAG in cell.tags else []
    return (
        skimmed / SKIMMED
        + (len(lines) - skimmed) / LINES
        + len(numbers) * NUMBER
        + bool(SHOWS.search(cell.source)) * FIGURE
    )


# --- the table that is kept --------------------------------------------------------------------


def kept(root: Path) -> Table:
    """The table as the last build left it."""
    path = root / TABLE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def ran(root: Path, name: str, seconds: float) -> bool:
    """Notes how long a notebook ran, beside whatever else this machine did; returns whether that
    changed its minutes."""
    table = kept(root)
    before, now = table.get(name, {}).get("run"), seconds * _share() / 60
    if before and before - 1 - SLACK < now <= before + SLACK:
        return False
    table[name] = table.get(name, {}) | {"run": max(1, math.ceil(now))}
    _keep(root, table)
    return True


def _share() -> float:
    """Of the processors that this machine has, the share that a build gets beside the others."""
    busy = os.getloadavg()[1] if hasattr(os, "getloadavg") else 0.0  # programs, over five minutes
    return min(1.0, (os.cpu_count() or 1) / max(busy, 1.0))


def computed(root: Path) -> Table:
    """The table as the sources have it now, with the running times that are kept."""
    table = {}
    for chapter in chapters.chapters(root):
        for source in chapter.sources:
            found = of(root, source.stem, read_source(source))
            table[source.stem] = {
                "read": math.ceil(found.read),
                "run": found.run,
                "exercises": found.exercises,
            }
    return table


def _keep(root: Path, table: Table) -> None:
    rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(table.items())]
    (root / TABLE).parent.mkdir(exist_ok=True)
    (root / TABLE).write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


# --- the page that says it ----------------------------------------------------------------------


def said(root: Path, table: Table) -> dict[str, list[str]]:
    """The first cells of each chapter's row in README.md, behind its name: lesson, its exercises,
    further matter, its exercises; a dash where there is none."""
    rows = {}
    for chapter in chapters.chapters(root):
        parts = [table.get(name) for name in (chapter.title, f"{chapter.title}{chapters.FURTHER}")]
        rows[chapter.title] = [
            str(number) if number else "–"
            for part in parts
            for number in ((part["read"] + part["run"], part["exercises"]) if part else (0, 0))
        ]
    return rows


def changed(root: Path, table: Table) -> str | None:
    """README.md with these numbers in its table of chapters; None if it has them already."""
    path = root / "README.md"
    before = text = path.read_text(encoding="utf-8") if path.exists() else ""
    for name, numbers in said(root, table).items():
        row = rf"(?m)^\| `{name}` \|(?: (?:\d+|–) \|){{{len(numbers)}}}"
        text = re.sub(row, f"| `{name}` | {' | '.join(numbers)} |", text)
    return text if text != before else None


def write(root: Path) -> None:
    """Keep the table and put it into the README."""
    table = computed(root)
    _keep(root, table)
    if text := changed(root, table):
        (root / "README.md").write_text(text, encoding="utf-8")


def problems(root: Path) -> Iterator[str]:
    """What the kept table or the README says otherwise than the sources."""
    table = computed(root)
    if (root / TABLE).exists() and table != kept(root):
        yield f"{TABLE} is not what the sources give: run `python tools/minutes.py write`."
    if changed(root, table):
        yield "README.md says other minutes: run `python tools/minutes.py write`."


def main(arguments: list[str]) -> int:
    """Write the table, or print it; return the exit status."""
    if arguments == ["write"]:
        write(ROOT)
    print(f"{'':<28} read   run  exercises  first after  bare truths")
    for name, row in computed(ROOT).items():
        first = first_written(read_source(ROOT / "solutions" / f"{name}.py"))
        bare, lines = printed.truths(nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4))
        numbers = f"{row['read']:4} {row['run']:5} {row['exercises']:10}"
        print(f"{name:<28} {numbers} {first:11.0%}  {bare} of {lines} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
