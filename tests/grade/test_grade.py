"""The grader on a class whose submissions try everything (tests/hostile_class).

The class is graded with namespaces, and those for whom it might make a difference are graded again
without them: the marks are the same, and nothing is left. Where the system has no namespaces, both
are without.
"""

import contextlib
import csv
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import nbformat
import psutil
import pytest

import course_utils
from course_exercises.sources.answers import grade_id_of, source_of
from course_grader import Grade, Limits, Mark, grade_file, grade_files, grading, report
from course_grader.grading import Request
from course_grader.limits import MB
from course_utils.__main__ import main
from tests.hostile_class.attacks import VARIANT
from tests.hostile_class.members import hand_in, names_of

ATTACKS = names_of("attacks")
DAMAGED = names_of("damaged")
FORGERIES = names_of("forgeries")
INSIDERS = names_of("insiders")
KILLS = names_of("kills")
# graded without namespaces too
AGAIN = (
    *("all_right", "half_right", "checks_edited", "counts_one_byte_more", "a_picture", "leaves"),
    *("stops_itself", "forks_and_forks", "forks_and_flees", "leaves_a_daemon_behind"),
    *("eats_memory_in_its_children", "changes_the_check", "writes_a_mark_of_its_own"),
    *("kills_its_group", "leaves_traces", "leaves_traces_again"),
)
LIMITS = {"memory": 1024 * MB, "processes": 32, "file": 50 * MB, "notebook": 20_000_000}
MARK = "LANGUAGE"  # in the environment of all that a grader starts


@contextlib.contextmanager
def nothing_left():
    """Fails if a process or a temporary file outlives the block."""
    mark = uuid.uuid4().hex
    # short, because sockets lie in it
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield mark
        wait_until(lambda: not processes_with(mark))
        wait_until(lambda: not list(Path(folder).glob("grade-*")))


@contextlib.contextmanager
def something_outside(folder):
    """Listens at a socket, holds a FIFO open and has a secret in the environment."""
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as listening, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VIRTUAL_ENV", str(folder))
        for family in ("", "PYTHON_", "COURSE_", "TORCH_", "LC_"):
            patch.setenv(f"{family}INSTRUCTORS_TOKEN", "secret")
        listening.bind(str(folder / "socket"))
        listening.listen()
        fifo = os.open(folder / "fifo", os.O_RDWR)
        yield
        os.close(fifo)


def processes_with(mark):
    """Processes whose environment has the mark, wherever they are; the janitor is not one: it
    lives as long as this process."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if process.environ().get(MARK) == mark and "launch/keepers/janitor.py" not in command:
                found.append((process.pid, command))
    return found


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.1)


def grade_all(handed_in, **options):
    """Grades by member; those with the same time limit go together."""
    grades = {}
    for seconds in sorted({member.seconds for _, member in handed_in}):
        group = [(path, member) for path, member in handed_in if member.seconds == seconds]
        limits = Limits(seconds=seconds, **LIMITS)
        graded = grade_files([path for path, _ in group], jobs=2, limits=limits, **options)
        grades |= {m.name: grade for (_, m), grade in zip(group, graded, strict=True)}
    return grades


@pytest.fixture(scope="module")
def handed_in(tmp_path_factory):
    return hand_in(tmp_path_factory.mktemp("class"), DAMAGED + ATTACKS + FORGERIES + INSIDERS)


@pytest.fixture(scope="module")
def grades(handed_in):
    """The grades of the class by member, in namespaces and without."""
    found = {}
    for isolated in (True, False):
        again = [(path, member) for path, member in handed_in if member.name in AGAIN]
        with nothing_left():
            found[isolated] = grade_all(
                handed_in if isolated else again, isolated=isolated and None, variant=VARIANT
            )
    return found


@pytest.mark.parametrize("name", DAMAGED + ATTACKS + FORGERIES + INSIDERS)
def test_everybody_gets_a_grade_or_a_reason(name, handed_in, grades):
    [member] = [member for _, member in handed_in if member.name == name]
    grade = grades[True][name]
    as_expected(member, grade)
    assert bool(grade.reason) == (not grade.exercises)


def as_expected(member, grade):
    assert len(grade.exercises) == len(member.becomes), grade
    for mark, statuses in zip(grade.exercises, member.becomes, strict=True):
        assert mark.status in statuses.split("|"), grade
    said = [m.feedback for m in grade.exercises if m.status not in ("passed", "missing")]
    for text in [*said, grade.reason] if grade.reason else said:
        assert re.search(member.because, text), text
    assert grade.earned == sum(m.points for m in grade.exercises if m.status == "passed")


def test_marks_and_feedback_are_the_same_again(grades):
    def known(grade):
        return [(m.exercise, m.status, m.earned, m.feedback) for m in grade.exercises]

    of_two_kinds = {"forks_and_flees"}  # on a slow machine its check ends it before the keeper
    for name in grades[False].keys() - of_two_kinds:
        again = grades[False][name]
        grade = grades[True][name]
        assert (known(grade), grade.reason) == (known(again), again.reason)


DEEP = " + ".join(["1"] * 1000)
CHANGES = {  # of a solved notebook: the answer that is another, and what is written in its place, or behind it
    "beside GPUs": ("0.1", "{}\n\nimport torch\ntorch.cuda.device_count = lambda: 4\n"),
    "ranks wait": (
        "0.1",
        """def average_over_ranks(value):
    if dist.get_rank() == 0:
        dist.all_reduce(value)
    return value
""",
    ),
    "too deep": ("0.1", f"{{}}\n\ntotal = {DEEP}"),
    "very long": ("1.3", "def decide(job):\n    return 'line ' * 300_000\n"),
    "changes what the judge computes with": (
        "1.3",
        (
            "def decide(job):\n"
            "    [object.__setattr__(job, name, 0) for name in vars(job) if name != 'asked']; return 'one'\n"
        ),
    ),
}


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """By the name of a change, the marks."""
    requests = []
    for id, text in CHANGES.values():
        solved = source_of(id).with_suffix(".ipynb")
        notebook = nbformat.read(solved, as_version=4)
        ids = [cell.metadata.get("nbgrader", {}).get("grade_id") for cell in notebook.cells]
        cell = notebook.cells[ids.index(grade_id_of(id))]
        cell.source = text.format(cell.source)
        nbformat.write(notebook, path := tmp_path_factory.mktemp("changed") / solved.name)
        requests.append(Request(path))
    grades = grading.grade_all(requests, jobs=2, limits=Limits(**LIMITS))
    return {name: {m.exercise: m for m in g.exercises} for name, g in zip(CHANGES, grades)}


@pytest.mark.parametrize("name", ["beside GPUs", "too deep"])
def test_what_stands_beside_an_answer_costs_no_marks(name, changed):
    assert changed[name]["0.1"].status == "passed", changed[name]["0.1"].feedback


def test_ranks_that_wait_for_each_other_are_explained_as_in_the_notebook(changed):
    said = changed["ranks wait"]["0.1"].feedback
    assert re.search(r"rank 0 waits in all_reduce\n.*, line 3, in", said)


@pytest.mark.parametrize("name", ["very long", "changes what the judge computes with"])
def test_what_comes_back_ends_no_grading_and_changes_no_question(name, changed):
    marks = changed[name]
    assert marks["1.3"].status == "failed"
    assert len(marks["1.3"].feedback) <= 20_000
    assert {marks[id].status for id in ("1.1", "1.2")} == {"passed"}


def test_in_namespaces_nothing_around_a_submission_can_be_hit(tmp_path):
    program = "import sys; from course_grader import isolation; sys.exit(isolation.possible())"
    if subprocess.call([sys.executable, "-c", program]) == 0:
        pytest.skip("this system lets nobody make namespaces")
    handed_in = hand_in(tmp_path / "class", KILLS)
    with nothing_left(), something_outside(tmp_path):
        grades = grade_all(handed_in)
    for _, member in handed_in:
        as_expected(member, grades[member.name])
    for folder in (Path(course_utils.__file__).parent, Path("/tmp"), Path("/var/tmp")):
        reached = folder / "reached-by-a-submission"
        assert not reached.exists(), reached


def test_without_namespaces_who_is_hit_is_said_and_the_rest_is_graded(tmp_path):
    handed_in = hand_in(tmp_path, ["kills_its_parent", "kills_its_ancestors", "all_right"])
    with nothing_left():
        grades = grade_all(handed_in, isolated=False)
    # A check calls the answer more than once: the first call kills the worker's parent, the next one the
    # keeper, unless it has ended the worker by then.
    hit = re.compile("the code killed the process that (had started|watched over) it")
    for name in ("kills_its_parent", "kills_its_ancestors"):
        mark = grades[name].exercises[1]
        # the answer is right, and the verdict may be out
        assert mark.status in ("passed", "stopped")
        assert mark.status == "passed" or hit.search(mark.feedback), mark.feedback
    assert grades["all_right"].earned == 4


def test_a_variant_fixes_what_the_checks_draw(handed_in, grades):
    [path] = [path for path, member in handed_in if member.name == "counts_one_byte_more"]
    [_, mark, _] = grade_file(path, variant="autumn", isolated=None).exercises
    assert "expected:" in mark.feedback
    assert mark.feedback != grades[True]["counts_one_byte_more"].exercises[1].feedback


@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "not-isolated"])
def test_a_grader_that_is_killed_leaves_nothing(isolated, tmp_path):
    [(path, _)] = hand_in(tmp_path / "class", ["waits_without_an_alarm"])
    program = "import sys; from course_grader import grade_file as grade; "
    program += "grade(sys.argv[1], isolated=None if sys.argv[2] == 'True' else False)"
    command = [sys.executable, "-c", program, str(path), str(isolated)]
    with nothing_left() as mark, subprocess.Popen(command) as grader:
        # server, keeper, first, worker, and the worker's fork server
        wait_until(
            lambda: (
                sum("course_grader.keeper_server" in line for _, line in processes_with(mark)) >= 5
            )
        )
        grader.kill()


def test_limits_that_are_lower_already_stay(tmp_path):
    [(path, _)] = hand_in(tmp_path, ["second_thoughts"])
    program = "import resource, sys; from course_grader import grade_file; "
    program += "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26, 1 << 26)); "
    program += "print(grade_file(sys.argv[1], isolated=None))"
    shown = subprocess.run(
        [sys.executable, "-c", program, path], check=True, stdout=subprocess.PIPE
    )
    assert b"status='passed'" in shown.stdout, shown


@pytest.fixture
def class_folder(tmp_path):
    folder = tmp_path / "class"
    hand_in(folder, ["half_right", "leaves", "a_picture"])
    checkpoint = folder / "leaves" / ".ipynb_checkpoints" / "00_start_here.ipynb"
    checkpoint.parent.mkdir()
    checkpoint.write_text("not looked at")
    return folder


def test_the_text_of_a_check_is_shown_where_it_is_wanted_and_can_harm_no_terminal():
    marks = [Mark("0.2", "message_bytes", 1, "failed", "0.2 message_bytes\n  no  \x1b[2J")]
    grade = Grade("a.ipynb", "00_start_here", marks)
    assert report.text(grade, details=False).splitlines()[1:] == [
        "  0.2 message_bytes                            0 of 1  failed"
    ]
    assert report.text(grade, details=True).splitlines()[-1] == "        no  ?[2J"


class TestCommand:
    """python -m course_utils grade"""

    def run(self, *arguments):
        with pytest.raises(SystemExit) as left:
            main(["grade", "--unprotected", *map(str, arguments)])
        return left.value.code

    def test_without_namespaces_it_refuses_and_says_so_where_it_is_told_to_go_on(
        self, tmp_path, monkeypatch, capsys
    ):
        hand_in(tmp_path, ["second_thoughts"])
        monkeypatch.setattr("course_grader.keeper_client.PROTECTED", b"never said")
        assert self.run(tmp_path) == 1
        assert "has answers that a submission could read" in capsys.readouterr().out
        monkeypatch.setattr("course_grader.outside.ROOT", tmp_path)
        with pytest.raises(SystemExit) as left:
            main(["grade", str(tmp_path)])
        assert left.value.code == 1
        assert "nobody make namespaces" in capsys.readouterr().out
        assert self.run(tmp_path) == 0
        shown = capsys.readouterr().out
        assert "Unprotected: this system lets nobody make namespaces" in shown
        assert "1 of 1  passed" in shown

    def test_a_class(self, class_folder, tmp_path, capsys):
        assert self.run(class_folder, "--into", tmp_path / "out", "--jobs", 2) == 1
        shown = capsys.readouterr().out
        assert "half_right/00_start_here.ipynb: 00_start_here, 2 of 4 points" in shown
        assert "a_picture/00_start_here.ipynb: not graded\n  00_start_here.ipynb is no" in shown
        assert "0 of 1  stopped\n      the code ended its process, with exit code 0" in shown
        rows = list(csv.DictReader((tmp_path / "out" / "marks.csv").open()))
        assert [(row["exercise"], row["earned"], row["status"]) for row in rows] == [
            ("", "0", "not graded"),
            *(("0.1", "1", "passed"), ("0.2", "1", "passed"), ("0.3", "0", "not attempted")),
            *(("0.1", "0", "missing"), ("0.2", "0", "stopped"), ("0.3", "0", "missing")),
        ]
        assert rows[1]["feedback"].endswith("passed: 1 point")

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["{empty}"], "There is no notebook (.ipynb) in {empty}."),
            (["{file}", "--into", "{file}/x"], "{file}/x cannot be the folder of the results"),
        ],
    )
    def test_what_cannot_be_is_said(self, arguments, says, tmp_path):
        places = {"empty": tmp_path / "empty", "file": tmp_path / "file.ipynb"}
        places["empty"].mkdir()
        places["file"].touch()
        code = self.run(*(argument.format(**places) for argument in arguments))
        assert says.format(**places) in code

    def test_a_server_that_does_not_start(self, class_folder, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr("course_grader.keeper_client._PROGRAM", "no.such.program")
        assert self.run(class_folder, "--into", tmp_path / "out") == 1
        shown = capsys.readouterr().out
        assert "The grader's server does not start" in shown
        assert "1 of 3 files were graded" in shown  # the picture needs no server
        assert not (tmp_path / "out" / "marks.csv").exists()

    def test_inputs_of_their_own_for_students(self, tmp_path, capsys):
        """Two who hand in the same are asked for other numbers; a complaint can be tried again."""
        for name in ("first", "second"):
            hand_in(tmp_path / "in" / name, ["counts_one_byte_more"])
        rows = "name,email,id\nFirst,f@x.org,first\nSecond,s@x.org,second\n"
        (tmp_path / "roster.csv").write_text(rows)
        own = ("--roster", tmp_path / "roster.csv", "--own-inputs", "--variant", "spring")

        def feedback(*arguments):
            assert self.run(*arguments, "--json") == 0
            files = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            return [file["exercises"][1]["feedback"] for file in files]

        first, second = feedback(tmp_path / "in", *own)
        assert first != second
        assert feedback(tmp_path / "in" / "second", "--variant", "spring/second") == [second]

    def test_no_variant_at_all(self, capsys):
        assert self.run("x.ipynb", "--variant", "") == 2
        assert "any word will do" in capsys.readouterr().err

    def test_no_jobs_at_all(self, capsys):
        assert self.run("x.ipynb", "--jobs", "0") == 2
        assert "no whole number of at least 1" in capsys.readouterr().err
