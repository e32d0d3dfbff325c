"""From a folder of submissions to what is handed back: whose each is, late days, marks by hand, pages."""

import csv
import datetime
import json
import os
import shutil
import signal
import sys
import unicodedata
import zipfile
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from course_exercises.checks import catalogue, points
from course_exercises.sources.chapters import ROOT
from course_grader import (
    export,
    gathering,
    grading,
    lms,
    outside,
    pages,
    report,
    roster,
    rules,
    summary,
)
from course_grader.gathering import Found
from course_grader.marks import Grade, Mark
from course_grader.roster import Student
from course_grader.totals import HandedIn, Total, totals
from course_utils.__main__ import main

EXAMPLES = ROOT / "examples"
WRONG = [["two ranks", False, "unchanged"]]
DUE = datetime.datetime(2026, 3, 1, 12)


def student(id, name=""):
    return Student(name or id.title(), f"{id}@x.org", id)


def found(inside, typed="class", **more):
    return Found(Path("x"), f"/home/{typed}/{inside}", PurePosixPath(inside), typed, **more)


def mark(status="failed", exercise="0.3", lines=(), points=2, feedback="0.3 pass_on\n  no  <b>"):
    return Mark(exercise, "pass_on", points, status, feedback, 0.1, list(lines))


def grade(*marks, reason="", path="a/00.ipynb", chapter="00_start_here"):
    return Grade(path, "" if reason else chapter, list(marks), reason)


# --- whose it is -----------------------------------------------------------------------------------


def owner(one, *students):
    return roster.owner(one, {each.id: each for each in students})


@pytest.mark.parametrize(
    ("inside", "id"),
    [
        ("lovelaceada_1815_90210_03_ddp.ipynb", "1815"),  # Canvas
        ("lovelaceada_LATE_1815_90210_03_ddp-1.ipynb", "1815"),
        ("lovelaceada_1815_90210_work.zip/babbage_1791_5_03.ipynb", "1815"),
        ("Ada Lovelace_1815_assignsubmission_file_/babbage_1791_5_03.ipynb", "1815"),  # Moodle
        ("Ada Lovelace_1815_assignsubmission_file_03_ddp.ipynb", "1815"),
        ("ada/03_ddp/bob_03_ddp.ipynb", "ada"),  # nbgrader
        ("ada_03_ddp.ipynb", "ada"),
        ("ada.ipynb", "ada"),
        ("Müller_Jörg/03.ipynb", "Müller_Jörg"),
    ],
)
def test_what_the_lms_has_written_says_whose_it_is(inside, id):
    others = [student(each) for each in ("1815", "1791", "ada", "bob", "Müller_Jörg") if each != id]
    for form in ("NFC", "NFD"):  # macOS makes two characters of an umlaut
        one = found(unicodedata.normalize(form, inside))
        assert owner(one, *others, mine := student(id)) is mine


@pytest.mark.parametrize(
    "inside",
    [
        "lovelace_1815_90210_03.ipynb",  # of a student who is not in the roster
        "lovelace_1815_90210_work.zip/bob_03.ipynb",
        "lovelace_1815_5_x_90210_6_03.ipynb",
        "Ada_1815_assignsubmission_file__90210_assignsubmission_file_/03.ipynb",
        "zed/bob_03_ddp.ipynb",
        "03_ddp.ipynb",
        "abob_03.ipynb",
        "submissions/bob/03.ipynb",  # a level too high
    ],
)
def test_what_names_nobody_is_nobodys(inside):
    """A roster gave a whole class's points to one student, whose id was a part of another word."""
    said = owner(found(inside, "bob"), student("bob"), student("eli"), student("90210"))
    assert f"{inside} is nobody's" in said
    assert "is no id of the roster" in said


def test_what_the_instructor_typed_names_nobody():
    eli, bob = student("eli"), student("1")
    one = found("bob_1_2_03_ddp.ipynb", "parallelism")
    assert owner(one, eli, bob) is bob


@pytest.mark.parametrize(
    ("inside", "typed"),
    [
        ("ada_03_ddp.ipynb", "class"),  # "ada", or "ada_03"
        ("x_17_99_1000_03.ipynb", "class"),  # a name in Canvas that ends in a number
        ("x_17_5_y_99_1000_03.ipynb", "class"),
        ("x_17_assignsubmission_file__99_assignsubmission_file_/03.ipynb", "class"),
        ("ada/03.ipynb", "17"),  # the instructor named one student's folder
    ],
)
def test_what_could_be_two_students_names_both(inside, typed):
    class_ = [student(id) for id in ("ada", "ada_03", "17", "99")]
    said = owner(found(inside, typed), *class_)
    assert "is nobody's: it could be" in said
    assert sum(f"({one.id})" in said for one in class_) == 2


# --- the roster and class.toml --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "name,email,id\nAda,a@x.org,7\n",
        "Student,ID,SIS Login ID,Section\n    Points Possible,,,\nAda,7,a@x.org,1\n",  # Canvas
        "Identifier,Full name,Email address,Grade\nParticipant 7,Ada,a@x.org,\n",  # Moodle
    ],
)
def test_the_lists_of_an_lms_are_rosters(text, tmp_path):
    (tmp_path / "r.csv").write_text(text, encoding="utf-8-sig")
    assert roster.read(tmp_path / "r.csv") == {"7": Student("Ada", "a@x.org", "7")}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name,email\nA,b\n", "columns name, email, id"),
        ("name,email,id\nA,b,\n", "A has no id"),
        ("name,email,id\nA,b\n", "A has no id"),
        ("Student,ID,SIS Login ID\n    Points Possible,,\n", "has no student"),
        ("name,email,id\nA,b,7\nB,c,7\n", "A and B have the same id, 7"),
    ],
)
def test_a_roster_that_cannot_be_used_says_why(text, says, tmp_path):
    (tmp_path / "r.csv").write_text(text)
    with pytest.raises(ValueError, match=says):
        roster.read(tmp_path / "r.csv")


def decided(folder, text, *ids):
    (folder / "class.toml").write_text(text)
    return rules.read(folder / "class.toml", ids)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("penalty = -3", "from 0 to 1"),  # made 1,646 points of 2
        ("penalty = 10", "from 0 to 1"),
        ("penalty = nan", "from 0 to 1"),
        ("free_days = -1", "whole number of days"),
        ("late = 1", "late is not known; there are free_days"),
        ("penalty =", "Invalid value"),
        ('[due]\n"99" = 2026-03-01', "no chapter '99'"),
        ('[due]\n"03" = "Monday"', "it is a time like"),
        ('[due]\n"03" = 2026-03-01\n[extension.8]\n"03" = 1', "nobody in the roster has the id 8"),
        ('[extension.7]\n"03" = 1', 'extends nothing: [due] has no "03"'),
        ('[due]\n"03" = 2026-03-02\n[extension.7]\n"03" = 2026-03-01', "is before"),
        ('[due]\n"03" = 2026-03-01\n[days_late.7]\n"03" = -1', "whole number of days"),
        ('[mark.7]\n"3.1" = { points = 3, reason = "x" }', "points is 3; it has 2"),
        ('[mark.7]\n"3.1" = { points = 1 }', "reason ="),
        ('[mark.7]\n"3.99" = { points = 1, reason = "x" }', "There is no exercise '3.99'"),
        ('[days_late.7]\n"03" = 2', 'costs nothing: [due] has no "03"'),
        ('[regrade]\n"3.1" = ""', "needs a reason"),
        ("mark = 3", "mark is no table"),
    ],
)
def test_what_class_toml_cannot_say_has_a_sentence(text, says, tmp_path):
    with pytest.raises(ValueError, match=r"class\.toml: ") as caught:
        decided(tmp_path, text, "7")
    assert says in str(caught.value)


DECIDED = """
free_days = 1
[due]
"00" = 2026-03-01T12:00:00
[extension.more]
"00" = 2
[extension.date]
"00" = 2026-03-02
[days_late.hand]
"00" = 3
"""


@pytest.mark.parametrize(
    ("id", "days", "by_canvas", "late", "left"),
    [
        ("a", -0.1, None, 0, 1),
        ("a", 0.1, None, 1, 1),  # begun days count, and one is free
        ("a", 1, None, 1, 1),
        ("a", 2.1, None, 3, 0.8),
        ("a", 99, None, 99, 0),
        ("a", None, None, 0, 1),  # nobody knows when
        ("more", 2, None, 0, 1),
        ("more", 2.1, None, 1, 1),
        ("date", 1.4, None, 0, 1),  # to the end of that day
        ("date", 1.6, None, 1, 1),
        ("hand", 99, None, 3, 0.8),
        ("a", 99, False, 0, 1),  # what Canvas packs is as new as the packing
        ("a", 99, True, 1, 1),
        ("more", 99, True, 0, 1),
    ],
)
def test_late_days(id, days, by_canvas, late, left, tmp_path):
    made = decided(tmp_path, DECIDED, "more", "date", "hand")
    when = days if days is None else DUE.timestamp() + days * 86400
    found = made.late(id, 0, when, by_canvas)
    assert (found.days, round(found.left, 6)) == (late, left)
    assert bool(found.why) == bool(late or by_canvas)


def test_a_day_without_a_time_is_told_as_that_day(tmp_path):
    made = decided(tmp_path, '[due]\n"00" = 2026-03-01')
    late = made.late("a", 0, DUE.timestamp() + 86400, None)
    assert "It was due on 2026-03-01 23:59." in late.why


def test_without_a_due_time_what_canvas_calls_late_has_a_line():
    assert rules.Rules().late("a", 0, None, True) == rules.Late(why="Canvas calls it late.")


# --- totals ---------------------------------------------------------------------------------------


def in_total(tmp_path, graded, text=""):
    class_ = {id: student(id) for id in ("ada", "bob", "eve")}
    graded = [
        (found(name, **more), g, owner(found(name), *class_.values())) for name, g, more in graded
    ]
    return totals(graded, class_, decided(tmp_path, text, *class_))


def test_the_best_counts_after_its_late_days_and_everybody_has_a_line(tmp_path):
    due = DUE.timestamp()
    graded = [
        ("ada/00.ipynb", grade(mark("passed")), {"when": due}),
        ("ada/00 (1).ipynb", grade(mark("passed"), mark("passed")), {"when": due + 86401 * 7}),
        ("bob/00.html", grade(reason="No notebook (.ipynb) was handed in, only 00.html."), {}),
    ]
    ada, bob, eve = in_total(tmp_path, graded, '[due]\n"00" = 2026-03-01T12:00:00')
    assert (ada.points, ada.days_late, len(ada.counting)) == (2, 0, 1)
    assert "ada/00 (1).ipynb: 0.8 points, and another one counts." in ada.remarks()
    assert bob.remarks() == ["bob/00.html: No notebook (.ipynb) was handed in, only 00.html."]
    assert eve.remarks() == ["nothing was handed in."]


def test_a_mark_by_hand_counts_with_its_reason_also_where_nothing_came(tmp_path):
    hand = '"0.3" = { points = 1.5, reason = "at the blackboard" }'
    text = f"[mark.ada]\n{hand}\n[mark.eve]\n{hand}\n"
    ada, bob, eve = in_total(tmp_path, [("ada/00.ipynb", grade(mark()), {})], text)
    assert (ada.points, bob.points, eve.points) == (1.5, 0, 1.5)
    assert ada.remarks() == ["ada/00.ipynb: 0.3 pass_on  by hand: at the blackboard"]
    assert eve.remarks() == ["nothing was handed in.", "0.3 pass_on  by hand: at the blackboard"]
    assert "no  &lt;b&gt;" in pages.page(ada) and "at the blackboard" in pages.page(ada)


# --- tables and pages -----------------------------------------------------------------------------


def total(one, *graded):
    return Total(one, [HandedIn(f, g, rules.Late(), not g.reason) for f, g in graded])


def test_a_spreadsheet_computes_nothing_of_what_a_submission_says(tmp_path):
    path, evil = tmp_path / "marks.csv", '=HYPERLINK("x")'
    refused = (found(f"{evil}.ipynb"), grade(reason="\x1b[2J@x"))
    report.write_csv([total(student("+b"), refused, (found("-c"), grade(mark())))], ["@"], path)
    cells = [cell for row in csv.reader(path.open()) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]
    assert "\x1b" not in path.read_text()
    assert f"'{evil}.ipynb" in cells


def test_exports(tmp_path):
    one = total(student("7", "First"), (found("first_7_9_03.ipynb"), grade(mark("passed"))))
    export.write([one, total(student("8", "Second"))], tmp_path)

    def rows(kind):
        return list(csv.reader((tmp_path / f"{kind}.csv").open()))

    chapter = "00_start_here"
    assert rows("moodle") == [["Email address", chapter], ["7@x.org", "2"], ["8@x.org", "0"]]
    assert rows("gradescope")[1] == ["7@x.org", "First", "2"]
    assert rows("canvas") == [
        ["Student", "ID", "SIS Login ID", "Section", chapter],
        ["    Points Possible", "", "", "", "2"],
        ["First", "7", "7@x.org", "", "2"],
        ["Second", "8", "8@x.org", "", "0"],
    ]
    export.write([total(student("7"), (found("7_03.ipynb"), grade(mark("passed"))))], tmp_path)
    assert rows("canvas")[2][1] == "", "a number that Canvas has not given could be somebody else's"


def test_a_page_is_short_loads_nothing_and_turns_no_line_round(tmp_path):
    evil = "<script>alert(1)</script>"
    long = mark(feedback=f"{evil}\u202e\x1b[2K\n" * 5000)
    [path] = pages.write([total(student("a", evil), (found(evil), grade(long)))], tmp_path)
    text = path.read_text()
    assert path.parent == tmp_path / "feedback"
    assert len(text) < 50_000
    assert not [each for each in ("<script>", "://", "\u202e", "\x1b") if each in text]


def test_a_page_has_the_students_name_and_no_path_of_the_instructors(tmp_path):
    late = rules.Late(3, 0.8, "It came on Tuesday, 3 days late")
    one = HandedIn(
        found("ada_03.ipynb"), grade(mark(), mark("passed"), path="/home/prof/x"), late, True
    )
    [path] = pages.write([Total(student("1815", "Émilie du Châtelet"), [one])], tmp_path)
    text = path.read_text(encoding="utf-8")
    assert path.name == "Émilie-du-Châtelet_1815.html"
    assert "/home" not in text
    for said in (
        "Émilie du Châtelet",
        "1815",
        "1.6 of 4 points",
        "3 days late",
        "2 points before that",
    ):
        assert said in text
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "feedback/Émilie-du-Châtelet_1815.html" in index and "3 days late" in index


def test_what_is_said_of_a_file_names_no_folder_of_the_instructors(tmp_path):
    (tmp_path / "in" / "ada" / "03.ipynb").mkdir(parents=True)
    (tmp_path / "in" / "bob").mkdir()
    (tmp_path / "in" / "bob" / "03.ipynb").symlink_to(tmp_path / "nowhere" / "x.ipynb")
    (tmp_path / "in" / "cyd.zip").write_text("PK")
    found = list(gathering.notebooks([str(tmp_path / "in")], tmp_path / "out"))
    requests = [grading.Request(one.path, one.reason) for one in found]
    reasons = [made.reason for made in grading.grade_all(requests)]
    reasons.append(
        pages.page(total(student("a"), (found[0], replace(grade(mark()), reason="/home/x"))))
    )
    assert len(reasons) == 4 and all(reasons)
    assert not [said for said in reasons if str(tmp_path) in said or "/home" in said]


def test_no_page_takes_the_place_of_another(tmp_path):
    names = ["a/b", "a-b", "A-B", "../../x", "\udcfe", "\udcff", "\U0001d400" * 60]
    written = pages.write([total(student(name, name)) for name in names], tmp_path)
    assert len({path.name.casefold() for path in written}) == len(names)
    assert {path.parent for path in written} == {tmp_path / "feedback"}
    [left] = pages.write([total(student("a", "a"))], tmp_path)
    assert list((tmp_path / "feedback").iterdir()) == [left], "those who have left keep no page"
    assert {path.parent for path in written} == {tmp_path / "feedback"}


@pytest.mark.parametrize(
    ("inside", "sent"),
    [
        ("ada_1815_90210_03_ddp.ipynb", "ada_1815_90210_feedback.html"),
        ("ada_LATE_1815_90210_03_ddp.ipynb", "ada_LATE_1815_90210_feedback.html"),
        ("Ada L_7_assignsubmission_file_/03.ipynb", "Ada L_7_assignsubmission_file_feedback.html"),
        ("Ada L_7_assignsubmission_file/03.ipynb", "Ada L_7_assignsubmission_file_feedback.html"),
        ("Ada L_7_assignsubmission_file_03.ipynb", "Ada L_7_assignsubmission_file_feedback.html"),
        ("ada/03_ddp.ipynb", None),
    ],
)
def test_feedback_goes_back_under_the_names_of_the_lms(inside, sent, tmp_path):
    assert lms.for_feedback(PurePosixPath(inside)) == (sent or "")
    pages.write(
        [total(student("7"), (found(inside), grade(mark()))), total(student("8"))], tmp_path
    )
    assert (tmp_path / "feedback.zip").exists() == bool(sent)
    if sent:
        assert zipfile.ZipFile(tmp_path / "feedback.zip").namelist() == [sent]


def test_the_report_names_the_mistakes_by_frequency(tmp_path):
    marks = [mark(lines=WRONG)] * 3 + [mark("passed"), mark("not attempted")]
    marks += [mark(lines=[["r", False, "left-out"]])]
    marks += [
        mark("stopped", feedback="0.3 pass_on: the code reaches for what the check holds: gc")
    ]
    class_ = [total(student(f"s{i}"), (found("00.ipynb"), grade(m))) for i, m in enumerate(marks)]
    summary.write([*class_, total(student("eve"))], ["x is nobody's"], ["0.3: a, b"], tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| 0.3 `pass_on` | 1 (14%) | 5 | 1 | 3 x unchanged: Each rank still has" in text
    assert "* S6: 0.3 pass_on: the code reaches for" in text.replace("s6", "S6")
    assert "* Eve: nothing was handed in." in text
    assert "* x is nobody's" in text and "* 0.3: a, b" in text
    assert (tmp_path / "report.png").stat().st_size > 1000


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Grades three files, of which `of` are done when SIGTERM comes; `asked` has who was graded."""

    def run(*arguments, of=3, text="{}"):
        def graded(requests, **_):
            left = of
            for one in requests:
                if not one.known:
                    if not left:
                        os.kill(os.getpid(), signal.SIGTERM)
                    left -= 1
                    run.asked.append(one.path.parent.name)
                yield grade(*(one.known.values() or [mark("passed")]), path=str(one.path))

        run.asked = []
        monkeypatch.setattr("course_grader.command.grade_all", graded)
        with pytest.raises(SystemExit) as ended:
            main(["grade", str(tmp_path / "in"), *map(str, arguments)])
        return ended.value.code

    for name in ("first", "second", "third"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "03.ipynb").write_text(f'"{name}"')
    monkeypatch.chdir(tmp_path)
    rows = [f"{name},{name}@x.org,{name}" for name in ("first", "second", "third", "fourth")]
    Path("roster.csv").write_text("\n".join(["name,email,id", *rows]), encoding="utf-8-sig")
    return run


def test_a_run_that_is_ended_leaves_what_was_graded_and_goes_on_there(command, capsys):
    before = signal.getsignal(signal.SIGTERM)
    assert command("--into", "out", of=2) == 1
    assert "Interrupted: 2 of 3 files were graded. The same command goes on there" in (
        capsys.readouterr().out
    )
    assert os.listdir("out") == ["graded.jsonl"]
    with Path("out/graded.jsonl").open("a") as record:
        record.write('{"digest": "cut o')  # killed while it wrote
    assert not command("--into", "out")
    assert command.asked == ["third"]
    assert not command("--into", "out")
    assert command.asked == [], "each line stands by itself, also behind one that is cut off"
    assert Path("out/marks.csv").read_text().count("passed") == 3
    names = {"graded.jsonl", "marks.csv", "index.html", "feedback", "report.md", "report.png"}
    assert set(os.listdir("out")) == names
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_handed_in_anew_or_with_other_inputs_is_graded(command):
    command("--into", "out")
    Path("in/second/03.ipynb").write_text("new")
    command("--into", "out")
    assert command.asked == ["second"]
    command("--into", "out", "--variant", "spring")
    assert len(command.asked) == 3


def test_a_regrade_of_one_exercise_is_done_once_for_each_reason(command):
    own = ("--into", "out", "--roster", "roster.csv")
    command(*own)
    for reason in ("the first", "the second"):
        Path("class.toml").write_text(f'[regrade]\n"0.3" = "{reason}"')
        command(*own)
        assert len(command.asked) == 3
        command(*own)
        assert not command.asked
    for text in ("", '[regrade]\n"0.3" = "the second"'):
        Path("class.toml").write_text(text)
        command(*own)
        assert not command.asked, "it was graded for that reason, and no reason is none"


def test_what_is_nobodys_ends_with_a_failure_and_a_line(command, capsys):
    Path("roster.csv").write_text("name,email,id\nFirst,f@x.org,first\n")
    assert command("--roster", "roster.csv", "--into", "out") == 1
    said = capsys.readouterr().out
    assert "First: 2 points" in said
    assert "second/03.ipynb is nobody's" in said
    assert Path("out/canvas.csv").read_text().count("\n") == 3


def test_a_folder_that_cannot_be_is_refused_before_anything_is_graded(command):
    Path("pages").touch()
    assert "pages cannot be the folder of the results" in command("--into", "pages")
    assert not command.asked


def test_inputs_of_their_own_need_a_roster(command):
    assert "needs --roster" in command("--own-inputs")


def test_json_is_a_line_for_each_file_and_nothing_else(command, capsys):
    assert not command("--json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(line["file"]).parent.name for line in lines] == ["first", "second", "third"]
    assert lines[0]["exercises"][0]["earned"] == 2


def test_json_goes_with_tables(command, capsys):
    assert not command("--json", "--into", "out", "--roster", "roster.csv")
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 3 and "fourth: 0 points" in said.err
    assert Path("out/marks.csv").exists() and Path("out/moodle.csv").exists()


def test_what_one_student_hands_in_has_a_share_of_time(monkeypatch, tmp_path):
    """An archive of notebooks that hang took two minutes for each exercise in it."""
    started = []

    def checked(tasks, *_):
        for number in range(len(tasks)):
            task = tasks[number]
            started.append((task.variant, bool(task.submission.cells)))
            made = mark("passed", task.exercise.id, points=task.exercise.points)
            yield number, replace(made, seconds=task.submission.cells and 1000.0 or 0.0)

    monkeypatch.setattr(grading, "check_all", checked)
    for name in ("1", "2", "3"):
        shutil.copy(ROOT / "notebooks" / "00_start_here.ipynb", tmp_path / name)
    whose = {"1": "eve", "2": "ada", "3": "eve"}
    requests = [grading.Request(tmp_path / n, "", n, who) for n, who in whose.items()]
    grades = [[m.status for m in g.exercises] for g in grading.grade_all(requests)]
    assert grades == [
        ["passed", "passed", "stopped"],
        ["passed", "passed", "stopped"],
        ["stopped"] * 3,
    ]
    assert [cells for n, cells in started if n == "3"] == [False] * 3


def test_an_environment_that_is_a_link_is_seen_as_well_as_its_target(monkeypatch, tmp_path):
    """Two checkouts share one; nothing was graded, because Python was not there."""
    (tmp_path / "shared" / "bin").mkdir(parents=True)
    (tmp_path / ".venv").symlink_to(tmp_path / "shared")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert {str(tmp_path / ".venv"), str(tmp_path / "shared")} <= set(outside.visible())


# --- the examples ---------------------------------------------------------------------------------


def test_the_examples_are_what_the_grader_reads():
    """An instructor copies them; each line of the guide's first page has a file to begin with."""
    class_ = roster.read(EXAMPLES / "roster.csv")
    made = rules.read(EXAMPLES / "class.toml", class_)
    assert set(made.extension) | set(made.days_late) | set(made.mark) == set(class_)
    assert made.regrade and made.due
    for id, shares in points.read(EXAMPLES / "points.toml").items():
        assert sum(shares) == pytest.approx(catalogue.find(id).points)
