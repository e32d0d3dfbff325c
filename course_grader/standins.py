"""What answers at once while a notebook's cells run: checks, drawings, and all that starts ranks.

A chapter starts ranks a hundred times, and an answer needs hardly any of it. What `launch` gives back is
therefore a `Later`: it starts the ranks where somebody looks at it who may. When the cells have run, everybody
may.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

_STARTING = {
    "course_utils.launch": ("launch",),
    "course_utils.lesson.terminal": ("run_in_terminal", "torchrun"),
}
_DRAWING = {
    "matplotlib.pyplot": ("show",),
    "course_utils.lesson.explore": ("Explorer",),
    "course_exercises.checks.course_map": ("progress_map",),
}
IMPORTED = ("IPython", *_STARTING, *_DRAWING)


class NotRun(BaseException):
    """Ends a statement that needs what nothing has been started for; in the notebook it would not end."""


class Later:
    """What a call will return, in its place."""

    def __init__(self, call: Callable[[], Any], may_run: Callable[[], bool]):
        self._call, self._may_run = functools.cache(call), may_run

    def _value(self) -> Any:
        if not self._may_run():
            raise NotRun
        return self._call()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(
            "__"
        ):  # who looks whether there is such a method does not want the value
            raise AttributeError(name)
        return getattr(self._value(), name)

    def __radd__(self, other: Any) -> Any:
        return other + self._value()

    def __reduce__(self) -> tuple:
        return _itself, (self._value(),)


def _itself(value):
    return value


def _forwarded(name):
    def forward(self: Later, *arguments: Any) -> Any:
        return getattr(self._value(), name)(*arguments)

    return forward


for _name in (
    *("enter", "exit", "iter", "len", "getitem", "contains", "reversed", "repr", "str", "format"),
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "add", "mul", "rmul"),
):
    setattr(Later, f"__{_name}__", _forwarded(f"__{_name}__"))


def install(checked: Callable[[str, Any], None], may_run: Callable[[], bool]) -> None:
    """Puts them in place of the course's own. `checked` gets what a cell checks."""
    for name in ("course_exercises", "course_exercises.checks", "course_exercises.checks.learner"):
        module = importlib.import_module(name)
        module.check = lambda exercise_id, answer=None: checked(str(exercise_id), answer)
        module.hint = lambda exercise_id: None
    for name, functions in _STARTING.items():
        module = importlib.import_module(name)
        for function in functions:
            setattr(module, function, _later(getattr(module, function), may_run))
    for name, functions in _DRAWING.items():
        module = importlib.import_module(name)
        for function in functions:
            setattr(module, function, lambda *_, **__: None)


def _later(function, may_run):
    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        call = functools.partial(function, *args, **kwargs)
        return call() if may_run() else Later(call, may_run)

    return stand_in
