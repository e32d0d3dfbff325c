"""Rarer wrong answers to 10.5, `heads_for_sequence`."""

import torch
import torch.distributed as dist

from tests.wrong_answers import rarer
from tests.wrong_answers.ch10.heads_for_sequence import (
    Differentiable,
    packed,
    swap,
)
from tests.wrong_answers.ch10.shared import place_of


@rarer("10.5")
def gathers_and_cuts(q, k, v):
    rank, ranks = place_of()

    def gathered(x, join, cut):
        pieces = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(pieces, x.contiguous())
        return torch.cat(pieces, dim=join).chunk(ranks, dim=cut)[rank].contiguous()

    def both(x):
        return Differentiable.apply(x, lambda x: gathered(x, 2, 1), lambda g: gathered(g, 1, 2))

    return packed(q, k, v, swap=both)


@rarer("10.5")
def does_not_name_the_sizes(q, k, v):
    try:
        return packed(q, k, v)
    except ValueError:
        raise ValueError("the heads do not fit the ranks") from None


@rarer("10.5")
def refuses_fewer_heads_than_ranks(q, k, v):
    if k.shape[1] % dist.get_world_size():
        raise ValueError(f"{k.shape[1]} heads do not divide by {dist.get_world_size()} ranks")
    return packed(q, k, v)


@rarer("10.5")
def exchanges_k_and_v_apart(q, k, v):
    q, k, _ = packed(q, k, v)
    return q, k, packed(q.new_zeros(v.shape), v, v, swap=swap)[2]
