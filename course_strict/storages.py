"""Storages of the strict device, where PyTorch's C++ would ask an allocator for bytes.

Memory that FSDP frees (a storage resized to 0) is not given back but filled with bytes that no
computation survives unseen, so that a kernel which still reads it shows.
"""

import os

import torch

from course_strict import memory

_BEFORE_PYTORCHS_OWN = 5  # its entry for devices of this kind has 20, and needs an allocator
_all_bytes = torch.UntypedStorage.nbytes  # also of one that has been freed
_OF_RANK = f"{memory.NAME} device of rank "
_NOT_HERE = (
    "Attempting to deserialize object on CUDA device {saved} but torch.cuda.device_count() is 1. "
    "Please use torch.load with map_location to map your storages to an existing device."
)  # torch/serialization.py, _validate_device


def install() -> None:
    torch.serialization.register_package(_BEFORE_PYTORCHS_OWN, _tag, _restore)
    kind = torch.UntypedStorage
    own = {"resize_": _resize, "size": _size, "nbytes": _size, "clone": _clone}
    for name, function in own.items():
        setattr(kind, name, _of_the_device(function, getattr(kind, name)))


def _of_the_device(own, general):
    return lambda storage, *args: (own if storage.device.type == memory.NAME else general)(
        storage, *args
    )


def _size(storage):
    return 0 if storage.data_ptr() in memory.freed else _all_bytes(storage)


def _resize(storage, size):
    """The bytes stay where they are: C++ holds their address in every view."""
    if size > _all_bytes(storage):
        raise RuntimeError("Trying to resize storage that is not resizable")
    if size == 0:
        memory.of_storage(storage, _all_bytes(storage)).fill_(0xFF)  # NaN as any floating dtype
        memory.freed.add(storage.data_ptr())
    else:
        memory.freed.discard(storage.data_ptr())
    return storage


def _clone(storage):
    """What copy.deepcopy calls for each tensor."""
    return memory.storage_on_device(memory.of_storage(storage, _size(storage)).untyped_storage())


def _tag(storage):
    """What a checkpoint notes as the place: under NCCL each rank has a GPU of its own."""
    return f"{_OF_RANK}{_rank()}" if storage.device.type == memory.NAME else None


def _restore(storage, location):
    """What torch.load does: to the device that map_location names, or else to the saved one."""
    if not location.startswith(memory.NAME):
        return None
    if location.startswith(_OF_RANK) and location != f"{_OF_RANK}{_rank()}":
        raise RuntimeError(_NOT_HERE.format(saved=location.removeprefix(_OF_RANK)))
    return memory.storage_on_device(storage)


def _rank():
    return os.environ.get("LOCAL_RANK", "0")
