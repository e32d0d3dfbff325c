"""Exercise 11.2, `places`: what it asks for, and how it is checked."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from course_exercises.authoring import Exercise, OwnPart, expect, expect_from_each, run, same
from course_exercises.authoring.ranks import must_have_waited
from course_exercises.chapters.ch11.shared import (
    check_numbers_sent,
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
    things="places",
    misconceptions={
        "own-queue": "You count your own pieces only. The queue is that of all ranks: the pieces of earlier "
        "ranks stand before yours.",
        "other-pieces": "You count other pieces. Before a piece stand those for the same expert only: all of the ranks "
        "*before* its own, and of its own rank, once, those in front of it. Later ranks do not count.",
        "other-order": "Within a rank you count in another order. Count down the pieces, token by token with all its choices, "
        "the first in front: not along the experts, and not all first choices before the second ones.",
        "from-one": "Places count from 0.",
        "other-limit": "You drop by another limit. Expert e takes the places 0 to capacity[e] - 1 of its one queue of all ranks; "
        "a piece is dropped by its place in that queue.",
        "not-minus-one": "A piece that finds no place has -1, and nothing else: no other number tells that it was dropped.",
        "other-shape": "You return the right places in another shape. `choices` is (T, k), and so are they.",
        "too-many-numbers": "You hand over more than one number for each expert. The other ranks need only your counts.",
        "empty-rank": "Your function fails where a rank has no tokens. It takes part in every call, and its counts are zeros: "
        "the others wait for them.",
    },
    failures={"timeout": "not-every-rank", "mismatch": "not-every-rank"},
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
    must_have_waited([unwaited for _, unwaited, _ in reports])
    expect_from_each(got)
    right, ranks = _queue(parts, capacity), len(parts)
    wide = torch.full_like(capacity, 10_000)

    def none_before(counts: Tensor, rank: int) -> Tensor:
        return torch.zeros_like(counts[0])

    def kept_before(counts: Tensor, rank: int) -> Tensor:
        return counts[:rank].minimum(capacity // ranks).sum(0)

    likely = {
        "own-queue": _queue(parts, capacity, starts=none_before),
        "other-pieces": _any_of(
            _queue(parts, capacity, starts=lambda c, rank: c[: rank + 1].sum(0)),
            _queue(parts, capacity, starts=lambda c, rank: c[rank + 1 :].sum(0)),
            _queue(parts, capacity, starts=lambda c, rank: c.sum(0) - c[rank]),
            _queue(parts, capacity, starts=lambda c, rank: c[:rank].sum()),
            _in_one_queue(parts, capacity),
        ),
        "from-one": [place.where(place < 0, place + 1) for place in right],
        "other-limit": _any_of(
            _queue(parts, capacity, limit=1),
            _queue(parts, wide),
            _queue(parts, capacity, by_own=True),
            _queue(parts, capacity, share=ranks, by_own=True),
            _queue(parts, capacity, starts=kept_before),
            *(_queue(parts, capacity[[e]].expand_as(capacity)) for e in range(len(capacity))),
        ),
        "other-order": _any_of(
            _first_choices_first(parts, capacity),
            _queue(parts, capacity, order=lambda m: _first_choices_of(m, parts[0].shape[1])),
            _queue(parts, capacity, order=lambda m: m.cumsum(1) - m),
            _queue(parts, capacity, order=lambda m: m.flip(0).cumsum(0).flip(0) - m),
        ),
        "other-shape": lambda got: same([g.view_as(r) for g, r in zip(got, right)], right),
        "not-minus-one": lambda got: all(
            bool(((g == r) | ((r < 0) & (g >= 0))).all()) for g, r in zip(got, right, strict=True)
        ),
    }
    expect(got, right, each="rank", likely=likely)
    check_numbers_sent([numbers for *_, numbers in reports], at_most=len(capacity))


def _any_of(*lists: list[Tensor]) -> Callable[[list], bool]:
    return lambda got: any(same(got, each) for each in lists)


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
    failures=dict.fromkeys(("timeout", "mismatch", "exception"), "empty-rank"),
    needs_earlier=True,
)
def a_rank_without_tokens(answer, draw):
    experts = draw.integer(3, 4)
    parts = [_choices(draw, tokens, experts, 2) for tokens in draw.choice([(4, 0, 5), (0, 6, 3)])]
    _check_places(answer, parts, torch.arange(experts) + 4)
