"""Draws the picture of the course for the README: python tools/draw_course.py"""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from course_utils import plots

TARGET = Path(__file__).resolve().parents[1] / "notebooks" / "images" / "course.png"
BATCH = [plots.COLORS["load"]] * 6
MATERIAL, LINE = 1.15, 2.55  # where the material lies, and where the first building stands


def workshop(ax: Axes, x: float, y: float, rank: int, part: str) -> None:
    """A building with the share of the model that it holds written on its wall."""
    plots.building(ax, x, y, label=part, color=plots.RANK_COLORS[rank])


def material(ax: Axes, y: float, boxes: list[str]) -> None:
    """A share of the batch, on its way into a building."""
    plots.pile(ax, MATERIAL, y, boxes)
    plots.arrow(ax, (MATERIAL + 0.85, y + 0.3), (LINE - 0.08, y + 0.3))


def activations(ax: Axes, y: float) -> None:
    """What the first building of a line hands to the second."""
    color = plots.COLORS["communication"]
    plots.arrow(ax, (LINE + 1.68, y), (LINE + 3.12, y), color, "activations")


def one_process(ax: Axes) -> None:
    """The whole batch through the whole model."""
    material(ax, 1.4, BATCH)
    workshop(ax, LINE, 1.4, 0, "whole\nmodel")


def data_parallel(ax: Axes) -> None:
    """Copies of the model share the batch and exchange gradients."""
    for rank, y in enumerate((2.5, 0.3)):
        material(ax, y, BATCH[:3])
        workshop(ax, LINE, y, rank, "whole\nmodel")
    gradients(ax, LINE + 0.8)


def model_parallel(ax: Axes) -> None:
    """One model, cut across buildings, that hand the batch on."""
    material(ax, 1.4, BATCH)
    for rank, half in enumerate(("first\nhalf", "second\nhalf")):
        workshop(ax, LINE + 3.2 * rank, 1.4, rank, half)
    activations(ax, 1.85)


def both(ax: Axes) -> None:
    """Copies of a model that is itself cut."""
    for row, y in enumerate((2.5, 0.3)):
        material(ax, y, BATCH[:3])
        for column, half in enumerate(("first\nhalf", "second\nhalf")):
            workshop(ax, LINE + 3.2 * column, y, 2 * row + column, half)
        activations(ax, y + 0.45)
    for column in range(2):
        gradients(ax, LINE + 0.8 + 3.2 * column)


def gradients(ax: Axes, x: float) -> None:
    """The exchange between two copies that stand above each other."""
    color = plots.COLORS["gradients"]
    plots.arrow(ax, (x, 2.0), (x, 1.6), color)
    plots.arrow(ax, (x, 2.0), (x, 2.42), color)
    ax.text(x + 0.15, 2.0, "gradients", va="center", fontsize=9, color=color)


PANELS = {
    "one process": one_process,
    "data parallelism: copies share the batch": data_parallel,
    "model parallelism: one model is cut": model_parallel,
    "both together": both,
}


def main() -> None:
    """Draw the four panels and write the picture."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 5.4))
    for ax, (title, draw) in zip(axes.flat, PANELS.items(), strict=True):
        ax.set(xlim=(0.8, 8.0), ylim=(0, 4.0), aspect="equal", title=title)
        ax.axis("off")
        draw(ax)
    TARGET.parent.mkdir(exist_ok=True)
    figure.savefig(TARGET, metadata={"Software": None})


if __name__ == "__main__":
    main()
