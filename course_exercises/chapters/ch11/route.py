"""Exercise 11.1, `route`: what it asks for, and how it is checked."""

import torch
from torch import Tensor

from course_exercises.authoring import Exercise, Wrong, any_of, expect, expect_type, same
from course_exercises.chapters.ch11.shared import blaming

routing = Exercise(
    "11.1",
    "route",
    points=1,
    minutes=10,
    kind="first",
    parameters=("logits", "bias", "k"),
    hints=[
        "Logits go into two things, the choices and the weights. Which of the two is the bias for?",
        (
            "`topk` along the experts returns values and indices. The indices are the choices; the values have the bias "
            "in them. Which method picks the entries of `logits` by their numbers?"
        ),
        (
            "Choose with `topk` of `logits + bias`. `logits.gather(1, choices)` are the logits of the chosen experts, and "
            "their softmax along the same dimension are the weights: no mask is needed."
        ),
    ],
    misconceptions={
        "not-a-pair": "Return two tensors, the choices in whole numbers and then their weights. Both have a column for "
        "each choice, (T, k), and none for an expert that was not chosen.",
        "other-dimension": "You choose k *tokens* for each expert. The experts are the second dimension of `logits`.",
        "bias-ignored": "You choose by the logits without the bias. It is there to move tokens from an expert that has "
        "much to do to another: choose by `logits + bias`.",
        "not-largest-first": "You have the right experts of each token in another order, or those with the smallest sums. "
        "The expert with the largest logit + bias comes first.",
        "other-sums": "You choose by other sums. Add the bias to the logits themselves, with its sign as it is, and not to their "
        "softmax or sigmoids.",
        "bias-in-weights": "The bias is in your weights. It decides who is chosen and nothing else, so that balancing the "
        "experts does not change how much their results count: take the weights from the logits alone.",
        "other-order": "Your weights stand in another order than the experts that they belong to.",
        "not-normalised": "The weights of a token do not add up to 1. Take the softmax over its k chosen logits: over all E "
        "experts, over the tokens, or with zeros for those that were not chosen, it is another one.",
        "not-softmax": "The weights of a token add up to 1, and are not the softmax of its chosen logits: their "
        "exponentials, divided by the sum of these. Sigmoids, or the logits themselves, divided by their sum are others.",
        "fixed-k": "Your function works for k = 2 and not for another k, such as 1 or E. Look for a fixed number.",
        "no-tokens": "It fails where a rank has no tokens, T = 0. Its choices and weights have no rows then.",
    },
)


def _check_route(answer, logits: Tensor, bias: Tensor, k: int) -> None:
    given = logits.clone(), bias.clone()
    choices, weights = _pair(answer(*given, k))
    by = logits + bias
    right = by.topk(k).indices
    likely = {
        "other-dimension": lambda got: got.shape == (k, logits.shape[1]) != right.shape,
        "not-a-pair": lambda got: got.shape != right.shape,
        "bias-ignored": logits.topk(k).indices,
        "not-largest-first": lambda got: (
            same(got.sort(1).values, right.sort(1).values)
            or same(got, by.topk(k, largest=False).indices)
        ),
        "other-sums": any_of(
            *(
                sums.topk(k).indices
                for sums in (logits.softmax(1) + bias, logits.sigmoid() + bias, logits - bias)
            )
        ),
    }
    expect(choices, right, what="the choices", likely=likely)
    softmax = logits.gather(1, right).softmax(1)
    mistakes = {
        "not-a-pair": lambda got: got.shape != softmax.shape,
        "bias-in-weights": by.gather(1, right).softmax(1),
        "other-order": lambda got: same(got.sort(1).values, softmax.sort(1).values),
        "not-normalised": lambda got: not same(got.sum(1), torch.ones(len(got))),
        "not-softmax": True,
    }
    expect(weights, softmax, what="the weights", likely=mistakes)
    expect(given, (logits, bias), each="argument", likely={"input-changed": True})


def _pair(got: object) -> list[Tensor]:
    expect_type(got, (tuple, list), likely=None if got is None else "not-a-pair")
    floats = [isinstance(each, Tensor) and each.is_floating_point() for each in got]
    if floats != [False, True] or not isinstance(got[0], Tensor):
        raise Wrong("not-a-pair", expected="choices, int64, and weights, float32", got=got)
    return list(got)


@routing.requires("two of several experts")
def two_of_several_experts(answer, draw):
    experts = draw.integer(4, 5)
    _check_route(answer, draw.tensor(draw.integer(6, 9), experts), draw.tensor(experts), 2)


@routing.requires("another k", failures={"exception": "fixed-k"}, needs_earlier=True)
def another_k(answer, draw):
    experts = draw.integer(4, 6)
    for k in (1, 3, experts):
        with blaming("fixed-k", known=True):
            _check_route(answer, draw.tensor(7, experts), draw.tensor(experts), k)


@routing.requires(
    "the gradient of the weights reaches the logits", at_home=True, needs_earlier=True
)
def the_gradient_of_the_weights_reaches_the_logits(answer, draw):
    logits, bias, factors = draw.tensor(5, 6).requires_grad_(), draw.tensor(6), draw.tensor(5, 2)
    choices, weights = answer(logits, bias, 2)
    if not weights.requires_grad:
        expected, got = "weights with a gradient", "weights without one"
        raise Wrong("cut-from-the-graph", expected=expected, got=got)
    (weights * factors).sum().backward()
    got, logits.grad = logits.grad, None
    (logits.gather(1, choices).softmax(1) * factors).sum().backward()
    likely = {"cut-from-the-graph": lambda got: got is None}
    expect(got, logits.grad, what="the gradient", likely=likely)


@routing.requires("no tokens", failures={"exception": "no-tokens"}, needs_earlier=True)
def no_tokens(answer, draw):
    experts = draw.integer(3, 6)
    _check_route(answer, draw.tensor(0, experts), draw.tensor(experts), 2)
