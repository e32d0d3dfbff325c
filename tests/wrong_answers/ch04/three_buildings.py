"""Answers to 4.1, `ThreeBuildings`: wrong in a plausible way, or right in another."""

from torch import nn

from tests.wrong_answers import right, wrong


def thirds(layers):
    """Three lists whose lengths differ by one at most; the last ones are the longer."""
    n = len(layers)
    return [layers[i * n // 3 : (i + 1) * n // 3] for i in range(3)]


class Line(nn.Module):
    """Right, but for what its children replace."""

    def __init__(self, layers, devices):
        super().__init__()
        self.devices = devices
        parts = [nn.Sequential(*part) for part in self.cut(layers)]
        self.part0, self.part1, self.part2 = parts
        for part, device in zip(parts, devices):
            self.place(part, device)

    def cut(self, layers):
        return thirds(layers)

    def place(self, part, device):
        part.to(device)

    def forward(self, x):
        first, second, third = self.devices
        x = self.part0(x.to(first))
        x = self.part1(x.to(second))
        return self.part2(x.to(third))


@right("4.1")
class ThreeNamedParts(Line):
    pass


@right("4.1")
class AsksEachLayerWhereItIs(nn.Module):
    def __init__(self, layers, devices):
        super().__init__()
        n = len(layers)
        self.layers = nn.ModuleList(
            layer.to(devices[3 * number // n]) for number, layer in enumerate(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(next(layer.parameters()).device))
        return x


@wrong("4.1", names="no-super")
class ForgetsTheConstructor(Line):
    def __init__(self, layers, devices):
        self.parts = nn.ModuleList(nn.Sequential(*part) for part in self.cut(layers))


@wrong("4.1", names="not-a-module")
class PartsInAList(Line):
    def __init__(self, layers, devices):
        nn.Module.__init__(self)
        self.parts = [nn.Sequential(*part).to(d) for part, d in zip(thirds(layers), devices)]
        self.devices = devices

    def forward(self, x):
        for part, device in zip(self.parts, self.devices):
            x = part(x.to(device))
        return x


@wrong("4.1", names="not-a-module")
class CallsAModuleList(Line):
    def __init__(self, layers, devices):
        nn.Module.__init__(self)
        self.devices = devices
        self.part0, self.part1, self.part2 = map(nn.ModuleList, thirds(layers))
        for part, device in zip(self.children(), devices):
            part.to(device)


@wrong("4.1", names="not-the-chain")
class LosesTheRest(Line):
    def cut(self, layers):
        size = len(layers) // 3
        return [layers[i * size : (i + 1) * size] for i in range(3)]


@wrong("4.1", names="not-the-chain")
class DropsTheResults(Line):
    def forward(self, x):
        for part, device in zip(self.children(), self.devices):
            output = part(x.to(device))
        return output


@wrong("4.1", names="cut-from-the-graph")
class DetachesWhatItMoves(Line):
    def forward(self, x):
        for part, device in zip((self.part0, self.part1, self.part2), self.devices):
            x = part(x.detach().to(device))
        return x


@wrong("4.1", names="frozen-thawed")
class ThawsEverything(Line):
    def place(self, part, device):
        part.to(device).requires_grad_()


@wrong("4.1", names="mode-changed")
class EndsInEvaluationMode(Line):
    def __init__(self, layers, devices):
        super().__init__(layers, devices)
        self.eval()


@wrong("4.1", names="list-changed")
class TakesTheLayersAway(Line):
    def cut(self, layers):
        return [[layers.pop(0) for _ in part] for part in thirds(layers)]


@wrong("4.1", names="not-placed")
class PlacesInForward(Line):
    def place(self, part, device):
        pass

    def forward(self, x):
        for part, device in zip(self.children(), self.devices):
            x = part.to(device)(x.to(device))
        return x


@wrong("4.1", names="not-placed")
class MovesParametersAlone(Line):
    def place(self, part, device):
        for layer in part:
            moved = layer.weight.detach().to(device)
            layer.weight = nn.Parameter(moved, requires_grad=layer.weight.requires_grad)


@wrong("4.1", names="misplaced")
class NamesGpus(Line):
    def __init__(self, layers, devices):
        super().__init__(layers, ["cuda:7", "cuda:8", "cuda:9"])


@wrong("4.1", names="misplaced")
class UsesTwoOfThree(Line):
    def __init__(self, layers, devices):
        super().__init__(layers, [devices[0], devices[0], devices[2]])


@wrong("4.1", names="uneven")
class RoundsUp(Line):
    def cut(self, layers):
        size = -(-len(layers) // 3)
        return layers[:size], layers[size : 2 * size], layers[2 * size :]


@wrong("4.1", names="not-moved")
class ForgetsTheResultOfTo(Line):
    def forward(self, x):
        x = self.part0(x.to(self.devices[0]))
        x.to(self.devices[1])
        x = self.part1(x)
        x.to(self.devices[2])
        return self.part2(x)


@wrong("4.1", names="output-elsewhere")
class BringsTheOutputHome(Line):
    def forward(self, x):
        home = x.device
        return super().forward(x).to(home)
