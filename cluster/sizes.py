"""What a model costs on a rank, from its shapes: bytes held, bytes sent, and the ranks it needs.

The model may be on the meta device. Parameters, gradients and momentum are float32.
"""

import argparse
from bisect import bisect_left

from torch import nn

FLOAT32 = 4
MOST_NODES = 16_384
# Share of a GPU's memory for activations, buffers of NCCL and fragments: a guess, not a law.
REST = 0.4


def held_between_steps(model: nn.Module, ranks: int) -> int:
    """Bytes of parameters and momentum on the rank with the largest shards of `ranks`."""
    return sum(2 * FLOAT32 * largest_shard(p.shape, ranks) for p in model.parameters())


def largest_shard(shape: tuple[int, ...], ranks: int) -> int:
    """Elements: fully_shard cuts the first dimension as torch.chunk does, its largest part first."""
    rows, *others = shape or (1,)
    size = -(-rows // ranks)
    for other in others:
        size *= other
    return size


def at_peak(model: nn.Module, ranks: int, options: argparse.Namespace) -> int:
    """Bytes on a rank in a step, without activations: also gradients, and what is gathered."""
    computing = 2 if options.bfloat16 else FLOAT32
    whole = sum(p.numel() for p in model.parameters())
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    root = whole - sum(blocks)
    # the root's own parameters stay gathered; of the blocks one computes and the next one comes
    gathered = computing * (root + sum(sorted(blocks)[-2:]))
    gradients = whole if options.reduce == "last" else root + sum(sorted(blocks)[-2:])
    shards = sum(FLOAT32 * largest_shard(p.shape, ranks) for p in model.parameters())
    return held_between_steps(model, ranks) + shards + gathered + FLOAT32 * gradients


def reduction(model: nn.Module, ranks: int, pieces: int, when: str) -> tuple[int, int]:
    """Bytes that a rank sends to reduce a step's gradients, and bytes of whole gradients held.

    A reduce-scatter of n bytes sends n (ranks - 1) / ranks.
    """
    whole = FLOAT32 * sum(p.numel() for p in model.parameters())
    times = pieces if when == "every" else 1
    return times * whole * (ranks - 1) // ranks, whole if when == "last" and pieces > 1 else 0


def smallest_nodes(
    model: nn.Module, options: argparse.Namespace, ranks_per_node: int
) -> int | None:
    """The fewest nodes on which a step fits into --gpu-memory GiB; None if no number does."""
    room = (1 - REST) * options.gpu_memory * 2**30

    def fits(nodes: int) -> bool:
        return at_peak(model, options.shard_within or nodes * ranks_per_node, options) <= room

    if not fits(MOST_NODES):
        return None
    if options.shard_within:  # one set of shards; more nodes hold copies
        return -(-options.shard_within // ranks_per_node)
    return bisect_left(range(MOST_NODES), True, lo=1, key=fits)  # more nodes never need more
