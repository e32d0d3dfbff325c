"""11.4, `balance_loss`: answers written from the stub alone."""

import torch
import torch.distributed as dist
from torch.nn.functional import one_hot


def right(logits, choices):
    """A right answer, of which the wrong ones change a line."""
    experts = logits.shape[-1]
    counts = torch.bincount(choices.flatten(), minlength=experts)
    known = torch.cat([counts, counts.new_tensor([len(choices)])])
    dist.all_reduce(known)
    load = known[:-1] / known[:-1].sum()
    probability = logits.softmax(-1).sum(0) / known[-1]
    return experts * (load * probability).sum()


def multiplies_its_own_means(logits, choices):
    """Takes both means over its own tokens, and a share of 1 / n: a mean of products."""
    experts = logits.shape[-1]
    load = one_hot(choices.flatten(), experts).float().mean(0)
    probability = logits.softmax(-1).mean(0)
    return experts * (load * probability).sum() / dist.get_world_size()


def counts_every_rank_alike(logits, choices):
    """Takes the mean probability of its own tokens and divides by n: wrong for uneven ranks."""
    experts = logits.shape[-1]
    counts = torch.bincount(choices.flatten(), minlength=experts)
    dist.all_reduce(counts)
    load = counts / counts.sum()
    probability = logits.softmax(-1).mean(0) / dist.get_world_size()
    return experts * (load * probability).sum()


def returns_the_whole_loss(logits, choices):
    """Sums the probabilities over the ranks too: each returns the whole loss, n times in all."""
    experts = logits.shape[-1]
    counts = torch.bincount(choices.flatten(), minlength=experts).to(logits.dtype)
    probability = logits.softmax(-1).sum(0)
    total = probability.detach().clone()
    dist.all_reduce(counts)
    dist.all_reduce(total)
    probability = probability + (total - probability).detach()
    tokens = counts.sum() / choices.shape[-1]
    return experts * (counts / counts.sum() * probability / tokens).sum()


def divides_by_tokens_not_pieces(logits, choices):
    """Divides the counts by the tokens, though each has k pieces: the shares add up to k."""
    experts = logits.shape[-1]
    counts = torch.bincount(choices.flatten(), minlength=experts)
    known = torch.cat([counts, counts.new_tensor([len(choices)])])
    dist.all_reduce(known)
    load = known[:-1] / known[-1]
    probability = logits.softmax(-1).sum(0) / known[-1]
    return experts * (load * probability).sum()


def takes_the_softmax_of_the_chosen(logits, choices):
    """Takes p from the weights of the chosen experts, as routing does, not from all experts."""
    experts = logits.shape[-1]
    counts = torch.bincount(choices.flatten(), minlength=experts)
    known = torch.cat([counts, counts.new_tensor([len(choices)])])
    dist.all_reduce(known)
    load = known[:-1] / known[:-1].sum()
    weights = logits.gather(-1, choices).softmax(-1)
    probability = torch.zeros_like(logits).scatter(-1, choices, weights).sum(0) / known[-1]
    return experts * (load * probability).sum()


def forgets_the_number_of_experts(logits, choices):
    """Leaves the factor E out: even routing gives 1 / E, and not 1."""
    counts = torch.bincount(choices.flatten(), minlength=logits.shape[-1])
    known = torch.cat([counts, counts.new_tensor([len(choices)])])
    dist.all_reduce(known)
    load = known[:-1] / known[:-1].sum()
    probability = logits.softmax(-1).sum(0) / known[-1]
    return (load * probability).sum()


def leaves_early_without_tokens(logits, choices):
    """Returns zero before the collective where it has no tokens: the other ranks wait."""
    if len(choices) == 0:
        return logits.sum() * 0
    return right(logits, choices)


def has_no_gradient(logits, choices):
    """Computes all of it under `no_grad`, because nothing has to flow through the collective."""
    with torch.no_grad():
        return right(logits, choices)


ANSWERS = {
    "11.4": [
        multiplies_its_own_means,
        counts_every_rank_alike,
        returns_the_whole_loss,
        divides_by_tokens_not_pieces,
        takes_the_softmax_of_the_chosen,
        forgets_the_number_of_experts,
        leaves_early_without_tokens,
        has_no_gradient,
    ]
}
