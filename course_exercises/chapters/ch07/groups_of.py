"""Exercise 7.1, `groups_of`: what it asks for, and how it is checked."""

import itertools
import math
from collections.abc import Callable, Iterable

import torch

from course_exercises.authoring import Exercise, Wrong, expect, expect_type
from course_exercises.chapters.ch07.shared import NAMES, Sizes

Groups = dict[str, list[list[int]]]

grouping = Exercise(
    "7.1",
    "groups_of",
    points=2,
    minutes=12,
    kind="first",
    parameters=("dp", "pp", "tp"),
    hints=[
        (
            "Write the eight ranks of a 2 x 2 x 2 grid with their coordinates in a table. Which ranks "
            "have the same d and the same p as rank 0? What is the distance between them?"
        ),
        (
            "One step in a dimension changes the rank's number by a fixed stride: 1 for tensor. For "
            "the next dimension it is the product of the sizes of all that change faster."
        ),
        (
            "In each dimension, a group's first rank has the coordinate 0 there. Go through all ranks "
            "in ascending order, keep those, and add 0, 1, 2 ... strides to each."
        ),
    ],
    misconceptions={
        "not-a-dict": "Asked is a dict with the keys data, pipeline and tensor.",
        "keys": "The keys are the names of the dimensions: data, pipeline and tensor.",
        "not-lists": "Each dimension has a list of groups, and a group is a list of ranks, also where "
        "there is only one group.",
        "not-whole-numbers": "A rank is a whole number: `/` makes a float of it, `//` does not.",
        "names-swapped": "These are the groups of another dimension: the names are mixed up.",
        "order-of-dimensions": "You number the ranks in another order of the dimensions. The rank is "
        "(d * pp + p) * tp + t: tensor changes fastest, data slowest.",
        "consecutive-everywhere": "Every group is a run of consecutive ranks. That is so for tensor "
        "alone: ranks that differ in d only are pp * tp apart.",
        "same-coordinate": "Your groups are the ranks with the *same* coordinate in the dimension. A "
        "group holds those that differ in this coordinate and agree in all others.",
        "one-group": "Only one group of a dimension is there. Every rank is in exactly one group of "
        "each dimension, so together its groups hold all ranks.",
        "size-one-left-out": "A dimension of size 1 has groups too: every rank is alone in one.",
        "not-a-partition": "A rank is in two groups of a dimension, or in none, or is no rank of the "
        "grid. The stride of a dimension is the product of the sizes of those that change faster.",
        "order-of-groups": "The right groups in another order: ranks ascend within a group, and groups by "
        "their first rank. All ranks have to call `new_group` in the same order.",
    },
    failures={"KeyError": "keys"},
)


def _groups(sizes: Sizes, slowest_first: tuple[str, ...] = NAMES) -> Groups:
    """The groups where ranks are numbered with the last of `slowest_first` changing fastest."""
    size = dict(zip(NAMES, sizes, strict=True))
    grid = torch.arange(math.prod(sizes)).reshape([size[name] for name in slowest_first])
    rows = {
        name: grid.movedim(slowest_first.index(name), -1).reshape(-1, size[name]) for name in NAMES
    }
    return {name: sorted(rows[name].tolist()) for name in NAMES}


def _same_coordinate(sizes: Sizes) -> Groups:
    grid = torch.arange(math.prod(sizes)).reshape(sizes)
    return {
        name: [part.flatten().tolist() for part in grid.unbind(dim)]
        for dim, name in enumerate(NAMES)
    }


def _consecutive(sizes: Sizes) -> Groups:
    ranks = torch.arange(math.prod(sizes))
    return {n: ranks.reshape(-1, s).tolist() for n, s in zip(NAMES, sizes, strict=True)}


def _in_order(groups: Groups) -> Groups:
    return {name: sorted(sorted(group) for group in groups[name]) for name in NAMES}


def _check_groups(answer, sizes: Sizes) -> None:
    got = answer(*sizes)
    expect_type(got, dict, likely=None if got is None else "not-a-dict")
    expect(set(got), set(NAMES), what="the keys", likely={"keys": True})
    for name in NAMES:
        if not _is_list_of_lists(got[name]):
            raise Wrong("not-lists", expected="a list of lists of ranks", got=got[name])
        if any(isinstance(rank, float) for group in got[name] for rank in group):
            raise Wrong("not-whole-numbers", expected="whole numbers", got=got[name])
    right, everyone = _groups(sizes), list(range(math.prod(sizes)))

    def lists_all(test: Callable[[list[int]], bool]) -> Callable[[Groups], bool]:
        return lambda got: any(test(sorted(r for group in got[n] for r in group)) for n in NAMES)

    def another_order(got: Groups) -> bool:
        orders = list(itertools.permutations(NAMES))[1:]
        return any(_in_order(got) == _groups(sizes, order) for order in orders)

    def renamed(got: Groups) -> bool:
        values = [_in_order(got)[name] for name in NAMES]
        return any(list(p) == values for p in itertools.permutations(right.values()))

    likely = {
        "order-of-groups": lambda got: _in_order(got) == right,
        "size-one-left-out": lambda got: any(
            size == 1 and not got[n] for n, size in zip(NAMES, sizes, strict=True)
        ),
        "same-coordinate": _same_coordinate(sizes),
        "consecutive-everywhere": _consecutive(sizes),
        "names-swapped": renamed,
        "order-of-dimensions": another_order,
        "one-group": lambda got: any(len(got[n]) == 1 < len(right[n]) for n in NAMES),
        "not-a-partition": lists_all(lambda ranks: ranks != everyone),
    }
    expect({n: _as_lists(got[n]) for n in NAMES}, right, likely=likely)


def _is_list_of_lists(groups: object) -> bool:
    if not isinstance(groups, (list, tuple)):
        return False
    return all(isinstance(group, (list, tuple, range)) for group in groups)


def _as_lists(groups: Iterable) -> list:
    """Groups as lists of lists, whatever sequences they came as."""
    return [list(g) if isinstance(g, (tuple, range)) else g for g in groups]


@grouping.requires("the groups of 2 x 3 x 4 ranks")  # where no two mistakes look the same
def the_groups_of_2_x_3_x_4(answer, draw):
    _check_groups(answer, (2, 3, 4))


@grouping.requires("other sizes")
def other_sizes(answer, draw):
    for sizes in (tuple(draw.sample([2, 3, 4, 5, 6], 3)), (2, 2, 2)):
        _check_groups(answer, sizes)


@grouping.requires("dimensions of size 1")
def dimensions_of_size_1(answer, draw):
    size, other = draw.integer(2, 6), draw.integer(2, 4)
    for sizes in ((size, 1, other), (1, size, 1), (1, 1, 1)):
        _check_groups(answer, sizes)
