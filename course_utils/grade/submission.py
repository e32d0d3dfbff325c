"""Reads a submitted notebook and tells which chapter it answers. Believes nothing, runs nothing."""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course_utils.checks import catalogue
from course_utils.checks.answers import grade_id_of, percent_cells, source_of
from course_utils.checks.framework import Exercise
from course_utils.checks.statements import Cell
from course_utils.grade import reading

_LONGEST = 600  # seconds; the reading itself ends sooner


class NotGradable(Exception):
    """Says in one sentence why a file cannot be graded."""


@dataclass(frozen=True)
class Submission:
    """A notebook that answers a chapter, "03_ddp".

    cells: its code cells. texts: the grade ids of cells that are no code cells.
    provided: the chapter's own code cells, without the answers.
    """

    chapter: str
    exercises: list[Exercise]
    cells: list[Cell]
    texts: frozenset[str]
    provided: list[Cell]


def read_file(path: Path, most_bytes: int, wanted: int | None = None) -> Submission:
    """Reads a submission from a file; `wanted` is the only chapter that it may be. Raises
    NotGradable."""
    command = [sys.executable, "-I", "-S", reading.__file__, str(path), str(most_bytes)]
    run = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LONGEST
    )
    try:
        found = json.loads(run.stdout)
    except ValueError:
        found = {"reason": f"{path.name} cannot be read in the time and memory that there is."}
    if "reason" in found:
        raise NotGradable(found["reason"])
    read = _submission(found["cells"], path.name)
    if wanted is not None and int(read.chapter[:2]) != wanted:
        raise NotGradable(f"This is {read.chapter}, and {_title_of(wanted)} was asked for.")
    return read


def _submission(found: list[list[str]], name: str) -> Submission:
    cells = [
        Cell(source, grade_id, f"{name}, cell {number}", 0)
        for number, (kind, source, grade_id) in enumerate(found, start=1)
        if kind == "code"
    ]
    texts = {grade_id for kind, _, grade_id in found if kind != "code"}
    chapter = _chapter_of(cells, texts, name)
    exercises = [e for e in catalogue.exercises() if _number_of(e) == chapter]
    return Submission(
        _title_of(chapter), exercises, cells, frozenset(texts), _provided(str(chapter))
    )


@functools.cache
def _provided(chapter: str) -> list[Cell]:
    return [cell for cell in percent_cells(source_of(chapter)) if not cell.grade_id]


def _chapter_of(cells: list[Cell], texts: set[str], name: str) -> int:
    """The chapter with the most exercises in it; its file name decides between equals."""
    by_name = re.match(r"(\d\d)_", name)
    named = int(by_name[1]) if by_name else None
    found: dict[int, int] = {}
    for exercise in _exercises_in(cells, texts):
        found[_number_of(exercise)] = found.get(_number_of(exercise), 0) + 1
    if not found:
        if named in catalogue.chapters():
            return named
        raise NotGradable(f"{name} holds no exercise of this course.")
    best = [chapter for chapter in found if found[chapter] == max(found.values())]
    if len(best) > 1 and named not in best:
        titles = " and ".join(_title_of(chapter) for chapter in sorted(best))
        raise NotGradable(f"{name} mixes {titles}; hand in one notebook for each chapter.")
    return best[0] if len(best) == 1 else named


def _exercises_in(cells: list[Cell], texts: set[str]) -> Iterator[Exercise]:
    """The exercises whose cell, or definition, is there."""
    ids = texts | {cell.grade_id for cell in cells}
    source = "\n".join(cell.source for cell in cells)
    defined = set(re.findall(r"(?m)^(?:def|class)\s+(\w+)", source))
    for exercise in catalogue.exercises():
        if grade_id_of(exercise.id) in ids or exercise.name in defined:
            yield exercise


def _number_of(exercise: Exercise) -> int:
    return int(exercise.id.split(".")[0])


def _title_of(chapter: int) -> str:
    return next((catalogue.root() / "solutions").glob(f"{chapter:02d}_*.py")).stem
