"""Exercise 6.2, `RowParallelLinear`: what it asks for, and how it is checked."""

import copy

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, OwnPart, expect, run, same, signs
from course_exercises.chapters.ch06.cut_linear import (
    BOTH_CUTS,
    Cut,
    Task,
    check_double,
    check_held,
    check_linear,
    check_linear_sent,
    check_memory,
    check_one,
    check_outputs,
    check_three,
    linear_task,
)
from course_exercises.chapters.ch06.shared import (
    HANGS,
    KEEPS_A_CALL,
    PASSES_BY_LUCK,
    REFUSES,
    anywhere,
    check_refusal,
    must_not_record,
    on_three,
    own_bytes,
    recorded_calls,
    sizes_that_do_not_divide,
)
from course_utils.hardware import device

row = Exercise(
    "6.2",
    "RowParallelLinear",
    points=2,
    minutes=20,
    kind="core",
    parameters=("full",),
    hints=[
        (
            "Each rank multiplies its block of input features with the weights for them. What do "
            "the ranks' results have to do with the whole layer's?"
        ),
        (
            "Partial sums are added over the ranks, and every rank needs the result. The bias is not "
            "a partial sum: at which moment is there one output to add it to?"
        ),
        (
            "Cut the weight in the dimension of the input features and clone the block; keep the "
            "whole bias. In forward: the linear product without bias, the function of the conjugate "
            "pair that adds up forward, then the bias. Its backward hands the gradient through."
        ),
    ],
    misconceptions={
        **BOTH_CUTS,
        "other-block": "A rank holds other numbers than its block of `full`: of n equal blocks of consecutive input "
        "features the r-th, counted from 0. `nn.Linear` stores the weight as (out, in), so that dimension 1 counts "
        "the input features. The bias belongs to the output features, and every rank holds all of it.",
        "own-features": "x is this rank's block of the input features already, for its own weights: it is not "
        "cut once more, and not added to the other ranks' features. What is added is the products.",
        "outputs-joined": "Two tensors of different sizes are added, as where the ranks' results are put one after the "
        "other. Each result is a term of *all* output features: add the results, and then the whole bias.",
        "bias-once": "The bias counts once, after the sum over the ranks, where every rank adds all of it. Before the "
        "sum, it counts once per rank; on one rank only, or by a fraction on each, the output is right and the "
        "bias's gradient is not, so that the ranks' copies drift apart.",
        "passes-by-luck": PASSES_BY_LUCK,
        "gradient-through": "A gradient is summed over the ranks, or divided by their number. Backward hands the "
        "output's gradient through as it is: every rank has all of it, and finds with it what belongs to its own "
        "features and to the bias.",
        "keeps-a-call": KEEPS_A_CALL,
    },
    failures={
        **HANGS,
        "must match the size of tensor b": "outputs-joined",
        "shapes cannot be multiplied": "own-features",
        "does not require grad": "cut-from-the-graph",
    },
)


def _outputs(task: Task) -> dict:
    n, bias, y = task.ranks, task.bias, task.y
    terms = [x @ w.T for x, w in zip(task.parts("x"), task.weights(), strict=True)]
    of_summed_inputs = [sum(task.parts("x")) @ w.T + bias for w in task.weights()]

    def without_bias(sign):
        return lambda got: sign([g - bias for g in got])

    return {
        "bias-once": anywhere([y - bias, y + (n - 1) * bias]),
        "own-features": of_summed_inputs,
        **{name: without_bias(sign) for name, sign in signs(terms, [y - bias] * n).items()},
    }


def _gradients(task: Task, name: str, expected: list) -> dict:
    n = task.ranks
    wrong = [[n * g for g in expected]]
    if name == "x":
        wrong += [[g / n for g in expected], [sum(expected)] * n]
    return {
        "gradient-through": lambda got: any(same(got, each) for each in wrong),
        "bias-once": lambda got: name == "bias" and any(g is not None for g in got),
    }


ROW = Cut(weight=1, bias=None, x=-1, y=None, outputs=_outputs, gradients=_gradients)


@row.requires(
    "each of two ranks holds its block of the input features, and the whole bias", failures=REFUSES
)
def each_of_two_ranks_holds_its_block(answer, draw):
    check_held(answer, linear_task(draw, ROW, 2))


@row.requires("every rank has the whole output", needs_earlier=True)
def every_rank_has_the_whole_output(answer, draw):
    check_outputs(answer, linear_task(draw, ROW, 2))


@row.requires("the gradients are those of the whole layer", needs_earlier=True)
def the_gradients_are_those_of_the_whole_layer(answer, draw):
    check_linear(answer, linear_task(draw, ROW, 2))


@row.requires("three ranks", failures=on_three(row.failures), needs_earlier=True)
def three_ranks(answer, draw):
    check_three(answer, draw, ROW)


@row.requires(
    "one rank; inputs (N, T, in/n)",
    failures={"must be a matrix": "matrices-only"},
    needs_earlier=True,
)
def one_rank_and_inputs_of_three_dimensions(answer, draw):
    check_one(answer, draw, ROW)


@row.requires("a layer without bias", needs_earlier=True, failures={"exception": "needs-a-bias"})
def a_layer_without_bias(answer, draw):
    check_linear(answer, linear_task(draw, ROW, draw.choice([2, 3]), bias=False))


def _called(rank, answer, full, inputs) -> list[Tensor | str]:
    """What a layer gives for one input after the other, up to the first at which it fails. Those with
    three dimensions come transposed in memory."""
    layer = answer(copy.deepcopy(full).to(device()))
    outputs = []
    for x in inputs:
        x = x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() == 3 else x
        try:
            outputs.append(layer(x.to(device())))
        except Exception as error:  # noqa: BLE001 - at which input it fails, tells the mistake
            outputs.append(f"{type(error).__name__}: {error}")
            break
    return [y.detach() if torch.is_tensor(y) else y for y in outputs]


@row.requires("inputs of other shapes and layouts, one after the other", needs_earlier=True)
def inputs_of_other_shapes_and_layouts(answer, draw):
    ranks, rows = draw.choice([2, 3]), draw.integer(2, 4)
    full = linear_task(draw, ROW, ranks, bias=False).full  # y is then the sum itself
    cases = [
        ("keeps-a-call", (rows,)),
        ("keeps-a-call", (rows,)),
        ("keeps-a-call", (rows + draw.integer(1, 3),)),
        ("needs-contiguous", (rows, rows + 1)),
        ("matrices-only", ()),
        ("matrices-only", (2, 1, 3)),
    ]
    inputs = [draw.tensor(*leading, full.in_features) for _, leading in cases]
    parts = zip(*(x.chunk(ranks, dim=-1) for x in inputs), strict=True)
    reports = run(_called, ranks, answer, full, OwnPart([list(part) for part in parts]))
    for number, ((slug, _), x) in enumerate(zip(cases, inputs, strict=True)):
        got = [outputs[number] for outputs in reports if number < len(outputs)]
        what = f"the output for x {tuple(x.chunk(ranks, dim=-1)[0].shape)}, input {number + 1}"
        expect(got, [full(x).detach()] * ranks, each="rank", what=what, likely={slug: True})


def _recorded(rank, answer, full, x) -> list[str]:
    layer = answer(copy.deepcopy(full).to(device()))
    with recorded_calls() as found:
        layer(x.to(device()))
    return found


@row.requires("autograd knows what backward does", needs_earlier=True)
def autograd_knows_what_backward_does(answer, draw):
    task = linear_task(draw, ROW, draw.choice([2, 3]))
    must_not_record(run(_recorded, task.ranks, answer, task.full, OwnPart(task.parts("x"))))


@row.requires("a layer in double precision", needs_earlier=True)
def a_layer_in_double_precision(answer, draw):
    check_double(answer, draw, ROW)


@row.requires("the shards are contiguous, in memory of exactly their size", needs_earlier=True)
def the_shards_are_contiguous(answer, draw):
    for ranks in (draw.choice([2, 3, 4]), 1):
        check_memory(answer, linear_task(draw, ROW, ranks))


@row.requires("the size of the output is sent forward, nothing backward", needs_earlier=True)
def the_size_of_the_output_is_sent_forward(answer, draw):
    task = linear_task(draw, ROW, draw.choice([2, 3, 4]))
    check_linear_sent(answer, task, (own_bytes(task.y), 0))


@row.requires("a ValueError with both numbers where the sizes do not divide")
def a_valueerror_with_both_numbers_where_the_sizes(answer, draw):
    ranks, size = sizes_that_do_not_divide(draw)
    check_refusal(answer, nn.Linear(size, 2 * ranks), ranks, size)
