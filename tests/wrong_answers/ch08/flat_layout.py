"""Answers to 8.3, `FlatLayout`: wrong in a plausible way, or right in another."""

import math

import torch

from tests.wrong_answers import right, wrong


@right("8.3")
class JoinsAndPads:
    def __init__(self, shapes, world_size):
        self.shapes, self.n = [tuple(shape) for shape in shapes], world_size
        self.total = sum(math.prod(shape) for shape in self.shapes)
        self.shard_size = math.ceil(self.total / world_size)

    def flatten(self, tensors):
        padding = tensors[0].new_zeros(self.n * self.shard_size - self.total)
        return torch.cat([*(tensor.reshape(-1) for tensor in tensors), padding])

    def shards(self, flat):
        return [flat.narrow(0, r * self.shard_size, self.shard_size) for r in range(self.n)]

    def unflatten(self, flat):
        tensors, start = [], 0
        for shape in self.shapes:
            end = start + math.prod(shape)
            tensors.append(flat[start:end].view(shape))
            start = end
        return tensors


@wrong("8.3", names="size")
class RoundsDown(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        self.shard_size = self.total // world_size


@wrong("8.3", names="size")
class PadsEveryTensor(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        self.shard_size = sum(math.ceil(math.prod(s) / world_size) for s in self.shapes)


@wrong("8.3", names="padding")
class PadsNothing(JoinsAndPads):
    def flatten(self, tensors):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


@wrong("8.3", names="wrong-shards")
class DealsElementsOut(JoinsAndPads):
    def shards(self, flat):
        return [flat[rank :: self.n] for rank in range(self.n)]


@wrong("8.3", names="copied")
class CopiesTheShards(JoinsAndPads):
    def shards(self, flat):
        return [shard.clone() for shard in super().shards(flat)]


@wrong("8.3", names="flatten-aliases")
class ReusesASingleTensor(JoinsAndPads):
    def flatten(self, tensors):
        if len(tensors) == 1 and self.total % self.n == 0:
            return tensors[0].reshape(-1)
        return super().flatten(tensors)


@wrong("8.3", names="input-changed")
class AppendsThePadding(JoinsAndPads):
    def flatten(self, tensors):
        tensors.append(tensors[0].new_zeros(self.n * self.shard_size - self.total))
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


@wrong("8.3", names="copied")
class WritesIntoCopies(JoinsAndPads):
    def flatten(self, tensors):
        flat = tensors[0].new_zeros(self.n * self.shard_size)
        for place, tensor in zip(self.unflatten(flat), tensors, strict=True):
            place.copy_(tensor)
        return flat

    def unflatten(self, flat):
        return [tensor.clone() for tensor in super().unflatten(flat)]


@wrong("8.3", names="other-dtype")
class FillsAFloat32Vector(JoinsAndPads):
    def flatten(self, tensors):
        flat = torch.zeros(self.n * self.shard_size)
        for place, tensor in zip(self.unflatten(flat), tensors, strict=True):
            place.copy_(tensor)
        return flat


@wrong("8.3", names="not-flat")
class TakesTheOrderOfMemory(JoinsAndPads):
    def flatten(self, tensors):
        return super().flatten([t.as_strided((t.numel(),), (1,)) for t in tensors])


@wrong("8.3", names="not-flat")
class LaysColumnsEndToEnd(JoinsAndPads):
    def flatten(self, tensors):
        return super().flatten([t.t() if t.dim() == 2 else t for t in tensors])


@right("8.3")
class KeepsWhereEachBegins:
    def __init__(self, shapes, world_size):
        self.places, self.total, self.ranks = [], 0, world_size
        for shape in shapes:
            self.places.append((self.total, shape))
            self.total += shape.numel()

    @property
    def shard_size(self):
        return math.ceil(self.total / self.ranks)

    def flatten(self, tensors):
        flat = tensors[0].new_zeros(self.ranks * self.shard_size)
        parts = [tensor.contiguous().view(-1) for tensor in tensors]
        torch.cat(parts, out=flat[: self.total])
        return flat

    def shards(self, flat):
        return list(flat.tensor_split(self.ranks))

    def unflatten(self, flat):
        strides = [torch.empty(shape, device="meta").stride() for _, shape in self.places]
        return [
            flat.as_strided(shape, stride, flat.storage_offset() + begin)
            for (begin, shape), stride in zip(self.places, strides, strict=True)
        ]


@wrong("8.3", names="last-flatten")
class CutsTheLastVector(JoinsAndPads):
    def flatten(self, tensors):
        self.flat = super().flatten(tensors)
        return self.flat

    def unflatten(self, flat):
        return super().unflatten(self.flat)


@wrong("8.3", names="device-lost")
class FillsAVectorOnTheCPU(JoinsAndPads):
    def flatten(self, tensors):
        flat = torch.zeros(self.n * self.shard_size, dtype=tensors[0].dtype)
        for place, tensor in zip(self.unflatten(flat), tensors, strict=True):
            place.copy_(tensor)
        return flat


@wrong("8.3", names="padding")
class TakesEmptyMemory(JoinsAndPads):
    def flatten(self, tensors):
        flat = tensors[0].new_empty(self.n * self.shard_size)
        for place, tensor in zip(self.unflatten(flat), tensors, strict=True):
            place.copy_(tensor)
        return flat


@wrong("8.3", names="wrong-tensors")
class LastOneGetsTheRest(JoinsAndPads):
    def unflatten(self, flat):
        *tensors, last = super().unflatten(flat)
        return [*tensors, flat[self.total - last.numel() :]]


@right("8.3")
class MovesItsZeros(JoinsAndPads):
    def flatten(self, tensors):
        flat = torch.zeros(self.n * self.shard_size).to(tensors[0])
        for place, tensor in zip(self.unflatten(flat), tensors, strict=True):
            place.copy_(tensor)
        return flat
