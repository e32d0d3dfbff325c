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


def two_sites() -> Figure:
    """Two sites, each with a foreman and two buildings; a register and a safe between them."""
    figure, ax = plots.canvas(height=3.8)
    ax.set_title("Foremen agree in the register, and the state of the work lies in the safe")
    ax.add_patch(Rectangle((3.65, 3.2), 2.7, 1.1, facecolor="white", edgecolor=INK))
    ax.text(5.0, 4.02, "register", ha="center", va="center", weight="bold")
    words = "at least 1 site, at most 2\nA: 0 and 1, B: 2 and 3"
    ax.text(5.0, 3.55, words, ha="center", va="center", fontsize=9)
    ax.add_patch(Rectangle((4.35, 0.4), 1.3, 1.2, facecolor="#E8E8E8", edgecolor=INK, lw=2))
    ax.add_patch(Circle((5.0, 1.15), 0.22, facecolor="white", edgecolor=INK))
    ax.text(5.0, 0.65, "safe", ha="center", va="center", weight="bold")
    for site, left in enumerate((0.1, 6.7)):
        ax.add_patch(Rectangle((left, 0.3), 3.2, 2.6, facecolor="#F5F5F5", edgecolor=GREY))
        ax.text(left + 0.15, 2.62, f"site {'AB'[site]}", va="center", fontsize=11)
        ax.plot(left + 1.3, 2.05, marker="^", markersize=14, color=INK)
        ax.text(left + 1.6, 2.05, "foreman", va="center", fontsize=10)
        for place, x in enumerate((left + 0.3, left + 1.75)):
            rank = 2 * site + place
            plots.building(ax, x, 0.5, width=1.15, height=1.0, label=str(rank), color="white")
        register, safe, door = [((3.6, 3.75), 4.3, 3.35), ((6.4, 3.75), 5.7, 6.65)][site]
        plots.arrow(ax, (left + 1.6, 2.95), register, bend=0.2 * (2 * site - 1))
        plots.arrow(ax, (door, 1.0), (safe, 1.0), color=plots.COLORS["update"])
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
        points = {"color": "white", "mec": INK, "label": "simulated"}
        ax.plot(simulated.keys(), [100 * share for share in simulated.values()], "o", **points)
    best = (2 * save * mtbf) ** 0.5
    ax.axvline(best, color=GREY, lw=1)
    ax.text(best * 1.05, 96, f"$\\tau^*$ = {best:.0f} min", va="top")
    ax.set_xscale("log")
    ax.set_xticks([3, 10, 30, 100, 200], ["3", "10", "30", "100", "200"])
    ax.minorticks_off()
    ax.set(xlabel="interval between checkpoints (minutes)", ylabel="time lost (% of the work)")
    ax.set_ylim(0, 100)
    ax.set_title("Frequent saves cost time, rare saves cost lost work")
    ax.legend(loc="upper left", bbox_to_anchor=(0.06, 1.0))
    return figure


def night(nodes: Any) -> Figure:
    """Who was there, against the clock, and which steps were computed, in their order. `nodes` is the
    job's, as the chapter has started it: its events(), its groups, and what has happened to it."""
    events, start = nodes.events(), nodes.happened[0][0]
    figure, (above, below) = plt.subplots(2, 1, figsize=(plots.WIDTH, 5.2), height_ratios=[1, 1.5])
    for group in nodes.groups:
        _present(above, [event for event in events if event["group"] == group], start)
    for when, kind, node in nodes.happened:
        if kind == "kill":
            cross = {"ms": 12, "color": RED, "mec": "white", "zorder": 5}
            above.plot(when - start, "BA".index(node), "X", **cross)
    above.set_yticks([0, 1], ["node B", "node A"])
    above.set(xlabel="time (s), measured", ylim=(-0.4, 1.7))
    above.set_xlim(0, 1.15 * (events[-1]["time"] - start))
    above.set_title("A new group after each kill (X) and return; hatched: Python and torch start")
    _computed(below, nodes.groups, events)
    return figure


def _computed(ax: Axes, groups: list[str], events: list[dict]) -> None:
    """A bar for each step that rank 0 computed, as high as its number; a gap before each group."""
    seen, place = set(), 0
    for group in groups:
        own = [e for e in events if (e["group"], e["rank"], e["event"]) == (group, 0, "step")]
        words = {"ha": "center", "va": "bottom", "fontsize": 9}
        middle, top = place + (len(own) + 1) / 2, own[-1]["step"] + 0.4
        ax.text(middle, top, f"from step {own[0]['step'] - 1}", **words)
        for event in own:
            place += 1
            color = RED if event["step"] in seen else plots.COLORS["forward"]
            ax.bar(place, event["step"], color=color, width=0.8)
            seen.add(event["step"])
        place += 1
    computed = place - len(groups)
    ax.set(xlabel="steps in the order of their computation", ylabel="steps done")
    ax.set_xticks([])
    ax.set_ylim(0, max(seen) + 3)
    again = computed - len(seen)
    ax.set_title(f"{len(seen)} steps count, and {again} of them were computed again (orange)")


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


def until_a_step_counts(seconds: dict[str, list[float]]) -> Figure:
    """How long it took after a kill, for each way to go on: a dot for each run, on one axis of time."""
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 2.4))
    for row, times in enumerate(reversed(seconds.values())):
        ax.plot(times, [row] * len(times), "o", ms=9, color=KIND_COLORS["recovery"], mec=INK)
    ax.set_yticks(range(len(seconds)), [*reversed(seconds)])
    ax.set_xscale("log")
    ax.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    ax.minorticks_off()
    ax.set(xlabel="seconds from a kill until a step counts again", ylim=(-0.6, len(seconds) - 0.4))
    ax.set_title("Survivors go on at once, a restart takes ten seconds")
    return figure


def uses(counts: dict[str, Tensor]) -> Figure:
    """How often each sample of an epoch was used, in the epoch's order, for each way to go on."""
    figure, panels = plt.subplots(1, len(counts), sharey=True, figsize=(plots.WIDTH, 2.8))
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
    figure.suptitle("Only a position in the global order uses each sample once", weight="bold")
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
    title = f"Save every {60 * best:.0f} min: the time lost is {total.min():.1%} of the work"
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
