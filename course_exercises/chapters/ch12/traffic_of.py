"""Exercise 12.2, `traffic_of`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise, expect
from course_exercises.chapters.ch12.shared import (
    GROUPS,
    OTHER_UNIT,
    USES_ESTIMATE,
    among,
    case,
    check_keys,
    drawn,
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
            "micro-batches, except that ZeRO 3 gathers parameters for every pass and sums up gradients in every micro-batch."
        ),
        (
            "A ring sends (n - 1) / n of the payload in a pass; all-reduce has two passes. tp: layers x m x 8 passes, 12 with "
            "full recomputation. pp: m messages for each neighbour, 1 / t of s b W. dp: the stage's gradients, 2 passes, and "
            "with ZeRO 3 m of gradients and 2 m of parameters, recomputed or not."
        ),
    ],
    misconceptions={
        "uses-estimate": USES_ESTIMATE,
        "not-the-dict": "Return a dict with the three keys tp, pp and dp, and nothing else.",
        "other-unit": OTHER_UNIT,
        "nothing-to-send": "A group of one rank has nobody to send to: 0.",
        "tensor-factor-2": "What you send to tensor ranks is off by a factor of 2. A layer has two pairs of collectives, around "
        "attention and around the MLP; the backward pass sends as much as the forward pass; a number has 2 bytes.",
        "stages-factor-2": "What you send to stages is off by a factor of 2. A stage in the middle sends to both sides, the "
        "first and the last to one; a number has 2 bytes.",
        "data-factor-2": "What you send to data ranks is off by a factor of 2. An all-reduce has two passes, and ZeRO 1 and 2 "
        "have both; a gradient has 2 bytes.",
        "other-share": "You count another part of the payload than one rank sends. On a ring a rank sends (n - 1) / n of it in "
        "each pass, and the payload is the larger buffer: s b W numbers. A message between stages goes whole.",
        "not-cut": "You leave whole what a tensor rank has a part of: with sequence parallelism it sends 1 / t of a message "
        "between stages, and it sends the gradients of its own parts of the matrices.",
        "other-count": "You count other layers, micro-batches or sequences than the stage has: layers / pp layers, and m "
        "micro-batches of `micro_batch` sequences.",
        "other-recomputation": "You count another number of passes. Full recomputation runs the forward pass a second time with "
        "its collectives: 3 passes. Selective recomputation repeats no collective: 2, as without any.",
        "every-micro-batch": "You send gradients for every micro-batch. Without ZeRO 3 they are added up on the rank, and sent once a step.",
        "other-zero": "You count ZeRO in another way. 1 and 2 divide the memory, and send what an all-reduce sends. 3 gathers "
        "the parameters before every forward and every backward pass of a micro-batch, 2 m times, recomputed or not, and "
        "reduces gradients m times.",
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
    passes = passes or (3 * layout.micro_batches if layout.zero == 3 else 2)
    ring = (d - 1) / d if ring is None else ring
    return passes * 2 * layers * 12 * model.width**2 / tp * ring


def _slips_of_tensor(model: Model, layout: Layout, seq: int) -> dict[str, list[float]]:
    """The bytes that each mistake gives, by misconception."""

    def sent(**slip) -> float:
        return _tensor_bytes(model, layout, seq, **slip)

    right = sent()
    return {
        "other-unit": in_other_units(right),
        "other-recomputation": [sent(passes=2), sent(passes=3)],
        "other-share": [sent(ring=1), right * layout.tp, right / layout.tp],
        "other-count": [sent(m=1), sent(layers=1), sent(layers=model.layers), sent(b=1)],
        "tensor-factor-2": [right / 2, right * 2],
    }


def _slips_of_pipeline(
    model: Model, layout: Layout, seq: int, stage: int
) -> dict[str, list[float]]:
    """The bytes that each mistake gives, by misconception."""

    def sent(**slip) -> float:
        return _pipeline_bytes(model, layout, seq, stage, **slip)

    right, p = sent(), layout.pp
    return {
        "other-unit": in_other_units(right),
        "not-cut": [sent(tp=1)],
        "other-count": [sent(m=1), sent(b=1)],
        "other-share": [right * (p - 1) / p],
        "stages-factor-2": [right / 2, right * 2],
    }


def _slips_of_data(model: Model, layout: Layout) -> dict[str, list[float]]:
    """The bytes that each mistake gives, by misconception."""

    def sent(**slip) -> float:
        return _data_bytes(model, layout, **slip)

    right, d, m = sent(), layout.dp, layout.micro_batches
    passes = (2, 3, 2 * m, 1 + m, 1 + 2 * m, 4 * m) if layout.zero == 3 else ()
    zero = [sent(passes=n) for n in passes] if passes else [right / d] * (layout.zero > 0)
    return {
        "other-unit": in_other_units(right),
        "other-zero": zero,
        "every-micro-batch": [] if layout.zero == 3 else [sent(passes=2 * m)],
        "other-share": [sent(ring=1), right * d],
        "not-cut": [sent(tp=1)],
        "other-count": [sent(layers=model.layers), sent(layers=1)],
        "data-factor-2": [right / 2, right * 2],
    }


def _check_sent(got, model: Model, layout: Layout, seq: int, stage: int) -> None:
    check_keys(got, GROUPS)
    right = {
        "tp": _tensor_bytes(model, layout, seq),
        "pp": _pipeline_bytes(model, layout, seq, stage),
        "dp": _data_bytes(model, layout),
    }
    slips = {
        "tp": _slips_of_tensor(model, layout, seq),
        "pp": _slips_of_pipeline(model, layout, seq, stage),
        "dp": _slips_of_data(model, layout),
    }
    for group, sent in right.items():
        alone = {"nothing-to-send": getattr(layout, group) == 1}
        what = f"{group}: {drawn(model, layout, seq, stage)}"
        expect(got[group], sent, what=what, likely=alone | among(slips[group]))


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
