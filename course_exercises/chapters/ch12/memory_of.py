"""Exercise 12.1, `memory_of`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise, expect
from course_exercises.authoring.compare import same
from course_exercises.chapters.ch12.shared import (
    STATES,
    UNITS,
    USES_ESTIMATE,
    case,
    check_keys,
    held,
    in_flight,
    in_other_units,
    inner_stage,
    kept,
    matrices,
    own,
)
from course_planner import Layout, Model

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
        "one-too-few": "You keep p - r - 1. It is one more: even the last stage keeps the micro-batch that it works on.",
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


def _slips_of_states(model: Model, layout: Layout, stage: int, kind: str) -> dict[str, float]:
    size, from_stage = STATES[kind]
    shards = layout.dp if layout.zero >= from_stage else 1
    count = matrices(model, layout, stage)
    right = size * count / shards

    def other(**slip) -> float:
        return size * matrices(model, layout, stage, **slip) / shards

    sizes = {"parameters": 2, "gradients": 2, "optimizer": 12}
    of_optimizer = {"master-copy": 8 * count / shards, "bytes-16": 16 * count / shards}
    tied_apart = model.tied and layout.pp > 1 and stage == layout.pp - 1
    return {
        **in_other_units(right),
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
    layers, flight = model.layers // layout.pp, in_flight(layout, stage)
    layer = kept(model, layout, seq)
    right = layer * layers * flight
    tokens = seq * layout.micro_batch * model.width
    spread = tokens * (10 + (24 + 5 * model.heads * seq / model.width) / layout.tp)
    spread_without_scores = tokens * (10 + 24 / layout.tp)
    alone = spread if layout.recompute == "none" else spread_without_scores
    selective = kept(model, layout, seq, "selective")
    return {
        **in_other_units(right),
        "activations-by-dp": right / layout.dp,
        "global-batch": right * layout.dp,
        "micro-batch-size": right / layout.micro_batch,
        "whole-model": right * layout.pp if layout.pp > 1 else False,
        "nothing-kept": layout.recompute == "full" and 0.0,
        "full-cut": layout.recompute == "full" and right / layout.tp,
        "full-is-selective": layout.recompute == "full"
        and (lambda got: any(same(got, a * layers * flight) for a in (selective, alone))),
        "activations-not-cut": right * layout.tp,
        "no-sequence-parallelism": layout.recompute != "full" and alone * layers * flight,
        "no-scores": layout.recompute == "none" and selective * layers * flight,
        "scores-kept": layout.recompute == "selective"
        and kept(model, layout, seq, "none") * layers * flight,
        "more-than-there-are": layer * layers * (layout.pp - stage),
        "one-in-flight": layer * layers,
        "one-too-few": layer * layers * min(layout.micro_batches, layout.pp - stage - 1),
        "stages-reversed": layer * layers * min(layout.micro_batches, stage + 1),
        "every-stage-alike": lambda got: any(
            same(got, layer * layers * n) for n in (layout.pp, min(layout.micro_batches, layout.pp))
        ),
        "all-in-flight": layer * layers * layout.micro_batches,
        "activations-float32": 2 * right,
    }


def _check_held(got, model: Model, layout: Layout, seq: int, stage: int) -> None:
    check_keys(got, KINDS)
    right = held(model, layout, seq, stage)
    for kind in STATES:
        likely = _slips_of_states(model, layout, stage, kind)
        expect(got[kind], right[kind], what=kind, likely=likely)
    likely = _slips_of_activations(model, layout, seq, stage)
    expect(got["activations"], right["activations"], what="activations", likely=likely)


@holding.requires("a stage in the middle, nothing sharded", at_home=True)
def a_stage_in_the_middle(answer, draw):
    model, layout, seq = case(draw)
    stage = inner_stage(draw, layout)
    _check_held(own(answer, model, layout, seq, stage), model, layout, seq, stage)


@holding.requires("the first stage and the last, where the tables are", needs_earlier=True)
def the_first_stage_and_the_last(answer, draw):
    for tied in (True, False):
        model, layout, seq = case(draw, tied)
        for stage in (0, layout.pp - 1):
            _check_held(answer(model, layout, seq, stage), model, layout, seq, stage)


@holding.requires("one stage that has both ends, tied and not", needs_earlier=True)
def one_stage_that_has_both_ends(answer, draw):
    for tied in (True, False):
        model, layout, seq = case(draw, tied, pp=1)
        _check_held(answer(model, layout, seq, 0), model, layout, seq, 0)


@holding.requires("ZeRO's three stages", needs_earlier=True)
def zero_three_stages(answer, draw):
    for zero in (1, 2, 3):
        model, layout, seq = case(draw, zero=zero)
        stage = draw.integer(0, layout.pp - 1)
        _check_held(answer(model, layout, seq, stage), model, layout, seq, stage)


@holding.requires("selective and full recomputation", needs_earlier=True)
def selective_and_full_recomputation(answer, draw):
    for recompute in ("selective", "full"):
        model, layout, seq = case(draw, recompute=recompute)
        stage = draw.integer(0, layout.pp - 1)
        _check_held(answer(model, layout, seq, stage), model, layout, seq, stage)


@holding.requires("fewer micro-batches than stages", needs_earlier=True)
def fewer_micro_batches_than_stages(answer, draw):
    model, layout, seq = case(draw, pp=6, micro_batches=draw.integer(2, 3))
    for stage in (0, 3):
        _check_held(answer(model, layout, seq, stage), model, layout, seq, stage)


@holding.requires("one GPU", needs_earlier=True)
def one_gpu(answer, draw):
    model, layout, seq = case(draw, tp=1, pp=1, dp=1)
    _check_held(answer(model, layout, seq, 0), model, layout, seq, 0)
