"""Which lines of a failure are the learner's, wherever PyTorch and IPython are installed."""

import linecache
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

from course_utils.launch.story.frames import Frame, cells, is_own

FAILS = """
import torch.distributed as dist
from course_utils.launch import RankFailure, launch

def scatters_nothing(rank):
    dist.all_reduce("no tensor")

if __name__ == "__main__":
    try:
        launch(scatters_nothing, 2)
    except RankFailure as failure:
        print(failure)
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """The Python of a virtual environment that finds all packages in another one's folder, as with
    a module system's PyTorch and `venv --system-site-packages`."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    own = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    outer = sysconfig.get_path("purelib")
    (own / "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    return python


def test_pytorch_of_another_environment_is_a_library(elsewhere: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS)
    run = subprocess.run([elsewhere, script], check=True, capture_output=True, text=True)
    shown = run.stdout.splitlines()
    quotes = [line.strip() for line in shown if line.startswith("    ") and ", line " in line]
    assert quotes == ['train.py, line 6, in scatters_nothing:  dist.all_reduce("no tensor")']


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/home/learner/.local/lib/python3.12/site-packages/torch/nn/modules/module.py", False),
        ("/usr/lib/python3/dist-packages/psutil/__init__.py", False),
        ("/home/learner/site-packages.py", True),
        ("/home/learner/course/train.py", True),
    ],
)
def test_installed_packages_are_told_by_their_folder(file: str, own: bool) -> None:
    assert is_own(file) == own


def test_a_cell_of_ipython_7_is_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiler has no format_code_name, and gives the texts in linecache a date."""
    name = "/tmp/ipykernel_4711/123.py"
    entry = (9, time.time(), ["x = 1\n", "y = 2\n"], name)
    monkeypatch.setitem(linecache.cache, name, entry)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=None))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert Frame(name, 2, "<module>").place == "cell line 2"
    assert cells()[name] == (9, None, entry[2], name)
    assert __file__ not in cells()


def test_a_line_is_that_of_the_file_as_it_is_now(tmp_path: Path) -> None:
    """Whoever mends a script reads of the new one why it has failed again."""
    script = tmp_path / "train.py"
    for text in ("loss.backward()", "optimizer.step()"):
        script.write_text(f"{text}\n")
        assert Frame(str(script), 1, "main").source == text
