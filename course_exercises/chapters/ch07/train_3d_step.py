"""Exercise 7.4, `train_3d_step`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise, Wrong
from course_exercises.chapters.ch07.shared import (
    REPLICATED,
    SHARED_OUT,
    STEP,
    Report,
    Task,
    any_failure,
    as_it_may_be,
    blaming,
    check_losses,
    check_update,
    drawn_task,
    run_step,
)

# Text of a hang is quoted as only a hang says it: beside an exception others "were waiting in recv".
FAILURES = {
    "this rank's rows are": "other-rows",
    "not beside it in its pipeline": "wrong-neighbour",
    "names itself": "wrong-neighbour",
    "there is no rank": "group-rank",
    "is not part of group": "group-rank",
    "class 'NoneType'": "graph-cut",
    "'NoneType' object has no attribute 'item'": "loss-on-last-only",
    "loss' where it is not associated": "loss-on-last-only",
    "only for scalar outputs": "not-handed-on",
    "finished without sending": "stages-wait",
    "finished without": "not-every-rank",
    "waits in": "stages-wait",
    "wait in": "stages-wait",
    "timeout": "not-every-rank",
    "mismatch": "not-every-rank",
}

three_dimensions = Exercise(
    "7.4",
    "train_3d_step",
    points=4,
    minutes=55,
    kind="stretch",
    parameters=("part", "read_inputs", "read_targets", "shape", "mesh", "optimizer"),
    hints=[
        (
            "Take your two-dimensional step. What replaces the input where a rank has no first stage, and "
            "what replaces the loss where it has no last one?"
        ),
        (
            "A later stage receives its input and makes it a leaf that wants a gradient. An earlier one "
            "receives the gradient of its output, and `y.backward(gradient)` goes on from there. Both "
            "talk to the rank with the same data and tensor coordinates. A stage can be first and last."
        ),
        (
            "Forward: read or receive, compute, send unless you are last. Backward: from the loss, or "
            "from the gradient that comes; send the input's gradient back unless you are first. Then the "
            "data group averages gradients, as before; each stage has its own. The last stage's loss, "
            "averaged over its data group, goes to all ranks of the pipeline by a broadcast."
        ),
    ],
    misconceptions={
        **STEP,
        "wrong-neighbour": "A message goes to, or is expected from, a rank that is not beside this one "
        "in its pipeline. rank + 1 has another tensor coordinate; the next stage is tp ranks away, or "
        "further in another mesh. Use the pipeline group, and numbers within it.",
        "graph-cut": "The input that a stage received has no gradient to send back. A received tensor is no "
        "part of a graph: call `requires_grad_()` on it before you use it.",
        "not-handed-on": "A stage before the last does not go backward from the gradient that the next stage sends. It may use "
        "none, or ones, as `y.sum().backward()` does, or scale what comes. Receive the gradient of its output, "
        "and call `y.backward(gradient)` with it as it is.",
        "stages-wait": "Ranks wait for each other. Let the first stage begin: it computes and sends before it waits for a "
        "gradient. Let every other stage send its input's gradient back, after its backward. And sum "
        "within the tensor group: the ranks of other stages are not there to take part.",
        "other-stages": "Your step is right with two stages, and not with one or with three. One stage is first *and* last, and "
        "one in the middle is neither: decide about each message on its own.",
        "every-stage-reads": "A stage reads what it has no use for. Read inputs in the first stage, targets in the last "
        "one, and nothing in the middle: such a stage gets its input from the one before.",
        "loss-on-last-only": "Only the last stage's ranks know the loss. Send it from there to the other stages, as a "
        "broadcast in the pipeline group does.",
    },
    things="gradients",
    failures=FAILURES,
)


OTHER_ORDERS = [  # in which the arithmetic of the usual order gives another block of rows
    ((2, 2, 1), ("tensor", "pipeline", "data")),
    ((3, 2, 1), ("pipeline", "data", "tensor")),
    ((2, 1, 2), ("tensor", "data", "pipeline")),
]


def _check_readers(reports: list[Report], task: Task) -> None:
    """Raises Wrong where a stage reads what it has no use for."""
    last = task.size("pipeline") - 1
    for rank, report in enumerate(reports):
        stage = task.place(rank)["pipeline"]
        needed = {name for name, end in (("inputs", 0), ("targets", last)) if stage == end}
        if more := report.kinds - needed:
            got = f"rank {rank}, in stage {stage} of 0 to {last}, reads {min(more)}"
            expected = "inputs read in the first stage, targets in the last"
            raise Wrong("every-stage-reads", expected=expected, got=got)


def _check_3d(answer, task: Task) -> None:
    check_losses(check_update(answer, task), task)


@three_dimensions.requires("3 x 2 x 1 ranks: two stages, three times, take the step of one process")
def with_3_x_2_x_1_ranks(answer, draw):
    task = drawn_task(draw, (3, 2, 1))
    _check_readers(check_update(answer, task), task)


@three_dimensions.requires("1 x 2 x 2 ranks: each of two stages is cut", needs_earlier=True)
def with_1_x_2_x_2_ranks(answer, draw):
    task = drawn_task(draw, (1, 2, 2))
    check_update(answer, task)


@three_dimensions.requires(
    "every rank returns the mean loss of the global batch", needs_earlier=True
)
def every_rank_returns_the_mean_loss(answer, draw):
    for sizes in (draw.choice([(2, 2, 1), (3, 2, 1)]), (1, 2, 2)):
        task = drawn_task(draw, sizes)
        check_losses(run_step(answer, task), task)


@three_dimensions.requires(
    "one stage", failures=any_failure("other-stages", *FAILURES), needs_earlier=True
)
def one_stage(answer, draw):
    with blaming("other-stages"):
        _check_3d(answer, drawn_task(draw, (draw.choice([2, 3]), 1, 1)))


@three_dimensions.requires(
    "three stages", failures=any_failure("other-stages", *FAILURES), needs_earlier=True
)
def three_stages(answer, draw):
    with blaming("other-stages"):
        _check_3d(answer, drawn_task(draw, (1, 3, 1)))


@three_dimensions.requires("gradients that were there before", needs_earlier=True)
def gradients_that_were_there_before(answer, draw):
    sizes, stale = draw.choice([(1, 2, 1), (2, 2, 1)]), draw.number(1, 2)
    _check_3d(answer, drawn_task(draw, sizes, stale=stale))


@three_dimensions.requires(
    "a frozen parameter", failures=any_failure("frozen", *FAILURES), needs_earlier=True
)
def a_frozen_parameter(answer, draw):
    frozen = (draw.choice([*SHARED_OUT, *REPLICATED]),)
    with blaming("frozen"):
        sizes, extra = draw.choice([(1, 2, 1), (1, 2, 2)]), as_it_may_be(draw)
        _check_3d(answer, drawn_task(draw, sizes, frozen=frozen, **extra))


@three_dimensions.requires(
    "a mesh in another order",
    failures=any_failure("by-arithmetic", *FAILURES),
    needs_earlier=True,
)
def a_mesh_in_another_order(answer, draw):
    with blaming("by-arithmetic"):
        sizes, order = draw.choice(OTHER_ORDERS)
        _check_3d(answer, drawn_task(draw, sizes, order=order))


@three_dimensions.requires("2 x 2 x 2 ranks", needs_earlier=True)
def with_2_x_2_x_2_ranks(answer, draw):
    _check_3d(answer, drawn_task(draw, (2, 2, 2), adam=True))
