"""tools/run_tests.py: what a summary counts, and what makes the run fail."""

import sys
from pathlib import Path

import pytest
import run_tests

TESTS = """
import pytest

def test_right(): pass

@pytest.mark.skip(reason="no cable here")
def test_skipped(): pass

@pytest.mark.skip(reason="no cable here")
def test_skipped_too(): pass
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The steps "unit", pytest over a file of the test's own, and "lint", which always fails."""
    file = tmp_path / "test_some.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        str(file),
    ]
    fails = [sys.executable, "-c", "raise SystemExit(3)"]
    report = f"--junitxml={tmp_path / 'unit.xml'}"
    monkeypatch.setattr(run_tests, "REPORTS", tmp_path)
    monkeypatch.setattr(run_tests, "STEPS", {"unit": [[*command, report]], "lint": [fails]})
    return file


def test_skips_are_counted_with_their_reason(steps: Path) -> None:
    steps.write_text(TESTS)
    assert run_tests.main(["unit"]) == 0
    first, second = (steps.parent / "summary.txt").read_text().splitlines()
    assert first.startswith("ok    unit tests") and first.endswith("1 passed, 2 skipped")
    assert second == "      2 skipped: no cable here"


def test_a_failed_test_fails_the_run(steps: Path) -> None:
    steps.write_text(TESTS + "\ndef test_wrong(): assert False\n")
    assert run_tests.main(["unit"]) == 1
    summary = (steps.parent / "summary.txt").read_text()
    assert summary.startswith("FAIL") and "1 passed, 1 failed, 2 skipped" in summary


def test_a_failed_step_does_not_stop_the_next(steps: Path) -> None:
    steps.write_text(TESTS)
    assert run_tests.main(["lint", "unit"]) == 1
    lines = (steps.parent / "summary.txt").read_text().splitlines()
    assert [line[:4] for line in lines] == ["FAIL", "ok  ", "    "]


def test_what_an_earlier_run_left_is_not_counted(steps: Path) -> None:
    steps.write_text(TESTS)
    run_tests.main(["unit"])
    run_tests.STEPS["unit"] = run_tests.STEPS["lint"]
    run_tests.main(["unit"])
    assert "passed" not in (steps.parent / "summary.txt").read_text()
