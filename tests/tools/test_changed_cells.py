"""tools/changed_cells.py: what a learner's copy changes runs beside the solved notebook's cells."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

ROOT = Path(__file__).parents[2]
# of each cell what the learner's copy has, and the solved one: source, and what it prints
CELLS = [
    (("x = 1", ""), ("x = 1", "")),
    (("guess = ...", ""), ("guess = 2", "")),
    (("y = 3", ""), ("y = 3", "")),
    (("print(guess)", "Ellipsis\n"), ("print(guess)", "2\n")),
    (("print(x + y)", "4\n"), ("print(x + y)", "4\n")),
    (("guess = None", ""), ("guess = 5", "")),
    (("print(guess)", "None\n"), ("print(guess)", "5\n")),
]
ORDER = ["0", "1'", "2", "3'", "1", "3", "4", "5'", "6'", "5", "6"]


def test_a_passage_runs_as_the_learner_has_it_and_then_as_it_is_solved(tmp_path: Path) -> None:
    assert ran(tmp_path, CELLS) == ORDER


@pytest.mark.parametrize("cell", [3, 6])
def test_a_copy_that_shows_something_else_fails(tmp_path: Path, cell: int) -> None:
    (source, _), solved = CELLS[cell]
    cells = [*CELLS[:cell], ((source, "7\n"), solved), *CELLS[cell + 1 :]]
    assert [each for each in ran(tmp_path, cells) if "failed" in each] == [f"{cell}' failed"]


def ran(folder: Path, cells: list) -> list[str]:
    """The tests in their order, 1' the learner's cell 1, and which have failed."""
    for name, copy in zip(("notebooks", "solutions"), zip(*cells, strict=True), strict=True):
        written = [
            new_code_cell(
                source,
                execution_count=1,
                outputs=[new_output("stream", text=printed)] if printed else [],
            )
            for source, printed in copy
        ]
        (folder / name).mkdir()
        nbformat.write(new_notebook(cells=written), folder / name / "a.ipynb")
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "conftest"]
    options = ["-c", ROOT / "pyproject.toml", "--rootdir", folder, "--nbval", "--with-copies"]
    options += [f"--nbval-sanitize-with={ROOT / 'tests/notebooks/sanitize.cfg'}"]
    subprocess.run(
        [*command, *options, f"--junitxml={report}", folder / "solutions"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tools")))},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    cases = ElementTree.parse(report).iter("testcase")
    names = [
        case.get("name", "") + " failed" * (case.find("failure") is not None) for case in cases
    ]
    return [name.removeprefix("Cell ").replace(" of the learner's copy", "'") for name in names]
