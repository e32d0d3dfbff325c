"""Exercise 12.3, `step_time_of`: what it asks for, and how it is checked."""

from dataclasses import replace

from course_exercises.authoring import Exercise, expect
from course_exercises.chapters.ch12.shared import (
    GROUPS,
    USES_ESTIMATE,
    Step,
    among,
    inside,
    own,
    sent,
)
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
        "other-unit": "That is the right time in another unit. Return seconds.",
        "other-roofline": "You do not time each kernel by itself. A kernel computes and moves at once: it takes the "
        "larger of FLOPs / peak and bytes / bandwidth. Take that of each kernel, then add.",
        "other-latencies": "You count other latencies than there are rounds. A ring of n has n - 1 rounds in a pass, an "
        "all-reduce has two passes, a `send` is one round, and each of the `calls` has its own.",
        "other-payload": "You send the wrong part of the payload, or do not multiply by `calls`. In each round of a ring a piece "
        "of payload / n goes, n - 1 of them in a pass, and an all-reduce has two passes; a `send` is one round with the whole "
        "payload. Each of the `calls` sends this payload.",
        "other-link": "You take the wrong link for some group. It lies inside a node where its size times those of the groups "
        "before it in `layout.order`, innermost first, is at most `hardware.node`: its ranks lie that far apart. Else it "
        "goes between nodes.",
        "other-overlap": "What overlaps in your step is not what should, or nothing does. The calls of dp go on beside all the rest: take the longer of the "
        "two. Kernels and the other calls wait for each other: add them.",
        "other-bubble": "You stretch the wrong part, or by the wrong factor. Kernels and the calls that they wait for fill "
        "1 - bubble of the pipeline's time: divide their sum by 1 - bubble, and leave the calls of dp as they are.",
    },
)


def _slips_of_time(step: Step) -> dict[str, list[float]]:
    """The seconds that each mistake gives, by misconception."""
    flops, moved = (sum(column) for column in zip(*step.kernels, strict=True))
    right, n_pp = step.seconds(), step.layout.pp
    computing = [
        lambda kernels, hw: flops / hw.peak + moved / hw.hbm_bandwidth,
        lambda kernels, hw: max(flops / hw.peak, moved / hw.hbm_bandwidth),
        lambda kernels, hw: flops / hw.peak,
        lambda kernels, hw: moved / hw.hbm_bandwidth,
    ]
    bubbles = [  # of computing, what is in its way, the calls of dp and the bubble
        lambda c, w, d, b: max(c + w, d),
        lambda c, w, d, b: max((c + w) * (1 + b), d),
        lambda c, w, d, b: max(c + w, d) / (1 - b),
        lambda c, w, d, b: max(c / (1 - b) + w, d),
    ]
    overlaps = [
        lambda c, w, d, b: max(c, w, d) / (1 - b),
        lambda c, w, d, b: max(c / (1 - b), w, d),
        lambda c, w, d, b: max(max(c, w) / (1 - b), d),
        lambda c, w, d, b: (c + w) / (1 - b) + d,
        lambda c, w, d, b: (c + w + d) / (1 - b),
        lambda c, w, d, b: (max(c, d) + w) / (1 - b),
        lambda c, w, d, b: max(c, d) / (1 - b) + w,
        lambda c, w, d, b: max(c / (1 - b), d) + w,
        lambda c, w, d, b: max(c / (1 - b), d) + w / (1 - b),
    ]
    latencies = [lambda n, passes: 0, lambda n, passes: 1, lambda n, passes: n - 1]
    rings = [  # a message, as a collective of n ranks with one pass, or two
        lambda alpha, seconds, k=k: k * (n_pp - 1) * (alpha + seconds / n_pp) for k in (1, 2)
    ]

    def one_pass(n, passes):
        return (n - 1) / n

    links = [
        lambda layout, group, node: inside(layout, group, node, ("tp", "cp", "dp", "pp")),
        lambda layout, group, node: inside(layout, group, node, layout.order[::-1]),
        lambda layout, group, node: inside(layout, group, node - 1),
        lambda layout, group, node: getattr(layout, group) <= node,
        lambda *_: True,
        lambda *_: False,
    ]
    return {
        "other-unit": [right * k for k in (1e3, 1e6, 1e9)],
        "other-roofline": [step.seconds(each) for each in computing],
        "other-bubble": [step.seconds(together=each) for each in bubbles],
        "other-overlap": [step.seconds(together=each) for each in overlaps],
        "other-latencies": [
            step.seconds(latency=latencies[0], send=lambda alpha, seconds: seconds),
            *(step.seconds(latency=each) for each in latencies),
        ],
        "other-payload": [
            step.seconds(factor=lambda n, passes: passes),
            step.seconds(factor=lambda n, passes: passes, latency=lambda n, passes: passes * n),
            step.seconds(factor=one_pass),
            step.seconds(factor=one_pass, latency=latencies[2]),
            step.seconds(count=lambda call: 1),
            *(step.seconds(send=each) for each in rings),
        ],
        "other-link": [step.seconds(inside=each) for each in links],
    }


def _check_time(got, step: Step) -> None:
    expect(got, step.seconds(), what=f"seconds: {step.drawn()}", likely=among(_slips_of_time(step)))


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


def _kernels(draw, of_each: int) -> list[tuple[float, float]]:
    """Some that compute, and some that move; long enough for `expect`, which allows 1e-5 s."""
    many = [(draw.integer(200, 900) * 1e11, draw.integer(10, 90) * 1e8) for _ in range(of_each)]
    few = [(draw.integer(1, 9) * 1e11, draw.integer(200, 900) * 1e8) for _ in range(of_each)]
    return draw.sample(many + few, 2 * of_each)


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
    kernels = _kernels(draw, 1 if groups else 2)  # where there are calls, they are what is asked
    calls = _calls(draw, layout, groups, large)
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
    step = _step(draw, ("tp", "pp"), bubble=draw.integer(10, 40) / 100, pp=draw.choice([4, 8]))
    _check_time(answer(*step.arguments()), step)


@timing.requires("data ranks beside the rest: hidden, and longer than it", needs_earlier=True)
def data_ranks_beside_the_rest(answer, draw):
    for large in (0.5, 900.0):
        bubble = draw.integer(10, 40) / 100
        step = _step(draw, GROUPS, large, bubble, dp=draw.choice([3, 6]), pp=4)
        _check_time(answer(*step.arguments()), step)


@timing.requires("another order of the groups", needs_earlier=True)
def another_order_of_the_groups(answer, draw):
    for node, order in ((8, ("dp", "tp", "cp", "pp")), (4, ("cp", "pp", "tp", "dp"))):
        step = _step(draw, ("tp", "cp", "dp"), 900.0, node=node, cp=2, dp=4)
        step = replace(step, layout=replace(step.layout, order=order))
        _check_time(answer(*step.arguments()), step)
