"""Exercise 11.4, `balance_loss`: what it asks for, and how it is checked."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from course_exercises.authoring import Exercise, OwnPart, expect, expect_from_each, run, same
from course_exercises.authoring.ranks import must_have_sent, must_have_waited
from course_exercises.chapters.ch11.shared import (
    blaming,
    check_numbers_sent,
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
    things="parts",
    misconceptions={
        "own-shares": "Your shares f are those of a rank's own tokens. A product of means is not the mean of the ranks' "
        "products: f has to be that of the whole batch.",
        "whole-on-each-rank": "You return the loss of the whole batch on every rank. Added up, it counts as many times as "
        "there are ranks: return what this rank's tokens contribute.",
        "other-f": "Your f is not the share of pieces. It counts: f_e is the share of all pieces that *chose* expert e, with every choice "
        "of a token. It is no mean of probabilities.",
        "other-p": "Your p is not the mean probability. It is a mean of probabilities: the softmax of each token's logits over all E experts, "
        "also those that it did not choose.",
        "other-factor": "Your parts are off by a factor. Each is E times the sum over e of f_e times the "
        "probabilities of e of this rank's tokens, divided by the number of all ranks' tokens. The f_e add up to 1: they are "
        "counts divided by the number of pieces, k for each token. And with even routing the loss is 1, not 1 / E.",
        "not-a-scalar": "Return a scalar, without dimensions: the sum over the experts.",
        "other-gradient": "The value is right and its gradient is not: each token's gradient comes from its own "
        "probabilities, once.",
        "too-many-numbers": "You hand over more than E + 1 numbers. What the others need are counts.",
        "empty-rank": "Your function fails where a rank has no tokens. It takes part in the call all the same: its counts are zeros, and it contributes 0.",
        "fewer-experts": "The calls of the ranks do not fit each other. Each rank tells a count for each of the E experts, also for "
        "those that its own tokens did not choose: `bincount` needs `minlength`, and `one_hot` the number of classes.",
        "unequal": "Your parts are right where all ranks have equally many tokens, and wrong where they do not. f and the number "
        "of tokens are those of the whole batch: add counts up, and no shares.",
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
    return got, gradient, sent, numbers_sent(sent)


@dataclass(frozen=True)
class _Batch:
    """The logits and choices of each rank."""

    logits: list[Tensor]
    choices: list[Tensor]

    def shares(self, rank: int | None = None) -> Tensor:
        """f of one rank, or of all."""
        choices = torch.cat(self.choices) if rank is None else self.choices[rank]
        return choices.flatten().bincount(minlength=self.logits[0].shape[1]) / choices.numel()

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


def _batch(draw, sizes: list[int]) -> _Batch:
    experts, k = draw.integer(4, 6), 5 - len(sizes)  # unlike the ranks, so that factors tell apart
    taste = [draw.tensor(experts) for _ in sizes]  # the ranks have different favourites
    taste[0][-1], taste[1][-1] = -9, 2  # nobody on rank 0 chooses the last expert
    logits = [draw.tensor(n, experts) + t for n, t in zip(sizes, taste, strict=True)]
    return _Batch(logits, [each.topk(k).indices for each in logits])


def _check_balance(answer, batch: _Batch) -> None:
    ranks, experts = len(batch.logits), batch.logits[0].shape[1]
    reports = run(_balanced, ranks, answer, OwnPart(batch.logits), OwnPart(batch.choices))
    must_have_waited([sent.unwaited for _, _, sent, _ in reports])
    got = [value for value, *_ in reports]
    expect_from_each(got)
    right = [batch.part(r, batch.shares()) for r in range(ranks)]
    expect(got, right, each="rank", likely=_mistakes(batch, right))
    gradients = [gradient for _, gradient, *_ in reports]
    expect(
        gradients,
        [_gradient(batch, r) for r in range(ranks)],
        each="rank",
        what="the gradient",
        likely={
            "cut-from-the-graph": lambda got: any(each is None for each in got),
            "other-gradient": True,
        },
    )
    check_numbers_sent([numbers for *_, numbers in reports], at_most=experts + 1)
    must_have_sent([sent for *_, sent, _ in reports])


def _mistakes(batch: _Batch, right: list[Tensor]) -> dict:
    ranks, experts = len(right), batch.logits[0].shape[1]
    everyone = range(ranks)
    choices = torch.cat(batch.choices)

    def with_f(f: Tensor) -> list[Tensor]:
        return [batch.part(r, f) for r in everyone]

    def with_p(probabilities: Callable) -> list[Tensor]:
        return [batch.part(r, batch.shares(), probabilities=probabilities) for r in everyone]

    def own_shares(got: list) -> bool:
        own = [batch.part(r, batch.shares(r)) for r in everyone]
        alone = [batch.part(r, batch.shares(r), len(batch.logits[r])) for r in everyone]
        means = [each / ranks for each in alone]
        return any(same(got, each) for each in (own, alone, means, [sum(means)] * ranks))

    def off_by_a_factor(got: list) -> bool:
        own_means = [batch.part(r, batch.shares(), len(batch.logits[r])) for r in everyone]
        return same(got, own_means) or same(got, [each * (got[0] / right[0]) for each in right])

    return {
        "not-a-scalar": lambda got: any(value.ndim > 0 for value in got),
        "whole-on-each-rank": [sum(right)] * ranks,
        "own-shares": own_shares,
        "other-factor": off_by_a_factor,
        "other-f": lambda got: any(
            same(got, with_f(f))
            for f in (
                torch.cat(batch.logits).softmax(1).mean(0),
                one_hot(choices[:, 0], experts).float().mean(0),
            )
        ),
        "other-p": lambda got: any(
            same(got, with_p(probabilities))
            for probabilities in (
                lambda logits: logits,
                lambda logits: logits.softmax(0),
                _among_the_chosen(choices.shape[1]),
                _counts_of_the_chosen(1),
                _counts_of_the_chosen(choices.shape[1]),
            )
        ),
    }


def _among_the_chosen(k: int) -> Callable[[Tensor], Tensor]:
    """A softmax in which the other experts count for nothing."""

    def probabilities(logits: Tensor) -> Tensor:
        best = logits.topk(k)
        return torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(1))

    return probabilities


def _counts_of_the_chosen(k: int) -> Callable[[Tensor], Tensor]:
    """1 / k for each of the k best experts."""
    return lambda logits: torch.zeros_like(logits).scatter(1, logits.topk(k).indices, 1 / k)


def _gradient(batch: _Batch, rank: int) -> Tensor:
    logits = batch.logits[rank].clone().requires_grad_()
    changed = _Batch([*batch.logits[:rank], logits, *batch.logits[rank + 1 :]], batch.choices)
    [gradient] = torch.autograd.grad(changed.part(rank, batch.shares()), logits)
    return gradient


@balancing.requires("the parts of two or three ranks", failures={"mismatch": "fewer-experts"})
def the_parts_of_two_or_three_ranks(answer, draw):
    _check_balance(answer, _batch(draw, [draw.integer(5, 8)] * draw.choice([2, 3])))


@balancing.requires(
    "ranks with different numbers of tokens",
    failures=dict.fromkeys(("mismatch", "signal", "exception"), "unequal"),
    needs_earlier=True,
)
def ranks_with_different_numbers_of_tokens(answer, draw):
    with blaming("unequal"):
        _check_balance(answer, _batch(draw, draw.sample([3, 6, 9], 3)))


@balancing.requires(
    "a rank without tokens",
    failures=dict.fromkeys(("timeout", "mismatch", "exception"), "empty-rank"),
    needs_earlier=True,
)
def a_rank_without_tokens(answer, draw):
    with blaming("empty-rank", known=True):
        _check_balance(answer, _batch(draw, draw.sample([0, 5], 2)))
