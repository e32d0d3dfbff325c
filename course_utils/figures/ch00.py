"""The pictures of chapter 0: a round of trucks, and two ways to form a sum."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from course_utils import plots


def round_of_trucks() -> Figure:
    """Three buildings that hand their numbers to a round of trucks and get the sum."""
    figure, ax = plots.canvas(height=2.3)
    road = plots.COLORS["communication"]
    for rank, x in enumerate([0.5, 4.1, 7.7]):
        plots.building(
            ax, x, 1.1, width=1.8, label=f"building {rank}", color=plots.RANK_COLORS[rank]
        )
        plots.arrow(ax, (x + 0.5, 1.05), (x + 0.5, 0.5), road)
        plots.arrow(ax, (x + 1.3, 0.5), (x + 1.3, 1.05), road)
        ax.text(x + 0.4, 0.75, f"{10 * (rank + 1)}", ha="right", va="center")
        ax.text(x + 1.4, 0.75, "60", ha="left", va="center", weight="bold")
    ax.plot([0.5, 9.5], [0.05, 0.05], color=road, linewidth=3)
    for x in (2.75, 6.35):
        plots.truck(ax, x, 0.1)
    ax.set_title("All-reduce: each building brings a number, and each gets the sum")
    return figure


def star_and_ring(ranks: int) -> Figure:
    """The messages of a sum over `ranks`, and how many tensors the busiest rank sends and gets."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.8))
    plots.star(left, ranks)
    plots.ring(right, ranks)
    left.set_title(f"star: rank 0 moves {2 * (ranks - 1)} tensors")
    right.set_title(f"ring: every rank moves {4 * (ranks - 1) / ranks:.2f} tensors")
    return figure
