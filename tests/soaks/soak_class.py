"""Grades a made class twice and compares the bytes.

    python -m tests.soaks.soak_class [60] [--keep FOLDER]

Ten of the class are the worst of tests/hostile_class, the others right, half right, wrong and odd. What
comes out, tables, report and pages, must be alike, whatever the machine does besides.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from tests.hostile_class.members import hand_in, names_of

DAMAGED = names_of("damaged")
ATTACKS = names_of("attacks")
FORGERIES = names_of("forgeries")
WORST = [
    *("loops_and_swallows_what_would_end_it", "eats_memory", "forks_and_flees", "crashes"),
    *("prints_100_megabytes", "kills_its_group", "patches_and_puts_back", "speaks_for_the_judge"),
    *("makes_all_true_below_empty_answers", "brackets_without_end"),
]
ORDINARY = [
    *("all_right", "half_right", "counts_one_byte_more", "untouched", "second_thoughts"),
    *("metadata_lost", "cells_copied", "checks_edited", "habits_of_its_own", "wrong_name"),
]


def make(folder: Path, size: int, worst: list[str]) -> None:
    """Hands in for a class of `size`."""
    names = [*worst, *itertools.islice(itertools.cycle(ORDINARY), max(0, size - len(worst)))]
    for number, name in enumerate(names):
        [(path, _)] = hand_in(folder / "new", [name])
        path.parent.rename(folder / f"{number:02d}_{name}")
    (folder / "new").rmdir()


def grade(folder: Path, out: Path) -> dict[str, bytes]:
    """What the command writes about a class, by file name."""
    command = [sys.executable, "-m", "course_utils", "grade", str(folder), "--into", str(out)]
    run = subprocess.run(command, check=False, capture_output=True)
    (out / "text").write_bytes(run.stdout)
    return {
        str(p.relative_to(out)): p.read_bytes()
        for p in sorted(out.rglob("*"))
        if p.is_file() and p.suffix != ".png"
    }


def main(size: int, keep: Path | None) -> int:
    """Returns the exit status."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        make(folder / "class", size, WORST)
        seen = []
        for number in (1, 2):
            began = time.monotonic()
            seen.append(grade(folder / "class", folder / f"run{number}"))
            print(f"run {number}: {time.monotonic() - began:.0f} s", flush=True)
        different = [name for name in seen[0] | seen[1] if seen[0].get(name) != seen[1].get(name)]
        print(f"{size} submissions, {len(seen[0])} files, different: {different or 'none'}")
        return bool(different) or not seen[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", nargs="?", type=int, default=60)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    sys.exit(main(options.size, options.keep))
