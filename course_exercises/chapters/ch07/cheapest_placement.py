"""Exercise 7.5, `cheapest_placement`: what it asks for, and how it is checked."""

import itertools
import math
from dataclasses import dataclass, replace
from numbers import Number

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same

placing = Exercise(
    "7.5",
    "cheapest_placement",
    points=3,
    minutes=40,
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
        "another-form": "Your result has another form. Return a pair: a tuple that names each dimension in `sizes` exactly "
        "once, and the seconds.",
        "reversed": "Your seconds are right, and your order is a right one in reverse. Either you put the fastest-changing "
        "dimension first, or you take the entries of the two dicts by their place: put the slowest first, "
        "and take `sent[name]`.",
        "inside-misjudged": "You count a dimension as inside that is not, or as outside though it is inside, or swap "
        "the two rates, of which `inside` is that within a machine. Look where the "
        "ranks of *every* group are: rank r is in machine r // per_machine, and a group of n ranks ends n - 1 "
        "strides after its first. Its size does not tell, nor does its first group, nor whether sizes divide.",
        "most-bytes-first": "You look after the dimension with most bytes first. It may be too large for a machine, or two "
        "others that fit together may send more: compare whole orders.",
        "not-cheapest": "Your seconds are right for your order, and another order costs less. Compare all orders, anew in each "
        "call: neither the names nor the order of `sizes` decide.",
        "other-seconds": "These are not the seconds of your order. Add up each dimension's own bytes, `sent[name]`, divided by "
        "one of the two rates. The two dicts may have their names in different orders, and a dimension of size 1 "
        "sends nothing.",
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
        first, *rest = self.sent.items()  # the dicts belong together by name, not by place
        sent = dict([*rest, first])
        return dict(self.sizes), sent, self.per_machine, self.inside, self.between

    def __str__(self) -> str:
        dims = (
            f"{name} {size} with {self.sent[name]:.4g} bytes" for name, size in self.sizes.items()
        )
        rates = f"{self.inside:.4g} inside, {self.between:.4g} between"
        return f"{', '.join(dims)}; {self.per_machine} a machine; {rates}"

    def lie_inside(self, order: tuple[str, ...]) -> dict[str, bool]:
        """For each dimension whether all its groups lie inside machines."""
        stride, ranks, inside = 1, math.prod(self.sizes.values()), {}
        for name in reversed(order):
            firsts = [r for r in range(ranks) if r // stride % self.sizes[name] == 0]
            last = stride * (self.sizes[name] - 1)
            machines = [(r // self.per_machine, (r + last) // self.per_machine) for r in firsts]
            inside[name] = all(first == last for first, last in machines)
            stride *= self.sizes[name]
        return inside

    def seconds(self, inside: dict[str, bool]) -> float:
        """A step's seconds where these dimensions lie inside."""
        rates = {True: self.inside, False: self.between}
        return sum(self.sent[n] / rates[inside[n]] for n in inside if self.sizes[n] > 1)

    def zipped(self, order: tuple[str, ...]) -> float:
        """The seconds for one who takes the entries of the two dicts by their place."""
        sizes, sent, *_ = self.arguments()
        other = replace(self, sent=dict(zip(sizes, sent.values(), strict=True)))
        return other.seconds(self.lie_inside(order))

    def costs(self) -> dict[tuple[str, ...], float]:
        """The seconds of each order."""
        orders = itertools.permutations(self.sizes)
        return {order: self.seconds(self.lie_inside(order)) for order in orders}


def _read(answer, cluster: _Cluster) -> tuple[tuple[str, ...], float]:
    """An answer's order and seconds; raises Wrong where it gives something else."""
    arguments = cluster.arguments()
    got = answer(*arguments)
    expect_type(got, (tuple, list), likely=None if got is None else "another-form")
    if len(got) != 2:
        raise Wrong("another-form", expected="(order, seconds)", got=got)
    if not isinstance(got[0], (tuple, list)) or sorted(got[0]) != sorted(cluster.sizes):
        names = f"each of {', '.join(cluster.sizes)} once"
        raise Wrong("another-form", expected=names, got=got[0])
    if arguments != cluster.arguments():
        raise Wrong("input-changed", expected="the dicts as they were", got="other contents")
    return tuple(got[0]), got[1]


def _check_placement(answer, cluster: _Cluster) -> None:
    order, seconds = _read(answer, cluster)
    costs = cluster.costs()
    best = min(costs.values())
    cheapest = [other for other in costs if same(costs[other], best)]
    if order in cheapest and same(seconds, best):
        return
    honest, most = same(seconds, costs[order]), max(cluster.sent, key=cluster.sent.get)

    def comes_first(order: tuple[str, ...]) -> bool:
        """Whether this order cares for the dimension with most bytes."""
        return order[-1] == most or cluster.lie_inside(order)[most]

    guesses = itertools.product([True, False], repeat=len(order))
    guessed = (
        same(seconds, cluster.seconds(dict(zip(order, guess, strict=True)))) for guess in guesses
    )
    likely = {
        "reversed": order[::-1] in cheapest and same(seconds, best),
        "most-bytes-first": honest and comes_first(order) and not any(map(comes_first, cheapest)),
        "not-cheapest": honest,
        "inside-misjudged": any(guessed) and not same(seconds, cluster.zipped(order)),
        "other-seconds": True,
    }
    right = cheapest[0] if honest else order
    came, wanted = _words(order, seconds), _words(right, costs[right])
    expect(came, wanted, what=str(cluster), likely=likely)


def _words(order: tuple[str, ...], seconds: object) -> str:
    number = f"{seconds:.6g}" if isinstance(seconds, Number) else f"{seconds!r}"
    return f"{', '.join(order)}: {number} seconds"


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
