"""Exercise 7.5, `cheapest_placement`: what it asks for, and how it is checked."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same

placing = Exercise(
    "7.5",
    "cheapest_placement",
    points=3,
    minutes=20,
    kind="core",
    parameters=("sizes", "sent", "per_machine", "inside", "between"),
    hints=[
        (
            "Take 2 x 4 ranks and machines of four. Write the ranks of every group for both orders, and "
            "mark where a machine ends. Which groups cross a mark?"
        ),
        (
            "There are at most 120 orders: try them all. For one order you need the stride of each "
            "dimension, as in 7.1, and for each of its groups whether the first and the last rank are in "
            "the same machine."
        ),
        (
            "Rank r is in machine r // per_machine. Go through an order from its last dimension to its "
            "first and multiply the sizes to get the strides. A dimension of more than one rank costs "
            "its bytes over the fast rate if all its groups stay inside, else over the slow one. Add up, "
            "and keep the order with the smallest sum."
        ),
    ],
    misconceptions={
        "not-a-pair": "Asked is a pair: the order, a tuple of names, and its seconds.",
        "not-an-order": "The order has to name each dimension exactly once.",
        "reversed": "The right order in reverse: asked is slowest-changing first. The last dimension's "
        "groups are neighbours.",
        "most-expensive": "This is the most expensive order.",
        "rates-swapped": "The two rates are swapped: `inside` is that of groups within a machine.",
        "stride-ignored": "A dimension counts as inside if its *size* fits into a machine. Its ranks may be "
        "far apart all the same: it depends on what changes faster.",
        "last-only": "Only the last dimension counts as inside. If a machine has room for two dimensions "
        "together, both are.",
        "most-bytes-last": "The dimension with most bytes is placed last whatever its size. If its groups "
        "are larger than a machine, that place is wasted on it.",
        "straddles": "A group that is no larger than a machine can still lie across two: ranks 3, 4 and 5 "
        "in machines of four. Every group has to be looked at, not the first alone.",
        "divisors-only": "A dimension counts as outside though its groups lie inside. What counts is "
        "where their ranks are, not whether the sizes divide.",
        "end-off-by-one": "You look one stride too far: a group of n ranks ends n - 1 strides after its first "
        "rank. One stride on is another group's rank, perhaps in the next machine.",
        "slowest-only": "You count the slowest dimension alone. The times add up.",
        "size-one": "A dimension of size 1 is counted: it has nobody to send to.",
        "by-place": "You take the first entry of `sent` for the first of `sizes`, and so on. The two dicts "
        "need not have their keys in one order: what belongs together has the same name.",
        "remembers": "This order is that of an earlier call, with other numbers. The names alone do not "
        "decide which order is cheapest.",
        "greedy": "You choose the dimension with most bytes before the others, since it fits into a machine. "
        "Two others that fit together may send more: compare whole orders.",
        "first-order": "You take the order as given. Another one is cheaper.",
        "other-seconds": "This order is a cheapest one, and its seconds are not these. Each dimension of "
        "more than one rank adds its bytes divided by one of the two rates.",
        "not-cheapest": "The seconds are right for this order, and another order costs less: do you "
        "compare all of them?",
        "neither": "These are not the seconds of this order, and another order costs less. Count one order by "
        "hand first: which groups lie inside a machine?",
        "inputs-changed": "`sizes` or `sent` have changed: they belong to the caller.",
    },
)


@dataclass(frozen=True)
class _Cluster:
    sizes: dict[str, int]
    sent: dict[str, float]
    per_machine: int
    inside: float
    between: float

    def arguments(self) -> tuple:
        sent = dict(reversed(self.sent.items()))  # the dicts belong together by name, not by place
        return dict(self.sizes), sent, self.per_machine, self.inside, self.between

    def renamed(self, names: dict[str, str]) -> "_Cluster":
        """The same cluster, in which what was called `old` is now called `names[old]`."""
        sizes, sent = ({names[k]: v for k, v in d.items()} for d in (self.sizes, self.sent))
        return dataclasses.replace(self, sizes=sizes, sent=sent)

    def zipped(self) -> "_Cluster":
        """What one reads who takes the entries of the two dicts by their place."""
        sizes, sent, *_ = self.arguments()
        return dataclasses.replace(self, sent=dict(zip(sizes, sent.values(), strict=True)))

    def orders(self) -> list[tuple[str, ...]]:
        return list(itertools.permutations(self.sizes))


@dataclass(frozen=True)
class _Groups:
    """The groups of one dimension in one order."""

    stride: int
    size: int
    machines: list[set[int]]  # those that each group touches
    beyond: list[int]  # that of the rank one stride after each group


def _placed(cluster: _Cluster, order: tuple[str, ...]) -> dict[str, _Groups]:
    ranks = math.prod(cluster.sizes.values())
    grid = torch.arange(ranks).reshape([cluster.sizes[name] for name in order])
    placed = {}
    for dim, name in enumerate(order):
        groups = grid.movedim(dim, -1).reshape(-1, cluster.sizes[name]).tolist()
        machines = [{rank // cluster.per_machine for rank in group} for group in groups]
        stride = grid.stride(dim)
        beyond = [(group[-1] + stride) // cluster.per_machine for group in groups]
        placed[name] = _Groups(stride, cluster.sizes[name], machines, beyond)
    return placed


def _within(groups: _Groups) -> bool:
    return all(len(touched) == 1 for touched in groups.machines)


def _seconds(
    cluster: _Cluster,
    order: tuple[str, ...],
    fits: Callable[[_Groups], bool] = _within,
    together: Callable = sum,
    counts: Callable[[_Groups], bool] = lambda groups: groups.size > 1,
    swapped: bool = False,
) -> float:
    """A step's seconds in one order, rightly or with a mistake."""
    rates = (cluster.between, cluster.inside) if swapped else (cluster.inside, cluster.between)
    times = [
        cluster.sent[name] / rates[0 if fits(groups) else 1]
        for name, groups in _placed(cluster, order).items()
        if counts(groups)
    ]
    return together([0.0, *times])


def _read(answer, cluster: _Cluster) -> tuple[tuple[str, ...], float]:
    """An answer's order and seconds; raises Wrong where it gives something else."""
    arguments = cluster.arguments()
    got = answer(*arguments)
    if got is not None:
        if not isinstance(got, (tuple, list)) or len(got) != 2:
            raise Wrong("not-a-pair", expected="(order, seconds)", got=got)
        if not isinstance(got[0], (tuple, list)) or sorted(got[0]) != sorted(cluster.sizes):
            raise Wrong("not-an-order", expected=f"the names {sorted(cluster.sizes)}", got=got[0])
        got = (tuple(got[0]), got[1])
    expect_type(got, tuple)
    if arguments != cluster.arguments():
        raise Wrong("inputs-changed", expected="the dicts as they were", got="other contents")
    return got


def _is_right(cluster: _Cluster, got: tuple) -> bool:
    best = min(_seconds(cluster, order) for order in cluster.orders())
    return same(_seconds(cluster, got[0]), best) and same(got[1], best)


def _right_under_other_names(answer, cluster: _Cluster) -> bool:
    renamed = cluster.renamed({name: f"{name} of today" for name in cluster.sizes})
    return _is_right(renamed, _read(answer, renamed))


def _gives_back(answer) -> bool:
    """Whether the order given comes back where the other one is cheaper."""
    two = _Cluster({"tensor": 4, "data": 4}, {"tensor": 9 * GB, "data": GB}, 4, 10 * GB, GB)
    return _read(answer, two)[0] == tuple(two.sizes)


def _check_placement(answer, cluster: _Cluster) -> None:
    got = _read(answer, cluster)
    true = {order: _seconds(cluster, order) for order in cluster.orders()}
    best = min(true.values())
    if same(true[got[0]], best) and same(got[1], best):
        return
    honest = same(got[1], true[got[0]])

    def picks(seen: _Cluster = cluster, **mistake) -> bool:
        """Whether this is a cheapest order, and its time, as one who makes the mistake counts."""
        counted = {order: _seconds(seen, order, **mistake) for order in true}
        return same(counted[got[0]], min(counted.values())) and same(got[1], counted[got[0]])

    def chooses(**mistake) -> bool:
        """The same, where the time of the order that was chosen is the true one."""
        counted = {order: _seconds(cluster, order, **mistake) for order in true}
        return honest and same(counted[got[0]], min(counted.values()))

    def in_room(groups: _Groups) -> bool:
        return groups.stride * groups.size <= room

    def ends_beyond(groups: _Groups) -> bool:
        pairs = zip(groups.machines, groups.beyond, strict=True)
        return all(touched == {beyond} for touched, beyond in pairs)

    room, most = cluster.per_machine, max(cluster.sent, key=cluster.sent.get)
    cheapest = [order for order, seconds in true.items() if same(seconds, best)]
    orders = got[0], *cheapest
    most_inside = [order for order in orders if _within(_placed(cluster, order)[most])]
    likely = {
        "by-place": picks(cluster.zipped()),
        "remembers": lambda _: _right_under_other_names(answer, cluster),
        "divisors-only": picks(fits=lambda groups: room % (groups.stride * groups.size) == 0),
        "end-off-by-one": not honest and picks(fits=ends_beyond),
        "greedy": honest and most_inside == [got[0]],
        "last-only": picks(fits=lambda groups: groups.stride == 1 and _within(groups)),
        "straddles": picks(fits=lambda groups: len(groups.machines[0]) == 1)
        or picks(fits=in_room)
        or chooses(fits=in_room),
        "most-bytes-last": got[0][-1] == most and cluster.sizes[most] > room,
        "most-expensive": honest and same(got[1], max(true.values())),
        "reversed": same(got[1], best) and same(true[got[0][::-1]], best),
        "rates-swapped": picks(swapped=True),
        "stride-ignored": picks(fits=lambda groups: groups.size <= room),
        "slowest-only": picks(together=max),
        "size-one": picks(counts=lambda groups: True),
        "first-order": lambda _: honest and got[0] == tuple(cluster.sizes) and _gives_back(answer),
        "other-seconds": same(true[got[0]], best),
        "not-cheapest": honest,
        "neither": True,
    }
    if same(true[got[0]], best):
        expect(got[1], best, what="the seconds of this order", likely=likely)
    words = [f"{', '.join(order)}: {true[order]:.4g} seconds" for order in (got[0], cheapest[0])]
    expect(*words, likely=likely)


GB = 1e9


def _cluster(draw, sizes: dict[str, int], sent: dict[str, int], per_machine: int) -> _Cluster:
    """`sent` in GB, by weight: each is drawn anew and stays in the same order of size."""
    drawn = {name: weight * draw.number(1.0, 1.5) * GB for name, weight in sent.items()}
    inside = draw.integer(150, 300) * GB
    return _Cluster(sizes, drawn, per_machine, inside, inside / draw.integer(8, 12))


@placing.requires("one dimension fits into a machine")
def one_dimension_fits_into_a_machine(answer, draw):
    room, pipeline, data = draw.choice([(4, 2, 4), (4, 2, 2), (6, 2, 3), (6, 3, 2), (8, 2, 4)])
    sizes = {"tensor": room, "pipeline": pipeline, "data": data}
    sent = {"tensor": 9, "pipeline": 1, "data": 3}
    _check_placement(answer, _cluster(draw, sizes, sent, room))


@placing.requires("two dimensions fit together", needs_earlier=True)
def two_dimensions_fit_together(answer, draw):
    tensor, pipeline = draw.choice([(4, 2), (2, 3), (3, 2), (2, 4)])
    sizes = {"tensor": tensor, "data": draw.choice([2, 3, 4]), "pipeline": pipeline}
    sent = {"tensor": 9, "data": 2, "pipeline": 4}
    _check_placement(answer, _cluster(draw, sizes, sent, tensor * pipeline))
    # the two that fit are no neighbours in any rotation of the order given
    sizes = {"tensor": 2, "data": draw.choice([3, 5]), "pipeline": 2, "replica": 2}
    _check_placement(answer, _cluster(draw, sizes, {**sent, "replica": 1}, per_machine=4))


@placing.requires("the dimension with most bytes is larger than a machine", needs_earlier=True)
def the_dimension_with_most_bytes_is_larger_than(answer, draw):
    room = draw.choice([4, 5, 6])
    sizes = {"tensor": room, "data": room + draw.choice([1, 2, 4]), "pipeline": 2}
    sent = {"tensor": 4, "data": 9, "pipeline": 1}
    _check_placement(answer, _cluster(draw, sizes, sent, room))


@placing.requires(
    "two dimensions together send more than the one with most bytes", needs_earlier=True
)
def two_dimensions_together_send_more_than(answer, draw):
    room, data, pipeline = draw.choice([(4, 2, 2), (6, 2, 3), (6, 3, 2), (8, 2, 4), (8, 4, 2)])
    sizes = {"data": data, "tensor": room, "pipeline": pipeline}
    sent = {"data": draw.number(6, 8), "tensor": draw.number(9, 10), "pipeline": draw.number(6, 8)}
    sent = {name: number * GB for name, number in sent.items()}
    _check_placement(answer, _Cluster(sizes, sent, room, 200 * GB, 20 * GB))


@placing.requires("groups that lie across the end of a machine", needs_earlier=True)
def groups_that_lie_across_the_end(answer, draw):
    size, room = draw.choice([(3, 4), (3, 5), (4, 5), (4, 6), (5, 6)])
    sizes, sent = {"tensor": size, "data": room}, {"tensor": 9, "data": 3}
    _check_placement(answer, _cluster(draw, sizes, sent, room))
    room = draw.choice([4, 6])  # tensor first: ranks 0 and room - 1 meet, 1 and room do not
    _check_placement(answer, _cluster(draw, {"tensor": 2, "data": room - 1}, sent, room))


@placing.requires("fewer ranks than a machine has room for", needs_earlier=True)
def fewer_ranks_than_a_machine_has_room(answer, draw):
    data, tensor, room = draw.choice([(3, 2, 8), (2, 3, 7), (3, 3, 10), (2, 2, 5)])
    sizes, sent = {"data": data, "tensor": tensor}, {"data": 3, "tensor": 9}
    _check_placement(answer, _cluster(draw, sizes, sent, room))


@placing.requires(
    "four dimensions, one of them of size 1; machines of four ranks, and of one", needs_earlier=True
)
def four_dimensions_one_of_them_of_size_1(answer, draw):
    sizes = {"replica": draw.choice([2, 3, 5]), "data": 1, "pipeline": 2, "tensor": 2}
    sent = {"replica": 1, "data": 7, "pipeline": 3, "tensor": 12}
    for per_machine in (4, 1):
        _check_placement(answer, _cluster(draw, sizes, sent, per_machine))


@placing.requires("a single dimension, and five", needs_earlier=True)
def a_single_dimension(answer, draw):
    size = draw.integer(2, 5)
    _check_placement(answer, _cluster(draw, {"data": size}, {"data": 3}, draw.choice([1, size])))
    sizes = {"expert": draw.choice([2, 3]), "data": 2, "tensor": 2, "replica": 2, "pipeline": 2}
    sent = {"expert": 1, "data": 3, "tensor": 12, "replica": 2, "pipeline": 7}
    _check_placement(answer, _cluster(draw, sizes, sent, per_machine=4))
