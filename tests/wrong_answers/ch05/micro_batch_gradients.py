"""Answers to 5.5, `micro_batch_gradients`: wrong in a plausible way, or right in another."""

import math

import torch

from tests.wrong_answers import right, wrong


def _cut(inputs, targets, size):
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def _accumulate(model, loss_function, parts, weights):
    """The losses; the gradients are those of the weighted sum."""
    losses = []
    for (x, y), weight in zip(parts, weights, strict=True):
        loss = loss_function(model(x), y)
        (weight * loss).backward()
        losses.append(loss.item())
    return losses


def _shares(parts):
    total = sum(len(x) for x, _ in parts)
    return [len(x) / total for x, _ in parts]


def _mean(losses, parts):
    return sum(loss * share for loss, share in zip(losses, _shares(parts), strict=True))


def _with_weights(weigh):
    def gradients(model, loss_function, inputs, targets, size):
        parts = _cut(inputs, targets, size)
        model.zero_grad(set_to_none=True)
        losses = _accumulate(model, loss_function, parts, weigh(parts, size))
        return _mean(losses, parts)

    return gradients


@right("5.5")
def divides_at_the_end(model, loss_function, inputs, targets, size):
    """Sums over samples, and one division of every gradient."""
    for parameter in model.parameters():
        parameter.grad = None
    total = 0.0
    for start in range(0, len(inputs), size):
        stop = min(start + size, len(inputs))
        loss = loss_function(model(inputs[start:stop]), targets[start:stop]) * (stop - start)
        loss.backward()
        total += loss.item()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= len(inputs)
    return total / len(inputs)


@right("5.5")
def weighs_what_enters_backward(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    model.zero_grad()
    losses = torch.zeros(len(parts))
    for i, (x, y) in enumerate(parts):
        loss = loss_function(model(x), y)
        loss.backward(torch.tensor(len(x) / len(inputs)))
        losses[i] = loss.detach()
    return _mean(losses.tolist(), parts)


@wrong("5.5", names="loss-not-a-float")
def returns_a_tensor(*arguments):
    return torch.tensor(divides_at_the_end(*arguments))


@wrong("5.5", names="sum-not-mean")
def adds_up_means(model, loss_function, inputs, targets, size):
    weigh = _with_weights(lambda parts, size: [1] * len(parts))
    return weigh(model, loss_function, inputs, targets, size)


@wrong("5.5", names="samples-summed")
def weighs_with_the_samples(model, loss_function, inputs, targets, size):
    weigh = _with_weights(lambda parts, size: [len(x) for x, _ in parts])
    return weigh(model, loss_function, inputs, targets, size)


@wrong("5.5", names="mean-of-means")
def divides_by_their_number(model, loss_function, inputs, targets, size):
    weigh = _with_weights(lambda parts, size: [1 / len(parts)] * len(parts))
    return weigh(model, loss_function, inputs, targets, size)


@wrong("5.5", names="one-size-for-all")
def takes_all_for_full_ones(model, loss_function, inputs, targets, size):
    total = len(inputs)
    weigh = _with_weights(lambda parts, size: [min(size, total) / total] * len(parts))
    return weigh(model, loss_function, inputs, targets, size)


@wrong("5.5", names="divided-by-samples")
def divides_by_all_samples(model, loss_function, inputs, targets, size):
    weigh = _with_weights(lambda parts, size: [1 / len(inputs)] * len(parts))
    return weigh(model, loss_function, inputs, targets, size)


@wrong("5.5", names="divided-twice")
def divides_losses_and_gradients(model, loss_function, inputs, targets, size):
    loss = weighs_what_enters_backward(model, loss_function, inputs, targets, size)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= math.ceil(len(inputs) / size)
    return loss


@wrong("5.5", names="count-rounded-down")
def divides_by_the_full_ones(model, loss_function, inputs, targets, size):
    model.zero_grad()
    mean_loss, count = 0.0, len(inputs) // size
    for x, y in zip(inputs.split(size), targets.split(size)):
        loss = loss_function(model(x), y) / count
        loss.backward()
        mean_loss += loss.item()
    return mean_loss


@wrong("5.5", names="other-sizes")
def cuts_that_many_pieces(model, loss_function, inputs, targets, size):
    model.zero_grad()
    mean_loss = 0.0
    for x, y in zip(inputs.chunk(size), targets.chunk(size)):
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        share.backward()
        mean_loss += share.item()
    return mean_loss


@wrong("5.5", names="last-lost")
def drops_the_rest(model, loss_function, inputs, targets, size):
    whole = max(1, len(inputs) // size) * size
    return divides_at_the_end(model, loss_function, inputs[:whole], targets[:whole], size)


@wrong("5.5", names="last-only")
def clears_in_the_loop(model, loss_function, inputs, targets, size):
    total = 0.0
    for x, y in _cut(inputs, targets, size):
        model.zero_grad()
        loss = loss_function(model(x), y) * len(x) / len(inputs)
        loss.backward()
        total += loss.item()
    return total


@wrong("5.5", names="loss-not-mean")
def returns_the_sum(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    model.zero_grad()
    return sum(_accumulate(model, loss_function, parts, _shares(parts)))


@wrong("5.5", names="loss-of-last")
def returns_the_last_loss(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    model.zero_grad()
    return _accumulate(model, loss_function, parts, _shares(parts))[-1]


@wrong("5.5", names="loss-unweighted")
def returns_the_mean_of_the_means(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    model.zero_grad()
    return sum(_accumulate(model, loss_function, parts, _shares(parts))) / len(parts)


@wrong("5.5", names="none-gradient")
def expects_a_gradient_everywhere(model, loss_function, inputs, targets, size):
    model.zero_grad()
    parts = _cut(inputs, targets, size)
    losses = _accumulate(model, loss_function, parts, [len(x) for x, _ in parts])
    for parameter in model.parameters():
        parameter.grad /= len(inputs)
    return _mean(losses, parts)


@wrong("5.5", names="zeros-for-none")
def begins_with_zeros(model, loss_function, inputs, targets, size):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    parts = _cut(inputs, targets, size)
    return _mean(_accumulate(model, loss_function, parts, _shares(parts)), parts)


@wrong("5.5", names="zeros-for-none")
def sets_old_gradients_to_zero(model, loss_function, inputs, targets, size):
    """A parameter that is frozen now, with a gradient from before, keeps one of zeros."""
    model.zero_grad(set_to_none=False)
    parts = _cut(inputs, targets, size)
    return _mean(_accumulate(model, loss_function, parts, _shares(parts)), parts)


@wrong("5.5", names="tied-twice")
def divides_layer_by_layer(model, loss_function, inputs, targets, size):
    model.zero_grad()
    parts = _cut(inputs, targets, size)
    losses = _accumulate(model, loss_function, parts, [len(x) for x, _ in parts])
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            if parameter.grad is not None:
                parameter.grad /= len(inputs)
    return _mean(losses, parts)


@wrong("5.5", names="old-gradients")
def does_not_clear(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    return _mean(_accumulate(model, loss_function, parts, _shares(parts)), parts)


@wrong("5.5", names="parameters-moved")
def takes_a_step_too(model, loss_function, inputs, targets, size):
    loss = divides_at_the_end(model, loss_function, inputs, targets, size)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss


@wrong("5.5", names="whole-batch")
def runs_the_whole_batch(model, loss_function, inputs, targets, size):
    return divides_at_the_end(model, loss_function, inputs, targets, len(inputs))


@wrong("5.5", names="one-backward")
def adds_up_the_losses_first(model, loss_function, inputs, targets, size):
    model.zero_grad()
    parts = _cut(inputs, targets, size)
    losses = [loss_function(model(x), y) for x, y in parts]
    mean = _mean(losses, parts)
    mean.backward()
    return mean.item()


@wrong("5.5", names="no-backward")
def computes_losses_only(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    return _mean([loss_function(model(x), y).item() for x, y in parts], parts)


@wrong("5.5", names="no-backward")
def clears_at_the_end(model, loss_function, inputs, targets, size):
    loss = divides_at_the_end(model, loss_function, inputs, targets, size)
    model.zero_grad()
    return loss


def _in_turns(model, loss_function, inputs, targets, size, backward):
    """Adds up the weighted losses, and calls `backward(total)` in each turn."""
    model.zero_grad()
    total = 0
    for x, y in _cut(inputs, targets, size):
        total = total + loss_function(model(x), y) * len(x) / len(inputs)
        backward(total)
    return total.item()


@wrong("5.5", names="running-total")
def goes_back_from_the_total(*arguments):
    return _in_turns(*arguments, backward=lambda total: total.backward())


@wrong("5.5", names="running-total")
def keeps_the_graph_as_the_message_says(*arguments):
    """What PyTorch's message suggests; nothing raises any more, and the gradients are wrong."""
    return _in_turns(*arguments, backward=lambda total: total.backward(retain_graph=True))


@wrong("5.5", names="windows")
def slides_a_window(model, loss_function, inputs, targets, size):
    model.zero_grad()
    total, count = 0.0, math.ceil(len(inputs) / size)
    for i in range(count):
        loss = loss_function(model(inputs[i : i + size]), targets[i : i + size]) / count
        loss.backward()
        total += loss.item()
    return total


@wrong("5.5", names="no-graph")
def takes_the_number_first(model, loss_function, inputs, targets, size):
    for x, y in _cut(inputs, targets, size):
        loss = loss_function(model(x), y).item() * len(x) / len(inputs)
        loss.backward()


@wrong("5.5", names="no-graph")
def saves_memory_with_no_grad(model, loss_function, inputs, targets, size):
    for x, y in _cut(inputs, targets, size):
        with torch.no_grad():
            loss = loss_function(model(x), y) * len(x) / len(inputs)
        loss.backward()


@wrong("5.5", names="targets-not-cut")
def forgets_to_cut_the_targets(model, loss_function, inputs, targets, size):
    for x in inputs.split(size):
        (loss_function(model(x), targets) * len(x) / len(inputs)).backward()


@wrong("5.5", names="other-sizes")
def takes_sample_by_sample(model, loss_function, inputs, targets, size):
    return divides_at_the_end(model, loss_function, inputs, targets, 1)


@wrong("5.5", names="other-sizes")
def goes_through_the_samples(model, loss_function, inputs, targets, size):
    model.zero_grad()
    total = 0.0
    for x, y in zip(inputs, targets):
        loss = loss_function(model(x), y) / len(inputs)
        loss.backward()
        total += loss.item()
    return total


@wrong("5.5", names="graph-kept")
def keeps_every_graph(model, loss_function, inputs, targets, size):
    model.zero_grad(set_to_none=True)
    mean = 0.0
    for x, y in _cut(inputs, targets, size):
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        share.backward(retain_graph=True)
        mean += share.item()
    return mean


@wrong("5.5", names="other-order")
def begins_with_the_last(model, loss_function, inputs, targets, size):
    model.zero_grad(set_to_none=True)
    mean = 0.0
    for x, y in reversed([*_cut(inputs, targets, size)]):
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        share.backward()
        mean += share.item()
    return mean


@right("5.5")
def keeps_a_graph_and_drops_it(model, loss_function, inputs, targets, size):
    """What is kept for a second backward pass goes with the last name of the loss."""
    model.zero_grad(set_to_none=True)
    mean = 0.0
    for x, y in _cut(inputs, targets, size):
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        share.backward(retain_graph=True)
        mean += share.item()
        del share
    return mean


@wrong("5.5", names="other-order")
def shuffles_the_batch(model, loss_function, inputs, targets, size):
    order = torch.randperm(len(inputs))
    return divides_at_the_end(model, loss_function, inputs[order], targets[order], size)


@wrong("5.5", names="evaluation-mode")
def switches_to_evaluation(model, loss_function, inputs, targets, size):
    model.eval()
    return divides_at_the_end(model, loss_function, inputs, targets, size)


@wrong("5.5", names="evaluation-mode")
def evaluates_and_trains_again(model, loss_function, inputs, targets, size):
    mean = switches_to_evaluation(model, loss_function, inputs, targets, size)
    model.train()
    return mean


@wrong("5.5", names="loss-with-graph")
def returns_a_loss_with_its_graph(model, loss_function, inputs, targets, size):
    model.zero_grad(set_to_none=True)
    mean = 0.0
    for x, y in _cut(inputs, targets, size):
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        share.backward()
        mean = mean + share
    return mean


@wrong("5.5", names="other-weights")
def scales_again_what_is_there(model, loss_function, inputs, targets, size):
    model.zero_grad()
    parts = _cut(inputs, targets, size)
    losses = []
    for (x, y), share in zip(parts, _shares(parts), strict=True):
        losses += _accumulate(model, loss_function, [(x, y)], [1])
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= share
    return _mean(losses, parts)


@wrong("5.5", names="last-lost")
def ends_its_range_too_early(model, loss_function, inputs, targets, size):
    """A last micro-batch is lost where it is a single sample."""
    model.zero_grad()
    mean = 0.0
    for i in range(0, len(inputs) - 1, size):
        x, y = inputs[i : i + size], targets[i : i + size]
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        share.backward()
        mean += share.item()
    return mean


@wrong("5.5", names="later-use-missed")
def takes_the_first_for_all(model, loss_function, inputs, targets, size):
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    mean = 0.0
    for i, (x, y) in enumerate(_cut(inputs, targets, size)):
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        gradients = torch.autograd.grad(share, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if i == 0:
                parameter.grad = gradient
            elif parameter.grad is not None and gradient is not None:
                parameter.grad += gradient
        mean += share.item()
    return mean


@right("5.5")
def adds_up_what_each_one_has(model, loss_function, inputs, targets, size):
    learning = [p for p in model.parameters() if p.requires_grad]
    sums = [None] * len(learning)
    mean = 0.0
    for x, y in _cut(inputs, targets, size):
        outputs = model(x)  # still there as the next pass begins: one micro-batch's, as before
        loss = loss_function(outputs, y)
        share = len(x) / len(inputs)
        for i, gradient in enumerate(torch.autograd.grad(loss, learning, allow_unused=True)):
            if gradient is not None:
                sums[i] = gradient * share + (0 if sums[i] is None else sums[i])
        mean += share * loss.item()
    model.zero_grad()
    for parameter, gradient in zip(learning, sums, strict=True):
        parameter.grad = gradient
    return mean


@wrong("5.5", names="none-for-zeros")
def takes_zeros_for_nothing(model, loss_function, inputs, targets, size):
    mean = sets_old_gradients_to_zero(model, loss_function, inputs, targets, size)
    for parameter in model.parameters():
        if parameter.grad is not None and not parameter.grad.any():
            parameter.grad = None
    return mean


@wrong("5.5", names="old-gradients")
def clears_only_what_learns(model, loss_function, inputs, targets, size):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = None
    parts = _cut(inputs, targets, size)
    return _mean(_accumulate(model, loss_function, parts, _shares(parts)), parts)


@wrong("5.5", names="hooks-left")
def scales_in_hooks(model, loss_function, inputs, targets, size):
    model.zero_grad()
    share = 1.0
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * share)
    mean = 0.0
    for x, y in _cut(inputs, targets, size):
        share = len(x) / len(inputs)
        loss = loss_function(model(x), y)
        loss.backward()
        mean += share * loss.item()
    return mean


@right("5.5")
def scales_in_hooks_and_removes_them(model, loss_function, inputs, targets, size):
    model.zero_grad()
    share = 1.0
    learning = [p for p in model.parameters() if p.requires_grad]
    hooks = [p.register_hook(lambda gradient: gradient * share) for p in learning]
    mean = 0.0
    for x, y in _cut(inputs, targets, size):
        share = len(x) / len(inputs)
        loss = loss_function(model(x), y)
        loss.backward()
        mean += share * loss.item()
    for hook in hooks:
        hook.remove()
    return mean


@wrong("5.5", names="thawed")
def lets_all_learn(model, loss_function, inputs, targets, size):
    """So that every parameter has a gradient to divide; the frozen ones' are dropped."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    model.requires_grad_(True)
    mean = divides_at_the_end(model, loss_function, inputs, targets, size)
    for parameter in frozen:
        parameter.grad = None
    return mean


@wrong("5.5", names="outputs-kept")
def takes_the_loss_at_the_end(model, loss_function, inputs, targets, size):
    model.zero_grad()
    outputs = []
    for x, y in _cut(inputs, targets, size):
        outputs.append(model(x))
        (loss_function(outputs[-1], y) * len(x) / len(inputs)).backward()
    return loss_function(torch.cat(outputs), targets).item()


@wrong("5.5", names="seen-twice")
def computes_the_loss_once_more(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    model.zero_grad()
    _accumulate(model, loss_function, parts, _shares(parts))
    with torch.no_grad():
        return _mean([loss_function(model(x), y).item() for x, y in parts], parts)
