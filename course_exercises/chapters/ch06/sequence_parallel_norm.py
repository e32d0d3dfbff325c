"""Exercise 6.5, `SequenceParallelNorm`: what it asks for, and how it is checked."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, OwnPart, Wrong, expect, run, same, signs
from course_exercises.authoring.ranks import Sent, following, must_have_sent
from course_exercises.chapters.ch06.shared import (
    HANGS,
    anywhere,
    loss_of,
    on_three,
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
        "own-norm": "The module's parameters are not those of `norm` itself, kept as `self.norm`, and those alone. An "
        "optimizer that was made before holds them, and would train what nobody uses.",
        "other-norm": "The output is that of another norm. Use the weight and the bias of `norm`, and hand on its "
        "`eps`. If you write the formula yourself: LayerNorm's variance is the mean of the squares, divided by the "
        "width and not by one less, and `eps` is added to it under the root.",
        "gathered-along-batch": "The parts are put one after the other along the batch: the sequence "
        "is dimension 1.",
        "gathers-backward": "The gradient of x is not the sum over the ranks of what comes back for this rank's "
        "tokens, taken once. The all-gather's backward adds the ranks' parts up and keeps this rank's stretch, as "
        "that of `GatherSequence` does. Nothing else is to be summed on the way of x, and nothing divided.",
        "norm-gradients": "Each rank has only its own part of the gradients of the norm's parameters, from its tokens "
        "or from what comes back to it. The copies would drift apart: sum them over the ranks.",
        "sums-grad-again": "The gradients of two backward passes do not add up: the second one sums over "
        "the ranks what the first has summed already. Sum each new gradient once, not `.grad`.",
        "frozen-norm": "A frozen norm makes your module fail, or gets a gradient. A hook can only sit on a tensor that "
        "requires a gradient.",
        "norms-the-whole": "Autograd keeps the whole sequence: you gather first and normalise "
        "everything on every rank. Normalise the rank's own tokens, then gather.",
    },
    failures={**HANGS, "does not require grad": "cut-from-the-graph"},
)


@dataclass(frozen=True)
class _Normed:
    names: list[str]
    y: Tensor
    x_gradient: Tensor | None
    gradients: dict[str, Tensor | None]
    kept: int  # bytes that autograd keeps
    own_norm: bool  # are its parameters those of the norm that was handed in?
    sent: Sent


def _normed(rank, answer, norm, own, slope, passes) -> _Normed:
    given = copy.deepcopy(norm).to(device())
    model = answer(given)
    own_norm = {id(p) for p in model.parameters()} == {id(p) for p in given.parameters()}
    x = own.clone().to(device()).requires_grad_()
    with following() as sent:
        for _ in range(passes):
            with kept_for_backward(model) as kept:
                y = model(x)
            loss_of(y, slope).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return _Normed(list(gradients), y.detach(), x.grad, gradients, kept.bytes, own_norm, sent)


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


@torch.no_grad()
def _other_norms(task: _NormTask) -> list[Tensor]:
    """The whole sequence by norms that leave something out, or have another variance or `eps`."""
    x, weight, bias, eps = task.x, task.norm.weight, task.norm.bias, task.norm.eps
    centred, variance = x - x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    roots = [
        (variance + eps).sqrt(),
        (variance + 1e-5).sqrt(),
        (x.var(-1, keepdim=True) + eps).sqrt(),
        x.std(-1, keepdim=True) + eps,
        variance.sqrt() + eps,
    ]
    hats = [centred / root for root in roots]
    return [y for hat in hats for y in (hat * weight + bias, hat * weight, hat + bias, hat)]


def _check_norm(answer, task: _NormTask, passes: int = 1) -> list[_Normed]:
    n = len(task.slopes)
    own = OwnPart(task.parts()), OwnPart(task.slopes)
    reports = run(_normed, n, answer, task.norm, *own, passes)
    names, likely = {"norm.weight", "norm.bias"}, {"own-norm": True}
    expect([set(r.names) for r in reports], [names] * n, each="rank", likely=likely)
    _check_output([report.y for report in reports], task)
    _check_gradients(reports, task, passes)
    if not all(report.own_norm for report in reports):
        raise Wrong("own-norm", expected="the parameters of `norm` itself", got="those of a copy")
    must_have_sent([report.sent for report in reports])
    return reports


def _check_output(got: list[Tensor], task: _NormTask) -> None:
    n, own = len(got), list(task.y.chunk(len(got), dim=1))
    along_batch = torch.cat(own)
    likely = {
        "gathered-along-batch": anywhere([along_batch, along_batch.view(task.y.shape)]),
        "other-norm": anywhere(_other_norms(task)),
        **signs(own, [task.y] * n),
    }
    expect(got, [task.y] * n, each="rank", what="the output", likely=likely)


def _check_gradients(reports: list[_Normed], task: _NormTask, passes: int) -> None:
    n, slope = len(reports), sum(task.slopes)
    whole, parameters = task.gradients(slope, task.x)
    expected = [passes * g for g in whole.chunk(n, dim=1)]
    own = [task.gradients(s, task.x) for s in task.slopes]
    stretches = sum(slope.chunk(n, dim=1))  # of the output's gradient, added up
    wrong = [
        [passes * g.chunk(n, 1)[rank] for rank, (g, _) in enumerate(own)],
        [g / n for g in expected],
        [n * g for g in expected],
        [sum(expected)] * n,
        [task.gradients(stretches, tokens)[0] for tokens in task.parts()],
    ]
    got = [report.x_gradient for report in reports]
    likely = {
        "cut-from-the-graph": any(g is None for g in got),
        "gathers-backward": lambda got: any(same(got, each) for each in wrong),
    }
    expect(got, expected, each="rank", what="the gradient of x", likely=likely)
    pieces = zip(slope.chunk(n, 1), task.parts(), strict=True)
    local = [task.gradients(s, tokens) for s, tokens in pieces]
    for name, gradient in parameters.items():
        got = [report.gradients[name] for report in reports]
        what, likely = f"the gradient of {name}", {"frozen-norm": True}
        if gradient is not None:
            gradient = passes * gradient
            parts = [[passes * g[name] for _, g in each] for each in (local, own)]
            likely = {
                "sums-grad-again": passes > 1,
                "norm-gradients": lambda got, parts=parts: any(same(got, p) for p in parts),
                **signs(parts[0], [gradient] * n),
            }
        expect(got, [gradient] * n, each="rank", what=what, likely=likely)


@sequence_norm.requires("two ranks normalise their tokens, and both have the whole sequence")
def two_ranks_normalise_their_tokens(answer, draw):
    _check_norm(answer, _norm_task(draw, 2))


@sequence_norm.requires(
    "three ranks", failures=on_three(sequence_norm.failures), needs_earlier=True
)
def three_ranks(answer, draw):
    with only_for_two():
        _check_norm(answer, _norm_task(draw, 3))


@sequence_norm.requires("one rank; one token to each rank", needs_earlier=True)
def one_rank_and_one_token_to_each(answer, draw):
    _check_norm(answer, _norm_task(draw, 1))
    _check_norm(answer, _norm_task(draw, draw.choice([2, 3, 4]), share=1))


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
