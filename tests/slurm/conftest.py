"""Skips these tests unless they are asked for: they need root and SLURM's daemons."""

import pytest

from cluster import why_not
from tests.support.asked_for import skip_unless


@pytest.fixture(autouse=True, scope="session")
def asked_for(request):
    skip_unless(request.config, "--slurm", "SLURM did not run", "root, its daemons", why_not)
