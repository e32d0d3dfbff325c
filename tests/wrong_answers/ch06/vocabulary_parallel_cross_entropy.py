"""Answers to 6.4, `vocabulary_parallel_cross_entropy`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch06.shared import (
    SumBackward,
    SumForward,
    SumTwice,
    place,
    summed_in_place,
)


def _highest(logits):
    highest = logits.detach().amax(dim=1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return highest


def _at_target(z, targets):
    """This rank's contribution to the target's logit, zero where the class is elsewhere."""
    share = z.shape[1]
    column = targets - dist.get_rank() * share
    here = (column >= 0) & (column < share)
    picked = z.gather(1, column.clamp(0, share - 1).unsqueeze(1)).squeeze(1)
    return picked.where(here, 0.0)


def _mean(losses, targets):
    return losses[targets >= 0].mean()


@right("6.4")
def sums_both_in_one_call(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    both = torch.stack([z.exp().sum(dim=1), _at_target(z, targets)])
    total, at_target = SumForward.apply(both)
    return _mean(total.log() - at_target, targets)


class _Softmax(torch.autograd.Function):
    """Backward by hand: softmax, minus one at the target."""

    @staticmethod
    def forward(ctx, logits, targets):
        z = logits - _highest(logits).unsqueeze(1)
        exponentials = z.exp()
        both = torch.stack([exponentials.sum(dim=1), _at_target(z, targets)])
        dist.all_reduce(both)
        ctx.save_for_backward(exponentials / both[0].unsqueeze(1), targets)
        return _mean(both[0].log() - both[1], targets)

    @staticmethod
    def backward(ctx, gradient):
        softmax, targets = ctx.saved_tensors
        classes = torch.arange(softmax.shape[1], device=softmax.device)
        classes = classes + dist.get_rank() * softmax.shape[1]
        counts = (targets >= 0).unsqueeze(1)
        of_logits = (softmax - (targets.unsqueeze(1) == classes).float()) * counts
        return gradient * of_logits / counts.sum(), None


@right("6.4")
def differentiates_by_hand(logits, targets):
    return _Softmax.apply(logits, targets)


@right("6.4")
def combines_logsumexps(logits, targets):
    rank, n = place()
    own = logits.logsumexp(dim=1)
    everyone = [torch.empty_like(own) for _ in range(n)]
    dist.all_gather(everyone, own.detach())
    everyone[rank] = own
    total = torch.stack(everyone).logsumexp(dim=0)
    return _mean(total - SumForward.apply(_at_target(logits, targets)), targets)


@wrong("6.4", names="targets-not-shifted")
def takes_targets_as_columns(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(z.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="targets-not-shifted")
def averages_the_ranks_losses(logits, targets):
    return SumForward.apply(cross_entropy(logits, targets)) / dist.get_world_size()


@wrong("6.4", names="target-not-masked")
def clamps_only(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    share = logits.shape[1]
    column = (targets - dist.get_rank() * share).clamp(0, share - 1)
    at_target = SumForward.apply(z.gather(1, column.unsqueeze(1)).squeeze(1))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="target-not-masked")
def wraps_around(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    column = targets % logits.shape[1]
    at_target = SumForward.apply(z.gather(1, column.unsqueeze(1)).squeeze(1))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="edge-classes")
def takes_one_class_too_many(logits, targets):
    z, share = logits - _highest(logits).unsqueeze(1), logits.shape[1]
    column = targets - dist.get_rank() * share
    here = (column >= 0) & (column <= share)
    picked = z.gather(1, column.clamp(0, share - 1).unsqueeze(1)).squeeze(1)
    at_target = SumForward.apply(picked.where(here, 0.0))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="edge-classes")
def leaves_its_first_class_out(logits, targets):
    z, share = logits - _highest(logits).unsqueeze(1), logits.shape[1]
    column = targets - dist.get_rank() * share
    here = (column > 0) & (column < share)
    picked = z.gather(1, column.clamp(0, share - 1).unsqueeze(1)).squeeze(1)
    at_target = SumForward.apply(picked.where(here, 0.0))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="own-classes-only")
def ignores_what_is_elsewhere(logits, targets):
    """PyTorch's loss of the tokens whose class is here, summed over the ranks."""
    share = logits.shape[1]
    column = targets - dist.get_rank() * share
    column = column.where((column >= 0) & (column < share), -100)
    total = SumForward.apply(cross_entropy(logits, column, reduction="sum"))
    return total / (targets >= 0).sum()


@wrong("6.4", names="own-classes-only")
def sums_its_own_classes(logits, targets):
    at_target = SumForward.apply(_at_target(logits, targets))
    return _mean(logits.logsumexp(dim=1) - at_target, targets)


@wrong("6.4", names="own-classes-only")
def takes_the_other_function(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumBackward.apply(_at_target(z, targets))
    return _mean(SumBackward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="target-not-summed")
def subtracts_its_own_target(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - _at_target(z, targets), targets)


@wrong("6.4", names="log-before-sum")
def sums_logarithms(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(_at_target(z, targets))
    return _mean(SumForward.apply(z.exp().sum(dim=1).log()) - at_target, targets)


@wrong("6.4", names="target-not-lowered")
def subtracts_the_raw_target(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(_at_target(logits, targets))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="overflow")
def sums_the_maxima(logits, targets):
    total = logits.detach().amax(dim=1)
    dist.all_reduce(total)
    z = logits - total.unsqueeze(1)
    at_target = SumForward.apply(_at_target(z, targets))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="local-max")
def subtracts_its_own_maximum(logits, targets):
    z = logits - logits.detach().amax(dim=1, keepdim=True)
    at_target = SumForward.apply(_at_target(z, targets))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="local-max")
def adds_its_own_maximum_back(logits, targets):
    highest = logits.detach().amax(dim=1)
    total = SumForward.apply((logits - highest.unsqueeze(1)).exp().sum(dim=1)).log() + highest
    return _mean(total - SumForward.apply(_at_target(logits, targets)), targets)


@wrong("6.4", names="sum-not-mean")
def sums_the_tokens(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(_at_target(z, targets))
    return (SumForward.apply(z.exp().sum(dim=1)).log() - at_target)[targets >= 0].sum()


@wrong("6.4", names="one-rank-only")
def returns_it_on_rank_0(logits, targets):
    loss = sums_both_in_one_call(logits, targets)
    return loss if dist.get_rank() == 0 else loss * 0.0


@wrong("6.4", names="no-tensor")
def returns_a_number(logits, targets):
    return sums_both_in_one_call(logits, targets).item()


@wrong("6.4", names="not-every-rank")
def sums_targets_only_where_they_are(logits, targets):
    """Every rank has a token's class, until there are fewer tokens than ranks."""
    z = logits - _highest(logits).unsqueeze(1)
    at_target = _at_target(z, targets)
    total = SumForward.apply(z.exp().sum(dim=1)).log()
    if at_target.any():
        at_target = SumForward.apply(at_target)
    return _mean(total - at_target, targets)


@wrong("6.4", names="two-ranks")
def knows_two_parts_of_the_vocabulary(logits, targets):
    z, share = logits - _highest(logits).unsqueeze(1), logits.shape[1]
    column = targets if dist.get_rank() == 0 else targets - share
    here = (column >= 0) & (column < share)
    picked = z.gather(1, column.clamp(0, share - 1).unsqueeze(1)).squeeze(1)
    at_target = SumForward.apply(picked.where(here, 0.0))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


def _with(highest, logits, targets):
    z = logits - highest.unsqueeze(1)
    at_target = SumForward.apply(_at_target(z, targets))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


def _with_maximum(highest, logits, targets):
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return _with(highest, logits, targets)


@wrong("6.4", names="max-has-gradient")
def forgets_to_detach(logits, targets):
    return _with_maximum(logits.amax(dim=1), logits, targets)


@wrong("6.4", names="max-has-gradient")
def clones_without_detaching(logits, targets):
    return _with_maximum(logits.max(dim=1).values.clone(), logits, targets)


@wrong("6.4", names="cuts-the-graph")
def sums_outside_autograd(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    total = summed_in_place(z.exp().sum(dim=1))
    return _mean(total.log() - summed_in_place(_at_target(z, targets)), targets)


@wrong("6.4", names="total-gradient-lost")
def sums_exponentials_outside_autograd(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    total = summed_in_place(z.exp().sum(dim=1))
    return _mean(total.log() - SumForward.apply(_at_target(z, targets)), targets)


@wrong("6.4", names="target-gradient-lost")
def sums_targets_outside_autograd(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    total = SumForward.apply(z.exp().sum(dim=1))
    return _mean(total.log() - summed_in_place(_at_target(z, targets)), targets)


@wrong("6.4", names="summed-again")
def sums_in_backward_too(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumTwice.apply(_at_target(z, targets))
    return _mean(SumTwice.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="overflow")
def subtracts_no_maximum(logits, targets):
    total = SumForward.apply(logits.exp().sum(dim=1))
    return _mean(total.log() - SumForward.apply(_at_target(logits, targets)), targets)


@wrong("6.4", names="log-of-zero")
def takes_the_log_of_the_probability(logits, targets):
    exponentials = (logits - _highest(logits).unsqueeze(1)).exp()
    total = SumForward.apply(exponentials.sum(dim=1))
    return _mean(-(SumForward.apply(_at_target(exponentials, targets)) / total).log(), targets)


@wrong("6.4", names="padding-counted")
def forgets_padding(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(_at_target(z, targets))
    return (SumForward.apply(z.exp().sum(dim=1)).log() - at_target).mean()


@wrong("6.4", names="divided-by-all")
def divides_by_all_tokens(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(_at_target(z, targets))
    losses = SumForward.apply(z.exp().sum(dim=1)).log() - at_target
    return (losses * (targets >= 0)).mean()


@wrong("6.4", names="gathers-the-logits")
def gathers_everything(logits, targets):
    rank, n = place()
    everyone = [torch.empty_like(logits) for _ in range(n)]
    dist.all_gather(everyone, logits.detach())
    everyone[rank] = logits
    return cross_entropy(torch.cat(everyone, dim=1), targets)


@wrong("6.4", names="cut-off")
def clamps_at_80(logits, targets):
    z = logits.clamp(-80, 80)
    total = SumForward.apply(z.exp().sum(dim=1))
    return _mean(total.log() - SumForward.apply(_at_target(z, targets)), targets)


@wrong("6.4", names="padding-counted")
def makes_a_class_of_the_padding(logits, targets):
    rank, n = place()
    z = logits - _highest(logits).unsqueeze(1)
    hot = nn.functional.one_hot(targets, n * logits.shape[1]).chunk(n, dim=1)[rank]
    both = SumForward.apply(torch.stack([z.exp().sum(dim=1), (z * hot).sum(dim=1)]))
    return (both[0].log() - both[1]).mean()


@wrong("6.4", names="padding-counted")
def counts_from_the_end(logits, targets):
    n = dist.get_world_size()
    return sums_both_in_one_call(logits, targets % (n * logits.shape[1]))


@wrong("6.4", names="changes-the-logits")
def shifts_in_place(logits, targets):
    logits -= _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(_at_target(logits, targets))
    return _mean(SumForward.apply(logits.exp().sum(dim=1)).log() - at_target, targets)


def _loss_with(logits, targets, at_target):
    """The right loss but for `at_target(z)`, the target's logit."""
    z = logits - _highest(logits).unsqueeze(1)
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target(z), targets)


@wrong("6.4", names="target-left-out")
def takes_the_largest_of_the_targets_logits(logits, targets):
    """The others' zeros are the largest."""

    def at_target(z):
        own = _at_target(z, targets)
        dist.all_reduce(own.data, op=dist.ReduceOp.MAX)
        return own

    return _loss_with(logits, targets, at_target)


@wrong("6.4", names="target-averaged")
def averages_the_targets_logit(logits, targets):
    n = dist.get_world_size()
    return _loss_with(logits, targets, lambda z: SumForward.apply(_at_target(z, targets)) / n)


@wrong("6.4", names="class-0-left-out")
def takes_class_0_for_padding(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    total = SumForward.apply(z.exp().sum(dim=1)).log()
    return (total - SumForward.apply(_at_target(z, targets)))[targets > 0].mean()


@wrong("6.4", names="edge-classes")
def leaves_its_last_class_out(logits, targets):
    def at_target(z):
        share = z.shape[1]
        column = targets - dist.get_rank() * share
        here = (column >= 0) & (column < share - 1)
        picked = z.gather(1, column.clamp(0, share - 1).unsqueeze(1)).squeeze(1)
        return SumForward.apply(picked.where(here, 0.0))

    return _loss_with(logits, targets, at_target)


@wrong("6.4", names="own-tokens-only")
def lets_only_its_own_tokens_learn(logits, targets):
    share = logits.shape[1]
    own = (targets // share == dist.get_rank()).unsqueeze(1)
    return sums_both_in_one_call(torch.where(own, logits, logits.detach()), targets)


class _EndOfTheGraph(_Softmax):
    @staticmethod
    def backward(ctx, gradient):
        return _Softmax.backward(ctx, 1.0)


@wrong("6.4", names="upstream-ignored")
def takes_the_loss_for_the_end(logits, targets):
    return _EndOfTheGraph.apply(logits, targets)


@wrong("6.4", names="changes-the-targets")
def makes_zeros_of_the_padding(logits, targets):
    counts = targets >= 0
    targets[~counts] = 0
    z = logits - _highest(logits).unsqueeze(1)
    total = SumForward.apply(z.exp().sum(dim=1)).log()
    return (total - SumForward.apply(_at_target(z, targets)))[counts].mean()


@right("6.4")
def sums_in_double_precision(logits, targets):
    """Twice the bytes, and as many numbers."""
    z = (logits - _highest(logits).unsqueeze(1)).double()
    both = torch.stack([z.exp().sum(dim=1), _at_target(z, targets)])
    total, at_target = SumForward.apply(both)
    return _mean(total.log() - at_target, targets).to(logits.dtype)


@wrong("6.4", names="one-max-for-all")
def subtracts_the_largest_of_all_tokens(logits, targets):
    highest = logits.detach().max()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    z = logits - highest
    total = SumForward.apply(z.exp().sum(dim=1)).log()
    return _mean(total - SumForward.apply(_at_target(z, targets)), targets)


class _OfTheLastCall(torch.autograd.Function):
    saved = None

    @staticmethod
    def forward(ctx, logits, targets):
        own = logits.detach().requires_grad_()
        with torch.enable_grad():
            loss = sums_both_in_one_call(own, targets)
        _OfTheLastCall.saved = torch.autograd.grad(loss, own)[0]
        return loss.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * _OfTheLastCall.saved, None


@wrong("6.4", names="kept-from-before")
def keeps_the_gradient_on_the_class(logits, targets):
    return _OfTheLastCall.apply(logits, targets)


@wrong("6.4", names="needs-contiguous")
def picks_from_a_flat_view(logits, targets):
    def at_target(z):
        share = z.shape[1]
        column = targets - dist.get_rank() * share
        here = (column >= 0) & (column < share)
        first = torch.arange(len(z), device=z.device) * share
        picked = z.view(-1)[first + column.clamp(0, share - 1)]
        return SumForward.apply(picked.where(here, 0.0))

    return _loss_with(logits, targets, at_target)


@wrong("6.4", names="other-dtype")
def computes_in_single_precision(logits, targets):
    return sums_both_in_one_call(logits.float(), targets)


@wrong("6.4", names="other-dtype")
def sends_single_precision(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    both = torch.stack([z.exp().sum(dim=1), _at_target(z, targets)])
    total, at_target = SumForward.apply(both.float()).to(logits.dtype)
    return _mean(total.log() - at_target, targets)


@wrong("6.4", names="not-waited")
def does_not_wait_for_the_maximum(logits, targets):
    highest = logits.detach().amax(dim=1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, async_op=True)
    return _with(highest, logits, targets)


@right("6.4")
def waits_for_the_maximum_itself(logits, targets):
    highest = logits.detach().amax(dim=1)
    work = dist.all_reduce(highest, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    return _with(highest, logits, targets)


@wrong("6.4", names="one-ranks-max")
def subtracts_the_first_ranks_maximum(logits, targets):
    highest = logits.detach().amax(dim=1)
    dist.broadcast(highest, src=0)
    return _with(highest, logits, targets)


@wrong("6.4", names="too-many-numbers")
def asks_who_has_the_target_too(logits, targets):
    share = logits.shape[1]
    here = summed_in_place((targets // share == dist.get_rank()).float())
    count = summed_in_place((targets >= 0).float()) / dist.get_world_size()
    loss = sums_both_in_one_call(logits, targets)
    return loss * (count * here).sum() / count.sum()
