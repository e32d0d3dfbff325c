"""The pictures of chapter 1: two ways to grow a factory, how long a step takes, and what it costs."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from course_utils import plots
from course_utils.trace import Record, Span


def two_ways() -> Figure:
    """Copies of the line with half of the batch each, beside one line in two buildings."""
    figure, axes = plots.canvas(width=8, height=3.8)
    colors, road = plots.RANK_COLORS[:2], plots.COLORS["communication"]
    for i, (copy, part) in enumerate(((0.3, 5.4), (2.9, 8.1))):
        for x in (copy, part):
            plots.building(
                axes, x, 1.5, width=1.7, height=1.4, label=f"building {i}", color=colors[i]
            )
        plots.blueprint(axes, copy + 0.4, 3.15)
        plots.blueprint(axes, part + 0.4, 3.15, part=(i / 2, (i + 1) / 2))
        plots.pile(axes, copy + 0.46, 0.5, [colors[i]] * 6)
        axes.text(copy + 0.85, 0.4, "half of the batch", ha="center", va="top", fontsize=9)
        plots.arrow(axes, (copy + 0.85, 1.06), (copy + 0.85, 1.46))
    plots.arrow(axes, (1.85, 3.6), (3.05, 3.6), road, "average of\nchange notes")
    plots.arrow(axes, (3.05, 3.35), (1.85, 3.35), road)
    plots.truck(axes, 7.15, 1.5)
    plots.arrow(axes, (7.15, 2.25), (8.05, 2.25), road, "parts")
    plots.arrow(axes, (8.05, 1.3), (7.15, 1.3), road)
    axes.text(7.6, 1.2, "notes", ha="center", va="top", fontsize=9)
    plots.pile(axes, 5.47, 0.5, [colors[0], colors[1]] * 6, columns=6)
    axes.text(6.25, 0.4, "the whole batch", ha="center", va="top", fontsize=9)
    plots.arrow(axes, (6.25, 1.06), (6.25, 1.46))
    axes.text(2.45, 4.45, "Copies: each has the whole line", ha="center", weight="bold")
    axes.text(7.6, 4.45, "One line in two buildings", ha="center", weight="bold")
    return figure


def steps() -> Figure:
    """A training step of one process, of two copies, and of a line of two equal stages: simulated.
    Backward takes twice as long as forward."""
    message = 0.06
    one = [("forward", 1 / 3), ("backward", 2 / 3)]
    copy = [("forward", 1 / 6), ("backward", 1 / 3), ("", message)]
    first = [("forward", 1 / 6), ("", message), ("wait", 1 / 2), ("", message), ("backward", 1 / 3)]
    last = [("wait", 1 / 6), ("", message), ("forward", 1 / 6), ("backward", 1 / 3), ("", message)]
    panels = {"One process": [one], "Copies: half the time": [copy, copy]}
    panels["Line: no shorter, one rank always waits"] = [first, [*last, ("wait", 1 / 3)]]
    records = {
        title: [_record(rank, work) for rank, work in enumerate(ranks)]
        for title, ranks in panels.items()
    }
    return plots.timelines(records, unit="steps of one process, simulated")


def _record(rank: int, work: list[tuple[str, float]]) -> Record:
    """What a rank does, one thing after the other: (name, time), of messages without a name."""
    kinds, spans, now = {"wait": "waiting", "": "communication"}, [], 0.0
    for name, time in work:
        spans.append(Span(name, kinds.get(name, "compute"), now, now + time))
        now += time
    return Record(rank, spans)


def costs(sent: Mapping[str, Mapping], held: Mapping[str, Mapping]) -> Figure:
    """What a rank sends in a step and what it holds, {way: bytes by kind}."""
    figure, both = plt.subplots(1, 2, figsize=(8, 2.4), sharey=True)
    shown = {}
    for axes, ways in zip(both, (sent, held), strict=True):
        for row, ledger in enumerate(ways.values()):
            start = 0
            for kind, size in ledger.items():
                bar = axes.barh(row, size / 1e6, left=start / 1e6, **plots.look_of(kind))
                shown[kind], start = bar, start + size
        axes.set_yticks(range(len(ways)), list(ways))
        axes.set_ylim(len(ways) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("MB")
    times = sum(sent["copies"].values()) / sum(sent["line"].values())
    both[0].set_title(f"Copies send {times:.2g} times as much")
    both[1].set_title("A line holds half of the model")
    plots.legend(figure, shown)
    return figure
