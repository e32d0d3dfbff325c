"""The checks of chapter 06: linear layers cut in two ways, attention by heads, a cross-entropy over
a shared vocabulary, a norm on a part of the sequence, clipping by the global norm.

Functions whose first argument is `rank` run on real ranks and only report what they saw; the
requirements, in the notebook's kernel, judge it. Every rank gets the whole layer with the same
values, and so the kernel knows what each of them should hold and compute.
"""

import copy
import gc
import itertools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from course_utils.checks import Exercise, OwnPart, Wrong, expect, expect_type, run, same
from course_utils.checks.ranks import come_late
from course_utils.hardware import device
from course_utils.models import Attention
from course_utils.trace import Record, Trace, kept_for_backward

# ---- what several exercises need -----------------------------------------------------------------


def _blocks(tensor: Tensor | None, dim: int | None, ranks: int) -> list[Tensor | None]:
    """What each rank has of a tensor that is cut in `dim`, or whole on every rank."""
    if tensor is None or dim is None:
        return [tensor] * ranks
    return list(tensor.chunk(ranks, dim))


NOT_EVERY_RANK = (
    "Some ranks make a call that others never make, and so nobody can go on. A collective call in a "
    "branch that only some ranks take, such as `if dist.get_rank() == 0`, is the usual reason."
)
HANGS = {"timeout": "not-every-rank", "mismatch": "not-every-rank"}
TWO_RANKS = (
    "It works on two ranks and on no other number of them: look for a 2, a half, or an `else` that "
    "means rank 1, where the world size belongs."
)


@contextmanager
def _only_for_two() -> Iterator[None]:
    """Two ranks were right: what nothing else explains depends on their number."""
    try:
        yield
    except Wrong as wrong:
        slug = wrong.misconception or "two-ranks"
        raise Wrong(slug, expected=wrong.expected, got=wrong.got) from None


def _own_bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _loss_of(y: Tensor, slope: Tensor) -> Tensor:
    """A loss for which `slope` is the gradient of y. An output of another shape, which the
    requirement will see, gets any loss."""
    return (y * slope.to(device())).sum() if y.shape == slope.shape else y.sum()


def _refusal(rank, answer, full) -> tuple[str, str] | None:
    """The exception, and its message, with which an answer refuses a layer; None where it does not."""
    try:
        answer(copy.deepcopy(full).to(device()))
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        return type(error).__name__, str(error)
    return None


REFUSAL = {
    "no-error": "Sizes that do not divide are accepted without a word, and the ranks' shares are "
    "unequal, or something is lost. Compare the remainder with zero and raise a ValueError.",
    "other-error": "Sizes that do not divide end in another exception than a ValueError. An assert "
    "disappears under `python -O`, and a message from deep inside names the wrong cause.",
    "error-without-sizes": "The ValueError does not say what does not divide by what. Name both "
    "numbers in its message: who reads it wants to know which to change.",
}


REFUSES = {"ValueError": "refuses-what-divides"}


def _sizes_that_do_not_divide(draw) -> tuple[int, int]:
    """A number of ranks, and a size that leaves any remainder."""
    ranks = draw.choice([2, 3, 4])
    return ranks, ranks * draw.integer(2, 6) + draw.integer(1, ranks - 1)


def _check_refusal(answer, full: nn.Module, ranks: int, size: int) -> None:
    """Raises Wrong unless every rank refuses with a ValueError that names the size and the ranks."""
    for refusal in run(_refusal, ranks, answer, full):
        expected = f"a ValueError that names {size} and {ranks}"
        if refusal is None:
            raise Wrong("no-error", expected=expected, got="no exception")
        name, message = refusal
        if name != "ValueError":
            raise Wrong("other-error", expected=expected, got=name)
        if not {str(size), str(ranks)} <= set(re.findall(r"\d+", message)):
            raise Wrong("error-without-sizes", expected=expected, got=f"{name}: {message}")


WHOLE_KEPT_ALIVE = (
    "A whole matrix is still in memory after your layer was made and `full` is gone: as an attribute, "
    "a detached tensor, in a list, or as a copy. Keep clones of this rank's blocks only."
)


def _kept_alive(rank, answer, full) -> int:
    """The bytes of the largest tensor, no parameter of the layer, that lives on when the layer is
    made and the `full` that it was made from is gone."""
    before = _living()
    given = copy.deepcopy(full).to(device())
    layer = answer(given)
    del given
    gc.collect()
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    new = {key: kept for key, kept in _living().items() if key not in before and key not in own}
    return max((kept.nbytes() for kept in new.values()), default=0)


def _living() -> dict[int, torch.UntypedStorage]:
    """The memory of all living tensors of real numbers, by its address. A storage in this dict keeps
    its memory, so that no later one can be taken for it."""
    found = (t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter, nn.Buffer))
    storages = [t.untyped_storage() for t in found if t.is_floating_point()]
    return {storage.data_ptr(): storage for storage in storages}


def _check_nothing_whole(answer, full: nn.Module, ranks: int) -> None:
    """Raises Wrong where a rank keeps a tensor as large as the smallest matrix of `full`."""
    whole = min(_own_bytes(p) for p in full.parameters() if p.dim() > 1)
    kept = max(run(_kept_alive, ranks, answer, full))
    if kept >= whole:
        expected = "the rank's own parameters, and nothing of `full`"
        raise Wrong("whole-kept-alive", expected=expected, got=f"{kept} bytes more")


# ---- 6.1 and 6.2: a linear layer cut by its outputs, or by its inputs ----------------------------


@dataclass(frozen=True)
class _Cut:
    """The dimension in which each tensor is shared out; None where every rank has all of it."""

    weight: int
    bias: int | None
    x: int | None
    y: int | None


COLUMN = _Cut(weight=0, bias=0, x=None, y=-1)
ROW = _Cut(weight=1, bias=None, x=-1, y=None)


@dataclass(frozen=True)
class _Held:
    """What a rank's layer holds."""

    parameters: dict[str, Tensor]
    views: list[str]  # parameters that are not contiguous, or in memory larger than themselves
    shared: list[str]  # parameters in the memory of `full`'s
    full_changed: bool


@dataclass(frozen=True)
class _Ran:
    """What a rank's layer computed, and the bytes that it sent."""

    y: Tensor
    x_gradient: Tensor | None
    gradients: dict[str, Tensor | None]
    forward: Record
    backward: Record
    has_bias: bool  # an attribute `bias`, be it None


def _held(rank, answer, full) -> _Held:
    given = copy.deepcopy(full).to(device())
    of_full = {p.untyped_storage().data_ptr() for p in given.parameters()}
    layer = answer(given)
    parameters = dict(layer.named_parameters())
    views = [
        name
        for name, parameter in parameters.items()
        if not parameter.is_contiguous()
        or parameter.untyped_storage().nbytes() > _own_bytes(parameter)
    ]
    shared = [n for n, p in parameters.items() if p.untyped_storage().data_ptr() in of_full]
    held = {name: p.detach().clone() for name, p in parameters.items()}
    changed = not same(list(given.parameters()), list(full.parameters()))
    return _Held(held, views, shared, changed)


def _ran(rank, answer, full, x, slope, x_learns, beside) -> _Ran:
    """The loss is sum(slope * y); with `beside`, x also reaches it by another way."""
    layer = answer(copy.deepcopy(full).to(device()))
    x = x.clone().to(device()).requires_grad_(x_learns)
    with Trace() as forward:
        come_late(rank)
        y = layer(x)
    loss = _loss_of(y, slope)
    if beside is not None:
        loss = loss + (x * beside.to(device())).sum()
    with Trace() as backward:
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    calls = forward.record(), backward.record()
    return _Ran(y.detach(), x.grad, gradients, *calls, hasattr(layer, "bias"))


@dataclass(frozen=True)
class _LinearTask:
    """A whole layer and its input, what it gives, and each rank's part of all that."""

    cut: _Cut
    ranks: int
    full: nn.Linear
    x: Tensor
    slope: Tensor  # the gradient of y
    y: Tensor
    x_gradient: Tensor

    def parts(self, name: str) -> list[Tensor]:
        return _blocks(getattr(self, name), getattr(self.cut, name), self.ranks)

    def slopes(self) -> list[Tensor]:
        return _blocks(self.slope, self.cut.y, self.ranks)

    def x_gradients(self) -> list[Tensor]:
        return _blocks(self.x_gradient, self.cut.x, self.ranks)

    def weights(self) -> list[Tensor]:
        return _blocks(self.full.weight.detach(), self.cut.weight, self.ranks)

    def held(self) -> list[dict[str, Tensor]]:
        """Each rank's parameters."""
        return self._by_name(self.full.weight.detach(), self.full.bias)

    def gradients(self) -> list[dict[str, Tensor]]:
        bias = None if self.full.bias is None else self.full.bias.grad
        return self._by_name(self.full.weight.grad, bias)

    def misnamed(self) -> dict[str, Callable]:
        """What is wrong with the names of the ranks' parameters."""
        wanted = set(self.held()[0])
        return {
            "other-names": lambda got: all(g and not set(g) & wanted for g in got),
            "not-parameters": lambda got: any(not set(g) >= wanted for g in got),
            "keeps-the-whole": lambda got: any(len(g) > len(wanted) for g in got),
        }

    def _by_name(self, weight: Tensor, bias: Tensor | None) -> list[dict[str, Tensor]]:
        weights = _blocks(weight, self.cut.weight, self.ranks)
        if bias is None:
            return [{"weight": block} for block in weights]
        biases = _blocks(bias.detach(), self.cut.bias, self.ranks)
        return [{"weight": w, "bias": b} for w, b in zip(weights, biases, strict=True)]


def _linear_task(
    draw, cut: _Cut, ranks: int, leading=None, bias=True, dtype=torch.float32
) -> _LinearTask:
    """Both dimensions divide by the ranks, into blocks of more than one feature, and differ."""
    inside, outside = (ranks * share for share in draw.sample([2, 3, 4, 5], 2))
    leading = leading or (draw.integer(2, 5),)
    torch.manual_seed(draw.seed())
    full = nn.Linear(inside, outside, bias=bias, dtype=dtype)
    x, slope = (draw.tensor(*leading, size).to(dtype) for size in (inside, outside))
    y = full(x.requires_grad_())
    (y * slope).sum().backward()
    return _LinearTask(cut, ranks, full, x.detach(), slope, y.detach(), x.grad)


def _run_linear(answer, task: _LinearTask, x_learns=True, beside=None) -> list[_Ran]:
    full = copy.deepcopy(task.full)
    full.zero_grad()
    own = OwnPart(task.parts("x")), OwnPart(task.slopes())
    return run(_ran, task.ranks, answer, full, *own, x_learns, beside)


def _check_held(answer, task: _LinearTask) -> None:
    """Compares the parameters of every rank with its blocks."""
    weight, bias, n = task.full.weight.detach(), task.full.bias, task.ranks
    dim = task.cut.weight

    def weights_are(blocks: list[Tensor]) -> Callable:
        return lambda got: all(same(g["weight"], b) for g, b in zip(got, blocks, strict=True))

    strided = [weight.transpose(0, dim)[r::n].transpose(0, dim) for r in range(n)]
    reports = run(_held, n, answer, task.full)
    got = [report.parameters for report in reports]
    mistakes = {
        **task.misnamed(),
        "wrong-dimension": weights_are(list(weight.chunk(n, 1 - dim))),
        "everyone-everything": weights_are([weight] * n),
        "rank-0s-block": weights_are([task.weights()[0]] * n),
        "strided": weights_are(strided),
        "bias-whole": lambda got: all(same(g["bias"], bias) for g in got),
        "bias-cut": lambda got: same([g["bias"] for g in got], list(bias.chunk(n))),
        "another-ranks-block": lambda got: all(
            any(same(g["weight"], block) for block in task.weights()) for g in got
        ),
        "other-values": lambda got: all(
            g["weight"].shape == b.shape for g, b in zip(got, task.weights(), strict=True)
        ),
    }
    expect(got, task.held(), each="rank", likely=_possible(task.cut, mistakes))


def _check_memory(answer, task: _LinearTask) -> None:
    for report in run(_held, task.ranks, answer, task.full):
        if report.full_changed:
            raise Wrong(
                "full-changed", expected="`full` as before", got="another weight or bias in it"
            )
        if report.views:
            raise Wrong(
                "a-view",
                expected="contiguous parameters in memory of exactly their size",
                got=f"{' and '.join(report.views)} as a view into the whole",
            )
        if report.shared:
            got = f"{' and '.join(report.shared)} in that of `full`"
            raise Wrong("shares-memory", expected="memory of its own", got=got)
    _check_nothing_whole(answer, task.full, task.ranks)


def _check_outputs(reports: list[_Ran], task: _LinearTask) -> None:
    weight, bias, n = task.full.weight.detach(), task.full.bias, task.ranks
    zero = torch.zeros(weight.shape[0])
    bias = zero if bias is None else bias.detach()
    partial = [x @ w.T for x, w in zip(task.parts("x"), task.weights(), strict=True)]
    mistakes = {
        "output-gathered": [task.y] * n,
        "outputs-summed": [sum(_blocks(task.y, task.cut.y, n))] * n,
        "pair-swapped": _blocks(n * (task.y - bias) + bias, task.cut.y, n),
        "bias-per-rank": [task.y + (n - 1) * bias] * n,
        "bias-lost": _blocks(task.y - bias, task.cut.y, n),
        "partial-output": lambda got: same(got, partial) or same(got, [p + bias for p in partial]),
        "mean-not-sum": [(task.y - bias) / n + bias] * n,
        "inputs-summed": _through_summed_inputs(task) if task.cut is ROW else False,
        "one-rank-only": lambda got: any(same(g, task.y) for g in got),
        "matrices-only": lambda got: any(g.dim() != task.y.dim() for g in got),
        "rounded": lambda got: same(got, task.parts("y"), tolerance=0.01),
    }
    got, likely = [report.y for report in reports], _possible(task.cut, mistakes)
    expect(got, task.parts("y"), each="rank", what="the output", likely=likely)


def _through_summed_inputs(task: _LinearTask) -> list[Tensor]:
    """The ranks' outputs, where a row cut adds up its inputs in place of its products."""
    bias = 0 if task.full.bias is None else task.full.bias.detach()
    return [sum(task.parts("x")) @ w.T + bias for w in task.weights()]


def _check_gradients(reports: list[_Ran], task: _LinearTask, beside=None) -> None:
    n = task.ranks
    names = [set(report.gradients) for report in reports]
    expect(names, [set(task.held()[0])] * n, each="rank", likely=task.misnamed())
    own = [s @ w for s, w in zip(task.slopes(), task.weights(), strict=True)]
    of_summed = [sum(task.slopes()) @ w for w in task.weights()]
    expected = task.x_gradients()
    if beside is not None:
        expected = [gradient + beside for gradient in expected]
        of_summed = [gradient + beside for gradient in of_summed]
    mistakes = {
        "cuts-the-graph": lambda got: any(g is None for g in got),
        "residual-summed": beside is not None and [task.x_gradient + n * beside] * n,
        "input-gradient-local": own,
        "sums-behind-the-layer": of_summed,
        "other-features-summed": [sum(own)] * n,
        "input-gradient-mean": [g / n for g in expected],
        "summed-again": [n * g for g in expected],
        "rounded": lambda got: same(got, expected, tolerance=0.01),
    }
    got, likely = [report.x_gradient for report in reports], _possible(task.cut, mistakes)
    expect(got, expected, each="rank", what="the gradient of x", likely=likely)
    for name in task.held()[0]:
        expect(
            [report.gradients[name] for report in reports],
            [gradients[name] for gradients in task.gradients()],
            each="rank",
            what=f"the gradient of {name}",
            likely={
                **({"bias-gradient": name == "bias"} if task.cut is ROW else {}),
                "no-gradient": lambda got: any(gradient is None for gradient in got),
            },
        )


def _possible(cut: _Cut, mistakes: dict) -> dict:
    """Those of the mistakes that the exercise about this cut can name."""
    known = (column if cut is COLUMN else row).misconceptions
    return {slug: mistake for slug, mistake in mistakes.items() if slug in known}


def _check_linear(answer, task: _LinearTask) -> None:
    reports = _run_linear(answer, task)
    _check_outputs(reports, task)
    _check_gradients(reports, task)


def _check_without_bias(answer, task: _LinearTask) -> None:
    reports = _run_linear(answer, task)
    _check_outputs(reports, task)
    _check_gradients(reports, task)
    if not all(report.has_bias for report in reports):
        raise Wrong(
            "needs-a-bias", expected="an attribute `bias` that is None", got="no such attribute"
        )


def _check_double(answer, draw, cut: _Cut) -> None:
    """Everything that a layer holds and gives has the dtype of `full`."""
    for bias in (True, False):
        _check_dtypes(answer, _linear_task(draw, cut, 2, bias=bias, dtype=torch.float64))


def _check_dtypes(answer, task: _LinearTask) -> None:
    held = [report.parameters for report in run(_held, task.ranks, answer, task.full)]
    reports = _run_linear(answer, task)
    found = {
        "the parameters": [p for parameters in held for p in parameters.values()],
        "the output": [report.y for report in reports],
        "the gradient of x": [report.x_gradient for report in reports],
    }
    for what, tensors in found.items():
        dtypes = {tensor.dtype for tensor in tensors}
        likely = {"other-dtype": True}
        expect(dtypes, {torch.float64}, what=f"the dtype of {what}", likely=likely)
    _check_outputs(reports, task)
    _check_gradients(reports, task)


def _check_three_and_one(answer, draw, cut: _Cut) -> None:
    leading = draw.integer(2, 3), draw.integer(3, 6)
    with _only_for_two():
        _check_linear(answer, _linear_task(draw, cut, 3, leading))
        _check_linear(answer, _linear_task(draw, cut, 1))


def _check_sent(forward: Record, backward: Record, sizes: tuple[int, int]) -> None:
    """Raises Wrong where more than this many bytes are handed over each way, or in several calls."""
    for way, record, size in zip(("forward", "backward"), (forward, backward), sizes, strict=True):
        if record.sent() > size:
            got = f"{record.sent()} bytes"
            raise Wrong("sends-too-much", expected=f"{size} bytes {way}", got=got)
        if record.count() > 1:
            raise Wrong("in-pieces", expected=f"one call {way}", got=f"{record.count()} calls")


IN_PIECES = (
    "The sum is sent in several calls. Each of them waits for the slowest rank and costs its own "
    "start: hand the whole tensor over at once."
)


BOTH_CUTS = {
    "other-names": "Your layer's parameters have other names. Asked are `self.weight` and `self.bias`, "
    "each an `nn.Parameter`; those of an `nn.Linear` kept as `self.linear` are called "
    "linear.weight and linear.bias.",
    "not-parameters": "The layer lacks a parameter that it should have. Only an `nn.Parameter` that "
    "is an attribute of the module is one: a plain tensor is never trained.",
    "keeps-the-whole": "The layer has more parameters than its shard: did you keep `full` as an "
    "attribute? Then every rank still holds the whole matrix.",
    "whole-kept-alive": WHOLE_KEPT_ALIVE,
    "wrong-dimension": "The weight is cut in the other dimension. `nn.Linear` stores it as (out, in): "
    "dimension 0 counts the output features, dimension 1 the input features.",
    "everyone-everything": "Every rank holds the whole weight: nothing is shared.",
    "rank-0s-block": "All ranks hold the same block. Which one is yours depends on "
    "`dist.get_rank()`.",
    "another-ranks-block": "Each rank has a block, and not its own: of n ranks, rank r has the r-th block, "
    "counted from 0.",
    "no-gradient": "A parameter has no gradient after backward: is it frozen, or used by `detach()` or under "
    "`torch.no_grad()`?",
    "strided": "Each rank has every n-th feature. Asked is a block of consecutive ones, as `chunk` "
    "gives it: the next layer relies on the order.",
    "other-values": "The shapes are right and the values are not those of `full`. A new weight begins "
    "with random numbers: copy your block into it.",
    "a-view": "The shard is a view: it is not contiguous, or it keeps the memory of the whole matrix "
    "alive. `clone()` gives it memory of its own.",
    "shares-memory": "A parameter lies in the memory of `full`'s own, so that a step of your layer "
    "changes `full`. `detach()` shares it, and `contiguous()` copies nothing where there is "
    "nothing to move, as with one rank: `clone()` always copies.",
    "full-changed": "Your `__init__` changes `full` itself, which belongs to the caller: cut a "
    "copy of its weight, and make your own `nn.Parameter` of it.",
    "other-dtype": "`full` is in double precision, and yours does not stay so. What `torch.empty` or "
    "`torch.zeros` makes is float32 unless you say `dtype=`, as is what `float()` returns: take "
    "the dtype from what you were given.",
    "rounded": "The values are nearly right: something on the way is rounded to half precision.",
    "sends-too-much": "More bytes are sent than needed. The right result does not show that: the "
    "check counts the calls forward and backward.",
    "in-pieces": IN_PIECES,
    "not-every-rank": NOT_EVERY_RANK,
    "two-ranks": TWO_RANKS,
    "matrices-only": "The layer takes matrices only, or returns one. `nn.Linear` takes any number of "
    "dimensions before the last, the features, and keeps them: so does `nn.functional.linear`.",
    **REFUSAL,
    "refuses-what-divides": "Sizes that divide evenly are refused: the error belongs where the remainder "
    "is not zero.",
}

column = Exercise(
    "6.1",
    "ColumnParallelLinear",
    points=2,
    minutes=25,
    kind="first",
    parameters=("full",),
    hints=[
        (
            "Forward is an ordinary linear layer with fewer output features. Which dimension of "
            "`full.weight` counts them, and which block of it is this rank's?"
        ),
        (
            "Backward, each rank gets the part of x's gradient that its own features give. The "
            "conjugate pair has a function that does nothing forward and adds up backward."
        ),
        (
            "In `__init__`, compare sizes first; cut weight and bias with `chunk`, and `clone` the "
            "block, so that it is no view. In `forward`, send x through the function that sums "
            "gradients, then through `nn.functional.linear`. Because the function gives a new "
            "tensor, a residual connection around the layer is left alone."
        ),
    ],
    misconceptions={
        **BOTH_CUTS,
        "bias-whole": "Every rank holds the whole bias. A column cut shares the output features out, "
        "and each of them has its own bias.",
        "output-gathered": "You return the outputs of all ranks. Asked is this rank's block: the "
        "row cut that follows needs no more.",
        "outputs-summed": "You add up the outputs of the ranks. They are different output features: "
        "nothing is to be added forward.",
        "pair-swapped": "The input is multiplied by the number of ranks: you sum it over the ranks in "
        "forward. Every rank has the whole input already. It is its gradient that is summed.",
        "bias-lost": "The bias is missing from the output.",
        "sums-behind-the-layer": "You sum the gradient of the output. The ranks' outputs are "
        "different features. Sum the gradient of the input: send x through the function, before the "
        "linear layer.",
        "needs-a-bias": "A layer made with `bias=False` has `full.bias` None: so has yours.",
        "input-gradient-local": "Each rank has only its own part of x's gradient. Every output "
        "feature depends on every input feature: add the ranks' parts up in backward.",
        "input-gradient-mean": "The gradient of x is divided by the number of ranks. Its parts are "
        "to be added: no rank has seen other data.",
        "residual-summed": "You sum the whole gradient of x, also the part that comes past your layer "
        "and is complete on every rank already. Sum only what comes through the layer.",
        "needs-input-gradient": "An input that needs no gradient, such as the data themselves, makes "
        "your layer fail: a hook can only sit on a tensor that requires one.",
    },
    failures=HANGS,
)


@column.requires("each of two ranks holds its block of the output features", failures=REFUSES)
def _(answer, draw):
    _check_held(answer, _linear_task(draw, COLUMN, 2))


@column.requires("each rank computes its block of the outputs")
def _(answer, draw):
    task = _linear_task(draw, COLUMN, 2)
    _check_outputs(_run_linear(answer, task), task)


@column.requires("every rank has the whole gradient of the input")
def _(answer, draw):
    _check_linear(answer, _linear_task(draw, COLUMN, 2))


@column.requires(
    "three ranks and one; inputs (N, T, in)",
    failures={"must be a matrix": "matrices-only", "exception": "two-ranks"},
    needs_earlier=True,
)
def _(answer, draw):
    _check_three_and_one(answer, draw, COLUMN)


@column.requires("a layer without bias", needs_earlier=True, failures={"exception": "needs-a-bias"})
def _(answer, draw):
    _check_without_bias(answer, _linear_task(draw, COLUMN, draw.choice([2, 3]), bias=False))


@column.requires(
    "a layer in double precision", needs_earlier=True, failures={"exception": "other-dtype"}
)
def _(answer, draw):
    _check_double(answer, draw, COLUMN)


@column.requires("what goes past the layer is not summed")
def _(answer, draw):
    task = _linear_task(draw, COLUMN, draw.choice([2, 3, 4]))
    beside = draw.tensor(*task.x.shape)
    _check_gradients(_run_linear(answer, task, beside=beside), task, beside)


@column.requires(
    "an input that needs no gradient", failures={"register a hook": "needs-input-gradient"}
)
def _(answer, draw):
    task = _linear_task(draw, COLUMN, draw.choice([2, 3]))
    _check_outputs(_run_linear(answer, task, x_learns=False), task)


@column.requires("the shards are contiguous, in memory of exactly their size")
def _(answer, draw):
    for ranks in (draw.choice([2, 3, 4]), 1):
        _check_memory(answer, _linear_task(draw, COLUMN, ranks))


@column.requires("nothing is sent forward, the size of the input backward")
def _(answer, draw):
    task = _linear_task(draw, COLUMN, draw.choice([2, 3, 4]))
    for report in _run_linear(answer, task):
        _check_sent(report.forward, report.backward, (0, _own_bytes(task.x)))


@column.requires("a ValueError with both numbers where the sizes do not divide")
def _(answer, draw):
    ranks, size = _sizes_that_do_not_divide(draw)
    _check_refusal(answer, nn.Linear(2 * ranks, size), ranks, size)


row = Exercise(
    "6.2",
    "RowParallelLinear",
    points=2,
    minutes=25,
    kind="core",
    parameters=("full",),
    hints=[
        (
            "Each rank multiplies its block of input features with the weights for them. What do "
            "the ranks' results have to do with the whole layer's?"
        ),
        (
            "Partial sums are added over the ranks, and every rank needs the result. The bias is not "
            "a partial sum: at which moment is there one output to add it to?"
        ),
        (
            "Cut the weight in the dimension of the input features and clone the block; keep the "
            "whole bias. In forward: the linear product without bias, the function of the conjugate "
            "pair that adds up forward, then the bias. Its backward hands the gradient through."
        ),
    ],
    misconceptions={
        **BOTH_CUTS,
        "bias-cut": "The bias is cut. It belongs to the output features, and a row cut leaves each of "
        "them on every rank: every rank holds the whole bias.",
        "takes-the-whole-input": "The layer expects the whole input, or cuts what it gets once more. "
        "A rank is handed its own block of the input features.",
        "partial-output": "Each rank returns its own partial sum: the sum over the ranks is missing.",
        "bias-per-rank": "The bias is added once per rank: add it after the sum over the ranks, "
        "not before.",
        "bias-lost": "The bias is missing from the output.",
        "mean-not-sum": "The partial sums are averaged: they are to be added.",
        "inputs-summed": "You add up the ranks' inputs. They are different features: multiply each "
        "with its own weights first, and add up the products.",
        "input-gradient-mean": "The gradients are divided by the number of ranks. Backward hands the "
        "output's gradient through as it is: every rank has all of it.",
        "one-rank-only": "Only one rank has the output. `reduce` delivers to one rank, `all_reduce` "
        "to all of them.",
        "cuts-the-graph": "No gradient gets through your layer: the sum over the ranks was made where "
        "autograd does not see it. Use an autograd function that hands the gradient through.",
        "summed-again": "The gradients are world_size times too large: backward sums over the ranks "
        "once more. Every rank has the whole gradient of the output already.",
        "other-features-summed": "You sum the gradient of x over the ranks. Each rank has other input "
        "features: what it finds for them is complete.",
        "needs-a-bias": "A layer made with `bias=False` has `full.bias` None: so has yours.",
        "bias-gradient": "The output is right, and the bias's gradient is not. A copy that only one "
        "rank uses, or that every rank uses by a fraction, gets another gradient, and the copies "
        "drift apart. Let every rank add the whole bias after the sum.",
        "outputs-joined": "The ranks' results are put one after the other. Each is a term of *all* output "
        "features: they are added.",
    },
    failures={
        **HANGS,
        "must match the size of tensor b": "outputs-joined",
        "shapes cannot be multiplied": "takes-the-whole-input",
        "does not require grad": "cuts-the-graph",
    },
)


@row.requires(
    "each of two ranks holds its block of the input features, and the whole bias", failures=REFUSES
)
def _(answer, draw):
    _check_held(answer, _linear_task(draw, ROW, 2))


@row.requires("every rank has the whole output")
def _(answer, draw):
    task = _linear_task(draw, ROW, 2)
    _check_outputs(_run_linear(answer, task), task)


@row.requires("the gradients are those of the whole layer")
def _(answer, draw):
    _check_linear(answer, _linear_task(draw, ROW, 2))


@row.requires(
    "three ranks and one; inputs (N, T, in/n)",
    failures={
        "must be a matrix": "matrices-only",
        **dict.fromkeys(("exception", *row.failures), "two-ranks"),
        **HANGS,
    },
    needs_earlier=True,
)
def _(answer, draw):
    _check_three_and_one(answer, draw, ROW)


@row.requires("a layer without bias", needs_earlier=True, failures={"exception": "needs-a-bias"})
def _(answer, draw):
    _check_without_bias(answer, _linear_task(draw, ROW, draw.choice([2, 3]), bias=False))


@row.requires(
    "a layer in double precision", needs_earlier=True, failures={"exception": "other-dtype"}
)
def _(answer, draw):
    _check_double(answer, draw, ROW)


@row.requires("the shards are contiguous, in memory of exactly their size")
def _(answer, draw):
    for ranks in (draw.choice([2, 3, 4]), 1):
        _check_memory(answer, _linear_task(draw, ROW, ranks))


@row.requires("the size of the output is sent forward, nothing backward")
def _(answer, draw):
    task = _linear_task(draw, ROW, draw.choice([2, 3, 4]))
    for report in _run_linear(answer, task):
        _check_sent(report.forward, report.backward, (_own_bytes(task.y), 0))


@row.requires("a ValueError with both numbers where the sizes do not divide")
def _(answer, draw):
    ranks, size = _sizes_that_do_not_divide(draw)
    _check_refusal(answer, nn.Linear(size, 2 * ranks), ranks, size)


# ---- 6.3 -----------------------------------------------------------------------------------------

attention = Exercise(
    "6.3",
    "HeadParallelAttention",
    points=3,
    minutes=50,
    kind="stretch",
    parameters=("full",),
    hints=[
        (
            "Write down the rows of `full.qkv.weight` for 4 heads: first all queries, then all keys, "
            "then all values. Which rows does rank 1 of 2 need?"
        ),
        (
            "Three blocks of rows, one from each part. If you put the rows of rank 0 first, then "
            "those of rank 1, a plain column cut does the rest. The output projection meets the "
            "heads in the order of its input features: a plain row cut."
        ),
        (
            "View the row numbers as (3, ranks, features of a rank), swap the first two dimensions, "
            "flatten: the order of rows in which every rank's are together. Build a linear layer "
            "with the rows in this order and cut it by columns. Inside a rank, the attention is as "
            "in `full`, with fewer heads of the same width."
        ),
    ],
    misconceptions={
        "cut-across-the-parts": "The rows of `full.qkv` are cut into equal runs, so that one rank has "
        "mostly queries and another mostly values. Cut each of the three parts, and give a rank its "
        "block of every one.",
        "bias-across-the-parts": "The weight of `full.qkv` is cut by heads, its bias is not: it too "
        "holds the queries', then the keys', then the values' numbers. Cut it as the weight.",
        "parts-inside-heads": "The rank's rows are its queries, then its keys, then its values. You "
        "read them as if each head had its three parts together: split off the parts first.",
        "parts-swapped": "Queries, keys and values have changed places: the rows of `full.qkv` are those of "
        "all queries, then all keys, then all values.",
        "other-heads": "The queries, keys and values are those of other heads than the output projection "
        "expects. Rank r of n has the r-th of n blocks of consecutive heads, in both.",
        "heads-in-another-order": "The results are right, and the heads are not those asked: rank r of n "
        "has the r-th of n blocks of consecutive heads. Who puts the ranks' parts together, for a "
        "checkpoint, would get the heads in another order.",
        "other-bias-rows": "The weight of `full.qkv` is cut rightly, and its bias is not: with a bias of "
        "zero your result is right. Take the same rows of the bias as of the weight.",
        "heads-laid-out": "With one head on each rank your result is right, with several it is not: they "
        "are cut or viewed in another order than theirs. Within queries, keys and values a head's "
        "features lie together: (heads, head_width), and only then `transpose(1, 2)`.",
        "whole-kept-alive": WHOLE_KEPT_ALIVE,
        "global-heads": "You view with the numbers of the whole layer. A rank has full.heads / n heads, "
        "and so width / n features after attention; only the width of a head is as before.",
        "heads-mixed": "After attention the dimensions are (N, heads, T, head_width). Put the heads beside "
        "their features, with `transpose(1, 2)`, before you flatten: a reshape alone mixes tokens.",
        "attends-over-heads": "Heads attend to heads: attention runs over the last dimension but one, and "
        "that has to be T. Hand over (N, heads, T, head_width).",
        "output-not-cut-to-match": "The output projection does not fit what the rank's heads give. They "
        "are some of its *input* features: cut dimension 1 of `full.out.weight`, in the order of "
        "the heads.",
        "wrong-scale": "The scores are scaled by another width than the head's. A head is as wide on a "
        "rank as in the whole layer: only their number is smaller.",
        "not-causal": "Tokens attend to later ones: `full` is causal.",
        "mask-shifted": "The mask is one place off: a token attends to itself and to those before "
        "it, no more and no less.",
        "partial-output": "Each rank returns what its own heads give: the sum over the ranks is "
        "missing.",
        "bias-per-rank": "The bias of `full.out` is added once per rank: add it after the sum over "
        "the ranks.",
        "cuts-the-graph": "No gradient gets through: the sum over the ranks was made where autograd "
        "does not see it.",
        "input-gradient-local": "Each rank has the part of x's gradient that its own heads give: the "
        "parts must be added in backward.",
        "summed-again": "The gradient of x is world_size times too large: backward sums over the "
        "ranks once too often.",
        "wrong-after-a-step": "Output and input gradient are right, but a step of SGD leads "
        "elsewhere: a parameter's gradient is wrong. Look at the bias of the output projection: "
        "every rank adds all of it, after the sum.",
        "full-changed": "Your `__init__` changes `full` itself, which belongs to the caller: regroup the "
        "rows of a copy.",
        "holds-too-much": "A rank holds more than its heads' share of the parameters: does it keep a "
        "whole matrix, or a view into one?",
        "sends-too-much": "More bytes are sent than one all-reduce of x's size each way. Queries, keys "
        "and values come from the same x: sum its gradient once.",
        "in-pieces": IN_PIECES,
        "not-every-rank": NOT_EVERY_RANK,
        "two-ranks": TWO_RANKS,
        **REFUSAL,
    },
    failures={
        **HANGS,
        "does not require grad": "cuts-the-graph",
        "is invalid for input of size": "global-heads",
        "don't multiply up to the size": "global-heads",
        "shapes cannot be multiplied": "output-not-cut-to-match",
    },
)

LEARNING_RATE = 0.1


@dataclass(frozen=True)
class _Attended:
    y: Tensor
    x_gradient: Tensor | None
    y_after: Tensor  # after a step of SGD
    held: int  # bytes of parameters
    full_changed: bool
    forward: Record
    backward: Record


def _step(model: nn.Module) -> None:
    """A step of SGD by hand: it does not mind a parameter without gradient."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= LEARNING_RATE * parameter.grad


def _attended(rank, answer, full, x, slope) -> _Attended:
    given = copy.deepcopy(full).to(device())
    model = answer(given)
    changed = not same(list(given.parameters()), list(full.parameters()))
    x = x.clone().to(device()).requires_grad_()
    with Trace() as forward:
        y = model(x)
    with Trace() as backward:
        _loss_of(y, slope).backward()
    _step(model)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    held = sum(storage.nbytes() for storage in storages.values())
    calls = forward.record(), backward.record()
    return _Attended(y.detach(), x.grad, model(x).detach(), held, changed, *calls)


def _by_head(qkv: Tensor, heads: int, causal=True, scale=None) -> Tensor:
    """Each head's results (N, heads, T, head_width), from qkv (N, T, 3 * width)."""
    n, t, _ = qkv.shape
    q, k, v = qkv.view(n, t, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def _attend(qkv: Tensor, heads: int, causal=True, scale=None) -> Tensor:
    """All heads' results (N, T, width), before the output projection."""
    return _by_head(qkv, heads, causal, scale).transpose(1, 2).flatten(2)


def _attend_over_heads(qkv: Tensor, heads: int, ranks: int, causal: bool) -> Tensor:
    """(N, T, width), where the heads of a rank take the place of the tokens."""
    n, t, _ = qkv.shape
    parts = qkv.view(n, t, 3, ranks, heads // ranks, -1).permute(2, 0, 1, 3, 4, 5)
    return nn.functional.scaled_dot_product_attention(*parts, is_causal=causal).flatten(2)


def _rows_of_ranks(full: Attention, ranks: int) -> Tensor:
    """(rank, its rows): queries, keys and values of its heads."""
    rows = torch.arange(full.qkv.out_features).view(3, ranks, -1)
    return rows.transpose(0, 1).flatten(1)


def _dealt_out(full: Attention, ranks: int) -> Tensor:
    """As `_rows_of_ranks`, where rank r has every n-th head."""
    rows = torch.arange(full.qkv.out_features).view(3, -1, ranks, full.head_width)
    return rows.movedim(2, 0).flatten(1)


def _in_place_of(wanted: Tensor, taken: Tensor) -> Tensor:
    """The rows of the whole layer, if each rank takes rows `taken` where `wanted` were right."""
    rows = torch.empty(wanted.numel(), dtype=torch.int64)
    rows[wanted.flatten()] = taken.flatten()
    return rows


@torch.no_grad()
def _mistaken_attention(full: Attention, x: Tensor, ranks: int) -> dict[str, list[Tensor]]:
    """What each mistake makes of the ranks' outputs."""
    qkv, heads, width = full.qkv(x), full.heads, full.head_width * full.heads
    wanted = _rows_of_ranks(full, ranks)
    runs = torch.arange(3 * width).view(ranks, -1)
    by_head = wanted.view(ranks, heads // ranks, 3, -1).transpose(1, 2)
    by_rank = _by_head(qkv, heads).chunk(ranks, dim=1)
    others = [wanted[:1].expand(ranks, -1), _dealt_out(full, ranks)]
    bias = full.qkv.bias
    bias_in_runs = qkv - bias + bias[_in_place_of(wanted, runs)]
    results = {
        "cut-across-the-parts": [_attend(qkv[..., _in_place_of(wanted, runs)], heads)],
        "bias-across-the-parts": [_attend(bias_in_runs, heads)],
        "parts-inside-heads": [_attend(qkv[..., _in_place_of(wanted, by_head)], heads)],
        "parts-swapped": [
            _attend(torch.cat([qkv.chunk(3, dim=-1)[part] for part in order], dim=-1), heads)
            for order in list(itertools.permutations(range(3)))[1:]
        ],
        "other-heads": [_attend(qkv[..., _in_place_of(wanted, rows)], heads) for rows in others],
        "heads-mixed": [torch.cat([y.reshape(*x.shape[:2], -1) for y in by_rank], dim=-1)],
        "attends-over-heads": [
            _attend_over_heads(qkv, heads, ranks, causal) for causal in (True, False)
        ],
        "not-causal": [_attend(qkv, heads, causal=False)],
        "wrong-scale": [
            _attend(qkv, heads, scale=scale)
            for scale in (1 / math.sqrt(width), 1 / math.sqrt(width / ranks), 1.0)
        ],
    }
    return {slug: [full.out(y) for y in given] for slug, given in results.items()}


@torch.no_grad()
def _partial_outputs(full: Attention, x: Tensor, ranks: int) -> list[Tensor]:
    parts = _attend(full.qkv(x), full.heads).chunk(ranks, dim=-1)
    return [y @ w.T for y, w in zip(parts, full.out.weight.chunk(ranks, dim=1), strict=True)]


@dataclass(frozen=True)
class _AttentionTask:
    ranks: int
    full: Attention
    x: Tensor
    slope: Tensor
    y: Tensor
    x_gradient: Tensor
    y_after: Tensor


def _attention_task(draw, ranks: int, heads: int) -> _AttentionTask:
    torch.manual_seed(draw.seed())
    full = Attention(width=heads * draw.choice([3, 4, 5, 6]), heads=heads)
    x = 2 * draw.tensor(draw.integer(1, 3), draw.integer(4, 7), full.qkv.in_features)
    slope = draw.tensor(*x.shape)
    trained, leaf = copy.deepcopy(full), x.clone().requires_grad_()
    y = trained(leaf)
    (y * slope).sum().backward()
    _step(trained)
    return _AttentionTask(ranks, full, x, slope, y.detach(), leaf.grad, trained(x).detach())


def _numbers_held(rank, answer, full) -> Tensor:
    """All numbers of this rank's parameters, in whatever order and shapes."""
    model = answer(copy.deepcopy(full).to(device()))
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


def _check_own_heads(answer, task: _AttentionTask) -> None:
    """Raises Wrong where most of a rank's numbers are those of another rank's heads. Which layers and
    names they stand in is the answer's own affair."""
    weights = task.full.qkv.weight.detach()
    held = run(_numbers_held, task.ranks, answer, task.full)
    for rank, (numbers, rows) in enumerate(zip(held, _rows_of_ranks(task.full, task.ranks))):
        own = torch.isin(weights[rows], numbers).float().mean().item()
        others = torch.isin(weights, numbers).float().mean().item() * task.ranks - own
        if own < 0.9 and others > 0.1:  # a few numbers of single precision may be equal by chance
            raise Wrong(
                "heads-in-another-order",
                expected=f"block {rank} of {task.ranks} of the heads on rank {rank}",
                got="heads of other blocks",
            )


def _run_attention(answer, task: _AttentionTask) -> list[_Attended]:
    return run(_attended, task.ranks, answer, task.full, task.x, task.slope)


def _manages(answer, task: _AttentionTask) -> bool:
    """Whether every rank has the right output for another task, which tells where a mistake is."""
    try:
        return same([r.y for r in _run_attention(answer, task)], [task.y] * task.ranks)
    except Exception:  # noqa: BLE001 - whatever fails here, it does not manage
        return False


@torch.no_grad()
def _without_qkv_bias(task: _AttentionTask) -> _AttentionTask:
    full = copy.deepcopy(task.full)
    full.qkv.bias.zero_()
    return replace(task, full=full, y=full(task.x))


@torch.no_grad()
def _with_a_head_each(task: _AttentionTask) -> _AttentionTask:
    full = copy.deepcopy(task.full)
    full.heads, full.head_width = task.ranks, full.out.in_features // task.ranks
    return replace(task, full=full, y=full(task.x))


@torch.no_grad()
def _with_equal_columns(task: _AttentionTask) -> _AttentionTask:
    """A task whose output projection does not tell its input features apart."""
    full = copy.deepcopy(task.full)
    full.out.weight[:] = full.out.weight.mean(1, keepdim=True)
    return replace(task, full=full, y=full(task.x))


@torch.no_grad()
def _with_a_shifted_mask(full: Attention, x: Tensor) -> list[Tensor]:
    """The outputs where a token does not see itself, or sees one too many; the first token's and the
    last one's depend on how that is written."""
    qkv = full.qkv(x)
    q, k, v = qkv.view(*x.shape[:2], 3, full.heads, -1).permute(2, 0, 3, 1, 4)
    all_pairs = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    heads = [
        nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=all_pairs.tril(by))
        for by in (-1, 1)
    ]
    return [full.out(y.transpose(1, 2).flatten(2)) for y in heads]


def _check_attention(answer, task: _AttentionTask) -> None:
    n, bias = task.ranks, task.full.out.bias.detach()
    partial = _partial_outputs(task.full, task.x, n)
    mistaken = _mistaken_attention(task.full, task.x, n)

    def gives(outputs: list[Tensor]) -> Callable:
        return lambda got: any(same(got, [output] * n) for output in outputs)

    likely = {
        **{slug: gives(outputs) for slug, outputs in mistaken.items()},
        "partial-output": lambda got: same(got, partial) or same(got, [p + bias for p in partial]),
        "bias-per-rank": [task.y + (n - 1) * bias] * n,
        "other-bias-rows": lambda got: _manages(answer, _without_qkv_bias(task)),
        "heads-laid-out": lambda got: _manages(answer, _with_a_head_each(task)),
        "mask-shifted": lambda got: any(
            same([g[:, 1:-1] for g in got], [output[:, 1:-1]] * n)
            for output in _with_a_shifted_mask(task.full, task.x)
        ),
        "output-not-cut-to-match": lambda got: _manages(answer, _with_equal_columns(task)),
    }
    reports = _run_attention(answer, task)
    got = [report.y for report in reports]
    expect(got, [task.y] * n, each="rank", what="the output", likely=likely)
    if any(report.full_changed for report in reports):
        raise Wrong("full-changed", expected="`full` as before", got="other values in it")
    likely = {
        "cuts-the-graph": lambda got: any(g is None for g in got),
        "summed-again": [n * task.x_gradient] * n,
        "input-gradient-local": lambda got: same(sum(got), task.x_gradient, tolerance=1e-4),
    }
    got = [report.x_gradient for report in reports]
    expect(got, [task.x_gradient] * n, each="rank", what="the gradient of x", likely=likely)
    expect(
        [report.y_after for report in reports],
        [task.y_after] * n,
        each="rank",
        what="the output after a step of SGD",
        likely={"wrong-after-a-step": True},
        tolerance=1e-4,
    )


@attention.requires("two ranks with two heads each give the whole attention")
def _(answer, draw):
    _check_attention(answer, _attention_task(draw, 2, 4))


@attention.requires(
    "three ranks and one; one head to each rank",
    failures=dict.fromkeys(("exception", *attention.failures), "two-ranks") | HANGS,
    needs_earlier=True,
)
def _(answer, draw):
    alone = draw.choice([2, 4])
    with _only_for_two():
        _check_attention(answer, _attention_task(draw, 3, draw.choice([6, 9])))
        _check_attention(answer, _attention_task(draw, 1, draw.integer(2, 4)))
        _check_attention(answer, _attention_task(draw, alone, alone))


@attention.requires("each rank holds the parameters of its heads alone", needs_earlier=True)
def _(answer, draw):
    ranks = draw.choice([2, 3, 4])
    task = _attention_task(draw, ranks, ranks * draw.choice([2, 3]))
    qkv, out = task.full.qkv, task.full.out
    cut = sum(map(_own_bytes, (qkv.weight, qkv.bias, out.weight)))
    limit = cut // task.ranks + _own_bytes(out.bias)
    held = max(report.held for report in _run_attention(answer, task))
    if held > limit:
        raise Wrong("holds-too-much", expected=f"{limit} bytes on each rank", got=f"{held} bytes")
    _check_own_heads(answer, task)
    _check_nothing_whole(answer, task.full, ranks)


@attention.requires("one all-reduce of the input's size each way", needs_earlier=True)
def _(answer, draw):
    ranks = draw.choice([2, 3, 4])
    task = _attention_task(draw, ranks, ranks * draw.choice([1, 2]))
    size = _own_bytes(task.x)
    for report in _run_attention(answer, task):
        _check_sent(report.forward, report.backward, (size, size))


@attention.requires("12 heads on 8 ranks: a ValueError with both numbers")
def _(answer, draw):
    # the width divides: only the heads do not
    _check_refusal(answer, Attention(width=12 * draw.choice([2, 4, 6]), heads=12), 8, 12)


# ---- 6.4 -----------------------------------------------------------------------------------------

cross_entropy = Exercise(
    "6.4",
    "vocabulary_parallel_cross_entropy",
    points=3,
    minutes=45,
    kind="stretch",
    parameters=("logits", "targets"),
    hints=[
        (
            "For one token, the loss needs the largest logit, the sum of the exponentials and the "
            "target's logit. Each is one number: what does a rank know of each of them?"
        ),
        (
            "A maximum over all ranks, then two sums over all ranks. The rank that has the target's "
            "class gives its logit, every other one gives zero. Autograd must see the two sums, and "
            "not the maximum."
        ),
        (
            "Find the row's maximum without gradient, all-reduce it with `ReduceOp.MAX`, subtract it. "
            "Sum the exponentials over the rank's classes, then over ranks with the function that "
            "adds up forward. Subtract the rank's first class from the targets, clamp them, gather, "
            "and put zero where the target is not here. Log of one sum minus the other; the mean."
        ),
    ],
    misconceptions={
        "targets-not-shifted": "A target is a class of the whole vocabulary. On this rank, class "
        "r * V/n stands in column 0: subtract it, and see to the targets that are elsewhere.",
        "target-not-masked": "Ranks that do not have the target's class contribute another logit "
        "for it: theirs must count as zero.",
        "edge-classes": "A rank takes the first class of the next one for its own, or its own first class "
        "for another's: it has classes r * V/n to (r + 1) * V/n - 1, both included.",
        "own-classes-only": "The sum of the exponentials is over this rank's classes only: the sum "
        "over the ranks is missing. `SumBackward` would sum gradients, not these numbers.",
        "target-not-summed": "Only the rank that has the target's class subtracts its logit: the others "
        "need that number too.",
        "log-before-sum": "You add up logarithms. Add the sums of the exponentials over the ranks, then "
        "take the logarithm of the total.",
        "target-not-lowered": "The largest logit is subtracted in the exponentials and not from the "
        "target's logit: it cancels only if it is subtracted in both places.",
        "local-max": "Each rank subtracts its own largest logit, and then the exponentials of "
        "different ranks do not fit together. Subtract the largest of all ranks.",
        "sum-not-mean": "You return the sum over the tokens: asked is the mean.",
        "one-rank-only": "Only one rank has the loss: every rank needs it for its backward.",
        "no-tensor": "You return a Python number, for example by `.item()`: the loss has to be a tensor, "
        "from which backward can start.",
        "max-has-gradient": "The largest logit has a gradient. It cancels in the loss, but autograd on one "
        "rank sees only a part of that: take it from `logits.detach()`.",
        "cuts-the-graph": "Some gradient does not get through: a sum over the ranks was made where "
        "autograd does not see it.",
        "summed-again": "The gradient is world_size times too large: backward sums over the ranks, "
        "though every rank comes to the same loss.",
        "target-gradient-lost": "The gradient is the softmax alone. At the target's class, 1 is to be "
        "subtracted: has the target's logit lost its gradient?",
        "total-gradient-lost": "Only the target's logit has a gradient: the sum of the exponentials has "
        "lost its own.",
        "overflow": "Logits of ten thousands give no finite loss: subtract the row's largest logit "
        "before you take the exponential. `all_reduce` adds, unless you ask for `ReduceOp.MAX`.",
        "cut-off": "Large logits give a finite loss, and a wrong one: you cut them off, by `clamp` or the "
        "like. Subtracting the row's largest logit changes no loss and leaves nothing to cut.",
        "one-max-for-all": "The exponentials of some tokens add up to 0: you subtract a number "
        "that is much larger than all logits of their row. Each token has its own largest logit: "
        "`amax(dim=1)`.",
        "log-of-zero": "A class that is much less likely than another has a probability that rounds to "
        "0, and log(0) is minus infinity. Take the logarithm of the sum only, and subtract the "
        "target's logit.",
        "padding-counted": "A token with the target -100 has an effect on the loss or on a gradient: it is "
        "no class, on no rank, and has no column. Leave these tokens out of the mean.",
        "divided-by-all": "The padding is not in the sum, but in the number of tokens by which you "
        "divide: divide by the number of those that count.",
        "target-left-out": "The target's logit has no effect on the loss. Shifted by the largest "
        "one it is at most 0: a maximum with the other ranks' zeros is 0. Sum over the ranks.",
        "target-averaged": "The target's logit is divided by the number of ranks: only one rank "
        "has it, and the others add zero.",
        "class-0-left-out": "Tokens with the target 0 are left out. Class 0 is one like any other: "
        "only -100 marks padding.",
        "own-tokens-only": "A rank gives a gradient only to tokens whose class it has. Every "
        "token's sum has a term from every rank.",
        "upstream-ignored": "Your backward takes the loss for the end of the graph: what comes "
        "back to it is 1 only if nothing follows. Multiply by the gradient that your `backward` is "
        "handed.",
        "changes-the-targets": "The targets that were handed in have changed: work on a new tensor, as "
        "`targets.clamp(min=0)` or `torch.where` give it.",
        "gathers-the-logits": "More than four numbers a token are handed over: the logits must stay "
        "where they are.",
        "changes-the-logits": "The logits that were handed in have changed: work on a new tensor.",
        "not-every-rank": "A rank leaves a sum out, for instance because it has no token's class, and the "
        "others wait for it. Every rank makes every call, with zeros where it has nothing.",
        "two-ranks": TWO_RANKS,
    },
    failures={
        **HANGS,
        "out of bounds": "targets-not-shifted",
        "does not require grad": "cuts-the-graph",
    },
)


PADDING = -100  # the target of a token that does not count


@dataclass(frozen=True)
class _Loss:
    value: Tensor
    gradient: Tensor | None
    sent: int  # numbers
    logits_changed: bool
    targets_changed: bool


def _lost(rank, answer, own, targets, factor=1.0) -> _Loss:
    """The gradient is that of `factor` times the loss."""
    leaf = own.clone().to(device()).requires_grad_()
    logits, given = leaf * 1.0, targets.clone().to(device())
    with Trace() as trace:
        come_late(rank)
        value = answer(logits, given)
        if torch.is_tensor(value) and value.requires_grad:
            (value * factor).backward()
    changed = not torch.equal(logits, own.to(device())), not torch.equal(given.cpu(), targets)
    value = value.detach() if torch.is_tensor(value) else value
    sent = sum(call.elements for call in trace.record().calls if call.sends)
    return _Loss(value, leaf.grad, sent, *changed)


@dataclass(frozen=True)
class _LossTask:
    """Logits of the whole vocabulary, and what PyTorch's own cross-entropy makes of them."""

    logits: Tensor
    targets: Tensor
    value: Tensor
    gradient: Tensor

    def parts(self, ranks: int) -> list[Tensor]:
        return list(self.logits.chunk(ranks, dim=1))


def _loss_task(draw, logits: Tensor, ranks: int, padding=()) -> _LossTask:
    """Targets fall on every rank, on its first class, its last and others, in random order; those of
    the tokens `padding` do not count."""
    share = logits.shape[1] // ranks
    edges = [r * share + column for column in (0, share - 1) for r in range(ranks)]
    others = [draw.integer(0, logits.shape[1] - 1) for _ in range(len(logits))]
    targets = torch.tensor(draw.sample((edges + others)[: len(logits)], len(logits)))
    targets[list(padding)] = PADDING
    leaf = logits.clone().requires_grad_()
    value = nn.functional.cross_entropy(leaf, targets)
    value.backward()
    return _LossTask(logits, targets, value.detach(), leaf.grad)


def _mistaken_losses(task: _LossTask, ranks: int) -> dict[str, list[list[Tensor]]]:
    """What each mistake makes of the ranks' losses, in the ways in which it can be written."""
    z, targets, parts = task.logits, task.targets, task.parts(ranks)
    share = z.shape[1] // ranks
    total, highest = z.logsumexp(1), z.amax(1)
    at_target = z.gather(1, targets.unsqueeze(1)).squeeze(1)
    firsts = [rank * share for rank in range(ranks)]

    def picked(columns: list[Tensor]) -> list[Tensor]:
        return [p.gather(1, c.unsqueeze(1)).squeeze(1) for p, c in zip(parts, columns, strict=True)]

    unmasked = [
        sum(picked([(targets - first).clamp(0, share - 1) for first in firsts])),
        sum(picked([targets % share] * ranks)),
    ]
    not_masked = [total - given for given in unmasked]
    not_masked += [total - given + (ranks - 1) * highest for given in unmasked]
    edges = []
    for start, end in (
        (1, 0),
        (-1, 0),
        (0, 1),
        (0, -1),
    ):  # one class too few or too many, at one end
        taken = [(targets >= f + start) & (targets < f + share + end) for f in firsts]
        columns = [(targets - first).clamp(0, share - 1) for first in firsts]
        logit = [torch.where(t, p, 0.0) for t, p in zip(taken, picked(columns), strict=True)]
        count = sum(t.float() for t in taken)
        edges += [total - sum(logit), total - highest - (sum(logit) - count * highest)]
    own_highest = torch.stack([part.amax(1) for part in parts])
    mixed = sum((p - m.unsqueeze(1)).exp().sum(1) for p, m in zip(parts, own_highest, strict=True))
    shifted_target = at_target - own_highest.gather(0, (targets // share).unsqueeze(0)).squeeze(0)
    local = mixed.log() - shifted_target
    own = [part.logsumexp(1) - at_target for part in parts]
    lowered = [(part - highest.unsqueeze(1)).logsumexp(1) for part in parts]
    has_it = [targets // share == rank for rank in range(ranks)]
    own_target = [torch.where(has, at_target - highest, 0.0) for has in has_it]
    return {
        "sum-not-mean": [[task.value * len(z)] * ranks],
        "target-not-masked": [[loss.mean()] * ranks for loss in not_masked],
        "edge-classes": [[loss.mean()] * ranks for loss in edges],
        "own-classes-only": [
            [loss.mean() for loss in own],
            [sum(torch.where(h, loss, 0.0) for h, loss in zip(has_it, own, strict=True)).mean()]
            * ranks,
            [(a - b).mean() for a, b in zip(lowered, own_target, strict=True)],
        ],
        "target-not-summed": [[(total - highest - given).mean() for given in own_target]],
        "log-before-sum": [[(sum(lowered) - at_target + highest).mean()] * ranks],
        "target-not-lowered": [[task.value - highest.mean()] * ranks],
        "target-left-out": [[(total - highest).mean()] * ranks],
        "target-averaged": [
            [(total - at_target / ranks).mean()] * ranks,
            [(total - highest - (at_target - highest) / ranks).mean()] * ranks,
        ],
        "class-0-left-out": [[(total - at_target)[targets > 0].mean()] * ranks],
        "local-max": [
            [local.mean()] * ranks,
            [(mixed.log() + m - at_target).mean() for m in own_highest],
        ],
    }


def _check_loss(answer, draw, tokens: int, classes: int, ranks: int) -> None:
    task = _loss_task(draw, draw.tensor(tokens, classes), ranks)
    reports = run(_lost, ranks, answer, OwnPart(task.parts(ranks)), task.targets)
    for report in reports:
        likely = None if report.value is None else "no-tensor"
        expect_type(report.value, Tensor, likely=likely)
    mistaken = _mistaken_losses(task, ranks)

    def gives(losses: list[list[Tensor]]) -> Callable:
        return lambda got: any(same(got, given) for given in losses)

    likely = {slug: gives(losses) for slug, losses in mistaken.items()}
    likely["one-rank-only"] = lambda got: any(same(g, task.value) for g in got)
    got = [report.value for report in reports]
    expect(got, [task.value] * ranks, each="rank", what="the loss", likely=likely)
    softmax = task.logits.softmax(1) / tokens
    expected = list(task.gradient.chunk(ranks, dim=1))
    likely = {
        "cuts-the-graph": lambda got: any(g is None for g in got),
        "summed-again": [ranks * g for g in expected],
        "target-gradient-lost": list(softmax.chunk(ranks, dim=1)),
        "total-gradient-lost": list((task.gradient - softmax).chunk(ranks, dim=1)),
        "own-tokens-only": lambda got: ranks > 1 and _only_own_tokens(task, got),
        "max-has-gradient": lambda got: (
            same(got, _through_the_maximum(task, expected)) or not _all_finite(got)
        ),  # not finite where the maximum is changed in place
    }
    got = [report.gradient for report in reports]
    expect(got, expected, each="rank", what="the gradient of the logits", likely=likely)


def _only_own_tokens(task: _LossTask, gradients: list[Tensor]) -> bool:
    """Whether no rank has a gradient for a token whose class another rank has."""
    has_it = task.targets // (task.logits.shape[1] // len(gradients))
    return not any(bool(g[has_it != rank].any()) for rank, g in enumerate(gradients))


def _all_finite(tensors: list[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _through_the_maximum(task: _LossTask, gradients: list[Tensor]) -> list[Tensor]:
    """The gradients where each rank's own largest logit has one too."""
    wrong = []
    for part, gradient in zip(task.parts(len(gradients)), gradients, strict=True):
        largest = nn.functional.one_hot(part.argmax(1), part.shape[1])
        wrong.append(gradient - largest * gradient.sum(1, keepdim=True))
    return wrong


@cross_entropy.requires("two ranks agree on the loss, and each has its logits' gradient")
def _(answer, draw):
    _check_loss(answer, draw, draw.integer(5, 8), 2 * draw.integer(4, 7), 2)


@cross_entropy.requires(
    "three ranks and one; fewer tokens than ranks",
    failures={"exception": "two-ranks"},
    needs_earlier=True,
)
def _(answer, draw):
    many = draw.choice([3, 4])
    with _only_for_two():
        _check_loss(answer, draw, draw.integer(6, 9), 3 * draw.integer(3, 6), 3)
        _check_loss(answer, draw, draw.integer(3, 5), draw.integer(4, 7), 1)
        _check_loss(answer, draw, draw.integer(1, 2), many * draw.integer(2, 4), many)


def _check_large(answer, draw, offset: float, scale: float, slug: str) -> None:
    ranks = draw.choice([2, 3])
    tokens, classes = draw.integer(6, 8), ranks * draw.integer(4, 6)
    task = _loss_task(draw, scale * draw.tensor(tokens, classes) + offset, ranks)
    reports = run(_lost, ranks, answer, OwnPart(task.parts(ranks)), task.targets)
    likely = {
        "one-max-for-all": lambda got: scale > 1 and any(value == -math.inf for value in got),
        slug: lambda got: not all(math.isfinite(value) for value in got),
        "cut-off": True,
    }
    got = [report.value for report in reports]
    # Near ten thousand, float32 itself rounds to a thousandth.
    expect(got, [task.value] * ranks, each="rank", what="the loss", likely=likely, tolerance=2e-3)
    likely = {slug: lambda got: not _all_finite(got), "cut-off": True}
    got, expected = [report.gradient for report in reports], task.gradient.chunk(ranks, dim=1)
    what = "the gradient of the logits"
    expect(got, list(expected), each="rank", what=what, likely=likely, tolerance=2e-3)


@cross_entropy.requires("logits of ten thousands, and minus ten thousands")
def _(answer, draw):
    for offset in (1e4, -1e4):
        _check_large(answer, draw, offset, 1.0, "overflow")


@cross_entropy.requires("classes that are far from likely")
def _(answer, draw):
    _check_large(answer, draw, 0.0, 1e4, "log-of-zero")


@cross_entropy.requires(
    "tokens with the target -100 do not count",
    failures=dict.fromkeys(("out of bounds", "exception"), "padding-counted"),
    needs_earlier=True,
)
def _(answer, draw):
    tokens, ranks = draw.integer(5, 8), draw.choice([2, 3])
    padding = draw.sample(range(tokens), 2)
    task = _loss_task(draw, draw.tensor(tokens, 4 * ranks), ranks, padding)
    reports = run(_lost, ranks, answer, OwnPart(task.parts(ranks)), task.targets)
    likely = {
        "divided-by-all": [task.value * (tokens - len(padding)) / tokens] * ranks,
        "padding-counted": True,
    }
    got, expected = [report.value for report in reports], [task.value] * ranks
    expect(got, expected, each="rank", what="the loss", likely=likely)
    got, expected = [report.gradient for report in reports], task.gradient.chunk(ranks, dim=1)
    what = "the gradient of the logits"
    expect(got, list(expected), each="rank", what=what, likely={"padding-counted": True})


@cross_entropy.requires("at most four numbers a token are handed over", needs_earlier=True)
def _(answer, draw):
    tokens, ranks = draw.integer(3, 6), draw.choice([2, 3, 4])
    task = _loss_task(draw, draw.tensor(tokens, 40 * ranks), ranks)
    limit = 4 * tokens
    reports = run(_lost, ranks, answer, OwnPart(task.parts(ranks)), task.targets)
    sent = max(report.sent for report in reports)
    if sent > limit:
        raise Wrong("gathers-the-logits", expected=f"at most {limit} numbers", got=f"{sent}")


@cross_entropy.requires("the logits and the targets stay as they are")
def _(answer, draw):
    ranks, tokens = draw.choice([2, 3]), draw.integer(3, 5)
    padding = [draw.integer(0, tokens - 1)]
    task = _loss_task(draw, draw.tensor(tokens, 4 * ranks), ranks, padding)
    reports = run(_lost, ranks, answer, OwnPart(task.parts(ranks)), task.targets)
    if any(report.logits_changed for report in reports):
        raise Wrong("changes-the-logits", expected="the logits as before", got="other values")
    if any(report.targets_changed for report in reports):
        raise Wrong("changes-the-targets", expected="the targets as before", got="other values")


@cross_entropy.requires("the loss is one term of a sum", needs_earlier=True)
def _(answer, draw):
    ranks, factor = draw.choice([2, 3]), draw.number(0.2, 0.6)
    task = _loss_task(draw, draw.tensor(draw.integer(3, 5), 4 * ranks), ranks)
    reports = run(_lost, ranks, answer, OwnPart(task.parts(ranks)), task.targets, factor)
    gradients = task.gradient.chunk(ranks, dim=1)
    expect(
        [report.gradient for report in reports],
        [factor * gradient for gradient in gradients],
        each="rank",
        what="the gradient of the logits",
        likely={"upstream-ignored": list(gradients)},
    )


# ---- 6.5 -----------------------------------------------------------------------------------------

sequence_norm = Exercise(
    "6.5",
    "SequenceParallelNorm",
    points=2,
    minutes=30,
    kind="core",
    parameters=("norm",),
    hints=[
        (
            "A LayerNorm looks at one token at a time, so that the forward pass is easy. Then follow "
            "two gradients backward: that of the tokens, and that of the norm's weight."
        ),
        (
            "What comes back to the gathered sequence is, on each rank, a part of the sum: the reverse "
            "of gathering is to add up and to keep one's own stretch. The norm's weight has seen a "
            "rank's own tokens: its gradient, too, is a sum over ranks."
        ),
        (
            "Send the norm's weight and bias through the function that does nothing forward and adds "
            "up backward, and use the results in `nn.functional.layer_norm` on the rank's own tokens. "
            "Then gather along the sequence, with the function whose backward is a reduce-scatter."
        ),
    ],
    misconceptions={
        "norm-not-used": "The output is not scaled and shifted: use the weight and the bias of `norm`. A "
        "new LayerNorm begins with ones and zeros.",
        "other-eps": "The output is that of a norm with another `eps`: hand on `norm.eps`.",
        "pair-swapped": "The output is multiplied by the number of ranks: you sum the norm's parameters "
        "over the ranks in forward. It is their gradients that are summed.",
        "sums-twice": "The gradient of x is summed once more. The all-gather's backward adds up the "
        "ranks' parts and keeps this rank's tokens: nobody else has a gradient for them.",
        "own-formula": "The output is nearly that of `norm`. If you write the formula yourself: "
        "LayerNorm's variance is the mean of the squares, divided by the width and not by one "
        "less, and `eps` is added to it under the root.",
        "norm-copied": "`self.norm` is a copy of `norm`. Keep `norm` itself: an optimizer that was "
        "made before holds its parameters, and would train the ones that nobody uses.",
        "parameters-differ": "The module's parameters are not those of `self.norm` alone.",
        "not-gathered": "You return this rank's tokens only: the column cut that follows needs the "
        "whole sequence.",
        "gathered-along-batch": "The parts are put one after the other along the batch: the sequence "
        "is dimension 1.",
        "cuts-the-graph": "No gradient gets back through the all-gather: `dist.all_gather` fills new "
        "tensors, of which autograd knows nothing.",
        "slice-backward": "Backward hands each rank its own stretch of its own gradient. The other "
        "ranks' gradients for these tokens are lost: add them up, as a reduce-scatter does.",
        "mean-backward": "The gradient of x is divided by the number of ranks: its parts are to be "
        "added.",
        "parameter-gradients-local": "The gradients of the norm's parameters come from this rank's "
        "tokens only: the copies would drift apart. Sum them over the ranks.",
        "parameter-gradients-mean": "The gradients of the norm's parameters are divided by the number "
        "of ranks. Each rank has seen other tokens of the same loss: add them.",
        "summed-again": "The gradients of two backward passes do not add up: the second one sums over "
        "the ranks what the first has summed already. Sum each new gradient, not `.grad`.",
        "frozen-norm": "A frozen norm makes your module fail, or gives it a gradient: a hook can only "
        "sit on a tensor that requires one.",
        "norms-the-whole": "Autograd keeps the whole sequence: you gather first and normalise "
        "everything on every rank. Normalise the rank's own tokens, then gather.",
        "not-every-rank": NOT_EVERY_RANK,
        "two-ranks": TWO_RANKS,
    },
    failures={**HANGS, "does not require grad": "cuts-the-graph"},
)


@dataclass(frozen=True)
class _Normed:
    names: list[str]
    y: Tensor
    x_gradient: Tensor | None
    gradients: dict[str, Tensor | None]
    kept: int  # bytes that autograd keeps
    own_norm: bool  # are its parameters those of the norm that was handed in?


def _normed(rank, answer, norm, own, slope, passes) -> _Normed:
    given = copy.deepcopy(norm).to(device())
    model = answer(given)
    own_norm = {id(p) for p in model.parameters()} == {id(p) for p in given.parameters()}
    x = own.clone().to(device()).requires_grad_()
    for _ in range(passes):
        with kept_for_backward(model) as kept:
            y = model(x)
        _loss_of(y, slope).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return _Normed(list(gradients), y.detach(), x.grad, gradients, kept.bytes, own_norm)


@dataclass(frozen=True)
class _NormTask:
    """A norm, the whole sequence, and for each rank the gradient that comes back to it."""

    norm: nn.LayerNorm
    x: Tensor
    slopes: list[Tensor]
    y: Tensor

    def parts(self) -> list[Tensor]:
        return list(self.x.chunk(len(self.slopes), dim=1))

    def gradients(self, slope: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The gradients of `tokens` and of the parameters, where `slope` comes back."""
        norm, x = copy.deepcopy(self.norm), tokens.clone().requires_grad_()
        (norm(x) * slope).sum().backward()
        return x.grad, {f"norm.{name}": p.grad for name, p in norm.named_parameters()}


def _norm_task(draw, ranks: int, share: int | None = None, frozen: bool = False) -> _NormTask:
    width, share = draw.integer(4, 7), share or draw.integer(2, 4)
    norm = nn.LayerNorm(width, eps=0.1)
    norm.weight.data, norm.bias.data = draw.tensor(width), draw.tensor(width)
    norm.requires_grad_(not frozen)
    x = draw.tensor(draw.integer(2, 3), ranks * share, width)
    return _NormTask(norm, x, [draw.tensor(*x.shape) for _ in range(ranks)], norm(x).detach())


def _with_eps(norm: nn.LayerNorm, eps: float) -> nn.LayerNorm:
    other = copy.deepcopy(norm)
    other.eps = eps
    return other


@torch.no_grad()
def _other_formulas(task: _NormTask) -> list[Tensor]:
    """The whole sequence by norms whose variance or `eps` is another one's."""
    x, norm = task.x, task.norm
    centred, variance = x - x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    roots = [
        (x.var(-1, keepdim=True) + norm.eps).sqrt(),
        x.std(-1, keepdim=True) + norm.eps,
        variance.sqrt() + norm.eps,
    ]
    return [centred / root * norm.weight + norm.bias for root in roots]


def _check_norm(answer, task: _NormTask, passes: int = 1) -> list[_Normed]:
    ranks, parts = len(task.slopes), task.parts()
    own = OwnPart(parts), OwnPart(task.slopes)
    reports = run(_normed, ranks, answer, task.norm, *own, passes)
    names = ["norm.weight", "norm.bias"]
    likely = {"parameters-differ": True}
    expect([sorted(r.names) for r in reports], [sorted(names)] * ranks, each="rank", likely=likely)
    y = task.y.chunk(ranks, dim=1)
    along_batch = torch.cat(y)
    likely = {
        "not-gathered": list(y),
        "gathered-along-batch": lambda got: (
            ranks > 1
            and any(same(got, [o] * ranks) for o in (along_batch, along_batch.view(task.y.shape)))
        ),
        "norm-not-used": lambda got: any(
            same(got, [nn.functional.layer_norm(task.x, [task.x.shape[-1]], eps=eps)] * ranks)
            for eps in (task.norm.eps, 1e-5)
        ),
        "other-eps": [_with_eps(task.norm, 1e-5)(task.x).detach()] * ranks,
        "pair-swapped": [ranks * task.y] * ranks,
        "own-formula": lambda got: any(same(got, [o] * ranks) for o in _other_formulas(task)),
    }
    got = [report.y for report in reports]
    expect(got, [task.y] * ranks, each="rank", what="the output", likely=likely)
    _check_norms_gradients(reports, task, passes)
    if not all(report.own_norm for report in reports):
        raise Wrong(
            "norm-copied", expected="the parameters of `norm` itself", got="those of a copy"
        )
    return reports


def _check_norms_gradients(reports: list[_Normed], task: _NormTask, passes: int) -> None:
    ranks, slope = len(reports), sum(task.slopes)
    whole, parameters = task.gradients(slope, task.x)
    expected = [passes * g for g in whole.chunk(ranks, dim=1)]
    own = [task.gradients(s, task.x)[0].chunk(ranks, 1)[r] for r, s in enumerate(task.slopes)]
    stretches = sum(slope.chunk(ranks, dim=1))  # of the output's gradient, added up
    of_stretches = [task.gradients(stretches, tokens)[0] for tokens in task.parts()]
    twice = ([ranks * g for g in expected], [sum(expected)] * ranks, of_stretches)
    likely = {
        "cuts-the-graph": lambda got: any(g is None for g in got),
        "sums-twice": lambda got: ranks > 1 and any(same(got, given) for given in twice),
        "slice-backward": [passes * g for g in own],
        "mean-backward": [g / ranks for g in expected],
    }
    got = [report.x_gradient for report in reports]
    expect(got, expected, each="rank", what="the gradient of x", likely=likely)
    pieces = zip(slope.chunk(ranks, 1), task.parts(), strict=True)
    local = [task.gradients(s, tokens)[1] for s, tokens in pieces]
    for name, gradient in parameters.items():
        expected = None if gradient is None else passes * gradient
        likely = {
            "frozen-norm": gradient is None,
            "summed-again": passes > 1,
            "parameter-gradients-local": lambda got, name=name: same(got, [g[name] for g in local]),
            "parameter-gradients-mean": lambda got, g=expected: same(got, [g / ranks] * ranks),
        }
        got = [report.gradients[name] for report in reports]
        what = f"the gradient of {name}"
        expect(got, [expected] * ranks, each="rank", what=what, likely=likely)


@sequence_norm.requires("two ranks normalise their tokens, and both have the whole sequence")
def _(answer, draw):
    _check_norm(answer, _norm_task(draw, 2))


@sequence_norm.requires(
    "three ranks and one; one token to each rank",
    failures={"exception": "two-ranks"},
    needs_earlier=True,
)
def _(answer, draw):
    with _only_for_two():
        for ranks, share in ((3, None), (1, None), (draw.choice([2, 3, 4]), 1)):
            _check_norm(answer, _norm_task(draw, ranks, share))


@sequence_norm.requires("the gradients of two backward passes add up", needs_earlier=True)
def _(answer, draw):
    _check_norm(answer, _norm_task(draw, draw.choice([2, 3])), passes=2)


@sequence_norm.requires("a frozen norm", failures={"exception": "frozen-norm"})
def _(answer, draw):
    _check_norm(answer, _norm_task(draw, draw.choice([2, 3]), frozen=True))


@sequence_norm.requires("autograd keeps less than the whole sequence", needs_earlier=True)
def _(answer, draw):
    task = _norm_task(draw, draw.choice([4, 5]), share=draw.choice([6, 8]))
    kept = max(report.kept for report in _check_norm(answer, task))
    if kept >= _own_bytes(task.x):
        limit = f"less than {_own_bytes(task.x)} bytes, the whole sequence"
        raise Wrong("norms-the-whole", expected=limit, got=f"{kept} bytes")


# ---- 6.6 -----------------------------------------------------------------------------------------

clipping = Exercise(
    "6.6",
    "clip_gradient_norm",
    points=2,
    minutes=30,
    kind="core",
    parameters=("sharded", "replicated", "max_norm"),
    hints=[
        (
            "Norms do not add, their squares do. Which squares does a rank have that no other one has, "
            "and which does every rank have?"
        ),
        (
            "All-reduce the sum of the squares of the shards, in one call that every rank makes. Add "
            "the squares of the replicated gradients after it."
        ),
        (
            "Collect the gradients that are not None. Sum their squares for the shards into one "
            "number, zero where there are none; all-reduce it; add those of the copies; take the "
            "root. If it is above the limit, multiply every gradient in place by limit / norm."
        ),
    ],
    misconceptions={
        "local-norm": "Each rank computes the norm of its own gradients. The ranks then scale by "
        "different factors: add the squares of the shards over the ranks.",
        "replicated-per-rank": "The replicated gradients count once per rank: they are in every "
        "rank's sum. Add their squares after the all-reduce.",
        "replicated-left-out": "The replicated gradients are not in the norm.",
        "largest-norm": "You take the largest of the ranks' norms. Each rank has a part of the model: add "
        "the squares.",
        "one-rank-only": "Only one rank has the whole sum. `reduce` delivers to one rank, `all_reduce` to "
        "all of them.",
        "norms-added": "You add norms. Add their squares, and take the root at the end.",
        "not-rooted": "You return the sum of the squares: the root is missing.",
        "mean-of-squares": "The squares are averaged over the ranks: they are to be added.",
        "clipped-norm": "You return the norm after clipping: asked is the one before.",
        "not-scaled": "The norm is right, and the gradients are as before: scale them in place.",
        "each-value-clamped": "Each value is clamped to the limit on its own. The limit is one for the "
        "norm of all: multiply all gradients by the same factor.",
        "local-factor": "You return the global norm, and scale by a factor of the rank's own norm.",
        "replicated-not-scaled": "The replicated gradients are as before: all gradients are scaled by "
        "the same factor.",
        "shards-not-scaled": "The gradients of the shards are as before: all gradients are scaled "
        "by the same factor.",
        "no-float": "You return a tensor: asked is a Python number, as `.item()` gives it.",
        "needs-contiguous": "A gradient need not lie in memory in the order of its elements, and "
        "`view` then fails: `square().sum()`, `norm()` or `flatten()` take any layout.",
        "scaled-to-one": "The gradients end with norm 1: multiply by max_norm / norm.",
        "upside-down": "The gradients are multiplied by norm / max_norm: they have grown. The factor is "
        "max_norm / norm.",
        "always-scaled": "Gradients below the limit are scaled up to it: leave them alone.",
        "parameters-changed": "The parameters have changed: scale their gradients.",
        "none-gradient": "A parameter without a gradient has `.grad` None: leave it out.",
        "zeros-for-none": "A parameter without a gradient has received one: None stays None.",
        "not-every-rank": "A rank without gradients, or with fewer, makes fewer collective calls, and "
        "the others wait for it. Make one call, on every rank, with zero where there is nothing.",
        "half-precision": "The norm is nearly right: its squares or sums are rounded to half precision "
        "somewhere. Add up in float32.",
        "replaces-gradients": "A `.grad` is another tensor than before. Asked is to scale in place, with "
        "`mul_` or `*=`: a new tensor takes memory at the worst moment, and whoever else holds the old "
        "one, such as DDP with its buckets, does not see it.",
        "not-a-number-hidden": "A gradient is not a number, and your norm is one. Let NaN through: the norm "
        "is where a broken step is noticed.",
        "zero-norm": "Where all gradients are zero, you divide by a norm of zero.",
        "sum-of-nothing": "Where there are no gradients to add up, Python's `sum` gives the int 0, which is "
        "no tensor, and `torch.stack` fails. Begin with `torch.zeros((), device=hardware.device())`.",
        "two-ranks": TWO_RANKS,
    },
    failures={
        **HANGS,
        "but got <class 'int'>": "sum-of-nothing",
        "'int' object has no attribute": "sum-of-nothing",
        "non-empty TensorList": "sum-of-nothing",
    },
)

Values = list[Tensor | None]


@dataclass(frozen=True)
class _Clipped:
    norm: float
    sharded: Values
    replicated: Values
    moved: bool
    replaced: bool  # is a gradient another tensor than before?


def _clipped(rank, answer, sharded, replicated, max_norm) -> _Clipped:
    def parameters(gradients: Values) -> list[nn.Parameter]:
        shapes = [3 if g is None else g.shape for g in gradients]
        made = [nn.Parameter(torch.ones(shape, device=device())) for shape in shapes]
        for parameter, gradient in zip(made, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone().to(device())
        return made

    shards, copies = parameters(sharded[rank]), parameters(replicated)
    before = [parameter.grad for parameter in shards + copies]
    come_late(rank)
    norm = answer(shards, copies, max_norm)
    moved = any(not torch.equal(p, torch.ones_like(p)) for p in shards + copies)
    after = [parameter.grad for parameter in shards + copies]
    replaced = any(
        a is not None and b is not None and a.data_ptr() != b.data_ptr()
        for a, b in zip(after, before, strict=True)
    )
    return _Clipped(norm, [p.grad for p in shards], [p.grad for p in copies], moved, replaced)


@dataclass(frozen=True)
class _ClipTask:
    """The gradients of every rank's shards, and those that are the same everywhere."""

    sharded: list[Values]
    replicated: Values

    def norm(self) -> float:
        return math.sqrt(sum(map(_squares, self.sharded)) + _squares(self.replicated))

    def mistaken_norms(self) -> dict[str, list[float]]:
        shards, copies = [_squares(values) for values in self.sharded], _squares(self.replicated)
        ranks, own = len(shards), [math.sqrt(square + copies) for square in shards]
        root = math.sqrt
        return {
            "local-norm": own,
            "replicated-per-rank": [root(sum(shards) + ranks * copies)] * ranks,
            "replicated-left-out": [root(sum(shards))] * ranks,
            "not-rooted": [sum(shards) + copies] * ranks,
            "mean-of-squares": [root(sum(shards) / ranks + copies)] * ranks,
            "largest-norm": [max(own)] * ranks,
        }

    def sums_of_norms(self) -> list[float]:
        shards, copies = [_squares(values) for values in self.sharded], _squares(self.replicated)
        every = [g for values in self.sharded for g in values] + self.replicated
        return [
            sum(math.sqrt(square + copies) for square in shards),
            sum(map(math.sqrt, shards)) + math.sqrt(copies),
            sum(math.sqrt(_squares([g])) for g in every),
            sum(
                math.sqrt(_squares([g]))
                for values in self.sharded
                for g in values + self.replicated
            ),
            math.sqrt(sum(shards)) + math.sqrt(copies),
        ]


def _squares(values: Values) -> float:
    return sum(g.double().square().sum().item() for g in values if g is not None)


def _scaled(values: Values, factor: float) -> Values:
    return [None if g is None else g * factor for g in values]


def _clamped(values: Values, limit: float) -> Values:
    return [None if g is None else g.clamp(-limit, limit) for g in values]


def _clip_task(draw, ranks: int) -> _ClipTask:
    sharded = [
        [draw.tensor(draw.integer(2, 4), 2), draw.tensor(draw.integer(2, 5))] for _ in range(ranks)
    ]
    return _ClipTask(sharded, [draw.tensor(draw.integer(3, 5)), draw.tensor(2, draw.integer(2, 4))])


def _check_norms(reports: list[_Clipped], task: _ClipTask, max_norm: float) -> None:
    norm, ranks = task.norm(), len(reports)
    for report in reports:
        expect_type(report.norm, float, likely="no-float" if torch.is_tensor(report.norm) else None)
    likely = {
        **task.mistaken_norms(),
        "norms-added": lambda got: any(same(got, [n] * ranks) for n in task.sums_of_norms()),
        "clipped-norm": [min(norm, max_norm)] * ranks,
        "one-rank-only": lambda got: ranks > 1 and any(same(value, norm) for value in got),
        "zero-norm": lambda got: any(math.isnan(value) for value in got),
        "half-precision": lambda got: same(got, [norm] * ranks, tolerance=0.01),
    }
    expect(
        [report.norm for report in reports],
        [norm] * ranks,
        each="rank",
        what="the norm",
        likely=likely,
    )


def _check_clipped(answer, task: _ClipTask, share: float) -> None:
    """Clips at `share` of the norm, or at 1 where the norm is 0."""
    ranks, norm = len(task.sharded), task.norm()
    max_norm = share * norm or 1.0
    reports = run(_clipped, ranks, answer, task.sharded, task.replicated, max_norm)
    _check_norms(reports, task, max_norm)
    if any(report.moved for report in reports):
        raise Wrong("parameters-changed", expected="parameters as before", got="other values")

    def by(factors: list[float], of_copies: list[float] | None = None) -> list[list[Values]]:
        pairs = zip(task.sharded, factors, of_copies or factors, strict=True)
        return [[_scaled(own, f), _scaled(task.replicated, c)] for own, f, c in pairs]

    factor = min(1.0, share)
    local = [
        min(1.0, max_norm / own) if own else 1.0 for own in task.mistaken_norms()["local-norm"]
    ]
    missing = [[g is None for g in (*own, *task.replicated)] for own in task.sharded]
    likely = {
        "zeros-for-none": lambda got: [[g is None for g in (*a, *b)] for a, b in got] != missing,
        "not-scaled": share < 1 and by([1.0] * ranks),
        "each-value-clamped": [
            [_clamped(own, max_norm), _clamped(task.replicated, max_norm)] for own in task.sharded
        ],
        "local-factor": by(local),
        "replicated-not-scaled": by([factor] * ranks, [1.0] * ranks),
        "shards-not-scaled": by([1.0] * ranks, [factor] * ranks),
        "scaled-to-one": by([1 / norm] * ranks) if norm else False,
        "upside-down": 0 < share < 1 and by([1 / share] * ranks),
        "always-scaled": by([share] * ranks),
        "zero-norm": norm == 0,
    }
    got = [[report.sharded, report.replicated] for report in reports]
    expect(got, by([factor] * ranks), each="rank", what="the gradients", likely=likely)
    if any(report.replaced for report in reports):
        raise Wrong("replaces-gradients", expected="the same tensors, scaled", got="new tensors")


@clipping.requires("two ranks agree on the norm of the whole model")
def _(answer, draw):
    task = _clip_task(draw, 2)
    max_norm = 0.5 * task.norm()
    reports = run(_clipped, 2, answer, task.sharded, task.replicated, max_norm)
    _check_norms(reports, task, max_norm)


@clipping.requires("gradients above the limit are scaled by one factor")
def _(answer, draw):
    # so low a limit that single values are above it, too
    _check_clipped(answer, _clip_task(draw, 2), draw.number(0.05, 0.15))


@clipping.requires("gradients below the limit stay as they are")
def _(answer, draw):
    _check_clipped(answer, _clip_task(draw, 2), draw.number(1.5, 3.0))


@clipping.requires("three ranks and one; nothing replicated, nothing sharded", needs_earlier=True)
def _(answer, draw):
    share = draw.number(0.3, 0.7)
    with _only_for_two():
        for ranks in (3, 1):
            _check_clipped(answer, _clip_task(draw, ranks), share)
    task = _clip_task(draw, draw.choice([2, 3]))
    _check_clipped(answer, replace(task, replicated=[]), share)
    _check_clipped(answer, replace(task, sharded=[[] for _ in task.sharded]), share)


@clipping.requires(
    "a parameter without a gradient",
    failures={"TypeError": "none-gradient", "AttributeError": "none-gradient"},
)
def _(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    sharded = [[values[0], None] for values in task.sharded]
    _check_clipped(answer, _ClipTask(sharded, [None, *task.replicated]), 0.5)


@clipping.requires("a rank without any gradient of its own", needs_earlier=True)
def _(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    sharded = [[None, None], *task.sharded[1:]]
    _check_clipped(answer, replace(task, sharded=draw.sample(sharded, len(sharded))), 0.5)
    nothing_at_all = _ClipTask(draw.sample(sharded, len(sharded)), [None])
    _check_clipped(answer, nothing_at_all, 0.5)


@clipping.requires(
    "gradients of any layout in memory",
    needs_earlier=True,
    failures={"view size is not compatible": "needs-contiguous"},
)
def _(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    sharded = [[draw.tensor(3, 4).T, *values] for values in task.sharded]
    _check_clipped(answer, replace(task, sharded=sharded), 0.5)


@clipping.requires("gradients that are all zero", failures={"ZeroDivisionError": "zero-norm"})
def _(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    sharded = [_scaled(values, 0.0) for values in task.sharded]
    _check_clipped(answer, _ClipTask(sharded, _scaled(task.replicated, 0.0)), 0.5)


@clipping.requires("a gradient that is not a number", needs_earlier=True)
def _(answer, draw):
    task = _clip_task(draw, draw.choice([2, 3]))
    task.sharded[draw.integer(0, 1)][0][0, 0] = math.nan
    for report in run(_clipped, len(task.sharded), answer, task.sharded, task.replicated, 1.0):
        if not math.isnan(report.norm):
            raise Wrong("not-a-number-hidden", expected="nan", got=report.norm)
