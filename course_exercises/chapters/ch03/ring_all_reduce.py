"""Exercise 3.2, `ring_all_reduce`: what it asks for, and how it is checked."""

import contextlib
import math
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from course_exercises.authoring import Exercise, OwnPart, Wrong, expect, run, signs
from course_exercises.authoring.ranks import UsedEarly, come_late, following, must_have_waited
from course_utils.hardware import device
from course_utils.trace import Call, Trace

ring = Exercise(
    "3.2",
    "ring_all_reduce",
    points=3,
    minutes=75,
    kind="core",
    parameters=("tensor",),
    hints=[
        (
            "Draw three ranks in a circle, each with three chunks. In each step every rank sends one "
            "chunk to the right and receives one from the left. Which chunk has rank r just received, "
            "and so can send on in the next step?"
        ),
        (
            "In step s rank r sends chunk (r - s) mod n and receives chunk (r - s - 1) mod n. During "
            "the first n - 1 steps it adds what arrives, afterwards it overwrites. `tensor_split` gives "
            "exactly n chunks, empty ones too; `batch_isend_irecv` starts a send and a receive together."
        ),
        (
            "Split `tensor.contiguous().view(-1)` with `tensor_split(n)`; the chunks are views. For "
            "2(n - 1) steps: start the send and the receive, wait for both, add or overwrite. Where "
            "`contiguous` had to make a copy, copy the result back into the tensor."
        ),
    ],
    misconceptions={
        "all-begin-alike": "All ranks begin with `send`, and so nobody receives: start both together with "
        "`batch_isend_irecv`.",
        "nobody-answers": "A rank waits in a send or a receive that no other rank answers. Send to rank + 1 and "
        "receive from rank - 1, both modulo n, as often on every rank.",
        "sums-overwritten": "Each element comes from a single rank. Either what arrives replaces your "
        "chunk where it must be added (receive it in a buffer of its own), or the second half sends "
        "the wrong chunks: after n - 1 steps rank r owns the sum of chunk (r + 1) mod n.",
        "no-all-gather": "Each chunk is complete on one rank only. That is the reduce-scatter; now "
        "the complete chunks must travel round the ring once.",
        "added-again": "Complete chunks are added to what stood there. In the second half the "
        "chunk that arrives replaces the old one.",
        "wrong-chunks": "Some chunks are added twice, or not at all. Follow one chunk round the ring on "
        "paper: which rank has it after each step, and whose numbers are in it?",
        "one-rank-hangs": "With one rank there is nobody to talk to. n ranks take n - 1 steps to sum and "
        "n - 1 to send the sums round: here none.",
        "chunks": "The tensor is not cut into exactly n chunks whose sizes differ by one element at most. Lay it flat "
        "and use `tensor_split(n)`: where elements are few, some chunks are empty. `chunk(n)` may give fewer, and "
        "whole-number division leaves a remainder.",
        "chunk-sizes": "A rank receives a chunk of another size than was sent. Chunks may differ by "
        "one element: make the buffer like the chunk that arrives, chunk (r - s - 1) mod n in step "
        "s.",
        "another-dtype": "Another dtype than the tensor's is on the way. `torch.empty` makes float32, and "
        "`torch.empty_like` takes the tensor's; large whole numbers lose digits in floating point, and a wider "
        "dtype sends more bytes. Sum in the tensor's own.",
        "leaves-early": "A rank leaves because of what is in its own tensor, and its neighbours wait for it. "
        "Every rank takes every step: the others may have something to add.",
        "not-a-ring": "A rank sends to several others, or far more than the others do. On the ring each rank sends "
        "to its right neighbour alone, and equally much.",
        "whole-tensor": "You send the whole tensor in every step. Cut it into n chunks, and send one chunk in each of "
        "2(n-1) steps.",
        "sent-otherwise": "A rank does not send 2(n-1)/n of the tensor's bytes. Count your steps: one chunk travels in each "
        "of n - 1 steps that add, and in each of n - 1 steps that overwrite.",
    },
    things="sums",
    failures={
        "there is no rank": "no-such-rank",
        "timeout": "nobody-answers",
        "mismatch": "chunk-sizes",
    },
)


@dataclass(frozen=True)
class _Summed:
    """The tensors of a rank after each call, the messages that nobody waited for, and those whose
    tensor was used before somebody did."""

    tensors: list[Tensor]
    unwaited: list[str]
    early: list[str]


def _summed(rank, answer, own: list[Tensor], columns: bool = False, watched=False) -> _Summed:
    """Hands in the rank's tensor of each case; with `columns`, every second column of it, which is
    a view that is not contiguous. `watched` says whether to look for what is used early."""
    tensors = [tensor.to(device()) for tensor in own]
    come_late(rank)
    with following() as sent:
        with UsedEarly(sent) if watched else contextlib.nullcontext() as used:
            for tensor in tensors:
                answer(tensor[:, ::2] if columns else tensor)
        early = used.kinds if used else []
    return _Summed(tensors, sent.unwaited, early)


def _used_early(answer, tensors: list[Tensor]) -> bool:
    """Whether a message's tensor is used before it has come. It takes a run of its own, since to
    look for it takes seconds, and only a wrong sum asks."""
    own = OwnPart([[tensor] for tensor in tensors])
    return any(report.early for report in run(_summed, len(tensors), answer, own, False, True))


def _run_sums(answer, cases: list[list[Tensor]], columns: bool = False) -> list[list[Tensor]]:
    """For each case, what the tensor of every rank has become."""
    own = OwnPart([*zip(*cases, strict=True)])
    reports = run(_summed, len(cases[0]), answer, own, columns)
    must_have_waited([report.unwaited for report in reports])
    return [list(tensors) for tensors in zip(*(report.tensors for report in reports), strict=True)]


def _traced_sums(rank, answer, own: list[Tensor], columns: list[bool]) -> list[list[Call]]:
    """The calls for the rank's tensor of each case; for every second column of it, if `columns`."""
    reports = []
    for tensor, strided in zip(own, columns, strict=True):
        tensor = tensor.to(device())
        with Trace() as trace:
            answer(tensor[:, ::2] if strided else tensor)
        reports.append(trace.record().calls)
    return reports


def _check_sums(answer, cases: list[list[Tensor]], mistaken=None) -> None:
    """`cases` holds a list with one tensor a rank for each call; `mistaken` maps a misconception
    to a function of (got, tensors) of one case."""
    ranks = len(cases[0])
    for got, tensors in zip(_run_sums(answer, cases), cases, strict=True):
        sums = [sum(tensors)] * ranks
        extra = {slug: fits(got, tensors) for slug, fits in (mistaken or {}).items()}
        likely = {
            # of a single element the others may fit by chance
            "chunks": extra.pop("chunks", False),
            **{slug: sign for slug, sign in signs(tensors, sums).items() if slug in WHOLE},
            "sums-overwritten": _of_one_rank(got, tensors),
            "added-again": _added_again(got, tensors),
            "not-waited": lambda _, tensors=tensors: _used_early(answer, tensors),
            "no-all-gather": _complete_somewhere(got, tensors),
            **extra,
            "wrong-chunks": [g.shape for g in got] == [s.shape for s in sums],
        }
        what = f"the sum of {ranks} tensors of shape {tuple(sums[0].shape)}"
        expect(got, sums, each="rank", what=what, likely=likely)


WHOLE = "unchanged", "mean-not-sum"  # the usual mistakes that have nothing to do with chunks


def _not_zero(draw, shape: tuple[int, ...]) -> Tensor:
    """Whole numbers, none of them 0: of a few, all might be, and a rank that then leaves is a
    mistake that another requirement names."""
    numbers = draw.whole(max(1, math.prod(shape)))[: math.prod(shape)].view(shape)
    return numbers.where(numbers != 0, torch.ones(()))


def _of_one_rank(got: list[Tensor], tensors: list[Tensor]) -> bool:
    """Whether each element is what it was on some rank."""
    return all(torch.stack([g == own for own in tensors]).any(dim=0).all() for g in got)


def _complete_somewhere(got: list[Tensor], tensors: list[Tensor]) -> bool:
    """Whether each element is complete on some rank, and on the others a sum of what some had."""
    counts = range(1, len(tensors) + 1)
    sums = [sum(some) for count in counts for some in combinations(tensors, count)]
    partial = all(torch.stack([g == each for each in sums]).any(dim=0).all() for g in got)
    return partial and bool(torch.stack([g == sums[-1] for g in got]).any(dim=0).all())


def _added_again(got: list[Tensor], tensors: list[Tensor]) -> bool:
    total = sum(tensors)
    pairs = zip(got, tensors, strict=True)
    return all(((g == total) | (g == total + own)).all() for g, own in pairs)


def _remainder_left(got: list[Tensor], tensors: list[Tensor]) -> bool:
    rest = tensors[0].numel() % len(tensors)
    done = tensors[0].numel() - rest
    total = sum(tensors)
    pairs = zip(got, tensors, strict=True)
    return (
        rest > 0
        and tensors[0].dim() > 0
        and all(
            torch.equal(g[:done], total[:done]) and torch.equal(g[done:], own[done:])
            for g, own in pairs
        )
    )


@ring.requires(
    "two ranks end with the sum of their tensors",
    failures={
        **dict.fromkeys(("waits in recv", "wait in recv", "finished without"), "nobody-answers"),
        "waits in send": "all-begin-alike",
    },
)
def two_ranks_end_with_the_sum_of_their(answer, draw):
    length = 2 * draw.integer(2, 6)
    _check_sums(answer, [[draw.whole(length) for _ in range(2)]])


@ring.requires("three ranks do", needs_earlier=True)
def three_ranks_do(answer, draw):
    length = 3 * draw.integer(2, 6)
    cases = [[draw.whole(length) for _ in range(3)]]
    _check_sums(answer, cases, {"two-ranks": lambda got, tensors: True})


@ring.requires(
    "one rank keeps its tensor",
    failures=dict.fromkeys(("exception", "timeout"), "one-rank-hangs"),
)
def one_rank_keeps_its_tensor(answer, draw):
    _check_sums(answer, [[draw.whole(5)]])


@ring.requires(
    "lengths that do not divide by the number of ranks",
    failures={"raised IndexError": "chunks", "timeout": "chunks"},
)
def lengths_that_do_not_divide_by_the_number(answer, draw):
    ranks = draw.integer(3, 4)
    lengths = [ranks * draw.integer(3, 6) + rest for rest in (1, ranks - 1)] + [ranks + 1]
    cases = [[draw.whole(length) for _ in range(ranks)] for length in lengths]
    _check_sums(answer, cases, {"chunks": _remainder_left})


@ring.requires(
    "tensors with fewer elements than ranks, and with none",
    failures=dict.fromkeys(("exception", "timeout"), "chunks"),
)
def tensors_with_fewer_elements_than_ranks(answer, draw):
    ranks = draw.integer(3, 4)
    shapes = [(ranks - 1,), (1,), (0,), ()]
    cases = [[_not_zero(draw, shape) for _ in range(ranks)] for shape in shapes]
    _check_sums(answer, cases, {"chunks": _remainder_left})


@ring.requires(
    "several dimensions, and a tensor that is not contiguous",
    failures={"RuntimeError": "needs-contiguous"},
)
def several_dimensions_and_a_tensor_that_is_not(answer, draw):
    ranks, rows, pairs = draw.integer(2, 3), draw.integer(3, 5), draw.integer(2, 4)
    _check_sums(answer, [[draw.whole(rows, 5) for _ in range(ranks)]])
    # of 6 columns, every second one can be viewed as a vector with a stride; of 7 it cannot
    columns = (2 * pairs + 1, 2 * pairs)
    cases = [[draw.whole(rows, count) for _ in range(ranks)] for count in columns]
    for got, wholes in zip(_run_sums(answer, cases, columns=True), cases, strict=True):
        expected = [whole.clone() for whole in wholes]
        for whole in expected:
            whole[:, ::2] = sum(wholes)[:, ::2]
        expect(got, expected, each="rank", likely={"needs-contiguous": wholes})


@ring.requires(
    "integers and double precision are summed exactly",
    failures={
        "can't be cast to": "mean-not-sum",  # of integers, `/=` makes floats
        **dict.fromkeys(("exception", "mismatch", "signal", "timeout"), "another-dtype"),
    },
)
def integers_and_double_precision_are_summed_exactly(answer, draw):
    ranks, length = draw.integer(2, 3), draw.integer(5, 9)
    large = [2**40 + draw.integers(length) for _ in range(ranks)]
    precise = [1 + draw.tensor(length, dtype=torch.float64) * 1e-9 for _ in range(ranks)]
    for tensors, tolerance in ((large, 0), (precise, 1e-14)):
        [got] = _run_sums(answer, [tensors])
        total = sum(tensors)
        nearly = all(torch.allclose(g.double(), total.double(), rtol=1e-3) for g in got)
        likely = {
            "unchanged": tensors,
            "sums-overwritten": _of_one_rank(got, tensors),
            "added-again": _added_again(got, tensors),
            "no-all-gather": _complete_somewhere(got, tensors),
            "another-dtype": nearly,
        }
        expect(got, [total] * ranks, each="rank", tolerance=tolerance, likely=likely)


@ring.requires(
    "every rank sends 2(n-1)/n of the tensor's bytes, point to point",
    failures={"timeout": "leaves-early"},
    needs_earlier=True,  # a message that nobody waits for may hold up all ranks
)
def every_rank_sends_2_n_1_n(answer, draw):
    first = draw.integer(3, 4)
    for ranks in (first, 7 - first):
        length, pairs = ranks * draw.integer(20, 40), draw.integer(20, 30)
        shapes = [(length,), (length + 1,), (length - 1,), (1, length), (ranks - 1,)]
        shapes += [(3, 2 * pairs), (length,)]
        columns = [False] * 5 + [True, False]
        cases = [[draw.whole(*shape) for _ in range(ranks)] for shape in shapes]
        cases[-1][draw.integer(0, ranks - 1)].zero_()  # the others have something to add
        own = OwnPart([*zip(*cases, strict=True)])
        reports = run(_traced_sums, ranks, answer, own, columns)
        for shape, strided, calls in zip(shapes, columns, zip(*reports, strict=True), strict=True):
            length = math.prod(shape) // (2 if strided else 1)
            _check_traffic([*calls], length, rows=len(shape) > 1 and not strided)


def _check_traffic(calls: list[list[Call]], length: int, rows: bool) -> None:
    """Raises Wrong unless every rank sent 2(n-1) chunks of `length` / n float32, up to padding.
    `rows` says that the tensor has a single row."""
    ranks = len(calls)
    others = {call.op for own in calls for call in own} - {"send", "recv"}
    if others:
        raise Wrong("torchs-own", expected="send and recv", got=", ".join(sorted(others)))
    dtypes = {call.dtype for own in calls for call in own} - {"float32"}
    if dtypes:
        got = f"{', '.join(sorted(dtypes))} on the way"
        raise Wrong("another-dtype", expected="float32, as the tensor", got=got)
    sent = [sum(call.bytes for call in own if call.sends) for own in calls]
    messages = {call.bytes for own in calls for call in own if call.sends}
    steps, size = 2 * (ranks - 1), 4
    smallest, largest = length // ranks * size, math.ceil(length / ranks) * size
    low, high = steps * smallest, steps * largest
    if all(low <= bytes <= high for bytes in sent):
        _check_messages(calls, smallest, largest, length * size)
        return
    mistakes = {
        "chunks": (rows and messages == {0, length * size})
        or (max(messages) - min(messages) > size and len(messages) < ranks),
        "not-a-ring": max(sent) >= 2 * max(1, min(sent)),
        "whole-tensor": messages == {length * size},
        "sent-otherwise": True,
    }
    raise Wrong(
        next(slug for slug, made in mistakes.items() if made),
        expected=f"{low} bytes from each of {ranks} ranks" if low == high else f"{low} to {high}",
        got=f"{sent}, for a tensor of {length * size} bytes",
    )


def _check_messages(calls: list[list[Call]], smallest: int, largest: int, whole: int) -> None:
    """Raises Wrong unless a rank sends to one other, chunks between these two sizes, in bytes; a chunk may
    travel in several messages."""
    receivers = [{call.ranks[1] for call in own if call.sends} for own in calls]
    if max(map(len, receivers)) > 1:
        expected = "messages to one neighbour"
        raise Wrong("not-a-ring", expected=expected, got=f"messages to {receivers}")
    messages = sorted({call.bytes for own in calls for call in own if call.sends})
    if max(sum(call.sends for call in own) for own in calls) > 2 * (len(calls) - 1):
        smallest = 0
    if any(not smallest <= bytes <= largest for bytes in messages):
        slug = "whole-tensor" if messages == [whole] else "chunks"
        expected = f"chunks of {smallest} to {largest} bytes"
        raise Wrong(slug, expected=expected, got=f"chunks of {messages} bytes")
