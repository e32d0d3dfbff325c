"""Answers to 10.1, `merge`: wrong in a plausible way, or right in another."""

import torch

from tests.wrong_answers import right, wrong


def _weighted(out_a, share_a, out_b, share_b):
    a, b = share_a.unsqueeze(-1), share_b.unsqueeze(-1)
    return torch.where(a > 0, a * out_a, 0.0) + torch.where(b > 0, b * out_b, 0.0)


@right("10.1")
def takes_a_softmax_of_two(out_a, lse_a, out_b, lse_b):
    both = torch.stack([lse_a, lse_b])
    shares = both.softmax(dim=0).nan_to_num()  # of two minus infinities
    return _weighted(out_a, shares[0], out_b, shares[1]), both.logsumexp(dim=0)


@right("10.1")
def subtracts_the_larger(out_a, lse_a, out_b, lse_b):
    """As an online softmax does it: the maximum, and what is left to divide by."""
    highest = torch.maximum(lse_a, lse_b)
    base = torch.where(highest.isfinite(), highest, 0.0)
    a, b = (lse_a - base).exp(), (lse_b - base).exp()
    total = torch.where(a + b > 0, a + b, 1.0)
    return _weighted(out_a, a / total, out_b, b / total), (a + b).log() + base


def _shares(lse_a, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return (lse_a - lse).exp().nan_to_num(), (lse_b - lse).exp().nan_to_num(), lse


@wrong("10.1", names="no-logsumexp")
def returns_the_output(out_a, lse_a, out_b, lse_b):
    a, b, _ = _shares(lse_a, lse_b)
    return _weighted(out_a, a, out_b, b)


@wrong("10.1", names="mean")
def takes_the_mean(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


@wrong("10.1", names="sum")
def adds_the_outputs(out_a, lse_a, out_b, lse_b):
    return out_a + out_b, torch.logaddexp(lse_a, lse_b)


@wrong("10.1", names="undivided")
def does_not_divide(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.exp().unsqueeze(-1), lse_b.exp().unsqueeze(-1)
    return a * out_a + b * out_b, torch.logaddexp(lse_a, lse_b)


@wrong("10.1", names="swapped")
def swaps_the_weights(out_a, lse_a, out_b, lse_b):
    a, b, lse = _shares(lse_a, lse_b)
    return _weighted(out_a, b, out_b, a), lse


@wrong("10.1", names="linear-weights")
def weighs_by_logarithms(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.unsqueeze(-1), lse_b.unsqueeze(-1)
    return (a * out_a + b * out_b) / (a + b), torch.logaddexp(lse_a, lse_b)


@wrong("10.1", names="larger-only")
def keeps_the_larger(out_a, lse_a, out_b, lse_b):
    out = torch.where((lse_a > lse_b).unsqueeze(-1), out_a, out_b)
    return out, torch.logaddexp(lse_a, lse_b)


@wrong("10.1", names="lse-largest")
def returns_the_larger_logsumexp(out_a, lse_a, out_b, lse_b):
    a, b, _ = _shares(lse_a, lse_b)
    return _weighted(out_a, a, out_b, b), torch.maximum(lse_a, lse_b)


@wrong("10.1", names="lse-added")
def adds_logsumexps(out_a, lse_a, out_b, lse_b):
    a, b, _ = _shares(lse_a, lse_b)
    return _weighted(out_a, a, out_b, b), lse_a + lse_b


@wrong("10.1", names="lse-mean")
def averages_logsumexps(out_a, lse_a, out_b, lse_b):
    a, b, _ = _shares(lse_a, lse_b)
    return _weighted(out_a, a, out_b, b), (lse_a + lse_b) / 2


@wrong("10.1", names="not-logarithm")
def returns_the_sum_of_exponentials(out_a, lse_a, out_b, lse_b):
    a, b, lse = _shares(lse_a, lse_b)
    return _weighted(out_a, a, out_b, b), lse.exp()


@wrong("10.1", names="rows-mixed")
def forgets_the_last_dimension(out_a, lse_a, out_b, lse_b):
    a, b, lse = _shares(lse_a, lse_b)
    return a * out_a + b * out_b, lse


@wrong("10.1", names="overflow")
def takes_plain_exponentials(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.exp(), lse_b.exp()
    return _weighted(out_a, a / (a + b), out_b, b / (a + b)), (a + b).log()


@wrong("10.1", names="nothing-seen")
def multiplies_by_nothing(out_a, lse_a, out_b, lse_b):
    """0 times NaN."""
    a, b, lse = _shares(lse_a, lse_b)
    return a.unsqueeze(-1) * out_a + b.unsqueeze(-1) * out_b, lse


@wrong("10.1", names="both-empty")
def subtracts_infinities(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = ((x - lse).exp().unsqueeze(-1) for x in (lse_a, lse_b))
    return torch.where(a == 0, 0.0, a * out_a) + torch.where(b == 0, 0.0, b * out_b), lse


@wrong("10.1", names="arguments-changed")
def merges_in_place(out_a, lse_a, out_b, lse_b):
    a, b, lse = _shares(lse_a, lse_b)
    out = _weighted(out_a, a, out_b, b)
    out_a.copy_(out)
    lse_a.copy_(lse)
    return out_a, lse_a


@wrong("10.1", names="arguments-changed")
def empties_what_has_seen_nothing(out_a, lse_a, out_b, lse_b):
    out_a[lse_a.isneginf()] = 0
    out_b[lse_b.isneginf()] = 0
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse.isneginf(), 0)
    return _weighted(out_a, (lse_a - base).exp(), out_b, (lse_b - base).exp()), lse


@wrong("10.1", names="both-empty")
def takes_the_other_side(out_a, lse_a, out_b, lse_b):
    """Right but for a query that neither side has answered: it gets whatever stands in `out_b`."""
    empty_a, empty_b = (lse.isneginf().unsqueeze(-1) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = (lse_a - lse).exp(), (lse_b - lse).exp()
    out = torch.where(empty_b, out_a, _weighted(out_a, a, out_b, b))
    return torch.where(empty_a, out_b, out), lse


@wrong("10.1", names="overflow")
def limits_the_exponents(out_a, lse_a, out_b, lse_b):
    a, b = (lse.clamp(max=80).exp().unsqueeze(-1) for lse in (lse_a, lse_b))
    return (a * out_a + b * out_b) / (a + b), (a + b).log().squeeze(-1)


@wrong("10.1", names="overflow")
def subtracts_the_first(out_a, lse_a, out_b, lse_b):
    b = (lse_b - lse_a).exp()
    out = (out_a + b.unsqueeze(-1) * out_b) / (1 + b).unsqueeze(-1)
    return out, lse_a + b.log1p()


@wrong("10.1", names="not-normalised")
def forgets_to_divide_by_both(out_a, lse_a, out_b, lse_b):
    larger = torch.maximum(lse_a, lse_b)
    out = _weighted(out_a, (lse_a - larger).exp(), out_b, (lse_b - larger).exp())
    return out, torch.logaddexp(lse_a, lse_b)


@wrong("10.1", names="largest-not-added-back")
def forgets_to_add_the_larger(out_a, lse_a, out_b, lse_b):
    out, lse = subtracts_the_larger(out_a, lse_a, out_b, lse_b)
    return out, lse - torch.maximum(lse_a, lse_b)


@wrong("10.1", names="one-weight")
def weighs_whole_heads(out_a, lse_a, out_b, lse_b):
    a = torch.sigmoid(lse_a - lse_b).mean(dim=-1, keepdim=True)
    return _weighted(out_a, a, out_b, 1 - a), torch.logaddexp(lse_a, lse_b)
