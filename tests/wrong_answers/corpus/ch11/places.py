"""Rarer wrong answers to 11.2, `places`."""

import torch
import torch.distributed as dist

from tests.wrong_answers import rarer
from tests.wrong_answers.ch11.places import _earlier, _places


@rarer("11.2")
def counts_all_experts(choices, capacity):
    return _places(choices, capacity, lambda counts, rank: counts[:rank].sum())


@rarer("11.2")
def at_most_the_capacity(choices, capacity):
    return _places(choices, capacity, _earlier, limit=1)


@rarer("11.2")
def last_tokens_first(choices, capacity):
    return _places(
        choices, capacity, _earlier, own=lambda marks: marks.flip(0).cumsum(0).flip(0) - marks
    )


@rarer("11.2")
def counts_what_ranks_keep_of_a_share(choices, capacity):
    share = capacity // dist.get_world_size()
    return _places(choices, capacity, lambda counts, rank: counts[:rank].minimum(share).sum(0))


@rarer("11.2")
def puts_the_dropped_last(choices, capacity):
    places = _places(choices, torch.full_like(capacity, 10_000), _earlier)
    return places.minimum(capacity[choices] - 1)


@rarer("11.2")
def serves_own_first_choices_first(choices, capacity):
    """Rank by rank as it should be, and within a rank all first choices in front."""
    columns = _places(choices.T.contiguous(), capacity, _earlier)
    return columns.T


@rarer("11.2")
def takes_its_own_off_the_sum(choices, capacity):
    return _places(choices, capacity, lambda counts, rank: counts.sum(0) - counts[rank])
