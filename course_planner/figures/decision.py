"""The decision guide as a picture: which parallelism when, question by question."""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_utils import plots

Part = tuple[float, float, float, float]  # of a blueprint: x, y, width, height as shares of it


class Step(NamedTuple):
    """A question, what a "yes" leads to, and what each building then holds of the model."""

    question: str
    answer: str
    holds: list[list[Part]]


_WHOLE = [(0, 0, 1, 1)]
STEPS = [
    Step(
        "Does the model fit on one GPU,\nand is one GPU fast enough?",
        "one process\nnothing travels",
        [_WHOLE],
    ),
    Step(
        "Does a whole copy fit on one GPU?\n16 bytes a parameter, and activations",
        "data parallel: DDP (chapter 3)\ngradients travel",
        [_WHOLE, _WHOLE],
    ),
    Step(
        "Do shards of its model states fit,\nand do the gathers hide?",
        "FSDP (chapter 8)\nparameters and gradients travel",
        [[(0, y / 4, 1, 1 / 4) for y in (1, 3)], [(0, y / 4, 1, 1 / 4) for y in (0, 2)]],
    ),
    Step(
        "Are there fast links, as inside\na machine? Then cut every layer.",
        "tensor parallel (chapter 6)\nactivations travel in every layer",
        [[(0, 0, 0.5, 1)], [(0.5, 0, 0.5, 1)]],
    ),
    Step(
        "Only slow links, as between\nmachines? Then cut between layers.",
        "pipeline (chapter 5)\nactivations travel at the cuts",
        [[(0, 0.5, 1, 0.5)], [(0, 0, 1, 0.5)]],
    ),
]
BESIDE = [  # asked whatever the answers above are
    Step(
        "Are sequences so long that their\nactivations do not fit? Cut them.",
        "context parallel (chapter 10)\nkeys and values travel",
        [_WHOLE, _WHOLE],
    ),
    Step(
        "Does a token meet few of the experts?\nThen place them on different ranks.",
        "expert parallel (chapter 11)\ntokens travel to their experts",
        [[(0, 0.6, 1, 0.4), (x, 0, 0.42, 0.42)] for x in (0, 0.58)],
    ),
]
ALWAYS = (
    "One is not enough? Combine them (chapter 7): tensor inside a machine, pipeline between machines,\n"
    "data parallel or FSDP around both. The run outlives a node? Elastic training (chapter 9)."
)
_ROW, _FOOT = 1.3, 0.85  # heights of a step and of the sentence below


def decision_guide() -> Figure:
    """Draws the questions from top to bottom, and beside each what a "yes" leads to."""
    steps = STEPS + BESIDE
    height = _ROW * len(steps) + _FOOT
    figure, ax = plots.canvas(height=height * plots.WIDTH / 10)
    for row, step in enumerate(steps):
        y = height - _ROW * (row + 0.5)
        ax.text(0.05, y, step.question, va="center", fontsize=10)
        plots.arrow(ax, (3.75, y), (4.35, y), label="yes")
        _buildings(ax, y - 0.41, step)
        ax.text(6.85, y, step.answer, va="center", fontsize=10)
        if row + 1 < len(STEPS):
            plots.arrow(ax, (0.6, y - 0.33), (0.6, y - _ROW + 0.33))
            ax.text(0.75, y - _ROW / 2, "no", va="center", fontsize=9)
    for y in (_FOOT, _FOOT + _ROW * len(BESIDE)):
        ax.plot([0.05, 9.95], [y] * 2, color=plots.COLORS["waiting"], linewidth=1)
    ax.text(0.05, _FOOT / 2 - 0.05, ALWAYS, va="center", fontsize=10)
    return figure


def _buildings(ax: Axes, y: float, step: Step) -> None:
    places = (4.5, 5.85) if len(step.holds) == 2 else (5.175,)
    for rank, (x, parts) in enumerate(zip(places, step.holds)):
        plots.building(ax, x, y, 0.8, 0.82, color=plots.RANK_COLORS[rank])
        sheet = (x + 0.13, y + 0.1, 0.54, 0.38)
        _paper(ax, sheet, "white")
        for part in parts:
            left, bottom = (sheet[i] + sheet[2 + i] * part[i] for i in (0, 1))
            place = (left, bottom, sheet[2] * part[2], sheet[3] * part[3])
            _paper(ax, place, plots.COLORS["parameters"])
    if len(step.holds) == 2:
        middle, color = 5.575, plots.COLORS["communication"]
        for end in (5.83, 5.32):
            plots.arrow(ax, (middle, y + 0.3), (end, y + 0.3), color)


def _paper(ax: Axes, place: tuple[float, float, float, float], color: str) -> None:
    x, y, width, height = place
    ax.add_patch(Rectangle((x, y), width, height, facecolor=color, linewidth=0))
