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

from course_utils.checks import catalogue
from course_utils.checks.failures import explain
from course_utils.checks.framework import Exercise, judge
from course_utils.checks.guard import Deadline, TimeIsUp, undisturbed
from course_utils.checks.learner import render
from course_utils.checks.statements import Cell
from course_utils.grade import answer, integrity, isolation
from course_utils.launch import server

_SECONDS_TO_LOAD = 20.0


def main(job: dict, outcome: int) -> None:
    """The whole life of a worker. Never returns."""
    code = 1
    try:
        _settle(job["folder"], job["limits"]["file"])
        server.fork_from_here()  # as long as nothing of the submission is here
        exercise = catalogue.find(job["exercise"])
        cells = [Cell(**cell) for cell in job["cells"]]
        status, feedback = _graded(exercise, cells, job["texts"], job["variant"])
        result = {"secret": job["secret"], "status": status, "feedback": feedback}
        with open(outcome, "w") as pipe:
            pipe.write("\n" + json.dumps(result) + "\n")
        code = 0
    finally:
        os._exit(code)  # nothing that the submission has registered runs


def _settle(folder, most_bytes):
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
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    if sys.platform == "linux":  # if the machine runs out of memory, this is what goes first
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    isolation.give_up_privileges()


def _graded(exercise: Exercise, cells: list[Cell], texts: list[str], seed: str) -> tuple[str, str]:
    """Status and feedback, as in Mark."""
    title = f"{exercise.id} {exercise.name}"
    before = integrity.snapshot()
    try:
        with undisturbed(), Deadline(_SECONDS_TO_LOAD):
            found = answer.load(exercise, cells, texts)
    except answer.NoAnswer as error:
        return "missing", str(error)
    except BaseException as error:  # noqa: BLE001 - a submission may raise anything
        status = "stopped" if isinstance(error, TimeIsUp) else "failed"
        return status, f"{title}: before the check, {explain(error, _SECONDS_TO_LOAD).text}"
    outcome = judge(exercise, found.value, seed)
    if changed := integrity.changed(before):
        return "stopped", f"{title}: the code changes what the check is made of: {changed[0]}."
    feedback = render(outcome)
    if found.errors and outcome.status != "passed":
        earlier = explain(found.errors[0], _SECONDS_TO_LOAD).text
        feedback += textwrap.indent(f"\nbefore the check, {earlier}", "  ")
    return outcome.status, feedback
