"""Collectives: which rank holds which block before, after, and on the way."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_utils.plots.kit import arrow, canvas
from course_utils.plots.style import COLORS, RANK_COLORS, WIDTH


def collective(
    name: str,
    before: Sequence[Sequence[str]] | None = None,
    after: Sequence[Sequence[str]] | None = None,
    ranks: int = 4,
) -> Figure:
    """Draws what a collective does: what each rank holds before and after.

    `before` and `after` hold a row of blocks per rank. A block is written "A0": the letter says
    whose data it is (A belongs to rank 0, B to rank 1), the digit which piece. "A0+B0" is a sum and
    has the colours of all its parts, "" is an empty place, "?" a place whose content is undefined.
    Without them the picture is the operation's usual one, for `ranks` ranks.
    """
    if before is None or after is None:
        before, after = _BLOCKS[name](ranks)
    columns = [max(len(row) for row in rows) for rows in (before, after)]
    size = min(1.2, 6.4 / sum(columns))  # of a block, so that the widest picture fits
    gap = 1.75
    left = 0.95
    right = left + size * columns[0] + gap
    height = 0.525 * len(before)
    figure, ax = canvas(WIDTH, 0.8 * (height + 0.45))
    for x, title, rows in ((left, "before", before), (right, "after", after)):
        ax.text(x, height + 0.06, title, va="bottom", fontsize=10)
        for rank, row in enumerate(rows):
            y = height - (rank + 1) * 0.525 + 0.08
            for i, block in enumerate(row):
                _block(ax, x + i * size, y, size - 0.05, 0.44, block)
    for rank in range(len(before)):
        ax.text(0, height - (rank + 0.5) * 0.525, f"rank {rank}", va="center", fontsize=10)
    arrow(ax, (right - gap + 0.1, height / 2), (right - 0.15, height / 2))
    middle = right - gap / 2 - 0.02
    ax.text(middle, height / 2 + 0.1, name, ha="center", va="bottom", weight="bold", fontsize=10)
    return figure


def ring_steps(ranks: int = 4) -> Figure:
    """Draws an all-reduce on a ring of a few ranks, step by step: what each holds of each piece.

    A row of panels for the n - 1 steps in which pieces are added up, beginning with what the ranks
    hand in, and a row for the n - 1 steps in which the sums go round. What has just arrived has a
    thick edge.
    """
    pieces = [[frozenset([rank]) for _ in range(ranks)] for rank in range(ranks)]
    panels = [(pieces, set())]
    for step in range(2 * (ranks - 1)):
        arrived = {((r + 1) % ranks, _sent(r, step, ranks)) for r in range(ranks)}
        pieces = [
            [
                pieces[r][i] | pieces[r - 1][i] if (r, i) in arrived else pieces[r][i]
                for i in range(ranks)
            ]
            for r in range(ranks)
        ]
        panels.append((pieces, arrived))
    figure, axes = plt.subplots(
        2, ranks, figsize=(WIDTH, 0.75 * ranks + 1.1), subplot_kw={"xticks": [], "yticks": []}
    )
    axes[1, 0].axis("off")
    places = [*axes[0], *axes[1, 1:]]
    for step, (ax, (held, arrived)) in enumerate(zip(places, panels, strict=True)):
        _ring_panel(ax, held, arrived, name="" if step else "rank ")
        ax.set_title(f"step {step}" if step else "handed in", fontsize=10)
    axes[1, 0].text(
        0.5, 0.5, "above: adding up\n\nright:\nthe sums go round", ha="center", va="center"
    )
    return figure


def _sent(rank: int, step: int, ranks: int) -> int:
    """The piece that a rank sends to its right neighbour in a step of the ring, counted from 0."""
    return (rank - step) % ranks


def _ring_panel(
    ax: Axes, held: list[list[frozenset[int]]], arrived: set[tuple[int, int]], name: str
) -> None:
    ranks = len(held)
    ax.set_xlim(-0.75, ranks)
    ax.set_ylim(ranks, -0.1)
    ax.axis("off")
    for rank, row in enumerate(held):
        ax.text(-0.15, rank + 0.45, f"{name}{rank}", ha="right", va="center", fontsize=9)
        for piece, parts in enumerate(row):
            stripe = 0.9 / len(parts)
            new = (rank, piece) in arrived
            for i, part in enumerate(sorted(parts)):
                corner = (piece + i * stripe, rank)
                ax.add_patch(Rectangle(corner, stripe, 0.9, facecolor=RANK_COLORS[part], lw=0))
                if new or not arrived:
                    look = {"ha": "center", "va": "center", "fontsize": 7}
                    ax.text(piece + (i + 0.5) * stripe, rank + 0.45, str(part), **look)
            edge = {"edgecolor": COLORS["ink"], "linewidth": 2.4 if new else 0.6}
            ax.add_patch(Rectangle((piece, rank), 0.9, 0.9, fill=False, zorder=2 + new, **edge))


def _block(ax: Axes, x: float, y: float, width: float, height: float, block: str) -> None:
    parts = block.split("+") if block not in ("", "?") else []
    for i, part in enumerate(parts):
        color = RANK_COLORS[(ord(part[0]) - ord("A")) % len(RANK_COLORS)]
        stripe = width / len(parts)
        ax.add_patch(Rectangle((x + i * stripe, y), stripe, height, facecolor=color, linewidth=0))
    edge = {"edgecolor": COLORS["ink"] if parts else "#BBBBBB", "linewidth": 0.8}
    dashes = {} if parts else {"linestyle": (0, (3, 2))}
    ax.add_patch(Rectangle((x, y), width, height, fill=False, **edge, **dashes))
    text = block if len(block) <= 7 else "Σ" + parts[0][1:]
    size = 9 if len(text) <= 5 else 8
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def _letter(rank: int) -> str:
    return chr(ord("A") + rank)


def _pieces(rank: int, n: int) -> list[str]:
    return [f"{_letter(rank)}{i}" for i in range(n)]


def _total(piece: int | str, n: int) -> str:
    return "+".join(f"{_letter(rank)}{piece}" for rank in range(n))


def _only(rank: int, row: list[str], n: int, empty: str = "") -> list[list[str]]:
    return [row if r == rank else [empty] * len(row) for r in range(n)]


_BLOCKS = {
    "broadcast": lambda n: (_only(0, ["A"], n), [["A"] for _ in range(n)]),
    "scatter": lambda n: (
        _only(0, _pieces(0, n), n),
        [[f"A{r}"] for r in range(n)],
    ),
    "gather": lambda n: (
        [[_letter(r)] for r in range(n)],
        _only(0, [_letter(r) for r in range(n)], n),
    ),
    "all_gather": lambda n: (
        [[_letter(r)] for r in range(n)],
        [[_letter(r) for r in range(n)] for _ in range(n)],
    ),
    "reduce": lambda n: (
        [[_letter(r)] for r in range(n)],
        _only(0, [_total("", n)], n, empty="?"),
    ),
    "all_reduce": lambda n: (
        [[_letter(r)] for r in range(n)],
        [[_total("", n)] for _ in range(n)],
    ),
    "reduce_scatter": lambda n: (
        [_pieces(r, n) for r in range(n)],
        [[_total(r, n)] for r in range(n)],
    ),
    "all_to_all": lambda n: (
        [_pieces(r, n) for r in range(n)],
        [[f"{_letter(s)}{r}" for s in range(n)] for r in range(n)],
    ),
}
