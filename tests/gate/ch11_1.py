"""11.1, `route`: answers written from the stub alone."""

import torch


def weighs_with_the_bias(logits, bias, k):
    """The softmax is over logit + bias of the chosen."""
    chosen, choices = (logits + bias).topk(k)
    return choices, chosen.softmax(-1)


def chooses_without_the_bias(logits, bias, k):
    """The bias plays no part in the choice."""
    chosen, choices = logits.topk(k)
    return choices, chosen.softmax(-1)


def softmax_over_all(logits, bias, k):
    """The weights are the probabilities over all experts, of the chosen: they do not add up to 1."""
    choices = (logits + bias).topk(k).indices
    return choices, logits.softmax(-1).gather(-1, choices)


def largest_logit_first(logits, bias, k):
    """Orders the chosen by their logits without the bias."""
    choices = (logits + bias).topk(k).indices
    order = logits.gather(-1, choices).argsort(-1, descending=True)
    choices = choices.gather(-1, order)
    return choices, logits.gather(-1, choices).softmax(-1)


def adds_the_bias_in_place(logits, bias, k):
    """`logits += bias` changes what was handed in, and the weights have the bias in them."""
    plain = logits.clone()
    logits.data += bias
    choices = logits.topk(k).indices
    return choices, plain.gather(-1, choices).softmax(-1)


def without_a_gradient(logits, bias, k):
    """Computes the weights of detached logits."""
    logits = logits.detach()
    choices = (logits + bias).topk(k).indices
    return choices, logits.gather(-1, choices).softmax(-1)


def softmax_over_tokens(logits, bias, k):
    """The softmax goes along the tokens, dimension 0."""
    choices = (logits + bias).topk(k).indices
    return choices, logits.gather(-1, choices).softmax(0)


def the_gates_of_sigmoids(logits, bias, k):
    """Sigmoids divided by their sum, as DeepSeek-V3 has it."""
    choices = (logits + bias).topk(k).indices
    gates = torch.sigmoid(logits.gather(-1, choices))
    return choices, gates / gates.sum(-1, keepdim=True)


ANSWERS = {
    "11.1": [
        weighs_with_the_bias,
        chooses_without_the_bias,
        softmax_over_all,
        largest_logit_first,
        adds_the_bias_in_place,
        without_a_gradient,
        softmax_over_tokens,
        the_gates_of_sigmoids,
    ]
}
