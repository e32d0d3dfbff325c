"""progress: what a learner has passed survives restarts, other kernels and damage."""

import json
import multiprocessing
import os
import time

import pytest

from course_utils.checks import catalogue, progress
from course_utils.checks.framework import Exercise


def exercise(id="9.1", points=2):
    made = object.__new__(Exercise)  # not registered: the course does not have it
    made.id, made.name, made.points = id, "an_exercise", points
    return made


@pytest.fixture
def path(monkeypatch, tmp_path):
    path = tmp_path / "deep" / "progress.json"
    monkeypatch.setenv("COURSE_PROGRESS", str(path))
    return path


def test_what_was_passed_stays_passed(path):
    assert progress.passed() == set()
    progress.record(exercise("9.1"), False)
    assert progress.passed() == set()
    progress.record(exercise("9.1"), True)
    progress.record(exercise("9.2"), False)
    progress.record(exercise("9.1"), False)
    assert progress.passed() == {"9.1"}
    assert json.loads(path.read_text())["exercises"]["9.1"] == {"passed": True, "tries": 3}


def test_nothing_but_the_file_is_left(path):
    progress.record(exercise(), True)
    assert [p.name for p in path.parent.iterdir()] == ["progress.json"]


DAMAGED = {
    "empty": "",
    "not JSON": "{",
    "half a file": '{"exercises": {"9.1": {"passed": true, "tri',
    "binary": "\udcff\x00\udc80",
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "no checksum": '{"exercises": {}}',
    "exercises is a list": '{"exercises": [], "checksum": ""}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_explained_and_kept_aside(path, capsys, text):
    path.parent.mkdir()
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert progress.passed() == set()
    backup = path.with_name("progress.json.damaged-1")
    printed = capsys.readouterr().out
    assert "damaged or changed by hand" in printed
    assert str(backup) in printed
    assert backup.read_bytes() == text.encode(errors="surrogateescape")
    progress.record(exercise(), True)
    assert progress.passed() == {"9.1"}
    assert capsys.readouterr().out == ""


def test_a_second_damaged_file_does_not_replace_the_first(path):
    path.parent.mkdir()
    for text in ("one", "two"):
        path.write_text(text)
        progress.passed()
    backups = [path.with_name(f"progress.json.damaged-{i}").read_text() for i in (1, 2)]
    assert backups == ["one", "two"]


def test_a_file_changed_by_hand_is_noticed_and_its_sound_part_kept(path, capsys):
    progress.record(exercise("9.1"), True)
    progress.record(exercise("9.2"), False)
    content = json.loads(path.read_text())
    content["exercises"]["9.2"]["passed"] = "yes"
    content["exercises"]["9.3"] = {"passed": True, "tries": 1}
    path.write_text(json.dumps(content))
    assert progress.passed() == {"9.1", "9.3"}
    assert "changed by hand" in capsys.readouterr().out
    assert progress.passed() == {"9.1", "9.3"}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {},
        {"passed": 1, "tries": 1},
        {"passed": True, "tries": -1},
        {"passed": True, "tries": "1"},
        {"passed": True, "tries": 1, "points": 99},
    ],
)
def test_an_unsound_entry_is_dropped(path, entry):
    path.parent.mkdir()
    entries = {"9.1": entry}
    path.write_text(json.dumps({"exercises": entries, "checksum": progress._checksum(entries)}))
    assert progress.passed() == set()
    assert path.with_name("progress.json.damaged-1").exists()


def _record_many(chapter, count):
    for number in range(count):
        progress.record(exercise(f"{chapter}.{number}"), True)


def test_two_kernels_at_once_lose_nothing(path):
    fork = multiprocessing.get_context("spawn")
    writers = [fork.Process(target=_record_many, args=(chapter, 15)) for chapter in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(progress.passed()) == 30


def test_a_lock_left_by_a_dead_kernel_is_taken_over(path, monkeypatch):
    path.parent.mkdir()
    lock = path.with_name("progress.json.lock")
    lock.touch()
    old = time.time() - 2 * progress._LOCK_IS_STALE_AFTER
    os.utime(lock, (old, old))
    progress.record(exercise(), True)
    assert progress.passed() == {"9.1"}
    assert not lock.exists()


def test_a_lock_that_stays_is_one_sentence(path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_WAIT_FOR_LOCK", 0.1)
    path.parent.mkdir()
    path.with_name("progress.json.lock").touch()
    progress.record(exercise(), True)
    assert capsys.readouterr().out.startswith("(Your progress was not saved: another kernel")


def test_a_write_that_fails_leaves_the_old_file(path, monkeypatch, capsys):
    progress.record(exercise(), True)
    before = path.read_text()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    progress.record(exercise("9.2"), True)
    assert "No space left on device" in capsys.readouterr().out
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == ["progress.json"]


def test_a_folder_in_the_way_is_one_sentence(path, capsys):
    path.mkdir(parents=True)
    progress.record(exercise(), True)
    progress.passed()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("(Your progress") for line in lines)


def test_the_file_is_in_the_project(monkeypatch, tmp_path):
    monkeypatch.delenv("COURSE_PROGRESS")
    monkeypatch.setattr(catalogue, "root", lambda: tmp_path)
    assert progress.location() == tmp_path / ".course" / "progress.json"


def test_a_project_that_cannot_be_written_uses_the_state_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("COURSE_PROGRESS")
    monkeypatch.setattr(progress, "_writable", lambda folder: False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert progress.location() == tmp_path / "state" / "parallelism-course" / "progress.json"
    progress.record(exercise(), True)
    assert progress.passed() == {"9.1"}


def test_the_map_counts_points(path, monkeypatch, capsys):
    mine = [exercise("3.1", 2), exercise("3.2", 5)]
    monkeypatch.setattr(catalogue, "exercises", lambda: mine)
    monkeypatch.setattr(progress, "_chapter_titles", lambda: ["00_start_here", "03_ddp"])
    progress.record(mine[1], True)
    progress.progress_map()
    assert capsys.readouterr().out.splitlines() == [
        "5 of 7 points",
        "",
        "00_start_here   (no exercises)",
        "",
        "03_ddp",
        f"  [ ] 3.1 {'an_exercise':<40} 0 of 2",
        f"  [x] 3.2 {'an_exercise':<40} 5 of 5",
    ]


def test_the_map_knows_the_chapters_of_the_course(path, capsys):
    progress.progress_map()
    printed = capsys.readouterr().out
    for source in (catalogue.root() / "solutions").glob("[0-9][0-9]_*.py"):
        assert source.stem in printed
    for known in catalogue.exercises():
        assert f"{known.id} {known.name}" in printed
