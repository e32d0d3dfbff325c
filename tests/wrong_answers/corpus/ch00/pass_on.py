"""Rarer wrong answers to 0.3, `pass_on`."""

import torch
import torch.distributed as dist

from tests.wrong_answers import rarer
from tests.wrong_answers.ch00.pass_on import _passed


@rarer("0.3")
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


@rarer("0.3")
def receives_from_before_the_first(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        sending = dist.isend(value, dst=(rank + 1) % ranks)
        dist.recv(received, src=rank - 1)
        sending.wait()
    return received


@rarer("0.3")
def receives_float32_only(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return value.clone()
    received = torch.empty(value.shape)
    sending = dist.isend(value, dst=(rank + 1) % ranks)
    dist.recv(received, src=(rank - 1) % ranks)
    sending.wait()
    return received


# With NCCL all ranks wait: its queue keeps what a rank sends behind what it receives.
@rarer("0.3")
def does_not_wait_for_what_comes(value):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks > 1:
        dist.irecv(received, src=(rank - 1) % ranks)
        dist.send(value, dst=(rank + 1) % ranks)
    return received


@rarer("0.3")
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


@rarer("0.3")
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


@rarer("0.3")
def passes_a_vector(value):
    flat = value.flatten()
    return _passed(flat, torch.empty_like(flat)) if dist.get_world_size() > 1 else value.clone()
