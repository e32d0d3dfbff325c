"""Rarer wrong answers to 7.5, `cheapest_placement`."""

import itertools
import math

from tests.wrong_answers import rarer
from tests.wrong_answers.ch07.cheapest_placement import _best, _inside, _times


@rarer("7.5")
def keeps_one_dimension_inside(*given):
    def inside(stride, size, ranks, room):
        return stride == 1 and _inside(stride, size, ranks, room)

    return _best(*given, inside=inside)


@rarer("7.5")
def wants_sizes_that_divide(*given):
    return _best(*given, inside=lambda stride, size, ranks, room: room % (stride * size) == 0)


@rarer("7.5")
def charges_for_a_dimension_of_one(sizes, sent, per_machine, inside, between):
    order, seconds = _best(sizes, sent, per_machine, inside, between)
    alone = sum(sent[name] for name in sizes if sizes[name] == 1)
    return order, seconds + alone / inside


@rarer("7.5")
def strides_from_the_first_dimension(sizes, sent, per_machine, inside, between):
    """Counts the first of the order as the one that changes fastest, and adds everything up."""
    costs = {
        order: sum(_times(order[::-1], sizes, sent, per_machine, (inside, between)))
        + sum(sent.values()) / between
        for order in itertools.permutations(sizes)
    }
    order = min(costs, key=costs.get)
    return order, costs[order]


@rarer("7.5")
def swaps_neighbours(sizes, sent, per_machine, inside, between):
    """Until no swap makes it cheaper."""
    order = list(sizes)

    def seconds(order):
        return sum(_times(order, sizes, sent, per_machine, (inside, between)))

    better = True
    while better:
        better = False
        for i in range(len(order) - 1):
            swapped = [*order[:i], order[i + 1], order[i], *order[i + 2 :]]
            if seconds(swapped) < seconds(order):
                order, better = swapped, True
    return tuple(order), seconds(order)


@rarer("7.5")
def chooses_by_the_product(sizes, sent, per_machine, inside, between):
    """Those with most bytes whose sizes multiply to no more than a machine; counts rightly."""
    chosen = max(
        (
            names
            for count in range(len(sizes) + 1)
            for names in itertools.combinations(sizes, count)
            if math.prod(sizes[name] for name in names) <= per_machine
        ),
        key=lambda names: sum(sent[name] for name in names),
    )
    order = (*(name for name in sizes if name not in chosen), *chosen)
    return order, sum(_times(order, sizes, sent, per_machine, (inside, between)))


_kept = {}


@rarer("7.5")
def keeps_orders_by_name(sizes, sent, per_machine, inside, between):
    names = tuple(sorted(sizes))
    if names not in _kept:
        _kept[names] = _best(sizes, sent, per_machine, inside, between)[0]
    times = _times(_kept[names], sizes, sent, per_machine, (inside, between))
    return _kept[names], sum(times)


@rarer("7.5")
def zips_the_dicts(sizes, sent, *others):
    return _best(sizes, dict(zip(sizes, sent.values(), strict=True)), *others)
