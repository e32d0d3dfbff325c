"""Answers to 4.1, `ThreeBuildings`: wrong in a plausible way, or right in another."""

from torch import nn

from tests.wrong_answers import right, wrong


def _thirds(layers):
    """Three lists whose lengths differ by one at most; the last ones are the longer."""
    n = len(layers)
    return [layers[i * n // 3 : (i + 1) * n // 3] for i in range(3)]


class _Line(nn.Module):
    """Right, but for what its children replace."""

    def __init__(self, layers, devices):
        super().__init__()
        self.devices = devices
        parts = [nn.Sequential(*part) for part in self.cut(layers)]
        self.part0, self.part1, self.part2 = parts
        for part, device in zip(parts, devices):
            self.place(part, device)

    def cut(self, layers):
        return _thirds(layers)

    def place(self, part, device):
        part.to(device)

    def forward(self, x):
        first, second, third = self.devices
        x = self.part0(x.to(first))
        x = self.part1(x.to(second))
        return self.part2(x.to(third))


@right("4.1")
class ThreeNamedParts(_Line):
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
class ForgetsTheConstructor(_Line):
    def __init__(self, layers, devices):
        self.parts = nn.ModuleList(nn.Sequential(*part) for part in self.cut(layers))


@wrong("4.1", names="not-registered")
class PartsInAList(nn.Module):
    def __init__(self, layers, devices):
        super().__init__()
        self.parts = [nn.Sequential(*part).to(d) for part, d in zip(_thirds(layers), devices)]
        self.devices = devices

    def forward(self, x):
        for part, device in zip(self.parts, self.devices):
            x = part(x.to(device))
        return x


@wrong("4.1", names="layers-lost")
class LosesTheRest(_Line):
    def cut(self, layers):
        size = len(layers) // 3
        return [layers[i * size : (i + 1) * size] for i in range(3)]


@wrong("4.1", names="layers-repeated")
class OverlapsAtTheEnd(_Line):
    def cut(self, layers):
        size = -(-len(layers) // 3)
        return layers[:size], layers[size : 2 * size], layers[-size:]


@wrong("4.1", names="layers-out-of-order")
class DealsTheLayersOut(_Line):
    def cut(self, layers):
        return [layers[i::3] for i in range(3)]


@wrong("4.1", names="uneven")
class RestInTheLastPart(_Line):
    def cut(self, layers):
        size = len(layers) // 3
        return layers[:size], layers[size : 2 * size], layers[2 * size :]


@wrong("4.1", names="uneven")
class RoundsUp(_Line):
    def cut(self, layers):
        size = -(-len(layers) // 3)
        return layers[:size], layers[size : 2 * size], layers[2 * size :]


@wrong("4.1", names="gradient-lost")
class DetachesWhatItMoves(_Line):
    def forward(self, x):
        for part, device in zip((self.part0, self.part1, self.part2), self.devices):
            x = part(x.detach().to(device))
        return x


@wrong("4.1", names="gradient-lost")
class MovesTheData(_Line):
    def forward(self, x):
        for part, device in zip((self.part0, self.part1, self.part2), self.devices):
            x = part(x.data.to(device))
        return x


@wrong("4.1", names="devices-fixed")
class NamesGpus(_Line):
    def __init__(self, layers, devices):
        super().__init__(layers, ["cuda:7", "cuda:8", "cuda:9"])


@wrong("4.1", names="frozen-thawed")
class ThawsEverything(_Line):
    def place(self, part, device):
        part.to(device).requires_grad_()


@wrong("4.1", names="nothing-placed")
class PlacesNothing(_Line):
    def place(self, part, device):
        pass


@wrong("4.1", names="devices-mixed-up")
class BackToFront(_Line):
    def __init__(self, layers, devices):
        super().__init__(layers, devices[::-1])


@wrong("4.1", names="buffers-left")
class MovesParametersAlone(_Line):
    def place(self, part, device):
        for layer in part:
            moved = layer.weight.detach().to(device)
            layer.weight = nn.Parameter(moved, requires_grad=layer.weight.requires_grad)


@wrong("4.1", names="input-not-moved")
class ExpectsItsInputInPlace(_Line):
    def forward(self, x):
        x = self.part0(x)
        x = self.part1(x.to(self.devices[1]))
        return self.part2(x.to(self.devices[2]))


@wrong("4.1", names="activation-not-moved")
class ForgetsTheResultOfTo(_Line):
    def forward(self, x):
        x = self.part0(x.to(self.devices[0]))
        x.to(self.devices[1])
        x = self.part1(x)
        x.to(self.devices[2])
        return self.part2(x)


@wrong("4.1", names="output-elsewhere")
class BringsTheOutputHome(_Line):
    def forward(self, x):
        home = x.device
        return super().forward(x).to(home)


@wrong("4.1", names="list-not-module")
class MovesASlice(_Line):
    def __init__(self, layers, devices):
        nn.Module.__init__(self)
        for part, device in zip(_thirds(layers), devices):
            part.to(device)


@wrong("4.1", names="list-not-module")
class ForgetsTheStar(_Line):
    def __init__(self, layers, devices):
        nn.Module.__init__(self)
        self.part0, self.part1, self.part2 = (nn.Sequential(part) for part in _thirds(layers))


@wrong("4.1", names="container-called")
class CallsAModuleList(_Line):
    def __init__(self, layers, devices):
        nn.Module.__init__(self)
        self.devices = devices
        self.part0, self.part1, self.part2 = map(nn.ModuleList, _thirds(layers))
        for part, device in zip(self.children(), devices):
            part.to(device)


@wrong("4.1", names="result-dropped")
class DropsTheResults(_Line):
    def forward(self, x):
        for part, device in zip(self.children(), self.devices):
            output = part(x.to(device))
        return output


@wrong("4.1", names="nothing-placed")
class PlacesInForward(_Line):
    def place(self, part, device):
        pass

    def forward(self, x):
        for part, device in zip(self.children(), self.devices):
            x = part.to(device)(x.to(device))
        return x


@wrong("4.1", names="devices-fixed")
class MakesACudaNameOfIt(_Line):
    def place(self, part, device):
        part.to(f"cuda:{device}")


@wrong("4.1", names="device-unused")
class UsesTwoOfThree(_Line):
    def __init__(self, layers, devices):
        super().__init__(layers, [devices[0], devices[0], devices[2]])


@wrong("4.1", names="mode-changed")
class EndsInEvaluationMode(_Line):
    def __init__(self, layers, devices):
        super().__init__(layers, devices)
        self.eval()


@wrong("4.1", names="dtype-changed")
class MakesFloat32OfItsInputs(_Line):
    def forward(self, x):
        return super().forward(x.float())


@wrong("4.1", names="list-changed")
class TakesTheLayersAway(_Line):
    def cut(self, layers):
        return [[layers.pop(0) for _ in part] for part in _thirds(layers)]
