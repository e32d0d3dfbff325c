"""The house: which room may know which, that its picture is true, and that it stays small."""

import ast
import re
from pathlib import Path

import house
import pytest

ROOT = Path(__file__).parents[2]
HOUSE = house.rooms()
ARROWS = house.arrows(HOUSE)
MOST_ROOMS, MOST_ARROWS, MOST_LINES = 20, 75, 12_000  # the last: of course_utils

# The packages that each package may know, and name in a text.
KNOWN = {
    "course_utils": set(),
    "course_planner": {"course_utils"},
    "course_hosts": {"course_utils"},
    "course_run": {"course_utils"},
    "course_strict": {"course_utils"},
    "course_exercises": {"course_utils", "course_planner", "course_run"},
    "course_grader": {"course_utils", "course_exercises"},
}
# The rooms of a package: each may know those before it, and name them in its code.
ORDER = {
    "course_utils": (
        *("comm", "hardware", "trace", "launch", "lesson", "plots", "figures"),
        "__main__",
    ),
    "course_exercises": ("sources", "authoring", "chapters", "checks"),
}
NAME = re.compile(r"\bcourse_[a-z]+\b(?:[./](?:[a-z]\w*))?")


def texts(path: Path, documentation: bool) -> list[str]:
    """The texts in a file, also the parts of f-strings; without `documentation`, what only says what
    the code does is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    said = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if documentation or id(node) not in said
    ]


def packages(names: list[str]) -> set[str]:
    return {name.split(".")[0].split("/")[0] for name in names} & KNOWN.keys()


def named(path: Path, documentation: bool) -> list[str]:
    return [name for text in texts(path, documentation) for name in NAME.findall(text)]


def test_every_package_and_room_has_its_place():
    assert {path.parent.name for path in ROOT.glob("course_*/__init__.py")} == KNOWN.keys()
    inside = {f"{package}/{room}" for package, order in ORDER.items() for room in order}
    assert inside == {name for name in HOUSE if "/" in name}


@pytest.mark.parametrize("package", KNOWN)
def test_a_package_knows_those_below_it_only(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        known = packages([*house.imported(path), *named(path, documentation=True)])
        assert known <= KNOWN[package] | {package}, path


@pytest.mark.parametrize("name", [name for name in HOUSE if "/" in name])
def test_a_room_of_a_package_knows_those_before_it_only(name):
    package, _, room = name.partition("/")
    later = ORDER[package][ORDER[package].index(room) + 1 :]
    for path in HOUSE[name].files:
        for known in (*house.imported(path), *named(path, documentation=False)):
            assert not re.match(rf"{package}[./]({'|'.join(later) or '-'})\b", known), (path, known)


def test_no_room_reaches_itself_again():
    assert house.floors(ARROWS).keys() == HOUSE.keys()  # raises ValueError for a circle


def test_the_house_is_small():
    files = (ROOT / "course_utils").rglob("*.py")
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert len(HOUSE) <= MOST_ROOMS
    assert sum(map(len, ARROWS.values())) <= MOST_ARROWS
    assert lines <= MOST_LINES


def test_the_page_shows_the_house_as_it_is():
    shown = (ROOT / house.PAGE).read_text(encoding="utf-8")
    assert shown == house.page(), "run `python tools/house.py write`"


@pytest.mark.parametrize("package", KNOWN)
def test_a_package_tells_its_files(package):
    """In its README, or in the text of the folder that they lie in; those of the chapters speak for themselves."""
    readme = (ROOT / package / "README.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.stem != "__init__" and not re.match(r"(ch\d\d|mine)$", path.parent.name):
            told = readme + path.with_name("__init__.py").read_text(encoding="utf-8")
            assert re.match(r"ch\d\d$", path.stem) or re.search(rf"\b{path.stem}\b", told), path
