"""The learner's own script: it begins with what the course gives, and nothing that is theirs is lost."""

import pytest

from course_exercises.checks import mine
from course_exercises.sources import versions


@pytest.fixture(autouse=True)
def beside_the_notebooks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_it_begins_with_what_chapter_2_gives_and_is_not_written_over():
    assert mine.script(3).read_text() == versions.version(2).read_text()
    mine.FILE.write_text("print('mine')\n")
    assert mine.script(3).read_text() == "print('mine')\n"


def test_who_skips_a_chapter_keeps_their_own_script(capsys):
    mine.script(2)
    mine.FILE.write_text("print('mine')\n")
    mine.start(8)
    assert mine.FILE.read_text() == versions.version(6).read_text()
    assert mine.FILE.with_name("train_kept_1.py").read_text() == "print('mine')\n"
    assert "Your script is now mine/train_kept_1.py." in capsys.readouterr().out


def test_what_the_course_has_written_is_not_kept():
    mine.start(8)
    mine.start(12)
    assert mine.FILE.read_text() == versions.version(9).read_text()
    assert [path.name for path in mine.FILE.parent.iterdir()] == ["train.py"]


def test_the_change_is_shown(capsys):
    mine.script(3)
    mine.diff(3)
    mine.FILE.write_text(mine.FILE.read_text() + "print('more')\n")
    mine.diff(3)
    nothing, *rest = capsys.readouterr().out.splitlines()
    assert nothing == "Nothing has changed yet."
    assert [line for line in rest if line.startswith("+") and "+++" not in line] == [
        "+print('more')"
    ]


def test_chapter_2_runs_what_it_gave_when_the_script_has_grown(capsys):
    assert mine.first() == mine.FILE
    assert not capsys.readouterr().out
    mine.start(6)
    assert mine.first() == versions.version(2)
    assert "mine/train.py has changed since chapter 2" in capsys.readouterr().out


def test_beside_the_solved_notebooks_it_is_the_courses_own(tmp_path, monkeypatch):
    (tmp_path / "solutions").mkdir()
    monkeypatch.chdir("solutions")
    assert mine.script(8) == versions.version(8)
