"""Rarer wrong answers to 7.1, `groups_of`."""

from tests.wrong_answers import rarer
from tests.wrong_answers.ch07.groups_of import lays_out_a_tensor


@rarer("7.1")
def lists_a_group_for_each_rank(sizes):
    lines = lays_out_a_tensor(sizes)
    ranks = range(max(lines[name][-1][-1] for name in sizes) + 1)
    return {name: [next(g for g in lines[name] if r in g) for r in ranks] for name in sizes}


@rarer("7.1")
def halves_with_a_slash(sizes):
    lines = lays_out_a_tensor(sizes)
    return {name: [[r / 1 for r in group] for group in lines[name]] for name in sizes}


@rarer("7.1")
def finds_partners_by_flipping_a_bit(sizes):
    """Right for two ranks in each dimension, as in the chapter's picture."""
    lines = lays_out_a_tensor(sizes)
    strides = {name: groups[0][-1] // max(1, sizes[name] - 1) for name, groups in lines.items()}
    ranks = range(max(groups[-1][-1] for groups in lines.values()) + 1)
    return {n: [[r, r ^ s] for r in ranks if not r & s] for n, s in strides.items()}
