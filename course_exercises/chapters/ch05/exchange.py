"""Exercise 5.6, `exchange`: what it asks for, and how it is checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from course_exercises.authoring import Exercise, OwnPart, Wrong, expect, expect_type, run, same
from course_exercises.authoring.ranks import come_late, waits
from course_utils.comm import private
from course_utils.comm.intercept import hand_work, listening
from course_utils.hardware import device

exchanging = Exercise(
    "5.6",
    "exchange",
    points=3,
    minutes=30,
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
        "both-send": "Two neighbours wait in `send` to each other, and neither receives. Start the "
        "messages with `isend` and `irecv` and wait afterwards, or let one of two neighbours "
        "receive first.",
        "both-receive": "Two neighbours wait in `recv` from each other, and neither has sent. Start "
        "the messages with `isend` and `irecv` and wait afterwards.",
        "unanswered": "A rank waits for a message whose other end does not exist: every send needs "
        "a recv on the neighbour, and every recv a send.",
        "two-stages-only": "Two stages manage, and a longer line hangs: a stage in the middle has "
        "two neighbours, and waits for one of them while the other waits for it.",
        "beyond-the-ends": "A rank talks to one that does not exist. Activations go to rank + 1, "
        "gradients to rank - 1; the first rank has no previous one, and the last no next one.",
        "room-at-the-ends": "Where a rank has no neighbour nothing comes: return None there, not the "
        "empty room.",
        "truth-of-a-tensor": "`if activations:` asks whether its numbers are true. Ask "
        "`if activations is not None:`.",
        "talks-to-itself": "A rank sends to itself, or receives from itself. The previous rank is "
        "`rank - 1`, the next one is `rank + 1`.",
        "alone": "With one rank there is nobody to talk to: return (None, None).",
        "swapped-results": "The two results have changed places: first what comes from the previous "
        "rank, then what comes from the next one.",
        "own-returned": "A rank returns what it was handed itself, not what its neighbours sent.",
        "one-way-only": "Only one of the two directions works. Activations go to the next rank, and "
        "gradients to the previous one.",
        "not-waited": "A message was started and nobody waited for it: its tensor may not be there "
        "yet, or not be sent. Call `wait()` on every handle before you return; `is_completed()` "
        "only asks.",
        "into-what-is-sent": "You receive into a tensor that was handed in. It may still be on its "
        "way to the neighbour: receive into a new one.",
        "handed-in-changed": "A tensor that was handed in has changed.",
        "cut-from-its-graph": "An activation that was handed in has lost its graph, and this stage "
        "needs it for its backward pass. `detach_()` works in place, and `contiguous()` gives the same "
        "tensor again where it is contiguous already.",
        "belongs-to-a-graph": "What you return belongs to the graph of what was handed in, as a "
        "clone of it does: that graph stays in memory, and backward would run through it. Make the "
        "room with `torch.empty_like`.",
        "requires-a-gradient": "What you return requires a gradient. Whoever goes on with it asks for "
        "one where it is needed: what comes from the next rank is a gradient itself.",
        "zeros-left-out": "A tensor of zeros, or one without rows, is not handed over. Only None says "
        "that there is no neighbour: ask `is not None`.",
        "more-than-the-tensors": "More bytes are sent than the tensors have. Shape and dtype of "
        "what comes are known on both sides: no message about them is needed, and no object whose "
        "pickle carries them.",
        "built-in-collective": "You called a collective, in which every rank takes part. A stage "
        "talks to its neighbours only: use send and receive.",
        "not-a-neighbour": "A rank talks to one that is not its neighbour. In a long pipeline this "
        "traffic crosses the whole cluster.",
        "shapes-assumed": "The room for what comes in has the wrong size. Activations from the "
        "previous rank look like the gradients that go back to it, and gradients from the next rank "
        "like the activations that went there.",
        "room-kept": "The room for what comes in is the same in every call, and so what an earlier call has "
        "returned changes under the hands of whoever keeps it. Make a new one in each call.",
        "dtype-lost": "The room for what comes in has the wrong dtype: `torch.empty` makes float32. "
        "`torch.empty_like` takes the tensor's own.",
        "precision-lost": "What comes in has the right dtype, and lost digits on its way: it was sent "
        "in a shorter one. Send every tensor in the dtype that it has.",
        "layout-assumed": "The right numbers come in, in the wrong places: you send them as they lie "
        "in memory, and the neighbour's tensor lies there in another way. Send "
        "`tensor.contiguous()`, and make the room contiguous.",
        "needs-contiguous": "`send` and `recv` need contiguous memory. Send `tensor.contiguous()`, "
        "and make the room with the same shape, but contiguous.",
    },
    failures={
        "Boolean value of Tensor": "truth-of-a-tensor",
        "names itself": "talks-to-itself",
        "same as the rank of the current process": "talks-to-itself",
        "there is no rank": "beyond-the-ends",
    },
)

Handed = tuple[Tensor | None, Tensor | None]  # to the next rank, to the previous rank
MESSAGES = ("send", "recv_", "recv_any_source_")


@dataclass
class _Exchanged:
    """What a rank saw of one call."""

    received: object
    changed: bool = False  # have the tensors changed that were handed in?
    calls: list[tuple[str, int | None]] = field(default_factory=list)  # name and peer
    sent: int = 0  # bytes
    cut: bool = False  # has one of them lost its graph?
    graph: bool = False  # does what it returned belong to a graph?
    asks: bool = False  # does what it returned require a gradient?
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
    report.unwaited = [name for name, _ in unwaited]
    for _, work in unwaited:
        work.wait()  # so that what comes next is the same in every run
    received = [t for t in private.tree_leaves(report.received) if torch.is_tensor(t)]
    report.graph = any(t.grad_fn is not None for t in received)
    report.asks = any(t.requires_grad for t in received)
    report.cut = any(b[-1] and not t.grad_fn for b, t in zip(before, tensors, strict=True))
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
        _check_received([report.received for report in seen], expected, own)
        if any(report.cut for report in seen):
            raise Wrong("cut-from-its-graph", expected="the graph of before", got="none")
        if any(report.changed for report in seen):
            raise Wrong("handed-in-changed", expected="the tensors as they were", got="others")
        if any(report.graph for report in seen):
            raise Wrong("belongs-to-a-graph", expected="a tensor by itself", got="one in a graph")
        if any(report.asks for report in seen):
            got = "one that requires a gradient"
            raise Wrong("requires-a-gradient", expected="a tensor by itself", got=got)
        for report, tensors in zip(seen, own, strict=True):
            whole = sum(t.nbytes for t in tensors if t is not None)
            if alone and report.sent > whole:
                got = f"{report.sent} bytes"
                raise Wrong("more-than-the-tensors", expected=f"{whole} bytes", got=got)


def _check_messages(seen: Sequence[_Exchanged]) -> None:
    """Raises Wrong unless every rank sent and received point to point, with its neighbours, and
    waited for all of it. What this finds might still give the right tensors, by chance."""
    for rank, report in enumerate(seen):
        for name, peer in report.calls:
            if name not in MESSAGES:
                raise Wrong("built-in-collective", expected="send and recv", got=name.strip("_"))
            if peer is None or abs(peer - rank) != 1:
                other = "any rank" if peer is None else f"rank {peer}"
                got = f"rank {rank}: {'send to' if name == 'send' else 'recv from'} {other}"
                raise Wrong("not-a-neighbour", expected="messages with neighbours only", got=got)
    for rank, report in enumerate(seen):
        if report.reused:
            got = f"rank {rank} receives into a tensor that it was handed"
            raise Wrong("into-what-is-sent", expected="a new tensor", got=got)
        if report.unwaited:
            got = f"on rank {rank} nobody waits for a {report.unwaited[0].split('_')[0]}"
            raise Wrong("not-waited", expected="a wait() for every message", got=got)


def _check_received(got: list, expected: list[Handed], own: list[Handed]) -> None:
    if not all(result is None for result in got):
        for result in got:
            expect_type(result, (tuple, list))
    likely = {
        "zeros-left-out": lambda got: any(
            g is None and e is not None and not e.any()
            for pairs in zip(got, expected, strict=True)
            for g, e in zip(*pairs, strict=True)
        ),
        "swapped-results": [pair[::-1] for pair in expected],
        "own-returned": lambda got: same(got, own) or same(got, [pair[::-1] for pair in own]),
        "room-at-the-ends": lambda got: not (got[0][0] is got[-1][1] is None),
        "one-way-only": lambda got: any(
            all(pair[i] is None or not pair[i].any() for pair in got) for i in (0, 1)
        ),
        "precision-lost": lambda got: same(got, expected, tolerance=0.02),  # bfloat16 has 8 bits
        "layout-assumed": lambda got: same(_sorted(got), _sorted(expected)),
    }
    expect(got, expected, each="rank", likely=likely, tolerance=0)


def _sorted(pairs: list[Handed]) -> list:
    """The numbers of each tensor in ascending order, in its shape."""
    tensors = [tensor for pair in pairs for tensor in pair if tensor is not None]
    return [tensor.flatten().sort().values.view(tensor.shape) for tensor in tensors]


AT_AN_END = ("TypeError", "AttributeError", "ValueError")
ENDS = dict.fromkeys(AT_AN_END, "beyond-the-ends")
HANGS = {"finished without": "unanswered", "waits in recv": "both-receive", "timeout": "both-send"}


def _whole_numbers(draw) -> Callable[[int], Tensor]:
    """Makes tensors of one shape, which differs when it is transposed."""
    rows, columns = draw.sample(range(2, 6), 2)
    return lambda link: draw.whole(rows, columns)


@exchanging.requires("two stages hand over at the same time", failures=HANGS | ENDS)
def two_stages_hand_over_at_the_same_time(answer, draw):
    _check_exchange(answer, [_line(2, _whole_numbers(draw))])


@exchanging.requires("three stages do, and four", failures=ENDS | {"timeout": "two-stages-only"})
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
    failures=dict.fromkeys(("mismatch", "signal", "timeout"), "shapes-assumed"),
)
def shapes_that_differ_from_stage_to_stage(answer, draw):
    shapes = [(draw.integer(2, 3), 4), (draw.integer(4, 5), 2, 3), (draw.integer(5, 6), 7)]
    ranks, times = draw.integer(3, 4), draw.integer(2, 3)
    cases = [_line(ranks, lambda link: draw.whole(*shapes[link])) for _ in range(times)]
    _check_exchange(answer, cases, alone=True)


@exchanging.requires(
    "double precision, and activations that belong to a graph",
    failures=dict.fromkeys(("mismatch", "signal", "timeout"), "dtype-lost"),
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
    failures=dict.fromkeys(("timeout", "exception", "mismatch"), "zeros-left-out"),
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
