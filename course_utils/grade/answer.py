"""Takes an answer out of a submission, with what it needs, and executes that; nothing else.

Only the worker uses this: even to parse a submission is not the grader's own business.
"""

import ast
import builtins
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from course_utils.checks.answers import grade_id_of, percent_cells, source_of
from course_utils.checks.framework import Exercise
from course_utils.checks.guard import TimeIsUp
from course_utils.checks.statements import (
    Cell,
    Statement,
    closure,
    execute,
    parse_strictly,
    show_in_tracebacks,
    statements_of,
)

_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)  # what reading a cell may raise


class NoAnswer(Exception):
    """Says in one sentence why there is nothing to check."""


@dataclass(frozen=True)
class Answer:
    """The code of an answer.

    provided: what the course's own source binds, in place of what the submission does not.
    own: the answer itself, and what it needs of the submission.
    """

    name: str
    provided: list[Statement]
    own: list[Statement]

    def execute(self) -> tuple[Any, list[BaseException]]:
        """What the code binds to the name, and what was raised on the way there: as in a kernel,
        a cell that raises ends, and the next one is executed all the same.

        Raises the first of these errors where nothing is bound to the name.
        """
        namespace: dict[str, Any] = {"__name__": "submission", "__builtins__": builtins}
        for statement in self.provided:
            execute(statement, namespace)
        errors = _execute(self.own, namespace)
        if self.name not in namespace:
            raise errors[0] if errors else NameError(f"name {self.name!r} is not defined")
        return namespace[self.name], errors


def find(exercise: Exercise, cells: list[Cell], texts: Iterable[str]) -> Answer:
    """The answer to an exercise as it is when its check is called in a kernel; `texts` are the
    grade ids of text cells. Executes nothing. Raises NoAnswer."""
    for cell in cells:
        show_in_tracebacks(cell)
    readable, broken = _read(cells)
    statements = [s for _, own in readable[: _end(exercise, readable)] for s in own]
    if not any(exercise.name in s.binds for s in statements):
        raise NoAnswer(_what_is_missing(exercise, readable, broken, texts))
    own = {i for i, s in enumerate(statements) if s.cell.grade_id == grade_id_of(exercise.id)}
    own |= {i for i, s in enumerate(statements) if _imports_everything(s)}
    needed = [statements[i] for i in sorted(closure(statements, own, frozenset([exercise.name])))]
    return Answer(exercise.name, _of_the_course(exercise, _missing(needed, statements)), needed)


_Readable = list[tuple[Cell, list[Statement]]]


def _read(cells: list[Cell]) -> tuple[_Readable, list[tuple[Cell, Exception]]]:
    """The cells with their statements, and those that are no Python with the reason."""
    readable, broken = [], []
    for cell in cells:
        try:
            parse_strictly(cell)
            readable.append((cell, list(statements_of(cell))))
        except _NO_PYTHON as error:
            broken.append((cell, error))
    return readable, broken


def _end(exercise: Exercise, cells: _Readable) -> int:
    """How many cells count: those before the last check, if the answer is among them; else those up to
    the answer's own cell; else, where its metadata is lost, all."""
    grade_id, call = grade_id_of(exercise.id), rf"\bcheck\(\s*['\"]{re.escape(exercise.id)}['\"]"
    defining = [i for i, (_, own) in enumerate(cells) if any(exercise.name in s.binds for s in own)]
    checks = [
        i
        for i, (cell, _) in enumerate(cells)
        if cell.grade_id == f"{grade_id}-check" or re.search(call, cell.source)
    ]
    if after := [i for i in checks if defining and i > defining[0]]:
        return after[-1]
    marked = [i for i in defining if cells[i][0].grade_id == grade_id]
    return marked[-1] + 1 if marked else len(cells)


def _what_is_missing(
    exercise: Exercise,
    readable: _Readable,
    broken: list[tuple[Cell, Exception]],
    texts: Iterable[str],
) -> str:
    grade_id, name = grade_id_of(exercise.id), exercise.name
    for cell, error in broken:
        if cell.grade_id == grade_id or re.search(rf"\b(def|class)\s+{name}\b", cell.source):
            line = getattr(error, "lineno", None)
            place = f"{cell.filename}, line {line}" if line else cell.filename
            return f"{place}: this is not Python ({getattr(error, 'msg', error)})."
    if grade_id in texts:
        return "the cell of the answer is a text cell; turn it into a code cell."
    for cell, _ in readable:
        if cell.grade_id == grade_id:
            return f"{cell.filename}: the cell of the answer does not define {name}."
    return f"the cell of the answer is missing, and no other cell defines {name}."


def _imports_everything(statement: Statement) -> bool:
    """Whether it is `from math import *`: which names that binds, only its execution tells."""
    node = statement.node
    return isinstance(node, ast.ImportFrom) and node.names[0].name == "*"


def _missing(needed: list[Statement], statements: list[Statement]) -> frozenset[str]:
    used = frozenset().union(*(s.uses for s in needed))
    bound = frozenset().union(*(s.binds for s in statements))
    return frozenset(name for name in used - bound if not hasattr(builtins, name))


def _of_the_course(exercise: Exercise, names: frozenset[str]) -> list[Statement]:
    """What the chapter itself binds to the names, with what that needs; never an answer."""
    if not names:
        return []
    cells = [cell for cell in percent_cells(source_of(exercise.id)) if not cell.grade_id]
    statements = [s for cell in cells for s in statements_of(cell)]
    return [statements[i] for i in sorted(closure(statements, set(), names))]


def _execute(statements: list[Statement], namespace: dict[str, Any]) -> list[BaseException]:
    errors: list[BaseException] = []
    ended = None
    for statement in statements:
        if statement.cell is not ended:
            try:
                execute(statement, namespace)
            except TimeIsUp:
                raise
            except BaseException as error:  # noqa: BLE001 - a submission may raise anything
                errors.append(error)
                ended = statement.cell
    return errors
