"""Reads a file that was handed in and writes what a grader wants of it, in a process of its own.

    python reading.py FILE MOST_BYTES

A file can be made so that reading it takes all memory or all day; here that hits nobody but this
process, which has limits and imports nothing of the course. It prints JSON: {"cells": [[type,
source, grade id], ...]}, or {"reason": a sentence}.
"""

import json
import os
import re
import resource
import stat
import sys

_MEMORY, _SECONDS = 2 << 30, 60
_MOST_CELLS = 2000
_MOST_CHARACTERS = 4_000_000  # of code and text; a chapter has some 50 thousand


class Refused(Exception):
    """Says in one sentence why a file cannot be read."""


def main(path: str, most_bytes: int) -> None:
    """Prints what is in the file."""
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    try:
        found = {"cells": cells_of(content_of(path, most_bytes), os.path.basename(path))}
    except Refused as refused:
        found = {"reason": str(refused)}
    json.dump(found, sys.stdout)


def content_of(path: str, most_bytes: int) -> bytes:
    """The bytes of an ordinary file that lies where it seems to lie. Raises Refused."""
    name = os.path.basename(path)
    try:
        if os.path.islink(path) and not _beside(path):
            raise Refused(f"{name} is a link to a file elsewhere; hand in the notebook itself.")
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no ordinary file"
            raise Refused(f"{name} is {kind}; hand in a notebook (.ipynb).")
        if status.st_size > most_bytes:
            raise Refused(
                f"{name} has {status.st_size / 1e6:.0f} MB, and {most_bytes / 1e6:.0f} MB are "
                "allowed; clear the notebook's outputs and hand it in again."
            )
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise Refused(f"{name} cannot be read: {error.strerror or error}.") from None


def _beside(link: str) -> bool:
    """Whether a link leads to a file of the same folder."""
    return os.path.dirname(os.path.realpath(link)) == os.path.realpath(os.path.dirname(link) or ".")


def cells_of(content: bytes, name: str) -> list[list[str]]:
    """Type, source and grade id of each cell of a notebook. Raises Refused."""
    if not content.strip():
        raise Refused(f"{name} is empty.")
    try:
        notebook = json.loads(content)  # whatever of UTF-8, 16 and 32 it is, with a mark or without
    except MemoryError:
        raise Refused(f"{name} needs too much memory to be read.") from None
    except (ValueError, RecursionError):
        raise Refused(
            f"{name} is no notebook: its content is not the JSON text that JupyterLab writes."
        ) from None
    raw = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(raw, list):
        raise Refused(f"{name} is no notebook: it has no list of cells (nbformat 4).")
    if len(raw) > _MOST_CELLS:
        raise Refused(f"{name} has {len(raw):,} cells, and {_MOST_CELLS:,} are allowed.")
    cells = [_cell(cell) for cell in raw]
    size = sum(len(source) for _, source, _ in cells)
    if size > _MOST_CHARACTERS:
        raise Refused(
            f"{name} has {size:,} characters of code and text, and {_MOST_CHARACTERS:,} are allowed."
        )
    return cells


def _cell(cell: object) -> list[str]:
    if not isinstance(cell, dict):
        return ["", "", ""]
    kind = cell.get("cell_type")
    return [kind if isinstance(kind, str) else "", _source_of(cell), _grade_id_in(cell)]


def _source_of(cell: dict) -> str:
    source = cell.get("source", "")
    lines = source if isinstance(source, list) else [source]
    text = "".join(line for line in lines if isinstance(line, str))
    return re.sub("\r\n?", "\n", text)


def _grade_id_in(cell: object) -> str:
    for key in ("metadata", "nbgrader", "grade_id"):
        cell = cell.get(key) if isinstance(cell, dict) else None
    return cell if isinstance(cell, str) else ""


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
