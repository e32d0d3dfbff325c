"""The course in nbgrader: what is released, what `validate` says, and a class from release to
feedback."""

import copy
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import assignments
import nbformat
import pytest
import torch
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from nbgrader.api import Gradebook
from nbgrader.apps import NbGraderAPI
from nbgrader.auth import Authenticator
from nbgrader.coursedir import CourseDirectory
from nbgrader.exchange import ExchangeFactory
from nbgrader.nbgraderformat.v3 import MetadataValidatorV3
from nbgrader.utils import determine_grade
from nbgrader.validator import Validator
from traitlets.config import Config

import course_grader.nbgrader
import notebooks
from course_exercises.checks import catalogue, check
from course_exercises.sources import answers
from course_grader import grade_files, nbgrader
from tests.hostile_class.members import Member, hand_in, names_of

CHAPTER = "00_start_here"
ANSWERS = ["0-1", "0-2", "0-3"]
POINTS = (1, 1, 2)
CLASS = [  # who hands in what: tests/hostile_class
    "wrong_name",  # all right otherwise
    "half_right",
    "untouched",
    "checks_edited",
    "a_picture",
    "leaves",
]
SCRIPT = "<script>steal()</script>"


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course folder of nbgrader's with every chapter."""
    course = tmp_path_factory.mktemp("course")
    assert assignments.main(["build", "--folder", str(course)]) == 0
    return course


@pytest.fixture
def solved(course: Path) -> NotebookNode:
    return nbformat.read(course / "source" / CHAPTER / f"{CHAPTER}.ipynb", as_version=4)


# --- release -----------------------------------------------------------------------------------


def test_released_notebooks_are_the_learners_copies(course: Path) -> None:
    released = {path.name: path / f"{path.name}.ipynb" for path in course.glob("release/*")}
    for source in notebooks.find_sources(notebooks.ROOT, list(released)):
        learners, _ = notebooks.copies_of(notebooks.ROOT, source)
        cells, expected = nbformat.read(released[source.stem], 4).cells, learners.fresh().cells
        assert [(cell.cell_type, cell.source) for cell in cells] == [
            (cell.cell_type, cell.source) for cell in expected
        ]
        assert not any(cell.get("outputs") for cell in cells)


def test_gradebook_has_every_exercise_with_its_points(course: Path) -> None:
    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as gradebook:
        asking = {answers.source_of(e.id).stem for e in catalogue.exercises()}
        assert {assignment.name for assignment in gradebook.assignments} == asking
        points = {
            cell.name: cell.max_score
            for assignment in gradebook.assignments
            for notebook in assignment.notebooks
            for cell in notebook.grade_cells
        }
    exercises = catalogue.exercises()
    assert points == {f"{e.id.replace('.', '-')}-check": e.points for e in exercises}


def test_build_keeps_the_instructors_configuration(course: Path) -> None:
    config = course / assignments.CONFIG
    config.write_text(config.read_text() + "\nc.CourseDirectory.course_id = 'mine'\n")
    assert assignments.main(["build", "00", "--folder", str(course)]) == 0
    assert assignments.configuration(course).CourseDirectory.course_id == "mine"


def test_the_exchange_lies_in_the_courses_own_folder(course: Path) -> None:
    config = assignments.configuration(course)
    assert Path(config.Exchange.root).parent == course
    assert course in Path(config.Exchange.cache).parents


def test_a_part_of_the_points_is_what_nbgrader_reads(course: Path) -> None:
    [cell] = [c for c in copy_of(course).cells if c.source == 'check("0.3", pass_on)']
    mark = {"exercise": "0.3", "name": "pass_on", "status": "failed", "earned": 0.5, "feedback": ""}
    cell.outputs = nbgrader._outputs(cell, {"exercises": [mark]})
    assert determine_grade(cell) == (0.5, 2)


def copy_of(course: Path) -> NotebookNode:
    return nbformat.read(course / "source" / CHAPTER / f"{CHAPTER}.ipynb", as_version=4)


def test_report_without_a_gradebook(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert assignments.main(["report", "--folder", str(tmp_path), "03"]) == 1
    assert f"There is no gradebook in {tmp_path}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_report_beside_a_gradebook_that_is_newer_than_the_grades(
    tmp_path, capsys, monkeypatch
) -> None:
    own = Path(sys.executable).parent  # alembic is there
    monkeypatch.setenv("PATH", str(own), prepend=os.pathsep)
    for part in ("submitted", "autograded"):
        (tmp_path / part / "ada" / CHAPTER).mkdir(parents=True)
        (tmp_path / part / "ada" / CHAPTER / f"{CHAPTER}.ipynb").touch()
    Gradebook(f"sqlite:///{tmp_path / 'gradebook.db'}").close()
    assert assignments.main(["report", "--folder", str(tmp_path), "00"]) == 0
    printed = capsys.readouterr().out
    assert "no grade" in printed and f"autograde {CHAPTER} --student ada" in printed


def test_build_into_a_file_has_a_sentence(tmp_path: Path, capsys) -> None:
    (file := tmp_path / "course").touch()
    assert assignments.main(["build", "--folder", str(file), "00"]) == 1
    assert f"{file} cannot be the course folder" in capsys.readouterr().err


# --- validate ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "failed"), [("source", []), ("release", ANSWERS)])
def test_validate_passes_what_is_solved_only(course: Path, version: str, failed: list) -> None:
    path = course / version / CHAPTER / f"{CHAPTER}.ipynb"
    results = Validator(config=assignments.configuration(course)).validate(str(path))
    errors = [cell["raw_error"] for cell in results.get("failed", [])]
    assert [error.split()[1].replace(".", "-") for error in errors] == failed
    assert all(error.startswith("NotPassed: ") for error in errors)


def test_a_check_raises_for_nbgrader_only(monkeypatch: pytest.MonkeyPatch) -> None:
    check("0.2", lambda tensor: 0)
    monkeypatch.setenv("NBGRADER_EXECUTION", "validate")
    with pytest.raises(AssertionError, match="0.2 message_bytes is not solved yet"):
        check("0.2", lambda tensor: 0)
    with pytest.raises(AssertionError, match="0.2 message_bytes is not solved yet"):
        check("0.2")
    check("0.2", lambda tensor: tensor.nbytes)


# --- submissions that nbgrader could not handle --------------------------------------------------


def restored(submitted: NotebookNode, course: Path) -> NotebookNode:
    """What nbgrader goes on with, checked against its schema."""
    database = f"sqlite:///{course / 'gradebook.db'}"
    info = {"notebook": CHAPTER, "assignment": CHAPTER, "db_url": database}
    result, _ = nbgrader.RestoreExercises().preprocess(submitted, {"nbgrader": info})
    MetadataValidatorV3().validate_nb(result)
    nbformat.validate(result)
    return result


def exercises_in(notebook: NotebookNode) -> dict[str, str]:
    """The texts of the cells that nbgrader looks at, by grade id."""
    cells = [cell for cell in notebook.cells if "nbgrader" in cell.metadata]
    return {cell.metadata.nbgrader.grade_id: cell.source for cell in cells}


def test_an_untouched_submission_stays_as_it_is(course: Path, solved: NotebookNode) -> None:
    result = restored(copy.deepcopy(solved), course)
    assert [cell.source for cell in result.cells] == [cell.source for cell in solved.cells]
    assert exercises_in(result) == exercises_in(solved)
    assert result.metadata[nbgrader.REMARKS] == []


def _loses_all_metadata(notebook: NotebookNode) -> None:
    for cell in notebook.cells:
        cell.metadata = NotebookNode()


def _claims_something_else(notebook: NotebookNode) -> None:
    for cell in notebook.cells:
        cell.metadata = NotebookNode(nbgrader={"grade_id": "0-1", "points": 99, "grade": True})
        cell.metadata.nbgrader["schema_version"] = 99


def _is_there_twice(notebook: NotebookNode) -> None:
    notebook.cells = copy.deepcopy(notebook.cells) + notebook.cells


@pytest.mark.parametrize("edit", [_loses_all_metadata, _claims_something_else, _is_there_twice])
def test_metadata_decide_nothing(edit: Callable, course: Path, solved: NotebookNode) -> None:
    submitted = copy.deepcopy(solved)
    edit(submitted)
    result = restored(submitted, course)
    assert exercises_in(result) == exercises_in(solved)
    assert result.metadata[nbgrader.REMARKS] == []


def test_missing_and_edited_cells_are_put_back(course: Path, solved: NotebookNode) -> None:
    submitted = copy.deepcopy(solved)
    cells = {c.metadata.nbgrader.grade_id: c for c in submitted.cells if "nbgrader" in c.metadata}
    cells["0-1-check"].source = "print('passed')"
    submitted.cells.remove(cells["0-2"])
    submitted.cells.remove(cells["0-3-check"])
    result = restored(submitted, course)
    assert exercises_in(result).keys() == exercises_in(solved).keys()
    assert exercises_in(result)["0-1-check"] == 'check("0.1", average_over_ranks)'
    assert exercises_in(result)["0-2"].endswith("raise NotImplementedError")
    assert result.metadata[nbgrader.REMARKS] == [
        'The cell check("0.1", average_over_ranks) was edited; it was put back.',
        "The cell of message_bytes was missing.",
        'The cell check("0.3", pass_on) was missing; it was put back.',
    ]


def test_one_cell_may_answer_two_exercises(course: Path) -> None:
    both = new_code_cell("def message_bytes(tensor): ...\n\n\ndef pass_on(value): ...")
    result = restored(new_notebook(cells=[both]), course)
    assert exercises_in(result)["0-2"] == both.source
    assert exercises_in(result)["0-3"] == "# pass_on is defined in the cell of another exercise."


def test_cells_of_any_shape_are_survived(course: Path) -> None:
    odd = [{}, {"cell_type": "code"}, {"cell_type": "code", "source": 5}, {"cell_type": "?"}]
    odd += [{"cell_type": "code", "source": "\ud800", "metadata": {"nbgrader": []}}]
    submitted = new_notebook()
    submitted.cells = [NotebookNode(cell) for cell in odd]
    assert restored(submitted, course).cells[0].source == "?"


def test_the_only_notebook_is_found_under_any_name(tmp_path: Path) -> None:
    expected = tmp_path / f"{tmp_path.name}.ipynb"
    first, second = tmp_path / "first.ipynb", tmp_path / "second.ipynb"
    first.write_text("the first")
    found = [str(first)]
    nbgrader.find_renamed(notebooks=found, student="*")
    assert found == [str(first), str(expected)]
    assert expected.read_text() == "the first"
    expected.unlink()
    second.write_text("the second")
    nbgrader.find_renamed(notebooks=[str(first), str(second)])
    assert not expected.exists()


# --- a class -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Member]]:
    """The submissions of the class by name: STUDENT/FILE each; one of them holds a script."""
    for module in ("damaged", "attacks"):
        names_of(module)
    handed_in = hand_in(tmp_path_factory.mktemp("class"), CLASS)
    path, _ = handed_in[CLASS.index("half_right")]
    notebook = json.loads(path.read_bytes())
    notebook["cells"].insert(0, new_markdown_cell(SCRIPT))
    path.write_text(json.dumps(notebook))
    return {member.name: (path, member) for path, member in handed_in}


STARTED: list[int] = []  # how many notebooks each process of the grader got


class Counted(nbgrader.Marks):
    def __init__(self, paths: list[Path], options: list[str]):
        STARTED.append(len(paths))
        super().__init__(paths, options)


@pytest.fixture(scope="module")
def graded(course: Path, members: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The course folder after release, submission, collection, autograding and feedback."""
    config = assignments.configuration(course)
    exchange = tmp_path_factory.mktemp("exchange")
    config.Exchange.root, config.Exchange.cache = str(exchange), str(exchange / "cache")
    config.GradeExercises.unprotected = True  # where the tests run there may be no namespaces
    nbgrader = NbGraderAPI(config=config)
    assert nbgrader.release_assignment(CHAPTER)["success"]
    for name, (path, _) in members.items():
        submit(config, name, path, tmp_path_factory.mktemp(name))
    assert nbgrader.collect(CHAPTER)["success"]
    (course / "submitted" / "no_notebook" / CHAPTER).mkdir(parents=True)
    (course / "submitted" / "no_notebook" / CHAPTER / "answers.pdf").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(course_grader.nbgrader, "Marks", Counted)
        assert nbgrader.autograde(CHAPTER, "*")["success"]
    assert nbgrader.generate_feedback(CHAPTER)["success"]
    return course


def submit(config: Config, student: str, path: Path, folder: Path) -> None:
    """Hand a file in through the exchange, as `nbgrader submit` does in the learner's folder."""
    (folder / CHAPTER).mkdir()
    shutil.copy(path, folder / CHAPTER)
    config = config.copy()
    config.CourseDirectory.student_id, config.CourseDirectory.assignment_id = student, CHAPTER
    config.ExchangeSubmit.assignment_dir = str(folder)
    submit = ExchangeFactory(config=config).Submit
    coursedir = CourseDirectory(config=config)
    submit(coursedir=coursedir, authenticator=Authenticator(), config=config).start()


def test_every_submission_has_its_points_or_a_reason(graded: Path, members: dict) -> None:
    lines = {line.student: line for line in assignments.submissions(graded, CHAPTER)}
    assert lines.keys() == {*members, "no_notebook"}
    for name, (_, member) in members.items():
        earned = sum(p for p, what in zip(POINTS, member.becomes) if what == "passed")
        assert lines[name].points == f"{earned} of {sum(POINTS)}", name
    assert lines["no_notebook"].points == "no grade"
    assert lines["no_notebook"].remarks == ["No notebook was handed in, only answers.pdf."]
    assert lines["wrong_name"].remarks == ["The file was named homework final (2).ipynb."]
    assert "is no notebook" in " ".join(lines["a_picture"].remarks)
    assert len(lines["checks_edited"].remarks) == 3
    assert not any(lines[name].remarks for name in ("half_right", "untouched"))


def test_marks_are_those_of_the_command(graded: Path, members: dict) -> None:
    paths = [path for path, _ in members.values()]
    grades = grade_files(paths, jobs=2, isolated=None)
    lines = {line.student: line for line in assignments.submissions(graded, CHAPTER)}
    points = [float(lines[name].points.split()[0]) for name in members]
    assert points == [grade.earned for grade in grades]


def test_a_class_is_graded_in_one_process(graded: Path) -> None:
    """Each imported PyTorch twice before: the command, and the server of its keepers."""
    assert STARTED == [len(CLASS)]


def test_the_process_gets_what_nbgrader_will_take_up(tmp_path: Path) -> None:
    files = {
        "ada": ["03_ddp"],
        "bob": ["03_ddp"],
        "cyd": ["homework"],
        "dan": ["one", "two"],
        "eve": ["03_ddp", "old"],
        "fay": ["03_ddp"],
        "gus": [],
    }
    for student, names in files.items():
        (tmp_path / student / "03_ddp").mkdir(parents=True)
        for name in names:
            (tmp_path / student / "03_ddp" / f"{name}.ipynb").touch()
    (tmp_path / "done" / "fay").mkdir(parents=True)
    autograde = SimpleNamespace(
        assignments=[str(tmp_path / student / "03_ddp") for student in files],
        coursedir=SimpleNamespace(
            autograded_directory="done",
            format_path=lambda step, student, assignment: tmp_path / step / student,
        ),
        force=False,
    )
    first = tmp_path / "bob" / "03_ddp" / "03_ddp.ipynb"
    expected = ["bob/03_ddp/03_ddp.ipynb", "cyd/03_ddp/homework.ipynb", "eve/03_ddp/03_ddp.ipynb"]
    assert nbgrader._to_come(first, autograde) == [tmp_path / name for name in expected]
    autograde.force = True
    assert len(nbgrader._to_come(first, autograde)) == 4


def test_feedback_says_what_the_check_says(graded: Path) -> None:
    def feedback(student: str) -> str:
        return (graded / "feedback" / student / CHAPTER / f"{CHAPTER}.html").read_text()

    assert "passed: 2 points" in feedback("wrong_name")
    assert "0.3 pass_on: not attempted yet" in feedback("half_right")
    assert "is no notebook" in feedback("a_picture")
    assert "exit code 0" in feedback("leaves")


def test_no_script_reaches_the_instructor(graded: Path) -> None:
    autograded = graded / "autograded" / "half_right" / CHAPTER / f"{CHAPTER}.ipynb"
    assert "steal()" in autograded.read_text()
    assert SCRIPT not in autograded.read_text()


# --- points for requirements, as docs/grading.md tells to do it ---------------------------------------

SHARES = '"0.2" = [0.5, 0.25, 0.125, 0.0625, 0.0625]'


def four_bytes_each(tensor: torch.Tensor) -> int:
    return 4 * tensor.numel()


def test_points_are_the_same_in_check_grader_and_nbgrader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    course, home = tmp_path / "course", tmp_path / "home"
    home.mkdir()
    assert assignments.main(["build", "00", "--folder", str(course)]) == 0
    for folder in (course, course / "source" / CHAPTER):
        (folder / "points.toml").write_text(SHARES)
    with (course / assignments.CONFIG).open("a") as config:
        config.write(
            "\nc.GradeExercises.points = 'points.toml'\nc.GradeExercises.unprotected = True\n"
        )
    assert assignments.main(["build", "00", "--folder", str(course)]) == 0
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(course)
    api = NbGraderAPI(config=assignments.configuration(course))
    assert api.release_assignment(CHAPTER)["success"]
    released = course / "exchange" / "parallelism" / "outbound" / CHAPTER
    submitted = submit_to(course, released)
    assert api.collect(CHAPTER)["success"]
    assert api.autograde(CHAPTER, "ada")["success"]
    assert api.generate_feedback(CHAPTER, "ada")["success"]
    [line] = assignments.submissions(course, CHAPTER)
    shares = ["--points", str(course / "points.toml"), "--unprotected"]
    marks = nbgrader.Marks([submitted], shares).of(submitted)
    monkeypatch.chdir(released)
    capsys.readouterr()
    check("0.2", four_bytes_each)
    assert "so far: 0.75 of 1 point" in capsys.readouterr().out
    assert sum(mark["earned"] for mark in marks["exercises"]) == 0.75
    assert line.points == "0.75 of 4"
    assert "points.toml" in {path.name for path in released.iterdir()}
    assert not [path for path in home.rglob("*") if "exchange" in path.name or path.suffix == ".db"]


def submit_to(course: Path, released: Path) -> Path:
    """Hands in the released notebook with one answer; returns its path."""
    path = course.parent / "ada" / CHAPTER / f"{CHAPTER}.ipynb"
    shutil.copytree(released, path.parent)
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("grade_id") == "0-2":
            cell.source = inspect.getsource(four_bytes_each).replace(
                "four_bytes_each", "message_bytes"
            )
    nbformat.write(notebook, path)
    submit(assignments.configuration(course), "ada", path, course.parent)
    return path


# --- without a shared folder -------------------------------------------------------------------

DOWNLOADS = {  # as learning platforms name them: what nbgrader makes of it
    "ada_00_start_here.ipynb": f"ada/{CHAPTER}/00_start_here.ipynb",
    "bo_4711_late_00_start_here (1).ipynb": f"bo/{CHAPTER}/00_start_here (1).ipynb",
    "Cy Day_12_file_/00_start_here.ipynb": f"Cy Day/{CHAPTER}/00_start_here.ipynb",
    "di_homework.ipynb": f"di/{CHAPTER}/homework.ipynb",
}


def test_downloads_are_collected_by_the_students_name(course: Path, tmp_path: Path) -> None:
    shutil.copy(course / assignments.CONFIG, tmp_path)
    for name in DOWNLOADS:
        path = tmp_path / "downloaded" / CHAPTER / "archive" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    command = [sys.executable, "-m", "nbgrader", "zip_collect", CHAPTER]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    collected = (tmp_path / "submitted").rglob("*.ipynb")
    assert {str(p.relative_to(tmp_path / "submitted")) for p in collected} == {*DOWNLOADS.values()}
