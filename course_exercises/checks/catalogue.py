"""Finds exercises: `course_exercises/chapters/chNN/`, a file each."""

import ast
import functools
import importlib
import re
from pathlib import Path

import course_exercises.chapters
from course_exercises.authoring.framework import Exercise, registered

_PACKAGE = course_exercises.chapters.__name__
_FOLDER = Path(course_exercises.chapters.__file__).parent
_REGISTERED = re.compile(r'\b(Exercise|Stage)\(\s*"(\d+\.\d+)"')


def find(exercise_id: str | float) -> Exercise:
    """Returns an exercise by its id ("3.1", or 3.1 where somebody forgot the quotes), and imports no other.
    Raises LookupError with a sentence for a learner."""
    id = str(exercise_id)
    if id in (known := modules() | _modules("Stage")):
        importlib.import_module(known[id])
    if id not in registered:
        match = re.fullmatch(r"(\d+)\.\d+", id)
        near = [id for id in modules() if match and id.split(".")[0] == match[1]]
        known = f"chapter {match[1]} has {', '.join(near)}" if near else 'an id looks like "0.1"'
        raise LookupError(f"There is no exercise {exercise_id!r}; {known}.")
    return registered[id]


def exercises() -> list[Exercise]:
    """All exercises of the course, by chapter and number."""
    return [find(id) for id in modules()]


def stages() -> list[str]:
    """The ids of the stages of the learner's script, which have no points."""
    return list(_modules("Stage"))


def modules() -> dict[str, str]:
    """The module of each exercise by its id, in the order of the course, read without importing it."""
    return _modules("Exercise")


@functools.cache
def _modules(kind: str) -> dict[str, str]:
    found = {}
    for file in _FOLDER.glob("ch[0-9][0-9]/*.py"):
        for of, id in _REGISTERED.findall(file.read_text(encoding="utf-8")):
            if of == kind:
                found[id] = f"{_PACKAGE}.{file.parent.name}.{file.stem}"
    return dict(sorted(found.items(), key=lambda each: [int(part) for part in each[0].split(".")]))


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
