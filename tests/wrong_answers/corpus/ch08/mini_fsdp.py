"""Rarer wrong answers to 8.4, `MiniFSDP`."""

import torch
import torch.distributed as dist

from course_exercises.authoring import load_answer
from tests.wrong_answers import rarer
from tests.wrong_answers.ch08.mini_fsdp import OtherShard, Reducing

MiniFSDP = load_answer("8.4")


@rarer("8.4")
class KeepsAView(OtherShard):
    def other(self, whole, rank, ranks):
        return whole.flatten().view(ranks, -1)[rank]


@rarer("8.4")
class ReplacesTheGradient(Reducing):
    def take(self, kept, mean):
        kept.grad = mean


@rarer("8.4")
class AddsBeforeItCasts(Reducing):
    def prepared(self, gradient, weight):
        return gradient


@rarer("8.4")
class ReducesInBackward(Reducing):
    def reduce(self, weight, gradient):
        pieces = weight.layout.shards(weight.layout.flatten([gradient]))
        total = torch.empty_like(pieces[0])
        dist.reduce_scatter(total, pieces, group=self.reductions)
        return None, total


@rarer("8.4")
class NeverFreesFrozenOnes(MiniFSDP):
    def _prepare_backward(self, calls, index, gradients):
        super()._prepare_backward(calls[: index + 1], index, gradients)


@rarer("8.4")
class FreesTheFollowingOnly(Reducing):
    """The first layer's matrix stays until its next forward."""

    def release(self, weight):
        pass

    def _before_forward(self, own, layer, inputs, keywords):
        self._free(own.weights.values())
        return super()._before_forward(own, layer, inputs, keywords)

    def finish_gradient_synchronization(self):
        self._finish_reductions()
        self.calls = []


@rarer("8.4")
class FreesWhatItHasPrefetched(MiniFSDP):
    """Where a tied matrix is used by the calls before and after, it has just been gathered."""

    def _prepare_backward(self, calls, index, gradients):
        for weights, _ in calls[index + 2 : index + 3]:
            self._free(weights)
        super()._prepare_backward(calls, index, gradients)


@rarer("8.4")
class LeavesTheWholeInTheLayer(MiniFSDP):
    def _after_forward(self, own, layer, inputs, output):
        super()._after_forward(own, layer, inputs, output)
        for name, weight in own.weights.items():
            vars(layer)[name] = weight.whole


@rarer("8.4")
class ForgetsTheLastElements(MiniFSDP):
    """As if a shard had elements // n elements: right wherever the sizes divide."""

    def _weight(self, parameter):
        rest = parameter.numel() % dist.get_world_size()
        if parameter.dim() > 1 and rest:
            parameter.data.flatten()[-rest:] = 0.0
        return super()._weight(parameter)


@rarer("8.4")
class TrainsEverything(MiniFSDP):
    def _weight(self, parameter):
        return super()._weight(parameter.requires_grad_())


@rarer("8.4")
class ExpectsEveryGradient(MiniFSDP):
    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for kept in self.module.parameters():
            if kept.requires_grad:
                kept.grad = kept.grad.contiguous()


@rarer("8.4")
class KeepsShardsInFloat32(MiniFSDP):
    def _weight(self, parameter):
        weight = super()._weight(parameter)
        weight.kept.data = weight.kept.data.float()
        return weight


@rarer("8.4")
class TellsTheShapesOfShards(MiniFSDP):
    @property
    def shapes(self):
        return {name: p.shape for name, p in self.module.named_parameters()}

    @shapes.setter
    def shapes(self, whole):
        pass


@rarer("8.4")
class CastsEveryTensor(MiniFSDP):
    def _cast(self, value):
        return (
            value.to(self.compute_dtype) if self.compute_dtype and torch.is_tensor(value) else value
        )


@rarer("8.4")
class CastsNoKeywords(MiniFSDP):
    def _before_forward(self, own, layer, inputs, keywords):
        inputs, _ = super()._before_forward(own, layer, inputs, keywords)
        return inputs, keywords


@rarer("8.4")
class HandsOutItsVectors(MiniFSDP):
    def full_parameters(self):
        full, own = super().full_parameters(), dict(self.module.named_parameters())
        return {n: own[n].detach() if p.dim() == 1 else p for n, p in full.items()}
