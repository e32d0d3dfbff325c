"""Answers to 11.1, `route`: wrong in a plausible way, or right in another."""

import torch
from torch.nn.functional import one_hot

from tests.wrong_answers import right, wrong


@right("11.1")
def masks_with_minus_infinity(logits, k):
    choices = logits.argsort(dim=1, descending=True)[:, :k]
    masked = torch.full_like(logits, float("-inf")).scatter(1, choices, logits.gather(1, choices))
    return choices, masked.softmax(1).gather(1, choices)


@right("11.1")
def normalises_probabilities(logits, k):
    best = logits.softmax(1).topk(k)
    return best.indices, best.values / best.values.sum(1, keepdim=True)


@wrong("11.1", names="swapped")
def weights_first(logits, k):
    best = logits.topk(k)
    return best.values.softmax(1), best.indices


@wrong("11.1", names="not-a-pair")
def returns_the_weights(logits, k):
    return logits.topk(k).values.softmax(1)


@wrong("11.1", names="softmax-over-all")
def probabilities_of_the_best(logits, k):
    best = logits.softmax(1).topk(k)
    return best.indices, best.values


@wrong("11.1", names="raw-logits")
def logits_of_the_best(logits, k):
    best = logits.topk(k)
    return best.indices, best.values


@wrong("11.1", names="divided-by-the-sum")
def divides_logits(logits, k):
    best = logits.topk(k)
    return best.indices, best.values / best.values.sum(1, keepdim=True)


@wrong("11.1", names="softmax-over-tokens")
def softmax_of_the_other_dimension(logits, k):
    best = logits.topk(k)
    return best.indices, best.values.softmax(0)


@wrong("11.1", names="masked-with-zero")
def masks_with_zero(logits, k):
    best = logits.topk(k)
    masked = torch.zeros_like(logits).scatter(1, best.indices, best.values)
    return best.indices, masked.softmax(1).gather(1, best.indices)


@wrong("11.1", names="smallest")
def sorts_ascending(logits, k):
    choices = logits.argsort(dim=1)[:, :k]
    return choices, logits.gather(1, choices).softmax(1)


@wrong("11.1", names="by-number")
def sorts_by_number(logits, k):
    choices = logits.topk(k).indices.sort().values
    return choices, logits.gather(1, choices).softmax(1)


@wrong("11.1", names="other-dimension")
def experts_choose_tokens(logits, k):
    best = logits.topk(k, dim=0)
    return best.indices, best.values.softmax(0)


@wrong("11.1", names="no-gradient")
def detaches(logits, k):
    best = logits.detach().topk(k)
    return best.indices, best.values.softmax(1)


@wrong("11.1", names="fixed-k")
def always_two(logits, k):
    best = logits.topk(2)
    return best.indices, best.values.softmax(1)


@wrong("11.1", names="no-tokens")
def stacks_tokens(logits, k):
    best = [row.topk(k) for row in logits]
    return torch.stack([b.indices for b in best]), torch.stack([b.values.softmax(0) for b in best])


@wrong("11.1", names="other-order")
def weighs_in_order_of_number(logits, k):
    choices = logits.topk(k).indices
    return choices, logits.gather(1, choices.sort().values).softmax(1)


@wrong("11.1", names="softmax-twice")
def softmax_of_probabilities(logits, k):
    best = logits.softmax(1).topk(k)
    return best.indices, best.values.softmax(1)


@wrong("11.1", names="sigmoid")
def normalises_sigmoids(logits, k):
    best = logits.topk(k)
    gates = best.values.sigmoid()
    return best.indices, gates / gates.sum(1, keepdim=True)


@wrong("11.1", names="column-for-each-expert")
def weighs_every_expert(logits, k):
    choices = logits.topk(k).indices
    masked = torch.full_like(logits, float("-inf")).scatter(1, choices, logits.gather(1, choices))
    return choices, masked.softmax(1)


@wrong("11.1", names="column-for-each-expert")
def marks_the_chosen(logits, k):
    best = logits.topk(k)
    return one_hot(best.indices, logits.shape[1]).sum(1), best.values.softmax(1)


@wrong("11.1", names="smallest-first")
def takes_the_end_of_an_argsort(logits, k):
    choices = logits.argsort(1)[:, logits.shape[1] - k :]
    return choices, logits.gather(1, choices).softmax(1)
