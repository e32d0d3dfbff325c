"""The book as a reader meets it: on a telephone and on a desk, in a real browser, offline."""

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread

import playground_pages
import pytest

from course_exercises.sources.chapters import chapters

from .lab import ROOT

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("myst_nb", reason="the book's tools are not installed")

SCREENS = {"telephone": {"width": 390, "height": 844}, "desk": {"width": 1280, "height": 900}}
CHAPTERS = [name for chapter in chapters() for name in chapter.notebooks]
DOCS = re.findall(r"(?m)^docs/\w+$", (ROOT / "book" / "index.md").read_text(encoding="utf-8"))
PAGES = ["index", *CHAPTERS, "quick_reference", *DOCS]
WIDER_THAN_SCREEN = "() => document.documentElement.scrollWidth - window.innerWidth"
BROKEN_PICTURES = """() => Promise.all(Array.from(document.images).map(image => {
    image.loading = 'eager';
    return image.decode().then(() => null, () => image.src);
})).then(results => results.filter(Boolean))"""
IDS = "() => Array.from(document.querySelectorAll('[id]')).map(e => encodeURI(e.id))"
LINKS = "() => Array.from(document.links).map(link => link.href)"
# elements that a reader cannot see whole: wider than their parent, and nothing there scrolls
UNREACHABLE = """() => Array.from(document.querySelectorAll('pre, table, math, img')).filter(e => {
    for (let box = e; box && box !== document.body; box = box.parentElement) {
        if (['auto', 'scroll'].includes(getComputedStyle(box).overflowX)) return false;
    }
    return e.getBoundingClientRect().right > window.innerWidth + 1;
}).map(e => e.outerHTML.slice(0, 200))"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a book that was built from nothing."""
    folder = tmp_path_factory.mktemp("book") / "html"
    subprocess.run([sys.executable, "tools/book.py", str(folder)], cwd=ROOT, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Look at two pages, or with --all-notebooks at each."""
    if "name" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-notebooks")
        metafunc.parametrize("name", PAGES if everything else [PAGES[0], PAGES[-1]])


@pytest.mark.parametrize("screen", SCREENS)
def test_a_page_can_be_read(name, screen, browser, book, screenshots: Path) -> None:
    with browser.new_page(viewport=SCREENS[screen]) as page:
        asked, complaints = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{book}{name}.html")
        assert page.evaluate(BROKEN_PICTURES) == []
        assert page.evaluate(WIDER_THAN_SCREEN) <= 0
        assert page.evaluate(UNREACHABLE) == []
        assert complaints == []
        assert [url for url in asked if not url.startswith((book, "data:"))] == []
        page.screenshot(path=screenshots / f"book {name} {screen}.png")


def test_no_link_of_the_book_is_broken(browser, book) -> None:
    places, links = set(), {}
    with browser.new_page() as page:
        for name in PAGES:
            address = f"{book}{name}.html"
            page.goto(address)
            places |= {address, *(f"{address}#{id}" for id in page.evaluate(IDS))}
            links[address] = [link for link in page.evaluate(LINKS) if link.startswith(book)]
        elsewhere = {link.rstrip("#") for own in links.values() for link in own} - places
        broken = [link for link in elsewhere if "#" in link or not page.request.get(link).ok]
    assert not broken
    for before, after in pairwise(f"{book}{name}.html" for name in PAGES):
        assert after in links[before], f"{before} does not lead on"


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "thesis.tex"
    kept.write_text("years of work")
    command = [sys.executable, "tools/book.py", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert built.returncode == 1
    assert "holds something that is no book" in built.stdout
    assert kept.exists()


def test_chapters_that_are_mentioned_are_linked(browser, book) -> None:
    with browser.new_page() as page:
        page.goto(f"{book}09_elastic.html")
        page.get_by_role("link", name="chapter 8", exact=True).first.click()
        assert page.url.endswith("08_fsdp.html")


def test_the_playground_is_a_click_away(browser, book) -> None:
    if not playground_pages.PACKAGE.exists():
        pytest.skip("Pyodide's npm package is not here, and npm did not fetch it")
    with browser.new_page() as page:
        page.goto(f"{book}index.html")
        page.get_by_role("link", name="Play first").click()
        page.get_by_role("link", name="Ledger", exact=True).click()
        page.get_by_role("button", name="16.64 GB").wait_for()
