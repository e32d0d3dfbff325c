"""Rarer wrong answers to 6.5, `SequenceParallelNorm`."""

import torch
from torch.nn.functional import layer_norm

from tests.wrong_answers import rarer
from tests.wrong_answers.ch06.sequence_parallel_norm import (
    GatherSequence,
    _gathered,
    _Norm,
)
from tests.wrong_answers.ch06.shared import SumBackward, place, summed_in_place


@rarer("6.5")
class ForgetsTheBias(_Norm):
    def own_tokens(self, x):
        return layer_norm(x, self.norm.normalized_shape, self.copies()[0], None, self.norm.eps)


@rarer("6.5")
class NormalisesAfterTheGather(_Norm):
    """And sums nothing."""

    def forward(self, x):
        return self.norm(GatherSequence.apply(x))


@rarer("6.5")
class SumsTheGathered(_Norm):
    def gather(self, y):
        return SumBackward.apply(GatherSequence.apply(y))


@rarer("6.5")
class AddsEpsOutsideTheRoot(_Norm):
    def own_tokens(self, x):
        weight, bias = self.copies()
        centred = x - x.mean(dim=-1, keepdim=True)
        deviation = centred.square().mean(dim=-1, keepdim=True).sqrt()
        return centred / (deviation + self.norm.eps) * weight + bias


@rarer("6.5")
class ViewsTheBatchAsASequence(_Norm):
    """Right for a batch of one."""

    def gather(self, y):
        rank, _ = place()
        everyone = _gathered(y)
        everyone[rank] = y
        return SumBackward.apply(torch.cat(everyone).view(y.shape[0], -1, y.shape[2]))


@rarer("6.5")
class HooksInEveryForward(_Norm):
    """The hooks of the first pass are still there in the second."""

    def own_tokens(self, x):
        for parameter in self.norm.parameters():
            if parameter.requires_grad:
                parameter.register_hook(summed_in_place)
        return self.norm(x)
