"""Exercise 5.4, `interleaved`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise
from course_exercises.chapters.ch05.shared import (
    AFTER_THE_WARM_UP,
    FEW,
    PAIRS,
    SCHEDULE,
    WORK,
    Case,
    Judge,
    backwards_in_another_order,
    long,
    short,
)
from course_utils.lesson.schedules import Schedule


def _megatrons(case: Case, rank: int) -> int:
    """Megatron-LM's forward passes up to the first backward pass."""
    return (case.chunks - 1) * case.stages + 2 * (case.stages - rank) - 1


def _fewest(case: Case, rank: int) -> int:
    """As many are enough for the same time, where messages take none."""
    return (case.chunks - 1) * case.stages + case.stages - rank


def _begins_backward_with_chunk_0(schedule: Schedule, case: Case) -> bool:
    chunks = [op.chunk for row in schedule for op in row if op.kind == "B"]
    return case.chunks > 1 and chunks[:1] == [0]


def _other_groups(schedule: Schedule, case: Case) -> bool:
    """Whether rank 0 changes the chunk after another number of forward passes than `stages`."""
    chunks = [op.chunk for op in schedule[0] if op.kind == "F"]
    right = [0] * case.stages + [1]
    return case.chunks > 1 and chunks[:1] == [0] and chunks[: len(right)] != right


interleaving = Exercise(
    "5.4",
    "interleaved",
    points=3,
    minutes=75,
    kind="stretch",
    parameters=("stages", "micro_batches", "chunks"),
    hints=[
        (
            "Write down the F of one rank for 2 stages, 4 micro-batches and 2 chunks. When micro-batch "
            "0 comes back to rank 0 for chunk 1, how many others has rank 0 started? Every rank runs "
            "its F in this same order."
        ),
        (
            "Micro-batches go in groups of `stages`: a group through chunk 0, the same group through "
            "chunk 1, and so on, then the next group. The B go in the same groups, with the chunks from "
            "the last to the first. The warm-up is 2 * (stages - 1 - rank), and `stages` more for every "
            "chunk but one."
        ),
        (
            "Make one list of all F in this order and one of all B. Rank r takes its warm-up from the "
            "first list, but never more than all; then, in turn, the next F and the next B; then the "
            "rest of the B."
        ),
    ],
    misconceptions={
        **SCHEDULE,
        **PAIRS,
        "other-work": f"{WORK}, in each of its chunks, which the third argument of Op numbers from 0 on each rank. "
        f"{AFTER_THE_WARM_UP}",
        "other-groups": "Rank 0 does not change the chunk after `stages` micro-batches. Then the first of them has "
        "passed all ranks and comes back; before, it is not there, and later, the other ranks wait. Take them in "
        "groups of `stages`, each group through chunk after chunk.",
        "chunks-not-reversed": "Your first backward pass is one through chunk 0. The gradient comes "
        "from the end of the model: backward passes begin with the last chunk.",
    },
)
_interleaved = Judge(
    lambda answer, case: answer(case.stages, case.micro_batches, case.chunks),
    budget=_megatrons,
    suspects={
        "chunks-not-reversed": _begins_backward_with_chunk_0,
        "other-groups": _other_groups,
        "warm-up-short": short(_fewest),
        "too-many-activations": long(_megatrons),
        "backwards-order": backwards_in_another_order,
    },
)


def _groups(draw) -> Case:
    """Some groups of as many micro-batches as there are stages, and several chunks."""
    stages = draw.integer(3, 4)
    chunks = draw.integer(2, stages - 1)  # fewer than stages: groups of `chunks` are a mistake
    return Case(stages, stages * draw.integer(3, 4), chunks)


@interleaving.requires("the schedule can run: all the work, in an order that works", at_home=True)
def the_schedule_can_run(answer, draw):
    _interleaved.legal(answer, _groups(draw))


@interleaving.requires(
    "no slower than (chunks * micro_batches + stages - 1) * (F + B)", needs_earlier=True
)
def no_slower_than_chunks_micro_batches_stages_1(answer, draw):
    _interleaved.in_time(answer, _groups(draw))


@interleaving.requires(
    "rank r holds at most (chunks - 1) * stages + 2 * (stages - r) - 1 activations",
    needs_earlier=True,
)
def rank_r_holds_at_most_chunks_1_stages(answer, draw):
    _interleaved.in_memory(answer, _groups(draw))


@interleaving.requires(
    "as many micro-batches as stages, one stage, and one chunk", failures=FEW, needs_earlier=True
)
def as_many_micro_batches_as_stages(answer, draw):
    stages, chunks = draw.integer(3, 5), draw.integer(2, 3)
    few, alone = Case(stages, stages, 2), Case(1, draw.integer(2, 5), chunks)
    for case in (few, alone, Case(1, 1, 1), Case(stages, 2 * stages, 1)):
        _interleaved.in_time(answer, case)
        _interleaved.in_memory(answer, case)
