"""A class that works at once on one machine.

    python -m tests.soaks.soak_load 8 16 32 [--chapters 00 03]

For each size, so many learners run the solved notebooks from top to bottom at the same time, each in a
folder of their own, one half in the order of the chapters, the other in the opposite one. Strict nbval
looks at every cell: one that fails, and a verdict that is not the stored one, count alike. How long it
takes decides nothing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from course_exercises.sources.chapters import chapter

ROOT = Path(__file__).parents[2]
CELL_TIMEOUT = 3600  # seconds: with 32 learners on two cores, a cell that takes 10 s takes 160


def learner(chapters: list[str], home: Path) -> subprocess.Popen:
    """Starts a learner, who runs these notebooks one after the other in the folder `home`."""
    home.mkdir()
    titles = [f"{chapter(n).title}.ipynb" for n in chapters]
    notebooks = [shutil.copy(ROOT / "solutions" / title, home) for title in titles]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval"]
    return subprocess.Popen(
        [*command, f"--nbval-cell-timeout={CELL_TIMEOUT}", *notebooks],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"CI": "true"},  # differences are printed whole
    )


def work(size: int, chapters: list[str]) -> int:
    """Lets a class work; prints what became of it and returns how many cells were wrong."""
    started, orders = time.monotonic(), (chapters, chapters[::-1])
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="class-", dir=ROOT / "build") as homes:
        learners = [learner(orders[n % 2], Path(homes, str(n))) for n in range(size)]
        printed = [each.communicate()[0] for each in learners]
    passed, failed = (sum(_count(text, word) for text in printed) for word in ("passed", "failed"))
    stopped = sum(each.returncode not in (0, 1) for each in learners)
    for text in printed:
        if _count(text, "failed") or not _count(text, "passed"):
            print(text[-6000:])
    minutes = (time.monotonic() - started) / 60
    words = f"{size} learners: {passed} cells as stored, {failed} not, {stopped} learners stopped"
    print(f"{words}; {minutes:.0f} minutes", flush=True)
    return failed + stopped


def _count(text: str, word: str) -> int:
    found = re.findall(rf"(\d+) {word}", text)
    return int(found[-1]) if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sizes", nargs="+", type=int)
    parser.add_argument("--chapters", nargs="+", default=["00", "03"])
    options = parser.parse_args()
    return int(sum(work(size, options.chapters) for size in options.sizes) > 0)


if __name__ == "__main__":
    sys.exit(main())
