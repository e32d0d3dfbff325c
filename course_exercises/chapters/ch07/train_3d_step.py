"""Exercise 7.4, `train_3d_step`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise, Wrong
from course_exercises.chapters.ch07.shared import (
    NAMES,
    REPLICATED,
    SHARED_OUT,
    STEP,
    Report,
    Slip,
    Slips,
    Task,
    any_failure,
    as_it_may_be,
    blaming,
    check_losses,
    check_update,
    drawn_task,
    run_step,
    slips_of_any_step,
    tensor_slips,
)


def _check_readers(reports: list[Report], task: Task) -> None:
    """Raises Wrong where a stage reads what it has no use for."""
    last = task.size("pipeline") - 1
    for rank, report in enumerate(reports):
        stage = task.place(rank)["pipeline"]
        needed = {name for name, end in (("inputs", 0), ("targets", last)) if stage == end}
        if report.kinds - needed:
            got = (
                f"rank {rank}, in stage {stage} of 0 to {last}, reads {min(report.kinds - needed)}"
            )
            expected = "inputs read in the first stage, targets in the last"
            raise Wrong("every-stage-reads", expected=expected, got=got)


# Text of a hang is quoted as only a hang says it: beside an exception others "were waiting in recv".
FAILURES_3D = {
    "ReadsAllRows": "whole-batch",
    "ReadsOtherRows": "other-rows",
    "NotANeighbour": "wrong-neighbour",
    "names itself": "wrong-neighbour",
    "there is no rank": "group-rank",
    "is not part of group": "group-rank",
    "class 'NoneType'": "graph-cut",
    "'NoneType' object has no attribute 'item'": "loss-on-last-only",
    "loss' where it is not associated": "loss-on-last-only",
    "only for scalar outputs": "no-gradient-given",
    "finished without sending": "never-sent",
    "waits in broadcast": "never-sent",
    "wait in broadcast": "never-sent",
    "finished without": "not-every-rank",
    "wait in all_reduce": "sum-waits",
    "waits in all_reduce": "sum-waits",
    "waits in recv": "first-waits",
    "timeout": "not-every-rank",
    "mismatch": "not-every-rank",
}

three_dimensions = Exercise(
    "7.4",
    "train_3d_step",
    points=4,
    minutes=35,
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
        "other-rows": "A rank reads other rows than those of its data coordinate. All ranks of a pipeline "
        "and of a tensor group work on the same rows: `read_inputs(d, dp)`.",
        "wrong-neighbour": "A message goes to, or is expected from, a rank that is not beside this one "
        "in its pipeline. rank + 1 has another tensor coordinate; the next stage is tp ranks away, or "
        "further in another mesh. Use the pipeline group, and numbers within it.",
        "group-rank": "You name a rank that the group does not have. `dst`, `src` are global ranks, also "
        "with `group=`; `group_dst`, `group_src` count within the group, and end with the last stage.",
        "graph-cut": "The input that a stage received has no gradient to send back. A received tensor is no "
        "part of a graph: call `requires_grad_()` on it before you use it.",
        "no-gradient-given": "A stage before the last has no loss, and its output is not one number: "
        "`y.backward(gradient)`, with what the next stage sends back.",
        "not-sent-back": "Only the last stage has learned: the gradient of its input never reaches the "
        "stage before.",
        "begins-with-ones": "A stage before the last begins its backward with ones, as "
        "`y.sum().backward()` does. It goes on from the gradient that the next stage sends: "
        "`y.backward(gradient)`.",
        "scaled-on-the-way": "The gradient that goes from stage to stage is multiplied or divided "
        "by the size of a group. It belongs to the rows of this pipeline alone: hand it on as it "
        "is.",
        "first-waits": "All ranks wait to receive. The first stage receives no activations, and sends its own "
        "before it waits for their gradient: somebody has to begin.",
        "never-sent": "A stage waits for a message that its neighbour never sends. Activations go "
        "forward, and after backward the gradient of the input goes back.",
        "sum-waits": "Some ranks wait in an all-reduce, others to receive something. The sums of a cut "
        "stage run within its tensor group: other stages are not there to take part. And a rank that "
        "still has to send must not wait for the others first.",
        "single-stage": "A pipeline of one stage fails: that stage is first *and* last. Decide about each "
        "message on its own.",
        "middle-stage": "Two stages work, three do not. A stage in the middle receives and sends, forward "
        "and backward.",
        "every-stage-reads": "A stage reads what it has no use for. The first stage reads inputs, the last one "
        "targets, and a stage in the middle nothing: it gets its input from the stage before.",
        "loss-on-last-only": "Only the last stage's ranks know the loss. It has to go from there to "
        "the other stages.",
    },
    failures=FAILURES_3D,
)


OTHER_ORDERS = [  # in which the arithmetic of the usual order gives another block of rows
    ((2, 2, 1), ("tensor", "pipeline", "data")),
    ((3, 2, 1), ("pipeline", "data", "tensor")),
    ((2, 1, 2), ("tensor", "data", "pipeline")),
]


def _slips_3d(task: Task) -> Slips:
    sizes = {task.size(name) for name in NAMES} - {1}
    back = {
        "not-sent-back": [Slip(sends_back=False)],
        "begins-with-ones": [Slip(ones=True)],
        "scaled-on-the-way": [Slip(comes_back=f) for n in sizes for f in (n, 1 / n)],
    }
    back = back if task.size("pipeline") > 1 else {}
    tensor = tensor_slips(task) if task.size("tensor") > 1 else {}
    return {**back, **tensor, **slips_of_any_step(task)}


def _check_3d(answer, task: Task) -> None:
    check_losses(check_update(answer, task, _slips_3d(task), three=True), task)


@three_dimensions.requires("3 x 2 x 1 ranks: two stages, three times, take the step of one process")
def with_3_x_2_x_1_ranks(answer, draw):
    task = drawn_task(draw, (3, 2, 1))
    _check_readers(check_update(answer, task, _slips_3d(task), three=True), task)


@three_dimensions.requires("1 x 2 x 2 ranks: each of two stages is cut", needs_earlier=True)
def with_1_x_2_x_2_ranks(answer, draw):
    task = drawn_task(draw, (1, 2, 2))
    check_update(answer, task, _slips_3d(task), three=True)


@three_dimensions.requires(
    "every rank returns the mean loss of the global batch", needs_earlier=True
)
def every_rank_returns_the_mean_loss(answer, draw):
    for sizes in (draw.choice([(2, 2, 1), (3, 2, 1)]), (1, 2, 2)):
        task = drawn_task(draw, sizes)
        check_losses(run_step(answer, task, three=True), task)


@three_dimensions.requires(
    "one stage", failures=any_failure("single-stage", *FAILURES_3D), needs_earlier=True
)
def one_stage(answer, draw):
    with blaming("single-stage"):
        _check_3d(answer, drawn_task(draw, (draw.choice([2, 3]), 1, 1)))


@three_dimensions.requires(
    "three stages", failures=any_failure("middle-stage", *FAILURES_3D), needs_earlier=True
)
def three_stages(answer, draw):
    with blaming("middle-stage"):
        _check_3d(answer, drawn_task(draw, (1, 3, 1)))


@three_dimensions.requires("gradients that were there before", needs_earlier=True)
def gradients_that_were_there_before(answer, draw):
    sizes, stale = draw.choice([(1, 2, 1), (2, 2, 1)]), draw.number(1, 2)
    _check_3d(answer, drawn_task(draw, sizes, stale=stale))


@three_dimensions.requires(
    "a frozen parameter", failures=any_failure("frozen", *FAILURES_3D), needs_earlier=True
)
def a_frozen_parameter(answer, draw):
    frozen = (draw.choice([*SHARED_OUT, *REPLICATED]),)
    with blaming("frozen"):
        sizes, extra = draw.choice([(1, 2, 1), (1, 2, 2)]), as_it_may_be(draw)
        _check_3d(answer, drawn_task(draw, sizes, frozen=frozen, **extra))


@three_dimensions.requires(
    "a mesh in another order",
    failures=any_failure("by-arithmetic", *FAILURES_3D),
    needs_earlier=True,
)
def a_mesh_in_another_order(answer, draw):
    with blaming("by-arithmetic"):
        sizes, order = draw.choice(OTHER_ORDERS)
        _check_3d(answer, drawn_task(draw, sizes, order=order))


@three_dimensions.requires("2 x 2 x 2 ranks", needs_earlier=True)
def with_2_x_2_x_2_ranks(answer, draw):
    _check_3d(answer, drawn_task(draw, (2, 2, 2), adam=True))
