"""What the exercises of chapter 04 share."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from course_exercises.authoring import Wrong

CPU, META = torch.device("cpu"), torch.device("meta")

# Mistakes of a model whose parts are on devices.
PLACES = {
    "no-super": "Modules are registered by nn.Module's own constructor: call `super().__init__()` first.",
    "not-moved": "A part is called with what is on another device. Move the inputs too, which may come from any "
    "device, and what one part hands to the next: `x.to(device)` returns the moved tensor, so use the result.",
    "output-elsewhere": "The output belongs on the last part's device: the loss is computed there, and a move back "
    "costs a transfer.",
}

# What PyTorch says where code names a GPU that is not there.
NO_SUCH_GPU = dict.fromkeys(
    (
        "NVIDIA driver",
        "not compiled with CUDA",
        "device ordinal",
        "must be cuda device",
        "Invalid device string",
    ),
    "misplaced",
)


@contextlib.contextmanager
def watched_moves() -> Iterator[None]:
    """Raises Wrong where a layer with parameters is called with inputs from another device.

    PyTorch itself does not always: a convolution of meta and CPU tensors runs.
    """

    def look(layer: nn.Module, inputs: tuple) -> None:
        own = next(layer.parameters(recurse=False), None)
        if own is None or not inputs or not isinstance(inputs[0], Tensor):
            return
        if inputs[0].device != own.device:
            got = f"on {inputs[0].device}"
            raise Wrong("not-moved", expected=f"a layer's inputs on {own.device}", got=got)

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


Cuts = list[int]


def loads_of(costs: list[float], cuts: Cuts) -> list[float]:
    """The cost of each stage."""
    return [sum(costs[a:b]) for a, b in pairwise([0, *cuts, len(costs)])]


def best_cuts(costs: list[float], stages: int, join: Callable = max) -> Cuts:
    """The cuts that minimise the slowest stage. `join(load, rest)` adds a stage's load to the
    measure of the stages behind it; another `join` minimises another measure."""
    total, layers = [0, *accumulate(costs)], len(costs)
    tails: dict[int, tuple] = {layers: (0, ())}  # first layer: the measure and the stages' ends
    for _ in range(stages):
        tails = {
            start: min(
                (join(total[end] - total[start], measure), (end, *ends))
                for end, (measure, ends) in tails.items()
                if end > start
            )
            for start in range(layers)
            if start < max(tails)
        }
    return list(tails[0][1][:-1])


def equal_layers(costs: list[float], stages: int) -> Cuts:
    """The first stages have one layer more where the number does not divide."""
    size, longer = divmod(len(costs), stages)
    return [i * size + min(i, longer) for i in range(1, stages)]
