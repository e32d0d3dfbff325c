"""Reads a submitted notebook and tells which chapter it answers. Believes nothing, runs nothing."""

import json
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course_utils.checks import catalogue
from course_utils.checks.answers import grade_id_of
from course_utils.checks.framework import Exercise
from course_utils.checks.statements import Cell


class NotGradable(Exception):
    """Says in one sentence why a file cannot be graded."""


@dataclass(frozen=True)
class Submission:
    """A notebook that answers a chapter, "03_ddp".

    cells: its code cells. texts: the grade ids of cells that are no code cells.
    """

    chapter: str
    exercises: list[Exercise]
    cells: list[Cell]
    texts: frozenset[str]


def read_file(path: Path, most_bytes: int) -> Submission:
    """Reads a submission from a file. Raises NotGradable."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no ordinary file"
            raise NotGradable(f"{path} is {kind}; hand in a notebook (.ipynb).")
        if status.st_size > most_bytes:
            raise NotGradable(
                f"{path.name} has {status.st_size / 1e6:.0f} MB, and {most_bytes / 1e6:.0f} MB are "
                "allowed; clear the notebook's outputs and hand it in again."
            )
        content = path.read_bytes()
    except OSError as error:
        raise NotGradable(f"{path} cannot be read: {error.strerror or error}.") from None
    return read(_json_of(content, path.name), path.name)


def read(notebook: object, name: str) -> Submission:
    """Reads a submission from a notebook's content; `name` is its file's. Raises NotGradable."""
    raw = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(raw, list):
        raise NotGradable(f"{name} is no notebook: it has no list of cells (nbformat 4).")
    cells, texts = [], set()
    for number, cell in enumerate(raw, start=1):
        if isinstance(cell, dict):
            source, grade_id = _source_of(cell), _grade_id_in(cell)
            if cell.get("cell_type") == "code":
                cells.append(Cell(source, grade_id, f"{name}, cell {number}", 0))
            else:
                texts.add(grade_id)
    chapter = _chapter_of(cells, texts, name)
    exercises = [e for e in catalogue.exercises() if _number_of(e) == chapter]
    return Submission(_title_of(chapter), exercises, cells, frozenset(texts))


def _json_of(content: bytes, name: str) -> object:
    if not content.strip():
        raise NotGradable(f"{name} is empty.")
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        raise NotGradable(
            f"{name} is no notebook: its content is not the JSON text that JupyterLab writes."
        ) from None


def _source_of(cell: dict) -> str:
    source = cell.get("source", "")
    lines = source if isinstance(source, list) else [source]
    return "".join(line for line in lines if isinstance(line, str))


def _grade_id_in(cell: dict) -> str:
    for key in ("metadata", "nbgrader", "grade_id"):
        cell = cell.get(key) if isinstance(cell, dict) else None
    return cell if isinstance(cell, str) else ""


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
