"""Holds one answer and does with it what the judge asks: in no other process does code of a
submission run, and the verdict is not made here (judge.py).

Before that the process gives itself limits and folders of its own, and gives up its privileges.
"""

import contextlib
import io
import os
import pickle
import resource
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil

from course_exercises.authoring import framework
from course_exercises.authoring.compare import Wrong
from course_exercises.authoring.failures import explain, explain_stub, is_stub
from course_exercises.authoring.guard import Printed, undisturbed
from course_exercises.sources import answers
from course_grader import calls, integrity, isolation, notebook
from course_grader.limits import Limits
from course_grader.plain import Writer
from course_utils.hardware import without_gpus
from course_utils.launch import RankFailure, launch
from course_utils.launch.keepers import server
from course_utils.lesson.statements import CodeCell

_SECONDS_OF_A_RUN = 60.0  # on a busy machine ranks are slow; a hang is found by what ranks do
_SECONDS_TO_TELL = 2.0  # what an exception says of itself is code of the submission, too
_FILES = 1024  # that a process has open: each socket can hold memory which is in no process's count
BROKEN = 70  # the exit code where the worker itself could not go on
_THREADS_OF_A_PROCESS = 16  # on average; a rank has as many as it has cores


def main(job: dict, judge: Connection) -> NoReturn:
    """The whole life of a worker."""
    code = BROKEN
    try:
        found = _prepared(job, judge)
        if found is not None:
            before = integrity.snapshot()
            with undisturbed(), without_gpus():
                held = _executed(found, job["asked"], judge)
                if held is not None:  # in the environment and the folder that its cells have left
                    _Service(held, before, judge).serve()
        code = 0
    finally:
        os._exit(code)  # nothing that the submission has registered runs


def _prepared(job, judge):
    """The notebook, not executed. None where the judge has been told that there is no answer."""
    try:
        _settle(job["folder"], Limits(**job["limits"]), job["isolated"])
        cells, provided = ([CodeCell(**cell) for cell in job[key]] for key in ("cells", "provided"))
        exercise = notebook.Asked(**job["asked"])
        answers.sources_of = _kept_back
        server.fork_from_here()  # as long as nothing of the submission has been executed
        try:
            found = notebook.Notebook(exercise, cells, provided, job["texts"], job["thorough"])
        except notebook.NoAnswer as reason:
            judge.send_bytes(_message({"missing": str(reason)}))
            return None
    except Exception as error:  # noqa: BLE001 - whatever it is, it is not the submission's doing
        judge.send_bytes(_message({"error": f"{type(error).__name__}: {error}"}))
        return None
    judge.send_bytes(_message({"found": True}))
    return found


def _executed(found, asked, judge):
    """What is bound to the answer's name. None where the judge has been told why there is none."""
    try:
        value = found.run()
    except notebook.NoAnswer as reason:
        judge.send_bytes(_message({"missing": str(reason), "skipped": found.skipped}))
        return None
    except BaseException as error:  # noqa: BLE001 - a submission may raise anything
        said = explain(error, notebook.SECONDS).text
        judge.send_bytes(_message({"failed": said, "skipped": found.skipped}))
        return None
    said = [f"before the check, {explain(e, notebook.SECONDS).text}" for e in found.errors[:1]]
    nothing = value is None or value is Ellipsis
    about = {"errors": said, "nothing": nothing, "skipped": found.skipped}
    judge.send_bytes(_message(about))
    return _Held(value, asked)


class _Held:
    """The answer and all else that the judge has a handle of."""

    def __init__(self, value: Any, asked: dict):
        self.objects = {0: value}
        self.asked = asked
        self._numbers = {id(value): 0}

    def keep(self, value: object) -> int:
        number = self._numbers.setdefault(id(value), len(self.objects))
        self.objects[number] = value
        return number


def _message(about: dict, *values: Any, keep: Callable = lambda value: 0) -> bytes:
    return Writer(keep).dump(about, *values)


class _Service:
    """Answers what the judge asks, one request after the other."""

    __slots__ = (
        "_before",
        "_held",
        "_judge",
        "_printed",
        "_replaced",
    )  # no method can be put over its own

    def __init__(self, held: _Held, before: Any, judge: Connection):
        self._held, self._before, self._judge = held, before, judge
        self._printed = Printed()
        self._replaced: list[str] = []  # of the names that a requirement looks up

    def serve(self) -> None:
        """Until the judge has left."""
        with contextlib.suppress(EOFError, OSError), undisturbed() as self._printed:
            while True:
                self._judge.send_bytes(self._reply(self._judge.recv_bytes()))

    def _reply(self, message):
        kind, seconds, *rest, arguments = _Unpickler(message, self._held.objects).load()
        about: dict[str, Any] = {}
        value, changed = None, None
        try:
            with framework.limited(max(seconds, 0.1)) as deadline:
                value = getattr(self, f"_{kind.replace(' ', '_')}")(*rest, arguments)
        except BaseException as error:  # noqa: BLE001 - an answer may raise anything
            about["raised"] = _report_of(error, seconds)  # its time is over: no alarm may come now
        about["spent"] = float(seconds - deadline.left)
        if kind in ("call", "set", "item"):
            changed = list(arguments)
        different = integrity.changed(self._before) if kind in ("sound", "at home") else []
        if different or self._replaced:
            about["changed"] = [*different, *self._replaced][0]
        elif sys.gettrace() or sys.getprofile():
            about["changed"] = "sys.settrace or sys.setprofile"
        try:
            return _message(about, changed, value, keep=self._held.keep)
        except Exception as error:  # noqa: BLE001 - what it returned may be anything
            about["raised"] = _report_of(error, seconds)
            return _message(about, None, None)

    def _unfit(self, _):
        asked = notebook.Asked(**self._held.asked)
        return framework.misfit(asked, self._held.objects[0])

    def _untouched(self, _):
        return framework.untouched(self._held.objects[0])

    def _said(self, _):
        return self._printed.lines()

    def _call(self, number, kwargs, arguments):
        return self._held.objects[number](*arguments, **kwargs)

    def _get(self, number, name, _):
        return getattr(self._held.objects[number], name)

    def _set(self, number, name, arguments):
        setattr(self._held.objects[number], name, *arguments)

    def _iter(self, number, _):
        return _Iterator(iter(self._held.objects[number]))

    def _next(self, number, _):
        try:
            return False, next(self._held.objects[number])
        except StopIteration:
            return True, None

    def _len(self, number, _):
        return len(self._held.objects[number])

    def _item(self, number, arguments):
        return self._held.objects[number][arguments[0]]

    def _run(self, fn, nprocs, timeout, arguments):
        with framework.deadline().paused():
            return launch(fn, nprocs, *arguments, timeout=max(timeout, _SECONDS_OF_A_RUN))

    def _sound(self, _):
        """What the requirement that comes next is made of is looked at, and nobody looks on."""
        sys.settrace(None)
        sys.setprofile(None)

    def _at_home(self, requirement, draw, token, _):
        names, wrong = integrity.names_of(requirement), None
        try:
            requirement(self._held.objects[0], draw)
        except Wrong as error:
            wrong = error.misconception, error.expected, error.got
        finally:
            self._replaced += integrity.replaced(requirement, names)
        return token, wrong


class _Iterator:
    """An iterator as a thing of its own, so that none is read to its end as it travels."""

    def __init__(self, iterator: Any):
        self._iterator = iterator

    def __next__(self) -> Any:
        return next(self._iterator)


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: bytes, objects: dict[int, Any]):
        super().__init__(io.BytesIO(message))
        self._objects = objects

    def persistent_load(self, pid: int) -> Any:
        return self._objects[pid]


def _report_of(error: BaseException, seconds: float) -> dict:
    """What is said of an exception, also where it does not let itself be asked."""
    try:
        with framework.limited(_SECONDS_TO_TELL):
            return _described(error, seconds)
    except BaseException:  # noqa: BLE001 - as above
        text = "your code raised an exception that cannot be printed"
        failure = ["exception", "Exception", text]
        names = {"name": "Exception", "names": ["Exception"], "message": text}
        return names | {"failure": failure, "stub": None}


def _described(error: BaseException, seconds: float) -> dict:
    if isinstance(error, RankFailure):
        about = [str(error), error.rank, error.kind, error.line, error.error, list(error.ranks)]
        return {"rank": about}
    failure = explain(error, seconds)
    return {
        "name": type(error).__name__,
        "names": [kind.__name__ for kind in type(error).__mro__],
        "message": str(error)[:2000],
        "failure": [failure.kind, failure.error, failure.text],
        "stub": explain_stub(error) if is_stub(error) else None,
    }


def _settle(folder: str, limits: Limits, isolated: bool) -> None:
    """Folders, limits and privileges of a process that runs anybody's code."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.chdir(folder)
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        os.environ[name] = folder
    os.environ["COURSE_PROGRESS"] = os.path.join(folder, "progress.json")
    tempfile.tempdir = None  # it follows TMPDIR now
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, limits.file)
    # The system's own limit is for all threads of a user, here or, without a namespace, anywhere,
    # and root has none: it only slows down what the keeper ends.
    tasks = _THREADS_OF_A_PROCESS * limits.processes + (0 if isolated else _threads_of_the_user())
    _limit(resource.RLIMIT_NPROC, tasks)
    _limit(resource.RLIMIT_NOFILE, _FILES)
    isolation.give_up_privileges()
    if sys.platform == "linux":
        calls.refuse()


def _limit(which, most):
    """A limit that is lower already stays: nobody may raise it."""
    allowed = resource.getrlimit(which)[1]
    if allowed != resource.RLIM_INFINITY:
        most = min(most, allowed)
    resource.setrlimit(which, (most, most))


def _kept_back(chapter: str) -> NoReturn:
    """Stands in for `answers.sources_of`, with which answers and code of the solutions are found."""
    raise LookupError("the solutions are not at hand while an answer is graded")


def _threads_of_the_user():
    own = [p for p in psutil.process_iter(["uids", "num_threads"]) if p.info["uids"]]
    return sum(p.info["num_threads"] or 0 for p in own if p.info["uids"].real == os.getuid())
