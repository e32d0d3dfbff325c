"""Rarer wrong answers to 9.2, `ElasticSampler`."""

import random

import torch

from tests.wrong_answers import rarer
from tests.wrong_answers.ch09.elastic_sampler import _Sampler


def _with(name, **methods):
    rarer("9.2")(type(name, (_Sampler,), methods))


_with("YieldsListsOfTensors", order=lambda self: list(torch.tensor(_Sampler.order(self))))
_with("TakesThemInOrder", order=lambda self: list(range(self.samples)))
_with("ForgetsTheSeed", mixed=lambda self: self.epoch)
_with("MultipliesBySeed", mixed=lambda self: self.seed * (self.epoch + 1))
_with("HashesAText", mixed=lambda self: hash(f"{self.seed}/{self.epoch}"))
_with("SavesItsRank", state_dict=lambda self: {**_Sampler.state_dict(self), "rank": self.rank})
_with(
    "SavesTheWorldSize",
    state_dict=lambda self: {**_Sampler.state_dict(self), "ranks": self.world_size},
)
_with("KeepsThePosition", set_epoch=lambda self, epoch: setattr(self, "epoch", epoch))
_with(
    "YieldsIndices", __iter__=lambda self: (i for share in _Sampler.__iter__(self) for i in share)
)


@rarer("9.2")
class AddsAStepAlways(_Sampler):
    def steps(self):
        return super().steps() + [[]] * (self.samples % self.global_batch == 0)


@rarer("9.2")
class FillsUpEachShare(_Sampler):
    """As DistributedSampler does, in each step."""

    def share(self, batch):
        missing = -len(batch) % self.world_size
        return super().share((batch * self.world_size)[: len(batch) + missing])


@rarer("9.2")
class StartsOverByItself(_Sampler):
    def __iter__(self):
        while True:
            yield from super().__iter__()
            self.epoch, self.done = self.epoch + 1, 0


@rarer("9.2")
class ForksAroundAllSteps(_Sampler):
    """The training runs within the fork, with the sampler's random numbers."""

    def order(self):
        torch.manual_seed(1000 * self.seed + self.epoch)
        return torch.randperm(self.samples).tolist()

    def __iter__(self):
        with torch.random.fork_rng(devices=[]):
            yield from super().__iter__()


@rarer("9.2")
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


@rarer("9.2")
class SeedsPython(_Sampler):
    def order(self):
        random.seed(1000 * self.seed + self.epoch)
        return random.sample(range(self.samples), self.samples)


@rarer("9.2")
class PreparesOneList(_Sampler):
    """As a loader with a worker does."""

    def __iter__(self):
        lists = super().__iter__()
        waiting = next(lists, None)
        while waiting is not None:
            following = next(lists, None)
            yield waiting
            waiting = following


@rarer("9.2")
class StartsOverAtTheEnd(_Sampler):
    """Ready for the next epoch, as it seems."""

    def __iter__(self):
        yield from super().__iter__()
        self.done = 0


@rarer("9.2")
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


@rarer("9.2")
class DrawsAsAnEpochIsSet(_Sampler):
    drawn = None

    def order(self):
        self.drawn = self.drawn or super().order()
        return self.drawn

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.drawn = None
        super().set_epoch(epoch)


@rarer("9.2")
class BeginsAnEndedEpochAgain(_Sampler):
    def set_epoch(self, epoch):
        if epoch != self.epoch or self.done * self.global_batch >= self.samples:
            self.epoch, self.done = epoch, 0


@rarer("9.2")
class GoesForwardOnly(_Sampler):
    def set_epoch(self, epoch):
        if epoch > self.epoch:
            super().set_epoch(epoch)


@rarer("9.2")
class CountsInTheDictThatItLoads(_Sampler):
    def __iter__(self):
        for share in super().__iter__():
            vars(self).get("state", {}).update(self.state_dict())
            yield share

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.state = state
