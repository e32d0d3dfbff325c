"""Where a chapter reads a clock after work for a device, the device has finished.

On a GPU a call returns when its work is in the queue, and a clock that is read then shows how long it
took to ask. On the CPU of `make test` nothing differs, so the sources are read."""

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import course_utils
from course_exercises.sources import chapters

PACKAGE = Path(course_utils.__file__).parent
SOURCES = [path for chapter in chapters.chapters() for path in chapter.sources]
SOURCES += [PACKAGE / "lesson" / "pace.py", *sorted(PACKAGE.parent.glob("course_*/figures/ch*.py"))]
CLOCKS = {"perf_counter", "monotonic"}
SETTLES = {"settle", "barrier"}  # after dist.barrier() the host has waited for its device, too
ON_THE_CPU = {  # what is timed there is on the CPU, also beside a GPU
    ("02_data_parallel", "seconds"): "two threads of Python",
    ("04_manual_split_further", "seconds_of"): "stations and images as they are loaded",
}


def called(node: ast.AST) -> str:
    """The last name of what is called: "settle" of `hardware.settle()`."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def scopes(tree: ast.Module) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Each function that lies in no other, and what stands outside of all."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    yield from ((node.name, [node]) for node in tree.body if isinstance(node, kinds))
    yield "", [node for node in tree.body if not isinstance(node, kinds)]


def blocks(statements: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """The statements, and those inside of them, as lists of what comes one after the other."""
    yield statements
    for node in [inner for statement in statements for inner in ast.walk(statement)]:
        for _, inside in ast.iter_fields(node):
            if isinstance(inside, list) and inside and isinstance(inside[0], ast.stmt):
                yield inside


def readings(statements: list[ast.stmt]) -> list[ast.Call]:
    found = [node for s in statements for node in ast.walk(s) if called(node) in CLOCKS]
    return sorted(found, key=lambda node: node.lineno)


def settled(statements: list[ast.stmt]) -> set[ast.Call]:
    """The readings in a statement, not a block, right after one that waits for the device."""
    pairs = [pair for block in blocks(statements) for pair in pairwise(block)]
    after = [s for before, s in pairs if called(getattr(before, "value", before)) in SETTLES]
    return {clock for s in after if not hasattr(s, "body") for clock in readings([s])}


def timed() -> dict[tuple[str, str], list[ast.stmt]]:
    """What reads a clock more than once."""
    found = {
        (path.stem, name): statements
        for path in SOURCES
        for name, statements in scopes(ast.parse(path.read_text(encoding="utf-8")))
    }
    return {key: statements for key, statements in found.items() if len(readings(statements)) > 1}


@pytest.mark.parametrize(("key", "statements"), timed().items(), ids=map("-".join, timed()))
def test_a_clock_is_read_when_the_device_has_finished(
    key: tuple[str, str], statements: list[ast.stmt]
) -> None:
    """Else a ratio compares what was asked for with what was done."""
    _, *later = readings(statements)
    early = [reading.lineno for reading in later if reading not in settled(statements)]
    assert bool(early) == (key in ON_THE_CPU), f"read without hardware.settle() in lines {early}"
