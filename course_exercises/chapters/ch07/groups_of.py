"""Exercise 7.1, `groups_of`: what it asks for, and how it is checked."""

import itertools
import math
from collections.abc import Sequence

import torch

from course_exercises.authoring import Exercise, Wrong, expect, expect_type
from course_exercises.chapters.ch07.shared import NAMES, blaming

Sizes = dict[str, int]
Groups = dict[str, list[list[int]]]

grouping = Exercise(
    "7.1",
    "groups_of",
    points=2,
    minutes=20,
    kind="first",
    parameters=("sizes",),
    hints=[
        (
            "Write the eight ranks of a 2 x 2 x 2 grid with their coordinates in a table. Which ranks "
            "have the same coordinates as rank 0 but for the first? What is the distance between them?"
        ),
        (
            "One step in a dimension changes the rank's number by a fixed stride: 1 for the last one. For "
            "any other it is the product of the sizes of all that come after it."
        ),
        (
            "In each dimension, a group's first rank has the coordinate 0 there. Go through all ranks "
            "in ascending order, keep those, and add 0, 1, 2 ... strides to each."
        ),
    ],
    misconceptions={
        "another-form": "Your result has another form. Return a dict that has, for each name in `sizes`, a list of groups; "
        'a group is a list of whole numbers: {"data": [[0, 2], [1, 3]], "tensor": [[0, 1], [2, 3]]} for 2 x 2 '
        "ranks. `//` gives whole numbers, `/` does not.",
        "order-of-groups": "You have the right groups in another order. Let ranks ascend within a group, and groups by "
        "their first rank: all ranks have to call `new_group` in the same order.",
        "consecutive": "Every group is a run of consecutive ranks. That is so for the last dimension alone: in any other, "
        "take ranks that are as far apart as the product of the sizes after it.",
        "order-of-dimensions": "Your groups are those of another order of the dimensions, or stand under another "
        "dimension's name. Number the ranks so that the last dimension in `sizes` changes fastest, whatever it is called.",
        "other-coordinates": "Some ranks in one group differ in another coordinate than that of the dimension. Put those "
        "into a group that agree in all other coordinates: as many as the dimension's size, and as far apart as "
        "the product of the sizes of all dimensions after it.",
        "not-a-partition": "A dimension's groups leave a rank out, have one twice, or have one that is not in the grid. Put "
        "every rank into exactly one group of each dimension: where the size is 1, each is alone in one.",
        "any-number": "Your function is right for three dimensions, and not for another number of them. `sizes` "
        "may have any number: go through it in a loop.",
    },
)


def _groups(sizes: Sizes, slowest_first: Sequence[str] | None = None) -> Groups:
    """The groups where ranks are numbered with the last of `slowest_first` changing fastest."""
    names = list(slowest_first or sizes)
    grid = torch.arange(math.prod(sizes.values())).reshape([sizes[name] for name in names])
    lines = {n: grid.movedim(names.index(n), -1).reshape(-1, sizes[n]) for n in sizes}
    return {name: lines[name].tolist() for name in sizes}


def _consecutive(sizes: Sizes) -> Groups:
    ranks = torch.arange(math.prod(sizes.values()))
    return {name: ranks.reshape(-1, size).tolist() for name, size in sizes.items()}


def _in_order(groups: Groups) -> Groups:
    return {name: sorted(map(sorted, groups[name])) for name in groups}


def _renamed_or_reordered(got: Groups, sizes: Sizes) -> bool:
    found, right = _in_order(got), _groups(sizes)
    renamed = any(list(p) == list(found.values()) for p in itertools.permutations(right.values()))
    return renamed or any(found == _groups(sizes, p) for p in itertools.permutations(sizes))


def _differ_elsewhere(got: Groups, sizes: Sizes) -> bool:
    """Whether ranks of one group differ in another coordinate than their dimension's."""
    places = list(itertools.product(*map(range, sizes.values())))

    def others(dim: int, group: list[int]) -> set[tuple]:
        return {places[rank][:dim] + places[rank][dim + 1 :] for rank in group}

    return any(len(others(i, group)) > 1 for i, name in enumerate(sizes) for group in got[name])


def _no_partition(got: Groups, sizes: Sizes) -> bool:
    ranks = list(range(math.prod(sizes.values())))
    return any(sorted(itertools.chain(*groups)) != ranks for groups in got.values())


def _in_form(got: object, sizes: Sizes) -> Groups:
    """An answer as lists of lists, whatever sequences it is made of."""
    expect_type(got, dict, likely=None if got is None else "another-form")
    expect(set(got), set(sizes), what="the keys", likely={"another-form": True})
    for groups in got.values():
        rows = isinstance(groups, (list, tuple)) and all(
            isinstance(group, (list, tuple, range)) for group in groups
        )
        if not rows or any(isinstance(rank, float) for group in groups for rank in group):
            raise Wrong("another-form", expected="a list of lists of whole numbers", got=groups)
    return {name: [list(group) for group in got[name]] for name in sizes}


def _check_groups(answer, sizes: Sizes) -> None:
    got, right = _in_form(answer(dict(sizes)), sizes), _groups(sizes)
    likely = {
        "order-of-groups": lambda got: _in_order(got) == right,
        "consecutive": _consecutive(sizes),
        "order-of-dimensions": lambda got: _renamed_or_reordered(got, sizes),
        "other-coordinates": lambda got: _differ_elsewhere(got, sizes),
        "not-a-partition": lambda got: _no_partition(got, sizes),
    }
    expect(got, right, what=f"sizes {sizes}", likely=likely)


def _sizes(draw, names: Sequence[str]) -> Sizes:
    """Different sizes, so that no two mistakes look the same."""
    return dict(zip(names, draw.sample([2, 3, 4, 5, 6], len(names)), strict=True))


@grouping.requires("the groups of data 2, pipeline 3, tensor 4")
def the_groups_of_data_2(answer, draw):
    _check_groups(answer, {"data": 2, "pipeline": 3, "tensor": 4})


@grouping.requires("other sizes, in another order of the dimensions")
def other_sizes_in_another_order(answer, draw):
    _check_groups(answer, _sizes(draw, NAMES))
    order = draw.choice(list(itertools.permutations(NAMES))[1:])
    for sizes in (_sizes(draw, order), dict.fromkeys(order, 2)):
        _check_groups(answer, sizes)


@grouping.requires("dimensions of size 1")
def dimensions_of_size_1(answer, draw):
    size, other = draw.integer(2, 6), draw.integer(2, 4)
    for sizes in ((size, 1, other), (1, size, 1), (1, 1, 1)):
        _check_groups(answer, dict(zip(NAMES, sizes, strict=True)))


@grouping.requires(
    "one dimension, two, and four", failures={"exception": "any-number"}, needs_earlier=True
)
def one_dimension_two_and_four(answer, draw):
    with blaming("any-number"):
        for count in (1, 2, 4):
            names = draw.sample(["replica", "data", "pipeline", "context", "tensor"], count)
            _check_groups(answer, _sizes(draw, names))
