"""Exercise 6.1, `ColumnParallelLinear`: what it asks for, and how it is checked."""

from torch import nn

from course_exercises.authoring import Exercise
from course_exercises.chapters.ch06.shared import (
    BOTH_CUTS,
    HANGS,
    REFUSES,
    Cut,
    check_double,
    check_gradients,
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

column = Exercise(
    "6.1",
    "ColumnParallelLinear",
    points=2,
    minutes=25,
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
        "bias-whole": "Every rank holds the whole bias. A column cut shares the output features out, "
        "and each of them has its own bias.",
        "output-gathered": "You return the outputs of all ranks. Asked is this rank's block: the "
        "row cut that follows needs no more.",
        "outputs-summed": "You add up the outputs of the ranks. They are different output features: "
        "nothing is to be added forward.",
        "pair-swapped": "The input is multiplied by the number of ranks: you sum it over the ranks in "
        "forward. Every rank has the whole input already. It is its gradient that is summed.",
        "bias-lost": "The bias is missing from the output.",
        "sums-behind-the-layer": "You sum the gradient of the output. The ranks' outputs are "
        "different features. Sum the gradient of the input: send x through the function, before the "
        "linear layer.",
        "needs-a-bias": "A layer made with `bias=False` has `full.bias` None: so has yours.",
        "input-gradient-local": "Each rank has only its own part of x's gradient. Every output "
        "feature depends on every input feature: add the ranks' parts up in backward.",
        "input-gradient-mean": "The gradient of x is divided by the number of ranks. Its parts are "
        "to be added: no rank has seen other data.",
        "residual-summed": "You sum the whole gradient of x, also the part that comes past your layer "
        "and is complete on every rank already. Sum only what comes through the layer.",
        "needs-input-gradient": "An input that needs no gradient, such as the data themselves, makes "
        "your layer fail: a hook can only sit on a tensor that requires one.",
    },
    failures=HANGS,
)
COLUMN = Cut(frozenset(column.misconceptions), weight=0, bias=0, x=None, y=-1)


@column.requires("each of two ranks holds its block of the output features", failures=REFUSES)
def each_of_two_ranks_holds_its_block(answer, draw):
    check_held(answer, linear_task(draw, COLUMN, 2))


@column.requires("each rank computes its block of the outputs", needs_earlier=True)
def each_rank_computes_its_block_of_the_outputs(answer, draw):
    task = linear_task(draw, COLUMN, 2)
    check_outputs(run_linear(answer, task), task)


@column.requires("every rank has the whole gradient of the input", needs_earlier=True)
def every_rank_has_the_whole_gradient(answer, draw):
    check_linear(answer, linear_task(draw, COLUMN, 2))


@column.requires(
    "three ranks and one; inputs (N, T, in)",
    failures={"must be a matrix": "matrices-only", "exception": "two-ranks"},
    needs_earlier=True,
)
def three_ranks(answer, draw):
    check_three_and_one(answer, draw, COLUMN)


@column.requires("a layer without bias", needs_earlier=True, failures={"exception": "needs-a-bias"})
def a_layer_without_bias(answer, draw):
    check_without_bias(answer, linear_task(draw, COLUMN, draw.choice([2, 3]), bias=False))


@column.requires(
    "a layer in double precision", needs_earlier=True, failures={"exception": "other-dtype"}
)
def a_layer_in_double_precision(answer, draw):
    check_double(answer, draw, COLUMN)


@column.requires("what goes past the layer is not summed", needs_earlier=True)
def what_goes_past_the_layer_is_not_summed(answer, draw):
    task = linear_task(draw, COLUMN, draw.choice([2, 3, 4]))
    beside = draw.tensor(*task.x.shape)
    check_gradients(run_linear(answer, task, beside=beside), task, beside)


@column.requires(
    "an input that needs no gradient",
    failures={"register a hook": "needs-input-gradient"},
    needs_earlier=True,
)
def an_input_that_needs_no_gradient(answer, draw):
    task = linear_task(draw, COLUMN, draw.choice([2, 3]))
    check_outputs(run_linear(answer, task, x_learns=False), task)


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
