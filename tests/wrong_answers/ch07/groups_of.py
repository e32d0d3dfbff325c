"""Answers to 7.1, `groups_of`: wrong in a plausible way, or right in another."""

import torch

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch07.shared import NAMES


def _lines(dp, pp, tp, slowest_first=NAMES):
    """The groups where ranks are numbered in this order of the dimensions."""
    size = dict(zip(NAMES, (dp, pp, tp)))
    grid = torch.arange(dp * pp * tp).reshape([size[name] for name in slowest_first])
    return {
        name: grid.movedim(slowest_first.index(name), -1).reshape(-1, size[name]).tolist()
        for name in NAMES
    }


@right("7.1")
def lays_out_a_tensor(dp, pp, tp):
    return _lines(dp, pp, tp)


@right("7.1")
def loops_over_coordinates(dp, pp, tp):
    return {
        "data": [list(range(i, dp * pp * tp, pp * tp)) for i in range(pp * tp)],
        "pipeline": [
            [(d * pp + p) * tp + t for p in range(pp)] for d in range(dp) for t in range(tp)
        ],
        "tensor": [list(range(i * tp, i * tp + tp)) for i in range(dp * pp)],
    }


@wrong("7.1", names="not-a-dict")
def returns_three_lists(dp, pp, tp):
    return list(_lines(dp, pp, tp).values())


@wrong("7.1", names="keys")
def abbreviates_the_names(dp, pp, tp):
    return dict(zip(("dp", "pp", "tp"), _lines(dp, pp, tp).values()))


@wrong("7.1", names="not-lists")
def gives_the_groups_of_one_rank(dp, pp, tp):
    grid = torch.arange(dp * pp * tp).view(dp, pp, tp)
    lines = grid[:, 0, 0], grid[0, :, 0], grid[0, 0]
    return {name: line.tolist() for name, line in zip(NAMES, lines)}


@wrong("7.1", names="not-lists")
def collects_sets(dp, pp, tp):
    return {name: [set(line) for line in lines] for name, lines in _lines(dp, pp, tp).items()}


@wrong("7.1", names="names-swapped")
def swaps_data_and_tensor(dp, pp, tp):
    lines = _lines(dp, pp, tp)
    return {"data": lines["tensor"], "pipeline": lines["pipeline"], "tensor": lines["data"]}


@wrong("7.1", names="order-of-dimensions")
def lets_pipeline_change_slowest(dp, pp, tp):
    return _lines(dp, pp, tp, ("pipeline", "data", "tensor"))


@wrong("7.1", names="consecutive-everywhere")
def cuts_runs(dp, pp, tp):
    ranks = torch.arange(dp * pp * tp)
    return {n: ranks.reshape(-1, size).tolist() for n, size in zip(NAMES, (dp, pp, tp))}


@wrong("7.1", names="same-coordinate")
def collects_equal_coordinates(dp, pp, tp):
    grid = torch.arange(dp * pp * tp).reshape(dp, pp, tp)
    return {
        name: [part.flatten().tolist() for part in grid.unbind(dim)]
        for dim, name in enumerate(NAMES)
    }


@wrong("7.1", names="one-group")
def gives_rank_0s_groups(dp, pp, tp):
    return {name: groups[:1] for name, groups in _lines(dp, pp, tp).items()}


@wrong("7.1", names="size-one-left-out")
def leaves_lonely_ranks_out(dp, pp, tp):
    lines = _lines(dp, pp, tp)
    return {name: [g for g in groups if len(g) > 1] for name, groups in lines.items()}


@wrong("7.1", names="not-a-partition")
def strides_by_its_own_size(dp, pp, tp):
    """Right where the sizes are equal."""
    firsts = [d * pp * tp + t for d in range(dp) for t in range(tp)]
    return _lines(dp, pp, tp) | {
        "pipeline": [[first + p * pp for p in range(pp)] for first in firsts]
    }


@wrong("7.1", names="not-a-partition")
def lists_a_group_for_each_rank(dp, pp, tp):
    lines = _lines(dp, pp, tp)
    ranks = range(dp * pp * tp)
    return {name: [next(g for g in lines[name] if r in g) for r in ranks] for name in NAMES}


@wrong("7.1", names="not-a-partition")
def finds_partners_by_flipping_a_bit(dp, pp, tp):
    """Right for two ranks in each dimension, as in the chapter's picture."""
    strides = {"data": pp * tp, "pipeline": tp, "tensor": 1}
    ranks = range(dp * pp * tp)
    return {
        name: [[r, r ^ stride] for r in ranks if not r & stride] for name, stride in strides.items()
    }


@wrong("7.1", names="not-lists")
def keeps_rows_of_tensors(dp, pp, tp):
    grid = torch.arange(dp * pp * tp).reshape(dp, pp, tp)
    return {name: list(grid.movedim(dim, -1).flatten(0, 1)) for dim, name in enumerate(NAMES)}


@wrong("7.1", names="order-of-groups")
def starts_at_the_end(dp, pp, tp):
    return {name: groups[::-1] for name, groups in _lines(dp, pp, tp).items()}


@wrong("7.1", names="not-whole-numbers")
def halves_with_a_slash(dp, pp, tp):
    groups = _lines(dp, pp, tp)
    return groups | {"data": [[rank / 1 for rank in group] for group in groups["data"]]}
