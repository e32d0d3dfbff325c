"""Skips these tests unless they are asked for: the environment takes 5 GB and minutes."""

import shutil
import subprocess

import pytest

from tests.support.asked_for import skip_unless


@pytest.fixture(autouse=True, scope="session")
def asked_for(request):
    takes = "uv, Python 3.12, 5 GB"
    skip_unless(request.config, "--colab", "Colab was not simulated", takes, _why_not)


def _why_not() -> str | None:
    if shutil.which("uv") is None:
        return "uv is not here"
    found = subprocess.run(["uv", "python", "find", "3.12"], capture_output=True, check=False)
    return "Python 3.12 is not here" if found.returncode else None
