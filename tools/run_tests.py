"""Runs the course's tests, one step after the other, and closes with one summary.

python tools/run_tests.py                 all steps, as `make test` does
python tools/run_tests.py lint sync       some of them

A failed step does not stop the ones after it; the exit status is 0 only if all passed.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = [sys.executable]
NOTEBOOKS = ["notebooks", "solutions"]
STEPS = {
    "lint": [
        [*PYTHON, "-m", "ruff", "check"],
        [*PYTHON, "-m", "ruff", "format", "--check"],
    ],
    "sync": [[*PYTHON, "tools/notebooks.py", "check"]],
    "unit": [[*PYTHON, "-m", "pytest", "tests", "-n2", "--dist", "loadscope"]],
    "nbval": [[*PYTHON, "-m", "pytest", "--nbval", *NOTEBOOKS, "-n2", "--dist", "loadfile"]],
}
WORDS = {
    "lint": "lint (ruff)",
    "sync": "notebooks match their sources",
    "unit": "unit tests",
    "nbval": "strict nbval of every notebook",
}


def run_step(name: str) -> tuple[bool, float]:
    """Run one step; return whether it passed, and its seconds."""
    print(f"\n=== {WORDS[name]}", flush=True)
    started = time.monotonic()
    statuses = [subprocess.call(command, cwd=ROOT) for command in STEPS[name]]
    return not any(statuses), time.monotonic() - started


def main(arguments: list[str]) -> int:
    """Run the named steps, or all; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="step", help=", ".join(STEPS))
    names = parser.parse_args(arguments).steps or list(STEPS)
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        parser.error(f"unknown step {unknown[0]!r}: choose from {', '.join(STEPS)}")
    results = {name: run_step(name) for name in names}
    print("\n=== summary")
    for name, (passed, seconds) in results.items():
        print(f"{'ok  ' if passed else 'FAIL'}  {WORDS[name]:<32} {seconds:6.0f} s")
    return 0 if all(passed for passed, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
