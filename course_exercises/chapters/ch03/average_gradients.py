"""Exercise 3.1, `average_gradients`: what it asks for, and how it is checked."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_exercises.authoring import Exercise, Wrong, expect, run, same, signs
from course_exercises.authoring.ranks import (
    Sent,
    come_late,
    following,
    must_have_sent,
    must_have_waited,
)
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


class _SomeUsed(nn.Module):
    """Between two layers one more for each entry of `users`: the ranks whose batches take the way through it."""

    def __init__(self, users: tuple[tuple[int, ...], ...], width: int) -> None:
        super().__init__()
        self.users = users
        self.first = nn.Linear(width, width)
        self.between = nn.ModuleList(nn.Linear(width, width) for _ in users)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, ranks in zip(self.between, self.users, strict=True):
            if dist.get_rank() in ranks:
                x = layer(x.tanh())
        return self.last(x.tanh())


class _Untied(Tied):
    """The same layers, each with a weight of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.last.weight = nn.Parameter(self.first.weight.detach().clone())


averaging = Exercise(
    "3.1",
    "average_gradients",
    points=2,
    minutes=15,
    kind="first",
    parameters=("model",),
    hints=[
        (
            "After `backward()`, every `parameter.grad` is an ordinary tensor, or None. Which collective "
            "gives every rank the same result, made from all ranks' tensors?"
        ),
        (
            "`dist.all_reduce` works in place and adds. A mean is a sum divided by the number of all "
            "ranks, also of those that add nothing. Every rank has to make the same calls: how does a "
            "rank learn that another one has a gradient where it has none?"
        ),
        (
            "Go through `model.parameters()`, which yields a tied parameter once. All-reduce a number "
            "first: 1 where this rank has a gradient, 0 where it has none. If the sum is 0, all ranks "
            "skip the parameter. Otherwise zeros take the place of a missing gradient; all-reduce it, "
            "then divide it in place by the world size."
        ),
    ],
    misconceptions={
        "first-decides": "Your function ends where the first parameter has no gradient. First layers are often "
        "frozen: skip such a parameter and go on.",
        "mean-of-users": "You divide by the number of ranks that have the gradient. A rank that has none counts as "
        "zero, so the sum is divided by the number of all ranks.",
        "users-only": "The ranks that had a gradient have the mean, and the others still have none. All ranks have to "
        "end with the same gradients, since otherwise their copies of the model part.",
        "ranks-disagree": "A parameter is skipped although some rank has a gradient of it. If only the ranks without one skip "
        "it, a collective adds gradients of different parameters, or a rank waits for ever. Let the ranks agree first, "
        "in a call that all of them make: does any rank have a gradient of it? Where one has, zeros take the place of "
        "those that are missing.",
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
    numbers: int  # numbers handed over, in all calls of Python together
    sent: Sent


def _averaged(rank, answer, make, plan: Plan) -> _Averaged:
    model = plan.build(make)
    torch.manual_seed(plan.seed + 1 + rank)
    model(plan.batch()).square().sum().backward()
    local, before = gradients(model), state(model)
    with following() as sent:
        come_late(rank)
        answer(model)
        got = gradients(model)
        payloads = [t for c in sent.calls if c.kind != "recv" for t in c.payload]
        numbers = sum(tensor.numel() for tensor in payloads)
    moved = any(not torch.equal(tensor, before[k]) for k, tensor in model.state_dict().items())
    return _Averaged(local, got, moved, numbers, sent)


def _check_average(
    answer, draw, make, ranks, likely=None, plan=None, otherwise=None
) -> list[_Averaged]:
    """Compares what every rank holds afterwards with the mean, and returns the ranks' reports.
    `likely` maps a mistake to a function of (got, the ranks' own gradients); `otherwise` is the one
    where no other fits."""
    reports = run(_averaged, ranks, answer, make, plan or drawn_plan(draw))
    must_have_waited([r.sent.unwaited for r in reports])
    if any(r.moved for r in reports):
        raise Wrong("parameters-changed", expected="the same parameters as before", got="others")
    local, got = [r.local for r in reports], [r.got for r in reports]
    mean = [times(total(local), 1 / ranks)] * ranks
    own = {slug: made(got, local) for slug, made in (likely or {}).items()}
    usual = signs(local, mean)
    if otherwise:
        del usual["left-out"]  # what is left out there has a better name
        usual[otherwise] = True
    expect(got, mean, each="rank", likely=own | usual)
    must_have_sent([r.sent for r in reports])
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
    if 0 < sum(report.numbers for report in untied) <= sum(report.numbers for report in tied):
        got = "as many numbers sent as if the two layers had a weight each"
        raise Wrong("tied-twice", expected="the shared weight's gradient sent once", got=got)


def _mean_of_users(local: list[Gradients]) -> list[Gradients]:
    """What the ranks have where the sum is divided by the number of ranks that have a gradient."""
    sums = total(local)
    counts = {name: sum(own[name] is not None for own in local) for name in sums}
    return [{name: times(sums[name], 1 / max(1, counts[name])) for name in sums}] * len(local)


def _only_for_users(local: list[Gradients]) -> list[Gradients]:
    """What the ranks have where a mean arrives only where a gradient was."""
    mean = times(total(local), 1 / len(local))
    return [{k: None if v is None else mean[k] for k, v in own.items()} for own in local]


@averaging.requires(
    "a gradient that only some ranks have counts as zero on the others",
    failures=dict.fromkeys(("timeout", "mismatch"), "ranks-disagree"),
    needs_earlier=True,
)
def a_gradient_that_only_some_ranks_have(answer, draw):
    likely = {
        "mean-of-users": lambda got, local: same(got, _mean_of_users(local)),
        "users-only": lambda got, local: same(got, _only_for_users(local)),
    }
    ranks = draw.integer(3, 4)
    # as many gradients on each rank, of different parameters; then one that a single rank has
    for users in (((0, 2), (1, 3), ()), ((0,),), ((ranks - 1,),)):
        make = partial(_SomeUsed, users)
        _check_average(answer, draw, make, ranks, likely, otherwise="ranks-disagree")
