"""2.4, `data_parallel_step`: answers written from the stub alone."""

import copy

import torch


def _shares(model, images, labels, devices):
    """(worker, images, labels) for each chunk: the model itself, then a deep copy for each helper."""
    chunks = zip(devices, images.chunk(len(devices)), labels.chunk(len(devices)))
    helpers = [copy.deepcopy(model).to(device) for device in devices[1:]]
    for worker, (device, x, y) in zip([model, *helpers], chunks):
        yield worker, x.to(device), y.to(device)


def _add_gradients(model, helper):
    for own, other in zip(model.parameters(), helper.parameters()):
        if other.grad is not None:
            gradient = other.grad.to(own.device)
            own.grad = gradient if own.grad is None else own.grad + gradient


def mean_of_chunk_means(model, optimizer, loss_fn, images, labels, devices):
    """Each chunk counts the same, whatever its number of rows."""
    optimizer.zero_grad()
    shares = list(_shares(model, images, labels, devices))
    total = 0.0
    for worker, x, y in shares:
        loss = loss_fn(worker(x), y) / len(shares)
        loss.backward()
        total += loss.item()
        if worker is not model:
            _add_gradients(model, worker)
    optimizer.step()
    return total


def old_gradients_stay(model, optimizer, loss_fn, images, labels, devices):
    """No zero_grad before the step, neither for the model nor for the copies made of it."""
    total = 0.0
    for worker, x, y in _shares(model, images, labels, devices):
        if worker is not model:
            worker.zero_grad()
        loss = loss_fn(worker(x), y) * len(x) / len(images)
        loss.backward()
        total += loss.item()
        if worker is not model:
            _add_gradients(model, worker)
    optimizer.step()
    return total


def only_the_first_chunk_learns(model, optimizer, loss_fn, images, labels, devices):
    """The helpers' gradients stay in their copies; only those of the first chunk are applied."""
    optimizer.zero_grad()
    total = 0.0
    for worker, x, y in _shares(model, images, labels, devices):
        loss = loss_fn(worker(x), y) * len(x) / len(images)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def a_step_for_each_chunk(model, optimizer, loss_fn, images, labels, devices):
    """optimizer.step() stands inside the loop, so that each chunk makes an update of its own."""
    total = 0.0
    for worker, x, y in _shares(model, images, labels, devices):
        optimizer.zero_grad()
        worker.zero_grad()
        loss = loss_fn(worker(x), y) * len(x) / len(images)
        loss.backward()
        total += loss.item()
        if worker is not model:
            _add_gradients(model, worker)
        optimizer.step()
    return total


def all_through_the_model(model, optimizer, loss_fn, images, labels, devices):
    """Accumulates over the chunks with the model itself: no copies, so all change its buffers."""
    optimizer.zero_grad()
    total = 0.0
    chunks = zip(devices, images.chunk(len(devices)), labels.chunk(len(devices)))
    for device, x, y in chunks:
        model.to(device)
        loss = loss_fn(model(x.to(device)), y.to(device)) * len(x) / len(images)
        loss.backward()
        total += loss.item()
    model.to(devices[0])
    optimizer.step()
    return total


def zeros_for_unused(model, optimizer, loss_fn, images, labels, devices):
    """Collects into zeros, so a parameter that gets no gradient in this step has zeros, not None."""
    optimizer.zero_grad()
    total = 0.0
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for worker, x, y in _shares(model, images, labels, devices):
        loss = loss_fn(worker(x), y) * len(x) / len(images)
        loss.backward()
        total += loss.item()
        for into, p in zip(sums, worker.parameters()):
            if p.grad is not None:
                into += p.grad.to(into.device)
    for p, gradient in zip(model.parameters(), sums):
        p.grad = gradient
    optimizer.step()
    return total


def loss_of_the_first_chunk(model, optimizer, loss_fn, images, labels, devices):
    """The step is right; what is returned is the mean loss of the first chunk alone."""
    optimizer.zero_grad()
    losses = []
    for worker, x, y in _shares(model, images, labels, devices):
        loss = loss_fn(worker(x), y)
        losses.append(loss.item())
        (loss * len(x) / len(images)).backward()
        if worker is not model:
            _add_gradients(model, worker)
    optimizer.step()
    return losses[0]


def everything_in_training_mode(model, optimizer, loss_fn, images, labels, devices):
    """Calls train() on every worker, so parts in evaluation mode leave it."""
    optimizer.zero_grad()
    total = 0.0
    for worker, x, y in _shares(model, images, labels, devices):
        worker.train()
        loss = loss_fn(worker(x), y) * len(x) / len(images)
        loss.backward()
        total += loss.item()
        if worker is not model:
            _add_gradients(model, worker)
    optimizer.step()
    return total


ANSWERS = {
    "2.4": [
        mean_of_chunk_means,
        old_gradients_stay,
        only_the_first_chunk_learns,
        a_step_for_each_chunk,
        all_through_the_model,
        zeros_for_unused,
        loss_of_the_first_chunk,
        everything_in_training_mode,
    ]
}
