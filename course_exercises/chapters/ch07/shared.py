"""What the exercises of chapter 07 share."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import linear, mse_loss

from course_exercises.authoring import Wrong, expect, run, same, signs
from course_exercises.authoring.ranks import UsedEarly, come_late, described, following
from course_exercises.authoring.vocabulary import times, total
from course_utils.comm.intercept import listening
from course_utils.hardware import device

NAMES = ("data", "pipeline", "tensor")
Sizes = tuple[int, int, int]

ADAM_EPS = 0.5  # so that the update is smooth, and not linear
REPLICATED = ("scale", "bias")
SHARED_OUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # the dimension that tensor cuts
PARAMETERS = (*REPLICATED, *SHARED_OUT)
Values = dict[str, Tensor]

# What both steps can get wrong.
STEP = {
    "not-stepped": "No parameter has changed. Call `optimizer.step()`, and do not clear the gradients between "
    "backward and the step.",
    "other-rows": "A rank reads other rows than those of its data coordinate. With the whole batch nothing is "
    "distributed; and the ranks of a tensor group or a pipeline, parts of one model, need the same rows. "
    'Read the block `mesh.get_local_rank("data")` of as many blocks as the data group has ranks.',
    "other-output": "Your output is not that of the whole layer, `down(relu(up(scale * x))) + bias`. The ranks' terms may "
    "be averaged, or not summed at all; the bias may be added before the sum; or scale, relu or bias is missing. "
    "Put `SumForward` right behind `down`, and add the bias after it.",
    "input-gradient-partial": "The gradient of `scale` comes from this rank's hidden features alone. Where `scale * x` "
    "enters the cut region, backward has to sum over the tensor group, for `scale` and for what comes before: "
    "put `SumBackward` there, behind `scale`.",
    "summed-too-often": "Some gradients are too large by the size of the tensor group: backward sums what is whole already. "
    "Pass a gradient through a sum of the forward pass as it is, and do not sum whole ones again.",
    "other-factor": "All your gradients are too large or too small by one factor. Divide their sum over the data group once, "
    "by that group's size, and let the loss be the mean over all numbers of `y`.",
    "other-group": "You sum over other ranks than those that belong together; their numbers have the same shape and "
    "another meaning. Pass the tensor group to both functions, and average gradients over the data group.",
    "parameters-averaged": "You step with the gradients of the rank's own rows, and average the parameters "
    "after it. That is the same with plain SGD; other optimizers, such as Adam, are not linear in the "
    "gradients. Average the gradients before the step.",
    "group-rank": "You name a rank that the group does not have. `dst` and `src` are global ranks, also with "
    "`group=`. Take `group_dst` and `group_src`: they count within the group, and end with its last rank.",
    "frozen": "A frozen parameter gets no gradient: its `.grad` is None, or has to be, if an old one stands "
    "there. Skip it, on every rank: with a gradient, even of zeros, the optimizer would let it decay.",
    "not-a-float": "Return a number of Python's: `.item()` takes it out of a tensor.",
    "loss-not-mean": "You do not return the loss of the global batch on every rank. Average the loss over the data group, "
    "once, and with `all_reduce`, which gives it to all ranks.",
    "by-arithmetic": "The step is right only where the dimensions come in one order. Ask the mesh by name, "
    "`mesh.get_local_rank(name)` and `mesh.get_group(name)`, and neither by position, as `get_group(0)` or "
    "`mesh.shape[0]`, nor by computing a coordinate from the rank.",
}


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

    def mesh_shape(self) -> tuple[int, ...]:
        return tuple(self.size(name) for name in self.order)

    def place(self, rank: int) -> dict[str, int]:
        """The rank's coordinates by the names of the dimensions."""
        place = dict.fromkeys(NAMES, 0)
        for name in reversed(self.order):
            rank, place[name] = divmod(rank, self.size(name))
        return place

    def group(self, rank: int, name: str) -> list[int]:
        """The ranks that differ from `rank` in this dimension at most."""
        places = [self.place(other) | {name: 0} for other in range(self.ranks)]
        return [other for other, place in enumerate(places) if place == places[rank]]

    def last_stages(self) -> list[int]:
        end = self.size("pipeline") - 1
        return [rank for rank in range(self.ranks) if self.place(rank)["pipeline"] == end]

    def part(self, rank: int, stages: list[Values] | None = None) -> Values:
        """The rank's part of these stages' values; of the task's where none are given."""
        place, tp = self.place(rank), self.size("tensor")
        whole = (stages or self.stages)[place["pipeline"]]
        cut = {n: whole[n].chunk(tp, dim)[place["tensor"]] for n, dim in SHARED_OUT.items()}
        return {name: value.clone() for name, value in {**whole, **cut}.items()}

    def model(self, rank: int) -> tuple[_Part, torch.optim.Optimizer]:
        """The rank's part as the answer gets it, and its optimizer."""
        part = _Part(self.part(rank)).to(device())
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
            parameter.grad = torch.full_like(parameter, self.stale) if self.stale else None
        if self.adam:
            return part, torch.optim.Adam(part.parameters(), lr=self.lr, eps=ADAM_EPS)
        sgd = torch.optim.SGD(part.parameters(), lr=self.lr, weight_decay=self.decay)
        return part, sgd


def drawn_task(draw, sizes: Sizes, **more) -> Task:
    width, hidden = draw.integer(4, 7), draw.choice([12, 18])  # which divide by 1, 2 and 3
    rows = draw.choice([5, 7]) * sizes[0]  # so activations have another shape than gradients

    def stage() -> Values:  # activations and gradients stay near 1, as `compare` wants them
        return {
            "scale": draw.tensor(width),
            "bias": draw.tensor(width),
            "up.weight": draw.tensor(hidden, width) / width**0.5,
            "up.bias": draw.tensor(hidden),
            "down.weight": draw.tensor(width, hidden) / hidden**0.5,
        }

    stages = [stage() for _ in range(sizes[1])]
    inputs, targets = draw.tensor(rows, width), 3 * draw.tensor(rows, width)
    return Task(sizes, stages, inputs, targets, draw.number(0.5, 1.0), **more)


def as_it_may_be(draw) -> dict[str, float]:
    """With old gradients and a weight decay: what moves a frozen parameter that is given a gradient."""
    return {"stale": draw.number(1, 2), "decay": draw.number(0.1, 0.3)}


# ---- one process ---------------------------------------------------------------------------------


def one_process(stages: list[Values], x: Tensor, targets: Tensor, relu: bool = True) -> tuple:
    """The gradients of these stages, and the loss."""
    leaves = [{n: v.clone().requires_grad_() for n, v in stage.items()} for stage in stages]
    for stage in leaves:
        up = linear(x * stage["scale"], stage["up.weight"], stage["up.bias"])
        x = linear(up.relu() if relu else up, stage["down.weight"]) + stage["bias"]
    loss = mse_loss(x, targets)
    loss.backward()
    return [{name: value.grad for name, value in stage.items()} for stage in leaves], loss.item()


def gradients_by_rank(task: Task, own_rows: bool = False) -> list[Values]:
    """Each rank's part of the gradients, of the global batch or of the rank's own rows."""
    blocks = task.size("data") if own_rows else 1
    rows = zip(task.inputs.chunk(blocks), task.targets.chunk(blocks), strict=True)
    whole = [one_process(task.stages, *block)[0] for block in rows]
    return [task.part(r, whole[task.place(r)["data"] % blocks]) for r in range(task.ranks)]


def _stepped(task: Task, gradients: list[Values]) -> list[Values]:
    """Each rank's part after the optimizer's step with these gradients."""
    parts = []
    for rank, own in enumerate(gradients):
        part, optimizer = task.model(rank)
        for name, parameter in part.named_parameters():
            parameter.grad = None if name in task.frozen else own[name].to(device())
        optimizer.step()
        parts.append(_values(part))
    return parts


def _values(part: nn.Module) -> Values:
    return {name: value.detach().cpu().clone() for name, value in part.state_dict().items()}


# ---- the ranks -----------------------------------------------------------------------------------


@dataclass
class _Reader:
    """What reads the global batch. It judges at once: other rows would end in a hang."""

    task: Task
    rank: int
    kinds: set[str] = field(default_factory=set)  # "inputs", "targets"

    def inputs(self, block: int, blocks: int) -> Tensor:
        return self._block("inputs", block, blocks)

    def targets(self, block: int, blocks: int) -> Tensor:
        return self._block("targets", block, blocks)

    def _block(self, kind: str, block: int, blocks: int) -> Tensor:
        self.kinds.add(kind)
        own, size = self.task.place(self.rank)["data"], self.task.size("data")
        if (block, blocks) != (own, size):
            asked = f"block {block} of {blocks} was read"
            raise ValueError(f"{asked}; this rank's rows are block {own} of {size}")
        return getattr(self.task, kind).chunk(size)[own].clone().to(device())


@dataclass(frozen=True)
class Report:
    """What a rank did."""

    kinds: set[str]  # of what it read
    loss: object
    part: Values  # afterwards
    astray: list[str]  # sums over other ranks than those that belong together
    unwaited: list[str]  # calls for which nobody has waited, or too late, in words


def run_step(answer, task: Task) -> list[Report]:
    """Runs a step on all ranks. Where nobody waits for a call, no number means anything."""
    reports = run(_step, task.ranks, answer, task)
    for rank, report in enumerate(reports):
        if report.unwaited:
            got = f"rank {rank}: {report.unwaited[0]}"
            raise Wrong("not-waited", expected="a wait() for every call, in time", got=got)
    return reports


def _step(rank, answer, task: Task) -> Report:
    mesh = init_device_mesh(device().type, task.mesh_shape(), mesh_dim_names=task.order)
    (part, optimizer), reader, astray = task.model(rank), _Reader(task, rank), []
    more = (task.shape(), mesh) if "pipeline" in task.order else (mesh,)
    listener = _noting_groups(task, rank, astray)
    come_late(rank)
    with following() as sent, listening(listener), UsedEarly(sent) as used:
        loss = answer(part, reader.inputs, reader.targets, *more, optimizer)
    loss = loss.detach() if isinstance(loss, Tensor) else loss
    unwaited = [f"its {kind} is used before anybody has waited for it" for kind in used.kinds]
    unwaited += [f"nobody waits for this call: {kind}" for kind in sent.unwaited]
    return Report(reader.kinds, loss, _values(part), astray, unwaited)


def _noting_groups(task: Task, rank: int, astray: list[str]) -> Callable:
    """Raises where a message goes to, or is expected from, a rank that is not beside this one; notes sums
    of activations outside the tensor group, and of gradients outside the data group."""

    def on_call(name: str, arguments: dict) -> None:
        kind, payload = described(name, arguments)
        if kind not in ("send", "recv", "all_reduce"):
            return
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        members = dist.get_process_group_ranks(group)
        for tensor in payload if kind == "all_reduce" else ():
            belongs = "tensor" if tuple(tensor.shape) == task.shape() else "data"
            if tensor.numel() > 1 and members != task.group(rank, belongs):
                astray.append(belongs)
        if kind == "all_reduce":
            return
        peer = members[arguments["dst" if kind == "send" else "src"]]
        stages = task.place(rank)["pipeline"], task.place(peer)["pipeline"]
        if peer not in task.group(rank, "pipeline") or abs(stages[0] - stages[1]) != 1:
            verb = "sends to" if kind == "send" else "receives from"
            raise ValueError(f"it {verb} rank {peer}, which is not beside it in its pipeline")

    return on_call


# ---- the judgement -------------------------------------------------------------------------------

Sign = Callable[[list[Values]], bool]
# Those of the vocabulary whose sentence is true of the ranks of a data group.
OF_DATA_GROUPS = (
    "unchanged",
    "nothing-sent",
    "added-to-own",
    "left-out",
    "rounded",
)


def check_update(answer, task: Task) -> list[Report]:
    """Runs a step on all ranks and compares how their parts have changed."""
    reports = run_step(answer, task)
    before, got = [task.part(rank) for rank in range(task.ranks)], [r.part for r in reports]
    moved = [times(total([a, times(b, -1)]), 1 / task.lr) for a, b in zip(before, got, strict=True)]
    slips = {} if task.adam else _slips(task)  # Adam's update is not linear in the gradients
    likely = {
        "not-stepped": lambda _: same(got, before),
        **{name: lambda _, sign=sign: sign(moved) for name, sign in slips.items()},
        "parameters-averaged": lambda _: same(got, _with_averaged_parameters(task)),
        "other-group": any(report.astray for report in reports),
    }
    expected = _stepped(task, gradients_by_rank(task))
    expect(got, expected, each="rank", what="the parameters after the step", likely=likely)
    return reports


def _with_averaged_parameters(task: Task) -> list[Values]:
    """The parts where each rank steps alone, and the parameters are averaged then."""
    alone = _stepped(task, gradients_by_rank(task, own_rows=True))
    groups = [[alone[r] for r in task.group(rank, "data")] for rank in range(task.ranks)]
    return [times(total(group), 1 / len(group)) for group in groups]


def _slips(task: Task) -> dict[str, Sign]:
    """The signs of mistakes in the gradients that SGD has stepped with."""
    expected, own = gradients_by_rank(task), gradients_by_rank(task, own_rows=True)
    t, last = task.size("tensor"), task.last_stages()

    def right(got: list[Values], factors=(1,), but: tuple[str, ...] = ()) -> bool:
        """Whether the last stages have what belongs there, times one of the factors."""
        return all(
            any(same(got[rank][name], f * expected[rank][name]) for f in factors)
            for rank in last
            for name in PARAMETERS
            if name not in but
        )

    def partial_scale(got: list[Values]) -> bool:
        sums = [sum(got[r]["scale"] for r in task.group(rank, "tensor")) for rank in last]
        whole = [expected[rank]["scale"] for rank in last]
        return t > 1 and same(sums, whole) and right(got, but=("scale",))

    def summed_too_often(got: list[Values]) -> bool:
        return t > 1 and right(got, (1, t), ("scale",)) and not right(got, but=("scale",))

    def old_left(got: list[Values]) -> bool:
        """Old gradients come on top: once, or summed over the data group."""
        old = [task.stale * by for by in (1, task.size("data"))]
        sums = ([{n: v + each for n, v in part.items()} for part in expected] for each in old)
        return task.stale != 0 and any(same(got, both) for both in sums)

    return {
        "other-factor": lambda got: _one_factor(got, expected),
        "old-gradients": old_left,
        **_of_data_groups(task, own, expected),
        "not-handed-on": lambda got: right(got) and len(last) < task.ranks,
        "input-gradient-partial": partial_scale,
        "summed-too-often": summed_too_often,
        "other-output": lambda got: any(_as_if(got, task, **how) for how in _other_outputs(t)),
    }


def _one_factor(got: list[Values], expected: list[Values]) -> bool:
    bias = expected[0]["bias"]
    at = bias.abs().argmax()
    factor = (got[0]["bias"][at] / bias[at]).item()
    return factor != 0 and same(got, [times(own, factor) for own in expected])


def _of_data_groups(task: Task, own: list[Values], expected: list[Values]) -> dict[str, Sign]:
    """The vocabulary's signs, which have to fit in every data group."""
    groups = {tuple(task.group(rank, "data")) for rank in range(task.ranks)}
    found = {
        group: signs(*([each[rank] for rank in group] for each in (own, expected)))
        for group in groups
    }

    def everywhere(name: str) -> Sign:
        return lambda got: all(found[group][name]([got[r] for r in group]) for group in groups)

    return {name: everywhere(name) for name in OF_DATA_GROUPS}


def _other_outputs(t: int) -> list[dict]:
    """What is changed in the model, as arguments of `_as_if`, where the output is another one."""
    outputs: list[dict] = [
        {"changed": {"scale": torch.ones_like}, "but": ("scale",)},
        {"changed": {"bias": torch.zeros_like}, "but": ("bias",)},
        {"relu": False},
    ]
    if t > 1:
        outputs += [
            {"alone": True, "but": ("scale",)},  # each rank keeps its own term
            {"changed": {"down.weight": lambda w: w / t}, "but": ("down.weight",)},  # a mean
            {"changed": {"bias": lambda b: b * t}},  # added once for each rank
            {"alone": True, "changed": {"scale": lambda s: s * t}, "but": (*SHARED_OUT, "scale")},
        ]
    return outputs


def _as_if(got, task: Task, changed=None, but=(), alone=False, relu=True) -> bool:
    """Whether the last stages have the gradients of a model with changed values; `alone`: of their own
    parts, each of which is a model by itself."""
    for rank in task.last_stages():
        ranks = task.group(rank, "pipeline")
        stages = [task.part(r) for r in ranks] if alone else task.stages
        other = [
            {n: changed[n](v) if n in (changed or {}) else v for n, v in stage.items()}
            for stage in stages
        ]
        gradients, _ = one_process(other, task.inputs, task.targets, relu)
        wanted = gradients[-1] if alone else task.part(rank, gradients)
        if not all(same(got[rank][n], wanted[n]) for n in PARAMETERS if n not in but):
            return False
    return True


def check_losses(reports: list[Report], task: Task) -> None:
    got, last = [report.loss for report in reports], task.last_stages()
    _, loss = one_process(task.stages, task.inputs, task.targets)
    if any(isinstance(each, Tensor) for each in got):
        raise Wrong("not-a-float", expected="a float", got="a tensor")

    def on_last_only(got: list) -> bool:
        kept = all(same(each, loss) == (rank in last) for rank, each in enumerate(got))
        return len(last) < len(got) and (kept or same(got, [0.0] * len(got)))

    likely = {
        "loss-on-last-only": on_last_only,
        "loss-not-mean": lambda got: any(each is not None for each in got),
    }
    expect(got, [loss] * task.ranks, each="rank", what="the loss", likely=likely)


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
