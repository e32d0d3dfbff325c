"""The checks of chapter 12: the memory of a rank, what it sends, how long its step takes, and the search
for the best layout.

What an answer gives is compared with the same arithmetic, done rightly or with a slip of the kind that
people make: each slip is an argument of `_held`, `_sent` or `_seconds`.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from course_utils import estimate
from course_utils.checks import Exercise, Wrong, expect, expect_type
from course_utils.checks.compare import same
from course_utils.checks.forbidden import called
from course_utils.estimate import Call, Hardware, Layout, Model

FORBIDDEN = [f for f in vars(estimate).values() if inspect.isfunction(f)]
USES_ESTIMATE = (
    "You call `course_utils.estimate`, which this exercise is about. `Model`, `Layout` and `Hardware` are there to "
    "be read; the arithmetic is yours."
)
UNITS = {
    "in-gb": "You return GB. Asked are bytes: divide by 1e9 only where something is printed.",
    "in-gib": "You return GiB. Asked are bytes: divide only where something is printed.",
}


def _own(answer: Callable, *arguments):
    """What the answer returns; Wrong where it asks `course_utils.estimate`."""
    with called(*FORBIDDEN) as names:
        got = answer(*arguments)
    if names:
        raise Wrong("uses-estimate", expected="your own arithmetic", got=f"estimate.{names[0]}")
    return got


def _check_keys(got, keys: tuple[str, ...]) -> None:
    expect_type(got, dict, likely=None if got is None else "not-a-dict")
    if set(got) != set(keys):
        raise Wrong("other-keys", expected=f"the keys {', '.join(keys)}", got=got)


def _in_other_units(right: float) -> dict[str, float]:
    return {"in-gb": right / 1e9, "in-gib": right / 2**30} if right > 1e6 else {}


def _model(draw, layers: int, heads: int, **more) -> Model:
    """A plain transformer, of a size at which no two mistakes give the same bytes."""
    width = heads * 8 * draw.integer(12, 20)
    vocab = 1000 * draw.integer(29, 61) + 24
    return Model(layers, width, heads, vocab, **more)


# ---- 12.1 ----------------------------------------------------------------------------------------

holding = Exercise(
    "12.1",
    "memory_of",
    points=3,
    minutes=25,
    kind="first",
    parameters=("model", "layout", "seq", "stage"),
    hints=[
        (
            "Four numbers, and each has its own divisors. For each of them ask of tp, pp and dp: do these ranks share it "
            "out, or does each have one of its own?"
        ),
        (
            "Count the parameters of the stage first: its layers, and a table of V x W at either end. Tensor ranks share "
            "out all of it. ZeRO's stages come on top, one kind after the other: 1 the optimizer, 2 gradients, 3 "
            "parameters. Activations are those of this rank's own micro-batches: dp shares out nothing there."
        ),
        (
            "2, 2 and 12 bytes a parameter, each divided by dp from its stage of ZeRO on. Activations: a layer's bytes, "
            "by the kind of recomputation, times the layers of the stage, times min(m, p - stage) micro-batches in flight."
        ),
    ],
    misconceptions={
        "uses-estimate": USES_ESTIMATE,
        **UNITS,
        "not-a-dict": "Asked is a dict of four numbers, by kind.",
        "other-keys": "The keys are parameters, gradients, optimizer and activations.",
        "elements": "You count numbers and not bytes: each of them has two.",
        "float32": "You count 4 bytes for each. Parameters and gradients are in bfloat16; what is in float32 belongs to the "
        "optimizer.",
        "master-copy": "8 bytes are Adam's two averages. In mixed precision the optimizer also holds the float32 master "
        "copy of the parameters: 12.",
        "bytes-16": "16 bytes a parameter are all three kinds together. The optimizer has 12 of them.",
        "whole-model": "You count the layers of the whole model. A stage has layers / pp of them.",
        "not-cut": "Tensor ranks share out every matrix, the tables too: divide by tp.",
        "tables-not-cut": "The layers are divided by tp, the tables are not. Tensor ranks share them out by the vocabulary.",
        "no-tables": "The embedding is missing on the first stage, or the output layer on the last.",
        "tables-everywhere": "Every stage has a table in your count. The embedding is on the first stage only, the output "
        "layer on the last.",
        "tied-copy": "A tied output layer on another stage than the embedding is a copy: the last stage holds it.",
        "tied-twice": "On one stage a tied output layer is the embedding's matrix, once.",
        "one-table": "The output layer is not tied here: it is a second table.",
        "attention-only": "Those are the 4 W^2 of attention. The MLP has 8 W^2 more.",
        "mlp-only": "Those are the 8 W^2 of the MLP. Attention has 4 W^2 more: query, key, value and output.",
        "sharded-too-early": "You divide it by dp before ZeRO's stage does: 1 shards the optimizer, 2 the gradients too, 3 the "
        "parameters too.",
        "not-sharded": "At this stage of ZeRO the dp ranks share it out, and you do not divide.",
        "divided-by-all": "You divide by the number of all GPUs. Stages and tensor ranks are already counted.",
        "activations-by-dp": "You divide activations by dp. A data-parallel rank has micro-batches of its own, and keeps all "
        "of them.",
        "global-batch": "Those are the activations of all dp ranks. Each holds its own.",
        "one-in-flight": "You keep one micro-batch. Under 1F1B stage r has min(m, p - r) of them in flight.",
        "all-in-flight": "You keep all micro-batches, as GPipe does. Under 1F1B it is min(m, p - r).",
        "every-stage-alike": "Every stage keeps as many as the first in your count. Stage r begins its backward passes p - r "
        "micro-batches after it has begun, so it keeps fewer.",
        "stages-reversed": "The first stage keeps the most, not the last: it waits longest for its first backward pass.",
        "more-than-there-are": "You keep more micro-batches in flight than a step has: the smaller of m and p - r.",
        "micro-batch-size": "A micro-batch has `micro_batch` sequences, not one.",
        "activations-not-cut": "With sequence parallelism everything that a layer keeps is shared out among the tensor ranks.",
        "no-sequence-parallelism": "That is tensor parallelism alone, 10 + 24 / t. With sequence parallelism norms and "
        "dropouts are shared out too: 34 / t.",
        "no-scores": "Without recomputation the scores of attention are kept: 5 a s / W more.",
        "scores-kept": "Selective recomputation computes the scores again, so they are not kept.",
        "full-is-selective": "Full recomputation keeps a layer's input only: 2 s b W.",
        "full-cut": "With full recomputation the input is kept whole on every tensor rank, as the paper's table has it.",
        "nothing-kept": "Full recomputation keeps the input of each layer, or there is nothing to compute from.",
        "activations-float32": "Twice too much: activations have 2 bytes here, as the 34 already says.",
    },
)
KINDS = ("parameters", "gradients", "optimizer", "activations")
STATES = {"parameters": (2, 3), "gradients": (2, 2), "optimizer": (12, 1)}  # bytes, ZeRO from


def _tables(model: Model, layout: Layout, stage: int) -> int:
    """The tables of V x W on a stage."""
    both_here = layout.pp == 1 and model.tied
    return (stage == 0) + (stage == layout.pp - 1 and not both_here)


def _matrices(
    model: Model,
    layout: Layout,
    stage: int,
    pp: int | None = None,
    tp: int | None = None,
    squares: int = 12,
    tables: Callable = _tables,
    tables_tp: int | None = None,
) -> float:
    """The parameters of a rank before ZeRO."""
    tp, pp = tp or layout.tp, pp or layout.pp
    layers = model.layers / pp * squares * model.width**2 / tp
    return layers + tables(model, layout, stage) * model.vocab * model.width / (tables_tp or tp)


def _in_flight(layout: Layout, stage: int) -> int:
    return min(layout.micro_batches, layout.pp - stage)


def _kept(model: Model, layout: Layout, seq: int, recompute: str | None = None) -> float:
    """What one layer keeps of one micro-batch."""
    recompute = recompute or layout.recompute
    tokens = seq * layout.micro_batch * model.width
    if recompute == "full":
        return 2 * tokens
    scores = 5 * model.heads * seq / model.width if recompute == "none" else 0
    return tokens * (34 + scores) / layout.tp


def _held(model: Model, layout: Layout, seq: int, stage: int) -> dict[str, float]:
    count = _matrices(model, layout, stage)
    held = {}
    for kind, (size, from_stage) in STATES.items():
        held[kind] = size * count / (layout.dp if layout.zero >= from_stage else 1)
    layers = model.layers // layout.pp
    held["activations"] = _kept(model, layout, seq) * layers * _in_flight(layout, stage)
    return held


def _slips_of_states(model: Model, layout: Layout, stage: int, kind: str) -> dict[str, float]:
    size, from_stage = STATES[kind]
    shards = layout.dp if layout.zero >= from_stage else 1
    count = _matrices(model, layout, stage)
    right = size * count / shards

    def other(**slip) -> float:
        return size * _matrices(model, layout, stage, **slip) / shards

    sizes = {"parameters": 2, "gradients": 2, "optimizer": 12}
    of_optimizer = {"master-copy": 8 * count / shards, "bytes-16": 16 * count / shards}
    tied_apart = model.tied and layout.pp > 1 and stage == layout.pp - 1
    return {
        **_in_other_units(right),
        **(of_optimizer if kind == "optimizer" else {"elements": right / sizes[kind]}),
        **({} if kind == "optimizer" else {"float32": 2 * right}),
        "sharded-too-early": shards == 1 and right / layout.dp,
        "not-sharded": shards > 1 and right * shards,
        "divided-by-all": right / (layout.tp * layout.pp),
        "whole-model": layout.pp > 1 and other(pp=1),
        "not-cut": other(tp=1),
        "tables-not-cut": other(tables_tp=1),
        "tied-copy": tied_apart and other(tables=lambda *_: 0),
        "no-tables": other(tables=lambda *_: 0),
        "tied-twice": layout.pp == 1 and model.tied and other(tables=lambda *_: 2),
        "one-table": layout.pp == 1 and not model.tied and other(tables=lambda *_: 1),
        "tables-everywhere": lambda got: any(
            same(got, other(tables=lambda *_, n=n: n)) for n in (1, 2)
        ),
        "attention-only": other(squares=4),
        "mlp-only": other(squares=8),
    }


def _slips_of_activations(model: Model, layout: Layout, seq: int, stage: int) -> dict:
    layers, flight = model.layers // layout.pp, _in_flight(layout, stage)
    layer = _kept(model, layout, seq)
    right = layer * layers * flight
    tokens = seq * layout.micro_batch * model.width
    spread = tokens * (10 + (24 + 5 * model.heads * seq / model.width) / layout.tp)
    spread_without_scores = tokens * (10 + 24 / layout.tp)
    alone = spread if layout.recompute == "none" else spread_without_scores
    selective = _kept(model, layout, seq, "selective")
    return {
        **_in_other_units(right),
        "activations-by-dp": right / layout.dp,
        "global-batch": right * layout.dp,
        "micro-batch-size": right / layout.micro_batch,
        "whole-model": right * layout.pp if layout.pp > 1 else False,
        "nothing-kept": 0.0,
        "full-cut": layout.recompute == "full" and right / layout.tp,
        "full-is-selective": layout.recompute == "full"
        and (lambda got: any(same(got, a * layers * flight) for a in (selective, alone))),
        "activations-not-cut": right * layout.tp,
        "no-sequence-parallelism": layout.recompute != "full" and alone * layers * flight,
        "no-scores": layout.recompute == "none" and selective * layers * flight,
        "scores-kept": layout.recompute == "selective"
        and _kept(model, layout, seq, "none") * layers * flight,
        "more-than-there-are": layer * layers * (layout.pp - stage),
        "one-in-flight": layer * layers,
        "stages-reversed": layer * layers * min(layout.micro_batches, stage + 1),
        "every-stage-alike": lambda got: any(
            same(got, layer * layers * n) for n in (layout.pp, min(layout.micro_batches, layout.pp))
        ),
        "all-in-flight": layer * layers * layout.micro_batches,
        "activations-float32": 2 * right,
    }


def _check_held(got, model: Model, layout: Layout, seq: int, stage: int) -> None:
    _check_keys(got, KINDS)
    right = _held(model, layout, seq, stage)
    for kind in STATES:
        likely = _slips_of_states(model, layout, stage, kind)
        expect(got[kind], right[kind], what=kind, likely=likely)
    likely = _slips_of_activations(model, layout, seq, stage)
    expect(got["activations"], right["activations"], what="activations", likely=likely)


def _layout(draw, **more) -> Layout:
    """More micro-batches than stages, and sizes whose quotients tell two mistakes apart."""
    sizes = {"tp": [4, 8], "pp": [6, 7], "dp": [11, 13], "micro_batch": [5, 9]}
    drawn = {name: draw.choice(options) for name, options in sizes.items()}
    return Layout(**{**drawn, "micro_batches": draw.choice([17, 19, 23]), **more})


def _case(draw, tied: bool = True, **more) -> tuple[Model, Layout, int]:
    layout = _layout(draw, **more)
    model = _model(draw, layout.pp * draw.choice([7, 10]), 8 * draw.integer(2, 3), tied=tied)
    return model, layout, 512 * draw.integer(3, 7)


def _inner_stage(draw, layout: Layout) -> int:
    """One that keeps another number of micro-batches than its mirror image."""
    return draw.choice([1, layout.pp - 2])


@holding.requires("a stage in the middle, nothing sharded", at_home=True)
def _(answer, draw):
    model, layout, seq = _case(draw)
    stage = _inner_stage(draw, layout)
    _check_held(_own(answer, model, layout, seq, stage), model, layout, seq, stage)


@holding.requires("the first stage and the last, where the tables are")
def _(answer, draw):
    for tied in (True, False):
        model, layout, seq = _case(draw, tied)
        for stage in (0, layout.pp - 1):
            _check_held(answer(model, layout, seq, stage), model, layout, seq, stage)


@holding.requires("one stage that has both ends, tied and not")
def _(answer, draw):
    for tied in (True, False):
        model, layout, seq = _case(draw, tied, pp=1)
        _check_held(answer(model, layout, seq, 0), model, layout, seq, 0)


@holding.requires("ZeRO's three stages")
def _(answer, draw):
    for zero in (1, 2, 3):
        model, layout, seq = _case(draw, zero=zero)
        stage = draw.integer(0, layout.pp - 1)
        _check_held(answer(model, layout, seq, stage), model, layout, seq, stage)


@holding.requires("selective and full recomputation")
def _(answer, draw):
    for recompute in ("selective", "full"):
        model, layout, seq = _case(draw, recompute=recompute)
        stage = draw.integer(0, layout.pp - 1)
        _check_held(answer(model, layout, seq, stage), model, layout, seq, stage)


@holding.requires("fewer micro-batches than stages")
def _(answer, draw):
    model, layout, seq = _case(draw, pp=6, micro_batches=draw.integer(2, 3))
    for stage in (0, 3):
        _check_held(answer(model, layout, seq, stage), model, layout, seq, stage)


@holding.requires("one GPU")
def _(answer, draw):
    model, layout, seq = _case(draw, tp=1, pp=1, dp=1)
    _check_held(answer(model, layout, seq, 0), model, layout, seq, 0)


# ---- 12.2 ----------------------------------------------------------------------------------------

sending = Exercise(
    "12.2",
    "traffic_of",
    points=3,
    minutes=25,
    kind="core",
    parameters=("model", "layout", "seq", "stage"),
    hints=[
        (
            "Write down one layer and one micro-batch. Which collectives does it need, what is the payload, and how much of it "
            "leaves a rank? Only then multiply."
        ),
        (
            "Tensor ranks: two all-gathers and two reduce-scatters forward, as many backward, of 2 s b W bytes. Stages: one "
            "message to each neighbour, of a tensor rank's part. Data ranks: once a step, whatever the number of "
            "micro-batches, except that ZeRO 3 gathers parameters for every pass."
        ),
        (
            "A ring sends (n - 1) / n of the payload in a pass; all-reduce has two passes. tp: layers x m x 8 passes, 12 with "
            "full recomputation. pp: m messages for each neighbour, 1 / t of s b W. dp: the stage's gradients, 2 passes, and "
            "with ZeRO 3 one pass back and 2 m of parameters."
        ),
    ],
    misconceptions={
        "uses-estimate": USES_ESTIMATE,
        **UNITS,
        "not-a-dict": "Asked is a dict of three numbers: what goes to the tensor, the pipeline and the data ranks.",
        "other-keys": "The keys are tp, pp and dp.",
        "elements": "You count numbers and not bytes: each of them has two.",
        "whole-payload": "You count the whole payload. On a ring a rank sends (n - 1) / n of it in each pass.",
        "group-total": "That is what all ranks of the group send together. Asked is one rank.",
        "one-micro-batch": "You count one micro-batch. A step has m of them.",
        "one-layer": "You count one layer. The stage has layers / pp.",
        "whole-model": "You count the layers of the whole model. A stage has layers / pp of them.",
        "half": "Half of what is sent, and three mistakes give that: the backward pass sends as much as the forward pass; a "
        "layer has two pairs of an all-gather and a reduce-scatter, around attention and around the MLP; and a number has 2 bytes.",
        "no-recomputation": "Full recomputation runs the forward pass a second time, with its collectives: 3 passes, not 2.",
        "recomputed-always": "Without full recomputation the forward pass runs once: selective recomputation repeats no "
        "collective.",
        "micro-batch-size": "A micro-batch has `micro_batch` sequences, not one.",
        "payload-cut": "The payload of a collective is the larger buffer, s b W, not the tensor rank's part of it.",
        "message-not-cut": "With sequence parallelism a tensor rank has 1 / t of the sequence at a boundary, and sends that.",
        "both-ways-everywhere": "The first stage has no stage before it, and the last none behind it: they send in one direction.",
        "one-way": "A stage in the middle sends activations on and gradients back.",
        "messages-on-a-ring": "A message between stages goes whole: (n - 1) / n belongs to collectives.",
        "gradients-every-micro-batch": "Gradients are added up on the rank and sent once a step, not once a micro-batch.",
        "one-pass": "An all-reduce has two passes: a reduce-scatter and an all-gather. ZeRO 1 and 2 have both, too.",
        "gradients-not-cut": "Tensor ranks hold parts of the matrices, and send the gradients of their own parts.",
        "zero-3-as-ddp": "ZeRO 3 gathers the parameters for every forward and every backward pass, and reduces the gradients "
        "once.",
        "gathered-once": "ZeRO 3 gives the parameters up after every pass. With m micro-batches they are gathered 2 m times.",
        "gathered-for-forward": "The backward pass needs the parameters too: ZeRO 3 gathers them again.",
        "zero-saves-traffic": "ZeRO 1 and 2 divide the memory and send what an all-reduce sends.",
        "nothing-to-send": "A group of one rank has nobody to send to.",
    },
)
GROUPS = ("tp", "pp", "dp")


def _tensor_bytes(model, layout, seq, layers=None, m=None, passes=None, b=None, ring=None) -> float:
    """Two pairs of collectives a layer and pass."""
    t = layout.tp
    layers = model.layers // layout.pp if layers is None else layers
    m, b = m or layout.micro_batches, b or layout.micro_batch
    passes = passes or (3 if layout.recompute == "full" else 2)
    ring = (t - 1) / t if ring is None else ring
    return layers * m * passes * 4 * 2 * seq * b * model.width * ring


def _pipeline_bytes(model, layout, seq, stage, ways=None, m=None, b=None, tp=None) -> float:
    ways = (stage > 0) + (stage < layout.pp - 1) if ways is None else ways
    m, b, tp = m or layout.micro_batches, b or layout.micro_batch, tp or layout.tp
    return m * ways * 2 * seq * b * model.width / tp


def _data_bytes(model, layout, passes=None, layers=None, tp=None, ring=None) -> float:
    d, tp = layout.dp, tp or layout.tp
    layers = model.layers // layout.pp if layers is None else layers
    passes = passes or (1 + 2 * layout.micro_batches if layout.zero == 3 else 2)
    ring = (d - 1) / d if ring is None else ring
    return passes * 2 * layers * 12 * model.width**2 / tp * ring


def _slips_of_tensor(model: Model, layout: Layout, seq: int) -> dict:
    right, t = _tensor_bytes(model, layout, seq), layout.tp
    return {
        **_in_other_units(right),
        "nothing-to-send": t == 1,
        "no-recomputation": layout.recompute == "full"
        and _tensor_bytes(model, layout, seq, passes=2),
        "recomputed-always": layout.recompute != "full"
        and _tensor_bytes(model, layout, seq, passes=3),
        "whole-payload": _tensor_bytes(model, layout, seq, ring=1),
        "group-total": right * t,
        "one-micro-batch": _tensor_bytes(model, layout, seq, m=1),
        "one-layer": _tensor_bytes(model, layout, seq, layers=1),
        "whole-model": layout.pp > 1 and _tensor_bytes(model, layout, seq, layers=model.layers),
        "micro-batch-size": _tensor_bytes(model, layout, seq, b=1),
        "payload-cut": right / t,
        "half": right / 2,
    }


def _slips_of_pipeline(model: Model, layout: Layout, seq: int, stage: int) -> dict:
    right, p = _pipeline_bytes(model, layout, seq, stage), layout.pp
    end = stage in (0, p - 1)
    return {
        **_in_other_units(right),
        "nothing-to-send": p == 1,
        "both-ways-everywhere": end and _pipeline_bytes(model, layout, seq, stage, ways=2),
        "one-way": not end and _pipeline_bytes(model, layout, seq, stage, ways=1),
        "message-not-cut": _pipeline_bytes(model, layout, seq, stage, tp=1),
        "one-micro-batch": _pipeline_bytes(model, layout, seq, stage, m=1),
        "micro-batch-size": _pipeline_bytes(model, layout, seq, stage, b=1),
        "messages-on-a-ring": right * (p - 1) / p,
        "elements": right / 2,
    }


def _slips_of_data(model: Model, layout: Layout) -> dict:
    right, d, m = _data_bytes(model, layout), layout.dp, layout.micro_batches
    third = layout.zero == 3
    return {
        **_in_other_units(right),
        "nothing-to-send": d == 1,
        "zero-3-as-ddp": third and _data_bytes(model, layout, passes=2),
        "gathered-once": third and _data_bytes(model, layout, passes=3),
        "gathered-for-forward": third and _data_bytes(model, layout, passes=1 + m),
        "gradients-every-micro-batch": (
            (
                lambda got: any(
                    same(got, _data_bytes(model, layout, passes=n)) for n in (3 * m, 2 * m)
                )
            )
            if third
            else right * m
        ),
        "zero-saves-traffic": not third
        and layout.zero > 0
        and (lambda got: any(same(got, each) for each in (right / d, right / 2))),
        "one-pass": not third and right / 2,
        "whole-payload": _data_bytes(model, layout, ring=1),
        "group-total": right * d,
        "gradients-not-cut": _data_bytes(model, layout, tp=1),
        "whole-model": layout.pp > 1 and _data_bytes(model, layout, layers=model.layers),
        "one-layer": _data_bytes(model, layout, layers=1),
        "elements": right / 2,
    }


def _check_sent(got, model: Model, layout: Layout, seq: int, stage: int) -> None:
    _check_keys(got, GROUPS)
    likely = _slips_of_tensor(model, layout, seq)
    expect(got["tp"], _tensor_bytes(model, layout, seq), what="tp", likely=likely)
    likely = _slips_of_pipeline(model, layout, seq, stage)
    expect(got["pp"], _pipeline_bytes(model, layout, seq, stage), what="pp", likely=likely)
    expect(got["dp"], _data_bytes(model, layout), what="dp", likely=_slips_of_data(model, layout))


@sending.requires("a stage in the middle", at_home=True)
def _(answer, draw):
    model, layout, seq = _case(draw)
    stage = _inner_stage(draw, layout)
    _check_sent(_own(answer, model, layout, seq, stage), model, layout, seq, stage)


@sending.requires("the first stage and the last")
def _(answer, draw):
    model, layout, seq = _case(draw)
    for stage in (0, layout.pp - 1):
        _check_sent(answer(model, layout, seq, stage), model, layout, seq, stage)


@sending.requires("ZeRO 1 and 2")
def _(answer, draw):
    for zero in (1, 2):
        model, layout, seq = _case(draw, zero=zero)
        stage = draw.integer(0, layout.pp - 1)
        _check_sent(answer(model, layout, seq, stage), model, layout, seq, stage)


@sending.requires("ZeRO 3, with several micro-batches and with one")
def _(answer, draw):
    for m in (draw.integer(4, 9), 1):
        model, layout, seq = _case(draw, zero=3, pp=1, micro_batches=m)
        _check_sent(answer(model, layout, seq, 0), model, layout, seq, 0)


@sending.requires("selective and full recomputation")
def _(answer, draw):
    for more in (
        {"recompute": "selective"},
        {"recompute": "full"},
        {"recompute": "full", "zero": 3, "pp": 1},
    ):
        model, layout, seq = _case(draw, **more)
        stage = draw.integer(0, layout.pp - 1)
        _check_sent(answer(model, layout, seq, stage), model, layout, seq, stage)


@sending.requires("groups of one rank")
def _(answer, draw):
    for name in GROUPS:
        model, layout, seq = _case(draw, **{name: 1})
        _check_sent(answer(model, layout, seq, 0), model, layout, seq, 0)


# ---- 12.3 ----------------------------------------------------------------------------------------

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
        "other-unit": "The right time in another unit: asked are seconds.",
        "roofline-sum": "You add a kernel's computing and its memory traffic. Both go on at once: the longer one counts.",
        "roofline-of-sums": "You compare the sums of all kernels. Each kernel has a limit of its own: take the larger time of "
        "each, then add.",
        "peak-only": "You leave the memory out: a kernel that moves much takes bytes / bandwidth.",
        "memory-only": "You leave the FLOPs out: a kernel takes the larger of both times.",
        "latency-left-out": "The latencies are missing. Each round of a ring costs one, however small its piece.",
        "latency-once": "You count one latency a call. A ring of n has n - 1 rounds a pass, and each waits for one.",
        "rounds-of-one-pass": "All-reduce has two passes of n - 1 rounds: twice the latencies too.",
        "whole-payload": "In each pass of a ring a rank sends (n - 1) / n of the payload, n - 1 pieces of 1 / n.",
        "all-reduce-once": "All-reduce has two passes: first pieces are summed, then the sums go round.",
        "one-call": "`calls` says how many there are, each with this payload.",
        "send-on-a-ring": "A `send` is one message: one latency and the whole payload.",
        "inside-always": "You take the link inside a node for all groups. A group that reaches over more ranks than a node has "
        "goes between nodes.",
        "between-always": "You take the link between nodes for all groups. Groups whose ranks lie in one node use the faster one.",
        "size-only": "A group counts as inside if its *size* fits a node. Its ranks lie apart by the product of the groups "
        "further in.",
        "order-ignored": "You take the order tp, cp, dp, pp for given. `layout.order` says which group is innermost.",
        "order-reversed": "`order` begins with the innermost group, whose ranks are neighbours.",
        "everything-overlaps": "You take the maximum where nothing overlaps: the calls of tp, cp and pp stand in the way of "
        "computing, so their times are added.",
        "nothing-overlaps": "You add the calls of dp. They go on beside everything else: take the maximum.",
        "bubble-ignored": "The bubble is missing: computing and its calls are only 1 - bubble of the pipeline's time.",
        "bubble-of-the-ideal": "You multiply by 1 + bubble, as if it were a share of the ideal time. Here it is one of the whole: "
        "divide by 1 - bubble.",
        "bubble-on-dp": "The bubble stretches the pipeline, not the calls of dp, which go on beside it.",
        "bubble-without-calls": "The bubble stretches the calls that stand in the way, too: a stage that waits for its "
        "collectives makes the next ones wait.",
    },
)
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def _inside(layout: Layout, group: str, node: int, order: tuple[str, ...] | None = None) -> bool:
    order = order or layout.order
    further_in = order[: order.index(group)]
    return math.prod(getattr(layout, name) for name in further_in) * getattr(layout, group) <= node


def _call_seconds(
    call: Call,
    layout: Layout,
    hardware: Hardware,
    inside: Callable = _inside,
    latency: Callable[[int, int], int] = lambda n, passes: (n - 1) * passes,
    factor: Callable[[int, int], float] = lambda n, passes: passes * (n - 1) / n,
    send: Callable = lambda latency, seconds: latency + seconds,
    count: Callable[[Call], int] = lambda call: call.calls,
) -> float:
    near = inside(layout, call.group, hardware.node)
    speed = hardware.intra_bandwidth if near else hardware.inter_bandwidth
    alpha = hardware.intra_latency if near else hardware.inter_latency
    n, seconds = getattr(layout, call.group), call.payload / speed
    if call.op == "send":
        return count(call) * send(alpha, seconds)
    passes = PASSES[call.op]
    return count(call) * (latency(n, passes) * alpha + factor(n, passes) * seconds)


def _roofline(kernels, hardware: Hardware) -> float:
    return sum(max(f / hardware.peak, b / hardware.hbm_bandwidth) for f, b in kernels)


def _together(computing: float, in_the_way: float, beside: float, bubble: float) -> float:
    return max((computing + in_the_way) / (1 - bubble), beside)


@dataclass(frozen=True)
class _Step:
    """What the time of a step is made of."""

    kernels: list[tuple[float, float]]
    calls: list[Call]
    layout: Layout
    bubble: float
    hardware: Hardware

    def arguments(self) -> tuple:
        return list(self.kernels), list(self.calls), self.layout, self.bubble, self.hardware

    def seconds(self, computing=_roofline, together=_together, **slip) -> float:
        """Rightly, or with a slip."""
        times = {True: 0.0, False: 0.0}
        for call in self.calls:
            times[call.group == "dp"] += _call_seconds(call, self.layout, self.hardware, **slip)
        own = computing(self.kernels, self.hardware)
        return together(own, times[False], times[True], self.bubble)


def _slips_of_time(step: _Step) -> dict:
    right = step.seconds()
    flops, moved = (sum(column) for column in zip(*step.kernels, strict=True))

    def apart(layout, group, node):
        return getattr(layout, group) <= node

    return {
        "other-unit": lambda got: any(same(got, right * k) for k in (1e3, 1e6, 1e9)),
        "roofline-sum": step.seconds(
            lambda kernels, hw: flops / hw.peak + moved / hw.hbm_bandwidth
        ),
        "roofline-of-sums": step.seconds(
            lambda kernels, hw: max(flops / hw.peak, moved / hw.hbm_bandwidth)
        ),
        "peak-only": step.seconds(lambda kernels, hw: flops / hw.peak),
        "memory-only": step.seconds(lambda kernels, hw: moved / hw.hbm_bandwidth),
        "bubble-ignored": step.seconds(together=lambda c, w, d, b: max(c + w, d)),
        "bubble-of-the-ideal": step.seconds(together=lambda c, w, d, b: max((c + w) * (1 + b), d)),
        "bubble-on-dp": step.seconds(together=lambda c, w, d, b: max(c + w, d) / (1 - b)),
        "bubble-without-calls": step.seconds(together=lambda c, w, d, b: max(c / (1 - b) + w, d)),
        "everything-overlaps": lambda got: any(
            same(got, step.seconds(together=each))
            for each in (
                lambda c, w, d, b: max(c, w, d) / (1 - b),
                lambda c, w, d, b: max(c / (1 - b), w, d),
                lambda c, w, d, b: max(max(c, w) / (1 - b), d),
            )
        ),
        "nothing-overlaps": lambda got: any(
            same(got, step.seconds(together=each))
            for each in (
                lambda c, w, d, b: (c + w) / (1 - b) + d,
                lambda c, w, d, b: (c + w + d) / (1 - b),
            )
        ),
        "latency-left-out": lambda got: any(
            same(got, step.seconds(latency=lambda n, passes: 0, send=send))
            for send in (lambda alpha, seconds: seconds, lambda alpha, seconds: alpha + seconds)
        ),
        "latency-once": step.seconds(latency=lambda n, passes: 1),
        "rounds-of-one-pass": step.seconds(latency=lambda n, passes: n - 1),
        "whole-payload": step.seconds(factor=lambda n, passes: passes),
        "all-reduce-once": lambda got: any(
            same(got, step.seconds(factor=lambda n, passes: (n - 1) / n, **more))
            for more in ({}, {"latency": lambda n, passes: n - 1})
        ),
        "one-call": step.seconds(count=lambda call: 1),
        "send-on-a-ring": lambda got: any(
            same(got, step.seconds(send=send)) for send in _ring_messages(step.layout.pp)
        ),
        "order-ignored": step.seconds(
            inside=lambda layout, group, node: _inside(
                layout, group, node, ("tp", "cp", "dp", "pp")
            )
        ),
        "order-reversed": step.seconds(
            inside=lambda layout, group, node: _inside(layout, group, node, layout.order[::-1])
        ),
        "size-only": step.seconds(inside=apart),
        "inside-always": step.seconds(inside=lambda *_: True),
        "between-always": step.seconds(inside=lambda *_: False),
    }


def _ring_messages(n: int) -> Iterator[Callable]:
    """What a message would take, counted as a collective of n ranks with one pass, or with two."""
    for passes in (1, 2):
        yield lambda alpha, seconds, k=passes: k * (n - 1) * (alpha + seconds / n)


def _check_time(got, step: _Step) -> None:
    expect(got, step.seconds(), what="seconds", likely=_slips_of_time(step))


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


def _kernels(draw) -> list[tuple[float, float]]:
    """Some that compute, and some that move; long enough for `expect`, which allows 1e-5 s."""
    many = [(draw.integer(200, 900) * 1e11, draw.integer(10, 90) * 1e8) for _ in range(4)]
    few = [(draw.integer(1, 9) * 1e11, draw.integer(200, 900) * 1e8) for _ in range(3)]
    return draw.sample(many + few, 7)


def _calls(draw, groups: tuple[str, ...], large: float = 1.0) -> list[Call]:
    """Calls of each group; `large` scales those of dp."""
    ops = {"tp": ["all_gather", "reduce_scatter"], "cp": ["all_gather"], "pp": ["send"]}
    ops["dp"] = ["all_gather", "all_reduce"]
    found = []
    for group in groups:
        for op in ops[group]:
            calls, payload = draw.integer(600, 2000), draw.integer(2, 9) * 10**6
            if group == "dp":
                calls, payload = draw.integer(200, 400), int(payload * large)
            found.append(Call(group, op, calls, payload, 0, "step"))
    return found


def _step(draw, groups: tuple[str, ...], large: float = 1.0, bubble: float = 0.0, **sizes) -> _Step:
    layout = Layout(**{"tp": 4, "cp": 1, "dp": 1, "pp": 1, **sizes})
    node = draw.choice([4, 8])
    return _Step(_kernels(draw), _calls(draw, groups, large), layout, bubble, _hardware(draw, node))


@timing.requires("kernels alone: each has a limit of its own", at_home=True)
def _(answer, draw):
    step = _step(draw, ())
    moving = replace(step, kernels=[(f / 100, moved) for f, moved in step.kernels])
    for each in (moving, step):
        _check_time(_own(answer, *each.arguments()), each)


@timing.requires("tensor ranks inside a node")
def _(answer, draw):
    step = _step(draw, ("tp",), tp=draw.choice([2, 4]))
    _check_time(answer(*step.arguments()), step)


@timing.requires("groups that leave the node")
def _(answer, draw):
    step = _step(draw, ("tp", "cp", "pp"), tp=4, cp=2, pp=draw.choice([16, 32]))
    step = replace(step, hardware=replace(step.hardware, node=4))
    _check_time(answer(*step.arguments()), step)
    step = _step(draw, ("tp", "cp"), tp=draw.choice([2, 4]), cp=8)
    _check_time(answer(*step.arguments()), step)


@timing.requires("stages, and their bubble")
def _(answer, draw):
    step = _step(draw, ("tp", "pp"), bubble=draw.number(0.1, 0.4), pp=draw.choice([4, 8]))
    _check_time(answer(*step.arguments()), step)


@timing.requires("data ranks beside the rest: hidden, and longer than it")
def _(answer, draw):
    for large in (0.5, 900.0):
        bubble = draw.number(0.1, 0.4)
        step = _step(draw, GROUPS, large, bubble, dp=draw.choice([3, 6]), pp=4)
        _check_time(answer(*step.arguments()), step)


@timing.requires("another order of the groups")
def _(answer, draw):
    for order in (("dp", "tp", "cp", "pp"), ("cp", "pp", "tp", "dp")):
        step = _step(draw, ("tp", "cp", "dp"), 900.0, tp=4, cp=2, dp=4)
        step = replace(step, layout=replace(step.layout, order=order))
        _check_time(answer(*step.arguments()), step)


# ---- 12.4 ----------------------------------------------------------------------------------------

searching = Exercise(
    "12.4",
    "search",
    points=4,
    minutes=45,
    kind="stretch",
    parameters=("model", "gpus", "batch", "seq", "hardware", "judge"),
    at_home=True,  # it is handed a function
    hints=[
        (
            "There are only a few thousand layouts of some hundred GPUs. Nobody needs to be clever: write loops, throw out what "
            "is not legal, ask the judge about the rest, and keep the fastest."
        ),
        (
            "tp runs over the divisors of the heads, pp over those of the layers, both over what divides the GPUs; dp is what is "
            "left. It has to divide the batch, and the micro-batch what remains of it. Do not forget the three kinds of "
            "recomputation and ZeRO's four stages."
        ),
        (
            "Nested loops over tp, pp, micro_batch, zero and recompute; dp = gpus / (tp pp) and micro_batches = batch / "
            "(dp micro_batch), where these divide. Layouts whose bytes are more than hbm_bytes are out. `min` by "
            "seconds, and a ValueError if nothing is left."
        ),
    ],
    misconceptions={
        "uses-estimate": "You let `course_utils.estimate` decide. `Layout(...)` may be made; what is legal, you decide yourself.",
        "no-layout": "Asked is a `Layout`, and nothing else.",
        "gpus": "This layout has another number of GPUs than there are: dp x tp x pp x cp.",
        "batch": "A step of this layout has another number of sequences: dp x micro_batch x micro_batches.",
        "other-knobs": "cp, ep, chunks, the schedule and the order stay as they are: the judge knows nothing of them.",
        "heads": "The heads do not divide by tp: some ranks would have a part of a head. The judge does not look at that.",
        "sequence": "The sequence does not divide by tp. With sequence parallelism each tensor rank has a part of it.",
        "layers": "The layers do not divide by pp.",
        "zero-3-in-stages": "ZeRO 3 in a pipeline of several stages is left out here, since 12.2 does not count it.",
        "does-not-fit": "This layout needs more memory than a GPU has. Fast is of no use then.",
        "least-memory": "This is the layout that needs the least memory. Asked is the fastest that fits.",
        "slowest": "This is the slowest layout that fits.",
        "data-first": "You take as many data-parallel ranks as fit. More of them send more, and another split is faster here.",
        "powers-of-two": "You try powers of two only. The fastest layout has a group of another size.",
        "one-sequence": "You try micro-batches of one sequence only. Larger ones gather and wait less often.",
        "no-recomputation": "You never recompute. Where memory is short, a third more FLOPs can be the cheapest way.",
        "no-selective": "You never try selective recomputation.",
        "always-full": "You always recompute everything, and pay for it where there is room.",
        "no-pipeline": "You never cut by layers. Between nodes, messages of a pipeline are the smallest.",
        "no-tensor": "You never cut layers. Tensor ranks share out what nothing else does.",
        "no-data": "You never copy the model. Tensor ranks and stages alone talk more than they need.",
        "no-zero": "You never shard the model states. ZeRO 1 sends no byte more than an all-reduce.",
        "zero-up-to-2": "You try ZeRO up to stage 2. Stage 3 shards the parameters too.",
        "always-copies": "You always have two copies at least. dp = 1 is legal: all GPUs share one model.",
        "never-all-in-one": "One tensor group of all GPUs is legal too. Does a range of yours end one too early?",
        "no-zero-2-in-stages": "Behind stages only ZeRO 3 is excluded. With ZeRO 2 more would fit.",
        "at-most": "A layout that needs exactly what a GPU has does fit: at most.",
        "always-zero-3": "You always shard everything. What need not be gathered costs nothing.",
        "one-node": "You keep all groups but dp within a node.",
        "slow": "A legal layout that fits, and another one is more than 10 % faster.",
        "no-error": "No layout fits, and you return one all the same. Raise a ValueError.",
        "returns-none": "No layout fits, and you return None. The one who asked would find out later, somewhere else: raise a "
        "ValueError.",
        "other-error": "Where no layout fits, raise a ValueError: a sentence that says so, not an error from deep inside.",
        "gives-up": "You say that nothing fits, and there are layouts that do.",
    },
    failures={"ValueError": "gives-up"},
)
REGRET = 0.10


@dataclass(frozen=True)
class _Order:
    """A model to be trained on a cluster."""

    model: Model
    gpus: int
    batch: int
    seq: int
    hardware: Hardware

    def judge(self, layout: Layout) -> tuple[float, float]:
        """Bytes of the fullest rank, and seconds of a step; also of a layout that cannot be."""
        return _bytes_of(self.model, layout, self.seq), self._seconds(layout)

    def _seconds(self, layout: Layout) -> float:
        model, m = self.model, layout.micro_batches
        tokens = self.seq * layout.micro_batch
        matrices = 12 * model.width**2
        again = 4 if layout.recompute == "full" else 3
        scores = 4 * self.seq * model.width * (again + (layout.recompute == "selective"))
        flops = tokens * (2 * again * matrices + scores) / layout.tp
        moved = 2 * again * (matrices + 20 * tokens * model.width) / layout.tp
        layers = model.layers / layout.pp
        kernels = [(m * layers * flops, m * layers * moved)]
        hardware = self.hardware
        bubble = (layout.pp - 1) / (m + layout.pp - 1)
        return _Step(kernels, self._calls(layout), layout, bubble, hardware).seconds()

    def _calls(self, layout: Layout) -> list[Call]:
        model, m, layers = self.model, layout.micro_batches, self.model.layers / layout.pp
        hidden = 2 * self.seq * layout.micro_batch * model.width
        passes = 3 if layout.recompute == "full" else 2
        size = 2 * layers * 12 * model.width**2 / layout.tp
        calls = [Call("tp", "all_gather", round(4 * layers * m * passes), hidden, 0, "step")]
        if layout.pp > 1:
            calls.append(Call("pp", "send", 2 * m, hidden / layout.tp, 0, "step"))
        if layout.zero == 3:
            gathers = Call("dp", "all_gather", round(2 * layers * m), size / layers, 0, "step")
            return [*calls, gathers, Call("dp", "reduce_scatter", 1, size, 0, "step")]
        return [*calls, Call("dp", "all_reduce", 1, size, 0, "step")]

    def legal(self) -> Iterator[Layout]:
        """Every layout that may be chosen, whether it fits or not."""
        for tp, pp in itertools.product(_divisors(self.gpus), _divisors(self.model.layers)):
            if self.gpus % (tp * pp) or self.model.heads % tp or self.seq % tp:
                continue
            dp = self.gpus // (tp * pp)
            for b in _divisors(self.batch // dp) if self.batch % dp == 0 else ():
                more = {"dp": dp, "tp": tp, "pp": pp, "micro_batch": b}
                more["micro_batches"] = self.batch // (dp * b)
                for zero, recompute in itertools.product(range(4 if pp == 1 else 3), RECOMPUTE):
                    yield Layout(**more, zero=zero, recompute=recompute)

    def fitting(self) -> list[tuple[float, float, Layout]]:
        """The bytes, the seconds and the layouts that fit, the fastest first."""
        judged = [(*self.judge(layout), layout) for layout in self.legal()]
        return sorted(
            (each for each in judged if each[0] <= self.hardware.hbm_bytes), key=lambda e: e[1]
        )


RECOMPUTE = ("none", "selective", "full")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _bytes_of(model: Model, layout: Layout, seq: int) -> float:
    """Of the fullest rank, which is on the first stage or the last."""
    return max(sum(_held(model, layout, seq, s).values()) for s in {0, layout.pp - 1})


def _powers(layout: Layout) -> bool:
    sizes = layout.dp, layout.tp, layout.pp, layout.micro_batch
    return all(size & (size - 1) == 0 for size in sizes)


# What a search may have left out: it finds the fastest of the layouts that are so.
RESTRICTED: dict[str, Callable[[Layout], bool]] = {
    "no-zero": lambda layout: layout.zero == 0,
    "no-recomputation": lambda layout: layout.recompute == "none",
    "no-selective": lambda layout: layout.recompute != "selective",
    "always-full": lambda layout: layout.recompute == "full",
    "always-zero-3": lambda layout: layout.zero == 3,
    "zero-up-to-2": lambda layout: layout.zero < 3,
    "no-pipeline": lambda layout: layout.pp == 1,
    "no-tensor": lambda layout: layout.tp == 1,
    "no-data": lambda layout: layout.dp == 1,
    "one-sequence": lambda layout: layout.micro_batch == 1,
    "powers-of-two": _powers,
    "always-copies": lambda layout: layout.dp > 1,
    "never-all-in-one": lambda layout: layout.tp < layout.gpus,
    "no-zero-2-in-stages": lambda layout: layout.zero < 2 or layout.pp == 1,
}
LEFT_OUT = (
    "no-zero",
    "no-recomputation",
    "no-selective",
    "no-pipeline",
    "no-tensor",
    "one-sequence",
    "powers-of-two",
)
# What a search may have minimised instead of the seconds: of (bytes, seconds, layout)
AIMED: dict[str, Callable[[tuple], object]] = {
    "least-memory": lambda each: each[0],
    "data-first": lambda each: (-each[2].dp, each[1]),
    "slowest": lambda each: -each[1],
}


def _best_of(fitting: list[tuple], slug: str) -> float:
    """The seconds of what a search finds that makes this mistake; infinite where it finds nothing."""
    if slug in AIMED:
        return min(fitting, key=lambda each: (AIMED[slug](each), each[1]))[1]
    return next((seconds for _, seconds, layout in fitting if RESTRICTED[slug](layout)), math.inf)


def _regret(fitting: list[tuple], slug: str) -> float:
    """By what share a search with this mistake is slower than the best."""
    return _best_of(fitting, slug) / fitting[0][1] - 1


def _is_of(slug: str, chosen: tuple, fitting: list[tuple]) -> bool:
    """Whether this mistake chooses (bytes, seconds, layout)."""
    if slug in AIMED:
        return AIMED[slug](chosen) <= min(map(AIMED[slug], fitting))
    best = _best_of(fitting, slug)
    return RESTRICTED[slug](chosen[2]) and math.isclose(chosen[1], best, rel_tol=1e-9)


def _illegal(order: _Order, layout: Layout) -> str | None:
    """The mistake that makes a layout no answer at all."""
    if layout.gpus != order.gpus:
        return "gpus"
    if layout.sequences() != order.batch:
        return "batch"
    known = {name: getattr(layout, name) for name in ("dp", "tp", "pp", "zero", "recompute")}
    known |= {"micro_batch": layout.micro_batch, "micro_batches": layout.micro_batches}
    if Layout(**known) != layout:
        return "other-knobs"
    if order.model.heads % layout.tp:
        return "heads"
    if order.seq % layout.tp:
        return "sequence"
    if order.model.layers % layout.pp:
        return "layers"
    return "zero-3-in-stages" if layout.zero == 3 and layout.pp > 1 else None


def _chosen(answer, order: _Order):
    return answer(order.model, order.gpus, order.batch, order.seq, order.hardware, order.judge)


def _check_choice(answer, order: _Order, *suspects: str) -> None:
    """`suspects`: the mistakes that this order is made for; they are looked for first."""
    fitting = order.fitting()
    got = _chosen(answer, order)
    expect_type(got, Layout, likely=None if got is None else "no-layout")
    slug = _illegal(order, got)
    if slug:
        raise Wrong(slug, expected="a legal layout", got=_described(got))
    held, seconds = order.judge(got)
    if held > order.hardware.hbm_bytes:
        limit = f"at most {order.hardware.hbm_bytes / 1e9:.0f} GB"
        raise Wrong("does-not-fit", expected=limit, got=f"{held / 1e9:.1f} GB: {_described(got)}")
    best = fitting[0][1]
    if seconds <= (1 + REGRET) * best:
        return
    chosen = held, seconds, got
    found = [s for s in (*suspects, *AIMED, *RESTRICTED) if _is_of(s, chosen, fitting)]
    raise Wrong(
        (*found, "slow")[0],
        expected=f"at most {100 * REGRET:.0f} % more than {best:.4g} s",
        got=f"{seconds:.4g} s: {_described(got)}",
    )


def _described(layout: Layout) -> str:
    sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in ("dp", "tp", "pp", "zero"))
    return f"{sizes}, {layout.micro_batches} x {layout.micro_batch}, recompute {layout.recompute}"


def _order(draw, **fixed) -> _Order:
    """Any model on any cluster; `fixed` says what a requirement is about."""

    def chosen(name: str, options: list):
        return draw.choice(fixed.get(name, options))

    heads = chosen("heads", [8, 12, 16, 24, 32])
    model = Model(
        chosen("layers", [14, 16, 18, 20, 28]), heads * 128, heads, chosen("vocab", [32000])
    )
    gpus, node = chosen("gpus", [16, 32]), chosen("node", [4, 8])
    hardware = Hardware(
        peak=draw.integer(200, 400) * 1e12,
        hbm_bytes=chosen("memory", [16, 24, 40, 80]) * 10**9,
        hbm_bandwidth=draw.integer(15, 30) * 1e11,
        node=node,
        intra_bandwidth=draw.integer(150, 350) * 1e9,
        intra_latency=5e-6,
        inter_bandwidth=chosen("between", [5, 10, 20, 40]) * 1e9,
        inter_latency=15e-6,
    )
    batch = gpus * chosen("batch", [1, 2, 4])
    return _Order(model, gpus, batch, chosen("seq", [1024, 2048, 4096]), hardware)


def _order_where(draw, holds: Callable[[_Order, list[tuple]], bool], **fixed) -> _Order:
    """One for which `holds(order, fitting)` is true."""
    for _ in range(400):
        order = _order(draw, **fixed)
        fitting = order.fitting()
        if fitting and holds(order, fitting):
            return order
    raise RuntimeError(f"no order of {fixed} does")  # a defect of the check


def _hurting(*slugs: str, only: bool = True) -> Callable[[_Order, list[tuple]], bool]:
    """Where each of these mistakes costs more than may be regretted, with something to spare, and what
    else a search may leave out costs less; `only` says whether that matters."""

    def holds(order: _Order, fitting: list[tuple]) -> bool:
        regrets = {slug: _regret(fitting, slug) for slug in (*RESTRICTED, *AIMED)}
        others = [slug for slug in LEFT_OUT if slug not in slugs] if only else []
        return all(1.3 * REGRET < regrets[slug] < math.inf for slug in slugs) and all(
            regrets[slug] < 0.7 * REGRET for slug in others
        )

    return holds


def _needing(slug: str) -> Callable[[_Order, list[tuple]], bool]:
    """Where this mistake costs more than may be regretted, or finds nothing."""
    return lambda order, fitting: _regret(fitting, slug) > 1.3 * REGRET


def _without(rule: str) -> Callable[[_Order, list[tuple]], bool]:
    """Where a search that forgets one rule of what is legal finds something faster."""
    return lambda order, fitting: _fastest_without(order, rule) < fitting[0][1]


def _fastest_without(order: _Order, rule: str) -> float:
    best = math.inf
    for tp, pp in itertools.product(_divisors(order.gpus), range(1, order.model.layers + 1)):
        dp = order.gpus // (tp * pp)
        if order.gpus % (tp * pp) or order.batch % dp:
            continue
        layout = Layout(dp=dp, tp=tp, pp=pp, micro_batches=order.batch // dp)
        stages = range(4) if pp == 1 else [3] if rule == "zero-3-in-stages" else range(3)
        for zero, recompute in itertools.product(stages, RECOMPUTE):
            tried = replace(layout, zero=zero, recompute=recompute)
            held, seconds = order.judge(tried)
            if _illegal(order, tried) == rule and held <= order.hardware.hbm_bytes:
                best = min(best, seconds)
    return best


def _several_ways(order: _Order, fitting: list[tuple]) -> bool:
    """Where selective recomputation is best, and full and none are different seconds."""
    hurting = _hurting("no-recomputation", "no-selective")(order, fitting)
    return hurting and _best_of(fitting, "no-recomputation") != _best_of(fitting, "no-selective")


@searching.requires("a model with room to spare: legal, and fast")
def _(answer, draw):
    suspects = "slowest", "least-memory", "always-full", "always-zero-3"
    order = _order_where(draw, _hurting(*suspects), memory=[80], heads=[8, 12, 16])
    _check_choice(lambda *given: _own(answer, *given), order, *suspects)


@searching.requires("model states that do not fit without ZeRO", needs_earlier=True)
def _(answer, draw):
    _check_choice(answer, _order_where(draw, _hurting("no-zero"), memory=[24, 40]), "no-zero")


@searching.requires("activations that do not fit without recomputation")
def _(answer, draw):
    order = _order_where(draw, _several_ways, seq=[8192], memory=[24, 40])
    _check_choice(answer, order, "no-recomputation", "no-selective")


@searching.requires("slow links between nodes")
def _(answer, draw):
    order = _order_where(draw, _hurting("no-pipeline"), between=[2, 5])
    _check_choice(answer, order, "no-pipeline", "data-first")


@searching.requires("layers too wide for one GPU")
def _(answer, draw):
    order = _order_where(draw, _hurting("no-tensor"), heads=[24, 32, 40])
    _check_choice(answer, order, "no-tensor", "data-first")


@searching.requires(
    "a number of GPUs that is no power of two", failures={"ValueError": "powers-of-two"}
)
def _(answer, draw):
    order = _order_where(draw, _hurting(only=False), gpus=[24, 48])
    _check_choice(answer, order, "powers-of-two")


@searching.requires("heads, layers and sequences that do not divide")
def _(answer, draw):
    odd = {"heads": [9, 11, 15], "layers": [16, 24], "gpus": [16, 32]}
    _check_choice(answer, _order_where(draw, _without("heads"), **odd))
    odd = {"layers": [13, 17, 22], "gpus": [16, 32], "between": [2, 5]}
    _check_choice(answer, _order_where(draw, _without("layers"), **odd))
    odd = {"seq": [1001, 1502, 2003], "heads": [32, 40], "gpus": [16, 32]}
    _check_choice(answer, _order_where(draw, _without("sequence"), **odd))


@searching.requires(
    "only ZeRO 3 saves it, in large micro-batches", failures={"ValueError": "zero-up-to-2"}
)
def _(answer, draw):
    odd = {"layers": [11, 13], "heads": [33, 35, 37], "gpus": [16, 32], "batch": [4, 6]}
    odd |= {"memory": [8], "between": [2, 5], "seq": [256, 512]}
    order = _order_where(draw, _hurting("one-sequence", only=False), **odd)
    _check_choice(answer, order, "one-sequence")


@searching.requires(
    "all GPUs for one copy of the model", failures={"ValueError": "never-all-in-one"}
)
def _(answer, draw):
    one = {"batch": [1], "heads": [24, 32, 40]}
    slow = one | {"gpus": [8], "node": [2], "between": [2, 5]}
    order = _order_where(draw, _hurting("always-copies", only=False), **slow)
    _check_choice(answer, order, "always-copies")
    odd = one | {"gpus": [4], "node": [4], "layers": [11, 13], "memory": [16, 24]}
    order = _order_where(draw, _needing("never-all-in-one"), **odd, seq=[4096, 8192])
    _check_choice(answer, order, "never-all-in-one")


@searching.requires(
    "stages with ZeRO 2, and not with ZeRO 3", failures={"ValueError": "no-zero-2-in-stages"}
)
def _(answer, draw):
    tight = {"gpus": [16], "batch": [4], "heads": [40], "between": [2, 5], "memory": [8]}
    slug = "no-zero-2-in-stages"
    _check_choice(answer, _order_where(draw, _needing(slug), **tight), slug)
    _check_choice(answer, _order_where(draw, _without("zero-3-in-stages"), **tight))


@searching.requires("the last byte of a GPU", failures={"ValueError": "at-most"})
def _(answer, draw):
    order = _order_where(draw, lambda order, fitting: min(held for held, *_ in fitting) % 1 == 0)
    least = int(min(held for held, *_ in order.fitting()))
    _check_choice(answer, replace(order, hardware=replace(order.hardware, hbm_bytes=least)))


@searching.requires(
    "nothing fits",
    failures={"ValueError": "no-error", "exception": "other-error"},
    needs_earlier=True,
)
def _(answer, draw):
    order = _order(draw, gpus=[8, 16], heads=[32, 40], layers=[36, 48])
    order = replace(order, hardware=replace(order.hardware, hbm_bytes=10**9))
    try:
        got = _chosen(answer, order)
    except ValueError:
        return
    slug = "returns-none" if got is None else "no-error"
    raise Wrong(
        slug, expected="a ValueError", got=_described(got) if isinstance(got, Layout) else got
    )
