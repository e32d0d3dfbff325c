"""Plausible wrong answers, and other right ones, to the exercises of chapter 12.

Most wrong answers are the arithmetic of `_memory`, `_traffic`, `_time` or `_search` with one thing written
wrongly.
"""

import itertools
import math

from course_utils import estimate
from course_utils.estimate import Layout
from tests.wrong_answers import right, wrong

GB = 1e9

# ---- 12.1 memory_of ------------------------------------------------------------------------------


def _count(model, layout, stage, layers=None, tables=None, tp=None):
    tied_here = model.tied and layout.pp == 1
    ends = (stage == 0) + (stage == layout.pp - 1 and not tied_here)
    tables = ends if tables is None else tables
    layers = model.layers / layout.pp if layers is None else layers
    return (12 * layers * model.width**2 + tables * model.vocab * model.width) / (tp or layout.tp)


def _states(count, layout, sizes=(2, 2, 12), shards=None):
    """Parameters, gradients, optimizer."""
    shards = shards or [layout.dp if layout.zero >= z else 1 for z in (3, 2, 1)]
    return [size * count / n for size, n in zip(sizes, shards, strict=True)]


def _layer(model, layout, seq, recompute=None, tp=None):
    recompute, tp = recompute or layout.recompute, tp or layout.tp
    tokens = seq * layout.micro_batch
    if recompute == "full":
        return 2 * tokens * model.width
    return tokens * (34 * model.width + (recompute == "none") * 5 * model.heads * seq) / tp


def _memory(model, layout, seq, stage, states=None, layer=None, layers=None, flight=None):
    states = states or _states(_count(model, layout, stage), layout)
    layer = _layer(model, layout, seq) if layer is None else layer
    layers = layers or model.layers / layout.pp
    flight = flight or min(layout.micro_batches, layout.pp - stage)
    kinds = ("parameters", "gradients", "optimizer")
    return dict(zip(kinds, states, strict=True)) | {"activations": layer * layers * flight}


@right("12.1")
def with_integers(model, layout, seq, stage):
    """Rounds at the end: every divisor that is drawn divides, or nearly."""
    return {kind: round(size) for kind, size in _memory(model, layout, seq, stage).items()}


@right("12.1")
def with_names_and_ifs(model, layout, seq, stage):
    parameters = 12 * model.width * model.width * model.layers // layout.pp
    if stage == 0:
        parameters += model.vocab * model.width
    if stage == layout.pp - 1 and not (stage == 0 and model.tied):
        parameters += model.vocab * model.width
    parameters /= layout.tp
    divide = {kind: 1 for kind in ("parameters", "gradients", "optimizer")}
    if layout.zero >= 1:
        divide["optimizer"] = layout.dp
    if layout.zero >= 2:
        divide["gradients"] = layout.dp
    if layout.zero == 3:
        divide["parameters"] = layout.dp
    match layout.recompute:
        case "none":
            a_token = (34 + 5 * model.heads * seq / model.width) * model.width / layout.tp
        case "selective":
            a_token = 34 * model.width / layout.tp
        case _:
            a_token = 2 * model.width
    flight = min(layout.pp - stage, layout.micro_batches)
    tokens = layout.micro_batch * seq * flight
    return {
        "activations": a_token * tokens * (model.layers // layout.pp),
        "optimizer": 12 * parameters / divide["optimizer"],
        "parameters": 2 * parameters / divide["parameters"],
        "gradients": 2 * parameters / divide["gradients"],
    }


@right("12.1")
def by_counting_the_micro_batches(model, layout, seq, stage):
    flight = sum(1 for m in range(layout.micro_batches) if m < layout.pp - stage)
    return _memory(model, layout, seq, stage, flight=flight)


@wrong("12.1", names="uses-estimate")
def asks_estimate_for_the_states(model, layout, seq, stage):
    count = _count(model, layout, stage)
    whole = estimate.model_states(round(count) + 10**7, layout.dp, layout.zero)
    return _memory(model, layout, seq, stage) | {"unused": whole}


@wrong("12.1", names="in-gb")
def in_gigabytes(model, layout, seq, stage):
    return {kind: size / GB for kind, size in _memory(model, layout, seq, stage).items()}


@wrong("12.1", names="in-gib")
def in_gibibytes(model, layout, seq, stage):
    return {kind: size / 2**30 for kind, size in _memory(model, layout, seq, stage).items()}


@wrong("12.1", names="not-a-dict")
def adds_up(model, layout, seq, stage):
    return sum(_memory(model, layout, seq, stage).values())


@wrong("12.1", names="other-keys")
def with_a_total(model, layout, seq, stage):
    held = _memory(model, layout, seq, stage)
    return held | {"total": sum(held.values())}


@wrong("12.1", names="elements")
def counts_numbers(model, layout, seq, stage):
    states = _states(_count(model, layout, stage), layout, (1, 1, 6))
    return _memory(model, layout, seq, stage, states)


@wrong("12.1", names="float32")
def in_float32(model, layout, seq, stage):
    states = _states(_count(model, layout, stage), layout, (4, 4, 12))
    return _memory(model, layout, seq, stage, states)


@wrong("12.1", names="master-copy")
def forgets_the_master_copy(model, layout, seq, stage):
    states = _states(_count(model, layout, stage), layout, (2, 2, 8))
    return _memory(model, layout, seq, stage, states)


@wrong("12.1", names="bytes-16")
def counts_all_as_optimizer(model, layout, seq, stage):
    states = _states(_count(model, layout, stage), layout, (2, 2, 16))
    return _memory(model, layout, seq, stage, states)


@wrong("12.1", names="whole-model")
def holds_all_layers(model, layout, seq, stage):
    states = _states(_count(model, layout, stage, layers=model.layers), layout)
    return _memory(model, layout, seq, stage, states)


@wrong("12.1", names="whole-model")
def keeps_the_activations_of_all_layers(model, layout, seq, stage):
    return _memory(model, layout, seq, stage, layers=model.layers)


@wrong("12.1", names="not-cut")
def leaves_matrices_whole(model, layout, seq, stage):
    return _memory(model, layout, seq, stage, _states(_count(model, layout, stage, tp=1), layout))


@wrong("12.1", names="tables-not-cut")
def leaves_the_tables_whole(model, layout, seq, stage):
    count = _count(model, layout, stage, tables=0)
    count += _count(model, layout, stage, layers=0, tp=1)
    return _memory(model, layout, seq, stage, _states(count, layout))


@wrong("12.1", names="no-tables")
def forgets_the_tables(model, layout, seq, stage):
    return _memory(
        model, layout, seq, stage, _states(_count(model, layout, stage, tables=0), layout)
    )


@wrong("12.1", names="tables-everywhere")
def has_the_embedding_on_every_stage(model, layout, seq, stage):
    return _memory(
        model, layout, seq, stage, _states(_count(model, layout, stage, tables=1), layout)
    )


@wrong("12.1", names="tied-copy")
def has_a_tied_matrix_once(model, layout, seq, stage):
    tables = (stage == 0) + (stage == layout.pp - 1 and not model.tied)
    states = _states(_count(model, layout, stage, tables=tables), layout)
    return _memory(model, layout, seq, stage, states)


@wrong("12.1", names="tied-twice")
def has_two_tables_on_one_stage(model, layout, seq, stage):
    tables = (stage == 0) + (stage == layout.pp - 1)
    states = _states(_count(model, layout, stage, tables=tables), layout)
    return _memory(model, layout, seq, stage, states)


@wrong("12.1", names="one-table")
def never_has_two_tables(model, layout, seq, stage):
    tables = int(stage in (0, layout.pp - 1))
    states = _states(_count(model, layout, stage, tables=tables), layout)
    return _memory(model, layout, seq, stage, states)


@wrong("12.1", names="mlp-only")
def counts_the_mlp(model, layout, seq, stage):
    states = _states(_count(model, layout, stage, layers=model.layers / layout.pp * 2 / 3), layout)
    return _memory(model, layout, seq, stage, states)


@wrong("12.1", names="sharded-too-early")
def shards_everything_with_zero_1(model, layout, seq, stage):
    shards = [layout.dp if layout.zero else 1] * 3
    return _memory(
        model, layout, seq, stage, _states(_count(model, layout, stage), layout, shards=shards)
    )


@wrong("12.1", names="sharded-too-early")
def shards_parameters_first(model, layout, seq, stage):
    shards = [layout.dp if layout.zero >= z else 1 for z in (1, 2, 3)]
    return _memory(
        model, layout, seq, stage, _states(_count(model, layout, stage), layout, shards=shards)
    )


@wrong("12.1", names="not-sharded")
def knows_no_zero(model, layout, seq, stage):
    states = _states(_count(model, layout, stage), layout, shards=[1, 1, 1])
    return _memory(model, layout, seq, stage, states)


@wrong("12.1", names="divided-by-all")
def divides_by_all_gpus(model, layout, seq, stage):
    states = _states(_count(model, layout, stage), layout)
    return _memory(model, layout, seq, stage, [s / layout.tp / layout.pp for s in states])


@wrong("12.1", names="activations-by-dp")
def divides_activations_by_dp(model, layout, seq, stage):
    layer = _layer(model, layout, seq) / layout.dp
    return _memory(model, layout, seq, stage, layer=layer)


@wrong("12.1", names="global-batch")
def keeps_the_global_batch(model, layout, seq, stage):
    return _memory(model, layout, seq, stage, layer=_layer(model, layout, seq) * layout.dp)


@wrong("12.1", names="micro-batch-size")
def takes_one_sequence(model, layout, seq, stage):
    layer = _layer(model, layout, seq) / layout.micro_batch
    return _memory(model, layout, seq, stage, layer=layer)


@wrong("12.1", names="one-in-flight")
def keeps_one_micro_batch(model, layout, seq, stage):
    return _memory(model, layout, seq, stage, flight=1)


@wrong("12.1", names="all-in-flight")
def keeps_what_gpipe_keeps(model, layout, seq, stage):
    return _memory(model, layout, seq, stage, flight=layout.micro_batches)


@wrong("12.1", names="every-stage-alike")
def keeps_p_on_every_stage(model, layout, seq, stage):
    return _memory(model, layout, seq, stage, flight=min(layout.micro_batches, layout.pp))


@wrong("12.1", names="stages-reversed")
def keeps_most_at_the_end(model, layout, seq, stage):
    return _memory(model, layout, seq, stage, flight=min(layout.micro_batches, stage + 1))


@wrong("12.1", names="more-than-there-are")
def keeps_more_than_there_are(model, layout, seq, stage):
    return _memory(model, layout, seq, stage, flight=layout.pp - stage)


@wrong("12.1", names="activations-not-cut")
def keeps_whole_activations(model, layout, seq, stage):
    return _memory(model, layout, seq, stage, layer=_layer(model, layout, seq, tp=1))


@wrong("12.1", names="no-sequence-parallelism")
def without_sequence_parallelism(model, layout, seq, stage):
    tokens, t = seq * layout.micro_batch, layout.tp
    scores = 5 * model.heads * seq if layout.recompute == "none" else 0
    layer = tokens * (10 * model.width + (24 * model.width + scores) / t)
    layer = 2 * tokens * model.width if layout.recompute == "full" else layer
    return _memory(model, layout, seq, stage, layer=layer)


@wrong("12.1", names="no-scores")
def never_keeps_scores(model, layout, seq, stage):
    recompute = "selective" if layout.recompute == "none" else layout.recompute
    return _memory(model, layout, seq, stage, layer=_layer(model, layout, seq, recompute))


@wrong("12.1", names="scores-kept")
def always_keeps_scores(model, layout, seq, stage):
    recompute = "none" if layout.recompute == "selective" else layout.recompute
    return _memory(model, layout, seq, stage, layer=_layer(model, layout, seq, recompute))


@wrong("12.1", names="full-is-selective")
def knows_one_kind_of_recomputation(model, layout, seq, stage):
    recompute = "none" if layout.recompute == "none" else "selective"
    return _memory(model, layout, seq, stage, layer=_layer(model, layout, seq, recompute))


@wrong("12.1", names="full-cut")
def cuts_the_input(model, layout, seq, stage):
    layer = _layer(model, layout, seq)
    layer /= layout.tp if layout.recompute == "full" else 1
    return _memory(model, layout, seq, stage, layer=layer)


@wrong("12.1", names="nothing-kept")
def keeps_nothing(model, layout, seq, stage):
    layer = 0.0 if layout.recompute == "full" else _layer(model, layout, seq)
    return _memory(model, layout, seq, stage, layer=layer)


# ---- 12.2 traffic_of -----------------------------------------------------------------------------


def _traffic(
    model, layout, seq, stage, tp=1.0, pp=1.0, dp=1.0, passes=None, rounds=None, ways=None
):
    """What is sent, each number times a factor."""
    t, p, d, m = layout.tp, layout.pp, layout.dp, layout.micro_batches
    layers, hidden = model.layers // p, 2 * seq * layout.micro_batch * model.width
    passes = passes or (3 if layout.recompute == "full" else 2)
    rounds = rounds or (1 + 2 * m if layout.zero == 3 else 2)
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
    passes = 1 + (2 * layout.micro_batches if layout.zero == 3 else 1)
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
    sums = held * ring
    gathers = held * ring * (2 * layout.micro_batches if layout.zero == 3 else 1)
    both = 2 if 0 < stage < layout.pp - 1 else 1 if layout.pp > 1 else 0
    return {
        "dp": 2 * (sums + gathers),
        "tp": 2 * per_layer * model.layers // layout.pp * layout.micro_batches,
        "pp": 2 * both * numbers / t * layout.micro_batches,
    }


@wrong("12.2", names="uses-estimate")
def asks_estimate_for_the_traffic(model, layout, seq, stage):
    sent = dict.fromkeys(("tp", "pp", "dp"), 0)
    for call in estimate.traffic(model, layout, seq, stage):
        sent[call.group] += call.sent
    return sent


@wrong("12.2", names="in-gb")
def sends_gigabytes(model, layout, seq, stage):
    return {group: sent / GB for group, sent in _traffic(model, layout, seq, stage).items()}


@wrong("12.2", names="not-a-dict")
def three_numbers(model, layout, seq, stage):
    return tuple(_traffic(model, layout, seq, stage).values())


@wrong("12.2", names="half")
def one_pair_a_layer(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, tp=0.5)


@wrong("12.2", names="whole-payload")
def counts_the_payload(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, tp=layout.tp / max(layout.tp - 1, 1))


@wrong("12.2", names="whole-payload")
def counts_the_payload_of_gradients(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, dp=layout.dp / max(layout.dp - 1, 1))


@wrong("12.2", names="group-total")
def counts_all_tensor_ranks(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, tp=layout.tp)


@wrong("12.2", names="group-total")
def counts_all_data_ranks(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, dp=layout.dp)


@wrong("12.2", names="one-micro-batch")
def counts_one_micro_batch(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, tp=1 / layout.micro_batches)


@wrong("12.2", names="one-layer")
def counts_one_layer(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, tp=layout.pp / model.layers)


@wrong("12.2", names="whole-model")
def counts_all_layers(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, tp=layout.pp)


@wrong("12.2", names="whole-model")
def sends_all_gradients(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, dp=layout.pp)


@wrong("12.2", names="half")
def counts_forward(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, passes=1)


@wrong("12.2", names="no-recomputation")
def recomputes_without_collectives(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, passes=2)


@wrong("12.2", names="recomputed-always")
def recomputes_selectively_with_collectives(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, passes=2 if layout.recompute == "none" else 3)


@wrong("12.2", names="micro-batch-size")
def sends_one_sequence(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, tp=1 / layout.micro_batch)


@wrong("12.2", names="payload-cut")
def cuts_the_payload(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, tp=1 / layout.tp)


@wrong("12.2", names="message-not-cut")
def sends_whole_messages(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, pp=layout.tp)


@wrong("12.2", names="both-ways-everywhere")
def sends_both_ways(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, ways=2 if layout.pp > 1 else 0)


@wrong("12.2", names="one-way")
def sends_activations_only(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, ways=int(stage < layout.pp - 1))


@wrong("12.2", names="messages-on-a-ring")
def sends_messages_on_a_ring(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, pp=(layout.pp - 1) / layout.pp)


@wrong("12.2", names="gradients-every-micro-batch")
def sums_after_every_micro_batch(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, dp=layout.micro_batches)


@wrong("12.2", names="one-pass")
def sums_in_one_pass(model, layout, seq, stage):
    rounds = 1 + 2 * layout.micro_batches if layout.zero == 3 else 1
    return _traffic(model, layout, seq, stage, rounds=rounds)


@wrong("12.2", names="gradients-not-cut")
def sends_whole_gradients(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, dp=layout.tp)


@wrong("12.2", names="zero-saves-traffic")
def saves_traffic_with_zero(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, dp=1 / layout.dp if layout.zero in (1, 2) else 1)


@wrong("12.2", names="zero-3-as-ddp")
def treats_zero_3_as_ddp(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, rounds=2)


@wrong("12.2", names="gathered-once")
def gathers_once_a_step(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, rounds=3 if layout.zero == 3 else 2)


@wrong("12.2", names="gathered-for-forward")
def keeps_what_it_gathered(model, layout, seq, stage):
    rounds = 1 + layout.micro_batches if layout.zero == 3 else 2
    return _traffic(model, layout, seq, stage, rounds=rounds)


@wrong("12.2", names="nothing-to-send")
def sends_to_itself(model, layout, seq, stage):
    sent = _traffic(model, layout, seq, stage)
    weights = 24 * model.layers // layout.pp * model.width**2 / layout.tp
    return sent | ({"dp": 2 * weights} if layout.dp == 1 else {})


# ---- 12.3 step_time_of ---------------------------------------------------------------------------


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


@wrong("12.3", names="uses-estimate")
def asks_estimate_for_the_time(kernels, calls, layout, bubble, hardware):
    estimate.collective_time("all_reduce", 2, 10**6, hardware.intra_bandwidth)
    return _time(kernels, calls, layout, bubble, hardware)


@wrong("12.3", names="other-unit")
def in_milliseconds(kernels, calls, layout, bubble, hardware):
    return 1e3 * _time(kernels, calls, layout, bubble, hardware)


@wrong("12.3", names="roofline-sum")
def adds_computing_and_memory(kernels, calls, layout, bubble, hardware):
    def work(kernels, hw):
        return sum(f / hw.peak + b / hw.hbm_bandwidth for f, b in kernels)

    return _time(kernels, calls, layout, bubble, hardware, work=work)


@wrong("12.3", names="roofline-of-sums")
def takes_the_larger_sum(kernels, calls, layout, bubble, hardware):
    def work(kernels, hw):
        flops, moved = (sum(column) for column in zip(*kernels, strict=True))
        return max(flops / hw.peak, moved / hw.hbm_bandwidth)

    return _time(kernels, calls, layout, bubble, hardware, work=work)


@wrong("12.3", names="peak-only")
def divides_by_the_peak(kernels, calls, layout, bubble, hardware):
    def work(kernels, hw):
        return sum(f for f, _ in kernels) / hw.peak

    return _time(kernels, calls, layout, bubble, hardware, work=work)


@wrong("12.3", names="latency-left-out")
def leaves_the_latency_out(kernels, calls, layout, bubble, hardware):
    return _time(kernels, calls, layout, bubble, hardware, rounds=lambda n, k: 0)


@wrong("12.3", names="latency-once")
def waits_once_a_call(kernels, calls, layout, bubble, hardware):
    return _time(kernels, calls, layout, bubble, hardware, rounds=lambda n, k: 1)


@wrong("12.3", names="rounds-of-one-pass")
def waits_for_one_pass(kernels, calls, layout, bubble, hardware):
    return _time(kernels, calls, layout, bubble, hardware, rounds=lambda n, k: n - 1)


@wrong("12.3", names="whole-payload")
def sends_the_payload_in_each_pass(kernels, calls, layout, bubble, hardware):
    return _time(kernels, calls, layout, bubble, hardware, piece=lambda n, k: k)


@wrong("12.3", names="all-reduce-once")
def takes_an_all_reduce_for_one_pass(kernels, calls, layout, bubble, hardware):
    return _time(kernels, calls, layout, bubble, hardware, piece=lambda n, k: (n - 1) / n)


@wrong("12.3", names="one-call")
def counts_each_call_once(kernels, calls, layout, bubble, hardware):
    return _time(kernels, calls, layout, bubble, hardware, count=1)


@wrong("12.3", names="send-on-a-ring")
def sends_on_a_ring(kernels, calls, layout, bubble, hardware):
    def one(call, layout, hardware):
        if call.op != "send":
            return _call(call, layout, hardware)
        near = _reach(layout, call.group) <= hardware.node
        alpha = hardware.intra_latency if near else hardware.inter_latency
        rate = hardware.intra_bandwidth if near else hardware.inter_bandwidth
        return call.calls * (layout.pp - 1) * (alpha + call.payload / layout.pp / rate)

    return _time(kernels, calls, layout, bubble, hardware, one=one)


@wrong("12.3", names="inside-always")
def never_leaves_the_node(kernels, calls, layout, bubble, hardware):
    return _time(kernels, calls, layout, bubble, hardware, reach=lambda layout, group: 0)


@wrong("12.3", names="between-always")
def always_leaves_the_node(kernels, calls, layout, bubble, hardware):
    return _time(kernels, calls, layout, bubble, hardware, reach=lambda layout, group: math.inf)


@wrong("12.3", names="size-only")
def looks_at_the_size(kernels, calls, layout, bubble, hardware):
    return _time(kernels, calls, layout, bubble, hardware, reach=getattr)


@wrong("12.3", names="order-ignored")
def takes_the_usual_order(kernels, calls, layout, bubble, hardware):
    usual = ("tp", "cp", "dp", "pp")

    def reach(layout, group):
        return math.prod(getattr(layout, g) for g in usual[: usual.index(group) + 1])

    return _time(kernels, calls, layout, bubble, hardware, reach=reach)


@wrong("12.3", names="order-reversed")
def takes_the_order_from_outside(kernels, calls, layout, bubble, hardware):
    def reach(layout, group):
        order = layout.order[::-1]
        return math.prod(getattr(layout, g) for g in order[: order.index(group) + 1])

    return _time(kernels, calls, layout, bubble, hardware, reach=reach)


@wrong("12.3", names="everything-overlaps")
def hides_everything(kernels, calls, layout, bubble, hardware):
    def join(own, waiting, beside):
        return max(max(own, waiting) / (1 - bubble), beside)

    return _time(kernels, calls, layout, bubble, hardware, join=join)


@wrong("12.3", names="nothing-overlaps")
def adds_the_gradients(kernels, calls, layout, bubble, hardware):
    def join(own, waiting, beside):
        return (own + waiting) / (1 - bubble) + beside

    return _time(kernels, calls, layout, bubble, hardware, join=join)


@wrong("12.3", names="bubble-ignored")
def knows_no_bubble(kernels, calls, layout, bubble, hardware):
    def join(own, waiting, beside):
        return max(own + waiting, beside)

    return _time(kernels, calls, layout, bubble, hardware, join=join)


@wrong("12.3", names="bubble-of-the-ideal")
def multiplies_by_the_bubble(kernels, calls, layout, bubble, hardware):
    def join(own, waiting, beside):
        return max((own + waiting) * (1 + bubble), beside)

    return _time(kernels, calls, layout, bubble, hardware, join=join)


@wrong("12.3", names="bubble-on-dp")
def stretches_the_gradients(kernels, calls, layout, bubble, hardware):
    def join(own, waiting, beside):
        return max(own + waiting, beside) / (1 - bubble)

    return _time(kernels, calls, layout, bubble, hardware, join=join)


@wrong("12.3", names="bubble-without-calls")
def stretches_the_kernels_only(kernels, calls, layout, bubble, hardware):
    def join(own, waiting, beside):
        return max(own / (1 - bubble) + waiting, beside)

    return _time(kernels, calls, layout, bubble, hardware, join=join)


# ---- 12.4 search ---------------------------------------------------------------------------------

RECOMPUTE = ("none", "selective", "full")


def _divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def _layouts(model, gpus, batch, seq, rules=("heads", "seq", "layers", "zero")):
    for tp, pp in itertools.product(_divisors(gpus), repeat=2):
        dp, left = divmod(gpus, tp * pp)
        if left or dp == 0 or batch % dp or pp > model.layers:
            continue
        if "heads" in rules and model.heads % tp or "seq" in rules and seq % tp:
            continue
        if "layers" in rules and model.layers % pp:
            continue
        for b, recompute in itertools.product(_divisors(batch // dp), RECOMPUTE):
            for zero in range(3 if "zero" in rules and pp > 1 else 4):
                split = {"dp": dp, "tp": tp, "pp": pp, "zero": zero, "recompute": recompute}
                yield Layout(**split, micro_batch=b, micro_batches=batch // dp // b)


def _fitting(model, gpus, batch, seq, hardware, judge, keep=lambda layout: True, **more):
    """(bytes, seconds, layout) of those that fit."""
    judged = [(*judge(e), e) for e in _layouts(model, gpus, batch, seq, **more) if keep(e)]
    return [each for each in judged if each[0] <= hardware.hbm_bytes]


def _first(judged, key=lambda each: each[1]):
    if not judged:
        raise ValueError("Nothing fits.")
    return min(judged, key=key)[2]


@right("12.4")
def takes_the_least_of_all(model, gpus, batch, seq, hardware, judge):
    return _first(_fitting(model, gpus, batch, seq, hardware, judge))


@right("12.4")
def goes_by_seconds_and_looks_at_memory_last(model, gpus, batch, seq, hardware, judge):
    by_seconds = sorted(_layouts(model, gpus, batch, seq), key=lambda layout: judge(layout)[1])
    for layout in by_seconds:
        if judge(layout)[0] <= hardware.hbm_bytes:
            return layout
    raise ValueError(f"No split of {model.layers} layers over {gpus} GPUs fits.")


@right("12.4")
def never_leaves_the_node_with_tensor_ranks(model, gpus, batch, seq, hardware, judge):
    """A rule of thumb, within the regret: tensor groups stay inside a node, if anything fits there."""
    inside = _fitting(
        model, gpus, batch, seq, hardware, judge, lambda layout: layout.tp <= hardware.node
    )
    return _first(inside or _fitting(model, gpus, batch, seq, hardware, judge))


@wrong("12.4", names="uses-estimate")
def lets_estimate_search(model, gpus, batch, seq, hardware, judge):
    return estimate.search(model, gpus, batch, seq, hardware)[0][0].layout


@wrong("12.4", names="no-layout")
def returns_the_seconds_too(model, gpus, batch, seq, hardware, judge):
    layout = takes_the_least_of_all(model, gpus, batch, seq, hardware, judge)
    return layout, judge(layout)[1]


@wrong("12.4", names="gpus")
def uses_half_of_the_gpus(model, gpus, batch, seq, hardware, judge):
    return takes_the_least_of_all(model, gpus // 2, batch, seq, hardware, judge)


@wrong("12.4", names="batch")
def forgets_the_micro_batches(model, gpus, batch, seq, hardware, judge):
    layout = takes_the_least_of_all(model, gpus, batch, seq, hardware, judge)
    sizes = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "zero": layout.zero}
    return Layout(**sizes, micro_batches=batch)


@wrong("12.4", names="does-not-fit")
def forgets_the_memory(model, gpus, batch, seq, hardware, judge):
    return min(_layouts(model, gpus, batch, seq), key=lambda layout: judge(layout)[1])


@wrong("12.4", names="heads")
def splits_heads(model, gpus, batch, seq, hardware, judge):
    rules = ("seq", "layers", "zero")
    return _first(_fitting(model, gpus, batch, seq, hardware, judge, rules=rules))


@wrong("12.4", names="sequence")
def splits_tokens(model, gpus, batch, seq, hardware, judge):
    rules = ("heads", "layers", "zero")
    return _first(_fitting(model, gpus, batch, seq, hardware, judge, rules=rules))


@wrong("12.4", names="layers")
def splits_layers(model, gpus, batch, seq, hardware, judge):
    rules = ("heads", "seq", "zero")
    return _first(_fitting(model, gpus, batch, seq, hardware, judge, rules=rules))


@wrong("12.4", names="least-memory")
def takes_the_smallest(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    return _first(fitting, key=lambda each: each[0])


@wrong("12.4", names="slowest")
def takes_the_slowest(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    return _first(fitting, key=lambda each: -each[1])


@wrong("12.4", names="data-first")
def takes_the_most_data_ranks(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    return _first(fitting, key=lambda each: (-each[2].dp, each[1]))


def _restricted(keep):
    def answer(model, gpus, batch, seq, hardware, judge):
        return _first(_fitting(model, gpus, batch, seq, hardware, judge, keep))

    return answer


@wrong("12.4", names="no-zero")
def never_shards(model, gpus, batch, seq, hardware, judge):
    return _restricted(lambda layout: layout.zero == 0)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="no-recomputation")
def never_recomputes(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.recompute == "none")
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="no-selective")
def recomputes_all_or_nothing(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.recompute != "selective")
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="always-full")
def always_recomputes(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.recompute == "full")
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="always-zero-3")
def always_shards(model, gpus, batch, seq, hardware, judge):
    return _restricted(lambda layout: layout.zero == 3)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="zero-up-to-2")
def shards_no_parameters(model, gpus, batch, seq, hardware, judge):
    return _restricted(lambda layout: layout.zero < 3)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="no-pipeline")
def makes_no_stages(model, gpus, batch, seq, hardware, judge):
    return _restricted(lambda layout: layout.pp == 1)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="no-tensor")
def cuts_no_layer(model, gpus, batch, seq, hardware, judge):
    return _restricted(lambda layout: layout.tp == 1)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="one-sequence")
def takes_single_sequences(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.micro_batch == 1)
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="powers-of-two")
def tries_powers_of_two(model, gpus, batch, seq, hardware, judge):
    def even(layout):
        sizes = layout.dp, layout.tp, layout.pp, layout.micro_batch
        return all(math.log2(size).is_integer() for size in sizes)

    return _restricted(even)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="never-all-in-one")
def ends_the_range_too_early(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.tp in range(1, gpus))
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="always-copies")
def keeps_two_copies(model, gpus, batch, seq, hardware, judge):
    return _restricted(lambda layout: layout.dp > 1)(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="no-zero-2-in-stages")
def shards_the_optimizer_alone_in_stages(model, gpus, batch, seq, hardware, judge):
    search = _restricted(lambda layout: layout.pp == 1 or layout.zero < 2)
    return search(model, gpus, batch, seq, hardware, judge)


@wrong("12.4", names="zero-3-in-stages")
def shards_parameters_in_stages(model, gpus, batch, seq, hardware, judge):
    rules = ("heads", "seq", "layers")
    return _first(_fitting(model, gpus, batch, seq, hardware, judge, rules=rules))


@wrong("12.4", names="at-most")
def leaves_a_byte_free(model, gpus, batch, seq, hardware, judge):
    def less(layout):
        return judge(layout)[0] < hardware.hbm_bytes

    return _first(_fitting(model, gpus, batch, seq, hardware, judge, less))


@wrong("12.4", names="no-error")
def returns_what_needs_least(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    if not fitting:
        return min(_layouts(model, gpus, batch, seq), key=lambda layout: judge(layout)[0])
    return _first(fitting)


@wrong("12.4", names="returns-none")
def returns_nothing_if_nothing_fits(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    return _first(fitting) if fitting else None


@wrong("12.4", names="other-error")
def runs_into_an_empty_list(model, gpus, batch, seq, hardware, judge):
    fitting = _fitting(model, gpus, batch, seq, hardware, judge)
    fitting.sort(key=lambda each: each[1])
    return fitting[0][2]


@wrong("12.4", names="gives-up")
def gives_up_early(model, gpus, batch, seq, hardware, judge):
    raise ValueError("It needs too much memory.")
