"""The pictures of chapter 0: workshops in a row, and two ways to form a sum."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from course_utils import plots


def workshops() -> Figure:
    """Three workshops in a row, and the trucks that carry parts from one to the next."""
    figure, ax = plots.canvas(height=1.7)
    for rank, x in enumerate([0.2, 4.2, 8.2]):
        plots.building(ax, x, 0.3, label=f"workshop {rank}", color=plots.RANK_COLORS[rank])
    for x in (2.55, 6.55):
        plots.truck(ax, x, 0.3)
        road = plots.COLORS["communication"]
        plots.arrow(ax, (x - 0.5, 1.15), (x + 1.4, 1.15), road, "parts")
    return figure


def star_and_ring(ranks: int) -> Figure:
    """The messages of a sum over `ranks`, and how many tensors the busiest rank sends and gets."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.8))
    plots.star(left, ranks)
    plots.ring(right, ranks)
    left.set_title(f"star: rank 0 moves {2 * (ranks - 1)} tensors")
    right.set_title(f"ring: every rank moves {4 * (ranks - 1) / ranks:.2f} tensors")
    return figure
