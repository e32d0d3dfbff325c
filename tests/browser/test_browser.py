"""Every notebook as a learner meets it: in JupyterLab, in a real browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from course_exercises.sources.chapters import chapters

from .lab import Lab, running_lab

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from .page import NotebookPage

SMOKE = "00_start_here"  # the one that `make test-all` opens; `make browser` opens all
NAMES = [name for chapter in chapters() for name in chapter.notebooks]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Open one notebook, or with --all-notebooks each."""
    metafunc.parametrize("name", NAMES if metafunc.config.getoption("--all-notebooks") else [SMOKE])


def test_notebook_runs_and_its_sliders_move(
    name: str, browser, lab: Lab, screenshots: Path
) -> None:
    with browser.new_page() as page:
        notebook = NotebookPage(page, lab, name, screenshots)
        for cell in notebook.run_all():
            assert not cell["errors"], f"{cell['source']}\n{cell['errors']}"
            assert cell["count"], f"this cell did not run:\n{cell['source']}"
        notebook.screenshots_of_all()
        for number, explorer in enumerate(notebook.explorers(), 1):
            controls = notebook.controls(explorer)
            assert controls, "an explorer without anything to move"
            notebook.screenshot(f"explorer {number} start", explorer)
            for control in controls:
                assert notebook.picture_changes(explorer, control), control
            notebook.screenshot(f"explorer {number} moved", explorer)
