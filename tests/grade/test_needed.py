"""What an answer needs of its notebook is executed for it, and nothing that takes long."""

import ast

import pytest

from course_exercises.sources.answers import grade_id_of
from course_exercises.sources.chapters import chapters
from course_grader import submission
from course_grader.limits import Limits
from course_grader.needed import Needed, statements_of

RUNS = {"launch", "torchrun", "run_in_terminal", "Nodes", "Replicas"}


@pytest.mark.parametrize(
    "source", [path for each in chapters() for path in each.sources], ids=lambda path: path.stem
)
def test_no_answer_needs_the_runs_of_its_chapter(source):
    """A grader would start the same ranks for every exercise again."""
    solved = submission.read_file(source.with_suffix(".ipynb"), Limits().notebook)
    for exercise in solved.exercises:
        grade_ids = [cell.grade_id for cell in solved.cells]
        before = solved.cells[: grade_ids.index(f"{grade_id_of(exercise.id)}-check")]
        kept = Needed(statements_of(before)[0], frozenset({exercise.name}), set()).kept
        assert kept, exercise.id
        assert not [ast.unparse(s.node) for s in kept if calls(s.node) & RUNS], exercise.id


def calls(node):
    """The functions that it calls by name where it is executed, not in a `def`."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return set()
    called = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return {function.id for function in called if isinstance(function, ast.Name)}
