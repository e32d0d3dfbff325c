"""Answers to 6.1, `ColumnParallelLinear`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from course_utils.hardware import device
from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch06.shared import (
    MeanBackward,
    SumBackward,
    SumForward,
    must_divide,
    own,
    place,
    summed_in_place,
    whole,
)


@right("6.1")
class SumsInAHook(nn.Module):
    def __init__(self, full):
        super().__init__()
        must_divide(full.out_features)
        self.weight = own(full.weight)
        self.bias = None if full.bias is None else own(full.bias)

    def forward(self, x):
        x = x.view_as(x)  # the hook sits on what goes through the layer
        if x.requires_grad:
            x.register_hook(summed_in_place)
        return linear(x, self.weight, self.bias)


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight
        work = dist.all_reduce(of_x, async_op=True)  # meanwhile, the weight's
        of_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        work.wait()
        return of_x, of_weight


@right("6.1")
class OverlapsTheSum(SumsInAHook):
    def forward(self, x):
        y = _ColumnProduct.apply(x, self.weight)
        return y if self.bias is None else y + self.bias


class _Column(SumsInAHook):
    """A right answer with one thing wrong in each subclass."""

    def forward(self, x):
        return linear(SumBackward.apply(x), self.weight, self.bias)


@wrong("6.1", names="parameters")
class KeepsPlainTensors(_Column):
    def __init__(self, full):
        super().__init__(full)
        weight = self.weight.data
        del self.weight
        self.weight = weight


@wrong("6.1", names="other-block")
class CountsRanksBackwards(_Column):
    def __init__(self, full):
        super().__init__(full)
        rank, n = place()
        self.weight = nn.Parameter(full.weight.detach().chunk(n)[n - 1 - rank].clone())


@wrong("6.1", names="no-gradient")
class FreezesItsWeight(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.weight.requires_grad_(False)


@wrong("6.1", names="more-than-its-share")
class KeepsADetachedWeight(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.whole = full.weight.detach()


@wrong("6.1", names="parameters")
class KeepsAnInnerLayer(nn.Module):
    def __init__(self, full):
        super().__init__()
        must_divide(full.out_features)
        share, has_bias = full.out_features // dist.get_world_size(), full.bias is not None
        self.linear = nn.Linear(full.in_features, share, bias=has_bias)
        self.linear.weight.data = own(full.weight).data
        if has_bias:
            self.linear.bias.data = own(full.bias).data

    def forward(self, x):
        return self.linear(SumBackward.apply(x))


@wrong("6.1", names="other-block")
class CutsInputFeatures(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.weight = own(full.weight, dim=1)


@wrong("6.1", names="other-block")
class KeepsTheWholeBias(_Column):
    def __init__(self, full):
        super().__init__(full)
        if full.bias is not None:
            self.bias = whole(full.bias)


@wrong("6.1", names="more-than-its-share")
class MakesItContiguousOnly(_Column):
    """The block is contiguous already: `contiguous` copies nothing."""

    def __init__(self, full):
        super().__init__(full)
        rank, n = place()
        self.weight = nn.Parameter(full.weight.detach().chunk(n)[rank].contiguous())


@wrong("6.1", names="adds-forward")
class GathersTheOutput(_Column):
    def forward(self, x):
        rank, n = place()
        own = super().forward(x)
        everyone = [torch.empty_like(own) for _ in range(n)]
        dist.all_gather(everyone, own.detach())
        everyone[rank] = own
        return torch.cat(everyone, dim=-1)


@wrong("6.1", names="adds-forward")
class SumsTheInput(_Column):
    def forward(self, x):
        return linear(SumForward.apply(x), self.weight, self.bias)


@wrong("6.1", names="x-gradient")
class SumsTheOutputsGradient(_Column):
    def forward(self, x):
        return SumBackward.apply(linear(x, self.weight, self.bias))


@wrong("6.1", names="needs-a-bias")
class CutsAnyBias(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.bias = own(full.bias)


@wrong("6.1", names="bias-lost")
class ForgetsTheBias(_Column):
    def forward(self, x):
        return linear(SumBackward.apply(x), self.weight)


@wrong("6.1", names="x-gradient")
class ForgetsTheSum(_Column):
    def forward(self, x):
        return linear(x, self.weight, self.bias)


@wrong("6.1", names="mean-not-sum")
class AveragesTheGradient(_Column):
    def forward(self, x):
        return linear(MeanBackward.apply(x), self.weight, self.bias)


@wrong("6.1", names="residual-summed")
class HooksTheInputItself(_Column):
    def forward(self, x):
        if x.requires_grad:
            x.register_hook(summed_in_place)
        return linear(x, self.weight, self.bias)


@wrong("6.1", names="needs-input-gradient")
class HooksAnyInput(_Column):
    def forward(self, x):
        x = x.view_as(x)
        x.register_hook(summed_in_place)
        return linear(x, self.weight, self.bias)


@wrong("6.1", names="sends-too-much")
class BroadcastsTheInput(_Column):
    """To be sure that it is the same everywhere."""

    def forward(self, x):
        dist.broadcast(x.detach(), src=0)
        return super().forward(x)


@wrong("6.1", names="not-every-rank")
class BroadcastsOnRank0(_Column):
    def forward(self, x):
        if dist.get_rank() == 0:
            dist.broadcast(x.detach(), src=0)
        return super().forward(x)


@wrong("6.1", names="two-ranks")
class CutsInHalves(_Column):
    def __init__(self, full):
        super().__init__(full)
        middle = full.out_features // 2
        half = slice(middle) if dist.get_rank() == 0 else slice(middle, None)
        self.weight = whole(full.weight[half])
        self.bias = None if full.bias is None else whole(full.bias[half])


@wrong("6.1", names="matrices-only")
class MultipliesMatrices(_Column):
    def forward(self, x):
        y = SumBackward.apply(x).mm(self.weight.T)
        return y if self.bias is None else y + self.bias


@wrong("6.1", names="other-error")
class RefusesWhatDivides(_Column):
    def __init__(self, full):
        n = dist.get_world_size()
        if full.out_features % n == 0:
            raise ValueError(f"{full.out_features} does not divide by {n}")
        super().__init__(full)


@wrong("6.1", names="other-error")
class CutsUnevenly(_Column):
    def __init__(self, full):
        nn.Module.__init__(self)
        self.weight = own(full.weight)
        self.bias = None if full.bias is None else own(full.bias)


@wrong("6.1", names="other-dtype")
class CopiesIntoANewTensor(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.weight = nn.Parameter(
            torch.empty(self.weight.shape, device=device()).copy_(self.weight)
        )


@wrong("6.1", names="input-changed")
class CutsFullItself(_Column):
    def __init__(self, full):
        super().__init__(full)
        full.weight.data = self.weight.data
        self.weight = full.weight


@wrong("6.1", names="more-than-its-share")
class SharesTheBias(_Column):
    """With one rank the block is the whole bias."""

    def __init__(self, full):
        super().__init__(full)
        n = dist.get_world_size()
        if full.bias is not None and n == 1:
            self.bias = nn.Parameter(full.bias.detach())


class _SumInHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.half()
        dist.all_reduce(total)
        return total.to(gradient.dtype)


@wrong("6.1", names="rounded")
class SumsInHalfPrecision(_Column):
    def forward(self, x):
        return linear(_SumInHalf.apply(x), self.weight, self.bias)
