"""Takes an answer out of a submission, with what it needs, and executes that; nothing else.

Runs in the worker only: even to parse a submission is not the grader's own business.
"""

import builtins
from typing import Any

from course_utils.checks.answers import grade_id_of
from course_utils.checks.framework import Exercise
from course_utils.checks.statements import Cell, closure, execute, statements_of


def load(exercise: Exercise, cells: list[Cell]) -> Any:
    """The answer to an exercise."""
    statements = [s for cell in cells for s in statements_of(cell)]
    own = {i for i, s in enumerate(statements) if s.cell.grade_id == grade_id_of(exercise.id)}
    namespace: dict[str, Any] = {"__name__": "submission", "__builtins__": builtins}
    for i in sorted(closure(statements, own, frozenset([exercise.name]))):
        execute(statements[i], namespace)
    return namespace[exercise.name]
