"""Proves the checks: unanswered they say so, solved they pass, and every plausible wrong answer is
rejected with the hint that fits it.

There is one class a chapter, so that `pytest -n2 --dist loadscope` shares them out. The run ends
with a line for each exercise: see conftest.py in this folder.
"""

import functools

import nbformat
import pytest
from copies import make_copy
from source import read_source

from course_utils.checks import examine, load_answer
from course_utils.checks.catalogue import chapters, exercises, root
from course_utils.checks.learner import render
from tests.wrong_answers import collect

FEWEST_WRONG = 4
HINTS = 3


def _chapter_of(exercise):
    return int(exercise.id.split(".")[0])


@pytest.fixture(scope="session")
def learners_copies(tmp_path_factory):
    """A function from chapter to the learner's notebook, as the builder makes it, not executed."""
    folder = tmp_path_factory.mktemp("learner")

    @functools.cache
    def copy(chapter):
        path = folder / f"{chapter:02d}.ipynb"
        nbformat.write(make_copy(_cells(chapter), "", solved=False), path)
        return path

    return copy


@functools.cache
def _cells(chapter):
    return read_source(next((root() / "solutions").glob(f"{chapter:02d}_*.py")))


def _tests_of(chapter):
    mine = [e for e in exercises() if _chapter_of(e) == chapter]
    answers = collect(chapter)
    each = pytest.mark.parametrize("exercise", mine, ids=lambda e: e.id)

    class TestChapter:
        @each
        def test_has_enough_hints_and_answers(self, exercise):
            wrong = [a for a in answers if a.exercise == exercise.id and a.names]
            right = [a for a in answers if a.exercise == exercise.id and not a.names]
            assert len(exercise.hints) == HINTS
            assert exercise.rules, "an exercise without a requirement accepts everything"
            assert len({a.names for a in wrong}) >= FEWEST_WRONG, "each with a mistake of its own"
            assert right, "another right way to write it"
            for answer in wrong:
                assert exercise.misconceptions[answer.names], "names a mistake with a sentence"

        @each
        def test_the_notebook_has_the_same_name_and_points(self, exercise):
            id = f"{exercise.id}-check"
            [cell] = [c for c in _cells(chapter) if c.nbgrader.get("grade_id") == id]
            assert cell.nbgrader["points"] == exercise.points
            assert cell.source == f'check("{exercise.id}", {exercise.name})'

        @each
        def test_unanswered_it_says_so(self, exercise, learners_copies):
            stub = load_answer(exercise.id, learners_copies(chapter))
            outcome = examine(exercise.id, stub)
            assert render(outcome) == f"{exercise.id} {exercise.name}: not attempted yet"

        @each
        def test_the_solution_passes(self, exercise, record_property):
            record_property("points", (exercise.id, exercise.name, exercise.points))
            _must_pass(exercise.id, load_answer(exercise.id))

        @pytest.mark.parametrize(
            "right", [a for a in answers if not a.names], ids=lambda a: _label(a)
        )
        def test_another_right_answer_passes(self, right, record_property):
            record_property("right", right.exercise)
            _must_pass(right.exercise, right.answer)

        @pytest.mark.parametrize("wrong", [a for a in answers if a.names], ids=lambda a: _label(a))
        def test_a_wrong_answer_gets_its_hint(self, wrong, record_property):
            record_property("wrong", wrong.exercise)
            outcome = examine(wrong.exercise, wrong.answer)
            text = f"COURSE_SEED={outcome.seed}\n{render(outcome)}"
            assert outcome.status == "failed", text
            assert outcome.misconceptions[:1] == [wrong.names], text

    return TestChapter


def _label(answer):
    return f"{answer.exercise}-{answer.answer.__name__}"


def _must_pass(exercise_id, answer):
    outcome = examine(exercise_id, answer)
    assert outcome.status == "passed", f"COURSE_SEED={outcome.seed}\n{render(outcome)}"
    assert not outcome.misconceptions


for _chapter in chapters():
    globals()[f"TestChapter{_chapter:02d}"] = _tests_of(_chapter)
