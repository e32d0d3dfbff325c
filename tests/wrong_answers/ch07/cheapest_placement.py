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


@right("7.5")
def asks_whether_blocks_divide(sizes, sent, per_machine, fast, slow):
    """A group lies inside if all that changes as fast as it fills a part of a machine exactly, or if there
    is one machine only."""

    def fits(stride, size, ranks, room):
        return room % (stride * size) == 0 or ranks <= room

    order, seconds = _best(sizes, sent, per_machine, fast, slow, inside=fits)
    return list(order), seconds


@wrong("7.5", names="another-form")
def returns_the_order_alone(*given):
    return _best(*given)[0]


@wrong("7.5", names="another-form")
def loops_over_four_places(sizes, sent, per_machine, inside, between):
    def seconds(order):
        return sum(_times(order, sizes, sent, per_machine, (inside, between)))

    best = min(itertools.permutations(sizes, min(4, len(sizes))), key=seconds)
    return best, seconds(best)


@wrong("7.5", names="reversed")
def returns_the_fastest_first(*given):
    order, seconds = _best(*given)
    return order[::-1], seconds


@wrong("7.5", names="inside-misjudged")
def swaps_the_rates(sizes, sent, per_machine, inside, between):
    return _best(sizes, sent, per_machine, between, inside)


@wrong("7.5", names="inside-misjudged")
def compares_sizes_with_the_machine(*given):
    return _best(*given, inside=lambda stride, size, ranks, room: size <= room)


@wrong("7.5", names="inside-misjudged")
def looks_at_rank_0s_group(*given):
    return _best(*given, inside=lambda stride, size, ranks, room: stride * (size - 1) < room)


@wrong("7.5", names="inside-misjudged")
def ends_one_stride_late(*given):
    def inside(stride, size, ranks, room):
        firsts = [r for r in range(ranks) if r // stride % size == 0]
        return all(first // room == (first + stride * size) // room for first in firsts)

    return _best(*given, inside=inside)


@wrong("7.5", names="most-bytes-first")
def sorts_by_bytes(sizes, sent, per_machine, inside, between):
    order = tuple(sorted(sizes, key=sent.get))
    return order, sum(_times(order, sizes, sent, per_machine, (inside, between)))


@wrong("7.5", names="most-bytes-first")
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
def tries_rotations_only(sizes, sent, per_machine, inside, between):
    names = tuple(sizes)
    costs = {}
    for i in range(len(names)):
        order = names[i:] + names[:i]
        costs[order] = sum(_times(order, sizes, sent, per_machine, (inside, between)))
    order = min(costs, key=costs.get)
    return order, costs[order]


@wrong("7.5", names="other-seconds")
def takes_the_slowest_dimension(*given):
    return _best(*given, total=lambda times: max([0.0, *times]))


@wrong("7.5", names="input-changed")
def takes_names_away(sizes, sent, per_machine, inside, between):
    result = _best(sizes, sent, per_machine, inside, between)
    sizes.clear()
    return result
