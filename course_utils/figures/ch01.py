"""The pictures of chapter 1: two ways to grow a factory, and a company with sliders."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_utils import plots
from course_utils.trace import Record


def two_ways() -> Figure:
    """Copies with half of the batch each, beside a line with half of the blueprint each."""
    figure, axes = plots.canvas(width=8, height=4.4)
    blue, red = plots.RANK_COLORS[:2]
    for x, name, color in ((0.3, "factory 0", blue), (2.9, "factory 1", red)):
        plots.building(axes, x, 1.5, width=1.7, height=1.4, label=name, color=color)
        plots.blueprint(axes, x + 0.4, 3.15)
        plots.pile(axes, x + 0.46, 0.5, [color] * 6)
        axes.text(x + 0.85, 0.4, "half the batch", ha="center", va="top", fontsize=9)
        plots.arrow(axes, (x + 0.85, 1.06), (x + 0.85, 1.46))
    plots.head_office(axes, 2.06, 3.3, width=0.78)
    axes.text(2.45, 3.22, "average", ha="center", va="top", fontsize=9)
    for sheet, office in ((1.64, 2.04), (3.26, 2.86)):
        for (start, end), y in (((sheet, office), 3.66), ((office, sheet), 3.4)):  # and back
            plots.arrow(axes, (start, y), (end, y), color=plots.COLORS["communication"])
    for i, (x, color) in enumerate(((5.4, blue), (8.1, red))):
        plots.building(axes, x, 1.5, width=1.7, height=1.4, label=f"building {i}", color=color)
        plots.blueprint(axes, x + 0.4, 3.15, part=(i / 2, (i + 1) / 2))
    plots.truck(axes, 7.15, 1.5)
    plots.pile(axes, 5.47, 0.5, [blue, red] * 6, columns=6)
    axes.text(6.25, 0.4, "the whole batch", ha="center", va="top", fontsize=9)
    plots.arrow(axes, (6.25, 1.06), (6.25, 1.46))
    axes.text(2.45, 5.2, "copies: data parallelism", ha="center", weight="bold")
    axes.text(7.6, 5.2, "a line: model parallelism", ha="center", weight="bold")
    return figure


def company(
    records: list[Record],
    names: list[str],
    ledgers: list[dict[str, float]],
    minutes: float,
    alone: float,
    shelves: int,
) -> Figure:
    """A step of each building, in `minutes`, beside the shelves that it fills, by kind. `alone` is
    the time of one building alone; each has room for `shelves`."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8, 1.9 + 0.27 * len(names)), width_ratios=[3, 1], sharey=True
    )
    shown = plots.lanes(left, records, max(minutes, alone), names, unit="minutes")
    left.axvline(alone, color=plots.COLORS["ink"], linestyle=":", linewidth=1.5)
    left.text(alone, -0.6, "one building alone ", ha="right", va="bottom", fontsize=9)
    for row, ledger in enumerate(ledgers):
        shown |= _shelves(right, row, ledger, shelves)
    right.axvline(shelves, **plots.LIMIT)
    right.text(shelves, -0.6, "room", ha="center", va="bottom", fontsize=9)
    fullest = max(sum(ledger.values()) for ledger in ledgers)
    right.set_xlim(0, max(2 * shelves, 1.7 * fullest))
    right.set_xlabel("shelves")
    right.tick_params(axis="y", length=0)
    plots.legend(figure, shown)
    return figure


def _shelves(axes: Axes, row: int, ledger: dict[str, float], room: int) -> dict:
    """A stacked bar; returns a handle for each kind."""
    start, handles = 0.0, {}
    for kind, filled in ledger.items():
        bar = axes.barh(row, filled, left=start, height=0.6, color=plots.COLORS[kind])
        handles[kind], start = bar, start + filled
    if start > room:
        wrong = {"color": plots.COLORS["wrong"], "va": "center", "fontsize": 9}
        axes.text(start, row, " too full", **wrong)
    return handles
