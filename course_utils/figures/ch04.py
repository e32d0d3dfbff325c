"""The pictures of chapter 4: a line in two buildings, where to cut, and two tables."""

from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_utils import plots
from course_utils.trace import Record, Span

Spans = Sequence[Sequence[tuple[float, float]]]  # of each stage: (start, end) in minutes


def two_buildings() -> Figure:
    """Stations 1 to 4 in one building, 5 to 8 in another, and the trucks between them."""
    figure, ax = plots.canvas(height=3.1)
    road = plots.COLORS["communication"]
    for number, (x, stations) in enumerate(((0.9, "stations 1 to 4"), (6.3, "stations 5 to 8"))):
        color = plots.RANK_COLORS[number]
        plots.building(ax, x, 1.2, width=2.6, height=1.7, label=f"building {number}", color=color)
        plots.blueprint(ax, x + 0.85, 3.05, part=(number / 2, (number + 1) / 2))
        ax.text(x + 1.3, 1.38, stations, ha="center", fontsize=9)
    plots.truck(ax, 4.45, 2.2)
    for x, above in ((0.1, "material"), (9.0, "loss")):
        plots.arrow(ax, (x, 2.1), (x + 0.75, 2.1))
        ax.text(x + 0.36, 2.2, above, ha="center", va="bottom", fontsize=9)
    plots.arrow(ax, (3.6, 2.1), (6.2, 2.1), color=road)
    ax.text(4.9, 2.85, "half-finished parts", ha="center", va="bottom", fontsize=9)
    plots.arrow(ax, (6.2, 1.5), (3.6, 1.5), color=road)
    ax.text(4.9, 1.4, "change notes", ha="center", va="top", fontsize=9)
    ax.text(4.9, 0.55, "each half of the blueprint stays in its building", ha="center", fontsize=9)
    ax.set_title("Only parts and change notes cross the yard")
    return figure


def stations(work: Sequence[float], cuts: Mapping[str, int]) -> Figure:
    """The work of each station in million operations, and where the cuts {name: stations before
    it} lie. The last cut, drawn as a full line, colours the stations after their ranks."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.0))
    *_, best = cuts.values()
    colors = [plots.RANK_COLORS[int(station >= best)] for station in range(len(work))]
    numbers, top = range(1, len(work) + 1), 1.25 * max(work)
    ax.bar(numbers, work, color=colors, edgecolor=plots.COLORS["ink"], linewidth=0.8)
    for name, cut in cuts.items():
        color, style = ("ink", "-") if cut == best else ("wrong", ":")
        ax.axvline(cut + 0.5, color=plots.COLORS[color], linestyle=style)
        share = sum(work[:cut]) / sum(work)
        said = f"{name}:\n{share:.0%} | {1 - share:.0%}\nof the work"
        ax.text(cut + 0.55, 0.85 * top, said, va="top", fontsize=10)
    for shift, side, rank in ((-0.05, "right", 0), (0.05, "left", 1)):
        name, place = f"rank {rank}", (best + 0.5 + shift, 0.98 * top)
        ax.text(*place, name, ha=side, va="top", fontsize=10, weight="bold")
    ax.set(xlabel="station", ylabel="million operations", xticks=numbers, ylim=(0, top))
    ax.set_title("Equal numbers of layers are not equal work (counted)")
    return figure


# --- the tied embedding ------------------------------------------------------------------------


def tables() -> Figure:
    """A tied embedding in one process, silently untied by a cut, and tied again."""
    figure, ax = plots.canvas(height=2.8)
    ax.set_title("A cut turns one tied table into two")
    two = ["embedding", "head"]
    _tables(ax, 0.1, "one process", ["one table"], "both gradients\nadd up in it")
    _tables(ax, 2.75, "silently untied", two, "each table gets the gradient\nof its own use only")
    _tables(ax, 6.6, "tied again", two, "both tables get the sum\nof both gradients")
    for start, end in ((8.0, 8.5), (8.5, 8.0)):
        plots.arrow(ax, (start, 1.75), (end, 1.75), color=plots.COLORS["communication"])
    return figure


def _tables(ax: Axes, left: float, title: str, names: list[str], note: str) -> None:
    """A building for each table, what goes in and out, and what becomes of the gradients."""
    for number, name in enumerate(names):
        x = left + 0.35 + 1.5 * number
        plots.building(ax, x, 0.85, 1.1, 1.7, color=plots.RANK_COLORS[number])
        plots.blueprint(ax, x + 0.1, 1.4)
        ax.text(x + 0.55, 0.96, name, ha="center", va="bottom", fontsize=9)
    plots.arrow(ax, (left, 1.45), (left + 0.3, 1.45))
    plots.arrow(ax, (x + 1.15, 1.45), (x + 1.45, 1.45))
    middle = (left + x + 1.45) / 2
    ax.text(middle, 2.85, title, ha="center", weight="bold", fontsize=11)
    ax.text(middle, 0.7, note, ha="center", va="top", fontsize=9)


# --- the explorer ------------------------------------------------------------------------------


def split(minutes: Sequence[float], cuts: Sequence[int], spans: Spans, alone: float) -> Figure:
    """A line of stations of so many minutes, its cuts, and when each building works (simulated).

    `spans` are the stretches of work of each building, `alone` the minutes of one building.
    """
    figure, (above, below) = plt.subplots(2, 1, figsize=(plots.WIDTH, 4.6), height_ratios=(1, 1.5))
    numbers = range(1, len(minutes) + 1)
    homes = [sum(station >= cut for cut in cuts) for station in range(len(minutes))]
    colors = [plots.RANK_COLORS[home] for home in homes]
    above.bar(numbers, minutes, color=colors, edgecolor=plots.COLORS["ink"], linewidth=0.8)
    for cut in cuts:
        above.axvline(cut + 0.5, color=plots.COLORS["ink"])
    above.set(xlabel="station", ylabel="minutes", ylim=(0, 12.5), xticks=numbers)
    times = [sum(m for m, home in zip(minutes, homes) if home == b) for b in range(len(spans))]
    above.set_title(f"Buildings of {', '.join(f'{t:g}' for t in times)} minutes (simulated)")
    end = max(found[1] for row in spans for found in row)
    records = [Record(stage, _with_waiting(row, end)) for stage, row in enumerate(spans)]
    names = [f"building {number}" for number in range(len(spans))]
    plots.legend(figure, plots.lanes(below, records, end, names, unit="minutes"))
    idle = 1 - alone / (len(spans) * end)
    below.set_title(f"{end:g} minutes; one building: {alone:g}; idle: {idle:.0%}")
    return figure


def _with_waiting(work: Sequence[tuple], end: float) -> list[Span]:
    """The stretches of work of a building, and what is left of the time from 0 to `end`."""
    spans = [Span("forward", "compute", start, end) for start, end in work]
    free = zip([0.0, *(span.end for span in spans)], [*(span.start for span in spans), end])
    return spans + [Span("wait", "waiting", a, b) for a, b in free if b > a]


# --- further -----------------------------------------------------------------------------------

BLOCK = {  # what autograd keeps of a block, in tensors of N T W numbers, in the order of the way
    "block's input": 1,
    "norm": 1,
    "queries": 1,
    "keys": 1,
    "values": 1,
    "heads": 1,
    "sum": 1,
    "norm ": 1,
    "before the activation function": 4,
    "after the activation function": 4,
}


def kept_of_a_block() -> Figure:
    """The sixteen tensors of N T W numbers that autograd keeps of a transformer block."""
    figure, ax = plots.canvas(height=2.5)
    ax.set_title("Half of what a block keeps stands around its activation function")
    size, left = 0.52, 0.35
    for name, count in BLOCK.items():
        for number in range(count):
            place = (left + number * size, 1.1)
            box = {"facecolor": plots.COLORS["activations"], "edgecolor": plots.COLORS["ink"]}
            ax.add_patch(Rectangle(place, size, size, linewidth=0.8, **box))
        middle = left + count * size / 2
        if count == 1:
            ax.text(middle, 1.72, name.strip(), rotation=90, ha="center", va="bottom", fontsize=9)
        else:
            words = name.replace(" the", "\nthe", 1)
            ax.text(middle, 1.72, words, ha="center", va="bottom", fontsize=9)
        left += count * size + 0.06
    look = {"arrowstyle": "|-|", "mutation_scale": 3}
    for start, end, part in ((0.35, 4.4, "norm and attention"), (4.4, 9.3, "norm, linear layers")):
        ax.annotate("", (start, 0.85), (end - 0.06, 0.85), arrowprops=look)
        ax.text((start + end) / 2, 0.7, part, ha="center", va="top", fontsize=9)
    return figure


def strategies(
    tables: Mapping[int, Mapping[str, Mapping]], work_of: Callable[[list[int]], Sequence[float]]
) -> Figure:
    """The experiment of exercise 4.5, {stages: {strategy: row}}: bars of all stages, a column for
    each number of stages. Memory above; below `work_of(cuts)`, the million operations of each."""
    figure, axes = plt.subplots(
        2, len(tables), figsize=(plots.WIDTH, 4.6), sharey="row", layout="constrained"
    )
    for (above, below), (stages, table) in zip(axes.T, tables.items()):
        style = {"width": 0.8 / stages, "color": plots.RANK_COLORS[:stages]}
        for group, found in enumerate(table.values()):
            places = [group - 0.4 + 0.8 * (stage + 0.5) / stages for stage in range(stages)]
            above.bar(places, [count / 2**20 for count in found["memory"]], **style)
            below.bar(places, work_of(found["cuts"]), **style)
        above.set(title=f"{stages} stages", xticks=[])
        below.set_xticks(range(len(table)), [name.replace(" ", "\n") for name in table])
    axes[0, 0].set_ylabel("memory (MiB)")
    axes[1, 0].set_ylabel("million operations")
    return figure


def fullest(counts: Sequence[int], ledgers: Sequence[Mapping[str, float]]) -> Figure:
    """For each number of stages: the ledger of the fullest one, and the share that is idle."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(plots.WIDTH, 3.0))
    places, below = range(len(counts)), [0.0] * len(counts)
    for kind in ledgers[0]:
        heights = [ledger[kind] / 2**30 for ledger in ledgers]
        left.bar(places, heights, bottom=below, color=plots.COLORS[kind], label=kind)
        below = [a + b for a, b in zip(below, heights)]
    left.legend()
    left.set(xticks=places, xticklabels=counts, xlabel="stages", ylabel="GiB")
    left.set_title("Less memory in the fullest stage")
    look = {"color": plots.COLORS["waiting"], "hatch": "////", "edgecolor": "white"}
    right.bar(places, [100 * (1 - 1 / stages) for stages in counts], **look)
    right.set(xticks=places, xticklabels=counts, xlabel="stages", ylabel="per cent", ylim=(0, 100))
    right.set_title("More waiting (one batch)")
    return figure
