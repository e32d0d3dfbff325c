"""Answers to 3.3, `shard_indices`: wrong in a plausible way, or right in another."""

import math
import random

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from tests.wrong_answers import right, wrong


def _shuffled(length, seed):
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()


def _padded(order, world_size):
    total = math.ceil(len(order) / world_size) * world_size
    while len(order) < total:
        order = order + order[: total - len(order)]
    return order


@wrong("3.3", names="torchs-own")
def asks_the_sampler(length, rank, world_size, epoch, seed):
    sampler = DistributedSampler(range(length), world_size, rank, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


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


@wrong("3.3", names="epoch-ignored")
def forgets_the_epoch(length, rank, world_size, epoch, seed):
    return _padded(_shuffled(length, seed), world_size)[rank::world_size]


@wrong("3.3", names="parts-overlap")
def seeds_each_rank_differently(length, rank, world_size, epoch, seed):
    return _padded(_shuffled(length, seed + epoch + rank + 1), world_size)[rank::world_size]


@wrong("3.3", names="shuffled-after")
def shuffles_its_own_share(length, rank, world_size, epoch, seed):
    share = _padded(list(range(length)), world_size)[rank::world_size]
    random.Random(seed + epoch).shuffle(share)
    return share


@wrong("3.3", names="padding")
def leaves_shares_unequal(length, rank, world_size, epoch, seed):
    return _shuffled(length, seed + epoch)[rank::world_size]


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


_kept = {"of": None}


@wrong("3.3", names="kept-from-before")
def keeps_the_order_of_a_dataset(length, rank, world_size, epoch, seed):
    if _kept["of"] != (length, seed):
        _kept.update({"of": (length, seed), "order": _shuffled(length, seed + epoch)})
    return _padded(_kept["order"], world_size)[rank::world_size]
