"""The doctor, who answers "why is only one GPU busy".

It looks at the machine and at your model, batch and optimizer, and names each cause with its evidence and
its repair. It runs nothing and changes nothing. A set-up that you do not have can be described:
`doctor(machine=Machine(driver_gpus=4, visible="0"))`.
"""

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from course_utils.hardware import snapshot
from course_utils.hardware.columns import wrapped
from course_utils.hardware.snapshot import Machine, counted

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
        below = [wrapped(text, " " * 3, " " * 13) for text in rest]
        return "\n".join([f"{self.cause}: {CAUSES[self.cause]}", *below])


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
    here = snapshot.machine() if machine is None else machine
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
            "nothing to repair: ranks compute on the CPU, and every chapter runs",
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
    known = m.started_gpus is not None and m.visible is not None and m.driver_gpus is not None
    if known and m.started_gpus != len(m.selected()):
        yield Finding(
            "visible-late",
            f"{_visible(m)} now, which shows {_gpus(len(m.selected()))}, but CUDA started in "
            f"this process with {m.started_gpus}",
            "restart the kernel and set the variable before anything touches CUDA (preferably in "
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
                f"{counted(s.batch_size, 'sample')} on {_gpus(used)}: scatter cuts chunks of "
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
            what = "scatter copies it to the GPUs by itself, but labels left on the CPU make the loss fail"
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
        dict(candidate.named_children()).get("module") is model
        for candidate in gc.get_objects()
        if type(candidate) in WRAPPERS
    )


def _fits(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return all(id(p) in held for p in model.parameters() if p.requires_grad)


def _visible(m: Machine) -> str:
    if m.visible is None:
        return "CUDA_VISIBLE_DEVICES is not set"
    return f"CUDA_VISIBLE_DEVICES is {m.visible!r}"


def _gpus(count: int | None) -> str:
    return counted(count or 0, "GPU")
