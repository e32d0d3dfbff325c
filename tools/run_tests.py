"""Runs the course's tests, one step after the other, and closes with one summary.

python tools/run_tests.py                 `make test`: what proves the product in ten minutes
python tools/run_tests.py all             `make test-all`: that and all the rest; what has passed on
                                          the same commit, in the same environment, is not repeated
python tools/run_tests.py lint sync       some of the steps
python tools/run_tests.py all-rules       all that ranks do, under NCCL's rules, as `make rules` does

A failed step does not stop the ones after it; the exit status is 0 only if all passed. The summary
counts what was skipped, with the reasons, says where the time went and what was not run; it is also
written to build/tests/summary.txt. A step that goes on past its limit is ended and has failed: a
test that hangs costs an answer, not the whole run. tools/tiers.py says which unit test is in which step.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import tiers
from descendants import adopt, call, processor_seconds
from setup_env import has_driver

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "build" / "tests"
PASSED = REPORTS / "passed.json"  # the steps that have passed, and where; the last run of all
PYTHON = [sys.executable]
# Three on two cores: many tests wait a while, for an end, a limit or a host that falls silent.
WORKERS = "-n3"
# faulthandler prints where every thread is when one test takes longer than this (seconds)
PYTEST = [*PYTHON, "-m", "pytest", WORKERS, "-o", "faulthandler_timeout=300"]
IN_THEIR_ORDER = ["--dist", "loadscope", "--no-loadscope-reorder"]  # tests/conftest.py sorts them
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


def _pytest(name: str, *arguments: str) -> list[str]:
    return [*PYTEST, *arguments, f"--junitxml={REPORTS / name}.xml"]


STEPS = {
    "lint": [
        [*PYTHON, "-m", "ruff", "check"],
        [*PYTHON, "-m", "ruff", "format", "--check"],
    ],
    "sync": [[*PYTHON, "tools/notebooks.py", "check"]],
    "unit": [_pytest("unit", "tests", "--tier=quick", *IN_THEIR_ORDER)],
    "nbval": [_pytest("nbval", "--nbval", "solutions", "--with-copies", "--dist", "loadfile")],
}
REST = {  # what `make test` leaves to `make test-all`
    "unit-rest": [_pytest("unit-rest", "tests", "--tier=long", *IN_THEIR_ORDER)],
}
BY_NAME = {  # what takes too long for every commit, or was not yet timed on a quiet machine
    "nbval-copies": [_pytest("nbval-copies", "--nbval", "notebooks", "--dist", "loadfile")],
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
        [
            *UNDER_RULES,
            "--nbval",
            "notebooks",
            "solutions",
            f"--junitxml={REPORTS / 'all-rules.xml'}",
        ],
        [
            *UNDER_RULES,
            "tests/chapters/test_equality.py",
            "tests/checks/test_wrong_answers.py",
            *RANKS_OF_TESTS,
        ],
    ],
}
LIMITS = {  # seconds of a command, without those in which a busy machine has no processor for it
    "lint": 200,
    "sync": 200,
    "unit": 900,
    "nbval": 1000,
    "unit-rest": 3100,
    "nbval-copies": 700,
    "rules": 600,
    "all-rules": 5400,
}
BESIDE_GPUS = 2  # times as many: each rank of each launch starts CUDA
WORDS = {
    "lint": "lint (ruff)",
    "sync": "notebooks match their sources",
    "unit": "unit tests, the quick ones",
    "nbval": "strict nbval of both copies",
    "unit-rest": "unit tests, the rest",
    "nbval-copies": "strict nbval of learners' copies alone",
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
    processor: float  # seconds of all processors together
    tests: Counter = field(default_factory=Counter)
    skips: Counter = field(default_factory=Counter)
    times: Counter = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """The lines of the summary."""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self.tests.items() if count)
        word = "ok  " if self.passed else "FAIL"
        first = f"{word}  {WORDS[self.name]:<32} {_times(self.seconds, self.processor)}  {counts}"
        skips = [f"      {count} skipped: {reason}" for reason, count in self.skips.items()]
        slowest = [f"      {time:6.1f} s  {what}" for what, time in self.times.most_common(10)]
        return [first.rstrip(), *skips, *(["      the slowest:"] if slowest else []), *slowest]


def _times(seconds: float, processor: float) -> str:
    return f"{seconds / 60:5.1f} min, {processor / 60:5.1f} of processors"


def limit(name: str, beside_gpus: bool) -> int:
    """The seconds after which a command of a step is ended."""
    return LIMITS[name] * (BESIDE_GPUS if beside_gpus else 1)


def run_step(name: str) -> Result:
    """Run one step."""
    print(f"\n=== {WORDS[name]}", flush=True)
    report = REPORTS / f"{name}.xml"
    report.unlink(missing_ok=True)
    started, used = time.monotonic(), processor_seconds()
    most = limit(name, beside_gpus=has_driver())
    statuses = [call(command, most, ROOT) for command in (STEPS | REST | BY_NAME)[name]]
    seconds, processor = time.monotonic() - started, processor_seconds() - used
    result = Result(name, not any(statuses), seconds, processor)
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
        file, name = case.get("classname", ""), case.get("name", "")
        result.times[file if file.endswith(".ipynb") else f"{file}::{name}"] += float(
            case.get("time", 0)
        )
        if skipped is not None:
            result.skips[skipped.get("message", "no reason was given")] += 1


# --- what has passed --------------------------------------------------------------------------


def environment() -> str:
    """The versions that were tested, what installed them, and on how many processors."""
    stamp = Path(sys.prefix) / "course.json"  # of tools/setup_env.py
    stamp = json.loads(stamp.read_text(encoding="utf-8")) if stamp.exists() else {}
    versions = f"PyTorch {version('torch')}, torchvision {version('torchvision')}"
    installer = f"installer {stamp.get('installer', 'unknown')}"
    return (
        f"Python {platform.python_version()}, {versions}, {installer}, {os.cpu_count()} processors"
    )


def commit(what: str = "HEAD") -> str | None:
    """The commit of this tree, or its hash ("HEAD^{tree}"); None where something has changed since."""
    try:
        return _git("rev-parse", what) if not _git("status", "--porcelain") else None
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.check_output(command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip()


class Memory:
    """What build/tests/passed.json keeps: the steps that have passed on this very tree and in this
    environment, and the commit and the day at which all had passed."""

    def __init__(self) -> None:
        kept = json.loads(PASSED.read_text(encoding="utf-8")) if PASSED.exists() else {}
        self.here = [commit("HEAD^{tree}"), environment()]
        self.all = kept.get("all")
        self.steps = kept["steps"] if self.here[0] and kept.get("here") == self.here else {}

    def add(self, results: list[Result]) -> None:
        """Keep what has passed, and forget what has failed."""
        self.steps |= {result.name: result.passed for result in results}
        if self.here[0] and all(self.steps.get(name) for name in STEPS | REST):
            self.all = {"commit": commit(), "day": time.strftime("%Y-%m-%d")}
        kept = {"here": self.here, "steps": self.steps, "all": self.all}
        PASSED.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    def not_run(self, names: list[str]) -> list[str]:
        """The summary's line on what these steps left out, and on when it passed last."""
        words = WORDS | {"unit-rest": tiers.left_out()}
        left = [
            words[name] for name in STEPS | REST if name not in names and not self.steps.get(name)
        ]
        if not left:
            return []
        last = "all passed last on {day}, at commit {commit}".format(**self.all) if self.all else ""
        return [f"not run here: {', '.join(left)}; {last or 'all of it has never passed here'}"]


def main(arguments: list[str]) -> int:
    """Run the named steps, or those of `make test`; return the exit status. SIGTERM ends it as Ctrl-C
    does, with all that it has started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
    # Threads of PyTorch that have nothing to do sleep: three workers have six on two cores, and each
    # that looks for work takes the time of one that has some (7 s of a processor instead of 15).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Some images set it: each of the hundreds of processes below would compile the course anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    adopt()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = [*STEPS, *REST, *BY_NAME, "all"]
    parser.add_argument("steps", nargs="*", metavar="step", help=", ".join(known))
    names = parser.parse_args(arguments).steps or list(STEPS)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown step {unknown[0]!r}: choose from {', '.join(known)}")
    REPORTS.mkdir(parents=True, exist_ok=True)
    memory = Memory()
    again = [name for name in STEPS | REST if names == ["all"] and memory.steps.get(name)]
    if names == ["all"]:
        names = [name for name in STEPS | REST if name not in again]
    results = [run_step(name) for name in names]
    memory.add(results)
    lines = [line for result in results for line in result.lines()]
    together = _times(sum(r.seconds for r in results), sum(r.processor for r in results))
    lines += [f"      {'in all':<32} {together}"]
    lines += [f"passed before, on the same commit: {', '.join(again)}"] if again else []
    lines += [*memory.not_run(names), environment()]
    summary = "\n".join(lines)
    print(f"\n=== summary\n{summary}")
    (REPORTS / "summary.txt").write_text(summary + "\n", encoding="utf-8")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
