"""Exercise 5.5, `micro_batch_gradients`: what it asks for, and how it is checked."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same

Gradients = dict[str, Tensor | None]

accumulation = Exercise(
    "5.5",
    "micro_batch_gradients",
    points=2,
    minutes=20,
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
        "no-backward": "No parameter has a gradient: `backward()` is never called, or the last thing "
        "you do is clear what it gave.",
        "no-graph": "There is no graph behind this loss: under `torch.no_grad()`, or behind `.item()` "
        "and `.detach()`, nothing is recorded. Call `backward()` on what the model gave; a number for "
        "the sum is taken after it.",
        "running-total": "You call `backward()` on a running total: it goes through the earlier "
        "micro-batches again in every turn. Call it on this micro-batch's loss alone.",
        "windows": "Your micro-batches overlap: micro-batch i begins at sample i * size, not at i.",
        "targets-not-cut": "Inputs and targets have to be cut alike: sample i of one belongs to "
        "sample i of the other.",
        "other-weights": "Every micro-batch's gradient has to count once, with the share of its "
        "samples, `len(x) / len(inputs)`.",
        "loss-otherwise": "The mean loss is the sum of the micro-batches' losses, each times the share "
        "of its samples, `len(x) / len(inputs)`.",
        "sum-not-mean": "Your gradients are too large by the number of micro-batches: every loss is "
        "a mean already, and you add up these means. Adam would hide it, SGD does not.",
        "samples-summed": "Your gradients are those of the summed loss: they are too large by the "
        "number of samples.",
        "divided-twice": "The mean over the micro-batches is divided once more.",
        "divided-by-samples": "You divide by the number of samples what is a mean over a micro-batch "
        "already: the gradients are too small by its size.",
        "mean-of-means": "You give every micro-batch the same weight. The last one is smaller: its "
        "samples would count more than the others.",
        "one-size-for-all": "You give the last micro-batch the weight of a full one. Its weight is "
        "the number of its own samples over the number of all.",
        "count-rounded-down": "`len(inputs) // size` leaves out the smaller micro-batch at the end. "
        "And even with their true number, one weight for all would give its samples too much.",
        "last-lost": "The samples of the last micro-batch play no part.",
        "last-only": "Only the last micro-batch's gradient is left: the earlier ones were cleared. "
        "Clear once, before the first micro-batch.",
        "loss-not-mean": "You return the sum of the micro-batches' losses: asked is the mean over all "
        "samples.",
        "loss-of-last": "You return the last micro-batch's loss: asked is the mean over all samples.",
        "loss-unweighted": "You return the mean of the micro-batches' losses. Weigh the last one by "
        "its size, as you do for the gradients.",
        "none-gradient": "A frozen or unused parameter has no gradient: its `.grad` is None. Skip it.",
        "later-use-missed": "A parameter that only a later micro-batch uses has no gradient. Which "
        "parameters take part can differ from one micro-batch to the next, so the first does not "
        "decide it for all.",
        "none-for-zeros": "A parameter that the loss uses has lost its gradient, because all of it is "
        "0. That too is a gradient: weight decay and momentum move the parameter on.",
        "zeros-for-none": "A parameter without a gradient has received one. A `.grad` of zeros is "
        "not the same as None: weight decay and momentum would move the parameter.",
        "tied-twice": "A tied parameter, one tensor in two layers, was scaled once per layer.",
        "old-gradients": "What stood in `.grad` before is still in it. Clear the gradients before "
        "the first micro-batch, those of frozen parameters too.",
        "hooks-left": "A hook that you registered is still there after the call, and changes every "
        "gradient that comes later, here that of the next step. Remove it before you return.",
        "thawed": "The `requires_grad` of a parameter has changed: one learns that was frozen, or the "
        "other way round. A frozen parameter needs no gradient on the way either: leave it frozen.",
        "parameters-moved": "The parameters have changed. The optimizer's step is not part of this.",
        "whole-batch": "The model has seen more than `size` samples at once: that is the memory that "
        "micro-batches are to save.",
        "other-sizes": "The micro-batches have other sizes than asked: `size` samples each, and the "
        "rest in the last. `split(n)` cuts pieces of n samples, `chunk(n)` cuts n pieces.",
        "seen-twice": "The model sees every sample twice. The loss is there already in the pass that "
        "you go backward from; a second one costs its time again, and with dropout gives another loss.",
        "other-order": "The micro-batches hold other samples than asked: the batch is cut in its order, "
        "the first `size` samples first.",
        "evaluation-mode": "The model is not in training mode, in its forward passes or afterwards: "
        "`model.eval()` switches dropout off and makes batch norm use other numbers. That these are "
        "micro-batches of a training step does not change.",
        "loss-with-graph": "You return a loss that is still tied to its graph, and keeps alive what "
        "the graph keeps. Asked is a number: `.item()`.",
        "loss-not-a-float": "You return a tensor. Asked is a Python number, as `.item()` gives it.",
        "graph-kept": "A micro-batch's graph has outlived its backward pass: its activations are "
        "still there when the next forward pass begins. `retain_graph=True` does that, for a second "
        "backward pass; here each graph has one.",
        "outputs-kept": "You keep the model's outputs of all micro-batches. They are activations as "
        "well: a language model's logits are its largest. Of each micro-batch only the number for "
        "its loss has to stay.",
        "one-backward": "A forward pass began before the micro-batch before it was through its "
        "backward pass: its activations are kept. Call backward in every turn of the loop.",
    },
    failures={
        "a second time": "running-total",
        "'float' object has no attribute 'backward'": "no-graph",
        "does not require grad": "no-graph",
        "to match target batch_size": "targets-not-cut",
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
    seen: list[int] = field(default_factory=list)  # samples of each forward pass
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
        self.seen.append(len(output) if output.dim() > 1 else 1)  # 1: a sample without a batch
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


def _weighted(parts: list[Gradients], weights: Sequence[float]) -> Gradients:
    """The weighted sum by name; None where no part has a gradient."""
    terms = {
        name: [w * p[name] for w, p in zip(weights, parts) if p[name] is not None]
        for name in parts[0]
    }
    return {name: sum(each) if each else None for name, each in terms.items()}


def _gradient_mistakes(batch: _Batch) -> dict[str, Gradients | bool]:
    """What each mistake makes of the gradients, by misconception."""
    parts = batch.parts()
    each = [_gradient(batch.model, x, y)[1] for x, y in parts]
    count, total = len(each), len(batch.inputs)
    own = [len(x) for x, _ in parts]
    uneven = own[-1] != own[0]
    mean = [n / total for n in own]
    without_last = [n / max(1, sum(own[:-1])) for n in own]
    dropped = [
        [w * (i < count - 1) for i, w in enumerate(ws)]
        for ws in (*_weightings(batch), without_last)
    ]
    windows = [
        _gradient(batch.model, *(t[i : i + batch.size] for t in (batch.inputs, batch.targets)))[1]
        for i in range(count)
    ]
    totals = [w * (count - i) for i, w in enumerate(mean)]
    return {
        "no-backward": lambda got: all(gradient is None for gradient in got.values()),
        "running-total": count > 1 and _weighted(each, totals),
        "windows": lambda got: (
            count > 1 and any(same(got, _weighted(windows, ws)) for ws in _weightings(batch))
        ),
        "sum-not-mean": count > 1 and _weighted(each, [1] * count),
        "samples-summed": _weighted(each, own),
        "last-only": lambda got: (
            count > 1
            and any(same(got, _weighted(each[-1:], [w])) for w in (1, 1 / count, mean[-1]))
        ),
        "mean-of-means": uneven and _weighted(each, [1 / count] * count),
        "one-size-for-all": uneven and _weighted(each, [batch.size / total] * count),
        "count-rounded-down": uneven
        and total > batch.size
        and _weighted(each, [1 / (total // batch.size)] * count),
        "last-lost": lambda got: (
            count > 1 and any(same(got, _weighted(each, weights)) for weights in dropped)
        ),
        "divided-by-samples": _weighted(each, [1 / total] * count),
        "divided-twice": count > 1 and _weighted(each, [w / count for w in mean]),
        "other-weights": True,
    }


def _weightings(batch: _Batch) -> list[list[float]]:
    """Weights that people give to the micro-batches."""
    own = [len(x) for x, _ in batch.parts()]
    return [[1.0] * len(own), [1 / len(own)] * len(own), [n / len(batch.inputs) for n in own]]


def _check_gradients(answer, batch: _Batch, likely: Mapping | None = None) -> float:
    """Compares the gradients with the whole batch's; returns what the answer returned."""
    _, expected = _gradient(batch.model, batch.inputs, batch.targets)
    mistakes = {**(likely or {}), **_gradient_mistakes(batch)}
    before = copy.deepcopy(batch.model.state_dict())
    learning = [parameter.requires_grad for parameter in batch.model.parameters()]
    batch.watch()
    value = answer(batch.model, _loss, batch.inputs, batch.targets, batch.size)
    if batch.evaluated or batch.not_training():
        raise Wrong("evaluation-mode", expected="training mode", got="evaluation mode")
    if any(not torch.equal(tensor, before[k]) for k, tensor in batch.model.state_dict().items()):
        raise Wrong("parameters-moved", expected="the same parameters as before", got="others")
    now = [parameter.requires_grad for parameter in batch.model.parameters()]
    if now != learning:
        raise Wrong("thawed", expected="the same parameters frozen as before", got="others")
    expect(_gradients(batch.model), expected, what="the gradients", likely=mistakes)
    return value


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
        losses = [_gradient(batch.model, x, y)[0] for x, y in batch.parts()]
        mean, _ = _gradient(batch.model, batch.inputs, batch.targets)
        got = answer(batch.model, _loss, batch.inputs, batch.targets, size)
        if isinstance(got, Tensor) and got.requires_grad:
            raise Wrong("loss-with-graph", expected="a number", got=got)
        expect_type(got, float, likely="loss-not-a-float" if isinstance(got, Tensor) else None)
        likely = {
            "loss-not-mean": sum(losses),
            "loss-of-last": lambda got, losses=losses, own=(samples % size or size) / samples: (
                same(got, losses[-1]) or same(got, losses[-1] * own)
            ),
            "loss-unweighted": sum(losses) / len(losses),
            "loss-otherwise": True,
        }
        expect(got, mean, what="the loss", likely=likely)


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

    def all_but(prefix, got):
        return all(same(got[n], expected[n]) for n in expected if not n.startswith(prefix))

    def old(got):  # the ones that stood there, or a share of them
        left = [got[name] for name in without if got[name] is not None]
        return any(g.any() and (g == g.flatten()[0]).all() for g in left)

    return {
        "old-gradients": old,
        "zeros-for-none": lambda got: any(got[name] is not None for name in without),
        "later-use-missed": lambda got: got["some.bias"] is None and all_but("some.", got),
        "none-for-zeros": lambda got: got["dead.bias"] is None and all_but("dead.", got),
        "tied-twice": lambda got: all_but("first.weight", got),
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

    def hooked(got):
        loss = _loss(batch.model(batch.inputs), batch.targets)
        now = torch.autograd.grad(loss, list(batch.model.parameters()))
        return not same(list(now), list(gradients.values()))

    for step in range(3):
        answer(batch.model, _loss, batch.inputs, batch.targets, batch.size)
        _, gradients = _gradient(alone, batch.inputs, batch.targets)
        for name, parameter in alone.named_parameters():
            parameter.grad = gradients[name]
        as_alone = same(
            batch.model.state_dict(), alone.state_dict()
        )  # else what follows differs anyway
        expect(
            _gradients(batch.model),
            gradients,
            what=f"the gradients of step {step}",
            likely={
                "hooks-left": as_alone and hooked,
                "old-gradients": as_alone and step > 0,
            },
        )
        for model in (batch.model, alone):
            _step(model)
    expect(batch.model.state_dict(), alone.state_dict(), what="the parameters")


@accumulation.requires("one micro-batch of `size` samples at a time, and no more activations")
def one_micro_batch_of_size_samples_at(answer, draw):
    size = draw.integer(4, 6)
    batch = _batch(draw, _plain, 2 * size + 1, size)  # `chunk(5)` would cut 11 into 3, 3, 3, 2
    batch.watch()
    answer(batch.model, _loss, batch.inputs, batch.targets, batch.size)
    if max(batch.seen, default=0) > batch.size:
        raise Wrong("whole-batch", expected=f"at most {batch.size} samples", got=max(batch.seen))
    sizes = [len(x) for x, _ in batch.parts()]
    if batch.seen != sizes:
        slug = "other-order" if sorted(batch.seen) == sorted(sizes) else "other-sizes"
        slug = "seen-twice" if sorted(batch.seen) == sorted(2 * sizes) else slug
        raise Wrong(slug, expected=f"micro-batches of {sizes} samples", got=batch.seen)
    if not same(batch.fed, [x for x, _ in batch.parts()]):
        raise Wrong("other-order", expected="the samples in their order", got="another order")
    if batch.most_open > 1:
        raise Wrong("one-backward", expected="1 micro-batch in flight", got=batch.most_open)
    if batch.outlived:
        got = "those of the one before are still there"
        raise Wrong("graph-kept", expected="no activations when a forward pass begins", got=got)
    if batch.most_outputs > 1:  # the last ones may still have a name
        got = f"{batch.most_outputs} are kept"
        raise Wrong("outputs-kept", expected="no outputs of earlier micro-batches", got=got)
