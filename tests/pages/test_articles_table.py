"""docs/articles.md says where each example of the articles went: the places that it names exist."""

import re

import pytest

from course_exercises.checks.catalogue import modules
from course_exercises.sources.chapters import ROOT
from tests.support.reference_page import chapter as source_of

# "04: ...", a heading in italics, "exercise 4.1", "exercises 2.1 to 2.4" or "2.1 and 2.2"
PLACE = re.compile(
    r"(\d\d(?: further)?): |\*([^*]+)\*|exercises? (\d+\.\d+)(?: (?:to|and) (\d+\.\d+))?"
)


def rows():
    text = (ROOT / "docs" / "articles.md").read_text(encoding="utf-8")
    table = text.split("| example or exercise | chapter and section |")[1].split("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]


def headings(chapter: str) -> list[str]:
    return re.findall(r"(?m)^# ##+ (.+)$", source_of(chapter).read_text(encoding="utf-8"))


@pytest.mark.parametrize(("example", "places"), rows())
def test_the_places_of_an_example_exist(example, places):
    chapter, found = "", 0
    for number, title, first, last in PLACE.findall(places):
        chapter, found = number or chapter, found + 1
        if title:
            assert any(title in heading for heading in headings(chapter)), (chapter, title)
        for id in filter(None, (first, last)):
            assert id in modules()
    assert found, f"{example} has no place"
