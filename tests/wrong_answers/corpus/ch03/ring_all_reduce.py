"""Rarer wrong answers to 3.2, `ring_all_reduce`."""

import math

import torch
import torch.distributed as dist

from tests.wrong_answers import rarer
from tests.wrong_answers.ch03.ring_all_reduce import (
    _go_round,
    _ring,
    calls_all_reduce,
    ring_in_two_loops,
    sends_everything_round,
)
from tests.wrong_answers.makers import exchange, neighbours


@rarer("3.2")
def receives_from_the_right(tensor):
    """Right on two ranks, where both neighbours are the same rank."""
    rank, n, right_rank, _ = neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(kept)
        request = dist.isend(outgoing, right_rank)
        dist.recv(incoming, right_rank)
        request.wait()
        kept.copy_(kept + incoming if step < n - 1 else incoming)


@rarer("3.2")
def sums_in_n_steps(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.view(-1).tensor_split(n)
    _go_round(chunks, n, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)


@rarer("3.2")
def goes_round_in_n_steps(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.view(-1).tensor_split(n)
    _go_round(chunks, n, rank, add=True)
    _go_round(chunks, n, rank + 1, add=False)


@rarer("3.2")
def cuts_with_chunk(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.contiguous().view(-1).chunk(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(kept)
        exchange(outgoing, incoming)
        kept.copy_(kept + incoming if step < n - 1 else incoming)


@rarer("3.2")
def works_on_a_copy(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)


@rarer("3.2")
def receives_float32(tensor):
    rank, n, *_ = neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty(kept.shape)
        exchange(outgoing, incoming)
        kept.copy_(kept + incoming if step < n - 1 else incoming)
    tensor.copy_(flat.view_as(tensor))


@rarer("3.2")
def sums_in_float32(tensor):
    single = tensor.float()
    ring_in_two_loops(single)
    tensor.copy_(single)


# With NCCL all ranks wait: its queue keeps what a rank receives behind what it sends.
@rarer("3.2")
def never_waits_for_what_it_sends(tensor):
    rank, n, right_rank, left_rank = neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(kept)
        dist.isend(outgoing, right_rank)
        dist.recv(incoming, left_rank)
        kept.copy_(kept + incoming if step < n - 1 else incoming)


@rarer("3.2")
def second_half_begins_with_rank(tensor):
    rank, n, *_ = neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank, add=False)
    tensor.copy_(flat.view_as(tensor))


@rarer("3.2")
def refuses_empty_chunks(tensor):
    rank, n, *_ = neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    assert all(len(chunk) for chunk in chunks)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)
    tensor.copy_(flat.view_as(tensor))


@rarer("3.2")
def everybody_writes_to_everybody(tensor):
    """As many bytes as on a ring, and a message to each of the others."""
    rank, n, *_ = neighbours()
    flat = tensor.flatten().clone()
    chunks = list(flat.tensor_split(n))
    others = [other for other in range(n) if other != rank]
    works = [dist.isend(chunks[other].clone(), other) for other in others]
    for other in others:
        room = torch.empty_like(chunks[rank])
        dist.recv(room, other)
        chunks[rank] += room
    works += [dist.isend(chunks[rank], other) for other in others]
    for other in others:
        dist.recv(chunks[other], other)
    for work in works:
        work.wait()
    tensor.copy_(flat.view_as(tensor))


@rarer("3.2")
def cuts_rows(tensor):
    rank, n, *_ = neighbours()
    whole = tensor.contiguous()
    chunks = whole.tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)
    tensor.copy_(whole)


@rarer("3.2")
def cuts_rows_of_what_has_some(tensor):
    cuts_rows(tensor if tensor.dim() > 0 else tensor.view(1))


@rarer("3.2")
def gives_the_rest_to_the_last_chunk(tensor):
    def cut(flat, n):
        size = len(flat) // n
        return [flat[i * size : (i + 1) * size if i < n - 1 else None] for i in range(n)]

    _ring(tensor, cut)


@rarer("3.2")
def rounds_the_size_up(tensor):
    def cut(flat, n):
        size = math.ceil(len(flat) / n)
        return [flat[i * size : (i + 1) * size] for i in range(n)]

    _ring(tensor, cut)


@rarer("3.2")
def calls_all_reduce_for_a_few(tensor):
    if tensor.numel() < dist.get_world_size():
        calls_all_reduce(tensor)
    else:
        ring_in_two_loops(tensor)


@rarer("3.2")
def calls_all_reduce_of_a_copy(tensor):
    if tensor.is_contiguous():
        ring_in_two_loops(tensor)
    else:
        calls_all_reduce(tensor)


@rarer("3.2")
def sends_a_few_whole(tensor):
    if tensor.numel() < dist.get_world_size():
        sends_everything_round(tensor)
    else:
        ring_in_two_loops(tensor)


@rarer("3.2")
def adds_before_it_waits(tensor):
    rank, n, right_rank, left_rank = neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.zeros_like(kept)
        works = [dist.irecv(incoming, left_rank), dist.isend(outgoing, right_rank)]
        kept.copy_(kept + incoming if step < n - 1 else incoming)
        for work in works:
            work.wait()
    tensor.copy_(flat.view_as(tensor))


@rarer("3.2")
def waits_after_the_second_half(tensor):
    rank, n, right_rank, left_rank = neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    works = []
    for step in range(n - 1):
        outgoing, kept = chunks[(rank + 1 - step) % n], chunks[(rank - step) % n]
        works += [dist.irecv(kept, left_rank), dist.isend(outgoing, right_rank)]
    for work in works:
        work.wait()
    tensor.copy_(flat.view_as(tensor))
