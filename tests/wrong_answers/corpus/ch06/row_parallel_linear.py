"""Rarer wrong answers to 6.2, `RowParallelLinear`."""

import torch
import torch.distributed as dist
from torch import nn

from tests.wrong_answers import rarer
from tests.wrong_answers.ch06.row_parallel_linear import CutsColumnsUnevenly, _Row
from tests.wrong_answers.ch06.shared import (
    SumForward,
    place,
    summed_in_place,
    whole,
)


@rarer("6.2")
class DealsColumnsOut(_Row):
    def __init__(self, full):
        super().__init__(full)
        rank, n = place()
        self.weight = whole(full.weight[:, rank::n])


@rarer("6.2")
class AveragesTheBiasGradient(_Row):
    """To be sure that the copies do not drift apart."""

    def __init__(self, full):
        super().__init__(full)
        if self.bias is not None:
            self.bias.register_hook(lambda g: summed_in_place(g) / dist.get_world_size())


@rarer("6.2")
class MultipliesMatricesOnly(_Row):
    def partial(self, x):
        return x.mm(self.weight.T)


@rarer("6.2")
class LetsViewComplain(CutsColumnsUnevenly):
    def __init__(self, full):
        full.weight.detach().view(full.out_features, dist.get_world_size(), -1)
        super().__init__(full)


@rarer("6.2")
class MakesTheColumnsContiguous(_Row):
    """With one rank the block is the whole weight, and contiguous already."""

    def __init__(self, full):
        super().__init__(full)
        rank, n = place()
        self.weight = nn.Parameter(full.weight.detach().chunk(n, dim=1)[rank].contiguous())


@rarer("6.2")
class SumsInSinglePrecision(_Row):
    def forward(self, x):
        return self.with_bias(SumForward.apply(self.partial(x).float()))


class _DividedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / dist.get_world_size()


@rarer("6.2")
class DividesTheGradient(_Row):
    def forward(self, x):
        return self.with_bias(_DividedBackward.apply(SumForward.apply(self.partial(x))))
