"""tools/run_tests.py: what a summary counts, and what makes the run fail."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import run_tests

TOOLS = Path(run_tests.__file__).parent
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
    first, second, *_ = (steps.parent / "summary.txt").read_text().splitlines()
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
    assert [line[:4] for line in lines if line[:4].strip()] == ["FAIL", "ok  "]


def test_what_an_earlier_run_left_is_not_counted(steps: Path) -> None:
    steps.write_text(TESTS)
    run_tests.main(["unit"])
    run_tests.STEPS["unit"] = run_tests.STEPS["lint"]
    run_tests.main(["unit"])
    assert "passed" not in (steps.parent / "summary.txt").read_text()


def test_the_slowest_tests_are_named(steps: Path) -> None:
    steps.write_text("import time\ndef test_quick(): pass\ndef test_slow(): time.sleep(0.5)\n")
    run_tests.main(["unit"])
    _, heading, *slowest = (steps.parent / "summary.txt").read_text().splitlines()
    assert heading.strip() == "the slowest:"
    assert [line.rpartition("::")[2] for line in slowest] == ["test_slow", "test_quick"]


def test_the_cells_of_a_notebook_count_together(tmp_path: Path) -> None:
    cell = '<testcase classname="notebooks.03_ddp.ipynb" name="Cell {}" time="1.5" />'
    report = tmp_path / "nbval.xml"
    report.write_text(f"<testsuite>{cell.format(0)}{cell.format(1)}</testsuite>")
    result = run_tests.Result("nbval", True, 3.0)
    run_tests.count_tests(report, result)
    assert result.times == {"notebooks.03_ddp.ipynb": 3.0}


def test_a_step_that_hangs_is_ended_and_has_failed(
    steps: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hangs = [sys.executable, "-c", "import time; time.sleep(600)", str(steps)]
    monkeypatch.setitem(run_tests.STEPS, "lint", [hangs])
    monkeypatch.setitem(run_tests.LIMITS, "lint", 1)
    steps.write_text(TESTS)
    assert run_tests.main(["lint", "unit"]) == 1
    assert "was still running at its limit, and was ended" in capfd.readouterr().out
    lines = (steps.parent / "summary.txt").read_text().splitlines()
    assert [line[:4] for line in lines if line[:4].strip()] == ["FAIL", "ok  "]
    assert hangs not in [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]


def test_what_outlives_a_step_is_ended_too(steps: Path) -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)", str(steps)]
    run_tests.STEPS["lint"] = [
        [sys.executable, "-c", f"import subprocess; subprocess.Popen({sleeps})"]
    ]
    assert run_tests.main(["lint"]) == 0
    end = time.monotonic() + 60
    while time.monotonic() < end:  # a process that was killed may be there for a moment
        if sleeps not in [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]:
            return
    pytest.fail("it is still there")


def test_tests_that_interrupt_do_so_in_the_background_too(steps: Path) -> None:
    """A shell has what it starts in the background ignore SIGINT, and so would all tests' processes."""
    ignored = "import signal, sys; sys.exit(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    run_tests.STEPS["lint"] = [[sys.executable, "-c", ignored]]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run_tests.main(["lint"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("driver", "factor"), [(False, 1), (True, 2)])
def test_beside_gpus_a_step_has_twice_the_time(
    steps: Path, monkeypatch: pytest.MonkeyPatch, driver: bool, factor: int
) -> None:
    ends = []
    monkeypatch.setattr(run_tests, "has_driver", lambda: driver)
    monkeypatch.setattr(run_tests, "call", lambda command, end: ends.append(end) or 0)
    steps.write_text(TESTS)
    before = time.monotonic()
    run_tests.main(["unit"])
    seconds = factor * run_tests.LIMITS["unit"]
    assert before + seconds <= ends[0] <= time.monotonic() + seconds


def test_told_to_end_it_ends_what_it_has_started() -> None:
    hangs = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)", "x"]
    program = f"import run_tests as r; r.STEPS['lint'] = [{hangs}]; r.main(['lint'])"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=TOOLS, stdout=subprocess.PIPE, text=True) as run:
        while "begun" not in run.stdout.readline():
            pass
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    assert hangs not in [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]


def test_the_chapters_under_rules_exist() -> None:
    for chapter in run_tests.CHAPTERS_UNDER_RULES:
        assert (run_tests.ROOT / "solutions" / f"{chapter}.ipynb").is_file()
