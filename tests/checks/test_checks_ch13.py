"""The checks of chapter 13."""

from tests.support.failures import failures
from tests.wrong_answers.ch13.train import lets_the_writer_wait_alone


def test_a_barrier_that_is_told_is_the_answers_own():
    """The training's own meetings are no barriers: one of them met the writer's, and the ranks went on, a step apart."""
    [line] = failures("13.2", lets_the_writer_wait_alone)
    assert line.kind == "mismatch", line.text
