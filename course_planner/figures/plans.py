"""What a plan needs: the bytes of ranks against a GPU's memory, the seconds of steps by kind."""

import textwrap
from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_utils.plots.style import COLORS, LIMIT, WIDTH, legend

Looks = Mapping[str, tuple[str, str]]  # of each kind a colour, and a hatch that tells it without
Rows = Mapping[str, Mapping[str, float]]  # by name: amounts by kind

BYTES = {
    "parameters": (COLORS["parameters"], ""),
    "gradients": (COLORS["gradients"], ""),
    "optimizer": (COLORS["optimizer"], ""),
    "activations": (COLORS["activations"], ""),
    "temporary": (COLORS["temporary"], ""),
    "gathered": (COLORS["temporary"], "///"),
    "loss": (COLORS["temporary"], "..."),
    "allocator": (COLORS["other"], ""),
}
SECONDS = {
    "matrices": (COLORS["matrices"], ""),
    "attention": (COLORS["attention"], ""),
    "memory": (COLORS["buffers"], ""),
    "launch": (COLORS["other"], ""),
    "tensor": (COLORS["communication"], ""),
    "context": (COLORS["communication"], "///"),
    "experts": (COLORS["communication"], "..."),
    "data": (COLORS["communication"], "xxx"),
    "messages": (COLORS["communication"], "|||"),
    "other groups": (COLORS["communication"], "---"),
    "bubble": (COLORS["waiting"], "////"),
    "optimizer": (COLORS["update"], ""),
}
HAS = "dashed: what a GPU has"
HAIR = 0.005  # of an axis: what is shorter has no room for an edge, nor for a colour to be told by


def fit(ledgers: Rows, limit: float, title: str) -> Figure:
    """A bar for each ledger (bytes by kind), in GB, and the line that it must not cross."""
    figure, ax = plt.subplots(figsize=(WIDTH, 1.7 + 0.5 * len(ledgers)))
    _stacked(ax, ledgers, BYTES, 1e9, "GB", limit)
    ax.set_xlabel(f"bytes of a rank, in GB; {HAS}")
    ax.set_title(title)
    legend(figure, _patches(ledgers, BYTES))
    return figure


def where_time_goes(steps: Rows, title: str) -> Figure:
    """A bar for each step: its seconds by kind."""
    figure, ax = plt.subplots(figsize=(WIDTH, 1.7 + 0.5 * len(steps)))
    _stacked(ax, steps, SECONDS, 1.0, "s")
    ax.set_xlabel("seconds of a step")
    ax.set_title(title)
    legend(figure, _patches(steps, SECONDS))
    return figure


def fit_and_time(ledgers: Rows, steps: Rows, limit: float, below: str, title: str) -> Figure:
    """Both, one above the other, each with its legend; `below` stands under the seconds."""
    figure, axes = plt.subplots(2, figsize=(WIDTH, 4.2 + 0.8 * len(ledgers)))
    _stacked(axes[0], ledgers, BYTES, 2**30, "GiB", limit)
    axes[0].set_xlabel(f"bytes of the fullest rank, in GiB; {HAS}")
    _stacked(axes[1], steps, SECONDS, 1.0, "s")
    axes[1].set_xlabel(below)
    for ax, rows, looks in ((axes[0], ledgers, BYTES), (axes[1], steps, SECONDS)):
        shown = _patches(rows, looks)
        place = {"loc": "lower left", "bbox_to_anchor": (0, 0.98), "ncols": 6, "fontsize": 9}
        ax.legend(list(shown.values()), list(shown), **place)
    figure.suptitle(textwrap.fill(title, 75), x=0.01, ha="left", weight="bold", fontsize=11)
    return figure


def _stacked(
    ax: Axes, rows: Rows, looks: Looks, unit: float, name: str, limit: float = 0.0
) -> None:
    """A bar for each row, its kinds one after the other, and its sum behind it, clear of the line of
    the `limit`, if there is one."""
    end = 1.17 * max(limit, _longest(rows, looks)) / unit
    for place, row in enumerate(rows.values()):
        left = 0.0
        for kind, amount in _shown(row, looks).items():
            look = _look(looks[kind])
            if amount / unit < HAIR * end:
                look["ec"] = "none"  # an edge would hide the bar
            ax.barh(place, amount / unit, left=left, height=0.6, **look)
            left += amount / unit
        crossed = limit / unit - 0.15 * end < left < limit / unit
        behind = (limit / unit if crossed else left) + 0.01 * end
        ax.text(behind, place, f"{left:.1f} {name}", va="center", weight="bold", fontsize=10)
    if limit:
        ax.axvline(limit / unit, **LIMIT)
    ax.set_yticks(range(len(rows)), rows)
    ax.tick_params(axis="y", length=0)
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, end))


def _longest(rows: Rows, looks: Looks) -> float:
    return max(sum(_shown(row, looks).values()) for row in rows.values())


def _shown(row: Mapping[str, float], looks: Looks) -> dict[str, float]:
    """The kinds of a row that a bar can show; a total is their sum."""
    return {kind: row[kind] for kind in looks if row.get(kind, 0) > 0}


def _patches(rows: Rows, looks: Looks) -> dict[str, Patch]:
    """The legend: the kinds that make up a hair of any row, and so can be seen."""
    hair = HAIR * _longest(rows, looks)
    shown = [kind for kind in looks if any(row.get(kind, 0) > hair for row in rows.values())]
    return {kind: Patch(**_look(looks[kind])) for kind in shown}


def _look(look: tuple[str, str]) -> dict:
    """What has a hatch is also paler: thin lines alone do not tell two small pieces apart."""
    color, hatch = look
    if not hatch:
        return {"fc": color, "ec": "white"}
    return {"fc": [(1 + part) / 2 for part in to_rgb(color)], "ec": color, "hatch": hatch}
