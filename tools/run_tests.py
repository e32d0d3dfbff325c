"""Runs the course's tests, one step after the other, and closes with one summary.

python tools/run_tests.py                 all steps, as `make test` does
python tools/run_tests.py lint sync       some of them

python tools/run_tests.py all-rules       all that ranks do, under NCCL's rules, as `make rules` does

A failed step does not stop the ones after it; the exit status is 0 only if all passed. The summary
counts what was skipped, with the reasons, and says where the time went; it is also written to
build/tests/summary.txt. A step that goes on past its limit is ended and has failed: a test that
hangs costs an answer, not the whole run.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from setup_env import has_driver

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "build" / "tests"
PYTHON = [sys.executable]
# Three on two cores: many tests wait a while, for an end, a limit or a host that falls silent.
WORKERS = "-n3"
# faulthandler prints where every thread is when one test takes longer than this (seconds)
PYTEST = [*PYTHON, "-m", "pytest", WORKERS, "-o", "faulthandler_timeout=300"]
IN_THEIR_ORDER = ["--dist", "loadscope", "--no-loadscope-reorder"]  # tests/conftest.py sorts them
NOTEBOOKS = ["notebooks", "solutions"]
UNDER_RULES = ["env", "COURSE_RULES=nccl", *PYTEST, "--dist", "loadfile"]
CHAPTERS_UNDER_RULES = [
    "00_start_here",
    "01_factory",
    "02_data_parallel",
    "05_pipeline",
    "05_pipeline_further",
]
RANKS_OF_TESTS = [  # right answers, those that forget to wait, and the techniques
    "-k",
    "solution_passes or right_answer or not-waited or a_technique or interrupted or contract_sees",
]
STEPS = {
    "lint": [
        [*PYTHON, "-m", "ruff", "check"],
        [*PYTHON, "-m", "ruff", "format", "--check"],
    ],
    "sync": [[*PYTHON, "tools/notebooks.py", "check"]],
    "unit": [[*PYTEST, "tests", *IN_THEIR_ORDER, f"--junitxml={REPORTS / 'unit.xml'}"]],
    "nbval": [
        [
            *PYTEST,
            "--nbval",
            *NOTEBOOKS,
            "--dist",
            "loadfile",
            f"--junitxml={REPORTS / 'nbval.xml'}",
        ]
    ],
}
BY_NAME = {  # what takes too long for every commit, or was not yet timed on a quiet machine
    # The chapters that cost least, with their answers and checks, and the one with most messages.
    "rules": [
        [
            *UNDER_RULES,
            "--nbval",
            *(f"solutions/{chapter}.ipynb" for chapter in CHAPTERS_UNDER_RULES),
            f"--junitxml={REPORTS / 'rules.xml'}",
        ]
    ],
    "all-rules": [
        [*UNDER_RULES, "--nbval", *NOTEBOOKS, f"--junitxml={REPORTS / 'all-rules.xml'}"],
        [
            *UNDER_RULES,
            "tests/chapters/test_equality.py",
            "tests/checks/test_wrong_answers.py",
            *RANKS_OF_TESTS,
        ],
    ],
}
LIMITS = {  # seconds; .ci/run has 5,400
    "lint": 300,
    "sync": 300,
    "unit": 3300,
    "nbval": 1500,
    "rules": 600,
    "all-rules": 5400,
}
BESIDE_GPUS = 2  # times as many: each rank of each launch starts CUDA
WORDS = {
    "lint": "lint (ruff)",
    "sync": "notebooks match their sources",
    "unit": "unit tests",
    "nbval": "strict nbval of every notebook",
    "rules": "chapters under NCCL's rules",
    "all-rules": "all under NCCL's rules",
}


@dataclass
class Result:
    """What became of a step: `tests` counts outcomes, `skips` the reasons of skipped ones, and
    `times` holds the seconds of each test, or of each notebook."""

    name: str
    passed: bool
    seconds: float
    tests: Counter = field(default_factory=Counter)
    skips: Counter = field(default_factory=Counter)
    times: Counter = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """The lines of the summary."""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self.tests.items() if count)
        word = "ok  " if self.passed else "FAIL"
        first = f"{word}  {WORDS[self.name]:<32} {self.seconds:6.0f} s  {counts}"
        skips = [f"      {count} skipped: {reason}" for reason, count in self.skips.items()]
        slowest = [f"      {time:6.1f} s  {what}" for what, time in self.times.most_common(10)]
        return [first.rstrip(), *skips, *(["      the slowest:"] if slowest else []), *slowest]


def limit(name: str, beside_gpus: bool) -> int:
    """The seconds after which a step is ended."""
    return LIMITS[name] * (BESIDE_GPUS if beside_gpus else 1)


def run_step(name: str) -> Result:
    """Run one step."""
    print(f"\n=== {WORDS[name]}", flush=True)
    report = REPORTS / f"{name}.xml"
    report.unlink(missing_ok=True)
    started = time.monotonic()
    end = started + limit(name, beside_gpus=has_driver())
    statuses = [call(command, end) for command in (STEPS | BY_NAME)[name]]
    result = Result(name, not any(statuses), time.monotonic() - started)
    if report.exists():
        count_tests(report, result)
    return result


def call(command: list[str], end: float) -> int:
    """Run `command` until it ends, or until the clock shows `end`; return its exit status."""
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        try:
            return process.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"\n{' '.join(command)}\nwas still running at its limit, and was ended.")
            return 1
        finally:
            end_group(process)


def end_group(process: subprocess.Popen) -> None:
    """End the process, and first politely: pytest's fixtures stop what they have started. Then what is
    left of its group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def count_tests(report: Path, result: Result) -> None:
    """Add what pytest's report in JUnit's format says (docs.pytest.org, --junit-xml)."""
    result.tests = Counter(passed=0, failed=0, skipped=0)
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        failed = case.find("failure") is not None or case.find("error") is not None
        outcome = "skipped" if skipped is not None else "failed" if failed else "passed"
        result.tests[outcome] += 1
        file, name = case.get("classname", ""), case.get("name", "")
        result.times[file if file.endswith(".ipynb") else f"{file}::{name}"] += float(
            case.get("time", 0)
        )
        if skipped is not None:
            result.skips[skipped.get("message", "no reason was given")] += 1


def main(arguments: list[str]) -> int:
    """Run the named steps, or all; return the exit status. SIGTERM ends it as Ctrl-C does, with all
    that it has started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = [*STEPS, *BY_NAME]
    parser.add_argument("steps", nargs="*", metavar="step", help=", ".join(known))
    names = parser.parse_args(arguments).steps or list(STEPS)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown step {unknown[0]!r}: choose from {', '.join(known)}")
    results = [run_step(name) for name in names]
    summary = "\n".join(line for result in results for line in result.lines())
    print(f"\n=== summary\n{summary}")
    REPORTS.mkdir(parents=True, exist_ok=True)
    (REPORTS / "summary.txt").write_text(summary + "\n", encoding="utf-8")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
