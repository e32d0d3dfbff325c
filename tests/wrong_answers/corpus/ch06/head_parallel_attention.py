"""Rarer wrong answers to 6.3, `HeadParallelAttention`."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from course_exercises.authoring import load_code
from tests.wrong_answers import rarer
from tests.wrong_answers.ch06.head_parallel_attention import _Heads
from tests.wrong_answers.ch06.shared import must_divide, place, whole

cut_attention = load_code(6, "cut_attention")


@rarer("6.3")
class TakesTheLessonsFunction(nn.Module):
    def __init__(self, full):
        super().__init__()
        must_divide(full.kv_heads)
        self.inner = copy.deepcopy(full)
        cut_attention(self.inner)
        self.inner.kv_heads //= dist.get_world_size()

    def forward(self, x):
        return self.inner(x)


@rarer("6.3")
class DealsTheHeadsOut(_Heads):
    """Heads r, r + n, ..., in qkv and out alike."""

    def __init__(self, full):
        super().__init__(full)
        columns = self.dealt(full, full.out.weight.detach().T).T
        self.out_weight = nn.Parameter(columns.contiguous())

    def rows(self, full, tensor):
        return torch.cat([self.dealt(full, part) for part in self.parts(full, tensor)])

    def dealt(self, full, part):
        rank, n = place()
        return part.unflatten(0, (-1, full.head_width))[rank::n].flatten(0, 1).clone()


@rarer("6.3")
class SwapsKeysAndValues(_Heads):
    def split(self, qkv):
        q, k, v = super().split(qkv)
        return q, v, k


@rarer("6.3")
class FlattensWithoutTransposing(_Heads):
    def forward(self, x):
        y = self.mix(*self.split(self.project(x)))
        return self.leave(linear(y.reshape(*x.shape[:2], -1), self.out_weight))


@rarer("6.3")
class NeverTransposes(_Heads):
    def forward(self, x):
        q, k, v = (part.transpose(1, 2) for part in self.split(self.project(x)))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.leave(linear(y.flatten(2), self.out_weight))


@rarer("6.3")
class KeepsTheWholeOutput(_Heads):
    def __init__(self, full):
        super().__init__(full)
        self.out_weight = whole(full.out.weight)


@rarer("6.3")
class ForgetsTheFirstBias(_Heads):
    def rows(self, full, tensor):
        return super().rows(full, tensor if tensor.dim() > 1 else torch.zeros_like(tensor))


@rarer("6.3")
class RegroupsFullItself(_Heads):
    def rows(self, full, tensor):
        rank, n = place()
        rows = super().rows(full, tensor)
        tensor.chunk(n)[rank].copy_(rows)
        return rows


@rarer("6.3")
class SharesTheHeadsOutUnequally(_Heads):
    """The last ranks have no head of keys."""

    def check(self, full):
        pass


@rarer("6.3")
class DoesNotNameTheHeads(_Heads):
    def check(self, full):
        if full.kv_heads % dist.get_world_size():
            raise ValueError("the heads do not divide by the ranks")


@rarer("6.3")
class ComparesTheWidth(_Heads):
    def check(self, full):
        must_divide(full.out.in_features)


@rarer("6.3")
class GathersTheHeadsTerms(_Heads):
    def leave(self, y):
        rank, n = place()
        everyone = [torch.empty_like(y) for _ in range(n)]
        dist.all_gather(everyone, y.detach().contiguous())
        everyone[rank] = y
        return sum(everyone) + self.out_bias
