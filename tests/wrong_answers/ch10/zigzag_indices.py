"""Answers to 10.2, `zigzag_indices`: wrong in a plausible way, or right in another."""

import itertools
from collections.abc import Callable

import torch

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch10.shared import must_divide


def _documents(lengths):
    """Where each document starts, and its length."""
    return zip(itertools.accumulate(lengths, initial=0), lengths)


def of_each_document(places: Callable) -> Callable:
    """An answer, of what `places(length, ranks, rank)` says of one document."""

    def answer(lengths, ranks, rank):
        return torch.cat([start + places(n, ranks, rank) for start, n in _documents(lengths)])

    answer.__name__ = places.__name__
    return answer


def both_ends(length, ranks, rank):
    """The places of one document."""
    must_divide(length, ranks)
    size = length // (2 * ranks)
    head = torch.arange(rank * size, (rank + 1) * size)
    return torch.cat([head, (length - 1 - head).flip(0)])


@right("10.2")
def counts_from_both_ends(lengths, ranks, rank):
    return of_each_document(both_ends)(lengths, ranks, rank)


@right("10.2")
@of_each_document
def chooses_by_chunk_number(length, ranks, rank):
    must_divide(length, ranks)
    chunk = torch.arange(length) // (length // (2 * ranks))
    return ((chunk == rank) | (chunk == 2 * ranks - 1 - rank)).nonzero().flatten()


@right("10.2")
def takes_chunks_of_all_documents(lengths, ranks, rank):
    for length in lengths:
        must_divide(length, ranks)
    documents = torch.arange(sum(lengths)).split(list(lengths))
    pairs = [[d.chunk(2 * ranks)[i] for i in (rank, -1 - rank)] for d in documents]
    return torch.cat([chunk for pair in pairs for chunk in pair])


def _chunks(length, count):
    size = length // count
    return [torch.arange(i * size, (i + 1) * size) for i in range(count)]


@wrong("10.2", names="not-a-tensor")
def returns_a_list(lengths, ranks, rank):
    return counts_from_both_ends(lengths, ranks, rank).tolist()


@wrong("10.2", names="not-places")
@of_each_document
def returns_chunk_numbers(length, ranks, rank):
    must_divide(length, ranks)
    return torch.tensor([rank, 2 * ranks - 1 - rank])


@wrong("10.2", names="other-cut")
@of_each_document
def takes_neighbours(length, ranks, rank):
    must_divide(length, ranks)
    return torch.cat(_chunks(length, 2 * ranks)[2 * rank : 2 * rank + 2])


@wrong("10.2", names="one-chunk")
@of_each_document
def takes_the_head(length, ranks, rank):
    must_divide(length, ranks)
    return _chunks(length, 2 * ranks)[rank]


@wrong("10.2", names="tail-off-by-one")
@of_each_document
def counts_the_tail_from_one(length, ranks, rank):
    must_divide(length, ranks)
    chunks = _chunks(length, 2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 2 - rank]])


@wrong("10.2", names="other-order")
@of_each_document
def mirrors_places(length, ranks, rank):
    must_divide(length, ranks)
    head = _chunks(length, 2 * ranks)[rank]
    return torch.cat([head, length - 1 - head])


@wrong("10.2", names="other-rank")
def counts_ranks_backwards(lengths, ranks, rank):
    return counts_from_both_ends(lengths, ranks, ranks - 1 - rank)


@wrong("10.2", names="other-error")
@of_each_document
def checks_the_ranks_only(length, ranks, rank):
    if length % ranks:
        raise ValueError(f"{length} does not divide by {ranks}")
    chunks = _chunks(length, 2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


@wrong("10.2", names="cut-as-one")
def cuts_the_whole_sequence(lengths, ranks, rank):
    """The lesson's `positions`, with a ValueError before it."""
    for length in lengths:
        must_divide(length, ranks)
    return both_ends(sum(lengths), ranks, rank)


@wrong("10.2", names="from-its-start")
def begins_each_document_at_0(lengths, ranks, rank):
    return torch.cat([both_ends(length, ranks, rank) for length in lengths])


@wrong("10.2", names="other-order")
def puts_all_heads_first(lengths, ranks, rank):
    own = [(start + both_ends(n, ranks, rank)).chunk(2) for start, n in _documents(lengths)]
    return torch.cat([half[i] for i in (0, 1) for half in own])
