"""The checks of chapter 07: the groups of a grid, coordinates and back, a training step in two and in
three dimensions, the cheapest placement on two kinds of links.

A training step is compared with `_simulate`, which plays all ranks of a grid one after the other in
the notebook's kernel, rightly or with a slip of the kind that people make. What a rank reads, and to
whom it sends, is judged when it does it: such a mistake would otherwise end in a hang.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from course_utils.checks import Exercise, Wrong, expect, expect_type, run, same
from course_utils.checks.ranks import UsedEarly, come_late, following
from course_utils.hardware import device
from course_utils.intercept import listening

# ---- 7.1 -----------------------------------------------------------------------------------------

NAMES = ("data", "pipeline", "tensor")
Sizes = tuple[int, int, int]
Groups = dict[str, list[list[int]]]

grouping = Exercise(
    "7.1",
    "groups_of",
    points=2,
    minutes=12,
    kind="first",
    parameters=("dp", "pp", "tp"),
    hints=[
        (
            "Write the eight ranks of a 2 x 2 x 2 grid with their coordinates in a table. Which ranks "
            "have the same d and the same p as rank 0? What is the distance between them?"
        ),
        (
            "One step in a dimension changes the rank's number by a fixed stride: 1 for tensor. For "
            "the next dimension it is the product of the sizes of all that change faster."
        ),
        (
            "In each dimension, a group's first rank has the coordinate 0 there. Go through all ranks "
            "in ascending order, keep those, and add 0, 1, 2 ... strides to each."
        ),
    ],
    misconceptions={
        "not-a-dict": "Asked is a dict with the keys data, pipeline and tensor.",
        "keys": "The keys are the names of the dimensions: data, pipeline and tensor.",
        "not-lists": "Each dimension has a list of groups, and a group is a list of ranks, also where "
        "there is only one group.",
        "not-whole-numbers": "A rank is a whole number: `/` makes a float of it, `//` does not.",
        "names-swapped": "These are the groups of another dimension: the names are mixed up.",
        "order-of-dimensions": "You number the ranks in another order of the dimensions. The rank is "
        "(d * pp + p) * tp + t: tensor changes fastest, data slowest.",
        "consecutive-everywhere": "Every group is a run of consecutive ranks. That is so for tensor "
        "alone: ranks that differ in d only are pp * tp apart.",
        "same-coordinate": "Your groups are the ranks with the *same* coordinate in the dimension. A "
        "group holds those that differ in this coordinate and agree in all others.",
        "one-group": "Only one group of a dimension is there. Every rank is in exactly one group of "
        "each dimension, so together its groups hold all ranks.",
        "size-one-left-out": "A dimension of size 1 has groups too: every rank is alone in one.",
        "not-a-partition": "A rank is in two groups of a dimension, or in none, or is no rank of the "
        "grid. The stride of a dimension is the product of the sizes of those that change faster.",
        "order-of-groups": "The right groups in another order: ranks ascend within a group, and groups by "
        "their first rank. All ranks have to call `new_group` in the same order.",
    },
    failures={"KeyError": "keys"},
)


def _groups(sizes: Sizes, slowest_first: tuple[str, ...] = NAMES) -> Groups:
    """The groups where ranks are numbered with the last of `slowest_first` changing fastest."""
    size = dict(zip(NAMES, sizes, strict=True))
    grid = torch.arange(math.prod(sizes)).reshape([size[name] for name in slowest_first])
    rows = {
        name: grid.movedim(slowest_first.index(name), -1).reshape(-1, size[name]) for name in NAMES
    }
    return {name: sorted(rows[name].tolist()) for name in NAMES}


def _same_coordinate(sizes: Sizes) -> Groups:
    grid = torch.arange(math.prod(sizes)).reshape(sizes)
    return {
        name: [part.flatten().tolist() for part in grid.unbind(dim)]
        for dim, name in enumerate(NAMES)
    }


def _consecutive(sizes: Sizes) -> Groups:
    ranks = torch.arange(math.prod(sizes))
    return {n: ranks.reshape(-1, s).tolist() for n, s in zip(NAMES, sizes, strict=True)}


def _in_order(groups: Groups) -> Groups:
    return {name: sorted(sorted(group) for group in groups[name]) for name in NAMES}


def _check_groups(answer, sizes: Sizes) -> None:
    got = answer(*sizes)
    expect_type(got, dict, likely=None if got is None else "not-a-dict")
    expect(set(got), set(NAMES), what="the keys", likely={"keys": True})
    for name in NAMES:
        if not _is_list_of_lists(got[name]):
            raise Wrong("not-lists", expected="a list of lists of ranks", got=got[name])
        if any(isinstance(rank, float) for group in got[name] for rank in group):
            raise Wrong("not-whole-numbers", expected="whole numbers", got=got[name])
    right, everyone = _groups(sizes), list(range(math.prod(sizes)))

    def lists_all(test: Callable[[list[int]], bool]) -> Callable[[Groups], bool]:
        return lambda got: any(test(sorted(r for group in got[n] for r in group)) for n in NAMES)

    def another_order(got: Groups) -> bool:
        orders = list(itertools.permutations(NAMES))[1:]
        return any(_in_order(got) == _groups(sizes, order) for order in orders)

    def renamed(got: Groups) -> bool:
        values = [_in_order(got)[name] for name in NAMES]
        return any(list(p) == values for p in itertools.permutations(right.values()))

    likely = {
        "order-of-groups": lambda got: _in_order(got) == right,
        "size-one-left-out": lambda got: any(
            size == 1 and not got[n] for n, size in zip(NAMES, sizes, strict=True)
        ),
        "same-coordinate": _same_coordinate(sizes),
        "consecutive-everywhere": _consecutive(sizes),
        "names-swapped": renamed,
        "order-of-dimensions": another_order,
        "one-group": lambda got: any(len(got[n]) == 1 < len(right[n]) for n in NAMES),
        "not-a-partition": lists_all(lambda ranks: ranks != everyone),
    }
    expect({n: _as_lists(got[n]) for n in NAMES}, right, likely=likely)


def _is_list_of_lists(groups: object) -> bool:
    if not isinstance(groups, (list, tuple)):
        return False
    return all(isinstance(group, (list, tuple, range)) for group in groups)


def _as_lists(groups: Iterable) -> list:
    """Groups as lists of lists, whatever sequences they came as."""
    return [list(g) if isinstance(g, (tuple, range)) else g for g in groups]


@grouping.requires("the groups of 2 x 3 x 4 ranks")  # where no two mistakes look the same
def _(answer, draw):
    _check_groups(answer, (2, 3, 4))


@grouping.requires("other sizes")
def _(answer, draw):
    for sizes in (tuple(draw.sample([2, 3, 4, 5, 6], 3)), (2, 2, 2)):
        _check_groups(answer, sizes)


@grouping.requires("dimensions of size 1")
def _(answer, draw):
    size, other = draw.integer(2, 6), draw.integer(2, 4)
    for sizes in ((size, 1, other), (1, size, 1), (1, 1, 1)):
        _check_groups(answer, sizes)


# ---- 7.2 -----------------------------------------------------------------------------------------

coordinates = Exercise(
    "7.2",
    "RankGrid",
    points=1,
    minutes=8,
    kind="first",
    parameters=("dp", "pp", "tp"),
    hints=[
        (
            "How do you read hours, minutes and seconds out of a number of seconds? The grid is "
            "the same with other sizes."
        ),
        (
            "The fastest coordinate is a remainder, the slowest a quotient, and the one between them "
            "is a remainder of a quotient."
        ),
        (
            "t is the remainder of the rank by tp. What is left after the division by tp is d * pp + p: "
            "take it apart in the same way. Before that, compare the rank with the size of the grid; "
            "going back, compare each coordinate with its own size."
        ),
    ],
    misconceptions={
        "other-order": "The coordinates are those of another order of the dimensions: tensor changes "
        "fastest, data slowest.",
        "reversed": "The right coordinates in reverse: asked is (d, p, t).",
        "fractions": "Coordinates are whole numbers, and `/` gives fractions: `//` is the quotient "
        "without them.",
        "remainder-missing": "A coordinate is larger than its size: it lacks the remainder.",
        "another-grid": "These are the coordinates of another grid, which was asked before or made since. "
        "What a grid knows belongs to `self`, not to the class or the module.",
        "wrong-stride": "The coordinates are wrong where the sizes differ. A data step is pp * tp "
        "ranks, a pipeline step tp.",
        "back-is-wrong": "`rank` does not undo `coordinates`. The rank is (d * pp + p) * tp + t.",
        "refuses-what-is-inside": "A rank or a coordinate inside the grid is refused. 0 is inside, and so "
        "is the size less one.",
        "no-error": "A rank, or a coordinate, outside the grid is accepted without a word. `//` and `%` "
        "give numbers for it that belong to another rank.",
        "negative": "A negative number is accepted: Python's `%` turns -1 into the last coordinate.",
        "other-error": "What is outside the grid ends in another exception than a ValueError.",
    },
)


def _all_coordinates(sizes: Sizes, slowest_first: Sizes = (0, 1, 2)) -> list[tuple]:
    """(d, p, t) of every rank, where the dimensions are numbered in the given order."""
    places = itertools.product(*(range(sizes[dim]) for dim in slowest_first))
    return [tuple(place[slowest_first.index(dim)] for dim in range(3)) for place in places]


def _check_coordinates(grid, sizes: Sizes, beside: Sequence[Sizes] = ()) -> None:
    """Asks a grid for all its coordinates; `beside` are the sizes of other grids that there are."""
    right = _all_coordinates(sizes)
    got = [grid.coordinates(rank) for rank in range(math.prod(sizes))]
    others = [_all_coordinates(sizes, order) for order in itertools.permutations(range(3))][1:]

    def another_grids(got: list[tuple]) -> bool:
        return any(
            all(same(g, w) for g, w in zip(got, _all_coordinates(other), strict=False))
            for other in beside
        )

    def too_large(got: list[tuple]) -> bool:
        return any(c >= s for place in got for c, s in zip(place, sizes, strict=True))

    likely = {
        "another-grid": another_grids,
        "fractions": lambda got: any(c != int(c) for place in got for c in place),
        "reversed": [place[::-1] for place in right],
        "other-order": lambda got: any(same(got, other) for other in others),
        "remainder-missing": too_large,
        "wrong-stride": len(set(sizes)) == 3,
    }
    expect(got, right, each="rank", likely=likely)


def _check_back(answer, sizes: Sizes) -> None:
    grid = answer(*sizes)
    got = [grid.rank(*place) for place in _all_coordinates(sizes)]
    expect(got, list(range(len(got))), each="place", likely={"back-is-wrong": True})


def _must_refuse(question: Callable, *numbers: int) -> None:
    negative = min(numbers) < 0
    try:
        got = question(*numbers)
    except ValueError:
        return
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        raise Wrong("other-error", expected="a ValueError", got=type(error).__name__) from None
    what = f"{got} for {', '.join(map(str, numbers))}"
    raise Wrong("negative" if negative else "no-error", expected="a ValueError", got=what)


INSIDE = {"ValueError": "refuses-what-is-inside"}


@coordinates.requires("the coordinates of every rank of 2 x 3 x 4", failures=INSIDE)
def _(answer, draw):
    _check_coordinates(answer(2, 3, 4), (2, 3, 4))


@coordinates.requires("other sizes, and sizes of 1", failures=INSIDE)
def _(answer, draw):
    larger = tuple(draw.sample([2, 3, 4, 5, 6], 3))
    lines = (1, draw.integer(2, 6), 1), larger  # the larger is made last: it has all ranks of both
    grids = [answer(*sizes) for sizes in lines]
    for grid, sizes in zip(grids, lines, strict=True):
        _check_coordinates(grid, sizes, beside=[(2, 3, 4), *(s for s in lines if s != sizes)])


@coordinates.requires("back to the rank", failures=INSIDE)
def _(answer, draw):
    for sizes in (tuple(draw.sample([2, 3, 4, 5, 6], 3)), (2, 2, 2)):
        _check_back(answer, sizes)


@coordinates.requires("a ValueError for what is outside the grid")
def _(answer, draw):
    sizes = tuple(draw.sample([2, 3, 4, 5, 6], 3))
    grid, ranks = answer(*sizes), math.prod(sizes)
    _must_refuse(grid.coordinates, ranks)
    for dim in range(3):
        _must_refuse(grid.rank, *(sizes[dim] if i == dim else 0 for i in range(3)))
    _must_refuse(grid.coordinates, -1)
    for dim in range(3):
        _must_refuse(grid.rank, *(-1 if i == dim else 0 for i in range(3)))


# ---- what the two training steps have in common ---------------------------------------------------

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
class _Task:
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


def _task(draw, sizes: Sizes, **more) -> _Task:
    dp, pp, tp = sizes
    width, hidden = draw.integer(4, 7), draw.choice([12, 18])  # which divide by 1, 2 and 3
    rows = draw.integer(3, 5) * dp * pp * tp

    def stage() -> Values:
        return {
            "scale": draw.tensor(width),
            "bias": draw.tensor(width),
            "up.weight": draw.tensor(hidden, width),
            "up.bias": draw.tensor(hidden),
            "down.weight": draw.tensor(width, hidden),
        }

    stages = [stage() for _ in range(pp)]
    inputs, targets = draw.tensor(rows, width), 3 * draw.tensor(rows, width)
    return _Task(sizes, stages, inputs, targets, draw.number(0.5, 1.0), **more)


# The step, simulated.


@dataclass(frozen=True)
class _Slip:
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


RIGHT = _Slip()


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


def _simulate(task: _Task, slip: _Slip = RIGHT) -> _Stepped:
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


def _own_gradients(task: _Task, slip: _Slip, part: _Part, blind: bool) -> Values:
    """A rank's gradients before they are averaged; zeros where it has none."""
    gradients = {}
    for name, parameter in part.named_parameters():
        none = blind or parameter.grad is None
        gradient = torch.zeros_like(parameter) if none else parameter.grad
        if slip.keeps_stale:
            gradient = gradient + task.stale
        gradients[name] = torch.zeros_like(parameter) if name in task.frozen else gradient
    return gradients


def _rows(task: _Task, slip: _Slip, rank: int, batch: Tensor) -> Tensor:
    place, index, count = task.place(rank), 0, 1
    for name in slip.rows:
        index, count = index * task.size(name) + place[name], count * task.size(name)
    return batch.chunk(count)[index]


def _beside(task: _Task, rank: int, step: int) -> int:
    """The rank `step` stages further, with the same other coordinates."""
    place = task.place(rank)["pipeline"] + step
    return next(r for r in task.group(rank, "pipeline") if task.place(r)["pipeline"] == place)


def _enter(task: _Task, slip: _Slip, rank: int, x: Tensor) -> _Pass:
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


def _averaged(task: _Task, slip: _Slip, rank: int, gradients: dict[int, Values]) -> Values:
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

    task: _Task
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
class _Report:
    """What a rank did: the blocks that it read, its loss, its part afterwards."""

    read: list[tuple[int, int]]
    kinds: set[str]
    loss: object
    part: Values
    unwaited: list[str]  # calls for which nobody has waited, or too late, in words


def _run_step(answer, task: _Task, three: bool) -> list[_Report]:
    """Runs a step on all ranks. Where nobody waits for a call, no number means anything."""
    reports = run(_stepped, task.ranks, answer, task, three)
    for rank, report in enumerate(reports):
        if report.unwaited:
            got = f"rank {rank}: {report.unwaited[0]}"
            raise Wrong("not-waited", expected="a wait() for every call, in time", got=got)
    return reports


def _stepped(rank, answer, task: _Task, three: bool) -> _Report:
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
    if isinstance(loss, Tensor) and loss.numel() == 1:
        loss = loss.item()
    values = {name: value.detach().clone() for name, value in part.state_dict().items()}
    unwaited = [f"its {kind} is used before anybody has waited for it" for kind in used.kinds]
    unwaited += [f"nobody waits for this call: {kind}" for kind in sent.unwaited]
    return _Report(reader.read, reader.kinds, loss, values, unwaited)


def _neighbours_only(task: _Task, rank: int) -> Callable:
    """Raises where a message goes to, or is expected from, a rank that is not beside this one."""

    def hear(name: str, arguments: dict) -> None:
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

    return hear


Slips = dict[str, list[_Slip]]


def _check_update(answer, task: _Task, slips: Slips, three: bool) -> list[_Report]:
    """Runs a step on all ranks and compares what they read, and how their parts have changed."""
    reports = _run_step(answer, task, three)
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
        likely["not-averaged"] = _on_some_rank(task, _Slip(gradients=(), divisor=1))
    expected = task.updates(_simulate(task).gradients)
    what = "the update, by the learning rate" if task.adam else "the update, as a gradient"
    expect(got, expected, each="rank", what=what, likely=likely)
    return reports


def _of_averaged_parameters(task: _Task) -> list[Values]:
    """The updates where each rank steps alone, and the parameters are averaged then."""
    alone = task.updates(_simulate(task, _Slip(gradients=(), divisor=1)).gradients)
    groups = [[alone[other] for other in task.group(rank, "data")] for rank in range(task.ranks)]
    return [
        {name: sum(own[name] for own in group) / len(group) for name in group[0]}
        for group in groups
    ]


def _is_one_of(task: _Task, slips: list[_Slip]) -> Callable[[list[Values]], bool]:
    def found(got: list[Values]) -> bool:
        return any(same(got, task.updates(_simulate(task, slip).gradients)) for slip in slips)

    return found


def _on_some_rank(task: _Task, slip: _Slip) -> Callable[[list[Values]], bool]:
    """Whether at least one rank's update is that of the slip."""

    def found(got: list[Values]) -> bool:
        made = task.updates(_simulate(task, slip).gradients)
        return any(same(own, slipped) for own, slipped in zip(got, made, strict=True))

    return found


def _as_it_may_be(draw) -> dict[str, float]:
    """With old gradients and a weight decay: what moves a frozen parameter that is given a gradient."""
    return {"stale": draw.number(1, 2), "decay": draw.number(0.1, 0.3)}


def _check_readers(reports: list[_Report], task: _Task) -> None:
    """Raises Wrong where a stage reads what it has no use for."""
    last = task.size("pipeline") - 1
    for rank, report in enumerate(reports):
        stage = task.place(rank)["pipeline"]
        needed = {name for name, end in (("inputs", 0), ("targets", last)) if stage == end}
        if report.kinds - needed:
            got = (
                f"rank {rank}, in stage {stage} of 0 to {last}, reads {min(report.kinds - needed)}"
            )
            expected = "inputs read in the first stage, targets in the last"
            raise Wrong("every-stage-reads", expected=expected, got=got)


def _check_losses(reports: list[_Report], task: _Task) -> None:
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
    expect(got, [mean] * task.ranks, each="rank", what="the loss", likely=likely)


def _check_rows(reports: list[_Report], task: _Task) -> None:
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
def _blaming(slug: str) -> Iterator[None]:
    """Whatever is wrong within, this is why, unless nobody waits."""
    try:
        yield
    except Wrong as wrong:
        if wrong.misconception == "not-waited":
            raise
        raise Wrong(slug, expected=wrong.expected, got=wrong.got) from None


def _any_failure(slug: str, *keys: str) -> dict[str, str]:
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


def _slips_of_any_step(task: _Task) -> Slips:
    """Mistakes in averaging the gradients, and in the model itself."""
    dp, others = task.size("data"), [n for n in NAMES[1:] if task.size(n) > 1]
    every = [_Slip(gradients=ALL, divisor=n) for n in (task.ranks, dp, 1)]
    divisors = sorted({2, *(task.size(n) for n in others)} - {1, dp, dp**2, task.ranks})
    rows, width = task.inputs.shape
    another = [
        _Slip(gradients=(n,), divisor=d) for n in others for d in (task.size(n), dp, task.ranks)
    ]
    return {
        "not-averaged": [_Slip(gradients=(), divisor=1)],
        "sum-not-mean": [_Slip(divisor=1)],
        "divided-twice": [_Slip(divisor=dp**2)],
        "divided-by-world": [_Slip(divisor=task.ranks)],
        "divided-by-another": [_Slip(divisor=n) for n in divisors],
        "average-over-all": every,
        "average-over-another": another,
        "sharded-not-averaged": [_Slip(averaged=REPLICATED)],
        "replicated-not-averaged": [_Slip(averaged=tuple(SHARED_OUT))],
        "old-gradients": [_Slip(keeps_stale=True)],
        "other-loss": [_Slip(divisor=dp / n) for n in (width, rows // dp, rows // dp * width)],
        "other-model": [_Slip(leaves_out=part) for part in ("scale", "relu", "bias")],
    }


def _tensor_slips(task: _Task) -> Slips:
    """Mistakes in the sums over the tensor group."""
    tp = task.size("tensor")
    return {
        "partial-output": [_Slip(forward=()), _Slip(forward=(), backward=())],
        "bias-per-rank": [_Slip(bias_inside=True)],
        "mean-not-sum": [_Slip(share=1 / tp)],
        "input-gradient-partial": [
            _Slip(backward=()),
            _Slip(backward=(), again=1 / tp),
            _Slip(scale_inside=True),
        ],
        "summed-again": [
            _Slip(twice=True),
            _Slip(twice=True, backward=()),
            _Slip(again=1.0),
            _Slip(again=1.0, backward=()),
        ],
    }


# ---- 7.3 -----------------------------------------------------------------------------------------

two_dimensions = Exercise(
    "7.3",
    "train_2d_step",
    points=3,
    minutes=25,
    kind="core",
    parameters=("part", "read_inputs", "read_targets", "mesh", "optimizer"),
    hints=[
        (
            "Write the step for one process first. Then ask of each line: do the ranks of my tensor "
            "group have the same numbers here, or parts of them? And those of my data group?"
        ),
        (
            "The tensor group works on the same rows and talks twice: where the scaled input enters "
            "the cut region, and where the partial outputs leave it. The data group talks after "
            "backward, about gradients of the same parameters from other rows."
        ),
        (
            "Read the block of your data coordinate. Send `scale * x` through `SumBackward` with the "
            "tensor group, the output of `down` through `SumForward`, and add the bias after that. "
            "Clear the gradients, go backward, average each gradient that is not None over the data "
            "group, step. Average the loss in the same way before you return it."
        ),
    ],
    misconceptions={
        **STEP,
        "batch-by-rank": "Every rank reads rows of its own, by its number among all ranks. The ranks of a "
        "tensor group are parts of one model and need the same rows: share them out by the data "
        "coordinate.",
        "batch-by-tensor": "The rows are shared out by the tensor coordinate: those ranks need the same "
        "rows, and those of a data group other ones.",
        "other-rows": "A rank reads other rows than those of its data coordinate.",
        "pair-swapped": "The two functions have changed places: the input is summed where it enters the "
        "cut region, and the partial outputs are not. `SumForward` belongs where they leave it.",
        "sum-over-other-ranks": "The sums of the cut layers run over more than the tensor group, or over "
        "another group: ranks with other rows add their numbers. Pass the tensor group to both "
        "functions.",
        "group-rank": "You name a rank that the group does not have. `dst` and `src` are global ranks, also "
        "with `group=`; `group_dst` and `group_src` count within the group.",
    },
    failures={
        "is not part of group": "group-rank",
        "timeout": "not-every-rank",
        "mismatch": "not-every-rank",
    },
)


def _two(dp: int, tp: int) -> Sizes:
    return dp, 1, tp


def _slips_2d(task: _Task) -> Slips:
    groups = ("tensor",), ("data",), ALL
    elsewhere = [_Slip(forward=f, backward=b) for f in groups for b in groups][1:]
    swapped = _Slip(enters=task.size("tensor"), forward=(), backward=(), twice=True)
    elsewhere = {"pair-swapped": [swapped], "sum-over-other-ranks": elsewhere}
    return {**_tensor_slips(task), **elsewhere, **_slips_of_any_step(task)}


def _check_2d(answer, task: _Task) -> list[_Report]:
    return _check_update(answer, task, _slips_2d(task), three=False)


TWO = ("data", "tensor")


@two_dimensions.requires("3 x 2 ranks end with the parts of one process's step")
def _(answer, draw):
    _check_2d(answer, _task(draw, _two(3, 2), order=TWO))


@two_dimensions.requires("every rank returns the mean loss of the global batch")
def _(answer, draw):
    task = _task(draw, _two(draw.choice([2, 3]), 1), order=TWO)
    _check_losses(_check_2d(answer, task), task)


@two_dimensions.requires("layers cut in three, without copies; and a single rank")
def _(answer, draw):
    for sizes in (_two(1, 3), _two(1, 1)):
        task = _task(draw, sizes, order=TWO)
        _check_losses(_check_2d(answer, task), task)


@two_dimensions.requires("gradients that were there before", needs_earlier=True)
def _(answer, draw):
    sizes, stale = _two(draw.choice([2, 3]), 1), draw.number(1, 2)
    _check_2d(answer, _task(draw, sizes, order=TWO, stale=stale))


@two_dimensions.requires("the step of another optimizer, Adam", needs_earlier=True)
def _(answer, draw):
    _check_2d(answer, _task(draw, _two(draw.choice([2, 3]), 1), order=TWO, adam=True))


@two_dimensions.requires("a frozen parameter", failures={"exception": "frozen"}, needs_earlier=True)
def _(answer, draw):
    frozen = (draw.choice([*SHARED_OUT, *REPLICATED]),)
    with _blaming("frozen"):
        sizes, extra = _two(draw.choice([2, 3]), 1), _as_it_may_be(draw)
        _check_2d(answer, _task(draw, sizes, order=TWO, frozen=frozen, **extra))


@two_dimensions.requires(
    "a mesh whose first dimension is tensor",
    failures=_any_failure("by-arithmetic"),
    needs_earlier=True,
)
def _(answer, draw):
    with _blaming("by-arithmetic"):
        _check_2d(answer, _task(draw, _two(draw.choice([2, 3]), 2), order=TWO[::-1]))


# ---- 7.4 -----------------------------------------------------------------------------------------

# Text of a hang is quoted as only a hang says it: beside an exception others "were waiting in recv".
FAILURES_3D = {
    "ReadsAllRows": "whole-batch",
    "ReadsOtherRows": "other-rows",
    "NotANeighbour": "wrong-neighbour",
    "names itself": "wrong-neighbour",
    "there is no rank": "group-rank",
    "is not part of group": "group-rank",
    "class 'NoneType'": "graph-cut",
    "'NoneType' object has no attribute 'item'": "loss-on-last-only",
    "loss' where it is not associated": "loss-on-last-only",
    "only for scalar outputs": "no-gradient-given",
    "finished without sending": "never-sent",
    "waits in broadcast": "never-sent",
    "wait in broadcast": "never-sent",
    "finished without": "not-every-rank",
    "wait in all_reduce": "sum-waits",
    "waits in all_reduce": "sum-waits",
    "waits in recv": "first-waits",
    "timeout": "not-every-rank",
    "mismatch": "not-every-rank",
}

three_dimensions = Exercise(
    "7.4",
    "train_3d_step",
    points=4,
    minutes=35,
    kind="stretch",
    parameters=("part", "read_inputs", "read_targets", "shape", "mesh", "optimizer"),
    hints=[
        (
            "Take your two-dimensional step. What replaces the input where a rank has no first stage, and "
            "what replaces the loss where it has no last one?"
        ),
        (
            "A later stage receives its input and makes it a leaf that wants a gradient. An earlier one "
            "receives the gradient of its output, and `y.backward(gradient)` goes on from there. Both "
            "talk to the rank with the same data and tensor coordinates. A stage can be first and last."
        ),
        (
            "Forward: read or receive, compute, send unless you are last. Backward: from the loss, or "
            "from the gradient that comes; send the input's gradient back unless you are first. Then the "
            "data group averages gradients, as before; each stage has its own. The last stage's loss, "
            "averaged over its data group, goes to all ranks of the pipeline by a broadcast."
        ),
    ],
    misconceptions={
        **STEP,
        "other-rows": "A rank reads other rows than those of its data coordinate. All ranks of a pipeline "
        "and of a tensor group work on the same rows: `read_inputs(d, dp)`.",
        "wrong-neighbour": "A message goes to, or is expected from, a rank that is not beside this one "
        "in its pipeline. rank + 1 has another tensor coordinate; the next stage is tp ranks away, or "
        "further in another mesh. Use the pipeline group, and numbers within it.",
        "group-rank": "You name a rank that the group does not have. `dst`, `src` are global ranks, also "
        "with `group=`; `group_dst`, `group_src` count within the group, and end with the last stage.",
        "graph-cut": "The input that a stage received has no gradient to send back. A received tensor is no "
        "part of a graph: call `requires_grad_()` on it before you use it.",
        "no-gradient-given": "A stage before the last has no loss, and its output is not one number: "
        "`y.backward(gradient)`, with what the next stage sends back.",
        "not-sent-back": "Only the last stage has learned: the gradient of its input never reaches the "
        "stage before.",
        "begins-with-ones": "A stage before the last begins its backward with ones, as "
        "`y.sum().backward()` does. It goes on from the gradient that the next stage sends: "
        "`y.backward(gradient)`.",
        "scaled-on-the-way": "The gradient that goes from stage to stage is multiplied or divided "
        "by the size of a group. It belongs to the rows of this pipeline alone: hand it on as it "
        "is.",
        "first-waits": "All ranks wait to receive. The first stage receives no activations, and sends its own "
        "before it waits for their gradient: somebody has to begin.",
        "never-sent": "A stage waits for a message that its neighbour never sends. Activations go "
        "forward, and after backward the gradient of the input goes back.",
        "sum-waits": "Some ranks wait in an all-reduce, others to receive something. The sums of a cut "
        "stage run within its tensor group: other stages are not there to take part. And a rank that "
        "still has to send must not wait for the others first.",
        "single-stage": "A pipeline of one stage fails: that stage is first *and* last. Decide about each "
        "message on its own.",
        "middle-stage": "Two stages work, three do not. A stage in the middle receives and sends, forward "
        "and backward.",
        "every-stage-reads": "A stage reads what it has no use for. The first stage reads inputs, the last one "
        "targets, and a stage in the middle nothing: it gets its input from the stage before.",
        "loss-on-last-only": "Only the last stage's ranks know the loss. It has to go from there to "
        "the other stages.",
    },
    failures=FAILURES_3D,
)


OTHER_ORDERS = [  # in which the arithmetic of the usual order gives another block of rows
    ((2, 2, 1), ("tensor", "pipeline", "data")),
    ((3, 2, 1), ("pipeline", "data", "tensor")),
    ((2, 1, 2), ("tensor", "data", "pipeline")),
]


def _slips_3d(task: _Task) -> Slips:
    sizes = {task.size(name) for name in NAMES} - {1}
    back = {
        "not-sent-back": [_Slip(sends_back=False)],
        "begins-with-ones": [_Slip(ones=True)],
        "scaled-on-the-way": [_Slip(comes_back=f) for n in sizes for f in (n, 1 / n)],
    }
    back = back if task.size("pipeline") > 1 else {}
    tensor = _tensor_slips(task) if task.size("tensor") > 1 else {}
    return {**back, **tensor, **_slips_of_any_step(task)}


def _check_3d(answer, task: _Task) -> None:
    _check_losses(_check_update(answer, task, _slips_3d(task), three=True), task)


@three_dimensions.requires("3 x 2 x 1 ranks: two stages, three times, take the step of one process")
def _(answer, draw):
    task = _task(draw, (3, 2, 1))
    _check_readers(_check_update(answer, task, _slips_3d(task), three=True), task)


@three_dimensions.requires("1 x 2 x 2 ranks: each of two stages is cut")
def _(answer, draw):
    task = _task(draw, (1, 2, 2))
    _check_update(answer, task, _slips_3d(task), three=True)


@three_dimensions.requires("every rank returns the mean loss of the global batch")
def _(answer, draw):
    for sizes in (draw.choice([(2, 2, 1), (3, 2, 1)]), (1, 2, 2)):
        task = _task(draw, sizes)
        _check_losses(_run_step(answer, task, three=True), task)


@three_dimensions.requires(
    "one stage", failures=_any_failure("single-stage", *FAILURES_3D), needs_earlier=True
)
def _(answer, draw):
    with _blaming("single-stage"):
        _check_3d(answer, _task(draw, (draw.choice([2, 3]), 1, 1)))


@three_dimensions.requires(
    "three stages", failures=_any_failure("middle-stage", *FAILURES_3D), needs_earlier=True
)
def _(answer, draw):
    with _blaming("middle-stage"):
        _check_3d(answer, _task(draw, (1, 3, 1)))


@three_dimensions.requires("gradients that were there before", needs_earlier=True)
def _(answer, draw):
    sizes, stale = draw.choice([(1, 2, 1), (2, 2, 1)]), draw.number(1, 2)
    _check_3d(answer, _task(draw, sizes, stale=stale))


@three_dimensions.requires(
    "a frozen parameter", failures=_any_failure("frozen", *FAILURES_3D), needs_earlier=True
)
def _(answer, draw):
    frozen = (draw.choice([*SHARED_OUT, *REPLICATED]),)
    with _blaming("frozen"):
        sizes, extra = draw.choice([(1, 2, 1), (1, 2, 2)]), _as_it_may_be(draw)
        _check_3d(answer, _task(draw, sizes, frozen=frozen, **extra))


@three_dimensions.requires(
    "a mesh in another order",
    failures=_any_failure("by-arithmetic", *FAILURES_3D),
    needs_earlier=True,
)
def _(answer, draw):
    with _blaming("by-arithmetic"):
        sizes, order = draw.choice(OTHER_ORDERS)
        _check_3d(answer, _task(draw, sizes, order=order))


@three_dimensions.requires("2 x 2 x 2 ranks", needs_earlier=True)
def _(answer, draw):
    _check_3d(answer, _task(draw, (2, 2, 2), adam=True))


# ---- 7.5 -----------------------------------------------------------------------------------------

placing = Exercise(
    "7.5",
    "cheapest_placement",
    points=3,
    minutes=20,
    kind="core",
    parameters=("sizes", "sent", "per_machine", "inside", "between"),
    hints=[
        (
            "Take 2 x 4 ranks and machines of four. Write the ranks of every group for both orders, and "
            "mark where a machine ends. Which groups cross a mark?"
        ),
        (
            "There are at most 120 orders: try them all. For one order you need the stride of each "
            "dimension, as in 7.1, and for each of its groups whether the first and the last rank are in "
            "the same machine."
        ),
        (
            "Rank r is in machine r // per_machine. Go through an order from its last dimension to its "
            "first and multiply the sizes to get the strides. A dimension of more than one rank costs "
            "its bytes over the fast rate if all its groups stay inside, else over the slow one. Add up, "
            "and keep the order with the smallest sum."
        ),
    ],
    misconceptions={
        "not-a-pair": "Asked is a pair: the order, a tuple of names, and its seconds.",
        "not-an-order": "The order has to name each dimension exactly once.",
        "reversed": "The right order in reverse: asked is slowest-changing first. The last dimension's "
        "groups are neighbours.",
        "most-expensive": "This is the most expensive order.",
        "rates-swapped": "The two rates are swapped: `inside` is that of groups within a machine.",
        "stride-ignored": "A dimension counts as inside if its *size* fits into a machine. Its ranks may be "
        "far apart all the same: it depends on what changes faster.",
        "last-only": "Only the last dimension counts as inside. If a machine has room for two dimensions "
        "together, both are.",
        "most-bytes-last": "The dimension with most bytes is placed last whatever its size. If its groups "
        "are larger than a machine, that place is wasted on it.",
        "straddles": "A group that is no larger than a machine can still lie across two: ranks 3, 4 and 5 "
        "in machines of four. Every group has to be looked at, not the first alone.",
        "divisors-only": "A dimension counts as outside though its groups lie inside. What counts is "
        "where their ranks are, not whether the sizes divide.",
        "slowest-only": "You count the slowest dimension alone. The times add up.",
        "size-one": "A dimension of size 1 is counted: it has nobody to send to.",
        "first-order": "You take the order as given. Another one is cheaper.",
        "other-seconds": "This order is a cheapest one, and its seconds are not these. Each dimension of "
        "more than one rank adds its bytes divided by one of the two rates.",
        "not-cheapest": "The seconds are right for this order, and another order costs less: do you "
        "compare all of them?",
        "neither": "These are not the seconds of this order, and another order costs less. Count one order by "
        "hand first: which groups lie inside a machine?",
        "inputs-changed": "`sizes` or `sent` have changed: they belong to the caller.",
    },
)


@dataclass(frozen=True)
class _Cluster:
    sizes: dict[str, int]
    sent: dict[str, float]
    per_machine: int
    inside: float
    between: float

    def arguments(self) -> tuple:
        return dict(self.sizes), dict(self.sent), self.per_machine, self.inside, self.between

    def orders(self) -> list[tuple[str, ...]]:
        return list(itertools.permutations(self.sizes))


@dataclass(frozen=True)
class _Groups:
    """The groups of one dimension in one order."""

    stride: int
    size: int
    machines: list[set[int]]  # those that each group touches


def _placed(cluster: _Cluster, order: tuple[str, ...]) -> dict[str, _Groups]:
    ranks = math.prod(cluster.sizes.values())
    grid = torch.arange(ranks).reshape([cluster.sizes[name] for name in order])
    placed = {}
    for dim, name in enumerate(order):
        groups = grid.movedim(dim, -1).reshape(-1, cluster.sizes[name]).tolist()
        machines = [{rank // cluster.per_machine for rank in group} for group in groups]
        placed[name] = _Groups(grid.stride(dim), cluster.sizes[name], machines)
    return placed


def _within(groups: _Groups) -> bool:
    return all(len(touched) == 1 for touched in groups.machines)


def _seconds(
    cluster: _Cluster,
    order: tuple[str, ...],
    fits: Callable[[_Groups], bool] = _within,
    together: Callable = sum,
    counts: Callable[[_Groups], bool] = lambda groups: groups.size > 1,
    swapped: bool = False,
) -> float:
    """A step's seconds in one order, rightly or with a mistake."""
    rates = (cluster.between, cluster.inside) if swapped else (cluster.inside, cluster.between)
    times = [
        cluster.sent[name] / rates[0 if fits(groups) else 1]
        for name, groups in _placed(cluster, order).items()
        if counts(groups)
    ]
    return together([0.0, *times])


def _check_placement(answer, cluster: _Cluster) -> None:
    arguments = cluster.arguments()
    got = answer(*arguments)
    if got is not None:
        if not isinstance(got, (tuple, list)) or len(got) != 2:
            raise Wrong("not-a-pair", expected="(order, seconds)", got=got)
        if not isinstance(got[0], (tuple, list)) or sorted(got[0]) != sorted(cluster.sizes):
            raise Wrong("not-an-order", expected=f"the names {sorted(cluster.sizes)}", got=got[0])
        got = (tuple(got[0]), got[1])
    expect_type(got, tuple)
    if arguments != cluster.arguments():
        raise Wrong("inputs-changed", expected="the dicts as they were", got="other contents")
    true = {order: _seconds(cluster, order) for order in cluster.orders()}
    best = min(true.values())
    if same(true[got[0]], best) and same(got[1], best):
        return

    def picks(**mistake) -> bool:
        """Whether this is a cheapest order, and its time, as one who makes the mistake counts."""
        counted = {order: _seconds(cluster, order, **mistake) for order in true}
        return same(counted[got[0]], min(counted.values())) and same(got[1], counted[got[0]])

    room, most = cluster.per_machine, max(cluster.sent, key=cluster.sent.get)
    honest = same(got[1], true[got[0]])
    likely = {
        "divisors-only": picks(fits=lambda groups: room % (groups.stride * groups.size) == 0),
        "last-only": picks(fits=lambda groups: groups.stride == 1 and _within(groups)),
        "straddles": picks(fits=lambda groups: len(groups.machines[0]) == 1)
        or picks(fits=lambda groups: groups.stride * groups.size <= room),
        "most-bytes-last": got[0][-1] == most and cluster.sizes[most] > room,
        "most-expensive": honest and same(got[1], max(true.values())),
        "reversed": same(got[1], best) and same(true[got[0][::-1]], best),
        "rates-swapped": picks(swapped=True),
        "stride-ignored": picks(fits=lambda groups: groups.size <= room),
        "slowest-only": picks(together=max),
        "size-one": picks(counts=lambda groups: True),
        "first-order": honest and got[0] == tuple(cluster.sizes),
        "other-seconds": same(true[got[0]], best),
        "not-cheapest": honest,
        "neither": True,
    }
    if same(true[got[0]], best):
        expect(got[1], best, what="the seconds of this order", likely=likely)
    cheapest = next(order for order, seconds in true.items() if same(seconds, best))
    words = [f"{', '.join(order)}: {true[order]:.4g} seconds" for order in (got[0], cheapest)]
    expect(*words, likely=likely)


GB = 1e9


def _cluster(draw, sizes: dict[str, int], sent: dict[str, int], per_machine: int) -> _Cluster:
    """`sent` in GB, by weight: each is drawn anew and stays in the same order of size."""
    drawn = {name: weight * draw.number(1.0, 1.5) * GB for name, weight in sent.items()}
    inside = draw.integer(150, 300) * GB
    return _Cluster(sizes, drawn, per_machine, inside, inside / draw.integer(8, 12))


@placing.requires("one dimension fits into a machine")
def _(answer, draw):
    room, pipeline, data = draw.choice([(4, 2, 4), (4, 2, 2), (6, 2, 3), (6, 3, 2), (8, 2, 4)])
    sizes = {"tensor": room, "pipeline": pipeline, "data": data}
    sent = {"tensor": 9, "pipeline": 1, "data": 3}
    _check_placement(answer, _cluster(draw, sizes, sent, room))


@placing.requires("two dimensions fit together")
def _(answer, draw):
    tensor, pipeline = draw.choice([(4, 2), (2, 3), (3, 2), (2, 4)])
    sizes = {"tensor": tensor, "data": draw.choice([2, 3, 4]), "pipeline": pipeline}
    sent = {"tensor": 9, "data": 2, "pipeline": 4}
    _check_placement(answer, _cluster(draw, sizes, sent, tensor * pipeline))
    # the two that fit are no neighbours in any rotation of the order given
    sizes = {"tensor": 2, "data": draw.choice([3, 5]), "pipeline": 2, "replica": 2}
    _check_placement(answer, _cluster(draw, sizes, {**sent, "replica": 1}, per_machine=4))


@placing.requires("the dimension with most bytes is larger than a machine")
def _(answer, draw):
    room = draw.choice([4, 5, 6])
    sizes = {"tensor": room, "data": room + draw.choice([1, 2, 4]), "pipeline": 2}
    sent = {"tensor": 4, "data": 9, "pipeline": 1}
    _check_placement(answer, _cluster(draw, sizes, sent, room))


@placing.requires("groups that lie across the end of a machine")
def _(answer, draw):
    size, room = draw.choice([(3, 4), (3, 5), (4, 5), (4, 6), (5, 6)])
    sizes, sent = {"tensor": size, "data": room}, {"tensor": 9, "data": 3}
    _check_placement(answer, _cluster(draw, sizes, sent, room))
    room = draw.choice([4, 6])  # tensor first: ranks 0 and room - 1 meet, 1 and room do not
    _check_placement(answer, _cluster(draw, {"tensor": 2, "data": room - 1}, sent, room))


@placing.requires("fewer ranks than a machine has room for")
def _(answer, draw):
    data, tensor, room = draw.choice([(3, 2, 8), (2, 3, 7), (3, 3, 10), (2, 2, 7)])
    sizes, sent = {"data": data, "tensor": tensor}, {"data": 3, "tensor": 9}
    _check_placement(answer, _cluster(draw, sizes, sent, room))


@placing.requires("four dimensions, one of them of size 1; machines of four ranks, and of one")
def _(answer, draw):
    sizes = {"replica": draw.choice([2, 3, 5]), "data": 1, "pipeline": 2, "tensor": 2}
    sent = {"replica": 1, "data": 7, "pipeline": 3, "tensor": 12}
    for per_machine in (4, 1):
        _check_placement(answer, _cluster(draw, sizes, sent, per_machine))
