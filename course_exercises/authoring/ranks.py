"""What the functions that a check runs on its ranks have in common."""

import contextlib
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from course_exercises.authoring.compare import Wrong
from course_utils.comm import intercept, private
from course_utils.comm.collectives import OPERATORS, Operator, tensors_in

intercept.stand_between(__name__)


def come_late(rank: int) -> None:
    """Rank 0 is early: if it does not wait for a result, it reads one that has not arrived."""
    if rank > 0:
        time.sleep(0.02)


@contextlib.contextmanager
def hearing_waits(on_wait: Callable[[dist.Work], None]) -> Iterator[None]:
    """Within the block, `on_wait` hears of each call that somebody waits for: with `wait`, through its
    future, or by asking until it was complete. Who asks once and hears that it is still under way has
    not waited."""
    plain = {name: getattr(dist.Work, name) for name in ("wait", "is_completed", "get_future")}

    def noting(name):
        def noted(work, *args, **kwargs):
            if name != "is_completed":
                on_wait(work)  # before: a wait that fails was one
            result = plain[name](work, *args, **kwargs)
            if result is True and name == "is_completed":
                on_wait(work)
            return result

        return noted

    for name in plain:
        setattr(dist.Work, name, noting(name))
    try:
        yield
    finally:
        for name, method in plain.items():
            setattr(dist.Work, name, method)


@contextlib.contextmanager
def waits() -> Iterator[list[dist.Work]]:
    """Yields a list of the calls that somebody has waited for meanwhile."""
    awaited: list[dist.Work] = []
    with hearing_waits(awaited.append):
        yield awaited


@dataclass(eq=False)  # two calls are never the same
class SeenCall:
    """A call that this rank has made. Its tensors are there within the block, and its Work while somebody
    in Python has still to wait for it."""

    kind: str
    payload: list[Tensor] = field(repr=False)
    dtypes: list[torch.dtype]
    elements: int  # in what this rank hands over; of a recv, in what it gets
    bytes: int
    addresses: list[int]  # of the tensors
    group: str  # its name
    root: int | None  # of a broadcast
    blocks: bool  # it was made without `async_op`, where it could have been made with it
    beside: list[int]  # the calls that were under way, by their numbers
    work: dist.Work | None = field(default=None, repr=False)
    made: list[int] = field(default_factory=list)  # the tensors' versions when the call was made

    def follow(self, work: dist.Work | None) -> None:
        """Begins to follow what the call has returned."""
        self.work, self.made = work, versions(self.payload)


@dataclass
class Sent:
    """The calls of a block, in their order; unwaited: the kinds of those for which nobody has waited, or
    not before their tensor was changed; too_little: whether they have moved less than they must."""

    calls: list[SeenCall] = field(default_factory=list)
    unwaited: list[str] = field(default_factory=list)
    too_little: bool = False

    @property
    def dtypes(self) -> set[tuple[str, torch.dtype]]:
        """What was sent in which dtype."""
        return {(call.kind, dtype) for call in self.calls for dtype in call.dtypes}

    def elements(self, kind: str) -> int:
        """How many elements this rank has handed to calls of a kind."""
        return sum(call.elements for call in self.calls if call.kind == kind)

    def open_calls(self) -> list[SeenCall]:
        """Those for which nobody has waited so far."""
        return [call for call in self.calls if call.work is not None]

    def add(self, name: str, arguments: dict) -> SeenCall:
        kind, payload = described(name, arguments)
        call = SeenCall(
            kind,
            payload,
            dtypes=[tensor.dtype for tensor in payload],
            elements=sum(tensor.numel() for tensor in payload),
            bytes=sum(tensor.nbytes for tensor in payload),
            addresses=[tensor.data_ptr() for tensor in payload],
            group=dist.ProcessGroup.unbox(arguments["process_group"]).group_name,
            root=arguments.get("root_rank"),
            blocks=arguments.get("async_op") is False,
            beside=[i for i, call in enumerate(self.calls) if call.work is not None],
        )
        self.calls.append(call)
        return call

    def on_wait(self, work: dist.Work) -> None:
        for call in self.open_calls():
            if call.work is work:
                call.work = None
                if versions(call.payload) != call.made:
                    self.unwaited.append(f"{call.kind}, before its tensor is changed")

    def let_go(self) -> None:
        """Lets go of the tensors of calls that are over, for whoever looks at what is alive."""
        for call in self.calls:
            if call.work is None:
                call.payload = []


def described(name: str, arguments: dict) -> tuple[str, list[Tensor]]:
    """The kind of a call ("all_gather"), and the tensors that this rank hands over; of a recv those
    that it gets. Of an operator that is no call, its name and nothing."""
    operator = OPERATORS.get(name, Operator(name, name))
    key = operator.payload or operator.received
    return operator.op, tensors_in(arguments[key]) if key else []


@contextlib.contextmanager
def following(least: int = 1) -> Iterator[Sent]:
    """Within the block, follows this rank's calls. Those for which nobody has waited go on, and
    are waited for at the end of the block, so that what comes next is the same in every run. Until
    then their results may or may not be there: judge `unwaited` before any number. Among several ranks, one
    whose calls move fewer than `least` elements has moved too little."""
    sent = Sent()

    def on_call(name: str, arguments: dict) -> Callable | None:
        call = sent.add(name, arguments)
        if intercept.python_caller() is None:
            return None

        # kept also as gloo gives up a send whose Work is gone
        return lambda result: intercept.hand_work(result, call.follow)

    with hearing_waits(sent.on_wait), intercept.listening(on_call):
        yield sent
    unwaited = sent.open_calls()
    sent.unwaited += [call.kind for call in unwaited]
    moved = sum(call.elements for call in sent.calls)
    sent.too_little = dist.get_world_size() > 1 and moved < least
    for call in unwaited:
        call.work.wait()
    sent.calls = [replace(call, payload=[], work=None) for call in sent.calls]


def versions(tensors: list[Tensor]) -> list[int]:
    """How often each was changed in place. A view counts what is done to other parts of its base as well, so
    it is left out."""
    own = (t for t in tensors if not (private.is_view(t) or t.is_inference()))
    return [private.version.of(tensor) for tensor in own]


def must_have_waited(unwaited: list[list[str]]) -> None:
    """Raises Wrong where a rank has not waited for one of its calls, or too late, whether or not the result
    had come by chance. `unwaited` has the kinds of these calls, by rank."""
    for rank, kinds in enumerate(unwaited):
        if kinds:
            got = f"on rank {rank} nobody waits for: {'; '.join(dict.fromkeys(kinds))}"
            raise Wrong("not-waited", expected="a wait() for every call", got=got)


def must_have_sent(sent: Iterable[Sent]) -> None:
    """Raises Wrong where right values came to a rank by another way than calls; ask it after the values.
    `sent` has what each rank has sent."""
    for rank, each in enumerate(sent):
        if each.too_little:
            got = f"right values on rank {rank}, and too few in its calls"
            raise Wrong("around-the-calls", expected="values that calls have brought", got=got)


class UsedEarly(private.dispatch_mode.value):
    """Within the block, notes the kinds of the calls whose tensor somebody reads or writes before
    anybody has waited for them: those that fill it, as a recv does. It needs no luck: what has
    arrived by chance counts as well."""

    def __init__(self, sent: Sent) -> None:
        super().__init__()
        self.kinds: list[str] = []
        self._sent = sent

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not operator.is_view and not operator.name().partition(".")[0].endswith("_like"):
            given = storages(private.tree_leaves((args, kwargs)))
            calls = [call for call in self._sent.open_calls() if call.kind != "send"]
            self.kinds += [call.kind for call in calls if given & storages(call.payload)]
        return private.below.of(operator)(*args, **kwargs)


def storages(values: Iterable) -> set[int]:
    """The addresses of the plain tensors' memory: what a functional collective returns waits by itself."""
    plain = [v for v in values if type(v) in (Tensor, torch.nn.Parameter) and v.numel()]
    return {tensor.untyped_storage().data_ptr() for tensor in plain}


class Memory:
    """Which of the tensors that it was shown have memory now, each under a number."""

    def __init__(self) -> None:
        self._shown: dict[int, list[weakref.ref]] = {}
        self._patience = 3.0  # seconds, of all looks together

    def show(self, number: int, tensor: Tensor) -> None:
        self._shown.setdefault(number, []).append(weakref.ref(tensor.untyped_storage()))

    def alive(self, allowed: Callable[[list[int]], bool]) -> list[int]:
        """The numbers. gloo's thread holds what was gathered for a moment after `wait()`: looks again
        until what is alive is allowed, or the patience is at its end."""
        while not allowed(found := self._alive()) and self._patience > 0:
            time.sleep(0.005)
            self._patience -= 0.005
        return found

    def _alive(self) -> list[int]:
        return sorted(n for n, shown in self._shown.items() if any(map(_has_memory, shown)))


def _has_memory(reference: weakref.ref) -> bool:
    storage = reference()
    return storage is not None and storage.nbytes() > 0


def kill_in_a_write(size: int) -> None:
    """The system kills this process when it writes a file beyond `size` bytes. Not on Windows."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file of this death
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
