"""What a rank that does not return tells of its exception: plain data, of bounded size.

Whatever the exception is like, also one whose own methods raise, there is a report.
"""

import os
import time
import traceback

from course_utils import is_of_the_course
from course_utils.launch.ranks import values
from course_utils.launch.story.frames import is_own

_DATA_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_WORKER_ENDED = (
    "a worker process of the DataLoader has ended before its work was done: it was killed, as the "
    "system does when memory runs out, or C code in it crashed."
)
_LONGEST = 100_000  # characters of a traceback, most of them from its end
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_CAUSES, _MEMBERS = 4, 20  # of an exception, in the message


def described(kind: str, error: BaseException) -> dict:
    """The report of a rank that `error` has ended: its `type` and `text`, the `frames` of its stack,
    outermost first, and what else Python would print of it.

    causes:     ("caused", text, frames) for what it was raised from, ("handled", ...) for what was being
                handled, each the cause of the one before
    members:    (text, frames) for each exception in a group
    traceback:  as Python prints it, from the function that launch has called
    locals:     in words, of the learner's innermost frame
    follows:    what it reports is another rank's exception
    raised_at:  of time.monotonic(), which all processes of a host share
    """
    raised_at = time.monotonic()
    frames, name, said = _frames(error), type(error).__name__, text(error)
    failures = getattr(error, "failures", {}) if name == "CheckpointException" else {}
    if of_mine := failures.get(_place_in_checkpoint(error)):
        mine, stack = of_mine
        frames += [(f.filename, f.lineno, f.name) for f in stack]
        name, said = type(mine).__name__, text(mine)
    if "DataLoader worker (pid" in said or _lost_a_worker(error, frames):
        # Which of several errors comes first, and with which process id, is chance.
        name, said = "RuntimeError", f"RuntimeError: {_WORKER_ENDED}"
    report = {"kind": kind, "type": name, "text": said, "frames": frames, "raised_at": raised_at}
    report["follows"] = bool(failures) and not of_mine
    for tell in (_causes, _members, _traceback, _locals):
        try:
            report[tell.__name__.strip("_")] = tell(error)
        except Exception:  # noqa: BLE001, S110 - an exception may be of any class
            pass
    return report


def text(error: BaseException) -> str:
    """Returns "ValueError: what it says", with its notes."""
    try:
        said = "".join(traceback.format_exception_only(error)).strip()
    except Exception:  # noqa: BLE001 - its notes may be anything
        said = type(error).__name__
    return said.partition("\n Original exception:")[0]  # gloo's own, with its source's path


def _frames(error):
    return [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]


def _place_in_checkpoint(error):
    """This rank's number among those that save or load, as their exception counts. It is raised on all of
    them, by the object that has brought together what each has raised."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        own = frame.f_locals.get("self")
    return getattr(own, "rank", None)


def _lost_a_worker(error, frames):
    """True for a lost connection that is not of the learner's own data set."""
    mine = [is_own(file) for file, _, _ in frames]
    loading = [file.endswith(_DATA_LOADER) for file, _, _ in frames]
    lost = isinstance(error, (ConnectionError, EOFError)) and any(loading)
    return lost and not any(mine[loading.index(True) :])


def _causes(error):
    """What a library handles on its way is none of the learner's."""
    found, seen = [], {id(error)}
    while len(found) < _CAUSES:
        hidden = error.__suppress_context__
        link = "caused" if error.__cause__ else "handled"
        error = error.__cause__ or (None if hidden else error.__context__)
        if error is None or id(error) in seen:
            break
        seen.add(id(error))
        frames = _frames(error)
        if link == "caused" or any(is_own(file) for file, _, _ in frames):
            found.append((link, text(error), frames))
    return found


def _members(error):
    leaves = _leaves(error)[:_MEMBERS] if isinstance(error, BaseExceptionGroup) else []
    return [(text(each).partition("\n")[0], _frames(each)) for each in leaves]


def _leaves(error):
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in _leaves(each)]


def _starts_it(module):
    return module == "runpy" or is_of_the_course(module)


def _traceback(error):
    stack = error.__traceback__
    while stack and _starts_it(stack.tb_frame.f_globals.get("__name__", "")):
        stack = stack.tb_next
    whole = "".join(traceback.format_exception(type(error), error, stack))
    if len(whole) <= _LONGEST:
        return whole
    return f"{whole[: _LONGEST // 5]}\n  ...\n{whole[-_LONGEST * 4 // 5 :]}"


def _locals(error):
    variables = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if is_own(frame.f_code.co_filename):
            # A comprehension has, until Python 3.12, a frame in the function's.
            within = frame.f_code.co_name in _COMPREHENSIONS
            variables = (variables if within else {}) | frame.f_locals
    return values.in_words(variables)
