"""What the exercises say of themselves, and check cells that say otherwise.

Read from the text of `Exercise("3.1", "average_gradients", points=2, ...)`, and of `Stage("3.6", ...)` for a stage of
the learner's script: nothing is imported, so a build asks in no time.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from source import Cell, Problem


@dataclass(frozen=True)
class Registration:
    """What the builder has to know of an exercise; `name` is what the learner writes."""

    name: str
    points: int
    minutes: int


def of(root: Path, number: str) -> dict[str, Registration]:
    """The exercises of a chapter ("03") by their ids; a stage has no points."""
    found = {}
    for path in sorted(_folder(root, number).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Exercise", "Stage"):
                id, name = map(ast.literal_eval, [*node.args, ast.Constant("script")][:2])
                said = {k.arg: k.value for k in node.keywords if k.arg in ("points", "minutes")}
                numbers = {key: ast.literal_eval(value) for key, value in said.items()}
                found[id] = Registration(name, numbers.get("points", 0), numbers.get("minutes", 0))
    return found


def problems(root: Path, number: str, cells: list[Cell]) -> Iterator[Problem]:
    """A line and a sentence for each check cell that asks for what no exercise is."""
    known = of(root, number)
    for cell in cells:
        if not cell.is_check:
            continue
        id = cell.nbgrader["grade_id"].removesuffix("-check")
        name, points = re.search(r", (\w+)\)", cell.source)[1], cell.nbgrader["points"]
        if id not in known:
            folder = _folder(root, number).relative_to(root)
            sentence = (
                f"there is no exercise {id}: {folder} has {', '.join(known) or 'none'}. Write it "
                "there, or correct the id."
            )
            yield cell.line, sentence
            continue
        exercise = known[id]
        if name != exercise.name:
            yield cell.line, f"exercise {id} asks for {exercise.name}, and this checks {name}."
        if points != exercise.points:
            yield (
                cell.line - 1,
                f"exercise {id} has points={exercise.points}, and this header says {points}.",
            )


def _folder(root: Path, number: str) -> Path:
    return root / "course_exercises" / "chapters" / f"ch{number}"
