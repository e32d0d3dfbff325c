"""Figures that one chapter draws: no label lies on another, and they show what their text says."""

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.colors import to_rgb

from course_planner.figures import ch13, decision
from course_utils import plots
from course_utils.figures import ch01, ch03, ch04, ch05, ch06, ch08, ch09, ch11
from course_utils.lesson import schedules
from tests.modules.test_plots import bars, overlaps

LOAD = [16, 35, 11, 20, 17, 54, 34, 5]


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.mark.parametrize(
    "draw",
    [
        ch01.two_ways,
        ch03.ring_road,
        lambda: ch03.overlap([(10, 14.5), (20, 24.5), (30, 34.5), (40, 44.5)], 40),
        lambda: ch03.bucket_sizes([1, 10, 100], {8: [0.3, 2, 18], 256: [530, 50, 25]}),
        lambda: ch04.stations([14, 920, 230, 230, 25, 1, 1, 1], {"equal": 4, "best cut": 2}),
        ch05.assembly_line,
        ch08.pages,
        ch08.stages,
        *(ch06.one_station, ch06.two_cuts, ch06.heads, ch06.block, ch06.vocabulary),
        lambda: ch06.block_times(lambda n, *sizes, between: (16 / n, 32 / between), 64, 8),
        ch09.two_sites,
        lambda: ch09.until_a_step_counts({"the group": [0.4], "torchrun, a node": [12, 21]}),
        lambda: ch09.uses({"kept": torch.ones(8), "from zero": torch.tensor([2, 1, 0, 0])}),
        lambda: ch11.queues(LOAD, 24, "queues"),
        decision.decision_guide,
        ch13.way,
        lambda: ch13.budget(4, 36),
    ],
)
def test_no_label_lies_on_another(draw):
    assert not list(overlaps(draw()))


def test_the_names_of_a_blocks_tensors_stand_over_their_squares():
    (ax,) = ch04.kept_of_a_block().axes
    ax.figure.draw_without_rendering()
    squares = [patch.get_window_extent() for patch in ax.patches if patch.get_width() > 0]
    for text in ax.texts[:8]:
        box = text.get_window_extent()
        middle = (box.x0 + box.x1) / 2
        assert any(s.x0 <= middle <= s.x1 and box.width < s.width for s in squares)


def test_stations_are_counted_from_1_and_the_cut_lies_after_its_station():
    (ax,) = ch04.stations([1, 3, 2], {"equal": 1, "best cut": 2}).axes
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "3"]
    assert [line.get_xdata()[0] for line in ax.lines] == [1.5, 2.5]
    assert [to_home(bar) for bar in ax.patches] == [0, 0, 1]


def to_home(bar) -> int:
    """The building whose colour a station's bar has."""
    colors = [to_rgb(color) for color in plots.RANK_COLORS]
    return colors.index(bar.get_facecolor()[:3])


def test_what_is_not_work_in_a_building_is_waiting():
    spans = [[(0, 2), (2, 4)], [(3, 5), (6, 8)]]
    below = ch04.split([1, 1], [1], spans, alone=8).axes[1]
    waiting = [(p.get_x(), p.get_width()) for p in bars(below, plots.COLORS["waiting"])]
    assert waiting == [(4, 4), (0, 3), (5, 1)]


def test_the_number_of_an_expert_stands_above_all_of_its_bar():
    (ax,) = ch11.queues(LOAD, 24, "queues").axes
    assert [text.get_text() for text in ax.texts] == [str(pieces) for pieces in LOAD]
    assert all(text.get_position()[1] > pieces for text, pieces in zip(ax.texts, LOAD))


def test_a_shelf_shows_the_most_that_a_rank_has_in_flight():
    plans = {"GPipe": schedules.gpipe(4, 8), "1F1B": schedules.one_forward_one_backward(4, 8)}
    figure = ch05.shelves({name: schedules.simulate(plan) for name, plan in plans.items()})
    assert not list(overlaps(figure))
    *_, gpipe, one_forward_one_backward = figure.axes
    assert [text.get_text() for text in gpipe.texts] == ["8", "8", "8", "8"]
    assert [text.get_text() for text in one_forward_one_backward.texts] == ["4", "3", "2", "1"]
    tops = [shelf.get_paths()[0].vertices for shelf in one_forward_one_backward.collections]
    heights = [round((rank + 0.43 - top[:, 1].min()) / 0.86 * 8) for rank, top in enumerate(tops)]
    assert heights == [4, 3, 2, 1]
