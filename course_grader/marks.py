"""What grading gives: a Mark for each exercise, a Grade for each submission."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from course_exercises.checks.points import met


@dataclass(frozen=True)
class Mark:
    """What became of one exercise.

    status: "passed", "failed" or "not attempted", as the check says;
            "missing": the submission has no answer, or nothing that Python can read as one;
            "stopped": its code left Python, was killed, or went over a limit.
    feedback: the text that `check` prints; for the last two, a sentence that says what happened.
    lines: each requirement, whether it was met (None: not looked at), and the mistake or None.
    seconds: how long it took; the only part that differs from run to run.
    partial: what is earned where requirements have points of their own (checks/points.py), else None.
    """

    exercise: str
    name: str
    points: int
    status: str
    feedback: str
    seconds: float = 0.0
    lines: list[list] = field(default_factory=list)
    partial: float | None = None

    @property
    def earned(self) -> float:
        """All points of a passed exercise; of another those of the requirements that are met, where
        these have points, else none."""
        if self.partial is not None:
            return self.partial
        return self.points if self.status == "passed" else 0

    def with_points(self, shares: Mapping[str, list[float]]) -> "Mark":
        """The mark where requirements have points; shares: a list for each exercise that has them."""
        own = shares.get(self.exercise)
        if own is None or self.status == "passed":
            return self
        return replace(self, partial=met(own, (ok for _, ok, _ in self.lines)))


@dataclass(frozen=True)
class Grade:
    """What became of one submission.

    path: the file as it was given. chapter: "03_ddp", or "" where it could not be told.
    reason: a sentence where the submission could not be graded at all, else "".
    """

    path: str
    chapter: str = ""
    exercises: list[Mark] = field(default_factory=list)
    reason: str = ""

    def named(self, name: str) -> "Grade":
        """The same grade under the name by which the instructor knows the file."""
        return replace(self, path=name)

    def with_points(self, shares: Mapping[str, list[float]]) -> "Grade":
        """The grade where requirements have points, as in Mark."""
        return replace(self, exercises=[mark.with_points(shares) for mark in self.exercises])

    @property
    def earned(self) -> float:
        """The points that were earned."""
        return sum(mark.earned for mark in self.exercises)

    @property
    def points(self) -> int:
        """The points that could be earned."""
        return sum(mark.points for mark in self.exercises)
