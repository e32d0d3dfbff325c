"""An answer as bytes for its home (home.py). In a notebook it stays where its cells have made it. So more travels than to
a rank: locks, log files, modules of the learner's own as they are now, and the names that a function looks up by a text.
"""

import io
import operator
import sys
import threading
import weakref
from types import CodeType, ModuleType

import cloudpickle
import IPython
from IPython.core.interactiveshell import InteractiveShell

from course_exercises.authoring.guard import Printed
from course_grader import home, standins
from course_utils.launch.ranks import packing
from course_utils.launch.story import frames

_BEFORE = frozenset(sys.modules)  # none of these is a learner's
_LOCKS = {type(make()): make for make in (threading.Lock, threading.RLock)}
_LARGEST = 1 << 20  # bytes
_BY_TEXT = frozenset({"eval", "exec", "globals", "get_type_hints"})


def pack(value: object) -> list:
    """As `packing.pack`. Modules that a cell has written, and changed or deleted since, are not imported again."""
    own = [module for name, module in [*sys.modules.items()] if _is_own(name, module)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        return packing.pack(value, _WithNames)
    except Exception:  # two that import each other, for one, cannot travel
        if not own:
            raise
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)
    return packing.pack(value, _WithNames)


def _is_own(name, module):
    if name in _BEFORE or type(module) is not ModuleType or module.__name__ != name:
        return False
    file = getattr(module, "__file__", None)
    return type(file) is str and frames.is_own(file)


class _Pickler(packing.Pickler):
    def reducer_override(self, obj):
        kind = type(obj)
        if kind in _LOCKS:  # nobody holds it there
            return _LOCKS[kind], ()
        if kind is io.TextIOWrapper and obj.mode in ("w", "x", "a"):
            return open, (obj.name, "a")
        if issubclass(kind, InteractiveShell):  # `!ls` asks for it
            return IPython.get_ipython, ()
        if kind is weakref.WeakKeyDictionary:  # singledispatch has one
            return kind, (dict(obj),)
        if kind is Printed:  # sys.stdout, which is another one there
            return operator.attrgetter("stdout"), (sys,)
        if kind is standins.StandIn and obj.of_the_checks:
            return operator.attrgetter("format"), ("",)  # it takes all and does nothing
        return super().reducer_override(obj)


class _WithNames(_Pickler):
    def _dynamic_function_reduce(self, func):
        reduced = super()._dynamic_function_reduce(func)
        if not _BY_TEXT.isdisjoint(_names_in(func.__code__)):
            names = func.__globals__.items()
            found = {name: value for name, value in names if name[:1] != "_" and _travels(value)}
            reduced[2][1]["__globals__"].update(found)
        return reduced


def _names_in(code):
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names_in(part)


def _travels(value):
    """Whether it can, is no data set, and is nothing of what checks an answer."""
    try:
        stream, *buffers = packing.pack(value, _Pickler)
    except Exception:  # noqa: BLE001 - pickling runs anybody's code
        return False
    small = len(stream) + sum(map(len, buffers)) < _LARGEST
    return small and not any(name.encode() in stream for name in home.HIDDEN)
