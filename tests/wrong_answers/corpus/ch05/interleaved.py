"""Rarer wrong answers to 5.4, `interleaved`."""

from course_utils.lesson.schedules import Op
from tests.wrong_answers import rarer
from tests.wrong_answers.ch05.interleaved import _interleaved_with, from_two_lists
from tests.wrong_answers.ch05.one_forward_one_backward import backward_first_in_each_pair
from tests.wrong_answers.ch05.shared import ops, way


@rarer("5.4")
def runs_1f1b_for_each_chunk(stages, micro_batches, chunks):
    rows = backward_first_in_each_pair(stages, micro_batches)
    return [[Op(op.kind, op.micro_batch, c) for c in range(chunks) for op in row] for row in rows]


@rarer("5.4")
def warms_up_for_the_chunks_only(stages, micro_batches, chunks):
    warm_up = _interleaved_with(lambda p, v, rank: (v - 1) * p)
    return warm_up(stages, micro_batches, chunks)


@rarer("5.4")
def warms_up_beyond_the_end(stages, micro_batches, chunks):
    rows = from_two_lists(stages, micro_batches, chunks)
    for rank, row in enumerate(rows):
        missing = way(stages, chunks, rank) - chunks * micro_batches
        row[:0] = ops("F", range(micro_batches, micro_batches + missing))
    return rows
