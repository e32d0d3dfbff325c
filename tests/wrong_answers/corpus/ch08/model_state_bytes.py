"""Rarer wrong answers to 8.1, `model_state_bytes`."""

import math

from tests.wrong_answers import rarer
from tests.wrong_answers.ch08.model_state_bytes import adds_stage_by_stage, ledger, named

shards_at_stage_0 = rarer("8.1")(named("shards_at_stage_0", ledger(stage_of=(3, 2, 0))))
adds_one = rarer("8.1")(named("adds_one", ledger(shard=lambda count, n: count // n + 1)))
divides_exactly = rarer("8.1")(named("divides_exactly", ledger(shard=lambda count, n: count / n)))
rounds_the_bytes = rarer("8.1")(
    named(
        "rounds_the_bytes",
        ledger(shard=lambda count, n: count / n, total=lambda held, n: math.ceil(held)),
    )
)
counts_gibibytes = rarer("8.1")(
    named("counts_gibibytes", ledger(total=lambda held, n: held / 2**30))
)


@rarer("8.1")
def shards_its_own_sort_alone(parameters, world_size, stage, *sizes, **named_sizes):
    """Each stage the sort that it adds."""
    stages = [[9] * 3, [9, 9, 1], [9, 2, 9], [3, 9, 9]]
    chosen = stages[stage] if 0 <= stage <= 3 else [9] * 3
    return ledger(stage_of=chosen)(parameters, world_size, stage, *sizes, **named_sizes)


@rarer("8.1")
def rounds_the_bytes_of_each_sort(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    adds_stage_by_stage(parameters, world_size, stage)  # refuses
    held = [parameters * size for size in (parameter_bytes, gradient_bytes, optimizer_bytes)]
    return sum(-(-b // world_size) if i >= 3 - stage else b for i, b in enumerate(held))


@rarer("8.1")
def looks_the_stage_up(parameters, world_size, stage, *sizes, **named_sizes):
    known = {0: 0, 1: 1, 2: 2, 3: 3}
    return adds_stage_by_stage(parameters, world_size, known[stage], *sizes, **named_sizes)
