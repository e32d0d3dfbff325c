"""Figures that one chapter draws: no label lies on another, and they show what their text says."""

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.colors import to_rgb
from torch import nn

from course_planner.figures import decision
from course_utils import plots
from course_utils.figures import ch01, ch03, ch04, ch05, ch06, ch08, ch09, ch11
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
        lambda: ch04.stations([14, 920, 230, 230, 25, 1, 1, 1], {"equal": 4, "best cut": 2}),
        ch05.assembly_line,
        ch06.one_station,
        lambda: ch06.block_times([1, 2, 4, 8, 16], [16, 8, 4, 2, 1], [0, 1, 1, 1, 2]),
        ch08.pages,
        ch08.stages,
        lambda: ch09.uses({"kept": torch.ones(8), "from zero": torch.tensor([2, 1, 0, 0])}),
        lambda: ch11.queues(LOAD, 24, "queues"),
        decision.decision_guide,
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


def test_passes_of_a_loop_belong_to_their_devices_and_have_equally_many_slots(monkeypatch):
    slots = []

    def noted(trace, name, count):
        slots.append(count)
        return trace.span(name)

    monkeypatch.setattr(ch05, "paced", noted)
    stages = [nn.Linear(2, 2) for _ in range(3)]
    model = nn.Sequential(*stages, *stages)  # two chunks, one after the other
    devices = dict(zip(stages, [(0, 0), (1, 0), (0, 1)]))
    records = ch05.passes(model, devices, torch.ones(1, 2))
    assert [record.rank for record in records] == [0, 1]
    names = [[span.name for span in record.spans] for record in records]
    assert names == [["F0", "F0.1", "F1", "F1.1"], ["F0", "F1"]]
    assert len(slots) == 6 and len(set(slots)) == 1
