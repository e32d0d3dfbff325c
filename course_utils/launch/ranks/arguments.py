"""What launch accepts, and one sentence for everything else."""

import errno
import inspect
import operator
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from course_utils.comm import versions

MOST_RANKS = 64
_RULES = ("nccl",)
LONGEST = 7 * 24 * 3600  # seconds: gloo counts milliseconds in 32 bits
_FILES_OF_A_RANK, _FILES_OF_A_CALL = 6, 24  # three channels, two ends of multiprocessing's, a pidfd


@dataclass(frozen=True)
class OwnPart:
    """An argument of launch of which each rank is sent its own part, and nothing of the others'."""

    parts: Sequence[Any]


def of_ranks(args: tuple, kwargs: dict, nprocs: int) -> list[tuple[tuple, dict]]:
    """Returns the arguments of each rank: the same object for all, where none has its own part."""
    if not any(isinstance(value, OwnPart) for value in (*args, *kwargs.values())):
        return [(args, kwargs)] * nprocs

    def part(value, rank):
        return value.parts[rank] if isinstance(value, OwnPart) else value

    return [
        (tuple(part(v, rank) for v in args), {name: part(v, rank) for name, v in kwargs.items()})
        for rank in range(nprocs)
    ]


def check_call(fn, args: tuple, kwargs: dict, own: dict) -> None:
    """Raises TypeError, with what is expected, for what no rank could call. `own`: launch's own keywords
    with what was given for them."""
    about = "launch(fn, nprocs, ...): fn is a function that every rank calls with its number"
    if inspect.isclass(fn):
        raise TypeError(f"{about}; {fn.__name__} is a class.")
    if not callable(fn):
        raise TypeError(
            f"{about}, not {_short(fn)} of type {type(fn).__name__}; pass the function itself, "
            "without calling it."
        )
    _check_signature(fn, args, kwargs, own)


def check_ranks(nprocs, timeout) -> int:
    """Returns `nprocs` as an int; raises TypeError or ValueError with what is expected, and OSError where
    so many ranks cannot be started."""
    _check_timeout(timeout)
    number = _number_of_ranks(nprocs)
    try:
        os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            "launch: the folder in which this process works has been deleted; go to another one "
            "with os.chdir, or restart the kernel."
        ) from None
    _check_files(number)
    return number


def _number_of_ranks(nprocs):
    about = "launch(fn, nprocs, ...): nprocs is the number of ranks"
    try:
        if isinstance(nprocs, bool):
            raise TypeError
        number = operator.index(nprocs)
    except TypeError:
        raise TypeError(
            f"{about}, a whole number from 1 to {MOST_RANKS}, "
            f"not {_short(nprocs)} of type {type(nprocs).__name__}."
        ) from None
    if not 1 <= number <= MOST_RANKS:
        raise ValueError(f"{about}, from 1 to {MOST_RANKS}, not {number}.")
    return number


def _check_files(nprocs):
    """All at the beginning: without a free file nothing could be tidied up either."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_OF_A_RANK * nprocs + _FILES_OF_A_CALL
    try:
        open_now = len(os.listdir("/dev/fd"))
    except OSError as error:
        if error.errno != errno.EMFILE:
            return  # this system does not tell
        open_now = most
    if open_now + needed > most:
        raise OSError(
            errno.EMFILE,
            f"launch needs {needed} open files for {nprocs} ranks; this process has {open_now} "
            f"and may have {most}. Close some, or raise the limit (ulimit -n) and start again",
        )


def check_rules(rules, backend) -> str | None:
    """Returns the rules to launch under: those given, else those of the environment; with gloo, none.
    Raises ValueError for what cannot be asked for."""
    if backend not in (None, "gloo"):
        raise ValueError(f'launch(backend=...) is "gloo" or not given, not {_short(backend)}.')
    if backend and rules:
        raise ValueError(
            f"launch: backend={backend!r} and rules={rules!r} exclude each other; leave one out."
        )
    if backend:
        return None
    given = os.environ.get("COURSE_RULES") or None if rules is None else rules
    if given is not None and given not in _RULES:
        raise ValueError(
            f'launch(rules=...), or COURSE_RULES, is "nccl" or not given, not {_short(given)}.'
        )
    if given and versions.older_than(oldest := rules_called(given).OLDEST):
        raise RuntimeError(
            f"launch(rules=...), or COURSE_RULES, needs PyTorch {oldest} or newer, and "
            f"{versions.installed()} is installed."
        )
    return given


def rules_called(name: str) -> ModuleType:
    """What replays these rules: OLDEST, of PyTorch; install(), in a rank that has joined no group yet,
    which returns the rank's device."""
    (found,) = entry_points(group="course_utils.rules", name=name)
    return found.load()


def _check_timeout(timeout):
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"launch(timeout=...) is a number of seconds, not {_short(timeout)}.")
    if not 0 < timeout <= LONGEST:
        raise ValueError(
            f"launch(timeout=...) is a positive number of seconds, at most {LONGEST:,}, which is a "
            f"week, and not {_short(timeout)}."
        )


def _check_signature(fn, args, kwargs, own):
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # some callables written in C do not tell
    name = getattr(fn, "__name__", type(fn).__name__)
    for keyword in list(signature.parameters)[1 + len(args) :]:
        if own.get(keyword) not in (None, False):
            raise TypeError(
                f"{keyword}= is launch's own, and {name} has a parameter of that name: pass the "
                f"function's by position, launch(fn, nprocs, ...), or give it another name."
            )
    try:
        signature.bind(0, *args, **kwargs)
    except TypeError as error:
        given = ["rank", *(f"argument {i + 1}" for i in range(len(args)))]
        given += [f"{keyword}=..." for keyword in kwargs]
        raise TypeError(
            f"launch calls {name}({', '.join(given)}), but it is defined as {name}{signature}: {error}. "
            f"The first parameter is the rank, the others are launch's further arguments"
            + (f"; {', '.join(own)} are launch's own." if own else ".")
        ) from None


def _short(value):
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
