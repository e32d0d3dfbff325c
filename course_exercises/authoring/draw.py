"""Fresh random inputs for a check, fixed by the environment variable COURSE_SEED."""

import os
import random
from collections.abc import Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


class Draw:
    """A source of fresh inputs. Two draws with the same seed and label give the same values."""

    def __init__(self, seed: str, label: str = "") -> None:
        self._random = random.Random(f"{seed}/{label}")
        self._generator = torch.Generator().manual_seed(self._random.getrandbits(60))

    def integer(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return self._random.randint(low, high)

    def number(self, low: float, high: float) -> float:
        """A float between low and high."""
        return self._random.uniform(low, high)

    def choice(self, options: Sequence[T]) -> T:
        """One of the options."""
        return self._random.choice(options)

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different options, in random order; with count = len(options), a shuffle."""
        return self._random.sample(options, count)

    def seed(self) -> int:
        """A seed for torch.manual_seed, for instance one that ranks get as an argument."""
        return self._random.getrandbits(31)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor of normally distributed numbers, no two of which are equal in practice."""
        return torch.randn(*shape, generator=self._generator, dtype=dtype)

    def integers(self, *shape: int, low: int = -9, high: int = 9) -> torch.Tensor:
        """An int64 tensor with values from low to high, both included."""
        return torch.randint(low, high + 1, shape, generator=self._generator)

    def whole(self, *shape: int) -> torch.Tensor:
        """A float32 tensor of small whole numbers: sums in any order are exact."""
        return self.integers(*shape).float()


def fresh_seed() -> str:
    """COURSE_SEED where it is set, else a new seed."""
    return os.environ.get("COURSE_SEED") or str(random.SystemRandom().randrange(10**6))
