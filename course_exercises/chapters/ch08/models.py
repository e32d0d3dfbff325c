"""The models that exercise 8.4 shards: one for each thing that is awkward about layers, and a tower of equal
layers that shows its weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from course_utils.hardware import device


@dataclass(frozen=True)
class Recipe:
    """A kind of model and its sizes; every one of the ranks makes it, each with a seed of its own."""

    kind: Callable[[int, int], nn.Module]
    ranks: int
    width: int  # of the inputs
    hidden: int

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.kind(self.width, self.hidden).to(device())


def drawn(draw, kind: Callable[[int, int], nn.Module], ranks: int | None = None) -> Recipe:
    """Its matrices divide by the number of ranks, 2 or 3 where it is not given."""
    ranks = ranks or draw.choice((2, 3))
    return Recipe(kind, ranks, draw.integer(5, 7), ranks * draw.integer(2, 4))


def plain(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, 4))


def with_buffers(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 4))


def uneven(width: int, hidden: int) -> nn.Module:
    last = nn.Linear(hidden, 1, bias=False)
    return nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), last)


def frozen_middle(width: int, hidden: int) -> nn.Module:
    first, middle, last = nn.Linear(width, hidden), nn.Linear(hidden, 4), nn.Linear(4, 2)
    return nn.Sequential(first, nn.Tanh(), middle.requires_grad_(False), nn.Tanh(), last)


def unused_layer(width: int, hidden: int) -> nn.Module:
    model = plain(width, hidden)
    model[1].unused = nn.Linear(3, 3)
    return model


def tied_ends(width: int, hidden: int) -> nn.Module:
    """Two layers with one matrix, of which one is called twice, and another layer between them."""
    first, middle, last = (nn.Linear(width, width, bias=bias) for bias in (True, True, False))
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), first, nn.Tanh(), middle, nn.Tanh(), last)


CALLS_OF_TIED_ENDS = 4  # of layers whose matrices have width * width elements


class OuterLayer(nn.Module):
    """A matrix of its own, used before and after the layers inside."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(width, width))
        self.scale = nn.Parameter(torch.randn(()))
        self.inside = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x @ self.mix) @ self.mix * self.scale


class _Folds(nn.Linear):
    """Gives a view: one long list of rows, folded as the input was. (Before PyTorch 2.15, nn.Linear
    itself does that where it has a bias.)"""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def in_place(width: int, hidden: int) -> nn.Module:
    first, last = _Folds(width, hidden), _Folds(hidden, 4)
    return nn.Sequential(first, nn.ReLU(inplace=True), last, nn.LeakyReLU(inplace=True))


class Words(nn.Module):
    """Its first layer takes whole numbers, and its second one gets its input by name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(7, width)
        self.out = nn.Linear(width, 5)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        return self.out(input=self.token(tokens) * scale)


class _Marked(torch.autograd.Function):
    """Tells when backward comes by."""

    @staticmethod
    def forward(ctx, x: Tensor, on_backward: Callable) -> Tensor:
        ctx.on_backward = on_backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.on_backward()
        return gradient, None


class _Seen(torch.autograd.Function):
    """A linear layer's arithmetic, which shows the weight to `see` before it computes with it."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, see: Callable) -> Tensor:
        see(weight)
        ctx.save_for_backward(x, weight)
        ctx.see = see
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        ctx.see(weight)
        return gradient @ weight, gradient.T @ x, gradient.sum(0), None


class _SeenLinear(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.see: Callable = lambda weight: None

    def forward(self, x: Tensor) -> Tensor:
        return _Seen.apply(x, self.weight, self.bias, self.see)


class Tower(nn.Module):
    """Its layers show their weight to `see` before they compute; `arrives` hears where backward is."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_SeenLinear(width) for _ in range(layers))
        self.arrives: Callable = lambda index: None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = _Marked.apply(layer(x), partial(self.arrives, index))
        return x
