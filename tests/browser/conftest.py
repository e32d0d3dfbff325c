"""The browser that the tests of this folder share, and the folder for their screenshots."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import network_turns

from .lab import ROOT

BROWSERS = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]


@pytest.fixture(scope="session")
def browser() -> Iterator:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not executable:
        pytest.skip(f"no browser found: none of {', '.join(BROWSERS)} is on the PATH")
    with playwright.sync_playwright() as driver:
        # without its sandbox, because containers often run as root, where Chromium has none;
        # it opens only the test's own server on 127.0.0.1
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = driver.chromium.launch(executable_path=executable, args=options)
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def network_unchanged() -> Iterator[None]:
    with network_turns.unchanged():
        yield


@pytest.fixture
def screenshots(request: pytest.FixtureRequest) -> Path:
    folder = ROOT / request.config.getoption("--screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
