"""Exercise 7.2, `RankGrid`: what it asks for, and how it is checked."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral

from course_exercises.authoring import Exercise, Wrong, expect, same
from course_exercises.chapters.ch07.shared import Sizes

coordinates = Exercise(
    "7.2",
    "RankGrid",
    points=1,
    minutes=10,
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
        "other-order": "Your coordinates are those of another order of the dimensions. Return (d, p, t), where tensor "
        "changes fastest from rank to rank, and data slowest.",
        "not-an-int": "You give a number that is not an `int`. `/` gives fractions, and a tensor is not found in a set or "
        "a dict: take `//` and `%` of ints, which give ints.",
        "another-grid": "These are the coordinates of another grid, which was asked before or made since. "
        "Keep what a grid knows in `self`, not in the class or the module.",
        "wrong-stride": "These are not the coordinates of the rank. One step in data is pp * tp ranks, one in pipeline tp: "
        "divide by that, and take the remainder by the dimension's own size.",
        "back-is-wrong": "`rank` does not undo `coordinates`. The rank is (d * pp + p) * tp + t.",
        "refuses-what-is-inside": "You refuse a rank or a coordinate that is inside the grid. 0 is inside, and so "
        "is the size less one.",
        "not-refused": "You accept what is outside the grid, or raise another exception than a ValueError. Compare every "
        "number with 0 and with its own size before you compute: `//` and `%` turn also a negative one into "
        "what belongs to another rank.",
    },
)


def _all_coordinates(sizes: Sizes, slowest_first: Sizes = (0, 1, 2)) -> list[tuple]:
    """(d, p, t) of every rank, where the dimensions are numbered in the given order."""
    places = itertools.product(*(range(sizes[dim]) for dim in slowest_first))
    return [tuple(place[slowest_first.index(dim)] for dim in range(3)) for place in places]


def _has_another_type(numbers: Iterable) -> bool:
    return any(not isinstance(number, Integral) for number in numbers)  # NumPy's are


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

    likely = {
        "another-grid": another_grids,
        "not-an-int": lambda got: _has_another_type(itertools.chain(*got)),
        "other-order": lambda got: any(
            same(got, other) for other in (*others, [place[::-1] for place in right])
        ),
        "wrong-stride": lambda got: None not in got,
    }
    expect(got, right, each="rank", what=f"a grid of {sizes}", likely=likely)
    if _has_another_type(itertools.chain(*got)):
        raise Wrong("not-an-int", expected="three ints", got=f"{got[0]!r}")


def _check_back(answer, sizes: Sizes) -> None:
    grid = answer(*sizes)
    got = [grid.rank(*place) for place in _all_coordinates(sizes)]
    likely = {"back-is-wrong": lambda got: None not in got}
    expect(got, list(range(len(got))), each="place", what=f"a grid of {sizes}", likely=likely)
    if _has_another_type(got):
        raise Wrong("not-an-int", expected="an int", got=f"{got[0]!r}")


def _must_refuse(question: Callable, *numbers: int) -> None:
    try:
        got = f"{question(*numbers)} for {', '.join(map(str, numbers))}"
    except ValueError:
        return
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        got = type(error).__name__
    raise Wrong("not-refused", expected="a ValueError", got=got)


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
