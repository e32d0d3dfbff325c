"""Exercise 12.1, `memory_of`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise, expect
from course_exercises.chapters.ch12.shared import (
    OTHER_UNIT,
    STATES,
    USES_ESTIMATE,
    among,
    case,
    check_keys,
    drawn,
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
        "not-the-dict": "Return a dict with the four keys parameters, gradients, optimizer and activations, and nothing else.",
        "other-unit": OTHER_UNIT,
        "other-bytes": "You count other bytes for each parameter. It has 2, and its gradient 2, in bfloat16; the optimizer has "
        "12: Adam's two averages and the float32 copy of the parameter, 4 each.",
        "other-shards": "You divide where this stage of ZeRO does not, or the other way round. 1 shards the optimizer, 2 the "
        "gradients too, 3 the parameters too: each among the dp ranks, and among nobody else.",
        "other-layers": "You count the layers of the whole model, or a part of a layer. A stage has layers / pp layers, and "
        "each has 12 W^2 parameters: 4 W^2 of attention and 8 W^2 of the MLP.",
        "not-cut": "You divide by tp what each tensor rank has whole, or do not divide what they share out. Tensor ranks share out all matrices, the tables too, and with "
        "sequence parallelism all that a layer keeps, the scores too. Only what full recomputation keeps is whole on each.",
        "other-tables": "You count other tables of V W than there are. The first stage has the embedding, the last the output "
        "layer, and no stage between has one. A tied output layer is a copy on another stage, and on the same stage the "
        "same table.",
        "other-sequences": "You count other sequences than those of the rank's own micro-batch, which has `micro_batch` of them; "
        "those in flight count the micro-batches. Data-parallel ranks have micro-batches of their own: no dp divides or "
        "multiplies activations.",
        "in-flight": "You keep another number of micro-batches than are in flight. Under 1F1B stage r of p keeps min(m, p - r): "
        "the first stage the most, the last the one that it works on, and none more than there are.",
        "other-recomputation": "You count what another kind of recomputation keeps, or other bytes: 34 W has the 2 bytes of a "
        'number in it. Without recomputation the scores come on top, 5 a s; "selective" computes them again; "full" keeps '
        "the layer's input, 2 W.",
    },
)
KINDS = (*STATES, "activations")


def _slips_of_states(model: Model, layout: Layout, stage: int, kind: str) -> dict[str, list[float]]:
    """The bytes that each mistake gives, by misconception."""
    size, from_stage = STATES[kind]
    shards = layout.dp if layout.zero >= from_stage else 1

    def bytes_of(size=size, **slip) -> float:
        return size * matrices(model, layout, stage, **slip) / shards

    right = bytes_of()
    sizes = (4, 6, 8, 16, 24) if kind == "optimizer" else (1, 4)
    return {
        "other-unit": in_other_units(right),
        "other-bytes": [bytes_of(size) for size in sizes],
        "other-shards": [
            right * shards if shards > 1 else right / layout.dp,
            right / (layout.tp * layout.pp),
        ],
        "other-layers": [bytes_of(pp=1), bytes_of(squares=4), bytes_of(squares=8)],
        "not-cut": [bytes_of(tp=1), bytes_of(tables_tp=1)],
        "other-tables": [bytes_of(tables=lambda *_, n=n: n) for n in range(3)],
    }


def _slips_of_activations(
    model: Model, layout: Layout, seq: int, stage: int
) -> dict[str, list[float]]:
    """The bytes that each mistake gives, by misconception."""
    m, p, t = layout.micro_batches, layout.pp, layout.tp
    flight = in_flight(layout, stage)
    layer, of_stage = kept(model, layout, seq), model.layers // p * flight
    tokens = seq * layout.micro_batch
    scores = 5 * model.heads * seq * (layout.recompute == "none")
    full = layout.recompute == "full"
    uncut = [  # the scores; norms and dropouts, as without sequence parallelism
        tokens * (34 * model.width / t + scores),
        tokens * (10 * model.width + (24 * model.width + scores) / t),
    ]
    kinds = [kept(model, layout, seq, kind) for kind in ("none", "selective", "full")]
    others = [0.0, 2 * layer, *kinds, *(uncut if full else [])]
    right = layer * of_stage
    return {
        "other-unit": in_other_units(right),
        "other-sequences": [
            right * factor for factor in (1 / layout.dp, layout.dp, 1 / layout.micro_batch, m)
        ],
        "other-layers": [right * p],
        "not-cut": [right * t, right / t, *([] if full else [each * of_stage for each in uncut])],
        "in-flight": [
            right / flight * n for n in (1, m, p, min(m, p), p - stage, stage + 1, p - stage - 1)
        ],
        "other-recomputation": [each * of_stage for each in others],
    }


def _check_held(got, model: Model, layout: Layout, seq: int, stage: int) -> None:
    check_keys(got, KINDS)
    for kind, right in held(model, layout, seq, stage).items():
        if kind in STATES:
            slips = _slips_of_states(model, layout, stage, kind)
        else:
            slips = _slips_of_activations(model, layout, seq, stage)
        what = f"{kind}: {drawn(model, layout, seq, stage)}"
        expect(got[kind], right, what=what, likely=among(slips))


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
