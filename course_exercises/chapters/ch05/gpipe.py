"""Exercise 5.2, `gpipe`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise, Wrong
from course_exercises.chapters.ch05.shared import SCHEDULE, Case, Judge, flow, warm_ups_of
from course_utils.lesson.schedules import Schedule


def _one_at_a_time(schedule: Schedule, case: Case) -> bool:
    return case.micro_batches > 1 and set(warm_ups_of(schedule)) == {1}


gpipe_exercise = Exercise(
    "5.2",
    "gpipe",
    points=2,
    minutes=10,
    kind="first",
    parameters=("stages", "micro_batches"),
    hints=[
        "What does one rank do, from its first op to its last? Does it differ from rank to rank?",
        (
            "All ranks do the same, in the same order; they only start at other times, and times are "
            "no part of a schedule. First the F of micro-batch 0, 1, 2, ..., then the B."
        ),
        (
            "Build one rank's list from two comprehensions, one over the F and one over the B, and "
            "return a copy of it for each stage."
        ),
    ],
    misconceptions={
        **SCHEDULE,
        "one-at-a-time": "Every rank goes forward and back with one micro-batch before it starts the next: one stage "
        "works, the others wait. Run all F first.",
        "backwards-early": "A backward pass comes before the last forward pass. That is another "
        "schedule: GPipe runs all forward passes first.",
    },
)
_gpipe = Judge(
    lambda answer, case: answer(case.stages, case.micro_batches),
    budget=lambda case, rank: case.micro_batches,
    suspects={"one-at-a-time": _one_at_a_time},
)


@gpipe_exercise.requires("the schedule can run: all the work, in an order that works", at_home=True)
def the_schedule_can_run(answer, draw):
    _gpipe.legal(answer, flow(draw))


@gpipe_exercise.requires(
    "no slower than (micro_batches + stages - 1) * (F + B)", needs_earlier=True
)
def no_slower_than_micro_batches_stages_1_f(answer, draw):
    _gpipe.in_time(answer, flow(draw))


@gpipe_exercise.requires("all forward passes before the first backward pass", needs_earlier=True)
def all_forward_passes_before_the_first_backward_pass(answer, draw):
    case = flow(draw)
    for rank, first in enumerate(warm_ups_of(_gpipe.legal(answer, case))):
        if first < case.micro_batches:
            raise Wrong(
                "backwards-early",
                expected=f"{case.micro_batches} F before the first B",
                got=f"{first} on rank {rank}",
            )


@gpipe_exercise.requires(
    "one stage, one micro-batch, and more stages than micro-batches", needs_earlier=True
)
def one_stage_one_micro_batch_and_more_stages(answer, draw):
    stages, some = draw.integer(3, 6), draw.integer(2, 5)
    for case in (Case(1, some), Case(stages, 1), Case(stages, 2), Case(1, 1)):
        _gpipe.in_time(answer, case)
