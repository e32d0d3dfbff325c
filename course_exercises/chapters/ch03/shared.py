"""What the exercises of chapter 03 share."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from course_utils.hardware import device

Gradients = dict[str, Tensor | None]


# ---- models --------------------------------------------------------------------------------------


def plain(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, width))


class Frozen(nn.Module):
    """A frozen layer between two that learn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.first(x)).tanh())


class Unused(nn.Module):
    """A layer that the loss does not use, between two that it uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.unused = nn.Linear(width, 3)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


@dataclass(frozen=True)
class Plan:
    """What the ranks train on: a model's seed, and `rows` random rows of `width` numbers."""

    seed: int
    width: int
    rows: int

    def build(self, make) -> nn.Module:
        torch.manual_seed(self.seed)
        return make(self.width).to(device())

    def batch(self) -> Tensor:
        return torch.randn(self.rows, self.width, device=device())


def drawn_plan(draw) -> Plan:
    return Plan(draw.seed(), draw.integer(4, 7), draw.integer(3, 6))


def gradients(model: nn.Module) -> Gradients:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
