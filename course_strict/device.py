"""The strict device: a device of PyTorch's PrivateUse1 kind whose kernels compute on the CPU.

Its tensors are real tensors of another device (see `memory`), so what PyTorch itself refuses on a
GPU it refuses here, in its own words: a CPU tensor among those of the device, `numpy()`, a group
that has no backend for the CPU. One fallback computes all operators with the CPU's kernels; what
makes, copies or views tensors has kernels of its own. Differentiation, DDP, DTensor and FSDP are
above all this and notice nothing.
"""

import torch
from torch import Tensor, nn

from course_strict import autocast, guard, memory, module, queues, rules, storages
from course_strict.memory import CPU, moved_to_device, seen_from_cpu
from course_utils.comm import private

aten = torch.ops.aten
# On a GPU these take CPU tensors beside those of the device: indices, and what is copied.
_TAKES_CPU_TENSORS = {
    "aten::index.Tensor",
    "aten::index.Tensor_out",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor",
}
# Views of the same storage: the CPU's kernels do them for any device.
_VIEWS = (
    "as_strided",
    "view",
    "view_as_complex",
    "view_as_real",
    "_reshape_alias",
    "unfold",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
)
# What PyTorch asks a device of this kind for under another name than the CPU.
_OTHER_NAMES = {
    "convolution_overrideable": aten.convolution.default,
    "mse_loss": aten.mse_loss.default,  # its out= resizes what it was given
    "smooth_l1_loss": aten.smooth_l1_loss.default,
}
_libraries = []  # a library that is collected takes its kernels with it


def install() -> None:
    """Gives this process the device; for good, as PyTorch has one device of this kind."""
    if _libraries:
        return
    private.make_device(
        memory.NAME, backend_module=module.Module(), device_guard=guard.DeviceGuard()
    )
    guard.install()
    storages.install()
    _keep_parameters_when_moved()
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_compute, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, autocast.KEY)
    own = torch.library.Library("aten", "IMPL")
    for name, kernel in _KERNELS.items():
        own.impl(name, kernel, "PrivateUse1")
    for name in _VIEWS:
        own.impl(name, _on_the_same_storage(_operator(name)), "PrivateUse1")
    for name, meant in _OTHER_NAMES.items():
        own.impl(name, _under_another_name(meant), "PrivateUse1")
    for name in autocast.names():
        own.impl(name, autocast.casting(name, _operator(name)), autocast.KEY)
    for name in ("empty.memory_format", "empty_strided"):
        general = torch.library.get_kernel(f"aten::{name}", "BackendSelect")
        kernel = _unpinned(general)
        own.impl(name, kernel, "BackendSelect", with_keyset=True, allow_override=True)
    own.impl("is_pinned", _pinned, "CPU", allow_override=True)
    _libraries.extend([everything, own])


def _keep_parameters_when_moved():
    """`model.to(device)` keeps its parameters as it does on a GPU: tied ones stay tied. The switch for
    that would also change how a checkpoint is loaded, which copies on a GPU."""
    swap = torch.__future__.set_swap_module_params_on_conversion
    swap(True)
    load_state_dict, apply = nn.Module.load_state_dict, private.apply_to_module.value

    def load_without_swapping(*args, **kwargs):
        swap(False)
        try:
            return load_state_dict(*args, **kwargs)
        finally:
            swap(True)

    def apply_swapping_where_it_can(*args, **kwargs):
        try:
            return apply(*args, **kwargs)
        except RuntimeError as error:
            if "Couldn't swap" not in str(error):
                raise
        swap(False)  # somebody has a weak reference, as what torch.export has made
        try:
            return apply(*args, **kwargs)
        finally:
            swap(True)

    nn.Module.load_state_dict = load_without_swapping
    private.apply_to_module.put(apply_swapping_where_it_can)


def _operator(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _compute(operator, *args, **kwargs):
    """Any operator, by the CPU's kernel on the same bytes."""
    twins = _Twins(operator)
    args = _numbers_as_tensors(operator, args)
    args, kwargs = twins.of(args), {name: twins.of(value) for name, value in kwargs.items()}
    try:
        results = operator.redispatch(CPU, *args, **kwargs)
    except NotImplementedError as error:
        raise _without_a_kernel(operator, error) from error
    twins.adopt_what_was_resized()
    return twins.back(results)


def _without_a_kernel(operator, error):
    """PyTorch's error, or one sentence instead of its page about backends."""
    if not str(error).startswith("Could not run"):
        return error
    return NotImplementedError(
        f"{operator.name()} has no kernel for CPUs, with which this device computes under NCCL's rules: "
        "call launch without `rules`, or use a GPU."
    )


def _numbers_as_tensors(operator, args):
    """What was a number in `x * 2` arrives as a number where the schema has a tensor."""
    return tuple(
        _number_as_tensor(value, args)
        if isinstance(value, (int, float, complex)) and isinstance(argument.type, torch.TensorType)
        else value
        for value, argument in zip(args, private.schema.of(operator).arguments)
    )


def _number_as_tensor(number, beside):
    dtype = torch.tensor(number).dtype if isinstance(number, (bool, int)) else None
    tensors = [t for t in beside if isinstance(t, Tensor)]
    if dtype is None:  # a number never changes the precision of what it is combined with
        plain = all(t.dim() == 0 for t in tensors)
        known = tensors[0].dtype if tensors and plain and tensors[0].is_floating_point() else None
        dtype = torch.complex128 if isinstance(number, complex) else known or torch.float64
    return torch.tensor(number, dtype=dtype)


class _Twins:
    """The CPU's view of the tensors that one call of an operator gets, and the way back."""

    def __init__(self, operator):
        self._operator = operator
        self._pairs = []  # (the tensor of the device, its CPU twin)
        self._takes_cpu = operator.name() in _TAKES_CPU_TENSORS

    def of(self, value):
        if isinstance(value, Tensor):
            return self._twin(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.of(v) for v in value)
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == memory.NAME else value
        if isinstance(value, torch.Generator):
            rules.refuse_generator(value)
        return value

    def _twin(self, tensor):
        if memory.is_strict(tensor):
            queues.touched([tensor])
            # what has no bytes yet may be resized, and borrowed bytes cannot be
            twin = seen_from_cpu(tensor) if tensor.numel() else _empty_twin(tensor)
            self._pairs.append((tensor, twin))
            return twin
        if tensor.dim() and not self._takes_cpu:
            rules.refuse_mixture(memory.device(), self._operator)
        return tensor

    def adopt_what_was_resized(self):
        for tensor, twin in self._pairs:
            if twin.shape != tensor.shape:
                _replace(tensor, twin)

    def back(self, result):
        if isinstance(result, Tensor):
            return self._original(result)
        if isinstance(result, (list, tuple)):
            return type(result)(self.back(r) for r in result)
        return result

    def _original(self, result):
        for tensor, twin in self._pairs:
            if result is twin:
                return tensor
            if private.is_view(result) or not result.numel():
                continue
            if result.untyped_storage().data_ptr() == twin.untyped_storage().data_ptr():
                offset = tensor.storage_offset() + result.storage_offset()
                return aten.as_strided.default.redispatch(
                    CPU, tensor, result.shape, result.stride(), offset
                )
        return moved_to_device(result)


def _empty_twin(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _replace(tensor, twin):
    """The tensor gets the bytes, the shape and the strides of a CPU tensor."""
    new = moved_to_device(twin)
    aten.set_.source_Storage_storage_offset.redispatch(
        CPU, tensor, new.untyped_storage(), 0, new.shape, new.stride()
    )


def _on_the_same_storage(operator):
    return lambda *args, **kwargs: operator.redispatch(CPU, *args, **kwargs)


def _under_another_name(meant):
    return lambda *args, **kwargs: _compute(meant, *args, **kwargs)


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    cpu = torch.empty(
        size, dtype=dtype, device="cpu", memory_format=memory_format or torch.contiguous_format
    )
    return moved_to_device(cpu)


def _unpinned(general):
    """DDP's reducer asks for pinned memory, which only a device written in C++ can give."""

    def kernel(keys, *sizes, pin_memory=None, **options):
        return general.call_boxed(keys, *sizes, pin_memory=False, **options)

    return kernel


def _pinned(tensor, device=None):
    """The reducer insists that it got what it asked for: here any memory is as good as pinned."""
    return True


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return moved_to_device(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _resize_(tensor, size, *, memory_format=None):
    old = seen_from_cpu(tensor)
    if old.numel() < torch.Size(size).numel():
        new = torch.empty(size, dtype=old.dtype)
        new.flatten()[: old.numel()] = old.flatten()
        _replace(tensor, new)
    else:
        new = torch.empty(size, dtype=old.dtype, device="meta")
        aten.as_strided_.default(tensor, new.shape, new.stride())
    return tensor


def _copy_(target, source, non_blocking=False):
    queues.touched(t for t in (target, source) if memory.is_strict(t))
    here, there = (seen_from_cpu(t) if memory.is_strict(t) else t for t in (target, source))
    here.copy_(there)
    return target


def _copy_from(source, target, non_blocking=False):
    return _copy_(target, source)


def _local_scalar_dense(tensor):
    queues.touched([tensor])
    return seen_from_cpu(tensor).item()


def _convolution_backward(gradient, input, weight, *rest):
    *geometry, mask = rest
    sizes = [gradient.shape[1]] if mask[2] else None
    return _compute(
        aten.convolution_backward.default, gradient, input, weight, sizes, *geometry, mask
    )


def _nothing(*_, **__):
    return None


_KERNELS = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "resize_": _resize_,
    "copy_": _copy_,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from,
    "_local_scalar_dense": _local_scalar_dense,
    "convolution_backward_overrideable": _convolution_backward,
    "record_stream": _nothing,
    # the plain formula: what the CPU would choose exists for the CPU only
    "_fused_sdp_choice": lambda *_, **__: 0,
}
