"""Exercise 5.7, `cut_for_a_v`: what it asks for, and how it is checked."""

from dataclasses import dataclass, replace
from numbers import Integral

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
            "First find out how many layers each rank gets; leave its two stages for later. Rank 0 begins with the time of "
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
        "not-counts": "Return how many layers each stage has, in the order of the line: 2 * ranks whole numbers (int), "
        "none of them negative, that add up to `layers`.",
        "other-order": "Your numbers would be right in another order. They stand in the order of the line: down the ranks, "
        "and up again, so that the last stage is rank 0's.",
        "ends-forgotten": "You deal the layers out as if the embedding and the head took no time. Their rank gets "
        "fewer layers.",
        "one-end": "You count one of the two ends only. On a V the first stage and the last one are on the same rank: "
        "rank 0 has the embedding and the head.",
        "looped": "You put stage s and stage ranks + s on one rank, as in the interleaved schedule. A V turns: rank r has "
        "the stages r and 2 * ranks - 1 - r.",
        "by-stage": "Your slowest stage is as fast as it can be, and your slowest rank is not. Where an end takes long, "
        "rank 0's other stage has to make up for it: look at the sum of a rank's two stages.",
        "slowest-rank": "There is a cut whose slowest rank is faster: compare the ranks' sums, and count the embedding "
        "and the head. A stage may have no layer.",
        "uneven": "The two stages of a rank can be more alike. Share its layers out between them, and count the "
        "embedding with stage 0 and the head with the last stage.",
    },
)


def _slowest(layers: int, begun: list[float]) -> float:
    """The least time of the slowest, where each layer goes to whoever has least to do."""
    busy = list(begun)
    for _ in range(layers):
        busy[busy.index(min(busy))] += 1
    return max(busy)


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
        return _slowest(self.layers, [self.embedding + self.head] + [0.0] * (self.ranks - 1))

    def is_best(self, counts: list[int]) -> bool:
        return self.slowest(counts) == self.best()

    def is_best_looped(self, counts: list[int]) -> bool:
        begun = [0.0] * self.ranks
        begun[0] += self.embedding
        begun[-1] += self.head
        return self.slowest(counts, looped=True) == _slowest(self.layers, begun)

    def is_best_by_stage(self, counts: list[int]) -> bool:
        stages = [self.embedding, *[0.0] * (2 * self.ranks - 2), self.head]
        return max(self.stages(counts)) == _slowest(self.layers, stages)


def _counts(answer, case: _Case) -> list[int]:
    got = answer(case.layers, case.ranks, case.embedding, case.head)
    expect_type(got, (list, tuple), likely=None if got is None else "not-counts")
    whole = all(isinstance(n, Integral) and not isinstance(n, bool) and n >= 0 for n in got)
    if not whole or len(got) != 2 * case.ranks or sum(got) != case.layers:
        expected = f"{2 * case.ranks} numbers (int) that add up to {case.layers}"
        raise Wrong("not-counts", expected=expected, got=str(got))
    return list(got)


def _must_be_best(answer, *cases: _Case) -> list[list[int]]:
    """Returns the answer's cuts. A mistake is named if it fits all of them."""
    cuts = [_counts(answer, case) for case in cases]
    for case, counts in zip(cases, cuts):
        if not case.is_best(counts):
            raise Wrong(
                _suspect(list(zip(cases, cuts))),
                expected=f"a slowest rank of {case.best():g}, for {case}",
                got=f"{case.slowest(counts):g} with {counts}",
            )
    return cuts


def _suspect(tried: list[tuple[_Case, list[int]]]) -> str:
    signs = [
        ("ends-forgotten", lambda c, n: replace(c, embedding=0.0, head=0.0).is_best(n)),
        ("other-order", lambda c, n: c.is_best([*n[::2], *reversed(n[1::2])])),
        ("other-order", lambda c, n: c.is_best(n[: c.ranks] + n[c.ranks :][::-1])),
        ("by-stage", _Case.is_best_by_stage),
        ("looped", _Case.is_best_looped),
        ("one-end", lambda c, n: replace(c, head=0.0).is_best(n)),
        ("one-end", lambda c, n: replace(c, embedding=0.0).is_best(n)),
    ]
    if not any(case.head for case, _ in tried):  # without ends all look the same
        return "slowest-rank"
    fitting = (name for name, sign in signs if all(sign(*each) for each in tried))
    return next(fitting, "slowest-rank")


@cutting.requires("layers alone, also where they do not divide")
def layers_alone(answer, draw):
    ranks = draw.integer(3, 5)
    _must_be_best(
        answer,
        _Case(2 * ranks * draw.integer(2, 4), ranks),
        _Case(2 * ranks * draw.integer(2, 4) + draw.integer(2, ranks - 1), ranks),
    )


@cutting.requires("the embedding and the head are on rank 0")
def both_ends_are_on_rank_0(answer, draw):
    cases = []
    for ranks in (2, 3, 4, *(draw.integer(3, 5) for _ in range(9))):
        ends = [draw.integer(17, 31) / 8 for _ in range(2)]  # with one of them another cut is best
        cases.append(_Case(ranks * draw.integer(9, 12), ranks, *ends))
    _must_be_best(answer, *cases)


@cutting.requires("an end that takes longer than a stage", needs_earlier=True)
def an_end_that_takes_longer_than_a_stage(answer, draw):
    ranks, share = draw.integer(3, 5), draw.integer(4, 6)
    end = share + draw.integer(9, 15) / 8
    layers = 2 * ranks * share
    _must_be_best(answer, _Case(layers, ranks, 0.0, end), _Case(layers, ranks, end, 0.25))


@cutting.requires("one rank, few layers, and an end that takes longer than the layers of a rank")
def at_the_edges(answer, draw):
    ranks = draw.integer(3, 5)
    _must_be_best(
        answer,
        _Case(draw.integer(3, 9), 1, 0.5, 2.25),
        _Case(ranks - 1, ranks, 0.25, 1.5),
        _Case(3 * ranks, ranks, 0.5, 20.0),
        _Case(3 * ranks, ranks, 20.0, 0.5),
    )


@cutting.requires("the two stages of a rank are as alike as whole layers allow", needs_earlier=True)
def the_two_stages_of_a_rank_are_alike(answer, draw):
    cases = [_Case(draw.integer(6, 9), 1, 0.5, 2.25)]
    for ranks in (2, *(draw.integer(3, 5) for _ in range(3))):
        small, large = draw.integer(1, 7) / 8, draw.integer(13, 31) / 8
        layers = draw.integer(8 * ranks, 12 * ranks)
        cases += [_Case(layers, ranks, small, large), _Case(layers, ranks, large, small + 1.25)]
    for case, counts in zip(cases, _must_be_best(answer, *cases)):
        for rank in range(case.ranks):
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
            expected=f"a difference of {least:g} on rank {rank}, for {case}",
            got=f"{differences[pair]:g} with {counts}",
        )
