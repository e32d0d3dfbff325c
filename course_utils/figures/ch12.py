"""The figures of chapter 12: the site, what a rank holds against its limit, where a step's time goes."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course_utils import estimate, plots
from course_utils.estimate import Layout, published

KINDS = {  # of bytes: the colour of each
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "temporary": "buffers",
}
PARTS = {  # of a step's seconds: the colour of each, and a hatch that tells it without
    "matrices": (plots.COLORS["backward"], ""),
    "attention": (plots.COLORS["forward"], ""),
    "memory": (plots.COLORS["buffers"], ""),
    "launch": (plots.COLORS["other"], ""),
    "tensor": (plots.COLORS["communication"], ""),
    "context": (plots.COLORS["communication"], "///"),
    "experts": (plots.COLORS["communication"], "..."),
    "data": (plots.COLORS["communication"], "xxx"),
    "messages": (plots.COLORS["load"], ""),
    "bubble": (plots.COLORS["waiting"], "////"),
    "optimizer": (plots.COLORS["update"], ""),
    "overhead": (plots.COLORS["wrong"], ""),
}
TOKENS = 4_194_304  # of a batch of the explorer
CONTEXTS = {"8k": 8192, "32k": 32_768, "128k": 131_072}


def factory() -> Figure:
    """A site: two lines of three buildings, halls with a conveyor in each, trucks and a head office."""
    figure, ax = plots.canvas(height=3.6)
    for line, y in enumerate((2.9, 0.75)):
        for stage in range(3):
            x = 1.4 + 2.95 * stage
            ground = {"facecolor": "#F2F2F2", "edgecolor": "#8C8C8C", "linewidth": 0.8}
            ax.add_patch(Rectangle((x - 0.1, y - 0.25), 1.9, 1.3, **ground))
            for hall in range(2):
                left, color = x + 0.92 * hall, plots.RANK_COLORS[stage]
                plots.building(ax, left, y, 0.78, 0.9, f"hall {hall}", color=color)
            plots.arrow(ax, (x + 0.4, y - 0.12), (x + 1.3, y - 0.12))
            if stage < 2:
                plots.truck(ax, x + 1.86, y + 0.1)
        ax.text(0.1, y + 0.4, f"line {line}", fontsize=11, va="center")
    ax.text(2.25, 4.02, "a building", fontsize=9, ha="center")
    ax.text(2.25, 0.2, "conveyor inside a building", fontsize=9, ha="center")
    ax.text(5.2, 0.2, "road between buildings", fontsize=9, ha="center")
    for stage in range(3):
        x = 2.25 + 2.95 * stage
        plots.arrow(ax, (x, 2.55), (x, 1.95), color=plots.COLORS["communication"])
        plots.arrow(ax, (x + 0.12, 1.95), (x + 0.12, 2.55), color=plots.COLORS["communication"])
    ax.text(2.6, 2.25, "what was learned, once a day", fontsize=9, va="center")
    return figure


def fit(ledgers: Mapping[str, Mapping[str, float]], limit: float, title: str) -> Figure:
    """A bar for each ledger (bytes by kind), in GB, and the line that it must not cross."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 1.7 + 0.5 * len(ledgers)))
    _stacked(ax, ledgers, {k: (plots.COLORS[c], "") for k, c in KINDS.items()}, 1e9, "GB")
    ax.axvline(limit / 1e9, color=plots.COLORS["ink"], linestyle="--", linewidth=1.4)
    ax.set_xlabel("bytes of a rank, in GB; dashed: what a GPU has")
    ax.set_title(title)
    _legend(figure, ledgers, {k: (plots.COLORS[c], "") for k, c in KINDS.items()})
    return figure


def where_time_goes(steps: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """A bar for each step: its seconds by kind."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 1.7 + 0.5 * len(steps)))
    _stacked(ax, steps, PARTS, 1.0, "s")
    ax.set_xlabel("seconds of a step")
    ax.set_title(title)
    _legend(figure, steps, PARTS)
    return figure


def _stacked(ax: Axes, rows: Mapping, looks: Mapping, unit: float, name: str) -> None:
    """A bar for each row, its kinds one after the other, and its sum at the end."""
    longest = max(sum(_shown(row, looks).values()) for row in rows.values()) / unit
    for place, row in enumerate(rows.values()):
        left = 0.0
        for kind, amount in _shown(row, looks).items():
            color, hatch = looks[kind]
            ax.barh(place, amount / unit, left=left, height=0.6, fc=color, ec="white", hatch=hatch)
            left += amount / unit
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        end = left + 0.012 * longest
        ax.text(end, place, f"{left:.3g} {name}", va="center", fontsize=10, bbox=box, zorder=3)
    ax.set_yticks(range(len(rows)), rows)
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, 1.17 * longest))


def _shown(row: Mapping[str, float], looks: Mapping) -> dict[str, float]:
    """The kinds of a row that a bar can show; a total is their sum."""
    return {kind: row[kind] for kind in looks if row.get(kind, 0) > 0}


def _legend(figure: Figure, rows: Mapping, looks: Mapping) -> None:
    shown = [kind for kind in looks if any(kind in _shown(row, looks) for row in rows.values())]
    patches = {k: Patch(fc=looks[k][0], ec="white", hatch=looks[k][1]) for k in shown}
    plots.legend(figure, patches)


def described(layout: Layout) -> str:
    """A layout in a line."""
    sizes = " x ".join(f"{name} {getattr(layout, name)}" for name in ("dp", "cp", "pp", "tp"))
    order = f"{layout.schedule}, {layout.chunks} chunks" if layout.chunks > 1 else layout.schedule
    runs = f"{layout.micro_batches} micro-batches of {layout.micro_batch}"
    more = f"ZeRO {layout.zero}, recompute {layout.recompute}"
    return f"{sizes}; {runs}; {order if layout.pp > 1 else 'no pipeline'}; {more}"


def your_plan(model: str, gpus: str, context: str, network: str) -> Figure:
    """For the explorer: the quickest plan of a Llama 3 on H100, its memory and its time."""
    seq, bandwidth = CONTEXTS[context], float(network.split()[0]) / 8 * 1e9
    slow = {"inter_bandwidth": bandwidth}
    hardware = estimate.Hardware(**{**vars(published.H100), **slow})
    batch = TOKENS // seq
    found, refused = estimate.search(
        published.LLAMA[model], int(gpus), batch, seq, hardware, keep=1
    )
    if not found:
        return _nothing(refused, model, gpus)
    (best,) = found
    figure, axes = plt.subplots(2, figsize=(plots.WIDTH, 4.6))
    kinds = {kind: (plots.COLORS[color], "") for kind, color in KINDS.items()}
    _stacked(axes[0], {"": best.memory}, kinds, 1e9, "GB")
    axes[0].axvline(hardware.hbm_bytes / 1e9, color=plots.COLORS["ink"], linestyle="--")
    axes[0].set(xlabel="bytes of the fullest rank, in GB; dashed: what a GPU has", xlim=(0, 92))
    _stacked(axes[1], {"": best.time.parts}, PARTS, 1.0, "s")
    axes[1].set_xlabel(f"seconds of a step of {batch} sequences; most of it: {best.limit}")
    for ax, row, looks in ((axes[0], best.memory, kinds), (axes[1], best.time.parts, PARTS)):
        shown = _shown(row, looks)
        patches = [Patch(fc=looks[k][0], ec="white", hatch=looks[k][1]) for k in shown]
        ax.legend(patches, shown, loc="lower left", bbox_to_anchor=(0, 0.98), ncols=8, fontsize=8)
    figure.suptitle(described(best.layout), fontsize=9)
    return figure


def _nothing(refused: Mapping[str, int], model: str, gpus: str) -> Figure:
    figure, ax = plots.canvas(height=2.0)
    lines = [f"{count} layouts: {estimate.REASONS[why]}" for why, count in refused.items()]
    text = "\n".join([f"No layout of {gpus} GPUs holds the {model} model.", *lines])
    ax.text(0.2, 1.2, text, fontsize=10, va="center")
    return figure
