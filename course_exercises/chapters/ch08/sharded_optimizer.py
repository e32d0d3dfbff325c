"""Exercise 8.2, `ShardedOptimizer`: what it asks for, and how it is checked."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, Wrong, expect, run, same
from course_exercises.authoring.ranks import described, following
from course_exercises.chapters.ch08.shared import drawn_tensors
from course_utils.comm.intercept import listening
from course_utils.hardware import device

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
            "group, take what it has in its `state` into yours, and let it use yours as its own. Then "
            "schedulers and `load_state_dict` need nothing more."
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
        "gradients-left": "`zero_grad()` leaves gradients of parameters that other ranks own, and the next "
        "backward adds to them. It clears all that were handed in, as torch's own does.",
        "parameters-missing": "Your `param_groups` lack the parameters that other ranks own. Schedulers, "
        "`zero_grad` and the clipping of gradients look for all of them there; only `state` is a rank's own.",
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
    added: Sequence[tuple[list[int], dict]] = ()  # groups that come after the first step
    frozen: tuple[int, ...] = ()  # at first; they learn after the first step
    later: dict | None = None  # options that every group gets after the first step
    decay: float | None = None  # a scheduler multiplies the learning rates with it at each step
    tied: bool = False  # they come from a model that has the first one at two places
    generators: bool = False  # a group's parameters come as `parameters()` gives them


@dataclass
class _Updated:
    values: list[list[Tensor]]  # after each step
    unwaited: list[str] = field(default_factory=list)  # collectives for which nobody has waited
    listed: list[int] = field(default_factory=list)  # parameters in `state`
    held: list[int] = field(default_factory=list)  # parameters of which an inner one has state
    options: list[str] = field(default_factory=list)
    left_gradients: bool = True  # does every parameter have the gradient that it had before a step?
    grouped: list[int] = field(default_factory=list)  # parameters in `param_groups`
    cleared: bool = True  # does `zero_grad` clear every gradient?
    places: dict[int, int] = field(default_factory=dict)  # the parameters by their address
    broadcasts: list[tuple] = field(default_factory=list)  # from whom, and of which parameter


def _tied(parameters: list[nn.Parameter]) -> nn.Module:
    """A model that uses its first parameter at two places, as embedding and head do."""
    model = nn.Module()
    for index, parameter in enumerate([*parameters, parameters[0]]):
        model.register_parameter(f"parameter{index}", parameter)
    return model


def _update(rank, make: Callable, task: _Updates) -> _Updated:
    """Runs on a rank with the answer for `make`, and in the kernel with the optimizer itself."""
    way = -1 if rank % 2 else 1  # the order of their `id` is another one on the next rank
    parameters = [nn.Parameter(tensor.clone().to(device())) for tensor in task.tensors[::way]][
        ::way
    ]
    for index in task.frozen:
        parameters[index].requires_grad_(False)
    names = {parameter: index for index, parameter in enumerate(parameters)}
    made: list[torch.optim.Optimizer] = []

    class Watched(task.optimizer):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    later = [index for own, _ in task.added for index in own]
    whole = [p for index, p in enumerate(parameters) if index not in later]
    given = iter if task.generators else list
    groups = [{"params": given([parameters[i] for i in own]), **o} for own, o in task.groups or []]
    handed = _tied(whole).parameters() if task.tied else groups or whole
    optimizer = make(handed, Watched, **task.kwargs)
    scheduler = task.decay and torch.optim.lr_scheduler.ExponentialLR(optimizer, task.decay)
    report = _Updated([], places={p.data_ptr(): index for p, index in names.items()})
    for step, gradients in enumerate(task.steps):
        for own, options in task.added if step == 1 else ():
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
    report.grouped = sorted(names[p] for group in optimizer.param_groups for p in group["params"])
    optimizer.zero_grad()
    report.cleared = all(p.grad is None or not p.grad.any() for p in parameters)
    return report


def _sharded(rank, answer, tasks: list[_Updates]) -> list[_Updated]:
    reports = []
    for task in tasks:
        broadcasts: list[tuple[int, int]] = []

        def on_call(name: str, arguments: dict, broadcasts=broadcasts) -> None:
            kind, payload = described(name, arguments)
            if kind == "broadcast":
                broadcasts.extend((arguments["root_rank"], tensor.data_ptr()) for tensor in payload)

        with following() as sent, listening(on_call):
            report = _update(rank, answer, task)
        calls = [(root, report.places.get(place)) for root, place in broadcasts]
        reports.append(replace(report, unwaited=sent.unwaited, broadcasts=calls))
    return reports


def _itself(params, optimizer: type[torch.optim.Optimizer], **kwargs) -> torch.optim.Optimizer:
    return optimizer(params, **kwargs)


def _expected(task: _Updates, **changes) -> _Updated:
    return _update(0, _itself, replace(task, **changes))


def _updates(draw, shapes: list[tuple[int, ...]], **options) -> _Updates:
    tensors = drawn_tensors(draw, shapes)
    return _Updates(tensors, [drawn_tensors(draw, shapes) for _ in range(3)], **options)


def _check_updates(
    answer, task: _Updates, ranks: int, likely: dict[str, Callable] | None = None
) -> list[_Updated]:
    """Compares every parameter on every rank after every step with the inner optimizer alone."""
    reports = [each for [each] in run(_sharded, ranks, answer, [task])]
    _judge_updates(reports, task, likely or {})
    return reports


def _match(own: list[tuple], others: list[tuple]) -> bool:
    """Whether two ranks' broadcasts can be the same, where some are of other tensors than ours."""
    return len(own) == len(others) and all(
        a[0] == b[0] and (a[1] == b[1] or None in (a[1], b[1]))
        for a, b in zip(own, others, strict=True)
    )


def _judge_updates(reports: list[_Updated], task: _Updates, likely: dict[str, Callable]) -> None:
    """`likely` maps a misconception to a function of (step, parameter, what every rank has)."""
    ranks = len(reports)
    for report in reports:
        if report.unwaited:
            raise Wrong("not-waited", expected="a wait() for every message", got="none")
        if not _match(report.broadcasts, reports[0].broadcasts):
            wanted = "the same broadcasts, from the same ranks, on all ranks"
            raise Wrong("not-every-rank", expected=wanted, got="others on one rank than on rank 0")
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
    for report in reports:
        likely = {"parameters-missing": True}
        everyone = list(range(len(task.tensors)))
        expect(report.grouped, everyone, what="the parameters in `param_groups`", likely=likely)
        if not report.cleared:
            raise Wrong("gradients-left", expected="no gradient after zero_grad()", got="some")


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
def two_ranks_end_each_step_with_what(answer, draw):
    _check_updates(answer, _updates(draw, _small(draw)), 2)


@sharding.requires(
    "every parameter's state is on one rank, and the shares are fair", needs_earlier=True
)
def every_parameter_state_is_on_one_rank(answer, draw):
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
    needs_earlier=True,
)
def groups_keep_their_options(answer, draw):
    groups = [([0, 1], {"lr": 0.5}), ([2, 3, 4], {"weight_decay": 0.1})]
    task = _updates(draw, _small(draw), groups=groups)
    scheduled = replace(task, decay=0.5)
    others = replace(task, later={"momentum": draw.number(0.3, 0.6), "dampening": 0.2})
    reports = run(_sharded, draw.choice((2, 3)), answer, [task, scheduled, others])
    both = list(zip(*reports, strict=True))
    alike = [_as_if(task, groups=[(own, o) for own, _ in groups]) for o in ({}, groups[0][1])]
    likely = {"groups-lost": lambda *place: any(made(*place) for made in alike)}
    _judge_updates(both[0], task, likely)
    _judge_updates(both[1], scheduled, {"scheduler-unheard": _as_if(task)})
    _judge_updates(both[2], others, {"options-unheard": lambda *_: True})


@sharding.requires("the shares are fair over many groups", needs_earlier=True)
def the_shares_are_fair_over_many_groups(answer, draw):
    ranks = draw.choice((2, 3))
    shapes = [(draw.integer(3, 5), 2)] * (2 * ranks)
    alike = _updates(draw, shapes, groups=[([index], {}) for index in range(len(shapes))])
    width = draw.integer(6, 9)
    shapes = [(width, width), *[(2,)] * (ranks - 1)] * (2 * ranks)
    groups = [(list(range(i, i + ranks)), {}) for i in range(0, len(shapes), ranks)]
    mixed = _updates(draw, shapes, groups=groups)
    of_tasks = zip(*run(_sharded, ranks, answer, [alike, mixed]), strict=True)
    for task, reports in zip((alike, mixed), of_tasks, strict=True):
        _judge_updates(reports, task, {})
        _check_owners(reports, task, "unbalanced" if task is mixed else "unbalanced-groups")


class _StateAtOnce(torch.optim.SGD):
    """Makes its momenta when it is constructed, and begins with ones."""

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)


def _updated_alike(task: _Updates, step: int, index: int, got: list[Tensor]) -> bool:
    """Whether all ranks have updated a parameter, in the same way."""
    return same(got, [got[0]] * len(got)) and not same(got[0], task.tensors[index])


@sharding.requires("any inner optimizer, with all its options to see", needs_earlier=True)
def any_inner_optimizer(answer, draw):
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


@sharding.requires("three ranks, and one", needs_earlier=True)
def three_ranks(answer, draw):
    for ranks in (3, 1):
        task = _updates(draw, _small(draw))
        _check_owners(_check_updates(answer, task, ranks), task)


@sharding.requires(
    "`model.parameters()`, a generator, of a model with a tied matrix",
    failures={"empty parameter list": "generator-used-up"},
    needs_earlier=True,
)
def model_parameters_a_generator_of_a_model(answer, draw):
    tied = _updates(draw, _small(draw), tied=True)
    groups = [([0, 1], {}), ([2, 3, 4], {"lr": 0.2})]
    parts = _updates(draw, _small(draw), groups=groups, generators=True)
    of_tasks = zip(*run(_sharded, draw.choice((2, 3)), answer, [tied, parts]), strict=True)
    for task, reports in zip((tied, parts), of_tasks, strict=True):
        likely = {"generator-used-up": lambda *_, task=task: task is parts}
        _judge_updates(reports, task, likely)
        _check_owners(reports, task)


@sharding.requires(
    "more ranks than parameters", failures={"IndexError": "empty-rank"}, needs_earlier=True
)
def more_ranks_than_parameters(answer, draw):
    shapes = [(draw.integer(2, 5), 2), (draw.integer(2, 5),)]
    _check_updates(answer, _updates(draw, shapes), draw.choice((3, 4)))


@sharding.requires("a group that is added later", needs_earlier=True)
def a_group_that_is_added_later(answer, draw):
    one = _updates(draw, _small(draw), added=(([3, 4], {"lr": 0.3}),), optimizer=torch.optim.Adam)
    one = replace(one, kwargs={"lr": 0.1})
    groups = [([index], {}) for index in range(7)]
    many = _updates(draw, [(draw.integer(3, 5), 2)] * 7, groups=groups[:1], added=groups[1:])
    of_tasks = zip(*run(_sharded, draw.choice((2, 3)), answer, [one, many]), strict=True)
    for task, reports in zip((one, many), of_tasks, strict=True):
        later = {index for own, _ in task.added for index in own}
        likely = {"new-group-lost": lambda step, index, got, later=later: index in later}
        _judge_updates(reports, task, likely)
        _check_owners(reports, task, "unbalanced-groups")


@sharding.requires(
    "a parameter without a gradient, and one that is frozen at first",
    failures={"AttributeError": "none-gradient", "TypeError": "none-gradient"},
    needs_earlier=True,
)
def a_parameter_without_a_gradient(answer, draw):
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


@sharding.requires("step(closure) calls it once and returns its loss", needs_earlier=True)
def step_closure_calls_it_once_and_returns_its(answer, draw):
    tensors = drawn_tensors(draw, [(draw.integer(2, 5), 2), (4,)])
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
def state_dict_and_load_state_dict_resume(answer, draw):
    task = _updates(draw, _small(draw), optimizer=torch.optim.Adam, kwargs={"lr": 0.1})
    for straight, resumed in run(_resumed, draw.choice((2, 3)), answer, task):
        likely = {"state-not-restored": True}
        expect(resumed, straight, each="parameter", what="after resuming", likely=likely)
