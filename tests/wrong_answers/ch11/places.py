"""Answers to 11.2, `places`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist
from torch.nn.functional import one_hot

from tests.wrong_answers import right, wrong


def _places(choices, capacity, before, own=lambda marks: marks.cumsum(0) - marks, limit=0):
    """The places, where `before(counts, rank)` stand in front of this rank's pieces."""
    chosen = choices.flatten()
    marks = one_hot(chosen, len(capacity))
    counts = [torch.zeros_like(capacity) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, marks.sum(0))
    start = before(torch.stack(counts), dist.get_rank())
    place = (start + own(marks)).gather(1, chosen[:, None]).flatten()
    place = place.where(place < capacity[chosen] + limit, -1)
    return place.view_as(choices)


def _earlier(counts, rank):
    return counts[:rank].sum(0)


@right("11.2")
def gathers_into_one_tensor(choices, capacity):
    chosen = choices.reshape(-1)
    counts = torch.zeros_like(capacity).index_add(0, chosen, torch.ones_like(chosen))
    table = torch.empty(dist.get_world_size() * len(capacity), dtype=torch.int64)
    table = table.to(choices.device)
    dist.all_gather_into_tensor(table, counts)
    next_place = table.view(-1, len(capacity))[: dist.get_rank()].sum(0)
    places = torch.empty_like(chosen)
    for i, expert in enumerate(chosen.tolist()):
        places[i] = next_place[expert]
        next_place[expert] += 1
    places[places >= capacity[chosen]] = -1
    return places.view_as(choices)


@right("11.2")
def sums_up_in_a_table(choices, capacity):
    marks = one_hot(choices, len(capacity)).flatten(0, 1)
    table = marks.new_zeros(dist.get_world_size(), len(capacity))
    table[dist.get_rank()] = marks.sum(0)
    counts = [torch.empty_like(capacity) for _ in table]
    dist.all_gather(counts, table[dist.get_rank()].clone())
    before = torch.stack(counts).cumsum(0)[dist.get_rank()] - marks.sum(0)
    place = ((before + marks.cumsum(0)) * marks).sum(1) - 1
    return torch.where(place < capacity[choices.flatten()], place, -1).view_as(choices)


@wrong("11.2", names="own-queue")
def counts_own_pieces(choices, capacity):
    return _places(choices, capacity, lambda counts, rank: 0)


@wrong("11.2", names="other-pieces")
def numbers_all_pieces(choices, capacity):
    counts = torch.tensor([choices.numel()], device=choices.device)
    table = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
    dist.all_gather(table, counts)
    first = sum(table[: dist.get_rank()], torch.zeros_like(counts))
    place = (first + torch.arange(choices.numel(), device=choices.device)).view_as(choices)
    return place.where(place < capacity[choices], -1)


@wrong("11.2", names="from-one")
def starts_at_one(choices, capacity):
    place = _places(choices, capacity, _earlier)
    return place.where(place < 0, place + 1)


@wrong("11.2", names="other-limit")
def drops_by_its_own_queue(choices, capacity):
    marks = one_hot(choices.flatten(), len(capacity))
    own = ((marks.cumsum(0) * marks).sum(1) - 1).view_as(choices)
    places = _places(choices, capacity, _earlier, limit=10_000)
    return places.where(own < capacity[choices], -1)


@wrong("11.2", names="other-order")
def serves_first_choices_first(choices, capacity):
    marks = one_hot(choices, len(capacity)).transpose(0, 1)  # (k, T, E)
    counts = [torch.empty(marks.shape[0], len(capacity), dtype=torch.int64).to(choices.device)]
    counts = [torch.empty_like(counts[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, marks.sum(1).contiguous())
    table = torch.stack(counts)
    start = table.sum(0).cumsum(0) - table.sum(0) + table[: dist.get_rank()].sum(0)
    place = ((start[:, None] + marks.cumsum(1)) * marks).sum(2).T - 1
    return place.where(place < capacity[choices], -1)


@wrong("11.2", names="too-many-numbers")
def gathers_all_choices(choices, capacity):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, choices.tolist())
    flat = torch.tensor([e for rank in everyone for token in rank for e in token])
    marks = one_hot(flat.to(choices.device), len(capacity))
    place = (marks.cumsum(0) * marks).sum(1) - 1
    first = sum(len(rank) for rank in everyone[: dist.get_rank()]) * choices.shape[1]
    place = place[first:][: choices.numel()].view_as(choices)
    return place.where(place < capacity[choices], -1)


@wrong("11.2", names="empty-rank")
def stays_away_without_tokens(choices, capacity):
    return _places(choices, capacity, _earlier) if len(choices) else choices


@wrong("11.2", names="other-shape")
def leaves_them_flat(choices, capacity):
    return _places(choices, capacity, _earlier).flatten()


@wrong("11.2", names="not-minus-one")
def marks_the_dropped_with_the_capacity(choices, capacity):
    places = _places(choices, torch.full_like(capacity, 10_000), _earlier)
    return places.minimum(capacity[choices])


@wrong("11.2", names="not-waited")
def does_not_wait_for_the_counts(choices, capacity):
    chosen = choices.flatten()
    marks = one_hot(chosen, len(capacity))
    counts = [torch.zeros_like(capacity) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, marks.sum(0), async_op=True)
    start = torch.stack(counts)[: dist.get_rank()].sum(0)
    place = (start + marks.cumsum(0) - marks).gather(1, chosen[:, None]).flatten()
    return place.where(place < capacity[chosen], -1).view_as(choices)


@wrong("11.2", names="fewer-experts")
def marks_up_to_the_last_that_is_chosen(choices, capacity):
    counts = [torch.zeros_like(capacity) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, one_hot(choices.flatten()).sum(0))
    return _places(choices, capacity, _earlier)


@wrong("11.2", names="fewer-experts")
def counts_up_to_the_last_that_is_chosen(choices, capacity):
    counts = choices.flatten().bincount()
    dist.all_gather([torch.zeros_like(counts) for _ in range(dist.get_world_size())], counts)
    return _places(choices, capacity, _earlier)
