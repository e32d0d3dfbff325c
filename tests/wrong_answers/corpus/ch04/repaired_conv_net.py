"""Rarer wrong answers to 4.4, `RepairedConvNet`."""

import torch
from torch import nn

from tests.wrong_answers import rarer
from tests.wrong_answers.ch04.repaired_conv_net import ConvNet, eyes, head, pooled


@rarer("4.4")
class ForgetsToRoundUp(ConvNet):
    def features(self, image_size):
        height, width = image_size
        return 64 * (height // 4) * (width // 4)


@rarer("4.4")
class RoundsAtTheEndOnly(ConvNet):
    def features(self, image_size):
        height, width = (((pixels - 1) / 2 + 1 - 1) / 2 + 1 for pixels in image_size)
        return int(64 * height * width)


@rarer("4.4")
class SquaresTheHeight(ConvNet):
    def features(self, image_size):
        return 64 * pooled(image_size[0]) ** 2


@rarer("4.4")
class ViewsAThousand(ConvNet):
    def first(self, image_size):
        return nn.Sequential(*eyes(), nn.Unflatten(0, (1, -1)), nn.Linear(1024, 512))

    def forward(self, x):
        eyes, linear = self.part1[:3], self.part1[-1]
        x = linear(eyes(x.to(self.devices[0])).view(-1, 1024))
        return self.part2(x.to(self.devices[1]))


@rarer("4.4")
class PoolsWithoutPadding(ConvNet):
    def first(self, image_size):
        see = nn.Sequential(*eyes()[:2], nn.MaxPool2d(kernel_size=3, stride=2))
        features = see(torch.zeros(1, 3, *image_size)).numel()
        return nn.Sequential(*see, nn.Flatten(), nn.Linear(features, 512))


@rarer("4.4")
class LosesARelu(ConvNet):
    def second(self):
        return head()[1:]


@rarer("4.4")
class CutsBeforeTheLinearLayer(nn.Module):
    def __init__(self, image_size, devices):
        super().__init__()
        self.devices = devices
        linear = nn.Linear(64 * pooled(image_size[0]) * pooled(image_size[1]), 512)
        self.part1 = nn.Sequential(*eyes(), nn.Flatten()).to(devices[0])
        self.part2 = nn.Sequential(linear, *head()).to(devices[1])

    def forward(self, x):
        x = self.part1(x.to(self.devices[0]))
        return self.part2(x.to(self.devices[1]))


@rarer("4.4")
class ExpectsImagesInPlace(ConvNet):
    def forward(self, x):
        return self.part2(self.part1(x).to(self.devices[1]))
