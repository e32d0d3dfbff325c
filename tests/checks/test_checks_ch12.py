"""The checks of chapter 12."""

from course_exercises.authoring import load_answer
from course_exercises.authoring.framework import attempt
from course_exercises.authoring.guard import undisturbed
from course_exercises.checks import catalogue


def test_an_order_that_is_rare_is_found():
    """With this seed it took more than 400 draws, and the right search was refused for that."""
    with undisturbed():
        lines = attempt(catalogue.find("12.4"), load_answer("12.4"), "w27")
    assert [line.requirement for line in lines if not line.ok] == []
