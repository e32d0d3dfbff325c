"""The pictures of chapter 3: factories on a ring road, and what a bucket's size costs."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from course_utils import plots


def ring_road() -> Figure:
    """Four equal factories whose notes go round."""
    figure, ax = plots.canvas(height=2.7)
    road = plots.COLORS["communication"]
    for rank, x in enumerate((0.4, 2.95, 5.5, 8.05)):
        color = plots.RANK_COLORS[rank]
        plots.building(ax, x, 1.85, width=1.5, label=f"factory {rank}", color=color)
        plots.blueprint(ax, x - 0.05, 1.05, label="blueprint")
        plots.pile(ax, x + 0.98, 1.05, [color] * 6)
        if rank < 3:
            plots.arrow(ax, (x + 1.55, 2.05), (x + 2.5, 2.05), color=road)
            plots.truck(ax, x + 1.56, 2.1, label="notes")
    back = [9.6, 9.92, 9.92, 0.1, 0.1], [2.05, 2.05, 0.25, 0.25, 2.05]
    ax.plot(*back, color=road, linewidth=1.8)
    plots.arrow(ax, (0.1, 2.05), (0.38, 2.05), color=road)
    ax.text(5, 0.3, "and from the last back to the first", ha="center", va="bottom", fontsize=9)
    ax.set_title("Every evening the notes go round the ring")
    return figure


def bucket_sizes(sizes: list[float], exposed: dict[int, list[float]]) -> Figure:
    """The exposed time (ms) against the buckets' sizes (MB), a line for each start-up cost (µs)."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.2))
    for (startup_us, times), look in zip(exposed.items(), plots.LINES):
        ax.loglog(sizes, times, label=f"start-up cost {startup_us} µs", **look)
    ax.set(xlabel="bucket size (MB)", ylabel="exposed (ms)")
    ax.set_title("Neither tiny nor huge (simulated)")
    ax.set_xticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
    ax.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    ax.minorticks_off()
    ax.legend()
    return figure
