"""Exercise 5.3, `one_forward_one_backward`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise
from course_exercises.chapters.ch05.shared import (
    FEW,
    PAIRS,
    SCHEDULE,
    Case,
    Judge,
    backwards_in_another_order,
    flow,
    long,
    short,
)
from course_utils.lesson.schedules import Schedule


def _until_first_backward(case: Case, rank: int) -> int:
    """1F1B: the F of micro-batch 0 reaches the last rank while these ones follow it."""
    return case.stages - rank


def _not_in_turn(schedule: Schedule, case: Case) -> bool:
    """Whether some rank, between its first B and its last F, runs two of a kind in a row."""
    kinds = ("".join(op.kind for op in row) for row in schedule)
    between = [row.lstrip("F").rstrip("B") for row in kinds]
    return any("FF" in row or "BB" in row for row in between)


alternating = Exercise(
    "5.3",
    "one_forward_one_backward",
    points=3,
    minutes=45,
    kind="core",
    parameters=("stages", "micro_batches"),
    hints=[
        (
            "The last rank can run B0 right after F0. How many forward passes can the rank before it "
            "run until the gradient of micro-batch 0 comes back to it? And rank 0?"
        ),
        (
            "While a rank waits for its first gradient, each rank behind it works on one micro-batch: so many "
            "forward passes are the warm-up, but never more than there are micro-batches. After it come pairs: the "
            "next F, the next B."
        ),
        (
            "Rank r runs stages - 1 - r forward passes as a warm-up. The F of the pairs go on where it ended, their B "
            "begin with micro-batch 0, and after the last pair as many B remain as the warm-up had F."
        ),
    ],
    misconceptions={
        **SCHEDULE,
        **PAIRS,
        "not-in-turn": "Some rank runs several F, or several B, in a row between its first B and its last F. After the "
        "warm-up F and B take turns, until no F is left.",
    },
)
_1f1b = Judge(
    lambda answer, case: answer(case.stages, case.micro_batches),
    budget=_until_first_backward,
    suspects={
        "not-in-turn": _not_in_turn,
        "warm-up-short": short(_until_first_backward),
        "too-many-activations": long(_until_first_backward),
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
    failures=FEW,
    needs_earlier=True,
)
def one_stage_one_micro_batch_and_more_stages(answer, draw):
    stages, some = draw.integer(4, 6), draw.integer(2, 5)
    for case in (Case(1, some), Case(stages, 2), Case(stages, 1), Case(1, 1)):
        _1f1b.in_time(answer, case)
        _1f1b.in_memory(answer, case)
