"""Exercise 13.3, `plan`: what it asks for, and how it is checked."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import course_planner as estimate
from course_exercises.authoring import Exercise, Wrong
from course_planner import Hardware, Layout, Model
from course_planner.memory import fits, fullest, tensors

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
        "another-form": "Your result has another form. Return two things: a `Layout`, and a whole number of steps, at least 1.",
        "another-order": "Your layout does not do what is ordered. It has to be for all `gpus`, with dp x micro_batch x micro_batches = "
        "`batch` sequences, and to pass `Layout.check`, which says why a model cannot be split like this.",
        "does-not-fit": "The fullest rank holds more than a GPU has. Ask `estimate.memory` for each stage and `estimate.fits`, and take the "
        "largest.",
        "slow": "Your layout is legal and fits, and a faster one does too. Memory is a limit, and not the aim; a tensor group larger than a "
        "node, or data ranks only, send most through the network. Compare `estimate.step_time` of many layouts.",
        "other-failures": "You take another time between two failures. A job fails with the first of its nodes: divide a node's time by the "
        "number of nodes, which is GPUs over `hardware.node`.",
        "other-save": "You take another time for a save. A checkpoint has 14 bytes a parameter, since the optimizer is in it, and "
        "`disk` is what all ranks have together: divide one by the other, however many write.",
        "other-unit": "Your interval comes from a time in another unit, or is itself in seconds. Count all times in seconds, "
        "those of days too, and divide the interval by the seconds of a step: the answer is in steps.",
        "bad-interval": "Another interval loses less. Take the root of 2 C M, in seconds, where a failure costs half an interval on "
        "average, and divide it by the seconds of a step.",
    },
)
REGRET = 0.10
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

        def best(size=14, nodes=self.gpus / self.hardware.node, seconds=86_400, disk=self.disk):
            mtbf = self.node_days * seconds / nodes
            return math.sqrt(2 * size * parameters / disk * mtbf) / step

        save = 14 * parameters / self.disk
        mtbf = self.node_days * 86_400 / (self.gpus / self.hardware.node)
        return lambda steps: save / (steps * step) + steps * step / 2 / mtbf, best


@lru_cache(maxsize=8)
def _fastest(*cluster) -> float:
    plans, _ = estimate.search(*cluster, keep=1)
    return plans[0].time.seconds


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
        slug = None if got is None else "another-form"
        raise Wrong(slug, expected="(Layout, steps)", got=got)
    layout, best = got[0], _fastest(*order.arguments()[:5])
    for what, wanted, came in (
        ("GPUs", order.gpus, layout.gpus),
        ("sequences", order.batch, layout.sequences()),
    ):
        if came != wanted:
            raise Wrong("another-order", expected=f"{wanted} {what}", got=f"{came}")
    try:
        layout.check(order.model, order.seq)
    except ValueError as error:
        raise Wrong("another-order", expected="a legal layout", got=str(error)) from None
    held = fullest(order.model, layout, order.seq)
    if not fits(held, order.hardware):
        expected = f"at most {order.hardware.hbm_bytes / 1e9:.0f} GB of tensors"
        got = f"{tensors(held) / 1e9:.1f} GB"
        raise Wrong("does-not-fit", expected=expected, got=got)
    seconds = estimate.step_time(order.model, layout, order.seq, order.hardware).seconds
    if seconds > (1 + REGRET) * best:
        expected = f"at most {100 * REGRET:.0f} % more than {best:.3g} s"
        raise Wrong("slow", expected=expected, got=f"{seconds:.3g} s, {estimate.described(layout)}")


def _check_interval(order: _Order, got) -> None:
    layout, steps = got
    lost, best = order.losses(layout)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise Wrong("another-form", expected="a whole number of steps, at least 1", got=steps)
    least = min(lost(max(1, math.floor(best()))), lost(math.ceil(best())))
    if lost(steps) <= (1 + WASTE) * least:
        return
    seconds = estimate.step_time(order.model, layout, order.seq, order.hardware).seconds
    slips = {
        "other-failures": (best(nodes=1), best(nodes=order.gpus)),
        "other-save": (best(size=2), best(disk=order.disk * order.gpus)),
        "other-unit": (best() * seconds, max(1.0, best(seconds=24)), max(1.0, best(seconds=1))),
    }
    found = [slug for slug, all in slips.items() if any(abs(steps - one) <= 1 for one in all)]
    raise Wrong(
        (*found, "bad-interval")[0],
        expected=f"{round(best())} steps, {least:.1%} lost",
        got=f"{steps} steps, {lost(steps):.1%} lost",
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
