"""The checks of chapter 08: the ledger of memory, an optimizer that shares its state out, the layout
of shards, FSDP, and checkpoints for any number of ranks.

Functions whose first argument is `rank` run on real ranks and only report what they saw; the
requirements, in the notebook's kernel, judge it.
"""

import copy
import math
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from course_utils.checks import Exercise, Wrong, expect, expect_type, run, same
from course_utils.checks.ranks import KINDS, Sent, described, following, waits
from course_utils.hardware import device
from course_utils.intercept import hand_work, listening

# ---- what several exercises need -----------------------------------------------------------------


def _shard_size(elements: int, ranks: int) -> int:
    return -(-elements // ranks)


def _shards(whole: Tensor, ranks: int) -> list[Tensor]:
    """Each rank's shard of a tensor: laid flat, padded with zeros, cut into equal pieces."""
    size = _shard_size(whole.numel(), ranks)
    flat = torch.cat([whole.flatten(), whole.new_zeros(ranks * size - whole.numel())])
    return [shard.clone() for shard in flat.view(ranks, size)]


def _larger_than_itself(tensor: Tensor) -> bool:
    """Whether a tensor keeps more memory alive than it needs."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def _tensor(draw, shape: tuple[int, ...]) -> Tensor:
    return draw.tensor(math.prod(shape)).view(shape)


# ---- 8.1 -----------------------------------------------------------------------------------------

ledger = Exercise(
    "8.1",
    "model_state_bytes",
    points=2,
    minutes=10,
    kind="first",
    parameters=("parameters", "world_size", "stage"),
    hints=[
        "Three sorts of bytes are held. For each: from which stage on is it sharded?",
        (
            "Each stage shards one sort more, and keeps sharded what was sharded before: first the "
            "optimizer state, then the gradients, then the parameters."
        ),
        (
            "Round the number of parameters in a shard up, before you multiply with bytes. Then add for "
            "each sort either all parameters or a shard of them, times its bytes."
        ),
    ],
    misconceptions={
        "stage-0-sharded": "Stage 0 shards nothing: every rank holds everything, whatever the number of "
        "ranks.",
        "wrong-order": "The parameters are sharded first. It is the optimizer state that stage 1 "
        "shards: it is the largest part, and needs no other training loop.",
        "only-its-own": "A stage shards its own sort of bytes alone. Each stage keeps what the one before "
        "has sharded: stage 2 shards optimizer state and gradients.",
        "everything-divided": "Everything is divided by the number of ranks at a stage below 3. What a "
        "stage does not shard, every rank holds whole.",
        "all-ranks-together": "These are the bytes of all ranks together: asked is one rank's.",
        "a-sort-missing": "One sort of bytes is left out. A rank holds parameters, gradients and the optimizer's "
        "state.",
        "other-unit": "This is another unit. Bytes are asked, and neither GB nor GiB.",
        "one-too-many": "Where the parameters divide, a shard has one too many: `//` and then 1 more is "
        "not the same as rounding up.",
        "rounded-down": "A shard is rounded down, and the last parameters belong to no rank.",
        "not-rounded": "A shard is no whole number of parameters: round it up.",
        "rounded-late": "You round bytes up. It is the number of parameters in a shard that is whole: "
        "round it before you multiply.",
        "sizes-fixed": "The bytes for one parameter are arguments, and you count with the defaults.",
        "no-error": "A stage that does not exist gives a number: raise a ValueError.",
        "other-error": "A stage that does not exist ends in another exception than a ValueError.",
    },
)

SORTS = ("parameters", "gradients", "optimizer")
SHARDED = {0: (), 1: ("optimizer",), 2: ("optimizer", "gradients"), 3: SORTS}
MIXED = {"parameters": 2, "gradients": 2, "optimizer": 12}


def _held(count: int, shard: float, sharded: Iterable[str], sizes: dict[str, int]) -> float:
    return sum(size * (shard if sort in sharded else count) for sort, size in sizes.items())


def _ledger_mistakes(count: int, ranks: int, stage: int, sizes: dict[str, int]) -> dict:
    size = _shard_size(count, ranks)
    reversed_order = SORTS[:stage]
    own = SHARDED[stage][-1:]
    right = _held(count, size, SHARDED[stage], sizes)
    rounded_late = (
        math.ceil(_held(count, count / ranks, SHARDED[stage], sizes)),
        sum(-(-count * n // (ranks if s in SHARDED[stage] else 1)) for s, n in sizes.items()),
    )
    without_one = [
        _held(count, size, SHARDED[stage], {s: n for s, n in sizes.items() if s != sort})
        for sort in SORTS
    ]
    cut_anyway = [_held(count, size, SHARDED[later], sizes) for later in (1, 2, 3)]
    return {
        "other-unit": lambda got: any(math.isclose(got * unit, right) for unit in (1e9, 2**30)),
        "sizes-fixed": sizes != MIXED and _held(count, size, SHARDED[stage], MIXED),
        "all-ranks-together": ranks * _held(count, size, SHARDED[stage], sizes),
        "stage-0-sharded": lambda got: stage == 0 and got in cut_anyway,
        "wrong-order": _held(count, size, reversed_order, sizes),
        "only-its-own": _held(count, size, own, sizes),
        "everything-divided": _held(count, size, SORTS, sizes),
        "one-too-many": _held(count, count // ranks + 1, SHARDED[stage], sizes),
        "rounded-down": _held(count, count // ranks, SHARDED[stage], sizes),
        "a-sort-missing": lambda got: got in without_one,
        "rounded-late": lambda got: got in rounded_late,
        "not-rounded": _held(count, count / ranks, SHARDED[stage], sizes),
    }


def _check_ledger(answer, count: int, ranks: int, stage: int, sizes=MIXED) -> None:
    named = {f"{sort.removesuffix('s')}_bytes": size for sort, size in sizes.items()}
    got = answer(count, ranks, stage, **({} if sizes == MIXED else named))
    expected = _held(count, _shard_size(count, ranks), SHARDED[stage], sizes)
    what = f"{count} parameters, {ranks} ranks, stage {stage}"
    expect_type(got, (int, float))
    likely = _ledger_mistakes(count, ranks, stage, sizes)
    expect(got, expected, what=what, likely=likely, tolerance=0)


@ledger.requires("the 7.5 billion parameters of the ZeRO paper's first figure, on 64 ranks")
def _(answer, draw):
    for stage in range(4):
        _check_ledger(answer, 7_500_000_000, 64, stage)


@ledger.requires("numbers of parameters that do not divide")
def _(answer, draw):
    ranks = draw.choice([5, 9, 11])  # a shard of one more is no whole number of bytes at any stage
    for stage in (3, 2, 1):
        _check_ledger(answer, ranks * draw.integer(100, 200) + 1, ranks, stage)


@ledger.requires("other bytes for one parameter")
def _(answer, draw):
    sizes = dict(zip(SORTS, draw.sample(range(3, 12), 3), strict=True))
    for stage in range(4):
        _check_ledger(answer, 60 * draw.integer(10, 20), draw.integer(3, 6), stage, sizes)


@ledger.requires("one rank holds everything, and more ranks than parameters hold one each")
def _(answer, draw):
    few = draw.integer(3, 6)
    for stage in range(4):
        _check_ledger(answer, draw.integer(10, 99), 1, stage)
        _check_ledger(answer, few, few + draw.integer(1, 3), stage)


@ledger.requires("a stage that does not exist is refused with a ValueError")
def _(answer, draw):
    for stage in (-1, 4):
        expected = f"a ValueError for stage {stage}"
        try:
            got = answer(100, 4, stage)
        except ValueError:
            continue
        except Exception as error:  # noqa: BLE001 - which one it is, is the question
            raise Wrong("other-error", expected=expected, got=type(error).__name__) from None
        raise Wrong("no-error", expected=expected, got=got)


# ---- 8.2 -----------------------------------------------------------------------------------------

sharding = Exercise(
    "8.2",
    "ShardedOptimizer",
    points=4,
    minutes=45,
    kind="stretch",
    hints=[
        (
            "Begin with one group. Decide who owns which parameter, the same way on every rank; give an "
            "inner optimizer your own ones; step; then broadcast every parameter from its owner."
        ),
        (
            "Torch's `Optimizer.__init__` calls `self.add_param_group` for every group it is given, so "
            "what has to be done for a new group is written there once. Give each parameter to the rank "
            "that owns the fewest elements so far."
        ),
        (
            "Keep one inner optimizer for each group, made of that group's options and the parameters that "
            "this rank owns, perhaps none. Before it steps, copy the options of your own group into its "
            "group, and let it use your `state` as its own. Then schedulers and `load_state_dict` need "
            "nothing more."
        ),
    ],
    misconceptions={
        "not-an-optimizer": "Schedulers and checkpoints want a whole `torch.optim.Optimizer`: derive from "
        "it, and call its `__init__`, which makes `state` and `param_groups`.",
        "groups-as-parameters": "`params` may be a list of groups, which are dicts with their parameters under "
        "'params'. Torch's `Optimizer.__init__` knows both forms, and calls `add_param_group` for each group.",
        "not-broadcast": "A rank still has an old value of a parameter that another rank has updated: "
        "every rank must receive every parameter after the step.",
        "not-waited": "Nobody waits for a message: what a rank uses may not have arrived.",
        "all-reduced": "The ranks' values of a parameter are added up or averaged after the update. Only its "
        "owner has the new value: broadcast that one.",
        "wrong-source": "A parameter's owner has updated it, and then received the old value again: "
        "broadcast from the owner, and not always from the same rank.",
        "left-over": "Some parameters have no owner and are never updated. Where the number of parameters "
        "does not divide, someone must take the rest.",
        "not-every-rank": "The ranks do not make the same calls. Everyone calls the broadcast of every "
        "parameter, in the same order and from the same rank: the owner sends, the others receive. So all "
        "must find the same owners; `id` and `hash` differ from one process to the next.",
        "both-send": "Ranks send to each other at the same time, and each waits until the other receives. "
        "One broadcast from the owner sends and receives.",
        "two-ranks": "This is made for two ranks, and the third finds no part of its own. Share out over "
        "`dist.get_world_size()` ranks.",
        "everyone-everything": "Every rank keeps the state of all parameters: nothing is saved. Give the "
        "inner optimizer the parameters that this rank owns.",
        "state-elsewhere": "The inner optimizer has the right part of the state, and yours shows none: "
        "`state` must have it, as for every optimizer.",
        "unbalanced": "One rank owns much more than its share. Count elements and not parameters: the next "
        "one goes to the rank with the fewest so far.",
        "unbalanced-groups": "Each group is shared out by itself, and the same ranks get the first "
        "of every one: with many small groups they own almost all. Count what a rank owns over all "
        "groups.",
        "drops-gradients": "After `step` a `.grad` is gone or has changed. An optimizer leaves "
        "gradients as they are: their owner clears them, with `zero_grad`, and may want to look at "
        "them before.",
        "closure-late": "The closure is called after the update, which then has the gradients of "
        "an earlier step or none: call it first.",
        "groups-lost": "All parameters are updated with the same options. A group has its own learning "
        "rate and weight decay.",
        "scheduler-unheard": "The scheduler has changed the learning rate in your `param_groups`, and the "
        "inner optimizer still uses the old one: hand it the options of each group before it steps.",
        "options-unheard": "The inner optimizer hears of the learning rate only. Schedulers change other "
        "options too, OneCycleLR the momentum: hand over all options of a group, before each step.",
        "options-missing": "Your `param_groups` lack options that `optimizer_cls` has, such as Adam's "
        "`betas`, and schedulers look there. What is not in kwargs is in the inner's `defaults`.",
        "fixed-optimizer": "The update is not that of `optimizer_cls` with these kwargs.",
        "first-state-lost": "This optimizer makes its state when it is constructed, for every group, and yours "
        "steps without it: hand the inner's `state` on as soon as there is one.",
        "empty-rank": "A rank may own nothing of a group, surely with more ranks than parameters, and an "
        "optimizer refuses an empty list. A group with an empty list is accepted: `[{'params': []}]`.",
        "generator-used-up": "`model.parameters()` is a generator: it can be read once. Make a list first.",
        "new-group-lost": "The parameters of an added group are not updated. `add_param_group` must share "
        "them out, too.",
        "unfrozen-lost": "A parameter that was frozen at first, and learns later, is not updated: it needs "
        "an owner from the beginning.",
        "none-gradient": "A parameter without a gradient has `.grad` None; an optimizer leaves it alone.",
        "closure-lost": "`step(closure)` calls the closure once and returns its loss.",
        "closure-twice": "The closure is called more than once: call it yourself, and let the inner "
        "optimizer step without it.",
        "closure-no-grad": "The closure runs without gradients: it computes a loss and calls backward, so "
        "call it under `torch.enable_grad()`.",
        "state-not-restored": "After `load_state_dict` the inner optimizer goes on with another state than "
        "the one that was saved, or with none.",
    },
    failures={
        "timeout": "not-every-rank",
        "mismatch": "not-every-rank",
        "waits in send": "both-send",
        "empty parameter list": "empty-rank",
        "no attribute 'state'": "not-an-optimizer",
        "no attribute 'defaults'": "not-an-optimizer",
        "no attribute 'param_groups'": "not-an-optimizer",
        "IndexError": "two-ranks",
    },
)

Gradient = Tensor | None


@dataclass
class _Updates:
    """Parameters, their groups, and a gradient for each at each step, the same on every rank."""

    tensors: list[Tensor]
    steps: list[list[Gradient]]
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    kwargs: dict = field(default_factory=lambda: {"lr": 0.1, "momentum": 0.9})
    groups: list[tuple[list[int], dict]] | None = None  # which parameters, and their options
    added: tuple[list[int], dict] | None = None  # a group that comes after the first step
    frozen: tuple[int, ...] = ()  # at first; they learn after the first step
    later: dict | None = None  # options that every group gets after the first step
    decay: float | None = None  # a scheduler multiplies the learning rates with it at each step
    tied: bool = False  # they come from a model that has the first one at two places


@dataclass
class _Updated:
    values: list[list[Tensor]]  # after each step
    unwaited: list[str] = field(default_factory=list)  # collectives for which nobody has waited
    listed: list[int] = field(default_factory=list)  # parameters in `state`
    held: list[int] = field(default_factory=list)  # parameters of which an inner one has state
    options: list[str] = field(default_factory=list)
    left_gradients: bool = True  # does every parameter have the gradient that it had before a step?


def _tied(parameters: list[nn.Parameter]) -> nn.Module:
    """A model that uses its first parameter at two places, as embedding and head do."""
    model = nn.Module()
    for index, parameter in enumerate([*parameters, parameters[0]]):
        model.register_parameter(f"parameter{index}", parameter)
    return model


def _update(rank, make: Callable, task: _Updates) -> _Updated:
    """Runs on a rank with the answer for `make`, and in the kernel with the optimizer itself."""
    parameters = [nn.Parameter(tensor.clone().to(device())) for tensor in task.tensors]
    for index in task.frozen:
        parameters[index].requires_grad_(False)
    names = {parameter: index for index, parameter in enumerate(parameters)}
    made: list[torch.optim.Optimizer] = []

    class Watched(task.optimizer):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    later = task.added[0] if task.added else []
    whole = [p for index, p in enumerate(parameters) if index not in later]
    groups = [{"params": [parameters[i] for i in own], **o} for own, o in task.groups or []]
    handed = _tied(whole).parameters() if task.tied else groups or whole
    optimizer = make(handed, Watched, **task.kwargs)
    scheduler = task.decay and torch.optim.lr_scheduler.ExponentialLR(optimizer, task.decay)
    report = _Updated([])
    for step, gradients in enumerate(task.steps):
        if step == 1 and task.added:
            own, options = task.added
            optimizer.add_param_group({"params": [parameters[i] for i in own], **options})
        if step == 1:
            for group in optimizer.param_groups:
                group.update(task.later or {})
            for parameter in parameters:
                parameter.requires_grad_()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            learns = gradient is not None and parameter.requires_grad
            parameter.grad = gradient.clone().to(device()) if learns else None
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        optimizer.step()
        report.left_gradients &= same([p.grad for p in parameters], before)
        if scheduler:
            scheduler.step()
        report.values.append([parameter.detach().clone().cpu() for parameter in parameters])
    report.listed = sorted(names[p] for p in optimizer.state if p in names)
    report.held = sorted(
        {names[p] for inner in made for p, s in inner.state.items() if s and p in names}
    )
    report.options = sorted(optimizer.param_groups[0])
    return report


def _sharded(rank, answer, tasks: list[_Updates]) -> list[_Updated]:
    reports = []
    for task in tasks:
        with following() as sent:
            report = _update(rank, answer, task)
        reports.append(replace(report, unwaited=sent.unwaited))
    return reports


def _itself(params, optimizer: type[torch.optim.Optimizer], **kwargs) -> torch.optim.Optimizer:
    return optimizer(params, **kwargs)


def _expected(task: _Updates, **changes) -> _Updated:
    return _update(0, _itself, replace(task, **changes))


def _updates(draw, shapes: list[tuple[int, ...]], **options) -> _Updates:
    tensors = _tensors(draw, shapes)
    return _Updates(tensors, [_tensors(draw, shapes) for _ in range(3)], **options)


def _check_updates(
    answer, task: _Updates, ranks: int, likely: dict[str, Callable] | None = None
) -> list[_Updated]:
    """Compares every parameter on every rank after every step with the inner optimizer alone."""
    reports = [each for [each] in run(_sharded, ranks, answer, [task])]
    _judge_updates(reports, task, likely or {})
    return reports


def _judge_updates(reports: list[_Updated], task: _Updates, likely: dict[str, Callable]) -> None:
    """`likely` maps a misconception to a function of (step, parameter, what every rank has)."""
    ranks = len(reports)
    for report in reports:
        if report.unwaited:
            raise Wrong("not-waited", expected="a wait() for every message", got="none")
    expected = _expected(task).values
    for step, right in enumerate(expected):
        before = expected[step - 1] if step else task.tensors
        for index, value in enumerate(right):
            got = [report.values[step][index] for report in reports]
            named = {slug: made(step, index, got) for slug, made in likely.items()}
            unchanged = not same(before[index], value) and same(got, [before[index]] * ranks)
            named["left-over"] = unchanged and not any(index in r.held for r in reports)
            named["wrong-source"] = unchanged
            others = (ranks - 1) * before[index]
            mixtures = (ranks * value, value + others, (value + others) / ranks)
            named["all-reduced"] = any(same(got, [mixed] * ranks) for mixed in mixtures)
            named["not-broadcast"] = any(same(own, value) for own in got)
            what = f"parameter {index} after step {step + 1}"
            expect(got, [value] * ranks, each="rank", what=what, likely=named)
    if not all(report.left_gradients for report in reports):
        raise Wrong(
            "drops-gradients", expected="every `.grad` as before the step", got="another one"
        )


def _as_if(task: _Updates, **changes) -> Callable:
    """A mistake that gives what another task gives."""
    values = _expected(task, **changes).values
    return lambda step, index, got: same(got, [values[step][index]] * len(got))


def _check_owners(reports: list[_Updated], task: _Updates, slug: str = "unbalanced") -> None:
    """Each parameter's state is on one rank, and the ranks have similar amounts of it."""
    for index in range(len(task.tensors)):
        owners = [rank for rank, report in enumerate(reports) if index in report.held]
        likely = {"everyone-everything": len(owners) > 1, "left-over": not owners}
        expect(len(owners), 1, what=f"ranks with state of parameter {index}", likely=likely)
    for report in reports:
        likely = {"state-elsewhere": True}
        expect(report.listed, report.held, what="the parameters in `state`", likely=likely)
    sizes = [tensor.numel() for tensor in task.tensors]
    limit = sum(sizes) / len(reports) + max(sizes)
    most = max(sum(sizes[index] for index in report.held) for report in reports)
    if most > limit:
        expected = f"state of at most {limit:.0f} of {sum(sizes)} elements on each rank"
        raise Wrong(slug, expected=expected, got=most)


def _small(draw) -> list[tuple[int, ...]]:
    """Shapes of five parameters, a number that neither 2 nor 3 ranks divide."""
    a, b, c = draw.sample(range(2, 7), 3)
    return [(a, b), (b,), (c, a), (a + c,), (c, c)]


@sharding.requires(
    "two ranks end each step with what one optimizer gives", failures={"IndexError": "exception"}
)
def _(answer, draw):
    _check_updates(answer, _updates(draw, _small(draw)), 2)


@sharding.requires("every parameter's state is on one rank, and the shares are fair")
def _(answer, draw):
    ranks, width = draw.choice((2, 3)), draw.integer(6, 9)
    large_and_small = [(width, width), *[(2,)] * (ranks - 1)]  # dealt out, rank 0 gets all large
    task = _updates(draw, large_and_small * (2 * ranks))
    _check_owners(_check_updates(answer, task, ranks), task)


@sharding.requires(
    "groups keep their options, and a scheduler is heard",
    failures={
        "is not an Optimizer": "not-an-optimizer",
        "AttributeError": "groups-as-parameters",
        "TypeError": "groups-as-parameters",
    },
)
def _(answer, draw):
    groups = [([0, 1], {"lr": 0.5}), ([2, 3, 4], {"weight_decay": 0.1})]
    task = _updates(draw, _small(draw), groups=groups)
    scheduled = replace(task, decay=0.5)
    others = replace(task, later={"momentum": draw.number(0.3, 0.6), "nesterov": True})
    reports = run(_sharded, draw.choice((2, 3)), answer, [task, scheduled, others])
    both = list(zip(*reports, strict=True))
    plain = [(own, {}) for own, _ in groups]
    _judge_updates(both[0], task, {"groups-lost": _as_if(task, groups=plain)})
    _judge_updates(both[1], scheduled, {"scheduler-unheard": _as_if(task)})
    _judge_updates(both[2], others, {"options-unheard": lambda *_: True})


@sharding.requires("the shares are fair over many groups", needs_earlier=True)
def _(answer, draw):
    ranks = draw.choice((2, 3))
    alike = [(draw.integer(3, 5), 2)] * (2 * ranks)
    task = _updates(draw, alike, groups=[([index], {}) for index in range(len(alike))])
    _check_owners(_check_updates(answer, task, ranks), task, "unbalanced-groups")


class _StateAtOnce(torch.optim.SGD):
    """Makes its momenta when it is constructed, and begins with ones."""

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)


def _updated_alike(task: _Updates, step: int, index: int, got: list[Tensor]) -> bool:
    """Whether all ranks have updated a parameter, in the same way."""
    return same(got, [got[0]] * len(got)) and not same(got[0], task.tensors[index])


@sharding.requires("any inner optimizer, with all its options to see")
def _(answer, draw):
    tasks = [
        _updates(draw, _small(draw), optimizer=optimizer, kwargs=kwargs)
        for optimizer, kwargs in (
            (torch.optim.Adam, {"lr": 0.01}),
            (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
        )
    ]
    groups = [([0, 1], {"lr": 0.1}), ([2, 3, 4], {"lr": 0.2})]
    at_once = _updates(draw, _small(draw), optimizer=_StateAtOnce, groups=groups)
    tasks.append(replace(at_once, kwargs={"lr": 0.1, "momentum": 0.9}))
    of_tasks = zip(*run(_sharded, draw.choice((2, 3)), answer, tasks), strict=True)
    for task, reports in zip(tasks, of_tasks, strict=True):
        without_state = _as_if(task, optimizer=torch.optim.SGD) if task is tasks[-1] else None
        likely = {"first-state-lost": without_state} if without_state else {}
        _judge_updates(reports, task, likely | {"fixed-optimizer": partial(_updated_alike, task)})
        _check_owners(reports, task)
        missing = set(_expected(task).options) - set(reports[0].options)
        if missing:
            got = f"no {' and '.join(sorted(missing))}"
            raise Wrong("options-missing", expected="all options of the inner one", got=got)


@sharding.requires("three ranks, and one")
def _(answer, draw):
    for ranks in (3, 1):
        task = _updates(draw, _small(draw))
        _check_owners(_check_updates(answer, task, ranks), task)


@sharding.requires(
    "`model.parameters()`, a generator, of a model with a tied matrix",
    failures={"empty parameter list": "generator-used-up"},
)
def _(answer, draw):
    task = _updates(draw, _small(draw), tied=True)
    _check_owners(_check_updates(answer, task, draw.choice((2, 3))), task)


@sharding.requires(
    "more ranks than parameters",
    failures={"IndexError": "empty-rank"},
)
def _(answer, draw):
    shapes = [(draw.integer(2, 5), 2), (draw.integer(2, 5),)]
    _check_updates(answer, _updates(draw, shapes), draw.choice((3, 4)))


@sharding.requires("a group that is added later")
def _(answer, draw):
    task = _updates(draw, _small(draw), added=([3, 4], {"lr": 0.3}), optimizer=torch.optim.Adam)
    task = replace(task, kwargs={"lr": 0.1})
    likely = {"new-group-lost": lambda step, index, got: index in (3, 4)}
    _check_owners(_check_updates(answer, task, draw.choice((2, 3)), likely), task)


@sharding.requires(
    "a parameter without a gradient, and one that is frozen at first",
    failures={"AttributeError": "none-gradient", "TypeError": "none-gradient"},
)
def _(answer, draw):
    task = _updates(draw, _small(draw), frozen=(1, 2))
    for gradients in task.steps:
        gradients[3] = None
    likely = {"unfrozen-lost": lambda step, index, got: step > 0 and index in (1, 2)}
    _check_updates(answer, task, draw.choice((2, 3)), likely)


@dataclass
class _Closed:
    loss: float | None
    calls: int
    with_gradients: bool
    weight: Tensor


def _with_closure(rank, answer, tensors: list[Tensor]) -> _Closed:
    parameters = [nn.Parameter(tensor.clone().to(device())) for tensor in tensors]
    optimizer = answer(parameters, torch.optim.SGD, lr=0.1)
    modes: list[bool] = []

    def closure() -> Tensor:
        modes.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = sum(parameter.square().sum() for parameter in parameters)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    value = loss.item() if torch.is_tensor(loss) else None
    return _Closed(
        value, len(modes), all(modes), torch.cat([p.detach().flatten() for p in parameters])
    )


@sharding.requires("step(closure) calls it once and returns its loss")
def _(answer, draw):
    tensors = _tensors(draw, [(draw.integer(2, 5), 2), (4,)])
    loss = sum(tensor.square().sum().item() for tensor in tensors)
    after = torch.cat([0.8 * tensor.flatten() for tensor in tensors])
    unchanged = torch.cat([tensor.flatten() for tensor in tensors])
    for report in run(_with_closure, 3, answer, tensors):  # one of them owns nothing
        likely = {"closure-lost": report.calls == 0, "closure-twice": True}
        expect(report.calls, 1, what="calls of the closure", likely=likely)
        expect(
            report.with_gradients, True, what="gradients enabled", likely={"closure-no-grad": True}
        )
        expect(report.loss, loss, what="the loss returned", likely={"closure-lost": True})
        likely = {"closure-late": unchanged}
        expect(report.weight, after, what="the parameters", likely=likely)


def _resumed(rank, answer, task: _Updates) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters after the last step, without a break and with a new optimizer before it."""

    def begin(tensors: list[Tensor]) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        parameters = [nn.Parameter(tensor.detach().clone().to(device())) for tensor in tensors]
        return parameters, answer(parameters, task.optimizer, **task.kwargs)

    def step(parameters, optimizer, gradients) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone().to(device())
        optimizer.step()

    parameters, optimizer = begin(task.tensors)
    for gradients in task.steps[:-1]:
        step(parameters, optimizer, gradients)
    optimizer.param_groups[0]["lr"] /= 2
    saved = copy.deepcopy(optimizer.state_dict())
    others, other = begin(parameters)
    other.load_state_dict(saved)
    step(parameters, optimizer, task.steps[-1])
    step(others, other, task.steps[-1])
    return [p.detach() for p in parameters], [p.detach() for p in others]


@sharding.requires("state_dict() and load_state_dict() resume a rank's part", needs_earlier=True)
def _(answer, draw):
    task = _updates(draw, _small(draw), optimizer=torch.optim.Adam, kwargs={"lr": 0.1})
    for straight, resumed in run(_resumed, draw.choice((2, 3)), answer, task):
        likely = {"state-not-restored": True}
        expect(resumed, straight, each="parameter", what="after resuming", likely=likely)


# ---- 8.3 -----------------------------------------------------------------------------------------

layout = Exercise(
    "8.3",
    "FlatLayout",
    points=2,
    minutes=25,
    kind="core",
    hints=[
        (
            "Add up the elements of all shapes, divide by the number of ranks and round up. That many "
            "times the number of ranks is the vector's length."
        ),
        (
            "Slices, `split`, `view` and `unbind` give views, `cat` and `stack` give copies. Which of the "
            "three methods may copy?"
        ),
        (
            "Get a vector of zeros with the tensors' dtype, and copy each tensor into its place: "
            "`unflatten` gives the places. The shards are the rows of the vector seen as a matrix with "
            "one row a rank."
        ),
    ],
    misconceptions={
        "rounded-down": "A shard is rounded down: the last elements belong to no rank. Round up, and pad.",
        "padded-each": "Every tensor is padded by itself. Lay all of them end to end first, and pad once.",
        "padded-too-much": "The vector is longer than it must be. Where the sizes divide, there is nothing "
        "to pad.",
        "not-padded": "The vector is as long as the tensors together: zeros are missing at the end.",
        "padding-not-zero": "The padding is not zero. It takes part in sums and in updates of an "
        "optimizer: memory from `torch.empty` may hold anything.",
        "padded-in-front": "The zeros are in front. The tensors come first, the padding at the end.",
        "strided": "Each rank gets every n-th element. Asked are consecutive ones: n equal pieces of the "
        "vector, one after the other.",
        "too-few-shards": "There are not as many shards as ranks. `chunk` and `split` round up, and may "
        "give fewer pieces than you asked for.",
        "shards-copied": "A shard is a copy. What an all-gather writes into the shards must be in the "
        "vector.",
        "tensors-copied": "What comes out is a copy. `unflatten` returns views: what is written into the "
        "vector later must be in the tensors.",
        "flatten-aliases": "`flatten` returns a vector in the memory of a tensor that was handed in. Asked "
        "is a new one.",
        "buffer-kept": "Two calls of `flatten` return the same memory: the second overwrites what the first has "
        "returned. Make a new vector in each.",
        "input-changed": "`flatten` has changed what was handed in: the tensors, as `a.copy_(b)` writes into "
        "`a`, or the list of them.",
        "dtype-lost": "The vector has another dtype than the tensors.",
        "not-contiguous": "A tensor that is not contiguous, such as a transposed one, has no flat view. "
        "Row-major order is that of its indices: `flatten()` and `copy_` know it.",
        "scalars": "A tensor without dimensions has the shape () and one element.",
        "dimensions-left-out": "A shape may have any number of dimensions: its elements are the product of all "
        "of them, which is `shape.numel()`.",
    },
)


def _tensors(draw, shapes: list[tuple[int, ...]], dtype=torch.float32) -> list[Tensor]:
    return [_tensor(draw, shape).to(dtype) for shape in shapes]


def _sizes(shapes: list[tuple[int, ...]]) -> list[int]:
    return [math.prod(shape) for shape in shapes]


def _laid_out(answer, shapes: list[tuple[int, ...]], ranks: int):
    return answer([torch.Size(shape) for shape in shapes], ranks)


def _check_layout(answer, tensors: list[Tensor], ranks: int) -> None:
    """Goes through size, vector, shards and tensors of one layout."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    sizes = _sizes(shapes)
    size = _shard_size(sum(sizes), ranks)
    made = _laid_out(answer, shapes, ranks)
    _check_shard_size(made.shard_size, shapes, ranks)
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    flat = made.flatten(tensors)
    expect_type(flat, Tensor)
    if len(tensors) != len(shapes):
        got = f"{len(tensors)} tensors in it"
        raise Wrong("input-changed", expected=f"the list of {len(shapes)} tensors", got=got)
    if not same(torch.cat([tensor.flatten() for tensor in tensors]), joined):
        raise Wrong(
            "input-changed", expected="the tensors as they were", got="other values in them"
        )
    padding = joined.new_zeros(ranks * size - len(joined))
    likely = {
        "dtype-lost": lambda got: got.dtype != joined.dtype,
        "tensors-copied": lambda got: len(got) == ranks * size and not got.any(),
        "not-padded": lambda got: len(padding) > 0 and same(got, joined),
        "padded-in-front": torch.cat([padding, joined]),
        "padding-not-zero": lambda got: (
            len(got) == ranks * size and same(got[: len(joined)], joined)
        ),
        "padded-too-much": lambda got: len(got) > ranks * size,
        "not-contiguous": any(not tensor.is_contiguous() for tensor in tensors),
    }
    expect(flat, torch.cat([joined, padding]), what="the vector", likely=likely)
    shards = made.shards(flat)
    expect_type(shards, (list, tuple))
    likely = {
        "too-few-shards": lambda got: len(got) != ranks,
        "strided": [flat[rank::ranks] for rank in range(ranks)],
    }
    expect(list(shards), list(flat.view(ranks, size)), each="rank", likely=likely)
    back = made.unflatten(flat)
    expect_type(back, (list, tuple))
    expect(list(back), tensors, each="tensor", what="unflatten")


def _check_shard_size(got, shapes: list[tuple[int, ...]], ranks: int) -> None:
    sizes = _sizes(shapes)
    total = sum(sizes)
    likely = {
        "rounded-down": total % ranks > 0 and total // ranks,
        "padded-each": sum(_shard_size(size, ranks) for size in sizes),
        "padded-too-much": lambda got: got > _shard_size(total, ranks),
        "dimensions-left-out": any(len(shape) > 2 for shape in shapes),
    }
    expect(got, _shard_size(total, ranks), what="shard_size", likely=likely)


@layout.requires("tensors that divide evenly come back, and nothing is padded")
def _(answer, draw):
    ranks = draw.integer(2, 4)
    _check_layout(answer, _tensors(draw, [(ranks, 3), (2, 2, ranks), (ranks,)]), ranks)


@layout.requires("tensors that do not divide are padded once, with zeros, at the end")
def _(answer, draw):
    torch.empty(1000).fill_(math.nan)  # what torch.empty gets next is less often zero
    # each tensor has one element more than divides: to pad each by itself makes another size
    awkward = [([(3, 7), (5,), (1, 3, 3)], 4), ([(3, 7), (11,), (2, 1, 3)], 5)]
    shapes, ranks = draw.choice([*awkward, ([(5, 5), (7,), (13, 1)], 6)])
    _check_layout(answer, _tensors(draw, shapes), ranks)
    _check_layout(answer, _tensors(draw, [(draw.choice((2, 4, 5)), 3), (5,)]), 7)
    _check_layout(answer, _tensors(draw, [(2, 3), (1,)]), 5)  # the last shard is padding only


@layout.requires("shards and tensors are views into the vector, and the vector is new")
def _(answer, draw):
    tensors = _tensors(draw, [(3, draw.integer(4, 6)), (7,)])
    shapes = [tuple(tensor.shape) for tensor in tensors]
    made = _laid_out(answer, shapes, draw.integer(3, 5))
    flat = made.flatten(tensors)
    places = made.unflatten(flat)
    if any(t.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr() for t in places):
        raise Wrong("tensors-copied", expected="views into the vector", got="memory of their own")
    if made.flatten(tensors).untyped_storage().data_ptr() == flat.untyped_storage().data_ptr():
        raise Wrong("buffer-kept", expected="a new vector", got="that of the call before")
    for shard in made.shards(flat):
        shard.fill_(7.0)
    if not bool((flat == 7.0).all()):
        raise Wrong("shards-copied", expected="a write into a shard to change the vector", got=flat)
    single = draw.tensor(8)
    made = _laid_out(answer, [(8,)], 2)
    made.flatten([single]).fill_(7.0)
    if bool((single == 7.0).all()):
        got = "a write into the vector has changed the tensor"
        raise Wrong("flatten-aliases", expected="a vector with memory of its own", got=got)


@layout.requires("more ranks than elements", failures={"exception": "too-few-shards"})
def _(answer, draw):
    _check_layout(answer, _tensors(draw, [(2, 1)]), draw.integer(3, 6))
    _check_layout(answer, _tensors(draw, [(1, 2), (draw.integer(1, 3),)]), 7)


@layout.requires("a tensor without dimensions, and one rank", failures={"exception": "scalars"})
def _(answer, draw):
    _check_layout(answer, _tensors(draw, [(), (2, draw.integer(2, 5))]), 2)
    _check_layout(answer, _tensors(draw, [(2, 3), ()]), 1)


@layout.requires(
    "bfloat16, and tensors that are not contiguous", failures={"exception": "not-contiguous"}
)
def _(answer, draw):
    ranks = draw.integer(2, 4)
    _check_layout(answer, _tensors(draw, [(3, 4), (5,)], torch.bfloat16), ranks)
    _check_layout(answer, [draw.tensor(3, 4).T, draw.tensor(6)[::2]], ranks)


# ---- 8.4 -----------------------------------------------------------------------------------------

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


# ---- 8.4: the start ----


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
    too_large = [name for name, p in own.named_parameters() if _larger_than_itself(p)]
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
        return value if value is None or value.dim() < 2 else _shards(value, ranks)[rank]

    return [{name: kept(value, rank) for name, value in whole.items()} for rank in range(ranks)]


@fsdp.requires(
    "every rank starts with rank 0's parameters and buffers, and full_parameters() gives them",
    failures={"AttributeError": "no-module", "IndexError": "wrong-shard", "signal": "a-view"},
)
def _(answer, draw):
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


@fsdp.requires("a rank keeps its shard of each matrix, and every vector")
def _(answer, draw):
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


# ---- 8.4: training ----


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
    gathered[0] += sum(tensor.numel() for tensor in payload if kind == "gather")


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
        recipe, draw.seed(), _tensor(draw, (steps, passes, ranks, *rows, recipe.width))
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
def _(answer, draw):
    for report in run(_started, 2, answer, _recipe(draw, _plain, 2), draw.seed()):
        if report.aliased:
            got = f"{report.aliased[0]} in the memory of the parameter"
            raise Wrong("full-aliased", expected="tensors of their own", got=got)


@fsdp.requires("two ranks compute and learn as one process does")
def _(answer, draw):
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
    counts: dict[str, int]  # elements by kind of call
    blocking: list[str]  # calls of backward for which it stood still
    unfinished: int  # the most reductions of matrices under way when another one starts
    beside: int = 0  # the most under way, of vectors too, when backward arrives at a layer
    groups: dict[str, set[str]] = field(default_factory=dict)  # of backward's calls, by kind


class _Marked(torch.autograd.Function):
    """Tells when backward comes by."""

    @staticmethod
    def forward(ctx, x: Tensor, tell: Callable) -> Tensor:
        ctx.tell = tell
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.tell()
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
    report = _Passage([], [], [], [], [], [], dict.fromkeys([*KINDS.values(), "other"], 0), [], 0)
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
        # only reductions are asked after below, and a gather's Work holds what it has gathered
        own = reductions + of_vectors
        asked[:] = [work for work in asked if any(work is other for other in own)]
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
        return [work for work in works if not any(work is other for other in asked)]

    for index, layer in enumerate(module.layers):
        layer.see = partial(see, index)
    module.arrives = arrives

    def hear(name: str, arguments: dict) -> Callable | None:
        kind, payload = described(name, arguments)
        elements = sum(tensor.numel() for tensor in payload)
        report.counts[kind] += elements
        matrix = kind == "reduce_scatter" or elements > sizes.width
        if backward[0] and matrix and arguments.get("async_op") is False:
            report.blocking.append(kind)
        if backward[0] and matrix:
            group = dist.ProcessGroup.unbox(arguments["process_group"])
            report.groups.setdefault(kind, set()).add(group.group_name)
        if backward[0] and kind == "gather":
            started[0] += 1
        if kind == "all_reduce" and not matrix:
            return lambda result: hand_work(result, of_vectors.append)
        if kind == "gather" or not matrix:
            return None
        report.gathered.append(started[0])
        report.unfinished = max(report.unfinished, len(under_way(reductions)) + 1)
        return lambda result: hand_work(result, reductions.append)

    with waits() as asked, listening(hear):
        _forward_backward(model, x)
        model.finish_gradient_synchronization()
    report.alive_afterwards = settled(lambda found: not found)
    report.hidden = [
        index
        for index, layer in enumerate(module.layers)
        if layer.weight is not layer._parameters["weight"]
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
        if early and report.counts["gather"] <= _gathered_elements(sizes, len(reports)):
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
def _(answer, draw):
    ranks = draw.choice((2, 3))
    sizes = _sizes_of_tower(draw, ranks)
    _check_memory(run(_passage, ranks, answer, sizes, draw.seed()), sizes)


@fsdp.requires("no byte more than needed goes over the wire", needs_earlier=True)
def _(answer, draw):
    ranks = draw.choice((2, 3))
    sizes = _sizes_of_tower(draw, ranks)
    gathered, vectors = _gathered_elements(sizes, ranks), sizes.layers * sizes.width
    for report in run(_passage, ranks, answer, sizes, draw.seed()):
        counts = report.counts
        if counts["all_reduce"] > vectors:
            got = f"{counts['all_reduce']} elements all-reduced"
            raise Wrong("all-reduced", expected=f"the {vectors} of the vectors", got=got)
        likely = {"gathered-again": lambda got: got > gathered}
        expect(counts["gather"], gathered, what="elements handed to gathers", likely=likely)


@fsdp.requires(
    "three ranks, and one; sizes that do not divide",
    failures={"mismatch": "remainder-lost", "is invalid for input of size": "remainder-lost"},
    needs_earlier=True,
)
def _(answer, draw):
    recipe = _Recipe(_uneven, draw.choice((5, 7, 8)), draw.choice((4, 5, 7)))
    for ranks in (3, 1):
        _check_training(answer, _training(draw, recipe, ranks), "remainder-lost")


@fsdp.requires(
    "two backward passes before one update, and gradients set to zero",
    failures={"exception": "accumulated-wrong"},
    needs_earlier=True,
)
def _(answer, draw):
    task = _training(draw, _recipe(draw, _plain, 2), 2, passes=2)
    _check_training(answer, replace(task, keep_zeros=True), "accumulated-wrong")


def _with_frozen(rank, answer, task: _Training, sizes: _Sizes) -> tuple[list[_Step], _Passage]:
    return _trained(rank, answer, task), _passage(rank, answer, sizes, task.seed, frozen=(1, 2))


@fsdp.requires(
    "a frozen layer",
    failures={"exception": "frozen", "'NoneType'": "frozen"},
    needs_earlier=True,
)
def _(answer, draw):
    task, sizes = _training(draw, _recipe(draw, _FrozenMiddle, 2), 2), _sizes_of_tower(draw, 2)
    trainings, passages = zip(*run(_with_frozen, 2, answer, task, sizes), strict=True)
    _judge_training(trainings, "frozen")
    _check_memory(passages, sizes)


def _requires_training(text: str, kind: Callable, slug: str, failures, rows=(4,)) -> None:
    """Adds the requirement that models of this kind are trained."""

    failures = dict.fromkeys(["'NoneType'", *failures], slug)

    @fsdp.requires(text, failures=failures, needs_earlier=True)
    def _(answer, draw):
        ranks = draw.choice((2, 3))
        task = _training(draw, _recipe(draw, kind, ranks), ranks, rows=rows)
        _check_training(answer, task, slug)


_requires_training("a layer that is not called", _UnusedLayer, "unused", ["exception"])


@fsdp.requires(
    "a tied matrix, and a layer that is called twice",
    failures={"exception": "tied"},
    needs_earlier=True,
)
def _(answer, draw):
    ranks = draw.choice((2, 3))
    task = _training(draw, _recipe(draw, _TiedEnds, ranks), ranks)
    reports = run(_trained, ranks, answer, task)
    _judge_training(reports, "tied")
    most = 2 * _TiedEnds.CALLS * _shard_size(task.recipe.width**2, ranks)
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
def _(answer, draw):
    recipe = _recipe(draw, _plain, 2)
    for got, expected in run(_looked, 2, answer, recipe, draw.seed(), draw.tensor(4, recipe.width)):
        expect(got, expected, what="the output", likely={"without-gradients": True})


@fsdp.requires("shapes has those of the whole parameters", needs_earlier=True)
def _(answer, draw):
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
def _(answer, draw):
    recipe = _recipe(draw, _plain, 2)
    for found in run(_in_double, 2, answer, recipe, draw.seed(), draw.tensor(4, recipe.width)):
        for what, dtypes in found.items():
            expect(dtypes, {torch.float64}, what=f"dtypes of {what}", likely={"double-lost": True})


@fsdp.requires(
    "with compute_dtype, weights travel and compute in bfloat16, and the rest stays float32",
    failures={"same dtype": "dtypes-mixed", "scalar type": "dtypes-mixed"},
    needs_earlier=True,
)
def _(answer, draw):
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
    if ("gather", full) in step.sent.dtypes:
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
def _(answer, draw):
    tokens = torch.tensor([draw.integer(0, 6) for _ in range(5)])
    dtypes = run(_read_words, 2, answer, draw.integer(3, 6), tokens)
    expect(dtypes, [torch.bfloat16] * 2, each="rank", likely={"dtypes-mixed": True})


@fsdp.requires("the next gather, and one reduction, run beside backward", needs_earlier=True)
def _(answer, draw):
    sizes = _sizes_of_tower(draw, 2)
    for report in run(_passage, 2, answer, sizes, draw.seed()):
        if report.blocking:
            got = f"a {report.blocking[0]} without async_op"
            raise Wrong("backward-blocks", expected="calls that do not block", got=got)
        if not report.beside:
            got = "each is waited for before backward goes on"
            raise Wrong(
                "backward-blocks", expected="a reduction that runs beside backward", got=got
            )
        of_gathers = report.groups.get("gather", set())
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


# ---- 8.5 -----------------------------------------------------------------------------------------

resharding = Exercise(
    "8.5",
    "reshard",
    points=3,
    minutes=40,
    kind="core",
    parameters=("checkpoints", "world_size"),
    hints=[
        (
            "Take one parameter at a time: put its shards together, drop the padding, and cut again. Its "
            "whole shape tells how much of the vector is real."
        ),
        (
            "What is cut, and what is the same on every rank? Decide by the shape of the parameter, and, "
            "for the optimizer's values, by whether they have a dimension at all."
        ),
        (
            "Sort the parts by their rank and compare with what the run must have had. Write one function "
            "that turns the old ranks' values into the new ranks' values, by the parameter's shape. Use "
            "it for parameters and for each entry of the optimizer's state; clone what you cut."
        ),
    ],
    misconceptions={
        "list-order": "The shards are put together in the order of the list. Each part tells its `rank`: "
        "sort by it.",
        "sorted-as-text": "The parts are put together in the order of their ranks as text, where 10 comes "
        "before 2: compare numbers.",
        "padding-kept": "The old padding is still in there: it was cut along with the rest. The whole "
        "shape tells how many elements are real.",
        "vectors-cut": "Parameters with one dimension or none are the same on every rank: they are neither "
        "put together nor cut.",
        "whole-everywhere": "Every rank gets the whole parameter: cut it again.",
        "matrix-shape": "A shard is a vector: the matrix is laid flat before it is cut.",
        "uneven": "The new shards are not equal. Pad with zeros, until they are.",
        "padding-inside": "Every piece is padded by itself, so that zeros stand between the "
        "elements. Lay the whole end to end, pad once behind it, and cut.",
        "fewer-pieces": "Not every rank gets a shard: `chunk` makes fewer pieces where there are "
        "fewer elements than ranks. A rank that has no element has a shard of zeros.",
        "one-element": "A shard of one element is taken for a number. It has a dimension: ask "
        "`dim()`, not `numel()`.",
        "three-dimensions": "A parameter with more than two dimensions, such as a convolution's "
        "weight, is sharded as a matrix is.",
        "other-dtype": "A tensor has another dtype than before: `torch.zeros` makes float32. Take "
        "the dtype from what you cut, for each tensor by itself.",
        "multiples-only": "It works where one number of ranks divides the other. Put the whole together "
        "first; then any number will do.",
        "optimizer-left": "The optimizer's state is missing, or cut as before. Momentum has the shape of its "
        "shard: it is resharded as the parameter is. Without it training goes on, but not as before.",
        "step-cut": "Adam's `step` has no dimension: it is the same on every rank. It is a number, and "
        "nothing to cut or to put together.",
        "stateless": "A parameter without optimizer state, a frozen one for instance, is not in "
        "`optimizer`, neither before nor afterwards.",
        "rank-and-size": "`rank` and `world_size` of the new parts are those of the new run.",
        "missing-rank": "A part is missing, and you made a checkpoint of the rest. What is left of a "
        "half-written one must raise a ValueError.",
        "twice": "A rank is there twice, or from a run on another number of ranks, and you took it. Raise a "
        "ValueError.",
        "other-error": "An incomplete checkpoint ends in another exception than a ValueError.",
        "error-without-rank": "The ValueError does not say which rank is missing.",
        "a-view": "A new tensor is a view into the whole, or shares its memory with another part: a rank "
        "that saves it, saves the whole. `clone()` what you cut.",
        "input-changed": "The parts that were handed in have changed.",
    },
)


def _shapes(draw) -> dict[str, tuple[int, ...]]:
    """Of a small model: a matrix that 3 ranks do not divide, and one that 2 and 4 do not."""
    up = draw.choice(((5, 4), (4, 5), (2, 10), (11, 2)))
    down = draw.choice(((3, 5), (5, 3), (13, 1), (1, 11)))
    return {"up.weight": up, "up.bias": up[:1], "down.weight": down, "scale": ()}


def _entry_shards(whole: Tensor, ranks: int) -> list[Tensor]:
    if whole.dim() < 2:
        return [whole.clone() for _ in range(ranks)]
    return _shards(whole, ranks)


def _checkpoint(parameters: dict, states: dict, ranks: int) -> list[dict]:
    """The parts of a checkpoint, from whole tensors; numbers in `states` are the same everywhere."""

    def state_of(name: str, rank: int) -> dict:
        return {
            key: _entry_shards(value, ranks)[rank] if torch.is_tensor(value) else value
            for key, value in states[name].items()
        }

    return [
        {
            "rank": rank,
            "world_size": ranks,
            "shapes": {name: whole.shape for name, whole in parameters.items()},
            "parameters": {n: _entry_shards(p, ranks)[rank] for n, p in parameters.items()},
            "optimizer": {name: state_of(name, rank) for name in states},
        }
        for rank in range(ranks)
    ]


def _wholes(draw, shapes=None, stateless=(), dtype=torch.float32) -> tuple[dict, dict]:
    """Whole parameters, in this dtype, and the states of Adam, which are float32."""
    shapes = shapes or _shapes(draw)
    parameters = {name: _tensor(draw, shape).to(dtype) for name, shape in shapes.items()}
    states = {
        name: {
            "step": torch.tensor(float(draw.integer(3, 9))),
            "exp_avg": _tensor(draw, shape),
            "exp_avg_sq": _tensor(draw, shape).square(),
        }
        for name, shape in shapes.items()
        if name not in stateless
    }
    return parameters, states


def _reshard_mistakes(old: list[dict], ranks: int, expected: list[dict], listed: list[int]) -> dict:
    """`listed` are the old ranks in the order of the list that was handed in."""
    shapes = old[0]["shapes"]
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]

    def of_parameters(parts: list[dict], names: Iterable[str]) -> list:
        return [{name: part["parameters"][name] for name in names} for part in parts]

    def matrices_are(cut: Callable[[list[Tensor], torch.Size], list[Tensor]]) -> Callable:
        """Whether the matrices are what `cut` makes of the old shards, and wrong."""
        made = {name: cut([p["parameters"][name] for p in old], shapes[name]) for name in matrices}
        wanted = [{name: made[name][rank] for name in matrices} for rank in range(ranks)]
        if same(wanted, of_parameters(expected, matrices)):
            return lambda got: False
        return lambda got: same(of_parameters(got, matrices), wanted)

    def steps_differ(got: list[dict]) -> bool:
        steps = [
            [[s.get("step") for s in p["optimizer"].values()] for p in e] for e in (got, expected)
        ]
        return not same(*steps)

    def padded_one_by_one(shards: list[Tensor], shape: torch.Size) -> list[Tensor]:
        pieces = torch.cat(shards)[: shape.numel()].tensor_split(ranks)
        return [nn.functional.pad(piece, (0, len(pieces[0]) - len(piece))) for piece in pieces]

    def keeps_an_element(got: list[dict]) -> bool:
        single = [name for name in matrices if old[0]["parameters"][name].shape == (1,)]
        return same(
            of_parameters(got, single), [{n: old[0]["parameters"][n] for n in single}] * ranks
        )

    vectors = set(shapes) - set(matrices)
    return {
        "fewer-pieces": lambda got: any(set(p["parameters"]) < set(shapes) for p in got),
        "other-dtype": lambda got: any(
            len(own) == len(right) and own != right
            for own, right in zip(_dtypes(got), _dtypes(expected), strict=True)
        ),
        "list-order": matrices_are(
            lambda shards, shape: _shards(
                torch.cat([shards[rank] for rank in listed])[: shape.numel()], ranks
            )
        ),
        "sorted-as-text": matrices_are(
            lambda shards, shape: _shards(
                torch.cat([shards[rank] for rank in sorted(range(len(shards)), key=str)])[
                    : shape.numel()
                ],
                ranks,
            )
        ),
        "padding-kept": matrices_are(lambda shards, shape: _shards(torch.cat(shards), ranks)),
        "padding-inside": matrices_are(padded_one_by_one),
        "one-element": lambda got: any(
            old[0]["parameters"][n].shape == (1,) and keeps_an_element(got) for n in matrices
        ),
        "three-dimensions": lambda got: any(
            len(shapes[name]) > 2 and not same(p["parameters"][name], right["parameters"][name])
            for name in matrices
            for p, right in zip(got, expected, strict=True)
        ),
        "whole-everywhere": lambda got: any(
            p["parameters"][name].shape == shapes[name] for p in got for name in matrices
        ),
        "matrix-shape": lambda got: any(
            p["parameters"][n].dim() > 1 for p in got for n in matrices
        ),
        "uneven": lambda got: any(
            len({p["parameters"][name].shape for p in got}) > 1 for name in matrices
        ),
        "vectors-cut": lambda got: (
            not same(of_parameters(got, vectors), of_parameters(expected, vectors))
        ),
        "stateless": lambda got: any(set(p["optimizer"]) > set(old[0]["optimizer"]) for p in got),
        "step-cut": lambda got: all(p["optimizer"] for p in got) and steps_differ(got),
        "optimizer-left": lambda got: same(
            of_parameters(got, shapes), of_parameters(expected, shapes)
        ),
    }


def _dtypes(parts: list[dict]) -> list[set]:
    return [{(i, tensor.dtype) for i, tensor in enumerate(_tensors_of(part))} for part in parts]


def _check_reshard(
    answer,
    draw,
    before: int,
    after: int,
    shapes=None,
    stateless=(),
    shuffled=False,
    number=False,
    dtype=torch.float32,
) -> list[dict]:
    parameters, states = _wholes(draw, shapes, stateless, dtype)
    if number:
        for state in states.values():
            state["step"] = int(state["step"])
    old, expected = (_checkpoint(parameters, states, ranks) for ranks in (before, after))
    listed = list(reversed(range(before))) if shuffled else list(range(before))
    handed = [copy.deepcopy(old[rank]) for rank in listed]
    got = answer(handed, after)
    expect_type(got, (list, tuple))
    if len(got) != after:
        raise Wrong(expected=f"{after} parts", got=f"{len(got)} parts")
    expect([part.get("shapes") for part in got], [old[0]["shapes"]] * after, each="rank")
    places = [{key: part.get(key) for key in ("rank", "world_size")} for part in got]
    wanted = [{"rank": rank, "world_size": after} for rank in range(after)]
    likely = {"rank-and-size": True}
    expect(places, wanted, each="rank", likely=likely)
    expect(list(got), expected, each="rank", likely=_reshard_mistakes(old, after, expected, listed))
    likely = {"input-changed": True}
    expect(handed, [old[rank] for rank in listed], each="part", likely=likely)
    return list(got)


@resharding.requires("from two ranks to four, and from four to two")
def _(answer, draw):
    width = draw.integer(3, 6)
    shapes = {"up.weight": (4, width), "up.bias": (4,), "down.weight": (width, 4)}
    _check_reshard(answer, draw, 2, 4, shapes)
    _check_reshard(answer, draw, 4, 2, shapes)


@resharding.requires("the parts come in any order")
def _(answer, draw):
    ranks = draw.integer(3, 5)
    _check_reshard(answer, draw, ranks, ranks, {"w": (ranks, 6), "b": (4,)}, shuffled=True)


@resharding.requires(
    "from three ranks to four and to two, with sizes that do not divide",
    failures={"exception": "multiples-only"},
)
def _(answer, draw):
    for before, after in ((3, 4), (3, 2), (4, 3)):
        _check_reshard(answer, draw, before, after)


@resharding.requires(
    "to one rank, from one, and to more ranks than elements",
    failures={"IndexError": "fewer-pieces"},
)
def _(answer, draw):
    many = draw.integer(16, 19)  # more than elements of the smaller matrix
    for before, after in ((draw.integer(3, 5), 1), (1, draw.choice((3, 6))), (2, many), (many, 2)):
        _check_reshard(answer, draw, before, after)


@resharding.requires(
    "a parameter without optimizer state; steps that are plain numbers",
    failures={"KeyError": "stateless", "TypeError": "step-cut", "AttributeError": "step-cut"},
)
def _(answer, draw):
    before, after = draw.sample((2, 3, 4), 2)
    _check_reshard(answer, draw, before, after, stateless=("up.weight", "up.bias"))
    _check_reshard(answer, draw, before, after, number=True)


@resharding.requires("a parameter of three dimensions", failures={"exception": "three-dimensions"})
def _(answer, draw):
    before, after = draw.sample((2, 3, 4), 2)
    shapes = {"filter": (draw.integer(2, 3), 3, draw.integer(2, 5)), "bias": (3,)}
    _check_reshard(answer, draw, before, after, shapes)


def _tensors_of(part: dict) -> Iterator[Tensor]:
    yield from part["parameters"].values()
    for state in part["optimizer"].values():
        yield from (value for value in state.values() if torch.is_tensor(value))


@resharding.requires("every new tensor has memory of its own", needs_earlier=True)
def _(answer, draw):
    parameters, states = _wholes(draw)
    before, after = draw.sample((2, 3, 4), 2)
    old = _checkpoint(parameters, states, before)
    tensors = [tensor for part in answer(old, after) for tensor in _tensors_of(part)]
    taken = {tensor.untyped_storage().data_ptr() for part in old for tensor in _tensors_of(part)}
    for tensor in tensors:
        place = tensor.untyped_storage().data_ptr()
        if _larger_than_itself(tensor) or place in taken:
            raise Wrong("a-view", expected="memory of exactly its size", got="shared memory")
        taken.add(place)


@resharding.requires("what is not a whole checkpoint is refused with a ValueError")
def _(answer, draw):
    ranks = draw.integer(4, 6)
    last = ranks - 1
    parts, other = (_checkpoint(*_wholes(draw), n) for n in (ranks, last))
    gone = draw.integer(1, last - 1)
    _check_refused(answer, [p for p in parts if p["rank"] != gone], "missing-rank", gone)
    _check_refused(answer, parts[:last], "missing-rank", last)
    _check_refused(answer, [*parts[:last], parts[0]], "twice", last)
    _check_refused(answer, [*parts, parts[gone]], "twice", None)
    _check_refused(answer, [*other, parts[last]], "twice", None)


@resharding.requires(
    "parameters in bfloat16, with an optimizer in float32", failures={"exception": "other-dtype"}
)
def _(answer, draw):
    before, after = draw.sample((2, 3, 4), 2)
    _check_reshard(answer, draw, before, after, dtype=torch.bfloat16)


def _check_refused(answer, parts: list[dict], slug: str, missing: int | None) -> None:
    there = [part["rank"] for part in parts]
    expected = f"a ValueError, where the ranks {there} are there"
    try:
        answer(parts, 2)
    except ValueError as error:
        if missing is not None and str(missing) not in re.findall(r"\d+", str(error)):
            expected = f"a message that names rank {missing}"
            raise Wrong("error-without-rank", expected=expected, got=str(error)) from None
        return
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        raise Wrong("other-error", expected=expected, got=type(error).__name__) from None
    raise Wrong(slug, expected=expected, got="no exception")
