"""The pictures of chapter 5: an assembly line with its shelves, schedules and what they cost."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_utils import plots
from course_utils.lesson.schedules import Schedule, Simulation, simulate


def assembly_line() -> Figure:
    """Four buildings with trucks between them, and the shelf of each."""
    figure, ax = plots.canvas(height=2.9)
    road, back = plots.COLORS["forward"], plots.COLORS["backward"]
    for rank, x in enumerate((0.1, 2.75, 5.4, 8.05)):
        plots.building(ax, x, 1.55, width=1.6, label=f"stage {rank}", color=plots.RANK_COLORS[rank])
        plots.pile(ax, x + 0.42, 0.55, [plots.COLORS["activations"]] * (4 - rank))
        ax.plot([x + 0.3, x + 1.3], [0.53] * 2, color=plots.COLORS["ink"], linewidth=1.8)
        if rank < 3:
            plots.arrow(ax, (x + 1.7, 2.2), (x + 2.55, 2.2), color=road)
            plots.truck(ax, x + 1.68, 2.28, label=f"{3 - rank}", color=road)
            plots.arrow(ax, (x + 2.55, 1.7), (x + 1.7, 1.7), color=back)
    words = {"ha": "center", "va": "top", "fontsize": 9}
    ax.text(2.22, 1.46, "change notes\ngo back", **words)
    ax.text(2.22, 3.3, "boxes go\nto the right", **words)
    ax.text(5, 0.35, "shelves: the parts of boxes whose change notes have not come yet", **words)
    ax.set_title("All buildings work at once; the first one has the fullest shelf")
    return figure


def shelves(results: Mapping[str, Simulation]) -> Figure:
    """Simulated schedules of F and B, beside each other: what each rank does and, below, how many
    micro-batches (in a chunk each) it has in flight meanwhile, with the most on the right."""
    ranks = max(len(result.schedule) for result in results.values())
    size = (plots.WIDTH, 1.5 + 0.6 * ranks)
    figure, axes = plt.subplots(2, len(results), figsize=size, sharex="col", squeeze=False)
    figure.get_layout_engine().set(wspace=0.06)
    most = max(max(result.peak_in_flight) for result in results.values())
    for (lanes, below), (name, result) in zip(axes.T, results.items()):
        shown = plots.gantt_lanes(lanes, result)
        units = lanes.get_xlim()[1]
        for rank, row in enumerate(result.schedule):
            spans = zip(row, result.starts[rank], result.ends[rank])
            times = [start if op.kind == "F" else end for op, start, end in spans]
            counts = accumulate(1 if op.kind == "F" else -1 for op in row)
            look = {"step": "post", "color": plots.COLORS["activations"], "linewidth": 0}
            times = [time / result.makespan * units for time in times]
            tops = [rank + 0.43 - 0.86 * count / most for count in counts]
            below.fill_between(times, rank + 0.43, tops, **look)
            number = {"transform": below.get_yaxis_transform(), "va": "center", "weight": "bold"}
            below.text(1.01, rank, result.peak_in_flight[rank], **number)
        below.set_yticks(lanes.get_yticks(), lanes.get_yticklabels())
        title = f"in flight: {max(result.peak_in_flight)} at most"
        below.set(ylim=lanes.get_ylim(), xlabel="time (forward passes)", title=title)
        lanes.set(xlabel="", title=f"{name}: {units:g} units of time")
    plots.legend(figure, shown)
    return figure


def compared(
    plans: Mapping[str, Schedule],
    chosen: str,
    *,
    backward_to_forward: float = 2.0,
    last_stage: float = 1.0,
    hop_latency: float = 0.0,
) -> Figure:
    """One schedule, simulated with these times: its lanes, its idle share beside that of the others,
    and its shelves in micro-batches of a whole stage."""
    stages = len(plans[chosen])
    forward = [1.0] * (stages - 1) + [last_stage]
    backward = [backward_to_forward * time for time in forward]
    results = {
        name: simulate(plan, forward, backward, latency=hop_latency) for name, plan in plans.items()
    }
    figure, axes = plt.subplot_mosaic(
        [["time", "time"], ["idle", "memory"]],
        figsize=(plots.WIDTH, 4.3 + 0.26 * stages),
        height_ratios=[0.9 + 0.26 * stages, 2.2],
    )
    result = results[chosen]
    plots.legend(figure, plots.gantt_lanes(axes["time"], result))
    step = result.step * axes["time"].get_xlim()[1] / result.makespan  # in the unit of the axis
    title = f"a step takes {step:.1f} forward passes, idle {result.idle_share:.1%}"
    axes["time"].set_title(f"{chosen}: {title}")
    _idle_shares(axes["idle"], {name: 100 * r.idle_share for name, r in results.items()}, chosen)
    pieces = 1 + max(op.chunk for op in plans[chosen][0])
    _shelf_bars(axes["memory"], [n / pieces for n in result.peak_in_flight])
    return figure


def _idle_shares(ax: Axes, percent: Mapping[str, float], chosen: str) -> None:
    bars = ax.barh(list(percent), list(percent.values()), **plots.look_of("waiting"))
    for bar, name, number in zip(bars, percent, ax.bar_label(bars, fmt="%.1f", padding=3)):
        number.set(fontsize=9, weight="bold" if name == chosen else "normal")
        if name == chosen:
            bar.set(edgecolor=plots.COLORS["ink"], linewidth=2)
    ax.set(xlabel="idle share (%)", xlim=(0, max(50, 1.2 * max(percent.values()))))
    ax.invert_yaxis()


def _shelf_bars(ax: Axes, micro_batches: Sequence[float]) -> None:
    ranks = range(len(micro_batches))
    bars = ax.bar(ranks, micro_batches, color=plots.COLORS["activations"])
    ax.bar_label(bars, fmt="%.3g", fontsize=9)
    ax.margins(y=0.12)
    ax.set(xlabel="rank", ylabel="micro-batches stored", xticks=ranks)


def chunks_and_hops(counts: Sequence[int], percent: Mapping[float, Sequence[float]]) -> Figure:
    """The idle share over the number of chunks, a curve for each hop latency."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.2))
    for (latency, values), look in zip(percent.items(), plots.LINES):
        ax.plot(counts, values, marker="o", label=f"hop latency {latency:g}", **look)
    ax.set(xlabel="chunks of a rank", ylabel="idle share (%)", xticks=counts, ylim=(0, None))
    ax.set_title("Free messages: more chunks. Slow ones: fewer (simulated)")
    ax.legend()
    return figure
