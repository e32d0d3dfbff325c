"""The checks of chapter 12."""

from unittest import mock

from course_exercises.authoring import load_answer
from course_exercises.authoring.framework import attempt
from course_exercises.authoring.guard import undisturbed
from course_exercises.chapters.ch12 import search
from course_exercises.checks import catalogue
from tests.support.failures import failures


def test_orders_are_found_in_few_draws():
    """One was so rare that with this seed it took more than 400, and the right search met its time limit."""
    with undisturbed(), mock.patch.object(search, "_order", wraps=search._order) as drawn:
        lines = attempt(catalogue.find("12.4"), load_answer("12.4"), "w27")
        assert [line.requirement for line in lines if not line.ok] == []
    assert drawn.call_count < 300


def test_what_a_step_was_drawn_with_is_five_lines_at_most():
    """It told sizes of 1, a bubble of 0 and links that no call goes over."""
    right = load_answer("12.3")

    def slow_beside_data_ranks(kernels, calls, *others):
        return right(kernels, calls, *others) + any(call.group == "dp" for call in calls)

    [line] = failures("12.3", slow_beside_data_ranks)
    assert 300 < len(line.expected) < 400, line.expected
