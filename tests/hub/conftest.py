"""Skips these tests unless they are asked for: they make two system users and install JupyterHub."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hub import why_not


@pytest.fixture(autouse=True, scope="session")
def asked_for(request):
    if not request.config.getoption("--hub"):
        pytest.skip("JupyterHub did not run: it takes root, uv, npm, two new users and --hub")
    if reason := why_not():
        pytest.skip(f"JupyterHub did not run: {reason}")
