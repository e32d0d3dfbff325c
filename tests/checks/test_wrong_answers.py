"""Proves the checks: unanswered they say so, solved they pass, and every plausible wrong answer is
rejected with the hint that fits it. A check tells one mistake at a time, so that hint is all it says.

There is one class an exercise, so that `pytest -n2 --dist loadscope` shares them out, and what it tries
is imported when it is tried. The run ends with a table: see exercise_table.py in this folder. The inputs are those of one seed,
COURSE_SEED or 0; `tests/soaks/soak_checks.py` tries many.
"""

import functools

import nbformat
import pytest
from copies import make_copy
from source import read_source

from course_exercises.authoring import load_answer
from course_exercises.checks import examine
from course_exercises.checks.catalogue import find, modules
from course_exercises.checks.learner import render
from course_exercises.sources.answers import source_of
from tests.support.failures import SEED, failures
from tests.wrong_answers import answers_to, load_all

FEWEST_WRONG = 5
HINTS = 3


@functools.cache
def cells_of(source):
    return read_source(source)


@pytest.fixture(scope="session")
def learners_copy(tmp_path_factory):
    """A function from a source to the learner's notebook, as the builder makes it, not executed."""
    folder = tmp_path_factory.mktemp("learner")

    @functools.cache
    def copy(source):
        path = folder / f"{source.stem}.ipynb"
        nbformat.write(make_copy(cells_of(source), "", solved=False), path)
        return path

    return copy


def class_of(exercise_id):
    listed = answers_to(exercise_id)
    wrongs = [each for each in listed if each.names]
    rights = [each for each in listed if not each.names]

    class TestExercise:
        def test_has_enough_hints_and_answers(self):
            exercise = find(exercise_id)
            assert exercise.rules, "an exercise without a requirement accepts everything"
            assert len(exercise.hints) == HINTS
            assert rights, "another right way to write it"
            assert len({each.names for each in wrongs}) >= FEWEST_WRONG, "each with its own mistake"
            answers = load_all(exercise_id)
            named = {name for a in answers for name in (a.names, a.on_nccl) if name}
            assert all(exercise.misconceptions[name] for name in named), "each with its sentence"

        def test_every_answer_that_its_file_makes_is_listed(self):
            made = [each.answer.__name__ for each in load_all(exercise_id)]
            assert made == [each.name for each in listed]

        def test_the_notebook_has_the_same_name_and_points(self):
            exercise, id = find(exercise_id), f"{exercise_id}-check"
            [cell] = [
                c for c in cells_of(source_of(exercise.id)) if c.nbgrader.get("grade_id") == id
            ]
            assert cell.nbgrader["points"] == exercise.points
            assert cell.source == f'check("{exercise.id}", {exercise.name})'

        def test_unanswered_it_says_so(self, learners_copy):
            stub = load_answer(exercise_id, learners_copy(source_of(exercise_id)))
            name = find(exercise_id).name
            assert render(examine(exercise_id, stub)) == f"{exercise_id} {name}: not attempted yet"

        def test_the_solution_passes(self, record_property):
            record_property("solution", exercise_id)
            must_pass(exercise_id, load_answer(exercise_id))

        @pytest.mark.parametrize("right", rights, ids=lambda right: right.name)
        def test_another_right_answer_passes(self, right, record_property):
            record_property("right", exercise_id)
            must_pass(exercise_id, right.load().answer)

        @pytest.mark.parametrize("wrong", wrongs, ids=lambda wrong: f"{wrong.name}-{wrong.names}")
        def test_a_wrong_answer_gets_its_hint(self, wrong, record_property):
            record_property("wrong", exercise_id)
            answer = wrong.load()
            failed = failures(exercise_id, answer.answer)
            assert failed, "it passes"
            if not find(exercise_id).tells(failed[0]):
                record_property("generic", exercise_id)
            assert failed[-1].misconception == answer.named_here, failed

    return TestExercise


def must_pass(exercise_id, answer):
    outcome = examine(exercise_id, answer, SEED)
    assert outcome.status == "passed", render(outcome)


for each in modules():
    globals()[f"TestExercise{each.replace('.', '_')}"] = class_of(each)
