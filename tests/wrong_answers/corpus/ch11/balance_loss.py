"""Rarer wrong answers to 11.4, `balance_loss`."""

import torch.distributed as dist
from torch.nn.functional import one_hot

from tests.wrong_answers import rarer
from tests.wrong_answers.ch11.balance_loss import _f


@rarer("11.4")
def divides_by_pieces(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    return logits.shape[1] * (counts / pieces * logits.softmax(1).sum(0)).sum() / pieces


@rarer("11.4")
def softmax_of_each_expert(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    tokens = pieces / choices.shape[1]
    return logits.shape[1] * (counts / pieces * logits.softmax(0).sum(0)).sum() / tokens


@rarer("11.4")
def counts_first_choices(logits, choices):
    counts, tokens = _f(choices[:, 0], logits.shape[1])
    return logits.shape[1] * (counts / tokens * logits.softmax(1).sum(0)).sum() / tokens


@rarer("11.4")
def averages_the_ranks_shares(logits, choices):
    f = one_hot(choices.flatten(), logits.shape[1]).float().mean(0)
    tokens = f.new_full((), len(logits))
    dist.all_reduce(f)
    dist.all_reduce(tokens)
    f = f / dist.get_world_size()
    return logits.shape[1] * (f * logits.softmax(1).sum(0)).sum() / tokens
