"""Answers to 0.3, `pass_on`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist

from tests.wrong_answers import right, wrong


@wrong("0.3", names="all-begin-alike")
def everybody_sends_first(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        dist.send(value, dst=(rank + 1) % ranks)
        dist.recv(received, src=(rank - 1) % ranks)
    return received


@wrong("0.3", names="all-begin-alike")
def everybody_receives_first(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        dist.recv(received, src=(rank - 1) % ranks)
        dist.send(value, dst=(rank + 1) % ranks)
    return received


@wrong("0.3", names="all-begin-alike")
def passes_among_three(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks == 1:
        return received
    if rank == 0:
        dist.recv(received, src=2)
        dist.send(value, dst=1)
    else:
        dist.send(value, dst=(rank + 1) % 3)
        dist.recv(received, src=rank - 1)
    return received


@wrong("0.3", names="no-such-rank")
def sends_beyond_the_last_rank(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks == 1:
        return received
    if rank == 0:
        dist.recv(received, src=ranks - 1)
        dist.send(value, dst=rank + 1)
    else:
        dist.send(value, dst=rank + 1)
        dist.recv(received, src=rank - 1)
    return received


@wrong("0.3", names="no-such-rank")
def receives_from_before_the_first(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        sending = dist.isend(value, dst=(rank + 1) % ranks)
        dist.recv(received, src=rank - 1)
        sending.wait()
    return received


@wrong("0.3", names="recv-returns-a-rank")
def takes_what_recv_returns(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return value.clone()
    sending = dist.isend(value, dst=(rank + 1) % ranks)
    received = dist.recv(torch.empty_like(value), src=(rank - 1) % ranks)
    sending.wait()
    return received


@wrong("0.3", names="another-shape")
def has_too_little_room(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return value.clone()
    received = torch.empty(1)
    sending = dist.isend(value, dst=(rank + 1) % ranks)
    dist.recv(received, src=(rank - 1) % ranks)
    sending.wait()
    return received


@wrong("0.3", names="another-shape")
def receives_float32_only(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return value.clone()
    received = torch.empty(value.shape)
    sending = dist.isend(value, dst=(rank + 1) % ranks)
    dist.recv(received, src=(rank - 1) % ranks)
    sending.wait()
    return received


# With NCCL all ranks wait: its queue keeps what a rank receives behind what it sends.
@wrong("0.3", names="not-waited", on_nccl="all-begin-alike")
def does_not_wait_for_its_message(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        dist.isend(value, dst=(rank + 1) % ranks)
        dist.recv(received, src=(rank - 1) % ranks)
    return received


# With NCCL all ranks wait: its queue keeps what a rank sends behind what it receives.
@wrong("0.3", names="not-waited", on_nccl="all-begin-alike")
def does_not_wait_for_what_comes(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        dist.irecv(received, src=(rank - 1) % ranks)
        dist.send(value, dst=(rank + 1) % ranks)
    return received


@wrong("0.3", names="collective")
def gathers_everything(value):
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return values[dist.get_rank() - 1]


@wrong("0.3", names="broadcast")
def passes_on_what_came(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks == 1:
        return received
    if rank == 0:
        dist.send(value, dst=1)
        dist.recv(received, src=ranks - 1)
    else:
        dist.recv(received, src=rank - 1)
        dist.send(received, dst=(rank + 1) % ranks)
    return received


@wrong("0.3", names="wrong-direction")
def passes_backwards(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        work = dist.isend(value, dst=(rank - 1) % ranks)
        dist.recv(received, src=(rank + 1) % ranks)
        work.wait()
    return received


@wrong("0.3", names="own-value")
def returns_what_it_had(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks > 1:
        work = dist.isend(value, dst=(rank + 1) % ranks)
        dist.recv(torch.empty_like(value), src=(rank - 1) % ranks)
        work.wait()
    return value.clone()


@wrong("0.3", names="broadcast")
def sends_one_value_to_all(value):
    received = value.clone()
    dist.broadcast(received, src=0)
    return received


@wrong("0.3", names="input-changed")
def receives_into_its_own(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return value.clone()
    work = dist.isend(value.clone(), dst=(rank + 1) % ranks)
    dist.recv(value, src=(rank - 1) % ranks)
    work.wait()
    return value


@wrong("0.3", names="sends-to-itself")
def forgets_the_single_rank(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    work = dist.isend(value, dst=(rank + 1) % ranks)
    dist.recv(received, src=(rank - 1) % ranks)
    work.wait()
    return received


@wrong("0.3", names="not-a-copy")
def returns_its_argument(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return value
    received = torch.empty_like(value)
    work = dist.isend(value, dst=(rank + 1) % ranks)
    dist.recv(received, src=(rank - 1) % ranks)
    work.wait()
    return received


@wrong("0.3", names="no-wrap")
def stops_at_the_last_rank(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if rank > 0:
        dist.recv(received, src=rank - 1)
    if rank < ranks - 1:
        dist.send(value, dst=rank + 1)
    return received


@wrong("0.3", names="sends-to-itself")
def even_ranks_send_first(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(value)
    if rank % 2 == 0:
        dist.send(value, dst=(rank + 1) % ranks)
        dist.recv(received, src=(rank - 1) % ranks)
    else:
        dist.recv(received, src=(rank - 1) % ranks)
        dist.send(value, dst=(rank + 1) % ranks)
    return received


@right("0.3")
def posts_both_at_once(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        send = dist.P2POp(dist.isend, value, (rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([send, receive]):  # NCCL's queue knows one at a time
            work.wait()
    return received


@wrong("0.3", names="pairs-only")
def swaps_with_a_partner(value):
    partner = dist.get_rank() ^ 1
    received = value.clone()
    if partner >= dist.get_world_size():
        return received
    if partner > dist.get_rank():
        dist.send(value, partner)
        dist.recv(received, partner)
    else:
        dist.recv(received, partner)
        dist.send(value, partner)
    return received


def _passed(value, received):
    """Passes a message on; one rank after the other sends, and rank 0 begins."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.send(value, 1)
        dist.recv(received, ranks - 1)
    else:
        dist.recv(received, rank - 1)
        dist.send(value, (rank + 1) % ranks)
    return received


@wrong("0.3", names="not-as-it-is")
def passes_float32_whatever_comes(value):
    if dist.get_world_size() == 1:
        return value.clone()
    return _passed(value.float(), torch.empty(value.shape)).to(value.dtype)


@wrong("0.3", names="not-as-it-is")
def passes_objects(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return value.clone()
    received = [None]
    if rank == 0:
        dist.send_object_list([value], 1)
        dist.recv_object_list(received, ranks - 1)
    else:
        dist.recv_object_list(received, rank - 1)
        dist.send_object_list([value], (rank + 1) % ranks)
    return received[0]


@wrong("0.3", names="another-shape")
def passes_a_vector(value):
    flat = value.flatten()
    return _passed(flat, torch.empty_like(flat)) if dist.get_world_size() > 1 else value.clone()


@right("0.3")
def one_after_the_other(value):
    if dist.get_world_size() == 1:
        return value.clone()
    return _passed(value, torch.empty_like(value))
