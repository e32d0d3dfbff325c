"""Exercise 6.2, `RowParallelLinear`: what it asks for, and how it is checked."""

import copy

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, OwnPart, expect, run
from course_exercises.authoring.ranks import described
from course_exercises.chapters.ch06.shared import (
    BOTH_CUTS,
    HANGS,
    REFUSES,
    Cut,
    check_double,
    check_held,
    check_linear,
    check_linear_sent,
    check_memory,
    check_outputs,
    check_refusal,
    check_three_and_one,
    check_without_bias,
    linear_task,
    own_bytes,
    run_linear,
    sizes_that_do_not_divide,
)
from course_utils.comm.intercept import listening
from course_utils.hardware import device

row = Exercise(
    "6.2",
    "RowParallelLinear",
    points=2,
    minutes=25,
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
        "bias-cut": "The bias is cut. It belongs to the output features, and a row cut leaves each of "
        "them on every rank: every rank holds the whole bias.",
        "takes-the-whole-input": "The layer expects the whole input, or cuts what it gets once more. "
        "A rank is handed its own block of the input features.",
        "partial-output": "Each rank returns its own partial sum: the sum over the ranks is missing.",
        "bias-per-rank": "The bias is added once per rank: add it after the sum over the ranks, "
        "not before.",
        "bias-lost": "The bias is missing from the output.",
        "mean-not-sum": "The partial sums are averaged: they are to be added.",
        "inputs-summed": "You add up the ranks' inputs. They are different features: multiply each "
        "with its own weights first, and add up the products.",
        "input-gradient-mean": "The gradients are divided by the number of ranks. Backward hands the "
        "output's gradient through as it is: every rank has all of it.",
        "one-rank-only": "Only one rank has the output. `reduce` delivers to one rank, `all_reduce` "
        "to all of them.",
        "cuts-the-graph": "No gradient gets through your layer: the sum over the ranks was made where "
        "autograd does not see it. Use an autograd function that hands the gradient through.",
        "passes-by-luck": "You sum a tensor that autograd records, with a call of which it knows nothing. The gradient "
        "passes as it is, which happens to be right here: PyTorch warns that this is deprecated, and will "
        "refuse it. Use an autograd function, which says what backward does.",
        "summed-again": "The gradients are world_size times too large: backward sums over the ranks "
        "once more. Every rank has the whole gradient of the output already.",
        "other-features-summed": "You sum the gradient of x over the ranks. Each rank has other input "
        "features: what it finds for them is complete.",
        "needs-a-bias": "A layer made with `bias=False` has `full.bias` None: so has yours.",
        "bias-gradient": "The output is right, and the bias's gradient is not. A copy that only one "
        "rank uses, or that every rank uses by a fraction, gets another gradient, and the copies "
        "drift apart. Let every rank add the whole bias after the sum.",
        "needs-contiguous": "x need not lie in memory in the order of its elements, as a slice or a "
        "transposed tensor does not, and `view` then fails: `reshape` and `flatten` take any layout.",
        "kept-from-before": "The layer is right for one input and not for one after the other: it keeps "
        "something of an earlier call. Make in `forward` what depends on x, the sum's tensor too.",
        "outputs-joined": "What you add has another size: the ranks' results were put one after the other, or the bias was "
        "cut. Each result is a term of *all* output features: the ranks' results are added, and then the whole bias.",
    },
    failures={
        **HANGS,
        "must match the size of tensor b": "outputs-joined",
        "shapes cannot be multiplied": "takes-the-whole-input",
        "does not require grad": "cuts-the-graph",
    },
)
ROW = Cut(frozenset(row.misconceptions), weight=1, bias=None, x=-1, y=None)


@row.requires(
    "each of two ranks holds its block of the input features, and the whole bias", failures=REFUSES
)
def each_of_two_ranks_holds_its_block(answer, draw):
    check_held(answer, linear_task(draw, ROW, 2))


@row.requires("every rank has the whole output", needs_earlier=True)
def every_rank_has_the_whole_output(answer, draw):
    task = linear_task(draw, ROW, 2)
    check_outputs(run_linear(answer, task), task)


@row.requires("the gradients are those of the whole layer", needs_earlier=True)
def the_gradients_are_those_of_the_whole_layer(answer, draw):
    check_linear(answer, linear_task(draw, ROW, 2))


@row.requires(
    "three ranks and one; inputs (N, T, in/n)",
    failures={
        "must be a matrix": "matrices-only",
        **dict.fromkeys(("exception", *row.failures), "two-ranks"),
        **HANGS,
    },
    needs_earlier=True,
)
def three_ranks(answer, draw):
    check_three_and_one(answer, draw, ROW)


@row.requires("a layer without bias", needs_earlier=True, failures={"exception": "needs-a-bias"})
def a_layer_without_bias(answer, draw):
    check_without_bias(answer, linear_task(draw, ROW, draw.choice([2, 3]), bias=False))


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
        ("kept-from-before", (rows,)),
        ("kept-from-before", (rows,)),
        ("kept-from-before", (rows + draw.integer(1, 3),)),
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
    """The calls of forward that are handed a tensor which autograd records."""
    layer = answer(copy.deepcopy(full).to(device()))
    found = []

    def on_call(name: str, arguments: dict) -> None:
        kind, payload = described(name, arguments)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in payload):
            found.append(kind)

    with listening(on_call):
        layer(x.to(device()))
    return found


@row.requires("autograd knows what backward does", needs_earlier=True)
def autograd_knows_what_backward_does(answer, draw):
    task = linear_task(draw, ROW, draw.choice([2, 3]))
    got = run(_recorded, task.ranks, answer, task.full, OwnPart(task.parts("x")))
    what, likely = "calls with a tensor that autograd records", {"passes-by-luck": True}
    expect(got, [[]] * task.ranks, each="rank", what=what, likely=likely)


@row.requires(
    "a layer in double precision", needs_earlier=True, failures={"exception": "other-dtype"}
)
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
