"""Options of the tests; keeps the progress and the IPython profile of whoever runs them out."""

import os
import tempfile
from pathlib import Path

import nbval.kernel
import pytest
from changed_cells import with_copies
from kernels import KernelWithoutPorts

SCRATCH = tempfile.TemporaryDirectory(prefix="course-tests-")  # removed when the process ends
os.environ["IPYTHONDIR"] = str(Path(SCRATCH.name) / "ipython")
nbval.kernel.KernelManager = KernelWithoutPorts  # nbval gives up a kernel whose port was taken


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the tests: which, and what those may use that need more than the course."""
    group = parser.getgroup("course")
    group.addoption("--tier", choices=["quick", "long"], help="as tools/tiers.py tells; else all")
    group.addoption(
        "--with-copies",
        action="store_true",
        help="beside solved cells, what learners' copies change",
    )
    group.addoption("--all-notebooks", action="store_true", help="open every notebook, not one")
    group.addoption(
        "--kills", type=int, default=3, help="of workers under the printed command; 20 take long"
    )
    group.addoption(
        "--colab", action="store_true", help="make Colab's environment, 5 GB, and use it"
    )
    group.addoption("--hub", action="store_true", help="start JupyterHub here, with two new users")
    group.addoption("--slurm", action="store_true", help="start SLURM here, and jobs on it")
    group.addoption("--screenshots", default="build/screenshots", help="folder for screenshots")


@pytest.hookimpl(tryfirst=True)  # before nbval starts the notebook's kernel
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give every test file, and so every notebook, a progress file of its own."""
    name = f"{item.path.parent.name}-{item.path.stem}.json"
    os.environ["COURSE_PROGRESS"] = str(Path(SCRATCH.name) / name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the cells of learners' copies, where they are asked for."""
    if config.getoption("--with-copies"):
        items[:] = with_copies(items)
