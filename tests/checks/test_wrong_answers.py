"""Proves the checks: unanswered they say so, solved they pass, and every plausible wrong answer is
rejected with the hint that fits it.

There is one class an exercise, so that `pytest -n2 --dist loadscope` shares them out. The run ends
with a table: see exercise_table.py in this folder. The inputs are those of one seed,
COURSE_SEED or 0; `tests/soaks/soak_checks.py` tries many.
"""

import functools
import os

import nbformat
import pytest
from copies import make_copy
from source import read_source

from course_exercises.authoring import load_answer
from course_exercises.authoring.framework import attempt
from course_exercises.authoring.guard import undisturbed
from course_exercises.checks import examine
from course_exercises.checks.catalogue import exercises
from course_exercises.checks.learner import render
from course_exercises.sources.answers import source_of
from tests.wrong_answers import collect

FEWEST_WRONG = 5
HINTS = 3
SEED = os.environ.get("COURSE_SEED", "0")


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


def class_of(exercise):
    chapter = int(exercise.id.split(".")[0])
    answers = [a for a in collect(chapter) if a.exercise == exercise.id]
    wrongs = [a for a in answers if a.names]
    rights = [a for a in answers if not a.names]

    class TestExercise:
        def test_has_enough_hints_and_answers(self):
            assert exercise.rules, "an exercise without a requirement accepts everything"
            assert len(exercise.hints) == HINTS
            assert rights, "another right way to write it"
            assert len({a.names for a in wrongs}) >= FEWEST_WRONG, "each with its own mistake"
            named = {name for a in wrongs for name in (a.names, a.on_nccl) if name}
            assert all(exercise.misconceptions[name] for name in named), "each with its sentence"

        def test_the_notebook_has_the_same_name_and_points(self):
            id = f"{exercise.id}-check"
            [cell] = [
                c for c in cells_of(source_of(exercise.id)) if c.nbgrader.get("grade_id") == id
            ]
            assert cell.nbgrader["points"] == exercise.points
            assert cell.source == f'check("{exercise.id}", {exercise.name})'

        def test_unanswered_it_says_so(self, learners_copy):
            outcome = examine(
                exercise.id, load_answer(exercise.id, learners_copy(source_of(exercise.id)))
            )
            assert render(outcome) == f"{exercise.id} {exercise.name}: not attempted yet"

        def test_the_solution_passes(self, record_property):
            record_property("solution", exercise.id)
            must_pass(exercise, load_answer(exercise.id))

        @pytest.mark.parametrize("right", rights, ids=name_of)
        def test_another_right_answer_passes(self, right, record_property):
            record_property("right", exercise.id)
            must_pass(exercise, right.answer)

        @pytest.mark.parametrize("wrong", wrongs, ids=names_of)
        def test_a_wrong_answer_gets_its_hint(self, wrong, record_property):
            record_property("wrong", exercise.id)
            failed = failures(exercise, wrong.answer, SEED)
            if not failed or not exercise.misconceptions.get(failed[0].misconception):
                record_property("generic", exercise.id)
            first = next((line for line in failed if line.misconception), None)
            assert first, "no mistake was named"
            assert first.misconception == wrong.named_here, first

    return TestExercise


def failures(exercise, answer, seed):
    """The lines that failed, up to the first that names a mistake."""
    failed = []
    with undisturbed():
        for line in attempt(exercise, answer, seed):
            failed += [line] if line.ok is False else []
            if line.misconception:
                break
    return failed


def name_of(answer):
    return answer.answer.__name__


def names_of(wrong):
    return f"{wrong.answer.__name__}-{wrong.names}"


def must_pass(exercise, answer):
    outcome = examine(exercise.id, answer, SEED)
    assert outcome.status == "passed", render(outcome)


for each in exercises():
    globals()[f"TestExercise{each.id.replace('.', '_')}"] = class_of(each)
