"""Exercise 11.3, `Dispatcher`: what it asks for, and how it is checked."""

from dataclasses import dataclass

import torch
from torch import Tensor

from course_exercises.authoring import Exercise, OwnPart, expect, expect_type, run
from course_exercises.chapters.ch11.shared import NOT_WAITED, check_waited, follow_calls
from course_utils.hardware import device

sending = Exercise(
    "11.3",
    "Dispatcher",
    points=4,
    minutes=35,
    kind="stretch",
    parameters=("counts",),
    hints=[
        (
            "Draw two ranks with two experts each. In which order do the pieces lie before they travel, when "
            "they arrive, and when the experts take them?"
        ),
        (
            "An all-to-all of `counts` itself tells each rank how many pieces come from every rank for every one "
            "of its experts: n rows of E / n numbers. Sums of rows and columns of this table are all that you "
            "need."
        ),
        (
            "Row sums are the splits, column sums the load. For the sorting, write the number of its expert for "
            "every piece that arrives (`repeat_interleave` with the table) and take a *stable* argsort. `combine` "
            "undoes the sorting first, and then exchanges with the two splits in each other's place."
        ),
    ],
    misconceptions={
        "no-load": "The attribute `load` is missing, or no tensor: how many pieces come to each of this rank's "
        "experts.",
        "load-sent": "`load` tells what this rank *sends* to its own experts. Asked is what all ranks together "
        "send to them.",
        "load-by-rank": "`load` tells how many pieces come from each rank. Asked is how many come to each expert.",
        "by-rank": "The pieces lie in the order in which they arrive, by rank. Sort them by expert.",
        "load-not-by-expert": "`load` has another shape. Asked is one number for each of this rank's experts: the sum over the "
        "ranks that send.",
        "not-by-expert": "The right pieces, in another order than that of the experts. Indexing with an argsort sorts; "
        "indexing with the argsort of it undoes that.",
        "nothing-to-do": "It fails where a rank sends nothing or gets nothing. Its splits are zeros and its tensors have no "
        "rows, and it makes every call all the same.",
        "unstable": "The right pieces for each expert, in another order. Within an expert they lie by the rank "
        "that they come from: sort stably.",
        "dealt-out": "Expert e is sent to rank e % n. Rank r has the experts from r * E / n on, one after the other.",
        "other-pieces": "Other pieces arrive than were sent here.",
        "splits": "The splits do not fit what is sent or expected. On the way back they change places; and what "
        "arrives is counted by the *other* ranks.",
        "not-put-back": "`combine` returns the right results in another order. What `dispatch` sorted has to be "
        "undone before the way back; and the argsort of an argsort is its inverse.",
        "other-results": "`combine` does not bring the results home.",
        "no-gradient": "The gradient does not come through. `dist.all_to_all_single` is unknown to autograd: "
        "`Exchange.apply` has a backward.",
        "other-gradient": "The gradient of a piece is that of another one, or of several.",
        "one-expert-each": "It works with one expert on each rank and not with several.",
        "stays-away": "A rank with nothing to send or to receive does not take part, and the others wait. Every "
        "rank makes every call.",
        "not-waited": NOT_WAITED,
    },
    failures={
        "Split sizes": "splits",
        "doesn't match total": "splits",
        "timeout": "stays-away",
        "mismatch": "splits",
        "signal": "splits",
        "does not require grad": "no-gradient",
        "AttributeError": "no-load",
    },
)


@dataclass(frozen=True)
class _Delivered:
    """What a rank got: the load, the pieces, the results, the gradient of its pieces."""

    load: Tensor
    arrived: Tensor
    back: Tensor
    gradient: Tensor | None


def _delivered(rank, answer, counts: Tensor, pieces: Tensor, factors: Tensor):
    """Every expert doubles, and adds its number; the loss weighs each result with a factor."""
    counts, pieces, factors = (t.to(device()) for t in (counts, pieces, factors))
    pieces.requires_grad_()
    with follow_calls() as sent:
        sender = answer(counts)
        arrived = sender.dispatch(pieces)
        load = getattr(sender, "load", None)
        back = sender.combine(arrived * 2 if isinstance(arrived, Tensor) else arrived)
    if isinstance(back, Tensor) and back.requires_grad and back.shape == factors.shape:
        (back * factors).sum().backward()
    found = [t.detach() if isinstance(t, Tensor) else t for t in (load, arrived, back)]
    return _Delivered(*found, pieces.grad), sent.unwaited


def _tables(draw, ranks: int, experts: int) -> Tensor:
    """(rank, expert): how many pieces go from each rank to each expert; to one expert, never as many
    from two ranks."""
    further = torch.arange(experts) % 3 + 5 * torch.arange(ranks)[:, None]
    return draw.integers(ranks, experts, low=0, high=4) + further


def _check_delivery(answer, table: Tensor, draw) -> None:
    ranks, experts = table.shape
    own = experts // ranks
    pieces = [draw.tensor(int(row.sum()), 3) for row in table]
    factors = [draw.tensor(*each.shape) for each in pieces]
    args = OwnPart(list(table)), OwnPart(pieces), OwnPart(factors)
    reports = run(_delivered, ranks, answer, *args)
    check_waited([unwaited for _, unwaited in reports])
    got = [delivered for delivered, _ in reports]
    _check_load([each.load for each in got], table)
    parts = [each.split(row.tolist()) for each, row in zip(pieces, table, strict=True)]

    def of(rank: int, numbers: list[int], by_rank: bool = False) -> Tensor:
        sources = range(ranks)
        if by_rank:
            return torch.cat([parts[source][e] for source in sources for e in numbers])
        return torch.cat([parts[source][e] for e in numbers for source in sources])

    mine = [list(range(r * own, r * own + own)) for r in range(ranks)]
    right = [of(r, mine[r]) for r in range(ranks)]
    loads = [table[:, numbers].sum(0).tolist() for numbers in mine]
    dealt = [list(range(r, experts, ranks)) for r in range(ranks)]
    likely = {
        "by-rank": [of(r, mine[r], by_rank=True) for r in range(ranks)],
        "dealt-out": dealt != mine
        and (lambda got: _alike_sorted(got, [of(r, dealt[r]) for r in range(ranks)])),
        "unstable": lambda got: all(
            _alike_sorted(list(g.split(load)), list(r.split(load)))
            for g, r, load in zip(got, right, loads, strict=True)
        ),
        "not-by-expert": lambda got: _alike_sorted(got, right),
        "other-pieces": True,
    }
    expect([d.arrived for d in got], right, each="rank", what="what arrives", likely=likely)
    doubled = [2 * each for each in pieces]
    mistakes = {
        "not-put-back": lambda got: (
            _alike_sorted(got, doubled)
            or _alike_sorted([torch.cat(list(got))], [torch.cat(doubled)])
        ),
        "other-results": True,
    }
    expect([d.back for d in got], doubled, each="rank", what="what comes back", likely=mistakes)
    wanted = [2 * each for each in factors]
    gradients = {
        "no-gradient": lambda got: any(each is None for each in got),
        "other-gradient": True,
    }
    expect([d.gradient for d in got], wanted, each="rank", what="the gradient", likely=gradients)


def _alike_sorted(got: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether each rank has the right rows in any order."""
    return all(
        a.shape == b.shape and torch.equal(_sorted_rows(a), _sorted_rows(b))
        for a, b in zip(got, expected, strict=True)
    )


def _sorted_rows(rows: Tensor) -> Tensor:
    return rows[rows[:, 0].argsort()]


def _check_load(loads: list, table: Tensor) -> None:
    ranks = len(table)
    by_rank = table.view(ranks, ranks, -1)  # from rank, to rank, own expert
    for load in loads:
        expect_type(load, Tensor, likely="no-load")
    likely = {
        "load-sent": [by_rank[r, r] for r in range(ranks)],
        "load-by-rank": [by_rank[:, r].sum(1) for r in range(ranks)],
        "load-not-by-expert": lambda got: any(load.shape != by_rank[0, 0].shape for load in got),
    }
    expect(
        loads,
        [by_rank[:, r].sum(0) for r in range(ranks)],
        each="rank",
        what="`load`",
        likely=likely,
    )


@sending.requires("two ranks with three experts each")
def two_ranks_with_three_experts_each(answer, draw):
    _check_delivery(answer, _tables(draw, 2, 6), draw)


@sending.requires("three ranks, or one")
def three_ranks(answer, draw):
    ranks = draw.choice([1, 3])
    _check_delivery(answer, _tables(draw, ranks, 2 * ranks), draw)
    _check_delivery(answer, _tables(draw, 4 - ranks, 4 - ranks), draw)


@sending.requires(
    "a rank that sends nothing, and one that gets nothing",
    failures={name: "nothing-to-do" for name in ("exception", "mismatch")},
    needs_earlier=True,
)
def a_rank_that_sends_nothing(answer, draw):
    table = _tables(draw, 3, 6) + 1
    table[draw.integer(0, 2)] = 0
    _check_delivery(answer, table, draw)
    table = _tables(draw, 2, 4) + 1
    table[:, 2:] = 0
    _check_delivery(answer, table, draw)
