"""The checks of chapter 03: gradients averaged, a ring, the sampler, DDP that overlaps, evaluation.

Functions whose first argument is `rank` run on real ranks and only report what they saw; the
requirements, in the notebook's kernel, judge it. Gradients travel as {parameter name: tensor or
None}; a tied parameter has the name under which it was registered first.
"""

import contextlib
import copy
import math
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from numbers import Number
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from course_utils.checks import Exercise, OwnPart, Wrong, expect, expect_type, run, same
from course_utils.checks.forbidden import called
from course_utils.checks.ranks import come_late, finish_device_work, following
from course_utils.hardware import device
from course_utils.trace import Call, Trace

Gradients = dict[str, Tensor | None]
NEARLY = 0.01  # how far half precision may take a number away, as a part of it

# ---- models --------------------------------------------------------------------------------------


def _plain(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, width))


class _Frozen(nn.Module):
    """A frozen layer between two that learn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.first(x)).tanh())


class _FrozenFirst(_Frozen):
    """The first layer is frozen too, as in a model that is fine-tuned."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.first.requires_grad_(False)


class _Unused(nn.Module):
    """A layer that the loss does not use, between two that it uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.unused = nn.Linear(width, 3)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class _Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


class _Untied(_Tied):
    """The same layers, each with a weight of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.last.weight = nn.Parameter(self.first.weight.detach().clone())


class _Sometimes(nn.Module):
    """A layer that rank 0 does not use and the others do, and one that only the last rank uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.sometimes = nn.Linear(width, width)
        self.rarely = nn.Linear(width, width)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        if dist.get_rank() > 0:
            x = self.sometimes(x)
        if dist.get_rank() == dist.get_world_size() - 1:
            x = self.rarely(x)
        return self.last(x)


class _Tower(nn.Module):
    """Equal layers; tells when backward has all gradients but the first layer's."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.before_first_gradient = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if i == 0:
                x.register_hook(lambda _: self.before_first_gradient())
        return x


@dataclass(frozen=True)
class _Plan:
    """What the ranks train on: a model's seed, and `rows` random rows of `width` numbers."""

    seed: int
    width: int
    rows: int

    def build(self, make) -> nn.Module:
        torch.manual_seed(self.seed)
        return make(self.width).to(device())

    def batch(self) -> Tensor:
        return torch.randn(self.rows, self.width, device=device())


def _plan(draw) -> _Plan:
    return _Plan(draw.seed(), draw.integer(4, 7), draw.integer(3, 6))


def _gradients(model: nn.Module) -> Gradients:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# ---- what the ranks' gradients should become, and what mistakes make of them ---------------------


def _sum(parts: list[Gradients]) -> Gradients:
    """The sum by name; None where no part has a gradient."""
    total: Gradients = {}
    for name in parts[0]:
        there = [part[name] for part in parts if part[name] is not None]
        total[name] = sum(there) if there else None
    return total


def _scaled(gradients: Gradients, factor: float) -> Gradients:
    return {name: None if g is None else g * factor for name, g in gradients.items()}


def _mean(parts: list[Gradients]) -> Gradients:
    return _scaled(_sum(parts), 1 / len(parts))


def _some_local(got: list[Gradients], local: list[Gradients], mean: Gradients) -> bool:
    """Whether every gradient is either the mean or, for some parameters, the rank's own."""
    return all(
        same(g[name], mean[name]) or same(g[name], own[name])
        for g, own in zip(got, local, strict=True)
        for name in mean
    )


def _zeros_for_none(got: list[Gradients], local: list[Gradients]) -> bool:
    """Whether something stands where no rank has a gradient."""
    nobody = [name for name in local[0] if all(g[name] is None for g in local)]
    return any(g[name] is not None for g in got for name in nobody)


# ---- 3.1 -----------------------------------------------------------------------------------------

averaging = Exercise(
    "3.1",
    "average_gradients",
    points=2,
    minutes=10,
    kind="first",
    parameters=("model",),
    hints=[
        (
            "After `backward()`, every `parameter.grad` is an ordinary tensor. Which collective gives "
            "every rank the same result, made from all ranks' tensors?"
        ),
        (
            "`dist.all_reduce` works in place and adds. A mean is a sum divided by the number of "
            "those who contributed."
        ),
        (
            "Go through `model.parameters()`, which yields a tied parameter once. Skip those whose "
            "`.grad` is None. All-reduce the gradient, then divide it in place by the world size."
        ),
    ],
    misconceptions={
        "sum-not-mean": "Your gradients are world_size times too large: all_reduce adds, and the "
        "division is missing.",
        "divided-twice": "Your gradients are world_size times too small: they are divided twice.",
        "nothing-sent": "Each rank has divided its own gradient by the world size and heard nothing "
        "of the others. Dividing alone averages nothing: the sum over the ranks is missing.",
        "not-waited": "A rank has used a result before it was there: with `async_op=True`, call "
        "`wait()` on what all_reduce returns before you touch the tensor.",
        "unchanged": "Each rank still has its own gradients. Either nothing was averaged, or the "
        "average was not written back into `parameter.grad`.",
        "parameters-averaged": "The parameters have changed. Average their gradients, "
        "`parameter.grad`: the optimizer moves the parameters later.",
        "rank-0s-gradient": "All ranks have rank 0's gradient. That is a broadcast: the other ranks' "
        "data are lost.",
        "one-rank-only": "Only one rank has the mean. `reduce` delivers to one rank, `all_reduce` "
        "to all of them.",
        "left-out": "Some parameters' gradients are averaged, others are still the rank's own: does "
        "your loop leave some out, or end early?",
        "fixed-two": "You divide by 2. That is right on two ranks only: ask `dist.get_world_size()`.",
        "in-place": "`dist.all_reduce` works in place and returns None. Do not assign what it returns "
        "to `parameter.grad`, and do not compute with it.",
        "device-count": "Your gradients are divided by zero. `torch.cuda.device_count()` counts the "
        "GPUs of this machine; the number of ranks is `dist.get_world_size()`.",
        "one-tensor-listed": "All ranks have the last rank's gradient: `[tensor] * n` is one tensor, "
        "listed n times, and what arrived last has overwritten the rest. Make n tensors.",
        "two-ranks-only": "Right on two ranks only: of three, one has no partner. `all_reduce` works "
        "for any number of ranks.",
        "not-every-rank": "A collective is called by every rank or by none. Here a rank did not "
        "call it, and the others wait: look for an `if` or a `return` that depends on the rank.",
        "none-gradient": "A frozen or unused parameter has no gradient: its `.grad` is None. Skip "
        "it, on every rank alike.",
        "first-decides": "Your function ends where the first parameter has no gradient. First layers are "
        "often frozen: skip such a parameter and go on.",
        "rounded": "Your means are only nearly right: on the way the gradients have a smaller dtype.",
        "zeros-for-none": "A parameter without a gradient has received one. A `.grad` of zeros is "
        "not the same as None: weight decay and momentum would move the parameter.",
        "tied-twice": "A tied parameter, one tensor in two layers, was averaged once per layer. "
        "`model.parameters()` yields it once; a walk over the layers meets it twice.",
    },
    failures={
        "there is no rank": "two-ranks-only",
        "timeout": "not-every-rank",
        "mismatch": "not-every-rank",
    },
)


@dataclass(frozen=True)
class _Averaged:
    local: Gradients
    got: Gradients
    moved: bool  # have the parameters changed?
    silent: bool  # was nothing sent?
    sent: int  # numbers handed over, in all calls of Python together
    unwaited: list[str]  # calls that nobody waited for


def _averaged(rank, answer, make, plan: _Plan) -> _Averaged:
    model = plan.build(make)
    torch.manual_seed(plan.seed + 1 + rank)
    model(plan.batch()).square().sum().backward()
    local, before = _gradients(model), _state(model)
    with following() as followed:
        come_late(rank)
        answer(model)
        got = _gradients(model)
        payloads = [t for c in followed.calls if c.kind != "recv" for t in c.payload]
        sent = sum(tensor.numel() for tensor in payloads)
    moved = any(not torch.equal(tensor, before[k]) for k, tensor in model.state_dict().items())
    return _Averaged(local, got, moved, not followed.dtypes, sent, followed.unwaited)


def _must_have_waited(unwaited: list[list[str]]) -> None:
    """Raises Wrong where a rank has not waited for one of its calls, whether or not the result had
    arrived by chance."""
    for rank, kinds in enumerate(unwaited):
        if kinds:
            got = f"on rank {rank} nobody waits for {len(kinds)} of them"
            raise Wrong("not-waited", expected="a wait() for every call", got=got)


def _check_average(answer, draw, make, ranks, likely=None, plan=None) -> list[_Averaged]:
    """Compares what every rank holds afterwards with the mean, and returns the ranks' reports.
    `likely` maps a misconception to what it makes of the local gradients: a function of
    (local, got)."""
    reports = run(_averaged, ranks, answer, make, plan or _plan(draw))
    _must_have_waited([r.unwaited for r in reports])
    local, got = [r.local for r in reports], [r.got for r in reports]
    mean = _mean(local)
    mistakes = {
        "parameters-averaged": any(r.moved for r in reports),
        **{slug: mistake(local, got) for slug, mistake in (likely or {}).items()},
        "sum-not-mean": [_sum(local)] * ranks,
        "unchanged": local,
        "in-place": all(g is None for own in got for g in own.values()),
        "device-count": lambda got: (
            not all(g.isfinite().all() for own in got for g in own.values() if g is not None)
        ),
        "nothing-sent": all(r.silent for r in reports) and [_scaled(g, 1 / ranks) for g in local],
        "not-waited": ranks > 1 and same(got[0], _scaled(local[0], 1 / ranks)),
        "fixed-two": [_scaled(_sum(local), 1 / 2)] * ranks,
        "divided-twice": [_scaled(mean, 1 / ranks)] * ranks,
        "rank-0s-gradient": [local[0]] * ranks,
        "one-tensor-listed": [local[-1]] * ranks,
        "one-rank-only": lambda got: any(same(g, mean) for g in got),
        "left-out": lambda got: _some_local(got, local, mean),
        "rounded": lambda got: same(got, [mean] * ranks, NEARLY),
    }
    expect(got, [mean] * ranks, each="rank", likely=mistakes)
    if mistakes["parameters-averaged"]:
        raise Wrong(
            "parameters-averaged", expected="the same parameters as before", got="other values"
        )
    return reports


@averaging.requires(
    "two ranks end with the mean of their gradients",
    # here every parameter has a gradient: what is None came from all_reduce
    failures={"'NoneType'": "in-place", "ZeroDivisionError": "device-count"},
)
def _(answer, draw):
    _check_average(answer, draw, _plain, 2)


@averaging.requires("three ranks do, and one rank keeps its own")
def _(answer, draw):
    for ranks in (3, 1):
        _check_average(answer, draw, _plain, ranks)


@averaging.requires(
    "a frozen or unused parameter keeps no gradient",
    failures={"TypeError": "none-gradient", "AttributeError": "none-gradient"},
)
def _(answer, draw):
    for make in (_Frozen, _Unused, _FrozenFirst):
        likely = {
            "zeros-for-none": lambda local, got: _zeros_for_none(got, local),
            "first-decides": lambda local, got, make=make: make is _FrozenFirst and local,
        }
        _check_average(answer, draw, make, draw.integer(2, 4), likely)


@averaging.requires("a tied parameter is averaged once")
def _(answer, draw):
    def twice(local, got):
        mean = _mean(local)
        return [{**mean, "first.weight": mean["first.weight"] / len(local)}] * len(local)

    ranks, plan = draw.integer(2, 4), _plan(draw)
    tied = _check_average(answer, draw, _Tied, ranks, {"tied-twice": twice}, plan)
    # a mean averaged again is the same mean: only what was sent tells
    untied = _check_average(answer, draw, _Untied, ranks, plan=plan)
    if 0 < sum(report.sent for report in untied) <= sum(report.sent for report in tied):
        got = "as many numbers sent as if the two layers had a weight each"
        raise Wrong("tied-twice", expected="the shared weight's gradient sent once", got=got)


# ---- 3.2 -----------------------------------------------------------------------------------------

ring = Exercise(
    "3.2",
    "ring_all_reduce",
    points=3,
    minutes=40,
    kind="core",
    parameters=("tensor",),
    hints=[
        (
            "Draw three ranks in a circle, each with three chunks. In each step every rank sends one "
            "chunk to the right and receives one from the left. Which chunk has rank r just received, "
            "and so can send on in the next step?"
        ),
        (
            "In step s rank r sends chunk (r - s) mod n and receives chunk (r - s - 1) mod n. During "
            "the first n - 1 steps it adds what arrives, afterwards it overwrites. `tensor_split` gives "
            "exactly n chunks, empty ones too; `batch_isend_irecv` starts a send and a receive together."
        ),
        (
            "Split `tensor.contiguous().view(-1)` with `tensor_split(n)`; the chunks are views. For "
            "2(n - 1) steps: start the send and the receive, wait for both, add or overwrite. Where "
            "`contiguous` had to make a copy, copy the result back into the tensor."
        ),
    ],
    misconceptions={
        "everyone-sends-first": "Every rank begins with a send, and so nobody receives. Start both together "
        "with `batch_isend_irecv`, or let one rank receive first. An `isend` ahead of the `recv` helps with "
        "gloo; NCCL's queue holds the `recv` back until the send has ended.",
        "unanswered": "A rank waits for a chunk that nobody sends to it. Send to rank + 1 and receive "
        "from rank - 1, both modulo n, as often on every rank.",
        "unchanged": "The tensor is as it was. The result must stand in the tensor that was handed "
        "in, not in a new one.",
        "not-waited": "You started a message and never waited for it: a buffer is read before it "
        "is filled, or changed before it is sent. Call `wait()` on what `isend` and `irecv` return.",
        "no-such-rank": "The ring is not closed: after the last rank comes rank 0. The neighbours "
        "are (rank + 1) % n and (rank - 1) % n.",
        "sums-overwritten": "Each element is that of a single rank. Either what arrives replaces your "
        "chunk where it must be added (receive it in a buffer of its own), or the second half sends "
        "the wrong chunks: after n - 1 steps rank r owns the sum of chunk (r + 1) mod n.",
        "mean-not-sum": "You have divided by the number of ranks: an all-reduce gives the sum.",
        "no-all-gather": "Each chunk is complete on one rank only. That is the reduce-scatter; now "
        "the complete chunks must travel round the ring once.",
        "added-again": "Complete chunks are added to what stood there. In the second half the "
        "chunk that arrives replaces the old one.",
        "wrong-chunks": "Some chunks are added twice, or not at all. Follow one chunk round the ring on "
        "paper: which rank has it after each step, and whose numbers are in it?",
        "two-ranks-only": "Right on two ranks, wrong on three. With two ranks any chunk that is not "
        "yours will do; with three, send on the chunk that you received in the step before.",
        "one-rank-hangs": "With one rank there is nobody to talk to. n ranks take n - 1 steps to sum and "
        "n - 1 to send the sums round: here none.",
        "remainder-lost": "The last elements are not summed: the length does not divide by the "
        "number of ranks, and the remainder belongs to no chunk.",
        "too-few-chunks": "For some lengths you have fewer chunks than ranks. `chunk` gives fewer if "
        "the tensor is short; `tensor_split` gives exactly n, some of them empty.",
        "chunk-sizes": "A rank receives a chunk of another size than was sent. Chunks may differ by "
        "one element: make the buffer like the chunk that arrives, chunk (r - s - 1) mod n in step "
        "s.",
        "short-wrong": "The ring works for long tensors only: with fewer elements than ranks, some "
        "chunks are empty.",
        "copy-not-in-place": "A tensor that is not contiguous comes back unchanged: `contiguous` "
        "and `reshape` make a copy of it. Copy the result back into the tensor.",
        "needs-contiguous": "`send`, `recv` and `view` work on contiguous memory only. Work on "
        "`tensor.contiguous()`, which is the tensor itself or a copy, and copy the result back.",
        "dtype-lost": "The buffer that you receive into has the wrong dtype: `torch.empty` makes "
        "float32. `torch.empty_like` takes the tensor's own.",
        "rounded": "Large integers come back rounded: somewhere the sum was made in floating point.",
        "whole-tensor": "You send the whole tensor in every step: (n-1) times the tensor. Cut it "
        "into n chunks.",
        "through-one-rank": "One rank sends far more than the others: everything passes through it. "
        "On a ring each rank sends equally much.",
        "built-in-collective": "You called one of PyTorch's collectives. Build it from send and "
        "receive.",
        "not-a-ring": "A rank sends to several others. On the ring each talks to its neighbours only: it "
        "sends to one of them and receives from the other.",
        "sent-too-little": "You send less than 2(n-1)/n of the tensor: with so few bytes not every "
        "rank can have the whole sum.",
        "sent-too-much": "You send more than 2(n-1)/n of the tensor: 2(n-1) steps, one chunk each.",
    },
    failures={
        "there is no rank": "no-such-rank",
        " in recv": "unanswered",
        "timeout": "everyone-sends-first",
        "mismatch": "chunk-sizes",
    },
)


@dataclass(frozen=True)
class _Summed:
    """The tensors of a rank after each call, and the messages that nobody waited for."""

    tensors: list[Tensor]
    unwaited: list[str]


def _summed(rank, answer, own: list[Tensor], columns: bool = False) -> _Summed:
    """Hands in the rank's tensor of each case; with `columns`, every second column of it, which is
    a view that is not contiguous."""
    tensors = [tensor.to(device()) for tensor in own]
    come_late(rank)
    with following() as sent:
        for tensor in tensors:
            answer(tensor[:, ::2] if columns else tensor)
    return _Summed(tensors, sent.unwaited)


def _run_sums(answer, cases: list[list[Tensor]], columns: bool = False) -> list[list[Tensor]]:
    """For each case, what the tensor of every rank has become."""
    own = OwnPart([*zip(*cases, strict=True)])
    reports = run(_summed, len(cases[0]), answer, own, columns)
    for rank, report in enumerate(reports):
        if report.unwaited:
            got = f"on rank {rank} nobody waits for a {report.unwaited[0]}"
            raise Wrong("not-waited", expected="a wait() for every message", got=got)
    return [list(tensors) for tensors in zip(*(report.tensors for report in reports), strict=True)]


def _traced_sum(rank, answer, own: Tensor) -> list[Call]:
    with Trace() as trace:
        answer(own.to(device()))
    return trace.record().calls


def _check_sums(answer, cases: list[list[Tensor]], mistaken=None) -> None:
    """`cases` holds a list with one tensor a rank for each call; `mistaken` maps a misconception
    to a function of (got, tensors) of one case."""
    ranks = len(cases[0])
    for got, tensors in zip(_run_sums(answer, cases), cases, strict=True):
        total = sum(tensors)
        mistakes = {
            "unchanged": tensors,
            "mean-not-sum": [total / ranks] * ranks,
            "sums-overwritten": _of_one_rank(got, tensors),
            "added-again": _added_again(got, tensors),
            "no-all-gather": _complete_somewhere(got, total),
        }
        extra = {slug: fits(got, tensors) for slug, fits in (mistaken or {}).items()}
        what = f"the sum of {ranks} tensors of shape {tuple(total.shape)}"
        likely = (
            mistakes | extra | {"wrong-chunks": [g.shape for g in got] == [total.shape] * ranks}
        )
        expect(got, [total] * ranks, each="rank", what=what, likely=likely)


def _of_one_rank(got: list[Tensor], tensors: list[Tensor]) -> bool:
    """Whether each element is what it was on some rank."""
    return all(torch.stack([g == own for own in tensors]).any(dim=0).all() for g in got)


def _complete_somewhere(got: list[Tensor], total: Tensor) -> bool:
    return bool(torch.stack([g == total for g in got]).any(dim=0).all())


def _added_again(got: list[Tensor], tensors: list[Tensor]) -> bool:
    total = sum(tensors)
    pairs = zip(got, tensors, strict=True)
    return all(((g == total) | (g == total + own)).all() for g, own in pairs)


def _remainder_left(got: list[Tensor], tensors: list[Tensor]) -> bool:
    rest = len(tensors[0]) % len(tensors)
    done = len(tensors[0]) - rest
    total = sum(tensors)
    pairs = zip(got, tensors, strict=True)
    return rest > 0 and all(
        torch.equal(g[:done], total[:done]) and torch.equal(g[done:], own[done:])
        for g, own in pairs
    )


@ring.requires("two ranks end with the sum of their tensors")
def _(answer, draw):
    length = 2 * draw.integer(2, 6)
    _check_sums(answer, [[draw.whole(length) for _ in range(2)]])


@ring.requires("three ranks do", failures={"timeout": "two-ranks-only"})
def _(answer, draw):
    length = 3 * draw.integer(2, 6)
    cases = [[draw.whole(length) for _ in range(3)]]
    _check_sums(answer, cases, {"two-ranks-only": lambda got, tensors: True})


@ring.requires(
    "one rank keeps its tensor",
    failures=dict.fromkeys(("exception", "timeout"), "one-rank-hangs"),
)
def _(answer, draw):
    _check_sums(answer, [[draw.whole(5)]])


@ring.requires(
    "lengths that do not divide by the number of ranks",
    failures={"raised IndexError": "too-few-chunks", "timeout": "too-few-chunks"},
)
def _(answer, draw):
    ranks = draw.integer(3, 4)
    lengths = [ranks * draw.integer(3, 6) + rest for rest in (1, ranks - 1)] + [ranks + 1]
    cases = [[draw.whole(length) for _ in range(ranks)] for length in lengths]
    _check_sums(answer, cases, {"remainder-lost": _remainder_left})


@ring.requires(
    "tensors with fewer elements than ranks, and with none",
    failures={
        "raised IndexError": "too-few-chunks",
        "exception": "short-wrong",
        "timeout": "short-wrong",
    },
)
def _(answer, draw):
    ranks = draw.integer(3, 4)
    cases = [[draw.whole(length) for _ in range(ranks)] for length in (ranks - 1, 1, 0)]
    _check_sums(answer, cases, {"remainder-lost": _remainder_left})


@ring.requires(
    "several dimensions, and a tensor that is not contiguous",
    failures={"RuntimeError": "needs-contiguous"},
)
def _(answer, draw):
    ranks, rows, pairs = draw.integer(2, 3), draw.integer(3, 5), draw.integer(2, 4)
    _check_sums(answer, [[draw.whole(rows, 5) for _ in range(ranks)]])
    # of 6 columns, every second one can be viewed as a vector with a stride; of 7 it cannot
    columns = (2 * pairs + 1, 2 * pairs)
    cases = [[draw.whole(rows, count) for _ in range(ranks)] for count in columns]
    for got, wholes in zip(_run_sums(answer, cases, columns=True), cases, strict=True):
        expected = [whole.clone() for whole in wholes]
        for whole in expected:
            whole[:, ::2] = sum(wholes)[:, ::2]
        expect(got, expected, each="rank", likely={"copy-not-in-place": wholes})


@ring.requires(
    "integers and double precision are summed exactly",
    failures={
        "can't be cast to": "mean-not-sum",  # of integers, `/=` makes floats
        **dict.fromkeys(("exception", "mismatch", "signal", "timeout"), "dtype-lost"),
    },
)
def _(answer, draw):
    ranks, length = draw.integer(2, 3), draw.integer(5, 9)
    large = [2**40 + draw.integers(length) for _ in range(ranks)]
    precise = [1 + draw.tensor(length, dtype=torch.float64) * 1e-9 for _ in range(ranks)]
    for tensors, tolerance in ((large, 0), (precise, 1e-15)):
        [got] = _run_sums(answer, [tensors])
        total = sum(tensors)
        nearly = all(torch.allclose(g.double(), total.double(), rtol=1e-3) for g in got)
        likely = {"unchanged": tensors, "rounded": nearly}
        expect(got, [total] * ranks, each="rank", tolerance=tolerance, likely=likely)


@ring.requires("every rank sends 2(n-1)/n of the tensor's bytes, point to point")
def _(answer, draw):
    first = draw.integer(3, 4)
    for ranks, remainder in ((first, 0), (7 - first, 0), (3, 1)):
        length = ranks * draw.integer(20, 40) + remainder
        tensors = [draw.whole(length) for _ in range(ranks)]
        _check_traffic(run(_traced_sum, ranks, answer, OwnPart(tensors)), length)


def _check_traffic(calls: list[list[Call]], length: int) -> None:
    """Raises Wrong unless every rank sent 2(n-1) chunks of `length` / n float32, up to padding."""
    ranks = len(calls)
    others = {call.op for own in calls for call in own} - {"send", "recv"}
    if others:
        raise Wrong("built-in-collective", expected="send and recv", got=", ".join(sorted(others)))
    sent = [sum(call.bytes for call in own if call.sends) for own in calls]
    steps, size = 2 * (ranks - 1), 4
    low, high = steps * (length // ranks) * size, steps * math.ceil(length / ranks) * size
    if all(low <= bytes <= high for bytes in sent):
        receivers = [{call.ranks[1] for call in own if call.sends} for own in calls]
        if max(map(len, receivers)) > 1:
            expected = "messages to one neighbour"
            raise Wrong("not-a-ring", expected=expected, got=f"messages to {receivers}")
        return
    mistakes = {
        "whole-tensor": all(bytes >= (ranks - 1) * length * size for bytes in sent),
        "through-one-rank": max(sent) >= 2 * max(1, min(sent)),
        "sent-too-little": max(sent) < low,
        "sent-too-much": True,
    }
    raise Wrong(
        next(slug for slug, made in mistakes.items() if made),
        expected=f"{low} bytes from each of {ranks} ranks" if low == high else f"{low} to {high}",
        got=f"{sent}, for a tensor of {length * size} bytes",
    )


# ---- 3.3 -----------------------------------------------------------------------------------------

sharding = Exercise(
    "3.3",
    "shard_indices",
    points=2,
    minutes=20,
    kind="core",
    parameters=("length", "rank", "world_size", "epoch", "seed"),
    hints=[
        (
            "Three steps: shuffle all indices, make the list long enough, take this rank's part. Which "
            "of them depend on the rank?"
        ),
        (
            "Only the last one does. All ranks shuffle with the seed `seed + epoch`, in a generator of "
            "their own; the parts are strides, `order[rank::world_size]`, not blocks."
        ),
        (
            "Draw `torch.randperm(length, generator=...)`. Repeat the order from its beginning until it "
            "has ceil(length / world_size) * world_size entries: a very small dataset has to be "
            "repeated more than once. Take every world_size-th entry, beginning at `rank`."
        ),
    ],
    misconceptions={
        "ranks-from-one": "A rank has the part of its neighbour. Ranks count from 0: rank r begins at "
        "order[r].",
        "blocks": "Each rank has a block of neighbours in the order. DistributedSampler deals them "
        "out like cards: rank, rank + world_size, rank + 2 * world_size, ...",
        "not-shuffled": "The indices are not shuffled.",
        "epoch-ignored": "Every epoch has the same order: the epoch does not enter the seed. This "
        "is what training does that never calls `set_epoch`.",
        "seed-per-rank": "Each rank shuffles with a seed of its own. Then the ranks' parts overlap, "
        "and some samples are read by nobody.",
        "seed-ignored": "The seed that was handed in plays no part.",
        "shuffled-after": "You share the samples out first and then shuffle each part: a rank sees "
        "the same samples in every epoch.",
        "padded-wrongly": "The order is lengthened with the wrong indices. DistributedSampler starts "
        "again from the order's beginning: order[0], order[1], ...",
        "padded-needlessly": "The order is lengthened although it divides by the number of ranks: "
        "`length % world_size` is 0 then.",
        "not-padded": "The ranks get different numbers of samples: the order was not lengthened. "
        "Ranks that train on fewer batches leave the others waiting in a collective.",
        "dropped": "The last samples are left out, as with `drop_last=True`. Lengthen the order "
        "instead of cutting it.",
        "padded-once": "For a dataset smaller than the number of ranks the order has to be repeated "
        "more than once.",
        "empty-dataset": "A dataset without samples has no indices to share out: return an empty "
        "list on every rank.",
        "global-generator": "The notebook's own random numbers have changed: `torch.manual_seed` "
        "sets the generator that everybody uses. Make a `torch.Generator` of your own.",
        "not-a-list": "Return a list of ints; of a tensor, `tolist()` makes one.",
        "another-order": "Every rank has its part of a shuffled order, and it is not "
        "DistributedSampler's: that is `torch.randperm`, from a `torch.Generator` with the seed "
        "`seed + epoch`.",
        "asks-the-sampler": "You asked `DistributedSampler`. Here you write what it does: shuffle, "
        "lengthen, take every world_size-th index.",
        "asks-the-group": "There is no process group here: nothing is sent. Rank and world size are "
        "among the arguments.",
    },
    failures={"process group has not been initialized": "asks-the-group"},
)


def _sampler(length: int, ranks: int, epoch: int, seed: int) -> list[list[int]]:
    """What DistributedSampler gives each rank."""
    parts = []
    for rank in range(ranks):
        sampler = DistributedSampler(range(length), ranks, rank, shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
    return parts


def _dealt(order: list[int], ranks: int) -> list[list[int]]:
    return [order[rank::ranks] for rank in range(ranks)]


def _order(length: int, seed: int) -> list[int]:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()


def _sharding_mistakes(length: int, ranks: int, epoch: int, seed: int) -> dict:
    """What each mistake gives, by misconception."""
    order = _order(length, seed + epoch)
    share = math.ceil(length / ranks)
    missing = share * ranks - length
    padded = order + order[:missing]
    plain = list(range(length)) + list(range(missing))
    parts = [sorted(part) for part in _dealt(plain, ranks)]
    return {
        "asks-the-group": ranks > 1 and [order[rank:] for rank in range(ranks)],
        "not-padded": missing and _dealt(order, ranks),
        "dropped": missing and _dealt(order[: length - length % ranks], ranks),
        "padded-needlessly": not missing and (lambda got: len(got[0]) > share),
        "blocks": [padded[r * share : (r + 1) * share] for r in range(ranks)],
        "not-shuffled": lambda got: got in (_dealt(plain, ranks), _dealt(plain[:length], ranks)),
        "epoch-ignored": epoch and _dealt_and_padded(_order(length, seed), ranks),
        "seed-ignored": _dealt_and_padded(_order(length, epoch), ranks),
        "seed-per-rank": lambda got: _ranks_disagree(got, length, ranks),
        "shuffled-after": ranks > 1 and (lambda got: list(map(sorted, got)) == parts),
        "padded-wrongly": lambda got: _same_start(got, _dealt(order, ranks), share),
        "another-order": lambda got: (
            {len(part) for part in got} == {share}
            and {i for part in got for i in part} == set(order)
        ),
    }


def _same_start(got: list[list[int]], unpadded: list[list[int]], share: int) -> bool:
    """Whether the parts have the right size, and only what was repeated is wrong."""
    pairs = zip(got, unpadded, strict=True)
    return all(len(g) == share and g[: len(part)] == part for g, part in pairs)


def _dealt_and_padded(order: list[int], ranks: int) -> list[list[int]]:
    return _dealt(order + order[: -len(order) % ranks], ranks)


def _ranks_disagree(got: list[list[int]], length: int, ranks: int) -> bool:
    """Whether the parts, of the right size, leave samples out."""
    sizes = {len(part) for part in got}
    return sizes == {math.ceil(length / ranks)} and len({i for part in got for i in part}) < length


def _check_shards(answer, length: int, ranks: int, epoch: int, seed: int) -> None:
    with called(DistributedSampler.__init__, DistributedSampler.__iter__) as forbidden:
        got = [answer(length, rank, ranks, epoch, seed) for rank in range(ranks)]
    if forbidden:
        raise Wrong("asks-the-sampler", expected="an order of your own", got=forbidden[0])
    for part in got:
        expect_type(part, list, likely=None if part is None else "not-a-list")
        for index in part:
            expect_type(index, int, likely="not-a-list")
    small = length < ranks
    likely = {} if small else _sharding_mistakes(length, ranks, epoch, seed)
    expected = _sampler(length, ranks, epoch, seed)
    if small:
        likely["padded-once"] = sum(map(len, got)) < ranks * math.ceil(length / ranks)
    what = f"{length} samples, world size {ranks}, epoch {epoch}, seed {seed}"
    if ranks > 1:
        shifted = got[:-1] == expected[1:] or got[1:] == expected[:-1]
        likely = {"ranks-from-one": shifted, **likely}
    expect(got, expected, each="rank", what=what, likely=likely)


@sharding.requires("a dataset that divides by the number of ranks", at_home=True)
def _(answer, draw):
    ranks = draw.integer(3, 5)
    _check_shards(answer, ranks * draw.integer(5, 9), ranks, 0, draw.integer(1, 99))


@sharding.requires("every epoch has its own order")
def _(answer, draw):
    ranks = draw.integer(2, 4)
    for epoch in (1, draw.integer(2, 9)):
        _check_shards(answer, ranks * draw.integer(5, 9), ranks, epoch, draw.integer(1, 99))


@sharding.requires("a dataset that does not divide by the number of ranks")
def _(answer, draw):
    ranks = draw.integer(3, 5)
    for extra in draw.sample((1, ranks - 1), 2):
        length = ranks * draw.integer(5, 9) + extra
        _check_shards(answer, length, ranks, draw.integer(0, 9), draw.integer(1, 99))


@sharding.requires("one rank, and more ranks than samples")
def _(answer, draw):
    few = draw.integer(2, 4)
    more = draw.integer(2 * few + 1, 3 * few)  # one repetition is not enough
    for length, ranks in ((draw.integer(5, 9), 1), (few + 1, few + 2), (few, more), (1, 4)):
        _check_shards(answer, length, ranks, draw.integer(0, 9), draw.integer(1, 99))


@sharding.requires("an empty dataset", failures={"exception": "empty-dataset"})
def _(answer, draw):
    ranks = draw.integer(2, 4)
    got = [answer(0, rank, ranks, draw.integer(0, 9), draw.integer(1, 99)) for rank in range(ranks)]
    expect(got, [[]] * ranks, each="rank")


@sharding.requires("the notebook's own random numbers stay as they are", at_home=True)
def _(answer, draw):
    before = torch.get_rng_state()
    answer(draw.integer(8, 12), 1, 2, draw.integer(0, 9), draw.integer(1, 99))
    if not torch.equal(torch.get_rng_state(), before):
        raise Wrong("global-generator", expected="the same state", got="another state")


# ---- 3.4 -----------------------------------------------------------------------------------------

overlapping = Exercise(
    "3.4",
    "OverlappedDDP",
    points=5,
    minutes=120,
    kind="stretch",
    hints=[
        (
            "Begin without overlap: broadcast in `__init__`, and average everything in "
            "`finish_gradient_synchronization`. When that is right, move the all-reduces into hooks."
        ),
        (
            "Fill the buckets with the trainable parameters in reverse order. Register one hook per "
            "parameter; it counts down how many gradients its bucket still misses. At zero, the "
            "gradients go into one flat tensor and its all-reduce starts with `async_op=True`; keep the "
            "work handle, and call its `wait()` in `finish_gradient_synchronization` only."
        ),
        (
            "A bucket may start only after all the buckets before it, so that the ranks agree on the "
            "order; `finish_gradient_synchronization` starts those that never filled, with zeros for "
            "what is missing, waits for all, writes the means back and resets the counters. To know "
            "whether any rank used a parameter, let one number per parameter travel in the bucket. "
            "`no_sync` sets a flag at which the hooks return at once."
        ),
    ],
    misconceptions={
        "torchs-own": "You wrapped the module in PyTorch's own DistributedDataParallel. Here you write "
        "it: broadcast, buckets, hooks.",
        "no-module": "`model.module` is the module that was wrapped: call `super().__init__()`, then "
        "keep the module under that name.",
        "no-broadcast": "The ranks start from different parameters. Broadcast rank 0's in "
        "`__init__`: averaging gradients keeps equal models equal, but never makes them equal.",
        "buffers-forgotten": "The parameters agree and the buffers do not, for instance BatchNorm's "
        "running mean. Broadcast `module.buffers()` too.",
        "another-rank": "The ranks start from another rank's parameters; rank 0's were wanted.",
        "averaged-at-start": "The ranks start from the mean of their parameters; rank 0's were "
        "wanted.",
        "not-waited": "A rank has used gradients before the other ranks' had arrived: wait for "
        "every all-reduce in `finish_gradient_synchronization`.",
        "unsynchronised": "Each rank still has its own gradients: they were not averaged, or the "
        "average was not written into `parameter.grad`.",
        "sum-not-mean": "Your gradients are world_size times too large: all_reduce adds, and the "
        "division is missing.",
        "divided-twice": "Your gradients are world_size times too small: they are divided twice.",
        "fixed-two": "You divide by 2. That is right on two ranks only: ask `dist.get_world_size()`.",
        "hook-too-early": "A hook found no gradient in `.grad`. `register_hook` runs before the "
        "gradient gets there; `register_post_accumulate_grad_hook` runs after.",
        "no-handle": "An all_reduce without `async_op=True` waits at once and returns None: there is "
        "nothing to wait for later, and no overlap.",
        "not-every-rank": "A collective is called by every rank or by none. Here a rank did not "
        "call it, and the others wait: look for an `if` or a `return` that depends on the rank.",
        "first-step-only": "The first step is right and a later one is not. Reset the counters and "
        "the work handles in `finish_gradient_synchronization`, and remember that "
        "`zero_grad()` throws `.grad` away: the next backward puts a new tensor there.",
        "starts-at-the-end": "No all-reduce had started when backward reached the first layer: "
        "there is no overlap. Start a bucket's all-reduce in the hook that completes it, and fill the "
        "buckets in the order in which backward comes by: the last layer first.",
        "waits-in-backward": "A rank's backward stops until another rank gets there. Start the "
        "all-reduce with `async_op=True`, and wait in `finish_gradient_synchronization` only.",
        "one-per-parameter": "There is one all-reduce for every parameter. Each costs a fixed time "
        "before its first byte moves: pack gradients into buckets of up to `bucket_bytes`.",
        "one-for-all": "All gradients travel in one all-reduce, which cannot start before backward "
        "has ended. Split them into buckets of at most `bucket_bytes`.",
        "bucket-size": "The size of the buckets does not follow `bucket_bytes`.",
        "no-context-manager": "`with model.no_sync():` needs a context manager: a method that yields "
        "once, with `@contextmanager` above it.",
        "sends-in-no-sync": "Something is sent inside `no_sync()`. There the hooks must return "
        "at once, and `.grad` just adds up.",
        "silent-for-good": "After `no_sync()` the hooks stay silent, so all communication waits for "
        "`finish_gradient_synchronization`. Switch them on again when the `with` block ends.",
        "silent-after-error": "After an exception inside `no_sync()` the hooks stay silent. Switch them "
        "on again however the block ends: `try: yield`, and then `finally:`.",
        "nested": "Where one `no_sync()` stands inside another, the end of the inner one switches "
        "the hooks on in the middle of the outer one. Keep what was before, and put that back.",
        "error-swallowed": "An exception inside `no_sync()` does not come out again, so the training goes "
        "on as if nothing had happened. Clean up in `finally:`, and catch nothing.",
        "rounded": "Your means are only nearly right: on the way the gradients have a smaller dtype.",
        "accumulated-lost": "Only the last micro-batch's gradient was averaged, and the sum from "
        "`no_sync()` is gone. Average `parameter.grad`, in which backward has added everything up.",
        "accumulated-local": "What was added up inside `no_sync()` stays this rank's own: only the "
        "last micro-batch's gradient was averaged. Average the whole `parameter.grad`.",
        "frozen-hook": "A frozen parameter needs no gradient, and PyTorch takes no hook on it. Leave "
        "it out of the buckets, but broadcast it.",
        "frozen-not-broadcast": "The frozen parameters differ between the ranks. They need no "
        "gradients, but the same values everywhere: broadcast all parameters.",
        "frozen-gradient": "A frozen parameter has received a gradient.",
        "tied-twice": "A tied parameter, one tensor in two layers, is in the buckets twice. "
        "`module.parameters()` yields it once; a walk over the layers meets it twice.",
        "bucket-never-full": "A bucket with an unused parameter never fills, so the others in it "
        "were not averaged. Start what has not started in `finish_gradient_synchronization`.",
        "unused-crash": "A parameter that the loss did not use has no gradient: its `.grad` is "
        "None, its hook is never called, and its bucket does not start by itself.",
        "zeros-for-unused": "A parameter that no rank used has received a gradient of zeros. It is "
        "not the same as None: weight decay and momentum would move the parameter.",
        "order-differs": "The ranks wait for each other in different all-reduces. One rank does not "
        "use a layer, so its buckets fill in another order, or one not at all: start them in one "
        "fixed order on every rank, and those that did not fill in "
        "`finish_gradient_synchronization`.",
        "used-elsewhere": "A parameter that this rank did not use, and another did, has no gradient "
        "here, so the ranks' parameters drift apart. Its gradient is the mean with a zero for this "
        "rank.",
        "users-only": "You divide by the number of ranks that used the parameter. A rank that did "
        "not use it counts, with a zero: divide by the world size.",
    },
    failures={
        "has no attribute 'wait'": "no-handle",
        "'NoneType'": "hook-too-early",  # where every parameter has a gradient
        "timeout": "not-every-rank",
        "mismatch": "not-every-rank",
    },
)


def _initial(rank, answer, plan: _Plan, frozen=False) -> tuple[dict, dict, bool]:
    """The state of a module with buffers, before and after construction, and whether PyTorch's own
    was constructed."""
    torch.manual_seed(plan.seed + rank)
    layers = nn.Linear(5, plan.width), nn.BatchNorm1d(plan.width), nn.Linear(plan.width, 3)
    module = nn.Sequential(*layers).to(device())
    module[0].requires_grad_(not frozen)
    module[1](plan.batch())  # moves BatchNorm's buffers
    module[2].register_buffer("unsaved", torch.randn(3, device=device()), persistent=False)
    before = _whole_state(module)
    with called(DistributedDataParallel.__init__) as forbidden:
        model = answer(module)
    return before, {} if forbidden else _whole_state(model.module), bool(forbidden)


def _whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and all buffers, also those that `state_dict` leaves out."""
    return _state(module) | {name: tensor.clone() for name, tensor in module.named_buffers()}


def _must_be_own(forbidden: bool) -> None:
    if forbidden:
        raise Wrong("torchs-own", expected="your own", got="DistributedDataParallel")


def _check_start(answer, draw, frozen=False) -> None:
    ranks = draw.integer(2, 3)
    reports = run(_initial, ranks, answer, _plan(draw), frozen)
    before, got, forbidden = zip(*reports, strict=True)
    _must_be_own(any(forbidden))
    weight = sum(state["2.weight"] for state in before) / ranks

    def own(*parts: str) -> list[dict]:
        """Rank 0's state everywhere, but for the names with one of `parts` in them."""
        return [
            before[0] | {k: v for k, v in state.items() if any(part in k for part in parts)}
            for state in before
        ]

    unlike = ("running", "unsaved"), ("running",), ("unsaved",)
    likely = {
        "no-broadcast": list(before),
        "buffers-forgotten": lambda got: any(same(got, own(*parts)) for parts in unlike),
        "frozen-not-broadcast": own("0."),
        "another-rank": [before[-1]] * ranks,
        "averaged-at-start": lambda got: same(got[0]["2.weight"], weight),
    }
    expect(list(got), [before[0]] * ranks, each="rank", likely=likely)


@overlapping.requires(
    "every rank starts with rank 0's parameters and buffers",
    failures={"AttributeError": "no-module"},
)
def _(answer, draw):
    _check_start(answer, draw)


@dataclass(frozen=True)
class _Steps:
    """For each step of training: the local gradients of each micro-batch, and what came."""

    local: list[list[Gradients]]
    got: list[Gradients]
    forbidden: bool  # was DistributedDataParallel constructed meanwhile?
    unwaited: list[str]  # calls that nobody waited for


def _steps(rank, answer, make, plan: _Plan, bucket_bytes, micro_batches, keep_zeros) -> _Steps:
    """Three steps with a twin beside the model; all but the last micro-batch under no_sync."""
    module = plan.build(make)
    twin = copy.deepcopy(module)
    local, got = [], []
    with called(DistributedDataParallel.__init__) as forbidden, following() as sent:
        model = answer(module, bucket_bytes=bucket_bytes)
        torch.manual_seed(plan.seed + 1 + rank)
        for _ in range(3):
            batches = [plan.batch() for _ in range(micro_batches)]
            for batch in batches[:-1]:
                with model.no_sync():
                    model(batch).square().sum().backward()
            loss = model(batches[-1]).square().sum()
            come_late(rank)
            loss.backward()
            model.finish_gradient_synchronization()
            got.append(_gradients(module))
            local.append([_gradient_of(twin, batch) for batch in batches])
            module.zero_grad(set_to_none=not keep_zeros)
    return _Steps(local, got, bool(forbidden), sent.unwaited)


def _gradient_of(twin: nn.Module, batch: Tensor) -> Gradients:
    twin.zero_grad()
    twin(batch).square().sum().backward()
    return _gradients(twin)


def _check_steps(
    answer,
    draw,
    make,
    ranks,
    bucket_bytes,
    likely=None,
    otherwise=None,
    micro_batches=1,
    keep_zeros=False,
) -> None:
    """Compares the gradients after each step with the mean over the ranks of what each added up.

    `likely` maps a misconception to a function of (the ranks' added up gradients, what came);
    `otherwise` is the misconception to name where none fits.
    """
    how = (bucket_bytes, micro_batches, keep_zeros)
    reports = run(_steps, ranks, answer, make, _plan(draw), *how)
    _must_be_own(any(report.forbidden for report in reports))
    _must_have_waited([report.unwaited for report in reports])
    for step in range(3):
        local = [_sum(report.local[step]) for report in reports]
        last = [report.local[step][-1] for report in reports]
        got = [report.got[step] for report in reports]
        mean = _mean(local)
        mistakes = {
            **{slug: mistake(local, got) for slug, mistake in (likely or {}).items()},
            "not-waited": ranks > 1 and same(got[0], _scaled(local[0], 1 / ranks)),
            "first-step-only": step > 0,
            "unsynchronised": local,
            "sum-not-mean": [_sum(local)] * ranks,
            "fixed-two": [_scaled(_sum(local), 1 / 2)] * ranks,
            "divided-twice": [_scaled(mean, 1 / ranks)] * ranks,
            "accumulated-lost": [_mean(last)] * ranks,
            "accumulated-local": [
                _sum([own, _scaled(end, -1), _mean(last)])
                for own, end in zip(local, last, strict=True)
            ],
        }
        mistakes["rounded"] = lambda got, mean=mean: same(got, [mean] * ranks, NEARLY)
        if otherwise:
            mistakes[otherwise] = True
        expect(got, [mean] * ranks, each="rank", what=f"step {step + 1}", likely=mistakes)


@overlapping.requires("after each of three steps every rank has the mean gradients")
def _(answer, draw):
    _check_steps(answer, draw, _plain, 2, 25 * 2**20)


@overlapping.requires("three ranks do, with small buckets, and zero_grad(set_to_none=False)")
def _(answer, draw):
    _check_steps(answer, draw, _plain, 3, 64)
    _check_steps(answer, draw, _plain, 1, 64, keep_zeros=True)


@dataclass(frozen=True)
class _Backward:
    """What one rank saw of a backward pass through the tower."""

    started_early: int  # all-reduces that had started when backward reached the first layer
    sizes: list[int]  # bytes of each all-reduce that carries gradients
    partner_got_through: bool  # rank 1: did rank 0 reach its first layer alone?
    error_came: bool  # did the exception that ended a block come out of it?


class _Interrupted(Exception):
    """What ends a block before its end."""


def _tower_backward(
    rank,
    answer,
    plan: _Plan,
    layers: int,
    bucket_layers: float,
    mark: Path | None = None,
    after_no_sync: bool = False,
    interrupted: bool = False,
) -> _Backward:
    """One step after a first one, through a tower, with room for `bucket_layers` in a bucket. With
    `mark`, a file, rank 1 begins backward only when rank 0 has come through its own as far as the
    first layer, which makes the file; or after a while. The step may follow a backward pass under
    no_sync, one that an exception may have ended."""
    module = plan.build(partial(_Tower, layers=layers))
    model = answer(module, bucket_bytes=int(bucket_layers * _layer_bytes(plan)))
    inputs = plan.batch()
    model(inputs).sum().backward()
    model.finish_gradient_synchronization()
    module.zero_grad()
    error_came = False
    if after_no_sync:
        try:
            with model.no_sync():
                model(inputs).sum().backward()
                if interrupted:
                    raise _Interrupted
        except _Interrupted:
            error_came = True
    waits, signals = mark is not None and rank == 1, mark is not None and rank == 0
    with Trace() as trace, contextlib.ExitStack() as rest:

        def first_layer() -> None:
            rest.enter_context(trace.span("first layer"))
            if signals:
                finish_device_work()
                mark.touch()

        loss = model(inputs).sum()
        module.before_first_gradient = first_layer
        came = _appears(mark) if waits else True
        loss.backward()
        rest.close()
        model.finish_gradient_synchronization()
    record = trace.record()
    reached = min(span.start for span in record.spans if span.name == "first layer")
    early = [s for s in record.spans if s.kind == "communication" and s.start < reached]
    sizes = [call.bytes for call in record.calls if call.bytes >= _layer_bytes(plan) // 2]
    return _Backward(len(early), sizes, came, error_came)


def _layer_bytes(plan: _Plan) -> int:
    return 4 * plan.width**2


def _tower(draw) -> tuple[_Plan, int]:
    """The plan of a tower, and its number of layers."""
    return _Plan(draw.seed(), draw.integer(12, 20), draw.integer(3, 6)), draw.integer(6, 9)


def _appears(path: Path, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.005)
    return path.exists()


@overlapping.requires("all-reduces start while backward still runs")
def _(answer, draw):
    reports = run(_tower_backward, draw.integer(2, 3), answer, *_tower(draw), 2)
    if not all(report.started_early for report in reports):
        raise Wrong(
            "one-for-all" if len(reports[0].sizes) == 1 else "starts-at-the-end",
            expected="at least one all-reduce before the first layer's gradient",
            got="none",
        )


@overlapping.requires(
    "backward does not wait for the other ranks", needs_earlier=True, at_home=True
)
def _(answer, draw):
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "rank_0_is_at_its_first_layer"
        reports = run(_tower_backward, 2, answer, *_tower(draw), 2, mark)
    if not reports[1].partner_got_through:
        raise Wrong(
            "waits-in-backward",
            expected="rank 0 gets to its first layer while rank 1 has not begun backward",
            got="rank 0 waits",
        )


@overlapping.requires("gradients travel in buckets of bucket_bytes")
def _(answer, draw):
    plan, layers = _tower(draw)
    for limit in (2, 3, 2.75):
        sizes, bucket = run(_tower_backward, 2, answer, plan, layers, limit)[0].sizes, int(limit)
        likely = {
            "one-per-parameter": len(sizes) >= layers,
            "one-for-all": len(sizes) == 1,
            "bucket-size": 2 * max(sizes, default=0) > (2 * bucket + 1) * _layer_bytes(plan),
        }
        _name_first(likely, f"a bucket for every {bucket} of {layers} equal layers", sizes)
    sizes = run(_tower_backward, 2, answer, plan, layers, 100)[0].sizes
    likely = {"one-per-parameter": len(sizes) >= layers, "bucket-size": len(sizes) > 2}
    _name_first(likely, "one bucket where everything fits in", sizes)


def _name_first(mistakes: dict[str, bool], expected: str, sizes: list[int]) -> None:
    for slug, made in mistakes.items():
        if made:
            raise Wrong(slug, expected=expected, got=f"all-reduces of {sizes} bytes")


def _calls_in_no_sync(rank, answer, plan: _Plan) -> int:
    model = answer(plan.build(_plain), bucket_bytes=64)
    inputs = plan.batch()
    with Trace() as trace:
        for _ in range(2):
            with model.no_sync():
                model(inputs).sum().backward()
    return trace.record().count()


@overlapping.requires(
    "no_sync() sends nothing",
    failures={"TypeError": "no-context-manager", "AttributeError": "no-context-manager"},
)
def _(answer, draw):
    ranks = draw.integer(2, 3)
    calls = run(_calls_in_no_sync, ranks, answer, _plan(draw))
    expect(
        calls, [0] * ranks, each="rank", what="number of calls", likely={"sends-in-no-sync": True}
    )


@overlapping.requires("the backward after no_sync() averages the whole sum")
def _(answer, draw):
    ranks, micro_batches = draw.integer(2, 3), draw.integer(2, 4)
    _check_steps(answer, draw, _plain, ranks, 128, micro_batches=micro_batches)
    for interrupted, slug in ((False, "silent-for-good"), (True, "silent-after-error")):
        reports = run(_tower_backward, 2, answer, *_tower(draw), 2, None, True, interrupted)
        if not all(report.started_early for report in reports):
            expected = "all-reduces that start while backward runs, as before no_sync()"
            raise Wrong(slug, expected=expected, got="none starts before backward ends")
        if interrupted and not all(report.error_came for report in reports):
            raise Wrong("error-swallowed", expected="the exception of the block", got="none")


def _calls_after_an_inner_no_sync(rank, answer, plan: _Plan) -> int:
    model = answer(plan.build(_plain), bucket_bytes=64)
    inputs = plan.batch()
    with Trace() as trace, model.no_sync():
        for _ in range(2):  # a helper that does not know that it is called inside one
            with model.no_sync():
                model(inputs).sum().backward()
            model(inputs).sum().backward()
    return trace.record().count()


@overlapping.requires(
    "no_sync() within no_sync()", failures={"exception": "nested"}, needs_earlier=True
)
def _(answer, draw):
    calls = run(_calls_after_an_inner_no_sync, 2, answer, _plan(draw))
    expect(calls, [0, 0], each="rank", what="number of calls", likely={"nested": True})


@overlapping.requires(
    "a frozen parameter is broadcast and then left alone",
    failures=dict.fromkeys(("'NoneType'", "exception"), "frozen-hook"),
)
def _(answer, draw):
    _check_start(answer, draw, frozen=True)
    likely = {"frozen-gradient": lambda local, got: _zeros_for_none(got, local)}
    _check_steps(answer, draw, _Frozen, draw.integer(2, 3), 128, likely)


@overlapping.requires("a tied parameter is averaged once")
def _(answer, draw):
    for bucket_bytes in (64, 2**20):
        ranks = draw.integer(2, 3)
        _check_steps(answer, draw, _Tied, ranks, bucket_bytes, otherwise="tied-twice")


@overlapping.requires(
    "an unused parameter keeps no gradient, and the others are averaged",
    failures={
        "'NoneType'": "unused-crash",
        "exception": "unused-crash",
        "timeout": "bucket-never-full",
    },
)
def _(answer, draw):
    def still_local(local, got):
        pairs = zip(got, local, strict=True)
        return any(same(g[name], own[name]) for g, own in pairs for name in ("last.weight",))

    likely = {
        "zeros-for-unused": lambda local, got: _zeros_for_none(got, local),
        "bucket-never-full": still_local,
    }
    _check_steps(answer, draw, _Unused, draw.integer(2, 3), 2**20, likely)


@overlapping.requires(
    "a parameter that only some ranks used is averaged with zeros for the others",
    failures=dict.fromkeys(
        ("'NoneType'", "exception", "timeout", "mismatch", "signal"), "order-differs"
    ),
    needs_earlier=True,
)
def _(answer, draw):
    def missing(local, got):
        return any(gradient is None for own in got for gradient in own.values())

    def divided_by_users(local, got):
        used = [g["sometimes.weight"] for g in local if g["sometimes.weight"] is not None]
        return same(got[-1]["sometimes.weight"], sum(used) / len(used))

    likely = {"used-elsewhere": missing, "users-only": divided_by_users}
    for bucket_bytes in (64, 2**20):
        ranks = draw.integer(3, 4)
        _check_steps(answer, draw, _Sometimes, ranks, bucket_bytes, likely, "order-differs")


# ---- 3.5 -----------------------------------------------------------------------------------------

evaluation = Exercise(
    "3.5",
    "evaluate",
    points=3,
    minutes=30,
    kind="core",
    parameters=("model", "images", "labels", "batch_size"),
    hints=[
        (
            "Which images belong to this rank? A slice with a stride deals them out without repeats; "
            "the shares then differ by at most one image."
        ),
        "Do not average averages. What can be added over the ranks, whatever their shares are?",
        (
            "Every rank counts its correct images in an integer tensor, batch by batch. One all-reduce "
            "after the loop adds the counts, also on a rank without images. Divide by the number of "
            "all images."
        ),
    ],
    misconceptions={
        "padded-duplicates": "Some images are counted twice: the shares were made equal by "
        "repeating images, as DistributedSampler does. Let the shares differ instead.",
        "fixed-two": "The images are dealt out as if to two ranks. Ask `dist.get_world_size()`.",
        "everyone-everything": "Every rank evaluates all images. The number is right and nothing "
        "is shared: each rank takes its part.",
        "images-lost": "Some images are not evaluated at all: look at the last ones.",
        "mean-of-ranks": "You average the ranks' accuracies. The ranks' shares differ in size: add "
        "the counts of correct images and divide once.",
        "mean-of-batches": "You average the batches' accuracies. The last batch may be smaller: "
        "add the counts of correct images and divide once.",
        "own-share": "Each rank returns the accuracy of its own share: add the counts over ranks.",
        "not-added": "Each rank divides its own count by the number of all images: the counts of the "
        "ranks were not added, or not waited for.",
        "divided-by-share": "The correct images of all ranks are divided by one rank's share. Divide "
        "by the number of all images.",
        "percent": "You return percent: asked is a share, from 0 to 1.",
        "errors-counted": "You count the images that the model gets wrong.",
        "count-not-share": "You return the number of correct images: divide by the number of images.",
        "one-rank-only": "Only one rank has the right number: `reduce` delivers to one rank, "
        "`all_reduce` to all.",
        "not-every-rank": "A collective is called by every rank or by none. Here a rank did not "
        "call it, and the others wait: look for an `if` or a `return` that depends on the rank.",
        "number-not-tensor": "Collectives take tensors: make one of your count, "
        "`torch.tensor(count)`, and read it with `.item()` afterwards.",
        "miscounted": "Each image went through the model once, so it is the counting that is off. An "
        "image is correct where `argmax(dim=1)` of its scores equals its label; add these up over the "
        "batches and over the ranks.",
        "empty-batch": "The model is called with a batch without images, after the last one: not every "
        "model can take that. The loop goes one step too far.",
        "uneven-gather": "The ranks' shares differ by an image, and all_gather takes tensors of one "
        "shape. Send what always has the same shape: the count of correct images.",
        "collective-per-batch": "A rank waits in a collective for ranks that have no batch left. Keep "
        "collectives out of the loop over batches.",
        "empty-rank": "A rank without images has nothing to divide by, and must take part in the "
        "collective all the same.",
        "train-mode": "The model is in training mode while it is evaluated: dropout and BatchNorm "
        "then change the result. Call `model.eval()`.",
        "mode-not-restored": "The model comes back in another mode than it had. Remember "
        "`model.training` and restore it.",
        "parts-mode-lost": "A part of the model that was in evaluation mode, as a frozen BatchNorm "
        "often is, comes back in training mode, or the other way round: `model.train()` and "
        "`model.eval()` set every part. Remember the mode of each of `model.modules()`.",
        "not-a-float": "Return a number of Python's: `.item()` takes it out of a tensor.",
        "gradients-on": "Autograd records the evaluation, which costs memory: use `torch.no_grad()`.",
        "batch-too-large": "A batch is larger than `batch_size`.",
        "uneven-shares": "One rank evaluates more than ceil(N / world_size) images.",
    },
    failures={
        "Expected parameter `tensor` of type torch.Tensor": "number-not-tensor",
        ": all_gather of ": "uneven-gather",
        "timeout": "collective-per-batch",
        "mismatch": "collective-per-batch",
    },
)


class _Scores(nn.Module):
    """A model whose scores stand in the image itself, after the image's number; keeps a diary."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []
        self.modes: set[bool] = set()
        self.recorded: set[bool] = set()
        self.part = nn.Sequential(nn.Identity())

    def forward(self, images: Tensor) -> Tensor:
        numbers = images.flatten(1)
        self.batches.append(numbers[:, 0].long().tolist())
        self.modes |= {module.training for module in self.modules()}
        self.recorded.add(torch.is_grad_enabled())
        return numbers[:, 1:]


@dataclass(frozen=True)
class _Evaluated:
    value: float
    batches: list[list[int]]  # the numbers of the images, batch by batch
    modes: set[bool]
    recorded: set[bool]
    mode_after: bool
    parts_after: list[bool]  # the modes of the model's parts

    def seen(self) -> list[int]:
        return [image for batch in self.batches for image in batch]


def _evaluated(rank, answer, images, labels, batch_size, training, *parts) -> _Evaluated:
    model = _Scores().train(training)
    for module, mode in zip(model.part.modules(), parts, strict=True):
        module.training = mode
    come_late(rank)
    value = answer(model, images.to(device()), labels.to(device()), batch_size)
    after = [module.training for module in model.part.modules()]
    return _Evaluated(value, model.batches, model.modes, model.recorded, model.training, after)


def _evaluate(answer, draw, count, ranks, batch_size, modes=(True, True, True)):
    """Returns the ranks' reports, and for each image whether the model is right about it. `modes`
    says whether the model, its part, and the part in it come in training mode."""
    classes = draw.choice([5, 7, 9])
    scores = draw.tensor(count, classes)
    numbers = torch.arange(count, dtype=torch.float32).unsqueeze(1)
    images = torch.cat([numbers, scores], dim=1).view(count, 1, 2, (classes + 1) // 2)
    # more than half, but not all: then no two mistakes give the same number on two ranks
    correct = draw.integer(count // 2 + 1, count - 1) if count > 2 else 1
    right = torch.tensor(draw.sample([i < correct for i in range(count)], count))
    labels = torch.where(right, scores.argmax(dim=1), scores.argmin(dim=1))
    return run(_evaluated, ranks, answer, images, labels, batch_size, *modes), right.tolist()


def _share(images: list[int], right: list[bool]) -> float:
    return sum(right[i] for i in images) / len(images) if images else math.nan


def _check_evaluation(answer, draw, count, ranks, batch_size) -> None:
    reports, right = _evaluate(answer, draw, count, ranks, batch_size)
    _check_seen([report.seen() for report in reports], count)
    own = [_share(report.seen(), right) for report in reports]
    batches = [[_share(batch, right) for batch in report.batches] for report in reports]
    by_batch = [sum(shares) / len(shares) if shares else math.nan for shares in batches]
    every_batch = [share for shares in batches for share in shares]
    accuracy = sum(right) / count
    got = [report.value for report in reports]
    likely = {
        "empty-rank": lambda got: any(math.isnan(value) for value in got),
        "own-share": own,
        "mean-of-ranks": [sum(own) / ranks] * ranks,
        "mean-of-batches": lambda got: any(
            same(got, [mean] * ranks)
            for mean in (sum(by_batch) / ranks, sum(every_batch) / len(every_batch))
        ),
        "not-added": [sum(right[i] for i in report.seen()) / count for report in reports],
        "count-not-share": [sum(right)] * ranks,
        "percent": [100 * accuracy] * ranks,
        "errors-counted": [1 - accuracy] * ranks,
        "divided-by-share": [sum(right) / max(1, len(report.seen())) for report in reports],
        "one-rank-only": lambda got: any(same(value, accuracy) for value in got),
        "miscounted": lambda got: all(isinstance(value, Number) for value in got),
    }
    expect(got, [accuracy] * ranks, each="rank", what="the accuracy", likely=likely)
    for report in reports:
        expect_type(report.value, (float, int), likely="not-a-float")
        sizes = [len(batch) for batch in report.batches]
        if len(sizes) > 1 and 0 in sizes:  # `split` makes a single empty batch of no images
            raise Wrong("empty-batch", expected="batches with images", got=f"batches of {sizes}")


def _check_seen(seen: list[list[int]], count: int) -> None:
    """Raises Wrong unless every image was seen once, by ranks with equal shares."""
    times = Counter(image for images in seen for image in images)
    ranks = len(seen)
    if ranks > 1 and all(set(images) == set(range(count)) for images in seen):
        raise Wrong("everyone-everything", expected="each image once", got="each on every rank")
    twice = sum(1 for n in times.values() if n > 1)
    if twice and all(own == list(range(count))[rank::2] for rank, own in enumerate(seen)):
        raise Wrong("fixed-two", expected=f"{ranks} shares", got="every second image on each rank")
    if twice:
        got = f"{sum(times.values())} evaluations, {twice} of the images more than once"
        raise Wrong("padded-duplicates", expected=f"{count} images, each once", got=got)
    if len(times) < count:
        raise Wrong("images-lost", expected=f"{count} images", got=f"{len(times)} of them")
    largest = max(map(len, seen))
    if largest > math.ceil(count / ranks):
        expected = f"at most {math.ceil(count / ranks)} of {count} images on a rank"
        raise Wrong("uneven-shares", expected=expected, got=f"{largest} on one rank")


@evaluation.requires(
    "two ranks share the images and agree on the accuracy",
    # here every rank has as many batches as the other
    failures=dict.fromkeys(("timeout", "mismatch"), "not-every-rank"),
)
def _(answer, draw):
    batch_size = draw.integer(3, 5)
    _check_evaluation(answer, draw, 2 * batch_size * draw.integer(2, 4), 2, batch_size)


@evaluation.requires("image counts that divide neither by ranks nor by batches; one rank")
def _(answer, draw):
    # one rank has an image more than the others, and with it a batch more
    ranks, batch_size = draw.integer(3, 4), draw.integer(3, 5)
    count = ranks * batch_size * draw.integer(2, 3) + 1
    _check_evaluation(answer, draw, count, ranks, batch_size)
    ranks = 7 - ranks
    _check_evaluation(answer, draw, ranks * draw.integer(3, 6) - 1, ranks, 3)
    _check_evaluation(answer, draw, draw.integer(5, 9), 1, 4)
    # more images than a count in half precision can tell apart
    _check_evaluation(answer, draw, 2 * draw.integer(2100, 2400) + 1, 1, 500)


@evaluation.requires(
    "fewer images than ranks", failures={"exception": "empty-rank", "timeout": "empty-rank"}
)
def _(answer, draw):
    images = draw.integer(2, 3)
    _check_evaluation(answer, draw, images, draw.integer(images + 1, 4), 4)


@evaluation.requires("no batch is larger than batch_size")
def _(answer, draw):
    limit = draw.integer(2, 5)
    reports, _ = _evaluate(answer, draw, draw.integer(17, 23), draw.integer(2, 3), limit)
    largest = max(len(batch) for report in reports for batch in report.batches)
    if largest > limit:
        raise Wrong("batch-too-large", expected=f"at most {limit}", got=largest)


@evaluation.requires("evaluation mode meanwhile, then the mode it had; no gradients")
def _(answer, draw):
    alike = (True, True, True), (False, False, False), (True, False, False), (False, True, True)
    for training, *parts in (*alike, (True, True, False)):
        [report], _ = _evaluate(answer, draw, draw.integer(5, 9), 1, 3, (training, *parts))
        if True in report.modes:
            raise Wrong("train-mode", expected="model.training is False", got="True")
        expect(
            report.mode_after,
            training,
            what="model.training afterwards",
            likely={"mode-not-restored": True},
        )
        expect(
            report.parts_after,
            parts,
            what="the training of the model's parts afterwards",
            likely={"parts-mode-lost": True},
        )
        if True in report.recorded:
            raise Wrong("gradients-on", expected="no autograd", got="autograd records")
