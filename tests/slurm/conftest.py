"""Skips these tests unless they are asked for: they need root and SLURM's daemons."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cluster import why_not


@pytest.fixture(autouse=True, scope="session")
def asked_for(request):
    if not request.config.getoption("--slurm"):
        pytest.skip("SLURM did not run: it takes root, its daemons and --slurm")
    if reason := why_not():
        pytest.skip(f"SLURM did not run: {reason}")
