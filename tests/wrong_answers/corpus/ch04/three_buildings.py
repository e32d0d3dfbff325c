"""Rarer wrong answers to 4.1, `ThreeBuildings`."""

from tests.wrong_answers import rarer
from tests.wrong_answers.ch04.three_buildings import Line


@rarer("4.1")
class OverlapsAtTheEnd(Line):
    def cut(self, layers):
        size = -(-len(layers) // 3)
        return layers[:size], layers[size : 2 * size], layers[-size:]


@rarer("4.1")
class BackToFront(Line):
    def __init__(self, layers, devices):
        super().__init__(layers, devices[::-1])


@rarer("4.1")
class ExpectsItsInputInPlace(Line):
    def forward(self, x):
        x = self.part0(x)
        x = self.part1(x.to(self.devices[1]))
        return self.part2(x.to(self.devices[2]))


@rarer("4.1")
class MakesFloat32OfItsInputs(Line):
    def forward(self, x):
        return super().forward(x.float())
