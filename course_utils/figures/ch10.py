"""The figures of chapter 10: pages round a table, who computes what, who holds what when."""

from collections.abc import Callable, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_utils import plots

Layout = Callable[[int, int], list[int]]  # (rank, ranks) -> the numbers of its two chunks


def in_halves(rank: int, ranks: int) -> list[int]:
    """Neighbouring chunks, as a document is cut from front to back."""
    return [2 * rank, 2 * rank + 1]


def head_and_tail(rank: int, ranks: int) -> list[int]:
    """One chunk from the front and its mirror image from the back."""
    return [rank, 2 * ranks - rank - 1]


LAYOUTS = {"blocks": in_halves, "zig-zag": head_and_tail}


def table() -> Figure:
    """Four desks round a table: the questions stay, the pages go to the next desk."""
    figure, ax = plots.canvas(height=2.8)
    desks = [(2.0, 2.45), (6.4, 2.45), (6.4, 0.15), (2.0, 0.15)]
    for rank, (x, y) in enumerate(desks):
        color = plots.RANK_COLORS[rank]
        ax.add_patch(Rectangle((x, y), 1.6, 0.95, facecolor=color, edgecolor=plots.COLORS["ink"]))
        ax.text(x + 0.8, y + 0.66, f"desk {rank}", ha="center", va="center", fontsize=10)
        ax.text(x + 0.8, y + 0.28, f"questions {rank}", ha="center", va="center", fontsize=9)
        side = x - 1.1 if x < 5 else x + 1.8
        plots.pile(ax, side, y + 0.2, [color] * 6, label=f"pages {rank}")
    for start, end in [
        ((3.75, 2.95), (6.25, 2.95)),
        ((7.2, 2.35), (7.2, 1.2)),
        ((6.25, 0.65), (3.75, 0.65)),
        ((2.8, 1.2), (2.8, 2.35)),
    ]:
        plots.arrow(ax, start, end, color=plots.COLORS["communication"])
    ax.text(5.0, 1.8, "the pages travel,\nthe questions stay", ha="center", va="center")
    return figure


def travels(ranks: int) -> Figure:
    """Which pages, and the gradient of which pages, each rank has at each hop of backward."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 0.62 * ranks + 1.5))
    for rank in range(ranks):
        row = ranks - 1 - rank
        for hop in range(ranks):
            _cell(ax, hop, row + 0.5, f"pages {(rank - hop) % ranks}", (rank - hop) % ranks)
            if hop:
                page = (rank - hop) % ranks
                _cell(ax, hop, row, f"gradient {page}", page, edge=plots.COLORS["gradients"])
        _cell(ax, ranks, row, f"gradient {rank}", rank, edge=plots.COLORS["gradients"])
    ax.set_xlim(-0.5, ranks + 0.5)
    ax.set_ylim(-0.3, ranks - 0.2)
    ax.set_xticks(range(ranks + 1), [*(f"hop {hop}" for hop in range(ranks)), "home"])
    ax.set_yticks(
        [ranks - 1 - rank + 0.25 for rank in range(ranks)], map("rank {}".format, range(ranks))
    )
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_title("Gradients start at hop 1 and follow their pages")
    return figure


def _cell(ax: Axes, x: float, y: float, text: str, rank: int, edge: str = "white") -> None:
    color = plots.RANK_COLORS[rank % len(plots.RANK_COLORS)]
    ax.add_patch(
        Rectangle((x - 0.44, y - 0.21), 0.88, 0.42, facecolor=color, edgecolor=edge, linewidth=1.8)
    )
    ax.text(x, y, text, ha="center", va="center", fontsize=9)


def pairs_of(rank: int, ranks: int, layout: Layout) -> float:
    """The pairs of chunks that a rank computes under the causal mask; on the diagonal half of one."""
    return sum(mine + 0.5 for mine in layout(rank, ranks))


def shares(ranks: int, names: Sequence[str] = ("blocks", "zig-zag")) -> Figure:
    """The causal mask in chunks, coloured by the rank that computes; below, the work of each."""
    heights = {"height_ratios": [3, 1.3]}
    figure, axes = plt.subplots(
        2, len(names), figsize=(plots.WIDTH, 5.2), gridspec_kw=heights, squeeze=False
    )
    for (above, below), name in zip(axes.T, names, strict=True):
        _mask(above, ranks, LAYOUTS[name])
        above.set_title(name.capitalize())
        _work(below, ranks, LAYOUTS[name])
    axes[0][0].set_ylabel("queries: chunk")
    axes[1][0].set_ylabel("pairs")
    return figure


def _mask(ax: Axes, ranks: int, layout: Layout) -> None:
    owner = {chunk: rank for rank in range(ranks) for chunk in layout(rank, ranks)}
    for query in range(2 * ranks):
        color = plots.RANK_COLORS[owner[query] % len(plots.RANK_COLORS)]
        for key in range(query + 1):
            look = {"facecolor": color, "edgecolor": "white"}
            if key == query:
                corners = [(key, query), (key, query + 1), (key + 1, query + 1)]
                ax.add_patch(plt.Polygon(corners, **look))
            else:
                ax.add_patch(Rectangle((key, query), 1, 1, **look))
    ax.set_xlim(0, 2 * ranks)
    ax.set_ylim(2 * ranks, 0)
    ax.set_aspect("equal")
    chunks = range(0, 2 * ranks, 1 if ranks <= 5 else 2)
    ticks = [chunk + 0.5 for chunk in chunks]
    ax.set_xticks(ticks, chunks)
    ax.set_yticks(ticks, chunks)
    ax.set_xlabel("keys: chunk")


def _work(ax: Axes, ranks: int, layout: Layout) -> None:
    work = [pairs_of(rank, ranks, layout) for rank in range(ranks)]
    colors = [plots.RANK_COLORS[rank % len(plots.RANK_COLORS)] for rank in range(ranks)]
    ax.bar(range(ranks), work, color=colors, edgecolor=plots.COLORS["ink"])
    for rank, pairs in enumerate(work):
        ax.text(rank, pairs, f"{pairs:g}", ha="center", va="bottom", fontsize=9)
    ax.set_ylim(0, 1.25 * 4 * ranks)
    ax.set_xticks(range(ranks))
    ax.set_xlabel("rank")


METHODS = ("all-gather", "by heads", "ring")


def costs(tokens: int, heads: int, head_width: int, ranks: int) -> dict[str, tuple[float, float]]:
    """Bytes that leave a rank in a forward pass, and the bytes of the scores that it holds at once,
    for each method; float32, one sequence."""
    n, own = ranks, tokens // ranks * heads * head_width * 4
    scores = heads * tokens * tokens * 4
    return {
        "all-gather": (2 * own * (n - 1), scores / n),
        "by heads": (4 * own * (n - 1) / n, scores / n),
        "ring": (2 * own * (n - 1), scores / (2 * n) ** 2),
    }


def compared(tokens: int, heads: int, head_width: int, sizes: Sequence[int]) -> Figure:
    """What leaves a rank, and the scores that it holds, over the number of ranks."""
    figure, axes = plt.subplots(1, 2, figsize=(plots.WIDTH, 3.6))
    marks = {"all-gather": ("s", 9), "by heads": ("^", 7), "ring": ("o", 5)}
    for ax, index in zip(axes, (0, 1), strict=True):
        for method, look in zip(METHODS, plots.LINES):
            some = [n for n in sizes if method != "by heads" or heads % n == 0]
            values = [costs(tokens, heads, head_width, n)[method][index] / 2**30 for n in some]
            marker, size = marks[method]
            ax.plot(some, values, marker=marker, markersize=size, label=method, **look)
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, sizes)
        ax.set_xlabel("ranks")
    axes[0].set(ylabel="GiB that leave a rank", title="Sent in forward")
    axes[1].set(ylabel="GiB of scores at once", title="Scores without a fused kernel")
    axes[1].set_yscale("log", base=2)
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[0].legend()
    return figure


def explored(layout: str, ranks: int, tokens: int) -> Figure:
    """The explorer's picture: the mask of one layout, and what each method would send and hold.

    A rank holds two chunks of equal length: of an odd number of tokens it leaves one out.
    """
    tokens -= tokens % 2
    figure, axes = plt.subplots(
        1, 2, figsize=(plots.WIDTH, 4.0), gridspec_kw={"width_ratios": [1, 1.5]}
    )
    _mask(axes[0], ranks, LAYOUTS[layout])
    axes[0].set_ylabel("queries: chunk")
    axes[0].set_title(layout.capitalize())
    work = [pairs_of(rank, ranks, LAYOUTS[layout]) for rank in range(ranks)]
    busy = sum(work) / (ranks * max(work))
    lines = [
        f"{ranks} ranks, {tokens:,} tokens each: {ranks * tokens:,} tokens",
        f"pairs of chunks, least to most: {min(work):g} to {max(work):g}",
        f"share of the time in which ranks compute: {busy:.0%}",
        "",
        "32 heads of width 128, float32, one layer:",
    ]
    for method, (sent, scores) in costs(ranks * tokens, 32, 128, ranks).items():
        fits = method != "by heads" or 32 % ranks == 0
        said = f"sends {plots.human_bytes(sent)}, scores {plots.human_bytes(scores)}"
        lines.append(f"{method}: {said if fits else f'32 heads do not divide by {ranks}'}")
    axes[1].axis("off")
    for i, line in enumerate(lines):
        axes[1].text(0, 0.95 - 0.105 * i, line, transform=axes[1].transAxes, fontsize=9.5)
    return figure
