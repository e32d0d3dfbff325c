"""Answers to 5.5, `micro_batch_gradients`: wrong in a plausible way, or right in another."""

import torch

from tests.wrong_answers import right, wrong


def _cut(inputs, targets, size):
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def _shares(parts):
    total = sum(len(x) for x, _ in parts)
    return [len(x) / total for x, _ in parts]


def _mean(losses, parts):
    return sum(loss * share for loss, share in zip(losses, _shares(parts), strict=True))


def _accumulate(model, loss_function, parts, weights=None, backward=torch.Tensor.backward):
    """The losses; the gradients are those of the weighted sum, on top of what is there."""
    losses = []
    for (x, y), weight in zip(parts, weights or _shares(parts), strict=True):
        loss = loss_function(model(x), y)
        backward(weight * loss)
        losses.append(loss.item())
    return losses


def _train(model, loss_function, parts, weights=None, returned=_mean, **more):
    model.zero_grad()
    return returned(_accumulate(model, loss_function, parts, weights, **more), parts)


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


def _scales_in_hooks(model, loss_function, inputs, targets, size):
    """The hooks, and the mean loss."""
    model.zero_grad()
    share = 1.0
    learning = [p for p in model.parameters() if p.requires_grad]
    hooks = [p.register_hook(lambda gradient: gradient * share) for p in learning]
    mean = 0.0
    for x, y in _cut(inputs, targets, size):
        share = len(x) / len(inputs)
        mean += share * _accumulate(model, loss_function, [(x, y)])[0]
    return hooks, mean


@right("5.5")
def scales_in_hooks_and_removes_them(*arguments):
    hooks, mean = _scales_in_hooks(*arguments)
    for hook in hooks:
        hook.remove()
    return mean


@wrong("5.5", names="model-changed")
def scales_in_hooks(*arguments):
    return _scales_in_hooks(*arguments)[1]


@wrong("5.5", names="model-changed")
def switches_to_evaluation(model, *arguments):
    model.eval()
    return divides_at_the_end(model, *arguments)


@wrong("5.5", names="other-weights")
def adds_up_means(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    return _train(model, loss_function, parts, [1] * len(parts))


@wrong("5.5", names="same-weight")
def divides_by_their_number(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    return _train(model, loss_function, parts, [1 / len(parts)] * len(parts))


@wrong("5.5", names="last-only")
def clears_in_the_loop(model, loss_function, inputs, targets, size):
    def backward(loss):
        model.zero_grad()
        loss.backward()

    return _train(model, loss_function, _cut(inputs, targets, size), backward=backward)


@wrong("5.5", names="other-micro-batches")
def drops_the_rest(model, loss_function, inputs, targets, size):
    whole = max(1, len(inputs) // size) * size
    return divides_at_the_end(model, loss_function, inputs[:whole], targets[:whole], size)


@wrong("5.5", names="other-micro-batches")
def cuts_that_many_pieces(model, loss_function, inputs, targets, size):
    parts = list(zip(inputs.chunk(size), targets.chunk(size)))
    return _train(model, loss_function, parts)


@wrong("5.5", names="other-loss")
def returns_the_last_loss(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    return _train(model, loss_function, parts, returned=lambda losses, parts: losses[-1])


@wrong("5.5", names="other-loss")
def returns_a_loss_with_its_graph(model, loss_function, inputs, targets, size):
    model.zero_grad(set_to_none=True)
    mean = 0.0
    for x, y in _cut(inputs, targets, size):
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        share.backward()
        mean = mean + share
    return mean


@wrong("5.5", names="none-gradient")
def expects_a_gradient_everywhere(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    mean = _train(model, loss_function, parts, [len(x) for x, _ in parts])
    for parameter in model.parameters():
        parameter.grad /= len(inputs)
    return mean


@wrong("5.5", names="zeros-for-none")
def begins_with_zeros(model, loss_function, inputs, targets, size):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    parts = _cut(inputs, targets, size)
    return _mean(_accumulate(model, loss_function, parts), parts)


@wrong("5.5", names="tied-twice")
def divides_layer_by_layer(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    mean = _train(model, loss_function, parts, [len(x) for x, _ in parts])
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            if parameter.grad is not None:
                parameter.grad /= len(inputs)
    return mean


@wrong("5.5", names="old-gradients")
def does_not_clear(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    return _mean(_accumulate(model, loss_function, parts), parts)


@wrong("5.5", names="parameters-changed")
def takes_a_step_too(model, *arguments):
    loss = divides_at_the_end(model, *arguments)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss


@wrong("5.5", names="activations-kept")
def adds_up_the_losses_first(model, loss_function, inputs, targets, size):
    model.zero_grad()
    parts = _cut(inputs, targets, size)
    mean = _mean([loss_function(model(x), y) for x, y in parts], parts)
    mean.backward()
    return mean.item()


@wrong("5.5", names="no-backward")
def computes_losses_only(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    return _mean([loss_function(model(x), y).item() for x, y in parts], parts)


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


@wrong("5.5", names="cut-from-the-graph")
def takes_the_number_first(model, loss_function, inputs, targets, size):
    for x, y in _cut(inputs, targets, size):
        loss = loss_function(model(x), y).item() * len(x) / len(inputs)
        loss.backward()


@wrong("5.5", names="gradient-lost")
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
