"""Exercise 13.1, `Training`: what it asks for, and how it is checked."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, run, same
from course_utils.hardware import device
from course_utils.lesson.models import ResidualNet
from course_utils.trace import Call, Trace
from course_utils.trace.meters import Sampling

training = Exercise(
    "13.1",
    "Training",
    points=6,
    minutes=60,
    kind="core",
    parameters=("model",),
    hints=[
        (
            "Choose the split first: chapter 8's `fully_shard`, chapter 6's columns and rows, or shards by hand. Then ask of "
            "each: whose rows does a rank compute, and who adds up what?"
        ),
        (
            "Make it equal to one process before you make it small. A share's loss is the sum over its rows, divided by "
            "the rows of the whole batch. Whatever averages over ranks divides once more."
        ),
        (
            "With FSDP: shard each block, then the model, so that one block is whole at a time. Multiply the loss with the "
            "ranks, since FSDP averages. The state's tensors are DTensors: `full_tensor` on all ranks, and "
            "`distribute_tensor` on the way back; momentum is in `optimizer.state`."
        ),
    ],
    misconceptions={
        "sum-not-mean": "Your gradients are as many times too large as there are ranks: the sum over ranks of what "
        "each has divided by its own share's rows.",
        "divided-twice": "Your gradients are divided by the ranks once too often: FSDP and DDP average already.",
        "own-share-only": "The ranks end with different parameters: each has learned from its own share only.",
        "mean-of-means": "You average the means of the shares. Where a batch does not divide, a row of a small share counts more: "
        "divide by the rows of the global batch.",
        "rows-left-out": "Rows of the batch are left out where they do not divide by the ranks.",
        "no-momentum": "That is SGD without momentum.",
        "forgets-gradients": "The gradients of earlier steps are still there: set them to zero, or to None, after each step.",
        "loss-of-share": "The loss is that of a rank's own share. Asked is that of the global batch, on every rank.",
        "loss-after-step": "The loss is computed anew, after the step. Asked is the one that the step has learned from.",
        "loss-is-a-sum": "The loss is a sum over rows or ranks. Asked is the mean over all rows of the global batch.",
        "other-keys": 'The state has two dicts, "model" and "momentum", each with the names of the model\'s parameters.',
        "own-part": "The state has a rank's own part of a tensor. Whole ones are asked, that any number of ranks can load.",
        "one-rank-has-it": "The state is on one rank only. Every rank returns it.",
        "a-dtensor": "The state has DTensors, which are of this group of ranks: `full_tensor` makes plain ones.",
        "plain-parameter": "Not every parameter is a DTensor at this moment: one that was not split is plain, and so are those of the "
        "outermost `fully_shard` after a forward pass without a backward one, such as for a loss after the step. The loss "
        "that is asked is the one that the step has learned from.",
        "not-a-copy": "A state that was handed out changes with the next step: its tensors are those of the model. Copy "
        "them.",
        "momentum-missing": "The momentum in the state is all zeros. `optimizer.state` has it, as `momentum_buffer`.",
        "momentum-not-loaded": "After `load_state_dict` the momentum begins anew: the run goes on, and is another one.",
        "model-not-loaded": "After `load_state_dict` the parameters are still those of the new model.",
        "not-every-rank": "Not every rank makes the same calls, and the others wait. One with no rows, where a batch is smaller than the "
        "number of ranks, takes part in every collective too.",
        "copies": "Each rank keeps parameters and momentum whole: plain data parallelism, which the budget rules out.",
        "parameters-whole": "Between two steps a rank still holds all parameters whole, its own or those of the model that was handed "
        "over. Shards of the momentum alone (ZeRO 1) are not enough.",
        "all-at-once": "Between two steps a rank holds its part only, but in a step too much is whole at the same time. Make one block "
        "whole at a time: `fully_shard` for each block, and not for the model alone.",
        "too-many-bytes": "The result is right and small enough, and a rank sends more than the budget. Gather each block's "
        "parameters once forward and once backward, and reduce-scatter gradients instead of gathering them.",
    },
    failures={
        "timeout": "not-every-rank",
        "mismatch": "not-every-rank",
        "has no attribute 'full_tensor'": "plain-parameter",
    },
)

RATE, MOMENTUM = 0.1, 0.9
MEMORY, BYTES = 2.0, 3.2  # the budget: times the parameters' bytes, and times (n - 1) / n of them


@dataclass(frozen=True)
class _Task:
    """A model by its sizes and seed, and the batches of its steps by their numbers of rows."""

    width: int
    blocks: int
    seed: int
    batches: tuple[int, ...]

    def model(self) -> ResidualNet:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return ResidualNet(self.width, self.blocks)

    def data(self) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        return [
            (torch.randn(n, 49, generator=generator), torch.randint(10, (n,), generator=generator))
            for n in self.batches
        ]


@dataclass
class _Trained:
    losses: list[float] = field(default_factory=list)
    state: object = None
    first_changed: bool = False  # a state that was handed out, with later steps


def _trained(rank, answer, task: _Task, loaded: dict | None = None) -> _Trained:
    """Takes the steps of `task`, from `loaded` where that is given."""
    torch.set_num_threads(1)
    made, report = answer(task.model().to(device())), _Trained()
    if loaded is not None:
        made.load_state_dict(copy.deepcopy(loaded))
    first = kept = None
    for images, labels in task.data():
        report.losses.append(made.step(images.to(device()), labels.to(device())))
        if first is None:
            first = made.state_dict()
            kept = copy.deepcopy(_plain(first))
    report.first_changed = not same(_plain(first), kept)
    report.state = _plain(made.state_dict())
    return report


def _plain(state):
    """The state, with a word in the place of what no process can hand to another."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, Tensor) and type(state) not in (Tensor, torch.nn.Parameter):
        return type(state).__name__
    return state.detach().cpu() if isinstance(state, Tensor) else state


Weigh = Callable[[int, int], Tensor]  # rows and the number of the step: how much each row counts


def _evenly(rows: int, step: int) -> Tensor:
    return torch.full((rows,), 1 / rows)


def _alone(
    task: _Task,
    weigh: Weigh = _evenly,
    momentum: float = MOMENTUM,
    loaded: dict | None = None,
    forgets: bool = False,
    after: bool = False,
) -> tuple[list[float], dict]:
    """What one process gives: the losses, before each step or `after` it, and the state."""
    model = task.model()
    parameters = dict(model.named_parameters())
    velocity = {name: torch.zeros_like(p) for name, p in parameters.items()}
    if loaded is not None:
        for name, parameter in parameters.items():
            parameter.data.copy_(loaded["model"][name])
            velocity[name].copy_(loaded["momentum"][name])
    losses, before = [], [0.0] * len(parameters)
    for step, (images, labels) in enumerate(task.data()):
        each = cross_entropy(model(images), labels, reduction="none")
        losses.append(each.mean().item())
        gradients = torch.autograd.grad((each * weigh(len(labels), step)).sum(), model.parameters())
        if forgets:
            gradients = before = [old + new for old, new in zip(before, gradients)]
        with torch.no_grad():
            for (name, parameter), gradient in zip(parameters.items(), gradients):
                velocity[name].mul_(momentum).add_(gradient)
                parameter.sub_(RATE * velocity[name])
            if after:
                losses[-1] = cross_entropy(model(images), labels).item()
    state = {"model": {n: p.detach() for n, p in parameters.items()}, "momentum": velocity}
    return losses, state


def _shares(rows: int, ranks: int) -> list[list[Tensor]]:
    """Ways in which people share out rows: one after the other, in turn, and in equal pieces."""
    places = torch.arange(rows)
    return [
        list(places.tensor_split(ranks)),
        [places[rank::ranks] for rank in range(ranks)],
        list(places.chunk(ranks)),
    ]


def _of_means(way: int, ranks: int) -> Weigh:
    def weigh(rows: int, step: int) -> Tensor:
        weights = torch.zeros(rows)
        for share in _shares(rows, ranks)[way]:
            weights[share] = 1 / max(1, len(share)) / ranks
        return weights

    return weigh


def _without_the_rest(ranks: int, divided_by_all: bool) -> Weigh:
    def weigh(rows: int, step: int) -> Tensor:
        used = rows // ranks * ranks
        return (torch.arange(rows) < used) / (rows if divided_by_all else max(1, used))

    return weigh


def _scaled(factor: float) -> Weigh:
    return lambda rows, step: _evenly(rows, step) * factor


def _slips(task: _Task, ranks: int, loaded: dict | None = None) -> dict:
    """The states that mistakes end with."""
    slips: dict[str, object] = {
        "sum-not-mean": ranks > 1 and _alone(task, _scaled(ranks), loaded=loaded)[1],
        "divided-twice": ranks > 1 and _alone(task, _scaled(1 / ranks), loaded=loaded)[1],
        "no-momentum": lambda got: same(
            got["model"], _alone(task, momentum=0.0, loaded=loaded)[1]["model"]
        ),
        "forgets-gradients": _alone(task, loaded=loaded, forgets=True)[1],
    }
    means = [_alone(task, _of_means(way, ranks), loaded=loaded)[1] for way in range(3)]
    rests = [_alone(task, _without_the_rest(ranks, all), loaded=loaded)[1] for all in (True, False)]
    slips["mean-of-means"] = lambda got: any(same(got, s) for s in means)
    slips["rows-left-out"] = lambda got: any(same(got, s) for s in rests)
    return slips


def _judge_form(reports: list[_Trained], right: dict) -> None:
    """Whether the states are whole, plain and everywhere."""
    there = [report.state for report in reports if isinstance(report.state, dict) and report.state]
    if there and len(there) < len(reports):
        raise Wrong("one-rank-has-it", expected="a state on every rank", got=f"on {len(there)}")
    for report in reports:
        expect_type(report.state, dict)
        if {k: set(v) for k, v in report.state.items() if isinstance(v, dict)} != {
            kind: set(tensors) for kind, tensors in right.items()
        }:
            raise Wrong("other-keys", expected='"model" and "momentum"', got=report.state)
        for kind, tensors in right.items():
            for name, tensor in tensors.items():
                got, what = report.state[kind][name], f"{name} of {kind}"
                if isinstance(got, str):
                    raise Wrong("a-dtensor", expected=f"a plain tensor   ({what})", got="a DTensor")
                expect_type(got, Tensor)
                if got.shape != tensor.shape:
                    fewer = got.numel() < tensor.numel()
                    shape = f"shape {tuple(tensor.shape)}   ({what})"
                    raise Wrong(
                        "own-part" if fewer else None, expected=shape, got=f"{tuple(got.shape)}"
                    )


def _judge_states(reports: list[_Trained], task: _Task, loaded: dict | None = None) -> None:
    ranks = len(reports)
    _, right = _alone(task, loaded=loaded)
    _judge_form(reports, right)
    if any(not same(report.state, reports[0].state) for report in reports):
        raise Wrong("own-share-only", expected="the same parameters on all ranks", got="others")
    slips = _slips(task, ranks, loaded)
    zeros = {name: torch.zeros_like(p) for name, p in right["momentum"].items()}
    if loaded is not None:
        slips["momentum-not-loaded"] = _alone(task, loaded=loaded | {"momentum": zeros})[1]
        slips["model-not-loaded"] = lambda got: any(
            same(got["model"], _alone(task, loaded=start)[1]["model"])
            for start in (None, {**loaded, "model": _first(task)})
        )
    slips["momentum-missing"] = lambda got: (
        same(got["model"], right["model"]) and same(got["momentum"], zeros)
    )
    expect(reports[0].state, right, likely=slips)


def _first(task: _Task) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in task.model().named_parameters()}


def _judge_losses(reports: list[_Trained], task: _Task) -> None:
    ranks, (right, _) = len(reports), _alone(task)
    sums = [rows * loss for rows, loss in zip(task.batches, right)]
    differ = any(not same(report.losses, reports[0].losses) for report in reports)
    likely = {
        "loss-is-a-sum": lambda got: any(
            same(got, other) for other in (sums, [ranks * loss for loss in right])
        ),
        "loss-after-step": lambda got: same(got, _alone(task, after=True)[0]),
        "loss-of-share": differ,
    }
    for report in reports:
        expect(report.losses, right, what="the losses", likely=likely)


def _task(draw, batches: tuple[int, ...], blocks: int | None = None) -> _Task:
    return _Task(12 * draw.integer(1, 3), blocks or draw.integer(1, 3), draw.seed(), batches)


@training.requires("batches that divide: parameters, momentum and loss of one process")
def batches_that_divide(answer, draw):
    ranks = draw.choice([2, 3])
    task = _task(draw, (ranks * draw.integer(2, 4), ranks * draw.integer(5, 7)))
    _judge(run(_trained, ranks, answer, task), task)


@training.requires("batches that do not divide, on four ranks")
def batches_that_do_not_divide(answer, draw):
    ends = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    task = _task(draw, (4 * draw.integer(2, 4) + ends[0], 4 * draw.integer(5, 6) + ends[1]))
    _judge(run(_trained, 4, answer, task), task)


@training.requires("one rank alone, and fewer rows than ranks")
def one_rank_alone(answer, draw):
    task = _task(draw, (draw.integer(3, 9), 2))
    for ranks in (1, 3):
        _judge(run(_trained, ranks, answer, task), task)


def _judge(reports: list[_Trained], task: _Task) -> None:
    _judge_states(reports, task)
    _judge_losses(reports, task)


@training.requires("a state that is a copy, and goes on with any number of ranks")
def a_state_that_is_a_copy(answer, draw):
    ranks, before = draw.choice([2, 3]), _task(draw, (5, 7, 9))
    _, state = _alone(before)
    task = replace(before, batches=(draw.integer(6, 9), draw.integer(4, 5)), seed=draw.seed())
    for count in (ranks, 1):  # one alone needs to gather nothing, and may hand out what it has
        reports = run(_trained, count, answer, task, state)
        _judge_states(reports, task, state)
        if any(report.first_changed for report in reports):
            got = "one that follows the model"
            raise Wrong("not-a-copy", expected="a state that stays", got=got)


def _measured(rank, answer, task: _Task) -> tuple[int, int, float]:
    """The peak of a step in bytes, what is held after it, and what this rank sends in it."""
    torch.set_num_threads(1)
    made = answer(task.model().to(device()))
    [first, second, third] = [(i.to(device()), l.to(device())) for i, l in task.data()]
    made.step(*first)
    made.step(*second)
    with Sampling() as memory, Trace() as trace:
        made.step(*third)
    return memory.peak, Sampling().held(), sum(map(_sent, trace.record().calls))


def _sent(call: Call) -> float:
    """The bytes that a ring sends from this rank."""
    n = len(call.ranks)
    factors = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_gather": n - 1}
    return call.bytes * factors.get(call.op, 1) if call.sends else 0.0


@training.requires(
    "on four ranks, at most twice the parameters' bytes held and few sent", needs_earlier=True
)
def on_four_ranks(answer, draw):
    task = _Task(36, draw.integer(10, 12), draw.seed(), (21, 23, 22))
    reports = run(_measured, 4, answer, task)
    size = 4 * sum(p.numel() for p in task.model().parameters())
    peak, rest, sent = (max(column) for column in zip(*reports))
    if peak > MEMORY * size:
        whole = (
            "copies" if rest > 1.8 * size else "parameters-whole" if rest > size else "all-at-once"
        )
        got = f"{peak / size:.2f} P, and {rest / size:.2f} P after the step"
        raise Wrong(whole, expected=f"a peak of at most {MEMORY} P", got=got)
    if sent > BYTES * size * 3 / 4:
        got = f"{sent / (size * 3 / 4):.2f} (n - 1) / n P"
        raise Wrong("too-many-bytes", expected=f"at most {BYTES} (n - 1) / n P sent", got=got)
