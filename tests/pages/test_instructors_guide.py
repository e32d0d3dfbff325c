"""The instructor's pages name chapters, exercises, points and wrong answers that exist."""

import re

import pytest

from course_exercises.checks.catalogue import chapters, exercises
from course_exercises.sources.chapters import ROOT
from course_exercises.sources.chapters import chapters as lessons
from tests.wrong_answers import answers_to

GUIDE = (ROOT / "INSTRUCTORS.md").read_text(encoding="utf-8")
GRADING = (ROOT / "docs" / "grading.md").read_text(encoding="utf-8")
MISCONCEPTIONS = (ROOT / "docs" / "misconceptions.md").read_text(encoding="utf-8")
CHAPTERS = GUIDE.partition("## The chapters")[2].partition("\n## ")[0]
LEVELS = GUIDE.partition("## Which exercise")[2].partition("\n## ")[0]
MISTAKES = re.findall(r"(?m)^\| (\d\d) \|.*\| (\d+\.\d+) `(\w+)` \|$", MISCONCEPTIONS)


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
    assert not missing, "docs/misconceptions.md: add a row for each"


def test_every_chapter_has_a_row_and_a_paragraph() -> None:
    described = (ROOT / "docs" / "chapters.md").read_text(encoding="utf-8")
    assert re.findall(r"(?m)^\| `(\w+)` \|", CHAPTERS) == [each.title for each in lessons()]
    assert re.findall(r"(?m)^\*\*(\d\d), ", described) == [each.title[:2] for each in lessons()]


def test_what_runs_beside_the_answer_is_what_the_page_says() -> None:
    whole, single = re.search(
        r"cannot travel, (.*?) and single(.*?)\. These run", GRADING, re.DOTALL
    ).groups()
    partly = [e for e in exercises() if any(rule.at_home for rule in e.rules)]
    assert re.findall(r"\d+\.\d+", whole) == [e.id for e in partly if e.at_home]
    assert re.findall(r"\d+\.\d+", single) == [e.id for e in partly if not e.at_home]
