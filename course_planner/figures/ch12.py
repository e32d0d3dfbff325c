"""The figures of chapter 12: the site, and the plan of the explorer."""

import textwrap

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import course_planner as estimate
from course_planner import published
from course_planner.figures import plans
from course_planner.memory import AVOIDED
from course_planner.printing import nothing_fits
from course_utils import plots

TOKENS = 4_194_304  # of a batch of the explorer
CONTEXTS = {"8k": 8192, "32k": 32_768, "128k": 131_072}


def factory() -> Figure:
    """Two copies of a line: three sites each, with two buildings on each site, and trucks."""
    figure, ax = plots.canvas(height=3.6)
    ax.set_title("Trucks are fast inside a site, and slow between sites")
    for line, y in enumerate((2.9, 0.75)):
        for stage in range(3):
            x = 1.4 + 2.95 * stage
            ground = {"facecolor": "#F2F2F2", "edgecolor": "#8C8C8C", "linewidth": 0.8}
            ax.add_patch(Rectangle((x - 0.1, y - 0.25), 1.9, 1.3, **ground))
            for half in range(2):
                left, color = x + 0.92 * half, plots.RANK_COLORS[stage]
                plots.building(ax, left, y, 0.78, 0.9, f"{2 * stage + half}", color=color)
            ends = (x + 0.4, y - 0.12), (x + 1.3, y - 0.12)
            plots.arrow(ax, *ends, color=plots.COLORS["communication"])
            if stage < 2:
                plots.truck(ax, x + 1.86, y + 0.1)
        ax.text(0.1, y + 0.4, f"copy {line}", fontsize=11, va="center")
    ax.text(2.25, 4.02, "a site with two buildings", fontsize=9, ha="center")
    ax.text(2.25, 0.2, "road inside a site", fontsize=9, ha="center")
    ax.text(6.67, 0.2, "road between sites", fontsize=9, ha="center")
    for stage in range(3):
        x = 2.25 + 2.95 * stage
        plots.arrow(ax, (x, 2.55), (x, 1.95), color=plots.COLORS["communication"])
        plots.arrow(ax, (x + 0.12, 1.95), (x + 0.12, 2.55), color=plots.COLORS["communication"])
    ax.text(2.6, 2.25, "change notes, once a step", fontsize=9, va="center")
    return figure


def your_plan(model: str, gpus: str, context: str, network: str) -> Figure:
    """For the explorer: the quickest plan of a Llama 3 on H100, its memory and its time."""
    seq, bandwidth = CONTEXTS[context], float(network.split()[0]) / 8 * 1e9
    slow = {"inter_bandwidth": bandwidth}
    hardware = estimate.Hardware(**{**vars(published.H100), **slow})
    batch = TOKENS // seq
    sizes = (published.LLAMA[model], int(gpus), batch, seq, hardware)
    found, _ = estimate.search(*sizes, keep=1)
    if not found:
        return _nothing(nothing_fits(*sizes, "H100"))
    (best,) = found
    return plans.fit_and_time(
        {"": best.memory | dict.fromkeys(AVOIDED, 0)},
        {"": best.time.parts},
        hardware.hbm_bytes,
        f"seconds of a step of {batch} sequences; most of it: {best.limit}",
        estimate.described(best.layout),
    )


def _nothing(why: str) -> Figure:
    figure, ax = plots.canvas(height=2.0)
    lines = [textwrap.fill(line, 90, subsequent_indent="  ") for line in why.splitlines()]
    ax.text(0.2, 1.2, "\n".join(lines), fontsize=10, va="center")
    return figure
