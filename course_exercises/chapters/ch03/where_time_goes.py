"""Exercise 3.8, `where_time_goes`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise, Wrong, expect, expect_type

Spans = list[tuple[float, float]]

where_time_goes = Exercise(
    "3.8",
    "where_time_goes",
    points=2,
    minutes=20,
    kind="core",
    parameters=("step", "computing", "communicating"),
    hints=[
        (
            "Begins and ends cut the step into pieces. What is true of a piece from its left to its right end? And "
            "what does adding up the lengths of spans say where two overlap?"
        ),
        (
            "Sort all begins and ends that lie in the step. Between two neighbours nothing begins or ends: there the "
            "rank computes or does not, and communicates or does not."
        ),
        (
            "For each piece, ask of both lists whether one of their spans covers it. The two answers say which of the "
            "four the piece's length belongs to; a piece in which both happen counts as compute and as hidden."
        ),
    ],
    misconceptions={
        "counted-twice": "Where spans of one list overlap, you count the same seconds more than once. Operators lie "
        "inside each other, and two all-reduces can be under way: a moment counts once, however many spans cover it.",
        "gaps-counted": "You count from the first begin to the last end, with the gaps between spans. Leave the gaps out.",
        "beyond-the-step": "You count seconds before the step begins, or after it ends. Cut a span that reaches beyond "
        "the step, and leave out one that lies outside.",
        "edges-left-out": "You leave out spans that reach beyond the step. Their part inside of it counts: cut them.",
        "compute-without-hidden": "You count as compute only what has no communication beside it. Compute is all that the rank "
        "computes; hidden seconds are a part of it.",
        "shares": "Return seconds, not shares of the step.",
        "all-exposed": "You count all communication as exposed. Exposed is what no computing hides: leave out the "
        "seconds in which the rank computes.",
        "all-hidden": "You count all communication as hidden. Only the seconds in which the rank also computes are hidden.",
        "hidden-taken-twice": "Compute has the hidden seconds already. You take them from the step a second time, so "
        "idle is too small by them.",
        "exposed-is-idle": "You count exposed communication as idle too. In idle seconds the rank does neither.",
        "in-one-order": "It is right where spans come by their begin. They come in any order: an operator is noted "
        "when it ends. Sort them.",
        "no-spans": "A list may be empty: a step on one rank communicates nothing.",
    },
)


TICK = 0.5  # seconds; all times of the checks are whole ticks, so that floats are exact


def _covered(spans: Spans, step: tuple[int, int]) -> list[int]:
    """The ticks of the step that spans cover, once for each span."""
    within = (range(max(begin, step[0]), min(end, step[1])) for begin, end in spans)
    return [tick for ticks in within for tick in ticks]


def _parts(step: tuple[int, int], computing: Spans, communicating: Spans) -> dict[str, float]:
    """The right answer, in seconds, by counting ticks."""
    computes, communicates = (set(_covered(spans, step)) for spans in (computing, communicating))
    ticks = {
        "compute": len(computes),
        "hidden": len(computes & communicates),
        "exposed": len(communicates - computes),
        "idle": step[1] - step[0] - len(computes | communicates),
    }
    return {name: count * TICK for name, count in ticks.items()}


def _whole(spans: Spans, step: tuple[int, int]) -> Spans:
    """Those that do not reach beyond the step."""
    return [(begin, end) for begin, end in spans if step[0] <= begin and end <= step[1]]


def _with_gaps(spans: Spans) -> float:
    return (max(end for _, end in spans) - min(begin for begin, _ in spans)) * TICK if spans else 0


def _in_seconds(spans: Spans) -> list[tuple[float, float]]:
    return [(begin * TICK, end * TICK) for begin, end in spans]


def _mistakes(step, computing: Spans, communicating: Spans) -> dict[str, dict[str, float]]:
    """What each mistake gives, by the part that shows it, where that part is not right."""
    right = _parts(step, computing, communicating)
    uncut = _parts((-(10**3), 10**3), computing, communicating)
    both = right["hidden"] + right["exposed"]
    twice = [len(_covered(spans, step)) * TICK for spans in (computing, communicating)]
    computes = set(_covered(computing, step))
    hidden = sum(tick in computes for tick in _covered(communicating, step)) * TICK
    inside = _parts(step, *(_whole(spans, step) for spans in (computing, communicating)))
    given = {
        "beyond-the-step": {name: uncut[name] for name in ("compute", "hidden", "exposed")},
        "counted-twice": {
            "compute": twice[0],
            "hidden": hidden,
            "exposed": right["exposed"] + twice[1] - both,
        },
        "edges-left-out": {name: inside[name] for name in ("compute", "exposed")},
        "compute-without-hidden": {"compute": right["compute"] - right["hidden"]},
        "shares": {name: right[name] / (step[1] - step[0]) / TICK for name in ("compute", "idle")},
        "gaps-counted": {"compute": _with_gaps(computing)},
        "all-exposed": {"exposed": both},
        "all-hidden": {"hidden": both},
        "hidden-taken-twice": {"idle": right["idle"] - right["hidden"]},
        "exposed-is-idle": {"idle": right["idle"] + right["exposed"]},
    }
    return {
        name: {part: value for part, value in parts.items() if value != right[part]}
        for name, parts in given.items()
    }


def _check(answer, step, computing: Spans, communicating: Spans, likely=None) -> None:
    """`likely` comes behind what the values tell."""
    handed = _in_seconds(computing), _in_seconds(communicating)
    [seconds] = _in_seconds([step])
    got = answer(seconds, *handed)
    if handed != (_in_seconds(computing), _in_seconds(communicating)):
        raise Wrong("list-changed", expected="the same lists", got="another order or other spans")
    expect_type(got, dict)
    right = _parts(step, computing, communicating)
    sorts = got != right and answer(seconds, *map(sorted, handed)) == right
    signs = {"in-one-order": sorts} | {
        name: any(got.get(part) == value for part, value in parts.items())
        for name, parts in _mistakes(step, computing, communicating).items()
    }
    what = f"computing {handed[0]}, communicating {handed[1]}, step {seconds}"
    expect(got, right, what=what, likely=signs | (likely or {}))


def _drawn(draw, change=lambda *step: step) -> tuple[tuple[int, int], Spans, Spans]:
    """A step that computes twice, with an all-reduce that begins beside the second and ends after it,
    changed by `change`, in which no two mistakes give the same number."""
    while True:
        begin = draw.integer(1, 5)
        first = begin + 2, begin + draw.integer(4, 9)
        second = first[1] + draw.integer(2, 9), first[1] + draw.integer(12, 20)
        communication = second[1] - draw.integer(1, 7), second[1] + draw.integer(2, 9)
        step = begin, communication[1] + draw.integer(8, 15)
        case = change(step, [first, second], [communication])
        parts = [part for parts in _mistakes(*case).values() for part in parts.items()]
        if len(set(parts)) == len(parts):
            return case


@where_time_goes.requires(
    "an all-reduce that begins beside computing and ends after it", at_home=True
)
def an_all_reduce_that_begins_beside_computing(answer, draw):
    _check(answer, *_drawn(draw))


@where_time_goes.requires("operators inside of operators")
def operators_inside_of_operators(answer, draw):
    def nest(step, computing, communicating):
        begin, end = computing[0]
        inner = (begin, end - 1), (begin, begin + 1), (begin, end)
        return step, [computing[0], *inner[: draw.integer(1, 3)], computing[1]], communicating

    _check(answer, *_drawn(draw, nest))


@where_time_goes.requires("all-reduces under way together")
def all_reduces_under_way_together(answer, draw):
    def overlap(step, computing, communicating):
        [(begin, end)] = communicating
        others = (begin, begin + 1), (end - 1, end + draw.integer(1, 3))  # hidden, and exposed
        return step, computing, [(begin, end), *others]

    _check(answer, *_drawn(draw, overlap))


@where_time_goes.requires("spans that reach beyond the step, or lie outside of it")
def spans_that_reach_beyond_the_step(answer, draw):
    def beyond(step, computing, communicating):
        early = [(step[0] - 9, step[0] - 6), (step[0] - draw.integer(2, 5), step[0] + 1)]
        late = [(step[1] - 2, step[1] + draw.integer(1, 5)), (step[1] + 7, step[1] + 9)]
        if draw.integer(0, 1):
            return step, [*early, *computing], [*communicating, *late]
        return step, [*computing, *late], [*early, *communicating]

    for _ in range(3):
        _check(answer, *_drawn(draw, beyond))


@where_time_goes.requires("spans in any order")
def spans_in_any_order(answer, draw):
    def mix(step, computing, communicating):
        [(begin, end)], inner = communicating, computing[1][0]
        spans = [(begin, end), (begin + 1, end + 1), (step[0], step[0] + 1)]
        return step, draw.sample([*computing, (inner, inner + 1)], 3), draw.sample(spans, 3)

    for _ in range(4):
        _check(answer, *_drawn(draw, mix))


@where_time_goes.requires(
    "a list without a span", failures={"exception": "no-spans"}, needs_earlier=True
)
def a_list_without_a_span(answer, draw):
    step, computing, communicating = _drawn(draw)
    for lists in ((computing, []), ([], communicating), ([], [])):
        _check(answer, step, *lists, {"no-spans": True})
