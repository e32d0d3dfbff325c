"""Exercise 0.1, `average_over_ranks`: what it asks for, and how it is checked."""

import torch

from course_exercises.authoring import (
    Exercise,
    OwnPart,
    Wrong,
    expect,
    expect_from_each,
    run,
    signs,
)
from course_exercises.authoring.ranks import come_late, following, must_have_sent, must_have_waited
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
        "`all_reduce` works in place, so hand in a copy. `dist.get_world_size()` tells how many ranks took part.",
        "Copy the value, let all ranks sum their copies, divide the sum by the number of ranks, and return it.",
    ],
    misconceptions={
        "indexes-ranks": "`value` is this rank's own tensor. What the other ranks hold is not in it: it has to "
        "be sent.",
    },
    failures={
        "timeout": "not-every-rank",
        "'NoneType' and 'int'": "in-place",
        "IndexError": "indexes-ranks",
    },
)


def _averages(rank, answer, own):
    """What the answer gives for each of the rank's values, one call after the other."""
    values = [value.to(device()) for value in own]
    untouched = [value.clone() for value in values]
    come_late(rank)
    with following(sum(value.numel() for value in values)) as sent:
        results = [answer(value) for value in values]
    unchanged = all(map(torch.equal, values, untouched))
    return results, unchanged, sent


def _check_average(answer, *calls):
    """Runs the answer, once for each list of the ranks' values, and compares what every rank got with the
    mean. Returns whether all ranks left what they were handed as it was."""
    reports = run(_averages, len(calls[0]), answer, OwnPart([*zip(*calls)]))
    results, unchanged, sent = zip(*reports, strict=True)
    must_have_waited([each.unwaited for each in sent])
    before = None
    for got, values in zip(zip(*results, strict=True), calls, strict=True):
        expect_from_each(got)
        mean = [sum(values) / len(values)] * len(values)
        expect(list(got), mean, each="rank", likely=signs(values, mean, before))
        before = mean
    must_have_sent(sent)
    return all(unchanged)


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
    calls = [[draw.tensor(length) for _ in range(2)] for _ in range(2)]
    if not _check_average(answer, *calls):
        raise Wrong("input-changed", expected="the same values as before", got="other values")
