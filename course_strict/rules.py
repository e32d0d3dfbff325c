"""What NCCL, or PyTorch for a GPU, refuses and the CPU with gloo takes: one entry a rule.

Most of the rules need no code here: PyTorch itself refuses a CPU tensor in a group without a backend
for it, two devices in one kernel, `numpy()` of a tensor of the device, `monitored_barrier`.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from course_utils.comm import host_waits


@dataclass(frozen=True)
class Rule:
    """text: in PyTorch's or NCCL's words; source: where they stand."""

    text: str
    source: str


RULES = {
    "mixed devices": Rule(
        "Expected all tensors to be on the same device, but found at least two devices, {device} "
        "and cpu! (when checking arguments in method {operator})",
        "aten/src/ATen/core/adaption.h, common_device_check_failure",
    ),
    "generator": Rule(
        "Expected a 'cuda' device type for generator but found 'cpu'",
        "aten/src/ATen/core/Generator.h, check_generator",
    ),
    "dtype": Rule(
        "Input tensor data type is not supported for NCCL process group: {dtype}",
        "torch/csrc/distributed/c10d/NCCLUtils.cpp, getNcclDataType",
    ),
    "not contiguous": Rule(
        "Tensors must be contiguous",
        "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, check_gpu_single_tensor",
    ),
    "reduction": Rule(
        "Cannot use ReduceOp.{operation} with NCCL",
        "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, getNcclReduceOp",
    ),
    "any source": Rule(
        "Backend nccl does not support recvAnysource",
        "torch/csrc/distributed/c10d/Backend.hpp, recvAnysource",
    ),
    "in flight": Rule(
        f"The result of {{call}} {host_waits.USED_EARLY}. NCCL fills it on a stream of its own: call "
        "wait() on what {call} returned first.",
        "docs.pytorch.org, distributed, Synchronous and asynchronous collective operations: the "
        "output can be used on the default stream after wait()",
    ),
}

_UNKNOWN_TO_NCCL = {  # getNcclDataType has no entry for them
    torch.int16: "Short",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
}
_BITWISE = ("BAND", "BOR", "BXOR")


def _broken(rule, kind=RuntimeError, **words):
    return kind(RULES[rule].text.format(**words))


def refuse_generator(generator: torch.Generator) -> None:
    """Raises RuntimeError: a generator of the CPU for a tensor of the device."""
    if generator.device.type == "cpu":
        raise _broken("generator")


def refuse_mixture(device: torch.device, operator) -> None:
    """Raises RuntimeError: a kernel of the device got a CPU tensor."""
    raise _broken("mixed devices", device=device, operator=operator.name())


def refuse_in_flight(call: str) -> None:
    """Raises RuntimeError: a kernel touches what an asynchronous call still fills."""
    raise _broken("in flight", call=call)


def check_call(name: str, given: dict) -> None:
    """Judges a call of c10d by its operator's name and its arguments by name. Raises ValueError,
    TypeError or RuntimeError, as NCCL's backend does."""
    if name == "recv_any_source_":
        raise _broken("any source")
    operation = _operation(given)
    if operation in _BITWISE:
        raise _broken("reduction", ValueError, operation=operation)
    for value in given.values():
        _check_tensors(value)


def averages(given: dict) -> bool:
    """Whether a call asks for the mean, which NCCL knows and gloo does not."""
    return _operation(given) == "AVG"


def _operation(given):
    boxed = given.get("reduce_op")
    return None if boxed is None else dist.ReduceOp.RedOpType(boxed.op()).name


def _check_tensors(value):
    if isinstance(value, (list, tuple)):
        for entry in value:
            _check_tensors(entry)
    elif isinstance(value, Tensor):
        if not value.is_contiguous():
            raise _broken("not contiguous", ValueError)
        if value.dtype in _UNKNOWN_TO_NCCL:
            raise _broken("dtype", TypeError, dtype=_UNKNOWN_TO_NCCL[value.dtype])
