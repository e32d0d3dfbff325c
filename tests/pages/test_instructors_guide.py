"""INSTRUCTORS.md names exercises, points and wrong answers that exist."""

import re

import pytest

from course_utils.chapters import ROOT
from course_utils.checks.catalogue import chapters, exercises
from tests.wrong_answers import answers_to

GUIDE = (ROOT / "INSTRUCTORS.md").read_text(encoding="utf-8")
LEVELS = GUIDE.partition("## Which exercise")[2].partition("## What learners")[0]
MISTAKES = re.findall(r"^\| (\d\d) \|.*\| (\d+\.\d+) `(\w+)` \|$", GUIDE, re.MULTILINE)


def test_every_exercise_has_one_level_with_its_name_and_points() -> None:
    found = re.findall(r"(\d+\.\d+) `(\w+)` \((\d+)\)", LEVELS)
    wanted = [(e.id, e.name, str(e.points)) for e in exercises()]
    assert sorted(found) == sorted(wanted), (
        "INSTRUCTORS.md, Which exercise for whom: id `name` (points)"
    )


def test_the_levels_are_those_of_the_exercises() -> None:
    columns = {}
    for row in re.findall(r"(?m)^\| \d\d \|(.*)\|$", LEVELS):
        for kind, cell in zip(("first", "core", "stretch"), row.split("|"), strict=True):
            columns |= dict.fromkeys(re.findall(r"(\d+\.\d+) `", cell), kind)
    assert columns == {e.id: e.kind for e in exercises()}


@pytest.mark.parametrize(("chapter", "exercise", "name"), MISTAKES)
def test_a_wrong_answer_of_the_guide_is_in_the_library(chapter, exercise, name) -> None:
    assert exercise.startswith(f"{int(chapter)}.")
    assert name in {each.name for each in answers_to(exercise) if each.names}


def test_every_chapter_has_misconceptions() -> None:
    known = {chapter for chapter, _, _ in MISTAKES}
    missing = {f"{n:02d}" for n in chapters()} - known
    assert not missing, "INSTRUCTORS.md, What learners get wrong: add a row for each"


def test_what_runs_beside_the_answer_is_what_the_guide_says() -> None:
    whole, single = re.search(
        r"cannot travel, (.*?) and single(.*?)\. These run", GUIDE, re.DOTALL
    ).groups()
    partly = [e for e in exercises() if any(rule.at_home for rule in e.rules)]
    assert re.findall(r"\d+\.\d+", whole) == [e.id for e in partly if e.at_home]
    assert re.findall(r"\d+\.\d+", single) == [e.id for e in partly if not e.at_home]
