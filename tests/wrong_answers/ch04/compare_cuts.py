"""Answers to 4.5, `compare_cuts`: wrong in a plausible way, or right in another."""

from itertools import pairwise

import torch
from torch import nn

from course_utils.trace import kept_for_backward
from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch04.balanced_cuts import cuts_at_the_best_last_stage


class _Comparison:
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


def _as_function(kind):
    def compare(layers, inputs, seconds, stages, cut):
        return kind()(layers, inputs, seconds, stages, cut)

    compare.__name__ = kind.__name__
    return compare


def _right(kind):
    right("4.5")(_as_function(kind))
    return kind


def _wrong(names):
    def add(kind):
        wrong("4.5", names=names)(_as_function(kind))
        return kind

    return add


@_right
class MeasuresStageByStage(_Comparison):
    pass


@_wrong("rows-missing")
class LeavesOutARow(_Comparison):
    def __call__(self, *arguments):
        table = super().__call__(*arguments)
        del table["equal parameters"]
        return table


@_wrong("remainder-last")
class RestToTheLastStage(_Comparison):
    def equal_layers(self):
        size = len(self.layers) // self.stages
        return [size * stage for stage in range(1, self.stages)]


@_wrong("cut-of-ones")
class CutsEqualCosts(_Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        self.cuts = cut([1] * len(layers), stages)
        return super().__call__(layers, inputs, seconds, stages, cut)

    def equal_layers(self):
        return self.cuts


@_wrong("shares-rounded")
class RoundsTheShares(_Comparison):
    def equal_layers(self):
        return [round(i * len(self.layers) / self.stages) for i in range(1, self.stages)]


@_wrong("kept-by-layer")
class AsksLayerByLayer(_Comparison):
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


@_wrong("input-needs-gradient")
class HandsTheOutputOn(_Comparison):
    """Right where something before the cut learns."""

    def over_the_cut(self, outputs):
        return outputs


@_wrong("evaluation-mode")
class MeasuresInEvaluationMode(_Comparison):
    def memory(self, parts):
        return super().memory([part.eval() for part in parts])


@_wrong("evaluation-mode")
class MeasuresInEvaluationModeAndRestores(_Comparison):
    def memory(self, parts):
        result = super().memory([part.eval() for part in parts])
        self.layers.train()
        return result


@_wrong("four-bytes")
class CountsFourBytesForParameters(_Comparison):
    def bytes(self, tensor):
        return 4 * tensor.numel() if isinstance(tensor, nn.Parameter) else tensor.nbytes


@_wrong("same-cuts")
class ProfilesTheEqualLayersToo(_Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        table = super().__call__(layers, inputs, seconds, stages, cut)
        return dict.fromkeys(table, table["profiled time"])


@_wrong("trainable-only")
class CountsWhatLearns(_Comparison):
    def size(self, layer):
        return sum(p.numel() for p in layer.parameters() if p.requires_grad)


@_wrong("sum-not-slowest")
class AddsTheStages(_Comparison):
    def slowest(self, times):
        return sum(times)


@_wrong("mean-not-slowest")
class AveragesTheStages(_Comparison):
    def slowest(self, times):
        return sum(times) / len(times)


@_wrong("slowest-layer")
class LooksForTheSlowestLayer(_Comparison):
    def slowest(self, times):
        return max(self.seconds)


@_wrong("costs-not-seconds")
class BalancesAndReportsCosts(_Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        table = super().__call__(layers, inputs, seconds, stages, cut)
        costs = [1] * len(layers), [self.size(layer) for layer in layers], seconds
        for row, cost in zip(table.values(), costs):
            edges = pairwise([0, *row["cuts"], len(layers)])
            row["slowest"] = max(sum(cost[a:b]) for a, b in edges)
        return table


@_wrong("idle-one-batch")
class LetsOneBatchThrough(_Comparison):
    def idle(self, times):
        return 1 - 1 / self.stages


@_wrong("one-number")
class ReturnsEachStagesIdleShare(_Comparison):
    def idle(self, times):
        return [1 - t / max(times) for t in times]


@_wrong("one-number")
class ReturnsTheSecondsOfAllStages(_Comparison):
    def slowest(self, times):
        return times


@_wrong("idle-of-one-stage")
class ComparesFastestWithSlowest(_Comparison):
    def idle(self, times):
        return 1 - min(times) / max(times)


@_wrong("busy-not-idle")
class ReturnsTheBusyShare(_Comparison):
    def idle(self, times):
        return sum(times) / (len(times) * max(times))


@_wrong("idle-not-share")
class ReturnsIdleSeconds(_Comparison):
    def idle(self, times):
        return sum(max(times) - t for t in times)


@_wrong("list-of-stages")
class ReportsTheFullestStage(_Comparison):
    def memory(self, parts):
        return max(super().memory(parts))


@_wrong("gradients-forgotten")
class ForgetsTheGradients(_Comparison):
    def gradient(self, parameter):
        return 0


@_wrong("gradients-forgotten")
class CountsWhatBackwardAdds(_Comparison):
    def held(self, part):
        return sum(map(self.gradient, part.parameters())) + sum(map(self.bytes, part.buffers()))


@_wrong("activations-forgotten")
class ForgetsTheActivations(_Comparison):
    def memory(self, parts):
        return [self.held(part) for part in parts]


@_wrong("input-needs-gradient")
class DetachesAndLeavesIt(_Comparison):
    def over_the_cut(self, outputs):
        return outputs.detach()


@_wrong("first-input-leaf")
class TreatsTheBatchLikeACut(_Comparison):
    def memory(self, parts):
        if self.inputs.is_floating_point():
            self.inputs = self.inputs.detach().requires_grad_()
        return super().memory(parts)


@_wrong("whole-model")
class MeasuresTheWholeModel(_Comparison):
    def memory(self, parts):
        return super().memory([self.layers]) * self.stages


@_wrong("frozen-gradient")
class GivesEveryParameterAGradient(_Comparison):
    def gradient(self, parameter):
        return self.bytes(parameter)


@_wrong("buffers-forgotten")
class ForgetsTheBuffers(_Comparison):
    def held(self, part):
        return sum(self.bytes(p) + self.gradient(p) for p in part.parameters())


@_wrong("tied-twice")
class WalksOverTheLayers(_Comparison):
    def held(self, part):
        return sum(super(WalksOverTheLayers, self).held(layer) for layer in part)


@_wrong("four-bytes")
class AssumesFourBytes(_Comparison):
    def bytes(self, tensor):
        return 4 * tensor.numel()


@_wrong("ends-included")
class CutsAtBothEnds(_Comparison):
    def row(self, cuts):
        return super().row(cuts) | {"cuts": [0, *cuts, len(self.layers)]}


@_wrong("index-not-seconds")
class SaysWhichIsSlowest(_Comparison):
    def slowest(self, times):
        return times.index(max(times))


@_wrong("inputs-not-handed-on")
class FeedsTheBatchToEveryStage(_Comparison):
    def over_the_cut(self, outputs):
        return self.inputs


@_wrong("report-not-bytes")
class AddsTheReport(_Comparison):
    def memory(self, parts):
        with kept_for_backward(parts[0]) as kept:
            parts[0](self.inputs)
        return [kept + self.held(part) for part in parts]


@_wrong("first-input-leaf")
class RequiresGradientsOfEveryInput(_Comparison):
    def memory(self, parts):
        self.inputs = self.inputs.detach().requires_grad_()
        return super().memory(parts)


@_wrong("optimizer-counted")
class AddsAMomentum(_Comparison):
    def gradient(self, parameter):
        return 2 * super().gradient(parameter)


@_wrong("outputs-counted")
class AddsTheOutputs(_Comparison):
    def memory(self, parts):
        result, arriving = [], self.inputs
        for part in parts:
            [held] = super().memory([part])
            self.inputs = self.over_the_cut(part(self.inputs))
            result.append(held + self.bytes(self.inputs))
        self.inputs = arriving
        return result


@_wrong("bytes-not-numbers")
class BalancesBytes(_Comparison):
    def size(self, layer):
        return sum(p.nbytes for p in layer.parameters())


@_wrong("not-what-cut-returns")
class CountsTensors(_Comparison):
    def size(self, layer):
        return len(list(layer.parameters()))


@_wrong("not-what-cut-returns")
class CutsByItself(_Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        return super().__call__(layers, inputs, seconds, stages, cuts_at_the_best_last_stage)


@_wrong("rounded")
class RoundsTheIdleShare(_Comparison):
    def idle(self, times):
        return round(super().idle(times), 2)


@_wrong("training-mode")
class MeasuresInTrainingMode(_Comparison):
    def memory(self, parts):
        modes = {module: module.training for module in self.layers.modules()}
        result = super().memory([part.train() for part in parts])
        for module, training in modes.items():
            module.training = training
        return result
