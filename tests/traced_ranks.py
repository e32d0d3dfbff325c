"""What a real rank does in a step, measured in other ways than `estimate.trace` counts it."""

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_utils.estimate import Layout, mesh_of
from course_utils.meters import local
from course_utils.trace import Call, Trace


@dataclass
class Step:
    calls: list[Call]
    flops: int
    peak: int


def real(rank: int, program: Callable, layout: Layout) -> Step:
    """Runs on a rank: the calls of its second step, the peak of a third, the FLOPs of a fourth."""
    torch.set_num_threads(1)
    step = program(mesh_of(layout), layout)
    step()
    with Trace() as trace:
        step()
    with Sampling() as sampling:
        step()
    return Step(trace.record().calls, profiled_flops(step), sampling.peak)


class Sampling(TorchDispatchMode):
    """Adds up, after each operation, what all storages that are alive have at that moment.

    PyTorch's profiler does not hear what gloo's threads free, and its peak is too high by it.
    """

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        found = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
        self.alive: dict[int, weakref.ref] = {}
        self.peak = 0
        self._add([local(tensor) for tensor in found])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with this rank's part
        result = func(*args, **kwargs or {})
        self._add([leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)])
        storages = [reference() for reference in self.alive.values()]
        total = sum(storage.nbytes() for storage in storages if storage is not None)
        self.peak = max(self.peak, total)
        return result

    def _add(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = weakref.ref(storage)


def profiled_flops(step: Callable[[], None]) -> int:
    """The FLOPs of matrix products that PyTorch's profiler finds, and those of attention by its
    shapes: two products forward, and backward those two and three more."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as seen:
        step()
    flops = 0
    for event in seen.events():
        if _again(event, event.name):
            continue  # a DTensor's; below it comes what this rank does of it
        if event.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            flops += event.flops
        elif event.name == "aten::_scaled_dot_product_flash_attention_for_cpu":
            q, k = event.input_shapes[:2]
            flops += 4 * math.prod(q) * k[2]
        elif event.name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
            q, k = event.input_shapes[1:3]
            flops += 10 * math.prod(q) * k[2]
    return flops


def _again(event, name: str) -> bool:
    """Whether the same operation is called below this one."""
    return any(child.name == name or _again(child, name) for child in event.cpu_children)
