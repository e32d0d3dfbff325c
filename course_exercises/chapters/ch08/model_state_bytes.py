"""Exercise 8.1, `model_state_bytes`: what it asks for, and how it is checked."""

import math
from collections.abc import Iterable
from itertools import combinations

from course_exercises.authoring import Exercise, Wrong, expect, expect_type
from course_exercises.chapters.ch08.shared import shard_size

ledger = Exercise(
    "8.1",
    "model_state_bytes",
    points=2,
    minutes=10,
    kind="first",
    parameters=("parameters", "world_size", "stage"),
    hints=[
        "Three sorts of bytes are held. For each: from which stage on is it sharded?",
        (
            "Each stage shards one sort more, and keeps sharded what was sharded before: first the "
            "optimizer state, then the gradients, then the parameters."
        ),
        (
            "Round the number of parameters in a shard up, before you multiply with bytes. Then add for "
            "each sort either all parameters or a shard of them, times its bytes."
        ),
    ],
    misconceptions={
        "which-stage": "You shard other sorts of bytes than this stage does. Stage 0 shards nothing; stage 1 the "
        "optimizer state, the largest part; stage 2 the gradients as well; stage 3 the parameters as well. What "
        "is not sharded, every rank holds whole.",
        "all-ranks-together": "You count the bytes of all ranks together. Return those of one rank.",
        "a-sort-missing": "You leave one sort of bytes out. A rank holds parameters, gradients and the optimizer's "
        "state.",
        "other-unit": "You return another unit. Return bytes, neither GB nor GiB.",
        "rounding": "You round otherwise. A shard is a whole number of parameters, rounded up where they do not divide "
        "and exact where they do (`//` rounds down, and 1 more is too much where they divide). Round that number, "
        "not bytes, before you multiply.",
        "sizes-fixed": "You count with the defaults. The bytes for one parameter are arguments.",
        "not-refused": "A stage that does not exist must raise a ValueError: look at it before you count.",
    },
)

SORTS = ("parameters", "gradients", "optimizer")
SHARDED = {0: (), 1: ("optimizer",), 2: ("optimizer", "gradients"), 3: SORTS}
MIXED = {"parameters": 2, "gradients": 2, "optimizer": 12}


def _held(count: int, shard: float, sharded: Iterable[str], sizes: dict[str, int]) -> float:
    return sum(size * (shard if sort in sharded else count) for sort, size in sizes.items())


def _mistakes(count: int, ranks: int, stage: int, sizes: dict[str, int]) -> dict:
    size, sharded = shard_size(count, ranks), SHARDED[stage]
    right, exact = (_held(count, shard, sharded, sizes) for shard in (size, count / ranks))
    of_other_sorts = [
        _held(count, size, sorts, sizes) for n in range(4) for sorts in combinations(SORTS, n)
    ]
    without_one = [_held(count, size, sharded, {**sizes, sort: 0}) for sort in SORTS]
    otherwise_rounded = [
        *(_held(count, count // ranks + more, sharded, sizes) for more in (0, 1)),
        *(exact, math.floor(exact), math.ceil(exact)),
        sum(-(-count * n // (ranks if s in sharded else 1)) for s, n in sizes.items()),
    ]
    return {
        "other-unit": lambda got: any(math.isclose(got * unit, right) for unit in (1e9, 2**30)),
        "sizes-fixed": sizes != MIXED and _held(count, size, sharded, MIXED),
        "all-ranks-together": ranks * right,
        "which-stage": lambda got: got in of_other_sorts,
        "a-sort-missing": lambda got: got in without_one,
        "rounding": lambda got: got in otherwise_rounded,
    }


def _check(answer, count: int, ranks: int, stage: int, sizes=MIXED) -> None:
    named = {f"{sort.removesuffix('s')}_bytes": size for sort, size in sizes.items()}
    got = answer(count, ranks, stage, **({} if sizes == MIXED else named))
    expect_type(got, (int, float))
    expected = _held(count, shard_size(count, ranks), SHARDED[stage], sizes)
    given = "" if sizes == MIXED else f", {' + '.join(map(str, sizes.values()))} bytes"
    what = f"{count} parameters, {ranks} ranks, stage {stage}{given}"
    likely = _mistakes(count, ranks, stage, sizes)
    expect(got, expected, what=what, likely=likely, tolerance=0)


@ledger.requires("the 7.5 billion parameters of the ZeRO paper's first figure, on 64 ranks")
def the_7_5_billion_parameters_of_the_zero(answer, draw):
    for stage in range(4):
        _check(answer, 7_500_000_000, 64, stage)


@ledger.requires("numbers of parameters that do not divide")
def numbers_of_parameters_that_do_not_divide(answer, draw):
    ranks = draw.choice([5, 9, 11])  # a shard of one more is no whole number of bytes at any stage
    for stage in (3, 2, 1):
        _check(answer, ranks * draw.integer(100, 200) + 1, ranks, stage)


@ledger.requires("other bytes for one parameter", needs_earlier=True)
def other_bytes_for_one_parameter(answer, draw):
    sizes = dict(zip(SORTS, draw.sample(range(3, 12), 3), strict=True))
    for stage in range(4):
        _check(answer, 60 * draw.integer(10, 20), draw.integer(3, 6), stage, sizes)


@ledger.requires(
    "one rank holds everything, and more ranks than parameters hold one each", needs_earlier=True
)
def one_rank_holds_everything(answer, draw):
    few = draw.integer(3, 6)
    for stage in range(4):
        _check(answer, draw.integer(10, 99), 1, stage)
        _check(answer, few, few + draw.integer(1, 3), stage)


@ledger.requires("a stage that does not exist is refused with a ValueError")
def a_stage_that_does_not_exist_is_refused(answer, draw):
    for stage in (-1, 4):
        try:
            got = answer(100, 4, stage)
        except ValueError:
            continue
        except Exception as error:  # noqa: BLE001 - which one it is, is the question
            got = type(error).__name__
        raise Wrong("not-refused", expected=f"a ValueError for stage {stage}", got=got)
