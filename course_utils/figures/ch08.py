"""The pictures of chapter 8: pages and shards, a step's memory, the link and the work."""

from collections.abc import Callable

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_utils import plots
from course_utils.trace import Record, Span

STAGES = {0: "stage 0\n(chapter 3)", 1: "stage 1", 2: "stage 2", 3: "stage 3\n(FSDP)"}


def pages() -> Figure:
    """Four factories with a quarter of every page; of page 3, which is in use, with all of it."""
    figure, ax = plots.canvas(height=3.2)
    for page, y in enumerate((2.9, 2.0, 1.1, 0.2), start=1):
        ax.text(0.1, y + 0.3, f"page {page}", va="center", fontsize=10)
        for factory in range(4):
            quarter = (factory / 4, (factory + 1) / 4)
            plots.blueprint(ax, 1.1 + 1.25 * factory, y, part=quarter if page != 3 else (0, 1))
    for factory in range(4):
        x = 1.1 + 1.25 * factory
        ax.text(x + 0.45, 3.62, f"factory {factory}", ha="center", va="bottom", fontsize=9)
    frame = {"fill": False, "edgecolor": plots.COLORS["communication"], "linewidth": 2}
    ax.add_patch(Rectangle((0.95, 0.98), 4.95, 0.87, **frame))
    for y, words in [
        (2.75, "used, and thrown away again:\neach keeps its own quarter"),
        (1.42, "in use: everybody has all of it"),
        (0.5, "still to come"),
    ]:
        ax.text(6.2, y, words, va="center", fontsize=10)
    return figure


def stages(bytes_each: dict[str, int], shared_out: dict[int, list[str]], gigabytes) -> Figure:
    """What three ranks hold in each stage; at the right `gigabytes(stage, 64)`, the ledger of a
    model of 7.5 billion parameters. Heights are bytes per parameter."""
    figure, ax = plots.canvas(height=4.2)
    for rank in range(3):
        ax.text(2.5 + 1.75 * rank, 4.95, f"rank {rank}", ha="center", fontsize=10)
    ax.text(7.15, 4.95, "7.5 billion parameters,\neach of 64 ranks", fontsize=10, va="center")
    for stage, name in STAGES.items():
        top = 4.8 - 1.08 * stage
        ax.text(0.1, top - 0.4, name, va="center", weight="bold")
        _stage(ax, top, bytes_each, shared_out[stage])
        total = sum(gigabytes(stage, 64).values())
        ax.text(7.15, top - 0.4, f"{total:.1f} GB", va="center", weight="bold", fontsize=13)
    for i, kind in enumerate(bytes_each):
        plots.pile(ax, 1.75 + 1.75 * i, 0.1, [plots.COLORS[kind]], columns=1)
        ax.text(2.08 + 1.75 * i, 0.22, kind, va="center", fontsize=10)
    return figure


def _stage(ax: Axes, top: float, bytes_each: dict, shared: list[str], ranks: int = 3) -> None:
    """A row: what each rank holds of each kind."""
    for rank in range(ranks):
        left, y = 1.75 + 1.75 * rank, top
        for kind, each in bytes_each.items():
            y -= 0.055 * each + 0.03
            start, part = (rank / ranks, 1 / ranks) if kind in shared else (0, 1)
            box = {"height": 0.055 * each, "facecolor": plots.COLORS[kind]}
            ax.add_patch(Rectangle((left, y), 1.5, **box | {"facecolor": "#EFEFEF"}))
            ax.add_patch(Rectangle((left + 1.5 * start, y), 1.5 * part, **box))


def through_a_step(readings: dict[str, list[tuple[int, int, int]]], whole: int) -> Figure:
    """Parameters and gradients at every layer, for each wrapping; `whole` is the bytes of all
    parameters."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 4.0))
    for name, look in zip(("root only", "per block, kept", "per block"), plots.LINES[2::-1]):
        layers, *held = zip(*readings[name])
        together = [sum(pair) / 1024 for pair in zip(*held)]
        label = f"{name}: at most {max(together):.0f} KiB"
        ax.plot(layers, together, label=label, linewidth=2.2, **look)
    ax.axhline(2 * whole / 1024, color=plots.NEUTRALS[1], linewidth=1)
    words = "all parameters and gradients, without shards"
    ax.text(0, 2 * whole / 1024, words, va="bottom", fontsize=10)
    ax.axvline(max(layers) / 2, color=plots.COLORS["idle"], linewidth=2, zorder=0)
    for x, phase in ((0.25, "forward"), (0.75, "backward")):
        ax.text(x * max(layers), 12, phase, ha="center", color=plots.COLORS["buffers"])
    ax.set(xlabel="layers passed", ylabel="KiB on a rank", ylim=(0, 2.5 * whole / 1024))
    ax.set_title("Parameters and gradients through one step, measured")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def prefetching() -> Figure:
    """Three ways to gather and reduce four blocks, simulated."""
    panels = {
        "just in time": _simulated(False, False),
        "prefetch": _simulated(True, False),
        "prefetch, and reductions behind backward": _simulated(True, True),
    }
    titled = {f"{name}, simulated: {end:.1f}": [record] for name, (record, end) in panels.items()}
    return plots.timelines(titled, unit="forward passes of a block")


def _simulated(prefetch: bool, reduce_behind: bool, blocks: int = 4, message: float = 0.8):
    """One step on one rank: its record and its end, in units of a block's forward pass."""
    passes = [("forward", 1.0)] * blocks + [("backward", 2.0)] * blocks
    spans, arrivals, now, link = [], {}, 0.0, 0.0

    def send(name):
        nonlocal link
        start = max(link, now)
        link = start + message
        spans.append(Span(name, "communication", start, link, background=True))
        return link

    def wait_until(time):
        nonlocal now
        if time > now:
            spans.append(Span("wait", "waiting", now, time))
            now = time

    for position, (name, duration) in enumerate(passes):
        wait_until(arrivals.get(position) or send("all_gather"))
        if prefetch and position + 1 < len(passes):
            arrivals[position + 1] = send("all_gather")
        spans.append(Span(name, "compute", now, now + duration))
        now += duration
        if name == "backward":
            reduced = send("reduce_scatter")
            if not reduce_behind:
                wait_until(reduced)
    wait_until(link)
    return Record(0, spans), now


def resumed(losses: dict[str, list[float]]) -> Figure:
    """The losses of twelve steps, and their differences from the first entry, undisturbed."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(plots.WIDTH, 3.4))
    undisturbed = next(iter(losses.values()))
    looks = [(plots.COLORS["ink"], "-"), (plots.NEUTRALS[1], "--"), (plots.COLORS["wrong"], ":")]
    for (what, own), (color, style) in zip(losses.items(), looks):
        gap = [a - b for a, b in zip(own, undisturbed)]
        left.plot(range(1, 13), own, style, color=color, label=what, linewidth=2.2)
        right.plot(range(1, 13), gap, style, color=color, linewidth=2.2)
    left.set(xlabel="step", ylabel="loss", title="Looks fine")
    right.set(xlabel="step", ylabel="difference in loss", title="Is not")
    for ax in (left, right):
        ax.axvline(6.5, color=plots.NEUTRALS[1], linewidth=1)
        ax.set_xticks(range(2, 13, 2))
    left.text(6.7, max(own), "resumed", va="top", fontsize=10)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def ledgers(of_stages: list[dict[str, float]], chosen: int, title: str) -> Figure:
    """A bar for each stage's ledger, in GB, beside the 80 GB of a GPU."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.6))
    end = 1.2 * max(sum(of_stages[0].values()), 80)
    for row, ledger in enumerate(of_stages):
        left = 0.0
        for kind, size in ledger.items():
            color = plots.COLORS.get(kind, plots.COLORS["other"])
            label = kind if row == 3 else None
            ax.barh(row, size, left=left, height=0.6, color=color, label=label)
            left += size
        words = {"va": "center", "weight": "bold" if row == chosen else "normal"}
        crossed = 80 - 0.1 * end < left < 80  # the label would stand on the line of 80 GB
        ax.text(80 if crossed else left, row, f"  {left:,.1f} GB", **words)
    ax.add_patch(Rectangle((0, chosen - 0.42), end, 0.84, facecolor="#FFF3D6", zorder=0))
    ax.axvline(80, **plots.LIMIT)
    ax.text(80, -0.62, " 80 GB: a GPU", va="center")
    ax.set_yticks(range(4), [f"stage {row}" for row in range(4)])
    ax.set(xlim=(0, end), ylim=(3.5, -0.85), xlabel="GB on a rank (1e9 bytes), computed")
    ax.set_title(title)
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def floors(gigabytes: Callable[[int, int], dict[str, float]]) -> Figure:
    """What a rank holds of a model in each stage, on 1 to 1,024 ranks; `gigabytes(stage, n)` is its
    ledger."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.8))
    counts = [2**k for k in range(11)]
    for stage, look in enumerate(plots.LINES[:4]):
        totals = [sum(gigabytes(stage, n).values()) for n in counts]
        ax.plot(counts, totals, marker="so^D"[stage], markersize=5, **look)
        ax.text(1150, totals[-1], f"stage {stage}", va="center")
    ax.axhline(80, **plots.LIMIT)
    ax.text(1024, 72, "80 GB: a GPU", ha="right", va="top", fontsize=10)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(counts[::2], counts[::2])
    ax.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    ax.set(xlabel="ranks", ylabel="GB on a rank, computed", xlim=(1, 2300))
    ax.set_title("Stages 1 and 2 have a floor, stage 3 has none")
    return figure
