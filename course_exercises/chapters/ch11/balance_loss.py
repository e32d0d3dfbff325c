"""Exercise 11.4, `balance_loss`: what it asks for, and how it is checked."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from course_exercises.authoring import Exercise, OwnPart, expect, expect_type, run
from course_exercises.chapters.ch11.shared import (
    NOT_WAITED,
    blaming,
    check_numbers_sent,
    check_waited,
    follow_calls,
    numbers_sent,
)
from course_utils.hardware import device

balancing = Exercise(
    "11.4",
    "balance_loss",
    points=2,
    minutes=15,
    kind="core",
    parameters=("logits", "choices"),
    hints=[
        (
            "Write the loss of the whole batch with the probabilities of every single token. Which part of it "
            "does one token contribute, and what must be known of all tokens for that?"
        ),
        (
            "The shares f are those of the whole batch: count your pieces for each expert and add the counts up "
            "over all ranks. These counts also tell how many tokens there are. p is a sum over tokens: your own "
            "tokens give your part of it."
        ),
        (
            "E * sum over e of f_e * (the sum of your tokens' probabilities of e) / (the number of all tokens). "
            "f comes from an all-reduced `bincount`, and the number of all tokens is the sum of that, divided by k."
        ),
    ],
    misconceptions={
        "own-shares": "The shares f are those of your own tokens. A product of means is not the mean of the ranks' "
        "products: f has to be that of the whole batch.",
        "whole-on-each-rank": "Every rank returns the loss of the whole batch. Added up, it counts as many times as "
        "there are ranks; asked is what this rank's tokens contribute.",
        "own-mean": "You divide by your own tokens. The mean probability runs over the tokens of all ranks, so each "
        "rank divides by their number.",
        "without-e": "The factor E is missing: spread evenly, the loss is 1 for any number of experts.",
        "k-times": "The shares f add up to k and not to 1: divide by the number of pieces, T k over all ranks.",
        "divided-by-pieces": "Divided by the number of pieces. p is a mean over the tokens: of these there are T, and not T k.",
        "softmax-over-tokens": "The softmax runs over the tokens. The probabilities of one token, over the experts, add up to 1.",
        "soft-shares": "Both factors are mean probabilities. f counts: it is the share of the pieces that *chose* an expert.",
        "softmax-over-chosen": "The softmax runs over the chosen logits only, as for the weights of `route`. p is a mean of the "
        "probabilities among all E experts.",
        "first-choices": "You count first choices only. f is the share of all pieces, with every choice of a token.",
        "not-a-scalar": "Asked is a scalar, without dimensions: the sum over the experts.",
        "divided-by-ranks": "Divided by the number of ranks once more. Parts add up; nothing is averaged.",
        "logits": "The second factor is a mean of *probabilities*: the softmax over the experts is missing.",
        "no-gradient": "The result has no gradient. The probabilities have to stay in the graph.",
        "other-gradient": "The value is right and its gradient is not: each token's gradient comes from its own "
        "probabilities, once.",
        "too-many-numbers": "You hand over more than E + 1 numbers. What the others need are counts.",
        "empty-rank": "It fails where a rank has no tokens. Its counts are zeros, and it contributes 0.",
        "unequal": "It works as long as all ranks have as many tokens, and not otherwise.",
        "not-waited": NOT_WAITED,
    },
)


def _balanced(rank, answer, logits: Tensor, choices: Tensor):
    logits = logits.to(device()).requires_grad_()
    choices = choices.to(device())
    with follow_calls() as sent:
        got = answer(logits, choices)
    gradient = None
    if isinstance(got, Tensor) and got.requires_grad and got.numel() == 1:
        [gradient] = torch.autograd.grad(got, logits, allow_unused=True)
    got = got.detach() if isinstance(got, Tensor) else got
    return got, gradient, sent.unwaited, numbers_sent(lambda: answer(logits, choices))


@dataclass(frozen=True)
class _Batch:
    """The logits and choices of each rank."""

    logits: list[Tensor]
    choices: list[Tensor]

    def shares(self, rank: int | None = None, per: str = "pieces") -> Tensor:
        """f of one rank, or of all."""
        choices = torch.cat(self.choices) if rank is None else self.choices[rank]
        counts = choices.flatten().bincount(minlength=self.logits[0].shape[1])
        return counts / (choices.numel() if per == "pieces" else len(choices))

    def part(
        self,
        rank: int,
        f: Tensor,
        divisor: float | None = None,
        probabilities: Callable[[Tensor], Tensor] = lambda logits: logits.softmax(1),
    ) -> Tensor:
        """sum(f * p) times E over this rank's tokens, divided by all tokens or by `divisor`."""
        sums = probabilities(self.logits[rank]).sum(0)
        tokens = divisor or sum(map(len, self.logits))
        return len(f) * (f * sums).sum() / tokens

    def all_parts(self, **how) -> list[Tensor]:
        return [self.part(rank, self.shares(), **how) for rank in range(len(self.logits))]


def _batch(draw, sizes: list[int]) -> _Batch:
    experts, k = draw.integer(4, 6), 5 - len(sizes)  # unlike the ranks, so that factors tell apart
    taste = [draw.tensor(experts) for _ in sizes]  # the ranks have different favourites
    logits = [draw.tensor(n, experts) + t for n, t in zip(sizes, taste, strict=True)]
    return _Batch(logits, [each.topk(k).indices for each in logits])


def _check_balance(answer, batch: _Batch) -> None:
    ranks, experts = len(batch.logits), batch.logits[0].shape[1]
    reports = run(_balanced, ranks, answer, OwnPart(batch.logits), OwnPart(batch.choices))
    check_waited([unwaited for _, _, unwaited, _ in reports])
    got = [value for value, *_ in reports]
    for value in got:
        expect_type(value, Tensor)
    right = batch.all_parts()
    own = [batch.part(r, batch.shares(r)) for r in range(ranks) if len(batch.logits[r])]
    alone = [
        batch.part(r, batch.shares(r), len(batch.logits[r]))
        for r in range(ranks)
        if len(batch.logits[r])
    ]
    likely = {
        "whole-on-each-rank": [sum(right)] * ranks,
        "own-mean": lambda got: _near(
            got, [batch.part(r, batch.shares(), len(batch.logits[r])) for r in range(ranks)]
        ),
        "own-shares": lambda got: (
            _near(got, own)
            or _near(got, alone)
            or _near(got, [each / ranks for each in alone])
            or _near(got, [sum(alone) / ranks] * ranks)
        ),
        "without-e": [each / experts for each in right],
        "k-times": [batch.part(r, batch.shares(per="tokens")) for r in range(ranks)],
        "divided-by-ranks": [each / ranks for each in right],
        "divided-by-pieces": [each / batch.choices[0].shape[1] for each in right],
        "logits": batch.all_parts(probabilities=lambda logits: logits),
        "softmax-over-tokens": batch.all_parts(probabilities=lambda logits: logits.softmax(0)),
        "softmax-over-chosen": batch.all_parts(probabilities=_among_the_chosen(batch)),
        "soft-shares": [
            batch.part(r, torch.cat(batch.logits).softmax(1).mean(0)) for r in range(ranks)
        ],
        "first-choices": [
            batch.part(r, one_hot(torch.cat(batch.choices)[:, 0], experts).float().mean(0))
            for r in range(ranks)
        ],
        "not-a-scalar": lambda got: any(value.ndim > 0 for value in got),
    }
    expect(got, right, each="rank", likely=likely)
    gradients = [gradient for _, gradient, *_ in reports]
    expect(
        gradients,
        [_gradient(batch, r) for r in range(ranks)],
        each="rank",
        what="the gradient",
        likely={
            "no-gradient": lambda got: any(each is None for each in got),
            "other-gradient": True,
        },
    )
    check_numbers_sent([numbers for *_, numbers in reports], at_most=experts + 1)


def _among_the_chosen(batch: _Batch) -> Callable[[Tensor], Tensor]:
    """A softmax in which the other experts count for nothing."""
    k = batch.choices[0].shape[1]

    def probabilities(logits: Tensor) -> Tensor:
        best = logits.topk(k)
        return torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(1))

    return probabilities


def _near(got: list, expected: list[Tensor]) -> bool:
    return all(
        torch.isclose(a.float(), b.float(), rtol=1e-4) for a, b in zip(got, expected, strict=True)
    )


def _gradient(batch: _Batch, rank: int) -> Tensor:
    logits = batch.logits[rank].clone().requires_grad_()
    changed = _Batch([*batch.logits[:rank], logits, *batch.logits[rank + 1 :]], batch.choices)
    [gradient] = torch.autograd.grad(changed.part(rank, batch.shares()), logits)
    return gradient


@balancing.requires("the parts of two or three ranks")
def the_parts_of_two_or_three_ranks(answer, draw):
    _check_balance(answer, _batch(draw, [draw.integer(5, 8)] * draw.choice([2, 3])))


@balancing.requires(
    "ranks with different numbers of tokens",
    failures={name: "unequal" for name in ("mismatch", "signal", "exception")},
    needs_earlier=True,
)
def ranks_with_different_numbers_of_tokens(answer, draw):
    with blaming("unequal"):
        _check_balance(answer, _batch(draw, draw.sample([3, 6, 9], 3)))


@balancing.requires(
    "a rank without tokens",
    failures={name: "empty-rank" for name in ("timeout", "mismatch", "exception")},
    needs_earlier=True,
)
def a_rank_without_tokens(answer, draw):
    with blaming("empty-rank", known=True):
        _check_balance(answer, _batch(draw, draw.sample([0, 5], 2)))
