"""What a real rank does in a step, measured in other ways than `estimate.trace` counts it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from course_exercises.authoring.patience import PatientSampling
from course_planner import Layout, mesh_of
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
    with PatientSampling() as sampling:
        step()
    return Step(trace.record().calls, profiled_flops(step), sampling.peak)


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
