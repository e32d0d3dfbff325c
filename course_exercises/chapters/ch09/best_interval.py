"""Exercise 9.4, `best_interval`: what it asks for, and how it is checked."""

import math
from collections.abc import Callable
from dataclasses import dataclass
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

    def __str__(self) -> str:
        text = "nodes {}, node_mtbf_hours {:.6g}, save {:.6g}, recovery {:.6g}, step {:.6g}"
        return text.format(*self.arguments())

    @property
    def mtbf(self) -> float:
        return 3600 * self.node_mtbf_hours / self.nodes

    def lost(self, steps: float) -> float:
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


def _times(*values: float) -> Callable[[Any], bool]:
    """Whether what came is one of these, up to rounding to a whole number of steps or of anything else."""
    return lambda got: any(abs(got - value) <= max(1.01, 1e-6 * value) for value in values)


def _expect_steps(got: Any, cluster: _Cluster) -> None:
    ideal, seconds = cluster.ideal, cluster.ideal * cluster.step
    mistakes = {
        "not-whole": lambda got: _times(cluster.steps)(got) and got != int(got),
        "other-side": _times(cluster.steps),
        "one-node": _times(ideal * math.sqrt(cluster.nodes), ideal * cluster.nodes),
        "units": _times(seconds, ideal / 60, ideal / math.sqrt(60), seconds / 60),
        "no-minimum": lambda got: got > 0,
    }
    expect(got, cluster.steps, what=f"steps for {cluster}", likely=mistakes)
    if isinstance(got, float):
        raise Wrong("not-whole", expected=f"the integer {cluster.steps}", got=got)


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
        "one-node": "More nodes fail more often, and the job stops with the first of them. Its mean time between "
        "failures is that of a node, divided by the number of nodes.",
        "units": "Units are mixed. A node's time between failures is given in hours of 3,600 seconds, all other times "
        "in seconds, and the answer is in steps.",
        "no-minimum": "At your interval L of section 3 is not smallest. It is at the root of twice the save times the "
        "job's mean time between failures. The recovery does not move it, and nothing is added or taken off, as "
        "Daly (2006) does, who counts both otherwise.",
        "search-ends": "Your interval is far too short where the best one has very many steps: do you search "
        "among the first so many? The ideal interval has a formula.",
        "not-whole": "A checkpoint comes after a whole number of steps: return an integer.",
        "other-side": "Of the two whole numbers beside the ideal you take the one that loses more, because "
        "you round, or because you compare other shares than those of L.",
        "one-step": "Where a single step takes longer than the ideal interval, a checkpoint after each step is the "
        "best that can be had: 1 step, neither 0 nor more.",
        "swapped": "First the steps, then the share.",
        "share-at-ideal": "The share is that of the interval before it was made whole. Return what the "
        "whole number of steps loses.",
        "not-the-share": "Your share is not L of section 3. That has three terms: the save divided by the interval, "
        "and half the interval and the recovery, both divided by the job's mean time between failures, all in "
        "seconds. It is what is lost for each second of work, from 0 to 1, neither what is kept nor percent.",
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
    expect(
        steps,
        cluster.steps,
        what=f"steps for {cluster}",
        likely={"search-ends": steps < 0.9 * cluster.steps},
    )


@interval.requires("the share that this interval loses", needs_earlier=True)
def the_share_that_this_interval_loses(answer, draw):
    for nodes in (1, draw.integer(3, 9)):
        cluster = _cluster(draw, nodes)
        _, share = _answered(answer, cluster)
        what = f"the share of {cluster.steps} steps for {cluster}"
        expect(share, cluster.lost(cluster.steps), what=what, likely={"not-the-share": True})


@interval.requires(
    "long steps: at least one of them",
    failures={"ZeroDivisionError": "one-step"},
    needs_earlier=True,
)
def long_steps_at_least_one_of_them(answer, draw):
    cluster = _with_ideal(draw, draw.number(0.2, 0.4))
    steps, _ = _answered(answer, cluster)
    expect(steps, 1, what=f"steps for {cluster}", likely={"one-step": True})


@interval.requires("of two whole numbers the better one", needs_earlier=True)
def of_two_whole_numbers_the_better(answer, draw):
    # a little above the root of 1 * 2, where both lose the same, and below the middle
    beside_one = draw.number(1.1, 1.35), draw.number(1.43, 1.48)
    for ideal in (*beside_one, draw.number(4.1, 4.3), draw.number(4.6, 4.9)):
        cluster = _with_ideal(draw, ideal)
        steps, share = _answered(answer, cluster)
        likely = {"other-side": steps in (math.floor(ideal), math.ceil(ideal))}
        expect(steps, cluster.steps, what=f"steps for {cluster}", likely=likely)
        likely = {"share-at-ideal": cluster.lost(ideal)}
        expect(share, cluster.lost(steps), what="the share", likely=likely)
