"""What grading gives: a Mark for each exercise, a Grade for each submission."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from course_exercises.checks.points import met


@dataclass(frozen=True)
class Mark:
    """What became of one exercise.

    status: "passed", "failed" or "not attempted", as the check says;
            "missing": the submission has no answer, or nothing that Python can read as one;
            "stopped": its code left Python, was killed, or went over a limit;
            "by hand": class.toml says so, and why.
    feedback: the text that `check` prints; where it is "missing" or "stopped", a sentence that says what happened.
    lines: each requirement, whether it was met (None: not looked at), and the mistake or None.
    seconds: how long it took; the only part that differs from run to run.
    partial: what is earned where requirements have points of their own (checks/points.py), or a person
        has decided, else None.
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

    def described(self) -> dict:
        """The mark as it is written to files: nothing in it differs from run to run."""
        return {key: part for key, part in vars(self).items() if key not in ("seconds", "partial")}

    def by_hand(self, points: float, reason: str) -> "Mark":
        """The mark that a person has given; what the check said stays below the reason."""
        said = f"{self.exercise} {self.name}  by hand: {reason}\n\n{self.feedback}"
        return replace(self, partial=points, status="by hand", feedback=said)


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

    def with_points(self, shares: Mapping[str, list[float]]) -> "Grade":
        """The grade where requirements have points, as in Mark."""
        return replace(self, exercises=[mark.with_points(shares) for mark in self.exercises])

    def by_hand(self, given: Mapping[str, tuple[float, str]]) -> "Grade":
        """The grade with the marks that a person has given: points and reason by exercise."""
        marks = (
            m.by_hand(*given[m.exercise]) if m.exercise in given else m for m in self.exercises
        )
        return replace(self, exercises=list(marks))

    @property
    def earned(self) -> float:
        """The points that were earned."""
        return sum(mark.earned for mark in self.exercises)

    @property
    def points(self) -> int:
        """The points that could be earned."""
        return sum(mark.points for mark in self.exercises)
