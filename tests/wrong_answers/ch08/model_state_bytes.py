"""Answers to 8.1, `model_state_bytes`: wrong in a plausible way, or right in another."""

import math

from tests.wrong_answers import right, wrong


def _held(count, shard, sharded, sizes):
    return sum(size * (shard if each in sharded else count) for each, size in enumerate(sizes))


def _must_exist(stage):
    if not 0 <= stage <= 3:
        raise ValueError(f"no stage {stage}")


@right("8.1")
def adds_stage_by_stage(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    if stage not in range(4):
        raise ValueError("0 to 3")
    shard = math.ceil(parameters / world_size)
    total = parameters * (parameter_bytes + gradient_bytes + optimizer_bytes)
    saved = parameters - shard
    for size, first in ((optimizer_bytes, 1), (gradient_bytes, 2), (parameter_bytes, 3)):
        if stage >= first:
            total -= saved * size
    return total


@wrong("8.1", names="stage-0-sharded")
def shards_at_stage_0(parameters, world_size, stage, *sizes, **named):
    _must_exist(stage)
    return adds_stage_by_stage(parameters, world_size, max(stage, 1), *sizes, **named)


@wrong("8.1", names="wrong-order")
def parameters_first(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    _must_exist(stage)
    sizes = (parameter_bytes, gradient_bytes, optimizer_bytes)
    return _held(parameters, -(-parameters // world_size), range(stage), sizes)


@wrong("8.1", names="only-its-own")
def forgets_the_earlier_stages(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    _must_exist(stage)
    sizes = (parameter_bytes, gradient_bytes, optimizer_bytes)
    return _held(parameters, -(-parameters // world_size), (3 - stage,), sizes)


@wrong("8.1", names="everything-divided")
def divides_all(parameters, world_size, stage, *sizes, **named):
    _must_exist(stage)
    return adds_stage_by_stage(parameters, world_size, 3 if stage else 0, *sizes, **named)


@wrong("8.1", names="all-ranks-together")
def counts_every_rank(parameters, world_size, stage, *sizes, **named):
    return world_size * adds_stage_by_stage(parameters, world_size, stage, *sizes, **named)


def _with_shard(shard):
    def answer(
        parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
    ):
        _must_exist(stage)
        sizes = (parameter_bytes, gradient_bytes, optimizer_bytes)
        return _held(parameters, shard(parameters, world_size), range(3 - stage, 3), sizes)

    return answer


@wrong("8.1", names="rounded-down")
def rounds_down(parameters, world_size, stage, *sizes, **named):
    return _with_shard(lambda count, n: count // n)(parameters, world_size, stage, *sizes, **named)


@wrong("8.1", names="one-too-many")
def adds_one(parameters, world_size, stage, *sizes, **named):
    with_one_more = _with_shard(lambda count, n: count // n + 1)
    return with_one_more(parameters, world_size, stage, *sizes, **named)


@wrong("8.1", names="other-unit")
def counts_gigabytes(parameters, world_size, stage, *sizes, **named):
    return adds_stage_by_stage(parameters, world_size, stage, *sizes, **named) / 1e9


@wrong("8.1", names="other-unit")
def counts_gibibytes(parameters, world_size, stage, *sizes, **named):
    return adds_stage_by_stage(parameters, world_size, stage, *sizes, **named) / 2**30


@wrong("8.1", names="not-rounded")
def divides_exactly(parameters, world_size, stage, *sizes, **named):
    return _with_shard(lambda count, n: count / n)(parameters, world_size, stage, *sizes, **named)


@wrong("8.1", names="rounded-late")
def rounds_the_bytes(parameters, world_size, stage, *sizes, **named):
    return math.ceil(divides_exactly(parameters, world_size, stage, *sizes, **named))


@wrong("8.1", names="rounded-late")
def rounds_the_bytes_of_each_sort(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    _must_exist(stage)
    held = [parameters * size for size in (parameter_bytes, gradient_bytes, optimizer_bytes)]
    cut = range(3 - stage, 3)
    return sum(-(-b // world_size) if i in cut else b for i, b in enumerate(held))


@wrong("8.1", names="a-sort-missing")
def forgets_the_gradients(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    return adds_stage_by_stage(parameters, world_size, stage, parameter_bytes, 0, optimizer_bytes)


@wrong("8.1", names="sizes-fixed")
def knows_adam_only(parameters, world_size, stage, **named):
    return adds_stage_by_stage(parameters, world_size, stage)


@wrong("8.1", names="no-error")
def accepts_any_stage(parameters, world_size, stage, *sizes, **named):
    return adds_stage_by_stage(parameters, world_size, min(max(stage, 0), 3), *sizes, **named)


@wrong("8.1", names="other-error")
def looks_the_stage_up(parameters, world_size, stage, *sizes, **named):
    known = {0: 0, 1: 1, 2: 2, 3: 3}
    return adds_stage_by_stage(parameters, world_size, known[stage], *sizes, **named)
