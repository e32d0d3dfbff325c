"""Answers to 5.3, `one_forward_one_backward`: wrong in a plausible way, or right in another."""

from course_utils.lesson import schedules
from course_utils.lesson.schedules import Op
from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch05.gpipe import backwards_in_reverse_order
from tests.wrong_answers.ch05.shared import ops, renamed, spoilt, turns, with_warm_up


@right("5.3")
def backward_first_in_each_pair(stages, micro_batches):
    schedule = []
    for rank in range(stages):
        first = min(stages - rank, micro_batches)
        later = ops("F", range(first, micro_batches))
        pairs = turns(ops("B", range(micro_batches)), later)
        schedule.append(ops("F", range(first)) + pairs)
    return schedule


@right("5.3")
def by_slices(stages, micro_batches):
    """Without a cap: what a slice lacks at one place it gives at the other."""
    forward, backward = ops("F", range(micro_batches)), ops("B", range(micro_batches))
    schedule = []
    for rank in range(stages):
        ahead = stages - 1 - rank
        pairs = turns(forward[ahead:], backward[: micro_batches - ahead])
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


@wrong("5.3", names="warm-up-short")
def warms_up_once_less(stages, micro_batches):
    return with_warm_up(stages, micro_batches, lambda rank: stages - 2 - rank)


@wrong("5.3", names="too-many-activations")
def writes_gpipe(stages, micro_batches):
    return backwards_in_reverse_order(stages, micro_batches)


@wrong("5.3", names="too-many-activations")
def warms_all_ranks_up_alike(stages, micro_batches):
    return with_warm_up(stages, micro_batches, lambda rank: stages - 1)


@wrong("5.3", names="not-in-turn")
def flushes_in_the_middle(stages, micro_batches):
    half = micro_batches // 2
    second = with_warm_up(stages, micro_batches - half, lambda rank: stages - 1 - rank)
    second = [renamed(row, lambda n: n + half) for row in second]
    first = with_warm_up(stages, half, lambda rank: stages - 1 - rank)
    return [a + b for a, b in zip(first, second, strict=True)]


@wrong("5.3", names="not-in-turn")
def goes_forward_and_back_in_blocks(stages, micro_batches):
    """As many F as there are stages, as many B, and so on."""
    starts = range(0, micro_batches, stages)
    blocks = [range(n, min(n + stages, micro_batches)) for n in starts]
    return [[op for b in blocks for op in ops("F", b) + ops("B", b)] for _ in range(stages)]


@wrong("5.3", names="slow")
def swaps_two_micro_batches_on_one_rank(stages, micro_batches):
    schedule = backward_first_in_each_pair(stages, micro_batches)
    if min(stages, micro_batches) > 1:
        schedule[1] = renamed(schedule[1], lambda n: {0: 1, 1: 0}.get(n, n))
    return schedule


@wrong("5.3", names="backwards-order")
def newest_backward_first(stages, micro_batches):
    """The B of the F that has just been run: every rank waits until it has come back."""
    schedule = []
    for rank in range(stages):
        ahead = min(stages - 1 - rank, micro_batches)
        pairs = ops("F", range(ahead, micro_batches)), ops("B", range(ahead, micro_batches))
        schedule.append(ops("F", range(ahead)) + turns(*pairs) + ops("B", range(ahead)))
    return schedule


@wrong("5.3", names="other-work")
def begins_the_pairs_at_zero(stages, micro_batches):
    schedule = []
    for rank in range(stages):
        pairs = turns(ops("F", range(micro_batches)), ops("B", range(micro_batches)))
        schedule.append(ops("F", range(stages - 1 - rank)) + pairs)
    return schedule


@wrong("5.3", names="warm-up-not-capped")
def warms_up_with_what_is_not_there(stages, micro_batches):
    return with_warm_up(stages, micro_batches, lambda rank: stages - 1 - rank, capped=False)


@wrong("5.3", names="built-in-schedule")
def calls_the_built_in_1f1b(stages, micro_batches):
    return schedules.one_forward_one_backward(stages, micro_batches)


not_a_schedule = wrong("5.3", names="not-a-schedule")(
    spoilt(backward_first_in_each_pair, "not-a-schedule")
)
shared_list = wrong("5.3", names="shared-list")(spoilt(backward_first_in_each_pair, "shared-list"))
cannot_run = wrong("5.3", names="cannot-run")(spoilt(backward_first_in_each_pair, "cannot-run"))
