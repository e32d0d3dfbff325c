"""Exercise 11.3, `Dispatcher`: what it asks for, and how it is checked."""

from dataclasses import dataclass

import torch
from torch import Tensor

from course_exercises.authoring import Exercise, OwnPart, expect, expect_type, run
from course_exercises.authoring.ranks import must_have_sent, must_have_waited
from course_exercises.chapters.ch11.shared import follow_calls
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
    things="pieces",
    misconceptions={
        "other-load": "Your attribute `load` is missing, or counts something else. It is a tensor with a number for each of this "
        "rank's experts: how many pieces all ranks together send to it.",
        "by-rank": "Your pieces lie in the order in which they arrive, by rank. Sort them by expert.",
        "other-order": "You return the right pieces in another order. They lie by expert and, within an expert, by the rank that "
        "they come from: sort stably. Indexing with an argsort sorts; indexing with the argsort of it undoes that.",
        "dealt-out": "You send expert e to rank e % n. Rank r has the experts from r * E / n on, one after the other.",
        "splits": "Your splits do not fit what is sent or expected. On the way back they change places; and what "
        "arrives is counted by the *other* ranks.",
        "not-put-back": "Your `combine` returns the right results in another order. What `dispatch` sorted has to be "
        "undone before the way back; and the argsort of an argsort is its inverse.",
        "other-gradient": "The gradient of a piece is not that of its own result. Backward takes each row the way back, and "
        "adds nothing up.",
        "nothing-to-do": "Your ranks fail where one sends nothing or gets nothing. Its splits are zeros and its tensors have no "
        "rows, and it makes every call all the same: the others wait for it.",
    },
    failures={
        "Split sizes": "splits",
        "doesn't match total": "splits",
        "timeout": "not-every-rank",
        "mismatch": "splits",
        "signal": "splits",
        "does not require grad": "cut-from-the-graph",
        "AttributeError": "other-load",
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
    return _Delivered(*found, pieces.grad), sent


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
    must_have_waited([sent.unwaited for _, sent in reports])
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
    dealt = [list(range(r, experts, ranks)) for r in range(ranks)]
    likely = {
        "by-rank": [of(r, mine[r], by_rank=True) for r in range(ranks)],
        "dealt-out": dealt != mine
        and (lambda got: _alike_sorted(got, [of(r, dealt[r]) for r in range(ranks)])),
        "other-order": lambda got: _alike_sorted(got, right),
    }
    expect([d.arrived for d in got], right, each="rank", what="what arrives", likely=likely)
    doubled = [2 * each for each in pieces]
    put_back = {"not-put-back": lambda got: _alike_sorted([torch.cat(got)], [torch.cat(doubled)])}
    expect([d.back for d in got], doubled, each="rank", what="what comes back", likely=put_back)
    wanted = [2 * each for each in factors]
    gradients = {
        "cut-from-the-graph": lambda got: any(each is None for each in got),
        "other-gradient": True,
    }
    expect([d.gradient for d in got], wanted, each="rank", what="the gradient", likely=gradients)
    must_have_sent([sent for _, sent in reports])


def _alike_sorted(got: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether each rank has the right rows in any order."""
    return all(
        a.shape == b.shape and torch.equal(_sorted_rows(a), _sorted_rows(b))
        for a, b in zip(got, expected, strict=True)
    )


def _sorted_rows(rows: Tensor) -> Tensor:
    return rows[rows[:, 0].argsort()]


def _check_load(loads: list, table: Tensor) -> None:
    for load in loads:
        expect_type(load, Tensor, likely="other-load")
    right = list(table.sum(0).chunk(len(table)))
    expect(loads, right, each="rank", what="`load`", likely={"other-load": True})


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
    failures=dict.fromkeys(("exception", "mismatch", "timeout"), "nothing-to-do"),
    needs_earlier=True,
)
def a_rank_that_sends_nothing(answer, draw):
    table = _tables(draw, 3, 6) + 1
    table[draw.integer(0, 2)] = 0
    _check_delivery(answer, table, draw)
    table = _tables(draw, 2, 4) + 1
    table[:, 2:] = 0
    _check_delivery(answer, table, draw)
