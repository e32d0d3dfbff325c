"""Exercise 11.2, `places`: what it asks for, and how it is checked."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from course_exercises.authoring import Exercise, OwnPart, expect, run
from course_exercises.chapters.ch11.shared import (
    NOT_WAITED,
    check_numbers_sent,
    check_waited,
    follow_calls,
    numbers_sent,
)
from course_utils.hardware import device


def _choices(draw, tokens: int, experts: int, k: int) -> Tensor:
    """(tokens, k): different experts for each token, the first ones more often."""
    logits = draw.tensor(tokens, experts) - torch.linspace(0, 1.5, experts)
    return logits.topk(k).indices


queueing = Exercise(
    "11.2",
    "places",
    points=3,
    minutes=25,
    kind="core",
    parameters=("choices", "capacity"),
    hints=[
        (
            "Take two ranks and one expert. Rank 0 sends it three pieces. Which place has the first one of "
            "rank 1, and what does rank 1 have to know for it?"
        ),
        (
            "A piece stands behind all pieces of earlier ranks for the same expert, and behind those of its "
            "own rank that come before it. The first is a sum of counts, the second a running count."
        ),
        (
            "Mark the pieces in a table with a column for each expert, from `one_hot`. Its column sums are what "
            "you tell the others, with `all_gather`; of these, add up the rows of the ranks before you. The "
            "running sum down a column, without the piece itself, gives the rest."
        ),
    ],
    misconceptions={
        "own-queue": "You count your own pieces only. The queue is that of all ranks: the pieces of earlier "
        "ranks stand before yours.",
        "local-capacity": "The places are right, and what is dropped is decided by the place among the rank's "
        "own pieces. Compare the place in the whole queue with the capacity.",
        "shared-capacity": "You give each rank a share of the capacity. The queue is one for all ranks: a piece is dropped "
        "by its place in it.",
        "along-the-experts": "The running count goes along the experts. Count down the pieces: `cumsum(0)`.",
        "other-shape": "The right places in another shape. Asked is one for each piece, (T, k) as `choices`.",
        "not-minus-one": "A piece that finds no place has -1, and nothing else: no other number tells that it was dropped.",
        "inclusive": "Your own pieces are counted twice: only ranks *before* yours stand before you.",
        "later-ranks": "The pieces of later ranks stand before yours. It is the other way round.",
        "all-experts": "You count the pieces of earlier ranks for all experts together. Each expert has a queue "
        "of its own.",
        "one-queue": "You number the pieces of all experts in one queue. Each expert has its own.",
        "from-one": "Places count from 0.",
        "one-too-many": "An expert takes one piece too many. With places from 0, capacity c has the places 0 to "
        "c - 1.",
        "not-dropped": "A piece that finds no place has -1.",
        "first-choices-first": "All first choices stand before all second ones. Here the tokens stand in their "
        "order, with all their choices.",
        "backwards": "Within a rank the tokens stand in their order, the first in front.",
        "one-capacity": "`capacity` has an entry for each expert, and they differ.",
        "too-many-numbers": "You hand over more than one number for each expert. The other ranks need only "
        "your counts.",
        "empty-rank": "A rank without tokens does not take part. Its counts are zeros, and the others wait for "
        "them.",
        "not-waited": NOT_WAITED,
    },
)


def _queue(
    parts: list[Tensor],
    capacity: Tensor,
    starts: Callable[[Tensor, int], Tensor] | None = None,
    order: Callable[[Tensor], Tensor] = lambda marks: marks.cumsum(0) - marks,
    limit: int = 0,
    by_own: bool = False,
    share: int = 1,
) -> list[Tensor]:
    """The places on all ranks. `starts(counts, rank)` tells how many stand before a rank's first pieces,
    `order` how its own marks (T k, E) count up; both as they should, where they are not given."""
    marks = [one_hot(part.flatten(), len(capacity)) for part in parts]
    counts = torch.stack([each.sum(0) for each in marks])
    starts = starts or (lambda counts, rank: counts[:rank].sum(0))
    found = []
    for rank, part in enumerate(parts):
        chosen = part.flatten()[:, None]
        own = order(marks[rank]).gather(1, chosen).flatten()
        place = own + starts(counts, rank).expand(len(capacity))[chosen.flatten()]
        judged = own if by_own else place
        place = place.where(judged < (capacity // share + limit)[chosen.flatten()], -1)
        found.append(place.view_as(part))
    return found


def _first_choices_of(marks: Tensor, k: int) -> Tensor:
    """How a rank's marks (T k, E) count up, where its own first choices stand before its second ones."""
    by_choice = marks.view(-1, k, marks.shape[1]).transpose(0, 1).flatten(0, 1)
    ahead = by_choice.cumsum(0) - by_choice
    return ahead.view(k, -1, marks.shape[1]).transpose(0, 1).flatten(0, 1)


def _first_choices_first(parts: list[Tensor], capacity: Tensor) -> list[Tensor]:
    """All first choices of all ranks, then all second ones."""
    k = parts[0].shape[1]
    columns = [part[:, [j]] for j in range(k) for part in parts]
    placed = _queue(columns, capacity)
    ranks = len(parts)
    return [torch.cat(placed[rank::ranks], dim=1) for rank in range(ranks)]


def _placed(rank, answer, choices: Tensor, capacity: Tensor):
    choices, capacity = choices.to(device()), capacity.to(device())
    with follow_calls() as sent:
        got = answer(choices, capacity)
    return got, sent.unwaited, numbers_sent(lambda: answer(choices, capacity))


def _check_places(answer, parts: list[Tensor], capacity: Tensor) -> None:
    reports = run(_placed, len(parts), answer, OwnPart(parts), capacity)
    got = [places for places, *_ in reports]
    check_waited([unwaited for _, unwaited, _ in reports])
    right, ranks = _queue(parts, capacity), len(parts)
    wide = torch.full_like(capacity, 10_000)

    def shifted(by: int) -> list[Tensor]:
        return [place.where(place < 0, place + by) for place in _queue(parts, capacity)]

    def none_before(counts: Tensor, rank: int) -> Tensor:
        return torch.zeros_like(counts[0])

    def kept_before(counts: Tensor, rank: int) -> Tensor:
        return counts[:rank].minimum(capacity // ranks).sum(0)

    likely = {
        "own-queue": _queue(parts, capacity, starts=none_before),
        "inclusive": _queue(parts, capacity, starts=lambda c, rank: c[: rank + 1].sum(0)),
        "later-ranks": _queue(parts, capacity, starts=lambda c, rank: c[rank + 1 :].sum(0)),
        "all-experts": _queue(parts, capacity, starts=lambda c, rank: c[:rank].sum()),
        "one-queue": _in_one_queue(parts, capacity),
        "from-one": shifted(1),
        "one-too-many": _queue(parts, capacity, limit=1),
        "not-dropped": _queue(parts, wide),
        "local-capacity": _queue(parts, capacity, by_own=True),
        "shared-capacity": lambda got: any(
            _equal_lists(got, each)
            for each in (
                _queue(parts, capacity, share=ranks, by_own=True),
                _queue(parts, capacity, starts=kept_before),
            )
        ),
        "first-choices-first": lambda got: any(
            _equal_lists(got, each)
            for each in (
                _first_choices_first(parts, capacity),
                _queue(parts, capacity, order=lambda m: _first_choices_of(m, parts[0].shape[1])),
            )
        ),
        "along-the-experts": _queue(parts, capacity, order=lambda m: m.cumsum(1) - m),
        "backwards": _queue(parts, capacity, order=lambda m: m.flip(0).cumsum(0).flip(0) - m),
        "one-capacity": lambda got: any(
            _equal_lists(got, _queue(parts, capacity[[e]].expand_as(capacity)))
            for e in range(len(capacity))
        ),
        "other-shape": lambda got: _equal_lists([g.view_as(r) for g, r in zip(got, right)], right),
        "not-minus-one": lambda got: all(
            bool(((g == r) | ((r < 0) & (g >= 0))).all()) for g, r in zip(got, right, strict=True)
        ),
    }
    expect(got, right, each="rank", likely=likely)
    check_numbers_sent([numbers for *_, numbers in reports], at_most=len(capacity))


def _equal_lists(got: list, expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def _in_one_queue(parts: list[Tensor], capacity: Tensor) -> list[Tensor]:
    numbers = torch.arange(sum(part.numel() for part in parts))
    split = numbers.split([part.numel() for part in parts])
    return [
        place.view_as(part).where(place.view_as(part) < capacity[part], -1)
        for place, part in zip(split, parts, strict=True)
    ]


@queueing.requires("two ranks, with room for all")
def two_ranks_with_room_for_all(answer, draw):
    experts, tokens = draw.integer(3, 4), draw.integer(6, 8)
    parts = [_choices(draw, tokens, experts, 2) for _ in range(2)]
    _check_places(answer, parts, torch.full((experts,), 100))


@queueing.requires("two or three ranks, and queues with an end")
def two_or_three_ranks(answer, draw):
    experts, tokens, ranks = draw.integer(3, 4), draw.integer(7, 9), draw.choice([2, 3])
    parts = [_choices(draw, tokens, experts, 2) for _ in range(ranks)]
    _check_places(answer, parts, torch.arange(experts) + draw.integer(3, 4))


@queueing.requires("ranks with different numbers of tokens", needs_earlier=True)
def ranks_with_different_numbers_of_tokens(answer, draw):
    experts = draw.integer(3, 4)
    parts = [_choices(draw, tokens, experts, 1) for tokens in draw.sample([3, 5, 8], 3)]
    _check_places(answer, parts, torch.arange(experts) + draw.integer(4, 6))


@queueing.requires(
    "a rank without tokens",
    failures={name: "empty-rank" for name in ("timeout", "mismatch", "exception")},
    needs_earlier=True,
)
def a_rank_without_tokens(answer, draw):
    experts = draw.integer(3, 4)
    parts = [_choices(draw, tokens, experts, 2) for tokens in draw.choice([(4, 0, 5), (0, 6, 3)])]
    _check_places(answer, parts, torch.arange(experts) + 4)
