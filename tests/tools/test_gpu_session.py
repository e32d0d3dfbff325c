"""The session on a lent GPU, rehearsed: it reports after every step, whatever becomes of it."""

import sys
from pathlib import Path

import gpu_session
import pytest
from gpu_session import HEADER, Step

TABLE = f"# Seen\n\n{HEADER}| 2001-01-01 | old | old | old | old |\n\nMore.\n"
TESTS = """
import pytest, time
def test_good(): pass
def test_bad(): assert 0
def test_long(): time.sleep(300)
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(TABLE)
    return tmp_path / "README.md"


@pytest.fixture
def with_a_gpu(monkeypatch) -> None:
    words = dict.fromkeys(("date", "gpus", "driver", "python", "torch", "commit"), "new")
    monkeypatch.setattr(gpu_session, "machine", lambda: words)


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_the_rehearsal_says_where_ranks_run_and_leaves_no_row(tmp_path, rows):
    steps = [step for step in gpu_session.STEPS if step.name in ("versions", "ranks-2")]
    versions, ranks = gpu_session.run(steps, 3, tmp_path, rows)
    assert versions.ended == ranks.ended == "ended with 0"
    report = (tmp_path / "report.md").read_text()
    assert "torch: " in report and "second launch: " in report
    assert "2 ranks: gloo on cpu, cpu" in report or "nccl on" in report
    if "* gpus: none" in report:
        assert rows.read_text() == TABLE


def test_a_step_that_is_cut_off_is_a_result(tmp_path, rows, with_a_gpu):
    (tmp_path / "test_some.py").write_text(TESTS)
    pytest_ = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(tmp_path)]
    steps = [Step("tests", pytest_, 0.3), Step("after", program("print('still here')"), 1)]
    first, second = gpu_session.run(steps, 5, tmp_path, rows)
    assert first.ended.startswith("cut off after") and first.counts == {"PASSED": 1, "FAILED": 1}
    assert "test_some.py::test_bad" in first.said[0]
    assert "def test_bad(): assert 0" in (tmp_path / "tests.log").read_text()  # why it failed
    assert second.said == ["still here"]
    new = rows.read_text().split(HEADER)[1].splitlines()
    assert new[0].startswith(
        "| new | new | new, new, new | new | tests: cut off after 18 s, 1 passed"
    )
    assert new[0].endswith("; after: ok |") and new[1].startswith("| 2001-01-01")


def test_what_the_time_does_not_reach_is_named(tmp_path, rows, with_a_gpu):
    results = gpu_session.run([Step("never", program("1/0"), 1)], 0, tmp_path, rows)
    assert [result.ended for result in results] == ["not reached"]
    assert "never: not reached" in rows.read_text()


def test_its_steps_name_tests_that_exist():
    for step in gpu_session.STEPS:
        for word in step.command:
            if word.startswith("tests/"):
                assert (gpu_session.ROOT / word).is_file()
    assert HEADER in gpu_session.ROWS.read_text(encoding="utf-8")
