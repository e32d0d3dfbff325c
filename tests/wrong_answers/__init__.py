"""Answers to the exercises that are wrong in a plausible way, and other right ones.

One file an exercise, `tests/wrong_answers/chNN/name.py`, in the place that its check has in
`course_exercises/chapters/`. `tests/checks/test_wrong_answers.py` proves that the check rejects every
wrong one with the hint that fits it, and accepts every right one.

    @wrong("3.1", names="sum-not-mean")     # the first mistake that the check names
    def forgets_to_divide(model): ...

    @right("3.1")
    def averages_one_flat_buffer(model): ...
"""

import importlib
import importlib.util
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle


@dataclass(frozen=True)
class Answer:
    """An answer to try; `names` is the misconception it has, None where it is right. `on_nccl` is what
    it has under NCCL's rules, if they let it end in another way than gloo."""

    exercise: str
    answer: Any
    names: str | None
    on_nccl: str | None = None

    @property
    def named_here(self) -> str | None:
        """The misconception that its check has to name where this process launches ranks."""
        return self.on_nccl if self.on_nccl and _under_rules() else self.names


_answers: list[Answer] = []


def wrong(exercise_id: str, *, names: str, on_nccl: str | None = None) -> Callable:
    """Decorator: a wrong answer, and the misconception that its check must name first. Under
    NCCL's rules that is `on_nccl`, if given: say beside it why."""
    return _adding(exercise_id, names, on_nccl)


def right(exercise_id: str) -> Callable:
    """Decorator: another right way to write the answer."""
    return _adding(exercise_id, None)


def collect(chapter: int) -> list[Answer]:
    """The answers of a chapter, by exercise, in the order in which they are written."""
    name = f"{__name__}.ch{chapter:02d}"
    if importlib.util.find_spec(name) is None:
        return []
    package = importlib.import_module(name)
    # ranks cannot import this folder: send its functions by value, as those of a notebook are
    cloudpickle.register_pickle_by_value(package)
    for file in pkgutil.iter_modules(package.__path__, f"{name}."):
        importlib.import_module(file.name)
    own = [a for a in _answers if a.exercise.split(".")[0] == str(chapter)]
    return sorted(own, key=lambda a: int(a.exercise.split(".")[1]))


def _under_rules() -> bool:
    return os.environ.get("COURSE_RULES") == "nccl"


def _adding(exercise_id: str, names: str | None, on_nccl: str | None = None) -> Callable:
    def add(answer: Any) -> Any:
        _answers.append(Answer(exercise_id, answer, names, on_nccl))
        return answer

    return add
