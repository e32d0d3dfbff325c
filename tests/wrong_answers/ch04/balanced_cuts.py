"""Answers to 4.3, `balanced_cuts`: wrong in a plausible way, or right in another."""

from functools import cache
from itertools import accumulate, combinations, pairwise

from tests.wrong_answers import right, wrong


def refuse(costs, stages):
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{stages} stages for {len(costs)} layers: each needs at least one.")


def _first_fit(costs, limit):
    """As many layers a stage as the limit allows."""
    cuts, load = [], 0
    for i, cost in enumerate(costs):
        if load + cost > limit:
            cuts.append(i)
            load = 0
        load += cost
    return cuts


def _all_stages_filled(cuts, layers, stages):
    """More cuts never make the slowest stage slower: adds cuts until there are enough."""
    free = [c for c in range(1, layers) if c not in cuts]
    return sorted(cuts + free[: stages - 1 - len(cuts)])


@right("4.3")
def searches_the_sums_that_occur(costs, stages):
    refuse(costs, stages)
    total = [0, *accumulate(costs)]
    sums = sorted({b - a for a, b in combinations(total, 2) if b - a >= max(costs)})
    fits = [len(_first_fit(costs, limit * (1 + 1e-12))) < stages for limit in sums]
    limit = sums[fits.index(True)] * (1 + 1e-12)
    return _all_stages_filled(_first_fit(costs, limit), len(costs), stages)


@right("4.3")
def remembers_what_it_solved(costs, stages):
    refuse(costs, stages)
    total = [0, *accumulate(costs)]

    @cache
    def solve(start, left):
        """(slowest stage, cuts) for the layers from start on."""
        if left == 1:
            return total[-1] - total[start], ()
        options = []
        for cut in range(start + 1, len(costs) - left + 2):
            slowest, cuts = solve(cut, left - 1)
            options.append((max(total[cut] - total[start], slowest), (cut, *cuts)))
        return min(options)

    return list(solve(0, stages)[1])


def _halves_the_limit(costs, stages, width):
    """Looks for the least limit between two, until they are nearer than `width`."""
    low, high = max(costs), sum(costs)
    while high - low > width:
        middle = (low + high) / 2
        if len(_first_fit(costs, middle)) < stages:
            high = middle
        else:
            low = middle
    return _all_stages_filled(_first_fit(costs, high), len(costs), stages)


@right("4.3")
def halves_the_limit_relative_to_the_costs(costs, stages):
    refuse(costs, stages)
    return _halves_the_limit(costs, stages, 1e-12 * sum(costs))


def best_last_stage(costs, stages):
    total = [0, *accumulate(costs)]

    @cache
    def best(end, left):
        """The least slowest stage of the first `end` layers in `left` stages, and its cuts."""
        if left == 1:
            return total[end], ()
        choices = ((c, best(c, left - 1)) for c in range(left - 1, end))
        return min((max(s, total[end] - total[c]), (*cuts, c)) for c, (s, cuts) in choices)

    return list(best(len(costs), stages)[1])


@right("4.3")
def cuts_at_the_best_last_stage(costs, stages):
    refuse(costs, stages)
    return best_last_stage(costs, stages)


@wrong("4.3", names="not-cuts")
def returns_sizes(costs, stages):
    cuts = remembers_what_it_solved(costs, stages)
    return [b - a for a, b in pairwise([0, *cuts, len(costs)])]


@wrong("4.3", names="not-cuts")
def leaves_stages_empty(costs, stages):
    refuse(costs, stages)
    total = [0, *accumulate(costs)]
    sums = sorted({b - a for a, b in combinations(total, 2)})
    limit = next(s for s in sums if s >= max(costs) and len(_first_fit(costs, s)) < stages)
    return _first_fit(costs, limit)


@wrong("4.3", names="cut-after")
def returns_the_last_layers(costs, stages):
    return [cut - 1 for cut in remembers_what_it_solved(costs, stages)]


@wrong("4.3", names="not-best")
def counts_layers(costs, stages):
    refuse(costs, stages)
    size, longer = divmod(len(costs), stages)
    return [i * size + min(i, longer) for i in range(1, stages)]


@wrong("4.3", names="too-coarse")
def halves_the_limit_to_a_thousandth(costs, stages):
    refuse(costs, stages)
    return _halves_the_limit(costs, stages, 1e-3)


@wrong("4.3", names="too-coarse")
def searches_whole_numbers(costs, stages):
    refuse(costs, stages)
    limits = range(max(costs), sum(costs) + 1)
    cuts = next(cuts for cuts in (_first_fit(costs, x) for x in limits) if len(cuts) < stages)
    return _all_stages_filled(cuts, len(costs), stages)


def least(costs, stages, measure):
    """The best of all cuts: only for lists that are short."""
    refuse(costs, stages)

    def loads(cuts):
        return [sum(costs[a:b]) for a, b in pairwise((0, *cuts, len(costs)))]

    every = combinations(range(1, len(costs)), stages - 1)
    return list(min(every, key=lambda cuts: measure(loads(cuts))))


@wrong("4.3", names="too-slow")
def tries_all_cuts(costs, stages):
    return least(costs, stages, max)


@wrong("4.3", names="unhashable")
@cache
def caches_the_whole_function(costs, stages):
    return remembers_what_it_solved(costs, stages)


@wrong("4.3", names="list-changed")
def pops_the_costs(costs, stages):
    cuts = remembers_what_it_solved(costs, stages)
    while costs:
        costs.pop()
    return cuts


@wrong("4.3", names="refusal")
def makes_do_with_fewer_stages(costs, stages):
    return remembers_what_it_solved(costs, max(1, min(stages, len(costs)))) if costs else []


@wrong("4.3", names="refusal")
def refuses_with_an_assert(costs, stages):
    assert 1 <= stages <= len(costs), "impossible"
    return remembers_what_it_solved(costs, stages)


@wrong("4.3", names="refusal")
def wants_more_layers_than_stages(costs, stages):
    if not 1 <= stages < len(costs):
        raise ValueError(f"{stages} stages for {len(costs)} layers")
    return cuts_at_the_best_last_stage(costs, stages)
