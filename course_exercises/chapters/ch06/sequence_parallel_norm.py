"""Exercise 6.5, `SequenceParallelNorm`: what it asks for, and how it is checked."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, OwnPart, Wrong, expect, run, same
from course_exercises.chapters.ch06.shared import (
    HANGS,
    NOT_EVERY_RANK,
    TWO_RANKS,
    loss_of,
    only_for_two,
    own_bytes,
)
from course_utils.hardware import device
from course_utils.trace import kept_for_backward

sequence_norm = Exercise(
    "6.5",
    "SequenceParallelNorm",
    points=2,
    minutes=30,
    kind="core",
    parameters=("norm",),
    hints=[
        (
            "A LayerNorm looks at one token at a time, so that the forward pass is easy. Then follow "
            "two gradients backward: that of the tokens, and that of the norm's weight."
        ),
        (
            "What comes back to the gathered sequence is, on each rank, a part of the sum: the reverse "
            "of gathering is to add up and to keep one's own stretch. The norm's weight has seen a "
            "rank's own tokens: its gradient, too, is a sum over ranks."
        ),
        (
            "Send the norm's weight and bias through the function that does nothing forward and adds "
            "up backward, and use the results in `nn.functional.layer_norm` on the rank's own tokens. "
            "Then gather along the sequence, with the function whose backward is a reduce-scatter."
        ),
    ],
    misconceptions={
        "norm-not-used": "The output is not scaled and shifted: use the weight and the bias of `norm`. A "
        "new LayerNorm begins with ones and zeros.",
        "other-eps": "The output is that of a norm with another `eps`: hand on `norm.eps`.",
        "pair-swapped": "The output is multiplied by the number of ranks: you sum the norm's parameters "
        "over the ranks in forward. It is their gradients that are summed.",
        "sums-twice": "The gradient of x is summed once more. The all-gather's backward adds up the "
        "ranks' parts and keeps this rank's tokens: nobody else has a gradient for them.",
        "own-formula": "The output is nearly that of `norm`. If you write the formula yourself: "
        "LayerNorm's variance is the mean of the squares, divided by the width and not by one "
        "less, and `eps` is added to it under the root.",
        "norm-copied": "`self.norm` is a copy of `norm`. Keep `norm` itself: an optimizer that was "
        "made before holds its parameters, and would train the ones that nobody uses.",
        "parameters-differ": "The module's parameters are not those of `self.norm` alone.",
        "not-gathered": "You return this rank's tokens only: the column cut that follows needs the "
        "whole sequence.",
        "gathered-along-batch": "The parts are put one after the other along the batch: the sequence "
        "is dimension 1.",
        "cuts-the-graph": "No gradient gets back through the all-gather: `dist.all_gather` fills new "
        "tensors, of which autograd knows nothing.",
        "slice-backward": "Backward hands each rank its own stretch of its own gradient. The other "
        "ranks' gradients for these tokens are lost: add them up, as a reduce-scatter does.",
        "mean-backward": "The gradient of x is divided by the number of ranks: its parts are to be "
        "added.",
        "parameter-gradients-local": "The gradients of the norm's parameters come from this rank's "
        "tokens only: the copies would drift apart. Sum them over the ranks.",
        "parameter-gradients-mean": "The gradients of the norm's parameters are divided by the number "
        "of ranks. Each rank has seen other tokens of the same loss: add them.",
        "summed-again": "The gradients of two backward passes do not add up: the second one sums over "
        "the ranks what the first has summed already. Sum each new gradient, not `.grad`.",
        "frozen-norm": "A frozen norm makes your module fail, or gives it a gradient: a hook can only "
        "sit on a tensor that requires one.",
        "norms-the-whole": "Autograd keeps the whole sequence: you gather first and normalise "
        "everything on every rank. Normalise the rank's own tokens, then gather.",
        "not-every-rank": NOT_EVERY_RANK,
        "two-ranks": TWO_RANKS,
    },
    failures={**HANGS, "does not require grad": "cuts-the-graph"},
)


@dataclass(frozen=True)
class _Normed:
    names: list[str]
    y: Tensor
    x_gradient: Tensor | None
    gradients: dict[str, Tensor | None]
    kept: int  # bytes that autograd keeps
    own_norm: bool  # are its parameters those of the norm that was handed in?


def _normed(rank, answer, norm, own, slope, passes) -> _Normed:
    given = copy.deepcopy(norm).to(device())
    model = answer(given)
    own_norm = {id(p) for p in model.parameters()} == {id(p) for p in given.parameters()}
    x = own.clone().to(device()).requires_grad_()
    for _ in range(passes):
        with kept_for_backward(model) as kept:
            y = model(x)
        loss_of(y, slope).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return _Normed(list(gradients), y.detach(), x.grad, gradients, kept.bytes, own_norm)


@dataclass(frozen=True)
class _NormTask:
    """A norm, the whole sequence, and for each rank the gradient that comes back to it."""

    norm: nn.LayerNorm
    x: Tensor
    slopes: list[Tensor]
    y: Tensor

    def parts(self) -> list[Tensor]:
        return list(self.x.chunk(len(self.slopes), dim=1))

    def gradients(self, slope: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The gradients of `tokens` and of the parameters, where `slope` comes back."""
        norm, x = copy.deepcopy(self.norm), tokens.clone().requires_grad_()
        (norm(x) * slope).sum().backward()
        return x.grad, {f"norm.{name}": p.grad for name, p in norm.named_parameters()}


def _norm_task(draw, ranks: int, share: int | None = None, frozen: bool = False) -> _NormTask:
    width, share = draw.integer(4, 7), share or draw.integer(2, 4)
    norm = nn.LayerNorm(width, eps=0.1)
    norm.weight.data, norm.bias.data = draw.tensor(width), draw.tensor(width)
    norm.requires_grad_(not frozen)
    x = draw.tensor(draw.integer(2, 3), ranks * share, width)
    near_1 = 1 / x[..., 0].numel() ** 0.5  # the parameters' gradients are sums over all tokens
    slopes = [near_1 * draw.tensor(*x.shape) for _ in range(ranks)]
    return _NormTask(norm, x, slopes, norm(x).detach())


def _with_eps(norm: nn.LayerNorm, eps: float) -> nn.LayerNorm:
    other = copy.deepcopy(norm)
    other.eps = eps
    return other


@torch.no_grad()
def _other_formulas(task: _NormTask) -> list[Tensor]:
    """The whole sequence by norms whose variance or `eps` is another one's."""
    x, norm = task.x, task.norm
    centred, variance = x - x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    roots = [
        (x.var(-1, keepdim=True) + norm.eps).sqrt(),
        x.std(-1, keepdim=True) + norm.eps,
        variance.sqrt() + norm.eps,
    ]
    return [centred / root * norm.weight + norm.bias for root in roots]


def _check_norm(answer, task: _NormTask, passes: int = 1) -> list[_Normed]:
    ranks, parts = len(task.slopes), task.parts()
    own = OwnPart(parts), OwnPart(task.slopes)
    reports = run(_normed, ranks, answer, task.norm, *own, passes)
    names = ["norm.weight", "norm.bias"]
    likely = {"parameters-differ": True}
    expect([sorted(r.names) for r in reports], [sorted(names)] * ranks, each="rank", likely=likely)
    y = task.y.chunk(ranks, dim=1)
    along_batch = torch.cat(y)
    likely = {
        "not-gathered": list(y),
        "gathered-along-batch": lambda got: (
            ranks > 1
            and any(same(got, [o] * ranks) for o in (along_batch, along_batch.view(task.y.shape)))
        ),
        "norm-not-used": lambda got: any(
            same(got, [nn.functional.layer_norm(task.x, [task.x.shape[-1]], eps=eps)] * ranks)
            for eps in (task.norm.eps, 1e-5)
        ),
        "other-eps": [_with_eps(task.norm, 1e-5)(task.x).detach()] * ranks,
        "pair-swapped": [ranks * task.y] * ranks,
        "own-formula": lambda got: any(same(got, [o] * ranks) for o in _other_formulas(task)),
    }
    got = [report.y for report in reports]
    expect(got, [task.y] * ranks, each="rank", what="the output", likely=likely)
    _check_norms_gradients(reports, task, passes)
    if not all(report.own_norm for report in reports):
        raise Wrong(
            "norm-copied", expected="the parameters of `norm` itself", got="those of a copy"
        )
    return reports


def _check_norms_gradients(reports: list[_Normed], task: _NormTask, passes: int) -> None:
    ranks, slope = len(reports), sum(task.slopes)
    whole, parameters = task.gradients(slope, task.x)
    expected = [passes * g for g in whole.chunk(ranks, dim=1)]
    own = [task.gradients(s, task.x)[0].chunk(ranks, 1)[r] for r, s in enumerate(task.slopes)]
    stretches = sum(slope.chunk(ranks, dim=1))  # of the output's gradient, added up
    of_stretches = [task.gradients(stretches, tokens)[0] for tokens in task.parts()]
    twice = ([ranks * g for g in expected], [sum(expected)] * ranks, of_stretches)
    likely = {
        "cuts-the-graph": lambda got: any(g is None for g in got),
        "sums-twice": lambda got: ranks > 1 and any(same(got, given) for given in twice),
        "slice-backward": [passes * g for g in own],
        "mean-backward": [g / ranks for g in expected],
    }
    got = [report.x_gradient for report in reports]
    expect(got, expected, each="rank", what="the gradient of x", likely=likely)
    pieces = zip(slope.chunk(ranks, 1), task.parts(), strict=True)
    local = [task.gradients(s, tokens)[1] for s, tokens in pieces]
    for name, gradient in parameters.items():
        expected = None if gradient is None else passes * gradient
        likely = {
            "frozen-norm": gradient is None,
            "summed-again": passes > 1,
            "parameter-gradients-local": lambda got, name=name: same(got, [g[name] for g in local]),
            "parameter-gradients-mean": lambda got, g=expected: same(got, [g / ranks] * ranks),
        }
        got = [report.gradients[name] for report in reports]
        what = f"the gradient of {name}"
        expect(got, [expected] * ranks, each="rank", what=what, likely=likely)


@sequence_norm.requires("two ranks normalise their tokens, and both have the whole sequence")
def two_ranks_normalise_their_tokens(answer, draw):
    _check_norm(answer, _norm_task(draw, 2))


@sequence_norm.requires(
    "three ranks and one; one token to each rank",
    failures={"exception": "two-ranks"},
    needs_earlier=True,
)
def three_ranks(answer, draw):
    with only_for_two():
        for ranks, share in ((3, None), (1, None), (draw.choice([2, 3, 4]), 1)):
            _check_norm(answer, _norm_task(draw, ranks, share))


@sequence_norm.requires("the gradients of two backward passes add up", needs_earlier=True)
def the_gradients_of_two_backward_passes_add_up(answer, draw):
    _check_norm(answer, _norm_task(draw, draw.choice([2, 3])), passes=2)


@sequence_norm.requires("a frozen norm", failures={"exception": "frozen-norm"}, needs_earlier=True)
def a_frozen_norm(answer, draw):
    _check_norm(answer, _norm_task(draw, draw.choice([2, 3]), frozen=True))


@sequence_norm.requires("autograd keeps less than the whole sequence", needs_earlier=True)
def autograd_keeps_less_than_the_whole_sequence(answer, draw):
    task = _norm_task(draw, draw.choice([4, 5]), share=draw.choice([6, 8]))
    kept = max(report.kept for report in _check_norm(answer, task))
    if kept >= own_bytes(task.x):
        limit = f"less than {own_bytes(task.x)} bytes, the whole sequence"
        raise Wrong("norms-the-whole", expected=limit, got=f"{kept} bytes")
