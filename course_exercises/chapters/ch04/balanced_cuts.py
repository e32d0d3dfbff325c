"""Exercise 4.3, `balanced_cuts`: what it asks for, and how it is checked."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from operator import index

from course_exercises.authoring import Exercise, Wrong, expect, expect_type
from course_exercises.chapters.ch04.shared import Cuts, best_cuts, equal_layers, loads_of

cutting = Exercise(
    "4.3",
    "balanced_cuts",
    points=2,
    minutes=35,
    kind="core",
    parameters=("costs", "stages"),
    hints=[
        (
            "Think of the last stage alone. If it begins at layer c, what is the best that the layers "
            "before c can do in one stage fewer?"
        ),
        (
            "That is a smaller problem of the same kind, and the same small problems come back again "
            "and again: solve each one once. With prefix sums, the cost of any run of layers is one "
            "subtraction."
        ),
        (
            "Fill a table. Entry (s, i) is the least slowest stage for the first i layers in s stages. "
            "It is the minimum over c of the larger of entry (s - 1, c) and the cost of layers c to "
            "i - 1. Keep the c of each minimum and walk back from the end."
        ),
    ],
    misconceptions={
        "sizes-not-cuts": "You return how many layers each stage has. Asked is where to cut.",
        "stages-not-cuts": "You return the stages themselves. Asked is where to cut: the indices of "
        "the layers before which a stage ends.",
        "cost-not-cuts": "You return how slow the slowest stage is. Asked is where to cut: remember, "
        "with each best cost, the cuts that lead to it.",
        "unhashable": "`cache` looks its results up by the arguments, and a list cannot be looked up. "
        "Cache a function inside yours: its arguments are whole numbers, and it sees `costs`.",
        "ends-included": "The beginning and the end of the chain are no cuts: stages - 1 indices "
        "suffice.",
        "number-of-cuts": "That many cuts do not make that many stages. Every stage has to have at "
        "least one layer, also where a stage fewer would be as fast.",
        "empty-stage": "Cuts are in ascending order, each of them once, from 1 to the number of layers "
        "- 1: every stage has at least one layer.",
        "cut-after": "Your cuts are one too small: a cut c stands before layer c, so that "
        "costs[:c] is the first stage of one cut.",
        "equal-layers": "You cut into stages with equally many layers. Layers cost differently.",
        "stops-early": "You fill each stage until the next layer would exceed an equal share. What "
        "each stage leaves over piles up in the last one.",
        "stops-late": "You fill each stage until it has reached an equal share. The stages come out "
        "too large, each by a part of a layer.",
        "nearest-share": "You cut where the running total is nearest to equal shares. A cut that is "
        "best by itself need not be best with its neighbours.",
        "share-of-the-rest": "You give each stage its share of what is left. That looks one stage "
        "ahead; the best cut needs all of them.",
        "halved": "You cut in halves, and the halves again. The best halves do not always have "
        "the best quarters.",
        "spread-not-slowest": "You make the stages as equal as possible in the mean (the least "
        "variance). Asked is the least slowest stage.",
        "sorted": "You sort the costs. The layers are a chain: their order is fixed.",
        "not-best": "There is a cut whose slowest stage is faster.",
        "fractions": "With whole numbers your cuts are right. Costs may be fractions: a search for "
        "the limit has to try the sums that occur, not whole numbers.",
        "too-coarse": "Your cuts are right for large costs and wrong for small ones, such as seconds of "
        "0.00001: a search that ends at a fixed width, or rounded costs, cannot tell them apart. Try "
        "the sums that occur.",
        "costs-changed": "Your function changes the caller's list.",
        "too-slow": "This tries too many cuts. Solve each smaller problem once and remember it.",
        "refuses-too-much": "You refuse what can be done: as many stages as layers, or a single one, are "
        "allowed.",
        "not-refused": "More stages than layers, or fewer than one: raise ValueError.",
        "other-error": "Asked is a ValueError with a message, raised on purpose.",
        "accident": "This ValueError comes from deep inside by accident, and its message tells the "
        "caller nothing. Test `stages` first.",
    },
    failures={
        "endless": "too-slow",
        "RecursionError": "too-slow",
        "unhashable type": "unhashable",
    },
)


def _filled(costs: list[float], stages: int, early: bool) -> Cuts:
    """A stage ends before (early) or after the layer with which it passes its equal share."""
    share, cuts, load = sum(costs) / stages, [], 0
    for i, cost in enumerate(costs):
        full = load + cost > share if early else load >= share
        needed = len(costs) - i == stages - 1 - len(cuts)
        if i > (cuts or [0])[-1] and len(cuts) < stages - 1 and (full or needed):
            cuts.append(i)
            load = 0
        load += cost
    return cuts


def _nearest_share(costs: list[float], stages: int) -> Cuts:
    total, cuts = [0, *accumulate(costs)], [0]
    for stage in range(1, stages):
        where = range(cuts[-1] + 1, len(costs) - (stages - 1 - stage))
        cuts.append(min(where, key=lambda i: abs(total[i] - stage * total[-1] / stages)))
    return cuts[1:]


def _share_of_the_rest(costs: list[float], stages: int) -> Cuts:
    cuts, start = [], 0
    for left in range(stages, 1, -1):
        share, load, end = sum(costs[start:]) / left, costs[start], start + 1
        while len(costs) - end > left - 1 and load + costs[end] <= share:
            load, end = load + costs[end], end + 1
        cuts.append(end)
        start = end
    return cuts


def _halved(costs: list[float], stages: int) -> Cuts:
    if stages == 1:
        return []
    first = stages // 2
    second = stages - first
    cut = min(
        range(first, len(costs) - second + 1),
        key=lambda c: max(sum(costs[:c]) / first, sum(costs[c:]) / second),
    )
    return [*_halved(costs[:cut], first), cut, *(cut + c for c in _halved(costs[cut:], second))]


MISTAKEN: dict[str, Callable[[list[float], int], Cuts]] = {
    "equal-layers": equal_layers,
    "stops-early": partial(_filled, early=True),
    "stops-late": partial(_filled, early=False),
    "nearest-share": _nearest_share,
    "share-of-the-rest": _share_of_the_rest,
    "halved": _halved,
    "spread-not-slowest": partial(best_cuts, join=lambda load, rest: load**2 + rest),
    "sorted": lambda costs, stages: best_cuts(sorted(costs, reverse=True), stages),
}

# Found by a search; tests/checks/test_checks_ch04.py shows that each mistaken partitioner misses the
# best cut of each list, and that no two of them give the same cuts, from whichever end they work.
MISLEADING = [
    ([8, 4, 2, 3, 5, 6, 9, 7, 2, 1, 6], 5),
    ([5, 7, 1, 9, 4, 7, 3, 1, 3, 9, 1, 2, 1], 6),
    ([9, 1, 8, 7, 1, 7, 2, 7, 7, 8, 6, 3], 5),
    ([8, 2, 1, 4, 1, 8, 6, 8, 1, 3, 5, 1, 4], 5),
    ([3, 7, 1, 5, 8, 7, 5, 7, 9, 2, 3], 6),
    ([5, 5, 2, 2, 5, 5, 8, 6, 3, 4], 5),
    ([1, 9, 5, 1, 6, 3, 5, 3, 1, 3, 1, 3], 6),
    ([8, 1, 7, 8, 8, 6, 2, 3, 9, 6], 6),
]


def _mirrored(partition: Callable, costs: list[float], stages: int) -> Cuts:
    """What a partitioner does that works from the last layer to the first."""
    return [len(costs) - cut for cut in reversed(partition(costs[::-1], stages))]


def _cuts_of(answer, costs: list[float], stages: int) -> Cuts:
    """The answer's cuts, which must be cuts: Wrong says what else they are."""
    given = list(costs)
    got = answer(given, stages)
    if given != costs:
        raise Wrong("costs-changed", expected=costs, got=given)
    if isinstance(got, int | float):
        raise Wrong("cost-not-cuts", expected="a list of cuts", got=got)
    expect_type(got, (list, tuple))
    try:
        cuts = [index(cut) for cut in got]
    except TypeError:
        lists = [isinstance(entry, list | tuple) for entry in got]
        slug = "stages-not-cuts" if all(lists) else "cost-not-cuts" if any(lists) else None
        raise Wrong(slug, expected="a list of whole numbers", got=got) from None
    layers, what = len(costs), f"{stages - 1} cuts of {len(costs)} layers"
    if len(cuts) != stages - 1:
        ends = [cut for cut in cuts if cut in (0, layers)]
        mistakes = {
            "sizes-not-cuts": len(cuts) == stages and sum(cuts) == layers,
            "ends-included": bool(ends) and len(cuts) - len(ends) == stages - 1,
        }
        slug = next((slug for slug, made in mistakes.items() if made), "number-of-cuts")
        raise Wrong(slug, expected=what, got=got)
    if any(a >= b for a, b in pairwise([0, *cuts, layers])):
        after = [cut + 1 for cut in cuts] == best_cuts(costs, stages)
        raise Wrong("cut-after" if after else "empty-stage", expected=what, got=got)
    return cuts


def _must_be_best(got: Cuts, costs: list[float], stages: int, likely: str) -> None:
    slowest, best = max(loads_of(costs, got)), max(loads_of(costs, best_cuts(costs, stages)))
    if slowest > best * (1 + 1e-9):
        chain = costs if len(costs) <= 20 else f"{len(costs)} layers"
        raise Wrong(
            likely,
            expected=f"slowest stage {best:g} of {chain} in {stages} stages",
            got=f"{slowest:g} with cuts {got}",
        )


@cutting.requires("layers that cost the same")
def layers_that_cost_the_same(answer, draw):
    cost = draw.integer(2, 9)
    for stages in draw.sample(range(2, 6), 3):
        size = draw.integer(2, 4)
        costs = [cost] * (size * stages)
        got, best = _cuts_of(answer, costs, stages), best_cuts(costs, stages)
        after = got == [cut - 1 for cut in best]
        _must_be_best(got, costs, stages, "cut-after" if after else "not-best")


@cutting.requires("layers of different costs, on which simple rules fail")
def layers_of_different_costs(answer, draw):
    lists = [
        ([factor * cost for cost in costs], stages)
        for costs, stages in draw.sample(MISLEADING, 3)
        for factor in [draw.integer(1, 9)]
    ]
    got = [_cuts_of(answer, costs, stages) for costs, stages in lists]
    likely = "not-best"
    for slug, partition in MISTAKEN.items():
        for rule in (partition, partial(_mirrored, partition)):
            if got == [rule(costs, stages) for costs, stages in lists]:
                likely = slug
    for cuts, (costs, stages) in zip(got, lists):
        _must_be_best(cuts, costs, stages, likely)


@cutting.requires(
    "one stage; as many stages as layers; layers that cost nothing",
    failures={"ValueError": "refuses-too-much", "AssertionError": "refuses-too-much"},
)
def one_stage_as_many_stages_as_layers_layers(answer, draw):
    count = draw.integer(3, 7)
    costs = [draw.integer(1, 20) for _ in range(count)]
    expect(_cuts_of(answer, costs, 1), [], what="the cuts for one stage")
    expect(_cuts_of(answer, costs, count), list(range(1, count)), what="the cuts of single layers")
    cost = draw.integer(1, 9)
    free = [0] * count
    for costs, stages in (([0, 0, cost, *free, cost, 0], 3), ([cost, *free], 3), (free, 2)):
        _must_be_best(_cuts_of(answer, costs, stages), costs, stages, "not-best")


@cutting.requires(
    "many random lists, of whole numbers and of fractions",
    failures={"cannot be interpreted as an integer": "fractions"},
    needs_earlier=True,
)
def many_random_lists(answer, draw):
    for unit, likely in ((1, "not-best"), (2**-8, "fractions"), (2**-23, "too-coarse")):
        for _ in range(12):
            costs = [unit * draw.integer(0, 99) for _ in range(draw.integer(6, 11))]
            stages = draw.integer(2, 5)
            _must_be_best(_cuts_of(answer, costs, stages), costs, stages, likely)


@cutting.requires("96 layers in 12 stages, in seconds", seconds=5, needs_earlier=True)
def with_96_layers_in_12_stages(answer, draw):
    costs = [draw.integer(1, 1000) for _ in range(96)]
    _must_be_best(_cuts_of(answer, costs, 12), costs, 12, "not-best")


@cutting.requires("stages that cannot be filled are refused")
def stages_that_cannot_be_filled_are_refused(answer, draw):
    layers = draw.integer(2, 6)
    too_many = (layers, layers + 1), (layers, layers + draw.integer(2, 5))
    for count, stages in (*too_many, (layers, 0), (layers, -1), (0, 1)):
        expected = f"ValueError for {stages} stages of {count} layers"
        try:
            got = answer([draw.integer(1, 9) for _ in range(count)], stages)
        except ValueError as error:
            message = str(error)
            by_accident = ("arg is an empty", "iterable argument is empty", "unpack", "not in list")
            if not message or any(part in message for part in by_accident):
                raise Wrong("accident", expected=expected, got=f"ValueError({message!r})") from None
        except Exception as error:  # noqa: BLE001 - any other error is the wrong one
            got = f"{type(error).__name__}: {error}"
            raise Wrong("other-error", expected=expected, got=got) from None
        else:
            raise Wrong("not-refused", expected=expected, got=got)
