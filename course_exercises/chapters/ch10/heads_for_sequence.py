"""Exercise 10.5, `heads_for_sequence`: what it asks for, and how it is checked."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from course_exercises.authoring import Exercise, OwnPart, Wrong, expect, expect_type, run, same
from course_exercises.authoring.ranks import come_late, following
from course_exercises.chapters.ch10.shared import HANGS, TWO_RANKS, only_so_many, plain
from course_utils.hardware import device
from course_utils.trace import Trace

swapping = Exercise(
    "10.5",
    "heads_for_sequence",
    points=2,
    minutes=30,
    parameters=("x",),
    hints=[
        (
            "Cut x into n groups of heads. The r-th group is for rank r. What comes from rank s are the tokens of its stretch, "
            "for your heads: where do they belong in the result?"
        ),
        (
            "`torch.stack(x.chunk(n, dim=1))` has the group for rank r at index r; `all_to_all_single` exchanges along that "
            "dimension. Join what has come along the tokens. Autograd knows nothing of it: write an `autograd.Function`."
        ),
        (
            "Backward is the same exchange with the two dimensions changed about: cut the gradient along the tokens, send piece "
            "s to rank s, and join what comes along the heads."
        ),
    ],
    misconceptions={
        "whole-result": "You return all heads of all tokens. A rank is to have its own group of heads only.",
        "unchanged": "You return x itself, or its values in another shape: nothing has been exchanged.",
        "joined-along-heads": "What has come is joined along the heads. The pieces are stretches of the sequence: join "
        "them along dimension 2.",
        "tokens-interleaved": "The tokens are in another order: first the first token of each rank, or a view that mixes "
        "dimensions. The stretch of rank 0 comes first, then that of rank 1.",
        "pieces-mixed": "The right numbers on wrong ranks: `all_to_all_single` cuts a tensor along its *first* dimension, as it lies "
        "in memory. Stack the groups of heads along a first dimension of n.",
        "stretches-backwards": "The stretches of the sequence are in another order than the ranks.",
        "heads-strided": "Rank r has every n-th head. Asked is the r-th group of heads that lie together.",
        "other-heads": "These are another rank's heads.",
        "more-sent": "More is handed over than x: a collective that brings everything to every rank. An all-to-all sends each "
        "number to the one rank that needs it.",
        "no-gradient": "The result cannot be differentiated: collectives do not tell autograd. Write an "
        "`autograd.Function` with a backward.",
        "local-gradient": "The gradient of x has only what this rank's own piece gives. Backward has to bring the others' home.",
        "gradient-not-exchanged": "The gradient of x is in the wrong place: backward has to undo the exchange, piece by piece.",
        "gradient-scaled": "The gradient of x is n times too large or too small: each number has moved, and has not been "
        "added up or averaged.",
        "input-changed": "x has changed: the layer before needs it for its own backward.",
        "not-waited": "The exchange is used before anybody has waited for it.",
        "no-error": "Heads that do not divide are accepted without a word. Compare the remainder with zero and raise a "
        "ValueError.",
        "other-error": "Heads that do not divide end in another exception than a ValueError.",
        "error-without-sizes": "The ValueError does not say what does not divide by what. Name the heads and the ranks.",
        "refuses-what-divides": "A number of heads that divides is refused.",
        "two-ranks": TWO_RANKS,
        "not-every-rank": "Some ranks make a call that others never make, and so nobody can go on.",
    },
    failures=HANGS,
)


@dataclass(frozen=True)
class _Swapped:
    out: object
    gradient: Tensor | None
    unwaited: list[str]
    sent: int  # in the pass that sends more
    calls: list[str]  # their names
    changed: bool


def _swapped(rank, answer, x, slope) -> _Swapped:
    x = x.clone().to(device()).requires_grad_()
    before = x.detach().clone()
    slope = slope.to(device())
    with following() as sent:
        come_late(rank)
        out = answer(2 * x)  # not a leaf, as in a model
    if _fits(out, slope):
        out.backward(slope)
    changed = not torch.equal(before, x.detach())
    gradient, x.grad = x.grad, None
    with Trace() as forward:
        again = answer(2 * x)
    with Trace() as backward:
        if _fits(again, slope):
            again.backward(slope)
    records = forward.record(), backward.record()
    most = max(record.sent() for record in records)
    calls = sorted({call.op for record in records for call in record.calls})
    return _Swapped(plain(out), gradient, sent.unwaited, most, calls, changed)


def _fits(out: object, slope: Tensor) -> bool:
    """Whether backward can start from `slope`."""
    return torch.is_tensor(out) and out.requires_grad and out.shape == slope.shape


def _check_swap(answer, draw, ranks: int) -> None:
    n, heads, stretch, width = (
        draw.integer(1, 2),
        ranks * draw.integer(2, 3),
        draw.integer(2, 4),
        draw.integer(2, 5),
    )
    x, slope = (
        draw.tensor(n, heads, ranks * stretch, width),
        draw.tensor(n, heads, ranks * stretch, width),
    )
    own, groups = list(x.chunk(ranks, dim=2)), list(x.chunk(ranks, dim=1))
    slopes = list(slope.chunk(ranks, dim=1))
    reports = run(_swapped, ranks, answer, OwnPart(own), OwnPart(slopes))
    if any(report.unwaited for report in reports):
        raise Wrong("not-waited", expected="a wait for every call", got="a call without one")
    for report in reports:
        expect_type(report.out, Tensor)
    strided = [x[:, r::ranks] for r in range(ranks)]
    likely = {
        "whole-result": [x] * ranks,
        "unchanged": lambda got: all(
            same(g.flatten(), o.flatten()) for g, o in zip(got, own, strict=True)
        ),
        "heads-strided": strided,
        "other-heads": lambda got: all(any(same(g, group) for group in groups) for g in got),
        "stretches-backwards": lambda got: all(
            same(_sorted_stretches(g, ranks), _sorted_stretches(e, ranks))
            if g.shape == e.shape
            else False
            for g, e in zip(got, groups, strict=True)
        ),
        "joined-along-heads": lambda got: all(
            g.numel() == e.numel() and g.shape != e.shape for g, e in zip(got, groups, strict=True)
        ),
        "tokens-interleaved": lambda got: all(
            g.shape == e.shape and same(g.flatten().sort().values, e.flatten().sort().values)
            for g, e in zip(got, groups, strict=True)
        ),
        "pieces-mixed": lambda got: same(
            torch.cat([g.flatten() for g in got]).sort().values, x.flatten().sort().values
        ),
    }
    got = [report.out for report in reports]
    expect(
        got,
        [2 * group for group in groups],
        each="rank",
        what="the result",
        likely=_doubled(likely),
    )
    _check_swap_gradients(reports, slope, ranks)
    limit = own[0].numel() * 4
    for report in reports:
        others = [call for call in report.calls if call not in ("all_to_all", "send", "recv")]
        if report.sent > limit or others:
            got = f"{report.sent} bytes, with {', '.join(report.calls)}"
            raise Wrong("more-sent", expected=f"at most {limit} bytes a pass, all to all", got=got)
    if any(report.changed for report in reports):
        raise Wrong("input-changed", expected="x as before", got="other values")


def _doubled(likely: dict) -> dict:
    """The answer gets 2 x: what is expected of mistakes, for half of what came."""

    def judged(value):
        if callable(value):
            return lambda got: value([g / 2 for g in got])
        return [2 * tensor for tensor in value]

    return {slug: judged(value) for slug, value in likely.items()}


def _sorted_stretches(tensor: Tensor, ranks: int) -> list[Tensor]:
    return sorted(tensor.chunk(ranks, dim=2), key=lambda piece: piece.flatten()[0].item())


def _check_swap_gradients(reports: list[_Swapped], slope: Tensor, ranks: int) -> None:
    expected = [2 * part for part in slope.chunk(ranks, dim=2)]
    local = []
    for rank, part in enumerate(expected):
        kept = torch.zeros_like(part)
        kept.chunk(ranks, dim=1)[rank].copy_(part.chunk(ranks, dim=1)[rank])
        local.append(kept)
    likely = {
        "no-gradient": lambda got: any(g is None for g in got),
        "local-gradient": ranks > 1 and local,
        "gradient-scaled": lambda got: any(
            same(got, [g * factor for g in expected]) for factor in (ranks, 1 / ranks)
        ),
        "gradient-not-exchanged": lambda got: all(
            g.shape == e.shape for g, e in zip(got, expected, strict=True)
        ),
    }
    got = [report.gradient for report in reports]
    expect(got, expected, each="rank", what="the gradient of x", likely=likely)


@swapping.requires("each rank has all tokens of its heads, and gradients come home")
def each_rank_has_all_tokens_of_its_heads(answer, draw):
    _check_swap(answer, draw, draw.choice([2, 3]))


@swapping.requires("four ranks and one", needs_earlier=True)
def four_ranks(answer, draw):
    with only_so_many():
        for ranks in (4, 1):
            _check_swap(answer, draw, ranks)


def _refusal(rank, answer, x) -> tuple[str, str] | None:
    """The exception with which an answer refuses x, and its message; None where it does not."""
    try:
        answer(x.to(device()))
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        return type(error).__name__, str(error)
    return None


@swapping.requires("heads that do not divide are refused with both numbers", needs_earlier=True)
def heads_that_do_not_divide_are_refused(answer, draw):
    ranks = draw.choice([2, 3])
    heads = ranks * draw.integer(2, 4) + 1
    expected = f"a ValueError that names {heads} and {ranks}"
    for refusal in run(_refusal, ranks, answer, draw.tensor(1, heads, 2, 2)):
        if refusal is None:
            raise Wrong("no-error", expected=expected, got="no exception")
        if refusal[0] != "ValueError":
            raise Wrong("other-error", expected=expected, got=refusal[0])
        if not {str(heads), str(ranks)} <= set(re.findall(r"\d+", refusal[1])):
            raise Wrong("error-without-sizes", expected=expected, got=f"ValueError: {refusal[1]}")
