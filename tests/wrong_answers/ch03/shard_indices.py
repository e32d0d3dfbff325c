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


_kept = {"of": None}


@wrong("3.3", names="order-kept")
def keeps_the_order_of_a_dataset(length, rank, world_size, epoch, seed):
    if _kept["of"] != (length, seed):
        _kept.update({"of": (length, seed), "order": _shuffled(length, seed + epoch)})
    return _padded(_kept["order"], world_size)[rank::world_size]


@wrong("3.3", names="global-generator")
def seeds_everybody_as_before(length, rank, world_size, epoch, seed):
    before = torch.initial_seed()
    torch.manual_seed(seed + epoch)
    order = torch.randperm(length).tolist()
    torch.manual_seed(before)
    return _padded(order, world_size)[rank::world_size]


@wrong("3.3", names="padded-once")
def repeats_three_times(length, rank, world_size, epoch, seed):
    order = _shuffled(length, seed + epoch) * 3
    return order[: math.ceil(length / world_size) * world_size][rank::world_size]
