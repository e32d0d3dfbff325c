"""The figures of chapter 13: the way of one file, and what a rank holds against the budget."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

import course_planner as estimate
from course_utils import plots
from course_utils.lesson.models import ResidualNet

STATIONS = (
    ("notebook", "ranks of\nlaunch"),
    ("torchrun", "processes of\none machine"),
    ("two hosts", "a cable\nbetween them"),
    ("a node dies", "the other\ngoes on"),
    ("1,024 GPUs", "a plan,\nno run yet"),
)
KINDS = ("parameters", "gradients", "optimizer")
WHOLE = {"color": "white", "edgecolor": plots.COLORS["gradients"], "hatch": "////"}
BUDGET = 2  # times the bytes of the parameters


def way() -> Figure:
    """The stations of the one file, from left to right."""
    figure, ax = plots.canvas(height=2.6)
    ax.set_title("One file: four runs that end with the same parameters, and a plan")
    for place, (name, below) in enumerate(STATIONS):
        x = 0.15 + 1.98 * place
        plots.building(ax, x, 1.25, 1.5, 1.3, color=plots.COLORS["idle"])
        ax.text(x + 0.75, 1.75, name, ha="center", va="center", fontsize=10, weight="bold")
        ax.text(x + 0.75, 1.05, below, ha="center", va="top", fontsize=10)
        if place:
            plots.arrow(ax, (x - 0.44, 1.8), (x - 0.05, 1.8))
    return figure


def budget(ranks: int, width: int) -> Figure:
    """What ZeRO's stages hold on a rank at the end of backward, calculated, and the budget. With ZeRO 2 the gradients
    were whole before they were scattered."""
    count = sum(parameter.numel() for parameter in ResidualNet(width, 10).parameters())
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.0))
    sizes = {"parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 4}
    for zero in range(4):
        left = 0.0
        for kind in KINDS:
            own = {name: size * name.startswith(kind[:8]) for name, size in sizes.items()}
            held = estimate.model_states(count, ranks, zero, **own) / (4 * count)
            ax.barh(zero, held, left=left, color=plots.COLORS[kind], label=kind if not zero else "")
            left += held
        if zero == 2:
            ax.barh(zero, 1 - 1 / ranks, left=left, label="gradients, whole", **WHOLE)
    ax.axvline(BUDGET, **plots.LIMIT)
    ax.set_yticks(range(4), ["copies", "ZeRO 1", "ZeRO 2", "ZeRO 3"])
    ax.invert_yaxis()
    ax.set_xlim(0, 3.2)
    ax.set_xlabel("bytes of a rank, times those of the parameters; dashed: the budget")
    ax.set_title(f"{count:,} parameters on {ranks} ranks: ZeRO 3 fits, ZeRO 2 only block by block")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncol=4, frameon=False)
    return figure
