"""Answers to the exercises that are wrong in a plausible way, and other right ones.

One module a chapter, `tests/wrong_answers/chNN.py`. `tests/test_wrong_answers.py` proves that the
check rejects every wrong one with the hint that fits it, and accepts every right one.

    @wrong("3.1", names="sum-not-mean")     # the first mistake that the check names
    def forgets_to_divide(model): ...

    @right("3.1")
    def averages_one_flat_buffer(model): ...
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle


@dataclass(frozen=True)
class Answer:
    """An answer to try; `names` is the misconception it has, None where it is right."""

    exercise: str
    answer: Any
    names: str | None


_answers: list[Answer] = []


def wrong(exercise_id: str, *, names: str) -> Callable:
    """Decorator: a wrong answer, and the misconception that its check must name first."""
    return _adding(exercise_id, names)


def right(exercise_id: str) -> Callable:
    """Decorator: another right way to write the answer."""
    return _adding(exercise_id, None)


def collect(chapter: int) -> list[Answer]:
    """The answers of a chapter, in the order in which they are written."""
    name = f"tests.wrong_answers.ch{chapter:02d}"
    if importlib.util.find_spec(name) is None:
        return []
    module = importlib.import_module(name)
    # ranks cannot import this folder: send its functions by value, as those of a notebook are
    cloudpickle.register_pickle_by_value(module)
    return [a for a in _answers if a.exercise.split(".")[0] == str(chapter)]


def _adding(exercise_id: str, names: str | None) -> Callable:
    def add(answer: Any) -> Any:
        _answers.append(Answer(exercise_id, answer, names))
        return answer

    return add
