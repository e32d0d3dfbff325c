"""Exercise 11.2, `places`: what it asks for, and how it is checked."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from course_exercises.authoring import Exercise, OwnPart, expect, expect_from_each, run, same
from course_exercises.authoring.ranks import must_have_sent, must_have_waited
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
        "other-order": "Your pieces stand in the queues in another order. They stand by rank and, within a rank, token by token "
        "with all its choices, the first in front: not all first choices before the second ones. Count down the pieces, "
        "not along the experts.",
        "from-one": "Places count from 0.",
        "other-limit": "You drop by another limit. Expert e takes the places 0 to capacity[e] - 1 of its one queue of all ranks; "
        "a piece is dropped by its place in that queue.",
        "not-minus-one": "A piece that finds no place has -1, and nothing else: no other number tells that it was dropped.",
        "other-shape": "Your places have another shape. There is one for each piece, (T, k) as `choices` has it.",
        "too-many-numbers": "You hand over more than one number for each expert. The other ranks need only your counts.",
        "empty-rank": "Your function fails where a rank has no tokens. It takes part in every call, and its counts are zeros: "
        "the others wait for them.",
        "fewer-experts": "The calls of the ranks do not fit each other. Each rank tells a number for each of the E experts, also "
        "for those that its own tokens did not choose: `bincount` needs `minlength`, and `one_hot` the number of classes.",
    },
    failures={
        "timeout": "not-every-rank",
        "mismatch": "fewer-experts",
        "invalid tensor size": "fewer-experts",
    },
)


def _queue(
    parts: list[Tensor],
    experts: int,
    starts: Callable[[Tensor, int], Tensor] = lambda counts, rank: counts[:rank].sum(0),
    order: Callable[[Tensor], Tensor] = lambda marks: marks.cumsum(0) - marks,
) -> list[Tensor]:
    """The places on all ranks, with room for all. `starts(counts, rank)` tells how many stand before a rank's
    first pieces, `order` how its own marks (T k, E) count up."""
    marks = [one_hot(part.flatten(), experts) for part in parts]
    counts = torch.stack([each.sum(0) for each in marks])
    found = []
    for rank, part in enumerate(parts):
        place = order(marks[rank]) + starts(counts, rank)
        found.append(place.gather(1, part.flatten()[:, None]).view_as(part))
    return found


def _dropped(places: list[Tensor], parts: list[Tensor], capacity: Tensor) -> list[Tensor]:
    """The places, -1 where they are behind the end."""
    pairs = zip(places, parts, strict=True)
    return [place.where(place < capacity[part], -1) for place, part in pairs]


def _placed(rank, answer, choices: Tensor, capacity: Tensor):
    choices, capacity = choices.to(device()), capacity.to(device())
    with follow_calls() as sent:
        got = answer(choices, capacity)
    return got, sent, numbers_sent(sent)


def _check_places(answer, parts: list[Tensor], capacity: Tensor) -> None:
    reports = run(_placed, len(parts), answer, OwnPart(parts), capacity)
    got = [places for places, *_ in reports]
    must_have_waited([sent.unwaited for _, sent, _ in reports])
    expect_from_each(got)
    whole = _queue(parts, len(capacity))
    right = _dropped(whole, parts, capacity)
    expect(got, right, each="rank", likely=_mistakes(parts, capacity, whole, right))
    check_numbers_sent([numbers for *_, numbers in reports], at_most=len(capacity))
    must_have_sent([sent for _, sent, _ in reports])


def _mistakes(
    parts: list[Tensor], capacity: Tensor, whole: list[Tensor], right: list[Tensor]
) -> dict:
    def queued(**how) -> list[Tensor]:
        return _dropped(_queue(parts, len(capacity), **how), parts, capacity)

    others = [
        queued(starts=lambda counts, rank: counts[: rank + 1].sum(0)),
        queued(starts=lambda counts, rank: counts[rank + 1 :].sum(0)),
        queued(starts=lambda counts, rank: counts.sum(0) - counts[rank]),
        queued(starts=lambda counts, rank: counts[:rank].sum()),
        _dropped(_numbered(parts), parts, capacity),
    ]
    return {
        "other-shape": lambda got: [g.shape for g in got] != [part.shape for part in parts],
        "own-queue": queued(starts=lambda counts, rank: 0 * counts[0]),
        "other-pieces": lambda got: any(same(got, other) for other in others),
        "from-one": [place.where(place < 0, place + 1) for place in right],
        "other-limit": lambda got: all(
            ((g == w) | (g == -1)).all() for g, w in zip(got, whole, strict=True)
        ),
        "other-order": lambda got: (
            _by_expert(got, parts) == _by_expert(right, parts)
            or same(got, queued(order=lambda marks: marks.cumsum(1) - marks))
        ),
        "not-minus-one": lambda got: all(
            ((g == r) | ((r < 0) & (g >= 0))).all() for g, r in zip(got, right, strict=True)
        ),
    }


def _numbered(parts: list[Tensor]) -> list[Tensor]:
    """All pieces of all ranks in one queue."""
    sizes = [part.numel() for part in parts]
    numbers = torch.arange(sum(sizes)).split(sizes)
    return [number.view_as(part) for number, part in zip(numbers, parts, strict=True)]


def _by_expert(places: list[Tensor], parts: list[Tensor]) -> list[tuple[int, int]]:
    """Which places are taken in the queue of each expert."""
    pairs = zip(places, parts, strict=True)
    taken = [(e, p) for place, part in pairs for e, p in zip(part.flatten(), place.flatten())]
    return sorted((int(e), int(p)) for e, p in taken)


@queueing.requires("two ranks, with room for all")
def two_ranks_with_room_for_all(answer, draw):
    experts, tokens = draw.integer(4, 5), draw.integer(6, 8)
    parts = [_choices(draw, tokens, experts - 1, 2)]  # nobody on rank 0 chooses the last expert
    parts.append(experts - 1 - _choices(draw, tokens, experts, 2))
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
