"""Exercise 5.7, `cut_for_a_v`: what it asks for, and how it is checked."""

from dataclasses import dataclass
from math import ceil

from course_exercises.authoring import Exercise, Wrong, expect_type

cutting = Exercise(
    "5.7",
    "cut_for_a_v",
    points=2,
    minutes=25,
    kind="core",
    parameters=("layers", "ranks", "embedding", "head"),
    hints=[
        (
            "Draw the V for three ranks and number its six stages. Which two stages does each rank have? On which rank is "
            "the embedding, and on which the head?"
        ),
        (
            "First find out how many layers each rank gets, and forget its two stages: rank 0 begins with the time of "
            "embedding and head, the others with nothing. Who gets the next layer?"
        ),
        (
            "Give each layer to the rank that has least to do so far. Then deal a rank's layers out between its two stages "
            "in the same way: the first stage of rank 0 begins with the embedding, its last one with the head. Rank r's "
            "numbers belong at the places r and 2 * ranks - 1 - r."
        ),
    ],
    things="layers",
    misconceptions={
        "not-counts": "Return how many layers each stage has, in the order of the line: 2 * ranks whole numbers, none "
        "of them negative, that add up to `layers`.",
        "other-order": "Your list has the two stages of a rank side by side. Its order is that of the line: down the "
        "ranks, and up again.",
        "ends-forgotten": "You deal the layers out as if the embedding and the head took no time. Their rank gets "
        "fewer layers.",
        "one-end": "You count one of the two ends only. On a V the first stage and the last one are on the same rank: "
        "rank 0 has the embedding and the head.",
        "looped": "You put stage s and stage ranks + s on one rank, as in the interleaved schedule. A V turns: rank r has "
        "the stages r and 2 * ranks - 1 - r.",
        "by-stage": "Your slowest stage is as fast as it can be, and your slowest rank is not. Where the head takes longer "
        "than a stage, rank 0's other stage has to make up for it: look at the sum of a rank's two stages.",
        "slowest-rank": "There is a cut whose slowest rank is faster.",
        "uneven": "The two stages of a rank can be more alike. Share its layers out between them, and count the embedding "
        "and the head, too.",
    },
)


@dataclass(frozen=True)
class _Case:
    layers: int
    ranks: int
    embedding: float = 0.0
    head: float = 0.0

    def __str__(self) -> str:
        ends = f"embedding {self.embedding:g}, head {self.head:g}"
        return f"{self.layers} layers on {self.ranks} ranks, {ends}"

    def stages(self, counts: list[int]) -> list[float]:
        """The time of each stage."""
        times = list(map(float, counts))
        times[0] += self.embedding
        times[-1] += self.head
        return times

    def slowest(self, counts: list[int], looped: bool = False) -> float:
        """The time of the slowest rank."""
        times, ranks = self.stages(counts), self.ranks
        others = times[ranks:] if looped else reversed(times[ranks:])
        return max(map(sum, zip(times[:ranks], others, strict=True)))

    def best(self) -> float:
        """The time of the slowest rank under the best cut: rank 0 may have any number of layers."""
        ends, others = self.embedding + self.head, self.ranks - 1
        if not others:
            return self.layers + ends
        return min(max(n + ends, ceil((self.layers - n) / others)) for n in range(self.layers + 1))

    def is_best(self, counts: list[int]) -> bool:
        return self.slowest(counts) == self.best()

    def best_looped(self) -> float:
        """As `best`, with the embedding on the first rank and the head on the last."""
        first = range(self.layers + 1)
        pairs = ((n, m) for n in first for m in range(self.layers + 1 - n))
        between = self.ranks - 2
        return min(
            max(n + self.embedding, m + self.head, ceil((self.layers - n - m) / between))
            for n, m in pairs
        )

    def best_stage(self) -> float:
        """The time of the slowest stage, where only that counts."""
        times = [self.embedding, self.head, *[0.0] * (2 * self.ranks - 2)]
        for _ in range(self.layers):
            times[times.index(min(times))] += 1
        return max(times)


def _counts(answer, case: _Case) -> list[int]:
    got = answer(case.layers, case.ranks, case.embedding, case.head)
    expect_type(got, (list, tuple), likely=None if got is None else "not-counts")
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in got)
    if not whole or len(got) != 2 * case.ranks or sum(got) != case.layers:
        expected = f"{2 * case.ranks} numbers that add up to {case.layers}"
        raise Wrong("not-counts", expected=expected, got=got)
    return list(got)


def _must_be_best(answer, case: _Case) -> None:
    counts = _counts(answer, case)
    if case.is_best(counts):
        return
    raise Wrong(
        _suspect(counts, case),
        expected=f"slowest rank {case.best():g} layers' time, for {case}",
        got=f"{case.slowest(counts):g} with {counts}",
    )


def _suspect(counts: list[int], case: _Case) -> str:
    embedding, head = case.embedding, case.head
    if not head:
        return "slowest-rank"
    alone = [_Case(case.layers, case.ranks, *ends) for ends in ((embedding, 0.0), (0.0, head))]
    by_rank = [*counts[::2], *reversed(counts[1::2])]
    suspects = {
        "ends-forgotten": _Case(case.layers, case.ranks).is_best(counts),
        "other-order": case.is_best(by_rank),
        "by-stage": max(case.stages(counts)) == case.best_stage(),
        "looped": case.ranks > 2 and case.slowest(counts, looped=True) == case.best_looped(),
        "one-end": embedding and any(one.is_best(counts) for one in alone),
    }
    return next((name for name, fits in suspects.items() if fits), "slowest-rank")


@cutting.requires("layers alone, also where they do not divide")
def layers_alone(answer, draw):
    ranks = draw.integer(3, 5)
    _must_be_best(answer, _Case(2 * ranks * draw.integer(2, 4), ranks))
    _must_be_best(answer, _Case(2 * ranks * draw.integer(2, 4) + draw.integer(2, ranks - 1), ranks))


@cutting.requires("the embedding and the head are on rank 0")
def both_ends_are_on_rank_0(answer, draw):
    for _ in range(4):
        ranks = draw.integer(3, 5)
        ends = [draw.integer(17, 31) / 8 for _ in range(2)]  # with one of them another cut is best
        _must_be_best(answer, _Case(ranks * draw.integer(9, 12), ranks, *ends))


@cutting.requires("a head that takes longer than a stage", needs_earlier=True)
def a_head_that_takes_longer_than_a_stage(answer, draw):
    ranks, share = draw.integer(3, 5), draw.integer(4, 6)
    head = share + draw.integer(9, 15) / 8
    _must_be_best(answer, _Case(2 * ranks * share, ranks, 0.0, head))


@cutting.requires("one rank, few layers, and an end that takes longer than all others' layers")
def at_the_edges(answer, draw):
    ranks = draw.integer(3, 5)
    _must_be_best(answer, _Case(draw.integer(3, 9), 1, 0.5, 2.25))
    _must_be_best(answer, _Case(ranks - 1, ranks, 0.25, 1.5))
    _must_be_best(answer, _Case(3 * ranks, ranks, 0.5, 20.0))


@cutting.requires("the two stages of a rank are as alike as whole layers allow", needs_earlier=True)
def the_two_stages_of_a_rank_are_alike(answer, draw):
    for _ in range(4):
        ranks = draw.integer(3, 5)
        ends = draw.integer(1, 7) / 8, draw.integer(9, 31) / 8
        case = _Case(draw.integer(8 * ranks, 12 * ranks), ranks, *ends)
        counts = _counts(answer, case)
        _must_be_best(lambda *_, counts=counts: counts, case)
        for rank in range(ranks):
            _must_be_alike(counts, case, rank)


def _must_be_alike(counts: list[int], case: _Case, rank: int) -> None:
    first, last = (case.embedding, case.head) if rank == 0 else (0.0, 0.0)
    pair = counts[rank], counts[-1 - rank]
    cuts = ((n, sum(pair) - n) for n in range(sum(pair) + 1))
    differences = {cut: abs(cut[0] + first - cut[1] - last) for cut in cuts}
    least = min(differences.values())
    if differences[pair] > least:
        raise Wrong(
            "uneven",
            expected=f"a difference of {least:g} layers' time on rank {rank}, for {case}",
            got=f"{differences[pair]:g} with {counts}",
        )
