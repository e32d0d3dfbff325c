"""Answers to 12.2, `traffic_of`: wrong in a plausible way, or right in another."""

import course_planner as estimate
from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch12.shared import GB


def _traffic(
    model, layout, seq, stage, tp=1.0, pp=1.0, dp=1.0, passes=None, rounds=None, ways=None
):
    """What is sent, each number times a factor."""
    t, p, d, m = layout.tp, layout.pp, layout.dp, layout.micro_batches
    layers, hidden = model.layers // p, 2 * seq * layout.micro_batch * model.width
    passes = passes or (3 if layout.recompute == "full" else 2)
    rounds = rounds or (3 * m if layout.zero == 3 else 2)
    ways = (stage > 0) + (stage < p - 1) if ways is None else ways
    gradients = 24 * layers * model.width**2 / t
    return {
        "tp": tp * 4 * passes * layers * m * hidden * (t - 1) / t,
        "pp": pp * ways * m * hidden / t,
        "dp": dp * rounds * gradients * (d - 1) / d,
    }


@right("12.2")
def call_by_call(model, layout, seq, stage):
    """Adds up single messages and collectives."""
    size = 2 * seq * layout.micro_batch * model.width
    tp = pp = dp = 0.0
    layers = model.layers // layout.pp
    for _ in range(layout.micro_batches):
        for _ in range(3 if layout.recompute == "full" else 2):
            tp += layers * 4 * size * (1 - 1 / layout.tp)
        for neighbour in (stage - 1, stage + 1):
            pp += size / layout.tp if 0 <= neighbour < layout.pp else 0
    weights = layers * 24 * model.width**2 // layout.tp
    passes = 3 * layout.micro_batches if layout.zero == 3 else 2
    for _ in range(passes):
        dp += weights - weights / layout.dp
    return {"tp": tp, "pp": pp, "dp": dp}


@right("12.2")
def in_whole_bytes(model, layout, seq, stage):
    return {group: round(sent) for group, sent in _traffic(model, layout, seq, stage).items()}


@right("12.2")
def by_the_formula_of_megatron(model, layout, seq, stage):
    """8 b s h (t - 1) / t numbers a layer, 2104.04473, section 3.2."""
    t, numbers = layout.tp, layout.micro_batch * seq * model.width
    per_layer = 8 * numbers * (t - 1) / t * (1.5 if layout.recompute == "full" else 1)
    held = 12 * model.width**2 * (model.layers // layout.pp) / t
    ring = (layout.dp - 1) / layout.dp
    sums = held * ring * (layout.micro_batches if layout.zero == 3 else 1)
    gathers = 2 * sums if layout.zero == 3 else sums
    both = 2 if 0 < stage < layout.pp - 1 else 1 if layout.pp > 1 else 0
    return {
        "dp": 2 * (sums + gathers),
        "tp": 2 * per_layer * model.layers // layout.pp * layout.micro_batches,
        "pp": 2 * both * numbers / t * layout.micro_batches,
    }


@wrong("12.2", names="other-zero")
def treats_zero_3_as_ddp(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, rounds=2)


@wrong("12.2", names="other-zero")
def keeps_gradients_whole_with_zero_3(model, layout, seq, stage):
    rounds = 1 + 2 * layout.micro_batches if layout.zero == 3 else 2
    return _traffic(model, layout, seq, stage, rounds=rounds)


@wrong("12.2", names="other-zero")
def saves_traffic_with_zero(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, dp=1 / layout.dp if layout.zero in (1, 2) else 1)


@wrong("12.2", names="tensor-factor-2")
def counts_forward(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, passes=1)


@wrong("12.2", names="stages-factor-2")
def sends_to_both_sides_everywhere(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, pp=1 if 0 < stage < layout.pp - 1 else 2)


@wrong("12.2", names="not-cut")
def sends_whole_messages(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, pp=layout.tp)


@wrong("12.2", names="other-count")
def counts_all_layers(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, tp=layout.pp)


@wrong("12.2", names="other-recomputation")
def recomputes_without_collectives(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, passes=2)


@wrong("12.2", names="every-micro-batch")
def sums_after_every_micro_batch(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, dp=layout.micro_batches)


@wrong("12.2", names="nothing-to-send")
def sends_to_itself(model, layout, seq, stage):
    sent = _traffic(model, layout, seq, stage)
    weights = 24 * model.layers // layout.pp * model.width**2 / layout.tp
    return sent | ({"dp": 2 * weights} if layout.dp == 1 else {})


@wrong("12.2", names="data-factor-2")
def sends_gradients_in_float32(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, dp=1 if layout.zero == 3 else 2)


@wrong("12.2", names="uses-estimate")
def asks_estimate_for_the_traffic(model, layout, seq, stage):
    sent = dict.fromkeys(("tp", "pp", "dp"), 0)
    for call in estimate.traffic(model, layout, seq, stage):
        sent[call.group] += call.sent
    return sent


@wrong("12.2", names="not-the-dict")
def three_numbers(model, layout, seq, stage):
    return tuple(_traffic(model, layout, seq, stage).values())


@wrong("12.2", names="other-unit")
def sends_gigabytes(model, layout, seq, stage):
    return {group: sent / GB for group, sent in _traffic(model, layout, seq, stage).items()}


@wrong("12.2", names="other-share")
def counts_the_payload(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, tp=layout.tp / max(layout.tp - 1, 1))
