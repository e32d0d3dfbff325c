"""What the exercises of chapter 07 share."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from course_exercises.authoring import Wrong, expect, run, same
from course_exercises.authoring.ranks import UsedEarly, come_late, following
from course_utils.comm.intercept import listening
from course_utils.hardware import device

NAMES = ("data", "pipeline", "tensor")
Sizes = tuple[int, int, int]


ADAM_EPS = 0.1  # so that the update is smooth, and far from linear
REPLICATED = ("scale", "bias")
SHARED_OUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # the dimension that tensor cuts
Values = dict[str, Tensor]


class _Part(nn.Module):
    """A rank's part of a stage; the whole stage where T is 1. The answer computes with it."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        width, hidden = len(values["bias"]), len(values["up.bias"])
        self.scale, self.bias = (nn.Parameter(values[name].clone()) for name in ("scale", "bias"))
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.load_state_dict(values)


@dataclass(frozen=True)
class Task:
    """A grid of ranks, the whole model by stages, the global batch and the learning rate."""

    sizes: Sizes
    stages: list[Values]
    inputs: Tensor
    targets: Tensor
    lr: float
    frozen: tuple[str, ...] = ()
    stale: float = 0.0  # what stands in every .grad before
    order: tuple[str, ...] = NAMES  # of the mesh's dimensions; those that are not named have size 1
    adam: bool = False  # else SGD
    decay: float = 0.0  # of SGD's weights

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    def size(self, name: str) -> int:
        return self.sizes[NAMES.index(name)]

    def shape(self) -> tuple[int, int]:
        """That of the activations of one rank's rows."""
        return len(self.inputs) // self.size("data"), self.inputs.shape[1]

    def optimizer(self, part: nn.Module) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.Adam(part.parameters(), lr=self.lr, eps=ADAM_EPS)
        return torch.optim.SGD(part.parameters(), lr=self.lr, weight_decay=self.decay)

    def updates(self, gradients: list[Values]) -> list[Values]:
        """What the optimizer's first step subtracts with these gradients, by the learning rate."""
        if self.adam:
            return [{n: g / (g.abs() + ADAM_EPS) for n, g in own.items()} for own in gradients]
        decays = [
            {n: 0.0 if n in self.frozen else self.decay * value for n, value in part.items()}
            for part in map(self.part, range(self.ranks))
        ]
        pairs = zip(gradients, decays, strict=True)
        return [{n: g + decay[n] for n, g in own.items()} for own, decay in pairs]

    def mesh_shape(self) -> tuple[int, ...]:
        return tuple(self.size(name) for name in self.order)

    def place(self, rank: int) -> dict[str, int]:
        """The rank's coordinates by the names of the dimensions."""
        place = dict.fromkeys(NAMES, 0)
        for name in reversed(self.order):
            rank, place[name] = divmod(rank, self.size(name))
        return place

    def group(self, rank: int, *names: str) -> list[int]:
        """The ranks that differ from `rank` in these dimensions at most."""
        fixed = [name for name in NAMES if name not in names]
        own = self.place(rank)
        others = {other: self.place(other) for other in range(self.ranks)}
        return [r for r, place in others.items() if all(place[n] == own[n] for n in fixed)]

    def part(self, rank: int) -> Values:
        """The values of the rank's part."""
        place, tp = self.place(rank), self.size("tensor")
        whole = self.stages[place["pipeline"]]
        return {
            name: value.chunk(tp, SHARED_OUT[name])[place["tensor"]].clone()
            if name in SHARED_OUT
            else value
            for name, value in whole.items()
        }


def drawn_task(draw, sizes: Sizes, **more) -> Task:
    dp, pp, tp = sizes
    width, hidden = draw.integer(4, 7), draw.choice([12, 18])  # which divide by 1, 2 and 3
    rows = draw.integer(3, 5) * dp * pp * tp

    def stage() -> Values:  # activations and gradients stay near 1, as `compare` wants them
        return {
            "scale": draw.tensor(width),
            "bias": draw.tensor(width),
            "up.weight": draw.tensor(hidden, width) / width**0.5,
            "up.bias": draw.tensor(hidden),
            "down.weight": draw.tensor(width, hidden) / hidden**0.5,
        }

    stages = [stage() for _ in range(pp)]
    inputs, targets = draw.tensor(rows, width), 3 * draw.tensor(rows, width)
    return Task(sizes, stages, inputs, targets, draw.number(0.5, 1.0), **more)


# The step, simulated.
@dataclass(frozen=True)
class Slip:
    """What goes wrong in a step. A group is given by the dimensions in which its ranks differ."""

    rows: tuple[str, ...] = ("data",)  # the dimensions that share the rows out
    forward: tuple[str, ...] = ("tensor",)  # over which the partial outputs are summed
    backward: tuple[str, ...] = ("tensor",)  # and the gradients that enter the cut region
    enters: float = 1.0  # times what enters the cut region: T where the sum is made there
    twice: bool = False  # the gradients are summed where the partial outputs leave the region
    bias_inside: bool = False  # the bias is added before the sum
    share: float = 1.0  # of the sum that is kept: 1 / T for a mean
    gradients: tuple[str, ...] = ("data",)  # over which the gradients are summed
    divisor: float | None = None  # by which the sum is divided; None for the data dimension's size
    averaged: tuple[str, ...] = (*SHARED_OUT, *REPLICATED)  # the parameters that are averaged
    again: float = 0.0  # replicated gradients are summed over tensor, too, and take this factor
    keeps_stale: bool = False
    leaves_out: str = ""  # "scale", "relu" or "bias"
    sends_back: bool = True  # the gradient of its input, to the stage before
    comes_back: float = 1.0  # times the gradient that a stage gets from the next one
    ones: bool = False  # a stage begins its backward with ones, whatever comes from the next
    scale_inside: bool = False  # the scale stands behind the place where backward sums


RIGHT = Slip()


@dataclass
class _Pass:
    """One rank's forward pass, up to the sum."""

    part: _Part
    x: Tensor
    scaled: Tensor
    entered: Tensor  # a leaf, whose gradient goes back into the graph of `scaled`
    partial: Tensor
    y: Tensor | None = None


@dataclass(frozen=True)
class _Stepped:
    """The gradients that every rank's update used, and every rank's own loss (0 before the last
    stage)."""

    gradients: list[Values]
    losses: list[float]


def _simulate(task: Task, slip: Slip = RIGHT) -> _Stepped:
    """Plays the step of all ranks."""
    passes: dict[int, _Pass] = {}
    last = task.size("pipeline") - 1
    for stage in range(last + 1):
        ranks = [r for r in range(task.ranks) if task.place(r)["pipeline"] == stage]
        for rank in ranks:
            x = _rows(task, slip, rank, task.inputs)
            if stage > 0:
                x = passes[_beside(task, rank, -1)].y
            passes[rank] = _enter(task, slip, rank, x)
        for rank in ranks:
            terms = [passes[r].partial for r in task.group(rank, *slip.forward)]
            y = slip.share * sum(terms).detach()
            outside = not slip.bias_inside and slip.leaves_out != "bias"
            passes[rank].y = y + passes[rank].part.bias.detach() if outside else y
    gradients, losses = {}, [0.0] * task.ranks
    of_output: dict[int, Tensor] = {}
    for stage in range(last, -1, -1):
        ranks = [r for r in range(task.ranks) if task.place(r)["pipeline"] == stage]
        if stage == last:
            for rank in ranks:
                y = passes[rank].y.clone().requires_grad_()
                loss = nn.functional.mse_loss(y, _rows(task, slip, rank, task.targets))
                loss.backward()
                of_output[rank], losses[rank] = y.grad, loss.item()
        for rank in ranks:
            _leave_backward(task, slip, rank, passes, of_output)
        for rank in ranks:
            own = passes[rank]
            entered = sum(passes[r].entered.grad for r in task.group(rank, *slip.backward))
            own.scaled.backward(entered)
            if slip.scale_inside:
                own.part.scale.grad = (own.entered.grad * own.x.detach()).sum(0)
            if stage > 0:
                back = torch.ones_like(own.x) if slip.ones else slip.comes_back * own.x.grad
                of_output[_beside(task, rank, -1)] = back
        for rank in ranks:
            blind = stage < last and not slip.sends_back
            gradients[rank] = _own_gradients(task, slip, passes[rank].part, blind)
    return _Stepped([_averaged(task, slip, r, gradients) for r in range(task.ranks)], losses)


def _own_gradients(task: Task, slip: Slip, part: _Part, blind: bool) -> Values:
    """A rank's gradients before they are averaged; zeros where it has none."""
    gradients = {}
    for name, parameter in part.named_parameters():
        none = blind or parameter.grad is None
        gradient = torch.zeros_like(parameter) if none else parameter.grad
        if slip.keeps_stale:
            gradient = gradient + task.stale
        gradients[name] = torch.zeros_like(parameter) if name in task.frozen else gradient
    return gradients


def _rows(task: Task, slip: Slip, rank: int, batch: Tensor) -> Tensor:
    place, index, count = task.place(rank), 0, 1
    for name in slip.rows:
        index, count = index * task.size(name) + place[name], count * task.size(name)
    return batch.chunk(count)[index]


def _beside(task: Task, rank: int, step: int) -> int:
    """The rank `step` stages further, with the same other coordinates."""
    place = task.place(rank)["pipeline"] + step
    return next(r for r in task.group(rank, "pipeline") if task.place(r)["pipeline"] == place)


def _enter(task: Task, slip: Slip, rank: int, x: Tensor) -> _Pass:
    part = _Part(task.part(rank))
    x = x.detach().clone().requires_grad_()
    scaled = x if slip.leaves_out == "scale" else x * part.scale
    entered = (slip.enters * scaled).detach().requires_grad_()
    hidden = part.up(entered)
    partial = part.down(hidden if slip.leaves_out == "relu" else hidden.relu())
    return _Pass(part, x, scaled, entered, partial + part.bias if slip.bias_inside else partial)


def _leave_backward(task, slip, rank, passes: dict[int, _Pass], of_output) -> None:
    """Backward from the rank's output to where its cut region begins."""
    own, gradient = passes[rank], of_output[rank]
    if slip.twice:
        gradient = sum(of_output[r] for r in task.group(rank, "tensor"))
    own.partial.backward(slip.share * gradient)
    if not slip.bias_inside and slip.leaves_out != "bias":
        own.part.bias.grad = of_output[rank].sum(0)


def _averaged(task: Task, slip: Slip, rank: int, gradients: dict[int, Values]) -> Values:
    divisor = slip.divisor or task.size("data")

    def mean(name: str) -> Tensor:
        if name not in slip.averaged:
            return gradients[rank][name]
        if slip.again and name in REPLICATED:
            ranks = task.group(rank, "tensor", *slip.gradients)
            return slip.again * sum(gradients[r][name] for r in ranks) / divisor
        return sum(gradients[r][name] for r in task.group(rank, *slip.gradients)) / divisor

    return {name: mean(name) for name in gradients[rank]}


# The step, for real.
class ReadsOtherRows(Exception):
    """A rank reads rows that are not those of its data coordinate."""


class ReadsAllRows(Exception):
    """A rank reads the whole batch although the data dimension has several ranks."""


class NotANeighbour(Exception):
    """A rank sends to, or receives from, a rank that is not beside it in its pipeline."""


@dataclass
class _Reader:
    """What reads the global batch. `place` is that of the rank; it judges at once where `strict`."""

    task: Task
    place: dict[str, int]
    strict: bool
    read: list[tuple[int, int]] = field(default_factory=list)  # (block, blocks)
    kinds: set[str] = field(default_factory=set)  # "inputs", "targets"

    def inputs(self, block: int, blocks: int) -> Tensor:
        self.kinds.add("inputs")
        return self._block(self.task.inputs, block, blocks)

    def targets(self, block: int, blocks: int) -> Tensor:
        self.kinds.add("targets")
        return self._block(self.task.targets, block, blocks)

    def _block(self, batch: Tensor, block: int, blocks: int) -> Tensor:
        self.read.append((block, blocks))
        own, size = self.place["data"], self.task.size("data")
        if self.strict and blocks == 1 < size:
            raise ReadsAllRows(f"block 0 of 1 is the whole batch, and {size} ranks share it out")
        if self.strict and (block, blocks) != (own, size):
            asked = f"block {block} of {blocks} was read"
            raise ReadsOtherRows(f"{asked}; this rank's rows are block {own} of {size}")
        return batch.chunk(blocks)[block % blocks].clone().to(device())


@dataclass(frozen=True)
class Report:
    """What a rank did: the blocks that it read, its loss, its part afterwards."""

    read: list[tuple[int, int]]
    kinds: set[str]
    loss: object
    part: Values
    unwaited: list[str]  # calls for which nobody has waited, or too late, in words


def run_step(answer, task: Task, three: bool) -> list[Report]:
    """Runs a step on all ranks. Where nobody waits for a call, no number means anything."""
    reports = run(_stepped, task.ranks, answer, task, three)
    for rank, report in enumerate(reports):
        if report.unwaited:
            got = f"rank {rank}: {report.unwaited[0]}"
            raise Wrong("not-waited", expected="a wait() for every call, in time", got=got)
    return reports


def _stepped(rank, answer, task: Task, three: bool) -> Report:
    mesh = init_device_mesh(device().type, task.mesh_shape(), mesh_dim_names=task.order)
    part = _Part(task.part(rank)).to(device())
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(name not in task.frozen)
        if task.stale:
            parameter.grad = torch.full_like(parameter, task.stale)
    optimizer = task.optimizer(part)
    reader = _Reader(task, task.place(rank), strict=three)
    more = (task.shape(), mesh) if three else (mesh,)
    come_late(rank)
    with following() as sent, listening(_neighbours_only(task, rank)), UsedEarly(sent) as used:
        loss = answer(part, reader.inputs, reader.targets, *more, optimizer)
    loss = loss.detach() if isinstance(loss, Tensor) else loss
    values = {name: value.detach().clone() for name, value in part.state_dict().items()}
    unwaited = [f"its {kind} is used before anybody has waited for it" for kind in used.kinds]
    unwaited += [f"nobody waits for this call: {kind}" for kind in sent.unwaited]
    return Report(reader.read, reader.kinds, loss, values, unwaited)


def _neighbours_only(task: Task, rank: int) -> Callable:
    """Raises where a message goes to, or is expected from, a rank that is not beside this one."""

    def on_call(name: str, arguments: dict) -> None:
        end = {"send": "dst", "recv_": "src"}.get(name)
        if end is not None:
            group = dist.ProcessGroup.unbox(arguments["process_group"])
            peer = dist.get_process_group_ranks(group)[arguments[end]]
            stages = task.place(rank)["pipeline"], task.place(peer)["pipeline"]
            if peer not in task.group(rank, "pipeline") or abs(stages[0] - stages[1]) != 1:
                verb = "sends to" if end == "dst" else "receives from"
                raise NotANeighbour(
                    f"it {verb} rank {peer}, which is not beside it in its pipeline"
                )

    return on_call


Slips = dict[str, list[Slip]]


def check_update(answer, task: Task, slips: Slips, three: bool) -> list[Report]:
    """Runs a step on all ranks and compares what they read, and how their parts have changed."""
    reports = run_step(answer, task, three)
    if not three:
        _check_rows(reports, task)
    got = [
        {name: (old - report.part[name].cpu()) / task.lr for name, old in task.part(rank).items()}
        for rank, report in enumerate(reports)
    ]
    likely = {
        "not-stepped": lambda got: not any(value.any() for own in got for value in own.values()),
        **{slug: _is_one_of(task, made) for slug, made in slips.items()},
    }
    if task.adam:
        likely["parameters-averaged"] = lambda got: same(got, _of_averaged_parameters(task))
    if task.size("data") > 1:
        likely["not-averaged"] = _on_some_rank(task, Slip(gradients=(), divisor=1))
    expected = task.updates(_simulate(task).gradients)
    what = "the update, by the learning rate" if task.adam else "the update, as a gradient"
    expect(got, expected, each="rank", what=what, likely=likely)
    return reports


def _of_averaged_parameters(task: Task) -> list[Values]:
    """The updates where each rank steps alone, and the parameters are averaged then."""
    alone = task.updates(_simulate(task, Slip(gradients=(), divisor=1)).gradients)
    groups = [[alone[other] for other in task.group(rank, "data")] for rank in range(task.ranks)]
    return [
        {name: sum(own[name] for own in group) / len(group) for name in group[0]}
        for group in groups
    ]


def _is_one_of(task: Task, slips: list[Slip]) -> Callable[[list[Values]], bool]:
    def found(got: list[Values]) -> bool:
        return any(same(got, task.updates(_simulate(task, slip).gradients)) for slip in slips)

    return found


def _on_some_rank(task: Task, slip: Slip) -> Callable[[list[Values]], bool]:
    """Whether at least one rank's update is that of the slip."""

    def found(got: list[Values]) -> bool:
        made = task.updates(_simulate(task, slip).gradients)
        return any(same(own, slipped) for own, slipped in zip(got, made, strict=True))

    return found


def as_it_may_be(draw) -> dict[str, float]:
    """With old gradients and a weight decay: what moves a frozen parameter that is given a gradient."""
    return {"stale": draw.number(1, 2), "decay": draw.number(0.1, 0.3)}


def check_losses(reports: list[Report], task: Task) -> None:
    last, own = task.size("pipeline") - 1, _simulate(task).losses
    at_end = [r for r in range(task.ranks) if task.place(r)["pipeline"] == last]
    mean = sum(own[r] for r in at_end) / len(at_end)
    factors = {f for size in (*task.sizes, task.ranks) for f in (size, 1 / size)}

    def on_last_only(got: list) -> bool:
        from_first = same(got, [0.0] * task.ranks)  # the first stage has told all that it has none
        kept = all(same(got[r], mean) == (r in at_end) for r in range(task.ranks))
        return last > 0 and (kept or from_first)

    likely = {
        "loss-on-last-only": on_last_only,
        "loss-local": lambda got: all(same(got[r], own[r]) for r in at_end),
        "loss-on-some": lambda got: any(same(got[r], mean) for r in at_end),
        "loss-not-mean": lambda got: any(same(got, [f * mean] * task.ranks) for f in factors),
    }
    got = [report.loss for report in reports]
    if any(isinstance(loss, Tensor) for loss in got):
        raise Wrong("loss-not-a-float", expected="a float", got="a tensor")
    expect(got, [mean] * task.ranks, each="rank", what="the loss", likely=likely)


def _check_rows(reports: list[Report], task: Task) -> None:
    """Judges the blocks that the ranks read; a rank that read none is judged by its update."""
    places = [task.place(rank) for rank in range(task.ranks)]
    read = [_blocks(report.read) for report in reports]
    right = [_blocks([(place["data"], task.size("data"))]) for place in places]
    if all(own in ("nothing", wanted) for own, wanted in zip(read, right, strict=True)):
        return
    parts = task.size("tensor")
    likely = {
        "whole-batch": [_blocks([(0, 1)])] * task.ranks,
        "batch-by-rank": [_blocks([(rank, task.ranks)]) for rank in range(task.ranks)],
        "batch-by-tensor": [_blocks([(place["tensor"], parts)]) for place in places],
        "other-rows": True,
    }
    expect(read, right, each="rank", what="what is read", likely=likely)


def _blocks(read: list[tuple[int, int]]) -> str:
    """The blocks that a rank read, in words."""
    return " and ".join(f"block {i} of {n}" for i, n in sorted(set(read))) or "nothing"


@contextmanager
def blaming(slug: str) -> Iterator[None]:
    """Whatever is wrong within, this is why, unless nobody waits."""
    try:
        yield
    except Wrong as wrong:
        if wrong.misconception == "not-waited":
            raise
        raise Wrong(slug, expected=wrong.expected, got=wrong.got) from None


def any_failure(slug: str, *keys: str) -> dict[str, str]:
    """Every failure is named so, also what the exercise names otherwise by these keys."""
    return dict.fromkeys((*keys, "exception", "timeout", "mismatch", "signal"), slug)


ALL = NAMES
STEP = {
    "not-waited": "Nobody waits for a call with `async_op=True`, an `isend` or an `irecv`, or somebody "
    "does too late: what is used may not have arrived. Call `wait()` on what such a call returns, before "
    "the result is used, and for an `isend` before the step ends.",
    "not-stepped": "No parameter has changed: the optimizer's step is missing, or the gradients are "
    "cleared between backward and the step.",
    "other-model": "The step is that of another model: the scale, the relu or the bias is missing. The model "
    "is `down(relu(up(scale * x))) + bias`.",
    "other-loss": "The gradients are those of a sum over columns or rows: `mse_loss` is the mean "
    "over all numbers of `y`, as the loss of one process is.",
    "parameters-averaged": "You step with the gradients of the rank's own rows, and average the parameters "
    "after it. That is the same with plain SGD; other optimizers, such as Adam, are not linear in the "
    "gradients. Average the gradients before the step.",
    "whole-batch": "Every rank reads the whole batch. The numbers may still be right, but nothing is "
    "distributed: with more ranks no step gets shorter.",
    "partial-output": "The outputs of the tensor group's ranks are not added up: each has a term of "
    "the sum only.",
    "bias-per-rank": "The bias is added before the sum: once per rank of the tensor group.",
    "mean-not-sum": "The partial outputs are averaged: they are terms of one sum.",
    "input-gradient-partial": "Where `scale * x` enters the cut region, backward has to sum over the "
    "tensor group: each rank's gradient comes from its own hidden features alone. So `scale`, which all "
    "ranks hold, gets a part of its gradient, and so does what comes before.",
    "summed-again": "The gradients of the tensor group are too large by its size: backward sums what "
    "is whole already. A sum in forward is passed through as it is in backward.",
    "not-averaged": "A rank steps with the gradients of its own rows: they are not averaged over its "
    "data group before the step. Every rank has a data group, and the copies of a part drift apart.",
    "sum-not-mean": "The gradients are summed over the data group and not divided by its size.",
    "divided-twice": "The gradients are divided by the size of the data group twice: the loss is a "
    "mean already, or the average was.",
    "divided-by-world": "You divide by the number of all ranks. The sum has as many terms as the data "
    "group has ranks.",
    "divided-by-another": "You divide by a number that is not the size of the data group: that of another "
    "dimension, or a fixed 2. The sum has as many terms as the data group has ranks.",
    "average-over-all": "The gradients are averaged over *all* ranks. Ranks outside the data group "
    "hold other parts of the model: the shapes fit, the numbers belong to other parameters.",
    "average-over-another": "The gradients are averaged over another dimension than data. Its ranks hold "
    "other parts of the model: the shapes fit, the numbers belong to other parameters.",
    "sharded-not-averaged": "Only the replicated parameters are averaged. A shard has copies too, on "
    "the other ranks of its data group.",
    "replicated-not-averaged": "Only the cut parameters are averaged. The replicated ones see other "
    "rows on each rank of a data group as well.",
    "old-gradients": "What stood in `.grad` before is part of the update. Clear it first.",
    "frozen": "A frozen parameter gets no gradient: its `.grad` is None, or has to be, if an old one stands "
    "there. Skip it, on every rank: with a gradient, even of zeros, the optimizer would let it decay.",
    "loss-not-a-float": "You return a tensor. Asked is a Python number, as `.item()` gives it.",
    "loss-local": "You return the loss of the rank's own rows. Asked is that of the global batch: "
    "average over the data group.",
    "loss-on-some": "Some ranks of a data group return the mean loss and others do not. `reduce` "
    "and `gather` deliver to one rank, `all_reduce` to all of them.",
    "loss-not-mean": "The loss is too large or too small by the size of a group: average it over the "
    "data group, once.",
    "by-arithmetic": "The step is right only where the dimensions come in one order. Ask the mesh by name, "
    "`mesh.get_local_rank(name)` and `mesh.get_group(name)`, and neither by position, as `get_group(0)` or "
    "`mesh.shape[0]`, nor by computing a coordinate from the rank.",
    "not-every-rank": "Some ranks wait in a collective that others never call. Every rank of the group "
    "has to call it; a test such as `if it is rank 0` around it is the usual reason.",
}


def slips_of_any_step(task: Task) -> Slips:
    """Mistakes in averaging the gradients, and in the model itself."""
    dp, others = task.size("data"), [n for n in NAMES[1:] if task.size(n) > 1]
    every = [Slip(gradients=ALL, divisor=n) for n in (task.ranks, dp, 1)]
    divisors = sorted({2, *(task.size(n) for n in others)} - {1, dp, dp**2, task.ranks})
    rows, width = task.inputs.shape
    another = [
        Slip(gradients=(n,), divisor=d) for n in others for d in (task.size(n), dp, task.ranks)
    ]
    return {
        "not-averaged": [Slip(gradients=(), divisor=1)],
        "sum-not-mean": [Slip(divisor=1)],
        "divided-twice": [Slip(divisor=dp**2)],
        "divided-by-world": [Slip(divisor=task.ranks)],
        "divided-by-another": [Slip(divisor=n) for n in divisors],
        "average-over-all": every,
        "average-over-another": another,
        "sharded-not-averaged": [Slip(averaged=REPLICATED)],
        "replicated-not-averaged": [Slip(averaged=tuple(SHARED_OUT))],
        "old-gradients": [Slip(keeps_stale=True)],
        "other-loss": [Slip(divisor=dp / n) for n in (width, rows // dp, rows // dp * width)],
        "other-model": [Slip(leaves_out=part) for part in ("scale", "relu", "bias")],
    }


def tensor_slips(task: Task) -> Slips:
    """Mistakes in the sums over the tensor group."""
    tp = task.size("tensor")
    return {
        "partial-output": [Slip(forward=()), Slip(forward=(), backward=())],
        "bias-per-rank": [Slip(bias_inside=True)],
        "mean-not-sum": [Slip(share=1 / tp)],
        "input-gradient-partial": [
            Slip(backward=()),
            Slip(backward=(), again=1 / tp),
            Slip(scale_inside=True),
        ],
        "summed-again": [
            Slip(twice=True),
            Slip(twice=True, backward=()),
            Slip(again=1.0),
            Slip(again=1.0, backward=()),
        ],
    }
