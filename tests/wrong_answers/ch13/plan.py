"""Answers to 13.3, `plan`: wrong in a plausible way, or right in another."""

import math

import course_planner as estimate
from course_planner import Layout
from tests.wrong_answers import right, wrong


def _interval(model, layout, seq, hardware, nodes, node_days, disk, size=14):
    step = estimate.step_time(model, layout, seq, hardware).seconds
    save = size * estimate.parameters(model) / disk
    return math.sqrt(2 * save * node_days * 86_400 / nodes) / step


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
    held = max(estimate.memory(model, layout, seq, s)["total"] for s in range(layout.pp))
    if held > 0.9 * hardware.hbm_bytes:
        return None
    return estimate.step_time(model, layout, seq, hardware).seconds, layout


@wrong("13.3", names="one-node")
def as_if_one_node_failed(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    return layout, round(_interval(model, layout, seq, hardware, 1, node_days, disk))


@wrong("13.3", names="gpus-for-nodes")
def as_if_gpus_failed(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    return layout, round(_interval(model, layout, seq, hardware, gpus, node_days, disk))


@wrong("13.3", names="seconds-not-steps")
def in_seconds(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    step = estimate.step_time(model, layout, seq, hardware).seconds
    steps = _interval(model, layout, seq, hardware, gpus / hardware.node, node_days, disk)
    return layout, round(steps * step)


@wrong("13.3", names="parameters-only")
def saves_the_parameters(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    nodes = gpus / hardware.node
    return layout, round(_interval(model, layout, seq, hardware, nodes, node_days, disk, size=2))


@wrong("13.3", names="other-unit")
def counts_in_hours(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    nodes = gpus / hardware.node * 3600
    return layout, max(1, round(_interval(model, layout, seq, hardware, nodes, node_days, disk)))


@wrong("13.3", names="no-two")
def forgets_the_two(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    nodes = 2 * gpus / hardware.node
    return layout, round(_interval(model, layout, seq, hardware, nodes, node_days, disk))


@wrong("13.3", names="other-unit")
def saves_after_every_step(model, gpus, batch, seq, hardware, node_days, disk):
    return _best(model, gpus, batch, seq, hardware), 1


@wrong("13.3", names="steps-not-whole")
def does_not_round(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    nodes = gpus / hardware.node
    return layout, _interval(model, layout, seq, hardware, nodes, node_days, disk)


@wrong("13.3", names="saved-by-all")
def each_rank_has_the_disk(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    nodes = gpus / hardware.node
    return layout, round(_interval(model, layout, seq, hardware, nodes, node_days, disk * gpus))


@wrong("13.3", names="steps-not-whole")
def rounds_to_none(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    nodes = gpus / hardware.node
    return layout, round(_interval(model, layout, seq, hardware, nodes, node_days, disk))


@wrong("13.3", names="bad-interval")
def forgets_the_root(model, gpus, batch, seq, hardware, node_days, disk):
    layout = _best(model, gpus, batch, seq, hardware)
    step = estimate.step_time(model, layout, seq, hardware).seconds
    steps = _interval(model, layout, seq, hardware, gpus / hardware.node, node_days, disk)
    return layout, round((steps * step) ** 2 / step)


@wrong("13.3", names="illegal")
def more_stages_than_layers(model, gpus, batch, seq, hardware, node_days, disk):
    dp = gpus // (8 * 64)
    return Layout(dp=dp, tp=8, pp=64, micro_batches=batch // dp), 10


@wrong("13.3", names="slow")
def by_rule_of_thumb(model, gpus, batch, seq, hardware, node_days, disk):
    dp = gpus // (8 * 8)
    layout = Layout(dp=dp, tp=8, pp=8, zero=1, micro_batches=batch // dp, recompute="full")
    return layout, 10


@wrong("13.3", names="not-a-pair")
def the_layout_only(model, gpus, batch, seq, hardware, node_days, disk):
    return _best(model, gpus, batch, seq, hardware)


@wrong("13.3", names="gpus")
def half_of_them(model, gpus, batch, seq, hardware, node_days, disk):
    return _best(model, gpus // 2, batch, seq, hardware), 10


@wrong("13.3", names="batch")
def a_batch_a_gpu(model, gpus, batch, seq, hardware, node_days, disk):
    return _best(model, gpus, 2 * batch, seq, hardware), 10


@wrong("13.3", names="does-not-fit")
def never_recomputes(model, gpus, batch, seq, hardware, node_days, disk):
    return Layout(dp=gpus, micro_batches=batch // gpus), 10


@wrong("13.3", names="least-memory")
def takes_the_smallest(model, gpus, batch, seq, hardware, node_days, disk):
    plans, _ = estimate.search(model, gpus, batch, seq, hardware, keep=10**6)
    return min(plans, key=lambda found: found.memory["total"]).layout, 10


@wrong("13.3", names="data-only")
def fully_sharded_only(model, gpus, batch, seq, hardware, node_days, disk):
    return Layout(dp=gpus, zero=3, micro_batch=batch // gpus, recompute="full"), 10


@wrong("13.3", names="does-not-fit")
def fully_sharded_with_gradients_that_wait(model, gpus, batch, seq, hardware, node_days, disk):
    return Layout(dp=gpus, zero=3, micro_batches=batch // gpus, recompute="full"), 10


@wrong("13.3", names="tensor-leaves-node")
def one_wide_group(model, gpus, batch, seq, hardware, node_days, disk):
    plans, _ = estimate.search(model, gpus, batch, seq, hardware, keep=10**6)
    return next(p.layout for p in plans if p.layout.tp > hardware.node), 10
