"""The pictures of chapter 5: an assembly line, a loop that is none, schedules and their prices."""

from collections.abc import Mapping, Sequence
from itertools import count

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from course_utils import plots
from course_utils.lesson.pace import paced
from course_utils.lesson.schedules import Simulation
from course_utils.trace import Record, Trace


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
    ax.text(2.22, 1.46, "complaints go\nto the left", **words)
    ax.text(2.22, 3.3, "boxes go\nto the right", **words)
    ax.text(5, 0.35, "the shelves hold notes on open boxes", **words)
    ax.set_title("Four buildings, and a box on every truck")
    return figure


def passes(
    model: nn.Module, devices: Mapping[nn.Module, tuple[int, int]], x: Tensor
) -> list[Record]:
    """Runs `model` on x, each pass of a stage in five slots, and returns a Record for each device:
    which stage worked on which chunk, and when. `devices` says of each stage (its device, its place
    among the device's stages)."""
    ran, chunks = [], {stage: count() for stage in devices}

    def begin(stage: nn.Module, inputs: tuple) -> None:
        device, place = devices[stage]
        name = f"F{next(chunks[stage])}" + (f".{place}" if place else "")
        ran.append((device, paced(trace, name, 5)))
        ran[-1][1].__enter__()

    def end(stage: nn.Module, inputs: tuple, output: Tensor) -> None:
        ran[-1][1].__exit__(None, None, None)

    hooks = [stage.register_forward_pre_hook(begin) for stage in devices]
    hooks += [stage.register_forward_hook(end) for stage in devices]
    with Trace() as trace:
        model(x)
    for hook in hooks:
        hook.remove()
    of_devices = {device: Record(device, []) for device, _ in sorted(devices.values())}
    for (device, _), span in zip(ran, trace.record().spans, strict=True):
        of_devices[device].spans.append(span)
    return list(of_devices.values())


def loop(records: Sequence[Record]) -> Figure:
    """The passes of chunks in a loop, on two devices."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 1.9))
    shown = plots.gantt_lanes(ax, records)
    ax.set_yticks([0, 1], ["device 0", "device 1"])
    ax.set_xlabel("time (passes of a chunk through two stages)")
    ax.set_title("Chunks in a loop (emulated: every pass keeps its slot)")
    plots.legend(figure, dict(zip(("stages 1 and 2", "stage 3", "idle"), shown.values())))
    return figure


def compared(results: Mapping[str, Simulation], chosen: str, chunks: int) -> Figure:
    """One simulated schedule: its lanes, its idle share beside that of the others, and its shelves
    in micro-batches of a whole stage. Interleaved, each rank holds `chunks` pieces."""
    figure, axes = plt.subplot_mosaic(
        [["time", "time"], ["idle", "memory"]],
        figsize=(plots.WIDTH, 4.3 + 0.26 * len(results[chosen].schedule)),
        height_ratios=[0.9 + 0.26 * len(results[chosen].schedule), 2.2],
    )
    result = results[chosen]
    plots.legend(figure, plots.gantt_lanes(axes["time"], result))
    step = result.step * axes["time"].get_xlim()[1] / result.makespan  # in the unit of the axis
    title = f"a step takes {step:.1f} forward passes, idle {result.idle_share:.1%}"
    axes["time"].set_title(f"{chosen}: {title}")
    _idle_shares(axes["idle"], {name: 100 * r.idle_share for name, r in results.items()}, chosen)
    pieces = chunks if chosen == "interleaved" else 1
    _shelves(axes["memory"], [n / pieces for n in result.peak_in_flight])
    return figure


def _idle_shares(ax: Axes, percent: Mapping[str, float], chosen: str) -> None:
    bars = ax.barh(list(percent), list(percent.values()), **plots.look_of("waiting"))
    for bar, name, number in zip(bars, percent, ax.bar_label(bars, fmt="%.1f", padding=3)):
        number.set(fontsize=9, weight="bold" if name == chosen else "normal")
        if name == chosen:
            bar.set(edgecolor=plots.COLORS["ink"], linewidth=2)
    ax.set(xlabel="idle share (%)", xlim=(0, 100))
    ax.invert_yaxis()


def _shelves(ax: Axes, micro_batches: Sequence[float]) -> None:
    ranks = range(len(micro_batches))
    bars = ax.bar(ranks, micro_batches, color=plots.COLORS["activations"])
    ax.bar_label(bars, fmt="%.3g", fontsize=9)
    ax.margins(y=0.12)
    ax.set(xlabel="rank", ylabel="micro-batches stored", xticks=ranks)


def prices(sizes: Sequence[int], idle: Mapping[str, list], stored: Mapping[str, list]) -> Figure:
    """For each schedule, over the number of micro-batches: its idle share in percent, and the
    micro-batches on its fullest rank. Where curves lie on each other, the larger marks are below."""
    figure, axes = plt.subplots(1, 2, figsize=(plots.WIDTH, 3.4))
    marks = [{"marker": m, "markersize": size} for m, size in zip("so^Dv", (10, 7, 8, 5, 6))]
    units = {"Idle share": "per cent", "Stored on the fullest rank": "micro-batches"}
    for ax, (title, unit), curves in zip(axes, units.items(), (idle, stored)):
        for (name, values), look, mark in zip(curves.items(), plots.LINES, marks):
            ax.plot(sizes, values, label=name, clip_on=False, **look, **mark)
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, sizes)
        ax.set(xlabel="micro-batches of a step", ylabel=unit, title=title, ylim=(0, None))
    axes[0].legend()
    return figure


def ledgers(of_ranks: Mapping[str, Mapping[str, int]]) -> Figure:
    """The memory of the image classifier in one process and in the stages of a pipeline."""
    return plots.memory(list(of_ranks.values()), list(of_ranks), "Memory of the classifier")


def chunks_and_hops(counts: Sequence[int], percent: Mapping[float, Sequence[float]]) -> Figure:
    """The idle share over the number of chunks, a curve for each hop latency."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.2))
    for (latency, values), look in zip(percent.items(), plots.LINES):
        ax.plot(counts, values, marker="o", label=f"hop latency {latency:g}", **look)
    ax.set(xlabel="chunks of a rank", ylabel="idle share (%)", xticks=counts, ylim=(0, None))
    ax.set_title("Free messages: more chunks. Slow ones: fewer (simulated)")
    ax.legend()
    return figure
