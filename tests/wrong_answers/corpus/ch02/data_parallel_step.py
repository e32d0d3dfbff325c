"""Rarer wrong answers to 2.4, `data_parallel_step`."""

import torch
from torch import nn
from torch.func import functional_call

from tests.wrong_answers import rarer
from tests.wrong_answers.ch02.data_parallel_step import _outputs, _update
from tests.wrong_answers.ch02.shared import copies_of


@rarer("2.4")
def ignores_the_devices(model, optimizer, loss_fn, images, labels, devices):
    return _update(optimizer, loss_fn(model(images), labels))


@rarer("2.4")
def forgets_the_update(model, optimizer, loss_fn, images, labels, devices):
    loss = loss_fn(torch.cat(_outputs(model, images, devices)), labels)
    optimizer.zero_grad()
    loss.backward()
    return loss.item()


@rarer("2.4")
def computes_the_loss_after_the_update(model, optimizer, loss_fn, images, labels, devices):
    _update(optimizer, loss_fn(torch.cat(_outputs(model, images, devices)), labels))
    with torch.no_grad():
        return loss_fn(model(images), labels).item()


@rarer("2.4")
def puts_the_model_into_training_mode(model, optimizer, loss_fn, images, labels, devices):
    model.train()
    outputs = _outputs(model, images, devices)
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))


@rarer("2.4")
def averages_over_the_workers(model, optimizer, loss_fn, images, labels, devices):
    loss = loss_fn(torch.cat(_outputs(model, images, devices)), labels)
    return _update(optimizer, loss / len(devices)) * len(devices)


@rarer("2.4")
def forgets_to_gather(model, optimizer, loss_fn, images, labels, devices):
    outputs = _outputs(model, images, devices)
    return _update(optimizer, loss_fn(outputs[0], labels[: len(outputs[0])]))


@rarer("2.4")
def updates_twice(model, optimizer, loss_fn, images, labels, devices):
    loss = _update(optimizer, loss_fn(torch.cat(_outputs(model, images, devices)), labels))
    optimizer.step()
    return loss


@rarer("2.4")
def moves_nothing(model, optimizer, loss_fn, images, labels, devices):
    outputs = []
    for i, chunk in enumerate(images.chunk(len(devices))):
        state = copies_of(model, devices[0]) if i > 0 else {}
        outputs.append(functional_call(model, state, (chunk,)))
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))


@rarer("2.4")
def calls_data_parallel(model, optimizer, loss_fn, images, labels, devices):
    outputs = nn.parallel.data_parallel(model, images, None)
    return _update(optimizer, loss_fn(outputs, labels))


@rarer("2.4")
def updates_after_every_weighted_chunk(model, optimizer, loss_fn, images, labels, devices):
    count = len(devices)
    parts = zip(images.chunk(count), labels.chunk(count))
    shares = [(rows, own, len(rows) / len(images)) for rows, own in parts]
    return sum(_update(optimizer, loss_fn(model(rows), own) * w) for rows, own, w in shares)


@rarer("2.4")
def updates_by_hand_with_the_optimizers_rate(model, optimizer, loss_fn, images, labels, devices):
    loss = loss_fn(torch.cat(_outputs(model, images, devices)), labels)
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad
    return loss.item()


@rarer("2.4")
def makes_its_own_optimizer(model, optimizer, loss_fn, images, labels, devices):
    own = torch.optim.SGD(model.parameters(), lr=optimizer.param_groups[0]["lr"])
    return _update(own, loss_fn(torch.cat(_outputs(model, images, devices)), labels))


@rarer("2.4")
def clears_with_zeros(model, optimizer, loss_fn, images, labels, devices):
    loss = loss_fn(torch.cat(_outputs(model, images, devices)), labels)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    return loss.item()


@rarer("2.4")
def gathers_the_helpers_first(model, optimizer, loss_fn, images, labels, devices):
    first, *others = _outputs(model, images, devices)
    return _update(optimizer, loss_fn(torch.cat([*others, first]), labels))


@rarer("2.4")
def copies_no_frozen_parameters(model, optimizer, loss_fn, images, labels, devices):
    def copies(model, device):
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        tensors = learning | dict(model.named_buffers())
        return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}

    outputs = _outputs(model, images, devices, copies)
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))
