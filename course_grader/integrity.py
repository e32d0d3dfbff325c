"""Notices a submission that changes what its check is made of.

A requirement that runs at home (authoring/framework.py says which) shares a process with the answer,
so an answer can replace functions there. That changes no other submission's marks, and here it is
seen. Who reads this can get around it: an answer that nobody trusts is read by a person.
"""

import sys
import types

import course_utils
from course_utils.comm import private

_WATCHED = (
    "builtins",
    "math",
    "torch",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.nn.functional",
)
_Snapshot = dict[str, tuple[object, object]]


def snapshot() -> _Snapshot:
    """The functions and classes of Python, of the course and of PyTorch as they are now, by their
    names."""
    found: _Snapshot = {}
    for name, module in list(sys.modules.items()):
        if course_utils.is_of_the_course(name) or name in _WATCHED:
            _note(found, name, vars(module))
    methods: dict[str, object] = {}
    for base in reversed(sys.modules["torch"].Tensor.__mro__):
        methods.update(vars(base))  # many are inherited, and could be overridden
    _note(found, "torch.Tensor", methods)
    impls = private.replaced.value  # where operators get other kernels
    kernels = frozenset(k for k in impls if k.startswith("aten/") and "Meta" not in k)
    found["torch.library"] = (kernels, None)
    return found


def changed(before: _Snapshot) -> list[str]:
    """The names that mean something else now."""
    now = snapshot()
    return sorted(name for name in before if now.get(name) != before[name])


def names_of(function: types.FunctionType) -> dict[str, tuple[object, object]]:
    """The functions and classes that a function finds by their names: it came here by itself, with a
    copy of its module's names."""
    named = function.__globals__.items()
    return {key: (value, _inside(value)) for key, value in named if callable(value)}


def replaced(function: types.FunctionType, before: dict[str, tuple[object, object]]) -> list[str]:
    """Those of the names that mean something else now."""
    now = names_of(function)
    return sorted(key for key in before if now.get(key) != before[key])


def _note(found, holder, members):
    for key, value in list(members.items()):
        if callable(value):
            found[f"{holder}.{key}"] = (value, _inside(value))
        if type(value) is type and course_utils.is_of_the_course(value.__module__):
            _note(found, f"{holder}.{key}", vars(value))


def _inside(value):
    """What can be replaced in a function that stays the same object."""
    # by type(), because PyTorch has objects that warn when they are asked for anything else
    if type(value) is not types.FunctionType:
        return None
    return value.__code__, value.__defaults__, dict(value.__kwdefaults__ or {})
