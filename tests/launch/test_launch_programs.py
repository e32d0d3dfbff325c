"""A few of the random programs of `soak_programs.py` and `run_programs.py`, which try hundreds."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.soaks import soak_programs


def test_right_programs_run_and_wrong_ones_are_explained(tmp_path):
    seeds = (0, 1, 3)
    with ThreadPoolExecutor(len(seeds)) as pool:
        found = list(pool.map(lambda seed: soak_programs.complaint(seed, tmp_path), seeds))
    assert found == [None] * len(seeds)


@pytest.mark.parametrize("what", ["right", "broken"])
def test_programs_of_another_hand(what):
    command = [sys.executable, "-m", "tests.soaks.run_programs", what, "4", "--seed", "2010"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "4 programs, 4 fully right" in run.stdout
