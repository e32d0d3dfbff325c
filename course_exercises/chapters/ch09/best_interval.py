"""Exercise 9.4, `best_interval`: what it asks for, and how it is checked."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from course_exercises.authoring import Exercise, Wrong, expect, expect_type


@dataclass(frozen=True)
class _Cluster:
    """The arguments of `best_interval`, and what follows from them; times in seconds."""

    nodes: int
    node_mtbf_hours: float
    save: float
    recovery: float
    step: float

    def arguments(self) -> tuple:
        return self.nodes, self.node_mtbf_hours, self.save, self.recovery, self.step

    @property
    def mtbf(self) -> float:
        return 3600 * self.node_mtbf_hours / self.nodes

    def lost(self, steps: int) -> float:
        seconds = steps * self.step
        return self.save / seconds + (seconds / 2 + self.recovery) / self.mtbf

    @property
    def ideal(self) -> float:
        """The best interval in steps, before it is made whole."""
        return math.sqrt(2 * self.save * self.mtbf) / self.step

    @property
    def steps(self) -> int:
        return min(max(1, math.floor(self.ideal)), math.ceil(self.ideal), key=self.lost)


def _cluster(draw, nodes: int) -> _Cluster:
    """One that has a failure every few hours and saves every few hundred steps."""
    hours = nodes * draw.number(20, 30)
    save = draw.number(50, 60)
    return _Cluster(nodes, hours, save, save * draw.number(20, 30), draw.number(5, 6))


def _with_ideal(draw, steps: float) -> _Cluster:
    """One whose best interval, before it is made whole, is `steps`."""
    nodes, hours, save = draw.integer(5, 9), draw.number(300, 500), draw.number(20, 30)
    seconds = math.sqrt(2 * save * 3600 * hours / nodes)
    return _Cluster(nodes, hours, save, draw.number(50, 60), seconds / steps)


def _answered(answer, cluster: _Cluster) -> tuple:
    """The answer's pair; raises Wrong where it is none."""
    got = answer(*cluster.arguments())
    expect_type(got, (tuple, list))
    if len(got) != 2:
        raise Wrong(expected="a pair: steps and share", got=got)
    if isinstance(got[0], float) and isinstance(got[1], int):
        raise Wrong("swapped", expected="a pair: steps and share", got=got)
    return tuple(got)


def _close_to(value: float) -> Callable[[Any], bool]:
    return lambda got: abs(got - value) <= 1.01


def _expect_steps(got: Any, cluster: _Cluster) -> None:
    c = cluster
    mistakes = {
        "not-whole": lambda got: abs(got - c.steps) <= 1.01 and got != int(got),
        "rounded": _close_to(c.steps),
        "recovery-in-mtbf": _close_to(math.sqrt(2 * c.save * (c.mtbf + c.recovery)) / c.step),
        "save-subtracted": lambda got: any(
            abs(got - (math.sqrt(2 * c.save * mtbf) - c.save) / c.step) <= 1.01
            for mtbf in (c.mtbf, c.mtbf + c.recovery)
        ),
        "nodes-forgotten": _close_to(c.ideal * math.sqrt(c.nodes)),
        "nodes-multiply": _close_to(c.ideal * c.nodes),
        "hours": lambda got: (
            min(abs(got * 60 / c.ideal - 1), abs(got * 60**0.5 / c.ideal - 1)) < 0.1
        ),
        "no-half": _close_to(c.ideal / math.sqrt(2)),
        "recovery-in-interval": _close_to(math.sqrt(2 * (c.save + c.recovery) * c.mtbf) / c.step),
        "in-seconds": _close_to(c.ideal * c.step),
        "not-rooted": _close_to(c.ideal**2 * c.step),
    }
    expect(got, c.steps, what="steps", likely=mistakes)
    if isinstance(got, float):
        raise Wrong("not-whole", expected=f"the integer {c.steps}", got=got)


interval = Exercise(
    "9.4",
    "best_interval",
    points=2,
    minutes=15,
    kind="first",
    parameters=("nodes", "node_mtbf_hours", "save", "recovery", "step"),
    hints=[
        (
            "Write the lost share as a function of the number of steps first. Which of its terms "
            "grow with it, and which shrink?"
        ),
        (
            "With ten nodes, each of which lasts a thousand hours, something fails every hundred. "
            "At the minimum of a sum `a / T + b * T` both terms are equal."
        ),
        (
            "Find the mean time between failures of the job in seconds. The best interval is the root "
            "of twice this time the duration of a save; divide by a step's duration. Of the two whole "
            "numbers beside it, at least 1, take the one at which your function is smaller."
        ),
    ],
    misconceptions={
        "nodes-forgotten": "Your interval is that of one node. The job stops with the first node "
        "that fails, so its mean time between failures is a node's divided by the nodes.",
        "nodes-multiply": "With more nodes you save more rarely. More nodes fail more often.",
        "hours": "Units are mixed: a save and a step are given in seconds, a node's time between "
        "failures in hours of 3,600 of them.",
        "no-half": "Your interval is too short by the root of 2: a failure costs half an interval on "
        "average, not a whole one.",
        "recovery-in-interval": "The recovery has got into the interval. It costs the same however "
        "often you save; it belongs into the share only.",
        "recovery-in-mtbf": "You add the recovery to the time between failures. Daly (2006) does so; here L of "
        "section 3 is asked, in which the recovery is a term that the interval does not change.",
        "save-subtracted": "You subtract the save from the interval, as Daly (2006) does, who counts it as a part "
        "of the interval. L of section 3 does not: its minimum is at the root alone.",
        "in-seconds": "That is the interval in seconds. Asked are steps.",
        "not-rooted": "The root is missing.",
        "not-whole": "A checkpoint comes after a whole number of steps: return an integer.",
        "zero-steps": "Where a single step takes longer than the ideal interval, a checkpoint after "
        "each step is the best that can be had: 1, not 0.",
        "rounded": "Of the two whole numbers beside the ideal you take the one that loses more, because "
        "you round, or because you compare other shares than those of L.",
        "search-ends": "Your interval is far too short where the best one has very many steps: do you search "
        "among the first so many? The ideal interval has a formula.",
        "never-one": "One step between two checkpoints is allowed, and here the best.",
        "swapped": "First the steps, then the share.",
        "interval-in-steps": "The interval in L is a time. Your share takes the number of steps for it.",
        "share-of-one-node": "Your share counts the failures of one node, not those of the job.",
        "share-at-ideal": "The share is that of the interval before it was made whole. Return what the "
        "whole number of steps loses.",
        "recovery-per-save": "Your share counts a recovery with every save. One comes with every failure: divide "
        "it by the job's mean time between failures.",
        "of-all-time": "That is the lost time as a share of all time, work and losses. L is a share of the "
        "work's time.",
        "no-saving": "The share lacks what the saves cost.",
        "no-recovery": "The share lacks what the recoveries cost.",
        "whole-interval": "The share counts a whole interval per failure. On average it is half.",
        "kept-not-lost": "That is the share which is kept.",
        "percent": "The share is a number from 0 to 1, not percents.",
    },
)


@interval.requires("one node: the interval that loses least, in steps")
def one_node_the_interval_that_loses_least(answer, draw):
    cluster = _cluster(draw, 1)
    steps, _ = _answered(answer, cluster)
    _expect_steps(steps, cluster)


@interval.requires("many nodes fail more often than one")
def many_nodes_fail_more_often_than(answer, draw):
    for nodes in (draw.integer(3, 9), draw.integer(100, 900)):
        cluster = _cluster(draw, nodes)
        steps, _ = _answered(answer, cluster)
        _expect_steps(steps, cluster)
    cluster = _with_ideal(draw, draw.number(150_000, 200_000))
    steps, _ = _answered(answer, cluster)
    expect(steps, cluster.steps, what="steps", likely={"search-ends": steps < 0.9 * cluster.steps})


@interval.requires("the share that this interval loses", needs_earlier=True)
def the_share_that_this_interval_loses(answer, draw):
    for nodes in (1, draw.integer(3, 9)):
        cluster = _cluster(draw, nodes)
        _, share = _answered(answer, cluster)
        seconds = cluster.steps * cluster.step
        expected = cluster.lost(cluster.steps)
        in_steps = replace(cluster, step=1).lost(cluster.steps)
        one_node = replace(cluster, nodes=1).lost(cluster.steps)
        mistakes = {
            "interval-in-steps": in_steps,
            "share-of-one-node": one_node if cluster.nodes > 1 else False,
            "recovery-per-save": expected
            + cluster.recovery / seconds
            - cluster.recovery / cluster.mtbf,
            "of-all-time": expected / (1 + expected),
            "no-saving": expected - cluster.save / seconds,
            "no-recovery": expected - cluster.recovery / cluster.mtbf,
            "whole-interval": expected + seconds / 2 / cluster.mtbf,
            "kept-not-lost": 1 - expected,
            "percent": 100 * expected,
        }
        expect(share, expected, what="the share", likely=mistakes)


@interval.requires(
    "long steps: at least one of them",
    failures={"ZeroDivisionError": "zero-steps"},
    needs_earlier=True,
)
def long_steps_at_least_one_of_them(answer, draw):
    cluster = _with_ideal(draw, draw.number(0.2, 0.4))
    steps, _ = _answered(answer, cluster)
    likely = {"zero-steps": lambda got: got == 0, "never-one": lambda got: got > 1}
    expect(steps, 1, what="steps", likely=likely)


@interval.requires("of two whole numbers the better one", needs_earlier=True)
def of_two_whole_numbers_the_better(answer, draw):
    # a little above the root of 1 * 2, where both lose the same, and below the middle
    beside_one = draw.number(1.1, 1.35), draw.number(1.43, 1.48)
    for ideal in (*beside_one, draw.number(4.1, 4.3), draw.number(4.6, 4.9)):
        cluster = _with_ideal(draw, ideal)
        steps, share = _answered(answer, cluster)
        likely = {"rounded": steps in (math.floor(ideal), math.ceil(ideal))}
        expect(steps, cluster.steps, what="steps", likely=likely)
        likely = {"share-at-ideal": cluster.lost(cluster.ideal)}
        expect(share, cluster.lost(steps), what="the share", likely=likely)
