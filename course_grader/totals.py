"""What each student has in the end: the best submission for each notebook, days late, marks by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from course_exercises.checks import catalogue
from course_exercises.sources.answers import source_of
from course_grader import lms, roster
from course_grader.gathering import Found
from course_grader.marks import Grade, Mark
from course_grader.roster import Student
from course_grader.rules import Late, Rules


@dataclass
class HandedIn:
    """A submission; `found` is None where there is none, and a mark by hand all the same."""

    found: Found | None
    grade: Grade
    late: Late
    counts: bool = False

    @property
    def worth(self) -> float:
        """The points after the days late."""
        return round(self.grade.earned * self.late.left, 4)

    @property
    def name(self) -> str:
        """What the student calls it: no folder of the instructor's."""
        return str(self.found.inside) if self.found else ""


@dataclass
class Total:
    """A student, and what was handed in; of several for one notebook the best counts."""

    student: Student
    handed_in: list[HandedIn] = field(default_factory=list)

    @property
    def counting(self) -> list[HandedIn]:
        """What counts, in the order of the notebooks."""
        return sorted((h for h in self.handed_in if h.counts), key=lambda h: h.grade.chapter)

    @property
    def points(self) -> float:
        """All points, after the days late."""
        return round(sum(handed_in.worth for handed_in in self.counting), 4)

    @property
    def days_late(self) -> int:
        """The days late of all that counts."""
        return sum(handed_in.late.days for handed_in in self.counting)

    def remarks(self, named: bool = True) -> list[str]:
        """What an instructor should know: nothing, or nothing gradable, came; what was late; marks by
        hand; what does not count; each with the name of its file, or without."""
        found = [] if any(h.found for h in self.handed_in) else ["nothing was handed in."]
        for one in self.handed_in:
            said = [one.grade.reason, one.late.why]
            said += [
                m.feedback.partition("\n")[0] for m in one.grade.exercises if m.status == "by hand"
            ]
            if not one.grade.reason and not one.counts:
                said += [f"{one.worth:g} points, and another one counts."]
            name = f"{one.name}: " if named and one.name else ""
            found += [f"{name}{sentence}" for sentence in said if sentence]
        return found


def owners(found: Sequence[Found], students: Mapping[str, Student]) -> list[Student | str]:
    """Whose each submission is, or why it is nobody's; without a roster each is somebody else's."""
    if students:
        return [roster.owner(one, students) for one in found]
    return [Student(str(one.inside), "", "") for one in found]


def totals(
    graded: Sequence[tuple[Found, Grade, Student | str]],
    students: Mapping[str, Student],
    rules: Rules,
) -> list[Total]:
    """The total of each student of the roster; without one, of each submission."""
    if not students:
        return [Total(one, [HandedIn(found, g, Late(), not g.reason)]) for found, g, one in graded]
    totals = {student: Total(student) for student in students.values()}
    for found, grade, student in graded:
        if isinstance(student, Student):
            totals[student].handed_in.append(_handed_in(found, grade, student, rules))
    asked = {grade.chapter for _, grade, _ in graded if not grade.reason}
    for student, total in totals.items():
        _choose(total)
        by_hand = rules.mark.get(student.id, {})
        missing = asked - {one.grade.chapter for one in total.counting}
        for title in sorted({source_of(id).stem for id in by_hand} & missing):
            grade = _nothing(title).by_hand(by_hand)
            total.handed_in.append(HandedIn(None, grade, Late(), counts=True))
    return list(totals.values())


def _handed_in(found, grade, student, rules):
    if grade.reason:
        return HandedIn(found, grade, Late())
    by_canvas = lms.late(found.inside)
    late = rules.late(student.id, int(grade.chapter[:2]), found.when, by_canvas)
    return HandedIn(found, grade.by_hand(rules.mark.get(student.id, {})), late)


def _choose(total):
    best: dict[str, HandedIn] = {}
    for one in total.handed_in:
        chapter = one.grade.chapter
        if not one.grade.reason and (chapter not in best or one.worth > best[chapter].worth):
            best[chapter] = one
    for one in best.values():
        one.counts = True


def _nothing(title: str) -> Grade:
    asked = [e for e in catalogue.exercises() if source_of(e.id).stem == title]
    marks = [Mark(e.id, e.name, e.points, "missing", "Nothing was handed in.") for e in asked]
    return Grade("", title, marks)
