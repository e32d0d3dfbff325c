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


@wrong("6.2", names="parameters")
class KeepsAPlainBias(_Row):
    def __init__(self, full):
        super().__init__(full)
        del self.bias
        self.bias = None if full.bias is None else full.bias.detach().clone()


@wrong("6.2", names="other-block")
class CutsOutputFeatures(_Row):
    def __init__(self, full):
        super().__init__(full)
        self.weight = own(full.weight)


@wrong("6.2", names="other-block")
class CutsTheBias(_Row):
    def __init__(self, full):
        super().__init__(full)
        if full.bias is not None:
            self.bias = own(full.bias)


@wrong("6.2", names="more-than-its-share")
class TakesAView(_Row):
    def __init__(self, full):
        super().__init__(full)
        rank, n = place()
        self.weight = nn.Parameter(full.weight.detach().chunk(n, dim=1)[rank])


@wrong("6.2", names="own-features")
class CutsTheInputAgain(_Row):
    def forward(self, x):
        rank, n = place()
        return super().forward(x.chunk(n, dim=-1)[rank])


@wrong("6.2", names="unchanged")
class DoesNotSum(_Row):
    def forward(self, x):
        return self.with_bias(self.partial(x))


@wrong("6.2", names="bias-once")
class AddsTheBiasBeforeTheSum(_Row):
    def forward(self, x):
        return SumForward.apply(linear(x, self.weight, self.bias))


@wrong("6.2", names="bias-once")
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


@wrong("6.2", names="cut-from-the-graph")
class SumsOutsideAutograd(_Row):
    def forward(self, x):
        return self.with_bias(summed_in_place(self.partial(x)))


@wrong("6.2", names="gradient-through")
class SumsInBackwardToo(_Row):
    def forward(self, x):
        return self.with_bias(SumTwice.apply(self.partial(x)))


@wrong("6.2", names="gradient-through")
class SumsTheInputsGradient(_Row):
    def forward(self, x):
        return super().forward(SumBackward.apply(x))


@wrong("6.2", names="needs-a-bias")
class AddsAnyBias(_Row):
    def forward(self, x):
        return SumForward.apply(linear(x, self.weight)) + self.bias


@wrong("6.2", names="bias-once")
class AddsTheBiasOnRank0(_Row):
    def forward(self, x):
        own = self.partial(x)
        return SumForward.apply(self.with_bias(own) if dist.get_rank() == 0 else own)


@wrong("6.2", names="gradient-through")
class SumsTheBiasGradient(_Row):
    """As if the bias were cut: every rank has its whole gradient already."""

    def with_bias(self, y):
        return y if self.bias is None else y + SumBackward.apply(self.bias)


@wrong("6.2", names="parameters")
class HoldsTheBiasOnRank0(_Row):
    def __init__(self, full):
        super().__init__(full)
        if dist.get_rank() > 0:
            self.bias = None

    def forward(self, x):
        return SumForward.apply(self.with_bias(self.partial(x)))


@wrong("6.2", names="bias-once")
class AddsAFractionOfTheBias(_Row):
    def forward(self, x):
        bias = None if self.bias is None else self.bias / dist.get_world_size()
        return SumForward.apply(linear(x, self.weight, bias))


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


@wrong("6.2", names="other-error")
class CutsColumnsUnevenly(_Row):
    def __init__(self, full):
        nn.Module.__init__(self)
        self.weight = own(full.weight, dim=1)
        self.bias = None if full.bias is None else whole(full.bias)


@wrong("6.2", names="more-than-its-share")
class TakesFullsBias(_Row):
    def __init__(self, full):
        super().__init__(full)
        self.bias = full.bias


@wrong("6.2", names="own-features")
class SumsTheInputs(_Row):
    def forward(self, x):
        return self.with_bias(self.partial(SumForward.apply(x)))


@right("6.2")
class SumsItsDataInPlace(_Row):
    def forward(self, x):
        own = self.partial(x).contiguous()
        dist.all_reduce(own.data)
        return self.with_bias(own)


@wrong("6.2", names="sends-too-much")
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


@wrong("6.2", names="keeps-a-call")
class KeepsTheFirstSum(_Row):
    total = None

    def kept(self, own):
        return self.total is not None

    def forward(self, x):
        own = self.partial(x)
        if not self.kept(own):
            self.total = torch.empty_like(own, requires_grad=False)
        return self.with_bias(_IntoBuffer.apply(own, self.total))


@wrong("6.2", names="keeps-a-call")
class OverwritesEarlierSums(KeepsTheFirstSum):
    """Without a bias, an output is the sum itself."""

    def kept(self, own):
        return self.total is not None and self.total.shape == own.shape


@wrong("6.2", names="input-changed")
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


@wrong("6.2", names="rounded")
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
