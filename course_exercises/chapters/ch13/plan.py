"""Exercise 13.3, `plan`: what it asks for, and how it is checked."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import course_planner as estimate
from course_exercises.authoring import Exercise, Wrong
from course_planner import Hardware, Layout, Model
from course_planner.searching import fullest

planning = Exercise(
    "13.3",
    "plan",
    points=3,
    minutes=20,
    kind="first",
    parameters=("model", "gpus", "batch", "seq", "hardware", "node_days", "disk"),
    hints=[
        "Two questions, one after the other: first the layout, for the seconds of a step, then the interval, in steps.",
        (
            "`estimate.search` gives the fastest layouts that fit. For the interval write down C, the seconds of a save, "
            "and M, the seconds between two failures of the whole job, each with its unit."
        ),
        (
            "C is 14 bytes times the parameters over `disk`. M is that of a node over the number of nodes, which is GPUs over "
            "those of a node. The root of 2 C M is in seconds: divide by those of a step, and round."
        ),
    ],
    misconceptions={
        "not-a-pair": "Asked are two things: a `Layout`, and a whole number of steps.",
        "gpus": "The layout is for another number of GPUs.",
        "batch": "The layout has another global batch: dp x micro_batch x micro_batches sequences.",
        "illegal": "The model cannot be split like this: `Layout.check` says why.",
        "does-not-fit": "The fullest rank holds more than 90 % of a GPU's memory.",
        "least-memory": "That is the layout with the least memory. Memory is a limit, and not the aim.",
        "data-only": "Only data ranks: their traffic goes through the network, and all states or gathers with it. Tensor ranks in a "
        "machine and stages between machines make it smaller.",
        "tensor-leaves-node": "The tensor group is larger than a node, and its traffic, the largest of all, goes through "
        "the network.",
        "slow": "It is legal and fits, and there is a faster one.",
        "one-node": "Your interval is that for one node. A job fails with the first of its nodes: divide the time between failures "
        "by their number.",
        "gpus-for-nodes": "You divide the time between failures by the GPUs. It is nodes that fail.",
        "seconds-not-steps": "The interval is in seconds. Asked are steps.",
        "no-two": "That is the root of C M. What a failure costs is half an interval on average: the root of 2 C M.",
        "other-unit": "Far too often: is a time in days or hours where the others are in seconds?",
        "parameters-only": "A checkpoint with 2 bytes a parameter has no optimizer in it: 14.",
        "saved-by-all": "`disk` is what all ranks have together: a checkpoint takes its bytes over it, however many write.",
        "steps-not-whole": "The interval is a whole number of steps, at least 1.",
        "bad-interval": "Another interval loses less.",
    },
)
REGRET, MARGIN = 0.10, 0.9
WASTE = 0.05  # of an interval: the root of C M, without the 2, loses 6 % more than the best


@dataclass(frozen=True)
class _Order:
    """What `plan` gets."""

    model: Model
    gpus: int
    batch: int
    seq: int
    hardware: Hardware
    node_days: float
    disk: float

    def arguments(self) -> tuple:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    def losses(self, layout: Layout) -> tuple[Callable[[int], float], Callable[..., float]]:
        """The share of time that is lost, by the steps between two saves; and the best number of
        them, with a slip in its arithmetic."""
        step = estimate.step_time(self.model, layout, self.seq, self.hardware).seconds
        parameters = estimate.parameters(self.model)

        def best(
            size=14, nodes=self.gpus / self.hardware.node, seconds=86_400, disk=self.disk, two=2
        ):
            mtbf = self.node_days * seconds / nodes
            return math.sqrt(two * size * parameters / disk * mtbf) / step

        save = 14 * parameters / self.disk
        mtbf = self.node_days * 86_400 / (self.gpus / self.hardware.node)
        return lambda steps: save / (steps * step) + steps * step / 2 / mtbf, best


@lru_cache(maxsize=8)
def _fastest(*cluster) -> float:
    plans, _ = estimate.search(*cluster, keep=1)
    return plans[0].time.seconds


@lru_cache(maxsize=8)
def _smallest(order: _Order) -> int:
    """The least bytes of any layout that is searched."""
    roomy = replace(order.hardware, hbm_bytes=10**15)
    plans, _ = estimate.search(*order.arguments()[:4], roomy, keep=10**6)
    return min(plan.memory["total"] for plan in plans)


def _drawn(draw) -> _Order:
    """A cluster on which tensor ranks and stages matter, and a failure every few hours."""
    heads = draw.choice([48, 64])  # 16 tensor ranks are legal, and leave the node
    model = Model(draw.choice([40, 48]), 128 * heads, heads, 51_200, tied=False, bias=False)
    gpus = draw.choice([512, 1024])
    links = {"intra_bandwidth": draw.integer(200, 400) * 1e9, "intra_latency": 5e-6}
    links |= {"inter_bandwidth": draw.integer(8, 14) * 1e9, "inter_latency": 15e-6}
    hardware = Hardware(draw.integer(300, 500) * 1e12, 40 * 10**9, 2e12, 8, **links)
    more = {"node_days": float(draw.integer(40, 90)), "disk": draw.integer(2, 5) * 1e9}
    return _Order(model, gpus, 4 * gpus, 2048, hardware, **more)


def _check_layout(order: _Order, got) -> None:
    if not isinstance(got, tuple) or len(got) != 2 or not isinstance(got[0], Layout):
        raise Wrong(None if got is None else "not-a-pair", expected="(Layout, steps)", got=got)
    layout = got[0]
    if layout.gpus != order.gpus:
        raise Wrong("gpus", expected=order.gpus, got=layout.gpus)
    if layout.sequences() != order.batch:
        raise Wrong("batch", expected=f"{order.batch} sequences", got=layout.sequences())
    try:
        layout.check(order.model, order.seq)
    except ValueError as error:
        raise Wrong("illegal", expected="a legal layout", got=str(error)) from None
    held = fullest(order.model, layout, order.seq)["total"]
    limit = MARGIN * order.hardware.hbm_bytes
    if held > limit:
        expected = f"at most {limit / 1e9:.0f} GB"
        raise Wrong("does-not-fit", expected=expected, got=f"{held / 1e9:.1f} GB")
    seconds = estimate.step_time(order.model, layout, order.seq, order.hardware).seconds
    best = _fastest(*order.arguments()[:5])
    if seconds > (1 + REGRET) * best:
        slug = "slow"
        if held <= 1.001 * _smallest(order):
            slug = "least-memory"
        elif layout.tp > order.hardware.node:
            slug = "tensor-leaves-node"
        elif layout.dp == order.gpus:
            slug = "data-only"
        expected = f"at most {100 * REGRET:.0f} % more than {best:.3g} s"
        raise Wrong(slug, expected=expected, got=f"{seconds:.3g} s")


def _check_interval(order: _Order, got) -> None:
    layout, steps = got
    lost, best = order.losses(layout)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise Wrong("steps-not-whole", expected="a whole number of steps", got=steps)
    least = min(lost(max(1, math.floor(best()))), lost(math.ceil(best())))
    if lost(steps) <= (1 + WASTE) * least:
        return
    seconds = estimate.step_time(order.model, layout, order.seq, order.hardware).seconds
    slips = {
        "one-node": best(nodes=1),
        "gpus-for-nodes": best(nodes=order.gpus),
        "seconds-not-steps": best() * seconds,
        "parameters-only": best(size=2),
        "no-two": best(two=1),
        "saved-by-all": best(disk=order.disk * order.gpus),
        "other-unit": max(1.0, best(seconds=24)),
    }
    found = [slug for slug, value in slips.items() if abs(steps - value) <= 1]
    if steps <= max(1.0, best(seconds=1)) + 1:
        found.append("other-unit")
    got = f"{steps} steps, {lost(steps):.1%} lost"
    raise Wrong(
        (*found, "bad-interval")[0], expected=f"{round(best())} steps, {least:.1%} lost", got=got
    )


@planning.requires("a layout that is legal, fits, and is fast", seconds=60)
def a_layout_that_is_legal(answer, draw):
    order = _drawn(draw)
    _check_layout(order, answer(*order.arguments()))


@planning.requires("the interval between two checkpoints", seconds=120, needs_earlier=True)
def the_interval_between_two_checkpoints(answer, draw):
    order = _drawn(draw)
    for disk in (order.disk, 1e7 * order.disk):  # with the second, a save is over in no time
        asked = replace(order, disk=disk)
        got = answer(*asked.arguments())
        _check_layout(asked, got)
        _check_interval(asked, got)
