"""Answers to 2.3, `gather`: wrong in a plausible way, or right in another."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.wrong_answers import right, wrong


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


@wrong("2.3", names="made-one")
def averages(outputs, device):
    return _map(lambda parts: sum(part.to(device) for part in parts) / len(parts), outputs)


@wrong("2.3", names="wrong-order")
def in_the_order_of_arrival(outputs, device):
    return _map(lambda parts: _join([part.to(device) for part in parts[::-1]]), outputs)


@wrong("2.3", names="structure")
def knows_tensors_only(outputs, device):
    return _join([output.to(device) for output in outputs])


@wrong("2.3", names="scalars")
def concatenates_everything(outputs, device):
    return _map(lambda parts: torch.cat([part.to(device) for part in parts]), outputs)


@wrong("2.3", names="not-moved")
def forgets_the_device(outputs, device):
    return _map(_join, outputs)


@wrong("2.3", names="cut-from-the-graph")
def detaches_the_outputs(outputs, device):
    return _map(lambda parts: _join([part.detach().to(device) for part in parts]), outputs)


@wrong("2.3", names="reshaped")
def flattens_first(outputs, device):
    return torch.cat([output.flatten() for output in outputs]).to(device)


@wrong("2.3", names="moved-too-late")
def moves_the_whole(outputs, device):
    return _map(lambda parts: _join(parts).to(device), outputs)


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


@wrong("2.3", names="other-dtype")
def makes_floats_of_everything(outputs, device):
    return _joined(outputs, device, lambda parts: _join([part.float() for part in parts]))


@wrong("2.3", names="input-changed")
def makes_vectors_in_place(outputs, device):
    for i, output in enumerate(outputs):
        outputs[i] = output.reshape(1) if torch.is_tensor(output) and not output.dim() else output
    return _joined(outputs, device)


@right("2.3")
def with_pytorchs_own_trees(outputs, device):
    flat = [tree_flatten(output) for output in outputs]
    joined = [
        torch.cat([torch.atleast_1d(tensor).to(device) for tensor in parts])
        for parts in zip(*(tensors for tensors, _ in flat))
    ]
    return tree_unflatten(joined, flat[0][1])


@right("2.3")
def moves_in_threads(outputs, device):
    def join(parts):
        with ThreadPoolExecutor() as pool:
            return _join(list(pool.map(lambda part: part.to(device), parts)))

    return _map(join, outputs)
