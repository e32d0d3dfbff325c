"""Rarer wrong answers to 2.3, `gather`."""

import torch

from tests.wrong_answers import rarer
from tests.wrong_answers.ch02.gather import _join, _joined, _map


@rarer("2.3")
def joins_side_by_side(outputs, device):
    return _map(lambda parts: torch.cat([part.to(device) for part in parts], dim=-1), outputs)


@rarer("2.3")
def makes_lists_of_tuples(outputs, device):
    first = outputs[0]
    if isinstance(first, dict):
        return {
            key: makes_lists_of_tuples([output[key] for output in outputs], device) for key in first
        }
    if isinstance(first, (tuple, list)):
        return [makes_lists_of_tuples(parts, device) for parts in zip(*outputs)]
    return _join([output.to(device) for output in outputs])


@rarer("2.3")
def averages_the_losses(outputs, device):
    def join(parts):
        joined = _join([part.to(device) for part in parts])
        return joined.mean() if parts[0].dim() == 0 else joined

    return _map(join, outputs)


@rarer("2.3")
def takes_the_numbers_of_losses(outputs, device):
    def join(parts):
        if parts[0].dim() == 0:
            return torch.tensor([part.item() for part in parts], device=device)
        return torch.cat([part.to(device) for part in parts])

    return _map(join, outputs)


@rarer("2.3")
def joins_along_dimension_1(outputs, device):
    return torch.cat([output.to(device) for output in outputs], dim=1)


@rarer("2.3")
def takes_the_first(outputs, device):
    return outputs[0].to(device)


@rarer("2.3")
def adds_them_up(outputs, device):
    return sum(output.to(device) for output in outputs)


@rarer("2.3")
def piles_up(outputs, device):
    return _map(lambda parts: torch.vstack([part.to(device) for part in parts]), outputs)


@rarer("2.3")
def leaves_out_the_last_number(outputs, device):
    return _joined(outputs, device, lambda p: _join(p) if p[0].dim() else torch.stack(p[:-1] or p))


@rarer("2.3")
def hands_a_single_output_on(outputs, device):
    return outputs[0] if len(outputs) == 1 else _joined(outputs, device)


@rarer("2.3")
def makes_new_leaves_of_losses(outputs, device):
    def join(parts):
        if parts[0].dim():
            return torch.cat(parts)
        numbers = [float(part) for part in parts]
        return torch.tensor(numbers, device=device, requires_grad=True)

    return _joined(outputs, device, join)


@rarer("2.3")
def moves_no_numbers(outputs, device):
    def join(parts):
        return (
            torch.stack(parts) if parts[0].dim() == 0 else torch.cat([p.to(device) for p in parts])
        )

    return _map(join, outputs)


@rarer("2.3")
def hands_the_rows_of_one_worker_on(outputs, device):
    def join(parts):
        if len(parts) == 1 and parts[0].dim():
            return parts[0]
        return _join([part.to(device) for part in parts])

    return _map(join, outputs)


@rarer("2.3")
def moves_plain_tensors_only(outputs, device):
    moved = [output.to(device) if torch.is_tensor(output) else output for output in outputs]
    return _map(_join, moved)


@rarer("2.3")
def stacks_numbers_outside_of_containers_only(outputs, device):
    if torch.is_tensor(outputs[0]):
        return _joined(outputs, device)
    return _joined(outputs, device, torch.cat)


@rarer("2.3")
def hands_the_numbers_of_one_worker_on(outputs, device):
    if len(outputs) > 1 or torch.is_tensor(outputs[0]):
        return _joined(outputs, device)
    return _map(lambda parts: parts[0].to(device), outputs)


@rarer("2.3")
def counts_numbers_in_place_of_dimensions(outputs, device):
    def join(parts):
        return torch.stack(parts) if all(p.numel() == 1 for p in parts) else torch.cat(parts)

    return _joined(outputs, device, join)


@rarer("2.3")
def expects_dicts_outside_only(outputs, device):
    def join(parts):
        if isinstance(parts[0], (tuple, list)):
            return type(parts[0])(map(join, zip(*parts)))
        return _join([part.to(device) for part in parts])

    if isinstance(outputs[0], dict):
        return {key: join([output[key] for output in outputs]) for key in outputs[0]}
    return join(outputs)


@rarer("2.3")
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


@rarer("2.3")
def writes_into_the_first_dict(outputs, device):
    first = outputs[0]
    if not isinstance(first, dict):
        return _joined(outputs, device)
    for key in first:
        first[key] = writes_into_the_first_dict([output[key] for output in outputs], device)
    return first


@rarer("2.3")
def takes_the_entries_out(outputs, device):
    first = outputs[0]
    if not isinstance(first, dict):
        return _joined(outputs, device)
    return {
        key: takes_the_entries_out([output.pop(key) for output in outputs], device)
        for key in list(first)
    }


@rarer("2.3")
def makes_new_leaves_of_rows(outputs, device):
    def join(parts):
        whole = _join(parts)
        return whole.detach().requires_grad_(whole.requires_grad) if parts[0].dim() else whole

    return _joined(outputs, device, join)
