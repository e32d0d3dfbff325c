"""Answers to 6.3, `HeadParallelAttention`: wrong in a plausible way, or right in another."""

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
        self.check(full)
        n = dist.get_world_size()
        self.heads, self.kv_heads = full.heads // n, full.kv_heads // n
        self.head_width = full.head_width
        self.weight, self.bias = (
            nn.Parameter(self.rows(full, tensor.detach()).clone())
            for tensor in (full.qkv.weight, full.qkv.bias)
        )
        self.out_weight = own(full.out.weight, dim=1)
        self.out_bias = whole(full.out.bias)

    def check(self, full):
        must_divide(full.kv_heads)

    def rows(self, full, tensor):
        rank, n = place()
        return torch.cat([part.chunk(n)[rank] for part in self.parts(full, tensor)])

    def parts(self, full, tensor):
        sizes = [heads * full.head_width for heads in (full.heads, full.kv_heads, full.kv_heads)]
        return tensor.split(sizes)

    def enter(self, x):
        return SumBackward.apply(x)

    def leave(self, y):
        return SumForward.apply(y) + self.out_bias

    def project(self, x):
        return linear(self.enter(x), self.weight, self.bias)

    def split(self, qkv):
        """q, k, v, each (N, heads, T, head_width)."""
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        by_head = qkv.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        return by_head.split(sizes, dim=1)

    def mix(self, q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward(self, x):
        y = self.mix(*self.split(self.project(x))).transpose(1, 2).flatten(2)
        return self.leave(linear(y, self.out_weight))


@right("6.3")
class CutsEachPart(_Heads):
    pass


@right("6.3")
class ScoresByHand(_Heads):
    def mix(self, q, k, v):
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_width)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(later, -math.inf).softmax(dim=-1) @ v


@right("6.3")
class HasThreeLayers(_Heads):
    """Queries, keys and values by layers of their own, behind one entrance."""

    def __init__(self, full):
        super().__init__(full)
        sizes = [heads * self.head_width for heads in (self.heads, self.kv_heads, self.kv_heads)]
        self.weights, self.biases = (
            nn.ParameterList(part.clone() for part in tensor.detach().split(sizes))
            for tensor in (self.weight, self.bias)
        )
        del self.weight, self.bias

    def project(self, x):
        x = self.enter(x)
        parts = [linear(x, w, b) for w, b in zip(self.weights, self.biases, strict=True)]
        return torch.cat(parts, dim=-1)


@right("6.3")
class AddsTheBiasOnRank0(_Heads):
    """And has it there alone."""

    def __init__(self, full):
        super().__init__(full)
        if dist.get_rank() > 0:
            del self.out_bias

    def leave(self, y):
        return SumForward.apply(y + self.out_bias if dist.get_rank() == 0 else y)


@wrong("6.3", names="other-rows")
class CutsThirds(_Heads):
    """As the lesson's `part_of` does."""

    def rows(self, full, tensor):
        rank, n = place()
        return torch.cat([part.chunk(n)[rank] for part in tensor.chunk(3)])


@wrong("6.3", names="other-rows")
class TakesTheFirstRanksBias(_Heads):
    def rows(self, full, tensor):
        if tensor.dim() > 1:
            return super().rows(full, tensor)
        n = dist.get_world_size()
        return torch.cat([part.chunk(n)[0] for part in self.parts(full, tensor)])


@wrong("6.3", names="other-rows")
class CountsRanksFromTheEnd(_Heads):
    """Right results: in `out` too."""

    def __init__(self, full):
        super().__init__(full)
        rank, n = place()
        self.out_weight = whole(full.out.weight.chunk(n, dim=1)[n - 1 - rank])

    def rows(self, full, tensor):
        rank, n = place()
        return torch.cat([part.chunk(n)[n - 1 - rank] for part in self.parts(full, tensor)])


@wrong("6.3", names="laid-out")
class PutsHeadsInTheLastDimension(_Heads):
    def split(self, qkv):
        sizes = [heads * self.head_width for heads in (self.heads, self.kv_heads, self.kv_heads)]
        parts = (part.unflatten(-1, (self.head_width, -1)) for part in qkv.split(sizes, dim=-1))
        return [part.permute(0, 3, 1, 2) for part in parts]


@wrong("6.3", names="laid-out")
class RepeatsTheKeysInTurn(_Heads):
    """Head h with head h % kv_heads."""

    def mix(self, q, k, v):
        k, v = (t.repeat(1, self.heads // self.kv_heads, 1, 1) for t in (k, v))
        return super().mix(q, k, v)


@wrong("6.3", names="laid-out")
class CountsAllHeads(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.heads = full.heads


@wrong("6.3", names="mask")
class ForgetsTheMask(_Heads):
    def mix(self, q, k, v):
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)


@wrong("6.3", names="mask")
class HidesATokenFromItself(_Heads):
    def mix(self, q, k, v):
        t = q.shape[-2]
        seen = torch.ones(t, t, dtype=torch.bool, device=q.device).tril(-1)
        seen[0, 0] = True
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


@wrong("6.3", names="wrong-scale")
class ScalesByTheRanksWidth(_Heads):
    def mix(self, q, k, v):
        scale = 1 / math.sqrt(self.heads * self.head_width)
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)


@wrong("6.3", names="output-not-cut-to-match")
class CutsTheOutputByColumns(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.out_weight = own(full.out.weight)


@wrong("6.3", names="output-not-cut-to-match")
class TurnsTheOutputAround(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.out_weight = nn.Parameter(self.out_weight.detach().flip(1))


@wrong("6.3", names="bias-once")
class AddsTheBiasOncePerRank(_Heads):
    def leave(self, y):
        return SumForward.apply(y + self.out_bias)


@wrong("6.3", names="unchanged")
class KeepsItsOwnHeads(_Heads):
    def leave(self, y):
        return y + self.out_bias


@wrong("6.3", names="cut-from-the-graph")
class SumsHeadsOutsideAutograd(_Heads):
    def leave(self, y):
        return summed_in_place(y) + self.out_bias


@wrong("6.3", names="x-gradient")
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


@wrong("6.3", names="input-changed")
class FreezesTheAttention(_Heads):
    def __init__(self, full):
        super().__init__(full.requires_grad_(False))


@wrong("6.3", names="keeps-a-call")
class KeepsTheMask(_Heads):
    """That of the first call's length."""

    seen = None

    def mix(self, q, k, v):
        if self.seen is None:
            t = q.shape[-2]
            self.seen = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()
        return scaled_dot_product_attention(q, k, v, attn_mask=self.seen, enable_gqa=True)


@wrong("6.3", names="more-than-its-share")
class SlicesInForward(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.layer, self.of_heads = full.qkv, lambda tensor: self.rows(full, tensor)
        self.weight = self.bias = None

    def project(self, x):
        weight, bias = self.of_heads(self.layer.weight), self.of_heads(self.layer.bias)
        return linear(self.enter(x), weight, bias)


@wrong("6.3", names="more-than-its-share")
class KeepsTheAttention(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.source = {"full": full}


@wrong("6.3", names="more-than-its-share")
class TakesTheOutputsBias(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.out_bias = full.out.bias


@wrong("6.3", names="several-sums")
class EntersThreeTimes(HasThreeLayers):
    def project(self, x):
        pairs = zip(self.weights, self.biases, strict=True)
        return torch.cat([linear(self.enter(x), w, b) for w, b in pairs], dim=-1)


@wrong("6.3", names="not-every-rank")
class SumsHeadsOnRank0(_Heads):
    def leave(self, y):
        return SumForward.apply(y) + self.out_bias if dist.get_rank() == 0 else y + self.out_bias


@wrong("6.3", names="two-ranks")
class KnowsTwoHalves(_Heads):
    """Both halves of the heads, and so of the rows, but no third."""

    def rows(self, full, tensor):
        rank, n = place()
        return torch.cat([part.chunk(n)[min(rank, 1)] for part in self.parts(full, tensor)])


@wrong("6.3", names="other-error")
class ComparesTheHeadsOfQueries(_Heads):
    def check(self, full):
        must_divide(full.heads)


@wrong("6.3", names="other-dtype")
class MakesNewLinearLayers(_Heads):
    def __init__(self, full):
        super().__init__(full)
        for name in ("weight", "bias", "out_weight", "out_bias"):
            getattr(self, name).data = getattr(self, name).detach().float()


@wrong("6.3", names="not-waited")
class DoesNotWaitForTheHeads(_Heads):
    def leave(self, y):
        total = y.detach().clone()
        dist.all_reduce(total, async_op=True)
        return y + (total - y.detach()) + self.out_bias
