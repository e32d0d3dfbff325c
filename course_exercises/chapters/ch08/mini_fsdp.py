"""Exercise 8.4, `MiniFSDP`: what it asks for, and how it is checked."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from course_exercises.authoring import Exercise, Wrong, expect, run, signs
from course_exercises.authoring.compare import TOLERANCE
from course_exercises.authoring.ranks import (
    Memory,
    SeenCall,
    Sent,
    following,
    must_have_waited,
    storages,
)
from course_exercises.authoring.vocabulary import times, total
from course_exercises.chapters.ch08 import models
from course_exercises.chapters.ch08.models import Recipe
from course_exercises.chapters.ch08.shared import (
    drawn_tensor,
    larger_than_itself,
    shard_size,
    shards_of,
)
from course_utils.hardware import device

fsdp = Exercise(
    "8.4",
    "MiniFSDP",
    points=5,
    minutes=240,
    kind="stretch",
    things="gradients",
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
        "start": "The ranks do not all start from rank 0's values. Broadcast every parameter, a frozen one too, "
        "before you cut it, and every buffer, such as BatchNorm's running mean.",
        "wholes": "`full_parameters()` and `shapes` tell of the parameters as they were in the module that was "
        "wrapped: whole, in their shapes, by their names. Note the shapes before you shard, and `clone()` what "
        "would share its memory with a parameter.",
        "names-changed": "Parameters or buffers have other names than in the module that was wrapped. A shard "
        "takes the matrix's place in its layer, and nothing is wrapped once more.",
        "shards": "A rank keeps something else than its shards. Of a matrix that is its piece, in memory of its "
        "own (`clone()` it): lay the matrix flat, pad it with zeros at the end, cut it into equal vectors. A "
        "parameter with fewer than two dimensions stays whole.",
        "shard-or-whole": "A shard stands where the whole matrix belongs, or the whole where a shard does. In the "
        "layer stands the whole while forward runs, and the shard at all other times. Who swaps `.data` has to swap "
        "it back after forward and after backward; two tensors, the shard and the whole, are easier to handle.",
        "gradient-missing": "A gradient is not where you or the optimizer look for it. Backward leaves it at the "
        "whole matrix, and a hook there passes it on to the shard: `register_post_accumulate_grad_hook` runs when "
        "it is complete, a module's full backward hook perhaps earlier.",
        "wrong-output": "Forward gives something else than the module that was wrapped. Look at what stands in "
        "the layers while it runs: each matrix whole, its shards in the order of the ranks and without the "
        "padding, and each vector with its values.",
        "first-step-only": "The first step is right and a later one is not. Gather again in every forward: the "
        "shards have changed. And leave no gradient at the whole matrix.",
        "kept-after-forward": "Whole matrices are still in memory when other layers compute. A Python name "
        "that is gone frees nothing: autograd has kept the tensor for backward. Free its storage.",
        "kept-after-backward": "Backward has left a layer, and its whole matrix is still in memory. Free it when its "
        "gradient is there. Where none comes, as for a frozen matrix, free it when backward has gone on, or in "
        "`finish_gradient_synchronization`.",
        "too-much-ahead": "More is under way than one gather ahead and one unfinished reduction, and each holds what "
        "sharding has just saved. Start the gather of the next layer only, and finish a reduction before the "
        "next one starts.",
        "too-many-bytes": "More goes over the wire than needed. Gather a layer's matrices once for its forward and "
        "once for its backward, and none that is still there. A matrix's gradient goes through one reduce-scatter: "
        "an all-reduce gives every rank all of it, for twice the bytes.",
        "accumulated": "Two backward passes come before one update here, and `.grad` is not the sum of their means. "
        "Add to what stands there, which may be zeros, and keep autograd from adding the gradient of a whole "
        "matrix to the shard's `.grad` by itself.",
        "tied": "One tensor is in two layers here, and a layer is called twice. There must be one shard, with the "
        "gradients of all places and calls. A walk over the layers meets it twice, and what one call frees "
        "another may need.",
        "outer-layer": "A module may have parameters of its own and other layers inside it: it is a layer, too, "
        "and its matrices must be there while all of its forward runs.",
        "view-output": "A layer's output is a view here, and an operation in place comes after it. The hook on "
        "`output.grad_fn` is then never called: put one on `output._base.grad_fn`, too.",
        "without-gradients": "A forward under `torch.no_grad()` must work, and leave nothing behind. Its output has no "
        "`grad_fn`, and no backward comes: set no hook there, and note no call.",
        "dtype": "Something has another dtype than it should. With `compute_dtype`, cast the shard and then gather it, "
        "which is half the bytes; parameters stay as they are, since a small update of a bfloat16 number is "
        "rounded away; gradients are cast back before they are summed. Without it everything keeps its dtype, "
        "and what `torch.zeros` or `torch.empty` makes is float32.",
        "inputs": "Weights and inputs of a layer do not fit together. With `compute_dtype`, cast its vectors and its "
        "floating point inputs, keywords too, and leave whole numbers: an embedding cannot look up 3.0.",
        "no-overlap": "Backward stands still while something is sent. Use `async_op=True`, start the next layer's "
        "gather when backward arrives at the layer before it, and wait when a result is needed.",
        "one-communicator": "Gathers and reductions use the same group. With NCCL its calls run "
        "one after the other, so that the next gather waits for the reduction before it: make a "
        "group of its own for each, with `dist.new_group`.",
    },
    failures={
        "timeout": "not-every-rank",
        "mat2 must be a matrix": "shard-or-whole",
        "mat1 and mat2 shapes": "shard-or-whole",
        "The expanded size": "shard-or-whole",
        "is invalid for input of size": "shard-or-whole",
        "has no attribute 'wait'": "exception",  # of a call without `async_op`, in any place
        "'NoneType'": "gradient-missing",
    },
)


Named = dict[str, Tensor | None]


def _values(module: nn.Module) -> Named:
    """What this rank holds; of a DTensor, which cannot leave the ranks, its part."""
    own = {name: p.detach() for name, p in module.named_parameters()}
    own = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in own.items()}
    return {name: p.clone() for name, p in own.items()}


def _gradients(module: nn.Module) -> Named:
    named = module.named_parameters()
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def _shards_of(whole: Named, ranks: int) -> list[Named]:
    """What each rank keeps of parameters, or of their gradients."""

    def kept(value: Tensor | None, rank: int) -> Tensor | None:
        return value if value is None or value.dim() < 2 else shards_of(value, ranks)[rank]

    return [{name: kept(value, rank) for name, value in whole.items()} for rank in range(ranks)]


# ---- what a rank keeps ---------------------------------------------------------------------------


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


def _started(rank, answer, recipe: Recipe, seed: int) -> _Started:
    module = recipe.build(seed + rank)
    if any(True for _ in module.buffers()):
        module(torch.randn(9, recipe.width, device=device()))  # moves BatchNorm's buffers
    before, buffers = _values(module), dict(copy.deepcopy(module).named_buffers())
    model = answer(module)
    own, full = model.module, model.full_parameters()
    memory = storages(own.parameters())
    return _Started(
        before,
        buffers,
        full,
        dict(own.named_buffers()),
        _values(own),
        [name for name, p in own.named_parameters() if larger_than_itself(p)],
        any(isinstance(p, DTensor) for p in own.parameters()),
        {name: tuple(shape) for name, shape in getattr(model, "shapes", {}).items()},
        [name for name, whole in full.items() if storages([whole]) & memory],
    )


def _starts(answer, draw, recipe: Recipe) -> list[_Started]:
    return run(_started, recipe.ranks, answer, recipe, draw.seed())


@fsdp.requires(
    "every rank starts with rank 0's parameters and buffers, and full_parameters() gives them",
    failures={"AttributeError": "no-module", "IndexError": "shards", "signal": "shards"},
)
def every_rank_starts_with_rank_0_parameters(answer, draw):
    reports = _starts(answer, draw, models.drawn(draw, models.with_buffers))
    ranks, first = len(reports), reports[0]

    def own_starts(got: list[Named]) -> bool:
        """Whether each number is what some rank has started with at this place."""
        own = {n: torch.stack([r.module[n] for r in reports]) for n in first.module}
        return all((own[n] == whole).any(0).all() for full in got for n, whole in full.items())

    got, likely = [report.full for report in reports], {"start": own_starts, "wholes": True}
    expect(got, [first.module] * ranks, each="rank", what="full_parameters()", likely=likely)
    got = [report.buffers_after for report in reports]
    likely = {
        "names-changed": lambda got: any(set(g) != set(first.buffers) for g in got),
        "start": True,
    }
    expect(got, [first.buffers] * ranks, each="rank", what="the buffers", likely=likely)


@fsdp.requires("a rank keeps its shard of each matrix, and every vector", needs_earlier=True)
def a_rank_keeps_its_shard_of_each_matrix(answer, draw):
    _check_kept(_starts(answer, draw, models.drawn(draw, models.plain)))


def _check_kept(reports: list[_Started]) -> None:
    whole = reports[0].module
    likely = {
        "names-changed": lambda got: any(set(g) != set(whole) for g in got),
        "torchs-own": any(report.dtensors for report in reports),
        "shards": True,
    }
    got = [report.kept for report in reports]
    expect(got, _shards_of(whole, len(reports)), each="rank", likely=likely)
    for report in reports:
        if report.too_large:
            got = f"{' and '.join(report.too_large)} as a view into something larger"
            raise Wrong("shards", expected="shards with memory of their own", got=got)


# ---- training beside one process -----------------------------------------------------------------


@dataclass
class _Step:
    """A step of training beside a twin in one process."""

    outputs: list[Tensor]  # one for each backward pass
    twin_outputs: list[Tensor]
    got: Named  # gradients
    own: Named  # gradients of the twin on this rank's rows, added up over the backward passes
    mean: Named  # over ranks
    dtypes: set[torch.dtype]  # of the parameters, and so of their gradients
    full: Named  # parameters after the update
    twin_full: Named
    sent: Sent


@dataclass(frozen=True)
class _Training:
    """What ranks train; `batches` has one for each step, backward pass and rank, in this order."""

    recipe: Recipe
    seed: int
    batches: Tensor
    keep_zeros: bool = False  # gradients are set to zero between steps, and not to None
    dtype: torch.dtype | None = None  # compute_dtype
    precision: torch.dtype = torch.float32  # of the module and its inputs


def _training(draw, recipe: Recipe, steps=2, passes=1, rows=(4,), **options) -> _Training:
    batches = drawn_tensor(draw, (steps, passes, recipe.ranks, *rows, recipe.width))
    return _Training(recipe, draw.seed(), batches, **options)


def _trained(rank, answer, task: _Training) -> list[_Step]:
    module, twin = (task.recipe.build(s).to(task.precision) for s in (task.seed + rank, task.seed))
    model = answer(module) if task.dtype is None else answer(module, compute_dtype=task.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    twins = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    steps = []
    for batch in task.batches.to(device(), task.precision):
        dtype = task.dtype or task.precision
        passes = [[_one_pass(twin, rows, dtype) for rows in micro] for micro in batch]
        with following() as sent:
            outputs = [_forward_backward(model, micro[rank]) for micro in batch]
            model.finish_gradient_synchronization()
        own = [total([each[r][1] for each in passes]) for r in range(len(batch[0]))]
        mean = times(total(own), 1 / len(own))
        got, dtypes = _gradients(model.module), {p.dtype for p in model.parameters()}
        for name, parameter in twin.named_parameters():
            parameter.grad = mean[name]
        optimizer.step()
        twins.step()
        optimizer.zero_grad(set_to_none=not task.keep_zeros)
        full, twin_outputs = model.full_parameters(), [each[rank][0] for each in passes]
        steps.append(
            _Step(outputs, twin_outputs, got, own[rank], mean, dtypes, full, _values(twin), sent)
        )
    return steps


def _forward_backward(model: nn.Module, rows: Tensor) -> Tensor:
    output = model(rows)
    output.to(torch.promote_types(output.dtype, torch.float32)).square().mean().backward()
    return output.detach().clone()


def _one_pass(twin: nn.Module, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Named]:
    """Output and gradients of the twin, computed in `dtype`."""
    lower = copy.deepcopy(twin).to(dtype)
    lower.zero_grad()
    output, kept = _forward_backward(lower, rows.to(dtype)), next(twin.parameters()).dtype
    return output, {n: g if g is None else g.to(kept) for n, g in _gradients(lower).items()}


def _check_training(answer, task: _Training, always: str | None = None) -> list[list[_Step]]:
    """Trains and compares outputs, gradients and parameters with one process.

    `always` is the mistake to name, where simpler models have been trained rightly before.
    """
    reports = run(_trained, task.recipe.ranks, answer, task)
    _judge_training(reports, always)
    return reports


def _judge_training(
    reports: Iterable[list[_Step]], always: str | None = None, tolerance: float = TOLERANCE
) -> None:
    for index, steps in enumerate(zip(*reports, strict=True)):
        must_have_waited([step.sent.unwaited for step in steps])
        first = {**({always: True} if always else {}), "first-step-only": index > 0}
        _judge_step(steps, f"step {index + 1}", first, tolerance)


def _judge_step(steps: tuple[_Step, ...], where: str, first: dict, tolerance: float) -> None:
    def compare(what: str, got: list, expected: list, mistakes: dict) -> None:
        likely = first | mistakes
        expect(got, expected, each="rank", what=what, likely=likely, tolerance=tolerance)

    outputs, twins = [s.outputs for s in steps], [s.twin_outputs for s in steps]
    compare(f"outputs, {where}", outputs, twins, {"wrong-output": True})
    shards = _shards_of(steps[0].mean, len(steps))
    compare(f"gradients, {where}", [s.got for s in steps], shards, _of_gradients(steps, shards))
    full, twins = [s.full for s in steps], [s.twin_full for s in steps]
    compare(f"the parameters after {where}", full, twins, {})


def _of_gradients(steps: tuple[_Step, ...], expected: list[Named]) -> dict:
    """The usual signs. Each rank has another part of the sum, which a factor shows all the same; a gradient
    that is nowhere has stayed at the whole matrix."""
    ranks = len(steps)
    own = [_shards_of(step.own, ranks)[rank] for rank, step in enumerate(steps)]
    return {
        **signs(own, expected),
        **dict.fromkeys(("in-place", "no-gradient", "other-dtype"), False),
        "sum-not-mean": [times(each, ranks) for each in expected],
        "divided-twice": [times(each, 1 / ranks) for each in expected],
        "gradient-missing": lambda got: any(
            each[name] is None and right is not None
            for each, shards in zip(got, expected, strict=True)
            for name, right in shards.items()
        ),
    }


@fsdp.requires("full_parameters() gives copies", needs_earlier=True)
def full_parameters_gives_copies(answer, draw):
    for report in _starts(answer, draw, models.drawn(draw, models.plain)):
        if report.aliased:
            got = f"{report.aliased[0]} in the memory of the parameter"
            raise Wrong("wholes", expected="tensors of their own", got=got)


@fsdp.requires("two ranks compute and learn as one process does", needs_earlier=True)
def two_ranks_compute_and_learn_as_one_process(answer, draw):
    _check_training(answer, _training(draw, models.drawn(draw, models.plain, 2), steps=3))


# ---- one step through a tower of equal layers ----------------------------------------------------


@dataclass
class _Passage:
    """What a rank saw of one step through a tower of equal layers."""

    alive_forward: list[list[int]]  # at each layer: the others whose whole matrix has memory
    alive_backward: list[list[int]]  # when backward arrives at layer L - 1, L - 2, ...
    calls_before: list[int]  # the calls made until then
    beside: int  # the most reductions that were under way then
    alive_afterwards: list[int]
    hidden: list[int]  # layers whose attribute is not their parameter afterwards
    sent: Sent

    def backward(self) -> list[SeenCall]:
        return self.sent.calls[self.calls_before[0] :]

    def gathers_ahead(self) -> list[int]:
        """Gathers that backward has started when it arrives at each layer."""
        begin = self.calls_before[0]
        return [_gathers(self.sent.calls[begin:end]) for end in self.calls_before]


@dataclass(frozen=True)
class _Sizes:
    """A tower of `layers` equal layers, `width` wide; the number of ranks divides the width."""

    layers: int
    width: int
    ranks: int

    @property
    def gathered(self) -> int:
        """What a rank hands to gathers: its shard of every layer, for forward and for backward."""
        return 2 * self.layers * self.width**2 // self.ranks

    def reduces(self, call: SeenCall) -> bool:
        """Whether a call reduces a matrix. Vectors, and flags of a few bytes, are all-reduced."""
        return call.kind == "reduce_scatter" or (
            call.kind not in ("all_reduce", "all_gather") and call.elements > self.width
        )


def _gathers(calls: list[SeenCall]) -> int:
    return sum(call.kind == "all_gather" for call in calls)


def _sizes_of_tower(draw, ranks: int) -> _Sizes:
    return _Sizes(draw.integer(4, 6), ranks * draw.integer(2, 4), ranks)


def _passage(rank, answer, sizes: _Sizes, seed: int, frozen=()) -> _Passage:
    torch.manual_seed(seed)
    module = models.Tower(sizes.layers, sizes.width).to(device())
    for index in frozen:
        module.layers[index].requires_grad_(False)
    model = answer(module)
    # its gradient is wanted too, so that backward needs every layer's matrix
    x = torch.ones(3, sizes.width, device=device(), requires_grad=True)
    _forward_backward(model, x)  # a first step, so that what is made once is there
    model.finish_gradient_synchronization()
    model.zero_grad()
    memory = Memory()

    def see(index: int, weight: Tensor) -> None:
        if not report.calls_before:  # in forward
            report.sent.let_go()
            found = memory.alive(lambda found: len(set(found) - {index}) <= 1)
            report.alive_forward.append([other for other in found if other != index])
        memory.show(index, weight)

    def arrives(index: int) -> None:
        report.calls_before.append(len(report.sent.calls))
        report.sent.let_go()
        most = sizes.layers if report.alive_backward else 2  # where backward begins
        report.alive_backward.append(
            memory.alive(lambda found: max(found, default=0) <= index + 1 and len(found) <= most)
        )
        under_way = [call for call in report.sent.open_calls() if call.kind != "all_gather"]
        report.beside = max(report.beside, len(under_way))

    for index, layer in enumerate(module.layers):
        layer.see = partial(see, index)
    module.arrives = arrives
    with following() as sent:
        report = _Passage([], [], [], 0, [], [], sent)
        _forward_backward(model, x)
        model.finish_gradient_synchronization()
    report.alive_afterwards = memory.alive(lambda found: not found)
    report.hidden = [
        index
        for index, layer in enumerate(module.layers)
        if layer.weight is not dict(layer.named_parameters(recurse=False))["weight"]
    ]
    return report


def _passages(answer, draw, sizes: _Sizes) -> list[_Passage]:
    return run(_passage, sizes.ranks, answer, sizes, draw.seed())


def _check_memory(reports: Iterable[_Passage], sizes: _Sizes) -> None:
    for report in reports:
        most = max(report.alive_forward, key=len)
        if len(most) > 1:
            got = f"those of {len(most)} others have memory, too"
            expected = "the matrix of the layer that computes"
            raise Wrong("kept-after-forward", expected=expected, got=got)
        for place, alive in enumerate(report.alive_backward):
            passed = [index for index in alive if index > sizes.layers - place]
            if len(alive) > 2 and place == 0:
                got = f"{len(alive)} matrices when backward begins"
                raise Wrong("kept-after-forward", expected="two at most", got=got)
            if passed:
                expected = "no whole matrix of a layer that backward has left"
                got = f"{len(passed)} of {sizes.layers}"
                raise Wrong("kept-after-backward", expected=expected, got=got)
        early = [n for place, n in enumerate(report.gathers_ahead()) if n > place + 1]
        if early and report.sent.elements("all_gather") <= sizes.gathered:
            got = f"{early[0]} gathers of {sizes.layers}"
            raise Wrong("too-much-ahead", expected="the gather of one layer ahead", got=got)
        likely = {"kept-after-backward": True}
        expect(report.alive_afterwards, [], what="whole matrices afterwards", likely=likely)
        what = "layers whose `weight` is not their parameter afterwards"
        expect(report.hidden, [], what=what, likely={"shard-or-whole": True})


@fsdp.requires("a layer's matrices are whole while it computes, and only then", needs_earlier=True)
def a_layer_matrices_are_whole_while_it_computes(answer, draw):
    sizes = _sizes_of_tower(draw, draw.choice((2, 3)))
    _check_memory(_passages(answer, draw, sizes), sizes)


@fsdp.requires("no byte more than needed goes over the wire", needs_earlier=True)
def no_byte_more_than_needed_goes_over(answer, draw):
    sizes = _sizes_of_tower(draw, draw.choice((2, 3)))
    vectors = sizes.layers * sizes.width
    flags = 2 * sizes.layers  # may tell of each parameter whether any rank has a gradient
    for report in _passages(answer, draw, sizes):
        reduced, gathered = (report.sent.elements(kind) for kind in ("all_reduce", "all_gather"))
        if reduced > vectors + flags:
            got = f"{reduced} elements all-reduced"
            raise Wrong("too-many-bytes", expected=f"the {vectors} of the vectors", got=got)
        likely = {"too-many-bytes": lambda got: got > sizes.gathered}
        expect(gathered, sizes.gathered, what="elements handed to gathers", likely=likely)


# ---- sizes and kinds of layers -------------------------------------------------------------------


@fsdp.requires(
    "three ranks, and one; sizes that do not divide",
    failures={"mismatch": "shards", "is invalid for input of size": "shards"},
    needs_earlier=True,
)
def three_ranks_and_one_sizes_that_do_not(answer, draw):
    sizes = draw.choice((5, 7, 8)), draw.choice((4, 5, 7))
    for ranks in (3, 1):
        recipe = Recipe(models.uneven, ranks, *sizes)
        _check_kept(_starts(answer, draw, recipe))
        _check_training(answer, _training(draw, recipe))


@fsdp.requires(
    "two backward passes before one update, and gradients set to zero",
    failures={"exception": "accumulated"},
    needs_earlier=True,
)
def two_backward_passes_before_one_update(answer, draw):
    task = _training(draw, models.drawn(draw, models.plain), passes=2, keep_zeros=True)
    _check_training(answer, task, "accumulated")


def _with_frozen(rank, answer, task: _Training, sizes: _Sizes) -> tuple[list[_Step], _Passage]:
    return _trained(rank, answer, task), _passage(rank, answer, sizes, task.seed, frozen=(1, 2))


@fsdp.requires("a frozen layer", failures={"'NoneType'": "none-gradient"}, needs_earlier=True)
def a_frozen_layer(answer, draw):
    sizes = _sizes_of_tower(draw, 2)
    task = _training(draw, models.drawn(draw, models.frozen_middle, 2))
    trainings, passages = zip(*run(_with_frozen, 2, answer, task, sizes), strict=True)
    _judge_training(trainings)
    _check_memory(passages, sizes)


def _requires_training(text: str, kind: Callable, slug: str | None, failures, rows=(4,)) -> None:
    """Adds the requirement that models of this kind are trained."""

    @fsdp.requires(text, failures=failures, needs_earlier=True)
    def models_of_this_kind_are_trained(answer, draw):
        _check_training(answer, _training(draw, models.drawn(draw, kind), rows=rows), slug)


_requires_training(
    "a layer that is not called", models.unused_layer, None, {"'NoneType'": "none-gradient"}
)


@fsdp.requires(
    "a tied matrix, and a layer that is called twice",
    failures={"exception": "tied"},
    needs_earlier=True,
)
def a_tied_matrix(answer, draw):
    recipe = models.drawn(draw, models.tied_ends)
    most = 2 * models.CALLS_OF_TIED_ENDS * shard_size(recipe.width**2, recipe.ranks)
    for step in _check_training(answer, _training(draw, recipe), "tied")[0]:
        if (gathered := step.sent.elements("all_gather")) > most:
            expected = f"at most {most} elements handed to gathers"
            raise Wrong("too-many-bytes", expected=expected, got=gathered)


_requires_training(
    "a layer with layers inside it",
    models.OuterLayer,
    "outer-layer",
    dict.fromkeys(("'NoneType'", "exception", "signal"), "outer-layer"),
)
_requires_training(
    "an output that is a view, and an operation in place after it",
    models.in_place,
    "view-output",
    dict.fromkeys(("'NoneType'", "exception", "signal", "timeout", "mismatch"), "view-output"),
    rows=(4, 3),
)


def _looked(rank, answer, recipe: Recipe, seed: int, x: Tensor) -> tuple[Tensor, Tensor]:
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
    recipe = models.drawn(draw, models.plain, 2)
    for got, expected in run(_looked, 2, answer, recipe, draw.seed(), draw.tensor(4, recipe.width)):
        expect(got, expected, what="the output", likely={"without-gradients": True})


@fsdp.requires("shapes has those of the whole parameters", needs_earlier=True)
def shapes_has_those_of_the_whole_parameters(answer, draw):
    for report in _starts(answer, draw, models.drawn(draw, models.plain)):
        shapes = {name: tuple(value.shape) for name, value in report.module.items()}
        expect(report.shapes, shapes, what="shapes", likely={"wholes": True})


@fsdp.requires("a module in double precision", failures={"exception": "dtype"}, needs_earlier=True)
def a_module_in_double_precision(answer, draw):
    recipe = models.drawn(draw, models.plain)
    _check_training(answer, _training(draw, recipe, precision=torch.float64), "dtype")


@fsdp.requires(
    "with compute_dtype, weights travel and compute in bfloat16, and the rest stays float32",
    failures={"same dtype": "inputs", "scalar type": "inputs"},
    needs_earlier=True,
)
def with_compute_dtype(answer, draw):
    recipe = models.drawn(draw, models.plain, 2)
    reports = run(_trained, 2, answer, _training(draw, recipe, dtype=torch.bfloat16))
    for step in (step for steps in reports for step in steps):
        _check_dtypes(step)
    _judge_training(reports, tolerance=ROUGH)


ROUGH = 0.02  # bfloat16 has 8 significant bits


def _check_dtypes(step: _Step) -> None:
    half, full = torch.bfloat16, torch.float32
    if half in step.dtypes:
        raise Wrong("dtype", expected="parameters in float32", got="bfloat16")
    if ("all_gather", full) in step.sent.dtypes:
        raise Wrong("dtype", expected="weights sent in bfloat16", got="float32")
    if {("reduce_scatter", half), ("all_reduce", half)} & step.sent.dtypes:
        raise Wrong("dtype", expected="gradients summed in float32", got="bfloat16")


def _read_words(rank, answer, width: int, tokens: Tensor) -> torch.dtype:
    model = answer(models.Words(width).to(device()), compute_dtype=torch.bfloat16)
    y = model(
        tokens.to(device()), torch.ones((), dtype=torch.float32, device=device()).expand(width)
    )
    y.float().sum().backward()
    model.finish_gradient_synchronization()
    return y.dtype


@fsdp.requires(
    "with compute_dtype, whole numbers stay whole, and keywords are cast as well",
    failures={"argument #1 'indices'": "inputs", "same dtype": "inputs"},
    needs_earlier=True,
)
def with_compute_dtype_whole_numbers_stay_whole_and_keywords_are_cast(answer, draw):
    tokens = torch.tensor([draw.integer(0, 6) for _ in range(5)])
    dtypes = run(_read_words, 2, answer, draw.integer(3, 6), tokens)
    expect(dtypes, [torch.bfloat16] * 2, each="rank", likely={"inputs": True})


@fsdp.requires("the next gather, and one reduction, run beside backward", needs_earlier=True)
def the_next_gather(answer, draw):
    sizes = _sizes_of_tower(draw, 2)
    for report in _passages(answer, draw, sizes):
        calls = report.backward()
        reductions = [index for index, call in enumerate(calls) if sizes.reduces(call)]
        of_matrices = [c for c in calls if c.kind == "all_gather" or sizes.reduces(c)]
        blocking = [call.kind for call in of_matrices if call.blocks]
        if blocking or not report.beside:
            got = f"{blocking[0]} without async_op" if blocking else "each is waited for at once"
            expected = "calls that run beside backward"
            raise Wrong("no-overlap", expected=expected, got=got)
        groups = [{c.group for c in of_matrices if sizes.reduces(c) is it} for it in (True, False)]
        if set.intersection(*groups):
            expected = "gathers and reductions in groups of their own"
            raise Wrong("one-communicator", expected=expected, got="one group for both")
        needed = [min(place + 2, sizes.layers) for place in range(sizes.layers)]
        gathered = [_gathers(calls[:index]) for index in reductions]
        if any(n < least for n, least in zip(gathered, needed, strict=True)):
            expected = "the next layer's gather to start before a layer's gradient is there"
            raise Wrong("no-overlap", expected=expected, got="it starts afterwards")
        begin = report.calls_before[0]
        unfinished = max(
            len({n - begin for n in calls[i].beside} & {*reductions}) for i in reductions
        )
        if unfinished > 1:
            got = f"{unfinished + 1} at the same time"
            raise Wrong("too-much-ahead", expected="one reduction unfinished", got=got)
