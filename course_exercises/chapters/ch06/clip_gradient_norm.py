"""Exercise 6.6, `clip_gradient_norm`: what it asks for, and how it is checked."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from course_exercises.authoring import (
    Exercise,
    OwnPart,
    Wrong,
    expect,
    expect_type,
    run,
    signs,
)
from course_exercises.authoring.ranks import (
    Sent,
    come_late,
    following,
    must_have_sent,
    must_have_waited,
)
from course_exercises.chapters.ch06.shared import HANGS, on_three, only_for_two
from course_utils.hardware import device

clipping = Exercise(
    "6.6",
    "clip_gradient_norm",
    points=2,
    minutes=30,
    kind="core",
    parameters=("sharded", "replicated", "max_norm"),
    hints=[
        (
            "Norms do not add, their squares do. Which squares does a rank have that no other one has, "
            "and which does every rank have?"
        ),
        (
            "All-reduce the sum of the squares of the shards, in one call that every rank makes. Add "
            "the squares of the replicated gradients after it."
        ),
        (
            "Collect the gradients that are not None. Sum their squares for the shards into one "
            "number, zero where there are none; all-reduce it; add those of the copies; take the "
            "root. If it is above the limit, multiply every gradient in place by limit / norm."
        ),
    ],
    misconceptions={
        "local-norm": "Each rank computes the norm of its own gradients. The ranks then scale by "
        "different factors: add the squares of the shards over the ranks.",
        "replicated-per-rank": "The replicated gradients count once per rank: they are in every "
        "rank's sum. Add their squares after the all-reduce.",
        "squares": "Your norm is not that of all gradients before clipping, every shard once and every replicated one "
        "once. Norms do not add, their squares do, and the norm is the root of their sum: add the squares of the shards "
        "over the ranks, in float32, then those of the replicated ones, and take the root.",
        "scaled-otherwise": "The norm is right, and the gradients are not scaled as they should be. Where it is above "
        "the limit, multiply every gradient by one factor, max_norm / norm, in place: all of a rank's shards and all "
        "copies. Gradients with a norm below the limit stay as they are.",
        "nothing-here": "A rank without gradients, or whose shard has no elements, leaves out a call or fails. It makes every call with a 0, and "
        "returns the norm of the whole model. Python's `sum` of nothing is the int 0, which is no tensor; "
        "`torch.stack`, `torch.cat` and a maximum of nothing are errors. Begin with "
        "`torch.zeros((), device=hardware.device())`.",
        "zeros": "A limit of 0 is allowed, and so is a norm of 0. Compare the norm with the limit, and nothing "
        "else, since 0 counts as False; multiply by max_norm / norm only where the norm is larger.",
        "replaces-gradients": "A `.grad` is another tensor than before. Scale in place, with "
        "`mul_` or `*=`: a new tensor takes memory at the worst moment, and whoever else holds the old "
        "one, such as DDP with its buckets, does not see it.",
        "no-float": "Return a Python number, as `.item()` makes it of a tensor.",
        "not-a-number-hidden": "A gradient is not a number, and your norm is one. Let NaN through: the norm "
        "is where a broken step is noticed.",
        "last-digits": "The ranks' norms differ in their last digits: each adds the same terms in another "
        "order, scales by another factor, and the copies drift apart. An all-reduce gives every rank the "
        "same bits; what you add yourself, add in the order of the ranks.",
        "sum-goes-on": "The first call is right and a later one is not: something goes on from call to "
        "call. A default argument or a variable outside of the function keeps what is added to it.",
    },
    things="gradients",
    failures={
        **HANGS,
        "but got <class 'int'>": "nothing-here",
        "'int' object has no attribute": "nothing-here",
        "non-empty": "nothing-here",
    },
)

Values = list[Tensor | None]
STEPS = 40  # in one of four or five, terms added in another order give other last digits


@dataclass(frozen=True)
class _Clipped:
    norm: float
    sharded: Values
    replicated: Values
    moved: bool
    replaced: bool  # is a gradient another tensor than before?
    sent: Sent


def _norms(rank, answer, steps) -> list[float]:
    """What an answer returns for one step's gradients after the other."""
    return [_clipped(0, answer, [own], copies, limit).norm for own, copies, limit in steps]


def _clipped(rank, answer, sharded, replicated, max_norm) -> _Clipped:
    def parameters(gradients: Values) -> list[nn.Parameter]:
        shapes = [3 if g is None else g.shape for g in gradients]
        made = [nn.Parameter(torch.ones(shape, device=device())) for shape in shapes]
        for parameter, gradient in zip(made, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone().to(device())
        return made

    shards, copies = parameters(sharded[rank]), parameters(replicated)
    before = [parameter.grad for parameter in shards + copies]
    come_late(rank)
    with following() as sent:
        norm = answer(shards, copies, max_norm)
    moved = any(not torch.equal(p, torch.ones_like(p)) for p in shards + copies)
    after = [parameter.grad for parameter in shards + copies]
    replaced = any(
        a is not None and b is not None and a.data_ptr() != b.data_ptr()
        for a, b in zip(after, before, strict=True)
    )
    own, everywhere = [p.grad for p in shards], [p.grad for p in copies]
    return _Clipped(norm, own, everywhere, moved, replaced, sent)


@dataclass(frozen=True)
class _Task:
    """The gradients of every rank's shards, and those that are the same everywhere."""

    sharded: list[Values]
    replicated: Values

    @property
    def ranks(self) -> int:
        return len(self.sharded)

    def norm(self, copies: int = 1) -> float:
        """Counts the replicated gradients this often."""
        return math.sqrt(sum(map(_squares, self.sharded)) + copies * _squares(self.replicated))

    def local_norms(self) -> list[float]:
        return [math.sqrt(_squares(own) + _squares(self.replicated)) for own in self.sharded]

    def scaled(self, factor: float) -> list[list[Values]]:
        return [[_scaled(own, factor), _scaled(self.replicated, factor)] for own in self.sharded]


def _squares(values: Values) -> float:
    return sum(g.double().square().sum().item() for g in values if g is not None)


def _scaled(values: Values, factor: float) -> Values:
    return [None if g is None else g * factor + 0.0 for g in values]  # 0, not minus 0


def _task(draw, ranks: int) -> _Task:
    sharded = [
        [draw.tensor(draw.integer(2, 4), 2), draw.tensor(draw.integer(2, 5))] for _ in range(ranks)
    ]
    return _Task(sharded, [draw.tensor(draw.integer(3, 5)), draw.tensor(2, draw.integer(2, 4))])


def _check_norms(answer, task: _Task, max_norm: float) -> list[_Clipped]:
    reports = run(_clipped, task.ranks, answer, task.sharded, task.replicated, max_norm)
    must_have_waited([report.sent.unwaited for report in reports])
    got, expected = [report.norm for report in reports], [task.norm()] * task.ranks
    for number in got:
        expect_type(number, float, likely="no-float" if torch.is_tensor(number) else None)
    no_gradients = [all(g is None for g in (*own, *task.replicated)) for own in task.sharded]
    of_none = [0.0 if none else task.norm() for none in no_gradients]
    likely = {
        "nothing-here": any(no_gradients) and of_none,
        "local-norm": task.local_norms(),
        "replicated-per-rank": [task.norm(copies=task.ranks)] * task.ranks,
        "one-rank-only": signs(got, expected)["one-rank-only"],
        "zeros": task.norm() == 0,
        "squares": True,
    }
    expect(got, expected, each="rank", what="the norm", likely=likely)
    # Who has nothing of its own may know the norm without a call.
    if all(map(_squares, task.sharded)):
        must_have_sent([report.sent for report in reports])
    return reports


def _check_clipped(answer, task: _Task, share: float, slug: str = "scaled-otherwise") -> None:
    """Clips at `share` of the norm, or at 1 where the norm is 0; `slug` is what is wrong otherwise."""
    max_norm = share * task.norm() if task.norm() else 1.0
    reports = _check_norms(answer, task, max_norm)
    if any(report.moved for report in reports):
        raise Wrong("parameters-changed", expected="parameters as before", got="other values")
    got, expected = [[r.sharded, r.replicated] for r in reports], task.scaled(min(1.0, share))
    of_none = signs(task.scaled(1.0), expected)["zeros-for-none"]
    likely = {"zeros-for-none": of_none, slug: True}
    expect(got, expected, each="rank", what="the gradients", likely=likely)
    if any(report.replaced for report in reports):
        raise Wrong("replaces-gradients", expected="the same tensors, scaled", got="new tensors")


@clipping.requires("two ranks agree on the norm of the whole model")
def two_ranks_agree_on_the_norm(answer, draw):
    task = _task(draw, 2)
    _check_norms(answer, task, 0.5 * task.norm())


@clipping.requires("gradients above the limit are scaled by one factor")
def gradients_above_the_limit_are_scaled(answer, draw):
    # so low a limit that single values are above it, too
    _check_clipped(answer, _task(draw, 2), draw.number(0.05, 0.15))


@clipping.requires("gradients below the limit stay as they are")
def gradients_below_the_limit_stay_as_they_are(answer, draw):
    _check_clipped(answer, _task(draw, 2), draw.number(1.5, 3.0))


@clipping.requires("three ranks", failures=on_three(clipping.failures), needs_earlier=True)
def three_ranks(answer, draw):
    with only_for_two():
        _check_clipped(answer, _task(draw, 3), draw.number(0.3, 0.7))


@clipping.requires("one rank; nothing replicated, nothing sharded", needs_earlier=True)
def one_rank_nothing_replicated_nothing_sharded(answer, draw):
    share, task = draw.number(0.3, 0.7), _task(draw, draw.choice([2, 3]))
    _check_clipped(answer, _task(draw, 1), share)
    _check_clipped(answer, replace(task, replicated=[]), share)
    _check_clipped(answer, replace(task, sharded=[[] for _ in task.sharded]), share)


NONE_HERE = {"timeout": "nothing-here", "mismatch": "nothing-here"}


@clipping.requires(
    "a parameter without a gradient",
    failures={**NONE_HERE, "TypeError": "none-gradient", "AttributeError": "none-gradient"},
)
def a_parameter_without_a_gradient(answer, draw):
    task = _task(draw, draw.choice([2, 3]))
    sharded = [[values[0], None] for values in task.sharded]
    _check_clipped(answer, _Task(sharded, [None, *task.replicated]), 0.5)


@clipping.requires("a rank without any gradient of its own", failures=NONE_HERE, needs_earlier=True)
def a_rank_without_any_gradient_of_its_own(answer, draw):
    task = _task(draw, draw.choice([2, 3]))
    sharded = [[None, None], *task.sharded[1:]]
    _check_clipped(answer, replace(task, sharded=draw.sample(sharded, len(sharded))), 0.5)
    nothing_at_all = _Task(draw.sample(sharded, len(sharded)), [None])
    _check_clipped(answer, nothing_at_all, 0.5)


@clipping.requires(
    "gradients of any layout in memory",
    needs_earlier=True,
    failures={"view size is not compatible": "needs-contiguous", "numel() == 0": "nothing-here"},
)
def gradients_of_any_layout_in_memory(answer, draw):
    task = _task(draw, draw.choice([2, 3]))
    sharded = [[draw.tensor(3, 4).T, draw.tensor(0, 4), *values] for values in task.sharded]
    replicated = [draw.tensor(4, 3).T, *task.replicated]
    _check_clipped(answer, _Task(sharded, replicated), 0.5)


@clipping.requires("the same number on every rank, step after step", needs_earlier=True)
def the_same_number_on_every_rank(answer, draw):
    ranks = draw.choice([3, 4])
    tasks = [_task(draw, ranks) for _ in range(STEPS)]
    limits = [draw.number(0.5, 1.5) * task.norm() for task in tasks]
    pairs = list(zip(tasks, limits, strict=True))
    parts = [
        [(t.sharded[rank], t.replicated, limit) for t, limit in pairs] for rank in range(ranks)
    ]
    norms = run(_norms, ranks, answer, OwnPart(parts))
    expected = [[task.norm() for task in tasks]] * ranks
    what, likely = "the norms of the steps", {"sum-goes-on": True}
    expect(norms, expected, each="rank", what=what, likely=likely)
    for step, found in enumerate(zip(*norms, strict=True)):
        if len(set(found)) > 1:
            got = f"{min(found)!r} and {max(found)!r} in step {step}"
            raise Wrong("last-digits", expected="the same number on every rank", got=got)


@clipping.requires("a limit of 0", needs_earlier=True, failures={"ZeroDivisionError": "zeros"})
def a_limit_of_0(answer, draw):
    _check_clipped(answer, _task(draw, draw.choice([2, 3])), 0.0, "zeros")


@clipping.requires("gradients that are all zero", failures={"ZeroDivisionError": "zeros"})
def gradients_that_are_all_zero(answer, draw):
    task = _task(draw, draw.choice([2, 3]))
    sharded = [_scaled(values, 0.0) for values in task.sharded]
    _check_clipped(answer, _Task(sharded, _scaled(task.replicated, 0.0)), 0.5, "zeros")


@clipping.requires("a gradient that is not a number", needs_earlier=True)
def a_gradient_that_is_not_a_number(answer, draw):
    task = _task(draw, draw.choice([2, 3]))
    task.sharded[draw.integer(0, 1)][0][0, 0] = math.nan
    likely = {"not-a-number-hidden": True}
    reports = run(_clipped, task.ranks, answer, task.sharded, task.replicated, 1.0)
    norms = [report.norm for report in reports]
    expect(norms, [math.nan] * task.ranks, each="rank", what="the norm", likely=likely)
