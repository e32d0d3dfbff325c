"""The one place through which every call of torch.distributed passes, for others to listen.

PyTorch sends each collective, each send and each recv through its dispatcher, as an operator of
the library c10d: the functions of torch.distributed, but also what DistributedDataParallel, FSDP
and DTensor start from C++. `listen` puts a function in front of these operators. It costs about
ten microseconds a call and sends nothing.

The key BackendSelect is the one that all calls pass, with or without autograd and on any device.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist

from course_utils.comm import private

# Called with the operator's name and its arguments by name, before the call is made. May return
# a function that is called with the operator's result afterwards.
Listener = Callable[[str, dict], Callable[[object], None] | None]

# The modules whose frames lie between a call and who hears of it; torch's wrap the method of a mode.
_between = (__package__, *private.BETWEEN)


class Waits(Protocol):
    """Who hears of waits that are no calls."""

    def on_key(self, key: str, seconds: float) -> Callable[[], None]:
        """The program waits for a key of a store, so long at most; returns what is called when it goes on."""

    def on_given_up(self) -> None:
        """A wait with a limit has failed: its call may never end."""


waits: Waits | None = None
_listeners: list[Listener] = []
_refused: list[Callable[[], None]] = []  # called when an operator has raised
_library = None
_of_the_batch: list[Callable[[dist.Work], None]] | None = None  # while one is being made up


def install() -> None:
    """Puts the listeners' place in front of the operators, for the life of this process.

    `listen` does that too; a process that others are forked from can do it once for all.
    """
    global _library
    if _library is not None:
        return
    kernels = {name: _kernel(name, operator) for name, operator in operators()}
    _library = torch.library.Library("c10d", "IMPL")
    for name, kernel in kernels.items():
        _library.impl(name, kernel, "BackendSelect", with_keyset=True)
    _show_waits()
    show_batches()


@functools.cache  # the search takes tens of milliseconds; processes forked from this one have it
def operators() -> list[tuple[str, Callable]]:
    """The operators of c10d that work in a process group, each with its name."""
    found = []
    for full_name in private.all_operators():
        library, _, name = full_name.partition("::")
        if library == "c10d" and "." not in name:
            operator = getattr(torch.ops.c10d, name).default
            if any(a.name == "process_group" for a in private.schema.of(operator).arguments):
                found.append((name, operator))
    return found


def listen(listener: Listener, refused: Callable[[], None] | None = None) -> None:
    """From now on, `listener` hears of each call that this process makes; `refused` is called, in the
    caller's thread, when such a call has raised."""
    install()
    _listeners.append(listener)
    if refused is not None:
        _refused.append(refused)


def stop(listener: Listener) -> None:
    """`listener` hears no more."""
    _listeners.remove(listener)


def hand_work(result: object, then: Callable[[dist.Work | None], None]) -> None:
    """For a listener that was called with an operator's `result`: calls `then` with what there is to
    wait for. In a batch NCCL has no Work for each call: `then` gets that of the whole batch, when it
    is complete. None is for a call for which nobody has to wait."""
    boxed = result[-1] if isinstance(result, (tuple, list)) else result
    work = None if boxed is None else dist.Work.unbox(boxed)  # NCCL's is a box with nothing in it
    if work is None and _of_the_batch is not None:
        _of_the_batch.append(then)
    else:
        then(work)


def python_caller() -> str | None:
    """For a listener: the function that makes this call, such as "all_reduce"; None if Python never
    gets the call's Work: DDP's reducer and the functional collectives call from C++ and wait there,
    unseen. The nearest frame is then another one of torch, or, in a thread of C++ alone, none."""
    frame = sys._getframe(1)
    while frame is not None and _is_between(frame):
        frame = frame.f_back
    module = "torch." if frame is None else frame.f_globals.get("__name__", "")
    if module == dist.distributed_c10d.__name__ or not module.startswith("torch."):
        return frame.f_code.co_name
    return None


def stand_between(module: str) -> None:
    """From now on the frames of this module, or of a package's modules, lie between."""
    global _between
    _between = (*_between, module)


def _is_between(frame) -> bool:
    """Whether a frame only hands on the calls of others; so does each mode, whoever has written it."""
    module = frame.f_globals.get("__name__", "")
    return module.startswith(_between) or frame.f_code.co_name == "__torch_dispatch__"


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within the block, `listener` hears of each call that this process makes."""
    listen(listener)
    try:
        yield
    finally:
        stop(listener)


def _kernel(name, operator):
    below = private.keys_after(private.key.value.BackendSelect)
    defaults = {a.name: a.default_value for a in private.schema.of(operator).arguments}

    def kernel(keys, *args, **kwargs):
        arguments = defaults | dict(zip(defaults, args)) | kwargs
        finishers = [listener(name, arguments) for listener in _listeners]
        try:
            result = operator.redispatch(keys & below, *args, **kwargs)
        except Exception:
            for refused in _refused:
                refused()
            raise
        for finish in finishers:
            if finish is not None:
                finish(result)
        return result

    _never_compile(kernel)
    return kernel


def _never_compile(function):
    """torch.compile passes over this function and all that it calls. `torch.compiler.disable` does
    the same, but imports the compiler in every process, which takes seconds."""
    with contextlib.suppress(ImportError):
        skip = private.skip.value
        private.set_strategy(function.__code__, private.strategy(skip, skip))


def given_up() -> None:
    """To be called where a wait with a limit has failed."""
    if waits is not None:
        waits.on_given_up()


def _show_waits():
    """Gives Work.wait, which is C++, a frame in Python's stack, where a stack dump shows it; one of
    another name if it waits for some time only, after which the caller may do something else."""
    wait_in_c = dist.Work.wait

    def wait_for_some_time(work, *args, **kwargs):
        try:
            return wait_in_c(work, *args, **kwargs)
        except Exception:
            given_up()
            raise

    def wait(work, *args, **kwargs):
        if args or kwargs:
            return wait_for_some_time(work, *args, **kwargs)
        return wait_in_c(work)

    dist.Work.wait = wait
    for name in "wait", "get":
        setattr(dist.Store, name, _shown(getattr(dist.Store, name)))


def _shown(wait_in_c):
    """A method of a store that waits for a key. For the program's own calls it has a frame in Python's
    stack, and `waits` hears of them; torch's own are told by torch's frames."""

    @functools.wraps(wait_in_c)
    def wait_for_key(store, keys, *limit):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if waits is None or caller.startswith("torch."):
            return wait_in_c(store, keys, *limit)
        seconds = (limit[0] if limit else store.timeout).total_seconds()
        over = waits.on_key(keys if isinstance(keys, str) else ", ".join(keys), seconds)
        try:
            return wait_in_c(store, keys, *limit)
        finally:
            over()

    return wait_for_key


def show_batches():
    """Lets `hand_work` see where PyTorch begins and ends a batch; to be called again by whoever puts
    functions of their own there."""
    start, end = private.start_batch.value, private.end_batch.value

    def start_batch(group, *device):
        global _of_the_batch
        start(group, *device)
        _of_the_batch = []

    def end_batch(group, *device):
        global _of_the_batch
        work, waiting = end(group, *device), _of_the_batch or []
        _of_the_batch = None
        for then in waiting:
            then(work)
        return work

    private.start_batch.put(start_batch)
    private.end_batch.put(end_batch)
