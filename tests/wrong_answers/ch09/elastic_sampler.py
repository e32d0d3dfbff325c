"""Answers to 9.2, `ElasticSampler`: wrong in a plausible way, or right in another."""

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

    def mixed(self):
        return 1000 * self.seed + self.epoch

    def order(self):
        generator = torch.Generator().manual_seed(self.mixed())
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


@right("9.2")
class ForksAroundTheOrder(_Sampler):
    def order(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * self.seed + self.epoch)
            return torch.randperm(self.samples).tolist()


@right("9.2")
class TakesNumpysIndices(_Sampler):
    def order(self):
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.samples)

    def share(self, batch):
        return list(np.array_split(batch, self.world_size)[self.rank])


@wrong("9.2", names="not-once")
class DropsTheRest(_Sampler):
    def steps(self):
        return [batch for batch in super().steps() if len(batch) == self.global_batch]


@wrong("9.2", names="set-epoch")
class CountsStepsFromOne(_Sampler):
    """Goes to step 1 of an epoch, which is its second."""

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 1


@wrong("9.2", names="order")
class ForgetsTheEpoch(_Sampler):
    def mixed(self):
        return self.seed


@wrong("9.2", names="order")
class ProcessesNumbers(_Sampler):
    def order(self):
        return torch.randperm(self.samples).tolist()


@wrong("9.2", names="global-random")
class SeedsTheProcess(_Sampler):
    def order(self):
        torch.manual_seed(1000 * self.seed + self.epoch)
        return torch.randperm(self.samples).tolist()


@wrong("9.2", names="shares")
class BatchPerRank(_Sampler):
    def steps(self):
        order, size = self.order(), self.global_batch * self.world_size
        return [order[start : start + size] for start in range(0, self.samples, size)]


@wrong("9.2", names="shares")
class RoundsSharesUp(_Sampler):
    def share(self, batch):
        size = -(-len(batch) // self.world_size)
        return batch[self.rank * size : (self.rank + 1) * size]


@wrong("9.2", names="shares")
class SkipsEmptyLists(_Sampler):
    def __iter__(self):
        return (share for share in super().__iter__() if share)


@wrong("9.2", names="own-count")
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


@wrong("9.2", names="own-count")
class SavesEverything(_Sampler):
    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


@wrong("9.2", names="position")
class IteratesFromTheStart(_Sampler):
    def __iter__(self):
        self.done = 0
        yield from super().__iter__()


@wrong("9.2", names="position")
class CountsAfterTheYield(_Sampler):
    def __iter__(self):
        for batch in self.steps()[self.done :]:
            yield self.share(batch)
            self.done += 1


@wrong("9.2", names="not-resumed")
class LoadsThePositionOnly(_Sampler):
    def load_state_dict(self, state):
        self.done = state["done"]


@wrong("9.2", names="not-resumed")
class LoadsTheEpochOnly(_Sampler):
    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], 0


@wrong("9.2", names="set-epoch")
class StartsTheEpochAnew(_Sampler):
    def set_epoch(self, epoch):
        self.epoch, self.done = epoch, 0


@wrong("9.2", names="state-moves")
class HandsOutItsOwnDict(_Sampler):
    def __init__(self, *args):
        super().__init__(*args)
        self.state = {}

    def state_dict(self):
        self.state |= super().state_dict()
        return self.state


@wrong("9.2", names="not-plain")
class SavesAnArray(_Sampler):
    def state_dict(self):
        return {"epoch": self.epoch, "done": np.array(self.done)}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], int(state["done"])
