"""Exercise 0.1, `average_over_ranks`: what it asks for, and how it is checked."""

import torch

from course_exercises.authoring import Exercise, OwnPart, Wrong, expect, expect_type, run, same
from course_exercises.authoring.ranks import come_late, following
from course_utils.hardware import device

average = Exercise(
    "0.1",
    "average_over_ranks",
    points=1,
    minutes=3,
    kind="first",
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
        "fixed-number": "You divide by the same number however many ranks there are: ask for the "
        "world size.",
        "divided-by-rank": "You divide by the number that a rank has, and rank 0 has 0. Divide by how "
        "many ranks there are: the world size.",
        "rounded-down": "`//` drops what is behind the point: divide with `/`.",
        "middle-not-mean": "You take the middle: of the sorted values, or between the smallest and the "
        "largest. The mean is the sum over all ranks, divided by their number.",
        "shape-lost": "The values are right and their shape is gone: return a tensor of the shape of "
        "`value`.",
        "another-dtype": "On the way your values have another dtype. The result is float32 as `value` is, "
        "and as exact.",
        "from-before": "The second call returns what the first one had found. Compute anew in every "
        "call: a loop calls with other values each time.",
        "mean-of-values": "You make one number of all values. The mean is over the ranks, for each "
        "place of the tensor by itself, so the shape stays.",
        "number-not-tensor": "Return a tensor of the same shape. `.item()` and `float()` make a plain "
        "number of it.",
        "one-rank-returns": "Some ranks end without a `return`. Every rank has to return the mean.",
        "broadcast": "You hand out rank 0's value, and the others' are lost. A sum needs all of "
        "them: `all_reduce`.",
        "one-buffer": "All gathered values are the last rank's: `[tensor] * n` is n times the same "
        "tensor. Make a new one for each rank.",
        "indexes-ranks": "`value` is this rank's own tensor. What the other ranks hold is not in it: "
        "it has to be sent.",
        "rank-0-only": "Only rank 0 has the mean. `reduce` gives the sum to one rank, `all_reduce` "
        "to all.",
        "input-changed": "The tensor that was handed in has changed: `all_reduce` works in place, "
        "so give it a copy.",
        "not-waited": "You read the result before it has arrived: with `async_op=True` a call comes "
        "back at once. Call `wait()` on what it returns.",
        "uses-none": "`all_reduce` returns nothing: the sum stands in the tensor that you gave it.",
        "only-rank-0-calls": "A collective is a meeting: every rank has to call it, or the ranks "
        "that do wait for ever.",
    },
    failures={
        "timeout": "only-rank-0-calls",
        "'NoneType' and 'int'": "uses-none",
        "IndexError": "indexes-ranks",
    },
)


def _averages(rank, answer, own):
    value = own.to(device())
    untouched = value.clone()
    come_late(rank)
    with following() as sent:
        result = answer(value)
    return result, torch.equal(value, untouched), sent.unwaited


def _check_average(answer, values):
    """Run the answer with one value a rank and compare what every rank got with the mean."""
    ranks = len(values)
    reports = run(_averages, ranks, answer, OwnPart(values))
    results = [result for result, _, _ in reports]
    if any(unwaited for _, _, unwaited in reports):
        raise Wrong("not-waited", expected="a result that has arrived", got="nobody waited for it")
    if any(result is None for result in results) and any(map(torch.is_tensor, results)):
        raise Wrong("one-rank-returns", expected="a tensor from every rank", got="None from some")
    for result in results:
        expect_type(
            result, torch.Tensor, likely="number-not-tensor" if result is not None else None
        )
    total = sum(values)
    mean = total / ranks
    middles = torch.stack(values).quantile(0.5, dim=0), torch.stack(values).median(dim=0).values
    halfway = (torch.stack(values).amax(dim=0) + torch.stack(values).amin(dim=0)) / 2
    one_number = torch.full_like(mean, mean.mean())
    expect(
        results,
        [mean] * ranks,
        each="rank",
        likely={
            "sum-not-mean": [total] * ranks,
            "no-communication": [value / ranks for value in values],
            "own-value": values,
            "fixed-number": lambda got: any(same(got, [total / n] * ranks) for n in (2, 3)),
            "divided-by-rank": [total / rank for rank in range(ranks)],
            "rounded-down": [total // ranks] * ranks,
            "mean-of-values": lambda got: (
                all(result.dim() == 0 for result in got) or same(got, [one_number] * ranks)
            ),
            "shape-lost": lambda got: same([g.flatten() for g in got], [mean.flatten()] * ranks),
            "another-dtype": lambda got: same([g.float() for g in got], [mean] * ranks, 0.01),
            "broadcast": lambda got: any(same(got, [values[0] / n] * ranks) for n in (1, ranks)),
            "one-buffer": [values[-1]] * ranks,
            "rank-0-only": [mean, *results[1:]],
            "middle-not-mean": lambda got: any(
                same(got, [middle] * ranks) for middle in (*middles, halfway)
            ),
        },
    )


@average.requires("three ranks that hold 2, 4 and 9 all get 5")
def three_ranks_that_hold_2(answer, draw):
    _check_average(answer, [torch.tensor([value]) for value in (2.0, 4.0, 9.0)])


@average.requires("any shape and any number of ranks give the mean", needs_earlier=True)
def any_shape_and_any_number_of_ranks_give(answer, draw):
    shape = draw.integer(2, 5), draw.integer(2, 5)
    for ranks in (draw.integer(4, 6), 2, 1):
        _check_average(answer, [draw.tensor(*shape) for _ in range(ranks)])


@average.requires("the tensor that was handed in is unchanged", needs_earlier=True)
def the_tensor_that_was_handed_in_is_unchanged(answer, draw):
    length = draw.integer(3, 9)
    values = [draw.tensor(length) for _ in range(2)]
    if not all(untouched for _, untouched, _ in run(_averages, 2, answer, OwnPart(values))):
        raise Wrong("input-changed", expected="the same values as before", got="other values")
    steps = [[draw.tensor(length) for _ in range(2)] for _ in range(2)]  # the values of both ranks
    again = run(_averages_twice, 2, answer, OwnPart([*zip(*steps)]))
    means = [sum(values) / 2 for values in steps]
    likely = {"from-before": [means[0]] * 2}
    expect(again, [means[1]] * 2, each="rank", what="the second call", likely=likely)


def _averages_twice(rank, answer, own):
    """What the second of two calls gives, with another value each."""
    return [answer(value.to(device())) for value in own][-1]
