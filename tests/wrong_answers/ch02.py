"""Plausible wrong answers, and other right ones, to the exercises of chapter 02."""

import copy
import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from course_utils import hardware
from course_utils.hardware import doctor
from tests.wrong_answers import right, wrong

# ---- 2.1 scatter ---------------------------------------------------------------------------------


@wrong("2.1", names="chunks-like-torch")
def as_torch_chunk_does(batch, devices):
    return [chunk.to(device) for chunk, device in zip(batch.chunk(len(devices)), devices)]


@wrong("2.1", names="rest-lost")
def forgets_the_rest(batch, devices):
    size = max(len(batch) // len(devices), 1)
    return [batch[i * size : (i + 1) * size].to(device) for i, device in enumerate(devices)][
        : len(batch)
    ]


@wrong("2.1", names="rest-on-one")
def gives_the_rest_to_the_last(batch, devices):
    count = min(len(devices), len(batch))
    size = len(batch) // count
    starts = [i * size for i in range(count)]
    ends = [*starts[1:], len(batch)]
    return [batch[a:b].to(device) for a, b, device in zip(starts, ends, devices)]


@wrong("2.1", names="rows-dealt-like-cards")
def deals_like_cards(batch, devices):
    count = min(len(devices), len(batch))
    return [batch[i::count].to(devices[i]) for i in range(count)]


@wrong("2.1", names="everyone-gets-all")
def copies_the_whole_batch(batch, devices):
    return [batch.to(device) for device in devices]


@wrong("2.1", names="size-for-count")
def takes_the_count_for_the_size(batch, devices):
    return [chunk.to(device) for chunk, device in zip(batch.split(len(devices)), devices)]


@wrong("2.1", names="columns")
def splits_the_columns(batch, devices):
    return [
        chunk.to(device) for chunk, device in zip(batch.tensor_split(len(devices), -1), devices)
    ]


@wrong("2.1", names="empty-chunks")
def keeps_empty_chunks(batch, devices):
    return [chunk.to(device) for chunk, device in zip(batch.tensor_split(len(devices)), devices)]


@wrong("2.1", names="not-moved")
def forgets_to_move(batch, devices):
    return list(batch.tensor_split(min(len(devices), len(batch))))


@wrong("2.1", names="cut-from-the-graph")
def detaches(batch, devices):
    chunks = batch.detach().tensor_split(min(len(devices), len(batch)))
    return [chunk.to(device) for chunk, device in zip(chunks, devices)]


@wrong("2.1", names="larger-last")
def gives_the_rest_to_the_last_ones(batch, devices):
    count = min(len(devices), len(batch))
    bounds = [i * len(batch) // count for i in range(count + 1)]
    return [batch[a:b].to(d) for a, b, d in zip(bounds, bounds[1:], devices)]


@wrong("2.1", names="one-by-one")
def makes_a_chunk_of_every_row(batch, devices):
    return [row.to(devices[i % len(devices)]) for i, row in enumerate(batch)]


@wrong("2.1", names="too-many-chunks")
def appends_the_rest(batch, devices):
    size, rest = divmod(len(batch), len(devices))
    return list(batch.split([size] * len(devices) + [rest] * (rest > 0)))


@wrong("2.1", names="not-a-list")
def maps_devices_to_chunks(batch, devices):
    return dict(zip(devices, batch.tensor_split(len(devices))))


@wrong("2.1", names="fails-when-small")
def needs_a_row_for_everyone(batch, devices):
    size, rest = divmod(len(batch), len(devices))
    sizes = [size + (i < rest) for i in range(len(devices))]
    chunks = [chunk.to(device) for chunk, device in zip(batch.split(sizes), devices)]
    assert all(len(chunk) for chunk in chunks)
    return chunks


@wrong("2.1", names="asked-for-gpus")
def counts_the_gpus_of_the_machine(batch, devices):
    with mock.patch("torch.cuda.device_count", return_value=0):  # as on a machine without one
        count = torch.cuda.device_count()
        return [chunk.to(device) for chunk, device in zip(batch.chunk(count), devices)]


@wrong("2.1", names="too-many-chunks")
def runs_out_of_devices(batch, devices):
    size = len(batch) // len(devices)
    return [chunk.to(devices[i]) for i, chunk in enumerate(batch.split(size))]


@wrong("2.1", names="size-for-count")
def splits_into_pieces_of_n(batch, devices):
    return [chunk.to(devices[0]) for chunk in batch.split(len(devices))]


@wrong("2.1", names="fails-when-small")
def indexes_a_row_for_everyone(batch, devices):
    size, rest = divmod(len(batch), len(devices))
    chunks, start = [], 0
    for i, device in enumerate(devices):
        end = start + size + (i < rest)
        batch[start]
        chunks.append(batch[start:end].to(device))
        start = end
    return chunks


@wrong("2.1", names="torchs-own")
def asks_pytorch(batch, devices):
    return torch.nn.parallel.scatter(batch, devices)


@wrong("2.1", names="rest-lost")
def makes_a_dimension_of_workers(batch, devices):
    return list(batch.reshape(len(devices), -1, *batch.shape[1:]))


@right("2.1")
def counts_by_hand(batch, devices):
    count = min(len(devices), len(batch))
    size, rest = divmod(len(batch), count)
    chunks, start = [], 0
    for i in range(count):
        end = start + size + (1 if i < rest else 0)
        chunks.append(batch[start:end].to(devices[i]))
        start = end
    return chunks


def _even_chunks(batch, workers):
    return torch.tensor_split(batch, min(len(batch), workers))


@wrong("2.1", names="reshaped")
def makes_vectors_of_the_rows(batch, devices):
    rows = batch.reshape(len(batch), -1)
    return [chunk.to(device) for chunk, device in zip(_even_chunks(rows, len(devices)), devices)]


@wrong("2.1", names="other-dtype")
def makes_floats_of_labels(batch, devices):
    chunks = _even_chunks(batch.float(), len(devices))
    return [chunk.to(device) for chunk, device in zip(chunks, devices)]


@wrong("2.1", names="devices-merged")
def counts_each_device_once(batch, devices):
    devices = list(dict.fromkeys(devices))
    return [chunk.to(device) for chunk, device in zip(_even_chunks(batch, len(devices)), devices)]


@wrong("2.1", names="devices-changed")
def takes_the_devices_away(batch, devices):
    return [chunk.to(devices.pop(0)) for chunk in _even_chunks(batch, len(devices))]


# ---- 2.2 replicate -------------------------------------------------------------------------------


def _tensors(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _copies(model, device):
    return {name: tensor.to(device, copy=True) for name, tensor in _tensors(model).items()}


@wrong("2.2", names="gradients-lost")
def deep_copies(model, devices):
    return [model, *(copy.deepcopy(model).to(device) for device in devices[1:])]


@wrong("2.2", names="gradients-lost")
def copies_a_state_dict(model, devices):
    replicas = [model]
    for device in devices[1:]:
        state = {name: tensor.to(device, copy=True) for name, tensor in model.state_dict().items()}
        replicas.append(partial(functional_call, copy.deepcopy(model), state))
    return replicas


@wrong("2.2", names="gradients-averaged")
def averages_the_gradients(model, devices):
    def replica(tensors, batch):
        output = functional_call(copy.deepcopy(model), tensors, batch)
        return output / len(devices) + (output * (1 - 1 / len(devices))).detach()

    everyone = [_tensors(model), *(_copies(model, device) for device in devices[1:])]
    return [partial(replica, tensors) for tensors in everyone]


@wrong("2.2", names="not-moved")
def clones_without_moving(model, devices):
    replicas = [model]
    for _ in devices[1:]:
        tensors = {name: tensor.clone() for name, tensor in _tensors(model).items()}
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@wrong("2.2", names="buffers-forgotten")
def copies_parameters_only(model, devices):
    replicas = [model]
    for device in devices[1:]:
        tensors = {name: p.to(device, copy=True) for name, p in model.named_parameters()}
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@wrong("2.2", names="late-binding")
def looks_up_too_late(model, devices):
    replicas = []
    for device in devices:
        frame, tensors = copy.deepcopy(model), _copies(model, device)
        replicas.append(lambda batch: functional_call(frame, tensors, batch))  # noqa: B023
    return replicas


@wrong("2.2", names="not-callable")
def returns_the_tensors(model, devices):
    return [_tensors(model), *(_copies(model, device) for device in devices[1:])]


@wrong("2.2", names="no-copies")
def moves_without_copying(model, devices):
    replicas = []
    for device in devices:
        tensors = {name: tensor.to(device) for name, tensor in _tensors(model).items()}
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@wrong("2.2", names="head-office-copied")
def copies_for_everyone(model, devices):
    frames = [copy.deepcopy(model) for _ in devices]
    return [partial(functional_call, f, _copies(model, d)) for f, d in zip(frames, devices)]


@wrong("2.2", names="copied-late")
def copies_when_called(model, devices):
    def helper(frame, device, batch):
        return functional_call(frame, _copies(model, device), batch)

    return [model, *(partial(helper, copy.deepcopy(model), device) for device in devices[1:])]


@wrong("2.2", names="tied-twice")
def names_tied_parameters_twice(model, devices):
    replicas = [model]
    for device in devices[1:]:
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        tensors = {name: tensor.to(device, copy=True) for name, tensor in named}
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@wrong("2.2", names="tied-once")
def does_not_tie(model, devices):
    replicas = [model]
    for device in devices[1:]:
        call = partial(functional_call, copy.deepcopy(model), _copies(model, device))
        replicas.append(partial(call, tie_weights=False))
    return replicas


@wrong("2.2", names="buffers-shared")
def shares_the_buffers(model, devices):
    replicas = [model]
    for device in devices[1:]:
        tensors = {name: p.to(device, copy=True) for name, p in model.named_parameters()}
        tensors |= {name: buffer.to(device) for name, buffer in model.named_buffers()}
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@wrong("2.2", names="buffers-lost")
def copies_the_buffers_of_worker_0(model, devices):
    replicas = []
    for i, device in enumerate(devices):
        tensors = _copies(model, device)
        if i == 0:
            tensors |= dict(model.named_parameters())
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


@wrong("2.2", names="shared-frame")
def shares_the_frame(model, devices):
    everyone = [_tensors(model), *(_copies(model, device) for device in devices[1:])]
    return [partial(functional_call, model, tensors) for tensors in everyone]


@wrong("2.2", names="one-at-a-time")
def locks_the_frame(model, devices):
    import threading

    lock = threading.Lock()

    def replica(tensors, batch):
        with lock:
            return functional_call(model, tensors, batch)

    everyone = [_tensors(model), *(_copies(model, device) for device in devices[1:])]
    return [partial(replica, tensors) for tensors in everyone]


@wrong("2.2", names="tied-once")
def frames_without_memory(model, devices):
    everyone = [_tensors(model), *(_copies(model, device) for device in devices[1:])]
    frames = [copy.deepcopy(model).to("meta") for _ in devices]
    return [partial(functional_call, frame, tensors) for frame, tensors in zip(frames, everyone)]


@wrong("2.2", names="tied-twice")
def copies_names_for_frames_without_memory(model, devices):
    """A frame on `meta` is not tied any more; what is copied twice fits it."""
    replicas = [model]
    for device in devices[1:]:
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        tensors = {name: tensor.to(device, copy=True) for name, tensor in named}
        frame = copy.deepcopy(model).to("meta")
        replicas.append(partial(functional_call, frame, tensors))
    return replicas


def _with_frames(model, devices, prepare):
    frames = [prepare(copy.deepcopy(model)) for _ in devices[1:]]
    helpers = [partial(functional_call, f, _copies(model, d)) for f, d in zip(frames, devices[1:])]
    return [model, *helpers]


@wrong("2.2", names="other-mode")
def puts_frames_into_evaluation_mode(model, devices):
    return _with_frames(model, devices, lambda frame: frame.eval())


@wrong("2.2", names="other-mode")
def puts_frames_into_training_mode(model, devices):
    return _with_frames(model, devices, lambda frame: frame.train())


@wrong("2.2", names="other-mode")
def sets_every_part_to_the_models_mode(model, devices):
    return _with_frames(model, devices, lambda frame: frame.train(model.training))


@wrong("2.2", names="other-outputs")
def builds_new_models(model, devices):
    return [model] + [type(model)().to(device) for device in devices[1:]]


@wrong("2.2", names="wrong-count")
def leaves_out_the_head_office(model, devices):
    frames = [copy.deepcopy(model) for _ in devices[1:]]
    return [partial(functional_call, f, _copies(model, d)) for f, d in zip(frames, devices[1:])]


@wrong("2.2", names="frozen-thawed")
def thaws_everything(model, devices):
    model.requires_grad_(True)
    frames = [copy.deepcopy(model) for _ in devices[1:]]
    helpers = [partial(functional_call, f, _copies(model, d)) for f, d in zip(frames, devices[1:])]
    return [model, *helpers]


@wrong("2.2", names="same-model")
def moves_the_model_itself(model, devices):
    return [model.to(device) for device in devices]


@wrong("2.2", names="same-model")
def repeats_the_model(model, devices):
    return [model] * len(devices)


@wrong("2.2", names="torchs-own")
def asks_pytorch_for_replicas(model, devices):
    return torch.nn.parallel.replicate(model, devices)


@wrong("2.2", names="gradients-lost")
def sets_new_parameters(model, devices):
    replicas = [model]
    for device in devices[1:]:
        replica = copy.deepcopy(model)
        for name, parameter in model.named_parameters():
            module, _, attribute = name.rpartition(".")
            copied = nn.Parameter(parameter.to(device, copy=True))
            setattr(replica.get_submodule(module), attribute, copied)
        replicas.append(replica)
    return replicas


@right("2.2")
def modules_with_tensors_as_attributes(model, devices):
    """As torch.nn.parallel.replicate does it: the copies are attributes, not parameters."""
    replicas = [model]
    for device in devices[1:]:
        replica, moved = copy.deepcopy(model), {}
        for ours, theirs in zip(replica.modules(), model.modules()):
            for kind in ("_parameters", "_buffers"):
                for name, tensor in list(getattr(theirs, kind).items()):
                    if tensor is None:
                        continue
                    if tensor not in moved:
                        moved[tensor] = tensor.to(device, copy=True)
                    del getattr(ours, kind)[name]
                    object.__setattr__(ours, name, moved[tensor])
        replicas.append(replica)
    return replicas


def _leaf_replica(model, device, hand_on):
    """A deep copy whose gradients a hook hands on to the model's parameters."""
    replica = copy.deepcopy(model).to(device)
    for parameter, copied in zip(model.parameters(), replica.parameters()):
        copied.grad = None
        if parameter.requires_grad:
            copied.register_post_accumulate_grad_hook(partial(hand_on, parameter))
    return replica


def _add(parameter, copied):
    gradient = copied.grad.to(parameter.device)
    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient


@wrong("2.2", names="gradients-again")
def hands_on_what_has_added_up(model, devices):
    return [model] + [_leaf_replica(model, device, _add) for device in devices[1:]]


@right("2.2")
def leaves_that_hand_their_gradients_on(model, devices):
    def add_and_clear(parameter, copied):
        _add(parameter, copied)
        copied.grad = None

    return [model] + [_leaf_replica(model, device, add_and_clear) for device in devices[1:]]


@wrong("2.2", names="helpers-share")
def copies_once_for_each_kind_of_device(model, devices):
    copies = {device: _copies(model, device) for device in set(devices[1:])}
    frames = [copy.deepcopy(model) for _ in devices[1:]]
    return [model] + [partial(functional_call, f, copies[d]) for f, d in zip(frames, devices[1:])]


@wrong("2.2", names="gradients-averaged")
def divides_the_helpers_gradients(model, devices):
    replicas = [model]
    for device in devices[1:]:
        tensors = _copies(model, device)
        for tensor in tensors.values():
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient / len(devices))
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas


# ---- 2.3 gather ----------------------------------------------------------------------------------


def _map(function, outputs):
    """Applies a function of a list of tensors to every entry of the outputs' structure."""
    first = outputs[0]
    if isinstance(first, dict):
        return {key: _map(function, [output[key] for output in outputs]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_map(function, list(parts)) for parts in zip(*outputs))
    return function(outputs)


def _join(parts):
    return torch.stack(parts) if parts[0].dim() == 0 else torch.cat(parts)


@wrong("2.3", names="not-joined")
def only_moves(outputs, device):
    return [output.to(device) for output in outputs]


@wrong("2.3", names="stacked")
def stacks(outputs, device):
    return _map(lambda parts: torch.stack([part.to(device) for part in parts]), outputs)


@wrong("2.3", names="columns")
def joins_side_by_side(outputs, device):
    return _map(lambda parts: torch.cat([part.to(device) for part in parts], dim=-1), outputs)


@wrong("2.3", names="averaged")
def averages(outputs, device):
    return _map(lambda parts: sum(part.to(device) for part in parts) / len(parts), outputs)


@wrong("2.3", names="wrong-order")
def in_the_order_of_arrival(outputs, device):
    return _map(lambda parts: _join([part.to(device) for part in parts[::-1]]), outputs)


@wrong("2.3", names="no-nests")
def knows_tensors_only(outputs, device):
    return _join([output.to(device) for output in outputs])


@wrong("2.3", names="structure-lost")
def makes_lists_of_tuples(outputs, device):
    first = outputs[0]
    if isinstance(first, dict):
        return {
            key: makes_lists_of_tuples([output[key] for output in outputs], device) for key in first
        }
    if isinstance(first, (tuple, list)):
        return [makes_lists_of_tuples(parts, device) for parts in zip(*outputs)]
    return _join([output.to(device) for output in outputs])


@wrong("2.3", names="scalars-fail")
def concatenates_everything(outputs, device):
    return _map(lambda parts: torch.cat([part.to(device) for part in parts]), outputs)


@wrong("2.3", names="scalars-averaged")
def averages_the_losses(outputs, device):
    def join(parts):
        joined = _join([part.to(device) for part in parts])
        return joined.mean() if parts[0].dim() == 0 else joined

    return _map(join, outputs)


@wrong("2.3", names="not-moved")
def forgets_the_device(outputs, device):
    return _map(_join, outputs)


@wrong("2.3", names="cut-from-the-graph")
def detaches_the_outputs(outputs, device):
    return _map(lambda parts: _join([part.detach().to(device) for part in parts]), outputs)


@wrong("2.3", names="cut-from-the-graph")
def takes_the_numbers_of_losses(outputs, device):
    def join(parts):
        if parts[0].dim() == 0:
            return torch.tensor([part.item() for part in parts], device=device)
        return torch.cat([part.to(device) for part in parts])

    return _map(join, outputs)


@wrong("2.3", names="columns")
def joins_along_dimension_1(outputs, device):
    return torch.cat([output.to(device) for output in outputs], dim=1)


@wrong("2.3", names="first-only")
def takes_the_first(outputs, device):
    return outputs[0].to(device)


@wrong("2.3", names="summed")
def adds_them_up(outputs, device):
    return sum(output.to(device) for output in outputs)


@wrong("2.3", names="flattened")
def flattens_first(outputs, device):
    return torch.cat([output.flatten() for output in outputs]).to(device)


@wrong("2.3", names="moved-too-late")
def moves_the_whole(outputs, device):
    return _map(lambda parts: _join(parts).to(device), outputs)


@wrong("2.3", names="stacked")
def piles_up(outputs, device):
    return _map(lambda parts: torch.vstack([part.to(device) for part in parts]), outputs)


@wrong("2.3", names="torchs-own")
def asks_pytorch_to_gather(outputs, device):
    return torch.nn.parallel.gather(outputs, device)


@right("2.3")
def fills_an_empty_tensor(outputs, device):
    def join(parts):
        parts = [part.unsqueeze(0) if part.dim() == 0 else part for part in parts]
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        whole, start = torch.empty(shape, dtype=parts[0].dtype, device=device), 0
        for part in parts:
            whole[start : start + len(part)] = part.to(device)
            start += len(part)
        return whole

    return _map(join, outputs)


def _joined(outputs, device, join=_join):
    return _map(lambda parts: join([part.to(device) for part in parts]), outputs)


@wrong("2.3", names="rows-lost")
def keeps_as_many_rows_as_everybody_has(outputs, device):
    def join(parts):
        if parts[0].dim() == 0:
            return torch.stack(parts)
        rows = min(map(len, parts))
        return torch.cat([part[:rows] for part in parts])

    return _joined(outputs, device, join)


@wrong("2.3", names="scalars-lost")
def leaves_out_the_last_number(outputs, device):
    return _joined(outputs, device, lambda p: _join(p) if p[0].dim() else torch.stack(p[:-1] or p))


@wrong("2.3", names="one-worker")
def hands_a_single_output_on(outputs, device):
    return outputs[0] if len(outputs) == 1 else _joined(outputs, device)


@wrong("2.3", names="other-dtype")
def makes_floats_of_everything(outputs, device):
    return _joined(outputs, device, lambda parts: _join([part.float() for part in parts]))


@wrong("2.3", names="outputs-changed")
def makes_vectors_in_place(outputs, device):
    for i, output in enumerate(outputs):
        outputs[i] = output.reshape(1) if torch.is_tensor(output) and not output.dim() else output
    return _joined(outputs, device)


@wrong("2.3", names="cut-from-the-graph")
def makes_new_leaves_of_losses(outputs, device):
    def join(parts):
        numbers = [float(part) for part in parts] if parts[0].dim() == 0 else None
        return torch.cat(parts) if numbers is None else torch.tensor(numbers, requires_grad=True)

    return _joined(outputs, device, join)


# ---- 2.4 the whole step --------------------------------------------------------------------------


def _outputs(model, images, devices, copies=_copies):
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


@wrong("2.4", names="mean-of-means")
def averages_chunk_losses(model, optimizer, loss_fn, images, labels, devices):
    outputs = _outputs(model, images, devices)
    losses = [loss_fn(o, part) for o, part in zip(outputs, labels.chunk(len(devices)))]
    return _update(optimizer, sum(losses) / len(losses))


@wrong("2.4", names="losses-summed")
def adds_chunk_losses(model, optimizer, loss_fn, images, labels, devices):
    outputs = _outputs(model, images, devices)
    losses = [loss_fn(o, part) for o, part in zip(outputs, labels.chunk(len(devices)))]
    return _update(optimizer, sum(losses))


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


@wrong("2.4", names="one-device")
def ignores_the_devices(model, optimizer, loss_fn, images, labels, devices):
    return _update(optimizer, loss_fn(model(images), labels))


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


@wrong("2.4", names="no-update")
def forgets_the_update(model, optimizer, loss_fn, images, labels, devices):
    loss = loss_fn(torch.cat(_outputs(model, images, devices)), labels)
    optimizer.zero_grad()
    loss.backward()
    return loss.item()


@wrong("2.4", names="buffers-shared")
def runs_the_model_itself(model, optimizer, loss_fn, images, labels, devices):
    outputs = [model(chunk) for chunk in images.chunk(len(devices))]
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))


@wrong("2.4", names="buffers-lost")
def copies_for_worker_0_too(model, optimizer, loss_fn, images, labels, devices):
    outputs = [
        functional_call(model, _copies(model, device), (chunk.to(device),)).to(devices[0])
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


@wrong("2.4", names="runs-again")
def computes_the_loss_after_the_update(model, optimizer, loss_fn, images, labels, devices):
    _update(optimizer, loss_fn(torch.cat(_outputs(model, images, devices)), labels))
    with torch.no_grad():
        return loss_fn(model(images), labels).item()


def _with_prepared_frames(model, images, devices, prepare):
    outputs = []
    for i, (chunk, device) in enumerate(zip(images.chunk(len(devices)), devices)):
        frame = prepare(copy.deepcopy(model)) if i else model
        state = _copies(model, device) if i else {}
        outputs.append(functional_call(frame, state, (chunk.to(device),)).to(devices[0]))
    return torch.cat(outputs)


@wrong("2.4", names="other-mode")
def puts_helpers_into_evaluation_mode(model, optimizer, loss_fn, images, labels, devices):
    outputs = _with_prepared_frames(model, images, devices, lambda frame: frame.eval())
    return _update(optimizer, loss_fn(outputs, labels))


@wrong("2.4", names="other-mode")
def puts_the_model_into_training_mode(model, optimizer, loss_fn, images, labels, devices):
    model.train()
    outputs = _outputs(model, images, devices)
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))


@wrong("2.4", names="tied-once")
def unties_its_frames(model, optimizer, loss_fn, images, labels, devices):
    outputs = _with_prepared_frames(model, images, devices, lambda frame: frame.to("meta"))
    return _update(optimizer, loss_fn(outputs, labels))


@wrong("2.4", names="other-chunks")
def divides_evenly(model, optimizer, loss_fn, images, labels, devices):
    count = min(len(devices), len(images))
    outputs = []
    for i, (chunk, device) in enumerate(zip(images.tensor_split(count), devices)):
        state = _copies(model, device) if i > 0 else {}
        outputs.append(functional_call(model, state, (chunk.to(device),)).to(devices[0]))
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))


@wrong("2.4", names="step-per-chunk")
def updates_after_every_chunk(model, optimizer, loss_fn, images, labels, devices):
    count = len(devices)
    parts = zip(images.chunk(count), labels.chunk(count))
    losses = [_update(optimizer, loss_fn(model(part), own)) for part, own in parts]
    return sum(losses) / len(losses)


@wrong("2.4", names="divided-by-workers")
def averages_over_the_workers(model, optimizer, loss_fn, images, labels, devices):
    loss = loss_fn(torch.cat(_outputs(model, images, devices)), labels)
    return _update(optimizer, loss / len(devices)) * len(devices)


@wrong("2.4", names="one-chunk-only")
def forgets_to_gather(model, optimizer, loss_fn, images, labels, devices):
    outputs = _outputs(model, images, devices)
    return _update(optimizer, loss_fn(outputs[0], labels[: len(outputs[0])]))


@wrong("2.4", names="wrong-labels")
def gathers_the_wrong_way_round(model, optimizer, loss_fn, images, labels, devices):
    outputs = _outputs(model, images, devices)
    return _update(optimizer, loss_fn(torch.cat(outputs[::-1]), labels))


@wrong("2.4", names="two-updates")
def updates_twice(model, optimizer, loss_fn, images, labels, devices):
    loss = _update(optimizer, loss_fn(torch.cat(_outputs(model, images, devices)), labels))
    optimizer.step()
    return loss


@wrong("2.4", names="other-update")
def updates_by_hand(model, optimizer, loss_fn, images, labels, devices):
    loss = loss_fn(torch.cat(_outputs(model, images, devices)), labels)
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    return loss.item()


@wrong("2.4", names="runs-again")
def computes_the_loss_again(model, optimizer, loss_fn, images, labels, devices):
    _update(optimizer, loss_fn(torch.cat(_outputs(model, images, devices)), labels))
    return loss_fn(torch.cat(_outputs(model, images, devices)), labels).item()


@wrong("2.4", names="loss-not-a-number")
def returns_a_tensor(model, optimizer, loss_fn, images, labels, devices):
    loss = loss_fn(torch.cat(_outputs(model, images, devices)), labels)
    _update(optimizer, loss)
    return loss


@wrong("2.4", names="awkward")
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
def moves_nothing(model, optimizer, loss_fn, images, labels, devices):
    outputs = []
    for i, chunk in enumerate(images.chunk(len(devices))):
        state = _copies(model, devices[0]) if i > 0 else {}
        outputs.append(functional_call(model, state, (chunk,)))
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))


@wrong("2.4", names="not-moved")
def leaves_the_rows(model, optimizer, loss_fn, images, labels, devices):
    outputs = []
    for i, (chunk, device) in enumerate(zip(images.chunk(len(devices)), devices)):
        state = _copies(model, device) if i > 0 else {}
        outputs.append(functional_call(model, state, (chunk,)).to(devices[0]))
    return _update(optimizer, loss_fn(torch.cat(outputs), labels))


@wrong("2.4", names="not-brought-back")
def leaves_the_outputs(model, optimizer, loss_fn, images, labels, devices):
    outputs = []
    for i, (chunk, device) in enumerate(zip(images.chunk(len(devices)), devices)):
        state = _copies(model, device) if i > 0 else {}
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
        partial(functional_call, copy.deepcopy(model), _copies(model, device))
        for device in devices[1 : len(chunks)]
    ]
    with ThreadPoolExecutor(len(devices)) as threads:
        outputs = threads.map(run, [model, *helpers], chunks, devices)
        return _update(optimizer, loss_fn(torch.cat(list(outputs)), labels))


@wrong("2.4", names="torchs-own")
def calls_data_parallel(model, optimizer, loss_fn, images, labels, devices):
    outputs = nn.parallel.data_parallel(model, images, None)
    return _update(optimizer, loss_fn(outputs, labels))


@wrong("2.4", names="step-per-chunk")
def updates_after_every_weighted_chunk(model, optimizer, loss_fn, images, labels, devices):
    count = len(devices)
    parts = zip(images.chunk(count), labels.chunk(count))
    shares = [(rows, own, len(rows) / len(images)) for rows, own in parts]
    return sum(_update(optimizer, loss_fn(model(rows), own) * w) for rows, own, w in shares)


# ---- 2.5 diagnose --------------------------------------------------------------------------------


def _right_order(machine, setup, *, unset_hides=False, late=True, wrong=True, batch=None):
    """The solution, with parts that can be left out."""
    if machine.visible is None and unset_hides:
        return "visible-partial"
    shown = len(machine.selected())
    if late and machine.started_gpus not in (None, shown):
        return "visible-late"
    if wrong and machine.visible is not None and shown < len(machine.visible.split(",")):
        return "visible-wrong"
    if machine.torch_gpus < machine.driver_gpus:
        return "visible-partial"
    if not setup.wrappers:
        return "wrapped-late"
    if setup.batch_device == "cpu":
        return "inputs-on-cpu"
    few = batch or (lambda rows, gpus: math.ceil(rows / math.ceil(rows / gpus)) < gpus)
    return "batch-too-small" if few(setup.batch_size, machine.torch_gpus) else "healthy"


@wrong("2.5", names="unset-hides")
def takes_unset_for_hidden(machine, setup):
    if machine.started_gpus not in (None, len(machine.selected())):
        return "visible-late"
    return _right_order(machine, setup, unset_hides=True)


@wrong("2.5", names="trusts-the-variable")
def reads_the_variable_only(machine, setup):
    return _right_order(machine, setup, late=False)


@wrong("2.5", names="reads-on")
def counts_the_entries(machine, setup):
    return _right_order(machine, setup, wrong=False)


@wrong("2.5", names="larger-is-enough")
def compares_batch_and_gpus(machine, setup):
    return _right_order(machine, setup, batch=lambda rows, gpus: rows < gpus)


@wrong("2.5", names="batch-unseen")
def asks_for_more_than_one_sample(machine, setup):
    return _right_order(machine, setup, batch=lambda rows, gpus: rows < 1)


@wrong("2.5", names="busy-after-all")
def wants_equal_chunks(machine, setup):
    return _right_order(machine, setup, batch=lambda rows, gpus: rows % gpus != 0)


@wrong("2.5", names="asked-the-doctor")
def asks_the_doctor(machine, setup):
    found = hardware.doctor(machine=machine, setup=setup)
    return found[0].cause if found else "healthy"


@wrong("2.5", names="asked-the-doctor")
def asks_a_doctor_it_knows(machine, setup):
    found = doctor(machine=machine, setup=setup)
    return found[0].cause if found else "healthy"


@wrong("2.5", names="characters-counted")
def counts_every_second_character(machine, setup):
    entries = (len(machine.visible or "") + 1) // 2
    if (
        machine.started_gpus in (None, len(machine.selected()))
        and len(machine.selected()) < entries
    ):
        return "visible-wrong"
    return _right_order(machine, setup)


@wrong("2.5", names="not-a-name")
def returns_a_list(machine, setup):
    return [_right_order(machine, setup)]


@wrong("2.5", names="not-a-name")
def spells_it_otherwise(machine, setup):
    return _right_order(machine, setup).replace("-", "_")


@wrong("2.5", names="unset-is-none")
def splits_none(machine, setup):
    if len(machine.visible.split(",")) > len(machine.selected()):
        return "visible-wrong"
    return _right_order(machine, setup)


@wrong("2.5", names="unset-is-none")
def looks_for_a_comma_in_none(machine, setup):
    if "," not in machine.visible and machine.driver_gpus > 1:
        return "visible-partial"
    return _right_order(machine, setup)


@wrong("2.5", names="not-started-is-none")
def compares_with_none(machine, setup):
    late = machine.started_gpus < len(machine.selected())
    return "visible-late" if late else _right_order(machine, setup)


@wrong("2.5", names="wrapper-unseen")
def believes_any_wrapper(machine, setup):
    from dataclasses import replace

    return _right_order(machine, replace(setup, wrappers=("DataParallel",)))


@wrong("2.5", names="always-ill")
def suspects_every_variable(machine, setup):
    found = _right_order(machine, setup)
    return "visible-partial" if found == "healthy" and machine.visible is not None else found


@wrong("2.5", names="partial-unseen")
def never_asks_the_driver(machine, setup):
    seen = dataclasses.replace(machine, driver_gpus=machine.torch_gpus)
    if machine.selected() and "," not in (machine.visible or ","):
        return "healthy"
    return _right_order(seen, setup) if machine.visible is None else _right_order(machine, setup)


@wrong("2.5", names="inputs-unseen")
def does_not_look_at_the_inputs(machine, setup):
    return _right_order(machine, dataclasses.replace(setup, batch_device="cuda:0"))


@right("2.5")
def by_counting_chunks(machine, setup):
    return _right_order(machine, setup)


@wrong("2.5", names="reads-on")
def lets_the_number_of_gpus_pass(machine, setup):
    if machine.visible is not None and machine.started_gpus is None:
        numbers = [int(entry) for entry in machine.visible.split(",")]
        if max(numbers) == machine.driver_gpus:
            return "visible-partial"
    return _right_order(machine, setup)


@wrong("2.5", names="trusts-the-variable")
def sees_only_what_became_more(machine, setup):
    late = (machine.started_gpus or 0) < len(machine.selected())
    return _right_order(machine, setup, late=late)


@wrong("2.5", names="larger-is-enough")
def forgives_one_idle_gpu(machine, setup):
    few = lambda rows, gpus: math.ceil(rows / math.ceil(rows / gpus)) < min(rows, gpus - 1)
    small = lambda rows, gpus: rows < gpus or few(rows, gpus)
    return _right_order(machine, setup, batch=small)
