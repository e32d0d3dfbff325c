"""Whatever passes in the notebook from top to bottom passes where it is graded (run_styles.py, honest_at_home.py)."""

import json
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from course_grader import Mark
from course_grader.grading import Request, grade_all
from tests.grade.honest_at_home import AT_HOME, IMPORTS
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


@pytest.fixture(scope="module")
def marks(tmp_path_factory):
    """By name, what a notebook that is checked at home gets for the exercise that it answers."""
    requests = []
    for cells in AT_HOME.values():
        path = tmp_path_factory.mktemp("at_home") / f"{_chapter_of(cells)}.ipynb"
        nbformat.write(new_notebook(cells=list(map(new_code_cell, [IMPORTS, *cells]))), path)
        requests.append(Request(path, known=_OTHERS[path.stem]))
    grades = grade_all(requests, jobs=2, isolated=None)
    return {name: {m.exercise: m for m in g.exercises} for name, g in zip(AT_HOME, grades)}


@pytest.mark.parametrize("name", AT_HOME)
def test_what_passes_in_the_notebook_passes_at_home(name, marks):
    mark = marks[name]["1.3" if _chapter_of(AT_HOME[name]).startswith("01") else "4.1"]
    assert mark.status == "passed", mark.feedback


def _known(*exercises):
    return {id: Mark(id, "", 0, "passed", "") for id in exercises}


_OTHERS = {"01_factory": _known("1.1", "1.2"), "04_manual_split": _known("4.2", "4.3")}


def _chapter_of(cells):
    return "01_factory" if "decide" in cells[-1] else "04_manual_split"
