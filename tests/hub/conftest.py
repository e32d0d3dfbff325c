"""Skips these tests unless they are asked for: they make two system users and install JupyterHub."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from asked_for import skip_unless
from hub import why_not


@pytest.fixture(autouse=True, scope="session")
def asked_for(request):
    takes = "root, uv, npm, two new users"
    skip_unless(request.config, "--hub", "JupyterHub did not run", takes, why_not)
