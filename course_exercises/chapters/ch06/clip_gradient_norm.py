"""Exercise 6.6, `clip_gradient_norm`: what it asks for, and how it is checked."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, OwnPart, Wrong, expect, expect_type, run, same
from course_exercises.authoring.ranks import come_late, following
from course_exercises.chapters.ch06.shared import (
    HANGS,
    NOT_WAITED,
    TWO_RANKS,
    check_waited,
    only_for_two,
)
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
        "not-waited": NOT_WAITED,
        "zero-here": "A rank that has no gradients returns 0. The norm is that of the whole model, and the "
        "same number on every rank, also on one that has nothing to scale.",
        "local-norm": "Each rank computes the norm of its own gradients. The ranks then scale by "
        "different factors: add the squares of the shards over the ranks.",
        "replicated-per-rank": "The replicated gradients count once per rank: they are in every "
        "rank's sum. Add their squares after the all-reduce.",
        "replicated-left-out": "The replicated gradients are not in the norm.",
        "largest-norm": "You take the largest of the ranks' norms. Each rank has a part of the model: add "
        "the squares.",
        "one-rank-only": "Only one rank has the whole sum. `reduce` delivers to one rank, `all_reduce` to "
        "all of them.",
        "norms-added": "You add norms. Add their squares, and take the root at the end.",
        "not-rooted": "You return the sum of the squares: the root is missing.",
        "mean-of-squares": "The squares are averaged over the ranks: they are to be added.",
        "clipped-norm": "You return the norm after clipping: asked is the one before.",
        "not-scaled": "The norm is right, and the gradients are as before: scale them in place.",
        "each-value-clamped": "Each value is clamped to the limit on its own. The limit is one for the "
        "norm of all: multiply all gradients by the same factor.",
        "local-factor": "You return the global norm, and scale by a factor of the rank's own norm.",
        "replicated-not-scaled": "The replicated gradients are as before: all gradients are scaled by "
        "the same factor.",
        "shards-not-scaled": "The gradients of the shards are as before: all gradients are scaled "
        "by the same factor.",
        "no-float": "You return a tensor: asked is a Python number, as `.item()` gives it.",
        "needs-contiguous": "A gradient need not lie in memory in the order of its elements, and "
        "`view` then fails: `square().sum()`, `norm()` or `flatten()` take any layout.",
        "scaled-to-one": "The gradients end with norm 1: multiply by max_norm / norm.",
        "upside-down": "The gradients are multiplied by norm / max_norm: they have grown. The factor is "
        "max_norm / norm.",
        "always-scaled": "Gradients below the limit are scaled up to it: leave them alone.",
        "parameters-changed": "The parameters have changed: scale their gradients.",
        "none-gradient": "A parameter without a gradient has `.grad` None: leave it out.",
        "zeros-for-none": "A parameter without a gradient has received one: None stays None.",
        "not-every-rank": "A rank without gradients, or with fewer, makes fewer collective calls, and "
        "the others wait for it. Make one call, on every rank, with zero where there is nothing.",
        "half-precision": "The norm is nearly right: its squares or sums are rounded to half precision "
        "somewhere. Add up in float32.",
        "replaces-gradients": "A `.grad` is another tensor than before. Asked is to scale in place, with "
        "`mul_` or `*=`: a new tensor takes memory at the worst moment, and whoever else holds the old "
        "one, such as DDP with its buckets, does not see it.",
        "not-a-number-hidden": "A gradient is not a number, and your norm is one. Let NaN through: the norm "
        "is where a broken step is noticed.",
        "last-digits": "The ranks' norms differ in their last digits: each adds the same terms in another "
        "order, scales by another factor, and the copies drift apart. An all-reduce gives every rank the "
        "same bits; what you add yourself, add in the order of the ranks.",
        "kept-from-before": "The first call is right and a later one is not: a sum goes on from call to "
        "call. A default argument or a variable outside of the function keeps what is added to it.",
        "limit-of-zero": "A limit of 0 is taken for no limit. It is one like any other: the gradients end as "
        "zeros. In Python 0 counts as False: compare the norm with the limit, and nothing else.",
        "divided-by-limit": "You divide by the limit, or by what is 0 with it. Multiply the gradients by the limit "
        "over the norm instead.",
        "empty-shard": "A shard may have no elements, where a tensor has fewer rows than there are ranks. A "
        "maximum of nothing is an error, a sum of nothing is 0.",
        "zero-norm": "Where all gradients are zero, you divide by a norm of zero.",
        "sum-of-nothing": "Where there are no gradients to add up, Python's `sum` gives the int 0, which is "
        "no tensor, and `torch.stack` fails. Begin with `torch.zeros((), device=hardware.device())`.",
        "two-ranks": TWO_RANKS,
    },
    failures={
        **HANGS,
        "but got <class 'int'>": "sum-of-nothing",
        "'int' object has no attribute": "sum-of-nothing",
        "non-empty TensorList": "sum-of-nothing",
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
    unwaited: list[str]


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
    return _Clipped(norm, own, everywhere, moved, replaced, sent.unwaited)


@dataclass(frozen=True)
class _ClipTask:
    """The gradients of every rank's shards, and those that are the same everywhere."""

    sharded: list[Values]
    replicated: Values

    def norm(self) -> float:
        return math.sqrt(sum(map(_squares, self.sharded)) + _squares(self.replicated))

    def mistaken_norms(self) -> dict[str, list[float]]:
        shards, copies = [_squares(values) for values in self.sharded], _squares(self.replicated)
        ranks, own = len(shards), [math.sqrt(square + copies) for square in shards]
        nothing = [all(g is None for g in (*values, *self.replicated)) for values in self.sharded]
        root = math.sqrt
        return {
            "zero-here": [0.0 if empty else self.norm() for empty in nothing],
            "local-norm": own,
            "replicated-per-rank": [root(sum(shards) + ranks * copies)] * ranks,
            "replicated-left-out": [root(sum(shards))] * ranks,
            "not-rooted": [sum(shards) + copies] * ranks,
            "mean-of-squares": [root(sum(shards) / ranks + copies)] * ranks,
            "largest-norm": [max(own)] * ranks,
        }

    def sums_of_norms(self) -> list[float]:
        shards, copies = [_squares(values) for values in self.sharded], _squares(self.replicated)
        every = [g for values in self.sharded for g in values] + self.replicated
        return [
            sum(math.sqrt(square + copies) for square in shards),
            sum(map(math.sqrt, shards)) + math.sqrt(copies),
            sum(math.sqrt(_squares([g])) for g in every),
            sum(
                math.sqrt(_squares([g]))
                for values in self.sharded
                for g in values + self.replicated
            ),
            math.sqrt(sum(shards)) + math.sqrt(copies),
        ]


def _squares(values: Values) -> float:
    return sum(g.double().square().sum().item() for g in values if g is not None)


def _scaled(values: Values, factor: float) -> Values:
    return [None if g is None else g * factor + 0.0 for g in values]  # 0, not minus 0


def _clamped(values: Values, limit: float) -> Values:
    return [None if g is None else g.clamp(-limit, limit) for g in values]


def _clip_task(draw, ranks: int) -> _ClipTask:
    sharded = [
        [draw.tensor(draw.integer(2, 4), 2), draw.tensor(draw.integer(2, 5))] for _ in range(ranks)
    ]
    return _ClipTask(sharded, [draw.tensor(draw.integer(3, 5)), draw.tensor(2, draw.integer(2, 4))])


def _run(answer, task: _ClipTask, max_norm: float) -> list[_Clipped]:
    ranks = len(task.sharded)
    reports = run(_clipped, ranks, answer, task.sharded, task.replicated, max_norm)
    check_waited([report.unwaited for report in reports])
    return reports


def _check_norms(reports: list[_Clipped], task: _ClipTask, max_norm: float) -> None:
    norm, ranks = task.norm(), len(reports)
    for report in reports:
        expect_type(report.norm, float, likely="no-float" if torch.is_tensor(report.norm) else None)
    likely = {
        **task.mistaken_norms(),
        "norms-added": lambda got: any(same(got, [n] * ranks) for n in task.sums_of_norms()),
        "clipped-norm": [min(norm, max_norm)] * ranks,
        "one-rank-only": lambda got: ranks > 1 and any(same(value, norm) for value in got),
        "zero-norm": lambda got: any(math.isnan(value) for value in got),
        "half-precision": lambda got: same(got, [norm] * ranks, tolerance=0.01),
    }
    expect(
        [report.norm for report in reports],
        [norm] * ranks,
        each="rank",
        what="the norm",
        likely=likely,
    )


def _check_clipped(answer, task: _ClipTask, share: float) -> None:
    """Clips at `share` of the norm, or at 1 where the norm is 0."""
    ranks, norm = len(task.sharded), task.norm()
    max_norm = share * norm if norm else 1.0
    reports = _run(answer, task, max_norm)
    _check_norms(reports, task, max_norm)
    if any(report.moved for report in reports):
        raise Wrong("parameters-changed", expected="parameters as before", got="other values")

    def by(factors: list[float], of_copies: list[float] | None = None) -> list[list[Values]]:
        pairs = zip(task.sharded, factors, of_copies or factors, strict=True)
        return [[_scaled(own, f), _scaled(task.replicated, c)] for own, f, c in pairs]

    factor = min(1.0, share)
    local = [
        min(1.0, max_norm / own) if own else 1.0 for own in task.mistaken_norms()["local-norm"]
    ]
    missing = [[g is None for g in (*own, *task.replicated)] for own in task.sharded]
    likely = {
        "zeros-for-none": lambda got: [[g is None for g in (*a, *b)] for a, b in got] != missing,
        "limit-of-zero": share == 0 and by([1.0] * ranks),
        "not-scaled": share < 1 and by([1.0] * ranks),
        "each-value-clamped": [
            [_clamped(own, max_norm), _clamped(task.replicated, max_norm)] for own in task.sharded
        ],
        "local-factor": by(local),
        "replicated-not-scaled": by([factor] * ranks, [1.0] * ranks),
        "shards-not-scaled": by([1.0] * ranks, [factor] * ranks),
        "scaled-to-one": by([1 / norm] * ranks) if norm else False,
        "upside-down": 0 < share < 1 and by([1 / share] * ranks),
        "always-scaled": by([share] * ranks),
        "zero-norm": norm == 0,
    }
    got = [[report.sharded, report.replicated] for report in reports]
    expect(got, by([factor] * ranks), each="rank", what="the gradients", likely=likely)
    if any(report.replaced for report in reports):
        raise Wrong("replaces-gradients", expected="the same tensors, scaled", got="new tensors")


@clipping.requires("two ranks agree on the norm of the whole model")
def two_ranks_agree_on_the_norm(answer, draw):
    task = _clip_task(draw, 2)
    max_norm = 0.5 * task.norm()
    reports = _run(answer, task, max_norm)
    _check_norms(reports, task, max_norm)


@clipping.requires("gradients above the limit are scaled by one factor")
def gradients_above_the_limit_are_scaled(answer, draw):
    # so low a limit that single values are above it, too
    _check_clipped(answer, _clip_task(draw, 2), draw.number(0.05, 0.15))


@clipping.requires("gradients below the limit stay as they are")
def gradients_below_the_limit_stay_as_they_are(answer, draw):
    _check_clipped(answer, _clip_task(draw, 2), draw.number(1.5, 3.0))


@clipping.requires("three ranks and one; nothing replicated, nothing sharded", needs_earlier=True)
def three_ranks(answer, draw):
    share = draw.number(0.3, 0.7)
    with only_for_two():
        for ranks in (3, 1):
            _check_clipped(answer, _clip_task(draw, ranks), share)
    task = _clip_task(draw, draw.choice([2, 3]))
    _check_clipped(answer, replace(task, replicated=[]), share)
    _check_clipped(answer, replace(task, sharded=[[] for _ in task.sharded]), share)


@clipping.requires(
    "a parameter without a gradient",
    failures={"TypeError": "none-gradient", "AttributeError": "none-gradient"},
)
def a_parameter_without_a_gradient(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    sharded = [[values[0], None] for values in task.sharded]
    _check_clipped(answer, _ClipTask(sharded, [None, *task.replicated]), 0.5)


@clipping.requires("a rank without any gradient of its own", needs_earlier=True)
def a_rank_without_any_gradient_of_its_own(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    sharded = [[None, None], *task.sharded[1:]]
    _check_clipped(answer, replace(task, sharded=draw.sample(sharded, len(sharded))), 0.5)
    nothing_at_all = _ClipTask(draw.sample(sharded, len(sharded)), [None])
    _check_clipped(answer, nothing_at_all, 0.5)


@clipping.requires(
    "gradients of any layout in memory",
    needs_earlier=True,
    failures={
        "view size is not compatible": "needs-contiguous",
        "numel() == 0": "empty-shard",
    },
)
def gradients_of_any_layout_in_memory(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    sharded = [[draw.tensor(3, 4).T, draw.tensor(0, 4), *values] for values in task.sharded]
    replicated = [draw.tensor(4, 3).T, *task.replicated]
    _check_clipped(answer, _ClipTask(sharded, replicated), 0.5)


@clipping.requires("the same number on every rank, step after step", needs_earlier=True)
def the_same_number_on_every_rank(answer, draw):
    ranks = draw.choice([3, 4])
    tasks = [_clip_task(draw, ranks) for _ in range(STEPS)]
    limits = [draw.number(0.5, 1.5) * task.norm() for task in tasks]
    parts = [
        [
            (task.sharded[rank], task.replicated, limit)
            for task, limit in zip(tasks, limits, strict=True)
        ]
        for rank in range(ranks)
    ]
    norms = run(_norms, ranks, answer, OwnPart(parts))
    expected = [[task.norm() for task in tasks]] * ranks
    what, likely = "the norms of the steps", {"kept-from-before": True}
    expect(norms, expected, each="rank", what=what, likely=likely)
    for step, found in enumerate(zip(*norms, strict=True)):
        if len(set(found)) > 1:
            got = f"{min(found)!r} and {max(found)!r} in step {step}"
            raise Wrong("last-digits", expected="the same number on every rank", got=got)


@clipping.requires(
    "a limit of 0", needs_earlier=True, failures={"ZeroDivisionError": "divided-by-limit"}
)
def a_limit_of_0(answer, draw):
    _check_clipped(answer, _clip_task(draw, draw.choice([2, 3])), 0.0)


@clipping.requires("gradients that are all zero", failures={"ZeroDivisionError": "zero-norm"})
def gradients_that_are_all_zero(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    sharded = [_scaled(values, 0.0) for values in task.sharded]
    _check_clipped(answer, _ClipTask(sharded, _scaled(task.replicated, 0.0)), 0.5)


@clipping.requires("a gradient that is not a number", needs_earlier=True)
def a_gradient_that_is_not_a_number(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    task.sharded[draw.integer(0, 1)][0][0, 0] = math.nan
    for report in _run(answer, task, 1.0):
        if not math.isnan(report.norm):
            raise Wrong("not-a-number-hidden", expected="nan", got=report.norm)
