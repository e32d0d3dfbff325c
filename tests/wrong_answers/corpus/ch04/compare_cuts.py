"""Rarer wrong answers to 4.5, `compare_cuts`."""

from itertools import pairwise

from tests.wrong_answers import rarer
from tests.wrong_answers.ch04.compare_cuts import Comparison, as_function


@rarer("4.5")
@as_function
class RoundsTheShares(Comparison):
    def equal_layers(self):
        return [round(i * len(self.layers) / self.stages) for i in range(1, self.stages)]


@rarer("4.5")
@as_function
class CutsEqualCosts(Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        self.cuts = cut([1] * len(layers), stages)
        return super().__call__(layers, inputs, seconds, stages, cut)

    def equal_layers(self):
        return self.cuts


@rarer("4.5")
@as_function
class BalancesBytes(Comparison):
    def size(self, layer):
        return sum(p.nbytes for p in layer.parameters())


@rarer("4.5")
@as_function
class BalancesAndReportsCosts(Comparison):
    def __call__(self, layers, inputs, seconds, stages, cut):
        table = super().__call__(layers, inputs, seconds, stages, cut)
        costs = [1] * len(layers), [self.size(layer) for layer in layers], seconds
        for row, cost in zip(table.values(), costs):
            edges = pairwise([0, *row["cuts"], len(layers)])
            row["slowest"] = max(sum(cost[a:b]) for a, b in edges)
        return table


@rarer("4.5")
@as_function
class GivesEveryParameterAGradient(Comparison):
    def gradient(self, parameter):
        return self.bytes(parameter)


@rarer("4.5")
@as_function
class RequiresGradientsOfEveryInput(Comparison):
    def memory(self, parts):
        self.inputs = self.inputs.detach().requires_grad_()
        return super().memory(parts)


@rarer("4.5")
@as_function
class MeasuresInTrainingMode(Comparison):
    def memory(self, parts):
        modes = {module: module.training for module in self.layers.modules()}
        result = super().memory([part.train() for part in parts])
        for module, training in modes.items():
            module.training = training
        return result
