"""Rarer wrong answers to 11.1, `route`."""

import torch
from torch.nn.functional import one_hot

from tests.wrong_answers import rarer


@rarer("11.1")
def takes_the_bias_off(logits, bias, k):
    choices = (logits - bias).topk(k).indices
    return choices, logits.gather(1, choices).softmax(1)


@rarer("11.1")
def adds_the_bias_to_probabilities(logits, bias, k):
    choices = (logits.softmax(1) + bias).topk(k).indices
    return choices, logits.gather(1, choices).softmax(1)


@rarer("11.1")
def marks_the_chosen(logits, bias, k):
    choices = (logits + bias).topk(k).indices
    return one_hot(choices, logits.shape[1]).sum(1), logits.gather(1, choices).softmax(1)


@rarer("11.1")
def masks_with_zero(logits, bias, k):
    choices = (logits + bias).topk(k).indices
    masked = torch.zeros_like(logits).scatter(1, choices, logits.gather(1, choices))
    return choices, masked.softmax(1).gather(1, choices)


@rarer("11.1")
def divides_logits(logits, bias, k):
    choices = (logits + bias).topk(k).indices
    best = logits.gather(1, choices)
    return choices, best / best.sum(1, keepdim=True)


@rarer("11.1")
def sorts_by_number(logits, bias, k):
    choices = (logits + bias).topk(k).indices.sort().values
    return choices, logits.gather(1, choices).softmax(1)
