"""Rarer wrong answers to 5.5, `micro_batch_gradients`."""

import torch

from tests.wrong_answers import rarer
from tests.wrong_answers.ch05.micro_batch_gradients import (
    _accumulate,
    _cut,
    _mean,
    _train,
    divides_at_the_end,
    switches_to_evaluation,
)


@rarer("5.5")
def returns_a_tensor(*arguments):
    return torch.tensor(divides_at_the_end(*arguments))


@rarer("5.5")
def returns_the_mean_of_the_means(model, loss_function, inputs, targets, size):
    """Right where all micro-batches are equally large."""
    parts = _cut(inputs, targets, size)
    return _train(model, loss_function, parts, returned=lambda all, parts: sum(all) / len(parts))


@rarer("5.5")
def sets_old_gradients_to_zero(model, loss_function, inputs, targets, size):
    """A parameter that is frozen now, with a gradient from before, keeps one of zeros."""
    model.zero_grad(set_to_none=False)
    parts = _cut(inputs, targets, size)
    return _mean(_accumulate(model, loss_function, parts), parts)


@rarer("5.5")
def takes_zeros_for_nothing(model, *arguments):
    mean = sets_old_gradients_to_zero(model, *arguments)
    for parameter in model.parameters():
        if parameter.grad is not None and not parameter.grad.any():
            parameter.grad = None
    return mean


@rarer("5.5")
def clears_only_what_learns(model, loss_function, inputs, targets, size):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = None
    parts = _cut(inputs, targets, size)
    return _mean(_accumulate(model, loss_function, parts), parts)


@rarer("5.5")
def forgets_to_cut_the_targets(model, loss_function, inputs, targets, size):
    for x in inputs.split(size):
        (loss_function(model(x), targets) * len(x) / len(inputs)).backward()


@rarer("5.5")
def slides_a_window(model, loss_function, inputs, targets, size):
    count = len(_cut(inputs, targets, size))
    parts = [(inputs[i : i + size], targets[i : i + size]) for i in range(count)]
    return _train(model, loss_function, parts)


@rarer("5.5")
def ends_its_range_too_early(model, loss_function, inputs, targets, size):
    """A last micro-batch is lost where it is a single sample."""
    begins = range(0, len(inputs) - 1, size)
    parts = [(inputs[i : i + size], targets[i : i + size]) for i in begins]
    return _train(model, loss_function, parts, [len(x) / len(inputs) for x, _ in parts])


@rarer("5.5")
def goes_through_the_samples(model, loss_function, inputs, targets, size):
    """Of a sample alone the model's output has no dimension for the batch."""
    n, parts = len(inputs), list(zip(inputs, targets))
    return _train(model, loss_function, parts, [1 / n] * n, lambda losses, parts: sum(losses) / n)


@rarer("5.5")
def shuffles_the_batch(model, loss_function, inputs, targets, size):
    order = torch.randperm(len(inputs))
    return divides_at_the_end(model, loss_function, inputs[order], targets[order], size)


@rarer("5.5")
def computes_the_loss_once_more(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    _train(model, loss_function, parts)
    with torch.no_grad():
        return _mean([loss_function(model(x), y).item() for x, y in parts], parts)


@rarer("5.5")
def keeps_every_graph(model, loss_function, inputs, targets, size):
    model.zero_grad(set_to_none=True)
    mean = 0.0
    for x, y in _cut(inputs, targets, size):
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        share.backward(retain_graph=True)
        mean += share.item()
    return mean


@rarer("5.5")
def takes_the_loss_at_the_end(model, loss_function, inputs, targets, size):
    model.zero_grad()
    outputs = []
    for x, y in _cut(inputs, targets, size):
        outputs.append(model(x))
        (loss_function(outputs[-1], y) * len(x) / len(inputs)).backward()
    return loss_function(torch.cat(outputs), targets).item()


@rarer("5.5")
def evaluates_and_trains_again(model, *arguments):
    mean = switches_to_evaluation(model, *arguments)
    model.train()
    return mean


@rarer("5.5")
def lets_all_learn(model, *arguments):
    """So that every parameter has a gradient to divide; the frozen ones' are dropped."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    model.requires_grad_(True)
    mean = divides_at_the_end(model, *arguments)
    for parameter in frozen:
        parameter.grad = None
    return mean
