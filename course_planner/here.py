"""This machine as a Hardware: what ranks on its cores reach together, with gloo between them."""

import statistics
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist

from course_planner.descriptions import Hardware
from course_planner.timing import Calibration
from course_utils.comm.rings import PASSES, bus_factor
from course_utils.launch import launch

SIDE = 1024  # of the matrices
NUMBERS = 2**22  # of a large tensor: 16 MB
ROUNDS = 7

# Where a calibration for CPUs begins: small matrices are quick already, nobody launches kernels,
# gloo's rates are measured as they are, and its threads need the cores that a backward pass needs.
CPU = Calibration(
    matrices=0.8,
    size=1e7,
    launch=1e-4,
    intra=1.0,
    inter=1.0,
    ring=1.0,
    slowdown=0.01,
    overlap=0.1,
)


def this_machine(ranks: int = 2) -> Hardware:
    """Measures `ranks` ranks that work at the same time, a thread each, as the course's ranks do.

    peak: float32 matrices of SIDE x SIDE. hbm_bandwidth: a copy, read and written. Links: gloo's
    all-reduce, of a large tensor for the bandwidth (nccl-tests' busbw) and of one number for the
    latency. `step_time` counts 2 bytes a number, and float32 has 4: so rates of bytes are halved.
    hbm_bytes: a rank's share of the memory. The machine is one node.
    """
    found = launch(_rates, ranks, backend="gloo")
    flops, copied, sent, latency = (statistics.median(values) for values in zip(*found))
    return Hardware(
        peak=flops,
        hbm_bytes=psutil.virtual_memory().total // ranks,
        hbm_bandwidth=copied / 2,
        node=ranks,
        intra_bandwidth=sent / 2,
        intra_latency=latency,
        inter_bandwidth=sent / 2,
        inter_latency=latency,
    )


def _rates(rank: int) -> tuple[float, float, float, float]:
    """Runs on a rank: FLOP/s, B/s of a copy, busbw, seconds of a round."""
    torch.set_num_threads(1)
    matrix, large, one = torch.rand(SIDE, SIDE), torch.rand(NUMBERS), torch.ones(1)
    target, ranks, size = torch.empty_like(large), dist.get_world_size(), 4 * NUMBERS
    rounds = PASSES["all_reduce"] * (ranks - 1)
    return (
        2 * SIDE**3 / _seconds(lambda: matrix @ matrix),
        2 * size / _seconds(lambda: target.copy_(large)),
        bus_factor("all_reduce", ranks) * size / _seconds(lambda: dist.all_reduce(large)),
        _seconds(lambda: dist.all_reduce(one)) / rounds,
    )


def _seconds(action: Callable[[], object]) -> float:
    """The median of several rounds, which all ranks begin together; the first does not count."""
    found = []
    for _ in range(1 + ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])
