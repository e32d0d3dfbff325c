"""The checks of chapter 11: routing, places in the queues of all ranks, dispatch and combine, the balance
loss, the gradients on a grid of data and experts.

What several ranks find together is compared with a simulation in the notebook's kernel, which sees all
of them, rightly or with a slip of the kind that people make.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import one_hot

from course_utils.checks import Exercise, OwnPart, Wrong, expect, expect_type, run, same
from course_utils.checks.ranks import Sent, come_late, following
from course_utils.hardware import device
from course_utils.trace import Trace

NOT_WAITED = (
    "Nobody waits for a call that goes on in the background: call `wait()` on what it returned before "
    "you use its result."
)


@contextmanager
def _hearing() -> Iterator[Sent]:
    """Follows the calls of an answer, on ranks that come one after the other."""
    come_late(dist.get_rank())
    with following() as sent:
        yield sent


def _told(call: Callable) -> int:
    """How many numbers a rank hands over in `call`. A Trace asks after each Work, which `following` would take
    for a wait, so the two do not listen to the same call."""
    with Trace() as trace:
        call()
    return sum(each.elements for each in trace.record().calls if each.sends)


def _check_waited(unwaited: list[list[str]]) -> None:
    for rank, calls in enumerate(unwaited):
        if calls:
            got = f"rank {rank} does not wait for its {calls[0]}"
            raise Wrong("not-waited", expected="a wait() for every call", got=got)


def _check_told(told: list[int], at_most: int) -> None:
    for rank, numbers in enumerate(told):
        if numbers > at_most:
            got = f"rank {rank} hands over {numbers}"
            raise Wrong("too-many-numbers", expected=f"at most {at_most} numbers", got=got)


@contextmanager
def _blaming(slug: str, known: bool = False) -> Iterator[None]:
    """Names what goes wrong within the block; with `known`, also what has a name already."""
    try:
        yield
    except Wrong as wrong:
        if wrong.misconception and not known:
            raise
        raise Wrong(slug, expected=wrong.expected, got=wrong.got) from None


def _choices(draw, tokens: int, experts: int, k: int) -> Tensor:
    """(tokens, k): different experts for each token, the first ones more often."""
    logits = draw.tensor(tokens, experts) - torch.linspace(0, 1.5, experts)
    return logits.topk(k).indices


# ---- 11.1 ----------------------------------------------------------------------------------------

routing = Exercise(
    "11.1",
    "route",
    points=1,
    minutes=8,
    kind="first",
    parameters=("logits", "k"),
    hints=[
        "Which method of a tensor returns its largest values together with their places?",
        "You need no mask and no softmax over all E: what is not chosen plays no part in the weights.",
        (
            "`topk` along the experts gives values and indices. The indices are the choices, and the "
            "softmax of the values, along the same dimension, are the weights."
        ),
    ],
    misconceptions={
        "not-a-pair": "Asked is a pair: (choices, weights).",
        "swapped": "The right pair in the wrong order: the choices come first.",
        "other-dimension": "You choose k *tokens* for each expert. The experts are the second dimension of "
        "`logits`.",
        "smallest": "These are the experts with the smallest logits.",
        "smallest-first": "The right experts, the smallest logit first. Asked is the largest first.",
        "column-for-each-expert": "For each token you return a number for every expert. Asked are k columns: the numbers "
        "of the chosen experts, and a weight for each of these.",
        "by-number": "The right experts, sorted by their numbers: asked is the largest logit first.",
        "softmax-over-all": "These are the probabilities among all E experts: the weights of a token do not "
        "add up to 1. The softmax runs over the chosen logits only.",
        "softmax-twice": "The softmax of probabilities: they lie between 0 and 1, so the weights are nearly alike. Take "
        "it once, over the chosen logits.",
        "sigmoid": "You divide sigmoids by their sum, as DeepSeek-V3 does. Asked is the softmax over the chosen logits.",
        "other-order": "The weights stand in another order than the experts that they belong to.",
        "raw-logits": "These are the logits themselves: they can be negative, and add up to anything. The "
        "weights are their softmax.",
        "divided-by-the-sum": "The chosen logits divided by their sum. A sum of logits may be zero or negative; "
        "their softmax divides exponentials.",
        "softmax-over-tokens": "The softmax runs over the tokens. The k weights of one token have to add up to 1.",
        "masked-with-zero": "The experts that were not chosen take part with a logit of 0, and exp(0) is 1. "
        "They count for nothing with a logit of minus infinity.",
        "all-alike": "All weights are 1/k. They depend on the logits, or the router can learn nothing.",
        "no-gradient": "No gradient reaches the logits, so the router learns nothing. Keep the weights in the "
        "graph: no `detach`, no `no_grad`, no `item`.",
        "fixed-k": "It works for k = 2 and not for another k.",
        "no-tokens": "It fails where a rank has no tokens at all, T = 0.",
    },
)


def _check_route(answer, logits: Tensor, k: int) -> None:
    right = logits.topk(k)
    got = answer(logits.clone(), k)
    if got is not None and not (isinstance(got, (tuple, list)) and len(got) == 2):
        raise Wrong("not-a-pair", expected="(choices, weights)", got=got)
    expect_type(got, (tuple, list))
    for each in got:
        expect_type(each, Tensor, likely="not-a-pair")
    choices, weights = got
    if choices.is_floating_point() and not weights.is_floating_point():
        raise Wrong("swapped", expected="the choices first", got="the weights first")
    likely = {
        "smallest": logits.topk(k, largest=False).indices,
        "smallest-first": k > 1 and right.indices.flip(1),
        "by-number": right.indices.sort().values,
        "column-for-each-expert": lambda got: got.shape == logits.shape != right.indices.shape,
        "other-dimension": lambda got: got.shape == (k, logits.shape[1]) != right.indices.shape,
    }
    expect(choices, right.indices, what="the choices", likely=likely)
    probabilities = logits.softmax(1)
    only = torch.zeros_like(logits).scatter(1, right.indices, right.values)
    sigmoids = right.values.sigmoid()
    mistakes = {
        "softmax-over-all": probabilities.gather(1, right.indices),
        "raw-logits": right.values,
        "divided-by-the-sum": right.values / right.values.sum(1, keepdim=True),
        "softmax-over-tokens": right.values.softmax(0),
        "masked-with-zero": only.softmax(1).gather(1, right.indices),
        "all-alike": torch.full_like(right.values, 1 / k),
        "softmax-twice": probabilities.gather(1, right.indices).softmax(1),
        "sigmoid": sigmoids / sigmoids.sum(1, keepdim=True),
        "column-for-each-expert": lambda got: got.shape == logits.shape != right.indices.shape,
        "other-order": lambda got: same(got.sort(1).values, right.values.softmax(1).sort(1).values),
    }
    expect(weights, right.values.softmax(1), what="the weights", likely=mistakes)


@routing.requires("two of several experts")
def _(answer, draw):
    _check_route(answer, draw.tensor(draw.integer(6, 9), draw.integer(4, 5)), 2)


@routing.requires("another k", failures={"exception": "fixed-k"}, needs_earlier=True)
def _(answer, draw):
    experts = draw.integer(4, 6)
    for k in (1, 3, experts):
        with _blaming("fixed-k", known=True):
            _check_route(answer, draw.tensor(7, experts), k)


@routing.requires("the gradient of the weights reaches the logits", at_home=True)
def _(answer, draw):
    logits, factors = draw.tensor(5, 6).requires_grad_(), draw.tensor(5, 2)
    weights = answer(logits, 2)[1]
    if not weights.requires_grad:
        raise Wrong("no-gradient", expected="weights with a gradient", got="weights without one")
    (weights * factors).sum().backward()
    got, logits.grad = logits.grad, None
    (logits.topk(2).values.softmax(1) * factors).sum().backward()
    expect(got, logits.grad, what="the gradient", likely={"no-gradient": lambda got: got is None})


@routing.requires("no tokens", failures={"exception": "no-tokens"})
def _(answer, draw):
    _check_route(answer, draw.tensor(0, draw.integer(3, 6)), 2)


# ---- 11.2 ----------------------------------------------------------------------------------------

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
    with _hearing() as sent:
        got = answer(choices, capacity)
    return got, sent.unwaited, _told(lambda: answer(choices, capacity))


def _check_places(answer, parts: list[Tensor], capacity: Tensor) -> None:
    reports = run(_placed, len(parts), answer, OwnPart(parts), capacity)
    got = [places for places, *_ in reports]
    _check_waited([unwaited for _, unwaited, _ in reports])
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
    _check_told([told for *_, told in reports], at_most=len(capacity))


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
def _(answer, draw):
    experts, tokens = draw.integer(3, 4), draw.integer(6, 8)
    parts = [_choices(draw, tokens, experts, 2) for _ in range(2)]
    _check_places(answer, parts, torch.full((experts,), 100))


@queueing.requires("two or three ranks, and queues with an end")
def _(answer, draw):
    experts, tokens, ranks = draw.integer(3, 4), draw.integer(7, 9), draw.choice([2, 3])
    parts = [_choices(draw, tokens, experts, 2) for _ in range(ranks)]
    _check_places(answer, parts, torch.arange(experts) + draw.integer(3, 4))


@queueing.requires("ranks with different numbers of tokens")
def _(answer, draw):
    experts = draw.integer(3, 4)
    parts = [_choices(draw, tokens, experts, 1) for tokens in draw.sample([3, 5, 8], 3)]
    _check_places(answer, parts, torch.arange(experts) + draw.integer(4, 6))


@queueing.requires(
    "a rank without tokens",
    failures={name: "empty-rank" for name in ("timeout", "mismatch", "exception")},
    needs_earlier=True,
)
def _(answer, draw):
    experts = draw.integer(3, 4)
    parts = [_choices(draw, tokens, experts, 2) for tokens in draw.choice([(4, 0, 5), (0, 6, 3)])]
    _check_places(answer, parts, torch.arange(experts) + 4)


# ---- 11.3 ----------------------------------------------------------------------------------------

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
    with _hearing() as sent:
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
    _check_waited([unwaited for _, unwaited in reports])
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
        "dealt-out": lambda got: _alike_sorted(got, [of(r, dealt[r]) for r in range(ranks)]),
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
def _(answer, draw):
    _check_delivery(answer, _tables(draw, 2, 6), draw)


@sending.requires("three ranks, or one")
def _(answer, draw):
    ranks = draw.choice([1, 3])
    _check_delivery(answer, _tables(draw, ranks, 2 * ranks), draw)
    _check_delivery(answer, _tables(draw, 4 - ranks, 4 - ranks), draw)


@sending.requires(
    "a rank that sends nothing, and one that gets nothing",
    failures={name: "nothing-to-do" for name in ("exception", "mismatch")},
    needs_earlier=True,
)
def _(answer, draw):
    table = _tables(draw, 3, 6) + 1
    table[draw.integer(0, 2)] = 0
    _check_delivery(answer, table, draw)
    table = _tables(draw, 2, 4) + 1
    table[:, 2:] = 0
    _check_delivery(answer, table, draw)


# ---- 11.4 ----------------------------------------------------------------------------------------

balancing = Exercise(
    "11.4",
    "balance_loss",
    points=2,
    minutes=15,
    kind="core",
    parameters=("logits", "choices"),
    hints=[
        (
            "Write the loss of the whole batch with the probabilities of every single token. Which part of it "
            "does one token contribute, and what must be known of all tokens for that?"
        ),
        (
            "The shares f are those of the whole batch: count your pieces for each expert and add the counts up "
            "over all ranks. These counts also tell how many tokens there are. p is a sum over tokens: your own "
            "tokens give your part of it."
        ),
        (
            "E * sum over e of f_e * (the sum of your tokens' probabilities of e) / (the number of all tokens). "
            "f comes from an all-reduced `bincount`, and the number of all tokens is the sum of that, divided by k."
        ),
    ],
    misconceptions={
        "own-shares": "The shares f are those of your own tokens. A product of means is not the mean of the ranks' "
        "products: f has to be that of the whole batch.",
        "whole-on-each-rank": "Every rank returns the loss of the whole batch. Added up, it counts as many times as "
        "there are ranks; asked is what this rank's tokens contribute.",
        "own-mean": "You divide by your own tokens. The mean probability runs over the tokens of all ranks, so each "
        "rank divides by their number.",
        "without-e": "The factor E is missing: spread evenly, the loss is 1 for any number of experts.",
        "k-times": "The shares f add up to k and not to 1: divide by the number of pieces, T k over all ranks.",
        "divided-by-pieces": "Divided by the number of pieces. p is a mean over the tokens: of these there are T, and not T k.",
        "softmax-over-tokens": "The softmax runs over the tokens. The probabilities of one token, over the experts, add up to 1.",
        "soft-shares": "Both factors are mean probabilities. f counts: it is the share of the pieces that *chose* an expert.",
        "first-choices": "You count first choices only. f is the share of all pieces, with every choice of a token.",
        "not-a-scalar": "Asked is a scalar, without dimensions: the sum over the experts.",
        "divided-by-ranks": "Divided by the number of ranks once more. Parts add up; nothing is averaged.",
        "logits": "The second factor is a mean of *probabilities*: the softmax over the experts is missing.",
        "no-gradient": "The result has no gradient. The probabilities have to stay in the graph.",
        "other-gradient": "The value is right and its gradient is not: each token's gradient comes from its own "
        "probabilities, once.",
        "too-many-numbers": "You hand over more than E + 1 numbers. What the others need are counts.",
        "empty-rank": "It fails where a rank has no tokens. Its counts are zeros, and it contributes 0.",
        "unequal": "It works as long as all ranks have as many tokens, and not otherwise.",
        "not-waited": NOT_WAITED,
    },
)


def _balanced(rank, answer, logits: Tensor, choices: Tensor):
    logits = logits.to(device()).requires_grad_()
    choices = choices.to(device())
    with _hearing() as sent:
        got = answer(logits, choices)
    gradient = None
    if isinstance(got, Tensor) and got.requires_grad and got.numel() == 1:
        [gradient] = torch.autograd.grad(got, logits, allow_unused=True)
    got = got.detach() if isinstance(got, Tensor) else got
    return got, gradient, sent.unwaited, _told(lambda: answer(logits, choices))


@dataclass(frozen=True)
class _Batch:
    """The logits and choices of each rank."""

    logits: list[Tensor]
    choices: list[Tensor]

    def shares(self, rank: int | None = None, per: str = "pieces") -> Tensor:
        """f of one rank, or of all."""
        choices = torch.cat(self.choices) if rank is None else self.choices[rank]
        counts = choices.flatten().bincount(minlength=self.logits[0].shape[1])
        return counts / (choices.numel() if per == "pieces" else len(choices))

    def part(
        self,
        rank: int,
        f: Tensor,
        divisor: float | None = None,
        probabilities: Callable[[Tensor], Tensor] = lambda logits: logits.softmax(1),
    ) -> Tensor:
        """sum(f * p) times E over this rank's tokens, divided by all tokens or by `divisor`."""
        sums = probabilities(self.logits[rank]).sum(0)
        tokens = divisor or sum(map(len, self.logits))
        return len(f) * (f * sums).sum() / tokens

    def all_parts(self, **how) -> list[Tensor]:
        return [self.part(rank, self.shares(), **how) for rank in range(len(self.logits))]


def _batch(draw, sizes: list[int]) -> _Batch:
    experts, k = draw.integer(4, 6), 5 - len(sizes)  # unlike the ranks, so that factors tell apart
    taste = [draw.tensor(experts) for _ in sizes]  # the ranks have different favourites
    logits = [draw.tensor(n, experts) + t for n, t in zip(sizes, taste, strict=True)]
    return _Batch(logits, [each.topk(k).indices for each in logits])


def _check_balance(answer, batch: _Batch) -> None:
    ranks, experts = len(batch.logits), batch.logits[0].shape[1]
    reports = run(_balanced, ranks, answer, OwnPart(batch.logits), OwnPart(batch.choices))
    _check_waited([unwaited for _, _, unwaited, _ in reports])
    got = [value for value, *_ in reports]
    for value in got:
        expect_type(value, Tensor)
    right = batch.all_parts()
    own = [batch.part(r, batch.shares(r)) for r in range(ranks) if len(batch.logits[r])]
    alone = [
        batch.part(r, batch.shares(r), len(batch.logits[r]))
        for r in range(ranks)
        if len(batch.logits[r])
    ]
    likely = {
        "whole-on-each-rank": [sum(right)] * ranks,
        "own-mean": lambda got: _near(
            got, [batch.part(r, batch.shares(), len(batch.logits[r])) for r in range(ranks)]
        ),
        "own-shares": lambda got: (
            _near(got, own)
            or _near(got, alone)
            or _near(got, [each / ranks for each in alone])
            or _near(got, [sum(alone) / ranks] * ranks)
        ),
        "without-e": [each / experts for each in right],
        "k-times": [batch.part(r, batch.shares(per="tokens")) for r in range(ranks)],
        "divided-by-ranks": [each / ranks for each in right],
        "divided-by-pieces": [each / batch.choices[0].shape[1] for each in right],
        "logits": batch.all_parts(probabilities=lambda logits: logits),
        "softmax-over-tokens": batch.all_parts(probabilities=lambda logits: logits.softmax(0)),
        "soft-shares": [
            batch.part(r, torch.cat(batch.logits).softmax(1).mean(0)) for r in range(ranks)
        ],
        "first-choices": [
            batch.part(r, one_hot(torch.cat(batch.choices)[:, 0], experts).float().mean(0))
            for r in range(ranks)
        ],
        "not-a-scalar": lambda got: any(value.ndim > 0 for value in got),
    }
    expect(got, right, each="rank", likely=likely)
    gradients = [gradient for _, gradient, *_ in reports]
    expect(
        gradients,
        [_gradient(batch, r) for r in range(ranks)],
        each="rank",
        what="the gradient",
        likely={
            "no-gradient": lambda got: any(each is None for each in got),
            "other-gradient": True,
        },
    )
    _check_told([told for *_, told in reports], at_most=experts + 1)


def _near(got: list, expected: list[Tensor]) -> bool:
    return all(
        torch.isclose(a.float(), b.float(), rtol=1e-4) for a, b in zip(got, expected, strict=True)
    )


def _gradient(batch: _Batch, rank: int) -> Tensor:
    logits = batch.logits[rank].clone().requires_grad_()
    changed = _Batch([*batch.logits[:rank], logits, *batch.logits[rank + 1 :]], batch.choices)
    [gradient] = torch.autograd.grad(changed.part(rank, batch.shares()), logits)
    return gradient


@balancing.requires("the parts of two or three ranks")
def _(answer, draw):
    _check_balance(answer, _batch(draw, [draw.integer(5, 8)] * draw.choice([2, 3])))


@balancing.requires(
    "ranks with different numbers of tokens",
    failures={name: "unequal" for name in ("mismatch", "signal", "exception")},
)
def _(answer, draw):
    with _blaming("unequal"):
        _check_balance(answer, _batch(draw, draw.sample([3, 6, 9], 3)))


@balancing.requires(
    "a rank without tokens",
    failures={name: "empty-rank" for name in ("timeout", "mismatch", "exception")},
    needs_earlier=True,
)
def _(answer, draw):
    with _blaming("empty-rank", known=True):
        _check_balance(answer, _batch(draw, draw.sample([0, 5], 2)))


# ---- 11.5 ----------------------------------------------------------------------------------------

averaging = Exercise(
    "11.5",
    "average_expert_gradients",
    points=3,
    minutes=20,
    kind="core",
    parameters=("model", "mesh"),
    hints=[
        (
            "Take the loss of the whole batch as the mean of four ranks' means. Write its gradient with respect to "
            "the router as a sum over ranks, then that with respect to one expert. What is already added up "
            "after backward?"
        ),
        (
            "Both sums have a term for every rank, and are divided by the number of *all* ranks. They differ in "
            "what is missing: for an expert, its other copies' terms only."
        ),
        (
            'All-reduce over everybody, or over the mesh\'s "data" group if the name has the part `experts`; then '
            "divide by the size of the whole mesh. Zeros take the place of a gradient that is missing, before the "
            "call."
        ),
    ],
    misconceptions={
        "mean-over-copies": "The experts' gradients are too large: the sum over the copies was divided by their "
        "number. The tokens of all ranks are in it, so it is divided by the number of all ranks.",
        "divided-by-the-group": "The experts' gradients are divided by the size of the experts' group. Divide by the "
        "number of all ranks: each gradient is a mean of all ranks' means.",
        "not-divided": "Sums and no means: the gradients are not divided by the number of ranks.",
        "experts-over-everybody": "The experts' gradients are added up over all ranks. The ranks of an experts' "
        "group have *different* experts under other names: only the copies, the ranks of `data`, have the same. (`experts` may be the "
        "first part of a name, with no dot before it.)",
        "experts-over-their-group": "The experts' gradients are added up over the group of their own dimension. Its "
        "ranks have different experts; the copies are in the group of `data`.",
        "experts-left-alone": "The experts' gradients have not been added up over their copies: these drift apart.",
        "others-over-data": "What is no expert is added up over `data` only. Every rank has tokens of its own, also in "
        "an experts' group.",
        "others-over-experts": "What is no expert is added up over the experts' group only. Every rank has tokens of its own, "
        "also the other copies of the group.",
        "divided-twice": "The experts' gradients are divided by the experts' group once more. One division by the number of all "
        "ranks makes the mean.",
        "not-a-sum": "The gradients of the ranks are not added up: the operation of the call is another one. A mean begins with "
        "a sum.",
        "as-before": "The gradients are as they were. Work on `.grad` itself, or put the result there.",
        "experts-only": "Only the experts' gradients are averaged; the rest belongs to it.",
        "by-name": "A parameter is taken for an expert's that is none, or the other way round: `experts` has to be one "
        "of the parts of its name, between the dots.",
        "first-dimension": "It works for a mesh whose first dimension is `data`, and not in another order: ask for the "
        "groups by name.",
        "skips-missing": "A rank whose parameter has no gradient skips a call in which the others wait. Zeros stand in "
        "for it.",
        "missing-stays": "A trainable parameter without a gradient counts as zero: its `.grad` has to be there "
        "afterwards, with what the other ranks found.",
        "frozen": "A frozen parameter takes part: it has no gradient and gets none.",
        "not-waited": NOT_WAITED,
    },
)

NAMES = ("data", "experts")


class _Layer(nn.Module):
    """What a rank has of a layer: a router, and its own experts by their numbers."""

    def __init__(self, numbers: list[int], width: int) -> None:
        super().__init__()
        self.experts_router = nn.Linear(
            width, 3, bias=False
        )  # its name says experts, and it is none
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleDict({str(e): nn.Linear(width, width) for e in numbers})


@dataclass(frozen=True)
class _Grid:
    """Sizes of data and experts, the order of the mesh's dimensions, and every rank's gradients by name."""

    sizes: tuple[int, int]
    order: tuple[str, str]
    gradients: list[dict[str, Tensor | None]]
    frozen: tuple[str, ...] = ()
    width: int = 3

    @property
    def ranks(self) -> int:
        return self.sizes[0] * self.sizes[1]

    def place(self, rank: int) -> tuple[int, int]:
        """(data, experts) of a rank."""
        if self.order == NAMES:
            return divmod(rank, self.sizes[1])
        expert, data = divmod(rank, self.sizes[0])
        return data, expert

    def group(self, rank: int, dimension: int) -> list[int]:
        """The ranks that differ from `rank` in this dimension at most."""
        fixed = 1 - dimension
        return [r for r in range(self.ranks) if self.place(r)[fixed] == self.place(rank)[fixed]]

    def summed(self, rank: int, name: str, over: list[int], how=torch.sum) -> Tensor | None:
        """By the parameter's position, as a call meets it: experts have other names elsewhere. `how`: of the
        stacked gradients (ranks, ...), along the first dimension."""
        if name in self.frozen:
            return None
        position = list(self.gradients[rank]).index(name)
        terms = [list(self.gradients[r].values())[position] for r in over]
        shape = next(iter(t.shape for t in terms if t is not None), None)
        terms = (
            [torch.zeros(shape) if t is None else t for t in terms] if shape else [torch.zeros(1)]
        )
        return how(torch.stack(terms), 0)


def _grid(draw, sizes: tuple[int, int], order=NAMES, missing: bool = False, frozen=()) -> _Grid:
    per_rank, width = draw.choice([1, 2]), 3
    gradients = []
    for rank in range(sizes[0] * sizes[1]):
        data, expert = divmod(rank, sizes[1]) if order == NAMES else divmod(rank, sizes[0])[::-1]
        numbers = [expert * per_rank + i for i in range(per_rank)]
        own = {}
        for name, parameter in _Layer(numbers, width).named_parameters():
            own[name] = None if name in frozen else draw.tensor(*parameter.shape)
        if missing and data == 0:
            own |= {name: None for name in own if name.startswith("experts.")}
        gradients.append(own)
    return _Grid(sizes, order, gradients, tuple(frozen), width)


def _averaged(rank, answer, grid: _Grid):
    shape = tuple(grid.sizes[NAMES.index(name)] for name in grid.order)
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=grid.order)
    numbers = sorted(
        {int(n.split(".")[1]) for n in grid.gradients[rank] if n.startswith("experts.")}
    )
    model = _Layer(numbers, grid.width).to(device())
    for name, parameter in model.named_parameters():
        gradient = grid.gradients[rank][name]
        parameter.requires_grad_(name not in grid.frozen)
        parameter.grad = None if gradient is None else gradient.to(device())
    with _hearing() as sent:
        answer(model, mesh)
    got = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return got, sent.unwaited


def _check_averages(answer, grid: _Grid) -> None:
    reports = run(_averaged, grid.ranks, answer, grid)
    _check_waited([unwaited for _, unwaited in reports])
    got = [gradients for gradients, _ in reports]
    for rank, gradients in enumerate(got):
        for name, value in gradients.items():
            if name in grid.frozen and value is not None:
                raise Wrong("frozen", expected=f"no gradient of {name}", got="one")
            if name not in grid.frozen and value is None:
                where = f"rank {rank}, {name}"
                raise Wrong("missing-stays", expected="a gradient", got=f"None ({where})")
    everybody = list(range(grid.ranks))

    def held(
        expert, other, is_expert=lambda name: name.startswith("experts."), how=torch.sum
    ) -> list[dict]:
        """All ranks' gradients, by two functions that give (ranks to add up, divisor)."""
        found = []
        for rank in everybody:
            own = {}
            for name in grid.gradients[rank]:
                over, divisor = (expert if is_expert(name) else other)(rank)
                total = grid.summed(rank, name, over, how)
                own[name] = None if total is None else total / divisor
            found.append(own)
        return found

    def copies(rank: int) -> list[int]:
        return grid.group(rank, 0)

    def neighbours(rank: int) -> list[int]:
        return grid.group(rank, 1)

    n, (data, experts) = grid.ranks, grid.sizes

    def mean(rank: int) -> tuple[list[int], int]:
        return everybody, n

    def alone(divisor: int) -> Callable:
        return lambda rank: ([rank], divisor)

    right = held(lambda r: (copies(r), n), mean)
    likely = {
        "mean-over-copies": held(lambda r: (copies(r), data), mean),
        "divided-by-the-group": held(lambda r: (copies(r), experts), mean),
        "not-divided": lambda got: any(
            _alike(got, each)
            for each in (
                held(lambda r: (copies(r), 1), lambda r: (everybody, 1)),
                held(lambda r: (copies(r), 1), mean),
            )
        ),
        "experts-over-everybody": held(mean, mean),
        "experts-over-their-group": lambda got: any(
            _alike(got, held(lambda r, d=d: (neighbours(r), d), mean)) for d in (1, experts, n)
        ),
        "experts-left-alone": lambda got: any(
            _alike(got, held(alone(d), mean)) for d in (1, data, experts, n)
        ),
        "others-over-data": lambda got: any(
            _alike(got, held(lambda r, d=d: (copies(r), d), lambda r, e=e: (copies(r), e)))
            for d in (data, n)
            for e in (data, n)
        ),
        "others-over-experts": lambda got: any(
            _alike(got, held(lambda r: (copies(r), n), lambda r, d=d: (neighbours(r), d)))
            for d in (experts, n)
        ),
        "divided-twice": held(lambda r: (copies(r), n * experts), mean),
        "not-a-sum": lambda got: any(
            _alike(got, held(lambda r, d=d: (copies(r), d), lambda r, d=d: (everybody, d), how=how))
            for d in (1, n)
            for how in (torch.amax, torch.amin)
        ),
        "as-before": held(alone(1), alone(1)),
        "experts-only": held(lambda r: (copies(r), n), alone(1)),
        "by-name": held(lambda r: (copies(r), n), mean, is_expert=lambda name: "experts" in name),
    }
    expect(got, right, each="rank", likely=likely)


def _alike(got: list[dict], expected: list[dict]) -> bool:
    return all(
        torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-5)
        for a, b in zip(got, expected, strict=True)
        for name in b
        if b[name] is not None
    )


@averaging.requires(
    "three copies of two groups, or two of three"
)  # where no two mistakes look alike
def _(answer, draw):
    _check_averages(answer, _grid(draw, draw.choice([(3, 2), (2, 3)])))


@averaging.requires("one copy, and one expert's rank")
def _(answer, draw):
    for sizes in ((1, draw.choice([2, 3])), (2, 1)):
        _check_averages(answer, _grid(draw, sizes))


@averaging.requires(
    "a mesh in another order",
    failures={name: "first-dimension" for name in ("exception", "mismatch", "timeout")},
    needs_earlier=True,
)
def _(answer, draw):
    with _blaming("first-dimension", known=True):
        _check_averages(answer, _grid(draw, draw.choice([(1, 2), (2, 1), (1, 3)]), NAMES[::-1]))


@averaging.requires(
    "an expert that nobody chose has no gradient",
    failures={name: "skips-missing" for name in ("timeout", "mismatch", "exception")},
)
def _(answer, draw):
    _check_averages(answer, _grid(draw, (2, draw.choice([1, 2])), missing=True))


@averaging.requires("a frozen parameter", failures={"exception": "frozen"})
def _(answer, draw):
    frozen = (draw.choice(["norm.weight", "norm.bias", "experts_router.weight"]),)
    _check_averages(answer, _grid(draw, (1, 2), frozen=frozen))
