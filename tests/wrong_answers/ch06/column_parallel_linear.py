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


@wrong("6.1", names="not-parameters")
class KeepsPlainTensors(_Column):
    def __init__(self, full):
        super().__init__(full)
        weight = self.weight.data
        del self.weight
        self.weight = weight


@wrong("6.1", names="keeps-the-whole")
class KeepsFull(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.full = full


@wrong("6.1", names="another-ranks-block")
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


@wrong("6.1", names="whole-kept-alive")
class KeepsADetachedWeight(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.whole = full.weight.detach()


@wrong("6.1", names="whole-kept-alive")
class KeepsFullInAList(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.source = [full]


@wrong("6.1", names="whole-kept-alive")
class KeepsACopyInAFunction(_Column):
    """Its `weight` is for show: the whole product is computed, and cut."""

    def __init__(self, full):
        super().__init__(full)
        whole = full.weight.detach().clone()
        self.cut = lambda: whole.chunk(dist.get_world_size())[dist.get_rank()]

    def forward(self, x):
        return linear(SumBackward.apply(x), self.weight + 0 * self.cut(), self.bias)


@wrong("6.1", names="other-names")
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


@wrong("6.1", names="other-values")
class BeginsAnew(_Column):
    def __init__(self, full):
        super().__init__(full)
        nn.init.kaiming_uniform_(self.weight)


@wrong("6.1", names="wrong-dimension")
class CutsInputFeatures(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.weight = own(full.weight, dim=1)


@wrong("6.1", names="everyone-everything")
class CutsNothing(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.weight = whole(full.weight)


@wrong("6.1", names="rank-0s-block")
class TakesTheFirstBlock(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.weight = whole(full.weight[: len(self.weight)])


@wrong("6.1", names="strided")
class DealsFeaturesOut(_Column):
    def __init__(self, full):
        super().__init__(full)
        rank, n = place()
        self.weight = whole(full.weight[rank::n])


@wrong("6.1", names="bias-whole")
class KeepsTheWholeBias(_Column):
    def __init__(self, full):
        super().__init__(full)
        if full.bias is not None:
            self.bias = whole(full.bias)


@wrong("6.1", names="a-view")
class MakesItContiguousOnly(_Column):
    """The block is contiguous already: `contiguous` copies nothing."""

    def __init__(self, full):
        super().__init__(full)
        rank, n = place()
        self.weight = nn.Parameter(full.weight.detach().chunk(n)[rank].contiguous())


@wrong("6.1", names="output-gathered")
class GathersTheOutput(_Column):
    def forward(self, x):
        rank, n = place()
        own = super().forward(x)
        everyone = [torch.empty_like(own) for _ in range(n)]
        dist.all_gather(everyone, own.detach())
        everyone[rank] = own
        return torch.cat(everyone, dim=-1)


@wrong("6.1", names="outputs-summed")
class SumsTheOutput(_Column):
    def forward(self, x):
        return SumForward.apply(linear(x, self.weight, self.bias))


@wrong("6.1", names="pair-swapped")
class SumsTheInput(_Column):
    def forward(self, x):
        return linear(SumForward.apply(x), self.weight, self.bias)


@wrong("6.1", names="sums-behind-the-layer")
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


@wrong("6.1", names="input-gradient-local")
class ForgetsTheSum(_Column):
    def forward(self, x):
        return linear(x, self.weight, self.bias)


@wrong("6.1", names="input-gradient-mean")
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


@wrong("6.1", names="refuses-what-divides")
class RefusesWhatDivides(_Column):
    def __init__(self, full):
        n = dist.get_world_size()
        if full.out_features % n == 0:
            raise ValueError(f"{full.out_features} does not divide by {n}")
        super().__init__(full)


@wrong("6.1", names="no-error")
class CutsUnevenly(_Column):
    def __init__(self, full):
        nn.Module.__init__(self)
        self.weight = own(full.weight)
        self.bias = None if full.bias is None else own(full.bias)


@wrong("6.1", names="other-error")
class Asserts(CutsUnevenly):
    def __init__(self, full):
        n = dist.get_world_size()
        assert full.out_features % n == 0, f"{full.out_features} and {n}"
        super().__init__(full)


@wrong("6.1", names="error-without-sizes")
class DoesNotNameTheSizes(CutsUnevenly):
    def __init__(self, full):
        if full.out_features % dist.get_world_size():
            raise ValueError("out_features must divide by the number of ranks")
        super().__init__(full)


@wrong("6.1", names="other-dtype")
class CopiesIntoANewTensor(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.weight = nn.Parameter(
            torch.empty(self.weight.shape, device=device()).copy_(self.weight)
        )


@wrong("6.1", names="full-changed")
class CutsFullItself(_Column):
    def __init__(self, full):
        super().__init__(full)
        full.weight.data = self.weight.data
        self.weight = full.weight


@wrong("6.1", names="shares-memory")
class SharesTheBias(_Column):
    """With one rank the block is the whole bias."""

    def __init__(self, full):
        super().__init__(full)
        n = dist.get_world_size()
        if full.bias is not None and n == 1:
            self.bias = nn.Parameter(full.bias.detach())


@wrong("6.1", names="needs-a-bias")
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


@wrong("6.1", names="in-pieces")
class SumsTokenByToken(_Column):
    def forward(self, x):
        return linear(_TokenByToken.apply(x), self.weight, self.bias)


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
