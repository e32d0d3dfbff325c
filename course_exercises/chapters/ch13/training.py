"""Exercise 13.1, `Training`: what it asks for, and how it is checked."""

import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from course_exercises.authoring import Exercise, Wrong, expect, run, same
from course_exercises.authoring.patience import PatientSampling
from course_utils.hardware import device
from course_utils.lesson.models import ResidualNet
from course_utils.trace import Trace, on_a_ring

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
        "not-stepped": "No parameter has changed. Call the optimizer's `step()`, and make the optimizer after `fully_shard`, which "
        "puts other parameters in the place of the model's.",
        "other-factor": "Your gradients are too large or too small by a factor of the number of ranks. FSDP and DDP divide the sum by the "
        "ranks: multiply your loss by their number. Where you add with `all_reduce`, divide by the global batch's rows only.",
        "rows-count-unevenly": "Your step is right where the batch divides by the ranks, and not where it does not, as where the means of "
        "the shares are averaged, or rows left out. Add up over the rows of a share, and divide by those of the global "
        "batch.",
        "own-share-only": "The ranks end with different values. Let each of them step with the gradients of all shares.",
        "momentum-missing": "The momentum in the state is all zeros, or the parameters move as without momentum. Give the optimizer its "
        "momentum; it keeps it in `optimizer.state`, as `momentum_buffer`.",
        "momentum-before": "Before its first step the optimizer has no `momentum_buffer`. Put zeros into the state in its place.",
        "another-form": 'Your state has another form. Return on every rank {"model": {name: tensor}, "momentum": {name: tensor}} with '
        "the names of the model's parameters. Each tensor is whole and plain: `full_tensor`, called on all ranks, makes "
        "it of a DTensor.",
        "plain-parameter": "Not every parameter is a DTensor at this moment: one that was not split is plain, and so are those of the "
        "outermost `fully_shard` after a forward pass without a backward one, such as for a loss after the step. Return "
        "the loss that the step has learned from.",
        "other-loss": "You return another loss than the global batch's. It may be that of a share, a sum, or computed anew after the step. Return the mean over all "
        "rows of the global batch, of the pass that the step has learned from, on every rank.",
        "not-a-copy": "A state that was handed out changes with the next step: its tensors are those of the model. Copy "
        "them.",
        "not-loaded": "After `load_state_dict` your run does not go on from the loaded parameters and momentum. Load both, the momentum "
        "into the optimizer.",
        "whole-between-steps": "Between two steps a rank still holds all parameters whole: copies, as in plain data parallelism, or those of "
        "the model that was handed over. Shards of the momentum alone (ZeRO 1) are not enough: keep a part of each.",
        "all-at-once": "Between two steps a rank holds its part only, but in a step too much is whole at the same time. Make one block "
        "whole at a time: `fully_shard` for each block, and not for the model alone.",
        "too-many-bytes": "The result is right and small enough, and a rank sends more than the budget. Gather each block's "
        "parameters once forward and once backward, and reduce-scatter gradients instead of gathering them.",
    },
    things="gradients",
    failures={
        "timeout": "not-every-rank",
        "mismatch": "not-every-rank",
        "has no attribute 'full_tensor'": "plain-parameter",
        "KeyError: 'momentum_buffer'": "momentum-before",
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
    report.first_changed = first is not None and not same(_plain(first), kept)
    report.state = _plain(made.state_dict())
    return report


def _plain(state):
    """The state, with a word in the place of what no process can hand to another."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, Tensor) and type(state) not in (Tensor, torch.nn.Parameter):
        return type(state).__name__
    return state.detach().cpu() if isinstance(state, Tensor) else state


def _alone(
    task: _Task,
    loaded: dict | None = None,
    factor: float = 1.0,
    momentum: float = MOMENTUM,
    forgets: bool = False,
) -> tuple[list[float], dict]:
    """What one process gives: the losses and the state. Its gradients may be too large by a factor, or
    it may forget to clear them."""
    model = task.model()
    parameters = dict(model.named_parameters())
    velocity = {name: torch.zeros_like(p) for name, p in parameters.items()}
    if loaded is not None:
        for name, parameter in parameters.items():
            parameter.data.copy_(loaded["model"][name])
            velocity[name].copy_(loaded["momentum"][name])
    losses, before = [], [0.0] * len(parameters)
    for images, labels in task.data():
        loss = cross_entropy(model(images), labels)
        losses.append(loss.item())
        gradients = torch.autograd.grad(factor * loss, model.parameters())
        if forgets:
            gradients = before = [old + new for old, new in zip(before, gradients, strict=True)]
        with torch.no_grad():
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
                velocity[name].mul_(momentum).add_(gradient)
                parameter.sub_(RATE * velocity[name])
    state = {"model": {n: p.detach() for n, p in parameters.items()}, "momentum": velocity}
    return losses, state


def _slips(task: _Task, ranks: int, loaded: dict | None, right: dict) -> dict:
    """The signs of mistakes in the state that the ranks end with."""

    def ends(got: dict, **slip) -> bool:
        return same(got, _alone(task, loaded, **slip)[1])

    def without_momentum(got: dict) -> bool:
        plain = _alone(task, loaded, momentum=0.0)[1]
        missing = not any(tensor.any() for tensor in got["momentum"].values())
        return same(got["model"], plain["model"]) or (
            missing and same(got["model"], right["model"])
        )

    start = _alone(replace(task, batches=()), loaded)[1]["model"]
    return {
        "not-stepped": lambda got: same(got["model"], start),
        "momentum-missing": without_momentum,
        "old-gradients": lambda got: ends(got, forgets=True),
        "other-factor": lambda got: any(ends(got, factor=f) for f in (ranks, 1 / ranks)),
    }


def _form(state: object) -> object:
    """What a state is made of, in words."""
    if isinstance(state, dict):
        return {key: _form(value) for key, value in state.items()}
    if isinstance(state, Tensor):
        return f"a tensor of shape {tuple(state.shape)}"
    return state if isinstance(state, str) else type(state).__name__


def _judge(
    reports: list[_Trained], task: _Task, loaded: dict | None = None, otherwise: str = ""
) -> None:
    """The states that the ranks end with, and their losses. `otherwise` is the mistake to name where
    no other one shows."""
    (losses, right), states = _alone(task, loaded), [report.state for report in reports]
    if any(states):
        forms = [_form(state) for state in states]
        expect(forms, [_form(right)] * len(forms), each="rank", likely={"another-form": True})
    slips = _slips(task, len(reports), loaded, right)
    likely = {
        "own-share-only": lambda got: any(not same(state, got[0]) for state in got),
        **{name: lambda got, sign=sign: sign(got[0]) for name, sign in slips.items()},
        **({otherwise: True} if otherwise else {}),
    }
    expect(states, [right] * len(states), each="rank", likely=likely)
    got = [report.losses for report in reports]
    known = {"other-loss": True}
    expect(got, [losses] * len(got), each="rank", what="the losses", likely=known)


def _task(draw, batches: tuple[int, ...], blocks: int | None = None) -> _Task:
    return _Task(12 * draw.integer(1, 3), blocks or draw.integer(1, 3), draw.seed(), batches)


@training.requires("batches that divide: parameters, momentum and loss of one process")
def batches_that_divide(answer, draw):
    ranks = draw.choice([2, 3])
    task = _task(draw, (ranks * draw.integer(2, 4), ranks * draw.integer(5, 7)))
    _judge(run(_trained, ranks, answer, task), task)


@training.requires("batches that do not divide, on four ranks", needs_earlier=True)
def batches_that_do_not_divide(answer, draw):
    ends = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    task = _task(draw, (4 * draw.integer(2, 4) + ends[0], 4 * draw.integer(5, 6) + ends[1]))
    _judge(run(_trained, 4, answer, task), task, otherwise="rows-count-unevenly")


@training.requires("one rank alone, and fewer rows than ranks", needs_earlier=True)
def one_rank_alone(answer, draw):
    task = _task(draw, (draw.integer(3, 9), 2))
    untrained = replace(task, batches=())
    _judge(run(_trained, 1, answer, untrained), untrained)
    _judge(run(_trained, 1, answer, task), task)
    _judge(run(_trained, 3, answer, task), task, otherwise="rows-count-unevenly")


@training.requires(
    "a state that is a copy, and goes on with any number of ranks", needs_earlier=True
)
def a_state_that_is_a_copy(answer, draw):
    ranks, before = draw.choice([2, 3]), _task(draw, (5, 7, 9))
    _, state = _alone(before)
    task = replace(before, batches=(draw.integer(6, 9), draw.integer(4, 5)), seed=draw.seed())
    for count in (ranks, 1):  # one alone needs to gather nothing, and may hand out what it has
        reports = run(_trained, count, answer, task, state)
        _judge(reports, task, state, otherwise="not-loaded")
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
    with PatientSampling() as memory, Trace() as trace:
        made.step(*third)
    sent = sum(on_a_ring(call)[1] for call in trace.record().calls)
    return memory.peak, memory.held(), sent


@training.requires(
    "on four ranks, at most twice the parameters' bytes held and few sent", needs_earlier=True
)
def on_four_ranks(answer, draw):
    task = _Task(36, draw.integer(10, 12), draw.seed(), (21, 23, 22))
    reports = run(_measured, 4, answer, task)
    size = 4 * sum(p.numel() for p in task.model().parameters())
    peak, rest, sent = (max(column) for column in zip(*reports, strict=True))
    if peak > MEMORY * size:
        got = f"{peak / size:.2f} P, and {rest / size:.2f} P after the step"
        slug = "whole-between-steps" if rest > size else "all-at-once"
        raise Wrong(slug, expected=f"a peak of at most {MEMORY} P", got=got)
    if sent > BYTES * size * 3 / 4:
        got = f"{sent / (size * 3 / 4):.2f} (n - 1) / n P"
        raise Wrong("too-many-bytes", expected=f"at most {BYTES} (n - 1) / n P sent", got=got)
