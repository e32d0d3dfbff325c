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


@right("4.5")
@_as_function
class MeasuresStageByStage(_Comparison):
    pass


@wrong("4.5", names="rows-missing")
@_as_function
class LeavesOutARow(_Comparison):
    def __call__(self, *arguments):
        table = super().__call__(*arguments)
        del table["equal parameters"]
        return table


@wrong("4.5", names="remainder-last")
@_as_function
class RestToTheLastStage(_Comparison):
    def equal_layers(self):
        size = len(self.layers) // self.stages
        return [size * stage for stage in range(1, self.stages)]


@wrong("4.5", names="remainder-last")
@_as_function
class RoundsThePartsUp(_Comparison):
    def equal_layers(self):
        size = -(-len(self.layers) // self.stages)
        return [size * stage for stage in range(1, self.stages)]


@wrong("4.5", names="cut-of-ones")
@_as_function
class CutsEqualCosts(_Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        self.cuts = cut([1] * len(layers), stages)
        return super().__call__(layers, inputs, seconds, stages, cut)

    def equal_layers(self):
        return self.cuts


@wrong("4.5", names="shares-rounded")
@_as_function
class RoundsTheShares(_Comparison):
    def equal_layers(self):
        return [round(i * len(self.layers) / self.stages) for i in range(1, self.stages)]


@wrong("4.5", names="kept-by-layer")
@_as_function
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


@wrong("4.5", names="input-needs-gradient")
@_as_function
class HandsTheOutputOn(_Comparison):
    """Right where something before the cut learns."""

    def over_the_cut(self, outputs):
        return outputs


@wrong("4.5", names="evaluation-mode")
@_as_function
class MeasuresInEvaluationMode(_Comparison):
    def memory(self, parts):
        return super().memory([part.eval() for part in parts])


@wrong("4.5", names="evaluation-mode")
@_as_function
class MeasuresInEvaluationModeAndRestores(_Comparison):
    def memory(self, parts):
        result = super().memory([part.eval() for part in parts])
        self.layers.train()
        return result


@wrong("4.5", names="four-bytes")
@_as_function
class CountsFourBytesForParameters(_Comparison):
    def bytes(self, tensor):
        return 4 * tensor.numel() if isinstance(tensor, nn.Parameter) else tensor.nbytes


@wrong("4.5", names="same-cuts")
@_as_function
class ProfilesTheEqualLayersToo(_Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        table = super().__call__(layers, inputs, seconds, stages, cut)
        return dict.fromkeys(table, table["profiled time"])


@wrong("4.5", names="trainable-only")
@_as_function
class CountsWhatLearns(_Comparison):
    def size(self, layer):
        return sum(p.numel() for p in layer.parameters() if p.requires_grad)


@wrong("4.5", names="sum-not-slowest")
@_as_function
class AddsTheStages(_Comparison):
    def slowest(self, times):
        return sum(times)


@wrong("4.5", names="mean-not-slowest")
@_as_function
class AveragesTheStages(_Comparison):
    def slowest(self, times):
        return sum(times) / len(times)


@wrong("4.5", names="slowest-layer")
@_as_function
class LooksForTheSlowestLayer(_Comparison):
    def slowest(self, times):
        return max(self.seconds)


@wrong("4.5", names="costs-not-seconds")
@_as_function
class BalancesAndReportsCosts(_Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        table = super().__call__(layers, inputs, seconds, stages, cut)
        costs = [1] * len(layers), [self.size(layer) for layer in layers], seconds
        for row, cost in zip(table.values(), costs):
            edges = pairwise([0, *row["cuts"], len(layers)])
            row["slowest"] = max(sum(cost[a:b]) for a, b in edges)
        return table


@wrong("4.5", names="idle-one-batch")
@_as_function
class LetsOneBatchThrough(_Comparison):
    def idle(self, times):
        return 1 - 1 / self.stages


@wrong("4.5", names="one-number")
@_as_function
class ReturnsEachStagesIdleShare(_Comparison):
    def idle(self, times):
        return [1 - t / max(times) for t in times]


@wrong("4.5", names="one-number")
@_as_function
class ReturnsTheSecondsOfAllStages(_Comparison):
    def slowest(self, times):
        return times


@wrong("4.5", names="idle-of-one-stage")
@_as_function
class ComparesFastestWithSlowest(_Comparison):
    def idle(self, times):
        return 1 - min(times) / max(times)


@wrong("4.5", names="busy-not-idle")
@_as_function
class ReturnsTheBusyShare(_Comparison):
    def idle(self, times):
        return sum(times) / (len(times) * max(times))


@wrong("4.5", names="idle-not-share")
@_as_function
class ReturnsIdleSeconds(_Comparison):
    def idle(self, times):
        return sum(max(times) - t for t in times)


@wrong("4.5", names="list-of-stages")
@_as_function
class ReportsTheFullestStage(_Comparison):
    def memory(self, parts):
        return max(super().memory(parts))


@wrong("4.5", names="gradients-forgotten")
@_as_function
class ForgetsTheGradients(_Comparison):
    def gradient(self, parameter):
        return 0


@wrong("4.5", names="gradients-forgotten")
@_as_function
class CountsWhatBackwardAdds(_Comparison):
    def held(self, part):
        return sum(map(self.gradient, part.parameters())) + sum(map(self.bytes, part.buffers()))


@wrong("4.5", names="activations-forgotten")
@_as_function
class ForgetsTheActivations(_Comparison):
    def memory(self, parts):
        return [self.held(part) for part in parts]


@wrong("4.5", names="input-needs-gradient")
@_as_function
class DetachesAndLeavesIt(_Comparison):
    def over_the_cut(self, outputs):
        return outputs.detach()


@wrong("4.5", names="first-input-leaf")
@_as_function
class TreatsTheBatchLikeACut(_Comparison):
    def memory(self, parts):
        if self.inputs.is_floating_point():
            self.inputs = self.inputs.detach().requires_grad_()
        return super().memory(parts)


@wrong("4.5", names="whole-model")
@_as_function
class MeasuresTheWholeModel(_Comparison):
    def memory(self, parts):
        return super().memory([self.layers]) * self.stages


@wrong("4.5", names="frozen-gradient")
@_as_function
class GivesEveryParameterAGradient(_Comparison):
    def gradient(self, parameter):
        return self.bytes(parameter)


@wrong("4.5", names="buffers-forgotten")
@_as_function
class ForgetsTheBuffers(_Comparison):
    def held(self, part):
        return sum(self.bytes(p) + self.gradient(p) for p in part.parameters())


@wrong("4.5", names="tied-twice")
@_as_function
class WalksOverTheLayers(_Comparison):
    def held(self, part):
        return sum(_Comparison.held(self, layer) for layer in part)


@wrong("4.5", names="four-bytes")
@_as_function
class AssumesFourBytes(_Comparison):
    def bytes(self, tensor):
        return 4 * tensor.numel()


@wrong("4.5", names="ends-included")
@_as_function
class CutsAtBothEnds(_Comparison):
    def row(self, cuts):
        return super().row(cuts) | {"cuts": [0, *cuts, len(self.layers)]}


@wrong("4.5", names="index-not-seconds")
@_as_function
class SaysWhichIsSlowest(_Comparison):
    def slowest(self, times):
        return times.index(max(times))


@wrong("4.5", names="inputs-not-handed-on")
@_as_function
class FeedsTheBatchToEveryStage(_Comparison):
    def over_the_cut(self, outputs):
        return self.inputs


@wrong("4.5", names="report-not-bytes")
@_as_function
class AddsTheReport(_Comparison):
    def memory(self, parts):
        with kept_for_backward(parts[0]) as kept:
            parts[0](self.inputs)
        return [kept + self.held(part) for part in parts]


@wrong("4.5", names="first-input-leaf")
@_as_function
class RequiresGradientsOfEveryInput(_Comparison):
    def memory(self, parts):
        self.inputs = self.inputs.detach().requires_grad_()
        return super().memory(parts)


@wrong("4.5", names="optimizer-counted")
@_as_function
class AddsAMomentum(_Comparison):
    def gradient(self, parameter):
        return 2 * super().gradient(parameter)


@wrong("4.5", names="outputs-counted")
@_as_function
class AddsTheOutputs(_Comparison):
    def memory(self, parts):
        result, arriving = [], self.inputs
        for part in parts:
            [held] = super().memory([part])
            self.inputs = self.over_the_cut(part(self.inputs))
            result.append(held + self.bytes(self.inputs))
        self.inputs = arriving
        return result


@wrong("4.5", names="bytes-not-numbers")
@_as_function
class BalancesBytes(_Comparison):
    def size(self, layer):
        return sum(p.nbytes for p in layer.parameters())


@wrong("4.5", names="not-what-cut-returns")
@_as_function
class CountsTensors(_Comparison):
    def size(self, layer):
        return len(list(layer.parameters()))


@wrong("4.5", names="not-what-cut-returns")
@_as_function
class CutsByItself(_Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        return super().__call__(layers, inputs, seconds, stages, cuts_at_the_best_last_stage)


@wrong("4.5", names="rounded")
@_as_function
class RoundsTheIdleShare(_Comparison):
    def idle(self, times):
        return round(super().idle(times), 2)


@wrong("4.5", names="training-mode")
@_as_function
class MeasuresInTrainingMode(_Comparison):
    def memory(self, parts):
        modes = {module: module.training for module in self.layers.modules()}
        result = super().memory([part.train() for part in parts])
        for module, training in modes.items():
            module.training = training
        return result
