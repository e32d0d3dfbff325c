"""Answers to 8.1, `model_state_bytes`: wrong in a plausible way, or right in another."""

import math

from tests.wrong_answers import right, wrong


def ledger(
    stage_of=(3, 2, 1),
    shard=lambda count, n: -(-count // n),
    sizes=lambda given: given,
    total=lambda held, n: held,
    refused=lambda stage: not 0 <= stage <= 3,
):
    """An answer that counts in these ways: from which stage on each sort is sharded, how large a shard is,
    the bytes of each sort, what is made of them, and the stages that are refused."""

    def answer(
        parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
    ):
        if refused(stage):
            raise ValueError(f"no stage {stage}")
        counts = [shard(parameters, world_size) if stage >= s else parameters for s in stage_of]
        bytes_each = sizes((parameter_bytes, gradient_bytes, optimizer_bytes))
        return total(sum(c * b for c, b in zip(counts, bytes_each)), world_size)

    return answer


def named(name, answer):
    answer.__name__ = name
    return answer


@right("8.1")
def adds_stage_by_stage(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    if stage not in range(4):
        raise ValueError("0 to 3")
    saved = parameters - math.ceil(parameters / world_size)
    total = parameters * (parameter_bytes + gradient_bytes + optimizer_bytes)
    for size, first in ((optimizer_bytes, 1), (gradient_bytes, 2), (parameter_bytes, 3)):
        if stage >= first:
            total -= saved * size
    return total


parameters_first = wrong("8.1", names="which-stage")(
    named("parameters_first", ledger(stage_of=(1, 2, 3)))
)
divides_all = wrong("8.1", names="which-stage")(named("divides_all", ledger(stage_of=(1, 1, 1))))
counts_every_rank = wrong("8.1", names="all-ranks-together")(
    named("counts_every_rank", ledger(total=lambda held, n: n * held))
)
forgets_the_gradients = wrong("8.1", names="a-sort-missing")(
    named("forgets_the_gradients", ledger(sizes=lambda given: (given[0], 0, given[2])))
)
counts_gigabytes = wrong("8.1", names="other-unit")(
    named("counts_gigabytes", ledger(total=lambda held, n: held / 1e9))
)
rounds_down = wrong("8.1", names="rounding")(
    named("rounds_down", ledger(shard=lambda count, n: count // n))
)
cuts_the_total = wrong("8.1", names="rounding")(
    named(
        "cuts_the_total", ledger(shard=lambda count, n: count / n, total=lambda held, n: int(held))
    )
)
knows_adam_only = wrong("8.1", names="sizes-fixed")(
    named("knows_adam_only", ledger(sizes=lambda given: (2, 2, 12)))
)
accepts_any_stage = wrong("8.1", names="not-refused")(
    named("accepts_any_stage", ledger(refused=lambda stage: False))
)
