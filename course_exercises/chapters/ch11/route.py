"""Exercise 11.1, `route`: what it asks for, and how it is checked."""

import torch
from torch import Tensor

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.chapters.ch11.shared import blaming

routing = Exercise(
    "11.1",
    "route",
    points=1,
    minutes=8,
    kind="first",
    parameters=("logits", "k"),
    hints=[
        "Which method of a tensor returns its largest values together with their places?",
        "You need no mask and no softmax over all E: what is not chosen plays no part in the weights.",
        (
            "`topk` along the experts gives values and indices. The indices are the choices, and the "
            "softmax of the values, along the same dimension, are the weights."
        ),
    ],
    misconceptions={
        "not-a-pair": "Asked is a pair: (choices, weights).",
        "swapped": "The right pair in the wrong order: the choices come first.",
        "other-dimension": "You choose k *tokens* for each expert. The experts are the second dimension of "
        "`logits`.",
        "smallest": "These are the experts with the smallest logits.",
        "smallest-first": "The right experts, the smallest logit first. Asked is the largest first.",
        "column-for-each-expert": "For each token you return a number for every expert. Asked are k columns: the numbers "
        "of the chosen experts, and a weight for each of these.",
        "by-number": "The right experts, sorted by their numbers: asked is the largest logit first.",
        "softmax-over-all": "These are the probabilities among all E experts: the weights of a token do not "
        "add up to 1. The softmax runs over the chosen logits only.",
        "softmax-twice": "The softmax of probabilities: they lie between 0 and 1, so the weights are nearly alike. Take "
        "it once, over the chosen logits.",
        "sigmoid": "You divide sigmoids by their sum, as DeepSeek-V3 does. Asked is the softmax over the chosen logits.",
        "other-order": "The weights stand in another order than the experts that they belong to.",
        "raw-logits": "These are the logits themselves: they can be negative, and add up to anything. The "
        "weights are their softmax.",
        "divided-by-the-sum": "The chosen logits divided by their sum. A sum of logits may be zero or negative; "
        "their softmax divides exponentials.",
        "softmax-over-tokens": "The softmax runs over the tokens. The k weights of one token have to add up to 1.",
        "masked-with-zero": "The experts that were not chosen take part with a logit of 0, and exp(0) is 1. "
        "They count for nothing with a logit of minus infinity.",
        "all-alike": "All weights are 1/k. They depend on the logits, or the router can learn nothing.",
        "no-gradient": "No gradient reaches the logits, so the router learns nothing. Keep the weights in the "
        "graph: no `detach`, no `no_grad`, no `item`.",
        "fixed-k": "It works for k = 2 and not for another k.",
        "no-tokens": "It fails where a rank has no tokens at all, T = 0.",
    },
)


def _check_route(answer, logits: Tensor, k: int) -> None:
    right = logits.topk(k)
    got = answer(logits.clone(), k)
    if got is not None and not (isinstance(got, (tuple, list)) and len(got) == 2):
        raise Wrong("not-a-pair", expected="(choices, weights)", got=got)
    expect_type(got, (tuple, list))
    for each in got:
        expect_type(each, Tensor, likely="not-a-pair")
    choices, weights = got
    if choices.is_floating_point() and not weights.is_floating_point():
        raise Wrong("swapped", expected="the choices first", got="the weights first")
    likely = {
        "smallest": logits.topk(k, largest=False).indices,
        "smallest-first": k > 1 and right.indices.flip(1),
        "by-number": right.indices.sort().values,
        "column-for-each-expert": lambda got: got.shape == logits.shape != right.indices.shape,
        "other-dimension": lambda got: got.shape == (k, logits.shape[1]) != right.indices.shape,
    }
    expect(choices, right.indices, what="the choices", likely=likely)
    probabilities = logits.softmax(1)
    only = torch.zeros_like(logits).scatter(1, right.indices, right.values)
    sigmoids = right.values.sigmoid()
    mistakes = {
        "softmax-over-all": probabilities.gather(1, right.indices),
        "raw-logits": right.values,
        "divided-by-the-sum": right.values / right.values.sum(1, keepdim=True),
        "softmax-over-tokens": right.values.softmax(0),
        "masked-with-zero": only.softmax(1).gather(1, right.indices),
        "all-alike": torch.full_like(right.values, 1 / k),
        "softmax-twice": probabilities.gather(1, right.indices).softmax(1),
        "sigmoid": sigmoids / sigmoids.sum(1, keepdim=True),
        "column-for-each-expert": lambda got: got.shape == logits.shape != right.indices.shape,
        "other-order": lambda got: same(got.sort(1).values, right.values.softmax(1).sort(1).values),
    }
    expect(weights, right.values.softmax(1), what="the weights", likely=mistakes)


@routing.requires("two of several experts")
def two_of_several_experts(answer, draw):
    _check_route(answer, draw.tensor(draw.integer(6, 9), draw.integer(4, 5)), 2)


@routing.requires("another k", failures={"exception": "fixed-k"}, needs_earlier=True)
def another_k(answer, draw):
    experts = draw.integer(4, 6)
    for k in (1, 3, experts):
        with blaming("fixed-k", known=True):
            _check_route(answer, draw.tensor(7, experts), k)


@routing.requires(
    "the gradient of the weights reaches the logits", at_home=True, needs_earlier=True
)
def the_gradient_of_the_weights_reaches_the_logits(answer, draw):
    logits, factors = draw.tensor(5, 6).requires_grad_(), draw.tensor(5, 2)
    weights = answer(logits, 2)[1]
    if not weights.requires_grad:
        raise Wrong("no-gradient", expected="weights with a gradient", got="weights without one")
    (weights * factors).sum().backward()
    got, logits.grad = logits.grad, None
    (logits.topk(2).values.softmax(1) * factors).sum().backward()
    expect(got, logits.grad, what="the gradient", likely={"no-gradient": lambda got: got is None})


@routing.requires("no tokens", failures={"exception": "no-tokens"}, needs_earlier=True)
def no_tokens(answer, draw):
    _check_route(answer, draw.tensor(0, draw.integer(3, 6)), 2)
