"""What 6.1 and 6.2 share: a linear layer, whole, and what each rank should hold and compute of it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from course_exercises.authoring import OwnPart, Wrong, expect, run, same
from course_exercises.authoring.ranks import (
    Sent,
    come_late,
    following,
    must_have_sent,
    must_have_waited,
)
from course_exercises.chapters.ch06.shared import (
    MORE_THAN_ITS_SHARE,
    by_block,
    check_nothing_whole,
    check_sent,
    loss_of,
    must_be_as_before,
    only_for_two,
    own_bytes,
    same_and_learning,
)
from course_utils.hardware import device

BOTH_CUTS = {
    "parameters": "Your layer's parameters are not `weight` and `bias` alone, the same on every rank. Each is an "
    "`nn.Parameter` and an attribute of the layer itself: a plain tensor is none, those of an `nn.Linear` in it "
    "are called linear.weight and linear.bias, and `full` as an attribute brings its own.",
    "more-than-its-share": MORE_THAN_ITS_SHARE,
    "matrices-only": "Your layer takes or returns inputs of some numbers of dimensions only. `nn.Linear` takes "
    "any number of them before the last, the features, none too, and keeps them: so does `nn.functional.linear`.",
    "needs-a-bias": "A layer made with `bias=False` has `full.bias` None: so has yours, and adds nothing.",
}


@dataclass(frozen=True)
class Cut:
    """The dimension in which each tensor is shared out, None where every rank has all of it; and what mistakes
    of the exercise give: of outputs, for a task, and of gradients, for a task, a name and what is expected."""

    weight: int
    bias: int | None
    x: int | None
    y: int | None
    outputs: Callable
    gradients: Callable


@dataclass(frozen=True)
class Task:
    """A whole layer and its input, what it gives, and each rank's part of all that."""

    cut: Cut
    ranks: int
    full: nn.Linear
    x: Tensor
    slope: Tensor  # the gradient of y
    y: Tensor
    x_gradient: Tensor
    beside: Tensor | None  # what comes back to x past the layer

    @property
    def bias(self) -> Tensor:
        """Zeros where there is none."""
        bias, size = self.full.bias, self.full.out_features
        return torch.zeros(size, dtype=self.y.dtype) if bias is None else bias.detach()

    def parts(self, name: str) -> list[Tensor]:
        """Of `x`, `y` or their gradients."""
        of = {"slope": "y", "x_gradient": "x"}.get(name, name)
        return by_block(getattr(self, name), getattr(self.cut, of), self.ranks)

    def weights(self) -> list[Tensor]:
        return by_block(self.full.weight.detach(), self.cut.weight, self.ranks)

    def held(self) -> list[dict[str, Tensor]]:
        """Each rank's parameters."""
        return self._by_name(lambda parameter: parameter.detach())

    def gradients(self) -> list[dict[str, Tensor]]:
        return self._by_name(lambda parameter: parameter.grad)

    def _by_name(self, value_of: Callable) -> list[dict[str, Tensor]]:
        parts = {
            name: by_block(value_of(parameter), getattr(self.cut, name), self.ranks)
            for name, parameter in self.full.named_parameters()
        }
        return [{name: blocks[r] for name, blocks in parts.items()} for r in range(self.ranks)]


def linear_task(
    draw, cut: Cut, ranks: int, leading=None, bias=True, dtype=torch.float32, beside=False
) -> Task:
    """Both dimensions divide by the ranks, into blocks of more than one feature, and differ."""
    inside, outside = (ranks * share for share in draw.sample([2, 3, 4, 5], 2))
    leading = leading or (draw.integer(2, 5),)
    torch.manual_seed(draw.seed())
    full = nn.Linear(inside, outside, bias=bias, dtype=dtype)
    x, slope = (draw.tensor(*leading, size).to(dtype) for size in (inside, outside))
    y = full(x.requires_grad_())
    (y * slope).sum().backward()
    past = draw.tensor(*x.shape) if beside else None
    return Task(cut, ranks, full, x.detach(), slope, y.detach(), x.grad, past)


# ---- what a rank's layer holds -------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    parameters: dict[str, Tensor]
    views: list[str]  # parameters that are not contiguous, or in memory larger than themselves
    shared: list[str]  # parameters in the memory of `full`'s
    full_changed: bool


def _held(rank, answer, full) -> _Held:
    given = copy.deepcopy(full).to(device())
    of_full = {p.untyped_storage().data_ptr() for p in given.parameters()}
    layer = answer(given)
    parameters = dict(layer.named_parameters())
    views = [
        name
        for name, parameter in parameters.items()
        if not parameter.is_contiguous()
        or parameter.untyped_storage().nbytes() > own_bytes(parameter)
    ]
    shared = [n for n, p in parameters.items() if p.untyped_storage().data_ptr() in of_full]
    held = {name: p.detach().clone() for name, p in parameters.items()}
    return _Held(held, views, shared, not same_and_learning(given, full))


def check_held(answer, task: Task) -> list[_Held]:
    """Compares the parameters of every rank with its blocks."""
    reports, expected = run(_held, task.ranks, answer, task.full), task.held()
    got = [report.parameters for report in reports]
    names, likely = [set(parameters) for parameters in expected], {"parameters": True}
    expect([set(g) for g in got], names, each="rank", what="the parameters", likely=likely)
    dtypes = [p.dtype for g in got for p in g.values()]
    likely = {"other-dtype": set(dtypes) != {task.y.dtype}, "other-block": True}
    expect(got, expected, each="rank", likely=likely)
    return reports


def check_memory(answer, task: Task) -> None:
    for report in run(_held, task.ranks, answer, task.full):
        must_be_as_before(report.full_changed)
        for found, how in (
            (report.views, "not contiguous, or as a view into something larger"),
            (report.shared, "in the memory of `full`'s own"),
        ):
            if found:
                expected = "contiguous parameters in memory of their own and of exactly their size"
                got = f"{' and '.join(found)}, {how}"
                raise Wrong("more-than-its-share", expected=expected, got=got)
    check_nothing_whole(answer, task.full, task.ranks)


# ---- what it computes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ran:
    y: Tensor
    x_gradient: Tensor | None
    gradients: dict[str, Tensor | None]
    has_bias: bool  # an attribute `bias`, be it None
    sent: Sent


def _ran(rank, answer, full, x, slope, x_learns, beside) -> _Ran:
    """The loss is sum(slope * y); with `beside`, x also reaches it by another way."""
    layer = answer(copy.deepcopy(full).to(device()))
    x = x.clone().to(device()).requires_grad_(x_learns)
    come_late(rank)
    with following() as sent:
        y = layer(x)
        loss = loss_of(y, slope)
        if beside is not None:
            loss = loss + (x * beside.to(device())).sum()
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return _Ran(y.detach(), x.grad, gradients, hasattr(layer, "bias"), sent)


def check_outputs(answer, task: Task, x_learns=True) -> list[_Ran]:
    own = OwnPart(task.parts("x")), OwnPart(task.parts("slope"))
    reports = run(_ran, task.ranks, answer, _fresh(task), *own, x_learns, task.beside)
    must_have_waited([report.sent.unwaited for report in reports])
    got, expected = [report.y for report in reports], task.parts("y")
    likely = {"matrices-only": any(g.dim() != task.y.dim() for g in got), **task.cut.outputs(task)}
    _expect(task, got, expected, "the output", likely)
    return reports


def _fresh(task: Task) -> nn.Linear:
    full = copy.deepcopy(task.full)
    full.zero_grad()
    return full


def check_linear(answer, task: Task) -> None:
    """Outputs and all gradients."""
    reports = check_outputs(answer, task)
    got, expected = [report.x_gradient for report in reports], task.parts("x_gradient")
    if task.beside is not None:
        expected = [gradient + task.beside for gradient in expected]
    cut_off = {"cut-from-the-graph": any(g is None for g in got)}
    likely = cut_off | task.cut.gradients(task, "x", expected)
    _expect(task, got, expected, "the gradient of x", likely)
    for name in task.held()[0]:
        got = [report.gradients[name] for report in reports]
        expected = [gradients[name] for gradients in task.gradients()]
        none = {"no-gradient": any(g is None for g in got)}
        likely = task.cut.gradients(task, name, expected) | none
        _expect(task, got, expected, f"the gradient of {name}", likely)
    if not all(report.has_bias for report in reports):
        expected, got = "an attribute `bias`, None where `full` has none", "no such attribute"
        raise Wrong("needs-a-bias", expected=expected, got=got)
    must_have_sent([report.sent for report in reports])


def _expect(task: Task, got: list, expected: list, what: str, likely: dict) -> None:
    """Compares what the ranks have, as exactly as their dtype allows."""
    tolerance = 1e-5
    if task.y.dtype == torch.float64:
        other = any(g.dtype != e.dtype for g, e in zip(got, expected, strict=True))
        likely = {"other-dtype": other, "rounded": lambda got: same(got, expected)}
        tolerance = 1e-10
    expect(got, expected, each="rank", what=what, likely=likely, tolerance=tolerance)


def check_three(answer, draw, cut: Cut) -> None:
    with only_for_two():
        check_linear(answer, linear_task(draw, cut, 3))


def check_one(answer, draw, cut: Cut) -> None:
    """One rank, and inputs of three dimensions."""
    check_linear(answer, linear_task(draw, cut, 1))
    leading = draw.integer(2, 3), draw.integer(3, 6)
    check_linear(answer, linear_task(draw, cut, draw.choice([2, 3]), leading))


def check_double(answer, draw, cut: Cut) -> None:
    """Everything that a layer holds and gives has the dtype of `full`."""
    for bias in (True, False):
        task = linear_task(draw, cut, 2, bias=bias, dtype=torch.float64)
        check_held(answer, task)
        check_linear(answer, task)


def check_linear_sent(answer, task: Task, sizes: tuple[int, int]) -> None:
    own = OwnPart(task.parts("x")), OwnPart(task.parts("slope"))
    check_sent(answer, task.ranks, _fresh(task), *own, sizes)
