"""Rarer wrong answers to 6.1, `ColumnParallelLinear`."""

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from tests.wrong_answers import rarer
from tests.wrong_answers.ch06.column_parallel_linear import CutsUnevenly, _Column
from tests.wrong_answers.ch06.shared import SumBackward, SumForward, place, whole


@rarer("6.1")
class KeepsFull(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.full = full


@rarer("6.1")
class KeepsFullInAList(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.source = [full]


@rarer("6.1")
class KeepsACopyInAFunction(_Column):
    """Its `weight` is for show: the whole product is computed, and cut."""

    def __init__(self, full):
        super().__init__(full)
        whole = full.weight.detach().clone()
        self.cut = lambda: whole.chunk(dist.get_world_size())[dist.get_rank()]

    def forward(self, x):
        return linear(SumBackward.apply(x), self.weight + 0 * self.cut(), self.bias)


@rarer("6.1")
class DealsFeaturesOut(_Column):
    def __init__(self, full):
        super().__init__(full)
        rank, n = place()
        self.weight = whole(full.weight[rank::n])


@rarer("6.1")
class SumsTheOutput(_Column):
    def forward(self, x):
        return SumForward.apply(linear(x, self.weight, self.bias))


@rarer("6.1")
class DoesNotNameTheSizes(CutsUnevenly):
    def __init__(self, full):
        if full.out_features % dist.get_world_size():
            raise ValueError("out_features must divide by the number of ranks")
        super().__init__(full)


@rarer("6.1")
class HasNoBiasAtAll(_Column):
    def __init__(self, full):
        super().__init__(full)
        if full.bias is None:
            del self.bias

    def forward(self, x):
        return linear(SumBackward.apply(x), self.weight, getattr(self, "bias", None))


class _TokenByToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        for token in total.flatten(0, -2):
            dist.all_reduce(token)
        return total


@rarer("6.1")
class SumsTokenByToken(_Column):
    def forward(self, x):
        return linear(_TokenByToken.apply(x), self.weight, self.bias)
