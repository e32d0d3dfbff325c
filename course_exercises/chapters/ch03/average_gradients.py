"""Exercise 3.1, `average_gradients`: what it asks for, and how it is checked."""

from dataclasses import dataclass

import torch
from torch import nn

from course_exercises.authoring import Exercise, Wrong, expect, run, same, signs
from course_exercises.authoring.ranks import come_late, following, must_have_waited
from course_exercises.authoring.vocabulary import times, total
from course_exercises.chapters.ch03.shared import (
    Frozen,
    Gradients,
    Plan,
    Tied,
    Unused,
    drawn_plan,
    gradients,
    plain,
    state,
)


class _FrozenFirst(Frozen):
    """The first layer is frozen too, as in a model that is fine-tuned."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.first.requires_grad_(False)


class _Untied(Tied):
    """The same layers, each with a weight of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.last.weight = nn.Parameter(self.first.weight.detach().clone())


averaging = Exercise(
    "3.1",
    "average_gradients",
    points=2,
    minutes=10,
    kind="first",
    parameters=("model",),
    hints=[
        (
            "After `backward()`, every `parameter.grad` is an ordinary tensor. Which collective gives "
            "every rank the same result, made from all ranks' tensors?"
        ),
        (
            "`dist.all_reduce` works in place and adds. A mean is a sum divided by the number of "
            "those who contributed."
        ),
        (
            "Go through `model.parameters()`, which yields a tied parameter once. Skip those whose "
            "`.grad` is None. All-reduce the gradient, then divide it in place by the world size."
        ),
    ],
    misconceptions={
        "first-decides": "Your function ends where the first parameter has no gradient. First layers are often "
        "frozen: skip such a parameter and go on.",
    },
    things="gradients",
    failures={
        "there is no rank": "two-ranks",
        "timeout": "not-every-rank",
        "mismatch": "not-every-rank",
    },
)


@dataclass(frozen=True)
class _Averaged:
    local: Gradients
    got: Gradients
    moved: bool  # have the parameters changed?
    sent: int  # numbers handed over, in all calls of Python together
    unwaited: list[str]  # calls that nobody waited for


def _averaged(rank, answer, make, plan: Plan) -> _Averaged:
    model = plan.build(make)
    torch.manual_seed(plan.seed + 1 + rank)
    model(plan.batch()).square().sum().backward()
    local, before = gradients(model), state(model)
    with following() as followed:
        come_late(rank)
        answer(model)
        got = gradients(model)
        payloads = [t for c in followed.calls if c.kind != "recv" for t in c.payload]
        sent = sum(tensor.numel() for tensor in payloads)
    moved = any(not torch.equal(tensor, before[k]) for k, tensor in model.state_dict().items())
    return _Averaged(local, got, moved, sent, followed.unwaited)


def _check_average(answer, draw, make, ranks, likely=None, plan=None) -> list[_Averaged]:
    """Compares what every rank holds afterwards with the mean, and returns the ranks' reports.
    `likely` maps a mistake to a function of (got, the ranks' own gradients)."""
    reports = run(_averaged, ranks, answer, make, plan or drawn_plan(draw))
    must_have_waited([r.unwaited for r in reports])
    if any(r.moved for r in reports):
        raise Wrong("parameters-changed", expected="the same parameters as before", got="others")
    local, got = [r.local for r in reports], [r.got for r in reports]
    mean = [times(total(local), 1 / ranks)] * ranks
    own = {slug: made(got, local) for slug, made in (likely or {}).items()}
    expect(got, mean, each="rank", likely=own | signs(local, mean))
    return reports


@averaging.requires(
    "two ranks end with the mean of their gradients",
    # here every parameter has a gradient: what is None came from all_reduce
    failures={"'NoneType'": "in-place", "ZeroDivisionError": "not-finite"},
)
def two_ranks_end_with_the_mean_of_their(answer, draw):
    _check_average(answer, draw, plain, 2)


@averaging.requires("three ranks do, and one rank keeps its own")
def three_ranks_do(answer, draw):
    for ranks in (3, 1):
        _check_average(answer, draw, plain, ranks)


@averaging.requires(
    "a frozen or unused parameter keeps no gradient",
    failures={"TypeError": "none-gradient", "AttributeError": "none-gradient"},
)
def a_frozen_or_unused_parameter_keeps_no_gradient(answer, draw):
    first = {"first-decides": same}
    for make, likely in ((Frozen, {}), (Unused, {}), (_FrozenFirst, first)):
        _check_average(answer, draw, make, draw.integer(2, 4), likely)


def _first_divided_again(got, local) -> bool:
    mean = times(total(local), 1 / len(local))
    tied = "first.weight"
    return same(got, [{**mean, tied: mean[tied] / len(local)}] * len(local))


@averaging.requires("a tied parameter is averaged once")
def a_tied_parameter_is_averaged_once(answer, draw):
    ranks, plan = draw.integer(2, 4), drawn_plan(draw)
    twice = {"tied-twice": _first_divided_again}
    tied = _check_average(answer, draw, Tied, ranks, twice, plan)
    # a mean averaged again is the same mean: only what was sent tells
    untied = _check_average(answer, draw, _Untied, ranks, plan=plan)
    if 0 < sum(report.sent for report in untied) <= sum(report.sent for report in tied):
        got = "as many numbers sent as if the two layers had a weight each"
        raise Wrong("tied-twice", expected="the shared weight's gradient sent once", got=got)
