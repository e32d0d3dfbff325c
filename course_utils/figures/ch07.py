"""The pictures of chapter 7: sites and seats, the grid of ranks, links, what a rank sends."""

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
    """Two sites of two buildings with two workers each, and who speaks to whom."""
    figure, ax = plots.canvas(height=3.4)
    for site, left in enumerate((0.1, 5.3)):
        ax.add_patch(Rectangle((left, 0.9), 4.6, 2.75, facecolor=PALE, edgecolor=FRAME))
        ax.text(left + 2.3, 3.72, f"site {site}", ha="center", va="bottom", fontsize=11)
        for stage, x in enumerate((left + 0.2, left + 2.9)):
            plots.building(ax, x, 1.25, width=1.5, height=2.15, color="white")
            ax.text(x + 0.75, 1.2, f"building {stage}", ha="center", va="top", fontsize=10)
            for seat, y in enumerate((2.45, 1.6)):
                _worker(ax, x + 0.75, y, rank=4 * site + 2 * stage + seat)
            ax.plot([x + 0.75] * 2, [1.83, 2.22], color=DIMENSIONS["tensor"], linewidth=5)
        plots.arrow(ax, (left + 1.8, 1.6), (left + 2.8, 1.6), color=DIMENSIONS["pipeline"])
        plots.arrow(ax, (left + 1.8, 2.45), (left + 2.8, 2.45), color=DIMENSIONS["pipeline"])
        plots.truck(ax, left + 1.85, 1.78)
    for x in (1.05, 3.75):
        bend = {"connectionstyle": "arc3,rad=-0.12", "color": DIMENSIONS["data"], "linewidth": 2.2}
        ax.annotate("", (x + 5.2, 2.72), (x, 2.72), arrowprops={"arrowstyle": "<|-|>"} | bend)
    kinds = ["data: same place, other site", "pipeline: next building", "tensor: same station"]
    handles = [Patch(color=color) for color in DIMENSIONS.values()]
    ax.legend(handles, kinds, loc="lower center", ncols=3)
    return figure


def _worker(ax: Axes, x: float, y: float, rank: int) -> None:
    face = plots.RANK_COLORS[rank]
    ax.add_patch(Rectangle((x - 0.3, y - 0.2), 0.6, 0.4, facecolor=face, edgecolor=INK))
    ax.text(x, y, str(rank), ha="center", va="center", fontsize=11)


def grid(data: int, pipeline: int, tensor: int, chosen: int) -> Figure:
    """All ranks, and the groups of one of them."""
    figure, ax = plots.canvas(height=3.0)
    _grid(ax, (data, pipeline, tensor), chosen, top=3.2, height=2.2)
    handles = [Patch(color=INK)] + [Patch(color=color) for color in DIMENSIONS.values()]
    names = [f"rank {chosen}", *(f"in its {name} group" for name in DIMENSIONS)]
    ax.legend(handles, names, loc="lower center", ncols=4)
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


def links(per_step: dict[str, float], inside: float = 250e9, between: float = 25e9) -> Figure:
    """Seconds that the bytes of each dimension take, inside a machine and between machines."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.2))
    for row, (name, count) in enumerate(per_step.items()):
        for shift, speed, hatch in ((-0.2, inside, ""), (0.2, between, "///")):
            look = {"color": DIMENSIONS[name], "hatch": hatch, "edgecolor": "white"}
            ax.barh(row + shift, count / speed, height=0.36, **look)
            ax.text(count / speed + 0.1, row + shift, f"{count / speed:.2f} s", va="center")
    ax.set_yticks(range(len(per_step)), per_step)
    ax.invert_yaxis()
    ax.set(xlabel="seconds of communication per step, simulated", xlim=(0, 15.5))
    plain, striped = Patch(fc="#C8C8C8"), Patch(fc="#C8C8C8", hatch="///", ec="white")
    ax.legend([plain, striped], ["inside a machine", "between machines"], loc="upper right")
    ax.set_title("Tensor is the one that cannot leave the machine")
    return figure


def tokens_grow(tokens: list[int], sent: list[dict[str, float]], ours: int) -> Figure:
    """What a rank sends in each dimension, for so many tokens of a copy; `ours` is marked."""
    figure, ax = plt.subplots()
    for name, color in DIMENSIONS.items():
        line = [each[name] for each in sent]
        ax.plot(tokens, line, color=color, linewidth=2.5)
        ax.text(tokens[-1] * 1.15, line[-1], name, color=color, va="center")
    ax.set(xscale="log", yscale="log")
    ax.axvline(ours, color=FRAME, linestyle=":")
    ax.text(1.1 * ours, ax.get_ylim()[1] * 0.5, "our batch", va="top", color=GREY)
    ax.set(xlabel="tokens of a copy", ylabel="bytes per step and rank, predicted")
    ax.set_title("Activations grow with the tokens, gradients do not")
    return figure


def grid_and_bytes(
    sizes: tuple, rank: int, lines: dict[str, list[int]], sent: dict[str, float]
) -> Figure:
    """The grid, the three groups of one rank, and what it sends to each in a step."""
    figure, ax = plots.canvas(height=4.6)
    _grid(ax, sizes, rank, top=5.3, height=3.1)
    for row, (name, line) in enumerate(lines.items()):
        y = 1.15 - 0.45 * row
        ax.add_patch(Rectangle((0.1, y - 0.13), 0.3, 0.26, facecolor=DIMENSIONS[name]))
        ax.text(0.55, y, f"{name} group", va="center", weight="bold")
        ax.text(2.5, y, ", ".join(map(str, line)), va="center")
        ax.text(6.4, y, f"{sent[name] / 1e9:.1f} GB", va="center", ha="right")
        inside = len({member // MACHINE for member in line}) == 1
        where = "in one machine" if inside else "between machines"
        ax.text(6.8, y, "talks to nobody" if len(line) == 1 else where, va="center")
    small = {"va": "center", "fontsize": 9, "color": GREY}
    ax.text(2.5, 1.55, "ranks", **small)
    ax.text(6.4, 1.55, "sent per step", ha="right", **small)
    return figure
