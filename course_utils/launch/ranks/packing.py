"""Objects to bytes and back, between the kernel and its ranks.

cloudpickle takes what pickle does not: functions that a cell defines, closures, lambdas. The data of tensors does not
pass through the pickle stream. It travels beside it, as out-of-band buffers (PEP 574), and lands in the memory that the
received tensor then owns: 100 MB take 0.2 s instead of 2 s.
"""

import contextlib
import functools
import importlib
import inspect
import io
import operator
import pickle
import socket
import struct
import sys
import types
from collections.abc import Iterator

import cloudpickle
import torch

from course_utils.comm import private
from course_utils.launch.story.failure import RankFailure

_LENGTH = struct.Struct("<Q")

# What only the ranks can use, and what to send instead.
_TIED = {
    "DistributedDataParallel": "return model.module, or its state_dict()",
    "DTensor": "return x.to_local(), the part of this rank, or x.full_tensor()",
}


class Pickler(cloudpickle.Pickler):
    """What `pack` uses."""

    def reducer_override(self, obj):
        kind = type(obj)
        if kind.__name__ in _TIED and kind.__module__.startswith("torch."):
            raise TypeError(f"it belongs to the ranks' process group: {_TIED[kind.__name__]}")
        if _stands_for_a_module(obj):
            return importlib.import_module, (obj.__name__,)
        # what once_differentiable uses; no import finds it
        if obj is private.autograd_functions.value:
            return operator.attrgetter("_C._functions"), (torch,)
        if kind is functools._lru_cache_wrapper and not _is_imported(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if kind.__module__ == "IPython.core.autocall":  # what exit and quit are in a notebook
            return operator.attrgetter("exit"), (sys,)
        if isinstance(obj, torch.Tensor) and obj.dtype in private.new_dtypes():
            return _of_new_dtype(obj)
        # Storages, not tensors: two tensors that share memory still share it on the other side.
        if isinstance(obj, torch.storage.TypedStorage):
            return _typed_storage, (private.untyped.of(obj), obj.dtype)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
            data = torch.empty(0, dtype=torch.uint8).set_(obj.cpu())
            return _untyped_storage, (pickle.PickleBuffer(data.numpy()),)
        if kind is types.CodeType:
            return self._with_its_file(obj)
        return super().reducer_override(obj)

    def _with_its_file(self, code):
        """From 3.1.3 on, cloudpickle puts "<dynamic-code>" in the place of a function's file, and
        nobody could quote the learner's line."""
        make, parts = self.dispatch_table[types.CodeType](code)
        return make, tuple(code.co_filename if p == "<dynamic-code>" else p for p in parts)


def _stands_for_a_module(obj):
    """True for torch.backends.cudnn, torch.ops and their like, which cloudpickle takes for no module."""
    a_kind_of = isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType
    return a_kind_of and sys.modules.get(obj.__name__) is obj


def _of_new_dtype(tensor):
    """Of numbers for which there is no typed storage (uint16, float8), PyTorch's own pickling has the
    bytes as they are, and its rebuilding asks for a storage with a type, whichever."""
    make, parts, *_ = tensor.__reduce_ex__(5)
    bare = make is private.rebuild_tensor.value and isinstance(parts[0], torch.UntypedStorage)
    return make, (_typed_storage(parts[0], torch.uint8), *parts[1:]) if bare else parts


def _typed_storage(untyped, dtype):
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _is_imported(obj):
    """Whether an import finds it under its name."""
    name, by_value = obj.__module__, cloudpickle.list_registry_pickle_by_value()
    if name in by_value or name == "__main__" or not hasattr(obj, "__qualname__"):
        return False
    with contextlib.suppress(AttributeError):
        return operator.attrgetter(obj.__qualname__)(sys.modules.get(name)) is obj
    return False


def _cached(function, parameters):
    return functools.lru_cache(**parameters)(function)


def _untyped_storage(buffer):
    if len(buffer) == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def pack(obj: object, pickler: type[Pickler] = Pickler) -> list:
    """Returns `obj` as a list of bytes-like parts: the pickle stream, then the buffers.

    CUDA tensors become CPU tensors. Raises whatever the objects' own pickling raises.
    """
    stream, buffers = io.BytesIO(), []
    pickler(stream, protocol=5, buffer_callback=lambda b: buffers.append(b.raw())).dump(obj)
    return [stream.getvalue(), *buffers]


def unpack(parts: list) -> object:
    """Returns the object that `pack` was given."""
    return pickle.loads(parts[0], buffers=parts[1:])


def message(parts: list) -> dict:
    """Returns what a rank has sent, or that it cannot be rebuilt here."""
    try:
        return unpack(parts)
    except Exception as error:  # noqa: BLE001 - what a rank could send may not be rebuilt
        return {"kind": "pickle", "what": "receive", "text": f"{type(error).__name__}: {error}"}


def culprit(name: str, obj: object) -> tuple[str, Exception] | None:
    """Returns the innermost part of `obj` that cannot be packed, as `name["key"][2]` with the
    error of its pickling; None if all of it can."""
    error = _error_of(obj)
    if error is None:
        return None
    seen = set()  # a part may contain the whole
    inner = True
    while inner and not isinstance(error.__cause__, RecursionError):
        seen.add(id(obj))
        parts = (
            (*part, _error_of(part[1])) for part in _parts(name, obj) if id(part[1]) not in seen
        )
        inner = next((part for part in parts if part[2]), None)
        name, obj, error = inner or (name, obj, error)
    if isinstance(error.__cause__, RecursionError):
        error = ValueError("its parts lie too deep in each other")
    return f"{name} ({type(obj).__name__})", error


def _error_of(obj):
    try:
        pack(obj)
    except Exception as error:  # noqa: BLE001 - pickling runs anybody's code
        return error
    return None


def _parts(name, obj):
    if isinstance(obj, dict):
        return [(f"{name}[{key!r}]", value) for key, value in obj.items()]
    if isinstance(obj, (list, tuple)):
        return [(f"{name}[{i}]", value) for i, value in enumerate(obj)]
    return []


def failure(fn, args: tuple, kwargs: dict, error: Exception) -> RankFailure:
    """Returns the failure of packing fn and its arguments, which has raised `error`."""
    name = getattr(fn, "__name__", type(fn).__name__)
    candidates = [(f"argument {i}", value) for i, value in enumerate(args, start=1)]
    candidates += [(f"argument {key}", value) for key, value in kwargs.items()]
    candidates += [(f"{variable}, used in {name},", value) for variable, value in _used(fn)]
    found = (culprit(words, value) for words, value in [*candidates, (name, fn)])
    what, error = next(filter(None, found), (name, error))
    return RankFailure(
        f"{what} cannot be pickled, so it cannot be sent to the ranks.\n"
        f"  {type(error).__name__}: {error}\n"
        "Create it inside of the function, on each rank.",
        kind="pickle",
    )


def _used(fn):
    try:
        variables = inspect.getclosurevars(fn)
    except TypeError:
        return []  # not a Python function
    return [*variables.nonlocals.items(), *variables.globals.items()]


def send(channel: socket.socket, parts: list) -> None:
    """Sends the parts as one message: their number, their lengths, their bytes."""
    lengths = [len(part) for part in parts]
    channel.sendall(b"".join(_LENGTH.pack(n) for n in [len(parts), *lengths]))
    for part in parts:
        channel.sendall(part)


def receive(channel: socket.socket) -> list:
    """Waits for one message and returns its parts; raises EOFError if the sender is gone."""
    return next(messages(channel))


def messages(channel: socket.socket) -> Iterator[list | None]:
    """Yields the parts of each message; None where no more has arrived on a channel that does not block, so
    that a reader never has to wait for it. Raises EOFError when the sender is gone."""
    while True:
        count = bytearray(_LENGTH.size)
        yield from _fill(count, channel)
        sizes = bytearray(_LENGTH.size * _LENGTH.unpack(count)[0])
        yield from _fill(sizes, channel)
        parts = [bytearray(size) for (size,) in _LENGTH.iter_unpack(sizes)]
        for part in parts:
            yield from _fill(part, channel)
        yield parts


def _fill(room, channel):
    missing = memoryview(room)
    while missing:
        try:
            count = channel.recv_into(missing)
        except BlockingIOError:
            yield None
            continue
        if count == 0:
            raise EOFError("the sender is gone")
        missing = missing[count:]
