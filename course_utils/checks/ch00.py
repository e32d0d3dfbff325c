"""The checks of chapter 00: the average of all ranks, the size of a message, passing it on."""

import sys

import torch

from course_utils.checks import Exercise, Wrong, expect, expect_type, run
from course_utils.hardware import device

average = Exercise(
    "0.1",
    "average_over_ranks",
    points=1,
    parameters=("value",),
    hints=[
        "What does `all_reduce` leave in the tensor that you hand in: the sum, or the mean?",
        (
            "`all_reduce` works in place, so hand in a copy. `dist.get_world_size()` tells how many "
            "ranks took part."
        ),
        (
            "Copy the value, let all ranks sum their copies, divide the sum by the number of ranks, "
            "and return it."
        ),
    ],
    misconceptions={
        "sum-not-mean": "You return the sum. `all_reduce` adds; the division is yours.",
        "no-communication": "You divide, but no rank has heard of the others' values yet.",
        "own-value": "You return the rank's own value: nothing was exchanged or averaged.",
        "fixed-two": "You divide by 2 whatever the number of ranks is: ask for the world size.",
        "rank-0-only": "Only rank 0 has the mean. `reduce` gives the sum to one rank, `all_reduce` "
        "to all.",
        "input-changed": "The tensor that was handed in has changed: `all_reduce` works in place, "
        "so give it a copy.",
        "uses-none": "`all_reduce` returns nothing: the sum stands in the tensor that you gave it.",
        "only-rank-0-calls": "A collective is a meeting: every rank has to call it, or the ranks "
        "that do wait for ever.",
    },
    failures={"timeout": "only-rank-0-calls", "'NoneType' and 'int'": "uses-none"},
)


def _averages(rank, answer, values):
    value = values[rank].to(device())
    untouched = value.clone()
    result = answer(value)
    return result, torch.equal(value, untouched)


def _check_average(answer, values):
    """Run the answer with one value a rank and compare what every rank got with the mean."""
    ranks = len(values)
    results = [result for result, _ in run(_averages, ranks, answer, values)]
    for result in results:
        expect_type(result, torch.Tensor)
    total = sum(values)
    mean = total / ranks
    expect(
        results,
        [mean] * ranks,
        each="rank",
        likely={
            "sum-not-mean": [total] * ranks,
            "no-communication": [value / ranks for value in values],
            "own-value": values,
            "fixed-two": [total / 2] * ranks,
            "rank-0-only": [mean, *results[1:]],
        },
    )


@average.requires("three ranks that hold 2, 4 and 9 all get 5")
def _(answer, draw):
    _check_average(answer, [torch.tensor([value]) for value in (2.0, 4.0, 9.0)])


@average.requires("any shape and any number of ranks give the mean", needs_earlier=True)
def _(answer, draw):
    for ranks in (1, 2):
        _check_average(answer, [draw.tensor(3, 2) for _ in range(ranks)])


@average.requires("the tensor that was handed in is unchanged", needs_earlier=True)
def _(answer, draw):
    values = [draw.tensor(5) for _ in range(2)]
    if not all(untouched for _, untouched in run(_averages, 2, answer, values)):
        raise Wrong("input-changed", expected="the same values as before", got="other values")


size = Exercise(
    "0.2",
    "message_bytes",
    points=1,
    parameters=("tensor",),
    hints=[
        "Two things decide: how many values there are, and how much one value takes.",
        "A tensor knows both: look for `numel` and `element_size` in its documentation.",
        "Multiply the number of values by the bytes that one value of this dtype takes.",
    ],
    misconceptions={
        "values-not-bytes": "You count the values. A value takes more than one byte: ask the "
        "tensor how many.",
        "four-bytes": "You take 4 bytes a value. That is float32; other dtypes take 1, 2 or 8.",
        "python-object": "`sys.getsizeof` measures the Python object, not the values of the tensor.",
        "one-value": "You return the bytes of one value: count the values too.",
        "dimensions-added": "You add the sizes of the dimensions. Multiplied they give the number "
        "of values.",
        "first-dimension": "You count the rows only: `len` and `shape[0]` leave out the other "
        "dimensions.",
        "bits-not-bytes": "You count bits: 8 of them are one byte.",
        "whole-storage": "You count the memory behind the tensor. A view sends only its own "
        "values, not those of the tensor that it looks into.",
    },
)


@size.requires("a float32 tensor of any shape")
def _(answer, draw):
    tensor = draw.tensor(draw.integer(2, 6), draw.integer(2, 6), 3)
    _check_size(answer, tensor)


@size.requires("dtypes of 1, 2 and 8 bytes")
def _(answer, draw):
    for dtype in (torch.uint8, torch.bfloat16, torch.float64):
        _check_size(answer, torch.zeros(draw.integer(2, 6), 5, dtype=dtype))


@size.requires("a view of a larger tensor")
def _(answer, draw):
    _check_size(answer, draw.tensor(8, 10)[2:5, : draw.integer(3, 7)])


@size.requires("a single number and an empty tensor")
def _(answer, draw):
    _check_size(answer, torch.tensor(1.0))
    _check_size(answer, torch.zeros(0, 4))


def _check_size(answer, tensor):
    values, each = tensor.numel(), tensor.element_size()
    rows, added = len(tensor) if tensor.dim() else 1, sum(tensor.shape)
    expect(
        answer(tensor),
        values * each,
        what=f"the size of {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}",
        likely={
            "values-not-bytes": values,
            "one-value": each,
            "first-dimension": lambda got: got in (rows, rows * each),
            "dimensions-added": lambda got: got in (added, added * each),
            "bits-not-bytes": 8 * values * each,
            "four-bytes": 4 * values,
            "whole-storage": tensor.untyped_storage().nbytes(),
            "python-object": sys.getsizeof(tensor),
        },
    )


pass_on = Exercise(
    "0.3",
    "pass_on",
    points=2,
    parameters=("value",),
    hints=[
        "`send` waits until the other side takes the bytes. What if every rank begins with it?",
        (
            "One rank has to receive first. The neighbours' numbers go round: after the last rank "
            "comes rank 0, and the remainder operator `%` does that."
        ),
        (
            "Let rank 0 receive before it sends, and all others send before they receive. With one "
            "rank there is nobody to send to: return a copy."
        ),
    ],
    misconceptions={
        "all-send-first": "Somebody waits in a send or a receive that nobody answers. If all "
        "ranks begin with `send`, nobody receives: let one rank receive first.",
        "wrong-direction": "The values travel the wrong way round: rank 0 sends to rank 1, and "
        "receives from the last.",
        "own-value": "You return the value that the rank already had: return what was received.",
        "sends-to-itself": "With one rank there is nobody to send to. Return a copy of the value.",
        "no-wrap": "Rank 0 still has its own value: after the last rank comes rank 0.",
        "broadcast": "Every rank has rank 0's value. Each needs that of its own predecessor.",
        "input-changed": "The tensor that was handed in has changed: receive into a tensor of "
        "your own.",
        "not-a-copy": "With one rank you return the tensor that was handed in, not a copy of it.",
    },
    failures={"timeout": "all-send-first"},
)


def _passed(rank, answer, values):
    value = values[rank].to(device())
    untouched = value.clone()
    result = answer(value)
    return result, torch.equal(value, untouched), result is not value


def _check_pass(answer, values):
    ranks = len(values)
    results = [result for result, _, _ in run(_passed, ranks, answer, values)]
    for result in results:
        expect_type(result, torch.Tensor)
    expect(
        results,
        [values[rank - 1] for rank in range(ranks)],
        each="rank",
        likely={
            "own-value": values,
            "broadcast": [values[0]] * ranks,
            "no-wrap": [values[0], *values[:-1]],
            "wrong-direction": [values[(rank + 1) % ranks] for rank in range(ranks)],
        },
    )


@pass_on.requires("three ranks: each gets its predecessor's tensor")
def _(answer, draw):
    _check_pass(answer, [draw.tensor(4) for _ in range(3)])


@pass_on.requires("two ranks, tensors of two dimensions", needs_earlier=True)
def _(answer, draw):
    _check_pass(answer, [draw.tensor(2, 3) for _ in range(2)])


@pass_on.requires("the tensor that was handed in is unchanged", needs_earlier=True)
def _(answer, draw):
    values = [draw.tensor(4) for _ in range(2)]
    if not all(untouched for _, untouched, _ in run(_passed, 2, answer, values)):
        raise Wrong("input-changed", expected="the same values as before", got="other values")


@pass_on.requires(
    "one rank gets a copy of its own tensor",
    failures=dict.fromkeys(("RuntimeError", "ValueError", "timeout"), "sends-to-itself"),
)
def _(answer, draw):
    value = draw.tensor(4)
    [(result, _, copied)] = run(_passed, 1, answer, [value])
    expect(result, value)
    if not copied:
        raise Wrong("not-a-copy", expected="a tensor of its own", got="the tensor handed in")
