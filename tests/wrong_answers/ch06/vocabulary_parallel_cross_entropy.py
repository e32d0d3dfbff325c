"""Answers to 6.4, `vocabulary_parallel_cross_entropy`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from tests.wrong_answers import right, usual, wrong
from tests.wrong_answers.ch06.shared import (
    SumBackward,
    SumForward,
    SumTwice,
    place,
    summed_in_place,
)


def _first(logits):
    """The first class of this rank."""
    rank, n = place()
    shares = [None] * n
    dist.all_gather_object(shares, logits.shape[1])
    return sum(shares[:rank])


def _highest(logits):
    highest = logits.detach().amax(dim=1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return highest


def _at_target(z, targets, first=None, low=0, high=0):
    """This rank's contribution to the target's logit, zero where the class is elsewhere; `low` and `high` are
    classes too few, or too many, at the ends."""
    share = z.shape[1]
    column = targets - (_first(z) if first is None else first)
    here = (column >= low) & (column < share + high)
    picked = z.gather(1, column.clamp(0, share - 1).unsqueeze(1)).squeeze(1)
    return picked.where(here, 0.0)


def _mean(losses, targets, ignore_index):
    return losses[targets != ignore_index].mean()


def _terms(logits, targets, highest=None):
    """The logarithm of the sum, and the target's logit."""
    z = logits - (_highest(logits) if highest is None else highest).unsqueeze(1)
    return SumForward.apply(z.exp().sum(dim=1)).log(), SumForward.apply(_at_target(z, targets))


@right("6.4")
def sums_both_in_one_call(logits, targets, ignore_index=-100):
    z = logits - _highest(logits).unsqueeze(1)
    both = torch.stack([z.exp().sum(dim=1), _at_target(z, targets)])
    total, at_target = SumForward.apply(both)
    return _mean(total.log() - at_target, targets, ignore_index)


class _Softmax(torch.autograd.Function):
    """Backward by hand: softmax, minus one at the target."""

    @staticmethod
    def forward(ctx, logits, targets, ignore_index):
        first, z = _first(logits), logits - _highest(logits).unsqueeze(1)
        both = torch.stack([z.exp().sum(dim=1), _at_target(z, targets, first)])
        dist.all_reduce(both)
        classes = first + torch.arange(z.shape[1], device=z.device)
        counts = (targets != ignore_index).unsqueeze(1)
        of_logits = z.exp() / both[0].unsqueeze(1) - (targets.unsqueeze(1) == classes).float()
        ctx.save_for_backward((of_logits * counts / counts.sum()).to(logits.dtype))
        return _mean(both[0].log() - both[1], targets, ignore_index)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None, None


@right("6.4")
def differentiates_by_hand(logits, targets, ignore_index=-100):
    return _Softmax.apply(logits, targets, ignore_index)


def _merged(logits, targets, first):
    """The logarithm of each rank's sum, gathered: two numbers a token."""
    own = logits.logsumexp(dim=1)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own.detach())
    everyone[dist.get_rank()] = own  # through this one the gradient reaches our logits
    total = torch.stack(everyone).logsumexp(dim=0)
    return (total - SumForward.apply(_at_target(logits, targets, first))).mean()


@right("6.4")
def merges_the_ranks_logarithms(logits, targets, ignore_index=-100):
    counts = targets != ignore_index
    return _merged(logits[counts], targets[counts], _first(logits))


@right("6.4")
def sums_in_double_precision(logits, targets, ignore_index=-100):
    """Twice the bytes, and as many numbers."""
    z = (logits - _highest(logits).unsqueeze(1)).double()
    both = torch.stack([z.exp().sum(dim=1), _at_target(z, targets)])
    total, at_target = SumForward.apply(both)
    return _mean(total.log() - at_target, targets, ignore_index).to(logits.dtype)


@right("6.4")
def detaches_after_the_maximum(logits, targets, ignore_index=-100):
    highest = logits.amax(dim=1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    log_total, at_target = _terms(logits, targets, highest.detach())
    return _mean(log_total - at_target, targets, ignore_index)


@wrong("6.4", names="passes-by-luck")
def sums_what_autograd_records(logits, targets, ignore_index=-100):
    z = logits - _highest(logits).unsqueeze(1)
    both = torch.stack([z.exp().sum(dim=1), _at_target(z, targets)])
    dist.all_reduce(both)
    return _mean(both[0].log() - both[1], targets, ignore_index)


@wrong("6.4", names="equal-parts")
def begins_at_its_rank_times_its_classes(logits, targets, ignore_index=-100):
    counts = targets != ignore_index
    return _merged(logits[counts], targets[counts], dist.get_rank() * logits.shape[1])


@wrong("6.4", names="target-logit")
def takes_targets_as_columns(logits, targets, ignore_index=-100):
    """An error: most targets are no columns."""
    return SumForward.apply(cross_entropy(logits, targets)) / dist.get_world_size()


@wrong("6.4", names="target-logit")
def clamps_only(logits, targets, ignore_index=-100):
    z = logits - _highest(logits).unsqueeze(1)
    column = (targets - _first(z)).clamp(0, z.shape[1] - 1)
    at_target = SumForward.apply(z.gather(1, column.unsqueeze(1)).squeeze(1))
    total = SumForward.apply(z.exp().sum(dim=1))
    return _mean(total.log() - at_target, targets, ignore_index)


@wrong("6.4", names="target-logit")
def leaves_its_first_class_out(logits, targets, ignore_index=-100):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(_at_target(z, targets, low=1))
    total = SumForward.apply(z.exp().sum(dim=1))
    return _mean(total.log() - at_target, targets, ignore_index)


@wrong("6.4", names="target-logit")
def subtracts_its_own_target(logits, targets, ignore_index=-100):
    z = logits - _highest(logits).unsqueeze(1)
    total = SumForward.apply(z.exp().sum(dim=1))
    return _mean(total.log() - _at_target(z, targets), targets, ignore_index)


@wrong("6.4", names="target-logit")
def subtracts_the_raw_target(logits, targets, ignore_index=-100):
    log_total, at_target = _terms(logits, targets)
    return _mean(log_total - at_target - _highest(logits), targets, ignore_index)


@wrong("6.4", names="exponentials")
def sums_its_own_classes(logits, targets, ignore_index=-100):
    at_target = SumForward.apply(_at_target(logits, targets))
    return _mean(logits.logsumexp(dim=1) - at_target, targets, ignore_index)


@wrong("6.4", names="exponentials")
def subtracts_its_own_maximum(logits, targets, ignore_index=-100):
    log_total, at_target = _terms(logits, targets, logits.detach().amax(dim=1))
    return _mean(log_total - at_target, targets, ignore_index)


@wrong("6.4", names="who-counts")
def sums_the_tokens(logits, targets, ignore_index=-100):
    log_total, at_target = _terms(logits, targets)
    return (log_total - at_target)[targets != ignore_index].sum()


@wrong("6.4", names="who-counts")
def averages_the_tokens_of_its_classes(logits, targets, ignore_index=-100):
    log_total, at_target = _terms(logits, targets)
    column = targets - _first(logits)
    return (log_total - at_target)[(column >= 0) & (column < logits.shape[1])].mean()


@wrong("6.4", names="who-counts")
def divides_by_all_tokens(logits, targets, ignore_index=-100):
    log_total, at_target = _terms(logits, targets)
    return ((log_total - at_target) * (targets != ignore_index)).mean()


@wrong("6.4", names="who-counts")
def leaves_negative_targets_out(logits, targets, ignore_index=-100):
    """Right for the usual number."""
    log_total, at_target = _terms(logits, targets)
    return (log_total - at_target)[targets >= 0].mean()


@wrong("6.4", names="cut-from-the-graph")
def sums_outside_autograd(logits, targets, ignore_index=-100):
    z = logits - _highest(logits).unsqueeze(1)
    total, at_target = summed_in_place(z.exp().sum(dim=1)), summed_in_place(_at_target(z, targets))
    return _mean(total.log() - at_target, targets, ignore_index)


@wrong("6.4", names="lost-gradient")
def sums_exponentials_outside_autograd(logits, targets, ignore_index=-100):
    z = logits - _highest(logits).unsqueeze(1)
    log_total = summed_in_place(z.exp().sum(dim=1)).log()
    at_target = SumForward.apply(_at_target(z, targets))
    return _mean(log_total - at_target, targets, ignore_index)


@wrong("6.4", names="lost-gradient")
def lets_only_its_own_tokens_learn(logits, targets, ignore_index=-100):
    column = targets - _first(logits)
    own = ((column >= 0) & (column < logits.shape[1])).unsqueeze(1)
    return sums_both_in_one_call(torch.where(own, logits, logits.detach()), targets, ignore_index)


@wrong("6.4", names="max-has-gradient")
def forgets_to_detach(logits, targets, ignore_index=-100):
    highest = logits.amax(dim=1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    log_total, at_target = _terms(logits, targets, highest)
    return _mean(log_total - at_target, targets, ignore_index)


@wrong("6.4", names="summed-again")
def sums_in_backward_too(logits, targets, ignore_index=-100):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumTwice.apply(_at_target(z, targets))
    total = SumTwice.apply(z.exp().sum(dim=1))
    return _mean(total.log() - at_target, targets, ignore_index)


@wrong("6.4", names="large-logits")
def subtracts_no_maximum(logits, targets, ignore_index=-100):
    total = SumForward.apply(logits.exp().sum(dim=1))
    at_target = SumForward.apply(_at_target(logits, targets))
    return _mean(total.log() - at_target, targets, ignore_index)


@wrong("6.4", names="large-logits")
def takes_the_log_of_the_probability(logits, targets, ignore_index=-100):
    exponentials = (logits - _highest(logits).unsqueeze(1)).exp()
    total = SumForward.apply(exponentials.sum(dim=1))
    share = SumForward.apply(_at_target(exponentials, targets)) / total
    return _mean(-share.log(), targets, ignore_index)


class _EndOfTheGraph(_Softmax):
    @staticmethod
    def backward(ctx, gradient):
        return _Softmax.backward(ctx, 1.0)


@wrong("6.4", names="own-backward")
def takes_the_loss_for_the_end(logits, targets, ignore_index=-100):
    return _EndOfTheGraph.apply(logits, targets, ignore_index)


@wrong("6.4", names="not-every-rank")
def sums_targets_only_where_they_are(logits, targets, ignore_index=-100):
    """Every rank has a token's class, until there are fewer tokens than ranks."""
    z = logits - _highest(logits).unsqueeze(1)
    at_target = _at_target(z, targets)
    total = SumForward.apply(z.exp().sum(dim=1)).log()
    if at_target.any():
        at_target = SumForward.apply(at_target)
    return _mean(total - at_target, targets, ignore_index)


@wrong("6.4", names="one-rank-only")
def returns_it_on_rank_0(logits, targets, ignore_index=-100):
    loss = sums_both_in_one_call(logits, targets, ignore_index)
    return loss if dist.get_rank() == 0 else loss * 0.0


usual("6.4", sums_both_in_one_call, "not-a-tensor", "one-rank-returns")


@wrong("6.4", names="sends-too-much")
def asks_who_has_the_target_too(logits, targets, ignore_index=-100):
    here = _at_target(torch.ones_like(logits), targets)
    count = summed_in_place(here) + summed_in_place((targets != ignore_index).float())
    return sums_both_in_one_call(logits, targets, ignore_index) + 0 * count.sum()


@wrong("6.4", names="gathers-logits")
def gathers_the_logits(logits, targets, ignore_index=-100):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, logits.detach())
    parts[dist.get_rank()] = logits
    return cross_entropy(torch.cat(parts, dim=1), targets, ignore_index=ignore_index)


@wrong("6.4", names="gradient-summed")
def sums_the_gradient_of_its_logits(logits, targets, ignore_index=-100):
    return sums_both_in_one_call(SumBackward.apply(logits), targets, ignore_index)


@wrong("6.4", names="input-changed")
def shifts_in_place(logits, targets, ignore_index=-100):
    logits -= _highest(logits).unsqueeze(1)
    total = SumForward.apply(logits.exp().sum(dim=1))
    at_target = SumForward.apply(_at_target(logits, targets))
    return _mean(total.log() - at_target, targets, ignore_index)


@wrong("6.4", names="needs-contiguous")
def picks_from_a_flat_view(logits, targets, ignore_index=-100):
    z, share, first = logits - _highest(logits).unsqueeze(1), logits.shape[1], _first(logits)
    column = targets - first
    here = (column >= 0) & (column < share)
    rows = torch.arange(len(z), device=z.device) * share
    picked = z.view(-1)[rows + column.clamp(0, share - 1)].where(here, 0.0)
    total = SumForward.apply(z.exp().sum(dim=1))
    return _mean(total.log() - SumForward.apply(picked), targets, ignore_index)


@wrong("6.4", names="other-dtype")
def computes_in_single_precision(logits, targets, ignore_index=-100):
    return sums_both_in_one_call(logits.float(), targets, ignore_index)


@wrong("6.4", names="rounded")
def sends_single_precision(logits, targets, ignore_index=-100):
    z = logits - _highest(logits).unsqueeze(1)
    both = torch.stack([z.exp().sum(dim=1), _at_target(z, targets)])
    total, at_target = SumForward.apply(both.float()).to(logits.dtype)
    return _mean(total.log() - at_target, targets, ignore_index)


@wrong("6.4", names="not-waited")
def does_not_wait_for_the_maximum(logits, targets, ignore_index=-100):
    highest = logits.detach().amax(dim=1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, async_op=True)
    log_total, at_target = _terms(logits, targets, highest)
    return _mean(log_total - at_target, targets, ignore_index)


@wrong("6.4", names="two-ranks")
def knows_two_parts_of_the_vocabulary(logits, targets, ignore_index=-100):
    z = logits - _highest(logits).unsqueeze(1)
    own = _at_target(z, targets, first=0 if dist.get_rank() == 0 else z.shape[1])
    total = SumForward.apply(z.exp().sum(dim=1))
    return _mean(total.log() - SumForward.apply(own), targets, ignore_index)
