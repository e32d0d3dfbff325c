"""Rarer wrong answers to 12.3, `step_time_of`."""

import math

from tests.wrong_answers import rarer
from tests.wrong_answers.ch12.step_time_of import _call, _reach, _time


@rarer("12.3")
def waits_for_one_pass(kernels, calls, layout, bubble, hardware):
    return _time(kernels, calls, layout, bubble, hardware, rounds=lambda n, k: n - 1)


@rarer("12.3")
def sends_on_a_ring(kernels, calls, layout, bubble, hardware):
    def one(call, layout, hardware):
        if call.op != "send":
            return _call(call, layout, hardware)
        near = _reach(layout, call.group) <= hardware.node
        alpha = hardware.intra_latency if near else hardware.inter_latency
        rate = hardware.intra_bandwidth if near else hardware.inter_bandwidth
        return call.calls * (layout.pp - 1) * (alpha + call.payload / layout.pp / rate)

    return _time(kernels, calls, layout, bubble, hardware, one=one)


@rarer("12.3")
def takes_the_usual_order(kernels, calls, layout, bubble, hardware):
    usual = ("tp", "cp", "dp", "pp")

    def reach(layout, group):
        return math.prod(getattr(layout, g) for g in usual[: usual.index(group) + 1])

    return _time(kernels, calls, layout, bubble, hardware, reach=reach)


@rarer("12.3")
def takes_the_order_from_outside(kernels, calls, layout, bubble, hardware):
    def reach(layout, group):
        order = layout.order[::-1]
        return math.prod(getattr(layout, g) for g in order[: order.index(group) + 1])

    return _time(kernels, calls, layout, bubble, hardware, reach=reach)


@rarer("12.3")
def hides_gradients_behind_kernels(kernels, calls, layout, bubble, hardware):
    def join(own, waiting, beside):
        return max(own / (1 - bubble), beside) + waiting / (1 - bubble)

    return _time(kernels, calls, layout, bubble, hardware, join=join)


@rarer("12.3")
def stretches_the_gradients(kernels, calls, layout, bubble, hardware):
    def join(own, waiting, beside):
        return max(own + waiting, beside) / (1 - bubble)

    return _time(kernels, calls, layout, bubble, hardware, join=join)
