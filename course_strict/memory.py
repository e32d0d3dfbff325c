"""The strict device's memory lies on the CPU: the same bytes under two devices.

A DLPack capsule says on which device its bytes are. Written into it, another device makes a real
tensor of that device, with a storage, strides and views that all of PyTorch's C++ understands, and
without a copy. `seen_from_cpu` is how the kernels read the device; nothing else may use it.

The layout of a capsule is DLPack's (dmlc.github.io/dlpack, struct DLManagedTensor).
"""

import ctypes

import torch
from torch import Tensor
from torch.utils import dlpack

from course_utils.comm import private

NAME = "strict"
CPU = private.keys(private.key.value.CPU)
freed: set[int] = set()  # where storages begin that were resized to 0
_KIND_CPU, _KIND_EXTENSION = 1, 12  # DLPack's kDLCPU and kDLExtDev, which is PrivateUse1 here


class _Place(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Managed(ctypes.Structure):
    """The beginning of a DLManagedTensor: all that is touched here."""

    _fields_ = [("data", ctypes.c_void_p), ("place", _Place)]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def device() -> torch.device:
    """The one device that a rank sees, as under torchrun with a GPU for each process."""
    return torch.device(NAME, 0)


def is_strict(tensor: Tensor) -> bool:
    return tensor.device.type == NAME


def seen_from_cpu(tensor: Tensor) -> Tensor:
    """The bytes of a tensor of the device, as a CPU tensor."""
    return _relabelled(tensor, _KIND_CPU)


def moved_to_device(tensor: Tensor) -> Tensor:
    """The bytes of a CPU tensor that nobody else holds, as a tensor of the device."""
    freed.discard(tensor.data_ptr())  # memory that has found another use
    return _relabelled(tensor, _KIND_EXTENSION)


def _relabelled(tensor, kind):
    capsule = dlpack.to_dlpack(tensor)
    managed = ctypes.cast(_pointer(capsule, b"dltensor"), ctypes.POINTER(_Managed)).contents
    managed.place.kind, managed.place.index = kind, 0
    result = dlpack.from_dlpack(capsule)
    if result.stride() != tensor.stride():  # DLPack makes 1 of the stride of a dimension of size 1
        result = torch.ops.aten.as_strided.default.redispatch(
            CPU, result, tensor.shape, tensor.stride(), 0
        )
    # DLPack knows no bit that says that numbers are still to be conjugated, or negated
    if tensor.is_conj():
        result = result.conj()
    return private.negated(result) if tensor.is_neg() else result


def of_storage(storage: torch.UntypedStorage, size: int) -> Tensor:
    """The first `size` bytes of a storage of the device, as a CPU tensor (size,) of uint8."""
    empty = moved_to_device(torch.empty(0, dtype=torch.uint8))
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        CPU, empty, storage, 0, [size], [1]
    )
    return seen_from_cpu(empty)


def storage_on_device(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy of a CPU storage on the device."""
    return moved_to_device(
        torch.empty(0, dtype=torch.uint8).set_(storage).clone()
    ).untyped_storage()
