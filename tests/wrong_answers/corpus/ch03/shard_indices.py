"""Rarer wrong answers to 3.3, `shard_indices`."""

import math

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from tests.wrong_answers import rarer
from tests.wrong_answers.ch03.shard_indices import _padded, _shuffled


@rarer("3.3")
def asks_a_sampler_for_its_order(length, rank, world_size, epoch, seed):
    class Mine(DistributedSampler):
        pass

    sampler = Mine(range(length), num_replicas=1, rank=0, seed=seed + epoch)
    return _padded(list(sampler), world_size)[rank::world_size]


@rarer("3.3")
def begins_one_too_far(length, rank, world_size, epoch, seed):
    return _padded(_shuffled(length, seed + epoch), world_size)[rank + 1 :: world_size]


@rarer("3.3")
def forgets_the_seed(length, rank, world_size, epoch, seed):
    return _padded(_shuffled(length, epoch), world_size)[rank::world_size]


@rarer("3.3")
def pads_with_the_last(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch)
    missing = -length % world_size
    return (order + order[length - missing :])[rank::world_size]


@rarer("3.3")
def pads_with_one_sample(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch)
    return (order + order[:1] * (-length % world_size))[rank::world_size]


@rarer("3.3")
def always_pads(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch)
    return (order + order[: world_size - length % world_size])[rank::world_size]


@rarer("3.3")
def drops_the_last(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch)
    return order[: length - length % world_size][rank::world_size]


@rarer("3.3")
def pads_once(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch)
    return (order + order[: -length % world_size])[rank::world_size]


@rarer("3.3")
def lists_tensors(length, rank, world_size, epoch, seed):
    order = torch.tensor(_padded(_shuffled(length, seed + epoch), world_size), dtype=torch.int64)
    return list(order[rank::world_size])


@rarer("3.3")
def takes_the_remainder(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch)
    share = max(1, math.ceil(length / world_size))
    return [order[(rank + i * world_size) % length] for i in range(share)]


@rarer("3.3")
def asks_a_group_that_may_be_there(length, rank, world_size, epoch, seed):
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return _padded(_shuffled(length, seed + epoch), world_size)[rank::world_size]


@rarer("3.3")
def seeds_everybody_as_before(length, rank, world_size, epoch, seed):
    before = torch.initial_seed()
    torch.manual_seed(seed + epoch)
    order = torch.randperm(length).tolist()
    torch.manual_seed(before)
    return _padded(order, world_size)[rank::world_size]


@rarer("3.3")
def repeats_three_times(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch) * 3
    return order[: math.ceil(length / world_size) * world_size][rank::world_size]
