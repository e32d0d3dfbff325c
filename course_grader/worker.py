"""Runs a notebook, holds its answer, and does with it what the judge asks. No verdict is made here (judge.py),
no rank launched and no requirement run: these are not to be had where a submission can replace them (home.py).

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

import course_utils
from course_exercises.authoring import framework
from course_exercises.authoring.failures import explain
from course_exercises.authoring.guard import Printed, undisturbed
from course_exercises.sources import answers
from course_grader import calls, home, integrity, isolation, luggage, notebook
from course_grader.limits import Limits
from course_grader.plain import Writer
from course_grader.reports import report_of
from course_utils.hardware import without_gpus
from course_utils.launch.keepers import server
from course_utils.launch.ranks import packing
from course_utils.launch.story import frames
from course_utils.lesson.statements import CodeCell

_FILES = 1024  # that a process has open: each socket can hold memory which is in no process's count
BROKEN = 70  # the exit code where the worker itself could not go on
_THREADS_OF_A_PROCESS = 16  # on average; a rank has as many as it has cores


def main(job: dict, judge: Connection, lodging: Connection) -> NoReturn:
    """The whole life of a worker."""
    code = BROKEN
    try:
        found = _prepared(job, judge, lodging)
        if found is not None:
            before = integrity.snapshot()
            with undisturbed(), without_gpus():
                held = _executed(found, job["asked"], judge)
                if held is not None:  # in the environment and the folder that its cells have left
                    _Service(held, before, judge).serve()
        code = 0
    finally:
        os._exit(code)  # nothing that the submission has registered runs


def _prepared(job, judge, lodging):
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
        server.share()
        if os.fork() == 0:
            judge.close()
            found.end()
            home.main(lodging)
        lodging.close()
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

    def __init__(self, held: _Held, before: Any, judge: Connection):
        self._held, self._before, self._judge = held, before, judge
        self._printed = Printed()

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
            about["raised"] = report_of(error, seconds)  # its time is over: no alarm may come now
        about["spent"] = float(seconds - deadline.left)
        if kind in ("call", "set", "item"):
            changed = list(arguments)
        try:
            return _message(about, changed, value, keep=self._held.keep)
        except Exception as error:  # noqa: BLE001 - what it returned may be anything
            about["raised"] = report_of(error, seconds)
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

    def _pack(self, kind, numbers, _):
        """Objects as they travel to a rank, and what has to be there around them. What was changed here has no
        effect there, and is only told."""
        changed = integrity.changed(self._before)
        if changed and (kind == "at home" or course_utils.is_of_the_course(changed)):
            return changed
        around = dict(os.environ), os.getcwd(), list(sys.path), frames.cells()
        pack = luggage.pack if kind == "at home" else packing.pack
        return [_packed(self._held.objects[number], pack) for number in numbers], around


def _packed(value, pack):
    try:
        return [bytes(part) for part in pack(value)]
    except Exception as error:  # noqa: BLE001 - pickling runs anybody's code
        raise packing.failure(value, (), {}, error) from None


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
