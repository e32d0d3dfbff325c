"""The pictures of chapter 7: sites, the grid of ranks, the calls of a step, what a rank sends."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course_utils import plots

DIMENSIONS = {  # and their colours, after what travels
    "data": plots.COLORS["gradients"],
    "pipeline": plots.COLORS["communication"],
    "tensor": plots.COLORS["parameters"],
}
INK, PALE, FRAME, GREY = plots.COLORS["ink"], "#F5F5F5", "#8C8C8C", "#5F5F5F"
MACHINE = 8  # ranks in one machine


def sites() -> Figure:
    """Two sites with a whole line each, four buildings a line, and who sends trucks to whom."""
    figure, ax = plots.canvas(height=3.6)
    for site, left in enumerate((0.1, 5.3)):
        ax.add_patch(Rectangle((left, 1.0), 4.6, 2.7, facecolor=PALE, edgecolor=FRAME))
        ax.text(left + 2.3, 2.25, f"site {site}", ha="center", va="center", fontsize=11)
        for stage, x in enumerate((left + 0.45, left + 2.85)):
            for share, y in enumerate((2.45, 1.15)):
                rank = 4 * site + 2 * stage + share
                plots.building(ax, x, y, width=1.3, height=0.9, label=str(rank), color="white")
            ax.plot([x + 0.65] * 2, [2.07, 2.43], color=DIMENSIONS["tensor"], linewidth=5)
        for y in (2.75, 1.45):
            plots.arrow(ax, (left + 1.77, y), (left + 2.83, y), color=DIMENSIONS["pipeline"])
    for x in (1.2, 3.6):
        for y, bend in ((3.38, -0.13), (1.1, 0.13)):
            look = {"arrowstyle": "<|-|>", "color": DIMENSIONS["data"], "linewidth": 2.2}
            look["connectionstyle"] = f"arc3,rad={bend}"
            ax.annotate("", (x + 5.2, y), (x, y), arrowprops=look)
    kinds = ["data: same place, other line", "pipeline: next stations", "tensor: same station"]
    handles = [Patch(color=color) for color in DIMENSIONS.values()]
    ax.legend(handles, kinds, loc="lower center", ncols=3, borderaxespad=0)
    ax.set_title("A building exchanges with three others, one for each reason")
    return figure


def grid(data: int, pipeline: int, tensor: int, chosen: int) -> Figure:
    """All ranks, and the groups of one of them."""
    figure, ax = plots.canvas(height=3.0)
    _grid(ax, (data, pipeline, tensor), chosen, top=3.2, height=2.2)
    handles = [Patch(color=INK)] + [Patch(color=color) for color in DIMENSIONS.values()]
    names = [f"rank {chosen}", *(f"in its {name} group" for name in DIMENSIONS)]
    ax.legend(handles, names, loc="lower center", ncols=4)
    ax.set_title("Each group is a line of ranks through the grid")
    return figure


def _grid(ax: Axes, sizes: tuple, chosen: int, top: float, height: float) -> None:
    """A frame for each copy, stages from left to right, parts downwards."""
    data, pipeline, tensor = sizes
    frame = 9.8 / data
    cell = min((frame - 0.5) / pipeline, height / tensor, 1.3)
    top -= (height - cell * tensor) / 2
    wide, high = cell * pipeline, cell * tensor
    for d in range(data):
        left = 0.1 + d * frame + (frame - wide) / 2
        box = ((left - 0.12, top - high - 0.12), wide + 0.24, high + 0.24)
        ax.add_patch(Rectangle(*box, facecolor=PALE, edgecolor=FRAME))
        ax.text(left, top + 0.2, f"data {d}", va="bottom", fontsize=10)
        if d == 0:
            words = {"fontsize": 9, "color": GREY, "ha": "center", "va": "center"}
            ax.text(left - 0.24, top - high / 2, "tensor", rotation=90, **words)
            ax.text(left + wide / 2, top - high - 0.27, "pipeline", **words)
        for p in range(pipeline):
            for t in range(tensor):
                x, y = left + p * cell, top - (t + 1) * cell
                _cell(ax, x, y, cell, (d, p, t), sizes, chosen)


def _cell(
    ax: Axes, x: float, y: float, cell: float, place: tuple, sizes: tuple, chosen: int
) -> None:
    rank = (place[0] * sizes[1] + place[1]) * sizes[2] + place[2]
    face = _color(place, sizes, chosen)
    box = ((x + 0.04, y + 0.04), cell - 0.08, cell - 0.08)
    ax.add_patch(Rectangle(*box, facecolor=face, edgecolor=INK, linewidth=0.8))
    words = {"ha": "center", "va": "center", "fontsize": min(12, 26 * cell)}
    words["color"] = "white" if face in (INK, DIMENSIONS["data"]) else INK
    ax.text(x + cell / 2, y + cell / 2, rank, **words)


def _color(place: tuple, sizes: tuple, chosen: int) -> str:
    """White, or the colour of the dimension along which `place` is in the chosen rank's group."""
    d, rest = divmod(chosen, sizes[1] * sizes[2])
    own = (d, *divmod(rest, sizes[2]))
    other = [name for name, a, b in zip(DIMENSIONS, place, own) if a != b]
    if not other:
        return INK
    return DIMENSIONS[other[0]] if len(other) == 1 else "white"


def calls_of_step(calls: list[str], rank: int) -> Figure:
    """The calls of one step in their order, each in the row of the dimension that it goes to."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 2.4))
    for row, (name, color) in enumerate(DIMENSIONS.items()):
        at = [number for number, each in enumerate(calls, 1) if each == name]
        ax.bar(at, 0.7, bottom=row - 0.35, width=0.8, color=color)
    ax.set_yticks(range(len(DIMENSIONS)), [f"{n}: {calls.count(n)}" for n in DIMENSIONS])
    ax.set(
        ylim=(2.5, -0.5),
        xlabel=f"calls of rank {rank} in one step, in their order",
        xlim=(0, len(calls) + 1),
    )
    ax.set_title("Tensor calls run through the step, data calls end it")
    return figure


def grid_and_bytes(sizes: tuple, rank: int, sent: dict[str, float]) -> Figure:
    """The grid, the three groups of one rank, and what it sends to each in a step."""
    figure, ax = plots.canvas(height=4.6)
    _grid(ax, sizes, rank, top=5.3, height=3.1)
    strides = (sizes[1] * sizes[2], sizes[2], 1)
    for row, (name, size, stride) in enumerate(zip(DIMENSIONS, sizes, strides)):
        first = rank - rank // stride % size * stride
        group = [first + stride * i for i in range(size)]
        y = 1.15 - 0.45 * row
        ax.add_patch(Rectangle((0.1, y - 0.13), 0.3, 0.26, facecolor=DIMENSIONS[name]))
        ax.text(0.55, y, f"{name} group", va="center", weight="bold")
        ax.text(2.5, y, ", ".join(map(str, group)), va="center")
        ax.text(6.4, y, f"{sent[name] / 1e9:.1f} GB", va="center", ha="right")
        where = "in one machine" if len({m // MACHINE for m in group}) == 1 else "between machines"
        ax.text(6.8, y, "talks to nobody" if size == 1 else where, va="center")
    small = {"va": "center", "fontsize": 9, "color": GREY}
    ax.text(2.5, 1.55, "ranks", **small)
    ax.text(6.4, 1.55, "sent per step", ha="right", **small)
    most = max(sent, key=sent.get)
    said = f"most to its {most} group" if sent[most] else "nothing"
    ax.set_title(f"Rank {rank} sends {said} (computed)", pad=14)
    return figure
