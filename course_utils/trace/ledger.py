"""The bytes that a process holds for a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from course_utils.comm import private


def memory_ledger(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, int]:
    """Returns the bytes that this process holds for `model`, by kind.

    Kinds are parameters, gradients, optimizer (its state) and buffers. A tied tensor counts once,
    a DTensor with the part that this rank holds of it.
    """
    parameters = list(model.parameters())
    state = optimizer.state.values() if optimizer is not None else []
    return {
        "parameters": _held(parameters),
        "gradients": _held(p.grad for p in parameters if p.grad is not None),
        "optimizer": _held(v for s in state for v in s.values() if torch.is_tensor(v)),
        "buffers": _held(model.buffers()),
    }


@dataclass
class Kept:
    """What autograd keeps for backward: the bytes of storages that are no parameters."""

    bytes: int = 0


@contextmanager
def kept_for_backward(model: nn.Module) -> Iterator[Kept]:
    """Counts the activations that forward passes of `model` inside the block keep for backward.

    A storage counts once, with all its bytes, however many operations keep it; of a DTensor it is
    that of this rank's part. Parameters and buffers are not counted: they stay whether or not there
    is a backward, and where FSDP gathers them for a layer it frees them after it. The inputs of the
    model are counted, where a layer keeps them. The source is autograd's own list of saved tensors,
    docs.pytorch.org/docs/stable/autograd.html, "Hooks for saved tensors".
    """
    kept = Kept()
    counted = {}  # storages by address: one that is freed could give its address to another tensor

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = _local(tensor).untyped_storage()
        address = storage.data_ptr()
        if address not in counted and address not in _addresses(model):
            counted[address] = storage
            kept.bytes += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        yield kept


@dataclass
class Largest:
    """The bytes of the largest tensor that an operation has made."""

    bytes: int = 0


@contextmanager
def largest_tensor() -> Iterator[Largest]:
    """Notes the largest tensor that operations of this process make inside the block.

    What forward makes counts, and so does what operations inside an autograd.Function make; views
    count with their own size. What a fused kernel has in its own tiles is no tensor.
    """
    largest = Largest()

    class Noting(private.dispatch_mode.value):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            made = operator(*args, **(kwargs or {}))
            tensors = [leaf for leaf in private.tree_leaves(made) if torch.is_tensor(leaf)]
            largest.bytes = max(largest.bytes, *(t.nbytes for t in tensors), 0)
            return made

    with Noting():
        yield largest


def _addresses(model: nn.Module) -> set[int]:
    """Where the parameters and buffers of `model` lie now: FSDP exchanges them as it gathers."""
    tensors = (*model.parameters(), *model.buffers())
    return {_local(tensor).untyped_storage().data_ptr() for tensor in tensors}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; any other tensor itself."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    # the result of a collective that still runs has no storage yet
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def _held(tensors) -> int:
    return sum(_local(tensor).nbytes for tensor in tensors)
