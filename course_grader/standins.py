"""What answers at once while a notebook's cells run: checks, drawings, and all that starts ranks.

A chapter starts ranks a hundred times, and an answer needs hardly any of it. What `launch` gives back is
therefore a `Later`: it starts the ranks where somebody looks at it who may. When the cells have run, everybody
may.
"""

import functools
import importlib
import operator
from collections.abc import Callable
from types import ModuleType
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
_CHECKING = {
    name: ("check", "hint")
    for name in ("course_exercises", "course_exercises.checks", "course_exercises.checks.learner")
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
    for names in (_STARTING, _DRAWING, _CHECKING):
        for name, functions in names.items():
            module = importlib.import_module(name)
            for function in functions:
                setattr(module, function, StandIn(module, function, checked, may_run))


class StandIn:
    """Answers in the place of a module's function; what travels to a rank is that function."""

    def __init__(self, module: ModuleType, name: str, checked: Callable, may_run: Callable):
        self._module, self._name, self._function = module, name, getattr(module, name)
        self._checked, self._may_run = checked, may_run
        self.of_the_checks = module.__name__.startswith("course_exercises")
        functools.update_wrapper(self, self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._module.__name__ in _STARTING:
            call = functools.partial(self._function, *args, **kwargs)
            return call() if self._may_run() else Later(call, self._may_run)
        if self._name == "check":
            exercise_id, answer = _checked(*args, **kwargs)
            self._checked(str(exercise_id), answer)
        return None

    def __reduce__(self) -> tuple:
        return operator.attrgetter(self._name), (self._module,)


def _checked(exercise_id, answer=None):
    return exercise_id, answer
