"""Answers to 7.2, `RankGrid`: wrong in a plausible way, or right in another."""

import itertools

import numpy as np

from tests.wrong_answers import right, wrong


class _Grid:
    """A right answer with one thing wrong in each subclass."""

    def __init__(self, dp, pp, tp):
        self.dp, self.pp, self.tp = dp, pp, tp

    def refuse(self, fits):
        if not fits:
            raise ValueError("outside the grid")

    def split(self, rank):
        return rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp

    def coordinates(self, rank):
        self.refuse(0 <= rank < self.dp * self.pp * self.tp)
        return self.split(rank)

    def rank(self, d, p, t):
        self.refuse(0 <= d < self.dp and 0 <= p < self.pp and 0 <= t < self.tp)
        return self.number(d, p, t)

    def number(self, d, p, t):
        return d * self.pp * self.tp + p * self.tp + t


@right("7.2")
class LooksUp:
    def __init__(self, dp, pp, tp):
        self.places = list(itertools.product(range(dp), range(pp), range(tp)))

    def coordinates(self, rank):
        if rank not in range(len(self.places)):
            raise ValueError(f"no rank {rank}")
        return self.places[rank]

    def rank(self, d, p, t):
        return self.places.index((d, p, t))


@right("7.2")
class DividesTwice(_Grid):
    def split(self, rank):
        rest, t = divmod(rank, self.tp)
        return *divmod(rest, self.pp), t


@wrong("7.2", names="other-order")
class LetsDataChangeFastest(_Grid):
    def split(self, rank):
        return rank % self.dp, rank // self.dp % self.pp, rank // (self.dp * self.pp)


@wrong("7.2", names="other-order")
class GivesTheFastestFirst(_Grid):
    def split(self, rank):
        return super().split(rank)[::-1]


@wrong("7.2", names="wrong-stride")
class ForgetsARemainder(_Grid):
    def split(self, rank):
        return rank // (self.pp * self.tp), rank // self.tp, rank % self.tp


@wrong("7.2", names="another-grid")
class KeepsSizesInTheClass(_Grid):
    def __init__(self, dp, pp, tp):
        KeepsSizesInTheClass.dp, KeepsSizesInTheClass.pp, KeepsSizesInTheClass.tp = dp, pp, tp


_known = {}


@wrong("7.2", names="another-grid")
class RemembersForAllGrids(_Grid):
    def split(self, rank):
        return _known.setdefault(rank, super().split(rank))


@wrong("7.2", names="back-is-wrong")
class AddsUpWithWrongStrides(_Grid):
    def number(self, d, p, t):
        return d * self.dp * self.pp + p * self.pp + t


@wrong("7.2", names="refuses-what-is-inside")
class CountsRanksFromOne(_Grid):
    def coordinates(self, rank):
        self.refuse(0 < rank <= self.dp * self.pp * self.tp)
        return self.split(rank)


@wrong("7.2", names="not-refused")
class WrapsAround(_Grid):
    def refuse(self, fits):
        pass


@right("7.2")
class AsksNumpy:
    """Its functions refuse what is outside by themselves, and give NumPy's ints."""

    def __init__(self, dp, pp, tp):
        self.shape = dp, pp, tp

    def coordinates(self, rank):
        return np.unravel_index(rank, self.shape)

    def rank(self, d, p, t):
        return np.ravel_multi_index((d, p, t), self.shape)


@wrong("7.2", names="not-an-int")
class CutsFloatsOff(_Grid):
    def split(self, rank):
        return rank / (self.pp * self.tp) // 1, rank / self.tp // 1 % self.pp, rank % self.tp


@wrong("7.2", names="not-refused")
class LooksForANegativeSum(_Grid):
    def rank(self, d, p, t):
        self.refuse(d < self.dp and p < self.pp and t < self.tp and d + p + t >= 0)
        return self.number(d, p, t)
