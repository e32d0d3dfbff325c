"""The pictures of chapter 3: equal buildings, all-reduces beside backward, and what a bucket's size costs."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from course_utils import plots


def ring_road() -> Figure:
    """Four equal buildings whose notes go round."""
    figure, ax = plots.canvas(height=2.7)
    road = plots.COLORS["communication"]
    for rank, x in enumerate((0.4, 2.95, 5.5, 8.05)):
        color = plots.RANK_COLORS[rank]
        plots.building(ax, x, 1.85, width=1.5, label=f"building {rank}", color=color)
        plots.blueprint(ax, x - 0.05, 1.05, label="blueprint")
        plots.pile(ax, x + 0.98, 1.05, [color] * 6)
        if rank < 3:
            plots.arrow(ax, (x + 1.55, 2.05), (x + 2.5, 2.05), color=road)
            plots.truck(ax, x + 1.56, 2.1, label="notes")
    back = [9.6, 9.92, 9.92, 0.1, 0.1], [2.05, 2.05, 0.25, 0.25, 2.05]
    ax.plot(*back, color=road, linewidth=1.8)
    plots.arrow(ax, (0.1, 2.05), (0.38, 2.05), color=road)
    ax.text(5, 0.3, "and from the last back to the first", ha="center", va="bottom", fontsize=9)
    ax.set_title("Every building has the whole blueprint; only change notes travel")
    return figure


def overlap(all_reduces: list[tuple[float, float]], backward_ms: float) -> Figure:
    """Backward, and beside it the start and end (ms) of the all-reduce of each bucket."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 2.6))
    count, ended = len(all_reduces), all_reduces[-1][1]
    bars = [(start, end - start) for start, end in all_reduces]
    look = {"facecolor": plots.COLORS["communication"], "edgecolor": "white"}
    ax.barh(1, backward_ms, color=plots.COLORS["backward"])
    ax.broken_barh(bars, (-0.4, 0.8), linewidth=min(1, 20 / count), **look)
    ax.axvspan(backward_ms, ended, zorder=0, **plots.look_of("waiting"))
    ax.set_yticks([1, 0], ["backward", f"all-reduce\n{count} x {bars[0][1]:.2f} ms"])
    ax.set_xlabel("time (ms), simulated")
    exposed = ended - backward_ms
    ax.set_title(f"Exposed communication: {exposed:.1f} ms, {exposed / ended:.0%} of the time")
    return figure


def bucket_sizes(sizes: list[float], exposed: dict[int, list[float]]) -> Figure:
    """The exposed time (ms) against the buckets' sizes (MB), a line for each number of ranks."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.2))
    for (ranks, times), look in zip(exposed.items(), plots.LINES):
        ax.loglog(sizes, times, label=f"{ranks} ranks", **look)
    ax.axvline(25 * 2**20 / 1e6, color=plots.COLORS["waiting"], linewidth=4, zorder=0)
    ax.text(27, 300, "DDP's default", rotation=90, va="top", fontsize=9)
    ax.set(xlabel="bucket size (MB)", ylabel="exposed (ms), simulated", ylim=(0.1, 400))
    ax.set_title("The more ranks, the larger the best bucket")
    ax.set_xticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
    ax.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    ax.minorticks_off()
    ax.legend()
    return figure
