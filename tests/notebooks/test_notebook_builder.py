"""The notebook builder: what it refuses, what it writes, and that strict nbval can fail on it."""

import json
import subprocess
import sys
from pathlib import Path

import execution
import nbformat
import nbval.kernel
import pytest
from copies import cell_ids, make_copy
from nbgrader.nbgraderformat.v3 import MetadataValidatorV3
from source import SourceError, read_source

import notebooks

ANSWER = '# %% nbgrader={"grade_id": "9.1", "solution": true}\n'
CHECK = '# %% nbgrader={"grade_id": "9.1-check", "grade": true, "points": 2, "locked": true}\n'
BODY = """def double(x: int) -> int:
    \"\"\"Twice x.\"\"\"
    ### BEGIN SOLUTION
    return x + x + 0 * x
    ### END SOLUTION
"""
CALL = 'check("9.1", double)\n'
# so much that the exercise stands in the lesson's first third
AFTER = f"""
# %% [markdown]
# ## Remember
# {"word " * 1000}
"""
GOOD = f"""# %% [markdown]
# # Tiny
# Prose.

# %% tags=["nbval-ignore-output"]
import os
import matplotlib.pyplot as plt
from ipywidgets import IntSlider
from IPython.display import display
print("process", os.getpid())
def check(name, answer):
    print(name, answer.__doc__)

# %%
print(os.environ["COURSE_PROGRESS"] == "the learner's", os.path.basename(os.getcwd()))

# %%
figure = plt.figure()
plt.plot([1, 2, 4])
plt.show()

# %%
os.write(1, b"from C")
display(IntSlider(3))
6 * 7

# %% [markdown]
# ## Exercises

{ANSWER}{BODY}
{CHECK}{CALL}{AFTER}"""


def write(folder: Path, text: str, chapter: str = "09_tiny") -> Path:
    exercises = folder / "course_exercises" / "chapters" / "ch09"
    exercises.mkdir(parents=True, exist_ok=True)
    (exercises / "double.py").write_text('Exercise("9.1", "double", points=2)\n')
    (folder / "solutions").mkdir(exist_ok=True)
    source = folder / "solutions" / f"{chapter}.py"
    source.write_text(text)
    return source


def problems(folder: Path, text: str) -> list[str]:
    """Problems of a source, each without the path in front: 'line: sentence'."""
    source = write(folder, text)
    try:
        read_source(source)
    except SourceError as error:
        assert all(line.startswith(f"{source}:") for line in error.problems)
        return [line.removeprefix(f"{source}:") for line in error.problems]
    return []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course of one tiny chapter, built once for all tests, which only read it."""
    folder = tmp_path_factory.mktemp("course")
    write(folder, GOOD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COURSE_PROGRESS", "the learner's")
        assert notebooks.main(["build"], folder) == 0
    return folder


@pytest.fixture
def course(built: Path, tmp_path: Path) -> Path:
    """A copy of the built course that a test may spoil."""
    for path in (*built.rglob("*_tiny.*"), *built.rglob("double.py")):
        copy = tmp_path / path.relative_to(built)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return tmp_path


# --- sources that are refused, with the line ---------------------------------------------------

HEAD = "# %% [markdown]\n# # Tiny\n\n"  # three lines, so that the next cell's header is line 4
REFUSED = {
    "no end": (
        HEAD + ANSWER + BODY.replace("    ### END SOLUTION\n", "") + CHECK + CALL,
        "7: BEGIN SOLUTION without an END SOLUTION",
    ),
    "no begin": (
        HEAD + ANSWER + BODY.replace("    ### BEGIN SOLUTION\n", "") + CHECK + CALL,
        "8: END SOLUTION without a BEGIN SOLUTION",
    ),
    "two begins": (
        HEAD + ANSWER + BODY.replace("return", "### BEGIN SOLUTION\n    return") + CHECK + CALL,
        "8: BEGIN SOLUTION again, before the END SOLUTION of line 7",
    ),
    "no markers": (
        HEAD + ANSWER + "def double(x):\n    pass\n" + CHECK + CALL,
        "5: an answer cell without '### BEGIN SOLUTION'",
    ),
    "marker outside": (
        HEAD + "# %%\n" + BODY,
        "7: a solution marker outside an answer cell",
    ),
    "another spelling": (
        HEAD + ANSWER + BODY.replace("### BEGIN", "# BEGIN") + CHECK + CALL,
        "7: a marker is a line of its own",
    ),
    "at top level": (
        HEAD + ANSWER + "double = 0\n### BEGIN SOLUTION\ndouble = abs\n### END SOLUTION\n" + CHECK,
        "6: the answer must stand inside a function",
    ),
    "no check": (
        HEAD + ANSWER + BODY,
        "5: the answer '9.1' has no check cell '9.1-check' after it",
    ),
    "no answer": (
        HEAD + CHECK + CALL,
        "5: the check '9.1-check' has no answer cell '9.1' before it",
    ),
    "check first": (
        HEAD + CHECK + CALL + ANSWER + BODY,
        "5: the check '9.1-check' has no answer cell '9.1' before it",
    ),
    "same id twice": (
        HEAD + ANSWER + BODY + ANSWER + BODY.replace("x + 0 * x", "y") + CHECK + CALL,
        "11: the id '9.1' is already used in line 5",
    ),
    "check does more": (
        HEAD + ANSWER + BODY + CHECK + CALL + "print(double(3))\n",
        '11: the check cell must be exactly check("9.1", NAME)',
    ),
    "check of another": (
        HEAD + ANSWER + BODY + CHECK + 'check("9.1", triple)\n',
        "11: the answer cell of 9.1 (line 5) does not define triple",
    ),
    "no points": (
        HEAD + ANSWER + BODY + CHECK.replace('"points": 2, ', "") + CALL,
        "11: a check's header is",
    ),
    "not locked": (
        HEAD + ANSWER + BODY + CHECK.replace('"locked": true', '"locked": false') + CALL,
        "11: a check's header is",
    ),
    "stub is not Python": (
        HEAD + ANSWER + BODY.replace("-> int:", "-> int") + CHECK + CALL,
        "5: without its answer the cell is not valid Python",
    ),
    "leak in code": (
        HEAD + "# %%\nx = 1\nprint(x + x + 0 * x)\n\n# %%\ndef twice(x):\n"
        "    return x + x + 0 * x\n\n" + ANSWER + BODY + CHECK + CALL,
        "10: this gives away the answer '9.1' of line 13",
    ),
    "leak in prose": (
        HEAD + "# %% [markdown]\n# Hint: `return x + x + 0 * x`\n\n" + ANSWER + BODY + CHECK + CALL,
        "5: this gives away the answer '9.1' of line 8",
    ),
    "leak in its own stub": (
        HEAD + ANSWER + BODY.replace("Twice x.", "return x + x + 0 * x") + CHECK + CALL,
        "6: this gives away the answer '9.1' of line 5",
    ),
    "skipped": (
        HEAD + '# %% tags=["nbval-skip"]\nprint(1)\n',
        "5: the tag nbval-skip hides a cell",
    ),
    "skipped by a comment": (
        HEAD + "# %%\n# NBVAL_SKIP\nprint(1)\n",
        "5: a comment steers nbval",
    ),
    "unknown tag": (
        HEAD + '# %% tags=["raises-exception"]\n1 / 0\n',
        "5: unknown tag 'raises-exception'",
    ),
    "prediction that is given away": (
        HEAD + "# %%\npredicted = {'bytes': 8}\n",
        "5: the values of `predicted` would be given away",
    ),
    "prediction without a value": (
        HEAD + '# %% tags=["prediction"]\npredicted = 8\n',
        "5: the tag prediction without a prediction",
    ),
    "ignored too often": (
        HEAD + '# %% tags=["nbval-ignore-output"]\nprint(1)\n' * 2 + "# %%\nprint(1)\n" * 13,
        "7: 2 of 15 code cells are nbval-ignore-output; one in 8 may be",
    ),
    "damaged header": (
        HEAD + ANSWER.replace("true}", "true") + BODY,
        "4: a cell's header holds only",
    ),
    "unknown header": (
        HEAD + '# %% slideshow="new"\nprint(1)\n',
        "4: a cell's header holds only",
    ),
    "raw cell": (HEAD + "# %% [raw]\n# text\n", "4: a raw cell: use code or [markdown]"),
    "empty cell": (HEAD + "# %%\n\n# %%\nprint(1)\n", "an empty code cell"),
    "semicolon": (
        HEAD + "# %%\nprint(1)\nplot();\n",
        "6: a cell ends with ';'",
    ),
    "text before": ("import os\n" + HEAD, "2: 1 lines start a cell with '# %%'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_line(name: str, tmp_path: Path) -> None:
    text, expected = REFUSED[name]
    found = problems(tmp_path, text)
    assert any(expected in line for line in found), found


def test_a_good_source_is_accepted(tmp_path: Path) -> None:
    assert problems(tmp_path, GOOD) == []


def test_one_ignored_cell_in_eight_is_accepted(tmp_path: Path) -> None:
    ignored = '# %% tags=["nbval-ignore-output"]\nprint(1)\n'
    assert problems(tmp_path, HEAD + ignored * 2 + "# %%\nprint(1)\n" * 14) == []


def test_ordinary_lines_are_no_leak(tmp_path: Path) -> None:
    """A long answer may share a line or two with the chapter."""
    body = BODY.replace(
        "return x + x + 0 * x",
        "for y in range(x):\n        total = y + x\n    scale = x - total\n    size = total * x\n"
        "    return scale + size",
    )
    chapter = "# %%\nx = 1\nfor y in range(x):\n    total = y + x\n\n"
    assert problems(tmp_path, HEAD + chapter + ANSWER + body + CHECK + CALL) == []


def test_three_lines_in_a_row_are_a_leak(tmp_path: Path) -> None:
    lines = [f"variable_{i} = {i} * x" for i in range(12)]
    body = BODY.replace("return x + x + 0 * x", "\n    ".join(lines))
    chapter = "# %%\nx = 1\n" + "\n".join(lines[4:7]) + "\n\n"
    found = problems(tmp_path, HEAD + chapter + ANSWER + body + CHECK + CALL)
    assert any("6: this gives away" in line for line in found), found


# --- what is written ---------------------------------------------------------------------------


def stored(course: Path, folder: str) -> nbformat.NotebookNode:
    return nbformat.read(course / folder / "09_tiny.ipynb", as_version=4)


def test_learner_gets_the_stub_and_the_solved_copy_the_answer(built: Path) -> None:
    stub = 'def double(x: int) -> int:\n    """Twice x."""\n    raise NotImplementedError'
    assert stored(built, "notebooks").cells[6].source == stub
    assert "return x + x + 0 * x" in stored(built, "solutions").cells[6].source


@pytest.mark.parametrize("folder", ["notebooks", "solutions"])
def test_nothing_volatile_is_stored(built: Path, folder: str) -> None:
    notebook = stored(built, folder)
    assert set(notebook.metadata) == {"kernelspec", "course"}
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4, 5, 6]
    assert all(set(cell.metadata) <= {"tags", "nbgrader"} for cell in notebook.cells)
    assert code[0].outputs == []  # ignored by nbval, so blank: it differs in every run
    assert code[1].outputs[0].text == f"False {folder}\n"  # the learner's progress is left alone
    assert set(code[2].outputs[0].data) == {"text/plain", "image/png"}
    slider, result = code[3].outputs
    assert set(slider.data) == {"text/plain"}  # no widget view, which only a live kernel can show
    assert result.data == {"text/plain": "42"} and result.execution_count == 4


def test_nbgrader_accepts_the_metadata(built: Path) -> None:
    for folder in ("notebooks", "solutions"):
        notebook = stored(built, folder)
        MetadataValidatorV3().validate_nb(notebook)
        answer, check = notebook.cells[6].metadata.nbgrader, notebook.cells[7].metadata.nbgrader
        assert (answer.grade_id, answer.solution, answer.grade) == ("9-1", True, False)
        assert (check.grade_id, check.grade, check.points, check.locked) == (
            "9-1-check",
            True,
            2,
            True,
        )


def test_ids_are_valid_unique_and_stay_when_a_cell_is_inserted(tmp_path: Path) -> None:
    text = GOOD + "\n# %%\nprint(1)\n\n# %%\nprint(1)\n"
    before = cell_ids(read_source(write(tmp_path, text)))
    assert len(set(before)) == len(before)
    assert before[0] == "tiny" and "exercise-9-1-check" in before
    inserted = text.replace("# %%\nfigure", "# %%\nprint(2)\n\n# %%\nfigure")
    after = cell_ids(read_source(write(tmp_path, inserted)))
    assert [cell_id for cell_id in after if cell_id in before] == before
    nbformat.validate(make_copy(read_source(tmp_path / "solutions/09_tiny.py"), "x", solved=False))


def test_built_twice_from_one_source_is_the_same(course: Path) -> None:
    before = {path: path.read_bytes() for path in course.rglob("*.ipynb")}
    assert notebooks.main(["build", "09"], course) == 0
    assert {path: path.read_bytes() for path in course.rglob("*.ipynb")} == before


# --- stale, edited, in the way -----------------------------------------------------------------


def check_says(course: Path, capsys: pytest.CaptureFixture) -> str:
    assert notebooks.main(["check"], course) == 1
    return capsys.readouterr().err.strip()


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_check_passes_and_nothing_is_rebuilt(
    course: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert notebooks.main(["check"], course) == 0
    monkeypatch.setattr(notebooks, "execute", None)  # any execution would fail
    assert notebooks.main(["build"], course) == 0
    assert "0 notebooks built, 2 were up to date." in capsys.readouterr().out


def test_a_changed_answer_makes_only_the_solved_copy_stale(
    course: Path, capsys: pytest.CaptureFixture
) -> None:
    edit(course / "solutions/09_tiny.py", "x + x + 0 * x", "x + x + 1 * x")
    assert check_says(course, capsys) == (
        "solutions/09_tiny.ipynb does not match solutions/09_tiny.py: run `make notebooks`."
    )


def test_a_changed_chapter_makes_both_stale(course: Path, capsys: pytest.CaptureFixture) -> None:
    edit(course / "solutions/09_tiny.py", "# Prose.", "# Other prose.")
    assert check_says(course, capsys).count("does not match solutions/09_tiny.py") == 2


def test_changed_prose_keeps_the_outputs_and_executes_nothing(
    course: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outputs() -> list:
        files = [course / f"{folder}/09_tiny.ipynb" for folder in ("notebooks", "solutions")]
        cells = [cell for file in files for cell in json.loads(file.read_text())["cells"]]
        return [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]

    before = outputs()
    new_cell = "# Other prose.\n\n# %% [markdown]\n# And a cell."
    edit(course / "solutions/09_tiny.py", "# Prose.", new_cell)
    monkeypatch.setattr(notebooks, "execute", None)  # any execution would fail
    assert notebooks.main(["build"], course) == 0
    assert "only its prose has changed" in capsys.readouterr().out
    assert outputs() == before
    assert "And a cell." in (course / "notebooks/09_tiny.ipynb").read_text()
    assert notebooks.main(["check"], course) == 0


@pytest.mark.parametrize("named", [[], ["09"]])
def test_changed_code_and_named_chapters_are_executed(
    course: Path, named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not named:
        edit(course / "solutions/09_tiny.py", "6 * 7", "6 * 8")
    executed = []
    monkeypatch.setattr(notebooks, "execute", lambda notebook, folder: executed.append(folder))
    assert notebooks.main(["build", *named], course) == 0
    assert [folder.name for folder in executed] == ["notebooks", "solutions"]


def test_an_edited_output_is_found(course: Path, capsys: pytest.CaptureFixture) -> None:
    edit(course / "notebooks/09_tiny.ipynb", '"42"', '"43"')
    assert "notebooks/09_tiny.ipynb was edited" in check_says(course, capsys)


def test_an_edited_notebook_is_kept_when_it_is_rebuilt(
    course: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(course / "notebooks/09_tiny.ipynb", "raise NotImplementedError", "return 2 * x")
    monkeypatch.setattr(notebooks, "execute", lambda notebook, folder: None)
    assert notebooks.main(["build"], course) == 0
    assert "return 2 * x" in (course / "build/edited/notebooks/09_tiny.ipynb").read_text()
    assert "return 2 * x" not in (course / "notebooks/09_tiny.ipynb").read_text()
    assert "1 notebooks built, 1 were up to date." in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["", "{", "<<<<<<< HEAD\n{}", "[]", "{}"])
def test_a_damaged_notebook_is_found(
    course: Path, damage: str, capsys: pytest.CaptureFixture
) -> None:
    (course / "notebooks/09_tiny.ipynb").write_text(damage)
    assert "notebooks/09_tiny.ipynb is not a readable notebook" in check_says(course, capsys)


def test_a_missing_notebook_and_a_missing_source_are_found(
    course: Path, capsys: pytest.CaptureFixture
) -> None:
    (course / "notebooks/09_tiny.ipynb").rename(course / "notebooks/10_lost.ipynb")
    said = check_says(course, capsys)
    assert "notebooks/09_tiny.ipynb is missing: run `make notebooks`." in said
    assert "notebooks/10_lost.ipynb has no source solutions/10_lost.py: delete it." in said


def test_the_quick_reference_is_built_like_a_chapter(course: Path, capsys) -> None:
    (course / "solutions/quick_reference.py").write_text("# %% [markdown]\n# # Tables\n")
    said = check_says(course, capsys)
    assert "notebooks/quick_reference.ipynb is missing" in said
    assert notebooks.main(["build", "quick_reference"], course) == 0
    (course / "solutions/quick_reference.py").unlink()
    assert "has no source solutions/quick_reference.py: delete it." in check_says(course, capsys)


def test_an_unknown_chapter_is_refused(course: Path, capsys: pytest.CaptureFixture) -> None:
    assert notebooks.main(["build", "77"], course) == 1
    assert "there is no chapter '77'" in capsys.readouterr().err


WHAT_TO_DO = " Write it there, or correct the id."


@pytest.mark.parametrize(
    ("registered", "expected"),
    [
        (
            "",
            f"38: there is no exercise 9.1: course_exercises/chapters/ch09 has none.{WHAT_TO_DO}",
        ),
        (
            'Exercise("9.2", "double", points=2)',
            f"38: there is no exercise 9.1: course_exercises/chapters/ch09 has 9.2.{WHAT_TO_DO}",
        ),
        (
            'Exercise("9.1", "treble", points=2)',
            "38: exercise 9.1 asks for treble, and this checks double.",
        ),
        (
            'Exercise("9.1", "double", points=3)',
            "37: exercise 9.1 has points=3, and this header says 2.",
        ),
    ],
)
def test_a_check_of_what_is_no_exercise_is_refused(
    course: Path, registered: str, expected: str, capsys: pytest.CaptureFixture
) -> None:
    (course / "course_exercises/chapters/ch09/double.py").write_text(registered)
    assert check_says(course, capsys) == f"solutions/09_tiny.py:{expected}"


# --- cells that cannot be stored ---------------------------------------------------------------

UNSTORABLE = {
    "raises": ("number = 1 / 0", "ZeroDivisionError: division by zero"),
    "kills": ("import os; os._exit(3)", "the kernel died while it ran this cell"),
    "path": ("import os; print(os.getcwd())", "the path of this copy of the course"),
    "temporary": ('print("/tmp/tmpab12/x")', "a temporary path (/tmp/tmpab12)"),
    "address": ("print(object())", "an object's address (0x"),
    "prediction": (
        "from course_utils.lesson.predictions import compare; compare({'a': 1, 'b': 2}, {'a': 1, 'b': 3})",
        "what it predicts is not what it measures: b             2             3  False",
    ),
    "svg": (
        "from IPython.display import SVG; display(SVG('<svg></svg>'))",
        "the type image/svg+xml",
    ),
    "leak": ('print("return x + x + 0 * x")', "gives away the answer '9.1'"),
}


@pytest.mark.parametrize("name", UNSTORABLE)
def test_a_failing_cell_stops_the_build(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code, expected = UNSTORABLE[name]
    text = f"{HEAD}# %%\nprint(1)\n\n# %%\n{code}\n\n# %%\ndef check(*_): pass\n\n"
    if name == "leak":  # as a string the line is refused before anything runs
        code = code.replace("x + 0", 'x" " + 0')
        text = text.replace(UNSTORABLE[name][0], code)
    write(tmp_path, text + ANSWER + BODY + CHECK + CALL + AFTER)
    assert notebooks.main(["build"], tmp_path) == 1
    said = capsys.readouterr().err
    assert "solutions/09_tiny.py:8: " in said and expected in said, said
    assert name == "leak" or code in said
    assert not list(tmp_path.rglob("*.ipynb*"))


# --- strict nbval can fail ---------------------------------------------------------------------


def nbval_of(course: Path) -> str:
    """What strict nbval says of a course's notebooks, with the project's own configuration."""
    root = notebooks.ROOT
    command = [sys.executable, "-m", "pytest", "-rf", "--color=no", "--nbval", "-c"]
    command += [root / "pyproject.toml", "--rootdir", root, course / "notebooks"]
    run = subprocess.run(command, check=False, capture_output=True, text=True, cwd=root)
    return run.stdout


def test_nbval_sees_a_changed_number_but_no_changed_picture(course: Path) -> None:
    original = (course / "notebooks/09_tiny.ipynb").read_text()
    notebook = json.loads(original)
    notebook["cells"][3]["outputs"][0]["data"]["image/png"] = "iVBORw0KGgo="
    (course / "notebooks/picture.ipynb").write_text(json.dumps(notebook))
    assert '"42"' in original
    (course / "notebooks/number.ipynb").write_text(original.replace('"42"', '"43"'))
    printed = nbval_of(course)
    assert "1 failed, 17 passed" in printed, printed
    assert "number.ipynb::Cell 3" in printed


def test_nbval_leaves_out_rounding_and_nothing_else(course: Path) -> None:
    cell = nbformat.v4.new_code_cell('print("largest difference:", 4e-08)')
    for name, stored in (("rounding", "7e-07"), ("zero", "0e+00"), ("wrong", "0.052")):
        output = nbformat.v4.new_output("stream", text=f"largest difference: {stored}\n")
        cell.outputs, cell.execution_count = [output], 1
        notebook = nbformat.v4.new_notebook(cells=[cell])
        nbformat.write(notebook, course / "notebooks" / f"{name}.ipynb")
    printed = nbval_of(course)
    assert "1 failed" in printed, printed
    assert "wrong.ipynb::Cell 0" in printed


def test_no_kernel_of_the_tests_waits_for_a_port(course: Path) -> None:
    """A port that another process takes first would end the kernel before its first word."""
    cell = "from ipykernel.connect import get_connection_info\n"
    cell += "get_connection_info(unpack=True)['transport']"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    execution.execute(notebook, course)
    assert notebook.cells[0].outputs[0].data["text/plain"] == "'ipc'"
    manager, client = nbval.kernel.start_new_kernel()
    client.stop_channels()
    manager.shutdown_kernel()
    assert manager.transport == "ipc"
    assert not Path(manager.ip).parent.exists()
