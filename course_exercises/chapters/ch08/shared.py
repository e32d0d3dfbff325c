"""What the exercises of chapter 08 share."""

import math

import torch
from torch import Tensor


def shard_size(elements: int, ranks: int) -> int:
    return -(-elements // ranks)


def shards_of(whole: Tensor, ranks: int) -> list[Tensor]:
    """Each rank's shard of a tensor: laid flat, padded with zeros, cut into equal pieces."""
    size = shard_size(whole.numel(), ranks)
    flat = torch.cat([whole.flatten(), whole.new_zeros(ranks * size - whole.numel())])
    return [shard.clone() for shard in flat.view(ranks, size)]


def larger_than_itself(tensor: Tensor) -> bool:
    """Whether a tensor keeps more memory alive than it needs."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def drawn_tensor(draw, shape: tuple[int, ...]) -> Tensor:
    return draw.tensor(math.prod(shape)).view(shape)


def drawn_tensors(draw, shapes: list[tuple[int, ...]], dtype=torch.float32) -> list[Tensor]:
    return [drawn_tensor(draw, shape).to(dtype) for shape in shapes]
