"""Exercise 5.6, `exchange`: what it asks for, and how it is checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from course_exercises.authoring import Exercise, OwnPart, Wrong, expect, expect_type, run, same
from course_exercises.authoring.ranks import come_late, must_have_waited, waits
from course_utils.comm import private
from course_utils.comm.intercept import hand_work, listening
from course_utils.hardware import device

exchanging = Exercise(
    "5.6",
    "exchange",
    points=3,
    minutes=40,
    kind="core",
    parameters=("activations", "gradients"),
    hints=[
        (
            "Draw three ranks in a line, each with an arrow to both sides. Which of them has a partner "
            "that receives, if each begins with `dist.send`?"
        ),
        (
            "`dist.isend` and `dist.irecv` only start a message, and return a handle; `wait()` on the "
            "handle ends it. Start everything, then wait for everything. The ends of the line have "
            "one neighbour only."
        ),
        (
            "For each neighbour that exists: make the outgoing tensor contiguous, make room like it, "
            "start the send and the receive. `dist.batch_isend_irecv` starts a list of P2POp at once. "
            "Wait for every handle, then return the two rooms, None where there is no neighbour."
        ),
    ],
    misconceptions={
        "waits-forever": "Ranks wait for each other, or for a message that nobody sends or receives. Each `send` needs a "
        "`recv` on the neighbour, and may wait for it: where both begin with `send`, or both with `recv`, neither goes on. "
        "Start all messages with `isend` and `irecv`, and wait afterwards. The first stage gets nothing from before it, "
        "and the last nothing from behind it: the ranks form no ring.",
        "not-a-neighbour": "Not every rank has two neighbours: the first has none before it, the last none after it, and "
        "there the tensor is None. Send and receive with rank - 1 and rank + 1 where they exist, and with nobody else: "
        "neither round a ring, nor with yourself, nor in a collective.",
        "alone": "A single rank has nobody to talk to. Return (None, None) there, and start nothing, not even a batch of "
        "no messages.",
        "asks-the-numbers": "You ask a tensor whether its numbers are true, or whether it has any. Zeros and tensors without "
        "rows are handed over too; None alone says that there is no neighbour: ask `is not None`.",
        "other-results": "You return something else than what has come in: the two in the other order, what the rank was "
        "handed, or an empty room where there is no neighbour. Return what comes from the previous rank, then what comes "
        "from the next one, and None where there is none.",
        "message-missing": "A rank does not send to one of its neighbours, or does not receive from it, and what it "
        "returns there has come from nobody. Each neighbour needs a send and a receive: activations go to the next rank, "
        "gradients to the previous one.",
        "tied-to-a-graph": "What you return requires a gradient, or belongs to the graph of what was handed in, as a clone "
        "of it does: that graph stays in memory, and backward would run through it. Make the room with "
        "`torch.empty_like`, and leave `requires_grad` to whoever goes on with it.",
        "room-assumed": "The room for what comes in has another shape or dtype than that. What the previous rank sends looks "
        "like the gradients that go back to it, and what the next rank sends like the activations that go there: "
        "`torch.empty_like` takes shape and dtype of these.",
        "layout-assumed": "The right numbers come in, in the wrong places: you send them as they lie in memory, and the "
        "neighbour's tensor lies there in another way. Send `tensor.contiguous()`, and make the room contiguous.",
        "room-kept": "The room for what comes in is the same in every call, and so what an earlier call has "
        "returned changes under the hands of whoever keeps it. Make a new one in each call.",
    },
    things="tensors",
    failures={
        "Boolean value of Tensor": "asks-the-numbers",
        "names itself": "not-a-neighbour",
        "same as the rank of the current process": "not-a-neighbour",
        "there is no rank": "not-a-neighbour",
        "timeout": "waits-forever",
    },
)

Handed = tuple[Tensor | None, Tensor | None]  # to the next rank, to the previous rank
MESSAGES = ("send", "recv_", "recv_any_source_")


@dataclass
class _Exchanged:
    """What a rank saw of one call."""

    received: object
    changed: bool = False  # have the tensors changed that were handed in, or what they belong to?
    calls: list[tuple[str, int | None]] = field(default_factory=list)  # name and peer
    sent: int = 0  # bytes
    graph: bool = False  # does what it returned require a gradient, or belong to a graph?
    reused: bool = False  # was something received into a tensor that was handed in?
    returned_before: bool = False  # has an earlier call returned this very memory?
    unwaited: list[str] = field(default_factory=list)  # messages that nobody waited for


def _exchanged(rank, answer, own: list[Handed], prepare) -> list[_Exchanged]:
    """Runs the answer on this rank's tensors of each case, as `prepare` makes them."""
    come_late(rank)
    reports, returned = [], set()
    for handed in own:
        report = _one_exchange(answer, handed, prepare)
        tensors = filter(torch.is_tensor, private.tree_leaves(report.received))
        came = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
        report.returned_before = bool(came & returned)
        returned |= came
        reports.append(report)
    return reports


def _one_exchange(answer, own: Handed, prepare) -> _Exchanged:
    handed = [None if t is None else prepare(t.to(device())) for t in own]
    tensors = [t for t in handed if t is not None]
    before = [(t.detach().clone(), t.stride(), t.requires_grad, t.grad_fn) for t in tensors]
    report = _Exchanged(None)
    memory = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
    messages: list[tuple[str, dist.Work]] = []

    def started(name, work):
        if work is not None:
            messages.append((name, work))

    def on_call(name, arguments):
        report.calls.append((name, arguments.get("dst", arguments.get("src"))))
        if name not in MESSAGES:
            return None
        if name == "send":
            report.sent += arguments["tensors"][0].nbytes
        else:
            report.reused |= arguments["tensors"][0].untyped_storage().data_ptr() in memory
        return lambda result: hand_work(result, lambda work: started(name, work))

    with waits() as awaited, listening(on_call):
        report.received = answer(*handed)
    unwaited = [(name, work) for name, work in messages if work not in awaited]
    report.unwaited = [name.partition("_")[0] for name, _ in unwaited]
    for _, work in unwaited:
        work.wait()  # so that what comes next is the same in every run
    received = [t for t in private.tree_leaves(report.received) if torch.is_tensor(t)]
    report.graph = any(t.requires_grad for t in received)
    now = [(t, t.stride(), t.requires_grad, t.grad_fn) for t in tensors]
    report.changed = not same(now, before, tolerance=0)
    return report


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _in_a_graph(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_() * 1


def _line(ranks: int, make: Callable[[int], Tensor], back: Callable | None = None) -> list[Handed]:
    """What each rank of a line is handed; `make(link)` makes a tensor for the link from rank
    `link` to the next, and `back(link)`, if it is another function, the one that goes back."""
    to_next = [*(make(link) for link in range(ranks - 1)), None]
    to_previous = [None, *((back or make)(link) for link in range(ranks - 1))]
    return list(zip(to_next, to_previous, strict=True))


def _check_exchange(
    answer, cases: list[list[Handed]], prepare=_as_it_is, alone: bool = False
) -> None:
    """Hands out each case, in turn; with `alone`, nothing but the tensors may be sent."""
    ranks = len(cases[0])
    reports = run(_exchanged, ranks, answer, OwnPart([*zip(*cases, strict=True)]), prepare)
    for seen in zip(*reports, strict=True):
        _check_messages(seen)
    if any(each.returned_before for report in reports for each in report):
        got = "the memory of what an earlier call has returned"
        raise Wrong("room-kept", expected="new tensors from each call", got=got)
    for i, case in enumerate(cases):
        seen = [report[i] for report in reports]
        to_next = [None if t is None else prepare(t) for t, _ in case]
        to_previous = [None if t is None else prepare(t) for _, t in case]
        expected = list(zip([None, *to_next[:-1]], [*to_previous[1:], None], strict=True))
        own = list(zip(to_next, to_previous, strict=True))
        missing = any(
            len(report.calls) < 2 * sum(t is not None for t in tensors)
            for report, tensors in zip(seen, own, strict=True)
        )
        _check_received([report.received for report in seen], expected, own, missing)
        if any(report.changed for report in seen):
            raise Wrong("input-changed", expected="the tensors as they were", got="others")
        if any(report.graph for report in seen):
            got = "one that requires a gradient"
            raise Wrong("tied-to-a-graph", expected="a tensor by itself", got=got)
        for report, tensors in zip(seen, own, strict=True):
            whole = sum(t.nbytes for t in tensors if t is not None)
            if alone and report.sent > whole:
                got = f"{report.sent} bytes"
                raise Wrong("sends-too-much", expected=f"{whole} bytes", got=got)


def _check_messages(seen: Sequence[_Exchanged]) -> None:
    """Raises Wrong unless every rank sent and received point to point, with its neighbours, and
    waited for all of it. What this finds might still give the right tensors, by chance."""
    for rank, report in enumerate(seen):
        for name, peer in report.calls:
            if name not in MESSAGES:
                got = f"a collective, {name.strip('_')}"
                raise Wrong("not-a-neighbour", expected="send and recv", got=got)
            if peer is None or abs(peer - rank) != 1:
                other = "any rank" if peer is None else f"rank {peer}"
                got = f"rank {rank}: {'send to' if name == 'send' else 'recv from'} {other}"
                raise Wrong("not-a-neighbour", expected="messages with neighbours only", got=got)
    for rank, report in enumerate(seen):
        if report.reused:
            got = f"rank {rank} receives into a tensor that it was handed"
            raise Wrong("input-changed", expected="a new tensor", got=got)
    must_have_waited([report.unwaited for report in seen])


def _check_received(got: list, expected: list[Handed], own: list[Handed], missing: bool) -> None:
    """`missing` says whether a rank has started fewer messages than it has tensors to hand over and to get."""
    if not all(result is None for result in got):
        for result in got:
            expect_type(result, (tuple, list))
    likely = {
        "asks-the-numbers": lambda got: any(
            g is None and e is not None and not e.any()
            for pairs in zip(got, expected, strict=True)
            for g, e in zip(*pairs, strict=True)
        ),
        "other-results": lambda got: (
            any(same(got, others) for others in (own, _turned(own), _turned(expected)))
            or not got[0][0] is got[-1][1] is None
        ),
        "message-missing": missing,
        "rounded": lambda got: same(got, expected, tolerance=0.02),  # bfloat16 has 8 bits
        "layout-assumed": lambda got: same(_sorted(got), _sorted(expected)),
    }
    expect(got, expected, each="rank", likely=likely, tolerance=0)


def _turned(pairs: list[Handed]) -> list[Handed]:
    return [pair[::-1] for pair in pairs]


def _sorted(pairs: list[Handed]) -> list:
    """The numbers of each tensor in ascending order, in its shape."""
    tensors = [tensor for pair in pairs for tensor in pair if tensor is not None]
    return [tensor.flatten().sort().values.view(tensor.shape) for tensor in tensors]


AT_AN_END = ("TypeError", "AttributeError", "ValueError")
ENDS = dict.fromkeys(AT_AN_END, "not-a-neighbour")


def _whole_numbers(draw) -> Callable[[int], Tensor]:
    """Makes tensors of one shape, which differs when it is transposed."""
    rows, columns = draw.sample(range(2, 6), 2)
    return lambda link: draw.whole(rows, columns)


@exchanging.requires("two stages hand over at the same time", failures=ENDS)
def two_stages_hand_over_at_the_same_time(answer, draw):
    _check_exchange(answer, [_line(2, _whole_numbers(draw))])


@exchanging.requires("three stages do, and four", failures=ENDS)
def three_stages_do(answer, draw):
    for ranks in (3, 4):
        _check_exchange(answer, [_line(ranks, _whole_numbers(draw))])


@exchanging.requires(
    "a single stage hands over nothing",
    failures=dict.fromkeys(
        (*AT_AN_END, "exception", "timeout", "names itself", "there is no rank"), "alone"
    ),
)
def a_single_stage_hands_over_nothing(answer, draw):
    _check_exchange(answer, [_line(1, _whole_numbers(draw))])


@exchanging.requires(
    "shapes that differ from stage to stage, several times in a row",
    failures=dict.fromkeys(("mismatch", "signal", "timeout"), "room-assumed"),
)
def shapes_that_differ_from_stage_to_stage(answer, draw):
    shapes = [(draw.integer(2, 3), 4), (draw.integer(4, 5), 2, 3), (draw.integer(5, 6), 7)]
    ranks, times = draw.integer(3, 4), draw.integer(2, 3)
    cases = [_line(ranks, lambda link: draw.whole(*shapes[link])) for _ in range(times)]
    _check_exchange(answer, cases, alone=True)


@exchanging.requires(
    "double precision, and activations that belong to a graph",
    failures=dict.fromkeys(("mismatch", "signal", "timeout"), "room-assumed"),
    needs_earlier=True,
)
def double_precision_and_activations_that_belong(answer, draw):
    ranks = draw.integer(3, 4)
    rows = draw.integer(2, 4)
    dtypes = [*draw.sample((torch.float64, torch.float32), 2), torch.float64]  # of each link
    line = _line(ranks, lambda link: draw.tensor(rows, 2, dtype=dtypes[link]))
    _check_exchange(answer, [line], _in_a_graph)


@exchanging.requires(
    "tensors of zeros",
    failures=dict.fromkeys(("timeout", "exception", "mismatch"), "asks-the-numbers"),
    needs_earlier=True,
)
def tensors_of_zeros(answer, draw):
    ranks, rows = draw.integer(2, 3), draw.integer(2, 4)
    cases = [_line(ranks, lambda link, n=n: torch.zeros(n, 3)) for n in (rows, 0)]
    _check_exchange(answer, cases)


@exchanging.requires(
    "tensors that are not contiguous",
    failures=dict.fromkeys(("exception", "timeout", "mismatch", "signal"), "needs-contiguous"),
    needs_earlier=True,
)
def tensors_that_are_not_contiguous(answer, draw):
    ranks = draw.integer(2, 3)
    (rows, columns), pages = draw.sample(range(2, 6), 2), draw.integer(2, 3)

    def plain(link):
        return draw.whole(rows, columns)

    def transposed(link):
        return draw.whole(columns, rows).t()

    def permuted(link):
        return draw.whole(pages, columns, rows).permute(2, 0, 1)

    def every_second(link):
        return draw.whole(rows, pages, 2 * columns)[..., ::2]

    # The two ends of a link lay out their tensors in different ways.
    _check_exchange(answer, [_line(ranks, transposed, plain), _line(ranks, plain, transposed)])
    _check_exchange(answer, [_line(ranks, permuted, every_second)])
