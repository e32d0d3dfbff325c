"""Colours that mean the same in every figure, and the style, which is applied on import."""

import math
from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

COLORS = {
    "forward": "#56B4E9",
    "activations": "#56B4E9",
    "backward": "#0072B2",
    "gradients": "#0072B2",
    "update": "#009E73",
    "optimizer": "#009E73",
    "parameters": "#CC79A7",
    "buffers": "#5F5F5F",
    "temporary": "#A87B4F",
    "matrices": "#332288",
    "attention": "#882255",
    "load": "#F0E442",
    "communication": "#E69F00",
    "waiting": "#D9D9D9",
    "idle": "#F5F5F5",
    "wrong": "#D55E00",
    "other": "#B9A38C",
    "ink": "#222222",
}
RANK_COLORS = [
    "#77AADD", "#EE8866", "#EEDD88", "#44BB99", "#FFAABB", "#99DDFF", "#BBCC33", "#AAAA00",
]  # fmt: skip
ORDER = [  # of kinds in a legend
    *("load", "forward", "backward", "update", "communication"),
    *("parameters", "gradients", "optimizer", "activations", "buffers", "temporary", "waiting"),
]
NEUTRALS = ["#222222", "#7A7A7A", "#B0B0B0"]
LINES = [  # looks of lines that are no kind of thing: their dashes tell them apart
    {"color": NEUTRALS[i % 2], "linestyle": dashes}
    for i, dashes in enumerate(("-", "--", ":", "-.", (0, (7, 2)), (0, (1, 3))))
]
LIMIT = {"color": COLORS["ink"], "linestyle": "--", "linewidth": 1.4}  # what there is room for
WIDTH = 8.0  # inches: the width of a notebook's column at 100 dots per inch

plt.rcParams.update(
    {
        "figure.figsize": (WIDTH, 3.6),
        "figure.dpi": 100,
        "figure.constrained_layout.use": True,
        "font.size": 11,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.edgecolor": COLORS["ink"],
        "axes.labelcolor": COLORS["ink"],
        "axes.titlecolor": COLORS["ink"],
        "text.color": COLORS["ink"],
        "xtick.color": COLORS["ink"],
        "ytick.color": COLORS["ink"],
        "legend.frameon": False,
        "legend.fontsize": 10,
        "hatch.linewidth": 0.6,
        "hatch.color": "#8C8C8C",
        "axes.prop_cycle": plt.cycler(color=NEUTRALS),
    }
)


def legend(figure: Figure, shown: Mapping[str, Patch]) -> None:
    """Puts one legend under all axes of a figure, in as few rows as fit, which are equally long.

    Kinds have the same order in all figures, whichever a figure shows first.
    """
    column = 0.6 + 0.075 * max(map(len, shown), default=0)  # inches
    rows = math.ceil(len(shown) / int(figure.get_figwidth() / column)) or 1
    kinds = (kind for kind in ORDER if kind in shown)
    names = [next(kinds) if name in ORDER else name for name in shown]
    handles, columns = [shown[name] for name in names], math.ceil(len(shown) / rows)
    figure.legend(handles=handles, labels=names, loc="outside lower center", ncols=columns or 1)


def look_of(key: str) -> dict:
    """How a bar of this kind is drawn: waiting is hatched too, so that it shows without colours."""
    look = {"facecolor": COLORS.get(key, COLORS["other"]), "edgecolor": "white", "linewidth": 0.6}
    return look | ({"hatch": "////"} if key == "waiting" else {})


def ink_on(key: str) -> str:
    """The colour of text on a bar of this kind."""
    return (
        "white"
        if key in ("backward", "gradients", "update", "optimizer", "buffers")
        else COLORS["ink"]
    )
