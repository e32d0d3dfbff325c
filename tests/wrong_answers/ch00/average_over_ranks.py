"""Answers to 0.1, `average_over_ranks`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist

from tests.wrong_answers import right, usual, wrong


def sums_a_copy(value):
    total = value.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


usual("0.1", sums_a_copy, "sum-not-mean", "unchanged", "not-finite", "nothing-sent")
usual("0.1", sums_a_copy, "divided-twice", "fixed-number", "rank-0s")
usual("0.1", sums_a_copy, "last-ranks", "rounded", "one-rank-only", "another-reduction")
usual("0.1", sums_a_copy, "not-waited", "kept-from-before", "returns-nothing")
usual("0.1", sums_a_copy, "one-rank-returns", "not-a-tensor", "rounded-down", "other-dtype")
usual("0.1", sums_a_copy, "shape-lost", "one-number", "around-the-calls")


@wrong("0.1", names="not-every-rank")
def rank_0_alone(value):
    total = value.clone()
    if dist.get_rank() == 0:
        dist.all_reduce(total)
    return total / dist.get_world_size()


@wrong("0.1", names="input-changed")
def works_in_place(value):
    dist.all_reduce(value)
    return value / dist.get_world_size()


@wrong("0.1", names="in-place")
def takes_what_all_reduce_returns(value):
    total = dist.all_reduce(value.clone())
    return total / dist.get_world_size()


@wrong("0.1", names="indexes-ranks")
def looks_for_the_others_in_its_own(value):
    ranks = dist.get_world_size()
    return sum(value[rank] for rank in range(ranks)) / ranks


@right("0.1")
def gathers_and_averages(value):
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return torch.stack(values).mean(dim=0)


@right("0.1")
def through_rank_0(value):
    total = value.clone()
    dist.reduce(total, dst=0)
    total /= dist.get_world_size()
    dist.broadcast(total, src=0)
    return total
