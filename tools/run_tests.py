"""Runs the course's tests, one step after the other, and closes with one summary.

python tools/run_tests.py                 all steps, as `make test` does
python tools/run_tests.py lint sync       some of them

A failed step does not stop the ones after it; the exit status is 0 only if all passed. The summary
counts what was skipped, with the reasons; it is also written to build/tests/summary.txt.
"""

import argparse
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "build" / "tests"
PYTHON = [sys.executable]
PYTEST = [*PYTHON, "-m", "pytest", "-n2"]
NOTEBOOKS = ["notebooks", "solutions"]
STEPS = {
    "lint": [
        [*PYTHON, "-m", "ruff", "check"],
        [*PYTHON, "-m", "ruff", "format", "--check"],
    ],
    "sync": [[*PYTHON, "tools/notebooks.py", "check"]],
    "unit": [[*PYTEST, "tests", "--dist", "loadscope", f"--junitxml={REPORTS / 'unit.xml'}"]],
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
WORDS = {
    "lint": "lint (ruff)",
    "sync": "notebooks match their sources",
    "unit": "unit tests",
    "nbval": "strict nbval of every notebook",
}


@dataclass
class Result:
    """What became of a step: `tests` counts outcomes, `skips` the reasons of skipped ones."""

    name: str
    passed: bool
    seconds: float
    tests: Counter = field(default_factory=Counter)
    skips: Counter = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """The lines of the summary."""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self.tests.items() if count)
        word = "ok  " if self.passed else "FAIL"
        first = f"{word}  {WORDS[self.name]:<32} {self.seconds:6.0f} s  {counts}"
        skips = [f"      {count} skipped: {reason}" for reason, count in self.skips.items()]
        return [first.rstrip(), *skips]


def run_step(name: str) -> Result:
    """Run one step."""
    print(f"\n=== {WORDS[name]}", flush=True)
    report = REPORTS / f"{name}.xml"
    report.unlink(missing_ok=True)
    started = time.monotonic()
    statuses = [subprocess.call(command, cwd=ROOT) for command in STEPS[name]]
    result = Result(name, not any(statuses), time.monotonic() - started)
    if report.exists():
        count_tests(report, result)
    return result


def count_tests(report: Path, result: Result) -> None:
    """Add what pytest's report in JUnit's format says (docs.pytest.org, --junit-xml)."""
    result.tests = Counter(passed=0, failed=0, skipped=0)
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        failed = case.find("failure") is not None or case.find("error") is not None
        outcome = "skipped" if skipped is not None else "failed" if failed else "passed"
        result.tests[outcome] += 1
        if skipped is not None:
            result.skips[skipped.get("message", "no reason was given")] += 1


def main(arguments: list[str]) -> int:
    """Run the named steps, or all; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="step", help=", ".join(STEPS))
    names = parser.parse_args(arguments).steps or list(STEPS)
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        parser.error(f"unknown step {unknown[0]!r}: choose from {', '.join(STEPS)}")
    results = [run_step(name) for name in names]
    summary = "\n".join(line for result in results for line in result.lines())
    print(f"\n=== summary\n{summary}")
    REPORTS.mkdir(parents=True, exist_ok=True)
    (REPORTS / "summary.txt").write_text(summary + "\n", encoding="utf-8")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
