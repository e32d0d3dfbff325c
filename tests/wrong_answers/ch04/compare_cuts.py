"""Answers to 4.5, `compare_cuts`: wrong in a plausible way, or right in another."""

from itertools import pairwise

import torch
from torch import nn

from course_utils.trace import kept_for_backward
from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch04.balanced_cuts import cuts_at_the_best_last_stage


class Comparison:
    """Right, but for what its children replace."""

    def __call__(self, layers, inputs, seconds, stages, cut):
        self.layers, self.inputs, self.seconds, self.stages = layers, inputs, seconds, stages
        return {
            "equal layers": self.row(self.equal_layers()),
            "equal parameters": self.row(cut([self.size(layer) for layer in layers], stages)),
            "profiled time": self.row(cut(seconds, stages)),
        }

    def equal_layers(self):
        parts = torch.arange(len(self.layers)).tensor_split(self.stages)
        return [int(part[0]) for part in parts[1:]]

    def size(self, layer):
        return sum(p.numel() for p in layer.parameters())

    def row(self, cuts):
        spans = list(pairwise([0, *cuts, len(self.layers)]))
        times = [sum(self.seconds[a:b]) for a, b in spans]
        return {
            "cuts": list(cuts),
            "memory": self.memory([self.layers[a:b] for a, b in spans]),
            "slowest": self.slowest(times),
            "idle": self.idle(times),
        }

    def slowest(self, times):
        return max(times)

    def idle(self, times):
        return sum(max(times) - t for t in times) / (len(times) * max(times))

    def memory(self, parts):
        result, arriving = [], self.inputs
        for part in parts:
            with kept_for_backward(part) as kept:
                outputs = part(arriving)
            result.append(kept.bytes + self.held(part))
            arriving = self.over_the_cut(outputs)
        return result

    def over_the_cut(self, outputs):
        return outputs.detach().requires_grad_()

    def held(self, part):
        tensors = [*part.parameters(), *part.buffers()]
        return sum(map(self.bytes, tensors)) + sum(map(self.gradient, part.parameters()))

    def bytes(self, tensor):
        return tensor.numel() * tensor.element_size()

    def gradient(self, parameter):
        return self.bytes(parameter) if parameter.requires_grad else 0


def as_function(kind):
    def compare(layers, inputs, seconds, stages, cut):
        return kind()(layers, inputs, seconds, stages, cut)

    compare.__name__ = kind.__name__
    return compare


@right("4.5")
@as_function
class MeasuresStageByStage(Comparison):
    pass


@wrong("4.5", names="equal-layers")
@as_function
class RestToTheLastStage(Comparison):
    def equal_layers(self):
        size = len(self.layers) // self.stages
        return [size * stage for stage in range(1, self.stages)]


@wrong("4.5", names="cut-asked-otherwise")
@as_function
class CountsWhatLearns(Comparison):
    def size(self, layer):
        return sum(p.numel() for p in layer.parameters() if p.requires_grad)


@wrong("4.5", names="cut-asked-otherwise")
@as_function
class CutsByItself(Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        return super().__call__(layers, inputs, seconds, stages, cuts_at_the_best_last_stage)


@wrong("4.5", names="slowest")
@as_function
class AveragesTheStages(Comparison):
    def slowest(self, times):
        return sum(times) / len(times)


@wrong("4.5", names="idle-one-batch")
@as_function
class LetsOneBatchThrough(Comparison):
    def idle(self, times):
        return 1 - 1 / self.stages


@wrong("4.5", names="idle")
@as_function
class ComparesFastestWithSlowest(Comparison):
    def idle(self, times):
        return 1 - min(times) / max(times)


@wrong("4.5", names="rounded-down")
@as_function
class RoundsTheIdleShare(Comparison):
    def idle(self, times):
        return round(super().idle(times), 2)


@wrong("4.5", names="gradients")
@as_function
class ForgetsTheGradients(Comparison):
    def gradient(self, parameter):
        return 0


@wrong("4.5", names="kept")
@as_function
class AsksLayerByLayer(Comparison):
    def memory(self, parts):
        result, arriving = [], self.inputs
        for part in parts:
            total = self.held(part)
            for layer in part:
                with kept_for_backward(layer) as kept:
                    arriving = layer(arriving)
                total += kept.bytes
            result.append(total)
            arriving = self.over_the_cut(arriving)
        return result


@wrong("4.5", names="over-the-cut")
@as_function
class HandsTheOutputOn(Comparison):
    """Right where something before the cut learns."""

    def over_the_cut(self, outputs):
        return outputs


@wrong("4.5", names="over-the-cut")
@as_function
class TreatsTheBatchLikeACut(Comparison):
    def memory(self, parts):
        if self.inputs.is_floating_point():
            self.inputs = self.inputs.detach().requires_grad_()
        return super().memory(parts)


@wrong("4.5", names="tied-twice")
@as_function
class WalksOverTheLayers(Comparison):
    def held(self, part):
        return sum(Comparison.held(self, layer) for layer in part)


@wrong("4.5", names="mode-changed")
@as_function
class MeasuresInEvaluationMode(Comparison):
    def memory(self, parts):
        return super().memory([part.eval() for part in parts])


@wrong("4.5", names="memory")
@as_function
class ForgetsTheBuffers(Comparison):
    def held(self, part):
        return sum(self.bytes(p) + self.gradient(p) for p in part.parameters())


@wrong("4.5", names="memory")
@as_function
class CountsFourBytesForParameters(Comparison):
    def bytes(self, tensor):
        return 4 * tensor.numel() if isinstance(tensor, nn.Parameter) else tensor.nbytes
