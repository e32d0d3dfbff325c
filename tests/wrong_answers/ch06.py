"""Plausible wrong answers, and other right ones, to the exercises of chapter 06.

The wrong answers to 6.1, 6.2, 6.3 and 6.5 are right ones with one thing written wrongly.
"""

import copy
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, layer_norm, linear, scaled_dot_product_attention

from course_utils.checks import load_code
from course_utils.hardware import device
from tests.wrong_answers import right, wrong

SumBackward = load_code(6, "SumBackward")
SumForward = load_code(6, "SumForward")
GatherSequence = load_code(6, "GatherSequence")


def _place():
    return dist.get_rank(), dist.get_world_size()


def _own(tensor, dim=0):
    """A copy of this rank's block, trained on its own."""
    rank, n = _place()
    return nn.Parameter(tensor.detach().chunk(n, dim)[rank].clone())


def _whole(tensor):
    return nn.Parameter(tensor.detach().clone())


def _must_divide(size):
    n = dist.get_world_size()
    if size % n:
        raise ValueError(f"{size} does not divide by {n}")


class SumTwice(torch.autograd.Function):
    """The all-reduce that is its own backward, as torch.distributed.nn has it."""

    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class MeanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


def _summed_in_place(tensor):
    """A sum over the ranks of which autograd knows nothing, not even that it happened."""
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


# ---- 6.1 ColumnParallelLinear --------------------------------------------------------------------


@right("6.1")
class SumsInAHook(nn.Module):
    def __init__(self, full):
        super().__init__()
        _must_divide(full.out_features)
        self.weight = _own(full.weight)
        self.bias = None if full.bias is None else _own(full.bias)

    def forward(self, x):
        x = x.view_as(x)  # the hook sits on what goes through the layer
        if x.requires_grad:
            x.register_hook(_summed_in_place)
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
        rank, n = _place()
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
        _must_divide(full.out_features)
        share, has_bias = full.out_features // dist.get_world_size(), full.bias is not None
        self.linear = nn.Linear(full.in_features, share, bias=has_bias)
        self.linear.weight.data = _own(full.weight).data
        if has_bias:
            self.linear.bias.data = _own(full.bias).data

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
        self.weight = _own(full.weight, dim=1)


@wrong("6.1", names="everyone-everything")
class CutsNothing(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.weight = _whole(full.weight)


@wrong("6.1", names="rank-0s-block")
class TakesTheFirstBlock(_Column):
    def __init__(self, full):
        super().__init__(full)
        self.weight = _whole(full.weight[: len(self.weight)])


@wrong("6.1", names="strided")
class DealsFeaturesOut(_Column):
    def __init__(self, full):
        super().__init__(full)
        rank, n = _place()
        self.weight = _whole(full.weight[rank::n])


@wrong("6.1", names="bias-whole")
class KeepsTheWholeBias(_Column):
    def __init__(self, full):
        super().__init__(full)
        if full.bias is not None:
            self.bias = _whole(full.bias)


@wrong("6.1", names="a-view")
class MakesItContiguousOnly(_Column):
    """The block is contiguous already: `contiguous` copies nothing."""

    def __init__(self, full):
        super().__init__(full)
        rank, n = _place()
        self.weight = nn.Parameter(full.weight.detach().chunk(n)[rank].contiguous())


@wrong("6.1", names="output-gathered")
class GathersTheOutput(_Column):
    def forward(self, x):
        rank, n = _place()
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
        self.bias = _own(full.bias)


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
            x.register_hook(_summed_in_place)
        return linear(x, self.weight, self.bias)


@wrong("6.1", names="needs-input-gradient")
class HooksAnyInput(_Column):
    def forward(self, x):
        x = x.view_as(x)
        x.register_hook(_summed_in_place)
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
        self.weight = _whole(full.weight[half])
        self.bias = None if full.bias is None else _whole(full.bias[half])


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
        self.weight = _own(full.weight)
        self.bias = None if full.bias is None else _own(full.bias)


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


# ---- 6.2 RowParallelLinear -----------------------------------------------------------------------


class _Row(nn.Module):
    """A right answer with one thing wrong in each subclass."""

    def __init__(self, full):
        super().__init__()
        _must_divide(full.in_features)
        self.weight = _own(full.weight, dim=1)
        self.bias = None if full.bias is None else _whole(full.bias)

    def partial(self, x):
        return linear(x, self.weight)

    def with_bias(self, y):
        return y if self.bias is None else y + self.bias

    def forward(self, x):
        return self.with_bias(SumForward.apply(self.partial(x)))


@right("6.2")
class GathersPartialSums(_Row):
    def forward(self, x):
        rank, n = _place()
        own = self.partial(x).contiguous()
        everyone = [torch.empty_like(own) for _ in range(n)]
        dist.all_gather(everyone, own.detach())
        everyone[rank] = own  # autograd goes this way; the others' terms are constants
        return self.with_bias(sum(everyone))


@right("6.2")
class AddsTheOthersAsAConstant(_Row):
    def forward(self, x):
        own = self.partial(x)
        others = _summed_in_place(own) - own.detach()
        return self.with_bias(own + others)


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
        _must_divide(full.in_features)
        share = full.in_features // dist.get_world_size()
        self.linear = nn.Linear(share, full.out_features, bias=full.bias is not None)
        self.linear.weight.data = _own(full.weight, dim=1).data
        if full.bias is not None:
            self.linear.bias.data = _whole(full.bias).data

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
        self.weight = _own(full.weight)


@wrong("6.2", names="everyone-everything")
class KeepsAllColumns(_Row):
    def __init__(self, full):
        super().__init__(full)
        self.weight = _whole(full.weight)


@wrong("6.2", names="rank-0s-block")
class TakesTheFirstColumns(_Row):
    def __init__(self, full):
        super().__init__(full)
        self.weight = _whole(full.weight[:, : self.weight.shape[1]])


@wrong("6.2", names="strided")
class DealsColumnsOut(_Row):
    def __init__(self, full):
        super().__init__(full)
        rank, n = _place()
        self.weight = _whole(full.weight[:, rank::n])


@wrong("6.2", names="bias-cut")
class CutsTheBias(_Row):
    def __init__(self, full):
        super().__init__(full)
        if full.bias is not None:
            self.bias = _own(full.bias)


@wrong("6.2", names="a-view")
class TakesAView(_Row):
    def __init__(self, full):
        super().__init__(full)
        rank, n = _place()
        self.weight = nn.Parameter(full.weight.detach().chunk(n, dim=1)[rank])


@wrong("6.2", names="takes-the-whole-input")
class CutsTheInputAgain(_Row):
    def forward(self, x):
        rank, n = _place()
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
        return self.with_bias(_summed_in_place(self.partial(x)))


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
            self.bias.register_hook(lambda g: _summed_in_place(g) / dist.get_world_size())


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
        self.weight = _whole(full.weight[:, half])


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
        self.weight = _own(full.weight, dim=1)
        self.bias = None if full.bias is None else _whole(full.bias)


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
        rank, n = _place()
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


# ---- 6.3 HeadParallelAttention -------------------------------------------------------------------


class _Heads(nn.Module):
    """A right answer with one thing wrong in each subclass; queries, keys, values cut each."""

    def __init__(self, full):
        super().__init__()
        _must_divide(full.heads)
        self.heads = full.heads // dist.get_world_size()
        self.head_width = full.head_width
        self.weight, self.bias = self.rows(full.qkv.weight), self.rows(full.qkv.bias)
        self.out_weight = _own(full.out.weight, dim=1)
        self.out_bias = _whole(full.out.bias)

    def rows(self, tensor):
        rank, n = _place()
        parts = [part.chunk(n)[rank] for part in tensor.detach().chunk(3)]
        return nn.Parameter(torch.cat(parts))

    def enter(self, x):
        return SumBackward.apply(x)

    def leave(self, y):
        return SumForward.apply(y) + self.out_bias

    def split(self, qkv):
        """q, k, v, each (N, T, heads, head_width)."""
        return qkv.unflatten(-1, (3, self.heads, self.head_width)).unbind(dim=2)

    def mix(self, q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        qkv = linear(self.enter(x), self.weight, self.bias)
        q, k, v = (part.transpose(1, 2) for part in self.split(qkv))
        y = self.mix(q, k, v).transpose(1, 2).flatten(2)
        return self.leave(linear(y, self.out_weight))


@right("6.3")
class CutsEachPart(_Heads):
    pass


@right("6.3")
class ScoresByHand(_Heads):
    def mix(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_width)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(later, -math.inf).softmax(dim=-1) @ v


@wrong("6.3", names="cut-across-the-parts")
class CutsEqualRuns(_Heads):
    def rows(self, tensor):
        return _own(tensor)


@wrong("6.3", names="bias-across-the-parts")
class CutsTheBiasInRuns(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.bias = _own(full.qkv.bias)


@wrong("6.3", names="parts-inside-heads")
class ReadsHeadByHead(_Heads):
    def split(self, qkv):
        return qkv.unflatten(-1, (self.heads, 3, self.head_width)).unbind(dim=3)


@wrong("6.3", names="other-heads")
class TakesTheFirstHeads(_Heads):
    def rows(self, tensor):
        parts = [part.chunk(dist.get_world_size())[0] for part in tensor.detach().chunk(3)]
        return nn.Parameter(torch.cat(parts))


@wrong("6.3", names="other-heads")
class DealsHeadsOut(_Heads):
    def rows(self, tensor):
        rank, n = _place()
        by_head = tensor.detach().unflatten(0, (3, -1, self.head_width))
        return nn.Parameter(by_head[:, rank::n].flatten(0, 2))


@wrong("6.3", names="parts-swapped")
class SplitsInAnotherOrder(_Heads):
    def split(self, qkv):
        q, k, v = super().split(qkv)
        return q, v, k


@wrong("6.3", names="heads-in-another-order")
class DealsTheHeadsOut(_Heads):
    """Heads r, r + n, ..., in qkv and out alike."""

    def __init__(self, full):
        super().__init__(full)
        columns = self.dealt(full, full.out.weight.detach().T).T
        self.out_weight = nn.Parameter(columns.contiguous())
        self.weight, self.bias = (
            nn.Parameter(torch.cat([self.dealt(full, part) for part in tensor.detach().chunk(3)]))
            for tensor in (full.qkv.weight, full.qkv.bias)
        )

    def dealt(self, full, part):
        rank, n = _place()
        return part.unflatten(0, (-1, full.head_width))[rank::n].flatten(0, 1).clone()


@wrong("6.3", names="heads-in-another-order")
class CountsRanksFromTheEnd(_Heads):
    def __init__(self, full):
        super().__init__(full)
        rank, n = _place()
        mine = n - 1 - rank
        self.out_weight = nn.Parameter(full.out.weight.detach().chunk(n, dim=1)[mine].clone())

    def rows(self, tensor):
        rank, n = _place()
        return nn.Parameter(torch.cat([p.chunk(n)[n - 1 - rank] for p in tensor.detach().chunk(3)]))


@wrong("6.3", names="other-bias-rows")
class TakesTheFirstRanksBias(_Heads):
    def __init__(self, full):
        super().__init__(full)
        n = dist.get_world_size()
        parts = [part.chunk(n)[0] for part in full.qkv.bias.detach().chunk(3)]
        self.bias = nn.Parameter(torch.cat(parts))


@wrong("6.3", names="heads-laid-out")
class PutsHeadsInTheLastDimension(_Heads):
    def split(self, qkv):
        parts = qkv.unflatten(-1, (3, self.head_width, self.heads))
        return parts.transpose(-1, -2).unbind(dim=2)


@wrong("6.3", names="whole-kept-alive")
class KeepsTheAttention(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.source = {"full": full}


@wrong("6.3", names="global-heads")
class CountsAllHeads(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.heads = full.heads


@wrong("6.3", names="global-heads")
class FlattensToTheWholeWidth(_Heads):
    def forward(self, x):
        qkv = linear(self.enter(x), self.weight, self.bias)
        y = self.mix(*(part.transpose(1, 2) for part in self.split(qkv)))
        return self.leave(linear(y.transpose(1, 2).reshape(x.shape), self.out_weight))


@wrong("6.3", names="heads-mixed")
class FlattensWithoutTransposing(_Heads):
    def forward(self, x):
        qkv = linear(self.enter(x), self.weight, self.bias)
        y = self.mix(*(part.transpose(1, 2) for part in self.split(qkv)))
        return self.leave(linear(y.reshape(*x.shape[:2], -1), self.out_weight))


@wrong("6.3", names="attends-over-heads")
class NeverTransposes(_Heads):
    def forward(self, x):
        y = self.mix(*self.split(linear(self.enter(x), self.weight, self.bias)))
        return self.leave(linear(y.flatten(2), self.out_weight))


@wrong("6.3", names="output-not-cut-to-match")
class KeepsTheWholeOutput(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.out_weight = _whole(full.out.weight)


@wrong("6.3", names="output-not-cut-to-match")
class CutsTheOutputByColumns(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.out_weight = _own(full.out.weight)


@wrong("6.3", names="wrong-scale")
class ScalesByTheRanksWidth(ScoresByHand):
    def mix(self, q, k, v):
        scale = 1 / math.sqrt(self.heads * self.head_width)
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


@wrong("6.3", names="not-causal")
class ForgetsTheMask(_Heads):
    def mix(self, q, k, v):
        return scaled_dot_product_attention(q, k, v)


@wrong("6.3", names="partial-output")
class KeepsItsOwnHeads(_Heads):
    def leave(self, y):
        return y + self.out_bias


@wrong("6.3", names="bias-per-rank")
class AddsTheBiasOncePerRank(_Heads):
    def leave(self, y):
        return SumForward.apply(y + self.out_bias)


@wrong("6.3", names="cuts-the-graph")
class SumsHeadsOutsideAutograd(_Heads):
    def leave(self, y):
        return _summed_in_place(y) + self.out_bias


@wrong("6.3", names="input-gradient-local")
class DoesNotSumTheInputsGradient(_Heads):
    def enter(self, x):
        return x


@wrong("6.3", names="summed-again")
class SumsHeadsInBackwardToo(_Heads):
    def leave(self, y):
        return SumTwice.apply(y) + self.out_bias


@wrong("6.3", names="wrong-after-a-step")
class AddsAFractionOfTheOutputBias(_Heads):
    def leave(self, y):
        return SumForward.apply(y + self.out_bias / dist.get_world_size())


@wrong("6.3", names="full-changed")
class RegroupsFullItself(_Heads):
    def __init__(self, full):
        for tensor in (full.qkv.weight, full.qkv.bias):
            parts = tensor.data.view(3, dist.get_world_size(), -1)
            tensor.data = parts.transpose(0, 1).reshape(tensor.shape)
        super().__init__(full)

    def rows(self, tensor):
        return _own(tensor)


@wrong("6.3", names="holds-too-much")
class SlicesInForward(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.qkv = full.qkv
        self.weight = self.bias = None

    def _parts(self, tensor):
        rank, n = _place()
        return torch.cat([part.chunk(n)[rank] for part in tensor.chunk(3)])

    def forward(self, x):
        weight, bias = self._parts(self.qkv.weight), self._parts(self.qkv.bias)
        q, k, v = (part.transpose(1, 2) for part in self.split(linear(self.enter(x), weight, bias)))
        y = self.mix(q, k, v).transpose(1, 2).flatten(2)
        return self.leave(linear(y, self.out_weight))


@wrong("6.3", names="sends-too-much")
class EntersThreeTimes(_Heads):
    def forward(self, x):
        weights, biases = self.weight.chunk(3), self.bias.chunk(3)
        q, k, v = (
            linear(self.enter(x), w, b).unflatten(-1, (self.heads, self.head_width)).transpose(1, 2)
            for w, b in zip(weights, biases, strict=True)
        )
        y = self.mix(q, k, v).transpose(1, 2).flatten(2)
        return self.leave(linear(y, self.out_weight))


@wrong("6.3", names="not-every-rank")
class SumsHeadsOnRank0(_Heads):
    def leave(self, y):
        return SumForward.apply(y) + self.out_bias if dist.get_rank() == 0 else y + self.out_bias


@wrong("6.3", names="two-ranks")
class KnowsTwoHalves(_Heads):
    """Both halves of the heads, and so of the rows, but no third."""

    def rows(self, tensor):
        rank, n = _place()
        parts = [part.chunk(n)[min(rank, 1)] for part in tensor.detach().chunk(3)]
        return nn.Parameter(torch.cat(parts))


@wrong("6.3", names="no-error")
class DividesTheWidth(_Heads):
    """12 heads on 8 ranks: one head for each, and four that nobody has."""

    def __init__(self, full):
        nn.Module.__init__(self)
        self.heads = full.heads // dist.get_world_size()
        self.head_width = full.head_width
        self.weight, self.bias = self.rows(full.qkv.weight), self.rows(full.qkv.bias)
        self.out_weight = _own(full.out.weight, dim=1)
        self.out_bias = _whole(full.out.bias)


@wrong("6.3", names="other-error")
class AssertsHeads(DividesTheWidth):
    def __init__(self, full):
        assert full.heads % dist.get_world_size() == 0
        super().__init__(full)


@wrong("6.3", names="error-without-sizes")
class DoesNotNameTheHeads(DividesTheWidth):
    def __init__(self, full):
        if full.heads % dist.get_world_size():
            raise ValueError("the heads do not divide by the ranks")
        super().__init__(full)


@wrong("6.3", names="no-error")
class ComparesTheWidth(_Heads):
    """The width divides, and the heads do not."""

    def __init__(self, full):
        _must_divide(full.out.in_features)
        whole, full = full, copy.copy(full)
        full.heads -= full.heads % dist.get_world_size()
        super().__init__(full)
        self.head_width = whole.head_width


@wrong("6.3", names="mask-shifted")
class HidesATokenFromItself(_Heads):
    def mix(self, q, k, v):
        t = q.shape[-2]
        seen = torch.ones(t, t, dtype=torch.bool, device=q.device).tril(-1)
        seen[0, 0] = True
        return scaled_dot_product_attention(q, k, v, attn_mask=seen)


@wrong("6.3", names="output-not-cut-to-match")
class TurnsTheOutputAround(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.out_weight = nn.Parameter(self.out_weight.detach().flip(1))


@right("6.3")
class HasThreeLayers(_Heads):
    """Queries, keys and values by layers of their own, behind one entrance."""

    def __init__(self, full):
        super().__init__(full)
        self.weights, self.biases = (
            nn.ParameterList(part.clone() for part in tensor.detach().chunk(3))
            for tensor in (self.weight, self.bias)
        )
        del self.weight, self.bias

    def forward(self, x):
        x = self.enter(x)
        parts = [linear(x, w, b) for w, b in zip(self.weights, self.biases)]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return self.leave(linear(self.mix(q, k, v).transpose(1, 2).flatten(2), self.out_weight))


# ---- 6.4 vocabulary_parallel_cross_entropy -------------------------------------------------------


def _highest(logits):
    highest = logits.detach().amax(dim=1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return highest


def _at_target(z, targets):
    """This rank's contribution to the target's logit, zero where the class is elsewhere."""
    share = z.shape[1]
    column = targets - dist.get_rank() * share
    here = (column >= 0) & (column < share)
    picked = z.gather(1, column.clamp(0, share - 1).unsqueeze(1)).squeeze(1)
    return picked.where(here, 0.0)


def _mean(losses, targets):
    return losses[targets >= 0].mean()


@right("6.4")
def sums_both_in_one_call(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    both = torch.stack([z.exp().sum(dim=1), _at_target(z, targets)])
    total, at_target = SumForward.apply(both)
    return _mean(total.log() - at_target, targets)


class _Softmax(torch.autograd.Function):
    """Backward by hand: softmax, minus one at the target."""

    @staticmethod
    def forward(ctx, logits, targets):
        z = logits - _highest(logits).unsqueeze(1)
        exponentials = z.exp()
        both = torch.stack([exponentials.sum(dim=1), _at_target(z, targets)])
        dist.all_reduce(both)
        ctx.save_for_backward(exponentials / both[0].unsqueeze(1), targets)
        return _mean(both[0].log() - both[1], targets)

    @staticmethod
    def backward(ctx, gradient):
        softmax, targets = ctx.saved_tensors
        classes = torch.arange(softmax.shape[1], device=softmax.device)
        classes = classes + dist.get_rank() * softmax.shape[1]
        counts = (targets >= 0).unsqueeze(1)
        of_logits = (softmax - (targets.unsqueeze(1) == classes).float()) * counts
        return gradient * of_logits / counts.sum(), None


@right("6.4")
def differentiates_by_hand(logits, targets):
    return _Softmax.apply(logits, targets)


@right("6.4")
def combines_logsumexps(logits, targets):
    rank, n = _place()
    own = logits.logsumexp(dim=1)
    everyone = [torch.empty_like(own) for _ in range(n)]
    dist.all_gather(everyone, own.detach())
    everyone[rank] = own
    total = torch.stack(everyone).logsumexp(dim=0)
    return _mean(total - SumForward.apply(_at_target(logits, targets)), targets)


@wrong("6.4", names="targets-not-shifted")
def takes_targets_as_columns(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(z.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="targets-not-shifted")
def averages_the_ranks_losses(logits, targets):
    return SumForward.apply(cross_entropy(logits, targets)) / dist.get_world_size()


@wrong("6.4", names="target-not-masked")
def clamps_only(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    share = logits.shape[1]
    column = (targets - dist.get_rank() * share).clamp(0, share - 1)
    at_target = SumForward.apply(z.gather(1, column.unsqueeze(1)).squeeze(1))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="target-not-masked")
def wraps_around(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    column = targets % logits.shape[1]
    at_target = SumForward.apply(z.gather(1, column.unsqueeze(1)).squeeze(1))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="edge-classes")
def takes_one_class_too_many(logits, targets):
    z, share = logits - _highest(logits).unsqueeze(1), logits.shape[1]
    column = targets - dist.get_rank() * share
    here = (column >= 0) & (column <= share)
    picked = z.gather(1, column.clamp(0, share - 1).unsqueeze(1)).squeeze(1)
    at_target = SumForward.apply(picked.where(here, 0.0))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="edge-classes")
def leaves_its_first_class_out(logits, targets):
    z, share = logits - _highest(logits).unsqueeze(1), logits.shape[1]
    column = targets - dist.get_rank() * share
    here = (column > 0) & (column < share)
    picked = z.gather(1, column.clamp(0, share - 1).unsqueeze(1)).squeeze(1)
    at_target = SumForward.apply(picked.where(here, 0.0))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="own-classes-only")
def ignores_what_is_elsewhere(logits, targets):
    """PyTorch's loss of the tokens whose class is here, summed over the ranks."""
    share = logits.shape[1]
    column = targets - dist.get_rank() * share
    column = column.where((column >= 0) & (column < share), -100)
    total = SumForward.apply(cross_entropy(logits, column, reduction="sum"))
    return total / (targets >= 0).sum()


@wrong("6.4", names="own-classes-only")
def sums_its_own_classes(logits, targets):
    at_target = SumForward.apply(_at_target(logits, targets))
    return _mean(logits.logsumexp(dim=1) - at_target, targets)


@wrong("6.4", names="own-classes-only")
def takes_the_other_function(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumBackward.apply(_at_target(z, targets))
    return _mean(SumBackward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="target-not-summed")
def subtracts_its_own_target(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - _at_target(z, targets), targets)


@wrong("6.4", names="log-before-sum")
def sums_logarithms(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(_at_target(z, targets))
    return _mean(SumForward.apply(z.exp().sum(dim=1).log()) - at_target, targets)


@wrong("6.4", names="target-not-lowered")
def subtracts_the_raw_target(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(_at_target(logits, targets))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="overflow")
def sums_the_maxima(logits, targets):
    total = logits.detach().amax(dim=1)
    dist.all_reduce(total)
    z = logits - total.unsqueeze(1)
    at_target = SumForward.apply(_at_target(z, targets))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="local-max")
def subtracts_its_own_maximum(logits, targets):
    z = logits - logits.detach().amax(dim=1, keepdim=True)
    at_target = SumForward.apply(_at_target(z, targets))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="local-max")
def adds_its_own_maximum_back(logits, targets):
    highest = logits.detach().amax(dim=1)
    total = SumForward.apply((logits - highest.unsqueeze(1)).exp().sum(dim=1)).log() + highest
    return _mean(total - SumForward.apply(_at_target(logits, targets)), targets)


@wrong("6.4", names="sum-not-mean")
def sums_the_tokens(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(_at_target(z, targets))
    return (SumForward.apply(z.exp().sum(dim=1)).log() - at_target)[targets >= 0].sum()


@wrong("6.4", names="one-rank-only")
def returns_it_on_rank_0(logits, targets):
    loss = sums_both_in_one_call(logits, targets)
    return loss if dist.get_rank() == 0 else loss * 0.0


@wrong("6.4", names="no-tensor")
def returns_a_number(logits, targets):
    return sums_both_in_one_call(logits, targets).item()


@wrong("6.4", names="not-every-rank")
def sums_targets_only_where_they_are(logits, targets):
    """Every rank has a token's class, until there are fewer tokens than ranks."""
    z = logits - _highest(logits).unsqueeze(1)
    at_target = _at_target(z, targets)
    total = SumForward.apply(z.exp().sum(dim=1)).log()
    if at_target.any():
        at_target = SumForward.apply(at_target)
    return _mean(total - at_target, targets)


@wrong("6.4", names="two-ranks")
def knows_two_parts_of_the_vocabulary(logits, targets):
    z, share = logits - _highest(logits).unsqueeze(1), logits.shape[1]
    column = targets if dist.get_rank() == 0 else targets - share
    here = (column >= 0) & (column < share)
    picked = z.gather(1, column.clamp(0, share - 1).unsqueeze(1)).squeeze(1)
    at_target = SumForward.apply(picked.where(here, 0.0))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


def _with_maximum(highest, logits, targets):
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    z = logits - highest.unsqueeze(1)
    at_target = SumForward.apply(_at_target(z, targets))
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="max-has-gradient")
def forgets_to_detach(logits, targets):
    return _with_maximum(logits.amax(dim=1), logits, targets)


@wrong("6.4", names="max-has-gradient")
def clones_without_detaching(logits, targets):
    return _with_maximum(logits.max(dim=1).values.clone(), logits, targets)


@wrong("6.4", names="cuts-the-graph")
def sums_outside_autograd(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    total = _summed_in_place(z.exp().sum(dim=1))
    return _mean(total.log() - _summed_in_place(_at_target(z, targets)), targets)


@wrong("6.4", names="total-gradient-lost")
def sums_exponentials_outside_autograd(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    total = _summed_in_place(z.exp().sum(dim=1))
    return _mean(total.log() - SumForward.apply(_at_target(z, targets)), targets)


@wrong("6.4", names="target-gradient-lost")
def sums_targets_outside_autograd(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    total = SumForward.apply(z.exp().sum(dim=1))
    return _mean(total.log() - _summed_in_place(_at_target(z, targets)), targets)


@wrong("6.4", names="summed-again")
def sums_in_backward_too(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumTwice.apply(_at_target(z, targets))
    return _mean(SumTwice.apply(z.exp().sum(dim=1)).log() - at_target, targets)


@wrong("6.4", names="overflow")
def subtracts_no_maximum(logits, targets):
    total = SumForward.apply(logits.exp().sum(dim=1))
    return _mean(total.log() - SumForward.apply(_at_target(logits, targets)), targets)


@wrong("6.4", names="log-of-zero")
def takes_the_log_of_the_probability(logits, targets):
    exponentials = (logits - _highest(logits).unsqueeze(1)).exp()
    total = SumForward.apply(exponentials.sum(dim=1))
    return _mean(-(SumForward.apply(_at_target(exponentials, targets)) / total).log(), targets)


@wrong("6.4", names="padding-counted")
def forgets_padding(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(_at_target(z, targets))
    return (SumForward.apply(z.exp().sum(dim=1)).log() - at_target).mean()


@wrong("6.4", names="divided-by-all")
def divides_by_all_tokens(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(_at_target(z, targets))
    losses = SumForward.apply(z.exp().sum(dim=1)).log() - at_target
    return (losses * (targets >= 0)).mean()


@wrong("6.4", names="gathers-the-logits")
def gathers_everything(logits, targets):
    rank, n = _place()
    everyone = [torch.empty_like(logits) for _ in range(n)]
    dist.all_gather(everyone, logits.detach())
    everyone[rank] = logits
    return cross_entropy(torch.cat(everyone, dim=1), targets)


@wrong("6.4", names="cut-off")
def clamps_at_80(logits, targets):
    z = logits.clamp(-80, 80)
    total = SumForward.apply(z.exp().sum(dim=1))
    return _mean(total.log() - SumForward.apply(_at_target(z, targets)), targets)


@wrong("6.4", names="padding-counted")
def makes_a_class_of_the_padding(logits, targets):
    rank, n = _place()
    z = logits - _highest(logits).unsqueeze(1)
    hot = nn.functional.one_hot(targets, n * logits.shape[1]).chunk(n, dim=1)[rank]
    both = SumForward.apply(torch.stack([z.exp().sum(dim=1), (z * hot).sum(dim=1)]))
    return (both[0].log() - both[1]).mean()


@wrong("6.4", names="padding-counted")
def counts_from_the_end(logits, targets):
    n = dist.get_world_size()
    return sums_both_in_one_call(logits, targets % (n * logits.shape[1]))


@wrong("6.4", names="changes-the-logits")
def shifts_in_place(logits, targets):
    logits -= _highest(logits).unsqueeze(1)
    at_target = SumForward.apply(_at_target(logits, targets))
    return _mean(SumForward.apply(logits.exp().sum(dim=1)).log() - at_target, targets)


def _loss_with(logits, targets, at_target):
    """The right loss but for `at_target(z)`, the target's logit."""
    z = logits - _highest(logits).unsqueeze(1)
    return _mean(SumForward.apply(z.exp().sum(dim=1)).log() - at_target(z), targets)


@wrong("6.4", names="target-left-out")
def takes_the_largest_of_the_targets_logits(logits, targets):
    """The others' zeros are the largest."""

    def at_target(z):
        own = _at_target(z, targets)
        dist.all_reduce(own.data, op=dist.ReduceOp.MAX)
        return own

    return _loss_with(logits, targets, at_target)


@wrong("6.4", names="target-averaged")
def averages_the_targets_logit(logits, targets):
    n = dist.get_world_size()
    return _loss_with(logits, targets, lambda z: SumForward.apply(_at_target(z, targets)) / n)


@wrong("6.4", names="class-0-left-out")
def takes_class_0_for_padding(logits, targets):
    z = logits - _highest(logits).unsqueeze(1)
    total = SumForward.apply(z.exp().sum(dim=1)).log()
    return (total - SumForward.apply(_at_target(z, targets)))[targets > 0].mean()


@wrong("6.4", names="edge-classes")
def leaves_its_last_class_out(logits, targets):
    def at_target(z):
        share = z.shape[1]
        column = targets - dist.get_rank() * share
        here = (column >= 0) & (column < share - 1)
        picked = z.gather(1, column.clamp(0, share - 1).unsqueeze(1)).squeeze(1)
        return SumForward.apply(picked.where(here, 0.0))

    return _loss_with(logits, targets, at_target)


@wrong("6.4", names="own-tokens-only")
def lets_only_its_own_tokens_learn(logits, targets):
    share = logits.shape[1]
    own = (targets // share == dist.get_rank()).unsqueeze(1)
    return sums_both_in_one_call(torch.where(own, logits, logits.detach()), targets)


class _EndOfTheGraph(_Softmax):
    @staticmethod
    def backward(ctx, gradient):
        return _Softmax.backward(ctx, 1.0)


@wrong("6.4", names="upstream-ignored")
def takes_the_loss_for_the_end(logits, targets):
    return _EndOfTheGraph.apply(logits, targets)


@wrong("6.4", names="changes-the-targets")
def makes_zeros_of_the_padding(logits, targets):
    counts = targets >= 0
    targets[~counts] = 0
    z = logits - _highest(logits).unsqueeze(1)
    total = SumForward.apply(z.exp().sum(dim=1)).log()
    return (total - SumForward.apply(_at_target(z, targets)))[counts].mean()


@right("6.4")
def sums_in_double_precision(logits, targets):
    """Twice the bytes, and as many numbers."""
    z = (logits - _highest(logits).unsqueeze(1)).double()
    both = torch.stack([z.exp().sum(dim=1), _at_target(z, targets)])
    total, at_target = SumForward.apply(both)
    return _mean(total.log() - at_target, targets).to(logits.dtype)


@wrong("6.4", names="one-max-for-all")
def subtracts_the_largest_of_all_tokens(logits, targets):
    highest = logits.detach().max()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    z = logits - highest
    total = SumForward.apply(z.exp().sum(dim=1)).log()
    return _mean(total - SumForward.apply(_at_target(z, targets)), targets)


# ---- 6.5 SequenceParallelNorm --------------------------------------------------------------------


def _gathered(y):
    everyone = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, y.detach().contiguous())
    return everyone


class _Norm(nn.Module):
    """A right answer with one thing wrong in each subclass."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def copies(self):
        return SumBackward.apply(self.norm.weight), SumBackward.apply(self.norm.bias)

    def own_tokens(self, x):
        return layer_norm(x, self.norm.normalized_shape, *self.copies(), self.norm.eps)

    def gather(self, y):
        return GatherSequence.apply(y)

    def forward(self, x):
        return self.gather(self.own_tokens(x))


@right("6.5")
class HooksTheParameters(_Norm):
    def __init__(self, norm):
        super().__init__(norm)
        for parameter in norm.parameters():
            if parameter.requires_grad:
                parameter.register_hook(_summed_in_place)

    def copies(self):
        return self.norm.weight, self.norm.bias


@right("6.5")
class NormalisesByHand(_Norm):
    def own_tokens(self, x):
        weight, bias = self.copies()
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)
        return centred * (variance + self.norm.eps).rsqrt() * weight + bias


@right("6.5")
class SumsAndSlices(_Norm):
    """A gather whose backward is an all-reduce and a slice: more bytes, the same gradient."""

    def gather(self, y):
        rank, _ = _place()
        everyone = _gathered(y)
        everyone[rank] = y
        return SumBackward.apply(torch.cat(everyone, dim=1))


@wrong("6.5", names="parameters-differ")
class MakesItsOwnNorm(_Norm):
    def __init__(self, norm):
        super().__init__(norm)
        self.weight = nn.Parameter(norm.weight.detach().clone())


@wrong("6.5", names="not-gathered")
class DoesNotGather(_Norm):
    def gather(self, y):
        return y


@wrong("6.5", names="gathered-along-batch")
class GathersAlongTheBatch(_Norm):
    def gather(self, y):
        rank, _ = _place()
        everyone = _gathered(y)
        everyone[rank] = y
        return torch.cat(everyone)


@wrong("6.5", names="cuts-the-graph")
class GathersOutsideAutograd(_Norm):
    def gather(self, y):
        return torch.cat(_gathered(y), dim=1)


@wrong("6.5", names="slice-backward")
class KeepsItsOwnStretch(_Norm):
    def gather(self, y):
        rank, _ = _place()
        everyone = _gathered(y)
        everyone[rank] = y
        return torch.cat(everyone, dim=1)


@wrong("6.5", names="mean-backward")
class AveragesTheSlices(KeepsItsOwnStretch):
    def gather(self, y):
        return MeanBackward.apply(super().gather(y))


@wrong("6.5", names="sums-twice")
class SumsTheGathered(_Norm):
    def gather(self, y):
        return SumBackward.apply(GatherSequence.apply(y))


@wrong("6.5", names="sums-twice")
class SumsBeforeItGathers(_Norm):
    def gather(self, y):
        return GatherSequence.apply(SumBackward.apply(y))


@wrong("6.5", names="sums-twice")
class SumsTheTokens(_Norm):
    def forward(self, x):
        return super().forward(SumBackward.apply(x))


@wrong("6.5", names="norm-not-used")
class BeginsWithANewNorm(_Norm):
    def __init__(self, norm):
        super().__init__(norm)
        self.norm = nn.LayerNorm(norm.normalized_shape, eps=norm.eps, device=device())


@wrong("6.5", names="not-every-rank")
class GathersOnRank0(_Norm):
    def gather(self, y):
        return GatherSequence.apply(y) if dist.get_rank() == 0 else y


@wrong("6.5", names="two-ranks")
class JoinsTwoStretches(_Norm):
    def gather(self, y):
        stretches = GatherSequence.apply(y).chunk(dist.get_world_size(), dim=1)
        return torch.cat([stretches[0], stretches[-1]], dim=1)


@wrong("6.5", names="other-eps")
class ForgetsEps(_Norm):
    def own_tokens(self, x):
        return layer_norm(x, self.norm.normalized_shape, *self.copies())


@wrong("6.5", names="pair-swapped")
class SumsTheParameters(_Norm):
    def copies(self):
        return SumForward.apply(self.norm.weight), SumForward.apply(self.norm.bias)


@wrong("6.5", names="parameter-gradients-local")
class LetsTheCopiesDrift(_Norm):
    def copies(self):
        return self.norm.weight, self.norm.bias


@wrong("6.5", names="parameter-gradients-mean")
class AveragesParameterGradients(_Norm):
    def copies(self):
        return MeanBackward.apply(self.norm.weight), MeanBackward.apply(self.norm.bias)


@wrong("6.5", names="summed-again")
class SumsWhatHasAccumulated(HooksTheParameters):
    def __init__(self, norm):
        _Norm.__init__(self, norm)
        for parameter in norm.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))


@wrong("6.5", names="frozen-norm")
class HooksFrozenParameters(HooksTheParameters):
    def __init__(self, norm):
        _Norm.__init__(self, norm)
        for parameter in norm.parameters():
            parameter.register_hook(_summed_in_place)


@wrong("6.5", names="norms-the-whole")
class GathersFirst(_Norm):
    def forward(self, x):
        return self.own_tokens(self.gather(x))


@wrong("6.5", names="norm-copied")
class CopiesTheNorm(_Norm):
    def __init__(self, norm):
        super().__init__(copy.deepcopy(norm))


@wrong("6.5", names="own-formula")
class TakesTheUnbiasedVariance(_Norm):
    def own_tokens(self, x):
        weight, bias = self.copies()
        centred = x - x.mean(dim=-1, keepdim=True)
        return centred / (x.var(dim=-1, keepdim=True) + self.norm.eps).sqrt() * weight + bias


@wrong("6.5", names="own-formula")
class AddsEpsOutsideTheRoot(_Norm):
    def own_tokens(self, x):
        weight, bias = self.copies()
        centred = x - x.mean(dim=-1, keepdim=True)
        deviation = centred.square().mean(dim=-1, keepdim=True).sqrt()
        return centred / (deviation + self.norm.eps) * weight + bias


@wrong("6.5", names="gathered-along-batch")
class ViewsTheBatchAsASequence(_Norm):
    """Right for a batch of one."""

    def gather(self, y):
        rank, _ = _place()
        everyone = _gathered(y)
        everyone[rank] = y
        return SumBackward.apply(torch.cat(everyone).view(y.shape[0], -1, y.shape[2]))


@wrong("6.5", names="summed-again")
class HooksInEveryForward(_Norm):
    """The hooks of the first pass are still there in the second."""

    def own_tokens(self, x):
        for parameter in self.norm.parameters():
            if parameter.requires_grad:
                parameter.register_hook(_summed_in_place)
        return self.norm(x)


@right("6.5")
class CallsTheNormWithCopies(_Norm):
    def own_tokens(self, x):
        copies = {name: SumBackward.apply(p) for name, p in self.norm.named_parameters()}
        return torch.func.functional_call(self.norm, copies, (x,))


# ---- 6.6 clip_gradient_norm ----------------------------------------------------------------------


def _gradients(parameters):
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _sum_of_squares(parameters):
    squares = [gradient.square().sum() for gradient in _gradients(parameters)]
    return torch.stack(squares).sum() if squares else torch.zeros((), device=device())


def _over_ranks(number):
    total = number.clone()
    dist.all_reduce(total)
    return total


def _global_norm(sharded, replicated):
    return (_over_ranks(_sum_of_squares(sharded)) + _sum_of_squares(replicated)).sqrt().item()


def _scale(parameters, factor):
    for gradient in _gradients(parameters):
        gradient *= factor


def _clip(parameters, norm, max_norm):
    if norm > max_norm:
        _scale(parameters, max_norm / norm)


@right("6.6")
def divides_replicated_squares(sharded, replicated, max_norm):
    squares = _sum_of_squares(sharded) + _sum_of_squares(replicated) / dist.get_world_size()
    norm = _over_ranks(squares).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@right("6.6")
def scales_as_pytorch_does(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    factor = min(1.0, max_norm / (norm + 1e-6))
    for parameter in sharded + replicated:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    return norm


@wrong("6.6", names="replaces-gradients")
def makes_new_gradients(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    for parameter in sharded + replicated:
        if parameter.grad is not None and norm > max_norm:
            parameter.grad = parameter.grad * (max_norm / norm)
    return norm


@wrong("6.6", names="not-every-rank")
def returns_where_there_is_nothing(sharded, replicated, max_norm):
    if not _gradients(sharded + replicated):
        return 0.0
    return divides_replicated_squares(sharded, replicated, max_norm)


@wrong("6.6", names="norms-added")
def adds_two_norms(sharded, replicated, max_norm):
    norm = _over_ranks(_sum_of_squares(sharded)).sqrt() + _sum_of_squares(replicated).sqrt()
    _clip(sharded + replicated, norm.item(), max_norm)
    return norm.item()


@wrong("6.6", names="norms-added")
def adds_all_norms_of_all_ranks(sharded, replicated, max_norm):
    norms = [gradient.norm() for gradient in _gradients(sharded + replicated)]
    norm = _over_ranks(sum(norms, torch.zeros((), device=device()))).item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="half-precision")
def sums_in_half_precision(sharded, replicated, max_norm):
    squares = _over_ranks(_sum_of_squares(sharded).half()) + _sum_of_squares(replicated).half()
    norm = squares.sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="not-a-number-hidden")
def makes_zero_of_nan(sharded, replicated, max_norm):
    norm = float(torch.tensor(_global_norm(sharded, replicated)).nan_to_num())
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="local-norm")
def calls_pytorch(sharded, replicated, max_norm):
    return nn.utils.clip_grad_norm_(sharded + replicated, max_norm).item()


@wrong("6.6", names="replicated-per-rank")
def sums_all_over_ranks(sharded, replicated, max_norm):
    norm = _over_ranks(_sum_of_squares(sharded + replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="replicated-left-out")
def forgets_the_replicated(sharded, replicated, max_norm):
    norm = _over_ranks(_sum_of_squares(sharded)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="largest-norm")
def takes_the_largest_norm(sharded, replicated, max_norm):
    norm = _sum_of_squares(sharded + replicated).sqrt()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    _clip(sharded + replicated, norm.item(), max_norm)
    return norm.item()


@wrong("6.6", names="one-rank-only")
def reduces_to_rank_0(sharded, replicated, max_norm):
    squares = _sum_of_squares(sharded)
    dist.reduce(squares, dst=0)
    norm = (squares + _sum_of_squares(replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="two-ranks")
def halves_the_replicated_squares(sharded, replicated, max_norm):
    squares = _sum_of_squares(sharded) + _sum_of_squares(replicated) / 2
    norm = _over_ranks(squares).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="sum-of-nothing")
def sums_with_python(sharded, replicated, max_norm):
    squares = sum(gradient.square().sum() for gradient in _gradients(sharded))
    dist.all_reduce(squares)
    norm = (squares + _sum_of_squares(replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="sum-of-nothing")
def stacks_norms(sharded, replicated, max_norm):
    squares = torch.stack([g.norm() for g in _gradients(sharded)]).square().sum()
    dist.all_reduce(squares)
    norm = (squares + _sum_of_squares(replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="norms-added")
def adds_the_ranks_norms(sharded, replicated, max_norm):
    norm = _over_ranks(_sum_of_squares(sharded + replicated).sqrt()).item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="norms-added")
def adds_the_parameters_norms(sharded, replicated, max_norm):
    own = sum(
        (gradient.norm() for gradient in _gradients(sharded)), torch.zeros((), device=device())
    )
    norm = (_over_ranks(own) + sum(gradient.norm() for gradient in _gradients(replicated))).item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="not-rooted")
def forgets_the_root(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated) ** 2
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="mean-of-squares")
def averages_squares(sharded, replicated, max_norm):
    own = _sum_of_squares(sharded) + _sum_of_squares(replicated)
    norm = (_over_ranks(own) / dist.get_world_size()).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="clipped-norm")
def returns_what_remains(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    _clip(sharded + replicated, norm, max_norm)
    return min(norm, max_norm)


@wrong("6.6", names="not-scaled")
def scales_copies_of_the_gradients(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    for gradient in _gradients(sharded + replicated):
        gradient = gradient * min(1.0, max_norm / norm)
    return norm


@wrong("6.6", names="each-value-clamped")
def clamps_each_value(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    if norm > max_norm:
        for gradient in _gradients(sharded + replicated):
            gradient.clamp_(-max_norm, max_norm)
    return norm


@wrong("6.6", names="local-factor")
def scales_by_its_own_norm(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    nn.utils.clip_grad_norm_(sharded + replicated, max_norm)
    return norm


@wrong("6.6", names="replicated-not-scaled")
def scales_shards_only(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    _clip(sharded, norm, max_norm)
    return norm


@wrong("6.6", names="scaled-to-one")
def divides_by_the_norm(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    if norm > max_norm:
        _scale(sharded + replicated, 1 / norm)
    return norm


@wrong("6.6", names="upside-down")
def multiplies_by_the_inverse(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    if norm > max_norm:
        _scale(sharded + replicated, norm / max_norm)
    return norm


@wrong("6.6", names="always-scaled")
def scales_in_any_case(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    _scale(sharded + replicated, max_norm / norm)
    return norm


@wrong("6.6", names="parameters-changed")
@torch.no_grad()
def scales_the_parameters(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    for parameter in sharded + replicated:
        parameter *= min(1.0, max_norm / norm)
    return norm


@wrong("6.6", names="none-gradient")
def expects_gradients_everywhere(sharded, replicated, max_norm):
    squares = torch.zeros((), device=device())
    for parameter in sharded:
        squares += parameter.grad.square().sum()
    norm = (_over_ranks(squares) + _sum_of_squares(replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="zeros-for-none")
def makes_up_zeros(sharded, replicated, max_norm):
    for parameter in sharded + replicated:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return divides_replicated_squares(sharded, replicated, max_norm)


@wrong("6.6", names="not-every-rank")
def reduces_each_parameter(sharded, replicated, max_norm):
    squares = _sum_of_squares(replicated)
    for gradient in _gradients(sharded):
        squares = squares + _over_ranks(gradient.square().sum())
    norm = squares.sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="not-every-rank")
def reduces_if_it_has_gradients(sharded, replicated, max_norm):
    squares = _sum_of_squares(sharded)
    if _gradients(sharded):
        squares = _over_ranks(squares)
    norm = (squares + _sum_of_squares(replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@wrong("6.6", names="zero-norm")
def divides_by_zero(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    _scale(sharded + replicated, min(1.0, max_norm / norm))
    return norm


@wrong("6.6", names="shards-not-scaled")
def scales_copies_only(sharded, replicated, max_norm):
    norm = _global_norm(sharded, replicated)
    _clip(replicated, norm, max_norm)
    return norm


@wrong("6.6", names="no-float")
def returns_a_tensor(sharded, replicated, max_norm):
    return torch.tensor(divides_replicated_squares(sharded, replicated, max_norm))


@wrong("6.6", names="needs-contiguous")
def views_each_gradient_as_a_vector(sharded, replicated, max_norm):
    def squares(parameters):
        flat = [gradient.view(-1) for gradient in _gradients(parameters)]
        return sum((v.dot(v) for v in flat), torch.zeros((), device=device()))

    norm = (_over_ranks(squares(sharded)) + squares(replicated)).sqrt().item()
    _clip(sharded + replicated, norm, max_norm)
    return norm


@right("6.6")
def takes_pytorchs_total_norm(sharded, replicated, max_norm):
    own, copies = (nn.utils.get_total_norm(_gradients(p)) for p in (sharded, replicated))
    squares = _over_ranks(own.square().to(device()))
    norm = torch.hypot(squares.sqrt(), copies.to(device()))
    nn.utils.clip_grads_with_norm_([*sharded, *replicated], max_norm, norm)
    return norm.item()
