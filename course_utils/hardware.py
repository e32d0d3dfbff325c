"""What this machine has, and which device and backend each rank gets.

The rule of the course: where there are at least as many GPUs as ranks, each rank gets one GPU
and NCCL; otherwise every rank runs on the CPU with gloo. One GPU still serves the parts of a
chapter that run in one process.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Placement:
    """Where ranks run: the backend and one device per rank, `devices[rank]`."""

    backend: str
    devices: list[torch.device]


def cores() -> int:
    """Processor cores that this process may use (not those that the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def placement(nprocs: int) -> Placement:
    """Returns the backend and the devices of `nprocs` ranks: one GPU each and NCCL where there
    are enough GPUs, else the CPU and gloo."""
    if _gpu_count() >= nprocs and dist.is_nccl_available():
        return Placement("nccl", [torch.device("cuda", i) for i in range(nprocs)])
    return Placement("gloo", [torch.device("cpu")] * nprocs)


def device() -> torch.device:
    """Returns the device of this process: in a rank the one that the rank was given, in the
    notebook's kernel the first GPU, or the CPU where there is none."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_backend() == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
    return torch.device("cuda", 0) if _gpu_count() else torch.device("cpu")


def report() -> None:
    """Prints in words what this machine has and what each rank of a cell would get."""
    gpus = _gpu_count()
    system = f"PyTorch {torch.__version__} on {cores()} CPU cores"
    if gpus == 0:
        print(f"{system} and no GPU.")
        print("Ranks run on the CPU with gloo: every result is real, no time is a GPU's.")
        return
    names = sorted({torch.cuda.get_device_name(i) for i in range(gpus)})
    print(f"{system} and {gpus} GPU{'s' if gpus > 1 else ''} ({', '.join(names)}).")
    if gpus == 1:
        print("Single-process parts use the GPU. Two or more ranks run on the CPU with gloo.")
    else:
        print(f"Up to {gpus} ranks get one GPU each and NCCL; more ranks run on the CPU with gloo.")


def _gpu_count() -> int:
    # device_count() asks the driver's management library and leaves CUDA unstarted;
    # is_available() would start it, and fix CUDA_VISIBLE_DEVICES, in the kernel.
    return torch.cuda.device_count()
