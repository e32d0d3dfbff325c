"""One queue a communicator, as NCCL has: what is called on it runs in the order of the calls.

A call returns when it is in the queue, a blocking one too. It begins when all before it in the queue
have ended, so an isend keeps an irecv behind it waiting, which gloo alone would not; and when all
has ended for which somebody had waited on any queue, because the device's stream stands there.

wait() says that what the device does next needs the result: it returns at once, and a kernel that
touches the result waits (on a GPU, in its stream; here, the host). Waiting for a call means waiting
for all before it in its queue too. A result that nobody has waited for is in flight: a kernel that
touches it would, on a GPU, read whatever lies there. Here it fails, whether or not the bytes have
arrived by chance.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from course_strict import rules
from course_utils.comm import host_waits, intercept, private, serving
from course_utils.launch.story.recorder import place

_flights: list["Flight"] = []  # those whose end nobody has needed yet, in order
_lock = threading.RLock()  # autograd's threads touch tensors too
_TRACING = "course_utils.trace.recording"  # asks for a future to take the time, not to wait


class Flight:
    """A call that is on its way: its name, its queue, its work and the memory that it fills.

    awaited: somebody has called wait(); watched: Python will, or ought to.
    """

    def __init__(self, name: str | None, queue: "Queue", outputs: Iterable[Tensor], watched: bool):
        self.name, self.queue, self.where = name, queue, place()
        self.spans: list[tuple[int, int]] = []
        self.tensors: list[Tensor] = []
        self.error: BaseException | None = None
        self.awaited = False
        self.ended = threading.Event()
        self.fills(outputs)
        self.future = torch.futures.Future()
        self.work = private.work_of(self.future)
        if watched:
            with _lock:
                _flights.append(self)

    def fills(self, outputs: Iterable[Tensor]) -> None:
        """This call, or one more of its batch, fills these tensors."""
        self.tensors += outputs
        self.spans += [_span(tensor) for tensor in outputs if tensor.numel()]

    def fills_any(self, span: tuple[int, int]) -> bool:
        return any(first < span[1] and span[0] < last for first, last in self.spans)

    def end(self, error: BaseException | None) -> None:
        """To be called when the call has ended; again, without effect, if it was given up before."""
        with _lock:
            if self.ended.is_set():
                return
            self.error = error
            if error is not None and self.spans and self not in _flights:
                self.awaited = True  # by C++, which hears of no error: a kernel will raise it
                _flights.append(self)
            self.ended.set()
        self.future.set_result(self.tensors)

    def await_(self) -> None:
        """What the device does next waits for this call, and so for all before it in its queue."""
        with _lock:
            for flight in _flights[: _flights.index(self) + 1]:
                flight.awaited = flight.awaited or flight.queue is self.queue

    def needed(self) -> None:
        """The host waits until this call has ended, and so have all before it in its queue. Raises
        what they have raised."""
        host_waits.until(self.ended.is_set)
        with _lock:
            if self not in _flights:
                return
            before = [f for f in _flights[: _flights.index(self) + 1] if f.queue is self.queue]
            _flights[:] = [f for f in _flights if f not in before]
        for flight in before:
            if flight.error is not None:
                raise flight.error if flight.where == place() else _from(flight.where, flight.error)


class Queue:
    """The calls of one communicator, one after the other, on a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "communicator")
        self.aborted: dist.DistBackendError | None = None  # what has taken the communicator down

    def give_up(self) -> None:
        """What NCCL does to a communicator when a wait with a limit has run out: its calls end, so that
        the device can go on."""
        with _lock:
            given_up = [flight for flight in _flights if flight.queue is self]
            _flights[:] = [flight for flight in _flights if flight.queue is not self]
        for flight in given_up:
            flight.end(None)

    def put(self, flight: Flight, starts: list[Callable[[], dist.Work | None]]) -> None:
        """Starts all of `starts` together when their turn comes, and ends the flight with them."""
        with _lock:
            elsewhere = [f for f in _flights if f.awaited and f.queue is not self]
        self._thread.submit(serving.serve, _carry, flight, starts, elsewhere)


def _carry(flight, starts, before):
    error = None
    try:
        for other in before:
            other.ended.wait()
        if flight.queue.aborted is not None:
            raise flight.queue.aborted
        finishes = [start() for start in starts]
        for finish in finishes:
            finish()
    except BaseException as failed:  # noqa: BLE001 - it belongs to who needs the result
        error = failed
        if isinstance(failed, dist.DistBackendError):
            flight.queue.aborted = failed
    flight.end(error)


def _from(where, error):
    """The same error, with the line of the call as its innermost: the host may be far below it."""
    if where is None:
        return error
    file, line, function = where
    code = compile("\n" * (line - 1) + "raise error", file, "exec").replace(co_name=function)
    try:
        exec(code, {"error": error.with_traceback(None)})  # noqa: S102
    except BaseException as raised:  # noqa: BLE001 - it is `error`
        return raised.with_traceback(raised.__traceback__.tb_next)


def touched(tensors: Iterable[Tensor]) -> None:
    """To be called by each kernel before it reads or writes tensors of the device."""
    for flight in _filling(tensors):
        flight.needed()


def called_with(tensors: Iterable[Tensor]) -> None:
    """To be called by each collective before it goes into its queue with these tensors: there it waits
    for what fills them."""
    _filling(tensors)


def _filling(tensors):
    """The calls that fill these tensors. Raises RuntimeError if nobody has waited for one of them."""
    if not _flights:
        return []
    spans = [_span(tensor) for tensor in tensors if tensor.numel()]
    with _lock:
        found = [flight for flight in _flights if any(map(flight.fills_any, spans))]
    for flight in found:
        if not flight.awaited:
            rules.refuse_in_flight(flight.name)
    return found


def join_all() -> None:
    """What `torch.cuda.synchronize()` does."""
    while _flights:
        last = _flights[-1]
        last.work.wait()
        last.needed()


def nothing_awaited() -> bool:
    """What `torch.cuda.current_stream().query()` tells. Raises what a call has raised."""
    with _lock:
        awaited = [flight for flight in _flights if flight.awaited]
    for flight in awaited:
        if not flight.ended.is_set():
            return False
        flight.needed()
    return True


def awaited(work: dist.Work) -> None:
    """To be called where somebody waits for a call, has seen its end, or hands its Work to C++, which
    will wait, unseen."""
    with _lock:
        flight = _flight_of(work)
        if flight is not None:
            flight.await_()


def install() -> None:
    """Lets this module see who waits, in front of PyTorch's own methods of Work."""
    wait, completed, future = dist.Work.wait, dist.Work.is_completed, dist.Work.get_future

    def queue_and_note(work, *limit, **named_limit):
        flight = _flight_of(work)
        if flight is None:
            return wait(work, *limit, **named_limit)
        awaited(work)
        for seconds in map(timedelta.total_seconds, (*limit, *named_limit.values())):
            if not flight.ended.wait(seconds):
                flight.queue.give_up()
                intercept.given_up()
                raise RuntimeError(f"{flight.name} timed out after {seconds:g} seconds")
        if limit or named_limit or flight.name == "barrier":  # the host itself waits there
            flight.needed()
        return True

    def ask_and_note(work):
        done = completed(work)
        if done:
            awaited(work)
        return done

    def future_and_note(work):
        if sys._getframe(1).f_globals.get("__name__") != _TRACING:
            awaited(work)  # whoever asks for the future waits there
        return future(work)

    dist.Work.wait, dist.Work.is_completed = queue_and_note, ask_and_note
    dist.Work.get_future = future_and_note


def _flight_of(work):
    return next((flight for flight in _flights if flight.work is work), None)


def _span(tensor):
    """The first byte of a tensor, and the one after its last."""
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
