"""Mixed precision on the strict device: `torch.autocast` casts there what it casts on an NVIDIA GPU.

Which operators that are, PyTorch's dispatcher knows; in which of three ways each is treated stands in
PyTorch's documentation (the page of torch.amp, "CUDA Ops that can autocast to float16", and so on).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_strict import memory
from course_utils.comm import private

KEY = "AutocastPrivateUse1"
_KEYS = private.keys(private.key.value.AutocastPrivateUse1)
# These compute in the lower precision.
_LOWER = {
    *("_convolution", "_convolution.deprecated", "convolution", "conv_tbc"),
    *("conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
    *("cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"),
    *("linear", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm"),
    *("chain_matmul", "linalg_multi_dot", "linalg_vecdot", "einsum", "prelu"),
    *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"),
}
# These take the widest type among their tensors, which the kernels of CPUs do by themselves or refuse.
_WIDEST = {
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler"),
    *("index_put", "scatter_add", "tensordot"),
}


def names() -> list[str]:
    """The operators of aten that autocast changes on a GPU, those aside that take the widest type."""
    changed = private.registered_for("AutocastCUDA")
    found = {name.removeprefix("aten::") for name in changed if name.startswith("aten::")}
    return sorted(found - _WIDEST)


def casting(name: str, operator: Callable) -> Callable:
    """The kernel: `operator` on its tensors in the lower precision, or, if it is none of those, in
    single precision. Doubles stay as they are, as on a GPU."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        wanted = torch.get_autocast_dtype(memory.NAME) if name in _LOWER else torch.float32

        def cast(value: Any) -> Any:
            return value.to(wanted) if _may_be_cast(value) else value

        with private.without_keys(_KEYS):
            return operator(*private.tree_map(cast, args), **private.tree_map(cast, kwargs))

    return kernel


def _may_be_cast(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.device.type != memory.NAME:
        return False
    return value.is_floating_point() and value.dtype != torch.float64
