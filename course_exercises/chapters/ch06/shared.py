"""What the exercises of chapter 06 share."""

import copy
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from course_exercises.authoring import OwnPart, Wrong, expect, run, same
from course_exercises.authoring.ranks import come_late, following
from course_utils.hardware import device
from course_utils.trace import Record, Trace


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
def only_for_two() -> Iterator[None]:
    """Two ranks were right: what nothing else explains depends on their number."""
    try:
        yield
    except Wrong as wrong:
        slug = wrong.misconception or "two-ranks"
        raise Wrong(slug, expected=wrong.expected, got=wrong.got) from None


def own_bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def loss_of(y: Tensor, slope: Tensor) -> Tensor:
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


def sizes_that_do_not_divide(draw) -> tuple[int, int]:
    """A number of ranks, and a size that leaves any remainder."""
    ranks = draw.choice([2, 3, 4])
    return ranks, ranks * draw.integer(2, 6) + draw.integer(1, ranks - 1)


def check_refusal(answer, full: nn.Module, ranks: int, size: int) -> None:
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


NOT_WAITED = (
    "A call goes on in the background, as with `async_op=True`, and nobody waits for it: its result may "
    "not be there yet when it is used. Call `wait()` on what the call returned."
)


def check_waited(unwaited: list[list[str]]) -> None:
    """Raises Wrong where a rank has not waited for a call: no number means anything then."""
    for rank, calls in enumerate(unwaited):
        if calls:
            got = f"rank {rank} does not wait for its {calls[0]}"
            raise Wrong("not-waited", expected="a wait() for every call", got=got)


def same_and_learning(given: nn.Module, full: nn.Module) -> bool:
    """Whether an answer has left the layer that it was `given` as `full` is: values, and none frozen."""
    learning = [[p.requires_grad for p in layer.parameters()] for layer in (given, full)]
    return learning[0] == learning[1] and same(list(given.parameters()), list(full.parameters()))


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


def check_nothing_whole(answer, full: nn.Module, ranks: int) -> None:
    """Raises Wrong where a rank keeps a tensor as large as the smallest matrix of `full`."""
    whole = min(own_bytes(p) for p in full.parameters() if p.dim() > 1)
    kept = max(run(_kept_alive, ranks, answer, full))
    if kept >= whole:
        expected = "the rank's own parameters, and nothing of `full`"
        raise Wrong("whole-kept-alive", expected=expected, got=f"{kept} bytes more")


@dataclass(frozen=True)
class Cut:
    """The dimension in which each tensor is shared out, None where every rank has all of it; and the
    mistakes that the exercise about this cut can name."""

    known: frozenset[str]
    weight: int
    bias: int | None
    x: int | None
    y: int | None


@dataclass(frozen=True)
class _Held:
    """What a rank's layer holds."""

    parameters: dict[str, Tensor]
    views: list[str]  # parameters that are not contiguous, or in memory larger than themselves
    shared: list[str]  # parameters in the memory of `full`'s
    full_changed: bool


@dataclass(frozen=True)
class _Ran:
    """What a rank's layer computed."""

    y: Tensor
    x_gradient: Tensor | None
    gradients: dict[str, Tensor | None]
    has_bias: bool  # an attribute `bias`, be it None
    unwaited: list[str]


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
    return _Ran(y.detach(), x.grad, gradients, hasattr(layer, "bias"), sent.unwaited)


def traced(rank, answer, full, x, slope) -> tuple[Record, Record]:
    """What a rank's layer sends forward, and backward."""
    layer = answer(copy.deepcopy(full).to(device()))
    x = x.clone().to(device()).requires_grad_()
    with Trace() as forward:
        y = layer(x)
    with Trace() as backward:
        loss_of(y, slope).backward()
    return forward.record(), backward.record()


@dataclass(frozen=True)
class _LinearTask:
    """A whole layer and its input, what it gives, and each rank's part of all that."""

    cut: Cut
    ranks: int
    full: nn.Linear
    x: Tensor
    slope: Tensor  # the gradient of y
    y: Tensor
    x_gradient: Tensor

    @property
    def tolerance(self) -> float:
        return 1e-10 if self.y.dtype == torch.float64 else 1e-5

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


def linear_task(
    draw, cut: Cut, ranks: int, leading=None, bias=True, dtype=torch.float32
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


def run_linear(answer, task: _LinearTask, x_learns=True, beside=None) -> list[_Ran]:
    own = OwnPart(task.parts("x")), OwnPart(task.slopes())
    reports = run(_ran, task.ranks, answer, _fresh(task), *own, x_learns, beside)
    check_waited([report.unwaited for report in reports])
    return reports


def _fresh(task: _LinearTask) -> nn.Linear:
    full = copy.deepcopy(task.full)
    full.zero_grad()
    return full


def check_held(answer, task: _LinearTask) -> None:
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


def check_memory(answer, task: _LinearTask) -> None:
    for report in run(_held, task.ranks, answer, task.full):
        if report.full_changed:
            got = "another weight or bias in it, or a frozen one"
            raise Wrong("full-changed", expected="`full` as before", got=got)
        if report.views:
            raise Wrong(
                "a-view",
                expected="contiguous parameters in memory of exactly their size",
                got=f"{' and '.join(report.views)} as a view into the whole",
            )
        if report.shared:
            got = f"{' and '.join(report.shared)} in that of `full`"
            raise Wrong("shares-memory", expected="memory of its own", got=got)
    check_nothing_whole(answer, task.full, task.ranks)


def check_outputs(reports: list[_Ran], task: _LinearTask) -> None:
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
        "inputs-summed": _through_summed_inputs(task) if task.cut.x is not None else False,
        "one-rank-only": lambda got: any(same(g, task.y) for g in got),
        "matrices-only": lambda got: any(g.dim() != task.y.dim() for g in got),
        "rounded": lambda got: same(got, task.parts("y"), tolerance=0.01),
    }
    _expect(task, [report.y for report in reports], task.parts("y"), "the output", mistakes)


def _expect(task: _LinearTask, got: list, expected: list, what: str, mistakes: dict) -> None:
    """Compares what the ranks have, as exactly as their dtype allows."""
    single = task.tolerance < 1e-5 and same(got, expected)
    likely = {"other-dtype": single, **_possible(task.cut, mistakes)}
    expect(got, expected, each="rank", what=what, likely=likely, tolerance=task.tolerance)


def _through_summed_inputs(task: _LinearTask) -> list[Tensor]:
    """The ranks' outputs, where a row cut adds up its inputs in place of its products."""
    bias = 0 if task.full.bias is None else task.full.bias.detach()
    return [sum(task.parts("x")) @ w.T + bias for w in task.weights()]


def check_gradients(reports: list[_Ran], task: _LinearTask, beside=None) -> None:
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
    _expect(task, [r.x_gradient for r in reports], expected, "the gradient of x", mistakes)
    for name in task.held()[0]:
        got = [report.gradients[name] for report in reports]
        expected = [gradients[name] for gradients in task.gradients()]
        mistakes = {
            "summed-again": [n * g for g in expected],
            "bias-gradient": name == "bias",
            "no-gradient": lambda got: any(gradient is None for gradient in got),
        }
        _expect(task, got, expected, f"the gradient of {name}", mistakes)


def _possible(cut: Cut, mistakes: dict) -> dict:
    """Those of the mistakes that the exercise about this cut can name."""
    return {slug: mistake for slug, mistake in mistakes.items() if slug in cut.known}


def check_linear(answer, task: _LinearTask) -> None:
    reports = run_linear(answer, task)
    check_outputs(reports, task)
    check_gradients(reports, task)


def check_without_bias(answer, task: _LinearTask) -> None:
    reports = run_linear(answer, task)
    check_outputs(reports, task)
    check_gradients(reports, task)
    if not all(report.has_bias for report in reports):
        raise Wrong(
            "needs-a-bias", expected="an attribute `bias` that is None", got="no such attribute"
        )


def check_double(answer, draw, cut: Cut) -> None:
    """Everything that a layer holds and gives has the dtype of `full`."""
    for bias in (True, False):
        _check_dtypes(answer, linear_task(draw, cut, 2, bias=bias, dtype=torch.float64))


def _check_dtypes(answer, task: _LinearTask) -> None:
    held = [report.parameters for report in run(_held, task.ranks, answer, task.full)]
    reports = run_linear(answer, task)
    found = {
        "the parameters": [p for parameters in held for p in parameters.values()],
        "the output": [report.y for report in reports],
        "the gradient of x": [report.x_gradient for report in reports],
    }
    for what, tensors in found.items():
        dtypes = {tensor.dtype for tensor in tensors}
        likely = {"other-dtype": True}
        expect(dtypes, {torch.float64}, what=f"the dtype of {what}", likely=likely)
    check_outputs(reports, task)
    check_gradients(reports, task)


def check_three_and_one(answer, draw, cut: Cut) -> None:
    leading = draw.integer(2, 3), draw.integer(3, 6)
    with only_for_two():
        check_linear(answer, linear_task(draw, cut, 3, leading))
        check_linear(answer, linear_task(draw, cut, 1))


def check_linear_sent(answer, task: _LinearTask, sizes: tuple[int, int]) -> None:
    own = OwnPart(task.parts("x")), OwnPart(task.slopes())
    for records in run(traced, task.ranks, answer, _fresh(task), *own):
        check_sent(*records, sizes)


def check_sent(forward: Record, backward: Record, sizes: tuple[int, int]) -> None:
    """Raises Wrong where more than this many bytes are handed over each way, in several calls, or in
    another one than an all-reduce."""
    for way, record, size in zip(("forward", "backward"), (forward, backward), sizes, strict=True):
        if record.sent() > size:
            got = f"{record.sent()} bytes"
            raise Wrong("sends-too-much", expected=f"{size} bytes {way}", got=got)
        if record.count() > 1:
            raise Wrong("in-pieces", expected=f"one call {way}", got=f"{record.count()} calls")
        if record.count() != record.count("all_reduce"):
            got = f"one {record.calls[0].op}"
            raise Wrong("gathered-to-add", expected=f"one all_reduce {way}", got=got)


IN_PIECES = (
    "The sum is sent in several calls. Each of them waits for the slowest rank and costs its own "
    "start: hand the whole tensor over at once."
)
GATHERED_TO_ADD = (
    "The ranks' terms are gathered, and each rank adds them up itself: it receives and holds n tensors, "
    "of which it needs the sum alone. An all-reduce adds on the way."
)


BOTH_CUTS = {
    "other-names": "Your layer's parameters have other names. Asked are `self.weight` and `self.bias`, "
    "each an `nn.Parameter`; those of an `nn.Linear` kept as `self.linear` are called "
    "linear.weight and linear.bias.",
    "not-parameters": "The layer lacks `weight` or `bias`, at least on one rank. Every rank holds both, also where only one "
    "adds the bias, and each as an `nn.Parameter` that is an attribute of the module: a plain tensor is never "
    "trained.",
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
    "gathered-to-add": GATHERED_TO_ADD,
    "not-waited": NOT_WAITED,
    "not-every-rank": NOT_EVERY_RANK,
    "two-ranks": TWO_RANKS,
    "matrices-only": "The layer takes or returns matrices only, or other shapes only. `nn.Linear` takes "
    "any number of dimensions before the last, the features, none too, and keeps them: so does "
    "`nn.functional.linear`.",
    **REFUSAL,
    "refuses-what-divides": "Sizes that divide evenly are refused: the error belongs where the remainder "
    "is not zero.",
}
