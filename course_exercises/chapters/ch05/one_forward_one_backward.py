"""Exercise 5.3, `one_forward_one_backward`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise
from course_exercises.chapters.ch05.shared import (
    FORM,
    MEMORY,
    ONE_AT_A_TIME,
    ORDER,
    PAIRS,
    Case,
    Judge,
    all_as_the_first,
    all_forward_first,
    backwards_in_another_order,
    flow,
    more_by,
    one_at_a_time,
    short,
    warm_ups_of,
)
from course_utils.lesson.schedules import Schedule


def _mirrored(schedule: Schedule, case: Case) -> bool:
    warm_ups = warm_ups_of(schedule)
    return case.stages > 2 and warm_ups == sorted(warm_ups) and len(set(warm_ups)) > 2


def _until_first_backward(case: Case, rank: int) -> int:
    """1F1B: the F of micro-batch 0 reaches the last rank while these ones follow it."""
    return case.stages - rank


alternating = Exercise(
    "5.3",
    "one_forward_one_backward",
    points=3,
    minutes=30,
    kind="core",
    parameters=("stages", "micro_batches"),
    hints=[
        (
            "The last rank can run B0 right after F0. How many forward passes can the rank before it "
            "run until the gradient of micro-batch 0 comes back to it? And rank 0?"
        ),
        (
            "Rank r runs stages - 1 - r forward passes as a warm-up, but never more than there are "
            "micro-batches. Then it runs pairs: the next F, the next B. At the end the B that remain."
        ),
        (
            "Three parts for each rank: `ahead` F; then for n from 0 to micro_batches - ahead - 1 the "
            "F of micro-batch n + ahead and the B of micro-batch n; then the last `ahead` B."
        ),
    ],
    misconceptions={
        **FORM,
        **ONE_AT_A_TIME,
        **PAIRS,
        **ORDER,
        **MEMORY,
        "mirrored": "Your warm-up grows from the first rank to the last. It is the first rank that "
        "waits longest for a gradient, and so runs the most forward passes first.",
        "warm-up-short": "Some rank begins its backward passes too early. It lacks a forward pass, "
        "or waits in every turn for a gradient that is still on its way.",
        "all-forward-first": "Your schedule is GPipe's: every rank runs all forward passes first, "
        "and holds the activations of all micro-batches.",
        "same-warm-up": "Every rank has the same warm-up. Only the first one needs it so long: the "
        "nearer to the end, the sooner the first gradient comes.",
        "one-too-many": "The warm-up is one forward pass too long. Count the forward pass of the "
        "first pair too: it comes before the first backward pass.",
        "warm-up-not-capped": "With fewer micro-batches than stages, something is done that is not there, or "
        "left out. The warm-up ends where the micro-batches end; no pair follows, and then come all B.",
    },
)
_1f1b = Judge(
    lambda answer, case: answer(case.stages, case.micro_batches),
    budget=_until_first_backward,
    suspects={
        "one-at-a-time": one_at_a_time,
        "mirrored": _mirrored,
        "all-forward-first": all_forward_first,
        "same-warm-up": all_as_the_first(_until_first_backward),
        "warm-up-short": short(_until_first_backward),
        "one-too-many": more_by(1, _until_first_backward),
        "backwards-order": backwards_in_another_order,
    },
)


@alternating.requires("the schedule can run: all the work, in an order that works", at_home=True)
def the_schedule_can_run(answer, draw):
    _1f1b.legal(answer, flow(draw))


@alternating.requires("no slower than (micro_batches + stages - 1) * (F + B)", needs_earlier=True)
def no_slower_than_micro_batches_stages_1_f(answer, draw):
    _1f1b.in_time(answer, flow(draw))


@alternating.requires(
    "rank r holds at most the activations of stages - r micro-batches", needs_earlier=True
)
def rank_r_holds_at_most_the_activations(answer, draw):
    _1f1b.in_memory(answer, flow(draw))


@alternating.requires(
    "one stage, one micro-batch, and more stages than micro-batches",
    failures={"IndexError": "warm-up-not-capped", "ValueError": "warm-up-not-capped"},
    needs_earlier=True,
)
def one_stage_one_micro_batch_and_more_stages(answer, draw):
    stages, some = draw.integer(4, 6), draw.integer(2, 5)
    for case in (Case(1, some), Case(stages, 2), Case(stages, 1), Case(1, 1)):
        _1f1b.legal(answer, case, strange_work="warm-up-not-capped")
        _1f1b.in_time(answer, case)
        _1f1b.in_memory(answer, case)
