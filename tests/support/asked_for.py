"""Tests that run only where somebody asks for them, and where the machine has what they take."""

from collections.abc import Callable

import pytest


def skip_unless(
    config: pytest.Config, option: str, what: str, takes: str, why_not: Callable[[], str | None]
) -> None:
    """Skips unless `option` was given and why_not() finds no reason; says `what` and why."""
    if not config.getoption(option):
        pytest.skip(f"{what}: it takes {takes} and {option}")
    if reason := why_not():
        pytest.skip(f"{what}: {reason}")
