"""Rarer wrong answers to 6.4, `vocabulary_parallel_cross_entropy`."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from tests.wrong_answers import rarer
from tests.wrong_answers.ch06.shared import SumBackward, SumForward, place, summed_in_place
from tests.wrong_answers.ch06.vocabulary_parallel_cross_entropy import (
    _at_target,
    _first,
    _highest,
    _mean,
    _terms,
    sums_both_in_one_call,
)


@rarer("6.4")
def wraps_around(logits, targets, ignore_index=-100):
    z = logits - _highest(logits).unsqueeze(1)
    column = targets % logits.shape[1]
    at_target = SumForward.apply(z.gather(1, column.unsqueeze(1)).squeeze(1))
    total = SumForward.apply(z.exp().sum(dim=1))
    return _mean(total.log() - at_target, targets, ignore_index)


@rarer("6.4")
def averages_the_targets_logit(logits, targets, ignore_index=-100):
    log_total, at_target = _terms(logits, targets)
    return _mean(log_total - at_target / dist.get_world_size(), targets, ignore_index)


@rarer("6.4")
def takes_the_largest_of_the_targets_logits(logits, targets, ignore_index=-100):
    """The others' zeros are the largest."""
    z = logits - _highest(logits).unsqueeze(1)
    own = _at_target(z, targets)
    dist.all_reduce(own.data, op=dist.ReduceOp.MAX)
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - own, targets, ignore_index)


@rarer("6.4")
def ignores_what_is_elsewhere(logits, targets, ignore_index=-100):
    """PyTorch's loss of the tokens whose class is here, summed over the ranks."""
    column = targets - _first(logits)
    here = (column >= 0) & (column < logits.shape[1]) & (targets != ignore_index)
    total = SumForward.apply(cross_entropy(logits, column.where(here, -100), reduction="sum"))
    return total / (targets != ignore_index).sum()


@rarer("6.4")
def takes_the_other_function(logits, targets, ignore_index=-100):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumBackward.apply(_at_target(z, targets))
    return _mean(SumBackward.apply(z.exp().sum(dim=1)).log() - at_target, targets, ignore_index)


@rarer("6.4")
def sums_logarithms(logits, targets, ignore_index=-100):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(_at_target(z, targets))
    return _mean(SumForward.apply(z.exp().sum(dim=1).log()) - at_target, targets, ignore_index)


@rarer("6.4")
def adds_its_own_maximum_back(logits, targets, ignore_index=-100):
    highest = logits.detach().amax(dim=1)
    total = SumForward.apply((logits - highest.unsqueeze(1)).exp().sum(dim=1)).log() + highest
    at_target = SumForward.apply(_at_target(logits, targets))
    return _mean(total - at_target, targets, ignore_index)


@rarer("6.4")
def sums_targets_outside_autograd(logits, targets, ignore_index=-100):
    z = logits - _highest(logits).unsqueeze(1)
    total = SumForward.apply(z.exp().sum(dim=1))
    at_target = summed_in_place(_at_target(z, targets))
    return _mean(total.log() - at_target, targets, ignore_index)


@rarer("6.4")
def sums_the_maxima(logits, targets, ignore_index=-100):
    log_total, at_target = _terms(logits, targets, summed_in_place(logits.detach().amax(dim=1)))
    return _mean(log_total - at_target, targets, ignore_index)


@rarer("6.4")
def clamps_at_80(logits, targets, ignore_index=-100):
    z = logits.clamp(-80, 80)
    total = SumForward.apply(z.exp().sum(dim=1))
    at_target = SumForward.apply(_at_target(z, targets))
    return _mean(total.log() - at_target, targets, ignore_index)


@rarer("6.4")
def subtracts_the_largest_of_all_tokens(logits, targets, ignore_index=-100):
    highest = logits.detach().max()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    log_total, at_target = _terms(logits, targets, highest.expand(len(logits)))
    return _mean(log_total - at_target, targets, ignore_index)


@rarer("6.4")
def subtracts_the_first_ranks_maximum(logits, targets, ignore_index=-100):
    highest = logits.detach().amax(dim=1)
    dist.broadcast(highest, src=0)
    log_total, at_target = _terms(logits, targets, highest)
    return _mean(log_total - at_target, targets, ignore_index)


@rarer("6.4")
def forgets_who_counts(logits, targets, ignore_index=-100):
    log_total, at_target = _terms(logits, targets)
    return (log_total - at_target).mean()


@rarer("6.4")
def takes_class_0_for_padding(logits, targets, ignore_index=-100):
    log_total, at_target = _terms(logits, targets)
    return (log_total - at_target)[(targets > 0) & (targets != ignore_index)].mean()


@rarer("6.4")
def gathers_everything(logits, targets, ignore_index=-100):
    rank, n = place()
    everyone = [torch.empty_like(logits) for _ in range(n)]
    dist.all_gather(everyone, logits.detach())
    everyone[rank] = logits
    return cross_entropy(torch.cat(everyone, dim=1), targets, ignore_index=ignore_index)


@rarer("6.4")
def gathers_parts_of_any_size(logits, targets, ignore_index=-100):
    rank, n = place()
    everyone = [None] * n
    dist.all_gather_object(everyone, logits.detach())
    everyone[rank] = logits
    return cross_entropy(torch.cat(everyone, dim=1), targets, ignore_index=ignore_index)


@rarer("6.4")
def makes_zeros_of_the_padding(logits, targets, ignore_index=-100):
    counts = targets != ignore_index
    targets[~counts] = 0
    log_total, at_target = _terms(logits, targets)
    return (log_total - at_target)[counts].mean()


class _OfTheLastCall(torch.autograd.Function):
    saved = None

    @staticmethod
    def forward(ctx, logits, targets, ignore_index):
        own = logits.detach().requires_grad_()
        with torch.enable_grad():
            loss = sums_both_in_one_call(own, targets, ignore_index)
        _OfTheLastCall.saved = torch.autograd.grad(loss, own)[0]
        return loss.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * _OfTheLastCall.saved, None, None


@rarer("6.4")
def keeps_the_gradient_on_the_class(logits, targets, ignore_index=-100):
    return _OfTheLastCall.apply(logits, targets, ignore_index)
