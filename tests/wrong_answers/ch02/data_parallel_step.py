"""Answers to 2.4, `data_parallel_step`: wrong in a plausible way, or right in another."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch02.shared import copies_of


def _outputs(model, images, devices, copies=copies_of):
    outputs = []
    for i, (chunk, device) in enumerate(zip(images.chunk(len(devices)), devices)):
        state = copies(model, device) if i > 0 else {}
        outputs.append(functional_call(model, state, (chunk.to(device),)).to(devices[0]))
    return outputs


def _update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@wrong("2.4", names="mean-of-chunks")
def averages_chunk_losses(model, optimizer, loss_fn, images, labels, devices):
    outputs = _outputs(model, images, devices)
    losses = [loss_fn(o, part) for o, part in zip(outputs, labels.chunk(len(devices)))]
    return _update(optimizer, sum(losses) / len(losses))


@wrong("2.4", names="old-gradients")
def never_clears(model, optimizer, loss_fn, images, labels, devices):
    loss = loss_fn(torch.cat(_outputs(model, images, devices)), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


@wrong("2.4", names="gradients-cleared")
def clears_afterwards(model, optimizer, loss_fn, images, labels, devices):
    loss = loss_fn(torch.cat(_outputs(model, images, devices)), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@wrong("2.4", names="helpers-lost")
def deep_copies_for_helpers(model, optimizer, loss_fn, images, labels, devices):
    first, *others = images.chunk(len(devices))
    outputs = [model(first)]
    for chunk, device in zip(others, devices[1:]):
        outputs.append(copy.deepcopy(model).to(device)(chunk.to(device)).to(devices[0]))
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))


@wrong("2.4", names="rows-lost")
def drops_the_rest(model, optimizer, loss_fn, images, labels, devices):
    rows = max(len(images) // len(devices), 1) * len(devices)
    loss = loss_fn(torch.cat(_outputs(model, images[:rows], devices)), labels[:rows])
    return _update(optimizer, loss)


@wrong("2.4", names="buffers-lost")
def copies_for_worker_0_too(model, optimizer, loss_fn, images, labels, devices):
    outputs = [
        functional_call(model, copies_of(model, device), (chunk.to(device),)).to(devices[0])
        for chunk, device in zip(images.chunk(len(devices)), devices)
    ]
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))


@wrong("2.4", names="tied-twice")
def copies_tied_parameters_twice(model, optimizer, loss_fn, images, labels, devices):
    def copies(model, device):
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        return {name: tensor.to(device, copy=True) for name, tensor in named}

    loss = loss_fn(torch.cat(_outputs(model, images, devices, copies)), labels)
    return _update(optimizer, loss)


@wrong("2.4", names="wrong-loss")
def reports_the_loss_afterwards(model, optimizer, loss_fn, images, labels, devices):
    _update(optimizer, loss_fn(torch.cat(_outputs(model, images, devices)), labels))
    with torch.no_grad():
        return loss_fn(torch.cat([o.detach() for o in _again(model, images)]), labels).item()


def _again(model, images):
    inner = getattr(model, "model", model)  # not through the model that counts its calls
    return [inner(images)]


def _with_prepared_frames(model, images, devices, prepare):
    outputs = []
    for i, (chunk, device) in enumerate(zip(images.chunk(len(devices)), devices)):
        frame = prepare(copy.deepcopy(model)) if i else model
        state = copies_of(model, device) if i else {}
        outputs.append(functional_call(frame, state, (chunk.to(device),)).to(devices[0]))
    return torch.cat(outputs)


@wrong("2.4", names="other-mode")
def puts_helpers_into_evaluation_mode(model, optimizer, loss_fn, images, labels, devices):
    outputs = _with_prepared_frames(model, images, devices, lambda frame: frame.eval())
    return _update(optimizer, loss_fn(outputs, labels))


@wrong("2.4", names="tied-once")
def unties_its_frames(model, optimizer, loss_fn, images, labels, devices):
    outputs = _with_prepared_frames(model, images, devices, lambda frame: frame.to("meta"))
    return _update(optimizer, loss_fn(outputs, labels))


@wrong("2.4", names="chunks")
def divides_evenly(model, optimizer, loss_fn, images, labels, devices):
    count = min(len(devices), len(images))
    outputs = []
    for i, (chunk, device) in enumerate(zip(images.tensor_split(count), devices)):
        state = copies_of(model, device) if i > 0 else {}
        outputs.append(functional_call(model, state, (chunk.to(device),)).to(devices[0]))
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))


@wrong("2.4", names="step-per-chunk")
def updates_after_every_chunk(model, optimizer, loss_fn, images, labels, devices):
    count = len(devices)
    parts = zip(images.chunk(count), labels.chunk(count))
    losses = [_update(optimizer, loss_fn(model(part), own)) for part, own in parts]
    return sum(losses) / len(losses)


@wrong("2.4", names="wrong-labels")
def gathers_the_wrong_way_round(model, optimizer, loss_fn, images, labels, devices):
    outputs = _outputs(model, images, devices)
    return _update(optimizer, loss_fn(torch.cat(outputs[::-1]), labels))


@wrong("2.4", names="update")
def updates_by_hand(model, optimizer, loss_fn, images, labels, devices):
    loss = loss_fn(torch.cat(_outputs(model, images, devices)), labels)
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    return loss.item()


@wrong("2.4", names="loss-not-a-number")
def returns_a_tensor(model, optimizer, loss_fn, images, labels, devices):
    loss = loss_fn(torch.cat(_outputs(model, images, devices)), labels)
    _update(optimizer, loss)
    return loss


@wrong("2.4", names="zeros-for-none")
def fills_in_missing_gradients(model, optimizer, loss_fn, images, labels, devices):
    loss = loss_fn(torch.cat(_outputs(model, images, devices)), labels)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return loss.item()


@wrong("2.4", names="torchs-own")
def wraps_in_data_parallel(model, optimizer, loss_fn, images, labels, devices):
    return _update(optimizer, loss_fn(nn.DataParallel(model)(images), labels))


@wrong("2.4", names="own-loss")
def chooses_the_loss(model, optimizer, loss_fn, images, labels, devices):
    return _update(optimizer, F.cross_entropy(torch.cat(_outputs(model, images, devices)), labels))


@wrong("2.4", names="not-moved")
def leaves_the_rows(model, optimizer, loss_fn, images, labels, devices):
    outputs = []
    for i, (chunk, device) in enumerate(zip(images.chunk(len(devices)), devices)):
        state = copies_of(model, device) if i > 0 else {}
        outputs.append(functional_call(model, state, (chunk,)).to(devices[0]))
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))


@wrong("2.4", names="not-brought-back")
def leaves_the_outputs(model, optimizer, loss_fn, images, labels, devices):
    outputs = []
    for i, (chunk, device) in enumerate(zip(images.chunk(len(devices)), devices)):
        state = copies_of(model, device) if i > 0 else {}
        outputs.append(functional_call(model, state, (chunk.to(device),)))
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))


@right("2.4")
def weights_the_chunk_losses(model, optimizer, loss_fn, images, labels, devices):
    """One backward pass a chunk: its loss weighted by its share of the rows."""
    optimizer.zero_grad()
    outputs = _outputs(model, images, devices)
    total = 0.0
    for output, part in zip(outputs, labels.chunk(len(devices))):
        loss = loss_fn(output, part) * len(part) / len(labels)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


@right("2.4")
def with_a_thread_for_each_worker(model, optimizer, loss_fn, images, labels, devices):
    def run(replica, chunk, device):
        return replica(chunk.to(device)).to(devices[0])

    chunks = images.chunk(len(devices))
    helpers = [
        partial(functional_call, copy.deepcopy(model), copies_of(model, device))
        for device in devices[1 : len(chunks)]
    ]
    with ThreadPoolExecutor(len(devices)) as threads:
        outputs = threads.map(run, [model, *helpers], chunks, devices)
        return _update(optimizer, loss_fn(torch.cat(list(outputs)), labels))


_kept = {}


@wrong("2.4", names="first-step-kept")
def copies_once_for_all_steps(model, optimizer, loss_fn, images, labels, devices):
    key = model, tuple(devices)
    if key not in _kept:
        _kept[key] = [copies_of(model, device) for device in devices]
    kept = iter(_kept[key][1:])
    outputs = _outputs(model, images, devices, lambda model, device: next(kept))
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))


def _with_deep_copies(model, optimizer, loss_fn, images, labels, devices, hand_on):
    """`hand_on` gets a parameter and its copy, which has the gradient of a helper."""
    model.zero_grad()
    chunks = images.chunk(len(devices))
    helpers = [copy.deepcopy(model).to(device) for device in devices[1 : len(chunks)]]
    outputs = [
        replica(chunk.to(device)).to(devices[0])
        for replica, chunk, device in zip([model, *helpers], chunks, devices)
    ]
    loss = loss_fn(torch.cat(outputs), labels)
    loss.backward()
    for helper in helpers:
        for parameter, copied in zip(model.parameters(), helper.parameters()):
            hand_on(parameter, copied)
    optimizer.step()
    return float(loss)


@right("2.4")
def deep_copies_that_hand_their_gradients_on(model, optimizer, loss_fn, images, labels, devices):
    def hand_on(parameter, copied):
        if copied.grad is not None:
            gradient = copied.grad.to(parameter.device)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    return _with_deep_copies(model, optimizer, loss_fn, images, labels, devices, hand_on)


@wrong("2.4", names="awkward")
def expects_a_gradient_of_each(model, optimizer, loss_fn, images, labels, devices):
    def hand_on(parameter, copied):
        parameter.grad += copied.grad.to(parameter.device)

    return _with_deep_copies(model, optimizer, loss_fn, images, labels, devices, hand_on)


@wrong("2.4", names="chunk-losses")
def adds_chunk_losses(model, optimizer, loss_fn, images, labels, devices):
    outputs = _outputs(model, images, devices)
    losses = [loss_fn(o, part) for o, part in zip(outputs, labels.chunk(len(devices)))]
    return _update(optimizer, sum(losses))


@wrong("2.4", names="buffers")
def runs_the_model_itself(model, optimizer, loss_fn, images, labels, devices):
    outputs = [model(chunk) for chunk in images.chunk(len(devices))]
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))


@wrong("2.4", names="runs-again")
def computes_the_loss_again(model, optimizer, loss_fn, images, labels, devices):
    _update(optimizer, loss_fn(torch.cat(_outputs(model, images, devices)), labels))
    return loss_fn(torch.cat(_outputs(model, images, devices)), labels).item()


@wrong("2.4", names="one-chunks-loss")
def returns_the_first_chunks_loss(model, optimizer, loss_fn, images, labels, devices):
    outputs = _outputs(model, images, devices)
    _update(optimizer, loss_fn(torch.cat(outputs), labels))
    return loss_fn(outputs[0], labels[: len(outputs[0])]).item()
