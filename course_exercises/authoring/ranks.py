"""What the functions that a check runs on its ranks have in common."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from course_exercises.authoring.compare import Wrong
from course_utils.comm import intercept, private
from course_utils.comm.collectives import OPERATORS, Operator

intercept.stand_between(__name__)


def come_late(rank: int) -> None:
    """Rank 0 is early: if it does not wait for a result, it reads one that has not arrived."""
    if rank > 0:
        time.sleep(0.02)


@contextlib.contextmanager
def waits() -> Iterator[list[dist.Work]]:
    """Yields a list of the calls that somebody has waited for meanwhile: with `wait`, through their
    future, or by asking until they were complete. Who asks once and hears that one is still under way
    has not waited."""
    awaited: list[dist.Work] = []
    plain = {name: getattr(dist.Work, name) for name in ("wait", "is_completed", "get_future")}

    def noting(name):
        def noted(work, *args, **kwargs):
            if name != "is_completed":
                awaited.append(work)  # before: a wait that fails was one
            result = plain[name](work, *args, **kwargs)
            if result is True and name == "is_completed":
                awaited.append(work)
            return result

        return noted

    for name in plain:
        setattr(dist.Work, name, noting(name))
    try:
        yield awaited
    finally:
        for name, method in plain.items():
            setattr(dist.Work, name, method)


@dataclass(frozen=True)
class SeenCall:
    """A call that somebody in Python has to wait for."""

    kind: str
    payload: list[Tensor]
    work: dist.Work


@dataclass
class Sent:
    """The calls of a block: what was sent in which dtype, and for what nobody has waited."""

    dtypes: set[tuple[str, torch.dtype]] = field(default_factory=set)
    unwaited: list[str] = field(default_factory=list)
    calls: list[SeenCall] = field(default_factory=list, repr=False)
    awaited: list[dist.Work] = field(default_factory=list, repr=False)

    def open_calls(self) -> list[SeenCall]:
        """Those for which nobody has waited so far."""
        return [call for call in self.calls if call.work not in self.awaited]


def described(name: str, arguments: dict) -> tuple[str, list[Tensor]]:
    """The kind of a call ("all_gather"), and the tensors that this rank hands over; of a recv those
    that it gets. Of an operator that is no call, its name and nothing."""
    operator = OPERATORS.get(name, Operator(name, name))
    key = operator.payload or operator.received
    return operator.op, list(_tensors_in(arguments[key])) if key else []


def _tensors_in(value) -> Iterator[Tensor]:
    if torch.is_tensor(value):
        yield value
    else:
        for entry in value:
            yield from _tensors_in(entry)


@contextlib.contextmanager
def following() -> Iterator[Sent]:
    """Within the block, follows this rank's calls. Those for which nobody has waited go on, and
    are waited for at the end of the block, so that what comes next is the same in every run. Until
    then their results may or may not be there: judge `unwaited` before any number."""
    sent = Sent()

    def on_call(name: str, arguments: dict) -> Callable | None:
        kind, payload = described(name, arguments)
        sent.dtypes |= {(kind, tensor.dtype) for tensor in payload}

        def keep(work: dist.Work | None) -> None:  # also as gloo gives up a send whose Work is gone
            if work is not None:
                sent.calls.append(SeenCall(kind, payload, work))

        return (
            (lambda result: intercept.hand_work(result, keep))
            if intercept.python_caller()
            else None
        )

    with waits() as awaited, intercept.listening(on_call):
        sent.awaited = awaited
        yield sent
    unwaited = sent.open_calls()
    for call in unwaited:
        call.work.wait()
    sent.unwaited = [call.kind for call in unwaited]
    sent.calls, sent.awaited = [], []


def must_have_waited(unwaited: list[list[str]]) -> None:
    """Raises Wrong where a rank has not waited for one of its calls, whether or not the result had come by
    chance. `unwaited` has the kinds of these calls, by rank."""
    for rank, kinds in enumerate(unwaited):
        if kinds:
            got = f"on rank {rank} nobody waits for: {', '.join(dict.fromkeys(kinds))}"
            raise Wrong("not-waited", expected="a wait() for every call", got=got)


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
            given = _storages(private.tree_leaves((args, kwargs)))
            calls = [call for call in self._sent.open_calls() if call.kind != "send"]
            self.kinds += [call.kind for call in calls if given & _storages(call.payload)]
        return private.below.of(operator)(*args, **kwargs)


def _storages(values: list) -> set[int]:
    """Those of the plain tensors: what a functional collective returns waits by itself."""
    plain = [v for v in values if type(v) in (Tensor, torch.nn.Parameter) and v.numel()]
    return {tensor.untyped_storage().data_ptr() for tensor in plain}
