"""How long a chapter takes to read: computed, and what the README says."""

import re
from pathlib import Path

import limits
import minutes
import nbformat
import printed
import pytest
import registrations
from source import Cell

from course_exercises.checks.catalogue import find, modules
from course_exercises.sources import chapters

ROOT = Path(__file__).resolve().parents[2]
WORDS = "word " * 100
ANSWER = "def f():\n    ### BEGIN SOLUTION\n" + "    x = 1\n" * 50 + "    ### END SOLUTION"


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (Cell("markdown", f"# Title\n{WORDS}", 1), 101 / 130),
        (Cell("code", "import os\nfrom pathlib import Path\n\nx = 1\n", 1), 2 / 30 + 1 / 10),
        (Cell("code", "%%writefile train.py\n" + "x = 1\n" * 29, 1), 30 / 30),
        (Cell("code", ANSWER, 1, nbgrader={"solution": True}), 1 / 10),
        (Cell("code", "plots.show(x)\nplt.show()", 1), 2 / 30 + 1),
        (Cell("code", "compare(\n    predicted,\n    measured,\n)", 1), 0),
        (Cell("code", "x = 1\ncompare(predicted, measured)", 1), 2 / 10),
        (Cell("code", 'predicted = {"a": 1, "b": 2}', 1, ["prediction"]), 1 / 10 + 2 * 40 / 60),
    ],
)
def test_prose_code_and_scripts_have_their_pace(cell: Cell, expected: float) -> None:
    assert minutes.minutes([cell]) == pytest.approx(expected)


def markdown(*texts: str) -> list[Cell]:
    return [Cell("markdown", text, 1) for text in texts]


def test_the_lesson_leaves_the_exercises_out() -> None:
    own = ["## 2. Run", "### 6.1 Write it (2 points)", "mine", "### Next", "b"]
    part = ["## 6. Exercises: a list", "c", "### 6.2 More", "### A note", "## 7. See", "d"]
    kept = minutes.lesson(markdown(*own, *part))
    assert [cell.source for cell in kept] == ["## 2. Run", "### Next", "b", "## 7. See", "d"]


def test_a_stage_of_the_script_counts_as_an_exercise() -> None:
    cells = [Cell("code", 'check("3.6", mine.script(3))', 1)]
    assert minutes.of(ROOT, "03_ddp", cells).exercises == find("3.6").minutes > 0


def test_the_first_exercise_stands_after_a_share_of_the_lesson() -> None:
    answer = Cell("code", ANSWER, 1, nbgrader={"solution": True})
    before, after = markdown(WORDS, "### 6.1 Write it"), markdown("### Next " + WORDS * 3)
    assert minutes.first_written([*before, answer, *after]) == pytest.approx(100 / 401)
    assert minutes.first_written(before) == 1


def test_what_is_kept_and_what_the_readme_says_is_what_the_sources_give() -> None:
    assert not list(minutes.problems(ROOT)), "run `python tools/minutes.py write`"
    table = minutes.kept(ROOT)
    text = (ROOT / "README.md").read_text()
    for chapter in chapters.chapters():
        row = re.search(rf"(?m)^\| `{chapter.title}` \|(.*)$", text)
        lesson = table[chapter.title]
        assert row and f" {lesson['read'] + lesson['run']} | {lesson['exercises']} |" in row[1]


def test_another_number_in_the_readme_is_a_problem(tmp_path: Path) -> None:
    for name in ("solutions", "course_exercises"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(re.sub(r"(`03_ddp` \|) \d+", r"\1 7", text))
    assert list(minutes.problems(tmp_path)) == [
        "README.md says other minutes: run `python tools/minutes.py write`."
    ]


@pytest.mark.parametrize("exercise_id", modules())
def test_an_exercise_has_its_minutes_and_its_kind(exercise_id: str) -> None:
    exercise, number = find(exercise_id), f"{int(exercise_id.split('.')[0]):02d}"
    assert exercise.minutes == registrations.of(ROOT, number)[exercise.id].minutes > 0
    assert exercise.kind in ("first", "core", "stretch")


@pytest.mark.parametrize(
    ("before", "seconds", "after"),
    [(None, 61, 2), (None, 3, 1), (2, 61, 2), (2, 148, 2), (2, 40, 2), (2, 152, 3), (2, 29, 1)],
)
def test_some_seconds_change_nothing(tmp_path, monkeypatch, before, seconds, after) -> None:
    monkeypatch.setattr(minutes, "_share", lambda: 1.0)
    (tmp_path / "course_exercises").mkdir()
    if before:
        minutes._keep(tmp_path, {"09_tiny": {"read": 5, "run": before}})
    assert minutes.ran(tmp_path, "09_tiny", seconds) == (after != before)
    assert minutes.kept(tmp_path)["09_tiny"]["run"] == after


# --- what is too much --------------------------------------------------------------------------

LESSON = minutes.Minutes(40, 2, 100)
WRITTEN = Cell("code", ANSWER, 1, nbgrader={"solution": True})
LATE = [*markdown(WORDS, "### 6.1 Write it"), WRITTEN, *markdown("### Next", WORDS)]


def lines(count: int, first: str = "x = 1") -> Cell:
    return Cell("code", "\n".join([first, *["x = 1"] * (count - 1)]), 7)


@pytest.mark.parametrize(
    ("name", "cells", "time", "problem"),
    [
        ("12_tiny", [lines(20)], LESSON, None),
        ("12_tiny", [lines(30), lines(30)], LESSON, None),
        ("12_tiny", [lines(31)], LESSON, "this cell has 31 lines, and a cell holds one idea"),
        ("12_tiny", [lines(21)] * 3, LESSON, "this cell has 21 lines"),
        ("12_tiny", [lines(60, "%%writefile train.py")], LESSON, None),
        ("12_tiny", [lines(61, "%%writefile train.py")], LESSON, "a script has at most 60"),
        ("12_tiny", [Cell("code", ANSWER, 7, nbgrader={"solution": True})], LESSON, None),
        ("12_tiny", [], minutes.Minutes(58.2, 1, 9), None),
        ("12_tiny", [], minutes.Minutes(58.2, 2, 9), "this lesson takes 61 minutes"),
        ("12_tiny_further", [], minutes.Minutes(99, 2, 9), None),
        ("00_tiny", [], minutes.Minutes(25, 1, 4), None),
        ("00_tiny", [], minutes.Minutes(25, 1, 5), "the first chapter takes 31 minutes"),
        ("12_tiny", LATE, LESSON, "a learner writes nothing in its first third"),
        ("12_tiny_further", LATE, LESSON, None),
    ],
)
def test_what_is_too_much_is_refused(name, cells, time, problem) -> None:
    cells = cells if cells is LATE else [WRITTEN, *markdown("### Next", WORDS), *cells]
    found = [sentence for _, sentence in limits.problems(name, cells, time)]
    assert not found if problem is None else problem in found[0] and len(found) == 1


# --- what is printed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("number: 3\n" * 9 + "equal: True\n", None),
        ("number: 3\n" * 8 + "equal: True\n", "1 of its 9 printed lines are a bare truth value"),
        ("True\n", "1 of its 1 printed lines"),
        ("number: 3\n" * 20 + "equal: False\n", "it prints 'equal: False': print the number"),
        ("   predicted   measured  equal\na      1     1  True\n", None),
        ("Not measured: a. Run the cells\n", "the names of `predicted` and `measured` differ"),
    ],
)
def test_truth_values_are_counted(text: str, problem: str | None) -> None:
    cell = nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", text=text)])
    found = printed.problem(nbformat.v4.new_notebook(cells=[cell]))
    assert found is None if problem is None else problem in found
