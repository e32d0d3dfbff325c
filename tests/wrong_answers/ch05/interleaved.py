"""Answers to 5.4, `interleaved`: wrong in a plausible way, or right in another."""

from itertools import chain

from course_utils.lesson import schedules
from course_utils.lesson.schedules import Op
from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch05.shared import (
    both_orders,
    combined,
    ops,
    spoilt,
    turns,
    way,
    with_warm_up,
)


def _interleaved_with(warm_up):
    def schedule(stages, micro_batches, chunks):
        orders = both_orders(stages, micro_batches, chunks)
        return combined(stages, *orders, lambda rank: warm_up(stages, chunks, rank))

    return schedule


@right("5.4")
def from_two_lists(stages, micro_batches, chunks):
    orders = both_orders(stages, micro_batches, chunks)
    return combined(stages, *orders, lambda rank: way(stages, chunks, rank))


@right("5.4")
def backward_first_after_the_warm_up(stages, micro_batches, chunks):
    forward, backward = both_orders(stages, micro_batches, chunks)
    rows = []
    for rank in range(stages):
        first = min(way(stages, chunks, rank) + 1, len(forward))
        rows.append(forward[:first] + turns(backward, forward[first:]))
    return rows


@right("5.4")
def warms_up_for_one_way_only(stages, micro_batches, chunks):
    """Half of Megatron-LM's slack: as fast where messages take no time, and smaller."""
    warm_up = _interleaved_with(lambda p, v, rank: (v - 1) * p + p - 1 - rank)
    return warm_up(stages, micro_batches, chunks)


@wrong("5.4", names="other-work")
def forgets_the_third_argument(stages, micro_batches, chunks):
    return with_warm_up(stages, micro_batches, lambda rank: stages - 1 - rank)


@wrong("5.4", names="other-work")
def numbers_the_pieces(stages, micro_batches, chunks):
    rows = from_two_lists(stages, micro_batches, chunks)
    return [
        [Op(op.kind, op.micro_batch, op.chunk * stages + rank) for op in row]
        for rank, row in enumerate(rows)
    ]


@wrong("5.4", names="chunks-not-reversed")
def backwards_from_chunk_0(stages, micro_batches, chunks):
    forward, _ = both_orders(stages, micro_batches, chunks)
    backward = [Op("B", op.micro_batch, op.chunk) for op in forward]
    return combined(stages, forward, backward, lambda rank: way(stages, chunks, rank))


@wrong("5.4", names="other-groups")
def goes_in_groups_of_chunks(stages, micro_batches, chunks):
    """Right where there are as many chunks as stages."""
    starts = range(0, micro_batches, chunks)
    groups = [range(n, min(n + chunks, micro_batches)) for n in starts]
    forward = [op for group in groups for c in range(chunks) for op in ops("F", group, c)]
    turned = [op for group in groups for c in reversed(range(chunks)) for op in ops("B", group, c)]
    return combined(stages, forward, turned, lambda rank: way(stages, chunks, rank))


@wrong("5.4", names="other-groups")
def runs_all_micro_batches_of_a_chunk(stages, micro_batches, chunks):
    numbers, pieces = range(micro_batches), range(chunks)
    forward = [Op("F", n, c) for c in pieces for n in numbers]
    backward = [Op("B", n, c) for c in reversed(pieces) for n in numbers]
    way = (chunks - 1) * micro_batches
    return combined(stages, forward, backward, lambda rank: way + 2 * (stages - 1 - rank))


@wrong("5.4", names="warm-up-short")
def warms_up_as_1f1b_does(stages, micro_batches, chunks):
    warm_up = _interleaved_with(lambda p, v, rank: p - 1 - rank)
    return warm_up(stages, micro_batches, chunks)


@wrong("5.4", names="too-many-activations")
def interleaves_gpipe(stages, micro_batches, chunks):
    orders = both_orders(stages, micro_batches, chunks)
    return [list(chain(*orders)) for _ in range(stages)]


@wrong("5.4", names="too-many-activations")
def warms_up_one_step_more(stages, micro_batches, chunks):
    warm_up = _interleaved_with(lambda p, v, rank: way(p, v, rank) + 1)
    return warm_up(stages, micro_batches, chunks)


@wrong("5.4", names="warm-up-not-capped")
def slices_beyond_the_end(stages, micro_batches, chunks):
    forward, backward = both_orders(stages, micro_batches, chunks)
    rows = []
    for rank in range(stages):
        ahead = way(stages, chunks, rank)
        pairs = [op for pair in zip(forward[ahead:], backward) for op in pair]
        rows.append(forward[:ahead] + pairs + backward[len(forward) - ahead :])
    return rows


@wrong("5.4", names="backwards-order")
def goes_the_whole_way_back(stages, micro_batches, chunks):
    """The list of all F from its end: the chunks come as they should, the micro-batches do not."""
    forward, _ = both_orders(stages, micro_batches, chunks)
    backward = [Op("B", op.micro_batch, op.chunk) for op in reversed(forward)]
    return combined(stages, forward, backward, lambda rank: way(stages, chunks, rank))


@wrong("5.4", names="slow")
def flushes_after_the_first_group(stages, micro_batches, chunks):
    first = from_two_lists(stages, stages, chunks)
    rest = from_two_lists(stages, max(0, micro_batches - stages), chunks)
    later = [[Op(op.kind, op.micro_batch + stages, op.chunk) for op in row] for row in rest]
    return [a + b for a, b in zip(first, later, strict=True)]


@wrong("5.4", names="built-in-schedule")
def calls_the_built_in_interleaved(stages, micro_batches, chunks):
    if chunks == 1:
        return schedules.one_forward_one_backward(stages, micro_batches)
    return schedules.interleaved(stages, micro_batches, chunks)


not_a_schedule = wrong("5.4", names="not-a-schedule")(spoilt(from_two_lists, "not-a-schedule"))
shared_list = wrong("5.4", names="shared-list")(spoilt(from_two_lists, "shared-list"))
cannot_run = wrong("5.4", names="cannot-run")(spoilt(from_two_lists, "cannot-run"))
