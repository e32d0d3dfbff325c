"""9.2, `ElasticSampler`: answers written from the stub alone."""

import torch
from torch.utils.data import Sampler


class Right(Sampler):
    """A right answer, of which the wrong ones change a method."""

    def __init__(self, samples, global_batch, rank, world_size, seed=0):
        self.samples, self.global_batch = samples, global_batch
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.epoch, self.position = 0, 0

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def order(self):
        """All samples in the order of the epoch."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        return torch.randperm(self.samples, generator=generator).tolist()

    def __iter__(self):
        order = self.order()
        while self.position < self.samples:
            batch = order[self.position : self.position + self.global_batch]
            self.position += len(batch)
            yield batch[self.rank :: self.world_size]

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


class DealsOutTheEpoch(Right):
    """Gives each rank every n-th sample of the epoch, and cuts that into batches of its own."""

    def __iter__(self):
        mine = self.order()[self.rank :: self.world_size]
        share = max(1, self.global_batch // self.world_size)
        for start in range(self.position // self.world_size, len(mine), share):
            self.position = min(self.position + self.global_batch, self.samples)
            yield mine[start : start + share]


class CountsItsOwnSamples(Right):
    """Its state counts the samples of this rank, not of all ranks together."""

    def __iter__(self):
        order = self.order()
        for start in range(self.position * self.world_size, self.samples, self.global_batch):
            mine = order[start : start + self.global_batch][self.rank :: self.world_size]
            self.position += len(mine)
            yield mine


class BeginsEachTimeAtZero(Right):
    """Saves and loads its position, but `__iter__` begins with the first sample of the epoch."""

    def __iter__(self):
        self.position = 0
        return super().__iter__()


class CountsAfterTheYield(Right):
    """Moves its position on when the next list is asked for: a saved state lacks the last step."""

    def __iter__(self):
        order = self.order()
        while self.position < self.samples:
            batch = order[self.position : self.position + self.global_batch]
            yield batch[self.rank :: self.world_size]
            self.position += len(batch)


class SeedsEverybody(Right):
    """Draws the order with `torch.manual_seed`, which changes the global random state."""

    def order(self):
        torch.manual_seed(1_000_003 * self.seed + self.epoch)
        return torch.randperm(self.samples).tolist()


class DropsTheLastStep(Right):
    """Makes whole global batches only, as `drop_last=True` does."""

    def __iter__(self):
        order = self.order()
        while self.position + self.global_batch <= self.samples:
            batch = order[self.position : self.position + self.global_batch]
            self.position += self.global_batch
            yield batch[self.rank :: self.world_size]


class StartsTheEpochAgain(Right):
    """`set_epoch` always goes back to the beginning, also in the epoch that was just loaded."""

    def set_epoch(self, epoch):
        self.epoch, self.position = epoch, 0


class SkipsItsEmptyLists(Right):
    """Yields nothing in a step in which this rank has no sample: the ranks' steps differ."""

    def __iter__(self):
        return (mine for mine in super().__iter__() if mine)


ANSWERS = {
    "9.2": [
        DealsOutTheEpoch,
        CountsItsOwnSamples,
        BeginsEachTimeAtZero,
        CountsAfterTheYield,
        SeedsEverybody,
        DropsTheLastStep,
        StartsTheEpochAgain,
        SkipsItsEmptyLists,
    ]
}
