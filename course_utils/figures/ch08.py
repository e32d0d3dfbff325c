"""The pictures of chapter 8: pages and shards, a step's memory, the link and the work."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_utils import plots
from course_utils.trace import Record, Span

STAGES = ("stage 0\n(chapter 3)", "stage 1", "stage 2", "stage 3\n(FSDP)")
BYTES = {"parameters": 2, "gradients": 2, "optimizer": 12}  # a parameter, as in the ZeRO paper
SHARDED = ((), ("optimizer",), ("optimizer", "gradients"), tuple(BYTES))


def pages() -> Figure:
    """Four buildings with a quarter of every page; of page 3, which is in use, with all of it."""
    figure, ax = plots.canvas(height=3.4)
    ax.set_title("Only the page in use is whole; of the others each building keeps a quarter")
    for page, y in enumerate((2.9, 2.0, 1.1, 0.2), start=1):
        ax.text(0.1, y + 0.3, f"page {page}", va="center", fontsize=10)
        for building in range(4):
            quarter = (building / 4, (building + 1) / 4)
            plots.blueprint(ax, 1.1 + 1.25 * building, y, part=quarter if page != 3 else (0, 1))
    for building in range(4):
        x = 1.1 + 1.25 * building
        ax.text(x + 0.45, 3.62, f"building {building}", ha="center", va="bottom", fontsize=9)
    frame = {"fill": False, "edgecolor": plots.COLORS["communication"], "linewidth": 2}
    ax.add_patch(Rectangle((0.95, 0.98), 4.95, 0.87, **frame))
    for y, words in [
        (2.75, "already used,\nthe copies are thrown away"),
        (1.42, "in use"),
        (0.5, "still to come"),
    ]:
        ax.text(6.2, y, words, va="center", fontsize=10)
    return figure


def gigabytes(billions: float, ranks: int, stage: int) -> float:
    """The model states of a rank, in GB of 1e9 bytes."""
    return billions * sum(
        each / (ranks if kind in SHARDED[stage] else 1) for kind, each in BYTES.items()
    )


def stages() -> Figure:
    """What three ranks hold in each stage; at the right the ledger of a model of 7.5 billion
    parameters on 64. Heights are bytes for each parameter."""
    figure, ax = plots.canvas(height=4.4)
    ax.set_title("From stage to stage one more kind is sharded")
    for rank in range(3):
        ax.text(2.5 + 1.75 * rank, 4.95, f"rank {rank}", ha="center", fontsize=10)
    ax.text(7.15, 4.95, "7.5 billion parameters,\neach of 64 ranks", fontsize=10, va="center")
    for stage, name in enumerate(STAGES):
        top = 4.8 - 1.08 * stage
        ax.text(0.1, top - 0.4, name, va="center", weight="bold")
        _stage(ax, top, SHARDED[stage])
        held = f"{gigabytes(7.5, 64, stage):.1f} GB"
        ax.text(7.15, top - 0.4, held, va="center", weight="bold", fontsize=13)
    for i, kind in enumerate(BYTES):
        plots.pile(ax, 1.75 + 1.75 * i, 0.1, [plots.COLORS[kind]], columns=1)
        ax.text(2.08 + 1.75 * i, 0.22, kind, va="center", fontsize=10)
    return figure


def _stage(ax: Axes, top: float, sharded: tuple[str, ...], ranks: int = 3) -> None:
    """A row: what each rank holds of each kind."""
    for rank in range(ranks):
        left, y = 1.75 + 1.75 * rank, top
        for kind, each in BYTES.items():
            y -= 0.055 * each + 0.03
            start, part = (rank / ranks, 1 / ranks) if kind in sharded else (0, 1)
            box = {"height": 0.055 * each, "facecolor": plots.COLORS[kind]}
            ax.add_patch(Rectangle((left, y), 1.5, **box | {"facecolor": "#EFEFEF"}))
            ax.add_patch(Rectangle((left + 1.5 * start, y), 1.5 * part, **box))


def through_a_step(readings: dict[str, list[tuple[int, int, int]]], whole: int) -> Figure:
    """Parameters and gradients at every layer, for each wrapping; `whole` is the bytes of all
    parameters of a model with four blocks of six layers."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 4.0))
    looks = ({"color": plots.COLORS["ink"]}, plots.LINES[1], {"color": plots.COLORS["wrong"]})
    heights = (0.25, 1.45, 2.4)  # of the names, in parts of all parameters
    for (name, of_layers), look, height in zip(readings.items(), looks, heights):
        layers, *held = zip(*of_layers)
        together = [sum(pair) / 1000 for pair in zip(*held)]
        ax.plot(layers, together, linewidth=2.2, **look)
        words = f"{name}: at most {max(together):.0f} kB"
        place = {"ha": "right", "va": "center", "color": look["color"], "fontsize": 10}
        ax.text(0.96 * max(layers), height * whole / 1000, words, **place)
    ax.axhline(2 * whole / 1000, color=plots.NEUTRALS[2], linewidth=1)
    words = "all parameters and gradients, without shards"
    ax.text(0.5, 2.02 * whole / 1000, words, va="bottom", fontsize=10)
    half = max(layers) / 2
    ax.axvline(half, color=plots.COLORS["idle"], linewidth=2, zorder=0)
    blocks = [2 + 6 * block + 3 for block in range(4)]  # the embeddings are two layers
    ticks = [*blocks, *(2 * half - place for place in reversed(blocks))]
    ax.set_xticks(ticks, [1, 2, 3, 4, 4, 3, 2, 1])
    ax.set(xlabel="block: forward, then backward", ylabel="parameters and gradients on a rank (kB)")
    ax.set(ylim=(0, 2.6 * whole / 1000), xlim=(0, 2 * half))
    ax.set_title("With the root alone, a rank needs more than without shards")
    return figure


def prefetching() -> Figure:
    """Three ways to gather and reduce four blocks, simulated."""
    panels = {
        "just in time": _simulated(False, False),
        "prefetch": _simulated(True, False),
        "prefetch, and reductions during backward": _simulated(True, True),
    }
    titled = {f"{name}: {end:.1f} (simulated)": [record] for name, (record, end) in panels.items()}
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


def ledgers(billions_of_parameters: float, ranks_as_a_power_of_two: int, stage: int) -> Figure:
    """A bar for each stage's ledger, in GB, beside the 80 GB of a GPU; in stage 3 with two gathered
    units, each a fortieth of the model."""
    ranks = 2**ranks_as_a_power_of_two
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.6))
    end = 1.2 * max(16 * billions_of_parameters, 80)
    for row in range(4):
        left = 0.0
        ledger = {
            kind: billions_of_parameters * each / (ranks if kind in SHARDED[row] else 1)
            for kind, each in BYTES.items()
        }
        if row == 3 and ranks > 1:
            ledger["temporary"] = 2 / 40 * billions_of_parameters * BYTES["parameters"]
        for kind, size in ledger.items():
            label = kind if row == 3 else None
            ax.barh(row, size, left=left, height=0.6, color=plots.COLORS[kind], label=label)
            left += size
        words = {"va": "center", "weight": "bold" if row == stage else "normal"}
        crossed = 80 - 0.1 * end < left < 80  # the label would stand on the line of 80 GB
        ax.text(80 if crossed else left, row, f"  {left:,.1f} GB", **words)
        if row == stage:
            fits = "fits into" if left <= 80 else "does not fit into"
    ax.add_patch(Rectangle((0, stage - 0.42), end, 0.84, facecolor="#FFF3D6", zorder=0))
    ax.axvline(80, **plots.LIMIT)
    ax.text(80, -0.62, " 80 GB: a GPU", va="center")
    ax.set_yticks(range(4), [f"stage {row}" for row in range(4)])
    ax.set(xlim=(0, end), ylim=(3.5, -0.85), xlabel="GB on a rank (1e9 bytes), computed")
    ax.set_title(f"Stage {stage} on {ranks} rank{'s' * (ranks > 1)} {fits} 80 GB")
    figure.legend(loc="outside lower center", ncols=4)
    return figure
