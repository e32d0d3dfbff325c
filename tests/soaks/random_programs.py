"""What the soaks of random programs share: a program as a function, and the run over many seeds."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def compiled(source: str, path: Path, space: dict) -> Callable[[int], None]:
    """The function `work` of a program, with its source in a file, so that its lines can be quoted."""
    path.write_text(source)
    space = {"__name__": "__main__"} | space
    exec(compile(source, str(path), "exec"), space)  # noqa: S102
    return space["work"]


def soak(
    description: str,
    complaint: Callable[[int, Path], str | None],
    words: str,
    *,
    programs: int,
    at_once: int,
) -> None:
    """Runs complaint(seed, folder) for as many seeds as the command line says, prints what it returns,
    and ends the process: status 1 if there was any."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--programs", type=int, default=programs)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--at-once", type=int, default=at_once)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.programs)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        found = [c for c in pool.map(lambda seed: complaint(seed, Path(folder)), seeds) if c]
    print("\n\n".join(found))
    print(f"{options.programs} {words}: {len(found)} complaints")
    sys.exit(bool(found))
