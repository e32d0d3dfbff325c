"""Answers to 11.4, `balance_loss`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist
from torch.nn.functional import one_hot

from tests.wrong_answers import right, wrong


def _f(choices, experts, dtype=torch.float32, over_all=True):
    counts = choices.flatten().bincount(minlength=experts)
    if over_all:
        dist.all_reduce(counts)
    return counts.to(dtype), counts.sum()


@right("11.4")
def reduces_counts_as_floats(logits, choices):
    counts = one_hot(choices, logits.shape[1]).float().sum((0, 1))
    dist.all_reduce(counts)
    p = logits.softmax(1).sum(0) / (counts.sum() / choices.shape[1])
    return logits.shape[1] * torch.dot(counts / counts.sum(), p)


@right("11.4")
def weighs_each_token(logits, choices):
    counts, tokens = torch.zeros(logits.shape[1]).to(logits.device), torch.tensor(len(choices))
    counts = counts.index_add(0, choices.flatten(), torch.ones(choices.numel()).to(logits.device))
    numbers = torch.cat([counts, tokens[None].float().to(logits.device)])
    dist.all_reduce(numbers)
    f = numbers[:-1] / numbers[:-1].sum()
    return (logits.softmax(1) @ f).sum() * len(f) / numbers[-1]


@wrong("11.4", names="own-shares")
def mean_of_the_ranks_losses(logits, choices):
    counts, pieces = _f(choices, logits.shape[1], over_all=False)
    loss = logits.shape[1] * (counts / pieces * logits.softmax(1).mean(0)).sum()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size() + loss - loss.detach()


@wrong("11.4", names="other-factor")
def mean_over_own_tokens(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    return logits.shape[1] * (counts / pieces * logits.softmax(1).mean(0)).sum()


@wrong("11.4", names="whole-on-each-rank")
def whole_loss_on_each_rank(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    part = logits.softmax(1).sum(0) * choices.shape[1] / pieces
    whole = part.detach().clone()
    dist.all_reduce(whole)
    return logits.shape[1] * (counts / pieces * (whole + part - part.detach())).sum()


@wrong("11.4", names="other-p")
def softmax_as_in_route(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    chosen = logits.gather(1, choices).softmax(1)
    p = torch.zeros_like(logits).scatter(1, choices, chosen).sum(0) * choices.shape[1] / pieces
    return logits.shape[1] * (counts / pieces * p).sum()


@wrong("11.4", names="other-f")
def multiplies_probabilities(logits, choices):
    _, pieces = _f(choices, logits.shape[1])
    tokens, own = pieces / choices.shape[1], logits.softmax(1).sum(0)
    everyone = own.detach().clone()
    dist.all_reduce(everyone)
    return logits.shape[1] * (everyone / tokens * own).sum() / tokens


@wrong("11.4", names="cut-from-the-graph")
def takes_numbers(logits, choices):
    return reduces_counts_as_floats(logits.detach(), choices)


@wrong("11.4", names="unequal")
def multiplies_by_the_ranks(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    tokens = len(choices) * dist.get_world_size()
    return logits.shape[1] * (counts / pieces * logits.softmax(1).sum(0)).sum() / tokens


@wrong("11.4", names="empty-rank")
def part_of_a_mean(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    share = choices.numel() / pieces
    return logits.shape[1] * (counts / pieces * logits.softmax(1).mean(0)).sum() * share


@wrong("11.4", names="too-many-numbers")
def tells_every_probability(logits, choices):
    numbers = torch.cat([_marks(choices, logits.shape[1]), logits.softmax(1).sum(0)[None]])
    dist.all_reduce(numbers.detach().clone())
    return reduces_counts_as_floats(logits, choices)


def _marks(choices, experts):
    return one_hot(choices.flatten(), experts).sum(0)[None].float()


@wrong("11.4", names="not-a-scalar")
def leaves_the_experts_apart(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    tokens = pieces / choices.shape[1]
    return logits.shape[1] * (counts / pieces * logits.softmax(1).sum(0)) / tokens


@wrong("11.4", names="not-waited")
def does_not_wait_for_the_sum(logits, choices):
    counts = choices.flatten().bincount(minlength=logits.shape[1])
    dist.all_reduce(counts, async_op=True)
    tokens = counts.sum() / choices.shape[1]
    return logits.shape[1] * (counts / counts.sum() * logits.softmax(1).sum(0)).sum() / tokens


@wrong("11.4", names="other-gradient")
def reduces_the_probabilities(logits, choices):
    """The value is right: what this rank adds to the sum of all, with the gradient twice."""
    part = reduces_counts_as_floats(logits, choices)
    return 2 * part - part.detach()


@wrong("11.4", names="other-p")
def counts_in_place_of_probabilities(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    p = one_hot(choices[:, 0], logits.shape[1]).float().sum(0) * choices.shape[1] / pieces
    return logits.shape[1] * (counts / pieces * p).sum()


@wrong("11.4", names="fewer-experts")
def counts_up_to_the_last_that_is_chosen(logits, choices):
    counts = choices.flatten().bincount()
    dist.all_reduce(counts)
    p = logits.softmax(1).sum(0) * choices.shape[1] / counts.sum()
    return logits.shape[1] * (counts / counts.sum() * p).sum()
