"""Exercise 3.3, `shard_indices`: what it asks for, and how it is checked."""

import math

import torch
from torch.utils.data import DistributedSampler

from course_exercises.authoring import Exercise, Wrong, expect, expect_type
from course_exercises.authoring.forbidden import called

sharding = Exercise(
    "3.3",
    "shard_indices",
    points=2,
    minutes=20,
    kind="core",
    parameters=("length", "rank", "world_size", "epoch", "seed"),
    hints=[
        (
            "Three steps: shuffle all indices, make the list long enough, take this rank's part. Which "
            "of them depend on the rank?"
        ),
        (
            "Only the last one does. All ranks shuffle with the seed `seed + epoch`, in a generator of "
            "their own; the parts are strides, `order[rank::world_size]`, not blocks."
        ),
        (
            "Draw `torch.randperm(length, generator=...)`. Repeat the order from its beginning until it "
            "has ceil(length / world_size) * world_size entries: a very small dataset has to be "
            "repeated more than once. Take every world_size-th entry, beginning at `rank`."
        ),
    ],
    misconceptions={
        "ranks-from-one": "A rank has the part of its neighbour. Ranks count from 0: rank r begins at order[r].",
        "blocks": "Each rank has a block of neighbours in the order. DistributedSampler deals them "
        "out like cards: rank, rank + world_size, rank + 2 * world_size, ...",
        "not-shuffled": "The indices are not shuffled.",
        "epoch-ignored": "Every epoch has the same order: the epoch does not enter the seed. This "
        "is what training does that never calls `set_epoch`.",
        "parts-overlap": "The ranks' parts overlap, and some samples are read by nobody. Either each rank shuffles "
        "with a seed of its own, or with none, or what is dealt out is not one shuffled order of all samples.",
        "shuffled-after": "You share the samples out first and then shuffle each part: a rank sees "
        "the same samples in every epoch.",
        "padding": "The order is not lengthened as DistributedSampler does it: it starts again from its beginning, "
        "order[0], order[1], ..., as often as it takes, until it has ceil(length / world_size) * world_size entries.",
        "global-generator": "The notebook's own random numbers have changed: `torch.manual_seed` "
        "sets the generator that everybody uses. Make a `torch.Generator` of your own.",
        "not-a-list": "Return a list of ints; of a tensor, `tolist()` makes one.",
        "another-order": "Every rank has its part of a shuffled order, and it is not that of this seed and this "
        "epoch: `torch.randperm(length)`, drawn from a new `torch.Generator` with the seed `seed + epoch`, and "
        "lengthened after it is shuffled.",
        "asks-the-group": "There is no process group here: nothing is sent. Rank and world size are "
        "among the arguments.",
    },
    failures={"process group has not been initialized": "asks-the-group"},
)


def _sampler(length: int, ranks: int, epoch: int, seed: int) -> list[list[int]]:
    """What DistributedSampler gives each rank."""
    parts = []
    for rank in range(ranks):
        sampler = DistributedSampler(range(length), ranks, rank, shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
    return parts


def _dealt(order: list[int], ranks: int) -> list[list[int]]:
    return [order[rank::ranks] for rank in range(ranks)]


def _order(length: int, seed: int) -> list[int]:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()


def _sharding_mistakes(length: int, ranks: int, epoch: int, seed: int) -> dict:
    """What each mistake gives, by misconception."""
    order = _order(length, seed + epoch)
    share = math.ceil(length / ranks)
    missing = share * ranks - length
    padded = order + order[:missing]
    plain = list(range(length)) + list(range(missing))
    parts = [sorted(part) for part in _dealt(plain, ranks)]
    unlengthened = _dealt(order, ranks), _dealt(order[: length - length % ranks], ranks)
    return {
        "asks-the-group": ranks > 1 and [order[rank:] for rank in range(ranks)],
        "padding": lambda got: (
            got in unlengthened
            or (not missing and len(got[0]) > share)
            or _same_start(got, unlengthened[0], share)
        ),
        "blocks": [padded[r * share : (r + 1) * share] for r in range(ranks)],
        "not-shuffled": lambda got: got in (_dealt(plain, ranks), _dealt(plain[:length], ranks)),
        "epoch-ignored": epoch and _dealt_and_padded(_order(length, seed), ranks),
        "parts-overlap": lambda got: _ranks_disagree(got, length, ranks),
        "shuffled-after": ranks > 1 and (lambda got: list(map(sorted, got)) == parts),
        "another-order": lambda got: (
            {len(part) for part in got} == {share}
            and {i for part in got for i in part} == set(order)
        ),
    }


def _same_start(got: list[list[int]], unpadded: list[list[int]], share: int) -> bool:
    """Whether the parts have the right size, and only what was repeated is wrong."""
    pairs = zip(got, unpadded, strict=True)
    return all(len(g) == share and g[: len(part)] == part for g, part in pairs)


def _dealt_and_padded(order: list[int], ranks: int) -> list[list[int]]:
    return _dealt(order + order[: -len(order) % ranks], ranks)


def _ranks_disagree(got: list[list[int]], length: int, ranks: int) -> bool:
    """Whether the parts, of the right size, leave samples out."""
    sizes = {len(part) for part in got}
    return sizes == {math.ceil(length / ranks)} and len({i for part in got for i in part}) < length


def _check_shards(answer, length: int, ranks: int, epoch: int, seed: int, likely=None) -> None:
    """`likely` are mistakes that come before the others."""
    with called(DistributedSampler.__init__, DistributedSampler.__iter__) as forbidden:
        got = [answer(length, rank, ranks, epoch, seed) for rank in range(ranks)]
    if forbidden:
        raise Wrong("torchs-own", expected="an order of your own", got=forbidden[0])
    for part in got:
        expect_type(part, list, likely=None if part is None else "not-a-list")
        for index in part:
            expect_type(index, int, likely="not-a-list")
    small = length < ranks
    likely = (likely or {}) | ({} if small else _sharding_mistakes(length, ranks, epoch, seed))
    expected = _sampler(length, ranks, epoch, seed)
    what = f"{length} samples, world size {ranks}, epoch {epoch}, seed {seed}"
    if ranks > 1 and not small:
        shifted = got[:-1] == expected[1:] or got[1:] == expected[:-1]
        likely = {"ranks-from-one": shifted, **likely}
    if small:
        likely = {"padding": sum(map(len, got)) < ranks * math.ceil(length / ranks), **likely}
    expect(got, expected, each="rank", what=what, likely=likely)


@sharding.requires("a dataset that divides by the number of ranks", at_home=True)
def a_dataset_that_divides_by_the_number(answer, draw):
    ranks = draw.integer(3, 5)
    _check_shards(answer, ranks * draw.integer(5, 9), ranks, 0, draw.integer(1, 99))


@sharding.requires("every epoch has its own order")
def every_epoch_has_its_own_order(answer, draw):
    ranks = draw.integer(2, 4)
    for epoch in (draw.integer(2, 9), 1):  # of epoch 1, the seed times the epoch is the seed
        _check_shards(answer, ranks * draw.integer(5, 9), ranks, epoch, draw.integer(1, 99))
    length, seed = ranks * draw.integer(10, 14), draw.integer(1, 99)
    kept = {"kept-from-before": _sampler(length, ranks, 0, seed)}
    for epoch in (0, draw.integer(1, 9)):  # the same dataset again
        _check_shards(answer, length, ranks, epoch, seed, kept if epoch else {})


@sharding.requires("a dataset that does not divide by the number of ranks")
def a_dataset_that_does_not_divide(answer, draw):
    ranks = draw.integer(3, 5)
    for extra in draw.sample((1, ranks - 1), 2):
        length = ranks * draw.integer(5, 9) + extra
        _check_shards(answer, length, ranks, draw.integer(0, 9), draw.integer(1, 99))


@sharding.requires("one rank, and more ranks than samples")
def one_rank_and_more_ranks_than_samples(answer, draw):
    few = draw.integer(2, 4)
    more = draw.integer(2 * few + 1, 3 * few)  # one repetition is not enough
    for length, ranks in ((draw.integer(5, 9), 1), (few + 1, few + 2), (few, more), (1, 4)):
        _check_shards(answer, length, ranks, draw.integer(0, 9), draw.integer(1, 99))


@sharding.requires("an empty dataset", failures={"exception": "padding"})
def an_empty_dataset(answer, draw):
    ranks = draw.integer(2, 4)
    got = [answer(0, rank, ranks, draw.integer(0, 9), draw.integer(1, 99)) for rank in range(ranks)]
    expect(got, [[]] * ranks, each="rank")


@sharding.requires("the notebook's own random numbers stay as they are", at_home=True)
def the_notebook_own_random_numbers_stay_as_they(answer, draw):
    torch.rand(3)  # the state is not that of a fresh seed, which seeding once more would bring back
    before = torch.get_rng_state()
    answer(draw.integer(8, 12), 1, 2, draw.integer(0, 9), draw.integer(1, 99))
    if not torch.equal(torch.get_rng_state(), before):
        raise Wrong("global-generator", expected="the same state", got="another state")
