"""Whatever passes in the notebook from top to bottom passes where it is graded (honest_styles.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grade.honest_styles import STYLES


@pytest.fixture(scope="module")
def said():
    """For each style: what comes of it in a kernel, and in the grader."""
    program = Path(__file__).with_name("honest_styles.py")
    command = [sys.executable, str(program)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(run.stdout)


def test_there_are_many_styles():
    assert len(STYLES) >= 60


@pytest.mark.parametrize("name", STYLES)
def test_what_passes_in_the_notebook_passes_here(name, said):
    in_a_kernel, as_graded = said[name]
    assert in_a_kernel is True, "the style itself is no right answer"
    assert as_graded is True
