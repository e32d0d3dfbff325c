"""A notebook in JupyterLab, driven as a learner does: run all cells, move the sliders."""

import re
from pathlib import Path

from playwright.sync_api import Locator, Page, TimeoutError

from .lab import Lab

RUN_TIMEOUT = 240_000  # milliseconds for all cells
PICTURE_TIMEOUT = 30_000
WIDTH, HEIGHT = 1100, 1300  # pixels

RUN_ALL = "() => window.jupyterapp.commands.execute('notebook:run-all-cells')"
CODE_CELLS = """() => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    return Array.from(notebook.model.cells).filter(cell => cell.type === 'code').map(cell => ({
        source: cell.sharedModel.getSource(),
        count: cell.executionCount,
        errors: cell.outputs.toJSON().filter(o => o.output_type === 'error')
            .map(o => o.ename + ': ' + o.evalue),
    }));
}"""
IS_READY = """() => {
    const panel = window.jupyterapp && window.jupyterapp.shell.currentWidget;
    const kernel = panel && panel.sessionContext && panel.sessionContext.session
        && panel.sessionContext.session.kernel;
    return Boolean(kernel && kernel.status === 'idle' && panel.content.model.cells.length);
}"""
# the widget's image gets a new address with every value, so the bytes are compared
PICTURE = """image => fetch(image.src).then(reply => reply.arrayBuffer()).then(buffer =>
    crypto.subtle.digest('SHA-256', buffer)).then(digest =>
    Array.from(new Uint8Array(digest)).join(' '))"""

HIDE_SIDEBAR = "() => window.jupyterapp.shell.collapseLeft()"
SCROLL = """top => {
    const panel = document.querySelector('.jp-NotebookPanel:not(.lm-mod-hidden) '
        + '.jp-WindowedPanel-outer');
    panel.scrollTop = top;
    return [panel.scrollHeight, panel.clientHeight];
}"""

# decoded, which fails where it is no picture, and painted
IS_SHOWN = """async image => {
    await image.decode();
    await new Promise(shown => requestAnimationFrame(() => requestAnimationFrame(shown)));
}"""


class NotebookPage:
    """One notebook, open in one page of the browser."""

    def __init__(self, page: Page, lab: Lab, name: str, screenshots: Path) -> None:
        self.page = page
        self.name = name
        self.screenshots = screenshots
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        page.goto(lab.url(f"notebooks/{name}.ipynb"))
        page.wait_for_function(IS_READY, timeout=RUN_TIMEOUT)

    def run_all(self) -> list[dict]:
        """Run all cells to the end; return source, count and errors of every code cell."""
        self.page.set_default_timeout(RUN_TIMEOUT)
        self.page.evaluate(RUN_ALL)
        self.page.wait_for_function(IS_READY, timeout=RUN_TIMEOUT)
        return self.page.evaluate(CODE_CELLS)

    def explorers(self) -> list[Locator]:
        """The outputs that hold sliders or buttons and a picture that follows them."""
        found = self.page.locator(".jp-OutputArea-output:has(img.widget-image)")
        return found.all()

    def controls(self, explorer: Locator) -> list[Locator]:
        """Everything in an explorer that a learner moves."""
        sliders = explorer.locator(".noUi-handle").all()
        return sliders + explorer.locator(".widget-toggle-buttons").all()

    def picture_changes(self, explorer: Locator, control: Locator) -> bool:
        """Move one control; True if the explorer's picture shows something else afterwards."""
        image = explorer.locator("img.widget-image")
        before = image.evaluate(PICTURE)
        address = image.get_attribute("src")
        self._move(control)
        try:
            self.page.wait_for_function(
                "([image, address]) => image.src !== address && image.complete",
                arg=[image.element_handle(), address],
                timeout=PICTURE_TIMEOUT,
            )
        except TimeoutError:
            return False
        image.evaluate(IS_SHOWN)
        return image.evaluate(PICTURE) != before

    def _move(self, control: Locator) -> None:
        control.scroll_into_view_if_needed()
        if "noUi-handle" in (control.get_attribute("class") or ""):
            now, highest = (control.get_attribute(f"aria-value{end}") for end in ("now", "max"))
            control.focus()
            # five steps: one may be too little to show
            self.page.keyboard.press("PageDown" if now == highest else "PageUp")
        else:
            control.locator("button:not(.mod-active)").first.click()

    def screenshot(self, label: str, what: Locator | None = None) -> None:
        """Save a picture of one element, or of the page as it is."""
        name = re.sub(r"[^a-z0-9]+", "-", f"{self.name} {label}".lower())
        (what or self.page).screenshot(path=self.screenshots / f"{name}.png")

    def screenshots_of_all(self) -> None:
        """Save the whole notebook, one picture a window's height, from top to bottom."""
        self.page.evaluate(HIDE_SIDEBAR)
        height, window = self.page.evaluate(SCROLL, 0)
        for number, top in enumerate(range(0, height, window), 1):
            self.page.evaluate(SCROLL, top)
            self.screenshot(f"page {number:02}")
