"""What grading gives: a Mark for each exercise, a Grade for each submission."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mark:
    """What became of one exercise.

    status: "passed", "failed" or "not attempted", as the check says;
            "missing": the submission has no answer, or nothing that Python can read as one;
            "stopped": its code left Python, was killed, or went over a limit.
    feedback: the text that `check` prints; for the last two, a sentence that says what happened.
    seconds: how long it took; the only part that differs from run to run.
    """

    exercise: str
    name: str
    points: int
    status: str
    feedback: str
    seconds: float = 0.0

    @property
    def earned(self) -> int:
        """All points of a passed exercise, none of another."""
        return self.points if self.status == "passed" else 0


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

    @property
    def earned(self) -> int:
        """The points that were earned."""
        return sum(mark.earned for mark in self.exercises)

    @property
    def points(self) -> int:
        """The points that could be earned."""
        return sum(mark.points for mark in self.exercises)
