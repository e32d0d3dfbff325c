"""Answers to 6.3, `HeadParallelAttention`: wrong in a plausible way, or right in another."""

import copy
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

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


class _Heads(nn.Module):
    """A right answer with one thing wrong in each subclass; queries, keys, values cut each."""

    def __init__(self, full):
        super().__init__()
        must_divide(full.heads)
        self.heads = full.heads // dist.get_world_size()
        self.head_width = full.head_width
        self.weight, self.bias = self.rows(full.qkv.weight), self.rows(full.qkv.bias)
        self.out_weight = own(full.out.weight, dim=1)
        self.out_bias = whole(full.out.bias)

    def rows(self, tensor):
        rank, n = place()
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
        return own(tensor)


@wrong("6.3", names="bias-across-the-parts")
class CutsTheBiasInRuns(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.bias = own(full.qkv.bias)


@wrong("6.3", names="parts-inside-heads")
class ReadsHeadByHead(_Heads):
    def split(self, qkv):
        return qkv.unflatten(-1, (self.heads, 3, self.head_width)).unbind(dim=3)


@wrong("6.3", names="heads-first")
class TakesTheRowsHeadByHead(_Heads):
    def rows(self, tensor):
        by_head = tensor.detach().unflatten(0, (-1, 3, self.head_width))
        mine = by_head.chunk(dist.get_world_size())[dist.get_rank()]
        return nn.Parameter(mine.transpose(0, 1).flatten(0, 2).clone())


@wrong("6.3", names="other-heads")
class TakesTheFirstHeads(_Heads):
    def rows(self, tensor):
        parts = [part.chunk(dist.get_world_size())[0] for part in tensor.detach().chunk(3)]
        return nn.Parameter(torch.cat(parts))


@wrong("6.3", names="other-heads")
class DealsHeadsOut(_Heads):
    def rows(self, tensor):
        rank, n = place()
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
        rank, n = place()
        return part.unflatten(0, (-1, full.head_width))[rank::n].flatten(0, 1).clone()


@wrong("6.3", names="heads-in-another-order")
class CountsRanksFromTheEnd(_Heads):
    def __init__(self, full):
        super().__init__(full)
        rank, n = place()
        mine = n - 1 - rank
        self.out_weight = nn.Parameter(full.out.weight.detach().chunk(n, dim=1)[mine].clone())

    def rows(self, tensor):
        rank, n = place()
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
        self.out_weight = whole(full.out.weight)


@wrong("6.3", names="output-not-cut-to-match")
class CutsTheOutputByColumns(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.out_weight = own(full.out.weight)


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
        return summed_in_place(y) + self.out_bias


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
        return own(tensor)


@wrong("6.3", names="holds-too-much")
class SlicesInForward(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.qkv = full.qkv
        self.weight = self.bias = None

    def _parts(self, tensor):
        rank, n = place()
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
        rank, n = place()
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
        self.out_weight = own(full.out.weight, dim=1)
        self.out_bias = whole(full.out.bias)


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
        must_divide(full.out.in_features)
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


@wrong("6.3", names="full-changed")
class FreezesTheAttention(_Heads):
    def __init__(self, full):
        super().__init__(full.requires_grad_(False))


@wrong("6.3", names="kept-from-before")
class KeepsTheMask(_Heads):
    """That of the first call's length."""

    seen = None

    def mix(self, q, k, v):
        if self.seen is None:
            self.seen = torch.ones(
                q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device
            ).tril()
        return scaled_dot_product_attention(q, k, v, attn_mask=self.seen)


@wrong("6.3", names="other-dtype")
class MakesNewLinearLayers(_Heads):
    def __init__(self, full):
        super().__init__(full)
        for name in ("weight", "bias", "out_weight", "out_bias"):
            getattr(self, name).data = getattr(self, name).detach().float()


@wrong("6.3", names="shares-memory")
class TakesTheOutputsBias(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.out_bias = full.out.bias


@wrong("6.3", names="bias-lost")
class ForgetsTheFirstBias(_Heads):
    def rows(self, tensor):
        return super().rows(tensor if tensor.dim() > 1 else torch.zeros_like(tensor))


@wrong("6.3", names="bias-lost")
class ForgetsTheOutputsBias(_Heads):
    def leave(self, y):
        return SumForward.apply(y)


@wrong("6.3", names="not-waited")
class DoesNotWaitForTheHeads(_Heads):
    def leave(self, y):
        total = y.detach().clone()
        dist.all_reduce(total, async_op=True)
        return y + (total - y.detach()) + self.out_bias


@wrong("6.3", names="gathered-to-add")
class GathersTheHeadsTerms(_Heads):
    def leave(self, y):
        rank, n = place()
        everyone = [torch.empty_like(y) for _ in range(n)]
        dist.all_gather(everyone, y.detach().contiguous())
        everyone[rank] = y
        return sum(everyone) + self.out_bias


@right("6.3")
class AddsTheBiasOnRank0(_Heads):
    """And has it there alone."""

    def __init__(self, full):
        super().__init__(full)
        if dist.get_rank() > 0:
            del self.out_bias

    def leave(self, y):
        return SumForward.apply(y + self.out_bias if dist.get_rank() == 0 else y)
