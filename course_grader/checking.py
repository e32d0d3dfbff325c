"""Has exercises checked, each below a keeper of its own, several at once."""

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait

import psutil

from course_exercises.authoring.framework import Exercise
from course_grader import tree, worker
from course_grader.keeper_client import KeeperClient
from course_grader.limits import MB, PATIENCE, Limits
from course_grader.marks import Mark
from course_grader.submission import NotGradable, Submission
from course_utils.launch.keepers.janitor import janitor
from course_utils.launch.story.states import signal_name

_TO_BEGIN = 300.0  # seconds until a keeper is at work; the server may still be importing
_TO_END = 60.0  # seconds beyond the limit until it has ended everything and reported
_TRIES = 3  # where it failed: without namespaces, another submission may have killed the keeper


@dataclass(frozen=True)
class Task:
    """An exercise of a submission, and what chooses the inputs of its check."""

    submission: Submission
    exercise: Exercise
    variant: str


def check_all(
    tasks: Sequence[Task],
    jobs: int,
    limits: Limits,
    isolated: bool | None,
    unprotected: Callable[[], None],
) -> Iterator[tuple[int, Mark | NotGradable]]:
    """Yields the marks as they come, each with the number of its task; NotGradable where it was not
    for the submission that there is none. Raises RuntimeError where nothing can be graded here."""
    waiting = deque((number, 1) for number in range(len(tasks)))
    running: list[_Job] = []
    quick: dict[int, Mark] = {}  # what did not pass as long as cells were not run to their end
    if not tasks:
        return
    with _temporary_folder() as folder, KeeperClient(isolated) as keepers:
        if not keepers.protected:
            unprotected()
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    number, attempt = waiting.popleft()
                    thorough = number in quick
                    job = _Job(tasks[number], number, attempt, limits, folder, thorough)
                    running.append(job)
                    job.begin(keepers)
                wait([job.connection for job in running], timeout=1.0)
                for job in [job for job in running if job.over()]:
                    running.remove(job)
                    job.close()
                    if job.failed and job.attempt < _TRIES:
                        waiting.append((job.number, job.attempt + 1))
                    elif job.may_pass_thoroughly:
                        quick[job.number] = job.mark()
                        waiting.append((job.number, job.attempt + 1))
                    else:
                        yield job.number, _better(job.mark(), quick.get(job.number))
        finally:
            for job in running:
                job.close()


def _better(mark: Mark | NotGradable, quick: Mark | None) -> Mark | NotGradable:
    """Of two marks for one answer; the thorough one where they are equal, for it has seen more."""
    if quick is None:
        return mark
    marks = [mark, quick] if isinstance(mark, Mark) else [quick]
    best = max(marks, key=lambda m: (m.status == "passed", sum(ok is True for _, ok, _ in m.lines)))
    return replace(best, seconds=sum(each.seconds for each in marks))


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    with contextlib.ExitStack() as opened:
        own = tempfile.TemporaryDirectory(prefix="grade-", ignore_cleanup_errors=True)
        folder = opened.enter_context(own)
        janitor.keep_with(opened, "folder", folder)
        yield folder


class _Job:
    """The check of one exercise, from the first word to its keeper to the mark."""

    def __init__(
        self, task: Task, number: int, attempt: int, limits: Limits, folder: str, thorough: bool
    ):
        self.number = number
        self._thorough = thorough
        self.attempt = attempt
        self._task = task
        self._limits = limits
        self._folder = os.path.join(folder, f"{number}-{attempt}")  # short: sockets lie in it
        os.mkdir(self._folder)
        self._processes: list[psutil.Process] = []
        self._report: dict | None = None
        self._until = time.monotonic() + _TO_BEGIN

    def begin(self, keepers: KeeperClient) -> None:
        """Hands the job to a keeper."""
        self.connection = keepers.begin(
            {
                "asked": self._asked(),
                "cells": [dataclasses.asdict(cell) for cell in self._task.submission.cells],
                "provided": [dataclasses.asdict(cell) for cell in self._task.submission.provided],
                "texts": sorted(self._task.submission.texts),
                "thorough": self._thorough,
                "limits": dataclasses.asdict(self._limits),
                "folder": self._folder,
            },
            self._task.variant,
        )

    def _asked(self):
        exercise = self._task.exercise
        return {"id": exercise.id, "name": exercise.name, "parameters": exercise.parameters}

    def over(self) -> bool:
        """Reads what the keeper has sent; True when it has reported, or never will."""
        try:
            while self.connection.poll():
                message = json.loads(self.connection.recv_bytes())
                if "processes" not in message:
                    self._report = message
                    return True
                self._processes = _those_of(message["processes"])
                self._until = time.monotonic() + PATIENCE * self._limits.seconds + _TO_END
        except (EOFError, ConnectionError):
            return True
        return time.monotonic() > self._until

    @property
    def lost(self) -> bool:
        """Whether it is over without a report."""
        return self._report is None

    @property
    def failed(self) -> bool:
        """Whether it is over without a mark, and it may be worth another try."""
        return self.lost or "error" in self._outcome()

    @property
    def may_pass_thoroughly(self) -> bool:
        """Whether it is worth a try in which all is run that takes long."""
        return not self._thorough and self._outcome().get("again") is True

    def close(self) -> None:
        """Ends what the keeper cannot end any more, and removes the folder."""
        self.connection.close()  # a keeper that still works ends everything now
        if self.lost:
            tree.end(self._left)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _left(self):
        found = [p for root in self._processes for p in (root, *tree.below(root))]
        return [process for process in found if tree.alive(process)]

    def mark(self) -> Mark | NotGradable:
        """The mark, when it is over."""
        exercise, outcome = self._task.exercise, self._outcome()
        if "error" in outcome:
            return NotGradable(f"The grader cannot check {exercise.id} here: {outcome['error']}")
        feedback = outcome["feedback"].replace(self._folder, "(its own folder)")
        seconds = 0.0 if self.lost else self._report["seconds"]
        return Mark(
            exercise.id,
            exercise.name,
            exercise.points,
            outcome["status"],
            feedback,
            seconds,
            outcome.get("lines", []),
        )

    def _outcome(self):
        """What the judge has written; else what happened to the worker."""
        outcome = {}
        if not self.lost and not self._report["broken"]:
            outcome = json.loads(self._report["outcome"] or '{"error": "its judge has ended"}')
            if "gone" not in outcome:
                return outcome
            if outcome["gone"] == "forged":
                self._report["broken"] = "connection"
        title = f"{self._task.exercise.id} {self._task.exercise.name}"
        return {"status": "stopped", "feedback": f"{title}: {self._what_happened(outcome)}"}

    def _what_happened(self, outcome):
        broken = "keeper" if self.lost else self._report["broken"]
        if broken:
            return {
                "seconds": f"the code ran for more than {self._limits.seconds:g} seconds.",
                "patience": "the machine is too busy: the code had hardly any processor time in "
                f"{PATIENCE * self._limits.seconds:g} seconds. Grade it again.",
                "processes": f"the code had more than {self._limits.processes} processes at once.",
                "memory": f"the code held more than {self._limits.memory // MB} MB of memory.",
                "connection": "the code has changed what its process says to the check.",
                "parent": "the code killed the process that had started it.",
                "keeper": "the code killed the process that watched over it.",
            }[broken]
        code = os.waitstatus_to_exitcode(outcome.get("status", self._report["status"]))
        if code < 0:
            return f"its process was killed by {signal_name(-code)} during the check."
        if code == worker.BROKEN:
            return "the code has changed what its own process needs to go on."
        return f"the code ended its process, with exit code {code}, before the check was done."


def _those_of(ids):
    found = []
    for pid in ids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found
