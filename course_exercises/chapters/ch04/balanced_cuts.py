"""Exercise 4.3, `balanced_cuts`: what it asks for, and how it is checked."""

from itertools import pairwise
from operator import index

from course_exercises.authoring import Exercise, Wrong, expect, expect_type
from course_exercises.chapters.ch04.shared import Cuts, best_cuts, loads_of

cutting = Exercise(
    "4.3",
    "balanced_cuts",
    points=2,
    minutes=45,
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
        "not-cuts": "Return where to cut: stages - 1 indices in ascending order, each once, from 1 to the number of "
        "layers - 1. Every stage has a layer, so even a cut that saves no time is needed. The sizes, contents or costs "
        "of the stages are no cuts, and neither are the ends of the chain.",
        "cut-after": "Your cuts are one too small: a cut c stands before layer c, so that "
        "costs[:c] is the first stage of one cut.",
        "not-best": "There is a cut whose slowest stage is faster. Rules that look at one stage at a time miss it: "
        "equally many layers, an equal share of the costs, halves of halves. So does another measure, such as the "
        "least variance, and another order of the layers. Find the best of all cuts.",
        "too-coarse": "Your cuts are right for large whole numbers, and wrong for fractions or for small ones, such as "
        "seconds of 0.00001: a search over whole numbers, one that ends at a fixed width, or rounded costs, cannot "
        "tell them apart. Try the sums that occur.",
        "too-slow": "This tries too many cuts. Solve each smaller problem once and remember it.",
        "unhashable": "`cache` looks its results up by the arguments, and a list cannot be looked up. "
        "Cache a function inside yours: its arguments are whole numbers, and it sees `costs`.",
        "refusal": "Raise a ValueError with a message of your own, before anything else goes wrong, where there are "
        "more stages than layers or fewer than one, and only there: a single stage, or as many as layers, can be cut.",
    },
    things="cuts",
    failures={
        "endless": "too-slow",
        "RecursionError": "too-slow",
        "unhashable type": "unhashable",
    },
)

# Found by a search; tests/checks/test_checks_ch04.py shows that simple rules miss the best cut of each list.
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


def _cuts_of(answer, costs: list[float], stages: int) -> Cuts:
    """The answer's cuts, which must be cuts."""
    given = list(costs)
    got = answer(given, stages)
    if given != costs:
        raise Wrong("list-changed", expected=costs, got=given)
    expect_type(got, (list, tuple), likely=None if got is None else "not-cuts")
    layers, what = len(costs), f"{stages - 1} cuts of {len(costs)} layers"
    try:
        cuts = [index(cut) for cut in got]
    except TypeError:
        raise Wrong("not-cuts", expected=what, got=got) from None
    if len(cuts) != stages - 1 or any(a >= b for a, b in pairwise([0, *cuts, layers])):
        after = cuts and [cut + 1 for cut in cuts] == best_cuts(costs, stages)
        raise Wrong("cut-after" if after else "not-cuts", expected=what, got=got)
    return cuts


def _must_be_best(answer, costs: list[float], stages: int, likely: str = "not-best") -> None:
    got = _cuts_of(answer, costs, stages)
    cuts = best_cuts(costs, stages)
    slowest, best = max(loads_of(costs, got)), max(loads_of(costs, cuts))
    if slowest > best * (1 + 1e-9):
        chain = costs if len(costs) <= 20 else f"{len(costs)} layers"
        after = len(set(costs)) == 1 and [cut + 1 for cut in got] == cuts
        raise Wrong(
            "cut-after" if after else likely,
            expected=f"slowest stage {best:g} of {chain} in {stages} stages",
            got=f"{slowest:g} with cuts {got}",
        )


@cutting.requires("layers that cost the same")
def layers_that_cost_the_same(answer, draw):
    cost = draw.integer(2, 9)
    for stages in draw.sample(range(2, 6), 3):
        size = draw.integer(2, 4)
        _must_be_best(answer, [cost] * (size * stages), stages)


@cutting.requires("layers of different costs, on which simple rules fail")
def layers_of_different_costs(answer, draw):
    for costs, stages in draw.sample(MISLEADING, 3):
        factor = draw.integer(1, 9)
        _must_be_best(answer, [factor * cost for cost in costs], stages)


@cutting.requires(
    "one stage; as many stages as layers; layers that cost nothing",
    failures={"ValueError": "refusal", "AssertionError": "refusal"},
)
def one_stage_as_many_stages_as_layers_layers(answer, draw):
    count = draw.integer(3, 7)
    costs = [draw.integer(1, 20) for _ in range(count)]
    expect(_cuts_of(answer, costs, 1), [], what="the cuts for one stage")
    expect(_cuts_of(answer, costs, count), list(range(1, count)), what="the cuts of single layers")
    cost = draw.integer(1, 9)
    free = [0] * count
    for costs, stages in (([0, 0, cost, *free, cost, 0], 3), ([cost, *free], 3), (free, 2)):
        _must_be_best(answer, costs, stages)


@cutting.requires(
    "many random lists, of whole numbers and of fractions",
    failures={"cannot be interpreted as an integer": "too-coarse"},
    needs_earlier=True,
)
def many_random_lists(answer, draw):
    for unit, lists in ((1, 12), (2**-8, 12), (2**-23, 48)):  # rounded, few small ones mislead
        likely = "not-best" if unit == 1 else "too-coarse"
        for _ in range(lists):
            costs = [unit * draw.integer(0, 99) for _ in range(draw.integer(6, 11))]
            stages = draw.integer(2, 5)
            _must_be_best(answer, costs, stages, likely)


@cutting.requires("96 layers in 12 stages, in seconds", seconds=5, needs_earlier=True)
def with_96_layers_in_12_stages(answer, draw):
    costs = [draw.integer(1, 1000) for _ in range(96)]
    _must_be_best(answer, costs, 12)


@cutting.requires("stages that cannot be filled are refused")
def stages_that_cannot_be_filled_are_refused(answer, draw):
    layers = draw.integer(2, 6)
    too_many = (layers, layers + 1), (layers, layers + draw.integer(2, 5))
    for count, stages in (*too_many, (layers, 0), (layers, -1), (0, 1)):
        expected = f"ValueError for {stages} stages of {count} layers"
        try:
            got = answer([draw.integer(1, 9) for _ in range(count)], stages)
        except Exception as error:  # noqa: BLE001 - any other error is the wrong one
            message = str(error)
            by_accident = ("arg is an empty", "iterable argument is empty", "unpack", "not in list")
            accident = not message or any(part in message for part in by_accident)
            if isinstance(error, ValueError) and not accident:
                continue
            got = f"{type(error).__name__}({message!r})"
        raise Wrong("refusal", expected=expected, got=got)
