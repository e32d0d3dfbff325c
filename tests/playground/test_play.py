"""A position of the playground on real ranks: the order that was played, from its link."""

import re

import matplotlib.pyplot as plt
import pytest

from course_exercises import play
from course_exercises.checks.positions import Position
from course_exercises.sources import answers, chapters
from course_utils import __main__ as command
from course_utils.lesson import schedules

LINKS = {
    "1F1B": str(Position(2, 4, 1, "FB", 2, schedules.one_forward_one_backward(2, 4))),
    "interleaved": str(Position(2, 2, 2, "FB", 4, schedules.interleaved(2, 2, 2))),
    "ZB-V": str(Position(2, 3, 2, "FBW", 4, schedules.zb_v(2, 3), schedules.v_shaped)),
    "one's own": "https://example.org/schedules.html#p2m2v1-FBW-cap2/F0F1B1W1B0W0/F0F1B1B0W0W1",
}


@pytest.mark.parametrize("name", LINKS)
def test_a_played_schedule_runs_on_ranks_in_its_order(name, capsys):
    figure = play(LINKS[name])
    assert "as played, in each rank's order: yes" in capsys.readouterr().out
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "On real ranks (emulated)",
        "As played (simulated)",
    ]
    plt.close(figure)


def test_a_learners_copy_has_the_engine_in_its_notebook(monkeypatch):
    notebook = chapters.ROOT / "notebooks" / "05_pipeline_further.ipynb"
    monkeypatch.setattr(answers, "sources_of", lambda chapter: [notebook])
    assert answers.load_code(5, "pipeline_run").__name__ == "pipeline_run"


def test_the_command_saves_the_picture(tmp_path, capsys):
    picture = tmp_path / "played.png"
    command.main(["play", "p2m1v1-FB-cap1/F0B0/F0B0", "--figure", str(picture)])
    assert picture.exists()
    assert re.search(r"idle share: 50\.0% as played, [\d.]+% on ranks", capsys.readouterr().out)


@pytest.mark.parametrize(
    "link, sentence",
    [
        ("p2m1v1-FB-cap1/F0/F0B0", "This schedule cannot run: stage 0 never runs B0."),
        ("p2m2v1-FB-cap1/F0B0/F0B0", "This schedule cannot run: stage 0 never runs F1."),
        ("p2m1v1-FB-cap1/F0B0/F0B0/F0B0", "is no position of the playground"),
        ("p2m1v1-FB-cap1/F0B0/hello", "is no position of the playground"),
    ],
)
def test_what_cannot_be_played_is_a_sentence(link, sentence):
    with pytest.raises(SystemExit, match=sentence):
        command.main(["play", link])
