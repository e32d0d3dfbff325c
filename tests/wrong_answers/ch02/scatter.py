"""Answers to 2.1, `scatter`: wrong in a plausible way, or right in another."""

from unittest import mock

import torch

from tests.wrong_answers import right, wrong


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


@wrong("2.1", names="not-moved")
def hands_the_batch_to_a_single_device(batch, devices):
    if len(devices) == 1:
        return [batch]
    return [part.to(d) for part, d in zip(_even_chunks(batch, len(devices)), devices)]


@wrong("2.1", names="not-moved")
def leaves_rows_where_they_are_few(batch, devices):
    if len(batch) <= len(devices):
        return list(batch.split(1))
    return [part.to(d) for part, d in zip(batch.tensor_split(len(devices)), devices)]


@wrong("2.1", names="not-moved")
def leaves_the_first_chunk(batch, devices):
    first, *others = _even_chunks(batch, len(devices))
    return [first, *(part.to(d) for part, d in zip(others, devices[1:]))]


@wrong("2.1", names="not-moved")
def gives_few_rows_to_the_last_devices(batch, devices):
    chunks = _even_chunks(batch, len(devices))
    return [part.to(d) for part, d in zip(chunks, devices[-len(chunks) :])]


@wrong("2.1", names="cut-from-the-graph")
def fills_new_tensors_elsewhere(batch, devices):
    def moved(part, device):
        if part.device == device:
            return part
        return torch.empty_like(part, device=device).copy_(part.detach())

    return [moved(part, d) for part, d in zip(_even_chunks(batch, len(devices)), devices)]


@wrong("2.1", names="cut-from-the-graph")
def makes_new_leaves(batch, devices):
    chunks = _even_chunks(batch.detach(), len(devices))
    moved = [part.to(d) for part, d in zip(chunks, devices)]
    return [part.requires_grad_(batch.requires_grad) for part in moved]


@wrong("2.1", names="needs-contiguous")
def views_the_rows_as_vectors(batch, devices):
    chunks = _even_chunks(batch.view(len(batch), -1), len(devices))
    return [part.view(-1, *batch.shape[1:]).to(d) for part, d in zip(chunks, devices)]


@wrong("2.1", names="batch-changed")
def asks_for_gradients_of_the_batch(batch, devices):
    if batch.is_floating_point():
        batch.requires_grad_()
    return [part.to(d) for part, d in zip(_even_chunks(batch, len(devices)), devices)]


@wrong("2.1", names="batch-changed")
def asks_for_gradients_of_labels_too(batch, devices):
    chunks = _even_chunks(batch.requires_grad_(), len(devices))
    return [part.to(d) for part, d in zip(chunks, devices)]


@wrong("2.1", names="reshaped")
def takes_single_rows_out(batch, devices):
    if len(batch) <= len(devices):
        return [row.to(device) for row, device in zip(batch, devices)]
    return [part.to(d) for part, d in zip(batch.tensor_split(len(devices)), devices)]


@right("2.1")
def takes_what_the_others_leave(batch, devices):
    chunks, left = [], batch
    for i, device in enumerate(devices):
        take = -(-len(left) // (len(devices) - i))
        if take:
            chunks.append(left[:take].to(device))
        left = left[take:]
    return chunks


@right("2.1")
def selects_rows_by_number(batch, devices):
    numbers = _even_chunks(torch.arange(len(batch), device=batch.device), len(devices))
    return [batch.index_select(0, rows).to(d) for rows, d in zip(numbers, devices)]
