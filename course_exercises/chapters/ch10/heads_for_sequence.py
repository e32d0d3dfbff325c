"""Exercise 10.5, `heads_for_sequence`: what it asks for, and how it is checked."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from course_exercises.authoring import Exercise, OwnPart, Wrong, expect, expect_type, run, same
from course_exercises.authoring.ranks import (
    Sent,
    come_late,
    following,
    must_have_sent,
    must_have_waited,
)
from course_utils.hardware import device
from course_utils.trace import Trace

swapping = Exercise(
    "10.5",
    "heads_for_sequence",
    points=2,
    minutes=30,
    things="heads",
    parameters=("q", "k", "v"),
    hints=[
        (
            "Write down for 4 ranks, 8 heads of queries and 2 of keys which heads each rank needs. How many ranks need "
            "the first head of the keys? Which are they?"
        ),
        (
            "A rank gets one message from each other rank: that rank's tokens of its heads of q, k and v, one behind the "
            "other along the heads. So first put what each rank is to get side by side, then exchange once."
        ),
        (
            "Where k and v have fewer heads than there are ranks, `repeat_interleave` gives every rank its copy, and autograd "
            "adds up the copies' gradients. Cut q, k and v into n groups each, join them in the order q, k, v of rank 0, "
            "q, k, v of rank 1, ..., let `Swap` exchange, and `split` what has come."
        ),
    ],
    misconceptions={
        "whole-result": "You return all heads of all tokens. A rank gets its own group of heads only.",
        "tiled": "You deal the heads of k and v out in turns, as `repeat` does. Queries whose heads lie together share a head "
        "of keys, so ranks that lie together do: repeat each head, with `repeat_interleave`.",
        "repeated": "You return a copy of a head of k and v for each head of q that it serves. A rank gets each of its "
        "heads of k and v once, and only these travel.",
        "other-heads": "Your ranks have whole heads, but not theirs. Rank r gets the r-th of n groups of heads that lie "
        "together.",
        "pieces-mixed": "You have the right numbers in the wrong places. What rank r is to get is cut out along the heads "
        "and has to lie in one stretch: `all_to_all_single` cuts a tensor along its first dimension, as it lies in memory. "
        "What comes is joined along the tokens, rank 0's stretch first.",
        "not-one-exchange": "You make other calls than one all-to-all in a pass. Put side by side what q, k and v have for a "
        "rank, so that one carries it all; an all-gather would bring everything to everybody.",
        "few-heads": "Your function fails where k and v have fewer heads than there are ranks. Then each head goes to all "
        "n / G ranks whose queries it serves.",
        "local-gradient": "Your gradients have only what this rank's own piece gives. Backward has to bring the others' home.",
        "copies-not-summed": "A head of k or v that went to several ranks gets a gradient from each of them. You have one of "
        "these, or their mean: add them up.",
        "gradient-not-exchanged": "Your gradients come home in another shape or place. Backward undoes the exchange: cut the "
        "gradient along the tokens, send piece s to rank s, and join what comes along the heads.",
        "gradient-scaled": "Your gradients are too large or too small by a factor of the number of ranks. Numbers that only "
        "move are not added up or averaged.",
    },
    failures={
        "timeout": "not-every-rank",
        "mismatch": "not-every-rank",
        "returned an invalid gradient": "gradient-not-exchanged",
        "there is no rank": "two-ranks",
    },
)


@dataclass(frozen=True)
class _Swapped:
    outs: object
    gradients: list[Tensor | None]
    sent: Sent
    most: int  # in the pass that sends more
    calls: list[list[str]]  # their names, in forward and in backward
    changed: bool


def _swapped(rank, answer, *parts) -> _Swapped:
    own = [x.clone().to(device()).requires_grad_() for x in parts[:3]]
    slopes = [x.to(device()) for x in parts[3:]]
    handed = [2 * x for x in own]  # no leaves, as in a model
    before = [x.detach().clone() for x in handed]
    with following() as sent:
        come_late(rank)
        outs = answer(*handed)
        changed = not all(map(torch.equal, before, handed))
        _start_backward(outs, slopes)
    gradients = [x.grad for x in own]
    for x in own:
        x.grad = None
    with Trace() as forward:
        again = answer(*(2 * x for x in own))
    with Trace() as backward:
        _start_backward(again, slopes)
    records = forward.record(), backward.record()
    most = max(record.sent() for record in records)
    calls = [[call.op for call in record.calls] for record in records]
    outs = [x.detach() for x in outs] if _three(outs) else outs
    return _Swapped(outs, gradients, sent, most, calls, changed)


def _three(outs: object) -> bool:
    return isinstance(outs, tuple | list) and len(outs) == 3 and all(map(torch.is_tensor, outs))


def _start_backward(outs: object, slopes: list[Tensor]) -> None:
    pairs = zip(outs, slopes, strict=True) if _three(outs) else ()
    fitting = [(o, s) for o, s in pairs if o.requires_grad and o.shape == s.shape]
    if fitting:
        torch.autograd.backward(*zip(*fitting, strict=True))


def _groups(x: Tensor, ranks: int) -> list[Tensor]:
    """The heads that each rank gets."""
    heads = x.shape[1]
    return [x[:, r * heads // ranks :][:, : max(heads // ranks, 1)] for r in range(ranks)]


def _check_swap(answer, draw, ranks: int, shared: int, per_head: int) -> None:
    """k and v have `shared` heads, each for `per_head` of q."""
    n, stretch, width = draw.integer(1, 2), draw.integer(2, 4), draw.integer(2, 5)
    heads = shared * per_head, shared, shared
    wholes = [draw.tensor(n, count, ranks * stretch, width) for count in heads]
    slopes = [[draw.tensor(*group.shape) for group in _groups(x, ranks)] for x in wholes]
    given = [*(x.chunk(ranks, dim=2) for x in wholes), *slopes]
    reports = run(_swapped, ranks, answer, *(OwnPart(list(parts)) for parts in given))
    must_have_waited([report.sent.unwaited for report in reports])
    for report in reports:
        expect_type(report.outs, (tuple, list))
        if not _three(report.outs):
            raise Wrong(expected="three tensors: q, k and v", got=report.outs)
    _check_results(reports, wholes)
    _check_gradients(reports, slopes, heads)
    if any(report.changed for report in reports):
        raise Wrong("input-changed", expected="q, k and v as before", got="other values")
    must_have_sent([report.sent for report in reports])
    _check_calls(reports, (heads[0] + 2 * max(shared, ranks)) * n * stretch * width * 4)


def _check_results(reports: list[_Swapped], wholes: list[Tensor]) -> None:
    ranks = len(reports)
    right = [[2 * group for group in _groups(x, ranks)] for x in wholes]
    outs = [out for report in reports for out in report.outs]
    for i, name in enumerate("qkv"):
        mixed = {"pieces-mixed": lambda got: same(_sorted(outs), _sorted(*right))}
        copied = {"repeated": name != "q" and _repeated(right[i], right[0])}
        likely = copied | _of_results(2 * wholes[i], ranks) | mixed
        expect([r.outs[i] for r in reports], right[i], each="rank", what=name, likely=likely)


def _check_gradients(reports: list[_Swapped], slopes: list, heads: tuple[int, ...]) -> None:
    right = [_gradients(*each) for each in zip(slopes, heads, strict=True)]
    came = [gradient for report in reports for gradient in report.gradients]
    for i, name in enumerate("qkv"):
        mixed = {"gradient-not-exchanged": lambda got: same(_sorted(came), _sorted(*right))}
        likely, what = _of_gradients(slopes[i], heads[i]) | mixed, f"the gradient of {name}"
        expect([r.gradients[i] for r in reports], right[i], each="rank", what=what, likely=likely)


def _check_calls(reports: list[_Swapped], limit: int) -> None:
    for report in reports:
        for calls in report.calls:
            if [op for op in calls if op not in ("send", "recv")] not in ([], ["all_to_all"]):
                got = ", ".join(calls)
                raise Wrong("not-one-exchange", expected="one all_to_all in a pass", got=got)
        if report.most > limit:
            expected, got = f"at most {limit} bytes in a pass", f"{report.most} bytes"
            raise Wrong("sends-too-much", expected=expected, got=got)


def _repeated(right: list[Tensor], q: list[Tensor]) -> list[Tensor] | bool:
    """A copy of each head for every head of q that it serves, where that is more than one."""
    times = [own.shape[1] // x.shape[1] for x, own in zip(right, q, strict=True)]
    copies = [x.repeat_interleave(n, dim=1) for x, n in zip(right, times, strict=True)]
    return max(times) > 1 and copies


def _of_results(x: Tensor, ranks: int) -> dict:
    own, heads = x.chunk(ranks, dim=2), x.shape[1]

    def whole_heads(got: list[Tensor]) -> bool:
        return all(any(same(h, e) for e in x.unbind(1)) for g in got for h in g.unbind(1))

    return {
        "whole-result": [x] * ranks,
        "unchanged": lambda got: same([g.flatten() for g in got], [o.flatten() for o in own]),
        "tiled": heads < ranks and [x[:, [r % heads]] for r in range(ranks)],
        "other-heads": whole_heads,
    }


def _sorted(*lists: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for each in lists for tensor in each]).sort().values


def _gradients(slopes: list[Tensor], heads: int, weight: Callable = lambda rank: 1) -> list[Tensor]:
    """What each rank's own part gets, if what comes from rank r counts weight(r) times."""
    n, _, length, width = slopes[0].shape
    whole = torch.zeros(n, heads, length, width)
    for rank, slope in enumerate(slopes):
        first = rank * heads // len(slopes)
        whole[:, first : first + slope.shape[1]] += 2 * weight(rank) * slope
    return list(whole.chunk(len(slopes), dim=2))


def _of_gradients(slopes: list[Tensor], heads: int) -> dict:
    ranks = range(len(slopes))
    copies = max(len(ranks) // heads, 1)
    right = _gradients(slopes, heads)
    weights = [lambda r, c=c: r % copies == c for c in range(copies)] + [lambda r: 1 / copies]
    return {
        "cut-from-the-graph": lambda got: any(g is None for g in got),
        "local-gradient": [
            _gradients(slopes, heads, lambda r, own=own: r == own)[own] for own in ranks
        ],
        "copies-not-summed": lambda got: any(
            same(got, _gradients(slopes, heads, w)) for w in weights
        ),
        "gradient-scaled": lambda got: any(
            same(got, [g * factor for g in right]) for factor in (len(ranks), 1 / len(ranks))
        ),
    }


@swapping.requires("each rank has all tokens of its heads, and gradients come home")
def each_rank_has_all_tokens_of_its_heads(answer, draw):
    ranks = draw.choice([2, 3])
    _check_swap(answer, draw, ranks, ranks * draw.integer(1, 2), draw.integer(2, 3))


@swapping.requires(
    "k and v may have fewer heads than there are ranks",
    failures={"exception": "few-heads"},
    needs_earlier=True,
)
def k_and_v_may_have_fewer_heads(answer, draw):
    for ranks, shared in draw.sample([(4, 2), (3, 1)], 2):
        _check_swap(answer, draw, ranks, shared, ranks // shared * draw.integer(1, 2))


@swapping.requires("one rank has it all", needs_earlier=True)
def one_rank_has_it_all(answer, draw):
    _check_swap(answer, draw, 1, draw.integer(1, 3), draw.integer(1, 2))


def _refusal(rank, answer, q, k) -> tuple[str, str]:
    """The name of the exception with which an answer refuses heads, and its message."""
    try:
        answer(q.to(device()), k.to(device()), k.to(device()))
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        return type(error).__name__, str(error)
    return "no exception", ""


@swapping.requires(
    "heads that do not fit the ranks are refused with both numbers", needs_earlier=True
)
def heads_that_do_not_fit_the_ranks_are_refused(answer, draw):
    odd = 2 * draw.integer(1, 3) + 1
    # heads of q, heads of k and v, ranks, and the one that does not fit
    for of_q, of_k, ranks, wrong in (
        (odd, 1, 2, odd),
        (4 * odd, 2 * odd, 4, 2 * odd),
        (6, 2, 3, 2),
    ):
        q, k = draw.tensor(1, of_q, 2, 2), draw.tensor(1, of_k, 2, 2)
        for kind, message in run(_refusal, ranks, answer, q, k):
            named = {str(wrong), str(ranks)} <= set(re.findall(r"\d+", message))
            if kind != "ValueError" or not named:
                expected = f"a ValueError that names {wrong} heads and {ranks} ranks"
                raise Wrong("other-error", expected=expected, got=f"{kind}: {message}".rstrip(": "))
