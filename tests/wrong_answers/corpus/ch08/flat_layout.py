"""Rarer wrong answers to 8.3, `FlatLayout`."""

import math

import torch

from tests.wrong_answers import rarer
from tests.wrong_answers.ch08.flat_layout import JoinsAndPads


@rarer("8.3")
class PadsAlways(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        self.shard_size = self.total // world_size + 1


@rarer("8.3")
class ChunksTheTensorsOnly(JoinsAndPads):
    def shards(self, flat):
        return (
            list(flat[: self.total].chunk(self.n)) if self.total < self.n else super().shards(flat)
        )


@rarer("8.3")
class CopiesTheOtherWay(JoinsAndPads):
    def flatten(self, tensors):
        flat = tensors[0].new_zeros(self.n * self.shard_size)
        for place, tensor in zip(self.unflatten(flat), tensors, strict=True):
            tensor.copy_(place)
        return flat


@rarer("8.3")
class KeepsItsVector(JoinsAndPads):
    vector = None

    def flatten(self, tensors):
        if self.vector is None:
            self.vector = tensors[0].new_zeros(self.n * self.shard_size)
        return self.vector.copy_(super().flatten(tensors))


@rarer("8.3")
class MultipliesTheShape(JoinsAndPads):
    def unflatten(self, flat):
        tensors, start = [], 0
        for shape in self.shapes:
            size = shape[0]
            for extent in shape[1:]:
                size *= extent
            tensors.append(flat[start : start + size].view(shape))
            start += size
        return tensors


@rarer("8.3")
class NotesThePadding(JoinsAndPads):
    def flatten(self, tensors):
        flat = super().flatten(tensors)
        self.end = sum(tensor.numel() for tensor in tensors)
        return flat

    def unflatten(self, flat):
        return super().unflatten(flat[: self.end])


@rarer("8.3")
class GivesEveryTensorAPlace(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        self.total = sum(math.prod(shape) or 1 for shape in self.shapes)
        self.shard_size = math.ceil(self.total / world_size)


@rarer("8.3")
class AppendsAShapeForThePadding(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        if missing := self.n * self.shard_size - self.total:
            shapes.append(torch.Size([missing]))
