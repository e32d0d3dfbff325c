"""The contract of every technique: it ends with the parameters of a single process.

float32, SGD, and no number that differs by more than 1e-5. Adam would hide gradients that are
wrong by a constant factor.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

TOLERANCE = 1e-5


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Returns all values of `tensors`, in their order, as one vector on the CPU."""
    return torch.cat([tensor.detach().flatten().cpu() for tensor in tensors])


def equal(some: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether none of `others`, such as a vector from each rank, is more than 1e-5 from `some`."""
    return all((some - other).abs().max().item() <= TOLERANCE for other in others)
