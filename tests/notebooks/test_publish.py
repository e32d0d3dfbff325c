"""The notebooks for Colab and Kaggle: the first cell acts there only, and takes what is missing only."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import publish
import pytest

ROOT = Path(__file__).parents[2]
HERE = {"COLAB_RELEASE_TAG": "release-colab_20260901"}
PROVIDED = {"torch", "torchvision", "IPython", "filelock"}  # torch needs that too
OPTIONAL = {"ipyparallel"}  # what needs it says what to install
WRITTEN = {"elastic_files", "elastic_parts"}  # by cells of chapter 09
PACKAGES = {path.parent.name for path in ROOT.glob("course_*/__init__.py")}
NOT_IN_CHAPTERS = ("course_grader/", "course_planner/planning.py", "course_planner/tracing.py")


def run_cell(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess:
    """Executes the cell in a Python of its own; what it prints at last is its working folder."""
    text = publish.first_cell(str(folder / "nowhere")).source + "\nimport os; print(os.getcwd())"
    kept = {k: v for k, v in os.environ.items() if k not in ("KAGGLE_KERNEL_RUN_TYPE", *HERE)}
    command = [sys.executable, *options, "-c", text]
    return subprocess.run(
        command, cwd=folder, env=kept | variables, capture_output=True, text=True, check=False
    )


def test_the_cell_does_nothing_elsewhere(tmp_path):
    done = run_cell(tmp_path)
    assert (done.stdout, done.stderr) == (f"{tmp_path}\n", "")


@pytest.mark.parametrize("where", ["COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"])
def test_where_the_course_is_installed_the_cell_only_goes_to_its_notebooks(tmp_path, where):
    done = run_cell(tmp_path, **{where: "Interactive"})
    assert (done.stdout, done.stderr) == (f"{ROOT / 'notebooks'}\n", "")


def test_without_a_network_it_says_what_to_do(tmp_path):
    done = run_cell(tmp_path, "-I", "-S", **HERE)  # no packages: nothing is installed
    assert done.returncode
    assert "was not fetched" in done.stderr and "Internet" in done.stderr
    assert not list(tmp_path.iterdir())


def test_each_published_notebook_is_the_learners_behind_the_cell(tmp_path):
    written = publish.publish(ROOT, "https://git.example/course.git", tmp_path)
    assert [path.name for path in written] == sorted(
        path.name for path in (ROOT / "notebooks").glob("*.ipynb")
    )
    for path in written:
        published = nbformat.read(path, as_version=4)
        nbformat.validate(published)
        first, *others = published.cells
        assert others == nbformat.read(ROOT / "notebooks" / path.name, as_version=4).cells
        assert not first.outputs and "'https://git.example/course.git'" in first.source
        assert first.metadata["jupyter"] == {"source_hidden": True}


def test_the_cell_asks_for_what_the_chapters_import():
    needed = set(ast.literal_eval(re.search(r"needed = (\(.*\))", publish.CELL.read_text())[1]))
    files = [
        path
        for path in ROOT.glob("course_*/**/*.py")
        if not path.relative_to(ROOT).as_posix().startswith(NOT_IN_CHAPTERS)
    ]
    files += (ROOT / "solutions").glob("*.py")
    imported = set().union(*(imports(path) for path in files))
    assert (
        imported - set(sys.stdlib_module_names) - PROVIDED - PACKAGES - OPTIONAL - WRITTEN == needed
    )


def imports(path: Path) -> set[str]:
    """The packages that a file names in its imports."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    of = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.split(".")[0] for name in plain + of}


def test_without_an_address_it_says_where_to_set_it(capsys, monkeypatch):
    monkeypatch.setattr(publish, "address", lambda root: "")
    assert publish.main() == 1
    assert "[tool.course] in pyproject.toml" in capsys.readouterr().err


def test_the_address_stands_in_one_place():
    assert isinstance(publish.address(ROOT), str)
