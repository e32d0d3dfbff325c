"""A machine, as one process sees it. Nothing here starts CUDA."""

import ctypes
import os
import re
import sys
from dataclasses import dataclass

import torch

from course_utils.hardware import gpu_sharing


@dataclass(frozen=True)
class Machine:
    """What a machine has, as one snapshot; invent one to see what the doctor says of it.

    driver_gpus   GPUs that the driver lists, whatever the environment says; None: nobody to ask
    visible       CUDA_VISIBLE_DEVICES as it is now; None: not set, which shows all GPUs
    started_gpus  GPUs that CUDA gave this process when it started; None: it has not started
    torch_gpus    torch.cuda.device_count(); left out, it follows from the three above
    cuda_build    whether this PyTorch is built with CUDA
    names         of the driver's GPUs
    memory_used   share of each of the driver's GPUs' memory that is in use, 0 to 1
    cores         processor cores that this process may use
    apple_gpu     whether PyTorch could compute on an Apple GPU (MPS)
    """

    driver_gpus: int | None = 0
    visible: str | None = None
    started_gpus: int | None = None
    torch_gpus: int | None = None
    cuda_build: bool = True
    names: tuple[str, ...] = ()
    memory_used: tuple[float, ...] = ()
    cores: int = 1
    apple_gpu: bool = False

    def __post_init__(self) -> None:
        if self.torch_gpus is None:
            count = len(self.selected()) if self.started_gpus is None else self.started_gpus
            object.__setattr__(self, "torch_gpus", count if self.cuda_build else 0)

    def selected(self) -> list[str]:
        """The entries of CUDA_VISIBLE_DEVICES that CUDA accepts; all GPUs where it is not set.

        CUDA reads the list up to the first entry that is no GPU and shows those before it; an
        entry that stands twice hides all.
        Source: CUDA C++ Programming Guide, section "CUDA Environment Variables".
        """
        count = self.driver_gpus or 0
        if self.visible is None:
            return [str(i) for i in range(count)]
        accepted: list[str] = []
        for entry in (part.strip() for part in self.visible.split(",")):
            number = re.match(r"\d+", entry)  # CUDA reads "1gpu" as 1
            if number and (self.driver_gpus is None or int(number[0]) < self.driver_gpus):
                entry = number[0]
            elif not entry.startswith(("GPU-", "MIG-")):
                break
            if entry in accepted:
                return []
            accepted.append(entry)
        return accepted


def cores() -> int:
    """Processor cores that this process may use (not those that the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> Machine:
    """Returns a snapshot of this machine as this process sees it. Does not start CUDA."""
    gpus = _driver_gpus()
    return Machine(
        driver_gpus=None if gpus is None else len(gpus),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        started_gpus=_started_gpus(),
        torch_gpus=torch_gpus(),
        cuda_build=torch.version.cuda is not None,
        names=tuple(name for name, _ in gpus or []),
        memory_used=tuple(used for _, used in gpus or []),
        cores=cores(),
        apple_gpu=torch.backends.mps.is_available(),
    )


def torch_gpus() -> int:
    # device_count() asks the driver's management library and leaves CUDA unstarted;
    # is_available() would start it, and fix CUDA_VISIBLE_DEVICES, in the kernel.
    return torch.cuda.device_count()


def _driver_gpus() -> list[tuple[str, float]] | None:
    """Name and share of memory in use of each GPU that the driver lists, whatever
    CUDA_VISIBLE_DEVICES says; None where nvidia-smi is missing or fails."""
    answer = gpu_sharing.nvidia_smi("name", "memory.used", "memory.total")
    if answer is None:
        return None
    rows = re.findall(r"^(.+), ([^,]+), ([^,]+)$", answer, re.MULTILINE)
    return [(name, _share(used, total)) for name, used, total in rows]


def _share(used: str, total: str) -> float:
    try:
        return float(used) / float(total)
    except (ValueError, ZeroDivisionError):
        return 0.0  # "[N/A]", on boards that share the system's memory


def _started_gpus() -> int | None:
    """GPUs that CUDA has given to this process, or None where it has not started here.

    The driver's library says so itself: before cuInit every call answers NOT_INITIALIZED (3).
    Source: CUDA Driver API, section "Device Management", cuDeviceGetCount.
    """
    try:
        if sys.platform == "win32":
            driver = ctypes.CDLL("nvcuda.dll")
        else:
            driver = ctypes.CDLL("libcuda.so.1", mode=getattr(os, "RTLD_NOLOAD", 0))
    except OSError:
        return None  # not there, or not loaded: nothing has started CUDA
    count = ctypes.c_int(0)
    return count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else None


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
