"""Answers to 3.2, `ring_all_reduce`: wrong in a plausible way, or right in another."""

import math

import torch
import torch.distributed as dist

from tests.wrong_answers import right, wrong
from tests.wrong_answers.makers import exchange, neighbours


def _go_round(chunks, steps, first, add, exchange=exchange):
    """Passes chunks on, beginning with chunk `first`; what arrives is added or replaces."""
    n = len(chunks)
    for step in range(steps):
        outgoing, kept = chunks[(first - step) % n], chunks[(first - step - 1) % n]
        incoming = torch.empty_like(kept)
        exchange(outgoing, incoming)
        kept.copy_(kept + incoming if add else incoming)


def _ring(tensor, cut=torch.tensor_split, exchange=exchange, summing=None, sharing=None, add=False):
    """A ring, or what a mistake makes of it: how many steps the sum takes and how many the sharing,
    n - 1 where nothing is said, and whether the latter adds."""
    rank, n, *_ = neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = cut(flat, n)
    steps = (n - 1 if steps is None else steps for steps in (summing, sharing))
    _go_round(chunks, next(steps), rank, add=True, exchange=exchange)
    _go_round(chunks, next(steps), rank + 1, add=add, exchange=exchange)
    tensor.copy_(flat.view_as(tensor))


def _one_step(way):
    """Of messages to the right: with `way`, which gets outgoing and incoming, and both neighbours."""

    def pass_on(outgoing, incoming):
        _, _, right_rank, left_rank = neighbours()
        way(outgoing, incoming, right_rank, left_rank)

    return pass_on


@right("3.2")
def ring_in_two_loops(tensor):
    _ring(tensor)


@right("3.2")
def even_ranks_send_first(tensor):
    """With blocking calls alone: somebody has to receive first."""

    def in_turn(outgoing, incoming, right_rank, left_rank):
        rank, n, *_ = neighbours()
        if rank % 2 == 0 and rank != n - 1:
            dist.send(outgoing, right_rank)
            dist.recv(incoming, left_rank)
        else:
            dist.recv(incoming, left_rank)
            dist.send(outgoing, right_rank)

    _ring(tensor, exchange=_one_step(in_turn))


@right("3.2")
def pads_to_equal_chunks(tensor):
    n = dist.get_world_size()
    padded = tensor.new_zeros(n * math.ceil(tensor.numel() / n))
    padded[: tensor.numel()] = tensor.flatten()
    _ring(padded)
    tensor.copy_(padded[: tensor.numel()].view_as(tensor))


@right("3.2")
def two_messages_a_chunk(tensor):
    def in_halves(outgoing, incoming, right_rank, left_rank):
        works = [dist.isend(half, right_rank) for half in outgoing.tensor_split(2) if len(half)]
        works += [dist.irecv(half, left_rank) for half in incoming.tensor_split(2) if len(half)]
        for work in works:
            work.wait()

    _ring(tensor, exchange=_one_step(in_halves))


@wrong("3.2", names="all-begin-alike")
def all_ranks_send_first(tensor):
    def sends_first(outgoing, incoming, right_rank, left_rank):
        dist.send(outgoing, right_rank)
        dist.recv(incoming, left_rank)

    _ring(tensor, exchange=_one_step(sends_first))


@wrong("3.2", names="no-all-gather")
def reduce_scatter_alone(tensor):
    _ring(tensor, sharing=0)


@wrong("3.2", names="added-again")
def always_adds(tensor):
    _ring(tensor, add=True)


@wrong("3.2", names="mean-not-sum")
def divides_too(tensor):
    _ring(tensor)
    tensor /= dist.get_world_size()


@wrong("3.2", names="two-ranks")
def always_sends_its_own_chunk(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    for first, add in ((rank, True), (rank + 1, False)):
        for _ in range(n - 1):
            _go_round(chunks, 1, first, add)


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


@wrong("3.2", names="chunks")
def cuts_equal_chunks_only(tensor):
    _ring(tensor, lambda flat, n: flat[: len(flat) // n * n].view(n, -1))


@wrong("3.2", names="chunk-sizes")
def makes_room_for_what_it_sends(tensor):
    def as_large(outgoing, incoming):
        room = torch.empty_like(outgoing)
        exchange(outgoing, room)
        incoming.copy_(room)

    _ring(tensor, exchange=as_large)


@wrong("3.2", names="needs-contiguous")
def views_what_comes(tensor):
    tensor.view(-1)
    _ring(tensor)


@wrong("3.2", names="not-a-ring")
def sums_on_rank_0(tensor):
    rank, n, *_ = neighbours()
    flat, incoming = tensor.contiguous(), torch.empty_like(tensor.contiguous())
    for other in range(1, n):
        if rank == 0:
            dist.recv(incoming, other)
            flat += incoming
        elif rank == other:
            dist.send(flat, 0)
    for other in range(1, n):
        if rank == 0:
            dist.send(flat, other)
        elif rank == other:
            dist.recv(flat, 0)
    tensor.copy_(flat)


@wrong("3.2", names="torchs-own")
def calls_all_reduce(tensor):
    whole = tensor.contiguous()
    dist.all_reduce(whole)
    tensor.copy_(whole)


@wrong("3.2", names="no-such-rank")
def forgets_the_modulo(tensor):
    def beyond_the_end(outgoing, incoming, right_rank, left_rank):
        sending = dist.isend(outgoing, dist.get_rank() + 1)
        dist.recv(incoming, left_rank)
        sending.wait()

    _ring(tensor, exchange=_one_step(beyond_the_end))


@wrong("3.2", names="not-waited")
def never_waits_for_what_comes(tensor):
    def starts_both(outgoing, incoming, right_rank, left_rank):
        dist.isend(outgoing, right_rank)
        dist.irecv(incoming, left_rank)

    _ring(tensor, exchange=_one_step(starts_both))


@wrong("3.2", names="sums-overwritten")
def receives_over_its_own(tensor):
    rank, n, *_ = neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        exchange(chunks[(rank - step) % n], chunks[(rank - step - 1) % n])


@wrong("3.2", names="unchanged")
def sums_into_a_new_tensor(tensor):
    _ring(tensor.clone())


@wrong("3.2", names="one-rank-hangs")
def does_a_first_step_in_any_case(tensor):
    _ring(tensor, summing=max(1, dist.get_world_size() - 1))


@wrong("3.2", names="sent-otherwise")
def gathers_once_more(tensor):
    n = dist.get_world_size()
    _ring(tensor, sharing=n if n > 1 else 0)


@wrong("3.2", names="leaves-early")
def has_nothing_to_add(tensor):
    if tensor.numel() == 0 or tensor.any():
        _ring(tensor)


@wrong("3.2", names="another-dtype")
def sums_in_double_precision(tensor):
    double = tensor.double()
    _ring(double)
    tensor.copy_(double)


@wrong("3.2", names="not-waited")
def asks_once_for_each_message(tensor):
    def asks_once(outgoing, incoming, right_rank, left_rank):
        both = [dist.P2POp(dist.isend, outgoing, right_rank)]
        both += [dist.P2POp(dist.irecv, incoming, left_rank)]
        for work in dist.batch_isend_irecv(both):
            if not work.is_completed():
                pass  # it will come

    _ring(tensor, exchange=_one_step(asks_once))


@wrong("3.2", names="nobody-answers")
def sends_once_less(tensor):
    _ring(tensor, sharing=max(0, dist.get_world_size() - 1 - dist.get_rank()))


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
