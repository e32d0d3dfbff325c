"""Skips these tests unless they are asked for: they need root and SLURM's daemons."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from asked_for import skip_unless

from cluster import why_not


@pytest.fixture(autouse=True, scope="session")
def asked_for(request):
    skip_unless(request.config, "--slurm", "SLURM did not run", "root, its daemons", why_not)
