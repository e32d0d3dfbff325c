"""progress: what a learner has passed survives restarts, other kernels and damage."""

import json
import multiprocessing
import os
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from course_exercises.authoring.framework import Exercise
from course_exercises.checks import catalogue, learner, progress, progress_file
from course_exercises.checks.course_map import progress_map
from course_exercises.sources import chapters
from course_utils.__main__ import main
from tests.modules.test_plots import overlaps


def exercise(id="9.1", points=2):
    made = object.__new__(Exercise)  # not registered: the course does not have it
    made.id, made.name, made.points = id, "an_exercise", points
    return made


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture
def path(monkeypatch, tmp_path):
    path = tmp_path / "deep" / "progress.json"
    monkeypatch.setenv("COURSE_PROGRESS", str(path))
    return path


def beside(path: Path) -> list[str]:
    """The files in its folder, but for the lock, which stays."""
    return sorted(p.name for p in path.parent.iterdir() if p.suffix != ".lock")


def test_what_was_passed_stays_passed(path):
    assert progress.passed() == set()
    progress.record(exercise("9.1"), False)
    assert progress.passed() == set()
    progress.record(exercise("9.1"), True)
    progress.record(exercise("9.2"), False)
    progress.record(exercise("9.1"), False)
    assert progress.passed() == {"9.1"}
    assert json.loads(path.read_text())["exercises"]["9.1"] == {"passed": True, "tries": 3}


def test_users_of_one_writable_folder_share_no_file(monkeypatch, tmp_path):
    """A course folder that a group may write: only its owner's progress lies in it."""
    monkeypatch.delenv("COURSE_PROGRESS")
    monkeypatch.setattr(progress_file, "ROOT", tmp_path)
    assert progress_file.location() == tmp_path / ".course" / "progress.json"
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert tmp_path not in progress_file.location().parents


def test_nothing_but_the_file_is_left(path):
    progress.record(exercise(), True)
    assert beside(path) == ["progress.json"]


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
    path.write_text(
        json.dumps({"exercises": entries, "checksum": progress_file._checksum(entries)})
    )
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


def _dies_with_the_lock(path, flock):
    if not flock:
        progress_file.filelock.FileLock = _no_flock
    with progress_file.locked(path):
        os._exit(0)


@pytest.mark.parametrize("flock", [True, False])
def test_a_lock_left_by_a_dead_kernel_is_taken_over(path, monkeypatch, flock):
    if not flock:
        monkeypatch.setattr(progress_file.filelock, "FileLock", _no_flock)
    spawn = multiprocessing.get_context("spawn")
    kernel = spawn.Process(target=_dies_with_the_lock, args=(path, flock))
    kernel.start()
    kernel.join()
    assert kernel.exitcode == 0
    progress.record(exercise(), True)
    assert progress.passed() == {"9.1"}


def _no_flock(*_):
    raise NotImplementedError("this file system does not know flock")


def test_a_lock_that_stays_is_one_sentence(path, monkeypatch, capsys):
    monkeypatch.setattr(progress_file, "_WAIT_FOR_LOCK", 0.1)
    with progress_file.locked(path):
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
    assert beside(path) == ["progress.json"]


def test_a_folder_in_the_way_is_one_sentence(path, capsys):
    path.mkdir(parents=True)
    progress.record(exercise(), True)
    progress.passed()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("(Your progress") for line in lines)


def test_the_file_is_in_the_project(monkeypatch, tmp_path):
    monkeypatch.delenv("COURSE_PROGRESS")
    monkeypatch.setattr(progress_file, "ROOT", tmp_path)
    assert progress_file.location() == tmp_path / ".course" / "progress.json"


def test_a_project_that_cannot_be_written_uses_the_state_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("COURSE_PROGRESS")
    monkeypatch.setattr(progress_file, "_writable", lambda folder: False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert progress_file.location() == tmp_path / "state" / "parallelism-course" / "progress.json"
    progress.record(exercise(), True)
    assert progress.passed() == {"9.1"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_or_device_is_neither_read_nor_moved(path, capsys):
    path.parent.mkdir()
    os.mkfifo(path)  # reading it would wait for ever
    progress.record(exercise(), True)
    assert progress.passed() == set()
    assert capsys.readouterr().out.count(f"{path} is not a file.") == 2
    assert beside(path) == ["progress.json"]


# ---- the map -------------------------------------------------------------------------------------


@pytest.fixture
def course(path, monkeypatch):
    """A course of two chapters, the second with two exercises."""
    mine = [exercise("3.1", 2), exercise("3.2", 5)]
    monkeypatch.setattr(catalogue, "exercises", lambda: mine)
    monkeypatch.setattr(progress, "_titles", lambda: ["00_start_here", "03_ddp"])
    monkeypatch.setattr(chapters, "minutes", {"03_ddp": [40, 20], "00_start_here": []}.get)
    return mine


def test_the_map_in_words_counts_points_and_names_what_comes_next(course):
    assert progress.progress_text().splitlines()[-1] == "next: 3.1 an_exercise, in 03_ddp"
    progress.record(course[1], True)
    assert progress.progress_text().splitlines() == [
        "5 of 7 points",
        "",
        f"{'00_start_here':<50} no exercises",
        "",
        f"{'03_ddp, 40 + 20 minutes':<50} 5 of 7",
        f"  [ ] {'3.1 an_exercise':<44} 2",
        f"  [x] {'3.2 an_exercise':<44} 5",
        "",
        "next: 3.1 an_exercise, in 03_ddp",
    ]
    progress.record(course[0], True)
    assert progress.progress_text().splitlines()[-1] == f"  [x] {'3.2 an_exercise':<44} 5"


def test_the_map_knows_the_chapters_of_the_course(path):
    text = progress.progress_text()
    for chapter in chapters.chapters():
        assert chapter.title in text
    for known in catalogue.exercises():
        assert f"{known.id} {known.name}" in text


def lit(figure):
    """The numbers in the green windows, without the key's."""
    return [text.get_text() for text in figure.axes[0].texts if text.get_color() == "white"][:-1]


def test_the_picture_fills_when_it_is_drawn_again(course):
    empty = progress_map()
    assert lit(empty) == []
    progress.record(course[1], True)
    assert lit(progress_map()) == ["2"]
    progress.record(course[0], True)
    full = progress_map()
    assert lit(full) == ["1", "2"]
    words = [text.get_text() for text in full.axes[0].texts]
    assert {"7 of 7 points", "00 start here", "no exercises", "03 ddp", "7 of 7"} <= set(words)
    flags = [len(figure.axes[0].lines) for figure in (empty, full)]
    assert flags == [1, 2]  # the key has one
    # nbval compares these words, whatever a learner has passed
    assert repr(empty) == repr(full)


@pytest.mark.parametrize("count", [1, 10, 13])
def test_no_words_of_the_picture_overlap(path, monkeypatch, count):
    titles = [f"{chapter:02d}_tensor_parallel" for chapter in range(count)]
    monkeypatch.setattr(progress, "_titles", lambda: titles)
    monkeypatch.setattr(
        catalogue,
        "exercises",
        lambda: [exercise(f"{c}.{e}") for c in range(count) for e in range(6)],
    )
    figure = progress_map()
    assert not list(overlaps(figure))


# ---- reset ---------------------------------------------------------------------------------------


def everything(path):
    ids = ["2.1", "3.1", "3.2", "30.1"]
    for id in ids:
        progress.record(exercise(id), True)
    return set(ids)


@pytest.mark.parametrize(
    ("what", "left"),
    [
        ("3.1", {"2.1", "3.2", "30.1"}),
        (3.1, {"2.1", "3.2", "30.1"}),
        (3, {"2.1", "30.1"}),
        ("3", {"2.1", "30.1"}),
        (" 03_ddp ", {"2.1", "30.1"}),
        ("all", set()),
        ("ALL", set()),
    ],
)
def test_a_reset_forgets_what_was_named_and_keeps_the_rest_aside(path, capsys, what, left):
    before = everything(path)
    learner.reset(what)
    assert progress.passed() == left
    kept = path.with_name("progress.json.before-reset-1")
    assert str(kept) in capsys.readouterr().out
    assert progress_file.read(kept) == ({id: {"passed": True, "tries": 1} for id in before}, True)
    learner.import_progress(kept)
    assert progress.passed() == before


def test_two_resets_keep_two_files(path):
    everything(path)
    learner.reset("3.1")
    learner.reset("3.2")
    kept = [path.with_name(f"progress.json.before-reset-{i}") for i in (1, 2)]
    assert ["3.1" in progress_file.read(file)[0] for file in kept] == [True, False]


def test_there_may_be_nothing_to_reset(path, capsys):
    learner.reset("3.1")
    assert capsys.readouterr().out == (
        "There is nothing to reset: no check of 3.1 average_gradients has run yet.\n"
    )
    assert not path.exists()


@pytest.mark.parametrize("what", [None, "", "3.99", 42, "banana", "3.", -1, [], True, "x" * 1000])
def test_a_reset_of_what_is_not_there_is_one_sentence(path, capsys, what):
    before = everything(path)
    learner.reset(what)
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 1
    assert "there is no chapter or exercise" in printed or "There is no exercise" in printed
    assert progress.passed() == before


def test_a_reset_begins_the_hints_again(path, capsys):
    learner.hint("0.1")
    progress.record(exercise("0.1"), True)
    learner.reset("0.1")
    capsys.readouterr()
    learner.hint("0.1")
    assert "hint 1 of" in capsys.readouterr().out


def test_a_damaged_file_is_mended_before_a_reset(path, capsys):
    everything(path)
    path.write_text(path.read_text().replace('"tries": 1', '"tries": 2', 1))
    learner.reset(3)
    assert progress.passed() == {"2.1", "30.1"}
    assert "changed by hand" in capsys.readouterr().out


# ---- export and import ---------------------------------------------------------------------------


def test_progress_goes_to_another_machine_as_one_file(path, monkeypatch, tmp_path, capsys):
    everything(path)
    exported = tmp_path / "mine.json"
    learner.export_progress(str(exported))
    assert capsys.readouterr().out == (
        f"Your progress, 4 exercises passed, is now also in {exported}.\n"
    )
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "other" / "progress.json"))
    progress.record(exercise("2.1"), False)
    progress.record(exercise("5.1"), True)
    learner.import_progress(exported)
    printed = capsys.readouterr().out
    assert (
        f"Taken from {exported}: 4 exercises passed. Here it is now 5 exercises passed." in printed
    )
    assert progress.passed() == {"2.1", "3.1", "3.2", "5.1", "30.1"}
    kept = tmp_path / "other" / "progress.json.before-import-1"
    assert str(kept) in printed
    assert progress_file.read(kept)[0]["2.1"] == {"passed": False, "tries": 1}


def test_importing_twice_changes_nothing(path, tmp_path, capsys):
    before = everything(path)
    learner.export_progress(tmp_path / "mine.json")
    learner.import_progress(tmp_path / "mine.json")
    learner.import_progress(path)
    assert progress.passed() == before
    assert beside(path) == ["progress.json"]


def test_an_export_overwrites_nothing(path, tmp_path, capsys):
    everything(path)
    target = tmp_path / "essay.txt"
    target.write_text("my essay")
    learner.export_progress(target)
    learner.export_progress(tmp_path)
    assert capsys.readouterr().out.count("exists already: choose another name") == 2
    assert target.read_text() == "my essay"


STRANGE = ["", " ", None, 3, "a\0b", "no/such/folder/mine.json", "~nobody.json", "x" * 300]


@pytest.mark.parametrize("name", STRANGE)
def test_a_file_that_cannot_be_named_so_is_one_sentence(path, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    everything(path)
    learner.export_progress(name)
    learner.import_progress(name)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.endswith(".") for line in lines)
    assert beside(path) == ["progress.json"]


def test_an_edited_import_is_explained_and_its_sound_part_taken(path, tmp_path, capsys):
    entries = {
        "3.1": {"passed": True, "tries": 1},
        "3.2": {"passed": "of course", "tries": 1},
        "../../etc": {"passed": True, "tries": 1},
        "٣.١": {"passed": True, "tries": 1},
        "3.4": {"passed": True, "tries": True},
    }
    source = tmp_path / "mine.json"
    source.write_text(json.dumps({"exercises": entries, "checksum": "0"}))
    learner.import_progress(source)
    assert progress.passed() == {"3.1"}
    assert "damaged or changed by hand" in capsys.readouterr().out
    assert source.exists()


def progress_file_text(entries):
    return json.dumps({"exercises": entries, "checksum": progress_file._checksum(entries)})


NOT_PROGRESS = {
    **DAMAGED,
    "a notebook": '{"cells": [], "metadata": {}, "nbformat": 4}',
    "a huge number": '{"exercises": {"3.1": {"passed": true, "tries": ' + "9" * 5000 + "}}}",
    "not a number": '{"exercises": {"3.1": {"passed": true, "tries": NaN}}, "checksum": ""}',
    "far too long": progress_file_text({"3.1": {"passed": True, "tries": 1}}) + " " * 2_000_000,
    "deep inside": '{"exercises": {"3.1": ' + "[" * 50_000 + "]" * 50_000 + "}}",
}


@pytest.mark.parametrize("text", NOT_PROGRESS.values(), ids=NOT_PROGRESS)
def test_an_import_of_something_else_leaves_the_progress_as_it_was(path, tmp_path, capsys, text):
    before = everything(path)
    source = tmp_path / "mine.json"
    source.write_bytes(text.encode(errors="surrogateescape"))
    learner.import_progress(source)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"{source} holds no progress that can be read; yours is as it was."
    assert progress.passed() == before
    assert beside(path) == ["progress.json"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_an_import_from_a_pipe_does_not_wait(path, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    learner.import_progress(tmp_path / "pipe")
    learner.import_progress(tmp_path)
    assert capsys.readouterr().out.count("is not a file.") == 2


# ---- the command line ----------------------------------------------------------------------------


def test_the_command_line_does_the_same(path, tmp_path, capsys):
    everything(path)
    main(["progress", "--export", str(tmp_path / "mine.json")])
    main(["progress", "--reset", "all"])
    assert progress.passed() == set()
    main(["progress", "--import", str(tmp_path / "mine.json")])
    assert progress.passed() == {"2.1", "3.1", "3.2", "30.1"}
    main(["progress"])
    assert f"[x] {'3.1 average_gradients':<44} 2" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--export", "--import", "--reset"])
def test_what_the_command_line_cannot_do_is_one_sentence_and_a_status(path, option, capsys):
    with pytest.raises(SystemExit) as left:
        main(["progress", option, ""])
    assert isinstance(left.value.code, str)
    assert left.value.code.endswith(".")
