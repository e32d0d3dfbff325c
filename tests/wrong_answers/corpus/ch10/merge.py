"""Rarer wrong answers to 10.1, `merge`."""

import torch

from tests.wrong_answers import rarer
from tests.wrong_answers.ch10.merge import _weighted, subtracts_the_larger


@rarer("10.1")
def does_not_divide(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.exp().unsqueeze(-1), lse_b.exp().unsqueeze(-1)
    return a * out_a + b * out_b, torch.logaddexp(lse_a, lse_b)


@rarer("10.1")
def weighs_by_logarithms(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.unsqueeze(-1), lse_b.unsqueeze(-1)
    return (a * out_a + b * out_b) / (a + b), torch.logaddexp(lse_a, lse_b)


@rarer("10.1")
def takes_the_other_side(out_a, lse_a, out_b, lse_b):
    """Right but for a query that neither side has answered: it gets whatever stands in `out_b`."""
    empty_a, empty_b = (lse.isneginf().unsqueeze(-1) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = (lse_a - lse).exp(), (lse_b - lse).exp()
    out = torch.where(empty_b, out_a, _weighted(out_a, a, out_b, b))
    return torch.where(empty_a, out_b, out), lse


@rarer("10.1")
def limits_the_exponents(out_a, lse_a, out_b, lse_b):
    a, b = (lse.clamp(max=80).exp().unsqueeze(-1) for lse in (lse_a, lse_b))
    return (a * out_a + b * out_b) / (a + b), (a + b).log().squeeze(-1)


@rarer("10.1")
def subtracts_the_first(out_a, lse_a, out_b, lse_b):
    b = (lse_b - lse_a).exp()
    out = (out_a + b.unsqueeze(-1) * out_b) / (1 + b).unsqueeze(-1)
    return out, lse_a + b.log1p()


@rarer("10.1")
def forgets_to_add_the_larger(out_a, lse_a, out_b, lse_b):
    out, lse = subtracts_the_larger(out_a, lse_a, out_b, lse_b)
    return out, lse - torch.maximum(lse_a, lse_b)
