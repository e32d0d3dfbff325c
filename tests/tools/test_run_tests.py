"""tools/run_tests.py: what a summary counts and remembers, and what makes the run fail."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import run_tests

TOOLS = Path(run_tests.__file__).parent
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
TESTS = """
import pytest

def test_right(): pass

@pytest.mark.skip(reason="no cable here")
def test_skipped(): pass

@pytest.mark.skip(reason="no cable here")
def test_skipped_too(): pass
"""
# In a process of its own: main takes in every orphan, and would take the children of these tests.
PROGRAM = """
import json, pathlib, sys
import run_tests
steps, rest, limits, folder, arguments = json.loads(sys.argv[1])
run_tests.ROOT = pathlib.Path(folder)
run_tests.REPORTS = run_tests.ROOT / "build"
run_tests.PASSED = run_tests.REPORTS / "passed.json"
run_tests.STEPS, run_tests.REST = steps, rest
run_tests.LIMITS |= limits
sys.exit(run_tests.main(arguments))
"""


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


@dataclass
class Course:
    """A folder with its own steps: "unit" is pytest over one file, "lint" always fails."""

    folder: Path
    steps: dict[str, list[list[str]]] = field(default_factory=dict)
    rest: dict[str, list[list[str]]] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.file, self.reports = self.folder / "test_some.py", self.folder / "build"
        self.file.write_text(TESTS)
        options = ["-p", "no:cacheprovider", "-c", "/dev/null", str(self.file)]
        report = f"--junitxml={self.reports / 'unit.xml'}"
        self.steps["unit"] = [[sys.executable, "-m", "pytest", *options, report]]
        self.steps["lint"] = [python("raise SystemExit(3)")]

    def command(self, *arguments: str) -> list[str]:
        given = [self.steps, self.rest, self.limits, str(self.folder), arguments]
        return python(PROGRAM, json.dumps(given))

    def run(self, *arguments: str) -> int:
        return subprocess.call(self.command(*arguments), cwd=TOOLS)

    @property
    def summary(self) -> str:
        return (self.reports / "summary.txt").read_text()

    def verdicts(self) -> list[str]:
        """What the summary says of each step."""
        words = [line[:4] for line in self.summary.splitlines()]
        return [word.strip() for word in words if word in ("ok  ", "FAIL")]


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path)


def still_there(command: list[str]) -> bool:
    return command in [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]


def test_skips_are_counted_with_their_reason(course: Course) -> None:
    assert course.run("unit") == 0
    first, second, *_ = course.summary.splitlines()
    assert first.startswith("ok    unit tests") and first.endswith("1 passed, 2 skipped")
    assert second == "      2 skipped: no cable here"


def test_a_failed_test_fails_the_run(course: Course) -> None:
    course.file.write_text(TESTS + "\ndef test_wrong(): assert False\n")
    assert course.run("unit") == 1
    assert course.summary.startswith("FAIL") and "1 passed, 1 failed, 2 skipped" in course.summary


def test_a_failed_step_does_not_stop_the_next(course: Course) -> None:
    assert course.run("lint", "unit") == 1
    assert course.verdicts() == ["FAIL", "ok"]


def test_what_an_earlier_run_left_is_not_counted(course: Course) -> None:
    course.run("unit")
    course.steps["unit"] = course.steps["lint"]
    course.run("unit")
    assert "1 passed" not in course.summary


def test_the_slowest_tests_are_named(course: Course) -> None:
    course.file.write_text(
        "import time\ndef test_quick(): pass\ndef test_slow(): time.sleep(0.5)\n"
    )
    course.run("unit")
    _, heading, *slowest = course.summary.splitlines()
    assert heading.strip() == "the slowest:"
    assert [line.rpartition("::")[2] for line in slowest[:2]] == ["test_slow", "test_quick"]


def test_the_cells_of_a_notebook_count_together(tmp_path: Path) -> None:
    cell = '<testcase classname="notebooks.03_ddp.ipynb" name="Cell {}" time="1.5" />'
    report = tmp_path / "nbval.xml"
    report.write_text(f"<testsuite>{cell.format(0)}{cell.format(1)}</testsuite>")
    result = run_tests.Result("nbval", True, 3.0, 2.0)
    run_tests.count_tests(report, result)
    assert result.times == {"notebooks.03_ddp.ipynb": 3.0}


def test_the_summary_ends_with_what_was_tested(course: Course) -> None:
    course.run("unit")
    last = course.summary.splitlines()[-1]
    assert last == run_tests.environment()
    assert last.startswith(f"Python {sys.version.split()[0]}, PyTorch 2.")
    assert last.endswith(f"{os.cpu_count()} processors")


# --- time -----------------------------------------------------------------------------------------

STARVED = """
import pathlib, sys, descendants
descendants.FairClock = lambda: type("Clock", (), {"passed": lambda self: 0.0})()
sys.exit(descendants.call(sys.argv[1:], 0.5, pathlib.Path()))
"""


def test_time_without_a_processor_does_not_end_a_step() -> None:
    rests = python("import time; time.sleep(2)")
    assert subprocess.run([*python(STARVED), *rests], cwd=TOOLS, check=False).returncode == 0


# as a fork server: a grandchild in a session of its own, whose parent has gone
LEAVES = """
import subprocess, sys
subprocess.Popen(sys.argv[1:], start_new_session=True)
"""
BURNS = "import time\nwhile time.process_time() < 0.5: pass"
COUNTS = """
import pathlib, sys, time
from descendants import adopt, call, processor_seconds
adopt()
call(sys.argv[1:], 60, pathlib.Path())
print(processor_seconds())
"""


@LINUX
def test_the_time_of_processes_that_have_left_counts() -> None:
    """A fork server lives in a session of its own, and its parent ends before it."""
    command = python(COUNTS, *python(LEAVES, *python(BURNS)))
    assert float(subprocess.check_output(command, cwd=TOOLS)) > 0.5


def test_a_step_that_hangs_is_ended_and_has_failed(
    course: Course, capfd: pytest.CaptureFixture[str]
) -> None:
    hangs = python("import time; time.sleep(600)", str(course.file))
    course.steps["lint"], course.limits = [hangs], {"lint": 1}
    assert course.run("lint", "unit") == 1
    assert "was still running at its limit, and was ended" in capfd.readouterr().out
    assert course.verdicts() == ["FAIL", "ok"]
    assert not still_there(hangs)


# --- nothing is left ------------------------------------------------------------------------------

STAYS = """
import subprocess, sys, time
subprocess.run([sys.executable, "-c", {leaves!r}, *sys.argv[1:]])
print("begun", flush=True)
time.sleep({seconds})
"""


def stays(sleeps: list[str], seconds: int) -> list[str]:
    return python(STAYS.format(leaves=LEAVES, seconds=seconds), *sleeps)


@LINUX
def test_what_outlives_a_step_is_ended_too(course: Course) -> None:
    sleeps = python("import time; time.sleep(600)", str(course.file))
    course.steps["lint"] = [stays(sleeps, 0)]
    assert course.run("lint") == 0
    assert not still_there(sleeps)


@LINUX
@pytest.mark.parametrize("word", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_it_ends_all_that_was_started(course: Course, word: signal.Signals) -> None:
    sleeps = python("import time; time.sleep(600)", str(course.file))
    course.steps["lint"] = [stays(sleeps, 600)]
    run = subprocess.Popen(course.command("lint"), cwd=TOOLS, stdout=subprocess.PIPE, text=True)
    with run:
        while "begun" not in run.stdout.readline():
            pass
        run.send_signal(word)
        time.sleep(0.3)
        run.send_signal(word)  # by who has no patience, or by make, which passes it on
        run.communicate(timeout=60)
    assert run.returncode not in (0, None)
    assert not still_there(sleeps)


def test_tests_that_interrupt_do_so_in_the_background_too(course: Course) -> None:
    """A shell has what it starts in the background ignore SIGINT, and so would all tests' processes."""
    ignored = "import signal, sys; sys.exit(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    course.steps["lint"] = [python(ignored)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert course.run("lint") == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_threads_that_have_nothing_to_do_sleep(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)  # these tests run under that very command
    asks = "import os, sys; sys.exit(os.environ.get('OMP_WAIT_POLICY') != 'passive')"
    course.steps["lint"] = [python(asks)]
    assert course.run("lint") == 0


def test_what_is_compiled_is_kept(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    course.steps["lint"] = [python("import sys; sys.exit(sys.dont_write_bytecode)")]
    assert course.run("lint") == 0


@pytest.mark.parametrize(("driver", "factor"), [(False, 1), (True, 2)])
def test_beside_gpus_a_step_has_twice_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: bool, factor: int
) -> None:
    given = []
    monkeypatch.setattr(run_tests, "REPORTS", tmp_path)
    monkeypatch.setattr(run_tests, "has_driver", lambda: driver)
    monkeypatch.setattr(
        run_tests, "call", lambda command, seconds, folder: given.append(seconds) or 0
    )
    run_tests.run_step("unit")
    assert given == [factor * run_tests.LIMITS["unit"]]


# --- what has passed ------------------------------------------------------------------------------


@pytest.fixture
def committed(course: Course) -> Course:
    """The course, whose steps pass and say their names, in a repository."""
    (course.folder / ".gitignore").write_text("build/\n")
    course.steps = {"lint": [python("print('=lint')")], "unit": [python("print('=unit')")]}
    course.rest = {"unit-rest": [python("print('=rest')")]}
    git(course, "init", "-q")
    commit(course)
    return course


def git(course: Course, *arguments: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=course.folder, check=True)


def commit(course: Course) -> None:
    git(course, "add", "-A")
    git(course, "commit", "-qm", "all")


def ran(course: Course, *arguments: str) -> str:
    """The steps that were run, in one word: "lint unit"."""
    command = course.command(*arguments)
    said = subprocess.run(command, cwd=TOOLS, stdout=subprocess.PIPE, text=True, check=False).stdout
    return " ".join(line[1:] for line in said.splitlines() if line in ("=lint", "=unit", "=rest"))


def test_all_does_not_repeat_what_has_passed_on_the_same_commit(committed: Course) -> None:
    assert ran(committed) == "lint unit"
    assert "all of it has never passed here" in committed.summary
    assert ran(committed, "all") == "rest"
    assert ran(committed, "all") == ""
    assert ran(committed) == "lint unit", "who asks for it gets it"
    assert "not run here" not in committed.summary


def test_a_change_makes_all_of_it_run_again(committed: Course) -> None:
    ran(committed, "all")
    committed.file.write_text("")
    assert ran(committed, "all") == "lint unit rest"
    assert ran(committed, "all") == "lint unit rest", "what is not committed is not remembered"
    commit(committed)
    assert ran(committed) == "lint unit"
    head = subprocess.check_output(["git", "rev-parse", "HEAD~"], cwd=committed.folder, text=True)
    assert head.strip() in committed.summary, "the commit at which all had passed"


def test_a_step_that_has_failed_is_repeated(committed: Course) -> None:
    committed.steps["unit"] = [python("print('=unit'); raise SystemExit(1)")]
    assert ran(committed) == "lint unit"
    assert ran(committed, "all") == "unit rest"
    assert json.loads((committed.reports / "passed.json").read_text())["all"] is None


def test_the_chapters_under_rules_exist() -> None:
    for chapter in run_tests.CHAPTERS_UNDER_RULES:
        assert (run_tests.ROOT / "solutions" / f"{chapter}.ipynb").is_file()
