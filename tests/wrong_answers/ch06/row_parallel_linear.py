"""Answers to 6.2, `RowParallelLinear`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch06.shared import (
    SumBackward,
    SumForward,
    SumTwice,
    must_divide,
    own,
    place,
    summed_in_place,
    whole,
)


class _Row(nn.Module):
    """A right answer with one thing wrong in each subclass."""

    def __init__(self, full):
        super().__init__()
        must_divide(full.in_features)
        self.weight = own(full.weight, dim=1)
        self.bias = None if full.bias is None else whole(full.bias)

    def partial(self, x):
        return linear(x, self.weight)

    def with_bias(self, y):
        return y if self.bias is None else y + self.bias

    def forward(self, x):
        return self.with_bias(SumForward.apply(self.partial(x)))


@right("6.2")
class AddsTheOthersAsAConstant(_Row):
    def forward(self, x):
        own = self.partial(x)
        others = summed_in_place(own) - own.detach()
        return self.with_bias(own + others)


@wrong("6.2", names="passes-by-luck")
class SumsWhatAutogradRecords(_Row):
    """PyTorch warns in backward: all_reduce has no autograd kernel."""

    def forward(self, x):
        own = self.partial(x).contiguous()
        dist.all_reduce(own)
        return self.with_bias(own)


@wrong("6.2", names="not-parameters")
class KeepsAPlainBias(_Row):
    def __init__(self, full):
        super().__init__(full)
        del self.bias
        self.bias = None if full.bias is None else full.bias.detach().clone()


@wrong("6.2", names="keeps-the-whole")
class KeepsTheLayer(_Row):
    def __init__(self, full):
        super().__init__(full)
        self.full = full


@wrong("6.2", names="other-names")
class KeepsAnInnerRow(nn.Module):
    def __init__(self, full):
        super().__init__()
        must_divide(full.in_features)
        share = full.in_features // dist.get_world_size()
        self.linear = nn.Linear(share, full.out_features, bias=full.bias is not None)
        self.linear.weight.data = own(full.weight, dim=1).data
        if full.bias is not None:
            self.linear.bias.data = whole(full.bias).data

    def forward(self, x):
        y = SumForward.apply(linear(x, self.linear.weight))
        return y if self.linear.bias is None else y + self.linear.bias


@wrong("6.2", names="other-values")
class DrawsNewColumns(_Row):
    def __init__(self, full):
        super().__init__(full)
        self.weight = nn.Parameter(torch.randn_like(self.weight))


@wrong("6.2", names="wrong-dimension")
class CutsOutputFeatures(_Row):
    def __init__(self, full):
        super().__init__(full)
        self.weight = own(full.weight)


@wrong("6.2", names="everyone-everything")
class KeepsAllColumns(_Row):
    def __init__(self, full):
        super().__init__(full)
        self.weight = whole(full.weight)


@wrong("6.2", names="rank-0s-block")
class TakesTheFirstColumns(_Row):
    def __init__(self, full):
        super().__init__(full)
        self.weight = whole(full.weight[:, : self.weight.shape[1]])


@wrong("6.2", names="strided")
class DealsColumnsOut(_Row):
    def __init__(self, full):
        super().__init__(full)
        rank, n = place()
        self.weight = whole(full.weight[:, rank::n])


@wrong("6.2", names="bias-cut")
class CutsTheBias(_Row):
    def __init__(self, full):
        super().__init__(full)
        if full.bias is not None:
            self.bias = own(full.bias)


@wrong("6.2", names="a-view")
class TakesAView(_Row):
    def __init__(self, full):
        super().__init__(full)
        rank, n = place()
        self.weight = nn.Parameter(full.weight.detach().chunk(n, dim=1)[rank])


@wrong("6.2", names="takes-the-whole-input")
class CutsTheInputAgain(_Row):
    def forward(self, x):
        rank, n = place()
        return super().forward(x.chunk(n, dim=-1)[rank])


@wrong("6.2", names="partial-output")
class DoesNotSum(_Row):
    def forward(self, x):
        return self.with_bias(self.partial(x))


@wrong("6.2", names="bias-per-rank")
class AddsTheBiasBeforeTheSum(_Row):
    def forward(self, x):
        return SumForward.apply(linear(x, self.weight, self.bias))


@wrong("6.2", names="bias-lost")
class LosesTheBias(_Row):
    def with_bias(self, y):
        return y


@wrong("6.2", names="mean-not-sum")
class AveragesPartialSums(_Row):
    def forward(self, x):
        return self.with_bias(SumForward.apply(self.partial(x)) / dist.get_world_size())


@wrong("6.2", names="one-rank-only")
class ReducesToRank0(_Row):
    def forward(self, x):
        own = self.partial(x)
        total = own.detach().clone()
        dist.reduce(total, dst=0)
        if dist.get_rank() == 0:
            own = own + (total - own.detach())
        return self.with_bias(own)


@wrong("6.2", names="cuts-the-graph")
class SumsOutsideAutograd(_Row):
    def forward(self, x):
        return self.with_bias(summed_in_place(self.partial(x)))


@wrong("6.2", names="summed-again")
class SumsInBackwardToo(_Row):
    def forward(self, x):
        return self.with_bias(SumTwice.apply(self.partial(x)))


@wrong("6.2", names="other-features-summed")
class SumsTheInputsGradient(_Row):
    def forward(self, x):
        return super().forward(SumBackward.apply(x))


@wrong("6.2", names="needs-a-bias")
class AddsAnyBias(_Row):
    def forward(self, x):
        return SumForward.apply(linear(x, self.weight)) + self.bias


@wrong("6.2", names="bias-gradient")
class AddsTheBiasOnRank0(_Row):
    def forward(self, x):
        own = self.partial(x)
        return SumForward.apply(self.with_bias(own) if dist.get_rank() == 0 else own)


@wrong("6.2", names="summed-again")
class SumsTheBiasGradient(_Row):
    """As if the bias were cut: every rank has its whole gradient already."""

    def with_bias(self, y):
        return y if self.bias is None else y + SumBackward.apply(self.bias)


@wrong("6.2", names="not-parameters")
class HoldsTheBiasOnRank0(_Row):
    def __init__(self, full):
        super().__init__(full)
        if dist.get_rank() > 0:
            self.bias = None

    def forward(self, x):
        return SumForward.apply(self.with_bias(self.partial(x)))


@wrong("6.2", names="bias-gradient")
class AddsAFractionOfTheBias(_Row):
    def forward(self, x):
        bias = None if self.bias is None else self.bias / dist.get_world_size()
        return SumForward.apply(linear(x, self.weight, bias))


@wrong("6.2", names="sends-too-much")
class AveragesTheBiasGradient(_Row):
    """To be sure that the copies do not drift apart."""

    def __init__(self, full):
        super().__init__(full)
        if self.bias is not None:
            self.bias.register_hook(lambda g: summed_in_place(g) / dist.get_world_size())


@wrong("6.2", names="outputs-joined")
class JoinsPartialSums(_Row):
    def forward(self, x):
        own = self.partial(x)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own.detach())
        return self.with_bias(torch.cat(everyone, dim=-1))


@wrong("6.2", names="not-every-rank")
class SumsOnRank0(_Row):
    def forward(self, x):
        own = self.partial(x)
        return self.with_bias(SumForward.apply(own) if dist.get_rank() == 0 else own)


@wrong("6.2", names="two-ranks")
class CutsColumnsInHalves(_Row):
    def __init__(self, full):
        super().__init__(full)
        middle = full.in_features // 2
        half = slice(middle) if dist.get_rank() == 0 else slice(middle, None)
        self.weight = whole(full.weight[:, half])


@wrong("6.2", names="matrices-only")
class MultipliesMatricesOnly(_Row):
    def partial(self, x):
        return x.mm(self.weight.T)


@wrong("6.2", names="refuses-what-divides")
class RaisesTheWrongWayRound(_Row):
    def __init__(self, full):
        n = dist.get_world_size()
        if full.in_features % n == 0:
            raise ValueError(f"{full.in_features} does not divide by {n}")
        super().__init__(full)


@wrong("6.2", names="no-error")
class CutsColumnsUnevenly(_Row):
    def __init__(self, full):
        nn.Module.__init__(self)
        self.weight = own(full.weight, dim=1)
        self.bias = None if full.bias is None else whole(full.bias)


@wrong("6.2", names="other-error")
class LetsViewComplain(CutsColumnsUnevenly):
    def __init__(self, full):
        full.weight.detach().view(full.out_features, dist.get_world_size(), -1)
        super().__init__(full)


@wrong("6.2", names="error-without-sizes")
class NamesTheSizeOnly(CutsColumnsUnevenly):
    def __init__(self, full):
        if full.in_features % dist.get_world_size():
            raise ValueError(f"cannot cut {full.in_features} input features")
        super().__init__(full)


@wrong("6.2", names="shares-memory")
class MakesTheColumnsContiguous(_Row):
    """With one rank the block is the whole weight, and contiguous already."""

    def __init__(self, full):
        super().__init__(full)
        rank, n = place()
        self.weight = nn.Parameter(full.weight.detach().chunk(n, dim=1)[rank].contiguous())


@wrong("6.2", names="shares-memory")
class TakesFullsBias(_Row):
    def __init__(self, full):
        super().__init__(full)
        self.bias = full.bias


@wrong("6.2", names="other-dtype")
class SumsInSinglePrecision(_Row):
    def forward(self, x):
        return self.with_bias(SumForward.apply(self.partial(x).float()))


@wrong("6.2", names="matrices-only")
class ReturnsAMatrix(_Row):
    def forward(self, x):
        return super().forward(x.flatten(0, -2))


@wrong("6.2", names="inputs-summed")
class SumsTheInputs(_Row):
    def forward(self, x):
        return self.with_bias(self.partial(SumForward.apply(x)))


class _DividedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / dist.get_world_size()


@wrong("6.2", names="input-gradient-mean")
class DividesTheGradient(_Row):
    def forward(self, x):
        return self.with_bias(_DividedBackward.apply(SumForward.apply(self.partial(x))))


@right("6.2")
class SumsItsDataInPlace(_Row):
    def forward(self, x):
        own = self.partial(x).contiguous()
        dist.all_reduce(own.data)
        return self.with_bias(own)


@wrong("6.2", names="gathered-to-add")
class GathersPartialSums(_Row):
    def forward(self, x):
        rank, n = place()
        own = self.partial(x).contiguous()
        everyone = [torch.empty_like(own) for _ in range(n)]
        dist.all_gather(everyone, own.detach())
        everyone[rank] = own  # autograd goes this way; the others' terms are constants
        return self.with_bias(sum(everyone))


class _IntoBuffer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, buffer):
        dist.all_reduce(buffer.copy_(tensor))
        return buffer.view_as(buffer)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@wrong("6.2", names="kept-from-before")
class KeepsTheFirstSum(_Row):
    total = None

    def kept(self, own):
        return self.total is not None

    def forward(self, x):
        own = self.partial(x)
        if not self.kept(own):
            self.total = torch.empty_like(own, requires_grad=False)
        return self.with_bias(_IntoBuffer.apply(own, self.total))


@wrong("6.2", names="kept-from-before")
class OverwritesEarlierSums(KeepsTheFirstSum):
    """Without a bias, an output is the sum itself."""

    def kept(self, own):
        return self.total is not None and self.total.shape == own.shape


@wrong("6.2", names="full-changed")
class FreezesFull(_Row):
    """To cut it without a graph."""

    def __init__(self, full):
        super().__init__(full.requires_grad_(False))


class _SumInSinglePrecision(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return summed_in_place(tensor.float()).to(tensor.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@wrong("6.2", names="other-dtype")
class SendsSinglePrecision(_Row):
    def forward(self, x):
        return self.with_bias(_SumInSinglePrecision.apply(self.partial(x)))


@wrong("6.2", names="matrices-only")
class TakesTwoOrThreeDimensions(_Row):
    def partial(self, x):
        return torch.einsum("ni,oi->no" if x.dim() == 2 else "nti,oi->nto", x, self.weight)


@wrong("6.2", names="needs-contiguous")
class ViewsTheInputAsAMatrix(_Row):
    def forward(self, x):
        y = SumForward.apply(x.view(-1, x.shape[-1]) @ self.weight.T)
        return self.with_bias(y.view(*x.shape[:-1], -1))


class _SumNotWaitedFor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total, async_op=True)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@wrong("6.2", names="not-waited")
class DoesNotWait(_Row):
    def forward(self, x):
        return self.with_bias(_SumNotWaitedFor.apply(self.partial(x)))


@right("6.2")
class WaitsItself(_Row):
    def forward(self, x):
        own = self.partial(x)
        total = own.detach().clone()
        work = dist.all_reduce(total, async_op=True)
        work.wait()
        return self.with_bias(own + (total - own.detach()))


class _SumOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient


@right("6.2")
class SumsOnceDifferentiable(_Row):
    def forward(self, x):
        return self.with_bias(_SumOnce.apply(self.partial(x)))
