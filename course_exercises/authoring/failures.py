"""Turns an exception from a learner's code into a sentence with the learner's own line.

Keys of `failures=` for a hang quote its own words ("waits in recv"), which an exception beside a
waiting rank does not contain.
"""

import traceback
from dataclasses import dataclass

from course_exercises.authoring.guard import TimeIsUp
from course_utils.launch import RankFailure
from course_utils.launch.story.frames import Frame, own

_UNUSABLE = "the check could not use what your answer gave"
_NAMED = "the check calls your answer with its parameters' names, which are those of the stub"
_NO_PYTHON = ("SyntaxError", "IndentationError", "TabError")  # a script's: no rank has run a line


@dataclass(frozen=True)
class Failure:
    """What went wrong: the kind, as in RankFailure, or "endless"; the exception's name; a sentence,
    on the next lines the learner's code."""

    kind: str
    error: str | None
    text: str


class Elsewhere:
    """Besides a kind of exception, the base of what was raised in another process and explained
    there: `failure`, and `stub`, the sentence of `explain_stub` or None."""

    failure: Failure
    stub: str | None


def explain(error: BaseException, seconds: float) -> Failure:
    """Explains an exception that ended a requirement with a time limit of `seconds`."""
    if isinstance(error, Elsewhere):
        return error.failure
    if isinstance(error, RankFailure):
        return _explain_rank(error)
    frame = _learners_frame(error)
    place = f"\n  {frame.place}, in {frame.function}:  {frame.source}" if frame else ""
    if isinstance(error, TimeIsUp):
        return Failure("endless", None, f"still running after {seconds:g} seconds{place}")
    if isinstance(error, SystemExit):
        return Failure(
            "exit", "SystemExit", f"your code left Python with exit({error.code}){place}"
        )
    name = type(error).__name__
    message = " ".join(str(error).split())
    what = f"{name}: {_cut(message)}" if message else name
    inside = "".join(each.file for each in _frames(error)[-1:])
    return Failure("exception", name, f"{what}{place}" if place else _without_a_line(what, inside))


def _explain_rank(error: RankFailure) -> Failure:
    text = str(error)
    if error.kind == "timeout" and error.ranks[error.rank].startswith("was running"):
        return Failure("endless", None, text)
    if error.error in _NO_PYTHON:
        text = text.partition(" raised ")[2]
    elif error.kind == "exception" and error.line is None:
        text = _without_a_line(text)
    return Failure(error.kind, error.error, text)


def _without_a_line(what: str, inside: str = "") -> str:
    """What was raised where the check called the answer, or used what it gave, perhaps `inside` of a library."""
    named = "unexpected keyword argument" in what and "-packages/" not in inside
    return f"{_NAMED if named else _UNUSABLE}: {what}"


def is_stub(error: BaseException) -> bool:
    """Whether the exception comes from an answer that still is, or has, the course's stub."""
    if isinstance(error, Elsewhere):
        return error.stub is not None
    if isinstance(error, RankFailure):
        return error.error == "NotImplementedError" and "raise NotImplementedError" in str(error)
    if not isinstance(error, NotImplementedError) or error.args:
        return False
    frames = _frames(error)
    return bool(frames) and own(frames[-1:]) == frames[-1:]


def explain_stub(error: BaseException) -> str:
    """The sentence for an answer that is done in part."""
    if isinstance(error, Elsewhere):
        return error.stub
    line = error.line if isinstance(error, RankFailure) else _learners_frame(error).line
    return f"a part that this needs is not written yet: line {line} raises NotImplementedError"


def _learners_frame(error: BaseException) -> Frame | None:
    """The innermost line that is the learner's."""
    return next(iter(own(_frames(error))[::-1]), None)


def _frames(error: BaseException) -> list[Frame]:
    summary = traceback.extract_tb(error.__traceback__)
    return [Frame(f.filename, f.lineno, f.name) for f in summary]


def _cut(text: str, width: int = 160) -> str:
    return text if len(text) <= width else text[: width - 4] + " ..."
