"""Judges mutants, each in a process of its own, which may crash, hang or eat memory.

This process has all that ranks need in memory, and never computes anything itself. It forks one child
for each mutant; the child forks a fork server of its own, and that ends its ranks when the child is
killed.
"""

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection

from course_exercises.authoring import load_answer
from course_exercises.authoring.framework import Line, attempt
from course_exercises.authoring.guard import undisturbed
from course_exercises.checks.catalogue import exercises, find
from course_utils.launch.keepers import forks, server
from tests.mutations.verdicts import Verdict

SEED = "0"
SECONDS = 120.0  # a mutant that takes longer counts as killed by time
MEMORY = 8 * 2**30  # bytes of a process
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Case:
    """Code for the answer's cell of an exercise."""

    exercise_id: str
    source: str


def judge_all(cases: Iterable[Case], jobs: int) -> Iterator[tuple[Case, Verdict]]:
    """Judges `jobs` cases at a time and yields each with its verdict, as they come."""
    waiting, running = iter(cases), []
    while True:
        while len(running) < jobs and (case := next(waiting, None)) is not None:
            running.append(_Child(case))
        if not running:
            return
        connection.wait([child.answers for child in running], timeout=1)
        for child in [child for child in running if child.done()]:
            running.remove(child)
            yield child.case, child.verdict()


def prepare() -> None:
    """Limits the memory of all that comes, and imports the checks and what ranks need: an edit of either
    while this runs reaches no rank."""
    exercises()  # imports all checks
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))
    forks.import_preloaded()


class _Child:
    """A process that judges one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.answers, theirs = _fork.Pipe(duplex=False)
        self._folder = tempfile.TemporaryDirectory(prefix="course-mutant-")
        self._process = _fork.Process(target=_judge, args=(case, self._folder.name, theirs))
        self._process.start()
        theirs.close()
        self._end = time.monotonic() + SECONDS

    def done(self) -> bool:
        return self.answers.poll() or time.monotonic() > self._end

    def verdict(self) -> Verdict:
        """What the child says of the case, or how it ended. Ends it in any case."""
        late = not self.answers.poll()
        try:
            said = Verdict("time", None, "did not end") if late else self.answers.recv()
        except EOFError:
            self._process.join()
            said = Verdict("killed", None, f"ended with code {self._process.exitcode}")
        self._process.kill()
        self._process.join()
        self.answers.close()
        self._folder.cleanup()
        return said


def _judge(case: Case, folder: str, answers: connection.Connection) -> None:
    _make_own(folder)
    try:
        line = _first_failure(case)
    except Exception as error:  # noqa: BLE001 - the mutant's own, when its cell is executed
        answers.send(Verdict("killed", "exception", f"{type(error).__name__}: {error}"))
        return
    verdict = Verdict("survived")
    if line:
        verdict = Verdict("killed", line.misconception, line.requirement)
    answers.send(verdict)


def _first_failure(case: Case) -> Line | None:
    exercise = find(case.exercise_id)
    answer = load_answer(case.exercise_id, source=case.source)
    with undisturbed():
        return next((line for line in attempt(exercise, answer, SEED) if not line.ok), None)


def _make_own(folder: str) -> None:
    """What a fork needs of its own: a temporary folder, a fork server."""
    tempfile.tempdir = folder
    server.fork_from_here()
