"""A learner's copy (`make class`): what a class needs is in it and works, and no answer is."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import class_copy
import pytest
from class_copy import ClassError
from source import leaked_line, read_source, solution_lines

ROOT = Path(__file__).resolve().parents[2]
MARKED = "### BEGIN SOLUTION\n{}\n### END SOLUTION"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy of this clone as it stands: also of what is changed and not committed yet."""
    folder = tmp_path_factory.mktemp("class") / "copy"
    class_copy.write(folder, class_copy.git("stash", "create").decode().strip() or "HEAD")
    return folder


# --- no answer ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers() -> list[tuple[str, str]]:
    """An exercise's id and the text of an answer between markers: the solutions, and other right
    answers."""
    solutions = [
        (cell.nbgrader["grade_id"], cell.source)
        for path in sorted(ROOT.glob("solutions/*.py"))
        for cell in read_source(path)
        if cell.is_answer
    ]
    others = [
        found
        for path in sorted(ROOT.glob("tests/wrong_answers/ch*/*.py"))
        for found in right_answers(path.read_text(encoding="utf-8"))
    ]
    assert {id for id, _ in solutions} >= {id for id, _ in others}
    assert len(solutions) >= 65 and len(others) >= 170
    return solutions + others


def right_answers(text: str) -> Iterator[tuple[str, str]]:
    """The bodies of what a file of answers calls @right("3.1")."""
    lines = text.split("\n")
    for node in ast.parse(text).body:
        for call in getattr(node, "decorator_list", []):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "right":
                body = "\n".join(lines[node.body[0].lineno - 1 : node.end_lineno])
                yield call.args[0].value, MARKED.format(body)


def leaks(folder: Path, answers: list[tuple[str, str]]) -> list[str]:
    """Which answer can be read in which file, by the rule that the builder has for notebooks.

    Most answers have no line in most texts: that is seen before the rule looks line by line.
    """
    wanted = [(id, answer, solution_lines(answer)) for id, answer in answers]
    return [
        f"{path.relative_to(folder)}: {id}, {telling[0]}"
        for path in sorted(folder.rglob("*"))
        for text in texts(path)
        for flat in [" ".join(text.split())]
        for id, answer, telling in wanted
        if any(line in flat for line in telling) and leaked_line(answer, text) is not None
    ]


def texts(path: Path) -> Iterator[str]:
    """A file's text; a notebook's cells and outputs one by one. None of a folder, image or archive."""
    try:
        text = path.read_text(encoding="utf-8")
    except (IsADirectoryError, UnicodeDecodeError):
        return
    yield from strings(json.loads(text)) if path.suffix == ".ipynb" else [text]


def strings(content) -> Iterator[str]:
    """The strings in what JSON holds; a list of lines, as notebooks have them, is one."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list) and all(isinstance(item, str) for item in content):
        yield "".join(content)
    else:
        for item in content.values() if isinstance(content, dict) else content or []:
            yield from strings(item) if isinstance(item, (str, list, dict)) else []


def test_no_answer_is_in_it(copy: Path, answers: list[tuple[str, str]]) -> None:
    assert leaks(copy, answers) == []


def test_an_answer_is_found_wherever_it_stands(
    tmp_path: Path, answers: list[tuple[str, str]]
) -> None:
    solution = next(answer for id, answer in answers if id == "3.4")
    other = next(answer for id, answer in answers if id == "3.4" and answer != solution)
    output = {"output_type": "stream", "text": solution.splitlines(keepends=True)}
    cells = [{"source": ["train()"], "outputs": [output]}]
    (tmp_path / "shown.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "oracle.py").write_text(other)
    (tmp_path / "page.md").write_text("An answer:\n" + solution)
    found = {line.split(",")[0] for line in leaks(tmp_path, answers)}
    assert found == {"shown.ipynb: 3.4", "oracle.py: 3.4", "page.md: 3.4"}


# --- what is in it -----------------------------------------------------------------------------


def test_the_makefile_has_only_what_works_there(copy: Path) -> None:
    makefile = (copy / "Makefile").read_text(encoding="utf-8")
    rules = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    assert rules == class_copy.TARGETS
    assert set(re.findall(r"make ([\w-]+) ", makefile)) == rules - {"help"}
    assert all((copy / name).exists() for name in re.findall(r"tools/\w+\.py", makefile))


def test_nothing_in_it_needs_what_is_left_out(copy: Path) -> None:
    assert not any((copy / name).exists() for name in class_copy.LEFT_OUT)
    for path in [copy / "pyproject.toml", *copy.rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not any(name in text for name in class_copy.LEFT_OUT), path


def test_pages_lead_nowhere_outside(copy: Path) -> None:
    for page in copy.rglob("*.md"):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert link.startswith("https:") or (page.parent / link).exists(), (page, link)


def in_the_folder(folder: Path, *arguments: str, progress: Path) -> str:
    """What Python prints there."""
    environment = os.environ | {"COURSE_PROGRESS": str(progress), "PYTHONPATH": str(folder)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, check=True, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ).stdout


def test_the_map_names_chapters_and_notebooks(copy: Path, tmp_path: Path) -> None:
    progress = tmp_path / "progress.json"
    printed = in_the_folder(copy, "-m", "course_utils", "progress", progress=progress)
    assert re.search(r"^03_ddp, \d+ \+ \d+ minutes ", printed, re.MULTILINE)
    assert re.search(r"^next: 0\.1 \w+, in 00_start_here$", printed, re.MULTILINE)
    script = "from course_exercises.sources.answers import source_of; print(source_of('3.4'))"
    found = in_the_folder(copy, "-c", script, progress=progress)
    assert found.strip() == str(copy / "notebooks" / "03_ddp_further.ipynb")


def test_an_exercise_is_checked(copy: Path, tmp_path: Path) -> None:
    script = """if True:
        from course_exercises.authoring import load_answer
        from course_exercises import check
        check("0.2", load_answer("0.2"))
        check("0.2", lambda tensor: tensor.numel())
        """
    printed = in_the_folder(copy, "-c", script, progress=tmp_path / "progress.json")
    assert printed.startswith("0.2 message_bytes: not attempted yet\n")
    assert "`element_size()`" in printed


# --- what it is made of, and where it goes -----------------------------------------------------


COMMANDS = (
    '[project.entry-points."course_utils.commands"]\nplan = "course_planner.commands:add_to"\n'
)
GRADE = 'grade = "course_grader.command:add_to"\n'
PACKAGES = '[tool.setuptools.packages.find]\ninclude = ["course_*"]\n'


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small course under git, whose packages are one for learners and the grader."""
    clone = tmp_path / "clone"
    learners = [*class_copy.FILES, *(f"{folder}/file" for folder in class_copy.FOLDERS)]
    for name in [*learners, "course_utils/a.py", "course_grader/a.py", "tests/a.py"]:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text("as committed\n")
    (clone / "pyproject.toml").write_text(COMMANDS + GRADE + PACKAGES)
    monkeypatch.setattr(class_copy, "ROOT", clone)
    class_copy.git("init", "--quiet")
    class_copy.git("add", ".")
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    class_copy.git(*who, "commit", "--quiet", "--message", "all")
    return clone


def test_it_is_of_the_last_commit_and_of_nothing_else(clone: Path, tmp_path: Path) -> None:
    (clone / "notebooks/file").write_text("solved by the instructor\n")
    (clone / "course_utils/a.pyc").write_text("made by Python\n")
    (clone / "course_utils/b.py").write_text("not under git\n")
    class_copy.write(tmp_path / "copy")
    files = {str(p.relative_to(tmp_path / "copy")) for p in tmp_path.glob("copy/**/*")}
    files = {name for name in files if (tmp_path / "copy" / name).is_file()}
    folders = {f"{folder}/file" for folder in class_copy.FOLDERS}
    assert files == {*class_copy.FILES, *folders, "README.md", "course_utils/a.py"}
    assert (tmp_path / "copy/notebooks/file").read_text() == "as committed\n"
    assert (tmp_path / "copy/pyproject.toml").read_text() == COMMANDS + PACKAGES


def test_it_refuses_what_is_not_a_new_folder_outside(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    class_copy.write(tmp_path / "empty")
    (tmp_path / "file").touch()
    for folder, reason in {
        tmp_path / "empty": "exists and is not an empty folder: name another one",
        tmp_path / "file": "exists and is not an empty folder: name another one",
        clone / "new": "lies inside the course: name a folder outside of it",
        tmp_path / "file" / "new": "cannot be written: Not a directory",
    }.items():
        with pytest.raises(ClassError, match=f"^{folder} {reason}.$"):
            class_copy.write(folder)


def test_without_git_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(class_copy, "ROOT", tmp_path / "unpacked")
    monkeypatch.setattr(sys, "argv", ["class_copy.py", str(tmp_path / "copy")])
    assert class_copy.main() == 1
    assert capsys.readouterr().err.startswith(
        "The copy is made from a clone of the course with git"
    )
    monkeypatch.setattr(sys, "argv", ["class_copy.py", ""])
    assert class_copy.main() == 1
    assert capsys.readouterr().err == "Name the folder: make class DIR=/path/to/folder.\n"
