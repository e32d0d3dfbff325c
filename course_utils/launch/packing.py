"""Objects to bytes and back, between the kernel and its ranks.

cloudpickle takes functions that a cell defines. The data of tensors does not pass through the
pickle stream: it travels beside it, as out-of-band buffers (PEP 574), and is copied once into
the memory that the received tensor then owns.
"""

import io
import pickle
import socket
import struct

import cloudpickle
import torch

_LENGTH = struct.Struct("<Q")


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj):
        if isinstance(obj, torch.storage.TypedStorage):
            return _typed_storage, (obj._untyped_storage, obj.dtype)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
            data = torch.empty(0, dtype=torch.uint8).set_(obj.cpu())
            return _untyped_storage, (pickle.PickleBuffer(data.numpy()),)
        return super().reducer_override(obj)


def _typed_storage(untyped, dtype):
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _untyped_storage(buffer):
    if len(buffer) == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def pack(obj: object) -> list:
    """Returns `obj` as a list of bytes-like parts: the pickle stream, then the buffers."""
    stream, buffers = io.BytesIO(), []
    _Pickler(stream, protocol=5, buffer_callback=lambda b: buffers.append(b.raw())).dump(obj)
    return [stream.getbuffer(), *buffers]


def unpack(parts: list) -> object:
    return pickle.loads(parts[0], buffers=parts[1:])


def send(channel: socket.socket, parts: list) -> None:
    """Sends the parts as one message: their number, their lengths, their bytes."""
    lengths = [len(part) for part in parts]
    channel.sendall(b"".join(_LENGTH.pack(n) for n in [len(parts), *lengths]))
    for part in parts:
        channel.sendall(part)


def receive(channel: socket.socket) -> list:
    """Receives one message; raises EOFError when the other side is gone."""
    (count,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    sizes = _exactly(channel, _LENGTH.size * count)
    return [_exactly(channel, size) for (size,) in _LENGTH.iter_unpack(sizes)]


def _exactly(channel, size):
    data = bytearray(size)
    view = memoryview(data)
    while view:
        received = channel.recv_into(view)
        if received == 0:
            raise EOFError("the other process is gone")
        view = view[received:]
    return data
