"""Exercise 6.6, `clip_gradient_norm`: what it asks for, and how it is checked."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from course_utils.authoring import Exercise, Wrong, expect, expect_type, run, same
from course_utils.authoring.ranks import come_late
from course_utils.exercises.ch06.shared import HANGS, TWO_RANKS, only_for_two
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


@dataclass(frozen=True)
class _Clipped:
    norm: float
    sharded: Values
    replicated: Values
    moved: bool
    replaced: bool  # is a gradient another tensor than before?


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
    norm = answer(shards, copies, max_norm)
    moved = any(not torch.equal(p, torch.ones_like(p)) for p in shards + copies)
    after = [parameter.grad for parameter in shards + copies]
    replaced = any(
        a is not None and b is not None and a.data_ptr() != b.data_ptr()
        for a, b in zip(after, before, strict=True)
    )
    return _Clipped(norm, [p.grad for p in shards], [p.grad for p in copies], moved, replaced)


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
        root = math.sqrt
        return {
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
    return [None if g is None else g * factor for g in values]


def _clamped(values: Values, limit: float) -> Values:
    return [None if g is None else g.clamp(-limit, limit) for g in values]


def _clip_task(draw, ranks: int) -> _ClipTask:
    sharded = [
        [draw.tensor(draw.integer(2, 4), 2), draw.tensor(draw.integer(2, 5))] for _ in range(ranks)
    ]
    return _ClipTask(sharded, [draw.tensor(draw.integer(3, 5)), draw.tensor(2, draw.integer(2, 4))])


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
    max_norm = share * norm or 1.0
    reports = run(_clipped, ranks, answer, task.sharded, task.replicated, max_norm)
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
def _(answer, draw):
    task = _clip_task(draw, 2)
    max_norm = 0.5 * task.norm()
    reports = run(_clipped, 2, answer, task.sharded, task.replicated, max_norm)
    _check_norms(reports, task, max_norm)


@clipping.requires("gradients above the limit are scaled by one factor")
def _(answer, draw):
    # so low a limit that single values are above it, too
    _check_clipped(answer, _clip_task(draw, 2), draw.number(0.05, 0.15))


@clipping.requires("gradients below the limit stay as they are")
def _(answer, draw):
    _check_clipped(answer, _clip_task(draw, 2), draw.number(1.5, 3.0))


@clipping.requires("three ranks and one; nothing replicated, nothing sharded", needs_earlier=True)
def _(answer, draw):
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
def _(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    sharded = [[values[0], None] for values in task.sharded]
    _check_clipped(answer, _ClipTask(sharded, [None, *task.replicated]), 0.5)


@clipping.requires("a rank without any gradient of its own", needs_earlier=True)
def _(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    sharded = [[None, None], *task.sharded[1:]]
    _check_clipped(answer, replace(task, sharded=draw.sample(sharded, len(sharded))), 0.5)
    nothing_at_all = _ClipTask(draw.sample(sharded, len(sharded)), [None])
    _check_clipped(answer, nothing_at_all, 0.5)


@clipping.requires(
    "gradients of any layout in memory",
    needs_earlier=True,
    failures={"view size is not compatible": "needs-contiguous"},
)
def _(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    sharded = [[draw.tensor(3, 4).T, *values] for values in task.sharded]
    _check_clipped(answer, replace(task, sharded=sharded), 0.5)


@clipping.requires("gradients that are all zero", failures={"ZeroDivisionError": "zero-norm"})
def _(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    sharded = [_scaled(values, 0.0) for values in task.sharded]
    _check_clipped(answer, _ClipTask(sharded, _scaled(task.replicated, 0.0)), 0.5)


@clipping.requires("a gradient that is not a number", needs_earlier=True)
def _(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    task.sharded[draw.integer(0, 1)][0][0, 0] = math.nan
    for report in run(_clipped, len(task.sharded), answer, task.sharded, task.replicated, 1.0):
        if not math.isnan(report.norm):
            raise Wrong("not-a-number-hidden", expected="nan", got=report.norm)
