"""Finds exercises: `course_exercises/chapters/chNN/`, a file each."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import course_exercises.chapters
from course_exercises.authoring.framework import Exercise, registered

_PACKAGE = course_exercises.chapters.__name__
_FOLDER = Path(course_exercises.chapters.__file__).parent


def find(exercise_id: str) -> Exercise:
    """Returns an exercise by its id ("3.1"). Raises LookupError with a sentence for a learner."""
    match = re.fullmatch(r"(\d+)\.(\d+)", str(exercise_id))
    if match and int(match[1]) in chapters():
        _load(int(match[1]))
    if not isinstance(exercise_id, str) or exercise_id not in registered:
        near = [id for id in registered if match and id.split(".")[0] == match[1]]
        known = f"chapter {match[1]} has {', '.join(near)}" if near else 'an id looks like "0.1"'
        raise LookupError(f"There is no exercise {exercise_id!r}; {known}.")
    return registered[exercise_id]


def exercises() -> list[Exercise]:
    """All exercises of the course, by chapter and number."""
    for chapter in chapters():
        _load(chapter)
    ids = sorted(registered, key=lambda id: [int(part) for part in id.split(".")])
    return [registered[id] for id in ids]


def chapters() -> list[int]:
    """The chapters that have exercises."""
    return sorted(int(folder.name[2:]) for folder in _FOLDER.glob("ch[0-9][0-9]"))


def imported() -> list[str]:
    """The modules that the exercises import, as their source names them."""
    names = set()
    for file in _FOLDER.glob("ch*/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
    return sorted(name for name in names if not name.startswith(f"{_PACKAGE}."))


def _load(chapter: int) -> None:
    package = importlib.import_module(f"{_PACKAGE}.ch{chapter:02d}")
    for file in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(file.name)
