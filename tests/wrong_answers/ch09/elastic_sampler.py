"""Answers to 9.2, `ElasticSampler`: wrong in a plausible way, or right in another."""

import math
import random

import numpy as np
import torch
from torch.utils.data import Sampler

from tests.wrong_answers import right, wrong


class _Sampler(Sampler):
    """A right answer in parts: the position is a number of steps, not of samples."""

    def __init__(self, samples, global_batch, rank, world_size, seed=0):
        self.samples, self.global_batch, self.seed = samples, global_batch, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = self.done = 0

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 0

    def order(self):
        generator = torch.Generator()
        generator.manual_seed(1000 * self.seed + self.epoch)
        return torch.randperm(self.samples, generator=generator).tolist()

    def steps(self):
        """The samples of each step, of all ranks together."""
        order = self.order()
        return [
            order[start : start + self.global_batch]
            for start in range(0, self.samples, self.global_batch)
        ]

    def share(self, batch):
        return batch[self.rank :: self.world_size]

    def __iter__(self):
        for batch in self.steps()[self.done :]:
            self.done += 1
            yield self.share(batch)

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]


@right("9.2")
class SharesBlocks(_Sampler):
    """Consecutive blocks, the first ones longer, and an order of Python's."""

    def order(self):
        order = list(range(self.samples))
        random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order

    def share(self, batch):
        ends = [len(batch) * rank // self.world_size for rank in range(self.world_size + 1)]
        return batch[ends[self.rank] : ends[self.rank + 1]]


@right("9.2")
class SavesWhatIsLeft(_Sampler):
    """The state holds the samples that nobody has used yet."""

    def __init__(self, *args):
        super().__init__(*args)
        self.left = self.order()

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch = epoch
            self.left = self.order()

    def __iter__(self):
        while self.left:
            batch, self.left = self.left[: self.global_batch], self.left[self.global_batch :]
            yield self.share(batch)

    def state_dict(self):
        return {"epoch": self.epoch, "left": self.left}

    def load_state_dict(self, state):
        self.epoch, self.left = state["epoch"], list(state["left"])


@wrong("9.2", names="not-lists")
class YieldsIndices(_Sampler):
    def __iter__(self):
        for share in super().__iter__():
            yield from share


@wrong("9.2", names="never-ends")
class StartsOverByItself(_Sampler):
    def __iter__(self):
        while True:
            yield from super().__iter__()
            self.epoch, self.done = self.epoch + 1, 0


@wrong("9.2", names="not-shuffled")
class TakesThemInOrder(_Sampler):
    def order(self):
        return list(range(self.samples))


@wrong("9.2", names="drops-last")
class DropsTheRest(_Sampler):
    def steps(self):
        return [batch for batch in super().steps() if len(batch) == self.global_batch]


@wrong("9.2", names="padded")
class FillsUpTheLastStep(_Sampler):
    def steps(self):
        steps = super().steps()
        steps[-1] = (steps[-1] + self.order())[: self.global_batch]
        return steps


@wrong("9.2", names="padded")
class FillsUpEachShare(_Sampler):
    """As DistributedSampler does, in each step."""

    def share(self, batch):
        missing = -len(batch) % self.world_size
        return super().share((batch * self.world_size)[: len(batch) + missing])


@wrong("9.2", names="own-order")
class RankInTheSeed(_Sampler):
    def order(self):
        generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch + self.rank)
        return torch.randperm(self.samples, generator=generator).tolist()


@wrong("9.2", names="own-order")
class ProcessesNumbers(_Sampler):
    def order(self):
        return torch.randperm(self.samples).tolist()


@wrong("9.2", names="global-batch-changes")
class BatchPerRank(_Sampler):
    def steps(self):
        order, size = self.order(), self.global_batch * self.world_size
        return [order[start : start + size] for start in range(0, self.samples, size)]


@wrong("9.2", names="remainder-lost")
class RoundsTheShareDown(_Sampler):
    def share(self, batch):
        size = len(batch) // self.world_size
        return batch[self.rank * size : (self.rank + 1) * size] if size else super().share(batch)


@wrong("9.2", names="batches-differ")
class CutsTheOrderFirst(_Sampler):
    """Each rank has every n-th sample of the epoch, then makes steps of them."""

    def share(self, batch):
        own = self.order()[self.rank :: self.world_size]
        steps = math.ceil(self.samples / self.global_batch)
        step = self.done - 1
        return (
            own[len(own) * step // steps : len(own) * (step + 1) // steps]
            if (self.world_size > 1)
            else batch
        )


@wrong("9.2", names="uneven")
class LastRankTakesTheRest(_Sampler):
    def share(self, batch):
        size = len(batch) // self.world_size
        last = self.rank == self.world_size - 1
        return (
            batch[self.rank * size :] if last else batch[self.rank * size : (self.rank + 1) * size]
        )


@wrong("9.2", names="steps-differ")
class SkipsEmptyLists(_Sampler):
    def __iter__(self):
        return (share for share in super().__iter__() if share)


@wrong("9.2", names="starts-late")
class CountsStepsFromOne(_Sampler):
    """Goes to step 1 of an epoch, which is its second."""

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 1


@wrong("9.2", names="same-order")
class ForgetsTheEpoch(_Sampler):
    def order(self):
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(self.samples, generator=generator).tolist()


@wrong("9.2", names="seed-ignored")
class ForgetsTheSeed(_Sampler):
    def order(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return torch.randperm(self.samples, generator=generator).tolist()


@wrong("9.2", names="global-random")
class SeedsTheProcess(_Sampler):
    def order(self):
        torch.manual_seed(1000 * self.seed + self.epoch)
        return torch.randperm(self.samples).tolist()


@wrong("9.2", names="global-random")
class SeedsPython(_Sampler):
    def order(self):
        random.seed(1000 * self.seed + self.epoch)
        return random.sample(range(self.samples), self.samples)


@wrong("9.2", names="not-plain")
class SavesAnArray(_Sampler):
    def state_dict(self):
        return {"epoch": self.epoch, "done": np.array(self.done)}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], int(state["done"])


@wrong("9.2", names="from-zero")
class LoadsTheEpochOnly(_Sampler):
    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], 0


@wrong("9.2", names="from-zero")
class IteratesFromTheStart(_Sampler):
    def __iter__(self):
        self.done = 0
        yield from super().__iter__()


@wrong("9.2", names="epoch-lost")
class LoadsThePositionOnly(_Sampler):
    def load_state_dict(self, state):
        self.done = state["done"]


@wrong("9.2", names="one-behind")
class CountsAfterTheYield(_Sampler):
    def __iter__(self):
        for batch in self.steps()[self.done :]:
            yield self.share(batch)
            self.done += 1


@wrong("9.2", names="one-ahead")
class PreparesAllLists(_Sampler):
    def __iter__(self):
        return iter(list(super().__iter__()))


@wrong("9.2", names="one-ahead")
class PreparesOneList(_Sampler):
    """As a loader with a worker does."""

    def __iter__(self):
        lists = super().__iter__()
        waiting = next(lists, None)
        while waiting is not None:
            following = next(lists, None)
            yield waiting
            waiting = following


@wrong("9.2", names="reshuffles")
class ShufflesTheRest(_Sampler):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.resumed_at = self.done

    def order(self):
        order = super().order()
        if not hasattr(self, "resumed_at"):
            return order
        used = self.resumed_at * self.global_batch
        rest = order[used:]
        random.Random(self.seed).shuffle(rest)
        return order[:used] + rest


@wrong("9.2", names="set-epoch-resets")
class StartsTheEpochAnew(_Sampler):
    def set_epoch(self, epoch):
        self.epoch, self.done = epoch, 0


@wrong("9.2", names="position-kept")
class KeepsThePosition(_Sampler):
    def set_epoch(self, epoch):
        self.epoch = epoch


@wrong("9.2", names="position-per-rank")
class CountsItsOwnSamples(_Sampler):
    """What one rank has used, times the ranks that there are now."""

    def __init__(self, *args):
        super().__init__(*args)
        self.own = 0

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.own = epoch, 0

    def __iter__(self):
        order, position = self.order(), self.own * self.world_size
        while position < self.samples:
            share = self.share(order[position : position + self.global_batch])
            position += self.global_batch
            self.own += len(share)
            yield share

    def state_dict(self):
        return {"epoch": self.epoch, "own": self.own}

    def load_state_dict(self, state):
        self.epoch, self.own = state["epoch"], state["own"]


@wrong("9.2", names="restores-rank")
class SavesEverything(_Sampler):
    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


@wrong("9.2", names="states-differ")
class SavesItsRank(_Sampler):
    def state_dict(self):
        return {**super().state_dict(), "rank": self.rank}


@wrong("9.2", names="state-moves")
class HandsOutItsOwnDict(_Sampler):
    def __init__(self, *args):
        super().__init__(*args)
        self.state = {}

    def state_dict(self):
        self.state |= super().state_dict()
        return self.state


@wrong("9.2", names="state-moves")
class CountsInTheDictThatItLoads(_Sampler):
    def __iter__(self):
        for share in super().__iter__():
            vars(self).get("state", {}).update(self.state_dict())
            yield share

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.state = state


@wrong("9.2", names="never-goes-back")
class GoesForwardOnly(_Sampler):
    def set_epoch(self, epoch):
        if epoch > self.epoch:
            super().set_epoch(epoch)


@wrong("9.2", names="uneven")
class RoundsSharesUp(_Sampler):
    def share(self, batch):
        size = -(-len(batch) // self.world_size)
        return batch[self.rank * size : (self.rank + 1) * size]


@wrong("9.2", names="end-forgotten")
class StartsOverAtTheEnd(_Sampler):
    """Ready for the next epoch, as it seems."""

    def __iter__(self):
        yield from super().__iter__()
        self.done = 0


@wrong("9.2", names="not-lists")
class YieldsTensors(_Sampler):
    def __iter__(self):
        for batch in super().__iter__():
            yield torch.tensor(batch)


@wrong("9.2", names="not-lists")
class YieldsListsOfTensors(_Sampler):
    def order(self):
        generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        return list(torch.randperm(self.samples, generator=generator))


@wrong("9.2", names="empty-step")
class AddsAStepAlways(_Sampler):
    def steps(self):
        return super().steps() + [[]] * (self.samples % self.global_batch == 0)


@wrong("9.2", names="seed-zero")
class MultipliesBySeed(_Sampler):
    def order(self):
        generator = torch.Generator().manual_seed(self.seed * (self.epoch + 1))
        return torch.randperm(self.samples, generator=generator).tolist()


@wrong("9.2", names="per-process")
class HashesAText(_Sampler):
    def order(self):
        generator = torch.Generator().manual_seed(hash(f"{self.seed}/{self.epoch}"))
        return torch.randperm(self.samples, generator=generator).tolist()


@wrong("9.2", names="global-random")
class SeedsAsAnEpochIsSet(_Sampler):
    def __init__(self, *args):
        super().__init__(*args)
        self.shuffle()

    def shuffle(self):
        torch.manual_seed(1000 * self.seed + self.epoch)
        self.shuffled = torch.randperm(self.samples).tolist()

    def order(self):
        return self.shuffled

    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        self.shuffle()

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.shuffle()


@wrong("9.2", names="global-random")
class ForksAroundAllSteps(_Sampler):
    """The training runs within the fork, with the sampler's random numbers."""

    def order(self):
        torch.manual_seed(1000 * self.seed + self.epoch)
        return torch.randperm(self.samples).tolist()

    def __iter__(self):
        with torch.random.fork_rng(devices=[]):
            yield from super().__iter__()


@right("9.2")
class ForksAroundTheOrder(_Sampler):
    def order(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * self.seed + self.epoch)
            return torch.randperm(self.samples).tolist()


@wrong("9.2", names="ended-begins-again")
class BeginsAnEndedEpochAgain(_Sampler):
    def set_epoch(self, epoch):
        if epoch != self.epoch or self.done * self.global_batch >= self.samples:
            self.epoch, self.done = epoch, 0


@wrong("9.2", names="iterates-from-start")
class GoesOnAfterALoadOnly(_Sampler):
    loaded = False

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.loaded = True

    def set_epoch(self, epoch):
        self.loaded = self.loaded and epoch == self.epoch
        super().set_epoch(epoch)

    def __iter__(self):
        self.done = self.done if self.loaded else 0
        self.loaded = False
        yield from super().__iter__()


@wrong("9.2", names="order-kept")
class DrawsAsAnEpochIsSet(_Sampler):
    drawn = None

    def order(self):
        self.drawn = self.drawn or super().order()
        return self.drawn

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.drawn = None
        super().set_epoch(epoch)


@wrong("9.2", names="world-size-in-state")
class SavesTheWorldSize(_Sampler):
    def state_dict(self):
        return {**super().state_dict(), "world_size": self.world_size}


@right("9.2")
class TakesNumpysIndices(_Sampler):
    def order(self):
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.samples)

    def share(self, batch):
        return list(np.array_split(batch, self.world_size)[self.rank])
