"""Rarer wrong answers to 10.2, `zigzag_indices`."""

import torch

from tests.wrong_answers import rarer
from tests.wrong_answers.ch10.shared import must_divide
from tests.wrong_answers.ch10.zigzag_indices import _chunks, both_ends, of_each_document


@rarer("10.2")
@of_each_document
def deals_places_there_and_back(length, ranks, rank):
    must_divide(length, ranks)
    return torch.arange(length).view(-1, 2 * ranks)[:, [rank, 2 * ranks - 1 - rank]].flatten()


@rarer("10.2")
@of_each_document
def puts_the_tail_first(length, ranks, rank):
    must_divide(length, ranks)
    chunks = _chunks(length, 2 * ranks)
    return torch.cat([chunks[2 * ranks - 1 - rank], chunks[rank]])


@rarer("10.2")
@of_each_document
def asserts_that_it_divides(length, ranks, rank):
    assert length % (2 * ranks) == 0, f"{length} does not divide by {2 * ranks}"
    return both_ends(length, ranks, rank)


@rarer("10.2")
@of_each_document
def does_not_say_what(length, ranks, rank):
    if length % (2 * ranks):
        raise ValueError("the sequence does not divide")
    return both_ends(length, ranks, rank)


@rarer("10.2")
@of_each_document
def refuses_too_much(length, ranks, rank):
    if length % (2 * ranks * ranks):
        raise ValueError(f"{length} does not divide by {2 * ranks * ranks}")
    return both_ends(length, ranks, rank)
