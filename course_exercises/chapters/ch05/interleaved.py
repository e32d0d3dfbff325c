"""Exercise 5.4, `interleaved`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise, Wrong
from course_exercises.chapters.ch05.shared import (
    FORM,
    MEMORY,
    ORDER,
    PAIRS,
    Case,
    Judge,
    all_as_the_first,
    all_forward_first,
    backwards_in_another_order,
    form,
    more_by,
    short,
)
from course_utils.lesson.schedules import Schedule


def _megatrons(case: Case, rank: int) -> int:
    """Megatron-LM's forward passes up to the first backward pass."""
    return (case.chunks - 1) * case.stages + 2 * (case.stages - rank) - 1


def _fewest(case: Case, rank: int) -> int:
    """As many are enough for the same time, where messages take none."""
    return (case.chunks - 1) * case.stages + case.stages - rank


def _first_backward_chunk(schedule: Schedule) -> int | None:
    return next((op.chunk for row in schedule for op in row if op.kind == "B"), None)


def _chunk_0_first(schedule: Schedule, case: Case) -> bool:
    forward = [op for op in schedule[0] if op.kind == "F"][: case.micro_batches]
    return case.micro_batches > case.stages and not any(op.chunk for op in forward)


def _other_groups(schedule: Schedule, case: Case) -> bool:
    """Whether rank 0 changes the chunk after another number of forward passes than `stages`."""
    chunks = [op.chunk for op in schedule[0] if op.kind == "F"]
    return chunks[0] == 0 and any(chunks) and chunks.index(1) != case.stages


def _chunks_in_a_row(schedule: Schedule, case: Case) -> bool:
    forward = [op for op in schedule[0] if op.kind == "F"]
    return forward[0].micro_batch == forward[1].micro_batch


interleaving = Exercise(
    "5.4",
    "interleaved",
    points=3,
    minutes=60,
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
        **FORM,
        **PAIRS,
        **ORDER,
        **MEMORY,
        "chunks-missing": "Only chunk 0 is there. Every rank runs each micro-batch through each of "
        "its chunks: the third argument of Op.",
        "pieces-not-chunks": "The third argument of Op is the number of the chunk on its rank, from 0 "
        "to chunks - 1, not that of the piece in the whole model.",
        "other-groups": "Your groups have another size. The chunk changes after every `stages` "
        "micro-batches: then the first of them has passed all ranks, and comes back.",
        "chunks-not-reversed": "Your first backward pass is one through chunk 0. The gradient comes "
        "from the end of the model: backward passes begin with the last chunk.",
        "chunks-in-a-row": "A rank runs its chunks of one micro-batch one after the other. Between two "
        "chunks the micro-batch has to pass all other ranks: meanwhile, take the next micro-batch.",
        "all-forward-first": "Every rank runs all forward passes first, and holds the activations of "
        "all micro-batches in all chunks.",
        "chunk-0-first": "A rank runs all micro-batches through chunk 0 before it begins with chunk "
        "1. Change the chunk after every `stages` micro-batches.",
        "same-warm-up": "Every rank has the same warm-up. The nearer a rank is to the end, the sooner "
        "its first gradient comes.",
        "warm-up-short": "Some rank begins its backward passes too early. It lacks a forward pass, "
        "or waits in every turn for a gradient that is still on its way: the first micro-batch has "
        "to pass all chunks before its gradient starts.",
        "one-too-many": "The warm-up is one forward pass too long. Count the forward pass of the "
        "first pair too: it comes before the first backward pass.",
        "warm-up-not-capped": "With few micro-batches, the warm-up is longer than all the forward "
        "passes. It ends where they end.",
    },
)
_interleaved = Judge(
    lambda answer, case: answer(case.stages, case.micro_batches, case.chunks),
    budget=_megatrons,
    suspects={
        "chunks-not-reversed": lambda s, case: case.chunks > 1 and _first_backward_chunk(s) == 0,
        "chunks-in-a-row": _chunks_in_a_row,
        "all-forward-first": all_forward_first,
        "chunk-0-first": _chunk_0_first,
        "other-groups": _other_groups,
        "same-warm-up": all_as_the_first(_megatrons),
        "warm-up-short": short(_fewest),
        "one-too-many": more_by(1, _megatrons),
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
    case = _groups(draw)
    schedule = form(_interleaved.call(answer, case), case)
    if not any(op.chunk for row in schedule for op in row):
        raise Wrong("chunks-missing", expected=f"chunks 0 to {case.chunks - 1}", got="chunk 0 only")
    highest = max(op.chunk for row in schedule for op in row)
    if highest >= case.chunks:
        expected = f"chunks 0 to {case.chunks - 1}, with {case}"
        raise Wrong("pieces-not-chunks", expected=expected, got=f"chunk {highest}")
    _interleaved.legal(answer, case)


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
    "as many micro-batches as stages, one stage, and one chunk",
    failures={"IndexError": "warm-up-not-capped", "ValueError": "warm-up-not-capped"},
    needs_earlier=True,
)
def as_many_micro_batches_as_stages(answer, draw):
    stages, chunks = draw.integer(3, 5), draw.integer(2, 3)
    few, alone = Case(stages, stages, 2), Case(1, draw.integer(2, 5), chunks)
    for case in (few, alone, Case(1, 1, 1), Case(stages, 2 * stages, 1)):
        _interleaved.legal(answer, case, strange_work="warm-up-not-capped")
        _interleaved.in_time(answer, case)
        _interleaved.in_memory(answer, case)
