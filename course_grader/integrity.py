"""Notices code that has changed what its check is made of.

A requirement that runs at home (authoring/framework.py says which) shares a process with the answer, which can replace
functions of Python, of PyTorch and of the course there. That changes no other submission's marks, and is seen.
"""

import builtins

__builtins__ = dict(vars(builtins))  # nobody replaces these in what follows

import sys
import types
from collections.abc import Mapping

import course_utils
from course_utils.comm import private

_WATCHED = (
    "builtins",
    "contextlib",
    "math",
    "torch",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.nn.functional",
)
_OF_A_BLOCK = "__enter__", "__exit__"
# With these values are compared.
_COMPARING = (
    *("abs", "sub.Tensor", "add.Tensor", "mul.Tensor", "div.Tensor", "eq.Tensor", "ne.Tensor"),
    *("le.Scalar", "isnan", "bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_not", "sum"),
    *("masked_fill.Scalar", "nonzero", "select.int", "_local_scalar_dense", "_to_copy", "detach"),
    *("clone", "set_.source_Storage", "set_.source_Storage_storage_offset"),
)
_impls, _kernels_of = private.replaced.value, private.kernels_of.value
# A holder, its members, a name, what it means.
_Snapshot = list[tuple[str, Mapping, object, object]]


def snapshot() -> _Snapshot:
    """The functions and classes of Python, of the course and of PyTorch as they are now."""
    found: _Snapshot = []
    for name, module in list(sys.modules.items()):
        own = course_utils.is_of_the_course(name)
        if own or name in _WATCHED:
            _note(found, name, vars(module))
        if name.startswith("course_exercises.authoring"):  # no name of Python's may be taken over
            found += [(name, vars(module), key, vars(module).get(key)) for key in vars(builtins)]
    bases = [vars(base) for base in sys.modules["torch"].Tensor.__mro__]
    for key in {key for base in bases for key in base}:  # those that are inherited, too
        found += [("torch.Tensor", base, key, base.get(key)) for base in bases]
    return [("torch.library", {}, None, _kernels()), *found]


def changed(before: _Snapshot) -> str:
    """The first name that means something else now, or "". What is watched is not asked for help."""
    (operators, _, _, kernels), *entries = before
    for holder, members, key, value in entries:
        if members.get(key) is not value:
            return f"{holder}.{key}"
    return operators if _kernels() != kernels else ""


def functions_of(before: _Snapshot) -> set[int]:
    """The ids of the functions, parts of which could be replaced."""
    return {id(value) for *_, value in before if type(value) is types.FunctionType}


def _kernels():
    """Where operators get other kernels, also those that no Python has noted."""
    tables = [_kernels_of(f"aten::{name}").splitlines() for name in _COMPARING]
    own = [[line for line in table if "Meta" not in line] for table in tables]
    return own, {k for k in _impls if k.startswith("aten/") and "Meta" not in k}


def _note(found, holder, members):
    for key, value in list(members.items()):
        if callable(value):
            found.append((holder, members, key, value))
        # by type(), because PyTorch has objects that warn when they are asked for anything else
        if type(value) is types.FunctionType and value.__kwdefaults__:
            defaults = value.__kwdefaults__
            found += [(f"{holder}.{key}", defaults, name, defaults[name]) for name in defaults]
        if type(value) is type and course_utils.is_of_the_course(value.__module__):
            _note(found, f"{holder}.{key}", vars(value))
        elif issubclass(type(value), type):  # a block of one may swallow what is raised in it
            own = vars(value)
            found += [(f"{holder}.{key}", own, name, own.get(name)) for name in _OF_A_BLOCK]
