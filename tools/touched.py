"""Runs the long tests of the folders that a change touches: python tools/touched.py origin/main

Beside `make test` on a pull request; all that is long runs every night. TESTS says which folders of
tests/ a file belongs to: the first row that its path begins with.
"""

import subprocess
import sys

from run_tests import PYTEST, ROOT

ALL = "*"  # what all tests stand on
TESTS = {
    "tests/support/": [ALL],
    "tests/wrong_answers/": ["checks"],
    "tests/techniques/": ["chapters"],
    "tests/hostile_class/": ["grade"],
    "tests/mutations/": ["checks"],
    "tests/benchmarks/": ["tools"],
    "tests/soaks/": [],
    "tests/conftest.py": [ALL],
    "course_utils/launch/": ["launch", "reports", "run", "strict", "chapters"],
    "course_exercises/sources/": ["sources", "checks"],
    "course_exercises/": ["checks", "grade"],
    "course_grader/": ["grade"],
    "course_hosts/": ["cluster", "launch", "modules", "two_hosts"],
    "course_planner/": ["estimate"],
    "course_run/": ["run"],
    "course_strict/": ["strict", "reports"],
    "course_utils/": ["modules", "chapters"],
    "cluster/": ["cluster", "two_hosts"],
    "solutions/": ["chapters", "checks", "notebooks", "pages"],
    "notebooks/": ["notebooks", "pages"],
    "tools/": ["tools", "notebooks"],
    "data/": ["modules", "estimate"],
    "examples/": ["grade"],
    "book/": ["browser"],
    "playground/": ["playground", "browser"],
    "conftest.py": [ALL],
    "pyproject.toml": [ALL],
    "requirements.txt": [ALL],
    "requirements-lock.txt": ["tools"],
    "CITATION.cff": ["tools"],
    "environment.yml": ["tools"],
    "Makefile": ["tools"],
    ".": ["tools"],  # the files for CI and for the places in which people open the course
}
PAGES = (".md", "LICENSE")  # wherever they lie


def folders(paths: list[str]) -> list[str]:
    """The folders of tests/ that these files touch."""
    found = {folder for path in paths for folder in tests_of(path)}
    return ["tests"] if ALL in found else sorted(f"tests/{folder}" for folder in found)


def tests_of(path: str) -> list[str]:
    """The folders for one file. Raises LookupError where no row fits."""
    if path.endswith(PAGES):
        return ["pages"]
    for beginning, found in TESTS.items():
        if path.startswith(beginning):
            return found
    first, *rest = path.split("/")
    if first == "tests" and len(rest) > 1:
        return rest[:1]
    raise LookupError(f"tools/touched.py: TESTS has no row for {path}.")


def main(base: str) -> int:
    """Run the tests; return pytest's exit status."""
    command = ["git", "diff", "--name-only", f"{base}...HEAD"]
    changed = subprocess.check_output(command, cwd=ROOT, text=True).split("\n")
    chosen = folders([path for path in changed if path])
    print("the change touches", ", ".join(chosen) or "no long tests", flush=True)
    if not chosen:
        return 0
    status = subprocess.call([*PYTEST, "--tier=long", "--dist", "loadscope", *chosen], cwd=ROOT)
    return 0 if status == 5 else status  # 5: the folders have no long test


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
