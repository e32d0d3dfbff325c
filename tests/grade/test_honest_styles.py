"""Whatever passes in the notebook from top to bottom passes where it is graded (run_styles.py)."""

import json
import subprocess
import sys

import pytest

from tests.grade.run_styles import CASES


@pytest.fixture(scope="module")
def said():
    """For each notebook: what comes of it in a kernel, and in the grader."""
    command = [sys.executable, "-m", "tests.grade.run_styles"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return {case: said for case, *said in map(json.loads, run.stdout.splitlines())}


def test_there_are_many_styles():
    assert len(CASES) >= 200


@pytest.mark.parametrize("name", CASES)
def test_what_passes_in_the_notebook_passes_here(name, said):
    in_a_kernel, as_graded = said[name]
    assert in_a_kernel is True, "the notebook itself has no right answer"
    assert as_graded is True
