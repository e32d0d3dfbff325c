"""The pictures of chapter 6: matrices, blocks and a vocabulary that are cut, and what a cut costs in time."""

from collections.abc import Callable

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_utils import plots

WHOLE = "#DDDDDD"  # what every rank holds
ROUND = {"boxstyle": "circle,pad=0.1", "facecolor": "white", "edgecolor": plots.COLORS["ink"]}


def one_station() -> Figure:
    """Four buildings share a station, each with some columns of one sheet and the same rows of the next."""
    figure, ax = plots.canvas(height=3.5)
    to_all, pink = {"color": plots.COLORS["communication"]}, plots.COLORS["parameters"]
    plots.pile(ax, 0.1, 1.75, [plots.COLORS["activations"]] * 6, label="material")
    for rank, y in enumerate((3.05, 2.15, 1.25, 0.35)):
        color, middle = plots.RANK_COLORS[rank], y + 0.33
        plots.arrow(ax, (1.05, 2.05), (2.15, middle), **to_all)
        plots.building(ax, 2.2, y, 1.35, 0.72, f"building {rank}", color)
        _box(ax, 3.7, middle - 0.155, 0.62, 0.31, "white")
        _box(ax, 3.7 + 0.155 * rank, middle - 0.155, 0.155, 0.31, pink)
        _box(ax, 4.45, middle - 0.31, 0.31, 0.62, "white")
        _box(ax, 4.45, middle + 0.155 - 0.155 * rank, 0.31, 0.155, pink)
        plots.pile(ax, 5.05, y + 0.06, [color] * 6)  # as large as the result
        plots.arrow(ax, (6.0, middle), (7.0, 2.05), **to_all)
    _word(ax, 4.2, 3.98, "its part of\nthe blueprint")
    _word(ax, 5.5, 3.95, "partial result")
    _word(ax, 7.3, 2.05, "+", fontsize=22)
    plots.arrow(ax, (7.6, 2.05), (8.75, 2.05), **to_all)
    everywhere = "result, in\nevery building"
    plots.pile(ax, 8.95, 1.75, [plots.COLORS["activations"]] * 6, label=everywhere)
    ax.set_title("All the material goes to every building; their partial results are added up")
    return figure


def _box(ax: Axes, x, y, width, height, color: str, label: str = "", **look) -> None:
    """A piece, and in it whose it is, or what."""
    ax.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=plots.COLORS["ink"]))
    _word(ax, x + width / 2, y + height / 2, label, **look)


def _word(ax: Axes, x, y, text: str, **look) -> None:
    ax.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": 9} | look)


def stacked(stacks: dict[str, list[float]], layers: list[str]) -> Figure:
    """The bytes of the inputs of `layers`, one behind the other, in a bar for each of `stacks`."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 2.4))
    left, widest = [0.0] * len(stacks), max(map(sum, stacks.values()))
    for layer, sizes in zip(layers, zip(*stacks.values())):
        ax.barh(
            list(stacks), sizes, 0.6, left, color=plots.COLORS["activations"], edgecolor="white"
        )
        for y, (start, size) in enumerate(zip(left, sizes)):
            if size > 0.05 * widest:
                _word(ax, start + size / 2, y, layer)
            else:  # there is no room for it in the bar
                _word(ax, start + 0.005 * widest, y + 0.45, layer, ha="left")
        left = [a + b for a, b in zip(left, sizes)]
    ax.set_ylim(len(stacks) - 0.3, -0.5)
    ax.set_xlabel("bytes on each rank")
    ax.set_title("Sequence parallelism also cuts what the norm keeps for backward")
    return figure


def two_cuts() -> Figure:
    """The column cut above the row cut, on four ranks."""
    figure, ax = plots.canvas(height=4.5)
    _cut(ax, 2.9, ["X, whole on every rank", "A, column cut", "Y, in columns"])
    _cut(ax, 0.1, ["X, in columns", "A, row cut", "Y is the sum of these four"])
    ax.set_title("A column cut gives finished columns, a row cut gives terms of a sum")
    return figure


def _cut(ax: Axes, y: float, titles: list[str]) -> None:
    """One product on four ranks; the titles say how it is cut."""
    by_columns = "column cut" in titles[1]
    ways = ("whole", "columns", "columns") if by_columns else ("columns", "rows", "sum")
    places = [(0.3, 1.6, 1.1), (3.0, 2.2, 1.6), (6.6, 2.2, 1.1)]
    for (x, width, height), way, title in zip(places, ways, titles, strict=True):
        _matrix(ax, x, y + 0.3, width, height, way)
        _word(ax, x + width / 2, y + 0.1, title)
    _word(ax, 2.45, y + 0.85, "times", fontsize=11)
    _word(ax, 5.85, y + 0.85, "is", fontsize=11)


def _matrix(ax: Axes, x, y, width, height, way: str) -> None:
    """A matrix on four ranks: cut in "columns" or "rows", a term of a "sum" on each, or "whole"."""
    if way == "whole":
        return _box(ax, x, y, width, height, "white")
    for rank, color in enumerate(plots.RANK_COLORS[:4]):
        if way == "columns":
            _box(ax, x + width * rank / 4, y, width / 4, height, color, str(rank))
        elif way == "rows":
            _box(ax, x, y + height * (3 - rank) / 4, width, height / 4, color, str(rank))
        else:  # one sheet in front of the other, each with its rank where the next leaves room
            left, low = x + 0.27 * rank, y + 0.6 - 0.2 * rank
            _box(ax, left, low, width, height, color)
            _word(ax, left + 0.13, low + 0.13, str(rank))


def heads() -> Figure:
    """The matrix qkv of a grouped attention, four heads of queries and two of keys, on two ranks."""
    figure, ax = plots.canvas(height=3.7)
    rows = [f"queries {i}" for i in range(4)] + [
        f"{w} {i}" for w in ("keys", "values") for i in (0, 1)
    ]
    for i, (row, rank) in enumerate(zip(rows, (0, 0, 1, 1, 0, 1, 0, 1), strict=True)):
        _box(ax, 0.2, 3.65 - 0.46 * i, 1.9, 0.46, plots.RANK_COLORS[rank], row)
    ax.plot([0.05, 3.0], [2.27, 2.27], color=plots.COLORS["wrong"], linestyle="--", linewidth=1.6)
    _word(ax, 2.2, 2.2, "a plain cut\nin two: no keys\nfor rank 0", ha="left", va="top")
    for rank, y in enumerate((2.5, 0.5)):
        color, two = plots.RANK_COLORS[rank], f"{2 * rank} and {2 * rank + 1}"
        plots.arrow(ax, (3.2, y + 0.45), (3.9, y + 0.45))
        _box(ax, 4.0, y, 2.5, 0.9, color, f"rank {rank}: queries {two}\nwith keys, values {rank}")
        plots.arrow(ax, (6.6, y + 0.45), (7.4, 2.1 - 0.4 * rank))
    for head in range(4):
        _box(ax, 7.5 + 0.5 * head, 1.4, 0.5, 1.0, plots.RANK_COLORS[head // 2], str(head))
    _word(ax, 1.15, 0.25, "rows of qkv, as stored")
    _word(ax, 8.5, 1.2, "columns of out, by head")
    ax.set_title("Each rank takes whole heads: queries together with their keys and values")
    return figure


def block() -> Figure:
    """The path through a block on two ranks, with f and g, and below it with sequence parallelism."""
    figure, ax = plots.canvas(height=4.4)
    _path(ax, 3.3, "f", "g", WHOLE)
    _path(ax, 0.45, "all-gather", "reduce-scatter", None)
    for y, says in (
        (4.95, "tensor parallelism: between the halves every rank has all tokens"),
        (3.05, "forward: f does nothing, g adds up.   backward: g does nothing, f adds up."),
        (2.1, "with sequence parallelism: there each rank has its own tokens"),
        (0.2, "backward: each of the two becomes the other"),
    ):
        _word(ax, 0.1, y, says, ha="left")
    ax.set_title("Ranks communicate at two places of each half: into the cut, and out of it")
    return figure


def _path(ax: Axes, y: float, enter: str, leave: str, between: str | None) -> None:
    """Two lanes, rank 0 above rank 1; `between` is the colour of what stands between the cut parts."""
    for x, layers in ((0.1, ["qkv", "heads", "out"]), (5.1, ["up", "GELU", "down"])):
        for bar, name in ((x + 0.95, enter), (x + 4.0, leave)):
            look = {"rotation": 90, "fontsize": 8} if len(name) > 1 else {"weight": "bold"}
            _box(ax, bar, y, 0.34, 1.4, plots.COLORS["communication"], name, **look)
        for rank, low in enumerate((y + 0.78, y + 0.08)):
            color, middle = plots.RANK_COLORS[rank], low + 0.27
            ax.plot([x - 0.1, x + 4.9], [middle] * 2, color=plots.COLORS["ink"], zorder=0)
            _box(ax, x + 0.05, low, 0.75, 0.54, between or color, "norm")
            for i, layer in enumerate(layers):
                _box(ax, x + 1.45 + 0.85 * i, low, 0.72, 0.54, color, layer)
            ax.text(x + 4.6, middle, "+", ha="center", va="center", bbox=ROUND)


def vocabulary() -> Figure:
    """An embedding and a head that are cut by words, on four ranks."""
    figure, ax = plots.canvas(height=3.7)
    orange = plots.COLORS["communication"]
    for rank, color in enumerate(plots.RANK_COLORS[:4]):
        y, x, words = 3.0 - 0.75 * rank, 5.2 + 1.15 * rank, f"{18 * rank} to {18 * rank + 17}"
        _box(ax, 0.2, y, 1.5, 0.7, color, f"rank {rank}: words\n{words}")
        plots.arrow(ax, (1.75, y + 0.35), (2.35, y + 0.35))
        _box(ax, 2.4, y + 0.2, 0.8, 0.3, *((color, "row 20") if rank == 1 else ("white", "0")))
        _box(ax, x, 2.75, 1.15, 0.95, color, f"logits of\n{words}")
        plots.arrow(ax, (x + 0.575, 2.7), (x + 0.575, 2.25))
        _box(ax, x + 0.05, 1.6, 1.05, 0.6, "white", "a few\nnumbers")
    _box(ax, 3.4, 0.75, 0.34, 2.95, orange, "all-reduce", rotation=90, weight="bold")
    _word(ax, 4.3, 2.2, "row 20\non all\nranks")
    _word(ax, 2.0, 0.4, "embedding: look up word 20")
    _box(ax, 5.2, 0.95, 4.6, 0.34, orange, "all-reduce", weight="bold")
    _word(ax, 7.5, 0.4, "head and loss: the logits stay where they are")
    ax.set_title("A cut vocabulary: a row, or a few numbers a token, instead of all logits")
    return figure


def block_times(seconds_of_block: Callable, width: int, tokens: int) -> Figure:
    """The time of a block for each number of ranks, by the network that joins machines of 8, above what is computed."""
    sizes, networks = [1, 2, 4, 8, 16, 32], {"one adapter a GPU": 200e9, "one a machine": 25e9}
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.6))
    for (name, speed), look in zip(networks.items(), plots.LINES):
        pairs = [seconds_of_block(n, width, tokens, between=speed) for n in sizes]
        ax.plot(sizes, [1e3 * sum(pair) for pair in pairs], marker="o", label=name, **look)
    compute = [1e3 * seconds for seconds, _ in pairs]
    ax.plot(
        sizes,
        compute,
        color=plots.COLORS["matrices"],
        linewidth=2.5,
        label="compute alone",
        zorder=0,
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, sizes)
    ax.set(xlabel="ranks that share a block", ylabel="time of a block (ms), simulated")
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_ylim(0.8 * min(compute))
    ax.axvline(8 * 2**0.5, color=plots.COLORS["ink"], linestyle=":")
    ax.text(12, 0.4 * ax.get_ylim()[1], "more than one machine", fontsize=10)
    ax.set_title("Beyond one machine, the network decides whether a finer cut pays")
    ax.legend()
    return figure
