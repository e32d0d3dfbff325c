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


@wrong("12.1", names="not-the-dict")
def with_a_total(model, layout, seq, stage):
    held = _memory(model, layout, seq, stage)
    return held | {"total": sum(held.values())}


@wrong("12.1", names="other-unit")
def in_gigabytes(model, layout, seq, stage):
    return {kind: size / GB for kind, size in _memory(model, layout, seq, stage).items()}


@wrong("12.1", names="other-bytes")
def forgets_the_master_copy(model, layout, seq, stage):
    states = _states(_count(model, layout, stage), layout, (2, 2, 8))
    return _memory(model, layout, seq, stage, states)


@wrong("12.1", names="other-shards")
def shards_parameters_first(model, layout, seq, stage):
    shards = [layout.dp if layout.zero >= z else 1 for z in (1, 2, 3)]
    return _memory(
        model, layout, seq, stage, _states(_count(model, layout, stage), layout, shards=shards)
    )


@wrong("12.1", names="other-layers")
def holds_all_layers(model, layout, seq, stage):
    states = _states(_count(model, layout, stage, layers=model.layers), layout)
    return _memory(model, layout, seq, stage, states)


@wrong("12.1", names="not-cut")
def leaves_the_tables_whole(model, layout, seq, stage):
    count = _count(model, layout, stage, tables=0)
    count += _count(model, layout, stage, layers=0, tp=1)
    return _memory(model, layout, seq, stage, _states(count, layout))


@wrong("12.1", names="not-cut")
def without_sequence_parallelism(model, layout, seq, stage):
    tokens, t = seq * layout.micro_batch, layout.tp
    scores = 5 * model.heads * seq if layout.recompute == "none" else 0
    layer = tokens * (10 * model.width + (24 * model.width + scores) / t)
    layer = 2 * tokens * model.width if layout.recompute == "full" else layer
    return _memory(model, layout, seq, stage, layer=layer)


@wrong("12.1", names="other-tables")
def has_a_tied_matrix_once(model, layout, seq, stage):
    tables = (stage == 0) + (stage == layout.pp - 1 and not model.tied)
    states = _states(_count(model, layout, stage, tables=tables), layout)
    return _memory(model, layout, seq, stage, states)


@wrong("12.1", names="other-sequences")
def takes_one_sequence(model, layout, seq, stage):
    layer = _layer(model, layout, seq) / layout.micro_batch
    return _memory(model, layout, seq, stage, layer=layer)


@wrong("12.1", names="other-sequences")
def takes_all_micro_batches_at_once(model, layout, seq, stage):
    layer = _layer(model, layout, seq) * layout.micro_batches
    return _memory(model, layout, seq, stage, layer=layer)


@wrong("12.1", names="in-flight")
def keeps_what_gpipe_keeps(model, layout, seq, stage):
    return _memory(model, layout, seq, stage, flight=layout.micro_batches)


@wrong("12.1", names="other-recomputation")
def knows_one_kind_of_recomputation(model, layout, seq, stage):
    recompute = "none" if layout.recompute == "none" else "selective"
    return _memory(model, layout, seq, stage, layer=_layer(model, layout, seq, recompute))


@wrong("12.1", names="not-cut")
def leaves_the_scores_whole(model, layout, seq, stage):
    layer = _layer(model, layout, seq)
    if layout.recompute == "none":
        tokens = seq * layout.micro_batch
        layer = tokens * (34 * model.width / layout.tp + 5 * model.heads * seq)
    return _memory(model, layout, seq, stage, layer=layer)
