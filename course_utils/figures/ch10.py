"""The figures of chapter 10: cards that go round, who computes what, who holds what when."""

from collections.abc import Callable

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_utils import plots

Layout = Callable[[int, int], list[int]]  # (rank, ranks) -> the numbers of its two chunks


def in_halves(rank: int, ranks: int) -> list[int]:
    """Neighbouring chunks, as a text is cut from front to back."""
    return [2 * rank, 2 * rank + 1]


def head_and_tail(rank: int, ranks: int) -> list[int]:
    """One chunk from the front and its mirror image from the back."""
    return [rank, 2 * ranks - rank - 1]


LAYOUTS = {"blocks": in_halves, "zig-zag": head_and_tail}


def buildings() -> Figure:
    """Four buildings in a ring: the questions stay, the cards go to the next building."""
    figure, ax = plots.canvas(height=3.1)
    for rank, (x, y) in enumerate([(2.3, 2.5), (6.1, 2.5), (6.1, 0.15), (2.3, 0.15)]):
        color = plots.RANK_COLORS[rank]
        plots.building(ax, x, y, label=f"questions {rank}", color=color)
        side = x - 1.1 if x < 5 else x + 1.9
        plots.pile(ax, side, y + 0.2, [color] * 6, label=f"cards {rank}")
    for start, end in [
        ((4.1, 2.9), (5.9, 2.9)),
        ((6.9, 2.4), (6.9, 1.4)),
        ((5.9, 0.55), (4.1, 0.55)),
        ((3.1, 1.4), (3.1, 2.4)),
    ]:
        plots.arrow(ax, start, end, color=plots.COLORS["communication"])
    plots.truck(ax, 4.5, 2.95)
    ax.set_title("The questions stay in their building, and the cards go round")
    return figure


def travels(ranks: int) -> Figure:
    """Whose keys and values, and whose gradients, each rank has at each hop of backward."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 0.62 * ranks + 1.5))
    for rank in range(ranks):
        row = ranks - 1 - rank
        for hop in range(ranks):
            owner = (rank - hop) % ranks
            _cell(ax, hop, row + 0.5, f"K, V of {owner}", owner)
            if hop:
                _cell(ax, hop, row, f"dK, dV of {owner}", owner, edge=plots.COLORS["gradients"])
        _cell(ax, ranks, row, f"dK, dV of {rank}", rank, edge=plots.COLORS["gradients"])
    ax.set_xlim(-0.5, ranks + 0.5)
    ax.set_ylim(-0.3, ranks - 0.2)
    ax.set_xticks(range(ranks + 1), [*(f"hop {hop}" for hop in range(ranks)), "home"])
    ax.set_yticks(
        [ranks - 1 - rank + 0.25 for rank in range(ranks)], map("rank {}".format, range(ranks))
    )
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_title("Gradients start one hop late, follow their keys and come home")
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


MESSAGES = {
    "blocks": "Blocks: all wait for the last",
    "zig-zag": "Zig-zag: all end together",
}


def shares(ranks: int) -> Figure:
    """The causal mask in chunks, coloured by the rank that computes; below, the work of each."""
    heights = {"height_ratios": [3, 1.3]}
    figure, axes = plt.subplots(2, 2, figsize=(plots.WIDTH, 5.2), gridspec_kw=heights)
    for (above, below), (name, message) in zip(axes.T, MESSAGES.items(), strict=True):
        _mask(above, ranks, LAYOUTS[name])
        above.set_title(message)
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
    for each method; 16 bits, one sequence."""
    n, own = ranks, tokens // ranks * heads * head_width * 2
    scores = heads * tokens * tokens * 2
    return {
        "all-gather": (2 * own * (n - 1), scores / n),
        "by heads": (4 * own * (n - 1) / n, scores / n),
        "ring": (2 * own * (n - 1), scores / (2 * n) ** 2),
    }


def explored(layout: str, ranks: int, tokens: int) -> Figure:
    """The explorer's picture: the mask of one layout, and what each method would send and hold.

    A rank holds two chunks of equal length: of an odd number of tokens it leaves one out.
    """
    whole = ranks * (tokens - tokens % 2)
    figure, axes = plt.subplot_mosaic(
        [["mask", "sent"], ["mask", "scores"]],
        figsize=(plots.WIDTH, 4.2),
        gridspec_kw={"width_ratios": [1, 1.1]},
    )
    _mask(axes["mask"], ranks, LAYOUTS[layout])
    axes["mask"].set_ylabel("queries: chunk")
    work = [pairs_of(rank, ranks, LAYOUTS[layout]) for rank in range(ranks)]
    busy = sum(work) / (ranks * max(work))
    axes["mask"].set_title(f"{layout.capitalize()}: ranks compute\n{busy:.0%} of the time")
    sent, scores = zip(*costs(whole, 32, 128, ranks).values(), strict=True)
    _bars(axes["sent"], sent, ranks, plots.COLORS["communication"])
    axes["sent"].set_title(f"{ranks} x {whole // ranks:,} tokens:\neach rank sends, in forward")
    _bars(axes["scores"], scores, ranks, plots.COLORS["activations"])
    axes["scores"].set_title("and the scores that it holds at once")
    return figure


def _bars(ax: Axes, values: tuple[float, ...], ranks: int, color: str) -> None:
    """A bar for each method, with its bytes; 32 heads do not divide by every number of ranks."""
    shown = [
        0 if method == "by heads" and 32 % ranks else value
        for method, value in zip(METHODS, values)
    ]
    ax.barh(METHODS, shown, 0.6, color=color)
    for place, (bar, value) in enumerate(zip(shown, values, strict=True)):
        words = plots.human_bytes(value) if bar == value else f"32 heads do not divide by {ranks}"
        ax.text(bar, place, f" {words}", va="center", fontsize=9)
    ax.set_xlim(0, 1.5 * max(*shown, 1))
    ax.set_xticks([])
    ax.invert_yaxis()
