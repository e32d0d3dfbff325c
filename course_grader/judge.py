"""Makes the verdict, in a process that never holds code of a submission.

The answer lives in the worker. From here it is called through a connection: arguments go there as a
pickle, which this process can be trusted to make, and results come back as plain data (plain.py).
What is expected, the inputs still to come and the verdict are never there. Functions that ranks run
are sent by value, so the worker holds no module of the checks.
"""

import builtins
import io
import json
import math
import operator
import os
import pickle
import re
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import cloudpickle
import torch

from course_exercises import chapters as exercises
from course_exercises.authoring import framework
from course_exercises.authoring.compare import Wrong
from course_exercises.authoring.draw import Draw
from course_exercises.authoring.failures import Elsewhere, Failure
from course_exercises.authoring.framework import Absent, Ended, Exercise, Outcome, judge
from course_exercises.checks import catalogue
from course_exercises.checks.learner import render
from course_grader import home, isolation
from course_grader.plain import Reader
from course_utils.launch import RankFailure

_LONGEST_MESSAGE = 1 << 28  # bytes
_LONGEST_TEXT = 4000  # characters of anything that an answer says
_LONGEST_FEEDBACK = 20_000  # characters: the keeper takes 1 MB of JSON
_RAISABLE = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


class Gone(Ended):
    """The worker has ended."""


class Left(Ended):
    """Code of the submission has ended the process that it was lent."""

    def __init__(self, status: int):
        self.status = status


class Forged(Ended):
    """The worker says what no worker says."""


def main(
    exercise_id: str, variant: int, worker: Connection, lodging: Connection, outcome: int
) -> NoReturn:
    """The whole life of a judge: reads the variant, and writes the outcome of an exercise."""
    code = 1
    try:
        isolation.hide_memory()
        with open(variant, encoding="utf-8") as pipe:
            seed = pipe.read()
        exercise = catalogue.find(exercise_id)
        hand_over_whole()
        try:
            result = _result(exercise, _Line(worker, lodging), seed)
        except Gone:
            result = {"gone": "ended"}
        except Left as left:
            result = {"gone": "left", "status": left.status}
        except Forged:
            result = {"gone": "forged"}
        except Exception as error:  # noqa: BLE001 - nothing of a submission ran here
            result = {"error": f"{type(error).__name__}: {error}"}
        with open(outcome, "w") as pipe:
            pipe.write(json.dumps(result) + "\n")
        code = 0
    finally:
        os._exit(code)


def hand_over_whole() -> None:
    """What a check is made of is sent by value: the worker has none of the exercises' modules."""
    cloudpickle.register_pickle_by_value(exercises)


def _result(exercise: Exercise, line: "_Line", seed: str) -> dict:
    title = f"{exercise.id} {exercise.name}"
    first = line.read()  # before anything of the submission is executed
    if "error" in first:
        return {"error": _text(first["error"])}
    ready = line.read() if "found" in first else first
    again = {"again": bool(ready.get("skipped"))}
    if "missing" in ready:
        feedback = f"{title}: {_text(ready['missing'])}{_skipped(ready)}"
        return {"status": "missing", "feedback": feedback} | again
    if "failed" in ready:
        feedback = f"{title}: before the check, {_text(ready['failed'])}{_skipped(ready)}"
        return {"status": "failed", "feedback": feedback} | again
    answer = None if ready.get("nothing") else _answer_of(exercise, line)
    try:
        outcome = judge(exercise, answer, seed)
    except _Changed as change:
        said = f"the code changes what the check is made of: {_text(change)}."
        return {"status": "stopped", "feedback": f"{title}: {said}"}
    feedback = render(outcome)
    if outcome.status in ("passed", "not attempted"):
        again = {"again": False}
    if outcome.status != "passed":
        feedback += "".join(f"\n  {said}" for said in _lines(ready.get("errors")))
        feedback += _skipped(ready)
    return {
        "status": outcome.status,
        "feedback": feedback[:_LONGEST_FEEDBACK],
        "lines": _met(outcome),
    } | again


def _met(outcome: Outcome) -> list[list]:
    """Each requirement with True, False, or None where it was not looked at; and the mistake."""
    return [[line.requirement, line.ok, line.misconception] for line in outcome.lines]


def _skipped(ready):
    return "".join(f"\n  not run to its end here: {said}" for said in _lines(ready.get("skipped")))


def _lines(value):
    return [_text(said) for said in value[:20]] if isinstance(value, list) else []


def _text(value: object) -> str:
    """Without places in memory, which are others in each run: two gradings are to be alike."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value)[: 2 * _LONGEST_TEXT])[:_LONGEST_TEXT]


class _Changed(Ended):
    """A submission has changed what a check is made of."""


class _Line:
    """The connections to the worker, and to its home (home.py)."""

    def __init__(self, worker: Connection, lodging: Connection):
        self._worker, self._home = worker, lodging
        self._connection = worker  # the one that is asked
        self.said: list[str] = []  # of what was printed at home
        self.met = False  # whether the last requirement there was met

    def read(self) -> dict:
        """The next message, of plain values."""
        return self._read(lambda number, name: _handle(self, number, name))[0]

    def ask(self, kind: str, *rest: Any, arguments: Any = ()) -> Any:
        """Sends a request; returns or raises what comes of it there. `arguments` become what the
        call has made of them."""
        message = _pickled((kind, _seconds_left(), *rest, arguments))
        return self._exchange(self._worker, message, arguments)

    def lodge(self, kind: str, *request: Any) -> Any:
        """Has a requirement or a launch done in a process of its own, in which nothing of the submission has run
        before. What the request refers to is fetched from the worker."""
        inner, numbers = _pickled_with_numbers(request)
        match self.ask("pack", kind, numbers):
            case str(changed):
                raise _Changed(changed)
            case (list(packed), tuple(around)):
                packed = dict(zip(numbers, packed, strict=False))
            case _:
                raise Forged
        try:
            message = pickle.dumps((kind, _seconds_left(), packed, around, inner))
        except Exception:  # noqa: BLE001 - it is to be plain data
            raise Forged from None
        return self._exchange(self._home, message)

    def _exchange(self, connection, message, arguments=()):
        deadline, self._connection = framework.deadline(), connection
        try:
            connection.send_bytes(message)
        except (OSError, EOFError):
            raise Gone from None
        if deadline:
            with deadline.paused():
                reply, reader, tree = self._reply()
        else:
            reply, reader, tree = self._reply()
        value = self._value_of(reader, tree, arguments)
        if deadline:
            spent = reply.get("spent")
            deadline.spend(spent if type(spent) is float and math.isfinite(spent) else 0.0)
        if "changed" in reply:
            raise _Changed(reply["changed"])
        if "left" in reply:
            raise Left(int(reply["left"]))
        self.said += _lines(reply.get("said"))
        if "raised" in reply:
            raise self._raised(reply["raised"])
        return value

    def _raised(self, about):
        try:
            return _raised(about)
        except (TypeError, ValueError, LookupError):
            raise Forged from None

    def _reply(self):
        reply, reader, tree = self._read(lambda number, name: _handle(self, number, name))
        return reply, reader, tree

    def _read(self, handle):
        try:
            said = self._connection.recv_bytes(_LONGEST_MESSAGE)
            if self._connection is self._home:
                self.met, said = said[:1] == home.MET, said[1:]
            reader = Reader(said, handle)
            about, *values = reader.trees
            reply = reader.value(about)
        except ValueError:
            raise Forged from None
        except (OSError, EOFError):
            raise Gone from None
        if not isinstance(reply, dict):
            raise Forged
        return reply, reader, values

    def _value_of(self, reader, tree, arguments):
        """The value of a reply; the arguments first, since it may consist of their parts."""
        if not tree:
            return None
        try:
            changed, value = tree
            if changed is not None:
                for mine, theirs in zip(arguments, changed[2], strict=True):
                    reader.replace(mine, theirs)
            return reader.value(value)
        except (ValueError, TypeError, LookupError):
            raise Forged from None


class _Pickler(cloudpickle.CloudPickler):
    numbers: set[int] | None = None  # of the handles that it meets

    def persistent_id(self, obj):
        if not isinstance(obj, _Handle):
            return None
        if self.numbers is not None:
            self.numbers.add(obj._number)
        return obj._number

    def reducer_override(self, obj):
        if type(obj) is type(torch.ops.aten):  # which a check may keep as a constant
            return operator.attrgetter(f"ops.{obj.name}"), (torch,)
        return super().reducer_override(obj)


def _pickled(value):
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def _pickled_with_numbers(value):
    file = io.BytesIO()
    pickler = _Pickler(file, protocol=5)
    pickler.numbers = set()
    pickler.dump(value)
    return file.getvalue(), sorted(pickler.numbers)


def _seconds_left():
    deadline = framework.deadline()
    return deadline.left if deadline else 60.0


class _Handle:
    """Something in the worker that is no plain data. Its class has the name of that one's."""

    def __init__(self, line: _Line, number: int):
        vars(self).update(_line=line, _number=number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._line.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._line.ask("set", self._number, name, arguments=(value,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._line.ask("call", self._number, kwargs, arguments=args)

    def __iter__(self) -> Any:
        return self._line.ask("iter", self._number)

    def __next__(self) -> Any:
        done, value = self._line.ask("next", self._number)
        if done:
            raise StopIteration
        return value

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return self._line.ask("len", self._number)

    def __getitem__(self, key: Any) -> Any:
        return self._line.ask("item", self._number, arguments=(key,))


def _handle(line: _Line, number: int, name: str) -> _Handle:
    return type(name if name.isidentifier() else "object", (_Handle,), {})(line, number)


def _answer_of(exercise: Exercise, line: _Line) -> Absent:
    return type(exercise.name, (_Answer,), {})(line, 0)


class _Answer(_Handle, Absent):
    """The answer itself."""

    def unfit(self) -> tuple[str, str] | None:
        try:
            found = self._line.ask("unfit")
        except BaseException as error:  # Elsewhere is no exception's class by itself
            if isinstance(
                error, Elsewhere
            ):  # such as an attribute that raises when it is looked at
                return "exception", error.failure.text
            raise
        match found:
            case None:
                return None
            case (str(slug), str(text)):
                return slug, _text(text)
        raise Forged

    def untouched(self) -> bool:
        return self._line.ask("untouched") is True

    def printed(self) -> list[str]:
        return (_lines(self._line.ask("said")) + self._line.said)[:20]

    def run(self, fn: Any, nprocs: int, *args: Any, timeout: float) -> list:
        return self._line.lodge("run", fn, nprocs, timeout, args)

    def at_home(self, requirement: Any, draw: Draw) -> None:
        match self._line.lodge("at home", requirement, draw, self):
            case True if self._line.met:
                return
            case (slug, expected, got):
                raise Wrong(slug, expected=_text_or_none(expected), got=_text_or_none(got))
        raise Forged


def _text_or_none(value):
    return None if value is None else _text(value)


def _raised(about: dict) -> BaseException:
    """An exception like the one that was raised there."""
    if "rank" in about:
        message, rank, kind, line, error, ranks = about["rank"]
        ranks, at = [_text(state) for state in ranks], None if line is None else int(line)
        if rank is not None:
            ranks[rank]  # raises where there is none
        return RankFailure(_text(message), rank, _text(kind), at, _text_or_none(error), ranks)
    kind, error, text = about["failure"]
    failure = Failure(_text(kind), _text_or_none(error), _text(text))
    base = next((_RAISABLE[name] for name in about["names"] if name in _RAISABLE), BaseException)
    known = {"failure": failure, "stub": _text_or_none(about["stub"])}
    try:
        return type(_text(about["name"]), (Elsewhere, base), known)(_text(about["message"]))
    except TypeError:  # such as UnicodeDecodeError, which wants to know more
        return type("Error", (Elsewhere, Exception), known)(_text(about["message"]))
