"""Answers to 11.1, `route`: wrong in a plausible way, or right in another."""

import torch

from course_exercises.authoring import load_code
from tests.wrong_answers import right, wrong

best_experts = load_code(11, "best_experts")


@right("11.1")
def masks_with_minus_infinity(logits, bias, k):
    choices = (logits + bias).argsort(dim=1, descending=True)[:, :k]
    masked = torch.full_like(logits, float("-inf")).scatter(1, choices, logits.gather(1, choices))
    return choices, masked.softmax(1).gather(1, choices)


@right("11.1")
def normalises_probabilities(logits, bias, k):
    choices = logits.add(bias).topk(k).indices
    best = logits.softmax(1).gather(1, choices)
    return choices, best / best.sum(1, keepdim=True)


@right("11.1")
def takes_the_bias_off_again(logits, bias, k):
    best = (logits + bias).topk(k)
    return best.indices, (best.values - bias[best.indices]).softmax(1)


@wrong("11.1", names="not-a-pair")
def weights_first(logits, bias, k):
    return masks_with_minus_infinity(logits, bias, k)[::-1]


@wrong("11.1", names="not-a-pair")
def weighs_every_expert(logits, bias, k):
    choices = (logits + bias).topk(k).indices
    masked = torch.full_like(logits, float("-inf")).scatter(1, choices, logits.gather(1, choices))
    return choices, masked.softmax(1)


@wrong("11.1", names="other-dimension")
def experts_choose_tokens(logits, bias, k):
    best = (logits + bias).topk(k, dim=0)
    return best.indices, best.values.softmax(0)


@wrong("11.1", names="bias-ignored")
def asks_the_lesson(logits, bias, k):
    return best_experts(logits, k)


@wrong("11.1", names="bias-in-weights")
def routes_what_has_the_bias_in_it(logits, bias, k):
    return best_experts(logits + bias, k)


@wrong("11.1", names="not-largest-first")
def sorts_by_the_logits(logits, bias, k):
    """Chosen with the bias, and then put in the order of the weights."""
    choices, weights = masks_with_minus_infinity(logits, bias, k)
    weights, order = weights.sort(dim=1, descending=True)
    return choices.gather(1, order), weights


@wrong("11.1", names="not-largest-first")
def sorts_ascending(logits, bias, k):
    choices = (logits + bias).argsort(dim=1)[:, :k]
    return choices, logits.gather(1, choices).softmax(1)


@wrong("11.1", names="other-order")
def weighs_in_order_of_number(logits, bias, k):
    choices = (logits + bias).topk(k).indices
    return choices, logits.gather(1, choices.sort().values).softmax(1)


@wrong("11.1", names="not-normalised")
def probabilities_among_all(logits, bias, k):
    choices = (logits + bias).topk(k).indices
    return choices, logits.softmax(1).gather(1, choices)


@wrong("11.1", names="not-normalised")
def softmax_over_the_tokens(logits, bias, k):
    choices = (logits + bias).topk(k).indices
    return choices, logits.gather(1, choices).softmax(0)


@wrong("11.1", names="not-softmax")
def normalises_sigmoids(logits, bias, k):
    """As DeepSeek-V3 does."""
    choices = (logits + bias).topk(k).indices
    gates = logits.gather(1, choices).sigmoid()
    return choices, gates / gates.sum(1, keepdim=True)


@wrong("11.1", names="cut-from-the-graph")
def detaches(logits, bias, k):
    return masks_with_minus_infinity(logits.detach(), bias, k)


@wrong("11.1", names="input-changed")
def subtracts_in_place(logits, bias, k):
    with torch.no_grad():
        best = logits.add_(bias).topk(k)
    return best.indices, (logits.gather(1, best.indices) - bias[best.indices]).softmax(1)


@wrong("11.1", names="fixed-k")
def always_two(logits, bias, k):
    return masks_with_minus_infinity(logits, bias, 2)


@wrong("11.1", names="no-tokens")
def stacks_tokens(logits, bias, k):
    best = [(row + bias).topk(k).indices for row in logits]
    weights = [row[chosen].softmax(0) for row, chosen in zip(logits, best)]
    return torch.stack(best), torch.stack(weights)


@wrong("11.1", names="other-sums")
def adds_the_bias_to_probabilities(logits, bias, k):
    """As the paper adds it to its scores, which are sigmoids."""
    choices = (logits.softmax(1) + bias).topk(k).indices
    return choices, logits.gather(1, choices).softmax(1)


@wrong("11.1", names="other-sums")
def subtracts_the_bias(logits, bias, k):
    return masks_with_minus_infinity(logits, -bias, k)
