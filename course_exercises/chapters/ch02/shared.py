"""What the exercises of chapter 02 share."""

from collections.abc import Callable

import torch
from torch import nn

from course_utils.comm import private

CPU, META = torch.device("cpu"), torch.device("meta")
aten = torch.ops.aten

# What every exercise about devices can meet on a machine without a GPU.
ASKED_FOR_GPUS = (
    "Here your code asks for this machine's GPUs. The devices to use are the ones it was handed, "
    "which may be CPUs: count that list, and move with `.to(device)`."
)
NO_GPU = dict.fromkeys(
    (
        "Found no NVIDIA driver",  # .cuda() and "cuda:0", with PyTorch for CUDA
        "not compiled with CUDA",  # the same, with PyTorch for CPUs
        "chunk expects `chunks` to be greater than 0",  # with torch.cuda.device_count()
        "number of sections must be larger than 0",
        "by zero",
    ),
    "asked-for-gpus",
)


class Sized(nn.Module):
    """A model for rows of `width` numbers and labels below `classes`."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.width, self.classes = width, classes


class Plain(Sized):
    """Two layers; passes a gate, if one is set, before and after it computes."""

    gate: Callable[[], object] | None = None

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__(width, classes)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, classes)

    def forward(self, x):
        gate = Plain.gate or (lambda: None)
        gate()
        output = self.second(torch.tanh(self.first(x)))
        gate()
        return output


class Counting(Sized):
    """A layer with two buffers, one of which is not saved; a forward pass changes both in place."""

    def __init__(self, width: int, _: int, classes: int) -> None:
        super().__init__(width, classes)
        self.layer = nn.Linear(width, classes)
        self.register_buffer("rows", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(width), persistent=False)

    def forward(self, x):
        self.rows += len(x)
        self.largest.copy_(torch.maximum(self.largest, x.detach().amax(dim=0)))
        return self.layer(x - 0.1 * self.largest)


class Awkward(Sized):
    """Two tied layers, a frozen one and one that is not used."""

    def __init__(self, width: int, _: int, classes: int) -> None:
        super().__init__(width, classes)
        self.into, self.again = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.again.weight = self.into.weight
        self.frozen = nn.Linear(width, classes).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.frozen(self.again(torch.tanh(self.into(x))))


class Moody(Sized):
    """Computes otherwise in training than in evaluation."""

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__(width, classes)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, classes)
        self.norm = nn.BatchNorm1d(hidden)

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x))))

    def modes(self) -> list[bool]:
        return [module.training for module in self.modules()]


# Whether the model, and its BatchNorm, are in training: a frozen one often is not.
MODES = (True, True), (False, False), (True, False)


def moody(draw, training: bool, norm: bool) -> Moody:
    model = make(Moody, draw).train(training)
    model.norm.train(norm)
    return model


def make(kind: type[Sized], draw) -> Sized:
    """A model with fresh sizes and parameters."""
    model = kind(draw.integer(3, 6), draw.integer(3, 6), draw.integer(3, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * draw.tensor(*parameter.shape))
    return model


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by name; a parameter without one is left out."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class MetaComesBack(private.dispatch_mode.value):
    """Lets tensors and numbers come from `meta` to the CPU, as zeros."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        source = args[1] if function is aten.copy_.default else args[0] if args else None
        if torch.is_tensor(source) and source.is_meta:
            if function is aten._local_scalar_dense.default:
                return 0.0
            if function is aten._to_copy.default and str(kwargs.get("device")) == "cpu":
                dtype = kwargs.get("dtype") or source.dtype
                return torch.zeros(source.shape, dtype=dtype)
            if function is aten.copy_.default and not args[0].is_meta:
                return args[0].zero_()
        return function(*args, **kwargs)
