"""Rarer wrong answers to 7.2, `RankGrid`."""

import torch

from tests.wrong_answers import rarer
from tests.wrong_answers.ch07.rank_grid import _Grid


@rarer("7.2")
class Asserts(_Grid):
    def refuse(self, fits):
        assert fits


@rarer("7.2")
class ComparesWithTheSizeOnly(_Grid):
    def coordinates(self, rank):
        self.refuse(rank < self.dp * self.pp * self.tp)
        return self.split(rank)


@rarer("7.2")
class LooksForANegativeRank(_Grid):
    def rank(self, d, p, t):
        number = self.number(d, p, t)
        self.refuse(d < self.dp and p < self.pp and t < self.tp and number >= 0)
        return number


@rarer("7.2")
class UnravelsATensor(_Grid):
    def split(self, rank):
        return torch.unravel_index(torch.tensor(rank), (self.dp, self.pp, self.tp))


@rarer("7.2")
class DividesOnTheWayBack(_Grid):
    def number(self, d, p, t):
        ranks = self.dp * self.pp * self.tp
        return d * ranks / self.dp + p * self.tp + t
