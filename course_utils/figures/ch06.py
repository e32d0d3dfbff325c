"""The pictures of chapter 6: matrices that are cut, who holds what, and what a cut costs in time."""

from collections.abc import Iterator

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from course_utils import plots

WHOLE = "#DDDDDD"  # what every rank holds


def one_station() -> Figure:
    """Four workers at one station, each with some columns of one page and the same rows of the next."""
    figure, ax = plots.canvas(height=3.3)
    to_all = {"color": plots.COLORS["communication"]}
    plots.pile(ax, 0.1, 1.75, [plots.COLORS["activations"]] * 6, label="product x")
    for worker, y in enumerate((3.05, 2.15, 1.25, 0.35)):
        color, middle = plots.RANK_COLORS[worker], y + 0.33
        plots.arrow(ax, (1.05, 2.05), (2.15, middle), **to_all)
        ax.add_patch(
            Rectangle((2.2, y), 1.35, 0.66, facecolor=color, edgecolor=plots.COLORS["ink"])
        )
        ax.text(2.88, middle, f"worker {worker}", ha="center", va="center", fontsize=10)
        _page(ax, 3.7, middle - 0.155, 0.62, 0.31, (worker / 4, 0.0, 1 / 4, 1.0))
        _page(ax, 4.45, middle - 0.31, 0.31, 0.62, (0.0, (3 - worker) / 4, 1.0, 1 / 4))
        plots.pile(ax, 5.05, y + 0.06, [color] * 6)  # as large as the result
        plots.arrow(ax, (6.0, middle), (7.0, 2.05), **to_all)
    ax.text(4.2, 3.82, "part of two pages", ha="center", va="bottom", fontsize=9)
    ax.text(5.15, 3.82, "partial result", ha="left", va="bottom", fontsize=9)
    ax.text(7.3, 2.05, "+", ha="center", va="center", fontsize=22)
    plots.arrow(ax, (7.6, 2.05), (8.75, 2.05), **to_all)
    plots.pile(ax, 8.95, 1.75, [plots.COLORS["activations"]] * 6, label="result,\nat every worker")
    return figure


def _page(ax: Axes, x, y, width, height, part: tuple[float, float, float, float]) -> None:
    """A page of which `part` is drawn out: x, y, width and height as shares of the page."""
    left, low, wide, high = part
    ax.add_patch(Rectangle((x, y), width, height, facecolor="white", edgecolor=plots.COLORS["ink"]))
    box = (x + left * width, y + low * height), wide * width, high * height
    ax.add_patch(Rectangle(*box, facecolor=plots.COLORS["parameters"]))


def stacked(stacks: dict[str, list[float]], layers: list[str]) -> Figure:
    """The bytes of the inputs of `layers`, one behind the other, in a bar for each of `stacks`."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 2.4))
    left, widest = [0.0] * len(stacks), max(map(sum, stacks.values()))
    for layer, sizes in zip(layers, zip(*stacks.values())):
        ax.barh(
            list(stacks), sizes, 0.6, left, color=plots.COLORS["activations"], edgecolor="white"
        )
        for y, (start, size) in enumerate(zip(left, sizes)):
            if size > 0.05 * widest:  # there is room for the word
                ax.text(start + size / 2, y, layer, ha="center", va="center", fontsize=9)
        left = [a + b for a, b in zip(left, sizes)]
    ax.invert_yaxis()
    ax.set_xlabel("bytes on each rank")
    ax.set_title("The inputs that backward needs, from a norm and an MLP")
    return figure


def what_stays(ranks: list[int], parts: dict[str, list[float]]) -> Figure:
    """The share of one rank's bytes that is kept on each of more ranks, a line for each of `parts`."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.0))
    for (name, shares), look in zip(parts.items(), plots.LINES):
        ax.plot(ranks, shares, marker="o", label=name, **look)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ranks, ranks)
    ax.set(xlabel="ranks", ylabel="share of one rank's bytes", ylim=(0, 1.05))
    ax.set_title("What backward needs from a norm and an MLP (computed)")
    ax.legend()
    return figure


def two_cuts() -> Figure:
    """The column cut above the row cut, on four ranks."""
    figure, ax = plots.canvas(height=4.3)
    _cut(ax, 2.9, 4, "columns", ["X, whole on every rank", "A, column cut", "Y, in columns"])
    _cut(ax, 0.2, 4, "rows", ["X, in columns", "A, row cut", "Y, a partial sum on each rank"])
    return figure


def one_cut(ranks: int, cut: str, names: list[str], lines: list[str]) -> Figure:
    """One product, cut in "columns" or "rows", with lines of text under it."""
    figure, ax = plots.canvas(height=3.6)
    _cut(ax, 2.0, ranks, cut, names)
    for i, line in enumerate(lines):
        ax.text(0.3, 1.5 - 0.4 * i, line, va="center", weight="bold" if i == 0 else "normal")
    return figure


def _cut(ax: Axes, y: float, ranks: int, cut: str, titles: list[str]) -> None:
    cuts = {"columns": ("none", "columns", "columns"), "rows": ("columns", "rows", "sum")}[cut]
    for (x, width, height), along, label in zip(
        [(0.3, 1.6, 1.1), (3.0, 2.2, 1.6), (6.6, 2.2, 1.1)], cuts, titles
    ):
        _matrix(ax, x, y + 0.3, width, height, label, ranks, along)
    ax.text(2.45, y + 0.85, "times", ha="center", va="center")
    ax.text(5.85, y + 0.85, "is", ha="center", va="center")


def _matrix(ax: Axes, x, y, width, height, label: str, ranks: int, along: str) -> None:
    """A matrix cut between `ranks`: "columns", "rows", "sum" (partial on each) or "none"."""
    for rank in range(ranks):
        color = plots.RANK_COLORS[rank]
        if along == "columns":
            box = (x + width * rank / ranks, y), width / ranks, height
        elif along == "rows":
            box = (x, y + height * (ranks - 1 - rank) / ranks), width, height / ranks
        elif along == "sum":  # one sheet behind the other
            box = (x + 0.07 * (ranks - 1 - rank), y + 0.07 * (ranks - 1 - rank)), width, height
        else:
            box, color = ((x, y), width, height), "white"
        ax.add_patch(Rectangle(*box, facecolor=color, edgecolor=plots.COLORS["ink"]))
        if along in ("columns", "rows"):
            (left, bottom), across, up = box
            _number(ax, left + across / 2, bottom + up / 2, str(rank))
    if along == "sum":
        _number(ax, x + width / 2, y + height / 2, " + ".join(map(str, range(ranks))))
    ax.text(x + width / 2, y - 0.12, label, ha="center", va="top", fontsize=9)


def _number(ax: Axes, x: float, y: float, ranks: str) -> None:
    """Says in a piece whose it is, for who sees no colours."""
    ax.text(x, y, ranks, ha="center", va="center", fontsize=9)


def block_of(holders: dict[str, Tensor]) -> Figure:
    """A block of which `holders` says, number by number, which of four ranks holds it; 4 is all."""
    figure, ax = plots.canvas(height=4.3)
    x = 0.1
    for layer in ("norm1", "attention.qkv", "norm2", "feed_forward.up"):
        x = _layer(ax, holders, layer, x, 4.75) + 0.5
    _layer(ax, holders, "attention.out", x, 4.75)
    _layer(ax, holders, "feed_forward.down", x, 2.95)
    names = ["rank 0", "rank 1", "rank 2", "rank 3", "all ranks"]
    for i, (name, color) in enumerate(zip(names, [*plots.RANK_COLORS[:4], WHOLE])):
        plots.pile(ax, x + 0.95 * i, 1.2, [color], columns=1)
        ax.text(x + 0.95 * i + 0.3, 1.33, name, va="center", fontsize=9)
    ax.set(xlim=(0, 10), ylim=(0, 5.375))
    return figure


def _layer(ax: Axes, holders: dict[str, Tensor], layer: str, x: float, top: float) -> float:
    """Draws the weight of a layer and its bias, and returns where they end."""
    ax.text(x, top + 0.1, layer.replace(".", ".\n"), ha="left", va="bottom", fontsize=9)
    for kind in ("weight", "bias"):
        x = _holder(ax, holders[f"{layer}.{kind}"], x, top) + 0.06
    return x


def _holder(ax: Axes, holder: Tensor, x: float, top: float, scale: float = 0.033) -> float:
    """Draws a parameter and returns where it ends."""
    height, width = holder.shape[0] * scale, max(3, holder.shape[1]) * scale  # a vector: 3 wide
    colors = ListedColormap([*plots.RANK_COLORS[:4], WHOLE])
    box = (x, x + width, top - height, top)
    ax.imshow(holder, cmap=colors, vmin=0, vmax=4, extent=box, interpolation="nearest")
    ax.add_patch(Rectangle((x, top - height), width, height, fill=False, linewidth=0.8))
    if holder.shape[1] > 1:  # a bias, and what is whole, is narrow
        for rank, (row, column) in _pieces(holder):
            _number(ax, x + (column + 0.5) * scale, top - (row + 0.5) * scale, str(rank))
    return x + width


def _pieces(holder: Tensor) -> Iterator[tuple[int, tuple[float, float]]]:
    """The rank of each piece of a matrix that is cut along one dimension, and its middle."""
    along = 0 if (holder == holder[:, :1]).all() else 1
    line = holder[:, 0] if along == 0 else holder[0]
    ranks, counts = torch.unique_consecutive(line, return_counts=True)
    across, begin = (holder.shape[1 - along] - 1) / 2, 0
    for rank, count in zip(ranks.tolist(), counts.tolist(), strict=True):
        middle = begin + (count - 1) / 2
        yield rank, (middle, across) if along == 0 else (across, middle)
        begin += count


def block_times(
    sizes: list[int], compute: list[float], communicate: list[float], machine: int = 8
) -> Figure:
    """The seconds of a block for each number of ranks, computing below communicating; `machine` of
    them are in one machine."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.4))
    places, below = range(len(sizes)), [1e3 * c for c in compute]
    ax.bar(places, below, color=plots.COLORS["matrices"], label="compute, forward and backward")
    above = {"color": plots.COLORS["communication"], "label": "all-reduce"}
    ax.bar(places, [1e3 * c for c in communicate], bottom=below, **above)
    ax.set_xticks(places, sizes)
    ax.set(xlabel="ranks that share a block", ylabel="time of a block (ms), simulated")
    ax.set_ylim(0, 1.08 * max(a + b for a, b in zip(compute, communicate)) * 1e3)
    end = sizes.index(machine) + 0.5
    ax.axvline(end, ymax=0.75, color=plots.COLORS["ink"], linestyle=":")  # below the legend
    ax.text(end + 0.05, 0.5 * ax.get_ylim()[1], "the machine ends", va="center", fontsize=10)
    ax.set_title("To cut further pays only inside a machine")
    ax.legend()
    return figure
