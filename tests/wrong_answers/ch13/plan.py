"""Answers to 13.3, `plan`: wrong in a plausible way, or right in another."""

import math

import course_planner as estimate
from course_planner import Layout
from tests.wrong_answers import right, wrong


def _interval(model, layout, seq, hardware, nodes, node_days, disk, size=14):
    step = estimate.step_time(model, layout, seq, hardware).seconds
    save = size * estimate.parameters(model) / disk
    return math.sqrt(2 * save * node_days * 86_400 / nodes) / step


def _with(model, gpus, batch, seq, hardware, node_days, disk, nodes=None, **more):
    """The best layout and its interval; what is given in place of the nodes, or of 14 bytes, is a slip."""
    layout, nodes = _best(model, gpus, batch, seq, hardware), nodes or gpus / hardware.node
    return layout, _interval(model, layout, seq, hardware, nodes, node_days, disk, **more)


def _best(model, gpus, batch, seq, hardware):
    return estimate.search(model, gpus, batch, seq, hardware, keep=1)[0][0].layout


@right("13.3")
def looks_along_the_curve(model, gpus, batch, seq, hardware, node_days, disk):
    plans, _ = estimate.search(model, gpus, batch, seq, hardware)
    chosen = plans[0]
    failures = gpus / hardware.node / (node_days * 24 * 60 * 60)  # a second
    save = 14 * estimate.parameters(model) / disk

    def lost(steps):
        work = steps * chosen.time.seconds
        return save / work + work / 2 * failures

    return chosen.layout, min(range(1, 20_000), key=lost)


@right("13.3")
def with_a_search_of_its_own(model, gpus, batch, seq, hardware, node_days, disk):
    """1F1B and interleaving, with tensor groups inside a node."""
    best = None
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16):
            for zero, reshard in ((1, True), (3, pp == 1)):
                for chunks in (1, 2, 3, 4, 5, 6, 8):
                    for recompute in ("none", "selective", "full"):
                        dp, more = gpus // (tp * pp), {"recompute": recompute, "zero": zero}
                        if chunks > 1:
                            more |= {"chunks": chunks, "schedule": "interleaved"}
                        try:
                            found = _judged(
                                model,
                                batch,
                                seq,
                                hardware,
                                dp=dp,
                                tp=tp,
                                pp=pp,
                                reshard=reshard,
                                **more,
                            )
                        except ValueError:
                            continue
                        best = min(
                            filter(None, (best, found)), key=lambda each: each[0], default=None
                        )
    nodes = gpus // hardware.node
    steps = _interval(model, best[1], seq, hardware, nodes, node_days, disk)
    return best[1], max(1, round(steps))


def _judged(model, batch, seq, hardware, dp, **sizes):
    layout = Layout(dp=dp, micro_batches=batch // dp, **sizes)
    if sizes["pp"] > 1 and -model.layers % (sizes["pp"] * sizes.get("chunks", 1)) not in (0, 2):
        return None
    layout.check(model, seq)
    held = (estimate.memory(model, layout, seq, s) for s in range(layout.pp))
    if not all(estimate.fits(each, hardware) for each in held):
        return None
    return estimate.step_time(model, layout, seq, hardware).seconds, layout


@wrong("13.3", names="other-failures")
def as_if_one_node_failed(*order):
    layout, steps = _with(*order, nodes=1)
    return layout, round(steps)


@wrong("13.3", names="other-unit")
def in_seconds(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    step = estimate.step_time(model, layout, seq, hardware).seconds
    steps = _interval(model, layout, seq, hardware, gpus / hardware.node, node_days, disk)
    return layout, round(steps * step)


@wrong("13.3", names="other-save")
def saves_the_parameters(*order):
    layout, steps = _with(*order, size=2)
    return layout, round(steps)


@wrong("13.3", names="bad-interval")
def forgets_the_two(*order):
    layout, steps = _with(*order, size=7)
    return layout, round(steps)


@wrong("13.3", names="other-unit")
def saves_after_every_step(model, gpus, batch, seq, hardware, node_days, disk):
    return _best(model, gpus, batch, seq, hardware), 1


@wrong("13.3", names="another-form")
def does_not_round(*order):
    return _with(*order)


@wrong("13.3", names="another-order")
def more_stages_than_layers(model, gpus, batch, seq, hardware, node_days, disk):
    dp = gpus // (8 * 64)
    return Layout(dp=dp, tp=8, pp=64, micro_batches=batch // dp), 10


@wrong("13.3", names="slow")
def by_rule_of_thumb(model, gpus, batch, seq, hardware, node_days, disk):
    dp = gpus // (8 * 8)
    layout = Layout(dp=dp, tp=8, pp=8, zero=1, micro_batches=batch // dp, recompute="full")
    return layout, 10


@wrong("13.3", names="another-order")
def half_of_them(model, gpus, batch, seq, hardware, node_days, disk):
    return _best(model, gpus // 2, batch, seq, hardware), 10


@wrong("13.3", names="does-not-fit")
def never_recomputes(model, gpus, batch, seq, hardware, node_days, disk):
    return Layout(dp=gpus, micro_batches=batch // gpus), 10


@wrong("13.3", names="slow")
def fully_sharded_only(model, gpus, batch, seq, hardware, node_days, disk):
    return Layout(dp=gpus, zero=3, micro_batch=batch // gpus, recompute="full"), 10
