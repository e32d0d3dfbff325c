"""A lesson and what goes beyond it are one chapter, wherever chapters are listed or handed in."""

import shutil
from pathlib import Path

import pytest

import book
from course_exercises.authoring import load_answer, load_code
from course_exercises.sources import chapters
from course_exercises.sources.answers import source_of
from course_grader.submission import NotGradable, read_file

NOTEBOOKS = chapters.ROOT / "notebooks"


def test_both_notebooks_are_one_chapter(tmp_path: Path) -> None:
    (tmp_path / "solutions").mkdir()
    for name in ("03_ddp", "03_ddp_further", "04_manual_split", "quick_reference"):
        (tmp_path / "solutions" / f"{name}.py").touch()
    found = chapters.chapters(tmp_path)
    assert [(each.number, each.notebooks) for each in found] == [
        (3, ["03_ddp", "03_ddp_further"]),
        (4, ["04_manual_split"]),
    ]
    assert chapters.chapter("03", tmp_path).title == chapters.chapter(3, tmp_path).title == "03_ddp"
    with pytest.raises(LookupError, match="There is no source of chapter '5'"):
        chapters.chapter(5, tmp_path)


def test_an_answer_and_code_are_found_in_either_notebook() -> None:
    assert source_of("3.1").stem == "03_ddp"
    assert source_of("3.4").stem == "03_ddp_further"
    assert load_answer("3.4").__name__ == "OverlappedDDP"
    assert load_code(3, "train_by_hand") and load_code(3, "uneven_with_join")


@pytest.mark.parametrize(
    ("name", "handed_in_as", "exercises"),
    [
        ("03_ddp", "03_ddp.ipynb", ["3.1", "3.2", "3.3", "3.5"]),
        ("03_ddp", "homework.ipynb", ["3.1", "3.2", "3.3", "3.5"]),
        ("03_ddp_further", "03_ddp_further (2).ipynb", ["3.4", "3.8"]),
        ("03_ddp_further", "homework.ipynb", ["3.4", "3.8"]),
    ],
)
def test_a_submission_is_of_the_notebook_that_asks(tmp_path, name, handed_in_as, exercises) -> None:
    path = Path(shutil.copy(NOTEBOOKS / f"{name}.ipynb", tmp_path / handed_in_as))
    read = read_file(path, 10**8, wanted=3)
    assert (read.chapter, [each.id for each in read.exercises]) == (name, exercises)
    with pytest.raises(NotGradable, match=f"This is {name}, and 04_manual_split was asked for"):
        read_file(path, 10**8, wanted=4)


def test_a_mention_leads_to_the_lesson_or_beyond_it() -> None:
    places = {"3": "03_ddp.ipynb", "3 further": "03_ddp_further.ipynb"}
    text = "chapter 3, 03: 4 and 03 further: 4, `chapter 3`"
    assert book.linked(text, places, own="quick_reference.ipynb") == (
        "[chapter 3](03_ddp.ipynb), [03: 4](03_ddp.ipynb) and "
        "[03 further: 4](03_ddp_further.ipynb), `chapter 3`"
    )
    assert book.linked("chapter 3", places, own="03_ddp.ipynb") == "chapter 3"
    assert book.linked("chapter 3", places, own="03_ddp_further.ipynb") == (
        "[chapter 3](03_ddp.ipynb)"
    )
