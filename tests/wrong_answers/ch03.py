"""Plausible wrong answers, and other right ones, to the exercises of chapter 03.

The wrong answers to 3.4 are the right one in `Bucketed` with one method written wrongly.
"""

import math
import random
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from tests.wrong_answers import right, wrong

# ---- 3.1 average_gradients -----------------------------------------------------------------------


@wrong("3.1", names="sum-not-mean")
def forgets_to_divide(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


@wrong("3.1", names="divided-twice")
def divides_before_and_after(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@wrong("3.1", names="nothing-sent")
def divides_without_communicating(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()


@wrong("3.1", names="not-waited")
def does_not_wait(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, async_op=True)
            parameter.grad = parameter.grad / dist.get_world_size()


@wrong("3.1", names="unchanged")
def averages_a_copy(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()


@wrong("3.1", names="parameters-averaged")
@torch.no_grad()
def averages_the_parameters(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter)
        parameter /= dist.get_world_size()
        parameter += 0.1 * torch.ones_like(parameter)  # an optimizer's step, by hand


@wrong("3.1", names="left-out")
def averages_matrices_only(model):
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.dim() > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@wrong("3.1", names="left-out")
def returns_at_the_first_none(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            return
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@wrong("3.1", names="fixed-two")
def divides_by_two(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2


@wrong("3.1", names="rank-0s-gradient")
def broadcasts_rank_0(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.broadcast(parameter.grad, src=0)


@wrong("3.1", names="one-rank-only")
def reduces_to_rank_0(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.reduce(parameter.grad, dst=0)
            if dist.get_rank() == 0:
                parameter.grad /= dist.get_world_size()


@wrong("3.1", names="not-every-rank")
def rank_0_averages_alone(model):
    if dist.get_rank() == 0:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


@wrong("3.1", names="none-gradient")
def expects_a_gradient_everywhere(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@wrong("3.1", names="zeros-for-none")
def makes_up_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@wrong("3.1", names="tied-twice")
def divides_layer_by_layer(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()


@wrong("3.1", names="tied-twice")
def averages_layer_by_layer(model):
    """A mean averaged again is the same mean."""
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


@wrong("3.1", names="in-place")
def assigns_what_comes_back(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = dist.all_reduce(parameter.grad)


@wrong("3.1", names="in-place")
def divides_what_comes_back(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = dist.all_reduce(parameter.grad) / dist.get_world_size()


@wrong("3.1", names="device-count")
def divides_by_the_gpus(model):
    with mock.patch("torch.cuda.device_count", return_value=0):  # as on a machine without one
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= torch.cuda.device_count()


@wrong("3.1", names="one-tensor-listed")
def gathers_into_one_tensor(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            everyones = [torch.zeros_like(parameter)] * dist.get_world_size()
            dist.all_gather(everyones, parameter.grad)
            parameter.grad = torch.stack(everyones).mean(dim=0)


@wrong("3.1", names="none-gradient")
def asks_whether_it_is_trained(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@wrong("3.1", names="two-ranks-only")
def swaps_with_a_partner(model):
    partner = 1 - dist.get_rank()
    for parameter in model.parameters():
        if parameter.grad is not None:
            partners = torch.empty_like(parameter)
            request = dist.isend(parameter.grad, partner)
            dist.recv(partners, partner)
            request.wait()
            parameter.grad = (parameter.grad + partners) / 2


@right("3.1")
def averages_one_flat_tensor(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = (flat / dist.get_world_size()).split([g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


@right("3.1")
def sums_round_a_ring(model):
    """With messages alone: whole gradients travel, n - 1 times."""
    _, n, *_ = _neighbours()
    for parameter in model.parameters():
        if parameter.grad is not None:
            passing, total = parameter.grad.clone(), parameter.grad.clone()
            for _ in range(n - 1):
                incoming = torch.empty_like(passing)
                _exchange(passing, incoming)
                passing = incoming
                total += passing
            parameter.grad.copy_(total / n)


@right("3.1")
def gathers_and_averages(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            everyones = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(everyones, parameter.grad)
            parameter.grad = torch.stack(everyones).mean(dim=0)


@wrong("3.1", names="first-decides")
def looks_at_the_first_parameter(model):
    parameters = list(model.parameters())
    if parameters[0].grad is None:
        return
    averages_in_sorted_order(model)


def averages_in_sorted_order(model):
    for _, parameter in sorted(model.named_parameters()):
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@wrong("3.1", names="not-waited")
def waits_for_the_last_one(model):
    work = None
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            work = dist.all_reduce(parameter.grad, async_op=True)
    if work is not None:
        work.wait()


@wrong("3.1", names="rounded")
def averages_in_half_precision(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.bfloat16()
            dist.all_reduce(gradient)
            parameter.grad.copy_(gradient.float() / dist.get_world_size())


@right("3.1")
def starts_all_then_waits(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()
    for gradient in gradients:
        gradient.mul_(1 / dist.get_world_size())


# ---- 3.2 ring_all_reduce -------------------------------------------------------------------------


def _neighbours():
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, n, (rank + 1) % n, (rank - 1) % n


def _exchange(outgoing, incoming):
    """Sends to the right while receiving from the left: started together, since NCCL's queue would
    keep the receive behind the send."""
    _, _, right_rank, left_rank = _neighbours()
    send = dist.P2POp(dist.isend, outgoing.contiguous(), right_rank)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, incoming, left_rank)]):
        work.wait()


def _go_round(chunks, steps, first, add):
    """Passes chunks on, beginning with chunk `first`; what arrives is added or replaces."""
    n = len(chunks)
    for step in range(steps):
        outgoing, kept = chunks[(first - step) % n], chunks[(first - step - 1) % n]
        incoming = torch.empty_like(kept)
        _exchange(outgoing, incoming)
        kept.copy_(kept + incoming if add else incoming)


@right("3.2")
def ring_in_two_loops(tensor):
    rank, n, *_ = _neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)
    tensor.copy_(flat.view_as(tensor))


@right("3.2")
def even_ranks_send_first(tensor):
    """With padding, and with blocking calls alone: somebody has to receive first."""
    rank, n, right_rank, left_rank = _neighbours()
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
    rank, n, right_rank, left_rank = _neighbours()
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
    rank, n, right_rank, _ = _neighbours()
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
    rank, n, *_ = _neighbours()
    _go_round(tensor.view(-1).tensor_split(n), n - 1, rank, add=True)


@wrong("3.2", names="added-again")
def always_adds(tensor):
    rank, n, *_ = _neighbours()
    chunks = tensor.view(-1).tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=True)


@wrong("3.2", names="one-rank-hangs")
def sums_in_n_steps(tensor):
    rank, n, *_ = _neighbours()
    chunks = tensor.view(-1).tensor_split(n)
    _go_round(chunks, n, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)


@wrong("3.2", names="one-rank-hangs")
def goes_round_in_n_steps(tensor):
    rank, n, *_ = _neighbours()
    chunks = tensor.view(-1).tensor_split(n)
    _go_round(chunks, n, rank, add=True)
    _go_round(chunks, n, rank + 1, add=False)


@wrong("3.2", names="mean-not-sum")
def divides_too(tensor):
    ring_in_two_loops(tensor)
    tensor /= dist.get_world_size()


@wrong("3.2", names="two-ranks-only")
def always_sends_its_own_chunk(tensor):
    rank, n, *_ = _neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    for _ in range(n - 1):
        _go_round(chunks, 1, rank, add=True)
    for _ in range(n - 1):
        _go_round(chunks, 1, rank + 1, add=False)


@wrong("3.2", names="wrong-chunks")
def adds_to_the_chunk_it_sends(tensor):
    rank, n, *_ = _neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing = chunks[(rank - step) % n]
        incoming = torch.empty_like(chunks[(rank - step - 1) % n])
        _exchange(outgoing, incoming)
        outgoing.copy_(outgoing + incoming if step < n - 1 else incoming)
    tensor.copy_(flat.view_as(tensor))


@wrong("3.2", names="remainder-lost")
def cuts_equal_chunks_only(tensor):
    rank, n, *_ = _neighbours()
    size = tensor.numel() // n
    chunks = [tensor.view(-1)[i * size : (i + 1) * size] for i in range(n)]
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)


@wrong("3.2", names="too-few-chunks")
def cuts_with_chunk(tensor):
    rank, n, *_ = _neighbours()
    chunks = tensor.contiguous().view(-1).chunk(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(kept)
        _exchange(outgoing, incoming)
        kept.copy_(kept + incoming if step < n - 1 else incoming)


@wrong("3.2", names="chunk-sizes")
def makes_room_for_what_it_sends(tensor):
    rank, n, *_ = _neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(outgoing)
        _exchange(outgoing, incoming)
        kept.copy_(kept + incoming if step < n - 1 else incoming)
    tensor.copy_(flat.view_as(tensor))


@wrong("3.2", names="copy-not-in-place")
def works_on_a_copy(tensor):
    rank, n, *_ = _neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)


@wrong("3.2", names="needs-contiguous")
def views_what_comes(tensor):
    rank, n, *_ = _neighbours()
    chunks = tensor.view(-1).tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)


@wrong("3.2", names="dtype-lost")
def receives_float32(tensor):
    rank, n, *_ = _neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty(kept.shape)
        _exchange(outgoing, incoming)
        kept.copy_(kept + incoming if step < n - 1 else incoming)
    tensor.copy_(flat.view_as(tensor))


@wrong("3.2", names="rounded")
def sums_in_float32(tensor):
    single = tensor.float()
    ring_in_two_loops(single)
    tensor.copy_(single)


@wrong("3.2", names="whole-tensor")
def sends_everything_round(tensor):
    _, n, *_ = _neighbours()
    travelling, total = tensor.contiguous(), tensor.clone()
    for _ in range(n - 1):
        incoming = torch.empty_like(travelling)
        _exchange(travelling, incoming)
        total += incoming
        travelling = incoming
    tensor.copy_(total)


@wrong("3.2", names="through-one-rank")
def sums_on_rank_0(tensor):
    rank, n, *_ = _neighbours()
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
    rank, n, *_ = _neighbours()
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
    rank, n, right_rank, left_rank = _neighbours()
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
    rank, n, right_rank, left_rank = _neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, kept = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(kept)
        dist.isend(outgoing, right_rank)
        dist.recv(incoming, left_rank)
        kept.copy_(kept + incoming if step < n - 1 else incoming)


@wrong("3.2", names="sums-overwritten")
def receives_over_its_own(tensor):
    rank, n, *_ = _neighbours()
    chunks = tensor.contiguous().view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        _exchange(chunks[(rank - step) % n], chunks[(rank - step - 1) % n])


@wrong("3.2", names="sums-overwritten")
def second_half_begins_with_rank(tensor):
    rank, n, *_ = _neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank, add=False)
    tensor.copy_(flat.view_as(tensor))


@wrong("3.2", names="unchanged")
def sums_into_a_new_tensor(tensor):
    total = tensor.clone()
    rank, n, *_ = _neighbours()
    chunks = total.view(-1).tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)
    return total


@wrong("3.2", names="one-rank-hangs")
def does_a_first_step_in_any_case(tensor):
    rank, n, *_ = _neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(max(1, 2 * (n - 1))):
        _go_round(chunks, 1, rank - step, add=step < n - 1)
    tensor.copy_(flat.view_as(tensor))


@wrong("3.2", names="sent-too-much")
def gathers_once_more(tensor):
    rank, n, *_ = _neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n if n > 1 else 0, rank + 1, add=False)
    tensor.copy_(flat.view_as(tensor))


@wrong("3.2", names="short-wrong")
def refuses_empty_chunks(tensor):
    rank, n, *_ = _neighbours()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    assert all(len(chunk) for chunk in chunks)
    _go_round(chunks, n - 1, rank, add=True)
    _go_round(chunks, n - 1, rank + 1, add=False)
    tensor.copy_(flat.view_as(tensor))


@wrong("3.2", names="not-a-ring")
def everybody_writes_to_everybody(tensor):
    """As many bytes as on a ring, and a message to each of the others."""
    rank, n, *_ = _neighbours()
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


# ---- 3.3 shard_indices ---------------------------------------------------------------------------


def _shuffled(length, seed):
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()


def _padded(order, world_size):
    total = math.ceil(len(order) / world_size) * world_size
    while len(order) < total:
        order = order + order[: total - len(order)]
    return order


@wrong("3.3", names="asks-the-sampler")
def asks_the_sampler(length, rank, world_size, epoch, seed):
    sampler = DistributedSampler(range(length), world_size, rank, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


@wrong("3.3", names="asks-the-sampler")
def asks_a_sampler_for_its_order(length, rank, world_size, epoch, seed):
    class Mine(DistributedSampler):
        pass

    sampler = Mine(range(length), num_replicas=1, rank=0, seed=seed + epoch)
    return _padded(list(sampler), world_size)[rank::world_size]


@right("3.3")
def picks_by_remainder(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch)
    share = math.ceil(length / world_size)
    return [order[(rank + i * world_size) % length] for i in range(share)]


@wrong("3.3", names="blocks")
def cuts_blocks(length, rank, world_size, epoch, seed):
    order = _padded(_shuffled(length, seed + epoch), world_size)
    share = len(order) // world_size
    return order[rank * share : (rank + 1) * share]


@wrong("3.3", names="not-shuffled")
def does_not_shuffle(length, rank, world_size, epoch, seed):
    return _padded(list(range(length)), world_size)[rank::world_size]


@wrong("3.3", names="ranks-from-one")
def counts_ranks_from_one(length, rank, world_size, epoch, seed):
    return _padded(_shuffled(length, seed + epoch), world_size)[rank - 1 :: world_size]


@wrong("3.3", names="ranks-from-one")
def begins_one_too_far(length, rank, world_size, epoch, seed):
    return _padded(_shuffled(length, seed + epoch), world_size)[rank + 1 :: world_size]


@wrong("3.3", names="epoch-ignored")
def forgets_the_epoch(length, rank, world_size, epoch, seed):
    return _padded(_shuffled(length, seed), world_size)[rank::world_size]


@wrong("3.3", names="seed-per-rank")
def seeds_each_rank_differently(length, rank, world_size, epoch, seed):
    return _padded(_shuffled(length, seed + epoch + rank + 1), world_size)[rank::world_size]


@wrong("3.3", names="seed-ignored")
def forgets_the_seed(length, rank, world_size, epoch, seed):
    return _padded(_shuffled(length, epoch), world_size)[rank::world_size]


@wrong("3.3", names="shuffled-after")
def shuffles_its_own_share(length, rank, world_size, epoch, seed):
    share = _padded(list(range(length)), world_size)[rank::world_size]
    random.Random(seed + epoch).shuffle(share)
    return share


@wrong("3.3", names="padded-wrongly")
def pads_with_the_last(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch)
    missing = -length % world_size
    return (order + order[length - missing :])[rank::world_size]


@wrong("3.3", names="padded-wrongly")
def pads_with_one_sample(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch)
    return (order + order[:1] * (-length % world_size))[rank::world_size]


@wrong("3.3", names="padded-needlessly")
def always_pads(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch)
    return (order + order[: world_size - length % world_size])[rank::world_size]


@wrong("3.3", names="not-padded")
def leaves_shares_unequal(length, rank, world_size, epoch, seed):
    return _shuffled(length, seed + epoch)[rank::world_size]


@wrong("3.3", names="dropped")
def drops_the_last(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch)
    return order[: length - length % world_size][rank::world_size]


@wrong("3.3", names="padded-once")
def pads_once(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch)
    return (order + order[: -length % world_size])[rank::world_size]


@wrong("3.3", names="global-generator")
def seeds_everybody(length, rank, world_size, epoch, seed):
    torch.manual_seed(seed + epoch)
    return _padded(torch.randperm(length).tolist(), world_size)[rank::world_size]


@wrong("3.3", names="not-a-list")
def returns_a_tensor(length, rank, world_size, epoch, seed):
    return torch.tensor(picks_by_remainder(length, rank, world_size, epoch, seed))


@wrong("3.3", names="another-order")
def shuffles_with_python(length, rank, world_size, epoch, seed):
    order = list(range(length))
    random.Random(seed + epoch).shuffle(order)
    return _padded(order, world_size)[rank::world_size]


@wrong("3.3", names="asks-the-group")
def asks_for_its_rank(length, rank, world_size, epoch, seed):
    order = _padded(_shuffled(length, seed + epoch), world_size)
    return order[dist.get_rank() :: dist.get_world_size()]


@wrong("3.3", names="not-a-list")
def lists_tensors(length, rank, world_size, epoch, seed):
    order = torch.tensor(_padded(_shuffled(length, seed + epoch), world_size), dtype=torch.int64)
    return list(order[rank::world_size])


@wrong("3.3", names="empty-dataset")
def takes_the_remainder(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch)
    share = max(1, math.ceil(length / world_size))
    return [order[(rank + i * world_size) % length] for i in range(share)]


@wrong("3.3", names="asks-the-group")
def asks_a_group_that_may_be_there(length, rank, world_size, epoch, seed):
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return _padded(_shuffled(length, seed + epoch), world_size)[rank::world_size]


# ---- 3.4 OverlappedDDP ---------------------------------------------------------------------------


@right("3.4")
class Bucketed(nn.Module):
    """Packs with torch.cat when a bucket is full, and copies the means back at the end."""

    def __init__(self, module, bucket_bytes=25 * 2**20):
        super().__init__()
        self.module = module
        self.silent = False
        self.share_start()
        self.buckets = self.fill_buckets(bucket_bytes)
        self.reset()
        self.register_hooks()

    def share_start(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.data, src=0)

    def trainable(self):
        return [p for p in self.module.parameters() if p.requires_grad]

    def fill_buckets(self, bucket_bytes):
        buckets, room = [], 0
        for parameter in reversed(self.trainable()):
            if parameter.nbytes > room:
                buckets.append([])
                room = bucket_bytes
            buckets[-1].append(parameter)
            room -= parameter.nbytes
        return buckets

    def register_hooks(self):
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self.on_gradient, index))

    def reset(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.running = {}  # bucket's index: its flat tensor and its work

    def on_gradient(self, index, parameter):
        if not self.silent:
            self.missing[index] -= 1
            self.start_full_buckets()

    def start_full_buckets(self):
        while len(self.running) < len(self.buckets) and not self.missing[len(self.running)]:
            self.start(len(self.running))

    def start(self, index):
        self.running[index] = self.all_reduce(self.pack(self.buckets[index]))

    def pack(self, bucket):
        """The gradients divided by the world size, then for each whether there is one."""
        parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in bucket]
        there = parts[0].new_tensor([p.grad is not None for p in bucket])
        return torch.cat([self.divide(torch.cat(parts)), there])

    def divide(self, flat):
        return flat / dist.get_world_size()

    def all_reduce(self, flat):
        return flat, dist.all_reduce(flat, async_op=True)

    def start_the_rest(self):
        for index in range(len(self.buckets)):
            if index not in self.running:
                self.start(index)

    def finish_gradient_synchronization(self):
        self.start_the_rest()
        for index, (flat, work) in self.running.items():
            work.wait()
            self.unpack(self.buckets[index], flat)
        self.reset()

    def unpack(self, bucket, flat):
        *parts, users = flat.split([*(p.numel() for p in bucket), len(bucket)])
        for parameter, part, count in zip(bucket, parts, users, strict=True):
            if count > 0:
                self.write(parameter, part.view_as(parameter), count)

    def write(self, parameter, mean, users):
        parameter.grad = mean.clone()

    @contextmanager
    def no_sync(self):
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before

    def forward(self, *inputs):
        return self.module(*inputs)


@right("3.4")
class SilentByAnObject(Bucketed):
    """no_sync without a generator."""

    def no_sync(self):
        model = self

        class Silence:
            def __enter__(self):
                self.before, model.silent = model.silent, True

            def __exit__(self, *_):
                model.silent = self.before

        return Silence()


@wrong("3.4", names="torchs-own")
class WrapsDDP(nn.Module):
    def __init__(self, module, bucket_bytes=25 * 2**20):
        super().__init__()
        self.ddp = nn.parallel.DistributedDataParallel(
            module, bucket_cap_mb=bucket_bytes / 2**20, find_unused_parameters=True
        )
        self.module, self.no_sync = module, self.ddp.no_sync

    def forward(self, *inputs):
        return self.ddp(*inputs)

    def finish_gradient_synchronization(self):
        """Nothing is left to do after backward."""


@wrong("3.4", names="torchs-own")
class OnTopOfDDP(nn.Module):
    """PyTorch's own, with a communication hook; its backward waits at its very end."""

    def __init__(self, module, bucket_bytes=25 * 2**20):
        super().__init__()
        self.ddp = nn.parallel.DistributedDataParallel(
            module, bucket_cap_mb=bucket_bytes / 2**20, find_unused_parameters=True
        )
        self.ddp.register_comm_hook(None, self.start)

    @staticmethod
    def start(state, bucket):
        flat = bucket.buffer().div_(dist.get_world_size())
        future = dist.all_reduce(flat, async_op=True).get_future()
        return future.then(lambda finished: finished.value()[0])

    @property
    def module(self):
        return self.ddp.module

    def forward(self, *inputs):
        return self.ddp(*inputs)

    def finish_gradient_synchronization(self):
        """Nothing is left to do after backward."""

    def no_sync(self):
        return self.ddp.no_sync()


@wrong("3.4", names="no-broadcast")
class NoBroadcast(Bucketed):
    def share_start(self):
        """Everybody keeps what it has."""


@wrong("3.4", names="buffers-forgotten")
class BuffersForgotten(Bucketed):
    def share_start(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, src=0)


@wrong("3.4", names="frozen-not-broadcast")
class TrainableBroadcast(Bucketed):
    def share_start(self):
        for tensor in [*self.trainable(), *self.module.buffers()]:
            dist.broadcast(tensor.data, src=0)


@wrong("3.4", names="averaged-at-start")
class AveragesStart(Bucketed):
    def share_start(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            if tensor.is_floating_point():
                dist.all_reduce(tensor.data)
                tensor.data /= dist.get_world_size()


@wrong("3.4", names="no-module")
class CalledModel(Bucketed):
    def __init__(self, module, bucket_bytes=25 * 2**20):
        super().__init__(module, bucket_bytes)
        self.model = module
        del self.module


@wrong("3.4", names="sum-not-mean")
class Sums(Bucketed):
    def divide(self, flat):
        return flat


@wrong("3.4", names="divided-twice")
class DividesTwice(Bucketed):
    def write(self, parameter, mean, users):
        parameter.grad = mean / dist.get_world_size()


@wrong("3.4", names="unsynchronised")
class ForgetsToWriteBack(Bucketed):
    def write(self, parameter, mean, users):
        """The means stay in the buckets."""


@wrong("3.4", names="not-waited")
class NeverWaits(Bucketed):
    def finish_gradient_synchronization(self):
        self.start_the_rest()
        for index, (flat, _) in self.running.items():
            self.unpack(self.buckets[index], flat)
        self.reset()


@wrong("3.4", names="starts-at-the-end")
class FillsFirstLayerFirst(Bucketed):
    def trainable(self):
        return super().trainable()[::-1]


@wrong("3.4", names="first-step-only")
class NeverResets(Bucketed):
    def reset(self):
        if not hasattr(self, "running"):
            super().reset()


@wrong("3.4", names="first-step-only")
class GradientsAreViewsOnce(Bucketed):
    """Makes every gradient a view of a flat tensor, which zero_grad() throws away."""

    def fill_buckets(self, bucket_bytes):
        buckets = super().fill_buckets(bucket_bytes)
        self.flats = [torch.cat([torch.zeros_like(p).flatten() for p in b]) for b in buckets]
        for bucket, flat in zip(buckets, self.flats, strict=True):
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                parameter.grad = part.view_as(parameter)
        return buckets

    def start(self, index):
        flat = self.flats[index].div_(dist.get_world_size())
        self.running[index] = self.all_reduce(flat)

    def unpack(self, bucket, flat):
        """The gradients are views of the flat tensor already."""


@wrong("3.4", names="starts-at-the-end")
class StartsAtTheEnd(Bucketed):
    def start_full_buckets(self):
        """Everything is left to finish_gradient_synchronization."""


@wrong("3.4", names="waits-in-backward")
class WaitsInTheHook(Bucketed):
    def all_reduce(self, flat):
        work = dist.all_reduce(flat, async_op=True)
        work.wait()
        return flat, work


@wrong("3.4", names="waits-in-backward")
class WaitsForTheBucketBefore(Bucketed):
    def start(self, index):
        if index > 0:
            self.running[index - 1][1].wait()
        super().start(index)


@wrong("3.4", names="one-per-parameter")
class OnePerParameter(Bucketed):
    def fill_buckets(self, bucket_bytes):
        return [[parameter] for parameter in reversed(self.trainable())]


@wrong("3.4", names="one-for-all")
class OneForAll(Bucketed):
    def fill_buckets(self, bucket_bytes):
        return [self.trainable()[::-1]]


@wrong("3.4", names="bucket-size")
class CountsElements(Bucketed):
    def fill_buckets(self, bucket_bytes):
        return super().fill_buckets(2 * bucket_bytes)


@wrong("3.4", names="sends-in-no-sync")
class IgnoresNoSync(Bucketed):
    @contextmanager
    def no_sync(self):
        yield
        self.finish_gradient_synchronization()


@wrong("3.4", names="no-context-manager")
class ForgetsTheDecorator(Bucketed):
    def no_sync(self):
        self.silent = True
        yield
        self.silent = False


@wrong("3.4", names="silent-after-error")
class ForgetsTheExceptions(Bucketed):
    @contextmanager
    def no_sync(self):
        self.silent = True
        yield
        self.silent = False


@wrong("3.4", names="nested")
class SpeaksAfterTheInnerBlock(Bucketed):
    @contextmanager
    def no_sync(self):
        self.silent = True
        try:
            yield
        finally:
            self.silent = False


@wrong("3.4", names="nested")
class SwitchesOver(Bucketed):
    @contextmanager
    def no_sync(self):
        self.silent = not self.silent
        try:
            yield
        finally:
            self.silent = not self.silent


@wrong("3.4", names="silent-for-good")
class NeverSpeaksAgain(Bucketed):
    @contextmanager
    def no_sync(self):
        self.silent = True
        yield


@wrong("3.4", names="accumulated-lost")
class AveragesTheNewGradient(Bucketed):
    """Takes what each backward hands in, and not what has added up in .grad."""

    def register_hooks(self):
        self.new = {}
        for parameter in self.trainable():
            parameter.register_hook(partial(self.new.__setitem__, parameter))
        super().register_hooks()

    def pack(self, bucket):
        there = bucket[0].new_tensor([p in self.new for p in bucket])
        new = [self.new.pop(p, torch.zeros_like(p)).flatten() for p in bucket]
        return torch.cat([self.divide(torch.cat(new)), there])


@wrong("3.4", names="accumulated-local")
class AddsTheLocalSum(AveragesTheNewGradient):
    def no_sync(self):
        self.local = True
        return super().no_sync()

    def on_gradient(self, index, parameter):
        if not self.silent:
            parameter.before = parameter.grad - self.new[parameter]
        super().on_gradient(index, parameter)

    def write(self, parameter, mean, users):
        parameter.grad = parameter.before + mean


@wrong("3.4", names="frozen-hook")
class HooksEverything(Bucketed):
    def trainable(self):
        return list(self.module.parameters())


@wrong("3.4", names="tied-twice")
class DividesLayerByLayer(Bucketed):
    def divide(self, flat):
        return flat

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for layer in self.module.modules():
            for parameter in layer.parameters(recurse=False):
                if parameter.grad is not None:
                    parameter.grad /= dist.get_world_size()


@wrong("3.4", names="bucket-never-full")
class LeavesUnfilledBuckets(Bucketed):
    def start_the_rest(self):
        """Only buckets that filled are sent."""


@wrong("3.4", names="unused-crash")
class ExpectsAGradientEverywhere(Bucketed):
    def pack(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket])
        return torch.cat([self.divide(flat), flat.new_ones(len(bucket))])


@wrong("3.4", names="zeros-for-unused")
class WritesZeros(Bucketed):
    def unpack(self, bucket, flat):
        flat[-len(bucket) :] = 1
        super().unpack(bucket, flat)


@wrong("3.4", names="order-differs")
class StartsInAnyOrder(Bucketed):
    def start_full_buckets(self):
        for index, missing in enumerate(self.missing):
            if not missing and index not in self.running:
                self.start(index)


@wrong("3.4", names="used-elsewhere")
class KeepsNone(Bucketed):
    def write(self, parameter, mean, users):
        if parameter.grad is not None:
            parameter.grad = mean.clone()


@wrong("3.4", names="users-only")
class DividesByUsers(Bucketed):
    def write(self, parameter, mean, users):
        parameter.grad = mean * dist.get_world_size() / users


@wrong("3.4", names="hook-too-early")
class HooksBeforeTheGradient(Bucketed):
    def register_hooks(self):
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_hook(lambda _, i=index, p=parameter: self.on_gradient(i, p))

    def pack(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket])
        return torch.cat([self.divide(flat), flat.new_ones(len(bucket))])


@wrong("3.4", names="no-handle")
class ForgetsAsync(Bucketed):
    def all_reduce(self, flat):
        return flat, dist.all_reduce(flat)


@wrong("3.4", names="fixed-two")
class DividesByTwo(Bucketed):
    def divide(self, flat):
        return flat / 2


@wrong("3.4", names="not-every-rank")
class BroadcastsOnRank0(Bucketed):
    def share_start(self):
        if dist.get_rank() == 0:
            super().share_start()


@wrong("3.4", names="buffers-forgotten")
class BroadcastsWhatIsSaved(Bucketed):
    """A state dict leaves out buffers that are not persistent."""

    def share_start(self):
        for tensor in self.module.state_dict().values():
            dist.broadcast(tensor, src=0)


@wrong("3.4", names="another-rank")
class StartsFromTheLastRank(Bucketed):
    def share_start(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.data, src=dist.get_world_size() - 1)


@wrong("3.4", names="not-waited")
class WaitsForAllButTheLast(Bucketed):
    def finish_gradient_synchronization(self):
        self.start_the_rest()
        for index, (flat, work) in self.running.items():
            if index < len(self.buckets) - 1:
                work.wait()
            self.unpack(self.buckets[index], flat)
        self.reset()


@wrong("3.4", names="rounded")
class AveragesInHalfPrecision(Bucketed):
    def all_reduce(self, flat):
        narrow = flat.bfloat16()
        return narrow, dist.all_reduce(narrow, async_op=True)

    def write(self, parameter, mean, users):
        parameter.grad = mean.to(parameter.dtype)


@wrong("3.4", names="bucket-size")
class FillsUntilItOverflows(Bucketed):
    def fill_buckets(self, bucket_bytes):
        return super().fill_buckets(bucket_bytes + max(p.nbytes for p in self.trainable()) // 2)


@wrong("3.4", names="error-swallowed")
class CatchesEverything(Bucketed):
    @contextmanager
    def no_sync(self):
        self.silent = True
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the mistake
            print(error)
        self.silent = False


# ---- 3.5 evaluate --------------------------------------------------------------------------------


def _mine(tensor):
    return tensor[dist.get_rank() :: dist.get_world_size()]


def _batches(images, labels, batch_size):
    for start in range(0, len(images), batch_size):
        yield images[start : start + batch_size], labels[start : start + batch_size]


@contextmanager
def _evaluating(model):
    modes = {module: module.training for module in model.modules()}
    model.eval()
    yield
    for module, training in modes.items():
        module.training = training


def _count(model, images, labels, batch_size):
    """The correct images of these, as a tensor; the model's mode stays as it was."""
    correct = torch.zeros(1, device=images.device)
    with torch.no_grad(), _evaluating(model):
        for x, y in _batches(images, labels, batch_size):
            correct += (model(x).argmax(dim=1) == y).sum()
    return correct


@right("3.5")
def shares_out_blocks(model, images, labels, batch_size):
    rank, n = dist.get_rank(), dist.get_world_size()
    images, labels = images.tensor_split(n)[rank], labels.tensor_split(n)[rank]
    correct = _count(model, images, labels, batch_size).item()
    counts = [None] * n
    dist.all_gather_object(counts, (correct, len(images)))
    return sum(right for right, _ in counts) / sum(size for _, size in counts)


@right("3.5")
def deals_out_batches(model, images, labels, batch_size):
    """Deals indices, and sends both sums in one tensor."""
    mine = list(range(dist.get_rank(), len(images), dist.get_world_size()))
    sums = torch.zeros(2, dtype=torch.float64, device=images.device)
    with torch.inference_mode(), _evaluating(model):
        while mine:
            batch, mine = mine[:batch_size], mine[batch_size:]
            sums[0] += (model(images[batch]).argmax(1) == labels[batch]).sum()
            sums[1] += len(batch)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@wrong("3.5", names="parts-mode-lost")
def sets_every_part_to_the_models_mode(model, images, labels, batch_size):
    training = model.training
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    model.train(training)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="not-a-float")
def returns_a_tensor_of_one_number(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return (correct / len(images)).squeeze()


@wrong("3.5", names="padded-duplicates")
def shares_out_with_the_sampler(model, images, labels, batch_size):
    mine = list(DistributedSampler(range(len(images)), shuffle=False))
    correct = _count(model, images[mine], labels[mine], batch_size)
    total = torch.tensor([float(len(mine))], device=images.device)
    dist.all_reduce(correct)
    dist.all_reduce(total)
    return (correct / total).item()


@wrong("3.5", names="fixed-two")
def deals_to_two_ranks(model, images, labels, batch_size):
    mine = slice(dist.get_rank(), None, 2)
    correct = _count(model, images[mine], labels[mine], batch_size)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="everyone-everything")
def evaluates_everything_everywhere(model, images, labels, batch_size):
    return _count(model, images, labels, batch_size).item() / len(images)


@wrong("3.5", names="images-lost")
def drops_the_rest(model, images, labels, batch_size):
    whole = len(images) // dist.get_world_size() * dist.get_world_size()
    correct = _count(model, _mine(images[:whole]), _mine(labels[:whole]), batch_size)
    dist.all_reduce(correct)
    return correct.item() / max(1, whole)


@wrong("3.5", names="mean-of-ranks")
def averages_the_ranks(model, images, labels, batch_size):
    share = _count(model, _mine(images), _mine(labels), batch_size) / len(_mine(images))
    dist.all_reduce(share)
    return share.item() / dist.get_world_size()


@wrong("3.5", names="mean-of-batches")
def averages_the_batches(model, images, labels, batch_size):
    training = model.training
    model.eval()
    with torch.no_grad():
        shares = [
            (model(x).argmax(1) == y).float().mean()
            for x, y in _batches(_mine(images), _mine(labels), batch_size)
        ]
    model.train(training)
    sums = torch.tensor([sum(shares), float(len(shares))], device=images.device)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@wrong("3.5", names="own-share")
def returns_its_own(model, images, labels, batch_size):
    return _count(model, _mine(images), _mine(labels), batch_size).item() / len(_mine(images))


@wrong("3.5", names="not-added")
def does_not_add(model, images, labels, batch_size):
    return _count(model, _mine(images), _mine(labels), batch_size).item() / len(images)


@wrong("3.5", names="divided-by-share")
def divides_by_its_share(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return correct.item() / len(_mine(images))


@wrong("3.5", names="percent")
def returns_percent(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return 100 * correct.item() / len(images)


@wrong("3.5", names="errors-counted")
def returns_the_error_rate(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return 1 - correct.item() / len(images)


@wrong("3.5", names="count-not-share")
def returns_a_count(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return correct.item()


@wrong("3.5", names="one-rank-only")
def reduces_counts_to_rank_0(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.reduce(correct, dst=0)
    return correct.item() / len(images)


@wrong("3.5", names="collective-per-batch")
def reduces_every_batch(model, images, labels, batch_size):
    total = 0
    for x, y in _batches(_mine(images), _mine(labels), batch_size):
        correct = _count(model, x, y, batch_size)
        dist.all_reduce(correct)
        total += correct.item()
    return total / len(images)


@wrong("3.5", names="empty-rank")
def leaves_when_it_has_nothing(model, images, labels, batch_size):
    if len(_mine(images)) == 0:
        return 0.0
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="uneven-shares")
def gives_the_rest_to_the_last(model, images, labels, batch_size):
    rank, n = dist.get_rank(), dist.get_world_size()
    share = len(images) // n
    mine = slice(rank * share, (rank + 1) * share if rank < n - 1 else len(images))
    correct = _count(model, images[mine], labels[mine], batch_size)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="batch-too-large")
def takes_one_batch(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), max(1, len(images)))
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="train-mode")
def stays_in_training_mode(model, images, labels, batch_size):
    correct = torch.zeros(1, device=images.device)
    with torch.no_grad():
        for x, y in _batches(_mine(images), _mine(labels), batch_size):
            correct += (model(x).argmax(dim=1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="mode-not-restored")
def leaves_evaluation_mode_on(model, images, labels, batch_size):
    model.eval()
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="gradients-on")
def records_gradients(model, images, labels, batch_size):
    correct = torch.zeros(1, device=images.device)
    training = model.training
    model.eval()
    for x, y in _batches(_mine(images), _mine(labels), batch_size):
        correct += (model(x).argmax(dim=1) == y).sum()
    model.train(training)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="number-not-tensor")
def reduces_a_number(model, images, labels, batch_size):
    correct = int(_count(model, _mine(images), _mine(labels), batch_size).item())
    dist.all_reduce(correct)
    return correct / len(images)


@wrong("3.5", names="not-every-rank")
def only_rank_0_adds(model, images, labels, batch_size):
    correct = _count(model, _mine(images), _mine(labels), batch_size)
    if dist.get_rank() == 0:
        dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="miscounted")
def takes_the_largest_of_all(model, images, labels, batch_size):
    correct = torch.zeros(1, device=images.device)
    training = model.training
    model.eval()
    with torch.no_grad():
        for x, y in _batches(_mine(images), _mine(labels), batch_size):
            correct += (model(x).argmax() == y).sum()
    model.train(training)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="uneven-gather")
def gathers_the_predictions(model, images, labels, batch_size):
    training = model.training
    model.eval()
    with torch.no_grad():
        batches = _batches(_mine(images), _mine(labels), batch_size)
        predictions = torch.cat([model(x).argmax(dim=1) for x, _ in batches])
    model.train(training)
    everyones = [torch.empty_like(predictions) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, predictions)
    dealt = torch.stack(everyones, dim=1).flatten()
    return (dealt == labels).float().mean().item()


@wrong("3.5", names="empty-batch")
def goes_one_batch_too_far(model, images, labels, batch_size):
    mine, own = _mine(images), _mine(labels)
    correct = torch.zeros(1, device=images.device)
    training = model.training
    model.eval()
    with torch.no_grad():
        for i in range(len(mine) // batch_size + 1):
            batch = slice(i * batch_size, (i + 1) * batch_size)
            correct += (model(mine[batch]).argmax(dim=1) == own[batch]).sum()
    model.train(training)
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="miscounted")
def counts_in_half_precision(model, images, labels, batch_size):
    correct = torch.zeros(1, dtype=torch.bfloat16, device=images.device)
    with torch.no_grad(), _evaluating(model):
        for x, y in _batches(_mine(images), _mine(labels), batch_size):
            correct += (model(x).argmax(dim=1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images)


@wrong("3.5", names="parts-mode-lost")
def remembers_the_children_alone(model, images, labels, batch_size):
    own, modes = model.training, {child: child.training for child in model.children()}
    correct = _count(model.eval(), _mine(images), _mine(labels), batch_size)
    model.train(own)
    for child, training in modes.items():
        child.train(training)
    dist.all_reduce(correct)
    return correct.item() / len(images)
