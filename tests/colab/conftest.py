"""Skips these tests unless they are asked for: the environment takes 5 GB and minutes."""

import shutil
import subprocess

import pytest


@pytest.fixture(autouse=True, scope="session")
def asked_for(request):
    if not request.config.getoption("--colab"):
        pytest.skip("Colab was not simulated: it takes uv, Python 3.12, 5 GB and --colab")
    if shutil.which("uv") is None:
        pytest.skip("Colab was not simulated: uv is not here")
    found = subprocess.run(["uv", "python", "find", "3.12"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip("Colab was not simulated: Python 3.12 is not here")
