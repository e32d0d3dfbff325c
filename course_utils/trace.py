"""What a rank did and when: compute, communication and waiting, and the bytes it handed over.

    with Trace() as trace:
        with trace.span("forward"):
            loss = loss_function(model(images), labels)
        dist.all_reduce(loss)
    record = trace.record()

Every collective and every message of this process is recorded, whoever starts it: the functions
of torch.distributed, DistributedDataParallel's C++ reducer, FSDP, DTensor. Bytes are exact. They
are the payload: what this rank hands to the call, which does not depend on how a backend moves it.

    op                                    handed over by a rank
    all_reduce, reduce, gather,           its tensor
      all_gather
    reduce_scatter, all_to_all            its whole input: all the pieces together
    broadcast, scatter                    the root its whole input; the others nothing
    send                                  its tensor (isend and batch_isend_irecv too)
    recv, barrier                         nothing

Times are seconds since the common start of all ranks. On the CPU they are `time.perf_counter`,
which all processes of one machine share. With NCCL they are CUDA events, so that a span covers
the work on the GPU and not the moment at which Python asked for it.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Self

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_utils import hardware, intercept
from course_utils.rings import PASSES, bus_factor


@dataclass(frozen=True)
class Span:
    """A stretch of time in seconds. `kind` is "compute", "communication" or "waiting".

    Foreground spans of one rank never overlap: the rank does one thing at a time, and a span that
    contains another is cut. `background` marks communication that runs beside them. `call` is the
    index of a communication span's call in the record's `calls`.
    """

    name: str
    kind: str
    start: float
    end: float
    background: bool = False
    call: int | None = None


@dataclass(frozen=True)
class Call:
    """A collective or a message. `bytes`, `elements` and `dtype` describe its payload.

    `sends` is False where this rank only receives. `ranks` are those that take part, for a message
    (from, to); `root` is the rank at the centre of a broadcast, scatter, gather or reduce.
    """

    op: str
    bytes: int
    elements: int
    dtype: str
    sends: bool = True
    ranks: tuple[int, ...] = ()
    root: int | None = None


@dataclass(frozen=True)
class Record:
    """What one rank did; it can be returned from `launch`."""

    rank: int
    spans: list[Span] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def sent(self, op: str | None = None) -> int:
        """Returns the bytes that this rank handed over, in calls of `op` or in all. A message travels
        as it is; what a collective's algorithm makes travel for its payload is another number."""
        return sum(call.bytes for call in self._named(op) if call.sends)

    def count(self, op: str | None = None) -> int:
        """Returns how many calls of `op`, or of any kind, this rank made."""
        return len(self._named(op))

    def seconds(self, kind: str) -> float:
        """Returns the seconds in the foreground that were of `kind`."""
        spans = [span for span in self.spans if span.kind == kind and not span.background]
        return sum(span.end - span.start for span in spans)

    def _named(self, op: str | None) -> list[Call]:
        known = {entry[0] for entry in _OPS.values()}
        if op is not None and op not in known:
            raise ValueError(
                f"There is no call named {op!r}; there are {', '.join(sorted(known))}."
            )
        return [call for call in self.calls if op in (None, call.op)]


class Trace:
    """Records this process between `with Trace() as trace:` and the end of the block.

    Every rank of the default group has to open its Trace: the ranks meet there and set their
    clocks to zero. The meeting itself is not recorded.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []  # in the order of their calls
        self._spans: list[tuple[str, str, object, object]] = []  # name, kind, start, end marks
        self._backwards: dict[int, _Backward] = {}  # those that communicate, by autograd's number
        self._record: Record | None = None

    def __enter__(self) -> Self:
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._clock = _common_clock()
        self._recorder = _Recorder(self)
        self._recorder.install()
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        self._recorder.remove()
        if exception_type is None:
            self._record = self._finish()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A compute span: "forward", "backward", "update", "load" or a name of your own."""
        start = self._clock.mark()
        try:
            yield
        finally:
            self._spans.append((name, "compute", start, self._clock.mark()))

    def record(self) -> Record:
        """Returns what was recorded. Call it after the block."""
        if self._record is None:
            raise RuntimeError("The record is ready when the `with Trace()` block has ended.")
        return self._record

    def _finish(self) -> Record:
        now = self._clock.mark()
        for entry in self._entries:
            entry.settle(now)
            entry.work = None
        seconds = self._clock.seconds
        foreground = [Span(name, kind, seconds(a), seconds(b)) for name, kind, a, b in self._spans]
        foreground += [span for run in self._backwards.values() for span in run.waiting(seconds)]
        background = []
        for index, entry in enumerate(self._entries):
            start, end = seconds(entry.start), seconds(entry.end)
            span = Span(entry.call.op, "communication", start, end, not entry.blocking, index)
            (foreground if entry.blocking else background).append(span)
        spans = sorted(_cut(foreground) + background, key=lambda span: span.start)
        return Record(self._rank, spans, [entry.call for entry in self._entries])


def on_a_ring(call: Call) -> tuple[int, float]:
    """The payload of a call as nccl-tests counts it, and the bytes that this rank sends for it.

    A collective goes around a ring (`rings.bus_factor`); of an all-gather the payload is what a rank
    holds afterwards, n times what it hands over. Any other call is sent as it is.
    """
    ranks = len(call.ranks)
    payload = call.bytes * (ranks if call.op == "all_gather" else 1)
    if call.op in PASSES:
        return payload, payload * bus_factor(call.op, ranks)
    return payload, call.bytes if call.sends else 0


def ring_bytes(calls: Iterable[Call]) -> int:
    """Returns the bytes that rings would send from this rank for `calls`, collectives of `Call`.

    On a ring of n ranks an all-reduce of S bytes sends 2(n - 1)/n times S from each rank, a
    reduce-scatter of S bytes (n - 1)/n times S, and an all-gather n - 1 times what the rank hands
    over (Thakur, Rabenseifner, Gropp 2005, sections 4.1 to 4.3). Raises ValueError for other calls.
    """
    total = 0.0
    for call in calls:
        if call.op not in PASSES:
            raise ValueError(
                f"The bytes of {call.op} on a ring are not known here; there are {', '.join(PASSES)}."
            )
        total += on_a_ring(call)[1]
    return round(total)


def separate_waiting(records: list[Record]) -> list[Record]:
    """Splits communication where the last partner arrives: before it the rank waits.

    A collective can start only when the ranks that it needs have called it, and one rank alone
    cannot see that. Takes the records of all ranks and returns them with "waiting" spans added.
    """
    starts = _starts(records)
    result = []
    for record in records:
        keys, spans = _keys(record), []
        for span in record.spans:
            if span.kind != "communication" or span.call is None:
                spans.append(span)
                continue
            partners = _needed(record.calls[span.call], starts[keys[span.call]], record.rank)
            # Who arrived after this rank had finished was not waited for.
            arrivals = [start for start in partners if start < span.end]
            ready = max([span.start, *arrivals])
            if ready > span.start:
                spans.append(replace(span, kind="waiting", end=ready))
            spans.append(replace(span, start=ready))
        result.append(replace(record, spans=spans))
    return result


def memory_ledger(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, int]:
    """Returns the bytes that this process holds for `model`, by kind.

    Kinds are parameters, gradients, optimizer (its state) and buffers. A tied tensor counts once,
    a DTensor with the part that this rank holds of it.
    """
    parameters = list(model.parameters())
    state = optimizer.state.values() if optimizer is not None else []
    return {
        "parameters": _held(parameters),
        "gradients": _held(p.grad for p in parameters if p.grad is not None),
        "optimizer": _held(v for s in state for v in s.values() if torch.is_tensor(v)),
        "buffers": _held(model.buffers()),
    }


@dataclass
class Kept:
    """What autograd keeps for backward: the bytes of storages that are no parameters."""

    bytes: int = 0


@contextmanager
def kept_for_backward(model: nn.Module) -> Iterator[Kept]:
    """Counts the activations that forward passes of `model` inside the block keep for backward.

    A storage counts once, with all its bytes, however many operations keep it; of a DTensor it is
    that of this rank's part. Parameters and buffers are not counted: they stay whether or not there
    is a backward, and where FSDP gathers them for a layer it frees them after it. The inputs of the
    model are counted, where a layer keeps them. The source is autograd's own list of saved tensors,
    docs.pytorch.org/docs/stable/autograd.html, "Hooks for saved tensors".
    """
    kept = Kept()
    counted = {}  # storages by address: one that is freed could give its address to another tensor

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = _local(tensor).untyped_storage()
        address = storage.data_ptr()
        if address not in counted and address not in _addresses(model):
            counted[address] = storage
            kept.bytes += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        yield kept


@dataclass
class Largest:
    """The bytes of the largest tensor that an operation has made."""

    bytes: int = 0


@contextmanager
def largest_tensor() -> Iterator[Largest]:
    """Notes the largest tensor that operations of this process make inside the block.

    What forward makes counts, and so does what operations inside an autograd.Function make; views
    count with their own size. What a fused kernel has in its own tiles is no tensor.
    """
    largest = Largest()

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            made = operator(*args, **(kwargs or {}))
            tensors = [leaf for leaf in tree_leaves(made) if torch.is_tensor(leaf)]
            largest.bytes = max(largest.bytes, *(t.nbytes for t in tensors), 0)
            return made

    with Noting():
        yield largest


def _addresses(model: nn.Module) -> set[int]:
    """Where the parameters and buffers of `model` lie now: FSDP exchanges them as it gathers."""
    tensors = (*model.parameters(), *model.buffers())
    return {_local(tensor).untyped_storage().data_ptr() for tensor in tensors}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; any other tensor itself."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    # the result of a collective that still runs has no storage yet
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def _held(tensors) -> int:
    return _bytes(map(_local, tensors))


def _bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _cut(spans: list[Span]) -> list[Span]:
    """Turns nested spans into a sequence: a span is interrupted where a later one runs."""
    pieces, open_spans, now = [], [], 0.0

    def close(span: Span, until: float) -> None:
        if until > now:
            pieces.append(replace(span, start=now, end=until))

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while open_spans and open_spans[-1].end <= span.start:
            close(open_spans[-1], open_spans[-1].end)
            now = max(now, open_spans.pop().end)
        if open_spans:
            close(open_spans[-1], span.start)
        open_spans.append(span)
        now = max(now, span.start)
    while open_spans:
        close(open_spans[-1], open_spans[-1].end)
        now = max(now, open_spans.pop().end)
    return pieces


def _keys(record: Record) -> list[tuple]:
    """Names each call so that it has the same name on every rank that takes part in it."""
    seen: Counter = Counter()
    keys = []
    for call in record.calls:
        channel = ("message" if call.op in ("send", "recv") else "collective", call.ranks)
        keys.append((*channel, seen[channel]))
        seen[channel] += 1
    return keys


def _starts(records: list[Record]) -> dict[tuple, dict[int, float]]:
    """For each call the time at which each rank entered it."""
    starts: dict[tuple, dict[int, float]] = {}
    for record in records:
        for key in (keys := _keys(record)):
            starts.setdefault(key, {})
        for span in record.spans:
            if span.call is not None:
                entered = starts[keys[span.call]]
                entered[record.rank] = min(span.start, entered.get(record.rank, span.start))
    return starts


def _needed(call: Call, starts: dict[int, float], rank: int) -> list[float]:
    """The arrivals that this rank's part of `call` depends on."""
    if call.root is None or call.root == rank:
        return list(starts.values())
    return [start for other, start in starts.items() if other == call.root]


# ---- how the calls are seen ----------------------------------------------------------------------
#
# `intercept` hears of every collective, whoever starts it. What is private in PyTorch (the boxed
# objects, autograd's number of a backward pass and its callbacks) is used between here and the end
# of the file only; tests/test_trace.py shows for each supported version that it works.

# operator: (op, argument with this rank's payload, argument with what a non-root rank receives)
_OPS = {
    "allreduce_": ("all_reduce", "tensors", None),
    "allreduce_coalesced_": ("all_reduce", "tensors", None),
    "reduce_": ("reduce", "tensors", None),
    "broadcast_": ("broadcast", "tensors", "tensors"),
    "scatter_": ("scatter", "input_tensors", "output_tensors"),
    "gather_": ("gather", "input_tensors", None),
    "allgather_": ("all_gather", "input_tensors", None),
    "_allgather_base_": ("all_gather", "input_tensor", None),
    "allgather_coalesced_": ("all_gather", "input_list", None),
    "allgather_into_tensor_coalesced_": ("all_gather", "inputs", None),
    "reduce_scatter_": ("reduce_scatter", "input_tensors", None),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor", None),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs", None),
    "alltoall_": ("all_to_all", "input_tensors", None),
    "alltoall_base_": ("all_to_all", "input", None),
    "send": ("send", "tensors", None),
    "recv_": ("recv", None, "tensors"),
    "recv_any_source_": ("recv", None, "tensors"),
    "barrier": ("barrier", None, None),
}


class _Entry:
    """One call while it runs: its marks, and how its end becomes known."""

    def __init__(self, call: Call, start, blocking: bool) -> None:
        self.call, self.start, self.blocking = call, start, blocking
        self.end = None
        self.work = None
        self._done = threading.Event()

    def finish(self, mark) -> None:
        if self.end is None or self.blocking:
            self.end = mark
        self._done.set()

    def settle(self, now) -> None:
        """At the end of the Trace. The news of an end may still be on its way to this thread."""
        if self.end is None and self.work is not None and self.work.is_completed():
            self._done.wait(timeout=1.0)
        if self.end is None:
            self.end = now  # started, and nobody has waited for it


class _Backward:
    """A backward pass that starts communication, as DistributedDataParallel's does.

    Its reducer waits, in C++ and unseen, when the last gradient is computed. Autograd calls its
    callbacks at that moment, in the order in which they were queued: the first here is queued
    before the reducer's own, and queues the second, which then comes after it.
    """

    def __init__(self, clock) -> None:
        self.entries: list[_Entry] = []
        self.clock, self.computed, self.left = clock, None, None
        self._queue(self._all_computed)

    def _queue(self, callback) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _all_computed(self) -> None:
        self.computed = self.clock.mark()
        self._queue(self._over)

    def _over(self) -> None:
        self.left = self.clock.mark()

    def waiting(self, seconds) -> list[Span]:
        """The time between the last gradient and the end of what the pass has started."""
        ends = [seconds(entry.end) for entry in self.entries if not entry.blocking]
        if self.left is None or not ends:
            return []
        start, end = seconds(self.computed), min(seconds(self.left), max(ends))
        return [Span("wait", "waiting", start, end)] if end > start else []


class _Recorder:
    """Listens to every call, and puts itself in front of Work.wait, while a Trace is open."""

    _installed: "_Recorder | None" = None

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.waiting_for: dict[int, list[_Entry]] = {}  # by the identity of the Work

    def install(self) -> None:
        if _Recorder._installed is not None:
            raise RuntimeError("A Trace is open in this process already; close it first.")
        _Recorder._installed = self
        intercept.listen(self._hear)
        self.original_wait = dist.Work.wait
        dist.Work.wait = self._waiter()

    def remove(self) -> None:
        dist.Work.wait = self.original_wait
        intercept.stop(self._hear)
        _Recorder._installed = None

    def _hear(self, name: str, arguments: dict):
        call = describe(name, arguments)
        if call is None:
            return None
        blocking = arguments.get("async_op") is False
        entry = _Entry(call, self.trace._clock.mark(), blocking)
        self.trace._entries.append(entry)
        self._note_backward(entry)

        return lambda result: intercept.hand_work(result, lambda work: self._follow(entry, work))

    def _note_backward(self, entry: _Entry) -> None:
        task = torch._C._current_graph_task_id()
        if task == -1:  # this call does not come out of a backward pass
            return
        backwards = self.trace._backwards
        if task not in backwards:
            backwards[task] = _Backward(self.trace._clock)
        backwards[task].entries.append(entry)

    def _follow(self, entry: _Entry, work: dist.Work | None) -> None:
        clock = self.trace._clock
        entry.work = work
        if work is None:  # a blocking call of NCCL: the current stream itself waits for it
            entry.finish(clock.mark())
            return
        self.waiting_for.setdefault(id(work), []).append(entry)
        try:
            work.get_future().add_done_callback(lambda _: entry.finish(clock.news()))
        except RuntimeError:
            pass  # gloo's messages have no future: they end when wait() returns

    def _waiter(self):
        recorder, original = self, self.original_wait

        def wait(work, *args, **kwargs):
            entries = recorder.waiting_for.pop(id(work), None)  # several of a batch
            if entries is None:
                return original(work, *args, **kwargs)
            # torch.distributed itself waits: the call was a blocking one, such as dist.send.
            caller = sys._getframe(1).f_code.co_filename
            blocking = caller == dist.distributed_c10d.__file__
            clock = recorder.trace._clock
            start = clock.mark()
            result = original(work, *args, **kwargs)
            end = clock.mark()
            for entry in entries:
                entry.blocking = blocking = entry.blocking or blocking
                entry.finish(end)
                entry.work = None  # it would keep the tensors alive
            if not blocking:
                recorder.trace._spans.append(("wait", "waiting", start, end))
            return result

        return wait


def describe(name: str, arguments: dict) -> Call | None:
    """The call that the operator `name` of c10d makes with these arguments; None if it makes none."""
    if name not in _OPS:
        return None
    op, payload, received = _OPS[name]
    ranks, root, sends = (), None, payload is not None
    group = dist.ProcessGroup.unbox(arguments["process_group"])
    members = dist.get_process_group_ranks(group)
    if name == "send":
        ranks = (members[group.rank()], members[arguments["dst"]])
    elif name == "recv_":
        ranks = (members[arguments["src"]], members[group.rank()])
    elif name != "recv_any_source_":
        ranks = tuple(members)
    if "root_rank" in arguments:
        root = members[arguments["root_rank"]]
        sends = received is None or root == members[group.rank()]
    tensors = _flat(arguments[payload if sends else received]) if payload or received else []
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    elements = sum(tensor.numel() for tensor in tensors)
    return Call(op, _bytes(tensors), elements, dtype, sends, ranks, root)


def _flat(tensors) -> list[torch.Tensor]:
    if torch.is_tensor(tensors):
        return [tensors]
    return [tensor for item in tensors for tensor in _flat(item)]


class _Clock:
    """Seconds on the clock that the processes of one machine share."""

    def __init__(self, zero: float) -> None:
        self.zero = zero

    def mark(self) -> float:
        return time.perf_counter()

    def news(self) -> float:
        """A mark for a thread of the backend, which must not wait for the device."""
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark - self.zero


class _DevicesClock(_Clock):
    """The same on a device whose kernels run on the host while its calls are queued (`strict`): the
    time at which the device is there, behind all that it has to wait for."""

    def mark(self) -> float:
        hardware.settle()
        return super().mark()


class _CudaClock:
    """Seconds at which the GPU reached a point of the current stream."""

    def __init__(self, zero: float) -> None:
        self.start = self.mark()
        self.start.synchronize()
        self.offset = time.perf_counter() - zero

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    news = mark

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self.offset + self.start.elapsed_time(mark) / 1000


def _common_clock() -> _Clock | _CudaClock:
    if not dist.is_initialized():
        cuda = torch.cuda.is_initialized()
        return (_CudaClock if cuda else _Clock)(time.perf_counter())
    place = hardware.device()
    dist.barrier()
    own = time.perf_counter()
    zero = torch.tensor([own], dtype=torch.float64, device=place)
    dist.all_reduce(zero, op=dist.ReduceOp.MIN)
    # Clocks of other machines have another zero: there, each rank starts its own after the barrier.
    common = zero.item() if abs(own - zero.item()) < 1.0 else own
    return {"cuda": _CudaClock, "cpu": _Clock}.get(place.type, _DevicesClock)(common)
