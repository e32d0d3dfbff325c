"""Answers to 7.5, `cheapest_placement`: wrong in a plausible way, or right in another."""

import itertools
import math

from tests.wrong_answers import right, wrong


def _inside(stride, size, ranks, per_machine):
    """Whether every group with this stride and size lies in one machine."""
    firsts = [r for r in range(ranks) if r // stride % size == 0]
    apart = stride * (size - 1)
    return all(first // per_machine == (first + apart) // per_machine for first in firsts)


def _times(order, sizes, sent, per_machine, rates, inside=_inside):
    """Each dimension's seconds, from the last to the first."""
    stride, ranks, times = 1, math.prod(sizes.values()), []
    for name in reversed(order):
        if sizes[name] > 1:
            fits = inside(stride, sizes[name], ranks, per_machine)
            times.append(sent[name] / rates[0 if fits else 1])
        stride *= sizes[name]
    return times


def _best(sizes, sent, per_machine, fast, slow, pick=min, total=sum, **changes):
    costs = {
        order: total(_times(order, sizes, sent, per_machine, (fast, slow), **changes))
        for order in itertools.permutations(sizes)
    }
    order = pick(costs, key=costs.get)
    return order, costs[order]


@right("7.5")
def builds_from_the_inside_out(sizes, sent, per_machine, inside, between):
    """Recursively: which dimension comes last, then which before it."""

    def search(left, stride):
        if not left:
            return (), 0.0
        found = []
        for name in left:
            fits = _inside(stride, sizes[name], math.prod(sizes.values()), per_machine)
            own = sent[name] / (inside if fits else between) if sizes[name] > 1 else 0.0
            before, seconds = search([n for n in left if n != name], stride * sizes[name])
            found.append(((*before, name), seconds + own))
        return min(found, key=lambda one: one[1])

    return search(list(sizes), 1)


@right("7.5")
def takes_the_last_of_equals(sizes, sent, per_machine, inside, between):
    backwards = dict(reversed(sizes.items()))
    return _best(backwards, sent, per_machine, inside, between)


@wrong("7.5", names="not-a-pair")
def returns_the_order_alone(*given):
    return _best(*given)[0]


@wrong("7.5", names="not-an-order")
def returns_the_last_dimension(*given):
    order, seconds = _best(*given)
    return order[-1:], seconds


@wrong("7.5", names="reversed")
def returns_the_fastest_first(*given):
    order, seconds = _best(*given)
    return order[::-1], seconds


@wrong("7.5", names="most-expensive")
def takes_the_largest(*given):
    return _best(*given, pick=max)


@wrong("7.5", names="rates-swapped")
def swaps_the_rates(sizes, sent, per_machine, inside, between):
    return _best(sizes, sent, per_machine, between, inside)


@wrong("7.5", names="stride-ignored")
def compares_sizes_with_the_machine(*given):
    return _best(*given, inside=lambda stride, size, ranks, room: size <= room)


@wrong("7.5", names="last-only")
def keeps_one_dimension_inside(*given):
    def inside(stride, size, ranks, room):
        return stride == 1 and _inside(stride, size, ranks, room)

    return _best(*given, inside=inside)


@wrong("7.5", names="most-bytes-last")
def sorts_by_bytes(sizes, sent, per_machine, inside, between):
    order = tuple(sorted(sizes, key=sent.get))
    return order, sum(_times(order, sizes, sent, per_machine, (inside, between)))


@wrong("7.5", names="most-bytes-last")
def fills_the_machine_greedily(sizes, sent, per_machine, inside, between):
    """What does not fit is put beside the others all the same."""
    order, room, seconds = (), per_machine, 0.0
    for name in sorted(sizes, key=sent.get, reverse=True):
        fits = sizes[name] <= room
        room = room // sizes[name] if fits else room
        order = (name, *order)
        seconds += sent[name] / (inside if fits else between)
    return order, seconds


@wrong("7.5", names="straddles")
def compares_products_with_the_machine(*given):
    return _best(*given, inside=lambda stride, size, ranks, room: stride * size <= room)


@wrong("7.5", names="straddles")
def looks_at_rank_0s_group(*given):
    return _best(*given, inside=lambda stride, size, ranks, room: stride * (size - 1) < room)


@wrong("7.5", names="divisors-only")
def wants_sizes_that_divide(*given):
    return _best(*given, inside=lambda stride, size, ranks, room: room % (stride * size) == 0)


@wrong("7.5", names="slowest-only")
def takes_the_slowest_dimension(*given):
    return _best(*given, total=lambda times: max([0.0, *times]))


@wrong("7.5", names="size-one")
def charges_for_a_dimension_of_one(sizes, sent, per_machine, inside, between):
    order, seconds = _best(sizes, sent, per_machine, inside, between)
    alone = sum(sent[name] for name in sizes if sizes[name] == 1)
    return order, seconds + alone / inside


@wrong("7.5", names="first-order")
def keeps_the_order_given(sizes, sent, per_machine, inside, between):
    order = tuple(sizes)
    return order, sum(_times(order, sizes, sent, per_machine, (inside, between)))


@wrong("7.5", names="other-seconds")
def leaves_the_last_dimension_out(sizes, sent, per_machine, inside, between):
    order, seconds = _best(sizes, sent, per_machine, inside, between)
    return order, seconds - sent[order[-1]] / inside


@wrong("7.5", names="not-cheapest")
def tries_rotations_only(sizes, sent, per_machine, inside, between):
    names = tuple(sizes)
    costs = {}
    for i in range(len(names)):
        order = names[i:] + names[:i]
        costs[order] = sum(_times(order, sizes, sent, per_machine, (inside, between)))
    order = min(costs, key=costs.get)
    return order, costs[order]


@wrong("7.5", names="neither")
def strides_from_the_first_dimension(sizes, sent, per_machine, inside, between):
    """Counts the first of the order as the one that changes fastest, and adds everything up."""
    costs = {
        order: sum(_times(order[::-1], sizes, sent, per_machine, (inside, between)))
        + sum(sent.values()) / between
        for order in itertools.permutations(sizes)
    }
    order = min(costs, key=costs.get)
    return order, costs[order]


@wrong("7.5", names="inputs-changed")
def takes_names_away(sizes, sent, per_machine, inside, between):
    result = _best(sizes, sent, per_machine, inside, between)
    sizes.clear()
    return result


@right("7.5")
def asks_whether_blocks_divide(sizes, sent, per_machine, fast, slow):
    """A group lies inside if all that changes as fast as it fills a part of a machine exactly, or if there
    is one machine only."""

    def fits(stride, size, ranks, room):
        return room % (stride * size) == 0 or ranks <= room

    order, seconds = _best(sizes, sent, per_machine, fast, slow, inside=fits)
    return list(order), seconds


@wrong("7.5", names="by-place")
def zips_the_dicts(sizes, sent, *others):
    return _best(sizes, dict(zip(sizes, sent.values(), strict=True)), *others)


@wrong("7.5", names="end-off-by-one")
def ends_one_stride_late(*given):
    def inside(stride, size, ranks, room):
        firsts = [r for r in range(ranks) if r // stride % size == 0]
        return all(first // room == (first + stride * size) // room for first in firsts)

    return _best(*given, inside=inside)


_kept = {}


@wrong("7.5", names="remembers")
def keeps_orders_by_name(sizes, sent, per_machine, inside, between):
    names = tuple(sorted(sizes))
    if names not in _kept:
        _kept[names] = _best(sizes, sent, per_machine, inside, between)[0]
    times = _times(_kept[names], sizes, sent, per_machine, (inside, between))
    return _kept[names], sum(times)


@wrong("7.5", names="greedy")
def takes_what_fits_by_bytes(sizes, sent, per_machine, inside, between):
    """From the last place on, each time the one with most bytes that still fits."""
    left, order, stride, ranks = dict(sent), (), 1, math.prod(sizes.values())
    while left:
        fitting = [
            name
            for name in left
            if ranks % (stride * sizes[name]) == 0
            and _inside(stride, sizes[name], ranks, per_machine)
        ]
        name = max(fitting or left, key=sent.get)
        order, stride = (name, *order), stride * sizes[name]
        del left[name]
    return order, sum(_times(order, sizes, sent, per_machine, (inside, between)))


@wrong("7.5", names="not-cheapest")
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


@wrong("7.5", names="straddles")
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


@wrong("7.5", names="not-an-order")
def loops_over_four_places(sizes, sent, per_machine, inside, between):
    def seconds(order):
        return sum(_times(order, sizes, sent, per_machine, (inside, between)))

    best = min(itertools.permutations(sizes, min(4, len(sizes))), key=seconds)
    return best, seconds(best)
