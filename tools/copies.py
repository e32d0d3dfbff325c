"""Makes the two notebooks of a chapter, learner's and solved, from its cells; runs nothing."""

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import groupby

import nbformat
import predictions
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from source import Cell

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
NBGRADER_SCHEMA = 3
COMPARES = re.compile(r"^\s*compare\(", re.MULTILINE)  # course_utils.lesson.predictions
ASKS = re.compile(r"\bbefore\s+you\s+run\b")  # of prose


def make_copy(cells: list[Cell], source: str, solved: bool) -> nbformat.NotebookNode:
    """Return a notebook without outputs; `source` is the source's path as the reader knows it.

    The solved copy keeps its solution markers: nbgrader makes its release from it.
    """
    notebook = new_notebook(metadata={"kernelspec": KERNELSPEC})
    for cell, cell_id, told in zip(cells, cell_ids(cells), _tell(cells), strict=True):
        make = new_code_cell if cell.kind == "code" else new_markdown_cell
        text = cell.source if solved else cell.for_learners()
        metadata = _metadata(cell) | (_folded(cell) if told and not solved else {})
        notebook.cells.append(make(text, id=cell_id, metadata=metadata))
    notebook.metadata["course"] = {"source": source, "cells": digest(notebook.cells)}
    return notebook


def cell_ids(cells: list[Cell]) -> list[str]:
    """Ids that stay the same from build to build: exercise id, heading, or a hash of the text.

    So a cell that is inserted changes no other's.
    """
    ids: list[str] = []
    for cell in cells:
        heading = re.match(r"#+ (.+)", cell.source) if cell.kind == "markdown" else None
        if cell.nbgrader:
            name = f"exercise-{nbgrader_id(cell)}"
        elif heading:
            name = re.sub(r"[^a-z0-9]+", "-", heading[1].lower()).strip("-")[:56] or "heading"
        else:
            name = hashlib.sha256(cell.source.encode()).hexdigest()[:12]
        copies = sum(other == name or other.startswith(f"{name}--") for other in ids)
        ids.append(f"{name}--{copies + 1}" if copies else name)
    return ids


def nbgrader_id(cell: Cell) -> str:
    """nbgrader's schema forbids dots in ids: exercise 3.1 is its 3-1."""
    return cell.nbgrader["grade_id"].replace(".", "-")


def _metadata(cell: Cell) -> dict:
    metadata: dict = {"tags": cell.tags} if cell.tags else {}
    if cell.nbgrader:
        metadata["nbgrader"] = {
            "grade": cell.is_check,
            "grade_id": nbgrader_id(cell),
            "locked": cell.is_check,
            "schema_version": NBGRADER_SCHEMA,
            "solution": cell.is_answer,
            "task": False,
        }
        if cell.is_check:
            metadata["nbgrader"]["points"] = cell.nbgrader["points"]
    return metadata


def _tell(cells: list[Cell]) -> Iterator[bool]:
    """Of each cell, whether its output may tell what is to be predicted: of code cells that follow one another,
    where one is a prediction or its table, or where the prose before them asks for a guess."""
    asked = False
    for kind, following in groupby(cells, key=lambda cell: cell.kind):
        group = list(following)
        told = kind == "code" and (asked or any(_predicts(cell) for cell in group))
        asked = ASKS.search(group[-1].source) is not None
        yield from (told for _ in group)


def _predicts(cell: Cell) -> bool:
    return predictions.TAG in cell.tags or COMPARES.search(cell.source) is not None


def _folded(cell: Cell) -> dict:
    """An output is folded away until the learner runs the cell, which unfolds it: a number that one
    has seen cannot be predicted any more. Where a cell is a table and nothing else, the list of
    likely mistakes in it is folded away too."""
    hidden = {"source_hidden": True} if predictions.only_compares(cell.source) else {}
    return {"jupyter": {"outputs_hidden": True, **hidden}}


def code_of(notebook: nbformat.NotebookNode) -> list[tuple[str, list[str]]]:
    """What decides the outputs of a notebook: its code cells with their tags, in their order."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [(cell.source, cell.metadata.get("tags", [])) for cell in code]


def take_outputs(notebook: nbformat.NotebookNode, stored: nbformat.NotebookNode) -> None:
    """Give the code cells of `notebook` the outputs and counts of those of `stored`, one by one."""
    code = ([c for c in each.cells if c.cell_type == "code"] for each in (notebook, stored))
    for cell, done in zip(*code, strict=True):
        cell.outputs, cell.execution_count = done.outputs, done.execution_count


def digest(content) -> str:
    """SHA-256 of anything that JSON can hold, independent of the order of keys."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def seal(notebook: nbformat.NotebookNode) -> None:
    """Record a digest of the finished notebook in it, so that a later edit shows."""
    notebook.metadata["course"].pop("content", None)
    notebook.metadata["course"]["content"] = _content_digest(notebook)


def is_sealed(notebook: nbformat.NotebookNode) -> bool:
    """True if the notebook is as `seal` left it."""
    return notebook.metadata.get("course", {}).get("content") == _content_digest(notebook)


def _content_digest(notebook: nbformat.NotebookNode) -> str:
    content = json.loads(json.dumps(notebook))
    content["metadata"].get("course", {}).pop("content", None)
    return digest(content)
