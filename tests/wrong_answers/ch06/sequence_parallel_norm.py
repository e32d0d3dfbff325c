"""Answers to 6.5, `SequenceParallelNorm`: wrong in a plausible way, or right in another."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import layer_norm

from course_exercises.authoring import load_code
from course_utils.hardware import device
from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch06.shared import (
    MeanBackward,
    SumBackward,
    SumForward,
    place,
    summed_in_place,
)

GatherSequence = load_code(6, "GatherSequence")


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
                parameter.register_hook(summed_in_place)

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
        rank, _ = place()
        everyone = _gathered(y)
        everyone[rank] = y
        return SumBackward.apply(torch.cat(everyone, dim=1))


@wrong("6.5", names="own-norm")
class MakesItsOwnNorm(_Norm):
    def __init__(self, norm):
        super().__init__(norm)
        self.weight = nn.Parameter(norm.weight.detach().clone())


@wrong("6.5", names="unchanged")
class DoesNotGather(_Norm):
    def gather(self, y):
        return y


@wrong("6.5", names="gathered-along-batch")
class GathersAlongTheBatch(_Norm):
    def gather(self, y):
        rank, _ = place()
        everyone = _gathered(y)
        everyone[rank] = y
        return torch.cat(everyone)


@wrong("6.5", names="cut-from-the-graph")
class GathersOutsideAutograd(_Norm):
    def gather(self, y):
        return torch.cat(_gathered(y), dim=1)


@wrong("6.5", names="gathers-backward")
class KeepsItsOwnStretch(_Norm):
    def gather(self, y):
        rank, _ = place()
        everyone = _gathered(y)
        everyone[rank] = y
        return torch.cat(everyone, dim=1)


@wrong("6.5", names="gathers-backward")
class SumsTheTokens(_Norm):
    def forward(self, x):
        return super().forward(SumBackward.apply(x))


@wrong("6.5", names="other-norm")
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


@wrong("6.5", names="other-norm")
class ForgetsEps(_Norm):
    def own_tokens(self, x):
        return layer_norm(x, self.norm.normalized_shape, *self.copies())


@wrong("6.5", names="summed-again")
class SumsTheParameters(_Norm):
    def copies(self):
        return SumForward.apply(self.norm.weight), SumForward.apply(self.norm.bias)


@wrong("6.5", names="norm-gradients")
class LetsTheCopiesDrift(_Norm):
    def copies(self):
        return self.norm.weight, self.norm.bias


@wrong("6.5", names="mean-not-sum")
class AveragesParameterGradients(_Norm):
    def copies(self):
        return MeanBackward.apply(self.norm.weight), MeanBackward.apply(self.norm.bias)


@wrong("6.5", names="sums-grad-again")
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
            parameter.register_hook(summed_in_place)


@wrong("6.5", names="norms-the-whole")
class GathersFirst(_Norm):
    def forward(self, x):
        return self.own_tokens(self.gather(x))


@wrong("6.5", names="own-norm")
class CopiesTheNorm(_Norm):
    def __init__(self, norm):
        super().__init__(copy.deepcopy(norm))


@wrong("6.5", names="other-norm")
class TakesTheUnbiasedVariance(_Norm):
    def own_tokens(self, x):
        weight, bias = self.copies()
        centred = x - x.mean(dim=-1, keepdim=True)
        return centred / (x.var(dim=-1, keepdim=True) + self.norm.eps).sqrt() * weight + bias


@right("6.5")
class CallsTheNormWithCopies(_Norm):
    def own_tokens(self, x):
        copies = {name: SumBackward.apply(p) for name, p in self.norm.named_parameters()}
        return torch.func.functional_call(self.norm, copies, (x,))
