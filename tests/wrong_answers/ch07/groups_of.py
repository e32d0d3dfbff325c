"""Answers to 7.1, `groups_of`: wrong in a plausible way, or right in another."""

import itertools
import math

import torch

from tests.wrong_answers import right, wrong


@right("7.1")
def lays_out_a_tensor(sizes):
    grid = torch.arange(math.prod(sizes.values())).reshape(*sizes.values())
    rows = {name: grid.movedim(axis, -1) for axis, name in enumerate(sizes)}
    return {name: row.reshape(-1, sizes[name]).tolist() for name, row in rows.items()}


@right("7.1")
def collects_by_the_other_coordinates(sizes):
    groups = {name: {} for name in sizes}
    for rank, place in enumerate(itertools.product(*map(range, sizes.values()))):
        for axis, name in enumerate(sizes):
            groups[name].setdefault(place[:axis] + place[axis + 1 :], []).append(rank)
    return {name: [*found.values()] for name, found in groups.items()}


@wrong("7.1", names="any-number")
def takes_three_dimensions_for_granted(sizes):
    _, _, _ = sizes
    return lays_out_a_tensor(sizes)


@wrong("7.1", names="order-of-dimensions")
def numbers_them_as_the_lesson_does(sizes):
    usual = {name: sizes[name] for name in ("data", "pipeline", "tensor")}
    return lays_out_a_tensor(usual)


@wrong("7.1", names="order-of-dimensions")
def lets_the_first_change_fastest(sizes):
    return lays_out_a_tensor(dict(reversed(sizes.items())))


@wrong("7.1", names="another-form")
def returns_lists_alone(sizes):
    return [*lays_out_a_tensor(sizes).values()]


@wrong("7.1", names="another-form")
def gives_the_groups_of_rank_0(sizes):
    return {name: groups[0] for name, groups in lays_out_a_tensor(sizes).items()}


@wrong("7.1", names="consecutive")
def cuts_runs(sizes):
    ranks = torch.arange(math.prod(sizes.values()))
    return {name: ranks.reshape(-1, size).tolist() for name, size in sizes.items()}


@wrong("7.1", names="other-coordinates")
def collects_equal_coordinates(sizes):
    grid = torch.arange(math.prod(sizes.values())).reshape(*sizes.values())
    parts = {name: grid.unbind(axis) for axis, name in enumerate(sizes)}
    return {name: [part.flatten().tolist() for part in parts[name]] for name in sizes}


@wrong("7.1", names="other-coordinates")
def goes_on_to_the_last_rank(sizes):
    ranks, stride, groups = math.prod(sizes.values()), 1, {}
    for name, size in reversed(sizes.items()):
        groups[name] = [list(range(first, ranks, stride)) for first in range(stride)]
        stride *= size
    return groups


@wrong("7.1", names="not-a-partition")
def leaves_lonely_ranks_out(sizes):
    lines = lays_out_a_tensor(sizes)
    return {name: [g for g in groups if len(g) > 1] for name, groups in lines.items()}


@wrong("7.1", names="order-of-groups")
def starts_at_the_end(sizes):
    return {name: groups[::-1] for name, groups in lays_out_a_tensor(sizes).items()}
