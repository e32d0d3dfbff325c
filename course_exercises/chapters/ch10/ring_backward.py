"""Exercise 10.4, `RingAttention`: what it asks for, and how it is checked."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, OwnPart, Wrong, expect, run, same
from course_exercises.authoring.ranks import come_late, following
from course_exercises.chapters.ch10.shared import (
    HANGS,
    MESSAGES,
    Meanwhile,
    Ring,
    any_of,
    must_have_come,
    must_run_beside,
    only_so_many,
    partial,
    ring_task,
    wrong_cases,
    wrong_masks,
)
from course_utils.hardware import device
from course_utils.trace import Trace, kept_for_backward

with_backward = Exercise(
    "10.4",
    "RingAttention",
    points=4,
    minutes=60,
    kind="stretch",
    things="gradients",
    hints=[
        (
            "Forward is 10.3, and keeps q, k, v, the output and the logsumexp with `ctx.save_for_backward`. In backward "
            "the keys go round again, and each hop has the same three cases as in forward."
        ),
        (
            "`attend_backward` gives what one case adds to the gradients of q, k and v. The gradient of q stays. Those of "
            "k and v belong to the owner of the keys: add your part to what has come, then pass the sum on."
        ),
        (
            "Put the parts from your own keys aside. From hop 1 on: compute while the next keys are under way, add to the "
            "travelling gradients, pass these. After hop n - 1 and its pass they are home: add what you put aside. One case "
            "fills only half of the rows: write it into zeros of full size."
        ),
    ],
    misconceptions={
        **MESSAGES,
        "no-function": "Write a subclass of `torch.autograd.Function` with the static methods forward and backward. Backward "
        "returns three gradients, those of q, k and v.",
        "wrong-output": "Your output is not that of 10.3. Put your forward into a function `ring_attention` and let "
        '`check("10.3", ring_attention)` say what is wrong with it.',
        "local-query-gradient": "The gradient of q comes from the rank's own keys only. Keys and values have to go round in backward, "
        "too.",
        "wrong-delta": "Your delta is missing, or another one. From every row of gradients of the weights, softmax's backward "
        "subtracts the sum over the width of gradient * output, both of this rank's queries.",
        "wrong-weights": "Your weights in backward are those of some keys alone. Over all keys they follow from the "
        "logsumexp at the end of forward: save that one.",
        "wrong-case-back": "In backward your queries see other keys than in forward. The three cases are those of forward, hop "
        "by hop, with the triangle of tokens on the rank's own keys.",
        "wrong-scale": "Your gradients of q and k are divided by the root of the head's width once too often or not at all. "
        "`attend_backward` does it once.",
        "k-and-v-swapped": "The gradients of k and v are in each other's place: return those of q, k and v.",
        "own-part": "In the gradients of k and v the part of this rank's own queries is missing, or counts twice. Put it aside "
        "at the start, and add it at home.",
        "not-home": "Your gradients of k and v are not the sum of all ranks' parts for this rank's own keys. Each rank adds "
        "its part to what has come, and then passes the sum on behind the keys, also after the last hop. A collective would "
        "add up those of different keys.",
        "keeps-pages": "Forward keeps the keys of other ranks for backward. Keep your own: they come round again.",
    },
    failures={**HANGS, "NoneType": "no-function", "incorrect number of gradients": "no-function"},
    at_home=True,
)


@dataclass(frozen=True)
class _Both:
    forward: Tensor
    gradients: list[Tensor | None]
    kept: int
    unwaited: list[str]
    used_early: bool
    beside: tuple[int, int]  # bytes received while the rank computed, in forward and in backward
    sent: int  # in backward


def _both(rank, answer, q, k, v, slope) -> _Both:
    q, k, v = (part.clone().to(device()).requires_grad_() for part in (q, k, v))
    slope = slope.to(device())
    with following() as sent:
        come_late(rank)
        with Meanwhile(sent) as forward, kept_for_backward(nn.Module()) as kept:
            out = answer.apply(q, k, v)
        with Meanwhile(sent) as backward:
            out.backward(slope)
    gradients = [x.grad for x in (q, k, v)]
    again = answer.apply(*(x.detach().requires_grad_() for x in (q, k, v)))
    with Trace() as trace:
        again.backward(slope)
    early, beside = forward.used_early or backward.used_early, (forward.bytes, backward.bytes)
    bytes_sent = trace.record().sent()
    return _Both(out.detach(), gradients, kept.bytes, sent.unwaited, early, beside, bytes_sent)


def _run_both(answer, task: Ring) -> list[_Both]:
    if not issubclass(answer, torch.autograd.Function):
        raise Wrong("no-function", expected="a torch.autograd.Function", got=answer.__name__)
    wholes = task.q, task.k, task.v, task.slope
    reports = run(_both, task.ranks, answer, *(OwnPart(task.parts(whole)) for whole in wholes))
    must_have_come(reports)
    return reports


class _Gradients:
    """dQ, dK and dV of a task, by the rank whose queries gave them and the rank of the keys."""

    def __init__(self, task: Ring, **slip) -> None:
        """`slip`: the mistake, as `_pair` takes it."""
        self.task = task
        n = range(task.ranks)
        self.tables = [[self._pair(r, s, **slip) for s in n] for r in n]

    def _pair(self, rank, sender, sees=None, delta="right", lse="all", scalings=1):
        """What the queries of `rank` and the keys of `sender` give to q, k and v."""
        task = self.task
        mine, theirs = task.places(rank), task.places(sender)
        q, slope = task.q[:, :, mine], task.slope[:, :, mine]
        k, v = task.k[:, :, theirs], task.v[:, :, theirs]
        out, total = partial(q, task.k, task.v, mine.unsqueeze(1) >= torch.arange(task.length))
        allowed = (sees or task.sees)(rank, sender)
        if lse == "own":
            own = task.k[:, :, mine], task.v[:, :, mine], task.sees(rank, rank)
            total = partial(q, *own)[1]
        elif lse == "each":
            out, total = (x.nan_to_num(0) for x in partial(q, k, v, allowed))
        scale = q.shape[-1] ** -0.5
        weights = ((q @ k.mT) * scale - total.unsqueeze(-1)).exp() * allowed
        weights = weights.nan_to_num(0, posinf=0)
        deltas = {
            "right": (slope * out).sum(-1),
            "none": torch.zeros_like(total),
            "mean": (slope * out).mean(-1),
            "gradient": slope.sum(-1),
            "values": (slope * task.v[:, :, mine]).sum(-1),
        }
        d_scores = weights * (slope @ v.mT - deltas[delta].unsqueeze(-1)) * scale**scalings
        return [d_scores @ k, d_scores.mT @ q, weights.mT @ slope]

    def of(
        self, which: int, counts: Callable[[int, int], float] = lambda r, owner: 1
    ) -> list[Tensor]:
        """By rank, the gradients of q (0), k (1) or v (2). The part of the queries of r for the keys of an owner
        counts `counts(r, owner)` times."""
        n = range(self.task.ranks)
        if which == 0:
            return [sum(counts(r, owner) * self.tables[r][owner][0] for owner in n) for r in n]
        return [sum(counts(r, owner) * self.tables[r][owner][which] for r in n) for owner in n]


def _check_both(answer, task: Ring) -> None:
    reports, right = _run_both(answer, task), _Gradients(task)
    outs = [report.forward for report in reports]
    expect(outs, task.outputs(), each="rank", what="the output", likely={"wrong-output": True})
    for which, name in enumerate("qkv"):
        got = [report.gradients[which] for report in reports]
        likely = {
            "no-function": lambda got: any(g is None for g in got),
            **(_wrong_page_gradients(right, which) if which else {}),
            "local-query-gradient": which == 0 and right.of(0, lambda r, owner: r == owner),
            **_wrong_parts(task, which),
        }
        expect(got, right.of(which), each="rank", what=f"the gradient of {name}", likely=likely)


def _wrong_parts(task: Ring, which: int) -> dict:
    """Signs of mistakes in what a rank computes."""

    def of(*slips: dict) -> Callable:
        return any_of(lambda: (_Gradients(task, **slip).of(which) for slip in slips))

    cases = [{"sees": sees} for sees in (*wrong_masks(task), *wrong_cases(task))]
    return {
        "wrong-delta": of(*({"delta": kind} for kind in ("none", "mean", "gradient", "values"))),
        "wrong-weights": of({"lse": "own"}, {"lse": "each"}),
        "wrong-case-back": of(*cases),
        "wrong-scale": of({"scalings": 0}, {"scalings": 2}),
    }


def _wrong_page_gradients(right: _Gradients, which: int) -> dict:
    """Signs of mistakes in the gradients of k or v on their way."""
    n = right.task.ranks
    own = right.of(which, lambda r, owner: r == owner)
    others = right.of(which, lambda r, owner: r != owner)
    whole = right.of(which)

    def elsewhere():
        """Parts of ranks that are missing, or the gradients of other keys."""
        for hops in range(n - 1):
            yield right.of(which, lambda r, owner, hops=hops: (r - owner) % n <= hops)
        yield right.of(which, lambda r, owner: (r - owner) % n in (0, n - 1))
        yield [sum(right.tables[r][owner][which] for owner in range(n)) for r in range(n)]
        for shift in range(1, n):
            moved = [others[(r + shift) % n] for r in range(n)]
            yield moved
            yield [a + b for a, b in zip(own, moved, strict=True)]
            yield [whole[(r + shift) % n] for r in range(n)]

    return {
        "k-and-v-swapped": right.of(3 - which),
        "mean-not-sum": n > 1 and [each / n for each in whole],
        "own-part": any_of(
            lambda: (right.of(which, lambda r, owner, m=m: m if r == owner else 1) for m in (0, 2))
        ),
        "not-home": lambda got: (
            n > 1 and (all(same(g, got[0]) for g in got) or any_of(elsewhere)(got))
        ),
    }


@with_backward.requires("output and gradients of q, k and v are those of one process")
def output_and_gradients_of_q(answer, draw):
    _check_both(answer, ring_task(draw, draw.choice([3, 4])))


@with_backward.requires(
    "two ranks and one", needs_earlier=True, failures={"exception": "other-number"}
)
def two_ranks_2(answer, draw):
    with only_so_many():
        for ranks in (2, 1):
            _check_both(answer, ring_task(draw, ranks))


@with_backward.requires("forward keeps this rank's own tensors only", needs_earlier=True)
def forward_keeps_this_rank_own_tensors_only(answer, draw):
    task = ring_task(draw, draw.choice([3, 4]))
    n, heads, length, _ = task.q.shape
    # q, k, v, the output, a mask for each hop and the logsumexp, generously
    limit = 5 * task.own_bytes() + 2 * n * heads * length // task.ranks * 4
    round_trip = 4 * (task.ranks - 1) * task.own_bytes()
    for report in _run_both(answer, task):
        if report.kept > limit:
            expected, got = f"at most {limit} bytes", f"{report.kept} bytes"
            raise Wrong("keeps-pages", expected=expected, got=got)
        if report.sent < round_trip:  # kept where autograd does not see it, as an attribute of ctx
            expected = f"{round_trip} bytes sent in backward: keys, values and their gradients"
            raise Wrong("keeps-pages", expected=expected, got=f"{report.sent} bytes")


@with_backward.requires("backward sends keys and their gradients n - 1 times", needs_earlier=True)
def backward_sends_keys_and_their_gradients_n_1(answer, draw):
    task = ring_task(draw, draw.choice([3, 4]))
    limit = 4 * (task.ranks - 1) * task.own_bytes()
    for report in _run_both(answer, task):
        if report.sent > limit:
            expected = f"at most {limit} bytes: n - 1 times keys, values and their gradients"
            raise Wrong("sends-too-much", expected=expected, got=f"{report.sent} bytes")


@with_backward.requires(
    "in both passes the next keys are under way while these are used", needs_earlier=True
)
def the_next_keys_are_under_way_in_both(answer, draw):
    task = ring_task(draw, draw.choice([3, 4]))
    reports = _run_both(answer, task)
    for received in zip(*(report.beside for report in reports), strict=True):
        must_run_beside(list(received), 2 * (task.ranks - 1) * task.own_bytes())
