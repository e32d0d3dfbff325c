"""The contract of every technique: it ends with the parameters of a single process.

float32, SGD, and no number that differs by more than 1e-5. Adam would hide gradients that are
wrong by a constant factor.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

TOLERANCE = 1e-5


class Difference(float):
    """A largest difference, printed with two digits (0.052), or with one where it is only rounding.

    Rounding (3e-08, 0e+00) differs from machine to machine: nbval leaves out just those numbers.
    """

    def __str__(self) -> str:
        return f"{float(self):{'.0e' if self <= TOLERANCE else '.2g'}}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Returns all values of `tensors`, in their order, as one vector on the CPU."""
    return torch.cat([tensor.detach().flatten().cpu() for tensor in tensors])


def largest_difference(some: Tensor, others: Iterable[Tensor]) -> Difference:
    """Returns by how much the value that differs most in `others`, such as a vector from each rank,
    differs from the same one in `some`."""
    differences = [(some - other).detach().abs().max() for other in others]
    return Difference(torch.stack(differences).max())


def check_equal(some: Tensor, others: Iterable[Tensor]) -> Difference:
    """Returns the largest difference; AssertionError if it is more than 1e-5."""
    difference = largest_difference(some, others)
    if not difference <= TOLERANCE:  # nan, too
        raise AssertionError(f"the largest difference is {difference}, and 1e-5 is allowed.")
    return difference
