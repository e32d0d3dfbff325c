"""Answers to 12.3, `step_time_of`: wrong in a plausible way, or right in another."""

import math
from dataclasses import replace

import course_planner as estimate
from tests.wrong_answers import right, wrong


def _reach(layout, group):
    return math.prod(getattr(layout, g) for g in layout.order[: layout.order.index(group) + 1])


def _call(call, layout, hardware, reach=_reach, rounds=None, piece=None, count=None):
    """Seconds of a call; `rounds` and `piece` are functions of its size and passes."""
    near = reach(layout, call.group) <= hardware.node
    alpha = hardware.intra_latency if near else hardware.inter_latency
    rate = hardware.intra_bandwidth if near else hardware.inter_bandwidth
    n, passes = getattr(layout, call.group), 2 if call.op == "all_reduce" else 1
    calls = call.calls if count is None else count
    if call.op == "send":
        return calls * (alpha + call.payload / rate)
    latencies = (rounds or (lambda n, k: k * (n - 1)))(n, passes)
    share = (piece or (lambda n, k: k * (n - 1) / n))(n, passes)
    return calls * (latencies * alpha + share * call.payload / rate)


def _kernels(kernels, hardware):
    return sum(max(f / hardware.peak, b / hardware.hbm_bandwidth) for f, b in kernels)


def _time(kernels, calls, layout, bubble, hardware, work=_kernels, one=_call, join=None, **slip):
    beside = sum(one(c, layout, hardware, **slip) for c in calls if c.group == "dp")
    waiting = sum(one(c, layout, hardware, **slip) for c in calls if c.group != "dp")
    join = join or (lambda own, waiting, beside: max((own + waiting) / (1 - bubble), beside))
    return join(work(kernels, hardware), waiting, beside)


@right("12.3")
def with_sums_by_group(kernels, calls, layout, bubble, hardware):
    seconds = {"kernels": _kernels(kernels, hardware)}
    for call in calls:
        seconds[call.group] = seconds.get(call.group, 0) + _call(call, layout, hardware)
    beside = seconds.pop("dp", 0)
    pipeline = sum(seconds.values())
    return max(pipeline / (1 - bubble), beside)


@right("12.3")
def round_by_round(kernels, calls, layout, bubble, hardware):
    links = {
        True: (hardware.intra_latency, hardware.intra_bandwidth),
        False: (hardware.inter_latency, hardware.inter_bandwidth),
    }
    total = {"dp": 0.0, "rest": 0.0}
    for flops, moved in kernels:
        computing, moving = flops / hardware.peak, moved / hardware.hbm_bandwidth
        total["rest"] += max(computing, moving)
    for call in calls:
        stride = 1
        for name in layout.order:
            stride *= getattr(layout, name)
            if name == call.group:
                break
        latency, bandwidth = links[stride <= hardware.node]
        n = getattr(layout, call.group)
        rounds = {"send": 1, "all_reduce": 2 * n - 2}.get(call.op, n - 1)
        piece = call.payload if call.op == "send" else call.payload / n
        where = "dp" if call.group == "dp" else "rest"
        for _ in range(rounds):
            total[where] += call.calls * (latency + piece / bandwidth)
    return max(total["dp"], total["rest"] / (1 - bubble))


@right("12.3")
def with_the_bubble_added(kernels, calls, layout, bubble, hardware):
    """The bubble's seconds, b / (1 - b) of the rest, on top."""

    def join(own, waiting, beside):
        busy = own + waiting
        return max(busy + busy * bubble / (1 - bubble), beside)

    return _time(kernels, calls, layout, bubble, hardware, join=join)


@right("12.3")
def with_the_bytes_that_are_sent(kernels, calls, layout, bubble, hardware):
    """`Call.sent` has the rounds' pieces of all calls together."""

    def one(call, layout, hardware):
        latencies = _call(replace(call, payload=0), layout, hardware)
        near = _reach(layout, call.group) <= hardware.node
        rate = hardware.intra_bandwidth if near else hardware.inter_bandwidth
        return latencies + call.sent / rate

    return _time(kernels, calls, layout, bubble, hardware, one=one)


@wrong("12.3", names="uses-estimate")
def asks_estimate_for_the_time(kernels, calls, layout, bubble, hardware):
    estimate.collective_time("all_reduce", 2, 10**6, hardware.intra_bandwidth)
    return _time(kernels, calls, layout, bubble, hardware)


@wrong("12.3", names="other-unit")
def in_milliseconds(kernels, calls, layout, bubble, hardware):
    return 1e3 * _time(kernels, calls, layout, bubble, hardware)


@wrong("12.3", names="other-roofline")
def adds_computing_and_memory(kernels, calls, layout, bubble, hardware):
    def work(kernels, hw):
        return sum(f / hw.peak + b / hw.hbm_bandwidth for f, b in kernels)

    return _time(kernels, calls, layout, bubble, hardware, work=work)


@wrong("12.3", names="other-roofline")
def takes_the_larger_sum(kernels, calls, layout, bubble, hardware):
    def work(kernels, hw):
        flops, moved = (sum(column) for column in zip(*kernels, strict=True))
        return max(flops / hw.peak, moved / hw.hbm_bandwidth)

    return _time(kernels, calls, layout, bubble, hardware, work=work)


@wrong("12.3", names="other-latencies")
def waits_once_a_call(kernels, calls, layout, bubble, hardware):
    return _time(kernels, calls, layout, bubble, hardware, rounds=lambda n, k: 1)


@wrong("12.3", names="other-payload")
def takes_an_all_reduce_for_one_pass(kernels, calls, layout, bubble, hardware):
    return _time(kernels, calls, layout, bubble, hardware, piece=lambda n, k: (n - 1) / n)


@wrong("12.3", names="other-payload")
def makes_a_round_too_many(kernels, calls, layout, bubble, hardware):
    rounds = {"rounds": lambda n, k: k * n, "piece": lambda n, k: k}
    return _time(kernels, calls, layout, bubble, hardware, **rounds)


@wrong("12.3", names="other-link")
def looks_at_the_size(kernels, calls, layout, bubble, hardware):
    return _time(kernels, calls, layout, bubble, hardware, reach=getattr)


@wrong("12.3", names="other-link")
def wants_a_place_left_in_the_node(kernels, calls, layout, bubble, hardware):
    def reach(layout, group):
        return _reach(layout, group) + 1

    return _time(kernels, calls, layout, bubble, hardware, reach=reach)


@wrong("12.3", names="other-overlap")
def adds_the_gradients(kernels, calls, layout, bubble, hardware):
    def join(own, waiting, beside):
        return (own + waiting) / (1 - bubble) + beside

    return _time(kernels, calls, layout, bubble, hardware, join=join)


@wrong("12.3", names="other-bubble")
def multiplies_by_the_bubble(kernels, calls, layout, bubble, hardware):
    def join(own, waiting, beside):
        return max((own + waiting) * (1 + bubble), beside)

    return _time(kernels, calls, layout, bubble, hardware, join=join)
