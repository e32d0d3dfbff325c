"""Where ranks run, and in which words a notebook says so."""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from course_utils.comm import host_waits
from course_utils.hardware import gpu_sharing
from course_utils.hardware.snapshot import counted, machine, torch_gpus

# What PyTorch would print into a cell: with NCCL a warning where a rank sends or receives without a batch,
# because ranks connect early; of its profiler that it starts, ends, and finds no GPU.
QUIET = {
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
    "KINETO_LOG_LEVEL": "6",
}


_without_gpus = False


@dataclass(frozen=True)
class Placement:
    """Where ranks run: the backend and one device per rank, `devices[rank]`."""

    backend: str
    devices: list[torch.device]

    @property
    def sharing(self) -> int:
        """Ranks on the fullest GPU; 1 where each has a device of its own or all are on the CPU."""
        if self.backend != "nccl":
            return 1
        return max(map(self.devices.count, self.devices))

    @property
    def timing(self) -> str:
        """What a figure has to say of times: "measured", or what stands in for GPUs."""
        if self.backend != "nccl":
            return "emulated: ranks on the CPU"
        if self.sharing > 1:
            gpus = counted(len(set(self.devices)), "GPU")
            return f"emulated: {len(self.devices)} ranks share {gpus}"
        return "measured"


def placement(nprocs: int) -> Placement:
    """Returns the backend and the devices of `nprocs` ranks: one GPU each and NCCL where there
    are enough GPUs, or shared ones where that works; else the CPU and gloo."""
    gpus = _usable_gpus()
    if gpus and dist.is_nccl_available() and (gpus >= nprocs or gpu_sharing.works()):
        return Placement("nccl", [torch.device("cuda", rank % gpus) for rank in range(nprocs)])
    return on_cpu(nprocs)


def on_cpu(nprocs: int) -> Placement:
    """Returns the placement of `nprocs` ranks on the CPU, with gloo."""
    return Placement("gloo", [torch.device("cpu")] * nprocs)


def _usable_gpus() -> int:
    """All GPUs; none where there is one only and ranks cannot share it. Two ranks would then compute
    on the CPU, and one on the GPU, and what they are compared with too."""
    gpus = 0 if _without_gpus else torch_gpus()
    return 0 if gpus == 1 and not gpu_sharing.works() else gpus


@contextlib.contextmanager
def without_gpus() -> Iterator[None]:
    """Within the block `device()` and all ranks are on the CPU, whatever GPUs there are.

    So an exercise is judged alike on every machine, and as quickly. Under NCCL a small message waits
    in a buffer when nobody receives it: a program that stops with gloo, and with NCCL once its
    tensors have grown, would pass.
    """
    global _without_gpus
    before, _without_gpus = _without_gpus, True
    try:
        yield
    finally:
        _without_gpus = before


def device() -> torch.device:
    """Returns the device of this process: in a rank the one that the rank was given, in the
    notebook's kernel the first GPU, or the CPU where there is none or ranks could not use it."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_backend() == "nccl":
            accelerator = torch.accelerator.current_accelerator()  # under strict rules not CUDA
            return torch.device(accelerator.type, torch.get_device_module().current_device())
        return torch.device("cpu")
    return torch.device("cuda", 0) if _usable_gpus() else torch.device("cpu")


def settle() -> None:
    """Waits until this process's device has done what it was given, before a clock is read: a GPU's
    calls return when the work is in its queue. On the CPU it is done already."""
    place = device()
    if place.type != "cpu":
        host_waits.until(torch.get_device_module(place).current_stream().query)


def compute_alike() -> None:
    """Makes this process compute as all others do: float32 is float32 on a GPU too.

    cuDNN's convolutions would take TF32, with 10 bits of mantissa for 23, and the quickest of several
    algorithms, whose sums differ from run to run (docs.pytorch.org, notes/numerical_accuracy and
    notes/randomness). And the first matrix product in a new thread, such as autograd's, does not warn
    that the thread had no CUDA context yet. `report` calls it in the notebook, the fork
    server for all its ranks.
    """
    warnings.filterwarnings(
        "ignore", "Attempting to run cuBLAS, but there was no current CUDA context"
    )
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def report() -> None:
    """Prints in words what this machine has and what each rank of a cell would get; and has the
    notebook compute as the ranks do (`compute_alike`)."""
    compute_alike()
    here = machine()
    system = f"PyTorch {torch.__version__} on {counted(here.cores, 'CPU core')}"
    if here.torch_gpus == 0:
        print(f"{system} and no GPU.")
        print("Ranks run on the CPU with gloo: every result is real, no time is a GPU's.")
    else:
        names = f" ({', '.join(sorted(set(here.names)))})" if here.names else ""
        print(f"{system} and {counted(here.torch_gpus, 'GPU')}{names}.")
        print(_of_ranks(here.torch_gpus))


def _of_ranks(gpus: int) -> str:
    """What the ranks of a cell get, where there is a GPU."""
    here = counted(gpus, "GPU")
    if gpu_sharing.works():
        own = f"Up to {gpus} ranks get one GPU each and NCCL; " if gpus > 1 else ""
        more = 2 * gpus if gpus > 1 else 4
        return (
            f"{own}{more} ranks share {here}: the calls are NCCL's, the times are not those of "
            f"{more} GPUs."
        )
    if gpus == 1:
        return (
            "Its NCCL does not let two ranks share it: everything runs on the CPU with gloo, so that "
            "what is compared is computed alike."
        )
    return (
        f"Up to {gpus} ranks get one GPU each and NCCL; more ranks run on the CPU with gloo, because "
        "this NCCL does not let two ranks share a GPU."
    )
