"""The figures of chapter 11: the dispatcher, the queues of the experts, the links of all-to-all."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course_utils import plots

SERVED, DROPPED, INK = (plots.COLORS[kind] for kind in ("activations", "wrong", "ink"))
ROAD = {"facecolor": plots.COLORS["communication"], "edgecolor": "white"}
LINKS = {  # where a piece goes, from near to far, and how that is drawn
    "stays in its rank": {"facecolor": "white", "edgecolor": plots.NEUTRALS[1]},
    "inside the machine": ROAD,
    "between machines": ROAD | {"hatch": "///"},
}
MACHINE = 8  # ranks in one machine


def factory() -> Figure:
    """A dispatcher sends pieces to four specialists, half of them to the same one."""
    figure, ax = plots.canvas(height=3.7)
    plots.pile(ax, 0.25, 1.4, [SERVED] * 12, label="12 pieces")
    ax.add_patch(Rectangle((1.75, 1.65), 1.35, 0.7, facecolor="white", edgecolor=INK))
    ax.text(2.42, 2.0, "dispatcher", ha="center", va="center", fontsize=10)
    plots.arrow(ax, (1.1, 2.0), (1.7, 2.0))
    for expert, waiting in enumerate((2, 6, 1, 3)):
        y = 3.45 - 1.05 * expert
        plots.arrow(ax, (3.2, 2.0), (4.3, y + 0.3), color=plots.COLORS["communication"])
        for place in range(waiting):  # the first one is at the door
            left = 6.6 - 0.42 * place
            ax.add_patch(Rectangle((left, y + 0.16), 0.3, 0.3, facecolor=SERVED, edgecolor=INK))
        name = f"specialist {expert}"
        plots.building(ax, 7.6, y, 2.1, 0.85, name, color=plots.RANK_COLORS[expert])
    ax.set_title("Half of the pieces go to the same specialist")
    return figure


def queues(load: Sequence[int], capacity: float, title: str) -> Figure:
    """A bar for the pieces of each expert, and the line where its queue ends."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.2))
    _queue_bars(ax, load, capacity)
    ax.set_title(title)
    return figure


def _queue_bars(ax: Axes, load: Sequence[int], capacity: float) -> None:
    served = [min(pieces, capacity) for pieces in load]
    dropped = [pieces - kept for pieces, kept in zip(load, served, strict=True)]
    numbers = range(len(load))
    ax.bar(numbers, served, color=SERVED, edgecolor="white")
    ax.bar(numbers, dropped, bottom=served, color=DROPPED, edgecolor="white", hatch="///")
    ax.axhline(capacity, **plots.LIMIT)
    for expert, pieces in enumerate(load if len(load) <= 16 else []):  # else there is no room
        on_the_line = pieces <= capacity < pieces + 0.11 * max(load)  # there it is not readable
        foot = (capacity if on_the_line else pieces) + 0.02 * max(load)
        ax.text(expert, foot, str(pieces), ha="center", va="bottom", fontsize=9)
    ax.set(xlabel="expert", ylabel="pieces", ylim=(0, 1.35 * max([*load, capacity])))
    ax.set_xticks(list(numbers)[:: 1 + len(load) // 17])
    handles = [Patch(color=SERVED), Patch(fc=DROPPED, hatch="///", ec="white"), ax.lines[0]]
    ax.legend(handles, ["served", "dropped", "capacity"], loc="upper right", ncols=3)


def load_and_capacity(experts: int, preference: float, capacity_factor: float) -> Figure:
    """For the explorer: 1,024 tokens choose two of `experts`; with `preference` the router's taste for
    the first experts grows."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1024, experts, generator=generator)
    logits -= preference * torch.linspace(0, 3, experts)
    load = logits.topk(2).indices.flatten().bincount(minlength=experts).tolist()
    capacity = int(-(-capacity_factor * sum(load) // experts))
    dropped = sum(max(0, pieces - capacity) for pieces in load)
    empty = sum(max(0, capacity - pieces) for pieces in load)
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.6))
    _queue_bars(ax, load, capacity)
    ax.set_title(
        f"{dropped / sum(load):.0%} of the pieces are dropped, "
        f"{empty / (capacity * experts):.0%} of the places stay empty"
    )
    return figure


def shares_by_link(ranks: int) -> dict[str, float]:
    """Where the pieces of a rank go if all experts are chosen alike, in machines of eight."""
    near = min(ranks, MACHINE)
    shares = (1 / ranks, (near - 1) / ranks, (ranks - near) / ranks)
    return dict(zip(LINKS, shares, strict=True))


def links(groups: Sequence[int]) -> Figure:
    """A bar for each size of the experts' group: the links that the pieces of a rank take."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 2.9))
    for row, ranks in enumerate(groups):
        left = 0.0
        for name, share in shares_by_link(ranks).items():
            ax.barh(row, share, left=left, height=0.6, **LINKS[name])
            if share > 0.05:
                words = {"ha": "center", "va": "center", "fontsize": 10}
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
                ax.text(left + share / 2, row, f"{100 * share:.3g}%", bbox=box, **words)
            left += share
    ax.set_yticks(range(len(groups)), [f"{ranks} ranks" for ranks in groups])
    ax.set(xlabel="share of a rank's pieces", xlim=(0, 1), ylim=(len(groups) - 0.5, -0.5))
    plots.legend(figure, {name: Patch(**look) for name, look in LINKS.items()})
    ax.set_title("Across 8 machines, seven of eight pieces take the slow links")
    return figure
