"""7.2, `RankGrid`: answers written from the stub alone."""


class _Grid:
    def __init__(self, dp, pp, tp):
        self.dp, self.pp, self.tp = dp, pp, tp

    def _must_be_inside(self, d, p, t):
        if not (0 <= d < self.dp and 0 <= p < self.pp and 0 <= t < self.tp):
            raise ValueError((d, p, t))

    def coordinates(self, rank):
        if not 0 <= rank < self.dp * self.pp * self.tp:
            raise ValueError(rank)
        rest, t = divmod(rank, self.tp)
        return (*divmod(rest, self.pp), t)

    def rank(self, d, p, t):
        self._must_be_inside(d, p, t)
        return (d * self.pp + p) * self.tp + t


class CountsDataFastest(_Grid):
    """The first dimension changes fastest, not the last."""

    def coordinates(self, rank):
        super().coordinates(rank)
        rest, d = divmod(rank, self.dp)
        t, p = divmod(rest, self.pp)
        return d, p, t

    def rank(self, d, p, t):
        self._must_be_inside(d, p, t)
        return (t * self.pp + p) * self.dp + d


class MultipliesByItsOwnSize(_Grid):
    """Uses dp and pp as strides, where those of the later dimensions belong."""

    def rank(self, d, p, t):
        self._must_be_inside(d, p, t)
        return d * self.dp * self.pp + p * self.pp + t


class TakesNegativeNumbers(_Grid):
    """Looks only whether a number is too large: -1 is let through."""

    def _must_be_inside(self, d, p, t):
        if d >= self.dp or p >= self.pp or t >= self.tp:
            raise ValueError((d, p, t))


class LooksAtTheRankOnly(_Grid):
    """Coordinates outside the grid are refused only where the rank that comes out is."""

    def rank(self, d, p, t):
        rank = (d * self.pp + p) * self.tp + t
        self.coordinates(rank)
        return rank


class RaisesIndexError(_Grid):
    """The refusal of a rank is an IndexError."""

    def coordinates(self, rank):
        return [(d, p, t) for d in range(self.dp) for p in range(self.pp) for t in range(self.tp)][
            rank
        ]


class SwapsStagesAndData(_Grid):
    """Returns (p, d, t)."""

    def coordinates(self, rank):
        d, p, t = super().coordinates(rank)
        return p, d, t


ANSWERS = {
    "7.2": [
        CountsDataFastest,
        MultipliesByItsOwnSize,
        TakesNegativeNumbers,
        LooksAtTheRankOnly,
        RaisesIndexError,
        SwapsStagesAndData,
    ]
}
