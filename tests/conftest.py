"""Ends a run that tried answers to the exercises with a table of them; a run that is told to end
takes its servers and kernels with it."""

import os
import signal
from pathlib import Path

import pytest
import tiers

# Folders and modules whose tests wait most of their time: for a host that falls silent, for the end
# of a limit. Last, they would leave the other workers with nothing to do.
WAITING = {"two_hosts", "cluster", "grade", "reports", "test_launch_hosts.py", "test_growing.py"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file whose tests are all of the other tier is not even imported."""
    tier = config.getoption("--tier")
    if tier and collection_path.name.startswith("test_"):
        file = collection_path.relative_to(Path(__file__).parent).as_posix()
        return tiers.of_file(file) not in (tier, None) or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of a tier, where one is asked for; those that wait long come first."""
    if tier := config.getoption("--tier"):
        ids = {item: item.nodeid.removeprefix("tests/") for item in items}
        tiers_of = tiers.of_tests(ids.values())
        mine = {item: tiers_of[ids[item]] == tier for item in items}
        config.hook.pytest_deselected(items=[item for item in items if not mine[item]])
        items[:] = [item for item in items if mine[item]]
    items.sort(key=lambda item: WAITING.isdisjoint(item.path.parts))


def pytest_configure():
    """SIGTERM ends a run as Ctrl-C does, so that fixtures stop what they have started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """The next test of this process begins in the same folder, whatever this one has called: the
    builder goes to the course that it builds."""
    before = os.getcwd()
    try:
        return (yield)
    finally:
        os.chdir(before)


def pytest_terminal_summary(terminalreporter):
    """Print what tests/checks/test_wrong_answers.py recorded, on whichever worker it ran."""
    recorded = [
        (kind, exercise_id, outcome == "passed")
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        for kind, exercise_id in report.user_properties
    ]
    if recorded:
        from tests.checks.exercise_table import table  # imports torch, which other runs need not

        terminalreporter.section("exercises")
        terminalreporter.write_line(table(recorded))
