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


@wrong("10.1", names="not-normalised")
def adds_the_outputs(out_a, lse_a, out_b, lse_b):
    return out_a + out_b, torch.logaddexp(lse_a, lse_b)


@wrong("10.1", names="other-weights")
def takes_the_mean(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


@wrong("10.1", names="other-logsumexp")
def returns_the_larger_logsumexp(out_a, lse_a, out_b, lse_b):
    a, b, _ = _shares(lse_a, lse_b)
    return _weighted(out_a, a, out_b, b), torch.maximum(lse_a, lse_b)


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


@wrong("10.1", names="input-changed")
def empties_what_has_seen_nothing(out_a, lse_a, out_b, lse_b):
    out_a[lse_a.isneginf()] = 0
    out_b[lse_b.isneginf()] = 0
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse.isneginf(), 0)
    return _weighted(out_a, (lse_a - base).exp(), out_b, (lse_b - base).exp()), lse
