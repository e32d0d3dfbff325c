"""Collectives: which rank holds which block before, after, and on the way round a ring."""

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_utils.plots.kit import arrow, canvas
from course_utils.plots.style import COLORS, RANK_COLORS, WIDTH


def before_and_after(names: Sequence[str], ranks: int = 4) -> Figure:
    """Draws what each rank holds before and after these collectives, in two columns.

    A letter says whose data a block is (A belongs to rank 0, B to rank 1), a digit which piece of it.
    A sum has the colours of all its parts. "?" is a place whose content is undefined.
    """
    rows = math.ceil(len(names) / 2)
    size = (WIDTH, rows * (0.24 * ranks + 0.4))
    blank = {"xticks": [], "yticks": [], "frame_on": False}
    figure, axes = plt.subplots(rows, 2, figsize=size, squeeze=False, subplot_kw=blank)
    for ax, name in zip(axes.T.flat, names):
        _collective(ax, name, ranks)
    return figure


def _collective(ax: Axes, name: str, ranks: int) -> None:
    before, after = _BLOCKS[name](ranks)
    wide = len(before[0])
    for left, rows in ((0, before), (wide + 1.2, after)):
        for rank, row in enumerate(rows):
            for i, block in enumerate(row):
                parts = [ord(part[0]) - ord("A") for part in block.split("+") if part[:1].isalpha()]
                text = block if len(parts) < 2 else "Σ" + block[1 : block.index("+")]
                _striped(ax, (left + i, rank), 0.92, 0.86, parts, text)
    for rank in range(ranks):
        ax.text(-0.15, rank + 0.43, f"rank {rank}", ha="right", va="center", fontsize=8)
    arrow(ax, (wide + 0.1, ranks / 2), (wide + 1.05, ranks / 2))
    ax.set_xlim(-1.5, 2 * ranks + 1.2)
    ax.set_ylim(ranks, -0.1)
    ax.set_title(name)


def ring_step(step: int, ranks: int = 4) -> Figure:
    """Draws what each rank of a ring holds before a step of an all-reduce, and what it sends in it.

    `step` counts from 1. In the first n - 1 steps pieces are added up, in the next n - 1 the sums go
    round. The one after them shows what all hold in the end.
    """
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    for earlier in range(1, step):
        for rank, piece in _sent(earlier, ranks):
            held[(rank + 1) % ranks][piece] |= held[rank][piece]
    figure, ax = canvas(height=0.42 * ranks + 0.45)
    pitch, top = 8.4 / ranks, 0.525 * ranks - 0.4
    wide = 0.6 * pitch
    for rank, pieces in enumerate(held):
        x = 1.5 + rank * pitch
        ax.text(x + wide / 2, top + 0.5, f"rank {rank}", ha="center", va="bottom", fontsize=10)
        for piece, parts in enumerate(pieces):
            text = "Σ" if len(parts) == ranks else "+".join(map(str, sorted(parts)))
            corner = (x, top - 0.525 * piece)
            _striped(ax, corner, wide, 0.43, sorted(parts), text, 2 if text == "Σ" else 0.8)
    for piece in range(ranks):
        ax.text(0, top + 0.21 - 0.525 * piece, f"piece {piece}", va="center", fontsize=9)
    last = 2 * (ranks - 1)
    for rank, piece in _sent(step, ranks) if step <= last else []:
        y, right = top + 0.21 - 0.525 * piece, 1.5 + rank * pitch + wide
        ends = [(right, right + pitch - wide)]
        if rank == ranks - 1:  # out on the right, and in again on the left
            ends = [(right, right + 0.4), (1.05, 1.5)]
        for start, end in ends:
            arrow(ax, (start, y), (end, y), COLORS["communication"])
    doing = "pieces are added up" if step < ranks else "the sums go round"
    ended = f"After {last} steps every rank holds every sum"
    ax.set_title(f"Step {step} of {last}: {doing}" if step <= last else ended)
    return figure


def _sent(step: int, ranks: int) -> list[tuple[int, int]]:
    """For each rank, the piece that it sends to its right neighbour in a step, counted from 1."""
    return [(rank, (rank - step + 1) % ranks) for rank in range(ranks)]


def _striped(
    ax: Axes,
    corner: tuple[float, float],
    width: float,
    height: float,
    parts: Sequence[int],
    text: str,
    edge: float = 0.8,
) -> None:
    """A block with a stripe in the colour of each rank whose data is in it."""
    (x, y), stripe = corner, width / max(1, len(parts))
    for i, rank in enumerate(parts):
        color = RANK_COLORS[rank % len(RANK_COLORS)]
        ax.add_patch(Rectangle((x + i * stripe, y), stripe, height, facecolor=color, linewidth=0))
    line = {"edgecolor": COLORS["ink"]} if parts else {"edgecolor": "#BBBBBB", "linestyle": "--"}
    ax.add_patch(Rectangle(corner, width, height, fill=False, linewidth=edge, **line))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8)


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
    "scatter": lambda n: (_only(0, _pieces(0, n), n), [[f"A{r}"] for r in range(n)]),
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
