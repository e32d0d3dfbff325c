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


@wrong("8.3", names="rounded-down")
class RoundsDown(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        self.shard_size = self.total // world_size


@wrong("8.3", names="padded-each")
class PadsEveryTensor(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        self.shard_size = sum(math.ceil(math.prod(s) / world_size) for s in self.shapes)


@wrong("8.3", names="padded-too-much")
class PadsAlways(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        self.shard_size = self.total // world_size + 1


@wrong("8.3", names="not-padded")
class PadsNothing(JoinsAndPads):
    def flatten(self, tensors):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


@wrong("8.3", names="padding-not-zero")
class PadsWithTheBeginning(JoinsAndPads):
    def flatten(self, tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return flat.repeat(1 + self.n)[: self.n * self.shard_size].clone()


@wrong("8.3", names="padded-in-front")
class PadsInFront(JoinsAndPads):
    def flatten(self, tensors):
        flat = super().flatten(tensors)
        return flat.roll(self.n * self.shard_size - self.total)


@wrong("8.3", names="strided")
class DealsElementsOut(JoinsAndPads):
    def shards(self, flat):
        return [flat[rank :: self.n] for rank in range(self.n)]


@wrong("8.3", names="too-few-shards")
class ChunksTheTensorsOnly(JoinsAndPads):
    def shards(self, flat):
        return (
            list(flat[: self.total].chunk(self.n)) if self.total < self.n else super().shards(flat)
        )


@wrong("8.3", names="shards-copied")
class CopiesTheShards(JoinsAndPads):
    def shards(self, flat):
        return [shard.clone() for shard in super().shards(flat)]


@wrong("8.3", names="tensors-copied")
class CopiesTheTensors(JoinsAndPads):
    def unflatten(self, flat):
        return [tensor.clone() for tensor in super().unflatten(flat)]


@wrong("8.3", names="flatten-aliases")
class ReusesASingleTensor(JoinsAndPads):
    def flatten(self, tensors):
        if len(tensors) == 1 and self.total % self.n == 0:
            return tensors[0].reshape(-1)
        return super().flatten(tensors)


@wrong("8.3", names="input-changed")
class CopiesTheOtherWay(JoinsAndPads):
    def flatten(self, tensors):
        flat = tensors[0].new_zeros(self.n * self.shard_size)
        for place, tensor in zip(self.unflatten(flat), tensors, strict=True):
            tensor.copy_(place)
        return flat


@wrong("8.3", names="input-changed")
class AppendsThePadding(JoinsAndPads):
    def flatten(self, tensors):
        tensors.append(tensors[0].new_zeros(self.n * self.shard_size - self.total))
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


@wrong("8.3", names="tensors-copied")
class WritesIntoCopies(JoinsAndPads):
    def flatten(self, tensors):
        flat = tensors[0].new_zeros(self.n * self.shard_size)
        for place, tensor in zip(self.unflatten(flat), tensors, strict=True):
            place.copy_(tensor)
        return flat

    def unflatten(self, flat):
        return [tensor.clone() for tensor in super().unflatten(flat)]


@wrong("8.3", names="buffer-kept")
class KeepsItsVector(JoinsAndPads):
    vector = None

    def flatten(self, tensors):
        if self.vector is None:
            self.vector = tensors[0].new_zeros(self.n * self.shard_size)
        return self.vector.copy_(super().flatten(tensors))


@wrong("8.3", names="dimensions-left-out")
class KnowsMatricesAndVectors(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        sizes = [s[0] * s[-1] if len(s) > 1 else math.prod(s) for s in self.shapes]
        self.shard_size = math.ceil(sum(sizes) / world_size)


@wrong("8.3", names="dtype-lost")
class FillsAFloat32Vector(JoinsAndPads):
    def flatten(self, tensors):
        flat = torch.zeros(self.n * self.shard_size)
        for place, tensor in zip(self.unflatten(flat), tensors, strict=True):
            place.copy_(tensor)
        return flat


@wrong("8.3", names="not-contiguous")
class ViewsTheTensors(JoinsAndPads):
    def flatten(self, tensors):
        padding = tensors[0].new_zeros(self.n * self.shard_size - self.total)
        return torch.cat([*(tensor.view(-1) for tensor in tensors), padding])


@wrong("8.3", names="not-contiguous")
class TakesTheOrderOfMemory(JoinsAndPads):
    def flatten(self, tensors):
        return super().flatten([t.as_strided((t.numel(),), (1,)) for t in tensors])


@wrong("8.3", names="scalars")
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
class NotesThePadding(JoinsAndPads):
    def flatten(self, tensors):
        flat = super().flatten(tensors)
        self.end = sum(tensor.numel() for tensor in tensors)
        return flat

    def unflatten(self, flat):
        return super().unflatten(flat[: self.end])


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


@wrong("8.3", names="device-lost")
class JoinsZerosOfTheCPU(JoinsAndPads):
    def flatten(self, tensors):
        padding = torch.zeros(self.n * self.shard_size - self.total, dtype=tensors[0].dtype)
        return torch.cat([*(tensor.reshape(-1) for tensor in tensors), padding])


@wrong("8.3", names="no-elements")
class GivesEveryTensorAPlace(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        self.total = sum(math.prod(shape) or 1 for shape in self.shapes)
        self.shard_size = math.ceil(self.total / world_size)


@wrong("8.3", names="input-changed")
class AppendsAShapeForThePadding(JoinsAndPads):
    def __init__(self, shapes, world_size):
        super().__init__(shapes, world_size)
        if missing := self.n * self.shard_size - self.total:
            shapes.append(torch.Size([missing]))


@wrong("8.3", names="padding-not-zero")
class TakesEmptyMemory(JoinsAndPads):
    def flatten(self, tensors):
        flat = tensors[0].new_empty(self.n * self.shard_size)
        for place, tensor in zip(self.unflatten(flat), tensors, strict=True):
            place.copy_(tensor)
        return flat


@wrong("8.3", names="shard-sizes")
class SplitsIntoRoundedDown(JoinsAndPads):
    def shards(self, flat):
        return list(flat.split(max(1, self.total // self.n)))


@wrong("8.3", names="padding-returned")
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
