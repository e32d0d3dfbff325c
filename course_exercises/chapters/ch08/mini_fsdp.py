"""Exercise 8.4, `MiniFSDP`: what it asks for, and how it is checked."""

import copy
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from course_exercises.authoring import Exercise, Wrong, expect, run, same
from course_exercises.authoring.ranks import Sent, described, following, waits
from course_exercises.chapters.ch08.shared import (
    drawn_tensor,
    larger_than_itself,
    shard_size,
    shards_of,
)
from course_utils.comm.intercept import hand_work, listening
from course_utils.hardware import device

fsdp = Exercise(
    "8.4",
    "MiniFSDP",
    points=5,
    minutes=240,
    kind="stretch",
    hints=[
        (
            "Begin without overlap: in a layer's pre-forward hook gather its matrices, in its forward hook "
            "free them; in a hook on its output's `grad_fn` gather them again. When all is right, start "
            "things earlier and wait for them later."
        ),
        (
            "For each matrix keep two tensors: the shard, an `nn.Parameter` that takes the matrix's place "
            "in its layer, and the whole, which requires gradients and has memory only while it is "
            "needed. Backward leaves the gradient at the whole; a hook there frees the whole, starts the "
            "reduce-scatter and empties `.grad`."
        ),
        (
            "Write down the layers as their forwards end. When backward arrives at a call, start its gather "
            "if nobody has, then that of the call before it, and only then wait for its own. Before "
            "a reduction starts, finish the one before it: divide by the number of ranks and add the "
            "result to the shard's `.grad`. `finish_gradient_synchronization` does so for the last one, "
            "frees what was prefetched in vain and empties the list."
        ),
    ],
    misconceptions={
        "no-module": "`model.module` is the module that was wrapped: call `super().__init__()`, then keep "
        "the module under that name.",
        "no-broadcast": "The ranks start from different parameters, and each cuts its shard out of its "
        "own. Broadcast rank 0's first.",
        "buffers-forgotten": "The parameters agree and the buffers do not, for instance BatchNorm's running "
        "mean. Broadcast `module.buffers()` too.",
        "not-full": "`full_parameters()` gives every parameter whole, in its own shape, by its name in the "
        "module that was wrapped.",
        "rank-0-alone": "Ranks wait in a collective that the others do not call. A gather needs every rank, "
        "also where only one of them wants the result.",
        "nothing-sharded": "Every rank still has whole matrices among its parameters.",
        "vectors-sharded": "Vectors are not sharded: every rank keeps them as they are.",
        "wrong-shard": "The shard is not this rank's piece of the matrix: laid flat, padded with zeros at the "
        "end, cut into equal pieces.",
        "names-changed": "Parameters or buffers have other names than in the module that was wrapped: a shard "
        "takes the matrix's place in its layer, and nothing is wrapped once more.",
        "dtensor": "These are `fully_shard`'s DTensors, which cut rows. Asked is your own: a plain `nn.Parameter` "
        "for each shard, cut from the flat matrix.",
        "shard-in-forward": "A layer computes with its shard, a vector. While forward runs, the whole matrix has "
        "to stand in its place.",
        "whole-in-parameter": "The parameter still holds the whole matrix when it is gathered again. If you "
        "swap its `.data`, swap it back after forward and after backward. Two tensors, the shard and the "
        "whole, are easier to handle.",
        "gradient-not-there": "There is no gradient yet where it is asked for. A module's full backward hook may "
        "run before its parameters' gradients are complete; `register_post_accumulate_grad_hook` runs after.",
        "a-view": "The shard is a view into the whole, whose memory stays, or is freed under it. "
        "`clone()` it.",
        "remainder-lost": "A matrix whose elements do not divide is cut wrongly: shards have "
        "ceil(elements / world_size) elements, and the last ones are padded.",
        "not-waited": "Nobody waits for a collective: its result may not be there yet.",
        "wrong-output": "Forward gives something else than the module that was wrapped.",
        "sum-not-mean": "The gradients are world_size times too large: they are added and not divided.",
        "divided-twice": "The gradients are world_size times too small: they are divided twice.",
        "own-gradient": "Each rank has its shard of its own gradient: nothing was added over the ranks.",
        "vectors-local": "The gradients of the vectors are this rank's own: average them with an all-reduce, "
        "or the ranks' copies drift apart.",
        "first-step-only": "The first step is right and a later one is not. Gather again in every forward: the "
        "shards have changed. And leave no gradient at the whole matrix.",
        "kept-after-forward": "Whole matrices are still in memory when other layers compute. A Python name "
        "that is gone frees nothing: autograd has kept the tensor for backward. Free its storage.",
        "kept-in-backward": "Backward has left a layer, and its whole matrix is still in memory.",
        "all-at-once": "Backward has hardly begun, and more than the next layer is gathered already.",
        "kept-afterwards": "After `finish_gradient_synchronization()` a whole matrix is still in memory.",
        "gathered-again": "More is gathered than each layer's matrices once for its forward and once for its "
        "backward.",
        "whole-stays-in-layer": "After forward a layer's `weight` is still what you put in front of its "
        "parameter: take it away, so that the shard is seen again.",
        "all-reduced": "The gradient of a matrix goes through an all-reduce, and every rank gets all of it. A "
        "reduce-scatter gives each rank its shard, for half of what goes over the wire.",
        "frozen": "A frozen parameter takes no hook, and gets no gradient; but it is sharded and gathered as "
        "the others are.",
        "tied": "A tied parameter, one tensor in two layers, has become two. There must be one shard, with "
        "the gradient from both layers.",
        "unused": "A layer that was not called has no gradient: `.grad` stays None, and nobody waits for it.",
        "outer-layer": "A module may have parameters of its own and other layers inside it: it is a layer, too, "
        "and its matrices must be there while all of its forward runs.",
        "view-output": "A layer's output is a view, and an operation in place comes after it. The hook on "
        "`output.grad_fn` is then never called: put one on `output._base.grad_fn`, too.",
        "accumulated-lost": "Only the last backward's gradient is there: what was in `.grad` before is lost. "
        "Add to it.",
        "accumulated-wrong": "Two backward passes before one update: `.grad` is the sum of both means. Keep "
        "autograd from adding the gradient of a whole matrix to the shard's `.grad` by itself.",
        "without-gradients": "A forward under `torch.no_grad()` must work, and leave nothing behind.",
        "gathered-in-float32": "The weights are sent in float32 and cast afterwards. Cast the shard, and then "
        "gather: half the bytes.",
        "master-cast": "The parameters themselves were cast. A small update of a bfloat16 number is rounded "
        "away: keep them in float32, and cast for forward only.",
        "summed-in-half": "The gradients are added over the ranks in `compute_dtype`, and rounded after every "
        "sum. Cast them to float32 first.",
        "dtypes-mixed": "Weights and inputs of a layer have different dtypes: cast its floating point inputs, "
        "and its vectors as well.",
        "double-lost": "The module is in double precision, and something of it is not any more: "
        "what `torch.empty`, `torch.zeros` or `float()` makes is float32. Without `compute_dtype` "
        "everything keeps its dtype.",
        "no-prefetch": "The gather of the next layer starts only when backward has got there. Start it when "
        "the layer before begins.",
        "full-aliased": "What `full_parameters()` returns shares its memory with a parameter, and "
        "changes with the next step: `clone()` it.",
        "shapes-of-shards": "`shapes` is not that of the whole parameters. After sharding they are "
        "vectors: note the shapes before.",
        "integers-cast": "An input of whole numbers is cast, and an embedding cannot look up 3.0: "
        "cast what is floating point, and nothing else.",
        "one-communicator": "Gathers and reductions use the same group. With NCCL its calls run "
        "one after the other, so that the next gather waits for the reduction before it: make a "
        "group of its own for each, with `dist.new_group`.",
        "backward-blocks": "Backward stands still while something is sent: use `async_op=True`, and wait when "
        "the result is needed.",
        "reductions-pile-up": "Several reductions are unfinished at the same time, and each holds a whole "
        "gradient. Finish one before the next one starts.",
    },
    failures={
        "timeout": "rank-0-alone",
        "mat2 must be a matrix": "shard-in-forward",
        "mat1 and mat2 shapes": "shard-in-forward",
        "The expanded size": "shard-in-forward",
        "is invalid for input of size": "whole-in-parameter",
        "'NoneType'": "gradient-not-there",
    },
)


class _FrozenMiddle(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(width, hidden), nn.Linear(hidden, 4)
        self.last = nn.Linear(4, 2)
        self.middle.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class _TiedEnds(nn.Module):
    """Two layers with one matrix, of which one is called twice, and another layer between them."""

    CALLS = 4  # of layers whose matrices have width * width elements

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Linear(width, width, bias=bias) for bias in (True, True, False)
        )
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.middle(x)))


class _UnusedLayer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.unused = nn.Linear(width, hidden), nn.Linear(3, 3)
        self.last = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class _OuterLayer(nn.Module):
    """A matrix of its own, used before and after the layers inside."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(width, width))
        self.scale = nn.Parameter(torch.randn(()))
        self.inside = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x @ self.mix) @ self.mix * self.scale


def _plain(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, 4))


def _with_buffers(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 4))


def _uneven(width: int, hidden: int) -> nn.Module:
    last = nn.Linear(hidden, 1, bias=False)
    return nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), last)


class _Folds(nn.Linear):
    """Gives a view: one long list of rows, folded as the input was. (Before PyTorch 2.15, nn.Linear
    itself does that where it has a bias.)"""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def _in_place(width: int, hidden: int) -> nn.Module:
    first, last = _Folds(width, hidden), _Folds(hidden, 4)
    return nn.Sequential(first, nn.ReLU(inplace=True), last, nn.LeakyReLU(inplace=True))


@dataclass(frozen=True)
class _Recipe:
    """A kind of model and its sizes; every rank makes it, each with a seed of its own."""

    kind: Callable[[int, int], nn.Module]
    width: int  # of the inputs
    hidden: int

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.kind(self.width, self.hidden).to(device())


def _recipe(draw, kind: Callable[[int, int], nn.Module], ranks: int) -> _Recipe:
    """Its matrices divide by the number of ranks."""
    return _Recipe(kind, draw.integer(5, 7), ranks * draw.integer(2, 4))


Named = dict[str, Tensor | None]


def _values(module: nn.Module) -> Named:
    """What this rank holds; of a DTensor, which cannot leave the ranks, its part."""
    own = {name: p.detach() for name, p in module.named_parameters()}
    own = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in own.items()}
    return {name: p.clone() for name, p in own.items()}


def _gradients(module: nn.Module) -> Named:
    named = module.named_parameters()
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


@dataclass
class _Started:
    module: Named  # as it came
    buffers: Named
    full: Named  # what full_parameters() gives
    buffers_after: Named
    kept: Named
    too_large: list[str]  # parameters that keep more memory alive than they need
    dtensors: bool  # is one of its parameters a DTensor?
    shapes: dict[str, tuple[int, ...]]
    aliased: list[str]  # of `full`, those in the memory of a parameter


def _started(rank, answer, recipe: _Recipe, seed: int) -> _Started:
    module = recipe.build(seed + rank)
    if any(True for _ in module.buffers()):
        module(torch.randn(9, recipe.width, device=device()))  # moves BatchNorm's buffers
    before, buffers = _values(module), dict(copy.deepcopy(module).named_buffers())
    model = answer(module)
    own = model.module
    too_large = [name for name, p in own.named_parameters() if larger_than_itself(p)]
    full = model.full_parameters()
    dtensors = any(isinstance(p, DTensor) for p in own.parameters())
    buffers_after = dict(own.named_buffers())
    shapes = {name: tuple(shape) for name, shape in getattr(model, "shapes", {}).items()}
    kept, memory = _values(own), _memory_of(own.parameters())
    aliased = [name for name, whole in full.items() if _memory_of([whole]) & memory]
    return _Started(
        before, buffers, full, buffers_after, kept, too_large, dtensors, shapes, aliased
    )


def _memory_of(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if not isinstance(t, DTensor)}


def _shards_of(whole: Named, ranks: int) -> list[Named]:
    """What each rank keeps of parameters, or of their gradients."""

    def kept(value: Tensor | None, rank: int) -> Tensor | None:
        return value if value is None or value.dim() < 2 else shards_of(value, ranks)[rank]

    return [{name: kept(value, rank) for name, value in whole.items()} for rank in range(ranks)]


@fsdp.requires(
    "every rank starts with rank 0's parameters and buffers, and full_parameters() gives them",
    failures={"AttributeError": "no-module", "IndexError": "wrong-shard", "signal": "a-view"},
)
def every_rank_starts_with_rank_0_parameters(answer, draw):
    ranks = draw.choice((2, 3))
    reports = run(_started, ranks, answer, _recipe(draw, _with_buffers, ranks), draw.seed())
    first = reports[0]
    own_cut = [_shards_of(report.module, ranks)[rank] for rank, report in enumerate(reports)]
    pieces = {
        name: torch.cat([cut[name] for cut in own_cut]).view_as(value)
        for name, value in first.module.items()
        if value.dim() > 1
    }
    rows = {  # as fully_shard cuts
        name: torch.cat([r.module[name].chunk(ranks)[rank] for rank, r in enumerate(reports)])
        for name, value in first.module.items()
        if value.dim() > 1 and len(value) % ranks == 0
    }
    likely = {
        "no-broadcast": lambda got: any(
            same(got[0][n], piece) or same(got[0][n], rows[n]) for n, piece in pieces.items()
        ),
        "not-full": lambda got: any(
            set(g) != set(first.module)
            or any(g[n].shape != p.shape for n, p in first.module.items())
            for g in got
        ),
    }
    got = [report.full for report in reports]
    expect(got, [first.module] * ranks, each="rank", what="full_parameters()", likely=likely)
    got = [report.buffers_after for report in reports]
    likely = {
        "names-changed": lambda got: any(set(g) != set(first.buffers) for g in got),
        "buffers-forgotten": True,
    }
    expect(got, [first.buffers] * ranks, each="rank", what="the buffers", likely=likely)


@fsdp.requires("a rank keeps its shard of each matrix, and every vector", needs_earlier=True)
def a_rank_keeps_its_shard_of_each_matrix(answer, draw):
    ranks = draw.choice((2, 3))
    reports = run(_started, ranks, answer, _recipe(draw, _plain, ranks), draw.seed())
    whole = reports[0].module
    matrices = [name for name, value in whole.items() if value.dim() > 1]
    got, expected = [report.kept for report in reports], _shards_of(whole, ranks)
    likely = {
        "names-changed": lambda got: any(set(g) != set(whole) for g in got),
        "dtensor": any(report.dtensors for report in reports),
        "nothing-sharded": lambda got: any(
            g[n].numel() == whole[n].numel() for g in got for n in matrices
        ),
        "vectors-sharded": lambda got: any(
            g[n].shape != whole[n].shape for g in got for n in whole if n not in matrices
        ),
        "wrong-shard": True,
    }
    expect(got, expected, each="rank", likely=likely)
    for report in reports:
        if report.too_large:
            names = " and ".join(report.too_large)
            raise Wrong(
                "a-view", expected="shards with memory of their own", got=f"{names} as a view"
            )


@dataclass
class _Step:
    """A step of training beside a twin in one process."""

    outputs: list[Tensor]  # one for each backward pass
    twin_outputs: list[Tensor]
    got: Named  # gradients
    own: list[Named]  # gradients of the twin on this rank's rows, for each backward pass
    mean: Named  # over ranks, added up over the backward passes
    dtypes: set[torch.dtype]  # of the parameters, and so of their gradients
    full: Named  # parameters after the update
    twin_full: Named
    sent: Sent
    gathered: int  # elements that this rank has handed to gathers


@dataclass(frozen=True)
class _Training:
    """What ranks train; `batches` has one for each step, backward pass and rank, in this order."""

    recipe: _Recipe
    seed: int
    batches: Tensor
    keep_zeros: bool = False  # gradients are set to zero between steps, and not to None
    dtype: torch.dtype | None = None


def _trained(rank, answer, task: _Training) -> list[_Step]:
    ranks = dist.get_world_size()
    module, twin = task.recipe.build(task.seed + rank), task.recipe.build(task.seed)
    model = answer(module) if task.dtype is None else answer(module, compute_dtype=task.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    twins = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    steps = []
    for batch in task.batches.to(device()):
        twin_outputs, of_ranks = [], []
        for micro in batch:
            each = [_one_pass(twin, rows, task.dtype) for rows in micro]
            twin_outputs.append(each[rank][0])
            of_ranks.append([gradients for _, gradients in each])
        gathered = [0]
        with following() as sent, listening(partial(_count_gathers, gathered)):
            outputs = [_forward_backward(model, micro[rank]) for micro in batch]
            model.finish_gradient_synchronization()
        got, mean = _gradients(model.module), _added([_mean(of, ranks) for of in of_ranks])
        dtypes = {parameter.dtype for parameter in model.parameters()}
        for name, parameter in twin.named_parameters():
            parameter.grad = mean[name]
        optimizer.step()
        twins.step()
        optimizer.zero_grad(set_to_none=not task.keep_zeros)
        step = _Step(
            outputs,
            twin_outputs,
            got,
            [of[rank] for of in of_ranks],
            mean,
            dtypes,
            model.full_parameters(),
            _values(twin),
            sent,
            gathered[0],
        )
        steps.append(step)
    return steps


def _count_gathers(gathered: list[int], name: str, arguments: dict) -> None:
    kind, payload = described(name, arguments)
    gathered[0] += sum(tensor.numel() for tensor in payload if kind == "all_gather")


def _forward_backward(model: nn.Module, rows: Tensor) -> Tensor:
    output = model(rows)
    output.float().square().mean().backward()
    return output.detach().clone()


def _one_pass(twin: nn.Module, rows: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Named]:
    """Output and gradients of the twin, computed in `dtype`."""
    lower = copy.deepcopy(twin)
    if dtype is not None:
        lower, rows = lower.to(dtype), rows.to(dtype)
    lower.zero_grad()
    output = _forward_backward(lower, rows)
    gradients = {n: None if g is None else g.float() for n, g in _gradients(lower).items()}
    return output, gradients


def _added(parts: list[Named]) -> Named:
    return {
        name: None if first is None else sum(part[name] for part in parts)
        for name, first in parts[0].items()
    }


def _scaled(gradients: Named, factor: float) -> Named:
    return {name: None if g is None else g * factor for name, g in gradients.items()}


def _mean(parts: list[Named], ranks: int) -> Named:
    return _scaled(_added(parts), 1 / ranks)


def _training(draw, recipe: _Recipe, ranks: int, steps=2, passes=1, rows=(4,)) -> _Training:
    return _Training(
        recipe, draw.seed(), drawn_tensor(draw, (steps, passes, ranks, *rows, recipe.width))
    )


def _check_training(answer, task: _Training, otherwise: str | None = None) -> None:
    """Trains and compares outputs, gradients and parameters with one process.

    `otherwise` is the mistake to name where none of the usual ones fits.
    """
    ranks = task.batches.shape[2]
    _judge_training(run(_trained, ranks, answer, task), otherwise)


def _judge_training(reports: Iterable[list[_Step]], otherwise: str | None) -> None:
    fallback = {otherwise: True} if otherwise else {}
    for index, steps in enumerate(zip(*reports, strict=True)):
        where, later = f"step {index + 1}", {"first-step-only": index > 0}
        for step in steps:
            if step.sent.unwaited:
                got = f"nobody waits for one of kind {step.sent.unwaited[0]}"
                raise Wrong("not-waited", expected="a wait() for every collective", got=got)
        _expect_outputs(steps, where, later | fallback | {"wrong-output": True})
        _expect_gradients(steps, where, later, fallback)
        for step in steps:
            what = f"the parameters after {where}"
            expect(step.full, step.twin_full, what=what, likely=later | fallback)


def _expect_outputs(steps: Iterable[_Step], where: str, likely: dict) -> None:
    for step in steps:
        expect(
            step.outputs, step.twin_outputs, each="pass", what=f"outputs, {where}", likely=likely
        )


def _expect_gradients(steps: tuple[_Step, ...], where: str, first: dict, last: dict) -> None:
    ranks, mean, passes = len(steps), steps[0].mean, len(steps[0].own)
    expected = _shards_of(mean, ranks)
    own = [_shards_of(_added(step.own), ranks)[rank] for rank, step in enumerate(steps)]
    latest = [_scaled(_added([step.own[-1] for step in steps]), 1 / ranks)]
    vectors = [name for name, g in mean.items() if g is not None and g.dim() < 2]

    def vectors_local(got: list[Named]) -> bool:
        return ranks > 1 and any(
            same(g[name], o[name]) for g, o in zip(got, own, strict=True) for name in vectors
        )

    likely = {
        **first,
        "own-gradient": ranks > 1 and own,
        "sum-not-mean": [_scaled(g, ranks) for g in expected],
        "divided-twice": passes == 1 and [_scaled(g, 1 / ranks) for g in expected],
        "vectors-local": vectors_local,
        "accumulated-lost": passes > 1 and _shards_of(latest[0], ranks),
        **last,
    }
    got = [step.got for step in steps]
    expect(got, expected, each="rank", what=f"gradients, {where}", likely=likely)


@fsdp.requires("full_parameters() gives copies", needs_earlier=True)
def full_parameters_gives_copies(answer, draw):
    for report in run(_started, 2, answer, _recipe(draw, _plain, 2), draw.seed()):
        if report.aliased:
            got = f"{report.aliased[0]} in the memory of the parameter"
            raise Wrong("full-aliased", expected="tensors of their own", got=got)


@fsdp.requires("two ranks compute and learn as one process does", needs_earlier=True)
def two_ranks_compute_and_learn_as_one_process(answer, draw):
    _check_training(answer, _training(draw, _recipe(draw, _plain, 2), 2, steps=3))


@dataclass
class _Passage:
    """What a rank saw of one step through a tower of equal layers."""

    alive_forward: list[list[int]]  # at each layer: the others whose whole matrix has memory
    alive_backward: list[list[int]]  # when backward arrives at layer L - 1, L - 2, ...
    alive_afterwards: list[int]
    hidden: list[int]  # layers whose attribute is not their parameter afterwards
    gathers: list[int]  # gathers of backward started when it arrives at each layer
    gathered: list[int]  # gathers of backward started when each layer's gradient is reduced
    counts: Counter  # elements by kind of call
    blocking: list[str]  # calls of backward for which it stood still
    unfinished: int  # the most reductions of matrices under way when another one starts
    beside: int = 0  # the most under way, of vectors too, when backward arrives at a layer
    groups: dict[str, set[str]] = field(default_factory=dict)  # of backward's calls, by kind


class _Marked(torch.autograd.Function):
    """Tells when backward comes by."""

    @staticmethod
    def forward(ctx, x: Tensor, on_backward: Callable) -> Tensor:
        ctx.on_backward = on_backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.on_backward()
        return gradient, None


class _Seen(torch.autograd.Function):
    """A linear layer's arithmetic, which shows the weight to `see` before it computes with it."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, see: Callable) -> Tensor:
        see(weight)
        ctx.save_for_backward(x, weight)
        ctx.see = see
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        ctx.see(weight)
        return gradient @ weight, gradient.T @ x, gradient.sum(0), None


class _SeenLinear(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.see: Callable = lambda weight: None

    def forward(self, x: Tensor) -> Tensor:
        return _Seen.apply(x, self.weight, self.bias, self.see)


@dataclass(frozen=True)
class _Sizes:
    """A tower of `layers` equal layers, `width` wide; the number of ranks divides the width."""

    layers: int
    width: int


def _sizes_of_tower(draw, ranks: int) -> _Sizes:
    return _Sizes(draw.integer(4, 6), ranks * draw.integer(2, 4))


class _Tower(nn.Module):
    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_SeenLinear(sizes.width) for _ in range(sizes.layers))
        self.arrives: Callable = lambda index: None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = _Marked.apply(layer(x), partial(self.arrives, index))
        return x


def _has_memory(reference: weakref.ref) -> bool:
    storage = reference()
    return storage is not None and storage.nbytes() > 0


def _passage(rank, answer, sizes: _Sizes, seed: int, frozen=()) -> _Passage:
    torch.manual_seed(seed)
    module = _Tower(sizes).to(device())
    for index in frozen:
        module.layers[index].requires_grad_(False)
    model = answer(module)
    # its gradient is wanted too, so that backward needs every layer's matrix
    x = torch.ones(3, sizes.width, device=device(), requires_grad=True)
    _forward_backward(model, x)  # a first step, so that what is made once is there
    model.finish_gradient_synchronization()
    model.zero_grad()
    report = _Passage([], [], [], [], [], [], Counter(), [], 0)
    storages: list[list[weakref.ref]] = [[] for _ in module.layers]
    backward = [False]
    started, reductions, of_vectors = [0], [], []

    patience = [3.0]  # seconds, for the whole step

    def settled(allowed: Callable[[list[int]], bool]) -> list[int]:
        """gloo's thread holds what was gathered for a moment after wait(): looks again until what is
        alive is allowed, or the patience is at its end."""
        while not allowed(found := alive()) and patience[0] > 0:
            time.sleep(0.005)
            patience[0] -= 0.005
        return found

    def alive() -> list[int]:
        # only reductions are asked for below, and a gather's Work holds what it has gathered
        own = reductions + of_vectors
        awaited[:] = [work for work in awaited if work in own]
        return [index for index, seen in enumerate(storages) if any(map(_has_memory, seen))]

    def see(index: int, weight: Tensor) -> None:
        if not backward[0]:
            found = settled(lambda found: len(set(found) - {index}) <= 1)
            report.alive_forward.append([other for other in found if other != index])
        storages[index].append(weakref.ref(weight.untyped_storage()))

    def arrives(index: int) -> None:
        backward[0] = True
        most = sizes.layers if report.alive_backward else 2  # where backward begins
        report.alive_backward.append(
            settled(lambda found: max(found, default=0) <= index + 1 and len(found) <= most)
        )
        report.gathers.append(started[0])
        report.beside = max(report.beside, len(under_way(reductions + of_vectors)))

    def under_way(works: list[dist.Work]) -> list[dist.Work]:
        return [work for work in works if work not in awaited]

    for index, layer in enumerate(module.layers):
        layer.see = partial(see, index)
    module.arrives = arrives

    def on_call(name: str, arguments: dict) -> Callable | None:
        kind, payload = described(name, arguments)
        elements = sum(tensor.numel() for tensor in payload)
        report.counts[kind] += elements
        # an all-reduce is one of vectors, or of flags: `no_byte_more_than_needed_goes_over` looks at its size
        matrix = kind == "reduce_scatter" or kind != "all_reduce" and elements > sizes.width
        if backward[0] and matrix and arguments.get("async_op") is False:
            report.blocking.append(kind)
        if backward[0] and matrix:
            group = dist.ProcessGroup.unbox(arguments["process_group"])
            report.groups.setdefault(kind, set()).add(group.group_name)
        if backward[0] and kind == "all_gather":
            started[0] += 1
        if kind == "all_reduce" and not matrix:
            return lambda result: hand_work(result, of_vectors.append)
        if kind == "all_gather" or not matrix:
            return None
        report.gathered.append(started[0])
        report.unfinished = max(report.unfinished, len(under_way(reductions)) + 1)
        return lambda result: hand_work(result, reductions.append)

    with waits() as awaited, listening(on_call):
        _forward_backward(model, x)
        model.finish_gradient_synchronization()
    report.alive_afterwards = settled(lambda found: not found)
    report.hidden = [
        index
        for index, layer in enumerate(module.layers)
        if layer.weight is not dict(layer.named_parameters(recurse=False))["weight"]
    ]
    return report


def _check_memory(reports: list[_Passage], sizes: _Sizes) -> None:
    for report in reports:
        most = max(report.alive_forward, key=len)
        if len(most) > 1:
            got = f"those of {len(most)} others have memory, too"
            raise Wrong(
                "kept-after-forward", expected="the matrix of the layer that computes", got=got
            )
        for place, alive in enumerate(report.alive_backward):
            passed = [index for index in alive if index > sizes.layers - place]
            if len(alive) > 2 and place == 0:
                got = f"{len(alive)} matrices when backward begins"
                raise Wrong("kept-after-forward", expected="two at most", got=got)
            if passed:
                got = f"of {sizes.layers} layers, {len(passed)} that backward has left"
                raise Wrong("kept-in-backward", expected="none", got=got)
        early = [n for place, n in enumerate(report.gathers) if n > place + 1]
        if early and report.counts["all_gather"] <= _gathered_elements(sizes, len(reports)):
            got = f"{early[0]} gathers of {sizes.layers}"
            raise Wrong("all-at-once", expected="the gather of one layer ahead", got=got)
        likely = {"kept-afterwards": True}
        expect(report.alive_afterwards, [], what="whole matrices afterwards", likely=likely)
        likely = {"whole-stays-in-layer": True}
        what = "layers whose `weight` is not their parameter afterwards"
        expect(report.hidden, [], what=what, likely=likely)


def _gathered_elements(sizes: _Sizes, ranks: int) -> int:
    """What a rank hands to gathers: its shard of every layer, for forward and for backward."""
    return 2 * sizes.layers * sizes.width**2 // ranks


@fsdp.requires("a layer's matrices are whole while it computes, and only then", needs_earlier=True)
def a_layer_matrices_are_whole_while_it_computes(answer, draw):
    ranks = draw.choice((2, 3))
    sizes = _sizes_of_tower(draw, ranks)
    _check_memory(run(_passage, ranks, answer, sizes, draw.seed()), sizes)


@fsdp.requires("no byte more than needed goes over the wire", needs_earlier=True)
def no_byte_more_than_needed_goes_over(answer, draw):
    ranks = draw.choice((2, 3))
    sizes = _sizes_of_tower(draw, ranks)
    gathered, vectors = _gathered_elements(sizes, ranks), sizes.layers * sizes.width
    flags = 2 * sizes.layers  # may tell of each parameter whether any rank has a gradient
    for report in run(_passage, ranks, answer, sizes, draw.seed()):
        counts = report.counts
        if counts["all_reduce"] > vectors + flags:
            got = f"{counts['all_reduce']} elements all-reduced"
            raise Wrong("all-reduced", expected=f"the {vectors} of the vectors", got=got)
        likely = {"gathered-again": lambda got: got > gathered}
        expect(counts["all_gather"], gathered, what="elements handed to gathers", likely=likely)


@fsdp.requires(
    "three ranks, and one; sizes that do not divide",
    failures={"mismatch": "remainder-lost", "is invalid for input of size": "remainder-lost"},
    needs_earlier=True,
)
def three_ranks_and_one_sizes_that_do_not(answer, draw):
    recipe = _Recipe(_uneven, draw.choice((5, 7, 8)), draw.choice((4, 5, 7)))
    for ranks in (3, 1):
        _check_training(answer, _training(draw, recipe, ranks), "remainder-lost")


@fsdp.requires(
    "two backward passes before one update, and gradients set to zero",
    failures={"exception": "accumulated-wrong"},
    needs_earlier=True,
)
def two_backward_passes_before_one_update(answer, draw):
    task = _training(draw, _recipe(draw, _plain, 2), 2, passes=2)
    _check_training(answer, replace(task, keep_zeros=True), "accumulated-wrong")


def _with_frozen(rank, answer, task: _Training, sizes: _Sizes) -> tuple[list[_Step], _Passage]:
    return _trained(rank, answer, task), _passage(rank, answer, sizes, task.seed, frozen=(1, 2))


@fsdp.requires(
    "a frozen layer",
    failures={"exception": "frozen", "'NoneType'": "frozen"},
    needs_earlier=True,
)
def a_frozen_layer(answer, draw):
    task, sizes = _training(draw, _recipe(draw, _FrozenMiddle, 2), 2), _sizes_of_tower(draw, 2)
    trainings, passages = zip(*run(_with_frozen, 2, answer, task, sizes), strict=True)
    _judge_training(trainings, "frozen")
    _check_memory(passages, sizes)


def _requires_training(text: str, kind: Callable, slug: str, failures, rows=(4,)) -> None:
    """Adds the requirement that models of this kind are trained."""

    failures = dict.fromkeys(["'NoneType'", *failures], slug)

    @fsdp.requires(text, failures=failures, needs_earlier=True)
    def models_of_this_kind_are_trained(answer, draw):
        ranks = draw.choice((2, 3))
        task = _training(draw, _recipe(draw, kind, ranks), ranks, rows=rows)
        _check_training(answer, task, slug)


_requires_training("a layer that is not called", _UnusedLayer, "unused", ["exception"])


@fsdp.requires(
    "a tied matrix, and a layer that is called twice",
    failures={"exception": "tied"},
    needs_earlier=True,
)
def a_tied_matrix(answer, draw):
    ranks = draw.choice((2, 3))
    task = _training(draw, _recipe(draw, _TiedEnds, ranks), ranks)
    reports = run(_trained, ranks, answer, task)
    _judge_training(reports, "tied")
    most = 2 * _TiedEnds.CALLS * shard_size(task.recipe.width**2, ranks)
    for step in reports[0]:
        if step.gathered > most:
            expected = f"at most {most} elements handed to gathers"
            raise Wrong("gathered-again", expected=expected, got=step.gathered)


_requires_training(
    "a layer with layers inside it", _OuterLayer, "outer-layer", ["exception", "signal"]
)
_requires_training(
    "an output that is a view, and an operation in place after it",
    _in_place,
    "view-output",
    ["exception", "signal", "timeout", "mismatch"],
    rows=(4, 3),
)


def _looked(rank, answer, recipe: _Recipe, seed: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of the model, without gradients, and of the module that it was made of."""
    twin, module = recipe.build(seed), recipe.build(seed)
    model = answer(module)
    with torch.no_grad():
        return model(x.to(device())), twin(x.to(device()))


@fsdp.requires(
    "a forward without gradients",
    failures=dict.fromkeys(("exception", "signal", "'NoneType'"), "without-gradients"),
    needs_earlier=True,
)
def a_forward_without_gradients(answer, draw):
    recipe = _recipe(draw, _plain, 2)
    for got, expected in run(_looked, 2, answer, recipe, draw.seed(), draw.tensor(4, recipe.width)):
        expect(got, expected, what="the output", likely={"without-gradients": True})


@fsdp.requires("shapes has those of the whole parameters", needs_earlier=True)
def shapes_has_those_of_the_whole_parameters(answer, draw):
    reports = run(_started, 2, answer, _recipe(draw, _plain, 2), draw.seed())
    shapes = {name: tuple(value.shape) for name, value in reports[0].module.items()}
    likely = {"shapes-of-shards": True}
    got = [report.shapes for report in reports]
    expect(got, [shapes] * 2, each="rank", what="shapes", likely=likely)


def _in_double(rank, answer, recipe: _Recipe, seed: int, x: Tensor) -> dict[str, set[torch.dtype]]:
    """The dtypes of what a model has and gives that was made of a module in double precision."""
    model = answer(recipe.build(seed).double())
    y = model(x.double().to(device()))
    y.square().mean().backward()
    model.finish_gradient_synchronization()
    tensors = {
        "the parameters": list(model.module.parameters()),
        "the output": [y],
        "the gradients": [p.grad for p in model.module.parameters() if p.grad is not None],
        "full_parameters()": list(model.full_parameters().values()),
    }
    return {what: {tensor.dtype for tensor in given} for what, given in tensors.items()}


@fsdp.requires(
    "a module in double precision", failures={"exception": "double-lost"}, needs_earlier=True
)
def a_module_in_double_precision(answer, draw):
    recipe = _recipe(draw, _plain, 2)
    for found in run(_in_double, 2, answer, recipe, draw.seed(), draw.tensor(4, recipe.width)):
        for what, dtypes in found.items():
            expect(dtypes, {torch.float64}, what=f"dtypes of {what}", likely={"double-lost": True})


@fsdp.requires(
    "with compute_dtype, weights travel and compute in bfloat16, and the rest stays float32",
    failures={"same dtype": "dtypes-mixed", "scalar type": "dtypes-mixed"},
    needs_earlier=True,
)
def with_compute_dtype(answer, draw):
    task = replace(_training(draw, _recipe(draw, _plain, 2), 2), dtype=torch.bfloat16)
    reports = run(_trained, 2, answer, task)
    for index, steps in enumerate(zip(*reports, strict=True)):
        where = f"step {index + 1}"
        for step in steps:
            _check_dtypes(step)
            outputs = [output.dtype for output in step.outputs]
            expect(outputs, [torch.bfloat16], each="pass", likely={"dtypes-mixed": True})
            for got, expected, what in (
                (step.outputs, step.twin_outputs, "the outputs"),
                (step.full, step.twin_full, "the parameters after"),
            ):
                expect(got, expected, what=f"{what}, {where}", tolerance=ROUGH)
        expected = _shards_of(steps[0].mean, len(steps))
        got = [step.got for step in steps]
        expect(got, expected, each="rank", what=f"gradients, {where}", tolerance=ROUGH)


ROUGH = 0.02  # bfloat16 has 8 significant bits


def _check_dtypes(step: _Step) -> None:
    half, full = torch.bfloat16, torch.float32
    if half in step.dtypes:
        raise Wrong("master-cast", expected="parameters in float32", got="bfloat16")
    if ("all_gather", full) in step.sent.dtypes:
        raise Wrong("gathered-in-float32", expected="weights sent in bfloat16", got="float32")
    if {("reduce_scatter", half), ("all_reduce", half)} & step.sent.dtypes:
        raise Wrong("summed-in-half", expected="gradients summed in float32", got="bfloat16")


class _Words(nn.Module):
    """Its first layer takes whole numbers, and its second one gets its input by name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(7, width)
        self.out = nn.Linear(width, 5)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        return self.out(input=self.token(tokens) * scale)


def _read_words(rank, answer, width: int, tokens: Tensor) -> torch.dtype:
    model = answer(_Words(width).to(device()), compute_dtype=torch.bfloat16)
    y = model(
        tokens.to(device()), torch.ones((), dtype=torch.float32, device=device()).expand(width)
    )
    y.float().sum().backward()
    model.finish_gradient_synchronization()
    return y.dtype


@fsdp.requires(
    "with compute_dtype, whole numbers stay whole, and keywords are cast as well",
    failures={"argument #1 'indices'": "integers-cast", "same dtype": "dtypes-mixed"},
    needs_earlier=True,
)
def with_compute_dtype_whole_numbers_stay_whole_and_keywords_are_cast(answer, draw):
    tokens = torch.tensor([draw.integer(0, 6) for _ in range(5)])
    dtypes = run(_read_words, 2, answer, draw.integer(3, 6), tokens)
    expect(dtypes, [torch.bfloat16] * 2, each="rank", likely={"dtypes-mixed": True})


@fsdp.requires("the next gather, and one reduction, run beside backward", needs_earlier=True)
def the_next_gather(answer, draw):
    sizes = _sizes_of_tower(draw, 2)
    for report in run(_passage, 2, answer, sizes, draw.seed()):
        if report.blocking:
            got = f"{report.blocking[0]} without async_op"
            raise Wrong("backward-blocks", expected="calls that do not block", got=got)
        if not report.beside:
            got = "each is waited for before backward goes on"
            raise Wrong(
                "backward-blocks", expected="a reduction that runs beside backward", got=got
            )
        of_gathers = report.groups.get("all_gather", set())
        if of_gathers & report.groups.get("reduce_scatter", set()):
            expected = "gathers and reductions in groups of their own"
            raise Wrong("one-communicator", expected=expected, got="one group for both")
        needed = [min(place + 2, sizes.layers) for place in range(sizes.layers)]
        if any(n < least for n, least in zip(report.gathered, needed, strict=True)):
            expected = "the next layer's gather to start before a layer's gradient is there"
            raise Wrong("no-prefetch", expected=expected, got="it starts afterwards")
        if report.unfinished > 2:
            got = f"{report.unfinished} at the same time"
            raise Wrong("reductions-pile-up", expected="one reduction unfinished", got=got)
