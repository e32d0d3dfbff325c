"""A deep MLP and its training step: a program that `python -m course_utils trace` can trace."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import gelu

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(gelu(self.up(x)))


def program(mesh, layout):
    with torch.device("meta"):  # shapes only, whatever its size
        model = nn.Sequential(*(Block(8192) for _ in range(16)))
    for block in model:
        parallelize_module(block, mesh["tp"], PLAN)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device=mesh.device_type)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step():
        x = torch.randn(layout.micro_batch, 8192, device=mesh.device_type)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
