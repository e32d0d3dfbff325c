"""Reads a submitted notebook and tells which one of the course it answers. Believes nothing, runs
nothing."""

import ast
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course_exercises.authoring.framework import Exercise
from course_exercises.checks import catalogue
from course_exercises.sources.answers import grade_id_of, percent_cells, source_of
from course_exercises.sources.chapters import ROOT, chapters
from course_exercises.sources.chapters import chapter as chapter_of
from course_grader import reading
from course_utils.lesson.statements import CodeCell, statements_of

_LONGEST = 600  # seconds; the reading itself ends sooner


class NotGradable(Exception):
    """Says in one sentence why a file cannot be graded."""


@dataclass(frozen=True)
class Submission:
    """A notebook with answers to exercises of the course.

    chapter: the notebook that asks for them, "03_ddp" or "03_ddp_further".
    cells: its code cells. texts: the grade ids of cells that are no code cells.
    provided: that notebook's own code cells, without the answers.
    """

    chapter: str
    exercises: list[Exercise]
    cells: list[CodeCell]
    texts: frozenset[str]
    provided: list[CodeCell]


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
        raise NotGradable(f"This is {read.chapter}, and {chapter_of(wanted).title} was asked for.")
    return read


def _submission(found: list[list[str]], name: str) -> Submission:
    cells = [
        CodeCell(source, grade_id, f"{name}, cell {number}", 0)
        for number, (kind, source, grade_id) in enumerate(found, start=1)
        if kind == "code"
    ]
    texts = {grade_id for kind, _, grade_id in found if kind != "code"}
    title = _title_for(cells, texts, name)
    exercises = [e for e in catalogue.exercises() if _title_of(e) == title]
    return Submission(title, exercises, cells, frozenset(texts), _provided(title))


@functools.cache
def _provided(title: str) -> list[CodeCell]:
    source = ROOT / "solutions" / f"{title}.py"
    return [cell for cell in percent_cells(source) if not cell.grade_id]


def imported() -> list[str]:
    """The modules that the chapters' cells import."""
    nodes = [s.node for title in _titles() for c in _provided(title) for s in statements_of(c)]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return sorted(modules | {node.module for node in nodes if isinstance(node, ast.ImportFrom)})


def _titles() -> set[str]:
    return {*map(_title_of, catalogue.exercises())}


def _title_for(cells: list[CodeCell], texts: set[str], name: str) -> str:
    """The notebook of the course with the most exercises in it; the file's name decides between
    equals."""
    found = Counter(map(_title_of, _exercises_in(cells, texts)))
    named = _named(name, {*found} or {title for each in chapters() for title in each.notebooks})
    if not found and named not in _titles():
        raise NotGradable(f"{name} holds no exercise of this course.")
    best = [title for title in found if found[title] == max(found.values())]
    if len(best) > 1 and named not in best:
        titles = " and ".join(sorted(best))
        raise NotGradable(f"{name} mixes {titles}; hand in one notebook for each chapter.")
    return best[0] if len(best) == 1 else named


def _named(name: str, titles: set[str]) -> str | None:
    """Of these notebooks the one that a file's name tells: by its whole name, "03_ddp_further
    (2).ipynb", else by its number."""
    begun = [title for title in sorted(titles, key=len) if name.startswith(title)]
    numbered = [title for title in sorted(titles, key=len) if name.startswith(title[:3])]
    return begun[-1] if begun else numbered[0] if numbered else None


def _exercises_in(cells: list[CodeCell], texts: set[str]) -> Iterator[Exercise]:
    """The exercises whose cell, check or definition is there."""
    ids = texts | {cell.grade_id for cell in cells}
    source = "\n".join(cell.source for cell in cells)
    ids |= {grade_id_of(id) for id in re.findall(r"""\bcheck\(\s*['"]?(\d+\.\d+)\b""", source)}
    defined = set(re.findall(r"(?m)^(?:def|class)\s+(\w+)", source))
    for exercise in catalogue.exercises():
        if grade_id_of(exercise.id) in ids or exercise.name in defined:
            yield exercise


@functools.cache
def _title_of(exercise: Exercise) -> str:
    """The name of the notebook that asks for an exercise."""
    return source_of(exercise.id).stem
