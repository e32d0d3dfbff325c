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
        if parts[0].dim():
            return torch.cat(parts)
        numbers = [float(part) for part in parts]
        return torch.tensor(numbers, device=device, requires_grad=True)

    return _joined(outputs, device, join)


@wrong("2.3", names="not-moved")
def moves_no_numbers(outputs, device):
    def join(parts):
        return (
            torch.stack(parts) if parts[0].dim() == 0 else torch.cat([p.to(device) for p in parts])
        )

    return _map(join, outputs)


@wrong("2.3", names="not-moved")
def hands_the_rows_of_one_worker_on(outputs, device):
    def join(parts):
        if len(parts) == 1 and parts[0].dim():
            return parts[0]
        return _join([part.to(device) for part in parts])

    return _map(join, outputs)


@wrong("2.3", names="not-moved")
def moves_plain_tensors_only(outputs, device):
    moved = [output.to(device) if torch.is_tensor(output) else output for output in outputs]
    return _map(_join, moved)


@wrong("2.3", names="scalars-fail")
def stacks_numbers_outside_of_containers_only(outputs, device):
    if torch.is_tensor(outputs[0]):
        return _joined(outputs, device)
    return _joined(outputs, device, torch.cat)


@wrong("2.3", names="one-worker")
def hands_the_numbers_of_one_worker_on(outputs, device):
    if len(outputs) > 1 or torch.is_tensor(outputs[0]):
        return _joined(outputs, device)
    return _map(lambda parts: parts[0].to(device), outputs)


@wrong("2.3", names="stacked")
def counts_numbers_in_place_of_dimensions(outputs, device):
    def join(parts):
        return torch.stack(parts) if all(p.numel() == 1 for p in parts) else torch.cat(parts)

    return _joined(outputs, device, join)


@wrong("2.3", names="no-nests")
def expects_dicts_outside_only(outputs, device):
    def join(parts):
        if isinstance(parts[0], (tuple, list)):
            return type(parts[0])(map(join, zip(*parts)))
        return _join([part.to(device) for part in parts])

    if isinstance(outputs[0], dict):
        return {key: join([output[key] for output in outputs]) for key in outputs[0]}
    return join(outputs)


@wrong("2.3", names="structure-lost")
def makes_tuples_of_inner_dicts(outputs, device):
    def tuples(value):
        if isinstance(value, dict):
            return tuple(map(tuples, value.values()))
        if isinstance(value, (tuple, list)):
            return type(value)(map(tuples, value))
        return value

    whole = _joined(outputs, device)
    if isinstance(whole, dict):
        return {key: tuples(value) for key, value in whole.items()}
    return tuples(whole)


@wrong("2.3", names="outputs-changed")
def writes_into_the_first_dict(outputs, device):
    first = outputs[0]
    if not isinstance(first, dict):
        return _joined(outputs, device)
    for key in first:
        first[key] = writes_into_the_first_dict([output[key] for output in outputs], device)
    return first


@wrong("2.3", names="outputs-changed")
def takes_the_entries_out(outputs, device):
    first = outputs[0]
    if not isinstance(first, dict):
        return _joined(outputs, device)
    return {
        key: takes_the_entries_out([output.pop(key) for output in outputs], device)
        for key in list(first)
    }


@wrong("2.3", names="cut-from-the-graph")
def makes_new_leaves_of_rows(outputs, device):
    def join(parts):
        whole = _join(parts)
        return whole.detach().requires_grad_(whole.requires_grad) if parts[0].dim() else whole

    return _joined(outputs, device, join)


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
