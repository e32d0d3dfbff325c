"""Rarer wrong answers to 5.3, `one_forward_one_backward`."""

import functools

from course_utils.lesson import schedules
from tests.wrong_answers import rarer
from tests.wrong_answers.ch05.shared import ops, turns, with_warm_up


@rarer("5.3")
def forgets_the_forward_of_the_pair(stages, micro_batches):
    """A backward pass first in each pair, after a warm-up for a forward pass first."""
    schedule = []
    for rank in range(stages):
        first = min(stages - 1 - rank, micro_batches)
        later = ops("F", range(first, micro_batches))
        schedule.append(ops("F", range(first)) + turns(ops("B", range(micro_batches)), later))
    return schedule


@rarer("5.3")
def warms_up_once_more(stages, micro_batches):
    return with_warm_up(stages, micro_batches, lambda rank: stages - rank)


@rarer("5.3")
def interleaves_one_chunk(stages, micro_batches):
    built_in = functools.partial(schedules.interleaved, chunks=1)
    return [row[:] for row in built_in(stages, micro_batches)]
