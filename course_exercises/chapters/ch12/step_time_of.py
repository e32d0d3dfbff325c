"""Exercise 12.3, `step_time_of`: what it asks for, and how it is checked."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from course_exercises.authoring import Exercise, expect
from course_exercises.authoring.compare import same
from course_exercises.chapters.ch12.shared import GROUPS, USES_ESTIMATE, Step, inside, own, sent
from course_planner import Call, Hardware, Layout

timing = Exercise(
    "12.3",
    "step_time_of",
    points=3,
    minutes=30,
    kind="core",
    parameters=("kernels", "calls", "layout", "bubble", "hardware"),
    hints=[
        (
            "Do the kernels alone first. Of what two times is each the larger, and what is the time of all, one after the "
            "other?"
        ),
        (
            "For a call you need n, the size of its group; the link; and the rounds of its ring, which each cost a "
            "latency and a piece of payload / n. The link follows from the order: multiply the sizes of the groups "
            "further in, and its own. More than a node has, and it goes between nodes."
        ),
        (
            "In the way of computing: kernels and all calls but those of dp, added up, divided by 1 - bubble. Beside it: the "
            "calls of dp, added up. The step takes the longer of the two."
        ),
    ],
    misconceptions={
        "uses-estimate": USES_ESTIMATE,
        "other-unit": "The right time in another unit: asked are seconds.",
        "roofline-sum": "You add a kernel's computing and its memory traffic. Both go on at once: the longer one counts.",
        "roofline-of-sums": "You compare the sums of all kernels. Each kernel has a limit of its own: take the larger time of "
        "each, then add.",
        "peak-only": "You leave the memory out: a kernel that moves much takes bytes / bandwidth.",
        "memory-only": "You leave the FLOPs out: a kernel takes the larger of both times.",
        "latency-left-out": "The latencies are missing. Each round of a ring costs one, however small its piece.",
        "latency-once": "You count one latency a call. A ring of n has n - 1 rounds a pass, and each waits for one.",
        "rounds-of-one-pass": "All-reduce has two passes of n - 1 rounds: twice the latencies too.",
        "whole-payload": "In each pass of a ring a rank sends (n - 1) / n of the payload, n - 1 pieces of 1 / n.",
        "all-reduce-once": "All-reduce has two passes: first pieces are summed, then the sums go round.",
        "one-call": "`calls` says how many there are, each with this payload.",
        "send-on-a-ring": "A `send` is one message: one latency and the whole payload.",
        "inside-always": "You take the link inside a node for all groups. A group that reaches over more ranks than a node has "
        "goes between nodes.",
        "between-always": "You take the link between nodes for all groups. Groups whose ranks lie in one node use the faster one.",
        "size-only": "A group counts as inside if its *size* fits a node. Its ranks lie apart by the product of the groups "
        "further in.",
        "less-than-node": "A group that reaches over exactly as many ranks as a node has lies inside it: at most.",
        "order-ignored": "You take the order tp, cp, dp, pp for given. `layout.order` says which group is innermost.",
        "order-reversed": "`order` begins with the innermost group, whose ranks are neighbours.",
        "everything-overlaps": "You take the maximum where nothing overlaps: the calls of tp, cp and pp stand in the way of "
        "computing, so their times are added.",
        "nothing-overlaps": "You add the calls of dp. They go on beside everything else: take the maximum.",
        "beside-kernels-only": "The calls of dp go on beside kernels and the other calls, and not beside kernels alone.",
        "bubble-ignored": "The bubble is missing: computing and its calls are only 1 - bubble of the pipeline's time.",
        "bubble-of-the-ideal": "You multiply by 1 + bubble, as if it were a share of the ideal time. Here it is one of the whole: "
        "divide by 1 - bubble.",
        "bubble-on-dp": "The bubble stretches the pipeline, not the calls of dp, which go on beside it.",
        "bubble-without-calls": "The bubble stretches the calls that stand in the way, too: a stage that waits for its "
        "collectives makes the next ones wait.",
    },
)


def _slips_of_time(step: Step) -> dict:
    right = step.seconds()
    flops, moved = (sum(column) for column in zip(*step.kernels, strict=True))

    def apart(layout, group, node):
        return getattr(layout, group) <= node

    return {
        "other-unit": lambda got: any(same(got, right * k) for k in (1e3, 1e6, 1e9)),
        "roofline-sum": step.seconds(
            lambda kernels, hw: flops / hw.peak + moved / hw.hbm_bandwidth
        ),
        "roofline-of-sums": step.seconds(
            lambda kernels, hw: max(flops / hw.peak, moved / hw.hbm_bandwidth)
        ),
        "peak-only": step.seconds(lambda kernels, hw: flops / hw.peak),
        "memory-only": step.seconds(lambda kernels, hw: moved / hw.hbm_bandwidth),
        "bubble-ignored": step.seconds(together=lambda c, w, d, b: max(c + w, d)),
        "bubble-of-the-ideal": step.seconds(together=lambda c, w, d, b: max((c + w) * (1 + b), d)),
        "bubble-on-dp": step.seconds(together=lambda c, w, d, b: max(c + w, d) / (1 - b)),
        "bubble-without-calls": step.seconds(together=lambda c, w, d, b: max(c / (1 - b) + w, d)),
        "everything-overlaps": lambda got: any(
            same(got, step.seconds(together=each))
            for each in (
                lambda c, w, d, b: max(c, w, d) / (1 - b),
                lambda c, w, d, b: max(c / (1 - b), w, d),
                lambda c, w, d, b: max(max(c, w) / (1 - b), d),
            )
        ),
        "nothing-overlaps": lambda got: any(
            same(got, step.seconds(together=each))
            for each in (
                lambda c, w, d, b: (c + w) / (1 - b) + d,
                lambda c, w, d, b: (c + w + d) / (1 - b),
            )
        ),
        "beside-kernels-only": lambda got: any(
            same(got, step.seconds(together=each))
            for each in (
                lambda c, w, d, b: (max(c, d) + w) / (1 - b),
                lambda c, w, d, b: max(c, d) / (1 - b) + w,
                lambda c, w, d, b: max(c / (1 - b), d) + w,
                lambda c, w, d, b: max(c / (1 - b), d) + w / (1 - b),
            )
        ),
        "latency-left-out": lambda got: any(
            same(got, step.seconds(latency=lambda n, passes: 0, send=send))
            for send in (lambda alpha, seconds: seconds, lambda alpha, seconds: alpha + seconds)
        ),
        "latency-once": step.seconds(latency=lambda n, passes: 1),
        "rounds-of-one-pass": step.seconds(latency=lambda n, passes: n - 1),
        "whole-payload": step.seconds(factor=lambda n, passes: passes),
        "all-reduce-once": lambda got: any(
            same(got, step.seconds(factor=lambda n, passes: (n - 1) / n, **more))
            for more in ({}, {"latency": lambda n, passes: n - 1})
        ),
        "one-call": step.seconds(count=lambda call: 1),
        "send-on-a-ring": lambda got: any(
            same(got, step.seconds(send=send)) for send in _ring_messages(step.layout.pp)
        ),
        "order-ignored": step.seconds(
            inside=lambda layout, group, node: inside(layout, group, node, ("tp", "cp", "dp", "pp"))
        ),
        "order-reversed": step.seconds(
            inside=lambda layout, group, node: inside(layout, group, node, layout.order[::-1])
        ),
        "size-only": step.seconds(inside=apart),
        "less-than-node": step.seconds(
            inside=lambda layout, group, n: inside(layout, group, n - 1)
        ),
        "inside-always": step.seconds(inside=lambda *_: True),
        "between-always": step.seconds(inside=lambda *_: False),
    }


def _ring_messages(n: int) -> Iterator[Callable]:
    """What a message would take, counted as a collective of n ranks with one pass, or with two."""
    for passes in (1, 2):
        yield lambda alpha, seconds, k=passes: k * (n - 1) * (alpha + seconds / n)


def _check_time(got, step: Step) -> None:
    expect(got, step.seconds(), what="seconds", likely=_slips_of_time(step))


def _hardware(draw, node: int) -> Hardware:
    return Hardware(
        peak=draw.integer(200, 400) * 1e12,
        hbm_bytes=80 * 10**9,
        hbm_bandwidth=draw.integer(15, 30) * 1e11,
        node=node,
        intra_bandwidth=draw.integer(150, 350) * 1e9,
        intra_latency=draw.integer(3, 6) * 1e-6,
        inter_bandwidth=draw.integer(10, 40) * 1e9,
        inter_latency=draw.integer(10, 25) * 1e-6,
    )


def _kernels(draw) -> list[tuple[float, float]]:
    """Some that compute, and some that move; long enough for `expect`, which allows 1e-5 s."""
    many = [(draw.integer(200, 900) * 1e11, draw.integer(10, 90) * 1e8) for _ in range(4)]
    few = [(draw.integer(1, 9) * 1e11, draw.integer(200, 900) * 1e8) for _ in range(3)]
    return draw.sample(many + few, 7)


def _calls(draw, layout: Layout, groups: tuple[str, ...], large: float) -> list[Call]:
    """Calls of each group: of dp many and small ones, which `large` scales; of the others one call
    already takes more than `expect` allows."""
    ops = {"tp": ["all_gather", "reduce_scatter"], "cp": ["all_gather"], "pp": ["send"]}
    ops["dp"] = ["all_gather", "all_reduce"]
    found = []
    for group in groups:
        for op in ops[group]:
            calls, payload = draw.integer(60, 200), draw.integer(2, 9) * 10**7
            if group == "dp":
                calls, payload = draw.integer(200, 400), int(payload / 10 * large)
            of_all = sent(op, getattr(layout, group), calls, payload)
            found.append(Call(group, op, calls, payload, of_all, "step"))
    return found


def _step(
    draw,
    groups: tuple[str, ...],
    large: float = 1.0,
    bubble: float = 0.0,
    node: int = 8,
    **sizes: int,
) -> Step:
    layout = Layout(**{"tp": 4, "cp": 1, "dp": 1, "pp": 1, **sizes})
    kernels, calls = _kernels(draw), _calls(draw, layout, groups, large)
    return Step(kernels, calls, layout, bubble, _hardware(draw, node))


@timing.requires("kernels alone: each has a limit of its own", at_home=True)
def kernels_alone_each_has_a_limit_of_its(answer, draw):
    step = _step(draw, ())
    moving = replace(step, kernels=[(f / 100, moved) for f, moved in step.kernels])
    for each in (moving, step):
        _check_time(own(answer, *each.arguments()), each)


@timing.requires("tensor ranks inside a node, and as many as it has", needs_earlier=True)
def tensor_ranks_inside_a_node(answer, draw):
    node = draw.choice([4, 8])
    for tp in (2, node):
        step = _step(draw, ("tp",), node=node, tp=tp)
        _check_time(answer(*step.arguments()), step)


@timing.requires("groups that leave the node", needs_earlier=True)
def groups_that_leave_the_node(answer, draw):
    step = _step(draw, ("tp", "cp", "pp"), cp=4, pp=draw.choice([16, 32]))
    _check_time(answer(*step.arguments()), step)
    step = _step(draw, ("tp", "cp"), tp=draw.choice([2, 4]), cp=8)
    _check_time(answer(*step.arguments()), step)


@timing.requires("stages, and their bubble", needs_earlier=True)
def stages_and_their_bubble(answer, draw):
    step = _step(draw, ("tp", "pp"), bubble=draw.number(0.1, 0.4), pp=draw.choice([4, 8]))
    _check_time(answer(*step.arguments()), step)


@timing.requires("data ranks beside the rest: hidden, and longer than it", needs_earlier=True)
def data_ranks_beside_the_rest(answer, draw):
    for large in (0.5, 900.0):
        bubble = draw.number(0.1, 0.4)
        step = _step(draw, GROUPS, large, bubble, dp=draw.choice([3, 6]), pp=4)
        _check_time(answer(*step.arguments()), step)


@timing.requires("another order of the groups", needs_earlier=True)
def another_order_of_the_groups(answer, draw):
    for node, order in ((8, ("dp", "tp", "cp", "pp")), (4, ("cp", "pp", "tp", "dp"))):
        step = _step(draw, ("tp", "cp", "dp"), 900.0, node=node, cp=2, dp=4)
        step = replace(step, layout=replace(step.layout, order=order))
        _check_time(answer(*step.arguments()), step)
