"""The pictures of chapter 2: a head office and its floors, memory and time of a step on each GPU."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_utils import plots

_PHASES = {"forward": "forward", "backward": "backward", "update": "update", "loss": "other"}


def head_office() -> Figure:
    """Three floors over a head office: what goes up, and what comes down."""
    figure, axes = plots.canvas(height=4.3)
    plots.building(axes, 2.3, 0.1, width=5.4, height=5.1, color="#F4F4F4")
    boxes = [color for color in plots.RANK_COLORS[:4] for _ in range(3)]
    for i in range(4):
        floor = 0.2 + 1.15 * i
        axes.plot([2.3, 7.7], [floor + 1.05] * 2, color=plots.COLORS["ink"], linewidth=1)
        plots.blueprint(axes, 2.6, floor + 0.2)
        plots.pile(axes, 3.9, floor - 0.06, boxes if i == 0 else boxes[3 * i : 3 * i + 3])
        axes.text(5.1, floor + 0.5, f"worker {i}", va="center", fontsize=10)
        if i > 0:
            plots.arrow(axes, (2.3 - 0.45 * i, 0.7), (2.3 - 0.45 * i, floor + 0.5))
            plots.arrow(axes, (7.7 + 0.45 * i, floor + 0.5), (7.7 + 0.45 * i, 0.7))
    words = {"va": "center", "fontsize": 9}
    axes.text(6.1, 0.7, "head office:\ninspects, corrects", **words)
    axes.text(1.2, 0.35, "copies of the\nblueprint, material", ha="center", **words)
    axes.text(8.8, 0.35, "pieces,\ncorrections", ha="center", **words)
    return figure


def load(
    gpus: int,
    first: dict[str, float],
    helper: dict[str, float],
    phases: dict[str, float],
    faster: float,
) -> Figure:
    """Memory, in bytes by kind on the first GPU and on a helper, beside the phases of a step, in
    seconds; `faster` is the speed-up over one GPU."""
    figure, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(plots.WIDTH, 4.4))
    for gpu in range(gpus):
        _memory(left, gpu, helper if gpu else first)
    _time(right, gpus, phases)
    left.set_yticks(range(gpus), [f"GPU {gpu}" for gpu in range(gpus)])
    left.invert_yaxis()
    left.set_xlabel("memory (GiB)")
    left.set_title("Memory (a model)")
    right.set_xlabel("share of one step")
    right.set_title(f"{faster:.2f} times as fast as one GPU")
    kinds = {"inputs and outputs": "other", "copying": "communication", "waiting": "waiting"}
    kinds = {k: k for k in ("parameters", "gradients", "optimizer", "activations")} | kinds
    patches = {name: Patch(**plots.look_of(kind)) for name, kind in kinds.items()}
    plots.legend(figure, patches)
    return figure


def _memory(axes: Axes, gpu: int, ledger: dict[str, float]) -> None:
    """A stacked bar, in GiB."""
    left = 0.0
    for kind, size in ledger.items():
        color = plots.COLORS.get(kind, plots.COLORS["other"])
        axes.barh(gpu, size / 2**30, left=left, height=0.8, color=color, edgecolor="white")
        left += size / 2**30


def _time(axes: Axes, gpus: int, phases: dict[str, float]) -> None:
    """One lane per GPU: coloured where it computes or copies, hatched where it waits."""
    start, total = 0.0, sum(phases.values())
    for phase, seconds in phases.items():
        kind, width = _PHASES.get(phase, "communication"), seconds / total
        for gpu in range(gpus):
            busy = gpu == 0 or phase in ("forward", "backward")
            look = plots.look_of(kind if busy else "waiting")
            axes.barh(gpu, width, left=start, height=0.8, **look)
        if width > 0.06:
            look = {"color": "white" if kind in ("backward", "update") else "black", "fontsize": 9}
            turned = 0 if width > 0.18 else 90
            middle = start + width / 2
            axes.text(middle, 0, phase, ha="center", va="center", rotation=turned, **look)
        start += width
    axes.set_xlim(0, 1)
