"""Runs one answer under its check: in no other process does code of a submission run.

Before that the process gives itself limits and folders of its own, and gives up its privileges.
The outcome goes through a pipe, on a line with a secret, so that nothing that an answer prints or
writes by chance is taken for one.
"""

import json
import os
import resource
import sys
import tempfile
import textwrap
from typing import NoReturn

import psutil

from course_utils.checks import answers, catalogue
from course_utils.checks.failures import explain
from course_utils.checks.framework import Exercise, judge
from course_utils.checks.guard import Deadline, TimeIsUp, undisturbed
from course_utils.checks.learner import render
from course_utils.checks.statements import Cell
from course_utils.grade import answer, integrity, isolation
from course_utils.grade.limits import Limits
from course_utils.launch import server

_SECONDS_TO_LOAD = 20.0
_THREADS_OF_A_PROCESS = 16  # on average; a rank has as many as it has cores


def main(job: dict, outcome: int) -> None:
    """The whole life of a worker. Never returns."""
    code = 1
    try:
        result = _result(job)
        with open(outcome, "w") as pipe:
            pipe.write("\n" + json.dumps({"secret": job["secret"], **result}) + "\n")
        code = 0
    finally:
        os._exit(code)  # nothing that the submission has registered runs


def _result(job):
    """Status and feedback, as in Mark; or "error", where the grader itself has failed."""
    try:
        _settle(job["folder"], Limits(**job["limits"]), job["isolated"])
        exercise = catalogue.find(job["exercise"])
        cells = [Cell(**cell) for cell in job["cells"]]
        found = answer.find(exercise, cells, job["texts"])
        answers.source_of = _kept_back
        server.fork_from_here()  # as long as nothing of the submission has been executed
    except answer.NoAnswer as error:
        feedback = f"{exercise.id} {exercise.name}: {error}"
        return {"status": "missing", "feedback": feedback}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is not the submission's doing
        return {"error": f"{type(error).__name__}: {error}"}
    status, feedback = _graded(exercise, found, job["variant"])
    return {"status": status, "feedback": feedback}


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
    if sys.platform == "linux":  # if the machine runs out of memory, this is what goes first
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    isolation.give_up_privileges()


def _limit(which, most):
    """A limit that is lower already stays: nobody may raise it."""
    allowed = resource.getrlimit(which)[1]
    if allowed != resource.RLIM_INFINITY:
        most = min(most, allowed)
    resource.setrlimit(which, (most, most))


def _kept_back(exercise_id: str) -> NoReturn:
    """Stands in for `answers.source_of`, with which `load_answer` finds the solutions."""
    raise LookupError("the solutions are not at hand while an answer is graded")


def _threads_of_the_user():
    own = [p for p in psutil.process_iter(["uids", "num_threads"]) if p.info["uids"]]
    return sum(p.info["num_threads"] or 0 for p in own if p.info["uids"].real == os.getuid())


def _graded(exercise: Exercise, found: answer.Answer, seed: str) -> tuple[str, str]:
    """Executes the answer and checks it."""
    title = f"{exercise.id} {exercise.name}"
    before = integrity.snapshot()
    try:
        with undisturbed(), Deadline(_SECONDS_TO_LOAD):
            value, errors = found.execute()
    except BaseException as error:  # noqa: BLE001 - a submission may raise anything
        status = "stopped" if isinstance(error, TimeIsUp) else "failed"
        return status, f"{title}: before the check, {explain(error, _SECONDS_TO_LOAD).text}"
    outcome = judge(exercise, value, seed)
    if changed := integrity.changed(before):
        return "stopped", f"{title}: the code changes what the check is made of: {changed[0]}."
    feedback = render(outcome)
    if errors and outcome.status != "passed":
        earlier = explain(errors[0], _SECONDS_TO_LOAD).text
        feedback += textwrap.indent(f"\nbefore the check, {earlier}", "  ")
    return outcome.status, feedback
