"""5.3, `one_forward_one_backward`: answers written from the stub alone."""

from course_utils.lesson.schedules import Op


def _row(warm_up, micro_batches):
    """F for the warm-up, then F and B in turn, then the B that remain."""
    row = [Op("F", i) for i in range(warm_up)]
    for i in range(warm_up, micro_batches):
        row += [Op("F", i), Op("B", i - warm_up)]
    return row + [Op("B", i) for i in range(micro_batches - warm_up, micro_batches)]


def one_more_in_the_warm_up(stages, micro_batches):
    """A warm-up of stages - rank: the first pair's F comes on top, one too many in memory."""
    return [_row(min(stages - rank, micro_batches), micro_batches) for rank in range(stages)]


def one_less_in_the_warm_up(stages, micro_batches):
    """A warm-up of stages - rank - 2: too short to keep the stages behind busy."""
    warm_ups = [max(0, stages - rank - 2) for rank in range(stages)]
    return [_row(min(warm_up, micro_batches), micro_batches) for warm_up in warm_ups]


def the_same_warm_up_everywhere(stages, micro_batches):
    """Every rank has rank 0's warm-up of stages - 1."""
    return [_row(min(stages - 1, micro_batches), micro_batches) for _ in range(stages)]


def warm_up_grows_with_the_rank(stages, micro_batches):
    """The ranks are counted from the wrong end: rank 0 has no warm-up, the last one the longest."""
    return [_row(min(rank, micro_batches), micro_batches) for rank in range(stages)]


def warm_up_beyond_the_batch(stages, micro_batches):
    """No min(): with fewer micro-batches than stages it begins micro-batches that do not exist."""
    rows = []
    for rank in range(stages):
        warm_up = stages - rank - 1
        row = [Op("F", i) for i in range(warm_up)]
        for i in range(warm_up, micro_batches):
            row += [Op("F", i), Op("B", i - warm_up)]
        rows.append(
            row + [Op("B", i) for i in range(max(0, micro_batches - warm_up), micro_batches)]
        )
    return rows


def the_rest_in_reverse(stages, micro_batches):
    """The remaining backward passes come last in, first out."""
    rows = []
    for rank in range(stages):
        warm_up = min(stages - rank - 1, micro_batches)
        row = _row(warm_up, micro_batches)
        cut = len(row) - warm_up
        rows.append(row[:cut] + row[cut:][::-1])
    return rows


def the_rest_left_out(stages, micro_batches):
    """Ends when there is no F left; the backward passes of the warm-up are missing."""
    rows = []
    for rank in range(stages):
        warm_up = min(stages - rank - 1, micro_batches)
        row = _row(warm_up, micro_batches)
        rows.append(row[: len(row) - warm_up])
    return rows


def backward_of_the_newest(stages, micro_batches):
    """Each pair is F and B of the same micro-batch; those of the warm-up come back at the end."""
    rows = []
    for rank in range(stages):
        warm_up = min(stages - rank - 1, micro_batches)
        row = [Op("F", i) for i in range(warm_up)]
        for i in range(warm_up, micro_batches):
            row += [Op("F", i), Op("B", i)]
        rows.append(row + [Op("B", i) for i in range(warm_up)])
    return rows


ANSWERS = {
    "5.3": [
        one_more_in_the_warm_up,
        one_less_in_the_warm_up,
        the_same_warm_up_everywhere,
        warm_up_grows_with_the_rank,
        warm_up_beyond_the_batch,
        the_rest_in_reverse,
        the_rest_left_out,
        backward_of_the_newest,
    ]
}
