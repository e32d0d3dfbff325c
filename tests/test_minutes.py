"""How long a chapter takes to read: computed, and what the README says."""

import re
from pathlib import Path

import minutes
import pytest
from source import Cell, read_source

ROOT = Path(__file__).resolve().parents[1]
WORDS = "word " * 100
ANSWER = "def f():\n    ### BEGIN SOLUTION\n" + "    x = 1\n" * 50 + "    ### END SOLUTION"


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (Cell("markdown", f"# Title\n{WORDS}", 1), 101 / 200),
        (Cell("code", "import os\nfrom pathlib import Path\n\nx = 1\n", 1), 2 / 60 + 1 / 20),
        (Cell("code", "%%writefile train.py\n" + "x = 1\n" * 29, 1), 30 / 60),
        (Cell("code", ANSWER, 1, nbgrader={"solution": True}), 1 / 20),
    ],
)
def test_prose_code_and_scripts_have_their_pace(cell: Cell, expected: float) -> None:
    assert minutes.minutes([cell]) == pytest.approx(expected)


def test_the_lesson_leaves_the_exercises_out() -> None:
    texts = ["## 5. Break it", "a", "## 6. Exercises: write it", "b", "### 6.1", "## 7. See", "c"]
    kept = minutes.lesson([Cell("markdown", text, 1) for text in texts])
    assert [cell.source for cell in kept] == ["## 5. Break it", "a", "## 7. See", "c"]


def test_the_readme_says_what_is_computed() -> None:
    said = re.findall(
        r"^\| `(\d\d_\w+)` \| (\d+) \|", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    sources = sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py"))
    computed = {s.stem: minutes.minutes(minutes.lesson(read_source(s))) for s in sources}
    expected = {name: f"{time:.0f}" for name, time in computed.items()}
    assert dict(said) == expected, "tools/minutes.py prints the table"
