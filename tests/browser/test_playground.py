"""The playground as a visitor meets it, who has installed nothing: from a static server, by keyboard."""

from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import playground_pages
import pytest

from .test_book import WIDER_THAN_SCREEN, Quiet

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

SCREENS = {"telephone": (360, "dark"), "desk": (1280, "light")}
START = 120_000  # milliseconds: a busy machine


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the playground, built from nothing."""
    if not playground_pages.PACKAGE.exists():
        pytest.skip("Pyodide's npm package is not here: make playground fetches it")
    folder = tmp_path_factory.mktemp("playground")
    playground_pages.build(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(params=SCREENS)
def page(request, browser, pages) -> Iterator:
    width, scheme = SCREENS[request.param]
    viewport = {"width": width, "height": 800}
    with browser.new_page(viewport=viewport, color_scheme=scheme) as page:
        page.set_default_timeout(START)
        asked, complaints = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        yield page
        assert page.evaluate(WIDER_THAN_SCREEN) <= 0
        assert page.evaluate("document.cookie") == ""
        assert complaints == []
        assert [url for url in asked if not url.startswith((pages, "data:"))] == []


def press(page, keys: str) -> None:
    for key in keys.split():
        page.keyboard.press(key)


def predict(page, value: str) -> None:
    page.get_by_role("button", name=value, exact=True).press("Enter")
    page.locator("#board").wait_for()


def test_a_schedule_is_played_by_keyboard(page, pages, screenshots: Path) -> None:
    page.goto(f"{pages}index.html")
    page.get_by_role("link", name="fill a pipeline").click()
    predict(page, "9 units")
    page.locator("[data-rank='0'] .track").click()  # only F0 may go there
    press(page, "f b")
    said = page.get_by_role("status")
    assert said.inner_text() == "B0 cannot go there: rank 1 has to run B0 first."
    press(page, "1 f b u b f b 0 b f 1 f b 0 b b")
    assert said.inner_text() == "Rank 0 runs B2 from 10 to 12."
    end = page.locator("#end").inner_text()
    assert "Your step takes 12 units, and its ranks are idle for 25.0 % of it. It is 1F1B." in end
    assert "12 is the least" in end
    assert (
        "You predicted 9 units. That is a rank's work alone." in page.locator("#board").inner_text()
    )
    link = "p2m3v1-FB-cap2/F0F1B0F2B1B2/F0B0F1B1F2B2"
    assert page.url.endswith(f"#{link}") and f'play("{link}")' in end
    page.screenshot(
        path=screenshots / f"schedules {page.viewport_size['width']}.png", full_page=True
    )
    page.reload()  # the address holds the position, and the browser the prediction
    page.get_by_text("It is 1F1B.").wait_for()


def test_a_v_turns_at_the_last_rank(page, pages) -> None:
    page.goto(f"{pages}schedules.html#p2m1V2-FBW-cap2")
    predict(page, "4.5 units")
    press(page, "0 f 1 f b")
    said = page.get_by_role("status")
    assert said.inner_text() == "B0.1 cannot go there: rank 1 has to run F0.1 first."
    press(page, "f 0 f b w 1 b w b w 0 b w")
    assert said.inner_text() == "Rank 0 runs W0 from 4.5 to 5."
    end = page.locator("#end").inner_text()
    assert "It is ZB-V, which here is the same as DualPipe-V." in end
    assert "4.5 is the least. So there is a shorter one" in end
    assert 'play("p2m1V2-FBW-cap2/F0F0.1B0.1W0.1B0W0/F0F0.1B0.1W0.1B0W0")' in end


def test_a_ring_is_carried_by_keyboard(page, pages, screenshots: Path) -> None:
    page.goto(f"{pages}ring.html#n2")
    predict(page, "6 MB")
    press(page, "Enter Enter")  # the first piece of rank 0, twice
    said = page.get_by_role("status")
    assert said.inner_text().startswith("That cannot go: rank 1 has the whole sum of piece 0")
    press(page, "Tab Tab Tab Enter")  # piece 1 of rank 1
    press(page, "Shift+Tab Enter Shift+Tab Enter")  # and the sums back
    end = page.locator("#end").inner_text()
    assert "The busiest has sent 12 MB, in 2 steps. That is the least" in end
    assert "You predicted 6 MB. That is half of the way" in page.locator("#board").inner_text()
    assert page.url.endswith("#n2/00111001")
    page.screenshot(path=screenshots / f"ring {page.viewport_size['width']}.png", full_page=True)


def test_a_ledger_is_read_by_keyboard(page, pages, screenshots: Path) -> None:
    page.goto(f"{pages}ledger.html#7.5/64/40")
    predict(page, "16.64 GB")
    page.get_by_text("You predicted 16.64 GB. That is right.").wait_for()
    said = page.get_by_role("status")
    assert "fits with ZeRO 1, ZeRO 2, ZeRO 3, tensor parallel, pipeline." in said.inner_text()
    press(page, "Control+A 8")  # ranks
    assert "fits with ZeRO 2, ZeRO 3, tensor parallel, pipeline." in said.inner_text()
    assert "Never fits" in page.get_by_role("listitem").filter(has_text="DDP:").inner_text()
    page.screenshot(path=screenshots / f"ledger {page.viewport_size['width']}.png", full_page=True)


def test_ranks_are_laid_out_by_keyboard(page, pages, screenshots: Path) -> None:
    page.goto(f"{pages}layout.html#2x8/dp2.pp2.tp4")
    page.locator("#rules", has_text="Llama-3-8B trains on 2 machines").wait_for()
    predict(page, "111.13 GB")
    page.get_by_text("You predicted 111.13 GB. That is right.").wait_for()
    said = page.get_by_role("status")
    assert said.inner_text().startswith("It fits, and another split or order has a shorter step")
    page.get_by_role("combobox", name="neighbours are").select_option("tp dp pp")
    page.get_by_role("combobox", name="tensor ranks").focus()
    press(page, "ArrowUp")  # 2 of them
    assert said.inner_text() == "It fits, and no split of this board has a shorter step."
    assert page.url.endswith("#2x8/tp2.dp4.pp2")
    page.get_by_role("button", name="Rank 5, in no group of it").press("Enter")
    assert page.get_by_role("button", name="Rank 13, one of its stages").is_visible()
    page.screenshot(path=screenshots / f"layout {page.viewport_size['width']}.png", full_page=True)


def test_a_plan_is_made_by_keyboard(page, pages, screenshots: Path) -> None:
    page.goto(f"{pages}plan.html#8x4090/tp8.pp1.z1.b1.selective")
    page.locator("#rules", has_text="Llama-3.2-3B trains on 8 4090 GPUs").wait_for()
    page.get_by_role("combobox", name="What takes most of a step?").select_option("tensor")
    predict(page, "8.74 GiB")
    page.get_by_text("sums between tensor ranks; as you predicted.").wait_for()
    said = page.get_by_role("status")
    assert said.inner_text().startswith("It fits: 8.74 of 23.64 GiB. A step takes 24.24 s")
    page.get_by_role("combobox", name="tensor ranks").select_option("1")
    assert said.inner_text().startswith("It does not fit")
    page.get_by_role("button", name="Ask the planner").press("Enter")
    page.get_by_text("The planner's plan: 8 data ranks; ZeRO").wait_for()
    page.screenshot(path=screenshots / f"plan {page.viewport_size['width']}.png", full_page=True)
