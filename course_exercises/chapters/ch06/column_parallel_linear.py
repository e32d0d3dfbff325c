"""Exercise 6.1, `ColumnParallelLinear`: what it asks for, and how it is checked."""

from torch import nn

from course_exercises.authoring import Exercise, same, signs
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
    REFUSES,
    anywhere,
    by_block,
    check_refusal,
    on_three,
    own_bytes,
    sizes_that_do_not_divide,
)

column = Exercise(
    "6.1",
    "ColumnParallelLinear",
    points=2,
    minutes=30,
    kind="first",
    parameters=("full",),
    hints=[
        (
            "Forward is an ordinary linear layer with fewer output features. Which dimension of "
            "`full.weight` counts them, and which block of it is this rank's?"
        ),
        (
            "Backward, each rank gets the part of x's gradient that its own features give. The "
            "conjugate pair has a function that does nothing forward and adds up backward."
        ),
        (
            "In `__init__`, compare sizes first; cut weight and bias with `chunk`, and `clone` the "
            "block, so that it is no view. In `forward`, send x through the function that sums "
            "gradients, then through `nn.functional.linear`. Because the function gives a new "
            "tensor, a residual connection around the layer is left alone."
        ),
    ],
    misconceptions={
        **BOTH_CUTS,
        "other-block": "A rank holds other numbers than its block of `full`: of n equal blocks of consecutive output "
        "features the r-th, counted from 0. `nn.Linear` stores the weight as (out, in), so that dimension 0 counts "
        "the output features, and each of them has its own bias.",
        "adds-forward": "You bring the ranks' values together in forward. Nothing is to be sent there: every rank has "
        "all of x already, and returns its block of the output features, which the row cut that follows needs.",
        "bias-lost": "The bias is missing from the output.",
        "x-gradient": "No rank has the whole gradient of x. Every output feature depends on every input "
        "feature: the sum over the ranks of what their weights find is the gradient. Send x through the function "
        "that sums in backward, before the linear layer. After the layer, it would add gradients of different features.",
        "residual-summed": "You sum the whole gradient of x, also the part that comes past your layer "
        "and is complete on every rank already. Sum only what comes through the layer.",
        "needs-input-gradient": "An input that needs no gradient, such as the data themselves, makes "
        "your layer fail: a hook can only sit on a tensor that requires one.",
    },
    failures=HANGS,
)


def _outputs(task: Task) -> dict:
    n, bias = task.ranks, task.bias
    summed_inputs = by_block(n * (task.y - bias) + bias, -1, n)
    together = anywhere([task.y, sum(task.parts("y"))])
    return {
        "adds-forward": lambda got: n > 1 and (together(got) or same(got, summed_inputs)),
        "bias-lost": by_block(task.y - bias, -1, n),
    }


def _gradients(task: Task, name: str, expected: list) -> dict:
    n, beside = task.ranks, 0 if task.beside is None else task.beside
    if name != "x":
        return {"summed-again": n > 1 and [n * g for g in expected]}
    own = [s @ w + beside for s, w in zip(task.parts("slope"), task.weights(), strict=True)]
    behind = [sum(task.parts("slope")) @ w + beside for w in task.weights()]
    return {
        "residual-summed": task.beside is not None and [task.x_gradient + n * beside] * n,
        "x-gradient": lambda got: same(got, own) or same(got, behind),
        **signs(own, expected),
    }


COLUMN = Cut(weight=0, bias=0, x=None, y=-1, outputs=_outputs, gradients=_gradients)


@column.requires("each of two ranks holds its block of the output features", failures=REFUSES)
def each_of_two_ranks_holds_its_block(answer, draw):
    check_held(answer, linear_task(draw, COLUMN, 2))


@column.requires("each rank computes its block of the outputs", needs_earlier=True)
def each_rank_computes_its_block_of_the_outputs(answer, draw):
    check_outputs(answer, linear_task(draw, COLUMN, 2))


@column.requires("every rank has the whole gradient of the input", needs_earlier=True)
def every_rank_has_the_whole_gradient(answer, draw):
    check_linear(answer, linear_task(draw, COLUMN, 2))


@column.requires("three ranks", failures=on_three(column.failures), needs_earlier=True)
def three_ranks(answer, draw):
    check_three(answer, draw, COLUMN)


@column.requires(
    "one rank; inputs (N, T, in)",
    failures={"must be a matrix": "matrices-only"},
    needs_earlier=True,
)
def one_rank_and_inputs_of_three_dimensions(answer, draw):
    check_one(answer, draw, COLUMN)


@column.requires("a layer without bias", needs_earlier=True, failures={"exception": "needs-a-bias"})
def a_layer_without_bias(answer, draw):
    check_linear(answer, linear_task(draw, COLUMN, draw.choice([2, 3]), bias=False))


@column.requires("a layer in double precision", needs_earlier=True)
def a_layer_in_double_precision(answer, draw):
    check_double(answer, draw, COLUMN)


@column.requires("what goes past the layer is not summed", needs_earlier=True)
def what_goes_past_the_layer_is_not_summed(answer, draw):
    check_linear(answer, linear_task(draw, COLUMN, draw.choice([2, 3, 4]), beside=True))


@column.requires(
    "an input that needs no gradient",
    failures={"register a hook": "needs-input-gradient"},
    needs_earlier=True,
)
def an_input_that_needs_no_gradient(answer, draw):
    check_outputs(answer, linear_task(draw, COLUMN, draw.choice([2, 3])), x_learns=False)


@column.requires("the shards are contiguous, in memory of exactly their size", needs_earlier=True)
def the_shards_are_contiguous(answer, draw):
    for ranks in (draw.choice([2, 3, 4]), 1):
        check_memory(answer, linear_task(draw, COLUMN, ranks))


@column.requires("nothing is sent forward, the size of the input backward", needs_earlier=True)
def nothing_is_sent_forward(answer, draw):
    task = linear_task(draw, COLUMN, draw.choice([2, 3, 4]))
    check_linear_sent(answer, task, (0, own_bytes(task.x)))


@column.requires("a ValueError with both numbers where the sizes do not divide")
def a_valueerror_with_both_numbers_where_the_sizes(answer, draw):
    ranks, size = sizes_that_do_not_divide(draw)
    check_refusal(answer, nn.Linear(2 * ranks, size), ranks, size)
