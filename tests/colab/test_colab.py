"""The first chapters in Colab's versions, opened through the first cell, strictly.

What stands for Colab is its Python, its versions of what has a say (IPython, ipykernel, ipywidgets,
torch, matplotlib, numpy, psutil), packages that lie beside the environment's own folder, and its
variable. The address is a folder of this machine. The kernel is that environment's, and the test that
watches it is strict nbval.

Kernel and packages stay in build/colab for the next run: delete that folder for a fresh one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import publish
import pytest

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "colab-simulation"
PYTHON = PLACE / "environment" / "bin" / "python"
VERSIONS = [
    *("torch==2.11.0", "torchvision==0.26.0", "ipython==7.34.0", "ipykernel==6.17.1"),
    *("ipywidgets==7.7.1", "traitlets==5.7.1", "matplotlib==3.10.0", "numpy==2.0.2"),
    *("psutil==5.9.5", "tqdm==4.67.1", "setuptools==75.2.0"),
]
CHAPTERS = ["00_start_here", "01_factory", "02_data_parallel", "03_ddp"]


def call(*command: str | Path, **options) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


@pytest.fixture(scope="session")
def kernel() -> dict[str, str]:
    """Environment variables with which Jupyter finds the kernel of that environment."""
    packages = PLACE / "dist-packages"
    if not (PLACE / "complete").exists():
        call("uv", "venv", "--clear", "--seed", "--python", "3.12", PYTHON.parents[1])
        call("uv", "pip", "install", "--python", PYTHON, "--target", packages, *VERSIONS)
        [site] = PYTHON.parents[1].glob("lib/python*/site-packages")
        (site / "colab.pth").write_text(f"{packages}\n", encoding="utf-8")
        (PLACE / "complete").touch()
    spec = PLACE / "share" / "kernels" / "colab"
    spec.mkdir(parents=True, exist_ok=True)
    argv = [str(PYTHON), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    described = {"argv": argv, "display_name": "Colab", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(described), encoding="utf-8")
    return {"JUPYTER_PATH": str(PLACE / "share"), "COLAB_RELEASE_TAG": "release-colab_20260901"}


@pytest.fixture(scope="session")
def content(tmp_path_factory) -> Path:
    """The folder in which Colab opens a notebook: no course is near it."""
    folder = tmp_path_factory.mktemp("content")
    publish.publish(ROOT, str(ROOT), folder)
    return folder


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_opened_in_colab_prints_what_is_stored(chapter, kernel, content):
    call("uv", "pip", "uninstall", "--python", PYTHON, "course-utils")
    call(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", content),
        *("--nbval", "--nbval-kernel-name", "colab", "--nbval-cell-timeout=300"),
        content / f"{chapter}.ipynb",
        cwd=content,
        env=os.environ | kernel | {"COURSE_PROGRESS": str(content / f"{chapter}.json")},
    )
    versions = "import torch, course_utils; print(torch.__version__, course_utils.__file__)"
    found = subprocess.check_output([PYTHON, "-c", versions], cwd=content, text=True)
    version, package = found.split()
    assert version.startswith("2.11.0"), "the course has changed the torch that it found"
    assert Path(package).parents[1] == content / "course"
