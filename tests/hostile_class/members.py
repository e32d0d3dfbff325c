"""Who hands in what, and what has to become of it."""

import functools
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from copies import make_copy
from source import read_source

from course_exercises.sources import chapters

IDS = ("0.1", "0.2", "0.3")


@dataclass(frozen=True)
class Member:
    """Somebody who hands in `content` as `file`.

    becomes: the statuses of the exercises 0.1, 0.2 and 0.3; empty where the file cannot be graded.
    because: a regular expression for what is said of each exercise that has neither passed nor is
    missing, and for the reason.
    seconds: the time limit that the member is graded with.
    """

    name: str
    file: str
    content: bytes
    becomes: tuple[str, ...]
    because: str
    seconds: float


_makers: dict[str, Callable[[], Member]] = {}


def member(
    *becomes: str, because: str = "", file: str = "00_start_here.ipynb", seconds: float = 300.0
) -> Callable:
    """Decorator for a function that returns a notebook, or the content of any file."""

    def add(make):
        def build():
            made = make()
            content = made if isinstance(made, bytes) else json.dumps(made).encode()
            return Member(make.__name__, file, content, becomes, because, seconds)

        _makers[make.__name__] = build
        return make

    return add


def hand_in(folder: Path, names: list[str]) -> list[tuple[Path, Member]]:
    """Makes the submissions of these members: folder/NAME/FILE."""
    handed_in = []
    for name in names:
        made = _makers[name]()
        path = folder / name / made.file
        path.parent.mkdir(parents=True)
        path.write_bytes(made.content)
        handed_in.append((path, made))
    return handed_in


def names_of(module: str) -> list[str]:
    """The members that a file of this folder describes."""
    before = set(_makers)
    importlib.import_module(f"tests.hostile_class.{module}")
    return [name for name in _makers if name not in before]


def notebook(solved: bool = True, chapter: int = 0) -> dict:
    """The chapter's notebook, not executed."""
    return json.loads(_text(solved, chapter))


@functools.cache
def _text(solved, chapter):
    return json.dumps(make_copy(read_source(chapters.chapter(chapter).lesson), "", solved))


def cell_of(notebook: dict, grade_id: str) -> dict:
    """The cell with this grade id, "0-2"."""
    return next(
        cell
        for cell in notebook["cells"]
        if cell["metadata"].get("nbgrader", {}).get("grade_id") == grade_id
    )


def with_code(code: str, grade_id: str = "0-2") -> dict:
    """A notebook with the imports, one answer and its check, and nothing else."""
    made = notebook(chapter=int(grade_id.split("-")[0]))
    imports = next(cell for cell in made["cells"] if cell["cell_type"] == "code")
    answer, check = cell_of(made, grade_id), cell_of(made, f"{grade_id}-check")
    answer["source"] = code
    return made | {"cells": [imports, answer, check]}
