"""What this machine has, which device and backend each rank gets, and why a GPU may be idle.

The rule of the course: where there are at least as many GPUs as ranks, each rank gets one GPU
and NCCL; where there are fewer, ranks share them, if NCCL lets them (`gpu_sharing`). Otherwise every
rank runs on the CPU with gloo, and beside a single GPU that nobody can share so does all the rest:
what is compared is computed on the same kind of device.

`doctor` answers "why is only one GPU busy": it looks at the machine and at your model, batch and
optimizer, and names each cause with its evidence and its repair. It runs nothing and changes
nothing. A set-up that you do not have can be described: `doctor(machine=Machine(driver_gpus=4,
visible="0"))`.
"""

import ctypes
import gc
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from course_utils import gpu_sharing, host_waits

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)

# What the doctor can find, in the order in which it looks: first the machine, then your program.
CAUSES = {
    "no-gpu": "The machine has no GPU that a driver knows.",
    "apple-gpu": "The GPU of a Mac takes no part.",
    "cpu-build": "This PyTorch is a build without CUDA.",
    "visible-none": "CUDA_VISIBLE_DEVICES hides every GPU.",
    "visible-wrong": "CUDA_VISIBLE_DEVICES names a GPU that does not exist.",
    "visible-partial": "CUDA_VISIBLE_DEVICES shows only some of the GPUs.",
    "visible-late": "CUDA_VISIBLE_DEVICES was changed after CUDA had started.",
    "count-differs": "PyTorch finds fewer GPUs than the driver.",
    "one-gpu": "There is one GPU: nothing to share the work with.",
    "not-wrapped": "The loop calls a bare model.",
    "wrapped-late": "A wrapper exists, but the loop does not call it.",
    "wrapped-twice": "The model is wrapped twice.",
    "few-devices": "The wrapper was given only some of the GPUs.",
    "model-on-cpu": "The model's parameters are on the CPU.",
    "inputs-on-cpu": "The batch is on the CPU.",
    "batch-too-small": "The batch has too few samples for all GPUs.",
    "optimizer-elsewhere": "The optimizer holds parameters of another model.",
    "first-gpu-loaded": "The first GPU carries more than the others.",
}


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
            gpus = _count(len(set(self.devices)), "GPU")
            return f"emulated: {len(self.devices)} ranks share {gpus}"
        return "measured"


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


@dataclass(frozen=True)
class Setup:
    """What a training loop uses; describe one, or let `Setup.of` read it from live objects.

    wrappers      what is around the model that the loop calls, outermost first
    device_ids    GPUs that the wrapper was given; None: all
    other_wrapper whether a wrapper around this model exists that the loop does not call
    model_device, batch_device   such as "cuda:0" or "cpu"; None: not given
    batch_size    samples in the batch that the loop hands to the model; None: not given
    optimizer_fits   whether the optimizer holds this model's parameters; None: not given
    """

    wrappers: tuple[str, ...] = ()
    device_ids: tuple[int, ...] | None = None
    other_wrapper: bool = False
    model_device: str | None = None
    batch_size: int | None = None
    batch_device: str | None = None
    optimizer_fits: bool | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        batch: torch.Tensor | Sequence[torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> "Setup":
        """Reads the set-up from the objects of a training loop; a batch is its inputs, or
        (inputs, labels)."""
        tensors = [] if batch is None else [batch] if isinstance(batch, torch.Tensor) else batch
        layers, inner = [], model
        while isinstance(inner, WRAPPERS):
            layers.append(inner)
            inner = inner.module
        parameter = next(inner.parameters(), None)
        return cls(
            wrappers=tuple(type(layer).__name__ for layer in layers),
            device_ids=_device_ids(layers[0]) if layers else None,
            other_wrapper=not layers and _wrapper_exists(model),
            model_device=None if parameter is None else str(parameter.device),
            batch_size=len(tensors[0]) if tensors else None,
            batch_device=min((str(t.device) for t in tensors), default=None),  # "cpu" < "cuda"
            optimizer_fits=None if optimizer is None else _fits(optimizer, inner),
        )


@dataclass(frozen=True)
class Finding:
    """One cause of idle GPUs: its name (a key of CAUSES), how it shows, and what to do."""

    cause: str
    evidence: str
    repair: str

    def __str__(self) -> str:
        rest = [f"evidence: {self.evidence}", f"repair:   {self.repair}"]
        wrapped = [
            textwrap.fill(text, 96, initial_indent=" " * 3, subsequent_indent=" " * 13)
            for text in rest
        ]
        return "\n".join([f"{self.cause}: {CAUSES[self.cause]}", *wrapped])


class Diagnosis(list[Finding]):
    """The doctor's findings; prints as a numbered list."""

    @property
    def causes(self) -> list[str]:
        """The names of the causes found."""
        return [finding.cause for finding in self]

    def __str__(self) -> str:
        if not self:
            return "Nothing found that keeps a GPU idle."
        return "\n".join(f"{i}. {finding}" for i, finding in enumerate(self, start=1))

    __repr__ = __str__


# For programs with NCCL: PyTorch would print a warning into each cell that sends or receives without
# a batch, because the ranks connect early.
QUIET = {"TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false"}


def cores() -> int:
    """Processor cores that this process may use (not those that the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
    gpus = _torch_gpus()
    return 0 if gpus == 1 and not gpu_sharing.works() else gpus


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
    notes/randomness). `report` calls it in the notebook, `launch` in each rank.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def report() -> None:
    """Prints in words what this machine has and what each rank of a cell would get; and has the
    notebook compute as the ranks do (`compute_alike`)."""
    compute_alike()
    here = machine()
    system = f"PyTorch {torch.__version__} on {_count(here.cores, 'CPU core')}"
    if here.torch_gpus == 0:
        print(f"{system} and no GPU.")
        print("Ranks run on the CPU with gloo: every result is real, no time is a GPU's.")
    else:
        names = f" ({', '.join(sorted(set(here.names)))})" if here.names else ""
        print(f"{system} and {_count(here.torch_gpus, 'GPU')}{names}.")
        print(_of_ranks(here.torch_gpus))


def _of_ranks(gpus: int) -> str:
    """What the ranks of a cell get, where there is a GPU."""
    here = _count(gpus, "GPU")
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


def machine() -> Machine:
    """Returns a snapshot of this machine as this process sees it. Does not start CUDA."""
    gpus = _driver_gpus()
    return Machine(
        driver_gpus=None if gpus is None else len(gpus),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        started_gpus=_started_gpus(),
        torch_gpus=_torch_gpus(),
        cuda_build=torch.version.cuda is not None,
        names=tuple(name for name, _ in gpus or []),
        memory_used=tuple(used for _, used in gpus or []),
        cores=cores(),
        apple_gpu=torch.backends.mps.is_available(),
    )


this_machine = machine  # the name for `doctor`, where `machine` is a parameter


def doctor(
    model: nn.Module | None = None,
    batch: torch.Tensor | Sequence[torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    machine: Machine | None = None,
    setup: Setup | None = None,
) -> Diagnosis:
    """Says why GPUs may be idle: `print(doctor(model, inputs, optimizer))`.

    `model` is what your loop calls, `batch` what it uses: the inputs, or (inputs, labels).
    `machine` and `setup` replace what is really there by a description.
    """
    here = this_machine() if machine is None else machine
    if setup is None and model is not None:
        setup = Setup.of(model, batch, optimizer)
    findings = list(_of_machine(here))
    if setup is not None:
        findings += _of_setup(setup, here)
    return Diagnosis(findings)


# --- the machine ---------------------------------------------------------------------------------


def _of_machine(m: Machine) -> Iterator[Finding]:
    if m.apple_gpu:
        yield Finding(
            "apple-gpu",
            "this Mac's GPU (MPS) could compute, but torch.distributed has no backend for it",
            "nothing to repair: ranks compute on the CPU, and every chapter runs",
        )
        return
    unknown = m.driver_gpus is None and m.cuda_build  # many containers have no nvidia-smi
    hidden = unknown and m.visible is not None and _hides_all(m.visible)
    if not m.driver_gpus and not m.torch_gpus and not hidden:
        yield Finding(
            "no-gpu",
            ("the driver lists none" if m.driver_gpus == 0 else "there is no nvidia-smi to ask")
            + ("" if m.visible is None else f"; {_visible(m)}"),
            "nothing to repair: the course runs on CPU ranks; nn.DataParallel hands the batch "
            "to the model unchanged",
        )
        return
    if not m.cuda_build:
        yield Finding(
            "cpu-build",
            f"torch.version.cuda is None; the driver lists {_gpus(m.driver_gpus)}",
            "install PyTorch's CUDA build",
        )
        return
    # Without the driver's list, or the variable, a wrong count has other causes. A late change to
    # another list of the same length cannot be seen.
    told = m.started_gpus is not None and m.visible is not None and m.driver_gpus is not None
    if told and m.started_gpus != len(m.selected()):
        yield Finding(
            "visible-late",
            f"{_visible(m)} now, which shows {_gpus(len(m.selected()))}, but CUDA started in "
            f"this process with {m.started_gpus}",
            "restart the kernel and set the variable before anything touches CUDA (at best in "
            "the shell); torch.cuda.is_available() already does",
        )
    elif m.visible is not None:
        yield from _of_variable(m)
    elif m.driver_gpus is not None and m.torch_gpus < m.driver_gpus:
        yield Finding(
            "count-differs",
            f"the driver lists {_gpus(m.driver_gpus)}, torch.cuda.device_count() is "
            f"{m.torch_gpus}, and CUDA_VISIBLE_DEVICES is not set (so it hides none)",
            "compare the driver's CUDA version (nvidia-smi) with torch.version.cuda "
            f"({torch.version.cuda}); update the driver, or install the matching PyTorch",
        )
    if m.driver_gpus == 1 and m.torch_gpus == 1:
        yield Finding(
            "one-gpu",
            "the driver lists 1 GPU",
            "nothing to repair: data parallelism over GPUs needs at least two",
        )
    used = m.memory_used
    if len(used) > 1 and used[0] > 0.05 + 1.5 * sum(used[1:]) / (len(used) - 1):
        shares = ", ".join(f"{share:.0%}" for share in used)
        yield Finding(
            "first-gpu-loaded",
            f"memory in use: {shares}",
            "nn.DataParallel gathers outputs, computes the loss and sums gradients on its first "
            "GPU: use DistributedDataParallel; or look with nvidia-smi for another program there",
        )


def _hides_all(visible: str) -> bool:
    return visible.strip() in ("", "-1")


def _of_variable(m: Machine) -> Iterator[Finding]:
    entries = [part.strip() for part in m.visible.split(",")]
    accepted = m.selected()
    everything = ",".join(str(i) for i in range(m.driver_gpus or 1))
    repair = (
        "unset CUDA_VISIBLE_DEVICES, which shows all GPUs, or set it to "
        f"{everything} before the program starts"
    )
    if _hides_all(m.visible):
        asked = "; there is no nvidia-smi to ask for more" if m.driver_gpus is None else ""
        yield Finding("visible-none", f"{_visible(m)}, which is no GPU{asked}", repair)
    elif len(accepted) < len(entries):
        repeated = not accepted and len(set(entries)) < len(entries)
        first = entries[len(accepted)]
        why = "an entry stands twice" if repeated else f"{first!r} is no GPU of this machine"
        yield Finding(
            "visible-wrong",
            f"{_visible(m)}: {why}; CUDA shows {_gpus(len(accepted))}"
            + ("" if repeated else ", those before the first wrong entry"),
            repair,
        )
    elif m.driver_gpus is not None and len(accepted) < m.driver_gpus:
        yield Finding(
            "visible-partial",
            f"{_visible(m)} and the driver lists {_gpus(m.driver_gpus)}",
            f"{repair}; leave it as it is if somebody else uses the other GPUs",
        )


# --- the program ---------------------------------------------------------------------------------


def _of_setup(s: Setup, m: Machine) -> Iterator[Finding]:
    wrapped = bool(s.wrappers)
    gpus = m.torch_gpus
    used = gpus if not s.device_ids else min(gpus, len(s.device_ids))
    ranks = "DistributedDataParallel" in s.wrappers  # one process a GPU: nothing is split here
    if not wrapped and s.other_wrapper:
        yield Finding(
            "wrapped-late",
            "a wrapper around this very model exists, and the model itself is what was passed",
            "wrap before the loop, and call the wrapper in it: model = nn.DataParallel(model)",
        )
    elif not wrapped and gpus > 1:
        yield Finding(
            "not-wrapped",
            f"the model is no DataParallel or DistributedDataParallel; {_gpus(gpus)} to use",
            "model = nn.DataParallel(model) before the loop, or one process a GPU with "
            "DistributedDataParallel",
        )
    if len(s.wrappers) > 1:
        yield Finding(
            "wrapped-twice",
            f"{' around '.join(s.wrappers)}",
            "wrap once: a cell that wraps and is run again wraps the wrapper",
        )
    if wrapped and not ranks and used < gpus:
        yield Finding(
            "few-devices",
            f"device_ids is {list(s.device_ids)}, PyTorch finds {_gpus(gpus)}",
            "leave device_ids out: then all visible GPUs are used",
        )
    yield from _of_devices(s, gpus)
    if wrapped and not ranks and s.batch_size is not None and used > 1:
        busy = _busy(s.batch_size, used)
        if busy < used:
            yield Finding(
                "batch-too-small",
                f"{_count(s.batch_size, 'sample')} on {_gpus(used)}: scatter cuts chunks of "
                f"{math.ceil(s.batch_size / used)}, which keeps {busy} busy",
                f"use a batch size that is a multiple of {used}, and large: "
                "every step copies the model to each GPU",
            )
    if s.optimizer_fits is False:
        yield Finding(
            "optimizer-elsewhere",
            "not every trainable parameter of the model is in the optimizer",
            "create the optimizer from this model's parameters, after the model has its final "
            "form: it keeps the parameters that it was given",
        )


def _of_devices(s: Setup, gpus: int) -> Iterator[Finding]:
    if gpus == 0:
        return
    wrapped = "DataParallel" in s.wrappers
    model_on_cpu = s.model_device is not None and not s.model_device.startswith("cuda")
    batch_on_cpu = s.batch_device is not None and not s.batch_device.startswith("cuda")
    if model_on_cpu:
        first = s.device_ids[0] if s.device_ids else 0
        what = "nn.DataParallel refuses to run" if wrapped else "everything runs on the CPU"
        yield Finding(
            "model-on-cpu",
            f"its parameters are on {s.model_device}, where {what}",
            f'model.to("cuda:{first}") before the loop',
        )
    if batch_on_cpu:
        if wrapped:
            what = "scatter copies it to the GPUs by itself, but the labels' loss will not fit"
        elif model_on_cpu:
            what = "as the model is"
        else:
            what = "the model is on a GPU, so its first layer raises an error"
        yield Finding(
            "inputs-on-cpu",
            f"the batch is on {s.batch_device}; {what}",
            "inputs, labels = inputs.to(device), labels.to(device) in every step (.to returns "
            "a copy: keep it)",
        )


def _busy(samples: int, gpus: int) -> int:
    """GPUs that get a chunk: torch.chunk cuts chunks of ceil(samples / gpus)."""
    return math.ceil(samples / math.ceil(samples / gpus)) if samples else 0


def _device_ids(wrapper: nn.Module) -> tuple[int, ...] | None:
    ids = getattr(wrapper, "device_ids", None)
    return tuple(torch.device(i).index if isinstance(i, str) else int(i) for i in ids or ()) or None


def _wrapper_exists(model: nn.Module) -> bool:
    # type(), not isinstance(): asking some objects for their class runs their code
    return any(
        candidate._modules.get("module") is model
        for candidate in gc.get_objects()
        if type(candidate) in WRAPPERS
    )


def _fits(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return all(id(p) in held for p in model.parameters() if p.requires_grad)


# --- asking the system ---------------------------------------------------------------------------


def _torch_gpus() -> int:
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


def _visible(m: Machine) -> str:
    if m.visible is None:
        return "CUDA_VISIBLE_DEVICES is not set"
    return f"CUDA_VISIBLE_DEVICES is {m.visible!r}"


def _gpus(count: int | None) -> str:
    return _count(count or 0, "GPU")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
