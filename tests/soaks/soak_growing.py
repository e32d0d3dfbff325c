"""Kills and joins at random, hundreds of times: python -m tests.soaks.soak_growing [200] [--seed 0]"""

import argparse
import tempfile
from pathlib import Path

from tests.modules.test_growing import disturbed_by_dice

EACH = 10  # disturbances of one run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("disturbances", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    worst = 0.0
    for run in range(options.disturbances // EACH):
        with tempfile.TemporaryDirectory() as folder:
            difference = disturbed_by_dice(options.seed + run, EACH, Path(folder))
        worst = max(worst, difference)
        print(
            f"seed {options.seed + run}: {EACH} kills and joins, difference {difference:.0e}",
            flush=True,
        )
    print(f"largest difference from one process: {worst:.0e}")
    assert worst < 1e-5


main()
