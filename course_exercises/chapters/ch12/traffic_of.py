"""Exercise 12.2, `traffic_of`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise, expect
from course_exercises.authoring.compare import same
from course_exercises.chapters.ch12.shared import (
    GROUPS,
    UNITS,
    USES_ESTIMATE,
    case,
    check_keys,
    in_other_units,
    own,
)
from course_planner import Layout, Model

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
            "with ZeRO 3 one pass back and 2 m of parameters, recomputed or not."
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
        "gathered-to-recompute": "Full recomputation gathers no third time: layer by layer, what the backward pass gathers "
        "is there for the second forward pass too.",
        "gathered-for-forward": "The backward pass needs the parameters too: ZeRO 3 gathers them again.",
        "zero-saves-traffic": "ZeRO 1 and 2 divide the memory and send what an all-reduce sends.",
        "nothing-to-send": "A group of one rank has nobody to send to.",
    },
)


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
        **in_other_units(right),
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
        **in_other_units(right),
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
        **in_other_units(right),
        "nothing-to-send": d == 1,
        "zero-3-as-ddp": third and _data_bytes(model, layout, passes=2),
        "gathered-once": third and _data_bytes(model, layout, passes=3),
        "gathered-to-recompute": third and _data_bytes(model, layout, passes=1 + 3 * m),
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
    check_keys(got, GROUPS)
    likely = _slips_of_tensor(model, layout, seq)
    expect(got["tp"], _tensor_bytes(model, layout, seq), what="tp", likely=likely)
    likely = _slips_of_pipeline(model, layout, seq, stage)
    expect(got["pp"], _pipeline_bytes(model, layout, seq, stage), what="pp", likely=likely)
    expect(got["dp"], _data_bytes(model, layout), what="dp", likely=_slips_of_data(model, layout))


@sending.requires("the stages in the middle", at_home=True)
def the_stages_in_the_middle(answer, draw):
    model, layout, seq = case(draw)
    for stage in range(1, layout.pp - 1):
        _check_sent(own(answer, model, layout, seq, stage), model, layout, seq, stage)


@sending.requires("the first stage and the last", needs_earlier=True)
def the_first_stage_and_the_last(answer, draw):
    model, layout, seq = case(draw)
    for stage in (0, layout.pp - 1):
        _check_sent(answer(model, layout, seq, stage), model, layout, seq, stage)


@sending.requires("ZeRO 1 and 2", needs_earlier=True)
def zero_1_and_2(answer, draw):
    for zero in (1, 2):
        model, layout, seq = case(draw, zero=zero)
        stage = draw.integer(0, layout.pp - 1)
        _check_sent(answer(model, layout, seq, stage), model, layout, seq, stage)


@sending.requires("ZeRO 3, with several micro-batches and with one", needs_earlier=True)
def zero_3_with_several_micro_batches(answer, draw):
    for m in (draw.integer(4, 9), 1):
        model, layout, seq = case(draw, zero=3, pp=1, micro_batches=m)
        _check_sent(answer(model, layout, seq, 0), model, layout, seq, 0)


@sending.requires("selective and full recomputation", needs_earlier=True)
def selective_and_full_recomputation(answer, draw):
    for more in (
        {"recompute": "selective"},
        {"recompute": "full"},
        {"recompute": "full", "zero": 3, "pp": 1},
    ):
        model, layout, seq = case(draw, **more)
        stage = draw.integer(0, layout.pp - 1)
        _check_sent(answer(model, layout, seq, stage), model, layout, seq, stage)


@sending.requires("groups of one rank", needs_earlier=True)
def groups_of_one_rank(answer, draw):
    for name in GROUPS:
        model, layout, seq = case(draw, **{name: 1})
        _check_sent(answer(model, layout, seq, 0), model, layout, seq, 0)
