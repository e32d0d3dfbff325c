"""Rarer wrong answers to 13.3, `plan`."""

import course_planner as estimate
from tests.wrong_answers import rarer
from tests.wrong_answers.ch13.plan import _best, _interval, _with


@rarer("13.3")
def as_if_gpus_failed(*order):
    layout, steps = _with(*order, nodes=order[1])
    return layout, round(steps)


@rarer("13.3")
def each_rank_has_the_disk(*order):
    layout, steps = _with(*order[:-1], order[-1] * order[1])
    return layout, round(steps)


@rarer("13.3")
def rounds_to_none(*order):
    layout, steps = _with(*order)
    return layout, round(steps)


@rarer("13.3")
def forgets_the_root(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    step = estimate.step_time(model, layout, seq, hardware).seconds
    steps = _interval(model, layout, seq, hardware, gpus / hardware.node, node_days, disk)
    return layout, round((steps * step) ** 2 / step)


@rarer("13.3")
def takes_the_smallest(model, gpus, batch, seq, hardware, node_days, disk):
    plans, _ = estimate.search(model, gpus, batch, seq, hardware, keep=10**6)
    return min(plans, key=lambda found: found.memory["total"]).layout, 10


@rarer("13.3")
def one_wide_group(model, gpus, batch, seq, hardware, node_days, disk):
    plans, _ = estimate.search(model, gpus, batch, seq, hardware, keep=10**6)
    return next(p.layout for p in plans if p.layout.tp > hardware.node), 10
