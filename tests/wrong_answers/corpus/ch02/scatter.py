"""Rarer wrong answers to 2.1, `scatter`."""

import torch

from tests.wrong_answers import rarer
from tests.wrong_answers.ch02.scatter import _even_chunks


@rarer("2.1")
def forgets_the_rest(batch, devices):
    size = max(len(batch) // len(devices), 1)
    return [batch[i * size : (i + 1) * size].to(device) for i, device in enumerate(devices)][
        : len(batch)
    ]


@rarer("2.1")
def gives_the_rest_to_the_last(batch, devices):
    count = min(len(devices), len(batch))
    size = len(batch) // count
    starts = [i * size for i in range(count)]
    ends = [*starts[1:], len(batch)]
    return [batch[a:b].to(device) for a, b, device in zip(starts, ends, devices)]


@rarer("2.1")
def copies_the_whole_batch(batch, devices):
    return [batch.to(device) for device in devices]


@rarer("2.1")
def takes_the_count_for_the_size(batch, devices):
    return [chunk.to(device) for chunk, device in zip(batch.split(len(devices)), devices)]


@rarer("2.1")
def splits_the_columns(batch, devices):
    return [
        chunk.to(device) for chunk, device in zip(batch.tensor_split(len(devices), -1), devices)
    ]


@rarer("2.1")
def keeps_empty_chunks(batch, devices):
    return [chunk.to(device) for chunk, device in zip(batch.tensor_split(len(devices)), devices)]


@rarer("2.1")
def gives_the_rest_to_the_last_ones(batch, devices):
    count = min(len(devices), len(batch))
    bounds = [i * len(batch) // count for i in range(count + 1)]
    return [batch[a:b].to(d) for a, b, d in zip(bounds, bounds[1:], devices)]


@rarer("2.1")
def makes_a_chunk_of_every_row(batch, devices):
    return [row.to(devices[i % len(devices)]) for i, row in enumerate(batch)]


@rarer("2.1")
def appends_the_rest(batch, devices):
    size, rest = divmod(len(batch), len(devices))
    return list(batch.split([size] * len(devices) + [rest] * (rest > 0)))


@rarer("2.1")
def runs_out_of_devices(batch, devices):
    size = len(batch) // len(devices)
    return [chunk.to(devices[i]) for i, chunk in enumerate(batch.split(size))]


@rarer("2.1")
def splits_into_pieces_of_n(batch, devices):
    return [chunk.to(devices[0]) for chunk in batch.split(len(devices))]


@rarer("2.1")
def indexes_a_row_for_everyone(batch, devices):
    size, rest = divmod(len(batch), len(devices))
    chunks, start = [], 0
    for i, device in enumerate(devices):
        end = start + size + (i < rest)
        batch[start]
        chunks.append(batch[start:end].to(device))
        start = end
    return chunks


@rarer("2.1")
def makes_a_dimension_of_workers(batch, devices):
    return list(batch.reshape(len(devices), -1, *batch.shape[1:]))


@rarer("2.1")
def takes_the_devices_away(batch, devices):
    return [chunk.to(devices.pop(0)) for chunk in _even_chunks(batch, len(devices))]


@rarer("2.1")
def hands_the_batch_to_a_single_device(batch, devices):
    if len(devices) == 1:
        return [batch]
    return [part.to(d) for part, d in zip(_even_chunks(batch, len(devices)), devices)]


@rarer("2.1")
def leaves_rows_where_they_are_few(batch, devices):
    if len(batch) <= len(devices):
        return list(batch.split(1))
    return [part.to(d) for part, d in zip(batch.tensor_split(len(devices)), devices)]


@rarer("2.1")
def leaves_the_first_chunk(batch, devices):
    first, *others = _even_chunks(batch, len(devices))
    return [first, *(part.to(d) for part, d in zip(others, devices[1:]))]


@rarer("2.1")
def gives_few_rows_to_the_last_devices(batch, devices):
    chunks = _even_chunks(batch, len(devices))
    return [part.to(d) for part, d in zip(chunks, devices[-len(chunks) :])]


@rarer("2.1")
def fills_new_tensors_elsewhere(batch, devices):
    def moved(part, device):
        if part.device == device:
            return part
        return torch.empty_like(part, device=device).copy_(part.detach())

    return [moved(part, d) for part, d in zip(_even_chunks(batch, len(devices)), devices)]


@rarer("2.1")
def makes_new_leaves(batch, devices):
    chunks = _even_chunks(batch.detach(), len(devices))
    moved = [part.to(d) for part, d in zip(chunks, devices)]
    return [part.requires_grad_(batch.requires_grad) for part in moved]


@rarer("2.1")
def asks_for_gradients_of_labels_too(batch, devices):
    chunks = _even_chunks(batch.requires_grad_(), len(devices))
    return [part.to(d) for part, d in zip(chunks, devices)]


@rarer("2.1")
def takes_single_rows_out(batch, devices):
    if len(batch) <= len(devices):
        return [row.to(device) for row, device in zip(batch, devices)]
    return [part.to(d) for part, d in zip(batch.tensor_split(len(devices)), devices)]
