"""The pictures of chapter 2: a building and its floors, memory and time of a step on each GPU."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_utils import plots

_MEMORY = {
    name: name if name in plots.COLORS else "other"
    for name in ("parameters", "gradients", "activations", "inputs and outputs", "optimizer")
}
_TIME = {
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "loss": "other",
    "copying": "communication",
    "waiting": "waiting",
}


def floors() -> Figure:
    """Three floors above a ground floor, from which everything comes and to which it goes back."""
    figure, axes = plots.canvas(height=4.3)
    axes.set_title("Everything begins or ends on the ground floor")
    plots.building(axes, 2.6, 0.1, width=4.8, height=5.1, color="#F4F4F4")
    boxes = [color for color in plots.RANK_COLORS[:4] for _ in range(3)]
    way = {"color": plots.COLORS["communication"], "bend": 0.45}
    words = {"va": "center", "fontsize": 10}
    for i in range(4):
        floor = 0.2 + 1.15 * i
        axes.plot([2.6, 7.4], [floor + 1.05] * 2, color=plots.COLORS["ink"], linewidth=1)
        plots.blueprint(axes, 2.85, floor + 0.2)
        plots.pile(axes, 4.1, floor - 0.06, boxes if i == 0 else boxes[3 * i : 3 * i + 3])
        holds = "" if i else ":\nwhole batch,\nloss, optimizer"
        axes.text(5.25, floor + 0.5, f"worker {i}{holds}", **words)
        if i > 0:
            plots.arrow(axes, (2.5, 0.7), (2.5, floor + 0.5), **way)
            plots.arrow(axes, (7.5, floor + 0.5), (7.5, 0.7), **way)
    axes.text(0.75, 2.6, "parameters,\nchunks", ha="center", **words)
    axes.text(9.25, 2.6, "outputs,\ngradients", ha="center", **words)
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
    left.set_xlabel("GiB")
    left.set_title("GPU 0 holds the most")
    right.set_xlabel("share of one step")
    right.set_title(f"{faster:.1f} times as fast as one GPU")
    _legend(left, _MEMORY)
    _legend(right, _TIME)
    return figure


def _legend(axes: Axes, kinds: dict[str, str]) -> None:
    patches = [Patch(**plots.look_of(kind)) for kind in kinds.values()]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "fontsize": 9}
    axes.legend(patches, list(kinds), ncols=2, **place)


def _memory(axes: Axes, gpu: int, ledger: dict[str, float]) -> None:
    """A stacked bar, in GiB."""
    left = 0.0
    for kind, size in ledger.items():
        look = plots.look_of(_MEMORY[kind])
        axes.barh(gpu, size / 2**30, left=left, height=0.8, **look)
        left += size / 2**30


def _time(axes: Axes, gpus: int, phases: dict[str, float]) -> None:
    """One lane per GPU: coloured where it computes or copies, hatched where it waits."""
    start, total = 0.0, sum(phases.values())
    for phase, seconds in phases.items():
        for gpu in range(gpus):
            busy = gpu == 0 or phase in ("forward", "backward")
            look = plots.look_of(_TIME.get(phase, "communication") if busy else "waiting")
            axes.barh(gpu, seconds / total, left=start, height=0.8, **look)
        start += seconds / total
    axes.set_xlim(0, 1)
