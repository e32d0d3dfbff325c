"""Answers to 4.3, `balanced_cuts`: wrong in a plausible way, or right in another."""

from bisect import bisect_left
from functools import cache
from itertools import accumulate, combinations, pairwise

import torch

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch04.shared import refuse


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


def _misled(costs, stages, rule):
    """A wrong rule with everything else right: refuses, and has as many stages as asked."""
    refuse(costs, stages)
    return _all_stages_filled(rule(), len(costs), stages)


@wrong("4.3", names="equal-layers")
def counts_layers(costs, stages):
    refuse(costs, stages)
    parts = torch.arange(len(costs)).tensor_split(stages)
    return [int(part[0]) for part in parts[1:]]


@wrong("4.3", names="stops-early")
def fills_to_the_mean(costs, stages):
    refuse(costs, stages)
    share, cuts, load = sum(costs) / stages, [], 0
    for i, cost in enumerate(costs):
        left = stages - 1 - len(cuts)
        if left and load and (load + cost > share or len(costs) - i == left):
            cuts.append(i)
            load = 0
        load += cost
    return cuts


@wrong("4.3", names="stops-late")
def fills_until_the_mean_is_reached(costs, stages):
    refuse(costs, stages)
    share, cuts, load = sum(costs) / stages, [], 0
    for i, cost in enumerate(costs):
        left = stages - 1 - len(cuts)
        if left and i and (load >= share or len(costs) - i == left):
            cuts.append(i)
            load = 0
        load += cost
    return cuts


@wrong("4.3", names="stops-late")
def fills_from_the_end(costs, stages):
    cuts = fills_until_the_mean_is_reached(costs[::-1], stages)
    return [len(costs) - cut for cut in reversed(cuts)]


@wrong("4.3", names="nearest-share")
def looks_up_the_quantiles(costs, stages):
    refuse(costs, stages)
    total, cuts = [0, *accumulate(costs)], []
    for stage in range(1, stages):
        wanted = sum(costs) * stage / stages
        at = bisect_left(total, wanted)
        at -= wanted - total[at - 1] <= total[at] - wanted
        low = (cuts[-1] if cuts else 0) + 1
        cuts.append(min(max(at, low), len(costs) - (stages - stage)))
    return cuts


@wrong("4.3", names="share-of-the-rest")
def takes_its_share_of_the_rest(costs, stages):
    refuse(costs, stages)
    cuts, start = [], 0
    for left in range(stages, 1, -1):
        share, end = sum(costs[start:]) / left, start + 1
        while end < len(costs) - left + 1 and sum(costs[start : end + 1]) <= share:
            end += 1
        cuts.append(end)
        start = end
    return cuts


@wrong("4.3", names="halved")
def cuts_in_halves(costs, stages):
    refuse(costs, stages)

    def halve(start, end, stages):
        if stages == 1:
            return []
        few, many = stages // 2, stages - stages // 2
        cut = min(
            range(start + few, end - many + 1),
            key=lambda c: max(sum(costs[start:c]) / few, sum(costs[c:end]) / many),
        )
        return [*halve(start, cut, few), cut, *halve(cut, end, many)]

    return halve(0, len(costs), stages)


def _least(costs, stages, measure):
    """The best of all cuts: only for lists that are short."""
    refuse(costs, stages)

    def loads(cuts):
        return [sum(costs[a:b]) for a, b in pairwise((0, *cuts, len(costs)))]

    every = combinations(range(1, len(costs)), stages - 1)
    return list(min(every, key=lambda cuts: measure(loads(cuts))))


@wrong("4.3", names="spread-not-slowest")
def minimises_the_variance(costs, stages):
    return _least(costs, stages, lambda loads: sum(load**2 for load in loads))


@wrong("4.3", names="sorted")
def sorts_the_costs(costs, stages):
    return remembers_what_it_solved(sorted(costs, reverse=True), stages)


@wrong("4.3", names="not-best")
def minimises_the_range(costs, stages):
    return _least(costs, stages, lambda loads: max(loads) - min(loads))


@wrong("4.3", names="too-slow")
def tries_all_cuts(costs, stages):
    return _least(costs, stages, max)


@wrong("4.3", names="fractions")
def searches_whole_numbers(costs, stages):
    def rule():
        low, high = max(costs), sum(costs)
        while low < high:
            middle = (low + high) // 2
            if len(_first_fit(costs, middle)) < stages:
                high = middle
            else:
                low = middle + 1
        return _first_fit(costs, high)

    return _misled(costs, stages, rule)


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


@wrong("4.3", names="too-coarse")
def halves_the_limit_to_a_thousandth(costs, stages):
    refuse(costs, stages)
    return _halves_the_limit(costs, stages, 1e-3)


@wrong("4.3", names="too-coarse")
def rounds_the_costs(costs, stages):
    return searches_the_sums_that_occur([round(cost, 6) for cost in costs], stages)


@wrong("4.3", names="number-of-cuts")
def leaves_stages_empty(costs, stages):
    refuse(costs, stages)
    total = [0, *accumulate(costs)]
    sums = sorted({b - a for a, b in combinations(total, 2)})
    limit = next(s for s in sums if s >= max(costs) and len(_first_fit(costs, s)) < stages)
    return _first_fit(costs, limit)


@wrong("4.3", names="empty-stage")
def repeats_the_last_cut(costs, stages):
    refuse(costs, stages)
    total = [0, *accumulate(costs)]
    cuts = _first_fit(costs, min(s for s in total if len(_first_fit(costs, s)) < stages))
    return cuts + [len(costs)] * (stages - 1 - len(cuts))


@wrong("4.3", names="sizes-not-cuts")
def returns_sizes(costs, stages):
    cuts = remembers_what_it_solved(costs, stages)
    return [b - a for a, b in pairwise([0, *cuts, len(costs)])]


@wrong("4.3", names="ends-included")
def returns_the_ends_too(costs, stages):
    return [0, *remembers_what_it_solved(costs, stages), len(costs)]


@wrong("4.3", names="cut-after")
def returns_the_last_layers(costs, stages):
    return [cut - 1 for cut in remembers_what_it_solved(costs, stages)]


@wrong("4.3", names="stages-not-cuts")
def returns_the_stages(costs, stages):
    cuts = remembers_what_it_solved(costs, stages)
    return [costs[a:b] for a, b in pairwise([0, *cuts, len(costs)])]


@wrong("4.3", names="cost-not-cuts")
def returns_the_least_cost(costs, stages):
    return max(map(sum, returns_the_stages(costs, stages)))


@wrong("4.3", names="cost-not-cuts")
def returns_the_cost_too(costs, stages):
    return returns_the_least_cost(costs, stages), remembers_what_it_solved(costs, stages)


@wrong("4.3", names="unhashable")
@cache
def caches_the_whole_function(costs, stages):
    return remembers_what_it_solved(costs, stages)


@wrong("4.3", names="fractions")
def tries_every_whole_limit(costs, stages):
    def rule():
        limits = range(max(costs), sum(costs) + 1)
        return next(cuts for cuts in (_first_fit(costs, x) for x in limits) if len(cuts) < stages)

    return _misled(costs, stages, rule)


@wrong("4.3", names="number-of-cuts")
def cuts_once(costs, stages):
    refuse(costs, stages)
    return [min(range(1, len(costs)), key=lambda c: max(sum(costs[:c]), sum(costs[c:])))]


@wrong("4.3", names="costs-changed")
def pops_the_costs(costs, stages):
    cuts = remembers_what_it_solved(costs, stages)
    while costs:
        costs.pop()
    return cuts


@wrong("4.3", names="not-refused")
def makes_do_with_fewer_stages(costs, stages):
    return remembers_what_it_solved(costs, max(1, min(stages, len(costs)))) if costs else []


@wrong("4.3", names="accident")
def refuses_by_accident(costs, stages):
    cuts, end = [], len(costs)
    total = [0, *accumulate(costs)]
    best = {i: [total[i]] for i in range(end + 1)}
    for stage in range(1, max(stages, 1)):
        for i in range(end, stage - 1, -1):
            options = [max(best[c][-1], total[i] - total[c]) for c in range(stage, i)]
            best[i].append(min(options) if i == end else min(options, default=float("inf")))
    for stage in range(stages - 1, 0, -1):
        slowest = {c: max(best[c][stage - 1], total[end] - total[c]) for c in range(stage, end)}
        end = min(slowest, key=slowest.get)
        cuts.insert(0, end)
    return cuts


@wrong("4.3", names="other-error")
def refuses_with_an_assert(costs, stages):
    assert 1 <= stages <= len(costs), "impossible"
    return remembers_what_it_solved(costs, stages)


@wrong("4.3", names="refuses-too-much")
def wants_more_layers_than_stages(costs, stages):
    if not 1 <= stages < len(costs):
        raise ValueError(f"{stages} stages for {len(costs)} layers")
    return cuts_at_the_best_last_stage(costs, stages)


@right("4.3")
def cuts_at_the_best_last_stage(costs, stages):
    refuse(costs, stages)
    total = [0, *accumulate(costs)]

    @cache
    def best(end, left):
        """The least slowest stage of the first `end` layers in `left` stages, and its cuts."""
        if left == 1:
            return total[end], ()
        choices = ((c, best(c, left - 1)) for c in range(left - 1, end))
        return min((max(s, total[end] - total[c]), (*cuts, c)) for c, (s, cuts) in choices)

    return list(best(len(costs), stages)[1])
