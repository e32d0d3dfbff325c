"""Rarer wrong answers to 10.3, `ring_attention`."""

import torch
import torch.distributed as dist

from tests.wrong_answers import rarer
from tests.wrong_answers.ch10.shared import (
    RingOf,
    attend,
    function,
    pass_on,
    place_of,
    start,
    wait_for,
)


@rarer("10.3")
@function
class HidesTheFirstHopOnly(RingOf):
    def come_by(self, k, v):
        ranks = dist.get_world_size()
        for hop in range(1, ranks):
            if hop == 1:
                coming, works = start(k, v)
                yield k, v
                wait_for(works)
                k, v = coming
            else:
                yield k, v
                k, v = pass_on(k, v)
        yield k, v


@rarer("10.3")
@function
class HidesHopsOfKeysOnly(RingOf):
    def start(self, k, v):
        [v] = pass_on(v)
        coming, works = start(k)
        return (*coming, v), works


@rarer("10.3")
@function
class TakesRankZeroForLater(RingOf):
    def earlier(self, rank, hop):
        return hop < rank


@rarer("10.3")
@function
class MeetsOneChunkOfLaterRanks(RingOf):
    def merge_in(self, result, q, k, v, earlier, *where):
        half = q.shape[2] // 2
        if not earlier:
            k, v = k[:, :, :half], v[:, :, :half]
        return super().merge_in(result, q, k, v, earlier, *where)


@rarer("10.3")
@function
class AveragesOnceInAWhile(RingOf):
    def merge_in(self, result, q, k, v, earlier, *where):
        if not earlier:
            return super().merge_in(result, q, k, v, earlier, *where)
        part = attend(q, k[:, :, : q.shape[2] // 2], v[:, :, : q.shape[2] // 2])
        return (result[0] + part[0]) / 2, torch.logaddexp(result[1], part[1])


@rarer("10.3")
@function
class FixesTheHops(RingOf):
    def hops(self, ranks):
        return max(ranks - 1, 2)


@rarer("10.3")
def sends_to_every_rank(q, k, v):
    """No ring, and all pages are there at once."""
    rank, ranks = place_of()
    pages, ring = torch.stack([k, v]), RingOf()
    others = [(rank - hop) % ranks for hop in range(1, ranks)]
    coming = [torch.empty_like(pages) for _ in others]
    works = [dist.isend(pages, other) for other in others]
    works += [dist.irecv(tensor, other) for tensor, other in zip(coming, others)]
    result = ring.own(q, k, v)
    wait_for(works)
    for hop, (keys, values) in enumerate(coming, start=1):
        result = ring.merge_in(result, q, keys, values, hop <= rank, rank, ranks, hop)
    return result[0]
