"""Answers to 5.2, `gpipe`: wrong in a plausible way, or right in another."""

from course_utils.lesson import schedules
from course_utils.lesson.schedules import Op
from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch05.shared import ops, turns, with_warm_up


@right("5.2")
def backwards_in_reverse_order(stages, micro_batches):
    """As in figure 2c of the paper: the last micro-batch comes back first."""
    forward = ops("F", range(micro_batches))
    return [forward + ops("B", reversed(range(micro_batches))) for _ in range(stages)]


@right("5.2")
def by_nested_loops(stages, micro_batches):
    schedule = []
    for _ in range(stages):
        row = []
        for kind in ("F", "B"):
            for n in range(micro_batches):
                row.append(Op(kind, n))
        schedule.append(tuple(row))
    return schedule


@wrong("5.2", names="one-at-a-time")
def there_and_back(stages, micro_batches):
    numbers = range(micro_batches)
    return [turns(ops("F", numbers), ops("B", numbers)) for _ in range(stages)]


@wrong("5.2", names="slow")
def flushes_half_way(stages, micro_batches):
    first, second = range(micro_batches // 2), range(micro_batches // 2, micro_batches)
    row = ops("F", first) + ops("B", first) + ops("F", second) + ops("B", second)
    return [row for _ in range(stages)]


@wrong("5.2", names="backwards-early")
def writes_1f1b(stages, micro_batches):
    return with_warm_up(stages, micro_batches, lambda rank: stages - 1 - rank)


@wrong("5.2", names="cannot-run")
def begins_at_the_end(stages, micro_batches):
    numbers = range(micro_batches)
    return [ops("B", numbers) + ops("F", numbers) for _ in range(stages)]


@wrong("5.2", names="other-work")
def never_goes_back(stages, micro_batches):
    return [ops("F", range(micro_batches)) for _ in range(stages)]


@wrong("5.2", names="other-work")
def takes_the_rank_for_the_chunk(stages, micro_batches):
    return [
        [Op(kind, n, rank) for kind in "FB" for n in range(micro_batches)] for rank in range(stages)
    ]


@wrong("5.2", names="shared-list")
def appends_to_shared_lists(stages, micro_batches):
    schedule = [[]] * stages
    for kind in "FB":
        for rank in range(stages):
            for n in range(micro_batches):
                schedule[rank].append(Op(kind, n))
    return schedule


@wrong("5.2", names="not-a-schedule")
def one_list_for_all(stages, micro_batches):
    return ops("F", range(micro_batches)) + ops("B", range(micro_batches))


@wrong("5.2", names="built-in-schedule")
def calls_the_built_in_gpipe(stages, micro_batches):
    return schedules.gpipe(stages, micro_batches)
