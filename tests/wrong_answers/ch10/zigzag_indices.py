"""Answers to 10.2, `zigzag_indices`: wrong in a plausible way, or right in another."""

import torch

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch10.shared import must_divide


@right("10.2")
def counts_from_both_ends(length, ranks, rank):
    must_divide(length, ranks)
    size = length // (2 * ranks)
    head = torch.arange(rank * size, (rank + 1) * size)
    return torch.cat([head, (length - 1 - head).flip(0)])


@right("10.2")
def chooses_by_chunk_number(length, ranks, rank):
    must_divide(length, ranks)
    chunk = torch.arange(length) // (length // (2 * ranks))
    return ((chunk == rank) | (chunk == 2 * ranks - 1 - rank)).nonzero().flatten()


def _chunks(length, count):
    size = length // count
    return [torch.arange(i * size, (i + 1) * size) for i in range(count)]


@wrong("10.2", names="not-a-tensor")
def returns_a_list(length, ranks, rank):
    return counts_from_both_ends(length, ranks, rank).tolist()


@wrong("10.2", names="not-places")
def returns_chunk_numbers(length, ranks, rank):
    must_divide(length, ranks)
    return torch.tensor([rank, 2 * ranks - 1 - rank])


@wrong("10.2", names="other-cut")
def takes_neighbours(length, ranks, rank):
    must_divide(length, ranks)
    return torch.cat(_chunks(length, 2 * ranks)[2 * rank : 2 * rank + 2])


@wrong("10.2", names="one-chunk")
def takes_the_head(length, ranks, rank):
    must_divide(length, ranks)
    return _chunks(length, 2 * ranks)[rank]


@wrong("10.2", names="tail-off-by-one")
def counts_the_tail_from_one(length, ranks, rank):
    must_divide(length, ranks)
    chunks = _chunks(length, 2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 2 - rank]])


@wrong("10.2", names="other-order")
def mirrors_places(length, ranks, rank):
    must_divide(length, ranks)
    head = _chunks(length, 2 * ranks)[rank]
    return torch.cat([head, length - 1 - head])


@wrong("10.2", names="other-rank")
def counts_ranks_backwards(length, ranks, rank):
    return counts_from_both_ends(length, ranks, ranks - 1 - rank)


@wrong("10.2", names="other-error")
def checks_the_ranks_only(length, ranks, rank):
    if length % ranks:
        raise ValueError(f"{length} does not divide by {ranks}")
    chunks = _chunks(length, 2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
