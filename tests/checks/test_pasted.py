"""An exercise asks for something that its lesson does not show: what the lesson's own cells define, given
as the answer, does not pass, and an answer of two parameters does not in the other order either."""

import ast
import builtins
import inspect
from collections.abc import Iterator

import pytest

from course_exercises.authoring import load_answer
from course_exercises.authoring.framework import attempt
from course_exercises.authoring.guard import undisturbed
from course_exercises.checks.catalogue import find, modules
from course_exercises.sources.answers import grade_id_of, percent_cells, source_of
from course_utils.lesson.statements import Statement, closure, execute, statements_of

# Loops and what else a lesson does are not repeated for a definition.
DEFINING = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def before_check(exercise_id: str) -> list[Statement]:
    """What is defined in the cells before an exercise's check, but for its answer."""
    own, found = grade_id_of(exercise_id), []
    for cell in percent_cells(source_of(exercise_id)):
        if cell.grade_id == f"{own}-check":
            return found
        if cell.grade_id != own:
            found += [s for s in statements_of(cell) if isinstance(s.node, DEFINING)]
    raise AssertionError(f"{exercise_id} has no check")


def pasted(exercise_id: str) -> Iterator[tuple[str, object]]:
    """The lesson's own code as answers of the same kind that take as many parameters."""
    solution, statements = load_answer(exercise_id), before_check(exercise_id)
    count = len(inspect.signature(solution).parameters)
    kind = ast.ClassDef if isinstance(solution, type) else ast.FunctionDef
    lessons = [s.node for s in statements if not s.cell.grade_id and isinstance(s.node, kind)]
    for name in dict.fromkeys(node.name for node in lessons if may_take(node, count)):
        namespace = {"__name__": "lesson", "__builtins__": builtins}
        for i in sorted(closure(statements, set(), frozenset([name]))):
            execute(statements[i], namespace)
        answer = namespace[name]
        if takes(answer, count):
            yield name, answer
            if count == 2 and kind is ast.FunctionDef:
                yield f"{name}, turned", lambda a, b, answer=answer: answer(b, a)


def may_take(node: ast.FunctionDef | ast.ClassDef, count: int) -> bool:
    """Whether a definition may take so many parameters, so that it need not be executed to know."""
    if isinstance(node, ast.ClassDef):
        return True
    given = node.args.posonlyargs + node.args.args
    return len(given) - len(node.args.defaults) <= count and (
        count <= len(given) or node.args.vararg is not None
    )


def takes(answer: object, count: int) -> bool:
    try:
        inspect.signature(answer).bind(*range(count))
    except (TypeError, ValueError):  # or it has no signature
        return False
    return True


def passes(exercise_id: str, answer: object) -> bool:
    """Whether a check accepts an answer; it ends at the first requirement that is not met."""
    with undisturbed():
        return all(line.ok for line in attempt(find(exercise_id), answer, "0"))


@pytest.mark.parametrize("exercise_id", modules())
def test_what_a_lesson_defines_does_not_pass(exercise_id):
    assert [name for name, answer in pasted(exercise_id) if passes(exercise_id, answer)] == []
