"""A test of launch that fails shows what its launches did last."""

from pathlib import Path

import pytest

LINES = 40


@pytest.fixture(autouse=True)
def _logged(tmp_path_factory, monkeypatch, request):
    request.node.events = tmp_path_factory.mktemp("events") / "log"
    monkeypatch.setenv("COURSE_LOG", str(request.node.events))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    events: Path | None = getattr(item, "events", None)
    if report.failed and events and events.exists():
        lines = events.read_text(encoding="utf-8").splitlines()[-LINES:]
        report.sections.append(("events of its launches (COURSE_LOG)", "\n".join(lines)))
    return report
