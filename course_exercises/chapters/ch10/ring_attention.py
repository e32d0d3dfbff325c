"""Exercise 10.3, `ring_attention`: what it asks for, and how it is checked."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from course_exercises.authoring import Exercise, OwnPart, Wrong, expect, expect_type, run, same
from course_exercises.authoring.ranks import come_late, following
from course_exercises.chapters.ch10.shared import (
    HANGS,
    RING,
    Ring,
    only_so_many,
    partial,
    plain,
    ring_task,
    wrong_outputs,
)
from course_utils.hardware import device
from course_utils.trace import Trace, kept_for_backward, largest_tensor

ring = Exercise(
    "10.3",
    "ring_attention",
    points=3,
    minutes=40,
    parameters=("q", "k", "v"),
    hints=[
        (
            "Begin with your own pages and a triangle of tokens as the mask. Then n - 1 times: pass the pages on, "
            "see whose they are, attend with what may see them, merge."
        ),
        (
            "After h hops you have the pages of rank - h, modulo n. If that rank stands before you (h <= rank), attend "
            "with all queries to the first half of its pages; else with the second half of your queries to all of them."
        ),
        (
            "Keep output and logsumexp as two tensors for all queries. In the second case only their second half "
            "changes: merge that half, and join it again with the first. No case but your own needs a mask."
        ),
    ],
    misconceptions=RING,
    failures=HANGS,
)


@dataclass(frozen=True)
class _Forward:
    out: Tensor
    unwaited: list[str]
    sent: int
    collectives: list[str]  # names of what was called beside messages
    largest: int
    flops: int
    changed: bool


def _forward(rank, answer, *parts) -> _Forward:
    q, k, v = (part.clone().to(device()) for part in parts)
    before = [x.clone() for x in (q, k, v)]
    with following() as sent:
        come_late(rank)
        out = answer(q, k, v)
    changed = not all(map(torch.equal, before, (q, k, v)))
    with Trace() as trace, largest_tensor() as largest, FlopCounterMode(display=False) as flops:
        answer(q, k, v)
    record = trace.record()
    others = sorted({call.op for call in record.calls} - {"send", "recv"})
    counted = largest.bytes, flops.get_total_flops()
    return _Forward(plain(out), sent.unwaited, record.sent(), others, *counted, changed)


def _run_forward(answer, task: Ring) -> list[_Forward]:
    """Runs and judges what must be judged before any number: messages nobody has waited for."""
    own = [OwnPart(task.parts(whole)) for whole in (task.q, task.k, task.v)]
    reports = run(_forward, task.ranks, answer, *own)
    for report in reports:
        if report.unwaited:
            raise Wrong(
                "not-waited", expected="a wait for every message", got="a message without one"
            )
        expect_type(report.out, Tensor)
    return reports


def _check_forward(answer, task: Ring) -> list[_Forward]:
    reports = _run_forward(answer, task)
    got = [report.out for report in reports]
    expect(got, task.outputs(), each="rank", what="the output", likely=wrong_outputs(task))
    if any(report.changed for report in reports):
        raise Wrong("arguments-changed", expected="q, k and v as before", got="other values")
    return reports


@ring.requires("queries see what the mask allows of the pages of all ranks")
def queries_see_what_the_mask_allows(answer, draw):
    _check_forward(answer, ring_task(draw, draw.choice([3, 4])))


@ring.requires("two ranks, and one", needs_earlier=True, failures={"exception": "two-ranks"})
def two_ranks(answer, draw):
    with only_so_many():
        for ranks in (2, 1):
            _check_forward(answer, ring_task(draw, ranks))


@ring.requires("keys and values make n - 1 hops, and nothing else is sent", needs_earlier=True)
def keys_and_values_make_n_1_hops(answer, draw):
    task = ring_task(draw, draw.choice([3, 4]))
    for report in _run_forward(answer, task):
        if report.collectives:
            names = ", ".join(report.collectives)
            raise Wrong("gathers-all-keys", expected="messages to a neighbour", got=names)
        limit = 2 * (task.ranks - 1) * task.own_bytes()
        if report.sent > limit:
            raise Wrong(
                "sends-too-much", expected=f"at most {limit} bytes", got=f"{report.sent} bytes"
            )


@ring.requires(
    "scores of one set of pages at a time, and of visible pairs only", needs_earlier=True
)
def scores_of_one_set_of_pages_at(answer, draw):
    ranks, heads, half, width = draw.choice([3, 4]), 2, draw.choice([12, 16]), 2
    shape = 1, heads, 2 * half * ranks, width
    task = Ring(ranks, *(draw.tensor(*shape) for _ in range(4)))
    pair = 4 * heads * half * half * width  # operations: two products
    limits = heads * (2 * half) ** 2 * 4, (4 + 2 * (ranks - 1)) * pair
    for report in _run_forward(answer, task):
        if report.largest > limits[0]:
            expected, got = f"at most {limits[0]} bytes in a tensor", f"{report.largest} bytes"
            raise Wrong("large-scores", expected=expected, got=got)
        if report.flops > limits[1]:
            expected = f"at most {limits[1] // pair} pairs of chunks"
            raise Wrong(
                "computes-masked-pairs", expected=expected, got=f"{report.flops / pair:g} pairs"
            )


with_backward = Exercise(
    "10.4",
    "RingAttention",
    points=4,
    minutes=60,
    kind="stretch",
    hints=[
        (
            "Forward is 10.3, and keeps q, k, v, the output and the logsumexp with `ctx.save_for_backward`. In backward "
            "the pages go round again, and each hop has the same three cases as in forward."
        ),
        (
            "`attend_backward` gives what one case adds to the gradients of q, k and v. The gradient of q stays. Those of "
            "k and v belong to the owner of the pages: add your part to what has come, then pass the sum on."
        ),
        (
            "Put the parts from your own pages aside. From hop 1 on: pass the pages, compute, add to the travelling gradients, "
            "pass these. After hop n - 1 and its pass they are home: add what you put aside. One case fills only half of the "
            "rows: write it into zeros of full size."
        ),
    ],
    misconceptions={
        **RING,
        "no-autograd-function": "Asked is a subclass of `torch.autograd.Function`, with the static methods forward and "
        "backward.",
        "no-backward": "Backward is not written yet, or gives no gradient for one of q, k and v. Return three.",
        "local-key-gradients": "The gradients of k and v have the parts of this rank's own queries only. Every later "
        "query has used these pages: the parts of the other ranks have to come home.",
        "never-sent": "The gradients of all pages that came by are added up on this rank. Those of each set of pages belong to "
        "their owner: pass them on behind the pages.",
        "last-part-only": "The parts of the ranks on the way are lost: what has come has to be added to before it is passed on.",
        "k-and-v-swapped": "The gradients of k and v are in each other's place: return those of q, k and v.",
        "averaged": "The gradients of k and v are divided by the number of ranks. They are sums over all queries, as in one process.",
        "own-part-missing": "The gradients of k and v lack the part of this rank's own queries: add it at home.",
        "own-part-twice": "The part of this rank's own queries is counted twice.",
        "not-home": "The gradients of k and v have stopped one desk before home: what a rank returns are those of the next "
        "rank's pages. Add first, then pass on, also after the last hop.",
        "last-part-missing": "The part of the last rank that saw the pages is missing: n - 1 ranks add to them.",
        "local-query-gradient": "The gradient of q comes from the rank's own pages only. Pages have to go round in backward, too.",
        "delta-missing": "The term delta is missing: softmax's backward subtracts the sum of gradient * output from every "
        "row.",
        "delta-wrong": "delta is not what it should be: of gradient * output, both of this rank's queries, the *sum* over the width.",
        "first-logsumexp": "Backward uses the logsumexp of the first pages. Save the one at the end of forward, over all keys.",
        "partial-logsumexp": "In backward you use weights of one set of pages alone. They have to be those over all keys: "
        "compute them with the logsumexp at the end of forward.",
        "mask-lost": "The causal mask is missing in backward, on the rank's own pages.",
        "cases-swapped-back": "In backward the two cases are swapped. They are those of forward, hop by hop.",
        "gradient-not-scaled": "The gradients of q and k lack the division by the root of the head's width.",
        "scaled-twice": "The gradients of q and k are divided by the root of the head's width once too often: `attend_backward` "
        "does it already.",
        "keeps-pages": "Forward keeps the pages of other ranks for backward. Keep your own: they come round again.",
        "sends-too-much-back": "Backward sends more than 4 (n - 1) times the bytes of k. Pages and their gradients make n - 1 "
        "hops each; gradients that start at hop 0 need one more.",
    },
    failures={**HANGS, "NoneType": "no-backward"},
    at_home=True,
)


@dataclass(frozen=True)
class _Both:
    forward: Tensor
    gradients: list[Tensor | None]
    kept: int
    unwaited: list[str]
    sent: int


def _both(rank, answer, q, k, v, slope) -> _Both:
    q, k, v = (part.clone().to(device()).requires_grad_() for part in (q, k, v))
    with following() as sent:
        come_late(rank)
        with kept_for_backward(nn.Module()) as kept:
            out = answer.apply(q, k, v)
        out.backward(slope.to(device()))
    gradients = [x.grad for x in (q, k, v)]
    again = answer.apply(*(x.detach().requires_grad_() for x in (q, k, v)))
    with Trace() as trace:
        again.backward(slope.to(device()))
    return _Both(out.detach(), gradients, kept.bytes, sent.unwaited, trace.record().sent())


def _run_both(answer, task: Ring) -> list[_Both]:
    if not issubclass(answer, torch.autograd.Function):
        raise Wrong(
            "no-autograd-function", expected="a torch.autograd.Function", got=f"{answer.__name__}"
        )
    wholes = task.q, task.k, task.v, task.slope
    reports = run(_both, task.ranks, answer, *(OwnPart(task.parts(whole)) for whole in wholes))
    for report in reports:
        if report.unwaited:
            raise Wrong(
                "not-waited", expected="a wait for every message", got="a message without one"
            )
    return reports


class _Gradients:
    """dQ, dK and dV of a task, by the rank whose queries gave them and the rank of the pages."""

    def __init__(self, task: Ring, **slip) -> None:
        """`slip`: the mistake, as `_pair` takes it."""
        self.task = task
        n = range(task.ranks)
        self.tables = [[self._pair(r, s, **slip) for s in n] for r in n]

    def _pair(self, rank, sender, mask="tokens", delta="right", lse="all", scalings=1):
        """What the queries of `rank` and the pages of `sender` give to q, k and v."""
        task = self.task
        mine, theirs = task.places(rank), task.places(sender)
        q, slope = task.q[:, :, mine], task.slope[:, :, mine]
        k, v = task.k[:, :, theirs], task.v[:, :, theirs]
        out, total = partial(q, task.k, task.v, mine.unsqueeze(1) >= torch.arange(task.length))
        if lse == "own":
            own = task.k[:, :, mine], task.v[:, :, mine], task._mask(rank, rank, "tokens")
            total = partial(q, *own)[1]
        elif lse == "each":
            out, total = (x.nan_to_num(0) for x in partial(q, k, v, task._mask(rank, sender, mask)))
        scale = q.shape[-1] ** -0.5
        weights = ((q @ k.mT) * scale - total.unsqueeze(-1)).exp() * task._mask(rank, sender, mask)
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

    def of_queries(self) -> list[Tensor]:
        return [sum(pair[0] for pair in row) for row in self.tables]

    def of_pages(self, which: int, rank_of: Callable[[int, int], float]) -> list[Tensor]:
        """The sum over ranks r of rank_of(r, owner) times the part of r, for each owner of pages."""
        n = range(self.task.ranks)
        return [sum(rank_of(r, owner) * self.tables[r][owner][which] for r in n) for owner in n]


def _check_both(answer, task: Ring) -> list[_Both]:
    reports, n = _run_both(answer, task), task.ranks
    outs = [report.forward for report in reports]
    expect(outs, task.outputs(), each="rank", what="the output", likely=wrong_outputs(task))
    right = _Gradients(task)
    slips = {
        "delta-missing": _Gradients(task, delta="none"),
        "first-logsumexp": _Gradients(task, lse="own"),
        "partial-logsumexp": _Gradients(task, lse="each"),
        "mask-lost": _Gradients(task, mask="own free"),
        "cases-swapped-back": _Gradients(task, mask="cases swapped"),
        "gradient-not-scaled": _Gradients(task, scalings=0),
        "scaled-twice": _Gradients(task, scalings=2),
    }
    of_delta = [_Gradients(task, delta=kind) for kind in ("mean", "gradient", "values")]
    got = [report.gradients[0] for report in reports]
    own_only = [right.tables[r][r][0] for r in range(n)]
    likely = {
        "no-backward": lambda got: any(g is None for g in got),
        "local-query-gradient": n > 1 and own_only,
        **{slug: slip.of_queries() for slug, slip in slips.items()},
        "delta-wrong": lambda got: any(same(got, slip.of_queries()) for slip in of_delta),
    }
    expect(got, right.of_queries(), each="rank", what="the gradient of q", likely=likely)
    for which, name in ((1, "k"), (2, "v")):
        got = [report.gradients[which] for report in reports]
        likely = {
            "no-backward": lambda got: any(g is None for g in got),
            "k-and-v-swapped": right.of_pages(3 - which, lambda r, owner: 1),
            **(_wrong_page_gradients(right, which) if n > 1 else {}),
            **{slug: slip.of_pages(which, lambda r, owner: 1) for slug, slip in slips.items()},
        }
        expected = right.of_pages(which, lambda r, owner: 1)
        expect(got, expected, each="rank", what=f"the gradient of {name}", likely=likely)
    return reports


def _wrong_page_gradients(right: _Gradients, which: int) -> dict[str, object]:
    """What the gradients of k or v are after a mistake on their way."""
    n = right.task.ranks
    own = right.of_pages(which, lambda r, owner: r == owner)
    others = right.of_pages(which, lambda r, owner: r != owner)
    whole = [a + b for a, b in zip(own, others, strict=True)]
    moved = [others[(r + 1) % n] for r in range(n)]
    back = [others[(r - 1) % n] for r in range(n)]
    last = right.of_pages(which, lambda r, owner: (r - owner) % n != n - 1)
    ends = right.of_pages(which, lambda r, owner: (r - owner) % n in (0, n - 1))
    here = [sum(right.tables[r][owner][which] for owner in range(n)) for r in range(n)]
    return {
        "local-key-gradients": own,
        "own-part-missing": others,
        "own-part-twice": [a + b for a, b in zip(own, whole, strict=True)],
        "last-part-missing": n > 2 and last,
        "last-part-only": n > 2 and ends,
        "never-sent": here,
        "averaged": [each / n for each in whole],
        "not-home": lambda got: any(
            same(got, [a + b for a, b in zip(own, wrong, strict=True)]) or same(got, wrong)
            for wrong in (moved, back, [whole[(r + 1) % n] for r in range(n)])
        ),
    }


@with_backward.requires("output and gradients of q, k and v are those of one process")
def output_and_gradients_of_q(answer, draw):
    _check_both(answer, ring_task(draw, draw.choice([3, 4])))


@with_backward.requires(
    "two ranks and one", needs_earlier=True, failures={"exception": "two-ranks"}
)
def two_ranks_2(answer, draw):
    with only_so_many():
        for ranks in (2, 1):
            _check_both(answer, ring_task(draw, ranks))


@with_backward.requires("forward keeps this rank's own tensors only", needs_earlier=True)
def forward_keeps_this_rank_own_tensors_only(answer, draw):
    task = ring_task(draw, draw.choice([3, 4]))
    # q, k, v, the output, a mask for each hop and the logsumexp, generously
    limit = (
        5 * task.own_bytes() + 2 * task.q.shape[1] * task.q.shape[0] * task.length // task.ranks * 4
    )
    for report in _run_both(answer, task):
        if report.kept > limit:
            raise Wrong(
                "keeps-pages", expected=f"at most {limit} bytes", got=f"{report.kept} bytes"
            )
        # kept where autograd does not see it, as an attribute of ctx
        round_trip = 4 * (task.ranks - 1) * task.own_bytes()
        if report.sent < round_trip:
            expected = f"{round_trip} bytes sent in backward: pages and their gradients"
            raise Wrong("keeps-pages", expected=expected, got=f"{report.sent} bytes")


@with_backward.requires("backward sends pages and their gradients n - 1 times", needs_earlier=True)
def backward_sends_pages_and_their_gradients_n_1(answer, draw):
    task = ring_task(draw, draw.choice([3, 4]))
    limit = 4 * (task.ranks - 1) * task.own_bytes()
    for report in _run_both(answer, task):
        if report.sent > limit:
            raise Wrong(
                "sends-too-much-back", expected=f"at most {limit} bytes", got=f"{report.sent} bytes"
            )
