"""Exercise 10.3, `ring_attention`: what it asks for, and how it is checked."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from course_exercises.authoring import Exercise, OwnPart, Wrong, expect, expect_type, run
from course_exercises.authoring.ranks import come_late, following
from course_exercises.chapters.ch10.shared import (
    HANGS,
    MESSAGES,
    Meanwhile,
    Ring,
    any_of,
    halves,
    merged,
    must_have_come,
    must_run_beside,
    only_so_many,
    plain,
    ring_task,
    wrong_cases,
    wrong_masks,
)
from course_utils.hardware import device
from course_utils.trace import Trace, largest_tensor

ring = Exercise(
    "10.3",
    "ring_attention",
    points=3,
    minutes=45,
    things="outputs",
    parameters=("q", "k", "v"),
    hints=[
        (
            "First write it with `pass_on`: begin with your own keys and values and a triangle of tokens as the mask; then n - 1 "
            "times pass both on, see whose they are, attend with the queries that may see them, merge. Where would you start a hop, and "
            "where wait for it, so that it is under way while you attend?"
        ),
        (
            "After h hops you have the keys of rank - h, modulo n. If that rank stands before you (h <= rank), attend "
            "with all queries to the first half of its keys; else with the second half of your queries to all of them. "
            "`batch_isend_irecv` returns at once, with a list of what there is to wait for."
        ),
        (
            "In each turn but the last: start to send the keys that you have and to receive into new tensors; attend and "
            "merge; wait; what has come are the keys of the next turn. In the second case only the second half of output and "
            "logsumexp changes: merge that half, and join it again with the first."
        ),
    ],
    misconceptions={
        **MESSAGES,
        "wrong-hops": "Your queries have not met the keys of each rank once. There are n - 1 hops: after fewer some keys "
        "are missing, after one more your own are with you again.",
        "wrong-mask": "Your mask is not that of the sequence. On its own keys a rank needs a triangle of tokens: a query sees the tokens "
        "before it and itself. Of another rank's keys a query sees a chunk whole or not at all: no triangle there.",
        "wrong-case": "You take one rank's keys for those of another, one case for the other, or other pairs of chunks than a case has. "
        "Pass keys on to rank + 1; after h hops you have those of rank - h. As long as h <= rank it stands before you, and all your queries see its first chunk; "
        "else your second chunk sees both of its chunks, and your first one none.",
        "keys-and-values-parted": "Of keys and values only one travels: after a hop a rank weighs the values of one rank by "
        "the keys of another. Pass both on.",
        "not-scaled": "Your scores are not divided by the root of the head's width, q.shape[-1] ** 0.5, as in `attend`.",
        "not-merged": "You do not merge partial results by their logsumexps, at least not in each hop. A mean, a sum or the "
        "last of them is another result. Use `merged`, and keep both things that it returns.",
        "not-a-number": "There is NaN in your output, as where a query sees none of some keys: its logsumexp is minus "
        "infinity. Begin with your own keys, and attend with those queries only that see something.",
        "all-at-once": "You bring the keys of several ranks at once, or join them in a tensor of scores that is larger than "
        "those with one set of keys. Pass one set on to the neighbour at a time, and merge after each hop.",
        "masked-pairs": "You compute pairs of chunks that the mask leaves out, and throw them away. In a zig-zag "
        "two of four pairs remain in each hop: choose the slices, then attend.",
    },
    failures=HANGS,
)


@dataclass(frozen=True)
class _Forward:
    out: Tensor
    unwaited: list[str]
    used_early: bool
    beside: int  # bytes received while the rank computed
    at_once: int  # most of them that were under way together
    sent: int
    collectives: list[str]  # names of what was called beside messages
    largest: int
    flops: int
    changed: bool


def _forward(rank, answer, *parts) -> _Forward:
    q, k, v = (part.clone().to(device()) for part in parts)
    before = [x.clone() for x in (q, k, v)]
    with following() as sent, Meanwhile(sent) as meanwhile:
        come_late(rank)
        out = plain(answer(q, k, v))
    seen = sent.unwaited, meanwhile.used_early, meanwhile.bytes, meanwhile.most
    changed = not all(map(torch.equal, before, (q, k, v)))
    with Trace() as trace, largest_tensor() as largest, FlopCounterMode(display=False) as flops:
        answer(q, k, v)
    record = trace.record()
    others = sorted({call.op for call in record.calls} - {"send", "recv"})
    counted = record.sent(), others, largest.bytes, flops.get_total_flops()
    return _Forward(out, *seen, *counted, changed)


def _run_forward(answer, task: Ring) -> list[_Forward]:
    own = [OwnPart(task.parts(whole)) for whole in (task.q, task.k, task.v)]
    reports = run(_forward, task.ranks, answer, *own)
    must_have_come(reports)
    for report in reports:
        expect_type(report.out, Tensor)
    return reports


def _check_forward(answer, task: Ring) -> None:
    reports = _run_forward(answer, task)
    got = [report.out for report in reports]
    expect(got, task.outputs(), each="rank", what="the output", likely=_wrong_outputs(task))
    if any(report.changed for report in reports):
        raise Wrong("input-changed", expected="q, k and v as before", got="other values")


def _wrong_outputs(task: Ring) -> dict:
    """Signs of mistakes, the outputs that each of them gives."""
    return {
        "wrong-hops": any_of(lambda: _other_hops(task)),
        "wrong-mask": any_of(lambda: map(task.outputs, wrong_masks(task))),
        "wrong-case": any_of(lambda: map(task.outputs, wrong_cases(task))),
        "keys-and-values-parted": any_of(lambda: (task.outputs(stays=name) for name in "kv")),
        "not-scaled": any_of(lambda: [task.outputs(scale=task.q.shape[-1] ** 0.5)]),
        "not-merged": any_of(lambda: _badly_merged(task)),
        "not-a-number": lambda got: any(out.isnan().any() for out in got),
    }


def _other_hops(task: Ring) -> Iterator[list[Tensor]]:
    """After fewer hops; and after one more, with the own keys once more, in either of two cases."""
    yield from (task.outputs(hops=hops) for hops in range(task.ranks - 1))
    triangle, late_rows, _ = halves(task)
    yield from (task.outputs(again=mask) for mask in (triangle, late_rows))


def _badly_merged(task: Ring) -> Iterator[list[Tensor]]:
    ways = [
        lambda one, other: ((one[0] + other[0]) / 2, torch.logaddexp(one[1], other[1])),
        lambda one, other: ((one[0] + other[0]) / 2, one[1]),
        lambda one, other: (one[0] + other[0], one[1]),
        lambda one, other: other,
        lambda one, other: (merged(*one, *other)[0], one[1]),
    ]
    for combine in ways:
        for where in (lambda r, s: True, lambda r, s: s < r, lambda r, s: s > r):
            yield task.running(combine, where)


@ring.requires("queries see what the mask allows of the keys of all ranks")
def queries_see_what_the_mask_allows(answer, draw):
    _check_forward(answer, ring_task(draw, draw.choice([3, 4])))


@ring.requires("two ranks, and one", needs_earlier=True, failures={"exception": "other-number"})
def two_ranks(answer, draw):
    with only_so_many():
        for ranks in (2, 1):
            _check_forward(answer, ring_task(draw, ranks))


@ring.requires("keys and values make n - 1 hops, and nothing else is sent", needs_earlier=True)
def keys_and_values_make_n_1_hops(answer, draw):
    task = ring_task(draw, draw.choice([3, 4]))
    limit = 2 * (task.ranks - 1) * task.own_bytes()
    for report in _run_forward(answer, task):
        if report.collectives:
            names = ", ".join(report.collectives)
            raise Wrong("all-at-once", expected="messages to a neighbour", got=names)
        if report.sent > limit:
            expected = f"at most {limit} bytes: n - 1 times those of k and of v"
            raise Wrong("sends-too-much", expected=expected, got=f"{report.sent} bytes")


@ring.requires("the next keys are under way while these are used", needs_earlier=True)
def the_next_keys_are_under_way(answer, draw):
    task = ring_task(draw, draw.choice([3, 4]))
    reports, one_set = _run_forward(answer, task), 2 * task.own_bytes()
    must_run_beside([report.beside for report in reports], (task.ranks - 1) * one_set)
    if any(report.at_once > one_set for report in reports):
        raise Wrong("all-at-once", expected="one set of keys on its way", got="several")


@ring.requires("scores of one set of keys at a time, and of visible pairs only", needs_earlier=True)
def scores_of_one_set_of_keys_at(answer, draw):
    ranks, heads, half, width = draw.choice([3, 4]), 2, draw.choice([12, 16]), 2
    shape = 1, heads, 2 * half * ranks, width
    task = Ring(ranks, *(draw.tensor(*shape) for _ in range(4)))
    pair = 4 * heads * half * half * width  # operations: two products
    limits = heads * (2 * half) ** 2 * 4, (4 + 2 * (ranks - 1)) * pair
    for report in _run_forward(answer, task):
        if report.largest > limits[0]:
            expected, got = f"at most {limits[0]} bytes in a tensor", f"{report.largest} bytes"
            raise Wrong("all-at-once", expected=expected, got=got)
        if report.flops > limits[1]:
            expected = f"at most {limits[1] // pair} pairs of chunks"
            raise Wrong("masked-pairs", expected=expected, got=f"{report.flops / pair:g} pairs")
