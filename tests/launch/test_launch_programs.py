"""A few of the random programs of `run_programs.py`, which tries hundreds."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("what", ["right", "broken"])
def test_right_programs_run_and_broken_ones_are_explained(what):
    command = [sys.executable, "-m", "tests.soaks.run_programs", what, "7", "--seed", "2010"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "7 programs, 7 fully right" in run.stdout
