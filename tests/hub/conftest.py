"""Skips these tests unless they are asked for: they make two system users and install JupyterHub."""

import pytest
from hub import why_not

from tests.support.asked_for import skip_unless


@pytest.fixture(autouse=True, scope="session")
def asked_for(request):
    takes = "root, uv, npm, two new users"
    skip_unless(request.config, "--hub", "JupyterHub did not run", takes, why_not)
