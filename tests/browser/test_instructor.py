"""An assignment from release to feedback, as an instructor and a learner do it in the browser: with
nbgrader's formgrader, and with its assignment list in JupyterLab.

It takes minutes, so it is part of `make browser` only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import assignments
import pytest

from .lab import Lab, serving

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import Page

CHAPTER = "00_start_here"
TIMEOUT = 240_000  # milliseconds
ANSWER = [  # to 0.1; the editor indents
    "average = value.clone()",
    "dist.all_reduce(average)",
    "return average / dist.get_world_size()",
]
HAS_ASSIGNMENTS = """() => window.jupyterapp
    && window.jupyterapp.commands.hasCommand('nbgrader:open-assignment-list')"""
OPEN_ASSIGNMENTS = "() => window.jupyterapp.commands.execute('nbgrader:open-assignment-list')"
IS_OPEN = """() => {
    const panel = window.jupyterapp && window.jupyterapp.shell.currentWidget;
    const kernel = panel && panel.sessionContext && panel.sessionContext.session
        && panel.sessionContext.session.kernel;
    return Boolean(kernel && kernel.status === 'idle' && panel.content.model.cells.length);
}"""


@pytest.fixture(scope="module")
def class_room(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Lab, Lab]]:
    """A server for the instructor and one for a learner, with an exchange between them."""
    if not request.config.getoption("--all-notebooks"):
        pytest.skip("the instructor's walk runs with `make browser`")
    folder = tmp_path_factory.mktemp("class")
    course, learner, exchange = (folder / name for name in ("course", "learner", "exchange"))
    assert assignments.main(["build", "00", "--folder", str(course)]) == 0
    learner.mkdir()
    exchange.mkdir()
    shared = [
        'c.CourseDirectory.course_id = "parallelism"',
        f'c.Exchange.root = "{exchange}"',
        f'c.Exchange.cache = "{folder / "cache"}"',
    ]
    with (course / assignments.CONFIG).open("a") as config:
        config.write("\n".join(["", *shared, ""]))
    (learner / assignments.CONFIG).write_text("\n".join(["c = get_config()", *shared, ""]))
    with serving(course) as instructors, serving(learner) as learners:
        yield instructors, learners


@dataclass
class Walk:
    """One of the two, at a page of the browser."""

    page: Page
    lab: Lab
    screenshots: Path

    def __post_init__(self) -> None:
        self.page.set_default_timeout(TIMEOUT)
        self.page.set_viewport_size({"width": 1200, "height": 1000})
        self.page.goto(f"{self.lab.address}/lab?reset&token={self.lab.token}")
        self.page.wait_for_function(HAS_ASSIGNMENTS, timeout=TIMEOUT)

    def screenshot(self, label: str, **options) -> None:
        self.page.screenshot(path=self.screenshots / f"class {label}.png", **options)


class Instructor(Walk):
    """Works in the formgrader."""

    def open(self, address: str = "manage_assignments") -> None:
        self.page.goto(f"{self.lab.address}/formgrader/{address}")

    def do(self, action: str) -> str:
        """Click an action in the only line of the table; return what the formgrader says then."""
        self.page.locator(f"td.{action} a").click()
        dialog = self.page.locator(".modal-dialog").filter(has=self.page.get_by_text("OK"))
        dialog.wait_for()
        title = dialog.locator(".modal-title").inner_text()
        self.screenshot(action)
        dialog.get_by_role("button", name="OK").click()
        dialog.wait_for(state="hidden")
        return title


class Learner(Walk):
    """Works in JupyterLab."""

    def assignments(self) -> None:
        self.page.evaluate(OPEN_ASSIGNMENTS)
        self.page.get_by_text(CHAPTER).first.wait_for()

    def press(self, button: str, then: str) -> None:
        """Press a button of the assignment list and wait until a text can be seen."""
        self.page.get_by_role("button", name=button, exact=True).click()
        self.page.get_by_text(then).first.wait_for()
        self.screenshot(button)

    def answer(self, definition: str, lines: list[str]) -> None:
        """Type an answer over the stub's last line."""
        self.page.goto(f"{self.lab.address}/lab/tree/{CHAPTER}/{CHAPTER}.ipynb?reset")
        self.page.wait_for_function(IS_OPEN, timeout=TIMEOUT)
        cell = self.page.locator(".jp-CodeCell").filter(has_text=definition)
        cell.locator(".cm-line", has_text="raise NotImplementedError").click()
        self.page.keyboard.press("End")
        self.page.keyboard.press("Shift+Home")
        for number, line in enumerate(lines):
            if number:
                self.page.keyboard.press("Enter")
            self.page.keyboard.type(line)
        self.screenshot("answer")

    def validate(self) -> str:
        """Press nbgrader's Validate, which saves the notebook and runs it."""
        self.page.get_by_role("button", name="Validate").click()
        dialog = self.page.locator(".jp-Dialog-content", has_text="Validation Results")
        dialog.wait_for()
        self.screenshot("validate")
        text = dialog.inner_text()
        dialog.get_by_role("button", name="Ok").click()
        return text


def test_an_assignment_from_release_to_feedback(
    class_room: tuple[Lab, Lab], browser, screenshots: Path
) -> None:
    with browser.new_page() as first, browser.new_page() as second:
        instructor = Instructor(first, class_room[0], screenshots)
        learner = Learner(second, class_room[1], screenshots)
        instructor.open()
        assert instructor.do("release") == "Success"
        _hand_in(learner)
        instructor.open()
        assert instructor.do("collect") == "Success"
        _grade(instructor)
        instructor.open()
        assert instructor.do("generate-feedback") == "Success"
        assert instructor.do("release-feedback") == "Success"
        _read_feedback(learner)


def _hand_in(learner: Learner) -> None:
    learner.assignments()
    learner.press("Fetch", then="There are no assignments to fetch.")
    learner.answer("def average_over_ranks", ANSWER)
    said = learner.validate()
    assert "0.1" not in said
    assert "NotPassed: 0.2 message_bytes is not solved yet" in said
    learner.assignments()
    learner.press("Submit", then="Fetch Feedback")


def _grade(instructor: Instructor) -> None:
    instructor.open(f"manage_submissions/{CHAPTER}")
    assert instructor.do("autograde") == "Success"
    assert instructor.page.locator("td.score").inner_text() == "1 / 4"
    instructor.screenshot("scores")
    instructor.open(f"gradebook/{CHAPTER}/{CHAPTER}")
    instructor.page.get_by_role("link", name="Submission #1").click()
    instructor.page.get_by_text("passed: 1 point").wait_for()
    instructor.page.get_by_text("0.2 message_bytes: not attempted yet").first.wait_for()
    instructor.screenshot("graded", full_page=True)


def _read_feedback(learner: Learner) -> None:
    learner.assignments()
    learner.press("Fetch Feedback", then="(view feedback)")
    [feedback] = learner.lab.folder.glob(f"{CHAPTER}/feedback/*/{CHAPTER}.html")
    learner.page.goto(feedback.as_uri())
    learner.page.get_by_text(f"{CHAPTER} (Score: 1.0 / 4.0)").wait_for()
    learner.page.get_by_text("passed: 1 point").wait_for()
    learner.screenshot("feedback", full_page=True)
