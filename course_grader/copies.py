"""Answers that are equal after renaming and formatting: a signal for a person to read, never a verdict.

Short answers are alike by themselves: only those with enough structure are compared, and not those
that equal the stub. What most of a class has is no signal either. Nor is a cell that is longer than any
answer: the tree of a million operators takes gigabytes, and this is the grader's own process.
"""

import ast
import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from course_grader.limits import NOTEBOOK
from course_grader.marks import Grade
from course_grader.submission import NotGradable, read_file

_FEWEST_NODES = 40
_MOST_CHARACTERS = 20_000  # of a cell; the longest answer of the course has some 3,000
_COMMON = 0.2  # a form that so large a part of a class has, and four at least, is common


def form_of(source: str, name: str) -> str | None:
    """The shape of the last definition of a name: without names, comments, docstrings and layout.
    None where it is none, or too short, too long or too deep to say anything."""
    if len(source) > _MOST_CHARACTERS:
        return None
    try:
        found = [n for n in ast.parse(source).body if getattr(n, "name", None) == name]
        if not found or sum(1 for _ in ast.walk(found[-1])) < _FEWEST_NODES:
            return None
        return ast.dump(_Plain().visit(found[-1]))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


class _Plain(ast.NodeTransformer):
    """Gives names numbers, in the order in which they appear."""

    def __init__(self):
        self._numbers: dict[str, str] = {}

    def _number(self, name):
        return self._numbers.setdefault(name, f"n{len(self._numbers)}")

    def visit_Name(self, node):
        return ast.Name(self._number(node.id), node.ctx)

    def visit_arg(self, node):
        return ast.arg(self._number(node.arg))

    def visit_FunctionDef(self, node):
        node.name, node.returns, node.body = self._number(node.name), None, _without_text(node.body)
        return self.generic_visit(node)

    def visit_ClassDef(self, node):
        node.name, node.body = self._number(node.name), _without_text(node.body)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node):
        if node.value is None:
            return None
        return self.generic_visit(ast.Assign([node.target], node.value))


def _without_text(body):
    kept = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    return kept or [ast.Pass()]


def alike(forms: list[tuple[str, str, str | None]]) -> list[str]:
    """A line for each group of equal answers, from (exercise, file, form)."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    answers: dict[str, int] = defaultdict(int)
    for exercise, file, form in forms:
        if form is not None:
            groups[exercise, form].append(file)
            answers[exercise] += 1
    return [
        f"{exercise}: {', '.join(files)}"
        for (exercise, _), files in groups.items()
        if len(files) > 1 and not (len(files) >= 4 and len(files) > _COMMON * answers[exercise])
    ]


def among(graded: Sequence[tuple[Path, Grade]]) -> list[str]:
    """The same, of submissions."""
    return alike(
        [form for path, grade in graded if not grade.reason for form in _forms(path, grade)]
    )


def _forms(path: Path, grade: Grade) -> Iterator[tuple[str, str, str | None]]:
    with contextlib.suppress(NotGradable):
        cells = read_file(path, NOTEBOOK).cells
        for mark in grade.exercises:
            if mark.status in ("passed", "failed", "stopped"):
                known = (form_of(cell.source, mark.name) for cell in reversed(cells))
                yield mark.exercise, grade.path, next(filter(None, known), None)
