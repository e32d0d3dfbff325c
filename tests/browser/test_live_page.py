"""A launch that goes on, as a person watches it: what is shown below the cell, and what is saved."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from tests.support.pages import Page

from .lab import Lab, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from .page import NotebookPage

IMPORTS = """import time
import torch, torch.distributed as dist
from course_utils.launch import launch
from IPython.display import HTML, display
from tqdm import tqdm

def slow(rank):
    time.sleep(5)

def steps(rank):
    for step in range(6):
        print("step", step)
        time.sleep(1)

def bars(rank):
    for step in tqdm(range(30), bar_format="{desc}{bar:20}{n}", desc="epoch", disable=rank > 1):
        time.sleep(0.2)

def missed(rank):
    if rank == 1:
        time.sleep(5)
        raise ValueError("mine")
    dist.all_reduce(torch.ones(1))
"""
SHOWN = {  # below a cell at some time
    IMPORTS: "",
    "launch(slow, 4);": "3 s · 4 of 4 ready",
    "print('before')\nlaunch(steps, 4);": "[rank 3] step 1",
    "display(HTML('<b>before</b>'))\nlaunch(bars, 4);": "[rank 1] epoch█",
    "launch(missed, 4, backend='gloo')": "4 of 4 ready · ranks 0, 2 and 3 last called all_reduce",
}
NAME = "live"
RUN = """() => { window.over = false;
    window.jupyterapp.commands.execute('notebook:run-cell-and-select-next')
        .then(() => { window.over = true; }); }"""
TEXT = """number => { const shown = document.querySelectorAll('.jp-CodeCell')[number]
    .querySelector('.jp-OutputArea').innerText;
    return shown.includes('TEXT') || window.over; }"""
# rows that are seen, and what begins one or stands in one
ROWS = """number => { const text = document.querySelectorAll('.jp-CodeCell')[number]
    .querySelector('.jp-OutputArea pre');
    return [Math.round(text.offsetHeight / parseFloat(getComputedStyle(text).lineHeight)),
        text.innerText.match(/\\[rank |before| ready/g).length]; }"""
SAVE = "() => window.jupyterapp.commands.execute('docmanager:save')"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    (tmp_path / "notebooks").mkdir()
    written = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in SHOWN],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    for copy in ("notebooks/live.ipynb", "executed.ipynb"):
        nbformat.write(written, tmp_path / copy)
    with serving(tmp_path) as lab:
        yield lab


def test_what_a_launch_shows_goes_again(browser, lab: Lab, screenshots: Path) -> None:
    with browser.new_page() as page:
        notebook = NotebookPage(page, lab, NAME, screenshots)
        for number, shown in enumerate(SHOWN.values()):
            page.evaluate(RUN)
            page.wait_for_function(TEXT.replace("TEXT", shown), arg=number, timeout=120_000)
            assert not shown or not page.evaluate("() => window.over"), f"never shown: {shown}"
            notebook.screenshot(f"{number} meanwhile")
            if shown:
                assert len(set(page.evaluate(ROWS, number))) == 1, "each rank has a row of its own"
            page.wait_for_function("() => window.over", timeout=120_000)
        notebook.screenshot("end")
        page.evaluate(SAVE)
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--execute", "--allow-errors"]
    command += ["--to=notebook", "--inplace", str(lab.folder / "executed.ipynb")]
    subprocess.run(command, check=True, capture_output=True)
    assert _outputs(lab.folder / "notebooks/live.ipynb") == _outputs(lab.folder / "executed.ipynb")


def _outputs(notebook):
    """What each cell shows, without the cells' numbers and the addresses in a traceback."""
    shown = []
    for cell in json.loads(notebook.read_text())["cells"][: len(SHOWN)]:
        page = Page()
        for output in cell["outputs"]:
            kind = output["output_type"]
            content = {name: output.get(name) for name in ("name", "data", "ename", "evalue")}
            page.take(kind, content | {"text": "".join(output.get("text", ""))})
        shown.append(page.outputs)
    return shown
