"""Answers to 12.1, `memory_of`: wrong in a plausible way, or right in another."""

import course_planner as estimate
from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch12.shared import GB


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
    flight = min(layout.micro_batches, layout.pp - stage) if flight is None else flight
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


@wrong("12.1", names="one-too-few")
def counts_from_the_end(model, layout, seq, stage):
    flight = min(layout.micro_batches, layout.pp - 1 - stage)
    return _memory(model, layout, seq, stage, flight=flight)


@wrong("12.1", names="every-stage-alike")
def as_many_as_stages(model, layout, seq, stage):
    return _memory(model, layout, seq, stage, flight=layout.pp)


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
