"""Rarer wrong answers to 5.2, `gpipe`."""

from course_utils.lesson import schedules
from tests.wrong_answers import rarer
from tests.wrong_answers.ch05.gpipe import backwards_in_reverse_order, by_nested_loops
from tests.wrong_answers.ch05.shared import ops


@rarer("5.2")
def counts_from_one(stages, micro_batches):
    numbers = range(1, micro_batches + 1)
    return [ops("F", numbers) + ops("B", numbers) for _ in range(stages)]


@rarer("5.2")
def a_dict_by_rank(stages, micro_batches):
    return dict(enumerate(by_nested_loops(stages, micro_batches)))


@rarer("5.2")
def two_lists_for_each_rank(stages, micro_batches):
    numbers = range(micro_batches)
    return [[ops("F", numbers), ops("B", numbers)] for _ in range(stages)]


@rarer("5.2")
def every_other_rank_goes_back_from_the_end(stages, micro_batches):
    schedule = backwards_in_reverse_order(stages, micro_batches)
    schedule[::2] = by_nested_loops(len(schedule[::2]), micro_batches)
    return schedule


@rarer("5.2")
def uses_what_the_built_in_ones_use(stages, micro_batches):
    ops = schedules._ops(micro_batches, "FB")
    return [ops["F"] + ops["B"] for _ in range(stages)]
