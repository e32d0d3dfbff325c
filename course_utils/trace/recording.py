"""How a rank's calls are seen.

A message whose end is not known is left out: gloo tells the end of an `isend` only in `wait()`.

`intercept` hears of every collective, whoever starts it. What is private in PyTorch (the boxed
objects, autograd's number of a backward pass and its callbacks) is used here, in `calls`, in `intercept`, in
launch's `calls` and `rank`, and by what replays a group; tests/modules/test_trace.py shows for each supported
version that it works.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
import torch.distributed as dist

from course_utils import hardware
from course_utils.comm import intercept, private
from course_utils.trace.calls import Call, describe
from course_utils.trace.records import Record, Span, cut


class Trace:
    """Records this process between `with Trace() as trace:` and the end of the block.

    Every rank of the default group has to open its Trace: the ranks meet there and set their
    clocks to zero. The meeting itself is not recorded.
    """

    def __init__(self) -> None:
        self._computed: list[tuple[str, object, object]] = []  # name, start and end marks
        self._record: Record | None = None

    def __enter__(self) -> Self:
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._clock = _common_clock()
        self._recorder = _Recorder(self._clock)
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
            self._computed.append((name, start, self._clock.mark()))

    def record(self) -> Record:
        """Returns what was recorded. Call it after the block."""
        if self._record is None:
            raise RuntimeError("The record is ready when the `with Trace()` block has ended.")
        return self._record

    def _finish(self) -> Record:
        recorder, now, seconds = self._recorder, self._clock.mark(), self._clock.seconds
        for entry in recorder.entries:
            entry.settle(now)
            entry.work = None
        foreground = [
            Span(name, "compute", seconds(a), seconds(b)) for name, a, b in self._computed
        ]
        foreground += [Span("wait", "waiting", seconds(a), seconds(b)) for a, b in recorder.waits]
        foreground += [span for run in recorder.backwards.values() for span in run.waiting(seconds)]
        background = []
        for index, entry in enumerate(recorder.entries):
            start, end = seconds(entry.start), seconds(entry.end)
            span = Span(entry.call.op, "communication", start, end, not entry.blocking, index)
            (foreground if entry.blocking else background).append(span)
        spans = sorted(cut(foreground) + background, key=lambda span: span.start)
        return Record(self._rank, spans, [entry.call for entry in recorder.entries])


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
        private.engine.value.queue_callback(callback)

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

    def __init__(self, clock) -> None:
        self.clock = clock
        self.entries: list[_Entry] = []  # in the order of their calls
        self.waits: list[tuple[object, object]] = []  # start and end marks
        self.backwards: dict[int, _Backward] = {}  # those that communicate, by autograd's number
        self.waiting_for: dict[int, list[_Entry]] = {}  # by the identity of the Work

    def install(self) -> None:
        if _Recorder._installed is not None:
            raise RuntimeError("A Trace is open in this process already; close it first.")
        _Recorder._installed = self
        intercept.listen(self._on_call)
        self.original_wait = dist.Work.wait
        dist.Work.wait = self._waiter()

    def remove(self) -> None:
        dist.Work.wait = self.original_wait
        intercept.stop(self._on_call)
        _Recorder._installed = None

    def _on_call(self, name: str, arguments: dict):
        call = describe(name, arguments)
        if call is None:
            return None
        blocking = arguments.get("async_op") is False
        entry = _Entry(call, self.clock.mark(), blocking)
        self.entries.append(entry)
        self._note_backward(entry)

        return lambda result: intercept.hand_work(result, lambda work: self._follow(entry, work))

    def _note_backward(self, entry: _Entry) -> None:
        task = private.backward_task()
        if task == -1:  # this call does not come out of a backward pass
            return
        if task not in self.backwards:
            self.backwards[task] = _Backward(self.clock)
        self.backwards[task].entries.append(entry)

    def _follow(self, entry: _Entry, work: dist.Work | None) -> None:
        entry.work = work
        if work is None:  # a blocking call of NCCL: the current stream itself waits for it
            entry.finish(self.clock.mark())
            return
        self.waiting_for.setdefault(id(work), []).append(entry)
        try:
            work.get_future().add_done_callback(lambda _: entry.finish(self.clock.news()))
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
            start = recorder.clock.mark()
            result = original(work, *args, **kwargs)
            end = recorder.clock.mark()
            for entry in entries:
                entry.blocking = blocking = entry.blocking or blocking
                entry.finish(end)
                entry.work = None  # it would keep the tensors alive
            if not blocking:
                recorder.waits.append((start, end))
            return result

        return wait


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
