"""Rarer wrong answers to 4.3, `balanced_cuts`: rules that find the best cut of most lists."""

from bisect import bisect_left
from itertools import accumulate

from tests.wrong_answers import rarer
from tests.wrong_answers.ch04.balanced_cuts import (
    best_last_stage,
    counts_layers,
    least,
    refuse,
    remembers_what_it_solved,
    searches_the_sums_that_occur,
)


@rarer("4.3")
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


@rarer("4.3")
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


@rarer("4.3")
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


@rarer("4.3")
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


@rarer("4.3")
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


@rarer("4.3")
def minimises_the_variance(costs, stages):
    return least(costs, stages, lambda loads: sum(load**2 for load in loads))


@rarer("4.3")
def sorts_the_costs(costs, stages):
    return remembers_what_it_solved(sorted(costs, reverse=True), stages)


# tests/checks/test_checks_ch04.py shows that the check's lists mislead each of them.
RULES = [
    counts_layers,
    fills_to_the_mean,
    fills_until_the_mean_is_reached,
    looks_up_the_quantiles,
    takes_its_share_of_the_rest,
    cuts_in_halves,
    minimises_the_variance,
    sorts_the_costs,
]


@rarer("4.3")
def rounds_the_costs(costs, stages):
    return searches_the_sums_that_occur([round(cost, 6) for cost in costs], stages)


@rarer("4.3")
def refuses_by_accident(costs, stages):
    """By the error of `min`, which finds nothing to choose from."""
    return best_last_stage(costs, stages)
