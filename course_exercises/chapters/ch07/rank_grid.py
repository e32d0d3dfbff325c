"""Exercise 7.2, `RankGrid`: what it asks for, and how it is checked."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

from course_exercises.authoring import Exercise, Wrong, expect, same
from course_exercises.chapters.ch07.shared import Sizes

coordinates = Exercise(
    "7.2",
    "RankGrid",
    points=1,
    minutes=8,
    kind="first",
    parameters=("dp", "pp", "tp"),
    hints=[
        (
            "How do you read hours, minutes and seconds out of a number of seconds? The grid is "
            "the same with other sizes."
        ),
        (
            "The fastest coordinate is a remainder, the slowest a quotient, and the one between them "
            "is a remainder of a quotient."
        ),
        (
            "t is the remainder of the rank by tp. What is left after the division by tp is d * pp + p: "
            "take it apart in the same way. Before that, compare the rank with the size of the grid; "
            "going back, compare each coordinate with its own size."
        ),
    ],
    misconceptions={
        "other-order": "The coordinates are those of another order of the dimensions: tensor changes "
        "fastest, data slowest.",
        "reversed": "The right coordinates in reverse: asked is (d, p, t).",
        "fractions": "Coordinates are whole numbers, and `/` gives fractions: `//` is the quotient "
        "without them.",
        "not-an-int": "The right number, but not an `int`. A float cannot be an index, and a tensor is not "
        "found in a set or a dict. `//` and `%` of ints give ints.",
        "remainder-missing": "A coordinate is larger than its size: it lacks the remainder.",
        "another-grid": "These are the coordinates of another grid, which was asked before or made since. "
        "What a grid knows belongs to `self`, not to the class or the module.",
        "wrong-stride": "The coordinates are wrong where the sizes differ. A data step is pp * tp "
        "ranks, a pipeline step tp.",
        "back-is-wrong": "`rank` does not undo `coordinates`. The rank is (d * pp + p) * tp + t.",
        "refuses-what-is-inside": "A rank or a coordinate inside the grid is refused. 0 is inside, and so "
        "is the size less one.",
        "no-error": "A rank, or a coordinate, outside the grid is accepted without a word. `//` and `%` "
        "give numbers for it that belong to another rank.",
        "negative": "A negative number is accepted: Python's `%` turns -1 into the last coordinate.",
        "other-error": "What is outside the grid ends in another exception than a ValueError.",
    },
)


def _all_coordinates(sizes: Sizes, slowest_first: Sizes = (0, 1, 2)) -> list[tuple]:
    """(d, p, t) of every rank, where the dimensions are numbered in the given order."""
    places = itertools.product(*(range(sizes[dim]) for dim in slowest_first))
    return [tuple(place[slowest_first.index(dim)] for dim in range(3)) for place in places]


def _check_coordinates(grid, sizes: Sizes, beside: Sequence[Sizes] = ()) -> None:
    """Asks a grid for all its coordinates; `beside` are the sizes of other grids that there are."""
    right = _all_coordinates(sizes)
    got = [grid.coordinates(rank) for rank in range(math.prod(sizes))]
    others = [_all_coordinates(sizes, order) for order in itertools.permutations(range(3))][1:]

    def another_grids(got: list[tuple]) -> bool:
        return any(
            all(same(g, w) for g, w in zip(got, _all_coordinates(other), strict=False))
            for other in beside
        )

    def too_large(got: list[tuple]) -> bool:
        return any(c >= s for place in got for c, s in zip(place, sizes, strict=True))

    likely = {
        "another-grid": another_grids,
        "fractions": lambda got: any(c != int(c) for place in got for c in place),
        "reversed": [place[::-1] for place in right],
        "other-order": lambda got: any(same(got, other) for other in others),
        "remainder-missing": too_large,
        "wrong-stride": len(set(sizes)) == 3,
    }
    expect(got, right, each="rank", likely=likely)
    _check_ints(number for place in got for number in place)


def _check_ints(numbers: Iterable[Any]) -> None:
    for number in numbers:
        if not isinstance(number, Integral):  # NumPy's are
            raise Wrong("not-an-int", expected="an int", got=f"a {type(number).__name__}")


def _check_back(answer, sizes: Sizes) -> None:
    grid = answer(*sizes)
    got = [grid.rank(*place) for place in _all_coordinates(sizes)]
    expect(got, list(range(len(got))), each="place", likely={"back-is-wrong": True})
    _check_ints(got)


def _must_refuse(question: Callable, *numbers: int) -> None:
    negative = min(numbers) < 0
    try:
        got = question(*numbers)
    except ValueError:
        return
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        raise Wrong("other-error", expected="a ValueError", got=type(error).__name__) from None
    what = f"{got} for {', '.join(map(str, numbers))}"
    raise Wrong("negative" if negative else "no-error", expected="a ValueError", got=what)


INSIDE = {"ValueError": "refuses-what-is-inside"}


@coordinates.requires("the coordinates of every rank of 2 x 3 x 4", failures=INSIDE)
def the_coordinates_of_every_rank_of_2_x(answer, draw):
    _check_coordinates(answer(2, 3, 4), (2, 3, 4))


@coordinates.requires("other sizes, and sizes of 1", failures=INSIDE)
def other_sizes_and_sizes_of_1(answer, draw):
    larger = tuple(draw.sample([2, 3, 4, 5, 6], 3))
    lines = (1, draw.integer(2, 6), 1), larger  # the larger is made last: it has all ranks of both
    grids = [answer(*sizes) for sizes in lines]
    for grid, sizes in zip(grids, lines, strict=True):
        _check_coordinates(grid, sizes, beside=[(2, 3, 4), *(s for s in lines if s != sizes)])


@coordinates.requires("back to the rank", failures=INSIDE)
def back_to_the_rank(answer, draw):
    for sizes in (tuple(draw.sample([2, 3, 4, 5, 6], 3)), (2, 2, 2)):
        _check_back(answer, sizes)


@coordinates.requires("a ValueError for what is outside the grid")
def a_valueerror_for_what_is_outside_the_grid(answer, draw):
    sizes = tuple(draw.sample([2, 3, 4, 5, 6], 3))
    grid, ranks = answer(*sizes), math.prod(sizes)
    _must_refuse(grid.coordinates, ranks)
    for dim in range(3):
        _must_refuse(grid.rank, *(sizes[dim] if i == dim else 0 for i in range(3)))
    _must_refuse(grid.coordinates, -1)
    for dim in range(3):
        _must_refuse(grid.rank, *(-1 if i == dim else 0 for i in range(3)))
    for dim in range(3):  # the others bring the rank, or the sum, above 0
        _must_refuse(grid.rank, *(-1 if i == dim else sizes[i] - 1 for i in range(3)))
