"""The pictures of chapter 9: foremen and a register, a night of failures, how often to save."""

import random
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle
from torch import Tensor

from course_utils import plots

INK, RED, GREY = plots.COLORS["ink"], plots.COLORS["wrong"], "#8C8C8C"
STARTING = {"color": "white", "hatch": "////"}  # Python and torch start
KIND_COLORS = {
    "work": plots.COLORS["forward"],
    "saving": plots.COLORS["update"],
    "lost work": plots.COLORS["wrong"],
    "recovery": plots.COLORS["waiting"],
}


def two_buildings() -> Figure:
    """A foreman and two workers in each, a register between them, and a safe."""
    figure, ax = plots.canvas(height=4.0)
    ax.add_patch(Rectangle((3.7, 3.55), 2.6, 1.15, facecolor="white", edgecolor=INK))
    ax.text(5.0, 4.48, "register", ha="center", va="center", weight="bold")
    ax.text(5.0, 3.95, "shift 3:  A is 0, B is 1\nat least 1, at most 2", ha="center", va="center")
    for x, name, shade in ((0.6, "building A", 0), (6.9, "building B", 1)):
        plots.building(ax, x, 0.75, width=2.5, height=2.1, color=plots.RANK_COLORS[shade])
        ax.text(x + 1.25, 0.6, name, ha="center", va="top")
        ax.plot(x + 0.5, 1.75, marker="^", markersize=15, color=INK)
        ax.text(x + 0.85, 1.75, "foreman", va="center", fontsize=10)
        for worker in range(2):
            ax.plot(x + 0.5 + 0.7 * worker, 1.2, marker="o", markersize=11, color="white", mec=INK)
        ax.text(x + 1.5, 1.2, "workers", va="center", fontsize=10)
        register = (3.65, 4.0) if shade == 0 else (6.35, 4.0)
        plots.arrow(ax, (x + 1.25, 2.95), register, bend=0.2 if shade == 0 else -0.2)
        safe = (4.15, 0.95) if shade == 0 else (5.85, 0.95)
        side = x + 2.55 if shade == 0 else x - 0.05
        plots.arrow(ax, (side, 0.95), safe, color=plots.COLORS["update"])
    ax.text(1.6, 3.75, "signs in", ha="center")
    ax.text(8.4, 3.75, "signs in", ha="center")
    ax.add_patch(Rectangle((4.2, 0.4), 1.6, 1.3, facecolor="#E8E8E8", edgecolor=INK, lw=2))
    ax.add_patch(Circle((5.0, 1.2), 0.26, facecolor="white", edgecolor=INK))
    ax.text(5.0, 0.6, "safe", ha="center", va="center", weight="bold")
    return figure


def time_lost(
    save: float, recovery: float, mtbf: float, simulated: dict[float, float] | None = None
) -> Figure:
    """The share of time that is lost, for each interval between checkpoints, all in minutes;
    `simulated` is the share that dice gave for some of them."""
    taus = np.geomspace(3, 200, 60)
    shares = {"saving": save / taus, "lost work": taus / 2 / mtbf}
    total = shares["saving"] + shares["lost work"] + recovery / mtbf
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.4))
    ax.plot(taus, 100 * total, color=INK, label="formula" if simulated else "time lost", lw=2.2)
    for (name, share), style in zip(shares.items(), ("--", ":")):
        ax.plot(taus, 100 * share, style, color=KIND_COLORS[name], label=name, lw=2.2)
    if simulated:
        points = {"color": plots.COLORS["forward"], "mec": INK, "label": "simulated"}
        ax.plot(simulated.keys(), [100 * share for share in simulated.values()], "o", **points)
    best = (2 * save * mtbf) ** 0.5
    ax.axvline(best, color=GREY, lw=1)
    ax.text(best * 1.05, 96, f"$\\tau^*$ = {best:.0f} min", va="top")
    ax.set_xscale("log")
    ax.set_xticks([3, 10, 30, 100, 200], ["3", "10", "30", "100", "200"])
    ax.minorticks_off()
    ax.set(xlabel="interval between checkpoints (minutes)", ylabel="time lost (% of the work)")
    ax.set_ylim(0, 100)
    ax.set_title("Too often costs saving, too rarely costs work")
    ax.legend(loc="upper left", bbox_to_anchor=(0.06, 1.0))
    return figure


def night(nodes: Any) -> Figure:
    """Who was there, and how far the training was, against the clock. `nodes` is the job's, as the chapter
    has started it: its events(), its groups, and what has happened to it."""
    events, start = nodes.events(), nodes.happened[0][0]
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(plots.WIDTH, 4.6), height_ratios=[1, 1.5]
    )
    previous = None
    for group in nodes.groups:
        members = [event for event in events if event["group"] == group]
        _present(above, members, start)
        own = [e for e in members if e["rank"] == 0 and e["event"] != "born"]
        curve = [(e["time"] - start, e["step"]) for e in own]
        if previous:
            below.plot(*zip(previous, curve[0]), color=GREY, ls="--", lw=1.2)
        below.plot(*zip(*curve), color=plots.COLORS["backward"], marker=".", lw=2)
        words = {"va": "center", "textcoords": "offset points", "fontsize": 9}
        below.annotate(f"from step {curve[0][1]}", (curve[-1][0], curve[0][1]), (4, 0), **words)
        previous = curve[-1]
    for when, kind, node in nodes.happened:
        if kind == "kill":
            cross = {"ms": 12, "color": RED, "mec": "white", "zorder": 5}
            above.plot(when - start, "BA".index(node), "X", **cross)
            below.axvline(when - start, color=RED, lw=1.2)
    above.set_yticks([0, 1], ["node B", "node A"])
    above.set_ylim(-0.4, 1.7)
    above.set_title("Who was there, as which rank (hatched: Python and torch start; X: killed)")
    below.set(xlabel="time (s), measured", ylabel="steps done", ylim=(-1, 21))
    below.set_xlim(0, 1.2 * (events[-1]["time"] - start))
    below.set_yticks([0, 5, 10, 15, 20])
    below.set_title("How far the training was: a new group starts at a checkpoint")
    below.grid(axis="y", color="#E5E5E5")
    return figure


def _present(ax: Axes, members: list[dict], start: float) -> None:
    """The workers of a group: a bar on each node's row, with its rank."""
    for row, node in enumerate("BA"):
        own = [event for event in members if event["node"] == node]
        if not own:
            continue
        born, ready, end = (own[i]["time"] - start for i in (0, 1, -1))
        ax.barh(row, ready - born, left=born, height=0.45, edgecolor=GREY, **STARTING)
        color = plots.RANK_COLORS[own[0]["rank"]]
        ax.barh(row, end - ready, left=ready, height=0.45, color=color, edgecolor=INK)
        label = f"rank {own[0]['rank']} of {own[0]['ranks']}"
        ax.text(born, row + 0.28, label, va="bottom", fontsize=9)


def recoveries(measured: dict[str, tuple[float, float]]) -> Figure:
    """Seconds until a new worker was born, and until the group could train, for each event."""
    noticed, started = zip(*measured.values())
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 2.5))
    waiting = {"color": plots.COLORS["waiting"], "edgecolor": INK}
    ax.barh(list(measured), noticed, label="notice, stop, rendezvous", **waiting)
    words = "start Python and torch, load"
    ax.barh(list(measured), started, left=noticed, label=words, edgecolor=INK, **STARTING)
    ax.invert_yaxis()
    ax.set(xlabel="seconds until the new group is ready to train, measured")
    ax.set_title("What a recovery is made of", pad=26)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 0.98), ncols=2)
    return figure


def uses(counts: dict[str, Tensor]) -> Figure:
    """How often each sample of an epoch was used, in the epoch's order, for each way to go on."""
    figure, panels = plt.subplots(1, len(counts), sharey=True, figsize=(plots.WIDTH, 2.6))
    for ax, (name, times) in zip(panels, counts.items()):
        place = range(len(times))
        ax.fill_between(place, times, step="mid", color=plots.COLORS["forward"])
        ax.fill_between(place, times, 1, where=times > 1, step="mid", color=RED)
        never = [sample for sample, used in enumerate(times) if used == 0]
        if never:
            middle = sum(never) / len(never)
            ax.text(middle, 0.5, "never", ha="center", va="center", fontsize=9)
        ax.set(title=name, xlabel="sample, in the epoch's order", ylim=(0, 2.4), yticks=[0, 1, 2])
        ax.set(xlim=(0, len(times)), xticks=[0, len(times) // 2, len(times)])
    panels[0].set_ylabel("times used")
    return figure


def how_often(mtbf: float, save: float, recovery: float) -> Figure:
    """The time that is lost, for every interval, and a day at the best one; all in hours."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(plots.WIDTH, 3.9), width_ratios=[1, 1.15])
    intervals = np.geomspace(0.02, 24, 400)
    saving, lost = save / intervals, intervals / (2 * mtbf)
    total = saving + lost + recovery / mtbf
    best = intervals[total.argmin()]
    left.plot(intervals, 100 * total, color=INK, lw=2.2, label="time lost")
    left.plot(intervals, 100 * saving, "--", color=KIND_COLORS["saving"], label="saving")
    left.plot(intervals, 100 * lost, ":", color=KIND_COLORS["lost work"], lw=2.2, label="lost work")
    left.plot(best, 100 * total.min(), "o", color=INK)
    left.set_xscale("log")
    left.set_xticks([0.05, 0.25, 1, 4, 24], ["3 min", "15 min", "1 h", "4 h", "24 h"])
    left.minorticks_off()
    left.set(xlabel="interval between checkpoints", ylabel="time lost (% of the work)")
    left.set_ylim(0, max(60, 130 * total.min()))
    title = f"Save every {60 * best:.0f} min: {total.min():.1%} of the work is lost time"
    if (
        best + save > mtbf / 2
    ):  # the formula takes the interval for short against the time to a failure
        title = "Failures come as fast as saves: the formula does not hold, look at the day"
    figure.suptitle(title, weight="bold")
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "fontsize": 9}
    above |= {"handletextpad": 0.4, "columnspacing": 0.8}
    left.legend(ncols=3, handlelength=1.4, **above)
    _day(right, _spans(best, save, mtbf, recovery))
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in KIND_COLORS.values()]
    right.legend(handles, KIND_COLORS, ncols=4, handlelength=0.8, **above)
    return figure


def _day(ax: Axes, spans: list[tuple[str, float, float]]) -> None:
    """24 hours in six rows of four."""
    for kind, begin, end in spans:
        for row in range(int(begin // 4), 6):
            a, b = max(begin, 4 * row), min(end, 4 * row + 4)
            if a < b:
                ax.barh(row, b - a, left=a - 4 * row, color=KIND_COLORS[kind], height=0.7)
    ax.set_yticks(range(6), [f"{4 * row} h" for row in range(6)])
    ax.set_ylim(5.6, -0.6)
    ax.set(xlabel="hours of the row (simulated)", ylabel="a day, from", xlim=(0, 4))


def _spans(interval: float, save: float, mtbf: float, recovery: float):
    """24 hours as (kind, from, to), with failures thrown by dice."""
    dice, spans, clock = random.Random(3), [], 0.0
    failure = dice.expovariate(1 / mtbf)
    while clock < 24:
        saved = clock + interval + save
        if saved <= failure:
            spans += [("work", clock, clock + interval), ("saving", clock + interval, saved)]
            clock = saved
        else:
            spans += [("lost work", clock, failure), ("recovery", failure, failure + recovery)]
            clock = failure + recovery
            failure = clock + dice.expovariate(1 / mtbf)
    return spans
