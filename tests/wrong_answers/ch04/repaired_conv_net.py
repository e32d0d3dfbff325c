"""Answers to 4.4, `RepairedConvNet`: wrong in a plausible way, or right in another."""

import torch
from torch import nn

from tests.wrong_answers import right, wrong


def _pooled(pixels):
    return ((pixels - 1) // 2) // 2 + 1


def _eyes():
    return (
        nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )


def _head():
    return nn.Sequential(nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


class _ConvNet(nn.Module):
    """Right, but for what its children replace."""

    def __init__(self, image_size, devices):
        super().__init__()
        self.devices = devices
        self.part1, self.part2 = self.first(image_size), self.second()
        self.place(devices)

    def features(self, image_size):
        height, width = image_size
        return 64 * _pooled(height) * _pooled(width)

    def first(self, image_size):
        return nn.Sequential(*_eyes(), nn.Flatten(), nn.Linear(self.features(image_size), 512))

    def second(self):
        return _head()

    def place(self, devices):
        self.part1.to(devices[0])
        self.part2.to(devices[1])

    def forward(self, x):
        x = self.part1(x.to(self.devices[0]))
        return self.part2(x.to(self.devices[1]))


@right("4.4")
class CountsWithTheFormula(_ConvNet):
    pass


@right("4.4")
class FlattensInForward(nn.Module):
    def __init__(self, image_size, devices):
        super().__init__()
        self.devices = devices
        self.eyes = nn.Sequential(*_eyes()).to(devices[0])
        count = self.eyes(torch.zeros(2, 3, *image_size, device=devices[0]))[0].numel()
        self.last = nn.Linear(count, 512, device=devices[0])
        self.head = _head().to(devices[1])

    def forward(self, x):
        x = self.eyes(x.to(self.devices[0]))
        x = self.last(x.view(len(x), -1))
        return self.head(x.to(self.devices[1]))


@wrong("4.4", names="no-super")
class ForgetsSuper(nn.Module):
    def __init__(self, image_size, devices):
        self.part1 = nn.Sequential(*_eyes())


@wrong("4.4", names="no-self")
class ForgetsSelf(_ConvNet):
    def forward(x):
        x = x.part1(x)
        return x.part2(x)


@wrong("4.4", names="no-flatten")
class ForgetsFlatten(_ConvNet):
    def first(self, image_size):
        return nn.Sequential(*_eyes(), nn.Linear(self.features(image_size), 512))


@wrong("4.4", names="batch-flattened")
class FlattensTheBatch(_ConvNet):
    def first(self, image_size):
        linear = nn.Linear(self.features(image_size), 512)
        return nn.Sequential(*_eyes(), nn.Flatten(start_dim=0), linear)


@wrong("4.4", names="in-features-wrong")
class AddsFlattenAlone(_ConvNet):
    def features(self, image_size):
        return 1024


@wrong("4.4", names="in-features-wrong")
class ForgetsToRoundUp(_ConvNet):
    def features(self, image_size):
        height, width = image_size
        return 64 * (height // 4) * (width // 4)


@wrong("4.4", names="in-features-wrong")
class CountsThePixelsOfTheImage(_ConvNet):
    def features(self, image_size):
        return 64 * image_size[0] * image_size[1]


@wrong("4.4", names="batch-mixed")
class ViewsAThousand(_ConvNet):
    def first(self, image_size):
        return nn.Sequential(*_eyes(), nn.Unflatten(0, (1, -1)), nn.Linear(1024, 512))

    def forward(self, x):
        eyes, linear = self.part1[:3], self.part1[-1]
        x = linear(eyes(x.to(self.devices[0])).view(-1, 1024))
        return self.part2(x.to(self.devices[1]))


@wrong("4.4", names="adaptive-pool")
class PoolsToOneSize(_ConvNet):
    def first(self, image_size):
        pool = nn.AdaptiveAvgPool2d(4)
        return nn.Sequential(*_eyes(), pool, nn.Flatten(), nn.Linear(1024, 512))


@wrong("4.4", names="square-only")
class SquaresTheHeight(_ConvNet):
    def features(self, image_size):
        return 64 * _pooled(image_size[0]) ** 2


@wrong("4.4", names="lazy-parameters")
class LeavesItToTheFirstBatch(_ConvNet):
    def first(self, image_size):
        return nn.Sequential(*_eyes(), nn.Flatten(), nn.LazyLinear(512))


@wrong("4.4", names="layer-changed")
class LosesARelu(_ConvNet):
    def second(self):
        return _head()[1:]


@wrong("4.4", names="layer-changed")
class TakesAnotherWidth(_ConvNet):
    def first(self, image_size):
        return nn.Sequential(*_eyes(), nn.Flatten(), nn.Linear(self.features(image_size), 256))

    def second(self):
        return nn.Sequential(nn.ReLU(), nn.Linear(256, 10))


@wrong("4.4", names="softmax-added")
class ReturnsProbabilities(_ConvNet):
    def second(self):
        return nn.Sequential(*_head(), nn.Softmax(dim=1))


@wrong("4.4", names="devices-fixed")
class NamesTwoGpus(_ConvNet):
    def __init__(self, image_size, devices):
        super().__init__(image_size, ["cuda:8", "cuda:9"])


@wrong("4.4", names="nothing-placed")
class StaysAtHome(_ConvNet):
    def place(self, devices):
        pass


@wrong("4.4", names="wrong-part")
class CutsBeforeTheLinearLayer(nn.Module):
    def __init__(self, image_size, devices):
        super().__init__()
        self.devices = devices
        linear = nn.Linear(64 * _pooled(image_size[0]) * _pooled(image_size[1]), 512)
        self.part1 = nn.Sequential(*_eyes(), nn.Flatten()).to(devices[0])
        self.part2 = nn.Sequential(linear, *_head()).to(devices[1])

    def forward(self, x):
        x = self.part1(x.to(self.devices[0]))
        return self.part2(x.to(self.devices[1]))


@wrong("4.4", names="activation-not-moved")
class MovesNothingBetween(_ConvNet):
    def forward(self, x):
        return self.part2(self.part1(x.to(self.devices[0])))


@wrong("4.4", names="input-not-moved")
class ExpectsImagesInPlace(_ConvNet):
    def forward(self, x):
        return self.part2(self.part1(x).to(self.devices[1]))


@wrong("4.4", names="output-elsewhere")
class BringsTheLogitsHome(_ConvNet):
    def forward(self, x):
        home = x.device
        return super().forward(x).to(home)


@wrong("4.4", names="class-not-module")
class ForgetsTheParentheses(_ConvNet):
    def first(self, image_size):
        return nn.Sequential(*_eyes(), nn.Flatten, nn.Linear(self.features(image_size), 512))


@wrong("4.4", names="size-is-a-pair")
class TakesTheSizeForANumber(_ConvNet):
    def features(self, image_size):
        return 64 * _pooled(image_size) ** 2


@wrong("4.4", names="in-features-wrong")
class DividesWithAStroke(_ConvNet):
    def features(self, image_size):
        height, width = ((pixels + 2 * 3 - 7) / 2 + 1 for pixels in image_size)
        return 64 * (height / 2) * (width / 2)


@wrong("4.4", names="in-features-wrong")
class RoundsAtTheEndOnly(_ConvNet):
    def features(self, image_size):
        height, width = (((pixels - 1) / 2 + 1 - 1) / 2 + 1 for pixels in image_size)
        return int(64 * height * width)


@wrong("4.4", names="classes-not-logits")
class ReturnsTheClass(_ConvNet):
    def forward(self, x):
        return super().forward(x).argmax(1)


@wrong("4.4", names="pooling-changed")
class PoolsWithoutPadding(_ConvNet):
    def first(self, image_size):
        eyes = nn.Sequential(*_eyes()[:2], nn.MaxPool2d(kernel_size=3, stride=2))
        features = eyes(torch.zeros(1, 3, *image_size)).numel()
        return nn.Sequential(*eyes, nn.Flatten(), nn.Linear(features, 512))


@wrong("4.4", names="gradient-lost")
class DetachesBetween(_ConvNet):
    def forward(self, x):
        x = self.part1(x.to(self.devices[0])).detach()
        return self.part2(x.to(self.devices[1]))


@wrong("4.4", names="batch-dropped")
class Squeezes(_ConvNet):
    def forward(self, x):
        return super().forward(x).squeeze()


@wrong("4.4", names="wrong-part")
class PutsBothOnTheFirst(_ConvNet):
    def place(self, devices):
        self.to(devices[0])

    def forward(self, x):
        return self.part2(self.part1(x.to(self.devices[0]))).to(self.devices[1])
