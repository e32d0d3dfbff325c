"""Answers to the exercises that are wrong in a plausible way, and other right ones.

One file an exercise, `tests/wrong_answers/chNN/name.py`, in the place that its check has in
`course_exercises/chapters/`. `tests/checks/test_wrong_answers.py` proves that the check rejects every
wrong one with the hint that fits it, and accepts every right one.

    @wrong("3.1", names="sum-not-mean")     # the mistake that the check names
    def forgets_to_divide(model): ...

    @right("3.1")
    def averages_one_flat_buffer(model): ...

    cannot_run = wrong("5.3", names="cannot-run")(spoilt(schedule, "cannot-run"))    # made, not written
    usual("3.1", averages_one_flat_buffer, "sum-not-mean", "not-waited")    # by tests.wrong_answers.makers

Each sentence has one wrong answer here, and a second where two are easily mistaken for each other. Rarer
forms go to `tests/wrong_answers/corpus/`, as `rarer("3.1")`: `tests/soaks/soak_checks.py` proves that they are
rejected, whatever the check calls them.

Which answers there are is read from the text, so that no test imports an answer but to try it: these
functions are called as above, with literals, once for an answer of that name.
"""

import ast
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from course_exercises.checks import catalogue
from tests.wrong_answers import makers


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


@dataclass(frozen=True)
class Listed:
    """What the text says of an answer: its name, and the misconception as in `Answer`."""

    exercise: str
    name: str
    names: str | None = None

    def load(self) -> Answer:
        """The answer itself."""
        [answer] = [a for a in load_all(self.exercise) if a.answer.__name__ == self.name]
        return answer


_answers: list[Answer] = []
ANY = "any"  # the mistake of an answer for which only that it is rejected counts


def wrong(exercise_id: str, *, names: str, on_nccl: str | None = None) -> Callable:
    """Decorator: a wrong answer, and the misconception that its check must name. Under
    NCCL's rules that is `on_nccl`, if given: say beside it why."""
    return _adding(exercise_id, names, on_nccl)


def usual(exercise_id: str, answer: Callable, *names: str) -> None:
    """Wrong answers with mistakes of the vocabulary, each made of a right answer by its maker; that of the
    mistake "not-waited" is called `not_waited`."""
    for name in names:
        made = makers.MAKERS[name](answer)
        made.__name__ = _function_of(name)
        _adding(exercise_id, name)(made)


def _function_of(mistake: str) -> str:
    return mistake.replace("-", "_")


def rarer(exercise_id: str) -> Callable:
    """Decorator: a wrong answer of the corpus, which its check must reject, under any name."""
    return _adding(exercise_id, ANY)


def right(exercise_id: str) -> Callable:
    """Decorator: another right way to write the answer."""
    return _adding(exercise_id, None)


def answers_to(exercise_id: str) -> list[Listed]:
    """The answers to an exercise, in the order in which they are written. Nothing is imported."""
    listed = _listed(_file(_module(exercise_id)))
    return [each for each in listed if each.exercise == exercise_id]


def load_all(exercise_id: str) -> list[Answer]:
    """The answers to an exercise, in the order in which their file makes them."""
    _import(_module(exercise_id))
    return [a for a in _answers if a.exercise == exercise_id and a.names != ANY]


def load_corpus(exercise_id: str) -> list[Answer]:
    """The rarer wrong answers to an exercise, if it has any."""
    name = _module(exercise_id)
    _import(name)
    rarer_ones = name.replace(__name__, f"{__name__}.corpus")
    if _file(rarer_ones).exists():
        _import(rarer_ones)
    return [a for a in _answers if a.exercise == exercise_id and a.names == ANY]


def _import(name: str) -> None:
    """Imports answers. Ranks cannot import this folder: its functions are sent by value, as those of a
    notebook are."""
    module = importlib.import_module(name)
    for sent in (importlib.import_module(module.__package__), makers):
        cloudpickle.register_pickle_by_value(sent)


def _file(module: str) -> Path:
    return Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")


def _module(exercise_id: str) -> str:
    chapter, name = catalogue.modules()[exercise_id].split(".")[-2:]
    return f"{__name__}.{chapter}.{name}"


@functools.cache
def _listed(file: Path) -> list[Listed]:
    return [
        listed
        for name, call in _calls(ast.parse(file.read_text(encoding="utf-8")))
        for listed in _of_call(name, call)
    ]


def _of_call(name: str, call: ast.Call) -> Iterator[Listed]:
    """What one call of `wrong`, `right` or `usual` lists."""
    function = getattr(call.func, "id", "")
    if function in ("wrong", "right"):
        names = (keyword.value.value for keyword in call.keywords if keyword.arg == "names")
        yield Listed(call.args[0].value, name, *names)
    elif function == "usual":
        for mistake in call.args[2:]:
            yield Listed(call.args[0].value, _function_of(mistake.value), mistake.value)


def _calls(module: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """The names that a module binds, and the calls that decorate or make what they are bound to."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from ((node.name, d) for d in node.decorator_list if isinstance(d, ast.Call))
        elif isinstance(node, ast.Assign) and isinstance(
            made := getattr(node.value, "func", None), ast.Call
        ):
            yield node.targets[0].id, made
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield "", node.value


def _under_rules() -> bool:
    return os.environ.get("COURSE_RULES") == "nccl"


def _adding(exercise_id: str, names: str | None, on_nccl: str | None = None) -> Callable:
    def add(answer: Any) -> Any:
        _answers.append(Answer(exercise_id, answer, names, on_nccl))
        return answer

    return add
