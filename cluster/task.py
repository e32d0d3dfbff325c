"""Yours: the model and the data. Everything else in this folder stays as it is."""

import argparse
import gzip

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A residual block of two linear layers; takes and returns (N, W)."""

    def __init__(self, width: int, dropout: float, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:  # keeps x alone, and computes the rest a second time in the backward
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(gelu(self.up(self.norm(x)))))


class Classifier(nn.Module):
    """Takes images (N, 784) and returns logits (N, 10).

    What any model here has to have: `blocks`, which are sharded one by one, and in each module that
    owns parameters or buffers a `reset_parameters()` that sets all of them, as PyTorch's own
    layers have: the model is made without memory, and gets its values shard by shard.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.first = nn.Linear(784, width)
        self.blocks = nn.ModuleList(
            Block(width, options.dropout, options.recompute) for _ in range(options.layers)
        )
        self.last = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def load_data(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Returns inputs (N, 784), float32 from 0 to 1, and targets (N,), the same on every rank."""
    if options.data is None:  # made-up images, so that the script runs anywhere
        generator = torch.Generator().manual_seed(options.seed)
        images = torch.rand(options.samples, 784, generator=generator)
        return images, images[:, :10].argmax(dim=1)
    with gzip.open(options.data / "train-images-idx3-ubyte.gz") as file:
        pixels = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[16:]
    with gzip.open(options.data / "train-labels-idx1-ubyte.gz") as file:
        labels = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[8:]
    images = pixels.view(-1, 784)[: options.samples].float() / 255
    return images, labels[: options.samples].long()
