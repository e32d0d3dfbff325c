"""load_answer: an answer and what it needs, and nothing else, out of a source or a notebook."""

import json
import linecache
import re

import pytest
from source import read_source

from course_exercises.authoring import load_answer, load_code
from course_exercises.sources import answers
from course_exercises.sources.chapters import ROOT
from course_utils.launch import launch

SOURCE = '''\
# %% [markdown]
# # A chapter

# %% tags=["nbval-ignore-output"]
import math
from dataclasses import dataclass

import torch

raise SystemExit("an import cell's other statements must not run")

# %%
FACTOR = 1
FACTOR += 2
OTHER = FACTOR + 1
LOG = []


def late(x):
    return x + EVEN_LATER


def unused():
    return no_such_name


# %%
LOG.append("ran a cell for its effect")
slow = 1 / 0

# %%
EVEN_LATER = 100
if FACTOR > 2:
    branch = "big"
else:
    branch = "small"
first, (second, third) = 1, (2, 3)

# %% nbgrader={"grade_id": "9.1", "solution": true}
def triple(x: torch.Tensor) -> torch.Tensor:
    """Three times."""
    ### BEGIN SOLUTION
    slow = FACTOR  # a local name, not the cell's
    return late(_helped(x * slow)) - EVEN_LATER
    ### END SOLUTION


def _helped(x):
    return x + second - 2


# %% nbgrader={"grade_id": "9.1-check", "grade": true, "points": 2, "locked": true}
check("9.1", triple)

# %% nbgrader={"grade_id": "9.2", "solution": true}
@dataclass
class Scale:
    factor: int = OTHER

    def __call__(self, x):
        return self.factor * math.floor(x)


# %% nbgrader={"grade_id": "9.2-check", "grade": true, "points": 2, "locked": true}
check("9.2", Scale)

# %% nbgrader={"grade_id": "9.3", "solution": true}
choices = {}
choices["a"] = branch

# %% nbgrader={"grade_id": "9.3-check", "grade": true, "points": 2, "locked": true}
check("9.3", choices)

# %% nbgrader={"grade_id": "9.4", "solution": true}
def triple(x):
    return 1 / x


# %% nbgrader={"grade_id": "9.4-check", "grade": true, "points": 1, "locked": true}
check("9.4", triple)
'''


def notebook_of(source):
    """The same cells as a notebook, with nbgrader's ids, which have no dots."""
    cells = []
    for chunk in source.split("# %%")[1:]:
        header, text = chunk.split("\n", 1)
        metadata = {}
        if "nbgrader=" in header:
            nbgrader = json.loads(header.split("nbgrader=")[1])
            nbgrader["grade_id"] = nbgrader["grade_id"].replace(".", "-")
            metadata["nbgrader"] = nbgrader
        kind = "markdown" if "[markdown]" in header else "code"
        lines = text.strip("\n").splitlines(keepends=True)
        cells.append({"cell_type": kind, "source": lines, "metadata": metadata})
    magic = ["%matplotlib inline\n", "!ls\n", "MAGIC = 1\n"]
    cells.insert(0, {"cell_type": "code", "source": magic, "metadata": {}})
    cells.insert(0, {"cell_type": "code", "source": ["%%bash\n", "ls -l\n"], "metadata": {}})
    return json.dumps({"cells": cells})


@pytest.fixture(params=["source", "notebook"])
def chapter(request, tmp_path):
    if request.param == "source":
        path = tmp_path / "09_chapter.py"
        path.write_text(SOURCE)
    else:
        path = tmp_path / "09_chapter.ipynb"
        path.write_text(notebook_of(SOURCE))
    return path


def test_a_function_comes_with_all_that_it_needs(chapter):
    assert load_answer("9.1", chapter)(5) == 15


def test_nothing_else_is_executed(chapter):
    names = set(load_answer("9.1", chapter).__globals__)
    assert "EVEN_LATER" in names
    assert not {"unused", "slow", "LOG", "OTHER", "branch", "Scale", "choices"} & names


def test_a_class_and_a_value_are_answers_too(chapter):
    assert load_answer("9.2", chapter)()(2.5) == 8
    assert load_answer("9.3", chapter) == {"a": "big"}


def test_the_last_definition_before_the_check_counts(chapter):
    assert load_answer("9.4", chapter)(2) == 0.5


def test_other_code_can_take_the_answers_place(chapter):
    halves = "def triple(x):\n    return late(x / 2)\n"
    assert load_answer("9.1", chapter, source=halves)(4) == 102
    assert load_answer("9.1", chapter)(5) == 15


def test_an_error_shows_the_answers_own_line(chapter):
    with pytest.raises(ZeroDivisionError) as caught:
        load_answer("9.4", chapter)(0)
    entry = caught.traceback[-1]
    line = linecache.getline(str(entry.frame.code.raw.co_filename), entry.lineno + 1)
    assert line.strip() == "return 1 / x"


def test_an_answer_travels_to_ranks(chapter):
    triple, scale = load_answer("9.1", chapter), load_answer("9.2", chapter)
    assert launch(lambda rank: (triple(rank), scale()(rank)), 2) == [(0, 0), (3, 4)]


def test_what_is_missing_is_named(chapter, tmp_path):
    with pytest.raises(LookupError, match=r"no cell that checks exercise '9\.9'"):
        load_answer("9.9", chapter)
    with pytest.raises(LookupError, match="no source of chapter '77'"):
        load_answer("77.1")
    with pytest.raises(LookupError, match="no source of chapter 'x'"):
        load_answer("x.1")


def test_code_of_a_chapter_comes_by_its_name():
    function = load_code(3, "train_by_hand")
    assert function.__name__ == "train_by_hand"
    assert function.__globals__["flat"], "with what it needs"
    assert load_code(3, "LEARNING_RATE") == function.__globals__["LEARNING_RATE"]


def test_a_script_that_a_cell_writes_is_not_the_chapters_code(monkeypatch, tmp_path):
    cells = "# %%\nSTEPS = 3\n\n# %%\n# %%writefile train.py\nSTEPS = 100\n"
    (tmp_path / "09_chapter.py").write_text(cells)
    monkeypatch.setattr(answers, "sources_of", lambda chapter: [tmp_path / "09_chapter.py"])
    assert load_code(9, "STEPS") == 3


def test_code_that_is_missing_is_named():
    with pytest.raises(LookupError, match="binds no 'no_such_name'"):
        load_code(3, "no_such_name")
    with pytest.raises(LookupError, match="no source of chapter '77'"):
        load_code(77, "x")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "solutions").glob("*.py")), ids=lambda path: path.stem
)
def test_a_source_is_read_as_the_builder_reads_it(path):
    """Who takes the course reads a source without jupytext, which only who builds it has."""
    built = [
        (cell.line, cell.source.strip("\n"), answers.grade_id_of(cell.nbgrader.get("grade_id", "")))
        for cell in read_source(path)
        if cell.kind == "code"
    ]
    read = [
        (first_line_of(cell), text_of(cell), cell.grade_id) for cell in answers.percent_cells(path)
    ]
    assert read == built


def first_line_of(cell):
    blank = len(cell.source) - len(cell.source.lstrip("\n"))
    return cell.line_before + blank + 1


def text_of(cell):
    """As it stands in the notebook, where a magic is no comment."""
    return re.sub(r"\A# (?=%%)", "", cell.source.strip("\n"))
