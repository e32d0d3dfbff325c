"""What NCCL, or PyTorch for a GPU, refuses and the CPU with gloo takes: one entry a rule.

Most of the rules need no code here: PyTorch itself refuses a CPU tensor in a group without a backend
for it, two devices in one kernel, `numpy()` of a tensor of the device, `monitored_barrier`.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from course_utils.comm import host_waits
from course_utils.comm.collectives import tensors_in


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
    "list size": Rule(
        "ProcessGroupNCCL::{call}: Incorrect {side} list size {got}. {Side} list size should be "
        "{expected}, same as size of the process group.",
        "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, gather, scatter; with the others' lists NCCL "
        "would go beyond the end of the memory",
    ),
    "part": Rule(
        "ProcessGroupNCCL::{call}: invalid tensor size at index {index} (expected {expected}, got {got})",
        "torch/csrc/distributed/c10d/Utils.hpp, assertTypeAndSizesMatch; in all_gather and "
        "reduce_scatter a rank's own part only, as ProcessGroupNCCL.cpp, _broadcast_oop, _reduce_oop",
    ),
    "whole": Rule(
        "{whole} tensor size must be equal to world_size times {part} tensor size",
        "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, _allgather_base, _reduce_scatter_base",
    ),
    "another dtype": Rule(
        "{whole} tensor must have the same type as {part} tensor",
        "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, _allgather_base, _reduce_scatter_base",
    ),
    "watchdog": Rule(
        "Watchdog caught collective operation timeout: WorkNCCL(OpType={operation}, Timeout(ms)="
        "{limit}) ran for {limit} milliseconds before timing out. With NCCL the watchdog then ends the "
        "process, whatever that is doing.",
        "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, WorkNCCL::checkTimeout",
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
_LISTS = ("gather_", "scatter_", "allgather_", "reduce_scatter_")  # with a tensor for each rank
_WHOLE = ("_allgather_base_", "_reduce_scatter_base_")  # with one for all ranks
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
    for tensor in tensors_in(list(given.values())):
        if not tensor.is_contiguous():
            raise _broken("not contiguous", ValueError)
        if tensor.dtype in _UNKNOWN_TO_NCCL:
            raise _broken("dtype", TypeError, dtype=_UNKNOWN_TO_NCCL[tensor.dtype])
    group = dist.ProcessGroup.unbox(given["process_group"])
    whole, part = ("output", "input") if "gather" in name else ("input", "output")
    if name in _LISTS:
        [own] = tensors_in(given[f"{part}_tensors"])
        _check_list(name, group, whole, tensors_in(given[f"{whole}_tensors"]), own)
    elif name in _WHOLE:
        large, small = given[f"{whole}_tensor"], given[f"{part}_tensor"]
        if large.dtype != small.dtype:
            raise _broken("another dtype", TypeError, whole=whole, part=part)
        if large.numel() != small.numel() * group.size():
            raise _broken("whole", ValueError, whole=whole, part=part)


def timed_out(name: str, limit: int) -> dist.DistBackendError:
    """What the watchdog says of a call that has not ended after `limit` milliseconds."""
    operation = name.removesuffix("_").upper()
    return _broken("watchdog", dist.DistBackendError, operation=operation, limit=limit)


def averages(given: dict) -> bool:
    """Whether a call asks for the mean, which NCCL knows and gloo does not."""
    return _operation(given) == "AVG"


def _operation(given):
    boxed = given.get("reduce_op")
    return None if boxed is None else dist.ReduceOp.RedOpType(boxed.op()).name


def _check_list(name, group, side, parts, own):
    """parts: one a rank, none where another rank is the root."""
    about = {"call": name.removesuffix("_"), "side": side, "Side": side.title()}
    if len(parts) not in (0, group.size()):
        about |= {"got": len(parts), "expected": group.size()}
        raise _broken("list size", ValueError, **about)
    for index, part in enumerate(parts):
        if name in ("gather_", "scatter_"):
            fits = part.shape == own.shape
        else:
            fits = part.numel() == own.numel() or index != group.rank()
        if not fits:
            got, expected = (f"({', '.join(map(str, tensor.shape))})" for tensor in (part, own))
            raise _broken("part", ValueError, index=index, got=got, expected=expected, **about)
