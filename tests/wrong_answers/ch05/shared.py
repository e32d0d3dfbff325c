"""What the answers of chapter 05 share."""

import functools
from itertools import chain, zip_longest

from course_utils.lesson.schedules import Op


def ops(kind, numbers, chunk=0):
    return [Op(kind, n, chunk) for n in numbers]


def turns(*lists):
    """Takes one of each list in turn; a list that is at its end is left out."""
    return [op for ops in zip_longest(*lists) for op in ops if op is not None]


def with_warm_up(stages, micro_batches, warm_up, capped=True):
    """A warm-up, pairs of F and B, and the rest of the B."""
    schedule = []
    for rank in range(stages):
        ahead = max(0, warm_up(rank))
        ahead = min(ahead, micro_batches) if capped else ahead
        row = ops("F", range(ahead))
        row += turns(ops("F", range(ahead, micro_batches)), ops("B", range(micro_batches - ahead)))
        schedule.append(row + ops("B", range(max(0, micro_batches - ahead), micro_batches)))
    return schedule


def both_orders(stages, micro_batches, chunks):
    """All F of a rank and all B of a rank, each in the right order."""
    groups = [range(n, n + stages) for n in range(0, micro_batches, stages)]
    forward = [op for group in groups for c in range(chunks) for op in ops("F", group, c)]
    turned = [op for group in groups for c in reversed(range(chunks)) for op in ops("B", group, c)]
    return forward, turned


def way(stages, chunks, rank):
    return (chunks - 1) * stages + 2 * (stages - 1 - rank)


def combined(stages, forward, backward, warm_up):
    """A warm-up, pairs of F and B, and the rest of the B."""
    rows = []
    for rank in range(stages):
        ahead = min(warm_up(rank), len(forward))
        rows.append(forward[:ahead] + turns(forward[ahead:], backward))
    return rows


def renamed(row, number):
    """The row with other numbers of micro-batches."""
    return [Op(op.kind, number(op.micro_batch), op.chunk) for op in row]


def _last_rank_backwards(rows):
    last = max(op.micro_batch for op in rows[0])
    return [*rows[:-1], renamed(rows[-1], lambda n: last - n)]


SPOILT = {
    "not-a-schedule": lambda rows: [[None] * rank + row for rank, row in enumerate(rows)],  # gaps
    "shared-list": lambda rows: [list(chain(*rows))] * len(rows),
    "cannot-run": _last_rank_backwards,
}


def spoilt(schedule, mistake):
    """The answer `schedule`, whose rows one thing happens to."""

    @functools.wraps(schedule)
    def answer(*arguments):
        return SPOILT[mistake](schedule(*arguments))

    answer.__name__ = mistake.replace("-", "_")
    return answer
