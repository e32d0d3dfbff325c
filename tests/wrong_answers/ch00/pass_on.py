"""Answers to 0.3, `pass_on`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist

from tests.wrong_answers import right, wrong
from tests.wrong_answers.makers import exchange, neighbours, swap, through_the_store


def _passed(value, received):
    """Passes a message on; one rank after the other sends, and rank 0 begins."""
    rank, _, right_rank, left_rank = neighbours()
    if rank == 0:
        dist.send(value, right_rank)
        dist.recv(received, left_rank)
    else:
        dist.recv(received, left_rank)
        dist.send(value, right_rank)
    return received


@right("0.3")
def one_after_the_other(value):
    return _passed(value, torch.empty_like(value)) if dist.get_world_size() > 1 else value.clone()


@right("0.3")
def posts_both_at_once(value):
    received = value.clone()
    if dist.get_world_size() > 1:
        exchange(value, received)
    return received


@wrong("0.3", names="around-the-calls")
def sends_a_number_and_takes_the_rest_from_the_store(value):
    rank, ranks, *_ = neighbours()
    values = through_the_store(value)
    if ranks > 1:
        one = value.flatten()[:1].clone()
        exchange(one, torch.empty_like(one))
    return values[rank - 1].clone()


@wrong("0.3", names="all-begin-alike")
def everybody_sends_first(value):
    _, ranks, right_rank, left_rank = neighbours()
    received = value.clone()
    if ranks > 1:
        dist.send(value, right_rank)
        dist.recv(received, left_rank)
    return received


@wrong("0.3", names="no-such-rank")
def sends_beyond_the_last_rank(value):
    rank, ranks, _, left_rank = neighbours()
    received = value.clone()
    if ranks > 1:
        sending = dist.isend(value, rank + 1)
        dist.recv(received, left_rank)
        sending.wait()
    return received


@wrong("0.3", names="recv-returns-a-rank")
def takes_what_recv_returns(value):
    rank, ranks, right_rank, left_rank = neighbours()
    if ranks == 1:
        return value.clone()
    if rank == 0:
        dist.send(value, right_rank)
    received = dist.recv(torch.empty_like(value), left_rank)
    if rank > 0:
        dist.send(value, right_rank)
    return received


@wrong("0.3", names="another-shape")
def has_too_little_room(value):
    return _passed(value, torch.empty(1)) if dist.get_world_size() > 1 else value.clone()


# With NCCL all ranks wait: its queue keeps what a rank receives behind what it sends.
@wrong("0.3", names="not-waited", on_nccl="all-begin-alike")
def does_not_wait_for_its_message(value):
    _, ranks, right_rank, left_rank = neighbours()
    received = value.clone()
    if ranks > 1:
        dist.isend(value, right_rank)
        dist.recv(received, left_rank)
    return received


@wrong("0.3", names="collective")
def gathers_everything(value):
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return values[dist.get_rank() - 1]


@wrong("0.3", names="wrong-direction")
def passes_backwards(value):
    _, ranks, right_rank, left_rank = neighbours()
    received = value.clone()
    if ranks > 1:
        swap(value, left_rank, received, right_rank)
    return received


@wrong("0.3", names="unchanged")
def returns_what_it_had(value):
    posts_both_at_once(value)
    return value.clone()


@wrong("0.3", names="rank-0s")
def sends_one_value_to_all(value):
    received = value.clone()
    dist.broadcast(received, src=0)
    return received


@wrong("0.3", names="input-changed")
def receives_into_its_own(value):
    return value.copy_(posts_both_at_once(value))


@wrong("0.3", names="sends-to-itself")
def forgets_the_single_rank(value):
    received = value.clone()
    exchange(value, received)
    return received


@wrong("0.3", names="not-a-copy")
def returns_its_argument(value):
    return posts_both_at_once(value) if dist.get_world_size() > 1 else value


@wrong("0.3", names="no-wrap")
def stops_at_the_last_rank(value):
    rank, ranks, *_ = neighbours()
    received = value.clone()
    if rank > 0:
        dist.recv(received, rank - 1)
    if rank < ranks - 1:
        dist.send(value, rank + 1)
    return received


@wrong("0.3", names="other-rank")
def swaps_with_a_partner(value):
    partner = dist.get_rank() ^ 1
    received = value.clone()
    if partner < dist.get_world_size():
        swap(value, partner, received, partner)
    return received


@wrong("0.3", names="not-as-it-is")
def passes_float32_whatever_comes(value):
    return one_after_the_other(value.float()).to(value.dtype)


@wrong("0.3", names="not-as-it-is")
def passes_objects(value):
    rank, ranks, right_rank, left_rank = neighbours()
    received = [value.clone()]
    if ranks > 1 and rank == 0:
        dist.send_object_list([value], right_rank)
    if ranks > 1:
        dist.recv_object_list(received, left_rank)
    if ranks > 1 and rank > 0:
        dist.send_object_list([value], right_rank)
    return received[0]


@wrong("0.3", names="nobody-answers")
def everybody_receives_first(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        dist.recv(received, src=(rank - 1) % ranks)
        dist.send(value, dst=(rank + 1) % ranks)
    return received
