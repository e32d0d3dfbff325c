"""Exercise 3.1, `average_gradients`: what it asks for, and how it is checked."""

from dataclasses import dataclass

import torch
from torch import nn

from course_exercises.authoring import Exercise, Wrong, expect, run, same
from course_exercises.authoring.ranks import come_late, following
from course_exercises.chapters.ch03.shared import (
    NEARLY,
    Frozen,
    Gradients,
    Plan,
    Tied,
    Unused,
    drawn_plan,
    gradients,
    mean_of,
    must_have_waited,
    plain,
    scaled,
    state,
    sum_of,
    zeros_for_none,
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


def _some_local(got: list[Gradients], local: list[Gradients], mean: Gradients) -> bool:
    """Whether every gradient is either the mean or, for some parameters, the rank's own."""
    return all(
        same(g[name], mean[name]) or same(g[name], own[name])
        for g, own in zip(got, local, strict=True)
        for name in mean
    )


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
        "sum-not-mean": "Your gradients are world_size times too large: all_reduce adds, and the "
        "division is missing.",
        "divided-twice": "Your gradients are world_size times too small: they are divided twice.",
        "nothing-sent": "Each rank has divided its own gradient by the world size and heard nothing "
        "of the others. Dividing alone averages nothing: the sum over the ranks is missing.",
        "not-waited": "A rank has used a result before it was there: with `async_op=True`, call "
        "`wait()` on what all_reduce returns before you touch the tensor.",
        "unchanged": "Each rank still has its own gradients. Either nothing was averaged, or the "
        "average was not written back into `parameter.grad`.",
        "added-to-own": "The mean was added to this rank's own gradient, which is still there. Let it take "
        "the gradient's place: `parameter.grad.copy_(mean)`.",
        "parameters-averaged": "The parameters have changed. Average their gradients, "
        "`parameter.grad`: the optimizer moves the parameters later.",
        "rank-0s-gradient": "All ranks have rank 0's gradient. That is a broadcast: the other ranks' "
        "data are lost.",
        "one-rank-only": "Only one rank has the mean. `reduce` delivers to one rank, `all_reduce` "
        "to all of them.",
        "left-out": "Some parameters' gradients are averaged, others are still the rank's own: does "
        "your loop leave some out, or end early?",
        "fixed-two": "You divide by 2. That is right on two ranks only: ask `dist.get_world_size()`.",
        "in-place": "`dist.all_reduce` works in place and returns None. Do not assign what it returns "
        "to `parameter.grad`, and do not compute with it.",
        "device-count": "Your gradients are divided by zero. `torch.cuda.device_count()` counts the "
        "GPUs of this machine; the number of ranks is `dist.get_world_size()`.",
        "one-tensor-listed": "All ranks have the last rank's gradient: `[tensor] * n` is one tensor, "
        "listed n times, and what arrived last has overwritten the rest. Make n tensors.",
        "two-ranks-only": "Right on two ranks only: of three, one has no partner. `all_reduce` works "
        "for any number of ranks.",
        "not-every-rank": "A collective is called by every rank or by none. Here a rank did not "
        "call it, and the others wait: look for an `if` or a `return` that depends on the rank.",
        "none-gradient": "A frozen or unused parameter has no gradient: its `.grad` is None. Skip "
        "it, on every rank alike.",
        "first-decides": "Your function ends where the first parameter has no gradient. First layers are "
        "often frozen: skip such a parameter and go on.",
        "rounded": "Your means are only nearly right: on the way the gradients have a smaller dtype.",
        "zeros-for-none": "A parameter without a gradient has received one. A `.grad` of zeros is "
        "not the same as None: weight decay and momentum would move the parameter.",
        "tied-twice": "A tied parameter, one tensor in two layers, was averaged once per layer. "
        "`model.parameters()` yields it once; a walk over the layers meets it twice.",
    },
    failures={
        "there is no rank": "two-ranks-only",
        "timeout": "not-every-rank",
        "mismatch": "not-every-rank",
    },
)


@dataclass(frozen=True)
class _Averaged:
    local: Gradients
    got: Gradients
    moved: bool  # have the parameters changed?
    silent: bool  # was nothing sent?
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
    return _Averaged(local, got, moved, not followed.dtypes, sent, followed.unwaited)


def _check_average(answer, draw, make, ranks, likely=None, plan=None) -> list[_Averaged]:
    """Compares what every rank holds afterwards with the mean, and returns the ranks' reports.
    `likely` maps a misconception to what it makes of the local gradients: a function of
    (local, got)."""
    reports = run(_averaged, ranks, answer, make, plan or drawn_plan(draw))
    must_have_waited([r.unwaited for r in reports])
    local, got = [r.local for r in reports], [r.got for r in reports]
    mean = mean_of(local)
    mistakes = {
        "parameters-averaged": any(r.moved for r in reports),
        **{slug: mistake(local, got) for slug, mistake in (likely or {}).items()},
        "sum-not-mean": [sum_of(local)] * ranks,
        "unchanged": local,
        "added-to-own": [sum_of([own, mean]) for own in local],
        "in-place": all(g is None for own in got for g in own.values()),
        "device-count": lambda got: (
            not all(g.isfinite().all() for own in got for g in own.values() if g is not None)
        ),
        "nothing-sent": all(r.silent for r in reports) and [scaled(g, 1 / ranks) for g in local],
        "not-waited": ranks > 1 and same(got[0], scaled(local[0], 1 / ranks)),
        "fixed-two": [scaled(sum_of(local), 1 / 2)] * ranks,
        "divided-twice": [scaled(mean, 1 / ranks)] * ranks,
        "rank-0s-gradient": [local[0]] * ranks,
        "one-tensor-listed": [local[-1]] * ranks,
        "one-rank-only": lambda got: any(same(g, mean) for g in got),
        "left-out": lambda got: _some_local(got, local, mean),
        "rounded": lambda got: same(got, [mean] * ranks, NEARLY),
    }
    expect(got, [mean] * ranks, each="rank", likely=mistakes)
    if mistakes["parameters-averaged"]:
        raise Wrong(
            "parameters-averaged", expected="the same parameters as before", got="other values"
        )
    return reports


@averaging.requires(
    "two ranks end with the mean of their gradients",
    # here every parameter has a gradient: what is None came from all_reduce
    failures={"'NoneType'": "in-place", "ZeroDivisionError": "device-count"},
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
    for make in (Frozen, Unused, _FrozenFirst):
        likely = {
            "zeros-for-none": lambda local, got: zeros_for_none(got, local),
            "first-decides": lambda local, got, make=make: make is _FrozenFirst and local,
        }
        _check_average(answer, draw, make, draw.integer(2, 4), likely)


@averaging.requires("a tied parameter is averaged once")
def a_tied_parameter_is_averaged_once(answer, draw):
    def twice(local, got):
        mean = mean_of(local)
        return [{**mean, "first.weight": mean["first.weight"] / len(local)}] * len(local)

    ranks, plan = draw.integer(2, 4), drawn_plan(draw)
    tied = _check_average(answer, draw, Tied, ranks, {"tied-twice": twice}, plan)
    # a mean averaged again is the same mean: only what was sent tells
    untied = _check_average(answer, draw, _Untied, ranks, plan=plan)
    if 0 < sum(report.sent for report in untied) <= sum(report.sent for report in tied):
        got = "as many numbers sent as if the two layers had a weight each"
        raise Wrong("tied-twice", expected="the shared weight's gradient sent once", got=got)
