"""Exercise 8.2, `ShardedOptimizer`: what it asks for, and how it is checked."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, Wrong, expect, run, same
from course_exercises.authoring.ranks import Sent, following, must_have_sent, must_have_waited
from course_exercises.chapters.ch08.shared import drawn_tensors
from course_utils.hardware import device

sharding = Exercise(
    "8.2",
    "ShardedOptimizer",
    points=4,
    minutes=100,
    kind="stretch",
    things="parameters",
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
        "not-an-optimizer": "Schedulers and checkpoints want a whole `torch.optim.Optimizer`. Derive from it, and hand "
        "`params` to its `__init__` as they are: it takes parameters or groups, which are dicts, makes `state` and "
        "`param_groups`, and calls `add_param_group` for each group.",
        "read-twice": "`model.parameters()` is a generator, which can be read once, and a group may hold one too. If "
        "you read it before torch's `Optimizer.__init__` does, nothing is left for that. Make a list first, or look "
        "into `param_groups` afterwards, which has lists.",
        "other-calls": "The calls of the ranks do not fit together: a rank makes other calls, or each waits in `send` "
        "until the other receives. Everyone calls the broadcast of every parameter, in the same order and from "
        "the same rank. So all must find the same owners; `id` and `hash` differ from one process to the next.",
        "not-broadcast": "A rank does not have the new value that a parameter's owner has made: it still has the old one, "
        "perhaps all do, or old and new ones are added up. After the update broadcast each parameter from its "
        "owner, and not always from the same rank.",
        "no-owner": "No rank updates this parameter, and none has state of it. Each needs an owner, whose inner "
        "optimizer has it and steps: also those that are left where the ranks do not divide their number, those of "
        "an added group, and frozen ones, which may learn later.",
        "everyone-everything": "Several ranks keep the state of the same parameter: nothing is saved. Give the "
        "inner optimizer the parameters that this rank owns.",
        "unbalanced": "One rank owns much more than its share. Count elements and not parameters, over all groups: "
        "the next parameter goes to the rank with the fewest so far.",
        "state": "Your `state` and the inner optimizer's are not the same thing. Some optimizers (Adagrad) make their "
        "state in the constructor: take it into yours in `add_param_group`. And the inner one has to step with what is in "
        "yours, which `load_state_dict` may have replaced.",
        "other-update": "All ranks have updated a parameter alike, and not as `optimizer_cls` does with what its group "
        "says now. Each group has options of its own, and schedulers change them in your `param_groups`, not only "
        "the learning rate: hand all of them to the inner optimizer, when you make it and before each step.",
        "param-groups": "Your `param_groups` lack what others look for there: all parameters, whoever owns them, for "
        "`zero_grad` and the clipping of gradients; and all options of `optimizer_cls`, for schedulers. Those "
        "that kwargs leave out are in the inner's `defaults`.",
        "gradients": "`step` leaves every `.grad` as it is, since whoever called it may want to look at it; "
        "`zero_grad()` clears those of all parameters that were handed in, whoever owns them.",
        "empty-rank": "A rank may own nothing of a group, surely with more ranks than parameters, and an "
        "optimizer refuses an empty list. A group with an empty list is accepted: `[{'params': []}]`.",
        "closure": "`step(closure)` calls the closure once, on every rank, before the update, under "
        "`torch.enable_grad()`, and returns its loss. Let the inner optimizer step without it.",
    },
    failures={
        "timeout": "other-calls",
        "mismatch": "other-calls",
        "empty parameter list": "empty-rank",
        "no attribute 'state'": "not-an-optimizer",
        "no attribute 'defaults'": "not-an-optimizer",
        "no attribute 'param_groups'": "not-an-optimizer",
        "IndexError": "two-ranks",
    },
)


@dataclass
class _Updates:
    """Parameters, their groups, and a gradient for each at each step, the same on every rank."""

    tensors: list[Tensor]
    steps: list[list[Tensor | None]]
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
    places: dict[int, int]  # the parameters by their address
    listed: list[int] = field(default_factory=list)  # parameters in `state`
    held: list[int] = field(default_factory=list)  # parameters of which an inner one has state
    options: list[str] = field(default_factory=list)
    left_gradients: bool = True  # does every parameter have the gradient that it had before a step?
    grouped: list[int] = field(default_factory=list)  # parameters in `param_groups`
    cleared: bool = True  # does `zero_grad` clear every gradient?
    sent: Sent = field(default_factory=Sent)
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
        with following() as sent:
            report = _update(rank, answer, task)
        report.sent = sent
        broadcasts = [call for call in sent.calls if call.kind == "broadcast"]
        report.broadcasts = [(c.root, report.places.get(c.addresses[0])) for c in broadcasts]
        reports.append(report)
    return reports


def _expected(task: _Updates, **changes) -> _Updated:
    def itself(params, optimizer, **kwargs) -> torch.optim.Optimizer:
        return optimizer(params, **kwargs)

    return _update(0, itself, replace(task, **changes))


def _updates(draw, shapes: list[tuple[int, ...]], **options) -> _Updates:
    tensors = drawn_tensors(draw, shapes)
    return _Updates(tensors, [drawn_tensors(draw, shapes) for _ in range(3)], **options)


def _small(draw) -> list[tuple[int, ...]]:
    """Shapes of five parameters, a number that neither 2 nor 3 ranks divide."""
    a, b, c = draw.sample(range(2, 7), 3)
    return [(a, b), (b,), (c, a), (a + c,), (c, c)]


Likely = dict[str, Callable[[int, int, list[Tensor]], bool]]  # of step, parameter, what ranks have


def _check(
    answer, tasks: list[_Updates], ranks: int, likely: Likely | None = None, owners: bool = False
) -> list[_Updated]:
    """Compares every parameter on every rank after every step with the inner optimizer alone; and, if asked
    for, who owns what. Returns rank 0's reports."""
    by_rank = run(_sharded, ranks, answer, tasks)
    for task, reports in zip(tasks, zip(*by_rank, strict=True), strict=True):
        _judge_calls(reports)
        _judge_values(reports, task, likely or {})
        _judge_gradients(reports, len(task.tensors))
        if owners:
            _judge_owners(reports, task)
    return by_rank[0]


def _judge_calls(reports: Sequence[_Updated]) -> None:
    must_have_waited([report.sent.unwaited for report in reports])
    for report in reports:
        if not _match(report.broadcasts, reports[0].broadcasts):
            wanted = "the same broadcasts, from the same ranks, on all ranks"
            raise Wrong("other-calls", expected=wanted, got="others on one rank than on rank 0")


def _match(own: list[tuple], others: list[tuple]) -> bool:
    """Whether two ranks' broadcasts can be the same, where some are of other tensors than ours."""
    return len(own) == len(others) and all(
        a[0] == b[0] and (a[1] == b[1] or None in (a[1], b[1]))
        for a, b in zip(own, others, strict=True)
    )


def _judge_values(reports: Sequence[_Updated], task: _Updates, likely: Likely) -> None:
    expected, before = _expected(task).values, task.tensors
    for step, right in enumerate(expected):
        for index, (old, new) in enumerate(zip(before, right, strict=True)):
            got = [report.values[step][index] for report in reports]
            likely_here = {slug: made(step, index, got) for slug, made in likely.items()}
            named = likely_here | _of_values(got, old, new, any(index in r.held for r in reports))
            what = f"parameter {index} after step {step + 1}"
            expect(got, [new] * len(got), each="rank", what=what, likely=named)
        before = right
    must_have_sent([report.sent for report in reports])


def _of_values(got: list[Tensor], old: Tensor, new: Tensor, has_owner: bool) -> dict[str, bool]:
    ranks = len(got)
    alike, unchanged = same(got, [got[0]] * ranks), same(got, [old] * ranks)
    others = (ranks - 1) * old
    mixtures = (ranks * new, new + others, (new + others) / ranks)
    mixed = any(same(got, [mixture] * ranks) for mixture in mixtures)
    return {
        "no-owner": unchanged and not has_owner,
        "not-broadcast": unchanged or mixed or any(same(own, new) for own in got),
        "other-update": alike,
    }


def _judge_gradients(reports: Sequence[_Updated], parameters: int) -> None:
    for report in reports:
        if not report.left_gradients:
            raise Wrong("gradients", expected="every `.grad` as before the step", got="another one")
        likely, everyone = {"param-groups": True}, list(range(parameters))
        expect(report.grouped, everyone, what="the parameters in `param_groups`", likely=likely)
        if not report.cleared:
            raise Wrong("gradients", expected="no gradient after zero_grad()", got="some")


def _judge_owners(reports: Sequence[_Updated], task: _Updates) -> None:
    """Each parameter's state is on one rank, and the ranks have similar amounts of it."""
    for index in range(len(task.tensors)):
        owners = [rank for rank, report in enumerate(reports) if index in report.held]
        likely = {"everyone-everything": len(owners) > 1}
        expect(len(owners), 1, what=f"ranks with state of parameter {index}", likely=likely)
    for report in reports:
        what = "the parameters in `state`"
        expect(report.listed, report.held, what=what, likely={"state": True})
    sizes = [tensor.numel() for tensor in task.tensors]
    limit = sum(sizes) / len(reports) + max(sizes)
    most = max(sum(sizes[index] for index in report.held) for report in reports)
    if most > limit:
        expected = f"state of at most {limit:.0f} of {sum(sizes)} elements on each rank"
        raise Wrong("unbalanced", expected=expected, got=most)


@sharding.requires(
    "two ranks end each step with what one optimizer gives", failures={"IndexError": "exception"}
)
def two_ranks_end_each_step_with_what(answer, draw):
    _check(answer, [_updates(draw, _small(draw))], 2)


@sharding.requires(
    "every parameter's state is on one rank, and the shares are fair", needs_earlier=True
)
def every_parameter_state_is_on_one_rank(answer, draw):
    ranks, width = draw.choice((2, 3)), draw.integer(6, 9)
    large_and_small = [(width, width), *[(2,)] * (ranks - 1)]  # dealt out, rank 0 gets all large
    _check(answer, [_updates(draw, large_and_small * (2 * ranks))], ranks, owners=True)


@sharding.requires(
    "groups keep their options, and a scheduler is heard",
    failures=dict.fromkeys(
        ("is not an Optimizer", "AttributeError", "TypeError"), "not-an-optimizer"
    ),
    needs_earlier=True,
)
def groups_keep_their_options(answer, draw):
    groups = [([0, 1], {"lr": 0.5}), ([2, 3, 4], {"weight_decay": 0.1})]
    task = _updates(draw, _small(draw), groups=groups)
    others = replace(task, later={"momentum": draw.number(0.3, 0.6), "dampening": 0.2})
    _check(answer, [task, replace(task, decay=0.5), others], draw.choice((2, 3)))


@sharding.requires("the shares are fair over many groups", needs_earlier=True)
def the_shares_are_fair_over_many_groups(answer, draw):
    ranks = draw.choice((2, 3))
    shapes = [(draw.integer(3, 5), 2)] * (2 * ranks)
    alike = _updates(draw, shapes, groups=[([index], {}) for index in range(len(shapes))])
    width = draw.integer(6, 9)
    shapes = [(width, width), *[(2,)] * (ranks - 1)] * (2 * ranks)
    groups = [(list(range(i, i + ranks)), {}) for i in range(0, len(shapes), ranks)]
    _check(answer, [alike, _updates(draw, shapes, groups=groups)], ranks, owners=True)


class _StateAtOnce(torch.optim.SGD):
    """Makes its momenta when it is constructed, and begins with ones."""

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)


@sharding.requires("any inner optimizer, with all its options to see", needs_earlier=True)
def any_inner_optimizer(answer, draw):
    ranks = draw.choice((2, 3))
    adam = _updates(draw, _small(draw), optimizer=torch.optim.Adam, kwargs={"lr": 0.01})
    kwargs = {"lr": 0.1, "initial_accumulator_value": 0.5}
    adagrad = _updates(draw, _small(draw), optimizer=torch.optim.Adagrad, kwargs=kwargs)
    tasks = [adam, adagrad]
    for task, report in zip(tasks, _check(answer, tasks, ranks, owners=True), strict=True):
        missing = set(_expected(task).options) - set(report.options)
        if missing:
            got = f"no {' and '.join(sorted(missing))}"
            raise Wrong("param-groups", expected="all options of the inner one", got=got)
    groups = [([0, 1], {"lr": 0.1}), ([2, 3, 4], {"lr": 0.2})]
    at_once = _updates(draw, _small(draw), optimizer=_StateAtOnce, groups=groups)
    without = _expected(at_once, optimizer=torch.optim.SGD).values
    likely = {"state": lambda step, index, got: same(got, [without[step][index]] * ranks)}
    _check(answer, [at_once], ranks, likely, owners=True)


@sharding.requires("three ranks, and one", needs_earlier=True)
def three_ranks(answer, draw):
    for ranks in (3, 1):
        _check(answer, [_updates(draw, _small(draw))], ranks, owners=True)


@sharding.requires(
    "`model.parameters()`, a generator, of a model with a tied matrix",
    failures={"empty parameter list": "read-twice"},
    needs_earlier=True,
)
def model_parameters_a_generator_of_a_model(answer, draw):
    ranks = draw.choice((2, 3))
    _check(answer, [_updates(draw, _small(draw), tied=True)], ranks, owners=True)
    groups = [([0, 1], {}), ([2, 3, 4], {"lr": 0.2})]
    parts = _updates(draw, _small(draw), groups=groups, generators=True)
    _check(answer, [parts], ranks, {"read-twice": lambda *_: True}, owners=True)


@sharding.requires(
    "more ranks than parameters", failures={"IndexError": "empty-rank"}, needs_earlier=True
)
def more_ranks_than_parameters(answer, draw):
    shapes = [(draw.integer(2, 5), 2), (draw.integer(2, 5),)]
    _check(answer, [_updates(draw, shapes)], draw.choice((3, 4)))


@sharding.requires("a group that is added later", needs_earlier=True)
def a_group_that_is_added_later(answer, draw):
    one = _updates(draw, _small(draw), added=(([3, 4], {"lr": 0.3}),), optimizer=torch.optim.Adam)
    one = replace(one, kwargs={"lr": 0.1})
    groups = [([index], {}) for index in range(7)]
    many = _updates(draw, [(draw.integer(3, 5), 2)] * 7, groups=groups[:1], added=groups[1:])
    _check(answer, [one, many], draw.choice((2, 3)), owners=True)


@sharding.requires(
    "a parameter without a gradient, and one that is frozen at first",
    failures={"AttributeError": "none-gradient", "TypeError": "none-gradient"},
    needs_earlier=True,
)
def a_parameter_without_a_gradient(answer, draw):
    task = _updates(draw, _small(draw), frozen=(1, 2))
    for gradients in task.steps:
        gradients[3] = None
    _check(answer, [task], draw.choice((2, 3)))


@dataclass
class _Closed:
    calls: list[bool]  # of the closure: with gradients enabled?
    loss: float | None
    weight: Tensor


def _with_closure(rank, answer, tensors: list[Tensor]) -> _Closed:
    parameters = [nn.Parameter(tensor.clone().to(device())) for tensor in tensors]
    optimizer = answer(parameters, torch.optim.SGD, lr=0.1)
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = sum(parameter.square().sum() for parameter in parameters)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    value = loss.item() if torch.is_tensor(loss) else None
    return _Closed(calls, value, torch.cat([p.detach().flatten() for p in parameters]))


@sharding.requires("step(closure) calls it once and returns its loss", needs_earlier=True)
def step_closure_calls_it_once_and_returns_its(answer, draw):
    tensors = drawn_tensors(draw, [(draw.integer(2, 5), 2), (4,)])
    loss = sum(tensor.square().sum().item() for tensor in tensors)
    after = torch.cat([0.8 * tensor.flatten() for tensor in tensors])
    likely = {"closure": True}
    for report in run(_with_closure, 3, answer, tensors):  # one of them owns nothing
        expect(len(report.calls), 1, what="calls of the closure", likely=likely)
        expect(report.calls, [True], what="gradients enabled", likely=likely)
        expect(report.loss, loss, what="the loss returned", likely=likely)
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
        expect(resumed, straight, each="parameter", what="after resuming", likely={"state": True})
