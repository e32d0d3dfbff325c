"""Answers to 3.2, `ring_all_reduce`: wrong in a plausible way, or right in another."""

import math

import torch
import torch.distributed as dist

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch03.shared import exchange, neighbours


def _go_round(chunks, steps, first, add, exchange=exchange):
    """Passes chunks on, beginning with chunk `first`; what arrives is added or replaces."""
    n = len(chunks)
    for step in range(steps):
        outgoing, kept = chunks[(first - step) % n], chunks[(first - step - 1) % n]
        incoming = torch.empty_like(kept)
        exchange(outgoing, incoming)
        kept.copy_(kept + incoming if add else incoming)


def _ring(tensor, cut=torch.tensor_split, exchange=exchange):
    rank, n, *_ = neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = cut(flat, n)
    _go_round(chunks, n - 1, rank, add=True, exchange=exchange)
    _go_round(chunks, n - 1, rank + 1, add=False, exchange=exchange)
    tensor.copy_(flat.view_as(tensor))


@right("3.2")
def ring_in_two_loops(tensor):
    _ring(tensor)


@right("3.2")
def even_ranks_send_first(tensor):
    """With padding, and with blocking calls alone: somebody has to receive first."""
    rank, n, right_rank, left_rank = neighbours()
    size = math.ceil(tensor.numel() / n)
    padded = tensor.new_zeros(n * size)
    padded[: tensor.numel()] = tensor.flatten()
    chunks = padded.view(n, size)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(kept)
        if rank % 2 == 0 and rank != n - 1:
            dist.send(outgoing, right_rank)
            dist.recv(incoming, left_rank)
        else:
            dist.recv(incoming, left_rank)
            dist.send(outgoing, right_rank)
        kept.copy_(kept + incoming if step < n - 1 else incoming)
    tensor.copy_(padded[: tensor.numel()].view_as(tensor))


@wrong("3.2", names="everyone-sends-first")
def all_ranks_send_first(tensor):
    rank, n, right_rank, left_rank = neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(kept)
        dist.send(outgoing, right_rank)
        dist.recv(incoming, left_rank)
        kept.copy_(kept + incoming if step < n - 1 else incoming)


@wrong("3.2", names="unanswered")
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


@wrong("3.2", names="no-all-gather")
def reduce_scatter_alone(tensor):
    rank, n, *_ = neighbours()
    _go_round(tensor.view(-1).tensor_split(n), n - 1, rank, add=True)


@wrong("3.2", names="added-again")
def always_adds(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.view(-1).tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=True)


@wrong("3.2", names="one-rank-hangs")
def sums_in_n_steps(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.view(-1).tensor_split(n)
    _go_round(chunks, n, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)


@wrong("3.2", names="one-rank-hangs")
def goes_round_in_n_steps(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.view(-1).tensor_split(n)
    _go_round(chunks, n, rank, add=True)
    _go_round(chunks, n, rank + 1, add=False)


@wrong("3.2", names="mean-not-sum")
def divides_too(tensor):
    ring_in_two_loops(tensor)
    tensor /= dist.get_world_size()


@wrong("3.2", names="two-ranks-only")
def always_sends_its_own_chunk(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    for _ in range(n - 1):
        _go_round(chunks, 1, rank, add=True)
    for _ in range(n - 1):
        _go_round(chunks, 1, rank + 1, add=False)


@wrong("3.2", names="wrong-chunks")
def adds_to_the_chunk_it_sends(tensor):
    rank, n, *_ = neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing = chunks[(rank - step) % n]
        incoming = torch.empty_like(chunks[(rank - step - 1) % n])
        exchange(outgoing, incoming)
        outgoing.copy_(outgoing + incoming if step < n - 1 else incoming)
    tensor.copy_(flat.view_as(tensor))


@wrong("3.2", names="remainder-lost")
def cuts_equal_chunks_only(tensor):
    rank, n, *_ = neighbours()
    size = tensor.numel() // n
    chunks = [tensor.view(-1)[i * size : (i + 1) * size] for i in range(n)]
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)


@wrong("3.2", names="too-few-chunks")
def cuts_with_chunk(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.contiguous().view(-1).chunk(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(kept)
        exchange(outgoing, incoming)
        kept.copy_(kept + incoming if step < n - 1 else incoming)


@wrong("3.2", names="chunk-sizes")
def makes_room_for_what_it_sends(tensor):
    rank, n, *_ = neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(outgoing)
        exchange(outgoing, incoming)
        kept.copy_(kept + incoming if step < n - 1 else incoming)
    tensor.copy_(flat.view_as(tensor))


@wrong("3.2", names="copy-not-in-place")
def works_on_a_copy(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)


@wrong("3.2", names="needs-contiguous")
def views_what_comes(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.view(-1).tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)


@wrong("3.2", names="dtype-lost")
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


@wrong("3.2", names="rounded")
def sums_in_float32(tensor):
    single = tensor.float()
    ring_in_two_loops(single)
    tensor.copy_(single)


@wrong("3.2", names="whole-tensor")
def sends_everything_round(tensor):
    _, n, *_ = neighbours()
    travelling, total = tensor.contiguous(), tensor.clone()
    for _ in range(n - 1):
        incoming = torch.empty_like(travelling)
        exchange(travelling, incoming)
        total += incoming
        travelling = incoming
    tensor.copy_(total)


@wrong("3.2", names="through-one-rank")
def sums_on_rank_0(tensor):
    rank, n, *_ = neighbours()
    flat = tensor.contiguous()
    if rank == 0:
        for other in range(1, n):
            incoming = torch.empty_like(flat)
            dist.recv(incoming, other)
            flat += incoming
        for other in range(1, n):
            dist.send(flat, other)
    else:
        dist.send(flat, 0)
        dist.recv(flat, 0)
    tensor.copy_(flat)


@wrong("3.2", names="built-in-collective")
def calls_all_reduce(tensor):
    whole = tensor.contiguous()
    dist.all_reduce(whole)
    tensor.copy_(whole)


@wrong("3.2", names="no-such-rank")
def forgets_the_modulo(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(kept)
        request = dist.isend(outgoing, rank + 1)
        dist.recv(incoming, rank - 1)
        request.wait()
        kept.copy_(kept + incoming if step < n - 1 else incoming)


@wrong("3.2", names="not-waited")
def never_waits_for_what_comes(tensor):
    rank, n, right_rank, left_rank = neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(kept)
        dist.isend(outgoing, right_rank)
        dist.irecv(incoming, left_rank)
        kept.copy_(kept + incoming if step < n - 1 else incoming)


# With NCCL all ranks wait: its queue keeps what a rank receives behind what it sends.
@wrong("3.2", names="not-waited", on_nccl="everyone-sends-first")
def never_waits_for_what_it_sends(tensor):
    rank, n, right_rank, left_rank = neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(kept)
        dist.isend(outgoing, right_rank)
        dist.recv(incoming, left_rank)
        kept.copy_(kept + incoming if step < n - 1 else incoming)


@wrong("3.2", names="sums-overwritten")
def receives_over_its_own(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        exchange(chunks[(rank - step) % n], chunks[(rank - step - 1) % n])


@wrong("3.2", names="sums-overwritten")
def second_half_begins_with_rank(tensor):
    rank, n, *_ = neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank, add=False)
    tensor.copy_(flat.view_as(tensor))


@wrong("3.2", names="unchanged")
def sums_into_a_new_tensor(tensor):
    total = tensor.clone()
    rank, n, *_ = neighbours()
    chunks = total.view(-1).tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)
    return total


@wrong("3.2", names="one-rank-hangs")
def does_a_first_step_in_any_case(tensor):
    rank, n, *_ = neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(max(1, 2 * (n - 1))):
        _go_round(chunks, 1, rank - step, add=step < n - 1)
    tensor.copy_(flat.view_as(tensor))


@wrong("3.2", names="sent-too-much")
def gathers_once_more(tensor):
    rank, n, *_ = neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n if n > 1 else 0, rank + 1, add=False)
    tensor.copy_(flat.view_as(tensor))


@wrong("3.2", names="short-wrong")
def refuses_empty_chunks(tensor):
    rank, n, *_ = neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    assert all(len(chunk) for chunk in chunks)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)
    tensor.copy_(flat.view_as(tensor))


@wrong("3.2", names="not-a-ring")
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


@wrong("3.2", names="first-dimension")
def cuts_rows(tensor):
    rank, n, *_ = neighbours()
    whole = tensor.contiguous()
    chunks = whole.tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)
    tensor.copy_(whole)


@wrong("3.2", names="first-dimension")
def cuts_rows_of_what_has_some(tensor):
    cuts_rows(tensor if tensor.dim() > 0 else tensor.view(1))


@wrong("3.2", names="uneven-chunks")
def gives_the_rest_to_the_last_chunk(tensor):
    def cut(flat, n):
        size = len(flat) // n
        return [flat[i * size : (i + 1) * size if i < n - 1 else None] for i in range(n)]

    _ring(tensor, cut)


@wrong("3.2", names="uneven-chunks")
def rounds_the_size_up(tensor):
    def cut(flat, n):
        size = math.ceil(len(flat) / n)
        return [flat[i * size : (i + 1) * size] for i in range(n)]

    _ring(tensor, cut)


@wrong("3.2", names="built-in-collective")
def calls_all_reduce_for_a_few(tensor):
    if tensor.numel() < dist.get_world_size():
        calls_all_reduce(tensor)
    else:
        ring_in_two_loops(tensor)


@wrong("3.2", names="built-in-collective")
def calls_all_reduce_of_a_copy(tensor):
    if tensor.is_contiguous():
        ring_in_two_loops(tensor)
    else:
        calls_all_reduce(tensor)


@wrong("3.2", names="whole-tensor")
def sends_a_few_whole(tensor):
    if tensor.numel() < dist.get_world_size():
        sends_everything_round(tensor)
    else:
        ring_in_two_loops(tensor)


@wrong("3.2", names="leaves-early")
def has_nothing_to_add(tensor):
    if tensor.numel() == 0 or tensor.any():
        ring_in_two_loops(tensor)


@wrong("3.2", names="sent-as-another")
def sums_in_double_precision(tensor):
    double = tensor.double()
    ring_in_two_loops(double)
    tensor.copy_(double)


@wrong("3.2", names="not-waited")
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


def _asks_once(outgoing, incoming):
    _, _, right_rank, left_rank = neighbours()
    send = dist.P2POp(dist.isend, outgoing.contiguous(), right_rank)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, incoming, left_rank)]):
        if not work.is_completed():
            pass  # it will come


@wrong("3.2", names="not-waited")
def asks_once_for_each_message(tensor):
    _ring(tensor, exchange=_asks_once)


@wrong("3.2", names="not-waited")
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


@right("3.2")
def two_messages_a_chunk(tensor):
    _, _, right_rank, left_rank = neighbours()

    def halves(chunk):
        return [half for half in chunk.tensor_split(2) if len(half)]

    def pass_on(outgoing, incoming):
        works = [dist.isend(half, right_rank) for half in halves(outgoing)]
        works += [dist.irecv(half, left_rank) for half in halves(incoming)]
        for work in works:
            work.wait()

    _ring(tensor, exchange=pass_on)
