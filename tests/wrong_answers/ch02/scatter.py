"""Answers to 2.1, `scatter`: wrong in a plausible way, or right in another."""

from unittest import mock

import torch

from tests.wrong_answers import right, wrong


@wrong("2.1", names="chunks-like-torch")
def as_torch_chunk_does(batch, devices):
    return [chunk.to(device) for chunk, device in zip(batch.chunk(len(devices)), devices)]


@wrong("2.1", names="rows-dealt-like-cards")
def deals_like_cards(batch, devices):
    count = min(len(devices), len(batch))
    return [batch[i::count].to(devices[i]) for i in range(count)]


@wrong("2.1", names="not-moved")
def forgets_to_move(batch, devices):
    return list(batch.tensor_split(min(len(devices), len(batch))))


@wrong("2.1", names="cut-from-the-graph")
def detaches(batch, devices):
    chunks = batch.detach().tensor_split(min(len(devices), len(batch)))
    return [chunk.to(device) for chunk, device in zip(chunks, devices)]


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


@wrong("2.1", names="torchs-own")
def asks_pytorch(batch, devices):
    return torch.nn.parallel.scatter(batch, devices)


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


@wrong("2.1", names="chunk-sizes")
def counts_each_device_once(batch, devices):
    devices = list(dict.fromkeys(devices))
    return [chunk.to(device) for chunk, device in zip(_even_chunks(batch, len(devices)), devices)]


@wrong("2.1", names="needs-contiguous")
def views_the_rows_as_vectors(batch, devices):
    chunks = _even_chunks(batch.view(len(batch), -1), len(devices))
    return [part.view(-1, *batch.shape[1:]).to(d) for part, d in zip(chunks, devices)]


@wrong("2.1", names="input-changed")
def asks_for_gradients_of_the_batch(batch, devices):
    if batch.is_floating_point():
        batch.requires_grad_()
    return [part.to(d) for part, d in zip(_even_chunks(batch, len(devices)), devices)]


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
