"""Ends a run that tried answers to the exercises with a table of them; a run that is told to end
takes its servers and kernels with it."""

import os
import signal

import pytest

# Folders and modules whose tests wait most of their time: for a host that falls silent, for the end
# of a limit. Last, they would leave the other workers with nothing to do.
WAITING = {"two_hosts", "cluster", "grade", "test_launch_hosts.py", "test_replicas.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait long come first."""
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
    if any(kind == "solution" for kind, _, _ in recorded):
        from tests.checks.exercise_table import table  # imports torch, which other runs need not

        terminalreporter.section("exercises")
        terminalreporter.write_line(table(recorded))
