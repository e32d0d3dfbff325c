"""tools/touched.py: the tests that a change touches."""

import subprocess

import pytest
import touched
from run_tests import ROOT


def test_every_file_has_its_tests() -> None:
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    found = {folder for path in tracked for folder in touched.tests_of(path)}
    assert all((ROOT / "tests" / folder).is_dir() for folder in found - {touched.ALL})


@pytest.mark.parametrize(
    ("paths", "folders"),
    [
        (["course_planner/memory.py"], ["tests/estimate"]),
        (["course_utils/lesson/mnist.py"], ["tests/chapters", "tests/modules"]),
        (["tests/grade/test_grade.py", "README.md"], ["tests/grade", "tests/pages"]),
        (["course_utils/lesson/mnist.py", "pyproject.toml"], ["tests"]),
        (["tests/soaks/soak_class.py"], []),
        (["course_strict/rules.py"], ["tests/reports", "tests/strict"]),
    ],
)
def test_a_change_touches(paths: list[str], folders: list[str]) -> None:
    assert touched.folders(paths) == folders


def test_a_new_place_needs_a_row() -> None:
    with pytest.raises(LookupError, match="no row for attic/lamp.py"):
        touched.tests_of("attic/lamp.py")


@pytest.mark.parametrize(
    ("changed", "status", "expected"), [("", 1, 0), ("tools/x.py", 1, 1), ("tools/x.py", 5, 0)]
)
def test_its_status_is_that_of_the_tests(monkeypatch, changed, status, expected) -> None:
    monkeypatch.setattr(subprocess, "check_output", lambda *_, **__: f"{changed}\n")
    monkeypatch.setattr(subprocess, "call", lambda *_, **__: status)
    assert touched.main("origin/main") == expected
