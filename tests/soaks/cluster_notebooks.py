"""The notebooks of the lessons over two hosts, which two of ipyparallel's engines play, with their
stored outputs.

    python -m tests.soaks.cluster_notebooks          chapters 00 to 08, learner's and solved
    python -m tests.soaks.cluster_notebooks 03 05    some of them

No notebook knows of it: COURSE_CLUSTER=2 in the environment is all. The exit code is 1 if a cell printed
anything else than on one machine, but for those below.
"""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = [f"{number:02}" for number in range(9)]
OPTIONS = ["-q", "-n", "0", "-p", "no:cacheprovider", "--nbval"]
# What stands in a cell that is about one machine, and why.
ONE_MACHINE = {
    "def who_am_i(rank)": "it shows LOCAL_RANK, a rank's number on its host",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """nbval runs the cells about one machine, and does not compare what they print."""
    for item in items:
        if any(words in item.cell.source for words in ONE_MACHINE):
            item.options["check"] = False


def notebooks(chapters: list[str]) -> list[Path]:
    """The lessons of these chapters, and what goes beyond them, in both copies."""
    return [
        path
        for chapter in chapters
        for folder in ("notebooks", "solutions")
        for path in sorted((ROOT / folder).glob(f"{chapter}_*.ipynb"))
    ]


def run(paths: list[Path]) -> bool:
    """Whether all cells printed what is stored."""
    os.environ["COURSE_CLUSTER"] = "2"
    os.chdir(ROOT)
    return pytest.main([*OPTIONS, *map(str, paths)], [sys.modules[__name__]]) == 0


if __name__ == "__main__":
    sys.exit(not run(notebooks(sys.argv[1:] or CHAPTERS)))
