"""Plausible wrong answers, and other right ones, to the exercises of chapter 05."""

import functools
import math
from itertools import chain, zip_longest

import torch
import torch.distributed as dist

from course_utils import schedules
from course_utils.schedules import Op
from tests.wrong_answers import right, wrong

# ---- 5.1 bubble_share ----------------------------------------------------------------------------


@right("5.1")
def idle_passes_of_all_ranks(stages, micro_batches, chunks=1):
    work = stages * chunks * micro_batches
    idle = stages * (stages - 1)
    return 1 - work / (work + idle)


@wrong("5.1", names="of-ideal")
def idle_over_work(stages, micro_batches, chunks=1):
    return (stages - 1) / (chunks * micro_batches)


@wrong("5.1", names="all-stages")
def counts_every_stage(stages, micro_batches, chunks=1):
    return stages / (chunks * micro_batches + stages)


@wrong("5.1", names="counted-twice")
def waits_as_long_at_both_ends(stages, micro_batches, chunks=1):
    waiting = 2 * (stages - 1)
    return waiting / (chunks * micro_batches + waiting)


@wrong("5.1", names="swapped")
def takes_micro_batches_for_stages(stages, micro_batches, chunks=1):
    return (micro_batches - 1) / (micro_batches + stages - 1)


@wrong("5.1", names="busy-share")
def work_over_everything(stages, micro_batches, chunks=1):
    return chunks * micro_batches / (chunks * micro_batches + stages - 1)


@wrong("5.1", names="no-overlap")
def one_stage_works_at_a_time(stages, micro_batches, chunks=1):
    return 1 - 1 / stages


@wrong("5.1", names="percent")
def in_percent(stages, micro_batches, chunks=1):
    return 100 * (stages - 1) / (chunks * micro_batches + stages - 1)


@wrong("5.1", names="rounded-down")
def divides_whole_numbers(stages, micro_batches, chunks=1):
    return (stages - 1) // (chunks * micro_batches + stages - 1)


@wrong("5.1", names="chunks-ignored")
def forgets_the_chunks(stages, micro_batches, chunks=1):
    return (stages - 1) / (micro_batches + stages - 1)


@wrong("5.1", names="chunks-lengthen")
def waits_for_every_chunk(stages, micro_batches, chunks=1):
    idle = chunks * (stages - 1)
    return idle / (micro_batches + idle)


@wrong("5.1", names="share-divided")
def divides_the_share(stages, micro_batches, chunks=1):
    return (stages - 1) / (micro_batches + stages - 1) / chunks


@wrong("5.1", names="passes-not-share")
def counts_idle_passes(stages, micro_batches, chunks=1):
    return stages - 1


@wrong("5.1", names="one-rank-of-all")
def work_of_one_over_time_of_all(stages, micro_batches, chunks=1):
    work = chunks * micro_batches
    return 1 - work / (stages * (work + stages - 1))


@wrong("5.1", names="no-chunks")
def takes_two_numbers(stages, micro_batches):
    return (stages - 1) / (micro_batches + stages - 1)


@wrong("5.1", names="few-micro-batches")
def lets_the_stages_without_work_stand(stages, micro_batches, chunks=1):
    if micro_batches < stages:
        return 1 - micro_batches / stages
    return (stages - 1) / (chunks * micro_batches + stages - 1)


@wrong("5.1", names="chunks-as-stages")
def makes_stages_of_chunks(stages, micro_batches, chunks=1):
    return (stages * chunks - 1) / (micro_batches + stages * chunks - 1)


# ---- 5.2 gpipe -----------------------------------------------------------------------------------


def _ops(kind, numbers, chunk=0):
    return [Op(kind, n, chunk) for n in numbers]


def _turns(*lists):
    """Takes one of each list in turn; a list that is at its end is left out."""
    return [op for ops in zip_longest(*lists) for op in ops if op is not None]


@right("5.2")
def backwards_in_reverse_order(stages, micro_batches):
    """As in figure 2c of the paper: the last micro-batch comes back first."""
    forward = _ops("F", range(micro_batches))
    return [forward + _ops("B", reversed(range(micro_batches))) for _ in range(stages)]


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
    return [_turns(_ops("F", numbers), _ops("B", numbers)) for _ in range(stages)]


@wrong("5.2", names="slow")
def flushes_half_way(stages, micro_batches):
    first, second = range(micro_batches // 2), range(micro_batches // 2, micro_batches)
    row = _ops("F", first) + _ops("B", first) + _ops("F", second) + _ops("B", second)
    return [row for _ in range(stages)]


@wrong("5.2", names="backwards-early")
def writes_1f1b(stages, micro_batches):
    return _with_warm_up(stages, micro_batches, lambda rank: stages - 1 - rank)


@wrong("5.2", names="cannot-run")
def begins_at_the_end(stages, micro_batches):
    numbers = range(micro_batches)
    return [_ops("B", numbers) + _ops("F", numbers) for _ in range(stages)]


@wrong("5.2", names="counted-from-one")
def counts_from_one(stages, micro_batches):
    numbers = range(1, micro_batches + 1)
    return [_ops("F", numbers) + _ops("B", numbers) for _ in range(stages)]


@wrong("5.2", names="missing")
def never_goes_back(stages, micro_batches):
    return [_ops("F", range(micro_batches)) for _ in range(stages)]


@wrong("5.2", names="shared-list")
def extends_one_list_again_and_again(stages, micro_batches):
    row, schedule = [], []
    for _ in range(stages):
        row += _ops("F", range(micro_batches)) + _ops("B", range(micro_batches))
        schedule.append(row)
    return schedule


@wrong("5.2", names="not-ops")
def writes_names(stages, micro_batches):
    return [[f"{kind}{n}" for kind in "FB" for n in range(micro_batches)] for _ in range(stages)]


@wrong("5.2", names="idle-entries")
def draws_the_gaps(stages, micro_batches):
    forward, backward = _ops("F", range(micro_batches)), _ops("B", range(micro_batches))
    return [
        [None] * rank + forward + [None] * 3 * (stages - 1 - rank) + backward
        for rank in range(stages)
    ]


@wrong("5.2", names="not-one-list-per-rank")
def one_list_per_micro_batch(stages, micro_batches):
    return [_ops("F", [n] * stages) + _ops("B", [n] * stages) for n in range(micro_batches)]


@wrong("5.2", names="flat-list")
def one_list_for_all(stages, micro_batches):
    return _ops("F", range(micro_batches)) + _ops("B", range(micro_batches))


@wrong("5.2", names="unknown-work")
def one_micro_batch_too_many(stages, micro_batches):
    numbers = range(micro_batches + 1)
    return [_ops("F", numbers) + _ops("B", numbers) for _ in range(stages)]


@wrong("5.2", names="shared-list")
def appends_to_shared_lists(stages, micro_batches):
    schedule = [[]] * stages
    for kind in "FB":
        for rank in range(stages):
            for n in range(micro_batches):
                schedule[rank].append(Op(kind, n))
    return schedule


@wrong("5.2", names="doubled")
def takes_the_rank_for_the_number(stages, micro_batches):
    return [
        _ops("F", [rank] * micro_batches) + _ops("B", [rank] * micro_batches)
        for rank in range(stages)
    ]


@wrong("5.2", names="not-one-list-per-rank")
def a_dict_by_rank(stages, micro_batches):
    return dict(enumerate(by_nested_loops(stages, micro_batches)))


@wrong("5.2", names="not-one-list-per-rank")
def yields_its_lists(stages, micro_batches):
    yield from by_nested_loops(stages, micro_batches)


@wrong("5.2", names="not-ops")
def two_lists_for_each_rank(stages, micro_batches):
    numbers = range(micro_batches)
    return [[_ops("F", numbers), _ops("B", numbers)] for _ in range(stages)]


@wrong("5.2", names="slow")
def every_other_rank_goes_back_from_the_end(stages, micro_batches):
    schedule = backwards_in_reverse_order(stages, micro_batches)
    schedule[::2] = by_nested_loops(len(schedule[::2]), micro_batches)
    return schedule


@wrong("5.2", names="missing")
def starts_later_on_later_ranks(stages, micro_batches):
    numbers = range(micro_batches)
    return [_ops("F", numbers[rank:]) + _ops("B", numbers) for rank in range(stages)]


@wrong("5.2", names="built-in-schedule")
def calls_the_built_in_gpipe(stages, micro_batches):
    return schedules.gpipe(stages, micro_batches)


@wrong("5.2", names="built-in-schedule")
def uses_what_the_built_in_ones_use(stages, micro_batches):
    ops = schedules._ops(micro_batches, "FB")
    return [ops["F"] + ops["B"] for _ in range(stages)]


# ---- 5.3 one_forward_one_backward ----------------------------------------------------------------


def _with_warm_up(stages, micro_batches, warm_up, capped=True):
    """A warm-up, pairs of F and B, and the rest of the B."""
    schedule = []
    for rank in range(stages):
        ahead = max(0, warm_up(rank))
        ahead = min(ahead, micro_batches) if capped else ahead
        row = _ops("F", range(ahead))
        row += _turns(
            _ops("F", range(ahead, micro_batches)), _ops("B", range(micro_batches - ahead))
        )
        schedule.append(row + _ops("B", range(max(0, micro_batches - ahead), micro_batches)))
    return schedule


@right("5.3")
def backward_first_in_each_pair(stages, micro_batches):
    schedule = []
    for rank in range(stages):
        first = min(stages - rank, micro_batches)
        later = _ops("F", range(first, micro_batches))
        pairs = _turns(_ops("B", range(micro_batches)), later)
        schedule.append(_ops("F", range(first)) + pairs)
    return schedule


@right("5.3")
def by_slices(stages, micro_batches):
    """Without a cap: what a slice lacks at one place it gives at the other."""
    forward, backward = _ops("F", range(micro_batches)), _ops("B", range(micro_batches))
    schedule = []
    for rank in range(stages):
        ahead = stages - 1 - rank
        pairs = _turns(forward[ahead:], backward[: micro_batches - ahead])
        schedule.append(forward[:ahead] + pairs + backward[micro_batches - ahead :])
    return schedule


@right("5.3")
def by_counting_what_is_held(stages, micro_batches):
    """Runs forward as long as the budget allows, and backward otherwise."""
    schedule = []
    for rank in range(stages):
        row, forwards, backwards = [], 0, 0
        while backwards < micro_batches:
            if forwards < micro_batches and forwards - backwards < stages - rank:
                row.append(Op("F", forwards))
                forwards += 1
            else:
                row.append(Op("B", backwards))
                backwards += 1
        schedule.append(row)
    return schedule


@wrong("5.3", names="all-forward-first")
def writes_gpipe(stages, micro_batches):
    return backwards_in_reverse_order(stages, micro_batches)


@wrong("5.3", names="same-warm-up")
def warms_all_ranks_up_alike(stages, micro_batches):
    return _with_warm_up(stages, micro_batches, lambda rank: stages - 1)


@wrong("5.3", names="warm-up-short")
def forgets_the_forward_of_the_pair(stages, micro_batches):
    """A backward pass first in each pair, after a warm-up for a forward pass first."""
    schedule = []
    for rank in range(stages):
        first = min(stages - 1 - rank, micro_batches)
        later = _ops("F", range(first, micro_batches))
        schedule.append(_ops("F", range(first)) + _turns(_ops("B", range(micro_batches)), later))
    return schedule


@wrong("5.3", names="mirrored")
def warms_up_by_the_rank(stages, micro_batches):
    return _with_warm_up(stages, micro_batches, lambda rank: rank)


@wrong("5.3", names="one-too-many")
def warms_up_once_more(stages, micro_batches):
    return _with_warm_up(stages, micro_batches, lambda rank: stages - rank)


@wrong("5.3", names="warm-up-short")
def warms_up_once_less(stages, micro_batches):
    return _with_warm_up(stages, micro_batches, lambda rank: stages - 2 - rank)


@wrong("5.3", names="one-at-a-time")
def does_not_warm_up(stages, micro_batches):
    return _with_warm_up(stages, micro_batches, lambda rank: 0)


@wrong("5.3", names="missing")
def forgets_the_last_backwards(stages, micro_batches):
    schedule = _with_warm_up(stages, micro_batches, lambda rank: stages - 1 - rank)
    return [row[: len(row) - (stages - 1 - rank)] for rank, row in enumerate(schedule)]


@wrong("5.3", names="doubled")
def starts_the_last_backwards_again(stages, micro_batches):
    schedule = _with_warm_up(stages, micro_batches, lambda rank: stages - 1 - rank)
    return [
        row[: len(row) - (stages - 1 - rank)] + _ops("B", range(stages - 1 - rank))
        for rank, row in enumerate(schedule)
    ]


@wrong("5.3", names="slow")
def flushes_in_the_middle(stages, micro_batches):
    half = micro_batches // 2
    second = _with_warm_up(stages, micro_batches - half, lambda rank: stages - 1 - rank)
    second = [_renamed(row, lambda n: n + half) for row in second]
    first = _with_warm_up(stages, half, lambda rank: stages - 1 - rank)
    return [a + b for a, b in zip(first, second, strict=True)]


@wrong("5.3", names="backwards-order")
def newest_backward_first(stages, micro_batches):
    """The B of the F that has just been run: every rank waits until it has come back."""
    schedule = []
    for rank in range(stages):
        ahead = min(stages - 1 - rank, micro_batches)
        pairs = _ops("F", range(ahead, micro_batches)), _ops("B", range(ahead, micro_batches))
        schedule.append(_ops("F", range(ahead)) + _turns(*pairs) + _ops("B", range(ahead)))
    return schedule


@wrong("5.3", names="too-many-activations")
def warms_up_twice_more(stages, micro_batches):
    return _with_warm_up(stages, micro_batches, lambda rank: stages - rank + 1)


@wrong("5.3", names="warm-up-not-capped")
def warms_up_with_what_is_not_there(stages, micro_batches):
    return _with_warm_up(stages, micro_batches, lambda rank: stages - 1 - rank, capped=False)


@wrong("5.3", names="doubled")
def begins_the_pairs_at_zero(stages, micro_batches):
    schedule = []
    for rank in range(stages):
        pairs = _turns(_ops("F", range(micro_batches)), _ops("B", range(micro_batches)))
        schedule.append(_ops("F", range(stages - 1 - rank)) + pairs)
    return schedule


@wrong("5.3", names="shared-list")
def extends_shared_lists(stages, micro_batches):
    schedule = [[]] * stages
    for rank, row in enumerate(backward_first_in_each_pair(stages, micro_batches)):
        schedule[rank].extend(row)
    return schedule


@wrong("5.3", names="built-in-schedule")
def calls_the_built_in_1f1b(stages, micro_batches):
    return schedules.one_forward_one_backward(stages, micro_batches)


@wrong("5.3", names="built-in-schedule")
def interleaves_one_chunk(stages, micro_batches):
    built_in = functools.partial(schedules.interleaved, chunks=1)
    return [row[:] for row in built_in(stages, micro_batches)]


# ---- 5.4 interleaved -----------------------------------------------------------------------------


def _orders(stages, micro_batches, chunks):
    """All F of a rank and all B of a rank, each in the right order."""
    groups = [range(n, n + stages) for n in range(0, micro_batches, stages)]
    forward = [op for group in groups for c in range(chunks) for op in _ops("F", group, c)]
    turned = [op for group in groups for c in reversed(range(chunks)) for op in _ops("B", group, c)]
    return forward, turned


def _way(stages, chunks, rank):
    return (chunks - 1) * stages + 2 * (stages - 1 - rank)


def _combined(stages, forward, backward, warm_up):
    """A warm-up, pairs of F and B, and the rest of the B."""
    rows = []
    for rank in range(stages):
        ahead = min(warm_up(rank), len(forward))
        rows.append(forward[:ahead] + _turns(forward[ahead:], backward))
    return rows


def _interleaved_with(warm_up):
    def schedule(stages, micro_batches, chunks):
        orders = _orders(stages, micro_batches, chunks)
        return _combined(stages, *orders, lambda rank: warm_up(stages, chunks, rank))

    return schedule


@right("5.4")
def from_two_lists(stages, micro_batches, chunks):
    orders = _orders(stages, micro_batches, chunks)
    return _combined(stages, *orders, lambda rank: _way(stages, chunks, rank))


@right("5.4")
def backward_first_after_the_warm_up(stages, micro_batches, chunks):
    forward, backward = _orders(stages, micro_batches, chunks)
    rows = []
    for rank in range(stages):
        first = min(_way(stages, chunks, rank) + 1, len(forward))
        rows.append(forward[:first] + _turns(backward, forward[first:]))
    return rows


@right("5.4")
def warms_up_for_one_way_only(stages, micro_batches, chunks):
    """Half of Megatron-LM's slack: as fast where messages take no time, and smaller."""
    warm_up = _interleaved_with(lambda p, v, rank: (v - 1) * p + p - 1 - rank)
    return warm_up(stages, micro_batches, chunks)


@wrong("5.4", names="chunks-missing")
def forgets_the_third_argument(stages, micro_batches, chunks):
    return _with_warm_up(stages, micro_batches, lambda rank: stages - 1 - rank)


@wrong("5.4", names="chunks-not-reversed")
def backwards_from_chunk_0(stages, micro_batches, chunks):
    forward, _ = _orders(stages, micro_batches, chunks)
    backward = [Op("B", op.micro_batch, op.chunk) for op in forward]
    return _combined(stages, forward, backward, lambda rank: _way(stages, chunks, rank))


@wrong("5.4", names="chunks-in-a-row")
def runs_all_chunks_of_a_micro_batch(stages, micro_batches, chunks):
    numbers, pieces = range(micro_batches), range(chunks)
    forward = [Op("F", n, c) for n in numbers for c in pieces]
    backward = [Op("B", n, c) for n in numbers for c in reversed(pieces)]
    return _combined(stages, forward, backward, lambda rank: _way(stages, chunks, rank))


@wrong("5.4", names="chunk-0-first")
def runs_all_micro_batches_of_a_chunk(stages, micro_batches, chunks):
    numbers, pieces = range(micro_batches), range(chunks)
    forward = [Op("F", n, c) for c in pieces for n in numbers]
    backward = [Op("B", n, c) for c in reversed(pieces) for n in numbers]
    way = (chunks - 1) * micro_batches
    return _combined(stages, forward, backward, lambda rank: way + 2 * (stages - 1 - rank))


@wrong("5.4", names="all-forward-first")
def interleaves_gpipe(stages, micro_batches, chunks):
    orders = _orders(stages, micro_batches, chunks)
    return [list(chain(*orders)) for _ in range(stages)]


@wrong("5.4", names="warm-up-short")
def warms_up_as_1f1b_does(stages, micro_batches, chunks):
    warm_up = _interleaved_with(lambda p, v, rank: p - 1 - rank)
    return warm_up(stages, micro_batches, chunks)


@wrong("5.4", names="warm-up-short")
def warms_up_for_the_chunks_only(stages, micro_batches, chunks):
    warm_up = _interleaved_with(lambda p, v, rank: (v - 1) * p)
    return warm_up(stages, micro_batches, chunks)


@wrong("5.4", names="one-too-many")
def warms_up_one_step_more(stages, micro_batches, chunks):
    warm_up = _interleaved_with(lambda p, v, rank: _way(p, v, rank) + 1)
    return warm_up(stages, micro_batches, chunks)


@wrong("5.4", names="same-warm-up")
def warms_up_as_rank_0_does(stages, micro_batches, chunks):
    warm_up = _interleaved_with(lambda p, v, rank: _way(p, v, 0))
    return warm_up(stages, micro_batches, chunks)


@wrong("5.4", names="too-many-activations")
def warms_up_a_group_more(stages, micro_batches, chunks):
    warm_up = _interleaved_with(lambda p, v, rank: _way(p, v, rank) + p)
    return warm_up(stages, micro_batches, chunks)


@wrong("5.4", names="warm-up-not-capped")
def warms_up_beyond_the_end(stages, micro_batches, chunks):
    rows = from_two_lists(stages, micro_batches, chunks)
    for rank, row in enumerate(rows):
        missing = _way(stages, chunks, rank) - chunks * micro_batches
        row[:0] = _ops("F", range(micro_batches, micro_batches + missing))
    return rows


@wrong("5.4", names="warm-up-not-capped")
def slices_beyond_the_end(stages, micro_batches, chunks):
    forward, backward = _orders(stages, micro_batches, chunks)
    rows = []
    for rank in range(stages):
        ahead = _way(stages, chunks, rank)
        pairs = [op for pair in zip(forward[ahead:], backward) for op in pair]
        rows.append(forward[:ahead] + pairs + backward[len(forward) - ahead :])
    return rows


@wrong("5.4", names="other-groups")
def goes_in_groups_of_chunks(stages, micro_batches, chunks):
    """Right where there are as many chunks as stages."""
    starts = range(0, micro_batches, chunks)
    groups = [range(n, min(n + chunks, micro_batches)) for n in starts]
    forward = [op for group in groups for c in range(chunks) for op in _ops("F", group, c)]
    turned = [op for group in groups for c in reversed(range(chunks)) for op in _ops("B", group, c)]
    return _combined(stages, forward, turned, lambda rank: _way(stages, chunks, rank))


@wrong("5.4", names="pieces-not-chunks")
def numbers_the_pieces(stages, micro_batches, chunks):
    rows = from_two_lists(stages, micro_batches, chunks)
    return [
        [Op(op.kind, op.micro_batch, op.chunk * stages + rank) for op in row]
        for rank, row in enumerate(rows)
    ]


@wrong("5.4", names="chunks-not-reversed")
def runs_1f1b_for_each_chunk(stages, micro_batches, chunks):
    rows = backward_first_in_each_pair(stages, micro_batches)
    return [[Op(op.kind, op.micro_batch, c) for c in range(chunks) for op in row] for row in rows]


@wrong("5.4", names="backwards-order")
def goes_the_whole_way_back(stages, micro_batches, chunks):
    """The list of all F from its end: the chunks come as they should, the micro-batches do not."""
    forward, _ = _orders(stages, micro_batches, chunks)
    backward = [Op("B", op.micro_batch, op.chunk) for op in reversed(forward)]
    return _combined(stages, forward, backward, lambda rank: _way(stages, chunks, rank))


@wrong("5.4", names="slow")
def flushes_after_the_first_group(stages, micro_batches, chunks):
    first = from_two_lists(stages, stages, chunks)
    rest = from_two_lists(stages, max(0, micro_batches - stages), chunks)
    later = [[Op(op.kind, op.micro_batch + stages, op.chunk) for op in row] for row in rest]
    return [a + b for a, b in zip(first, later, strict=True)]


# ---- 5.3 and 5.4: right schedules, written down wrongly ------------------------------------------


def _renamed(row, number):
    """The row with other numbers of micro-batches."""
    return [Op(op.kind, number(op.micro_batch), op.chunk) for op in row]


def _last_rank_backwards(rows):
    last = max(op.micro_batch for op in rows[0])
    return [*rows[:-1], _renamed(rows[-1], lambda n: last - n)]


SPOILT = {
    "flat-list": lambda rows: list(chain(*rows)),
    "not-one-list-per-rank": lambda rows: list(zip_longest(*rows)),  # one entry per step
    "idle-entries": lambda rows: [[None] * rank + row for rank, row in enumerate(rows)],
    "not-ops": lambda rows: [[str(op) for op in row] for row in rows],
    "counted-from-one": lambda rows: [_renamed(row, lambda n: n + 1) for row in rows],
    "unknown-work": lambda rows: [_renamed(row, lambda n: 2 * n) for row in rows],
    "missing": lambda rows: [row[:-1] for row in rows],
    "doubled": lambda rows: [row + row[-1:] for row in rows],
    "cannot-run": _last_rank_backwards,
}


def _add_spoilt(exercise, schedule, mistake, spoil):
    @wrong(exercise, names=mistake)
    @functools.wraps(schedule)
    def spoilt(*arguments):
        return spoil(schedule(*arguments))

    spoilt.__name__ = mistake.replace("-", "_")


for mistake, spoil in SPOILT.items():
    _add_spoilt("5.3", backward_first_in_each_pair, mistake, spoil)
    _add_spoilt("5.4", from_two_lists, mistake, spoil)


@wrong("5.4", names="built-in-schedule")
def calls_the_built_in_interleaved(stages, micro_batches, chunks):
    if chunks == 1:
        return schedules.one_forward_one_backward(stages, micro_batches)
    return schedules.interleaved(stages, micro_batches, chunks)


# ---- 5.5 micro_batch_gradients -------------------------------------------------------------------


def _cut(inputs, targets, size):
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def _accumulate(model, loss_function, parts, weights):
    """The losses; the gradients are those of the weighted sum."""
    losses = []
    for (x, y), weight in zip(parts, weights, strict=True):
        loss = loss_function(model(x), y)
        (weight * loss).backward()
        losses.append(loss.item())
    return losses


def _shares(parts):
    total = sum(len(x) for x, _ in parts)
    return [len(x) / total for x, _ in parts]


def _mean(losses, parts):
    return sum(loss * share for loss, share in zip(losses, _shares(parts), strict=True))


def _with_weights(weigh):
    def gradients(model, loss_function, inputs, targets, size):
        parts = _cut(inputs, targets, size)
        model.zero_grad(set_to_none=True)
        losses = _accumulate(model, loss_function, parts, weigh(parts, size))
        return _mean(losses, parts)

    return gradients


@right("5.5")
def divides_at_the_end(model, loss_function, inputs, targets, size):
    """Sums over samples, and one division of every gradient."""
    for parameter in model.parameters():
        parameter.grad = None
    total = 0.0
    for start in range(0, len(inputs), size):
        stop = min(start + size, len(inputs))
        loss = loss_function(model(inputs[start:stop]), targets[start:stop]) * (stop - start)
        loss.backward()
        total += loss.item()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= len(inputs)
    return total / len(inputs)


@right("5.5")
def weighs_what_enters_backward(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    model.zero_grad()
    losses = torch.zeros(len(parts))
    for i, (x, y) in enumerate(parts):
        loss = loss_function(model(x), y)
        loss.backward(torch.tensor(len(x) / len(inputs)))
        losses[i] = loss.detach()
    return _mean(losses, parts)


@wrong("5.5", names="sum-not-mean")
def adds_up_means(model, loss_function, inputs, targets, size):
    weigh = _with_weights(lambda parts, size: [1] * len(parts))
    return weigh(model, loss_function, inputs, targets, size)


@wrong("5.5", names="samples-summed")
def weighs_with_the_samples(model, loss_function, inputs, targets, size):
    weigh = _with_weights(lambda parts, size: [len(x) for x, _ in parts])
    return weigh(model, loss_function, inputs, targets, size)


@wrong("5.5", names="mean-of-means")
def divides_by_their_number(model, loss_function, inputs, targets, size):
    weigh = _with_weights(lambda parts, size: [1 / len(parts)] * len(parts))
    return weigh(model, loss_function, inputs, targets, size)


@wrong("5.5", names="one-size-for-all")
def takes_all_for_full_ones(model, loss_function, inputs, targets, size):
    total = len(inputs)
    weigh = _with_weights(lambda parts, size: [min(size, total) / total] * len(parts))
    return weigh(model, loss_function, inputs, targets, size)


@wrong("5.5", names="divided-by-samples")
def divides_by_all_samples(model, loss_function, inputs, targets, size):
    weigh = _with_weights(lambda parts, size: [1 / len(inputs)] * len(parts))
    return weigh(model, loss_function, inputs, targets, size)


@wrong("5.5", names="divided-twice")
def divides_losses_and_gradients(model, loss_function, inputs, targets, size):
    loss = weighs_what_enters_backward(model, loss_function, inputs, targets, size)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= math.ceil(len(inputs) / size)
    return loss


@wrong("5.5", names="count-rounded-down")
def divides_by_the_full_ones(model, loss_function, inputs, targets, size):
    model.zero_grad()
    mean_loss, count = 0.0, len(inputs) // size
    for x, y in zip(inputs.split(size), targets.split(size)):
        loss = loss_function(model(x), y) / count
        loss.backward()
        mean_loss += loss.item()
    return mean_loss


@wrong("5.5", names="other-sizes")
def cuts_that_many_pieces(model, loss_function, inputs, targets, size):
    model.zero_grad()
    mean_loss = 0.0
    for x, y in zip(inputs.chunk(size), targets.chunk(size)):
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        share.backward()
        mean_loss += share.item()
    return mean_loss


@wrong("5.5", names="last-lost")
def drops_the_rest(model, loss_function, inputs, targets, size):
    whole = max(1, len(inputs) // size) * size
    return divides_at_the_end(model, loss_function, inputs[:whole], targets[:whole], size)


@wrong("5.5", names="last-only")
def clears_in_the_loop(model, loss_function, inputs, targets, size):
    total = 0.0
    for x, y in _cut(inputs, targets, size):
        model.zero_grad()
        loss = loss_function(model(x), y) * len(x) / len(inputs)
        loss.backward()
        total += loss.item()
    return total


@wrong("5.5", names="loss-not-mean")
def returns_the_sum(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    model.zero_grad()
    return sum(_accumulate(model, loss_function, parts, _shares(parts)))


@wrong("5.5", names="loss-of-last")
def returns_the_last_loss(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    model.zero_grad()
    return _accumulate(model, loss_function, parts, _shares(parts))[-1]


@wrong("5.5", names="loss-unweighted")
def returns_the_mean_of_the_means(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    model.zero_grad()
    return sum(_accumulate(model, loss_function, parts, _shares(parts))) / len(parts)


@wrong("5.5", names="none-gradient")
def expects_a_gradient_everywhere(model, loss_function, inputs, targets, size):
    model.zero_grad()
    parts = _cut(inputs, targets, size)
    losses = _accumulate(model, loss_function, parts, [len(x) for x, _ in parts])
    for parameter in model.parameters():
        parameter.grad /= len(inputs)
    return _mean(losses, parts)


@wrong("5.5", names="zeros-for-none")
def begins_with_zeros(model, loss_function, inputs, targets, size):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    parts = _cut(inputs, targets, size)
    return _mean(_accumulate(model, loss_function, parts, _shares(parts)), parts)


@wrong("5.5", names="zeros-for-none")
def sets_old_gradients_to_zero(model, loss_function, inputs, targets, size):
    """A parameter that is frozen now, with a gradient from before, keeps one of zeros."""
    model.zero_grad(set_to_none=False)
    parts = _cut(inputs, targets, size)
    return _mean(_accumulate(model, loss_function, parts, _shares(parts)), parts)


@wrong("5.5", names="tied-twice")
def divides_layer_by_layer(model, loss_function, inputs, targets, size):
    model.zero_grad()
    parts = _cut(inputs, targets, size)
    losses = _accumulate(model, loss_function, parts, [len(x) for x, _ in parts])
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            if parameter.grad is not None:
                parameter.grad /= len(inputs)
    return _mean(losses, parts)


@wrong("5.5", names="old-gradients")
def does_not_clear(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    return _mean(_accumulate(model, loss_function, parts, _shares(parts)), parts)


@wrong("5.5", names="parameters-moved")
def takes_a_step_too(model, loss_function, inputs, targets, size):
    loss = divides_at_the_end(model, loss_function, inputs, targets, size)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss


@wrong("5.5", names="whole-batch")
def runs_the_whole_batch(model, loss_function, inputs, targets, size):
    return divides_at_the_end(model, loss_function, inputs, targets, len(inputs))


@wrong("5.5", names="one-backward")
def adds_up_the_losses_first(model, loss_function, inputs, targets, size):
    model.zero_grad()
    parts = _cut(inputs, targets, size)
    losses = [loss_function(model(x), y) for x, y in parts]
    mean = _mean(losses, parts)
    mean.backward()
    return mean.item()


@wrong("5.5", names="no-backward")
def computes_losses_only(model, loss_function, inputs, targets, size):
    parts = _cut(inputs, targets, size)
    return _mean([loss_function(model(x), y).item() for x, y in parts], parts)


@wrong("5.5", names="no-backward")
def clears_at_the_end(model, loss_function, inputs, targets, size):
    loss = divides_at_the_end(model, loss_function, inputs, targets, size)
    model.zero_grad()
    return loss


def _in_turns(model, loss_function, inputs, targets, size, backward):
    """Adds up the weighted losses, and calls `backward(total)` in each turn."""
    model.zero_grad()
    total = 0
    for x, y in _cut(inputs, targets, size):
        total = total + loss_function(model(x), y) * len(x) / len(inputs)
        backward(total)
    return total.item()


@wrong("5.5", names="running-total")
def goes_back_from_the_total(*arguments):
    return _in_turns(*arguments, backward=lambda total: total.backward())


@wrong("5.5", names="running-total")
def keeps_the_graph_as_the_message_says(*arguments):
    """What PyTorch's message suggests; nothing raises any more, and the gradients are wrong."""
    return _in_turns(*arguments, backward=lambda total: total.backward(retain_graph=True))


@wrong("5.5", names="windows")
def slides_a_window(model, loss_function, inputs, targets, size):
    model.zero_grad()
    total, count = 0.0, math.ceil(len(inputs) / size)
    for i in range(count):
        loss = loss_function(model(inputs[i : i + size]), targets[i : i + size]) / count
        loss.backward()
        total += loss.item()
    return total


@wrong("5.5", names="no-graph")
def takes_the_number_first(model, loss_function, inputs, targets, size):
    for x, y in _cut(inputs, targets, size):
        loss = loss_function(model(x), y).item() * len(x) / len(inputs)
        loss.backward()


@wrong("5.5", names="no-graph")
def saves_memory_with_no_grad(model, loss_function, inputs, targets, size):
    for x, y in _cut(inputs, targets, size):
        with torch.no_grad():
            loss = loss_function(model(x), y) * len(x) / len(inputs)
        loss.backward()


@wrong("5.5", names="targets-not-cut")
def forgets_to_cut_the_targets(model, loss_function, inputs, targets, size):
    for x in inputs.split(size):
        (loss_function(model(x), targets) * len(x) / len(inputs)).backward()


@wrong("5.5", names="other-sizes")
def takes_sample_by_sample(model, loss_function, inputs, targets, size):
    return divides_at_the_end(model, loss_function, inputs, targets, 1)


@wrong("5.5", names="other-sizes")
def goes_through_the_samples(model, loss_function, inputs, targets, size):
    model.zero_grad()
    total = 0.0
    for x, y in zip(inputs, targets):
        loss = loss_function(model(x), y) / len(inputs)
        loss.backward()
        total += loss.item()
    return total


@wrong("5.5", names="graph-kept")
def keeps_every_graph(model, loss_function, inputs, targets, size):
    model.zero_grad(set_to_none=True)
    mean = 0.0
    for x, y in _cut(inputs, targets, size):
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        share.backward(retain_graph=True)
        mean += share.item()
    return mean


@wrong("5.5", names="other-order")
def begins_with_the_last(model, loss_function, inputs, targets, size):
    model.zero_grad(set_to_none=True)
    mean = 0.0
    for x, y in reversed([*_cut(inputs, targets, size)]):
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        share.backward()
        mean += share.item()
    return mean


@right("5.5")
def keeps_a_graph_and_drops_it(model, loss_function, inputs, targets, size):
    """What is kept for a second backward pass goes with the last name of the loss."""
    model.zero_grad(set_to_none=True)
    mean = 0.0
    for x, y in _cut(inputs, targets, size):
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        share.backward(retain_graph=True)
        mean += share.item()
        del share
    return mean


@wrong("5.5", names="other-order")
def shuffles_the_batch(model, loss_function, inputs, targets, size):
    order = torch.randperm(len(inputs))
    return divides_at_the_end(model, loss_function, inputs[order], targets[order], size)


@wrong("5.5", names="evaluation-mode")
def switches_to_evaluation(model, loss_function, inputs, targets, size):
    model.eval()
    return divides_at_the_end(model, loss_function, inputs, targets, size)


@wrong("5.5", names="evaluation-mode")
def evaluates_and_trains_again(model, loss_function, inputs, targets, size):
    mean = switches_to_evaluation(model, loss_function, inputs, targets, size)
    model.train()
    return mean


@wrong("5.5", names="loss-with-graph")
def returns_a_loss_with_its_graph(model, loss_function, inputs, targets, size):
    model.zero_grad(set_to_none=True)
    mean = 0.0
    for x, y in _cut(inputs, targets, size):
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        share.backward()
        mean = mean + share
    return mean


# ---- 5.6 exchange --------------------------------------------------------------------------------


def _room(tensor):
    """An empty tensor that looks like this one; None for None."""
    return (
        None if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    )


def _started(outgoing, room, neighbour):
    """Starts both messages with one neighbour, if it exists, together, as NCCL needs; returns the
    handles, with gloo one for each."""
    if outgoing is None:
        return []
    messages = (dist.isend, outgoing.contiguous()), (dist.irecv, room)
    return dist.batch_isend_irecv([dist.P2POp(call, t, neighbour) for call, t in messages])


@right("5.6")
def starts_everything_then_waits(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    handles = _started(gradients, from_previous, rank - 1)
    handles += _started(activations, from_next, rank + 1)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


def _blocking(outgoing, neighbour, send_first):
    """Both messages with one neighbour, one after the other; returns what came."""
    if outgoing is None:
        return None
    room = _room(outgoing)
    if send_first:
        dist.send(outgoing.contiguous(), neighbour)
        dist.recv(room, neighbour)
    else:
        dist.recv(room, neighbour)
        dist.send(outgoing.contiguous(), neighbour)
    return room


@right("5.6")
def even_ranks_begin_with_the_next(activations, gradients):
    """With blocking calls alone: pairs (0, 1), (2, 3), ..., then pairs (1, 2), (3, 4), ..."""
    rank = dist.get_rank()
    if rank % 2 == 0:
        from_next = _blocking(activations, rank + 1, send_first=True)
        from_previous = _blocking(gradients, rank - 1, send_first=True)
    else:
        from_previous = _blocking(gradients, rank - 1, send_first=False)
        from_next = _blocking(activations, rank + 1, send_first=False)
    return from_previous, from_next


@right("5.6")
def down_the_line_and_up_again(activations, gradients):
    """Blocking too: activations go down the whole line, then gradients come up."""
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    if gradients is not None:
        dist.recv(from_previous, rank - 1)
    if activations is not None:
        dist.send(activations.contiguous(), rank + 1)
        dist.recv(from_next, rank + 1)
    if gradients is not None:
        dist.send(gradients.contiguous(), rank - 1)
    return from_previous, from_next


@wrong("5.6", names="both-send")
def sends_first(activations, gradients):
    rank = dist.get_rank()
    from_next = _blocking(activations, rank + 1, send_first=True)
    from_previous = _blocking(gradients, rank - 1, send_first=True)
    return from_previous, from_next


@wrong("5.6", names="both-receive")
def receives_first(activations, gradients):
    rank = dist.get_rank()
    from_previous = _blocking(gradients, rank - 1, send_first=False)
    from_next = _blocking(activations, rank + 1, send_first=False)
    return from_previous, from_next


@wrong("5.6", names="unanswered")
def only_receives(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    if activations is not None:
        dist.isend(activations.contiguous(), rank + 1).wait()
        dist.recv(from_next, rank + 1)
    if gradients is not None:
        dist.recv(from_previous, rank - 1)
    return from_previous, from_next


@wrong("5.6", names="two-stages-only")
def last_rank_receives_first(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    if activations is None and gradients is not None:
        dist.recv(from_previous, rank - 1)
        dist.send(gradients.contiguous(), rank - 1)
        return from_previous, None
    if activations is not None:
        dist.send(activations.contiguous(), rank + 1)
    if gradients is not None:
        dist.send(gradients.contiguous(), rank - 1)
        dist.recv(from_previous, rank - 1)
    if activations is not None:
        dist.recv(from_next, rank + 1)
    return from_previous, from_next


@wrong("5.6", names="beyond-the-ends")
def goes_round_in_a_ring(activations, gradients):
    rank, n = dist.get_rank(), dist.get_world_size()
    from_previous, from_next = torch.empty_like(gradients), torch.empty_like(activations)
    handles = _started(gradients, from_previous, (rank - 1) % n)
    handles += _started(activations, from_next, (rank + 1) % n)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="alone")
def first_or_last_or_between(activations, gradients):
    """A lone rank counts as the first one, and looks for a next one."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        from_previous, from_next = None, torch.empty(activations.shape, dtype=activations.dtype)
        handles = _started(activations, from_next, 1)
    elif rank == n - 1:
        from_previous, from_next = _room(gradients), None
        handles = _started(gradients, from_previous, rank - 1)
    else:
        return starts_everything_then_waits(activations, gradients)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="swapped-results")
def returns_the_next_ones_first(activations, gradients):
    from_previous, from_next = starts_everything_then_waits(activations, gradients)
    return from_next, from_previous


@wrong("5.6", names="own-returned")
def returns_what_it_had(activations, gradients):
    starts_everything_then_waits(activations, gradients)
    return gradients, activations


@wrong("5.6", names="one-way-only")
def hands_over_activations_only(activations, gradients):
    rank = dist.get_rank()
    from_previous = _room(gradients)
    if gradients is not None:
        dist.recv(from_previous, rank - 1)
    if activations is not None:
        dist.send(activations.contiguous(), rank + 1)
    return from_previous, None


@wrong("5.6", names="not-waited")
def does_not_wait_for_what_comes(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    handles = _started(gradients, from_previous, rank - 1)
    handles += _started(activations, from_next, rank + 1)
    for send in handles[::2]:
        send.wait()
    return from_previous, from_next


@wrong("5.6", names="not-waited")
def does_not_wait_for_what_goes(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    handles = _started(gradients, from_previous, rank - 1)
    handles += _started(activations, from_next, rank + 1)
    for recv in handles[1::2]:
        recv.wait()
    return from_previous, from_next


@wrong("5.6", names="into-what-is-sent")
def needs_no_room(activations, gradients):
    """Receives into what it has sent, as early as it can: harmless, and against the contract."""
    rank = dist.get_rank()
    for outgoing, neighbour in ((gradients, rank - 1), (activations, rank + 1)):
        if outgoing is not None:
            sent = dist.isend(outgoing.clone(), neighbour)
            dist.recv(outgoing, neighbour)
            sent.wait()
    return gradients, activations


@wrong("5.6", names="handed-in-changed")
def copies_back(activations, gradients):
    from_previous, from_next = starts_everything_then_waits(activations, gradients)
    for own, arrived in ((gradients, from_previous), (activations, from_next)):
        if own is not None:
            own.detach().copy_(arrived)
    return from_previous, from_next


@wrong("5.6", names="built-in-collective")
def gathers_everything(activations, gradients):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (activations, gradients))
    rank, n = dist.get_rank(), dist.get_world_size()
    from_previous = everyones[rank - 1][0] if rank > 0 else None
    from_next = everyones[rank + 1][1] if rank < n - 1 else None
    return from_previous, from_next


@wrong("5.6", names="not-a-neighbour")
def tells_rank_0_that_it_is_there(activations, gradients):
    rank, n = dist.get_rank(), dist.get_world_size()
    token = torch.zeros(1)
    if rank == 0:
        for other in range(1, n):
            dist.recv(token, other)
    else:
        dist.send(token, 0)
    return starts_everything_then_waits(activations, gradients)


@wrong("5.6", names="not-a-neighbour")
def receives_from_anybody(activations, gradients):
    rank = dist.get_rank()
    rooms = {rank - 1: _room(gradients), rank + 1: _room(activations)}
    sends = [
        dist.isend(outgoing.contiguous(), neighbour)
        for outgoing, neighbour in ((gradients, rank - 1), (activations, rank + 1))
        if outgoing is not None
    ]
    for room in rooms.values():
        if room is not None:
            dist.recv(room)
    for send in sends:
        send.wait()
    return rooms[rank - 1], rooms[rank + 1]


@wrong("5.6", names="shapes-assumed")
def expects_what_it_sends_forward(activations, gradients):
    """The middle of the line makes room for activations of its own shape."""
    rank = dist.get_rank()
    some = activations if activations is not None else gradients
    if some is None:
        return None, None
    from_previous = None if gradients is None else torch.empty_like(some)
    from_next = None if activations is None else torch.empty_like(some)
    handles = _started(gradients, from_previous, rank - 1)
    handles += _started(activations, from_next, rank + 1)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="dtype-lost")
def makes_room_in_float32(activations, gradients):
    rank = dist.get_rank()
    from_previous = None if gradients is None else torch.empty(gradients.shape)
    from_next = None if activations is None else torch.empty(activations.shape)
    handles = _started(gradients, from_previous, rank - 1)
    handles += _started(activations, from_next, rank + 1)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="needs-contiguous")
def sends_as_it_comes(activations, gradients):
    rank = dist.get_rank()
    from_previous = None if gradients is None else torch.empty_like(gradients)
    from_next = None if activations is None else torch.empty_like(activations)
    handles = []
    for outgoing, room, neighbour in (
        (gradients, from_previous, rank - 1),
        (activations, from_next, rank + 1),
    ):
        if outgoing is not None:
            handles += [dist.isend(outgoing, neighbour), dist.irecv(room, neighbour)]
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="room-at-the-ends")
def makes_room_for_nobody(activations, gradients):
    some = activations if activations is not None else gradients
    if some is None:
        return None, None
    arrived = even_ranks_begin_with_the_next(activations, gradients)
    return tuple(torch.empty_like(some) if tensor is None else tensor for tensor in arrived)


@wrong("5.6", names="truth-of-a-tensor")
def asks_whether_a_tensor_is_true(activations, gradients):
    if activations or gradients:
        return starts_everything_then_waits(activations, gradients)
    return None, None


@wrong("5.6", names="not-waited")
def waits_for_no_batch(activations, gradients):
    """`batch_isend_irecv` starts its messages, like each of them."""
    rank = dist.get_rank()
    arrived = _room(gradients), _room(activations)
    messages = []
    for outgoing, room, other in zip((gradients, activations), arrived, (rank - 1, rank + 1)):
        if outgoing is not None:
            messages.append(dist.P2POp(dist.isend, outgoing.contiguous(), other))
            messages.append(dist.P2POp(dist.irecv, room, other))
    if messages:
        dist.batch_isend_irecv(messages)
    return arrived


_rooms = {}


@wrong("5.6", names="room-kept")
def keeps_its_rooms(activations, gradients):
    def room(tensor):
        if tensor is None:
            return None
        return _rooms.setdefault((tensor.shape, tensor.dtype), _room(tensor))

    rank = dist.get_rank()
    from_previous, from_next = room(gradients), _room(activations)
    handles = _started(gradients, from_previous, rank - 1)
    handles += _started(activations, from_next, rank + 1)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="handed-in-changed")
def lays_what_it_is_handed_out_anew(activations, gradients):
    for tensor in (activations, gradients):
        if tensor is not None:
            tensor.data = tensor.data.contiguous()
    return starts_everything_then_waits(activations, gradients)


@wrong("5.6", names="alone")
def starts_an_empty_batch(activations, gradients):
    if activations is None and gradients is None:
        dist.batch_isend_irecv([])
    return starts_everything_then_waits(activations, gradients)


@wrong("5.6", names="both-send")
def sends_and_returns_nothing(activations, gradients):
    rank = dist.get_rank()
    if activations is not None:
        dist.send(activations.contiguous(), rank + 1)
    if gradients is not None:
        dist.send(gradients.contiguous(), rank - 1)


@wrong("5.6", names="beyond-the-ends")
def sends_both_ways_everywhere(activations, gradients):
    rank = dist.get_rank()
    sends = dist.isend(activations, rank + 1), dist.isend(gradients, rank - 1)
    arrived = torch.empty_like(gradients), torch.empty_like(activations)
    dist.recv(arrived[0], rank - 1)
    dist.recv(arrived[1], rank + 1)
    for send in sends:
        send.wait()
    return arrived


@wrong("5.6", names="talks-to-itself")
def takes_itself_for_the_previous(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    handles = _started(activations, from_next, rank + 1)
    handles += _started(gradients, from_previous, rank)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="beyond-the-ends")
def goes_the_wrong_way(activations, gradients):
    rank = dist.get_rank()
    from_previous, from_next = _room(gradients), _room(activations)
    handles = _started(activations, from_next, rank - 1)
    handles += _started(gradients, from_previous, rank + 1)
    for handle in handles:
        handle.wait()
    return from_previous, from_next


@wrong("5.6", names="belongs-to-a-graph")
def makes_room_of_clones(activations, gradients):
    rank = dist.get_rank()
    rooms, handles = [], []
    for outgoing, neighbour in ((gradients, rank - 1), (activations, rank + 1)):
        rooms.append(None if outgoing is None else outgoing.contiguous().clone())
        handles += _started(outgoing, rooms[-1], neighbour)
    for handle in handles:
        handle.wait()
    return tuple(rooms)


@wrong("5.6", names="zeros-left-out")
def asks_whether_there_is_a_number(activations, gradients):
    def something(tensor):
        return None if tensor is None or not tensor.any() else tensor

    return starts_everything_then_waits(something(activations), something(gradients))


@wrong("5.6", names="more-than-the-tensors")
def sends_objects(activations, gradients):
    """Pickled, with its length as a message before it."""

    def swap(outgoing, neighbour, send_first):
        if outgoing is None:
            return None
        came = [None]
        if send_first:
            dist.send_object_list([outgoing.detach()], neighbour)
        dist.recv_object_list(came, neighbour)
        if not send_first:
            dist.send_object_list([outgoing.detach()], neighbour)
        return came[0]

    rank = dist.get_rank()
    ways = [(activations, rank + 1), (gradients, rank - 1)]
    came = [swap(*way, send_first=rank % 2 == 0) for way in (ways if rank % 2 == 0 else ways[::-1])]
    return tuple(came[::-1] if rank % 2 == 0 else came)
