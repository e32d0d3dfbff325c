"""The table with which a run of tests/checks/test_wrong_answers.py ends.

A hint is generic where the first line that fails has no sentence of its own: an exception, a
hang or other numbers that no misconception of the exercise explains. The mutants are those that
`python -m tests.mutations` has judged and the check has killed; nobody writes most of them, so the
target is for the wrong answers.
"""

from collections import Counter
from collections.abc import Iterable

from course_exercises.authoring.framework import Exercise
from course_exercises.checks import catalogue
from tests.mutations.verdicts import known_verdicts

TARGET = "target: under 10 %"
HEAD = """\
                                           points   wrong answers         right   mutants
exercise                                            tried  hint  generic  others  killed  generic"""


def table(recorded: Iterable[tuple[str, str, bool]]) -> str:
    """A line for each exercise to which an answer was tried, and a total. `recorded` are kind, exercise
    and whether the test passed; kinds are "solution", "right", "wrong" and "generic"."""
    tried, good, ids = Counter(), Counter(), set()
    for kind, id, passed in recorded:
        tried[kind, id] += 1
        good[kind, id] += passed
        ids.add(id)
    rows, total = [], Counter()
    for exercise in catalogue.exercises():
        if exercise.id in ids:
            row = {
                "points": exercise.points,
                "wrong": tried["wrong", exercise.id],
                "hint": good["wrong", exercise.id],
                "generic": tried["generic", exercise.id],
                "right": tried["right", exercise.id],
                "accepted": good["right", exercise.id],
                **_mutants(exercise),
            }
            rows.append(_line(f"{exercise.id} {exercise.name}", row))
            total.update(row)
    wrong = _share(total["generic"], total["wrong"])
    share = f"generic hints: {wrong} of the wrong answers ({TARGET})"
    if total["killed"]:
        share += f", {_share(total['vague'], total['killed'])} of the killed mutants"
    return "\n".join([HEAD, *rows, _line("total", total), share])


def _mutants(exercise: Exercise) -> dict[str, int]:
    killed = [verdict for verdict in known_verdicts(exercise.id) if verdict.fate == "killed"]
    vague = [v for v in killed if not exercise.misconceptions.get(v.misconception)]
    return {"killed": len(killed), "vague": len(vague)}


def _line(title: str, row: dict[str, int]) -> str:
    mutants = f"{row['killed']:6}  {row['vague']:7}" if row["killed"] else "not judged here"
    return (
        f"{title:<42} {row['points']:6}   {row['wrong']:5}  {row['hint']:4}  {row['generic']:7}  "
        f"{row['accepted']:3}/{row['right']:<2}  {mutants}"
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "none"
