"""Answers to 4.4, `RepairedConvNet`: wrong in a plausible way, or right in another."""

import torch
from torch import nn

from tests.wrong_answers import right, wrong


def pooled(pixels):
    return ((pixels - 1) // 2) // 2 + 1


def eyes():
    return (
        nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )


def head():
    return nn.Sequential(nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


class ConvNet(nn.Module):
    """Right, but for what its children replace."""

    def __init__(self, image_size, devices):
        super().__init__()
        self.devices = devices
        self.part1, self.part2 = self.first(image_size), self.second()
        self.place(devices)

    def features(self, image_size):
        height, width = image_size
        return 64 * pooled(height) * pooled(width)

    def first(self, image_size):
        return nn.Sequential(*eyes(), nn.Flatten(), nn.Linear(self.features(image_size), 512))

    def second(self):
        return head()

    def place(self, devices):
        self.part1.to(devices[0])
        self.part2.to(devices[1])

    def forward(self, x):
        x = self.part1(x.to(self.devices[0]))
        return self.part2(x.to(self.devices[1]))


@right("4.4")
class CountsWithTheFormula(ConvNet):
    pass


@right("4.4")
class FlattensInForward(nn.Module):
    def __init__(self, image_size, devices):
        super().__init__()
        self.devices = devices
        self.eyes = nn.Sequential(*eyes()).to(devices[0])
        count = self.eyes(torch.zeros(2, 3, *image_size, device=devices[0]))[0].numel()
        self.last = nn.Linear(count, 512, device=devices[0])
        self.head = head().to(devices[1])

    def forward(self, x):
        x = self.eyes(x.to(self.devices[0]))
        x = self.last(x.view(len(x), -1))
        return self.head(x.to(self.devices[1]))


@wrong("4.4", names="no-super")
class ForgetsSuper(nn.Module):
    def __init__(self, image_size, devices):
        self.part1 = nn.Sequential(*eyes())


@wrong("4.4", names="no-self")
class ForgetsSelf(ConvNet):
    def forward(x):
        x = x.part1(x)
        return x.part2(x)


@wrong("4.4", names="no-flatten")
class ForgetsFlatten(ConvNet):
    def first(self, image_size):
        return nn.Sequential(*eyes(), nn.Linear(self.features(image_size), 512))


@wrong("4.4", names="no-flatten")
class LinearOnTheWidth(ConvNet):
    def first(self, image_size):
        return nn.Sequential(*eyes(), nn.Linear(pooled(image_size[1]), 512))


@wrong("4.4", names="batch-lost")
class FlattensTheBatch(ConvNet):
    def first(self, image_size):
        linear = nn.Linear(self.features(image_size), 512)
        return nn.Sequential(*eyes(), nn.Flatten(start_dim=0), linear)


@wrong("4.4", names="batch-lost")
class Squeezes(ConvNet):
    def forward(self, x):
        return super().forward(x).squeeze()


@wrong("4.4", names="in-features-wrong")
class AddsFlattenAlone(ConvNet):
    def features(self, image_size):
        return 1024


@wrong("4.4", names="in-features-wrong")
class LeavesItToTheFirstBatch(ConvNet):
    def first(self, image_size):
        return nn.Sequential(*eyes(), nn.Flatten(), nn.LazyLinear(512))


@wrong("4.4", names="layers-changed")
class PoolsToOneSize(ConvNet):
    def first(self, image_size):
        pool = nn.AdaptiveAvgPool2d(4)
        return nn.Sequential(*eyes(), pool, nn.Flatten(), nn.Linear(1024, 512))


@wrong("4.4", names="not-logits")
class ReturnsProbabilities(ConvNet):
    def second(self):
        return nn.Sequential(*head(), nn.Softmax(dim=1))


@wrong("4.4", names="misplaced")
class StaysAtHome(ConvNet):
    def place(self, devices):
        pass


@wrong("4.4", names="cut-from-the-graph")
class DetachesBetween(ConvNet):
    def forward(self, x):
        x = self.part1(x.to(self.devices[0])).detach()
        return self.part2(x.to(self.devices[1]))


@wrong("4.4", names="not-moved")
class MovesNothingBetween(ConvNet):
    def forward(self, x):
        return self.part2(self.part1(x.to(self.devices[0])))


@wrong("4.4", names="output-elsewhere")
class BringsTheLogitsHome(ConvNet):
    def forward(self, x):
        home = x.device
        return super().forward(x).to(home)
