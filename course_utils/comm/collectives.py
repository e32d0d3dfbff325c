"""The operators through which PyTorch communicates: what each is called, hands over and receives.

torch.distributed's functions end in them, and so do DistributedDataParallel, FSDP and DTensor
(`intercept` listens there). Who needs to know more of an operator than its arguments finds it here.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Operator:
    """An operator of the library c10d.

    function: its name in torch.distributed: "all_gather_into_tensor"
    op:       what it does, whatever the form of its tensors: "all_gather"
    payload:  the argument with what this rank hands over; None where it hands over nothing
    received: the argument with what a rank gets that hands over nothing
    alike:    the argument whose tensors must look the same on every rank; None where they may differ
    """

    function: str
    op: str
    payload: str | None = None
    received: str | None = None
    alike: str | None = None


OPERATORS = {
    "allreduce_": Operator("all_reduce", "all_reduce", "tensors", alike="tensors"),
    "allreduce_coalesced_": Operator(
        "all_reduce_coalesced", "all_reduce", "tensors", alike="tensors"
    ),
    "broadcast_": Operator("broadcast", "broadcast", "tensors", "tensors", alike="tensors"),
    "reduce_": Operator("reduce", "reduce", "tensors", alike="tensors"),
    "allgather_": Operator("all_gather", "all_gather", "input_tensors", alike="input_tensors"),
    "_allgather_base_": Operator(
        "all_gather_into_tensor", "all_gather", "input_tensor", alike="input_tensor"
    ),
    "allgather_coalesced_": Operator(
        "all_gather_coalesced", "all_gather", "input_list", alike="input_list"
    ),
    "allgather_into_tensor_coalesced_": Operator(
        "all_gather_into_tensor_coalesced", "all_gather", "inputs", alike="inputs"
    ),
    "gather_": Operator("gather", "gather", "input_tensors", alike="input_tensors"),
    "scatter_": Operator(
        "scatter", "scatter", "input_tensors", "output_tensors", alike="output_tensors"
    ),
    "reduce_scatter_": Operator(
        "reduce_scatter", "reduce_scatter", "input_tensors", alike="input_tensors"
    ),
    "_reduce_scatter_base_": Operator(
        "reduce_scatter_tensor", "reduce_scatter", "input_tensor", alike="output_tensor"
    ),
    "reduce_scatter_tensor_coalesced_": Operator(
        "reduce_scatter_tensor_coalesced", "reduce_scatter", "inputs", alike="outputs"
    ),
    "alltoall_": Operator("all_to_all", "all_to_all", "input_tensors"),
    "alltoall_base_": Operator("all_to_all_single", "all_to_all", "input"),
    "send": Operator("send", "send", "tensors", alike="tensors"),
    "recv_": Operator("recv", "recv", received="tensors", alike="tensors"),
    "recv_any_source_": Operator("recv", "recv", received="tensors", alike="tensors"),
    "barrier": Operator("barrier", "barrier"),
    "monitored_barrier_": Operator("monitored_barrier", "barrier"),
}
POINT_TO_POINT = ("send", "recv")


def tensors_in(value: object) -> list[Tensor]:
    """The tensors in an argument of an operator: a tensor, a list, a list of lists, or something else."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for entry in value for tensor in tensors_in(entry)]
    return []
