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


@wrong("10.2", names="no-tensor")
def returns_a_list(length, ranks, rank):
    return counts_from_both_ends(length, ranks, rank).tolist()


@wrong("10.2", names="wrong-dtype")
def returns_floats(length, ranks, rank):
    return counts_from_both_ends(length, ranks, rank).float()


@wrong("10.2", names="blocks")
def takes_neighbours(length, ranks, rank):
    must_divide(length, ranks)
    return torch.cat(_chunks(length, 2 * ranks)[2 * rank : 2 * rank + 2])


@wrong("10.2", names="strided")
def deals_places_out(length, ranks, rank):
    must_divide(length, ranks)
    return torch.arange(length)[rank::ranks]


@wrong("10.2", names="head-only")
def takes_the_head(length, ranks, rank):
    must_divide(length, ranks)
    return _chunks(length, 2 * ranks)[rank]


@wrong("10.2", names="too-few-chunks")
def cuts_into_ranks(length, ranks, rank):
    must_divide(length, ranks)
    chunks = _chunks(length, ranks)
    return torch.cat([chunks[rank], chunks[ranks - 1 - rank]])


@wrong("10.2", names="tail-off-by-one")
def counts_the_tail_from_one(length, ranks, rank):
    must_divide(length, ranks)
    chunks = _chunks(length, 2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 2 - rank]])


@wrong("10.2", names="tail-off-by-one")
def indexes_one_too_far(length, ranks, rank):
    must_divide(length, ranks)
    chunks = _chunks(length, 2 * ranks)
    return torch.cat([chunks[rank], chunks[-rank]])


@wrong("10.2", names="tail-backwards")
def mirrors_places(length, ranks, rank):
    must_divide(length, ranks)
    head = _chunks(length, 2 * ranks)[rank]
    return torch.cat([head, length - 1 - head])


@wrong("10.2", names="tail-first")
def puts_the_tail_first(length, ranks, rank):
    must_divide(length, ranks)
    chunks = _chunks(length, 2 * ranks)
    return torch.cat([chunks[2 * ranks - 1 - rank], chunks[rank]])


@wrong("10.2", names="other-rank")
def counts_ranks_backwards(length, ranks, rank):
    return counts_from_both_ends(length, ranks, ranks - 1 - rank)


@wrong("10.2", names="no-error")
def checks_the_ranks_only(length, ranks, rank):
    if length % ranks:
        raise ValueError(f"{length} does not divide by {ranks}")
    chunks = _chunks(length, 2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


@wrong("10.2", names="other-error")
def asserts_that_it_divides(length, ranks, rank):
    assert length % (2 * ranks) == 0, f"{length} does not divide by {2 * ranks}"
    return counts_from_both_ends(length, ranks, rank)


@wrong("10.2", names="error-without-sizes")
def does_not_say_what(length, ranks, rank):
    if length % (2 * ranks):
        raise ValueError("the sequence does not divide")
    return counts_from_both_ends(length, ranks, rank)


@wrong("10.2", names="refuses-what-divides")
def refuses_too_much(length, ranks, rank):
    if length % (2 * ranks * ranks):
        raise ValueError(f"{length} does not divide by {2 * ranks * ranks}")
    return counts_from_both_ends(length, ranks, rank)


@wrong("10.2", names="strided")
def deals_places_there_and_back(length, ranks, rank):
    must_divide(length, ranks)
    return torch.arange(length).view(-1, 2 * ranks)[:, [rank, 2 * ranks - 1 - rank]].flatten()


@wrong("10.2", names="chunk-numbers")
def returns_chunk_numbers(length, ranks, rank):
    must_divide(length, ranks)
    return torch.tensor([rank, 2 * ranks - 1 - rank])


@wrong("10.2", names="not-joined")
def leaves_a_table(length, ranks, rank):
    must_divide(length, ranks)
    return torch.arange(length).view(2 * ranks, -1)[[rank, 2 * ranks - 1 - rank]]
