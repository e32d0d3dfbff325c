"""Turns an exception from a learner's code into one sentence with the learner's own line."""

import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

from course_utils.checks.guard import TimeIsUp
from course_utils.launch import RankFailure

_NOT_THE_LEARNERS = tuple(
    str(folder)
    for folder in (
        Path(__file__).parents[1],
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    )
)
_UNUSABLE = "the check could not use what your answer gave"


@dataclass(frozen=True)
class Failure:
    """What went wrong: the kind, as in RankFailure, or "endless"; the exception's name; one
    sentence."""

    kind: str
    error: str | None
    text: str


def explain(error: BaseException, seconds: float) -> Failure:
    """Explains an exception that ended a requirement with a time limit of `seconds`."""
    if isinstance(error, RankFailure):
        text = str(error)
        if error.kind == "timeout" and error.ranks[error.rank].startswith("was running"):
            return Failure("endless", None, text)
        if error.kind == "exception" and error.line is None:
            text = f"{_UNUSABLE}: {text}"
        return Failure(error.kind, error.error, text)
    place = _place(error)
    if isinstance(error, TimeIsUp):
        return Failure("endless", None, f"still running after {seconds:g} seconds{place}")
    if isinstance(error, SystemExit):
        return Failure(
            "exit", "SystemExit", f"your code left Python with exit({error.code}){place}"
        )
    name = type(error).__name__
    message = " ".join(str(error).split())
    what = f"{name}: {_cut(message)}" if message else name
    if not place:
        what = f"{_UNUSABLE}: {what}"
    return Failure("exception", name, what + place)


def is_stub(error: BaseException) -> bool:
    """Whether the exception comes from an answer that still is, or has, the course's stub."""
    if isinstance(error, RankFailure):
        return error.error == "NotImplementedError" and "raise NotImplementedError" in str(error)
    if not isinstance(error, NotImplementedError) or error.args:
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_learners(frames[-1].filename)


def explain_stub(error: BaseException) -> str:
    """The sentence for an answer that is done in part."""
    line = error.line if isinstance(error, RankFailure) else _learners_frame(error).lineno
    return f"a part that this needs is not written yet: line {line} raises NotImplementedError"


def _place(error: BaseException) -> str:
    """Where the learner's own code was: ", in line 4 of Cell In[3]: `x = 1 / 0`", or ""."""
    frame = _learners_frame(error)
    if frame is None:
        return ""
    text = f": `{frame.line}`" if frame.line else ""
    return f", in line {frame.lineno} of {_name(frame.filename)}{text}"


def _learners_frame(error: BaseException) -> traceback.FrameSummary | None:
    frames = traceback.extract_tb(error.__traceback__)
    return next((f for f in reversed(frames) if _is_learners(f.filename)), None)


def _is_learners(filename: str) -> bool:
    generated = filename.startswith("<") and not filename.startswith(("<ipython", "<stdin"))
    return not generated and not filename.startswith(_NOT_THE_LEARNERS)


def _name(filename: str) -> str:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        label = shell.compile.format_code_name(filename)
        if label:
            return "your cell" if label[0] == "Cell" else f"{label[0]} {label[1]}"
    return Path(filename).name


def _cut(text: str, width: int = 160) -> str:
    return text if len(text) <= width else text[: width - 4] + " ..."
