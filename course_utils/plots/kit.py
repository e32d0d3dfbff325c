"""The drawing kit: buildings, trucks, arrows, on the axes that `canvas` gives."""

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle

from course_utils.plots.style import COLORS, RANK_COLORS, WIDTH


def canvas(width: float = WIDTH, height: float = 3.0) -> tuple[Figure, Axes]:
    """Returns an empty figure of `width` x `height` inches. Its x runs from 0 to 10, its y from 0
    to 10 * height / width: one unit is as long as it is high."""
    figure, ax = plt.subplots(figsize=(width, height))
    ax.set_xlim(0, 10)
    ax.set_ylim(0, 10 * height / width)
    ax.set_aspect("equal")
    ax.axis("off")
    return figure, ax


def building(
    ax: Axes,
    x: float,
    y: float,
    width: float = 1.6,
    height: float = 1.2,
    label: str = "",
    color: str = RANK_COLORS[0],
) -> None:
    """A factory building with its lower left corner at (x, y): a hall with a saw-tooth roof."""
    tooth, roof = width / 3, min(0.3, 0.3 * height)
    outline = [(x, y), (x, y + height - roof)]
    for i in range(3):
        outline += [(x + i * tooth, y + height), (x + (i + 1) * tooth, y + height - roof)]
    outline += [(x + width, y)]
    ax.add_patch(Polygon(outline, facecolor=color, edgecolor=COLORS["ink"], linewidth=1.2))
    ax.text(x + width / 2, y + (height - roof) / 2, label, ha="center", va="center", fontsize=10)


def truck(
    ax: Axes, x: float, y: float, label: str = "", color: str = COLORS["communication"]
) -> None:
    """A truck that drives to the right, 0.9 long, its wheels standing on y."""
    ink = {"edgecolor": COLORS["ink"], "linewidth": 1.0}
    ax.add_patch(Rectangle((x, y + 0.12), 0.6, 0.4, facecolor=color, **ink))
    cab = [(0.62, 0.12), (0.62, 0.42), (0.78, 0.42), (0.9, 0.28), (0.9, 0.12)]
    ax.add_patch(Polygon([(x + a, y + b) for a, b in cab], facecolor="white", **ink))
    for wheel in (0.15, 0.75):
        ax.add_patch(Circle((x + wheel, y + 0.1), 0.1, facecolor=COLORS["ink"]))
    ax.text(x + 0.3, y + 0.32, label, ha="center", va="center", fontsize=9)


def pile(
    ax: Axes, x: float, y: float, boxes: Sequence[str], label: str = "", columns: int = 3
) -> None:
    """A pile of raw material: one box per colour in `boxes`, in rows from the ground."""
    for i, color in enumerate(boxes):
        corner = (x + 0.26 * (i % columns), y + 0.26 * (i // columns))
        ax.add_patch(
            Rectangle(corner, 0.24, 0.24, facecolor=color, edgecolor=COLORS["ink"], linewidth=0.8)
        )
    middle, top = x + 0.13 * columns, y + 0.26 * math.ceil(len(boxes) / columns)
    ax.text(middle, top + 0.06, label, ha="center", va="bottom", fontsize=9)


def blueprint(
    ax: Axes, x: float, y: float, label: str = "", part: tuple[float, float] = (0.0, 1.0)
) -> None:
    """A blueprint 0.9 wide. `part` of it, from and to, is drawn out; the rest is blank paper."""
    left, right = x + 0.9 * part[0], x + 0.9 * part[1]
    sheet = {"boxstyle": "round,pad=0.02", "facecolor": "white", "edgecolor": "#8C8C8C"}
    ax.add_patch(FancyBboxPatch((x, y), 0.9, 0.62, **sheet))
    ax.add_patch(Rectangle((left, y), right - left, 0.62, facecolor=COLORS["parameters"]))
    for i in range(1, 4):
        ax.plot([left, right], [y + 0.155 * i] * 2, color="white", linewidth=0.8)
    ax.text(x + 0.45, y - 0.08, label, ha="center", va="top", fontsize=9)


def arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str = COLORS["ink"],
    label: str = "",
    bend: float = 0.0,
) -> None:
    """An arrow with its label above the middle. `bend` curves it, to the left if positive."""
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=14,
            linewidth=1.8,
            color=color,
            shrinkA=0,
            shrinkB=0,
            connectionstyle=f"arc3,rad={-bend}",
        )
    )
    x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    ax.text(x, y + 0.1, label, ha="center", va="bottom", fontsize=9)


def star(ax: Axes, ranks: int) -> None:
    """Ranks around rank 0, and the messages of a sum that rank 0 collects and sends back."""
    places = _nodes(ax, [(0.0, 0.0), *_circle(ranks - 1)])
    for place in places[1:]:
        _between(ax, place, places[0], bend=0.12)
        _between(ax, places[0], place, bend=0.12)


def ring(ax: Axes, ranks: int) -> None:
    """Ranks in a circle, each sending to the next."""
    places = _nodes(ax, _circle(ranks))
    for i, place in enumerate(places):
        _between(ax, place, places[(i + 1) % ranks], bend=0.12)


def _circle(count: int) -> list[tuple[float, float]]:
    turns = [math.pi / 2 - 2 * math.pi * i / count for i in range(count)]
    return [(math.cos(turn), math.sin(turn)) for turn in turns]


def _nodes(ax: Axes, places: list[tuple[float, float]]) -> list[tuple[float, float]]:
    ax.set_xlim(-1.35, 1.35)
    ax.set_ylim(-1.35, 1.35)
    ax.set_aspect("equal")
    ax.axis("off")
    for rank, place in enumerate(places):
        color = RANK_COLORS[rank % len(RANK_COLORS)]
        ax.add_patch(
            Circle(place, 0.2, facecolor=color, edgecolor=COLORS["ink"], linewidth=1.2, zorder=3)
        )
        ax.text(*place, str(rank), ha="center", va="center", zorder=4)
    return places


def _between(ax: Axes, a: tuple[float, float], b: tuple[float, float], bend: float) -> None:
    length = math.dist(a, b)
    step = ((b[0] - a[0]) / length * 0.24, (b[1] - a[1]) / length * 0.24)
    arrow(
        ax,
        (a[0] + step[0], a[1] + step[1]),
        (b[0] - step[0], b[1] - step[1]),
        color=COLORS["communication"],
        bend=bend,
    )
