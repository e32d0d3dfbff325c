"""Keeps whoever runs the tests out of them: their progress and their IPython profile."""

import os
import tempfile
from pathlib import Path

import pytest

SCRATCH = tempfile.TemporaryDirectory(prefix="course-tests-")  # removed when the process ends
os.environ["IPYTHONDIR"] = str(Path(SCRATCH.name) / "ipython")


@pytest.hookimpl(tryfirst=True)  # before nbval starts the notebook's kernel
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give every test file, and so every notebook, a progress file of its own."""
    name = f"{item.path.parent.name}-{item.path.stem}.json"
    os.environ["COURSE_PROGRESS"] = str(Path(SCRATCH.name) / name)
