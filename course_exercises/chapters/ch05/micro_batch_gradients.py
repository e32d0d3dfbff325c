"""Exercise 5.5, `micro_batch_gradients`: what it asks for, and how it is checked."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.authoring.compare import show
from course_exercises.authoring.vocabulary import times, total

Gradients = dict[str, Tensor | None]

accumulation = Exercise(
    "5.5",
    "micro_batch_gradients",
    points=2,
    minutes=30,
    kind="core",
    parameters=("model", "loss_function", "inputs", "targets", "size"),
    hints=[
        (
            "Write the mean over 5 samples with the means over the first 3 and the last 2. With which "
            "weights does it become the same number?"
        ),
        (
            "A micro-batch of k samples out of N has the weight k / N. What multiplies a loss also "
            "multiplies its gradients."
        ),
        (
            "Set the old gradients to None. For each micro-batch: forward, the loss times len(x) / "
            "len(inputs), backward. `backward()` adds up the gradients by itself, and you add up the "
            "weighted losses."
        ),
    ],
    misconceptions={
        "no-backward": "No parameter has a gradient: `backward()` is never called, or the last thing you do is clear what "
        "it gave. Call it for each micro-batch.",
        "running-total": "You call `backward()` on a running total: it goes through the earlier "
        "micro-batches again in every turn. Call it on this micro-batch's loss alone.",
        "last-only": "Only the last micro-batch's gradient is left: the earlier ones were cleared. "
        "Clear once, before the first micro-batch.",
        "same-weight": "You give every micro-batch the same weight, and the last one is smaller: its samples count more or "
        "less than the others. The weight is the share of its samples, `len(x) / len(inputs)`.",
        "other-weights": "Each loss is a mean over its micro-batch already. Multiply it by the share of its samples, "
        "`len(x) / len(inputs)`, so that each counts once. To add up plain means, to sum over samples, or to divide once "
        "more makes gradients of another size; Adam would hide that, SGD does not.",
        "other-micro-batches": "Your micro-batches are not the batch, cut in its order: `size` samples each, and the rest "
        "in the last one; each goes through the model once, and inputs and targets are cut alike. `split(n)` cuts pieces "
        "of n samples, `chunk(n)` cuts n pieces.",
        "other-loss": "You return something else than the mean loss of the batch, as a plain sum or mean of the "
        "micro-batches' losses, the last one, or a tensor. Add up the losses, each times the share of its samples, as "
        "numbers: `.item()` takes one out of a tensor, whose graph would keep the activations.",
        "gradient-lost": "A parameter that the loss uses has no gradient. Which parameters take part may differ from one "
        "micro-batch to the next, so none of them decides for all; and a gradient that is 0 everywhere is one. Keep what "
        "`backward()` has made.",
        "model-changed": "You leave the model otherwise than it was handed in, or run it so: a part of it is in evaluation "
        "mode, the `requires_grad` of a parameter has changed, or a hook is left that changes later gradients. This is a "
        "step of training, and a frozen parameter needs no gradient: leave both as they are, and remove your hooks.",
        "activations-kept": "Something of an earlier micro-batch is still in memory when the next forward pass begins. Call "
        "`backward()` in every turn, once and without `retain_graph=True`, and keep the number for its loss alone: "
        "outputs are activations too.",
    },
    things="gradients",
    failures={
        "a second time": "running-total",
        "'float' object has no attribute 'backward'": "cut-from-the-graph",
        "does not require grad": "cut-from-the-graph",
        "to match target batch_size": "other-micro-batches",
    },
    at_home=True,
)


def _plain(features: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 7), nn.Tanh(), nn.Linear(7, classes))


class _Awkward(nn.Module):
    """A frozen layer, one that the loss does not use, a weight that two layers share, a layer for
    samples that begin with a positive number, and one behind a ReLU that lets nothing through."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, features)
        self.frozen = nn.Linear(features, features).requires_grad_(False)
        self.unused = nn.Linear(features, 3)
        self.tied = nn.Linear(features, features)
        self.tied.weight = self.first.weight
        self.some = nn.Linear(features, features)
        self.dead = nn.Linear(features, features)
        self.last = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tied(self.frozen(self.first(x)).tanh()).tanh()
        chosen = x[..., :1] > 0
        if chosen.any():
            hidden = hidden + chosen * self.some(hidden)
        return self.last(hidden + (self.dead(hidden) - 99).relu())


@dataclass
class _Batch:
    """A model, a batch for it, and what the model saw of it."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    size: int
    open: int = 0  # forward passes whose backward pass has not come
    most_open: int = 0
    evaluated: bool = False  # was some part of the model in evaluation mode?
    activations: list[weakref.ref] = field(default_factory=list)  # memory kept for backward
    fed: list[Tensor] = field(default_factory=list)  # the samples of each forward pass
    outlived: bool = False  # was any of it still there when a later forward pass began?
    outputs: list[weakref.ref] = field(default_factory=list)  # memory of what the model returned
    most_outputs: int = 0  # of earlier forward passes, still there when a later one began

    def watch(self) -> None:
        self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self.model.register_forward_hook(self._forward)
        for module in self.model.modules():
            if isinstance(module, nn.Tanh):  # its output is kept, and only for backward
                module.register_forward_hook(self._keep)

    def not_training(self) -> bool:
        return not all(module.training for module in self.model.modules())

    def _begin(self, model, inputs, keywords):
        self.evaluated |= self.not_training()
        self.fed.append((*inputs, *keywords.values())[0])
        self.outlived |= any(memory() is not None for memory in self.activations)
        kept = sum(memory() is not None for memory in self.outputs)
        self.most_outputs = max(self.most_outputs, kept)

    def _keep(self, module, inputs, output):
        _note_memory(output, self.activations)

    def _forward(self, model, inputs, output):
        _note_memory(output, self.outputs)
        if output.requires_grad:
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            output.register_hook(self._backward)

    def _backward(self, gradient):
        self.open -= 1

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.inputs.split(self.size), self.targets.split(self.size), strict=True))


def _note_memory(tensor: Tensor, notes: list[weakref.ref]) -> None:
    with contextlib.suppress(NotImplementedError):  # tensors of torch.func show no memory
        notes.append(weakref.ref(tensor.untyped_storage()))


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def _batch(draw, make: Callable[[int, int], nn.Module], samples: int, size: int) -> _Batch:
    torch.manual_seed(draw.seed())
    features, classes = draw.integer(3, 6), draw.integer(3, 5)
    targets = draw.integers(samples, low=0, high=classes - 1)
    return _Batch(make(features, classes), 2 * draw.tensor(samples, features), targets, size)


def _uneven(draw, full: int) -> tuple[int, int]:
    """A number of samples and a size: some full micro-batches and a smaller one."""
    size = draw.integer(4, 6)  # unlike the number of micro-batches, which tells mistakes apart
    return full * size + draw.integer(2, size - 2), size


def _gradients(model: nn.Module) -> Gradients:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def _gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, Gradients]:
    """The mean loss of these samples, and its gradients; leaves the model alone."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    loss = _loss(model(inputs), targets)
    loss.backward()
    return loss.item(), _gradients(model)


def _multiple(got: Gradients, of: Gradients) -> bool:
    """Whether all gradients are one number, not 0, times these."""
    there = [(got[name], of[name]) for name in of if of[name] is not None]
    a, b = (torch.cat([tensor.flatten() for tensor in side]) for side in zip(*there, strict=True))
    factor = (a @ b / (b @ b)).item()
    return abs(factor) > 1e-3 and same(got, times(of, factor))


def _signs(batch: _Batch) -> dict[str, Callable[[Gradients], bool] | bool]:
    """What shows in the gradients how they were put together, by mistake."""
    parts, size = batch.parts(), batch.size
    each = [_gradient(batch.model, x, y)[1] for x, y in parts]
    several = len(each) > 1
    turns = [times(each[i], len(parts[i][0]) * (len(each) - i)) for i in range(len(each))]
    begins = range(len(each) if size > 1 else 0)  # as if micro-batch i began at sample i
    slices = [slice(i, i + size) for i in begins]
    windows = [_gradient(batch.model, batch.inputs[s], batch.targets[s])[1] for s in slices]
    uneven = len(parts[-1][0]) != len(parts[0][0])
    return {
        "no-backward": lambda got: all(gradient is None for gradient in got.values()),
        "running-total": lambda got: several and _multiple(got, total(turns)),
        "last-only": lambda got: several and _multiple(got, each[-1]),
        "other-micro-batches": lambda got: (
            several and any(_multiple(got, total(some)) for some in (each[:-1], windows) if some)
        ),
        "same-weight": lambda got: uneven and _multiple(got, total(each)),
        "other-weights": True,
    }


def _check_gradients(answer, batch: _Batch, likely: Mapping | None = None) -> None:
    """Compares the gradients with the whole batch's; `likely` goes before all other mistakes."""
    _, expected = _gradient(batch.model, batch.inputs, batch.targets)
    mistakes = {**(likely or {}), **_signs(batch)}
    before = copy.deepcopy(batch.model.state_dict())
    learning = [parameter.requires_grad for parameter in batch.model.parameters()]
    batch.watch()
    answer(batch.model, _loss, batch.inputs, batch.targets, batch.size)
    if batch.evaluated or batch.not_training():
        raise Wrong("model-changed", expected="training mode", got="evaluation mode")
    if any(not torch.equal(tensor, before[k]) for k, tensor in batch.model.state_dict().items()):
        raise Wrong("parameters-changed", expected="the same parameters as before", got="others")
    if [parameter.requires_grad for parameter in batch.model.parameters()] != learning:
        raise Wrong("model-changed", expected="the same parameters frozen as before", got="others")
    expect(_gradients(batch.model), expected, what="the gradients", likely=mistakes)


@accumulation.requires("equal micro-batches give the gradients of the batch's mean loss")
def equal_micro_batches_give_the_gradients(answer, draw):
    size = draw.integer(4, 6)  # unlike the number of micro-batches, which tells mistakes apart
    _check_gradients(answer, _batch(draw, _plain, 3 * size, size))


@accumulation.requires("so they do where the last micro-batch is smaller, or the only one")
def so_they_do_where_the_last_micro_batch(answer, draw):
    size = draw.integer(4, 6)
    for samples, own in (_uneven(draw, 3), (size - 1, size), (draw.integer(2, 4), 1)):
        _check_gradients(answer, _batch(draw, _plain, samples, own))


@accumulation.requires("the result is the mean loss of the whole batch")
def the_result_is_the_mean_loss(answer, draw):
    equal = draw.integer(4, 6)
    for samples, size in ((3 * equal, equal), _uneven(draw, 3)):
        batch = _batch(draw, _plain, samples, size)
        mean, _ = _gradient(batch.model, batch.inputs, batch.targets)
        got = answer(batch.model, _loss, batch.inputs, batch.targets, size)
        expect_type(got, float, likely="other-loss" if isinstance(got, Tensor) else None)
        expect(got, mean, what="the loss", likely={"other-loss": True})


@accumulation.requires(
    "frozen and unused parameters keep no gradient, and a tied one has one",
    failures={"TypeError": "none-gradient", "AttributeError": "none-gradient"},
)
def frozen_and_unused_parameters_keep_no_gradient(answer, draw):
    batch = _batch(draw, _Awkward, *_uneven(draw, 2))
    signs = -torch.ones(len(batch.inputs))
    signs[batch.size : 2 * batch.size] = 1  # of three micro-batches, the second uses all layers
    batch.inputs[:, 0] = signs * batch.inputs[:, 0].abs()
    _, expected = _gradient(batch.model, batch.inputs, batch.targets)
    for name in _without(expected):  # as if the parameter had learned until now
        parameter = batch.model.get_parameter(name)
        parameter.grad = torch.ones_like(parameter)
    _check_gradients(answer, batch, _awkward_mistakes(expected))


def _without(gradients: Gradients) -> list[str]:
    return [name for name in gradients if gradients[name] is None]


def _awkward_mistakes(expected: Gradients) -> dict[str, Callable[[Gradients], bool]]:
    """What people do to parameters that are not plain: the mistakes, by misconception."""
    without = _without(expected)

    def old(got):  # the ones that stood there, or a share of them
        left = [got[name] for name in without if got[name] is not None]
        return any(g.any() and (g == g.flatten()[0]).all() for g in left)

    def lost(got):
        there = [got[name] for name in expected if name not in without]
        return any(g is None for g in there) and any(g is not None for g in there)

    tied = "first.weight"
    return {
        "old-gradients": old,
        "zeros-for-none": lambda got: any(got[name] is not None for name in without),
        "gradient-lost": lost,
        "tied-twice": lambda got: same({**got, tied: expected[tied]}, expected),
    }


@torch.no_grad()
def _step(model: nn.Module) -> None:
    """One step of SGD, by hand."""
    for parameter in model.parameters():
        parameter -= 0.1 * parameter.grad


@accumulation.requires("three steps of SGD end with the parameters of whole-batch training")
def three_steps_of_sgd_end_with_the_parameters(answer, draw):
    batch = _batch(draw, _plain, *_uneven(draw, 3))
    alone = copy.deepcopy(batch.model)
    before = None  # the gradients of the step before

    def hooked(got):
        loss = _loss(batch.model(batch.inputs), batch.targets)
        now = torch.autograd.grad(loss, list(batch.model.parameters()))
        return not same(list(now), list(gradients.values()))

    for step in range(3):
        answer(batch.model, _loss, batch.inputs, batch.targets, batch.size)
        _, gradients = _gradient(alone, batch.inputs, batch.targets)
        for name, parameter in alone.named_parameters():
            parameter.grad = gradients[name]
        as_alone = same(batch.model.state_dict(), alone.state_dict())  # else all differs anyway
        likely = {
            "old-gradients": before and total([before, gradients]),
            "model-changed": as_alone and hooked,
        }
        got = _gradients(batch.model)
        expect(got, gradients, what=f"the gradients of step {step}", likely=likely)
        for model in (batch.model, alone):
            _step(model)
        before = gradients
    expect(batch.model.state_dict(), alone.state_dict(), what="the parameters")


@accumulation.requires("one micro-batch of `size` samples at a time, and no more activations")
def one_micro_batch_of_size_samples_at(answer, draw):
    size = draw.integer(4, 6)
    batch = _batch(draw, _plain, 2 * size + 1, size)  # `chunk(5)` would cut 11 into 3, 3, 3, 2
    batch.watch()
    answer(batch.model, _loss, batch.inputs, batch.targets, batch.size)
    parts = [x for x, _ in batch.parts()]
    if not same(batch.fed, parts):
        expected, got = ([tuple(x.shape) for x in inputs] for inputs in (parts, batch.fed))
        got = "these, with other samples" if got == expected else show(got)
        raise Wrong("other-micro-batches", expected=f"inputs of {show(expected)}", got=got)
    kept = {
        f"{batch.most_open} forward passes without their backward pass": batch.most_open > 1,
        "activations of the one before": batch.outlived,
        f"outputs of {batch.most_outputs}": batch.most_outputs > 1,  # the last may have a name
    }
    for what, found in kept.items():
        if found:
            expected = "nothing of earlier micro-batches when a forward pass begins"
            raise Wrong("activations-kept", expected=expected, got=what)
