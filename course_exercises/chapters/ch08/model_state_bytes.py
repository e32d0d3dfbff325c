"""Exercise 8.1, `model_state_bytes`: what it asks for, and how it is checked."""

import math
from collections.abc import Iterable

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
        "stage-0-sharded": "Stage 0 shards nothing: every rank holds everything, whatever the number of "
        "ranks.",
        "wrong-order": "The parameters are sharded first. It is the optimizer state that stage 1 "
        "shards: it is the largest part, and needs no other training loop.",
        "only-its-own": "A stage shards its own sort of bytes alone. Each stage keeps what the one before "
        "has sharded: stage 2 shards optimizer state and gradients.",
        "everything-divided": "Everything is divided by the number of ranks at a stage below 3. What a "
        "stage does not shard, every rank holds whole.",
        "all-ranks-together": "These are the bytes of all ranks together: asked is one rank's.",
        "a-sort-missing": "One sort of bytes is left out. A rank holds parameters, gradients and the optimizer's "
        "state.",
        "other-unit": "This is another unit. Bytes are asked, and neither GB nor GiB.",
        "one-too-many": "Where the parameters divide, a shard has one too many: `//` and then 1 more is "
        "not the same as rounding up.",
        "rounded-down": "A shard is rounded down, and the last parameters belong to no rank.",
        "not-rounded": "A shard is no whole number of parameters: round it up.",
        "rounded-late": "You round bytes up. It is the number of parameters in a shard that is whole: "
        "round it before you multiply.",
        "sizes-fixed": "The bytes for one parameter are arguments, and you count with the defaults.",
        "no-error": "A stage that does not exist gives a number: raise a ValueError.",
        "other-error": "A stage that does not exist ends in another exception than a ValueError.",
    },
)

SORTS = ("parameters", "gradients", "optimizer")
SHARDED = {0: (), 1: ("optimizer",), 2: ("optimizer", "gradients"), 3: SORTS}
MIXED = {"parameters": 2, "gradients": 2, "optimizer": 12}


def _held(count: int, shard: float, sharded: Iterable[str], sizes: dict[str, int]) -> float:
    return sum(size * (shard if sort in sharded else count) for sort, size in sizes.items())


def _ledger_mistakes(count: int, ranks: int, stage: int, sizes: dict[str, int]) -> dict:
    size = shard_size(count, ranks)
    reversed_order = SORTS[:stage]
    own = SHARDED[stage][-1:]
    right = _held(count, size, SHARDED[stage], sizes)
    rounded_late = (
        math.ceil(_held(count, count / ranks, SHARDED[stage], sizes)),
        sum(-(-count * n // (ranks if s in SHARDED[stage] else 1)) for s, n in sizes.items()),
    )
    without_one = [
        _held(count, size, SHARDED[stage], {s: n for s, n in sizes.items() if s != sort})
        for sort in SORTS
    ]
    cut_anyway = [_held(count, size, SHARDED[later], sizes) for later in (1, 2, 3)]
    return {
        "other-unit": lambda got: any(math.isclose(got * unit, right) for unit in (1e9, 2**30)),
        "sizes-fixed": sizes != MIXED and _held(count, size, SHARDED[stage], MIXED),
        "all-ranks-together": ranks * _held(count, size, SHARDED[stage], sizes),
        "stage-0-sharded": lambda got: stage == 0 and got in cut_anyway,
        "wrong-order": _held(count, size, reversed_order, sizes),
        "only-its-own": _held(count, size, own, sizes),
        "everything-divided": _held(count, size, SORTS, sizes),
        "one-too-many": _held(count, count // ranks + 1, SHARDED[stage], sizes),
        "rounded-down": _held(count, count // ranks, SHARDED[stage], sizes),
        "a-sort-missing": lambda got: got in without_one,
        "rounded-late": lambda got: got in rounded_late,
        "not-rounded": _held(count, count / ranks, SHARDED[stage], sizes),
    }


def _check_ledger(answer, count: int, ranks: int, stage: int, sizes=MIXED) -> None:
    named = {f"{sort.removesuffix('s')}_bytes": size for sort, size in sizes.items()}
    got = answer(count, ranks, stage, **({} if sizes == MIXED else named))
    expected = _held(count, shard_size(count, ranks), SHARDED[stage], sizes)
    what = f"{count} parameters, {ranks} ranks, stage {stage}"
    expect_type(got, (int, float))
    likely = _ledger_mistakes(count, ranks, stage, sizes)
    expect(got, expected, what=what, likely=likely, tolerance=0)


@ledger.requires("the 7.5 billion parameters of the ZeRO paper's first figure, on 64 ranks")
def the_7_5_billion_parameters_of_the_zero(answer, draw):
    for stage in range(4):
        _check_ledger(answer, 7_500_000_000, 64, stage)


@ledger.requires("numbers of parameters that do not divide")
def numbers_of_parameters_that_do_not_divide(answer, draw):
    ranks = draw.choice([5, 9, 11])  # a shard of one more is no whole number of bytes at any stage
    for stage in (3, 2, 1):
        _check_ledger(answer, ranks * draw.integer(100, 200) + 1, ranks, stage)


@ledger.requires("other bytes for one parameter", needs_earlier=True)
def other_bytes_for_one_parameter(answer, draw):
    sizes = dict(zip(SORTS, draw.sample(range(3, 12), 3), strict=True))
    for stage in range(4):
        _check_ledger(answer, 60 * draw.integer(10, 20), draw.integer(3, 6), stage, sizes)


@ledger.requires(
    "one rank holds everything, and more ranks than parameters hold one each", needs_earlier=True
)
def one_rank_holds_everything(answer, draw):
    few = draw.integer(3, 6)
    for stage in range(4):
        _check_ledger(answer, draw.integer(10, 99), 1, stage)
        _check_ledger(answer, few, few + draw.integer(1, 3), stage)


@ledger.requires("a stage that does not exist is refused with a ValueError")
def a_stage_that_does_not_exist_is_refused(answer, draw):
    for stage in (-1, 4):
        expected = f"a ValueError for stage {stage}"
        try:
            got = answer(100, 4, stage)
        except ValueError:
            continue
        except Exception as error:  # noqa: BLE001 - which one it is, is the question
            raise Wrong("other-error", expected=expected, got=type(error).__name__) from None
        raise Wrong("no-error", expected=expected, got=got)
