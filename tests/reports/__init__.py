"""Programs after public bug reports; importing the themes enters them."""

from tests.reports import (  # noqa: F401
    checkpoints,
    groups,
    hangs,
    loaders,
    messages,
    mismatches,
    rank0,
    threads,
    uneven,
)
from tests.reports.corpus import REPORTS, Report

__all__ = ["REPORTS", "Report"]
