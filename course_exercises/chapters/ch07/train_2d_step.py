"""Exercise 7.3, `train_2d_step`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise
from course_exercises.chapters.ch07.shared import (
    ALL,
    REPLICATED,
    SHARED_OUT,
    STEP,
    Report,
    Sizes,
    Slip,
    Slips,
    Task,
    any_failure,
    as_it_may_be,
    blaming,
    check_losses,
    check_update,
    drawn_task,
    slips_of_any_step,
    tensor_slips,
)

two_dimensions = Exercise(
    "7.3",
    "train_2d_step",
    points=3,
    minutes=25,
    kind="core",
    parameters=("part", "read_inputs", "read_targets", "mesh", "optimizer"),
    hints=[
        (
            "Write the step for one process first. Then ask of each line: do the ranks of my tensor "
            "group have the same numbers here, or parts of them? And those of my data group?"
        ),
        (
            "The tensor group works on the same rows and talks twice: where the scaled input enters "
            "the cut region, and where the partial outputs leave it. The data group talks after "
            "backward, about gradients of the same parameters from other rows."
        ),
        (
            "Read the block of your data coordinate. Send `scale * x` through `SumBackward` with the "
            "tensor group, the output of `down` through `SumForward`, and add the bias after that. "
            "Clear the gradients, go backward, average each gradient that is not None over the data "
            "group, step. Average the loss in the same way before you return it."
        ),
    ],
    misconceptions={
        **STEP,
        "batch-by-rank": "Every rank reads rows of its own, by its number among all ranks. The ranks of a "
        "tensor group are parts of one model and need the same rows: share them out by the data "
        "coordinate.",
        "batch-by-tensor": "The rows are shared out by the tensor coordinate: those ranks need the same "
        "rows, and those of a data group other ones.",
        "other-rows": "A rank reads other rows than those of its data coordinate.",
        "pair-swapped": "The two functions have changed places: the input is summed where it enters the "
        "cut region, and the partial outputs are not. `SumForward` belongs where they leave it.",
        "sum-over-other-ranks": "The sums of the cut layers run over more than the tensor group, or over "
        "another group: ranks with other rows add their numbers. Pass the tensor group to both "
        "functions.",
        "group-rank": "You name a rank that the group does not have. `dst` and `src` are global ranks, also "
        "with `group=`; `group_dst` and `group_src` count within the group.",
    },
    failures={
        "is not part of group": "group-rank",
        "timeout": "not-every-rank",
        "mismatch": "not-every-rank",
    },
)


def _two(dp: int, tp: int) -> Sizes:
    return dp, 1, tp


def _slips_2d(task: Task) -> Slips:
    groups = ("tensor",), ("data",), ALL
    elsewhere = [Slip(forward=f, backward=b) for f in groups for b in groups][1:]
    swapped = Slip(enters=task.size("tensor"), forward=(), backward=(), twice=True)
    elsewhere = {"pair-swapped": [swapped], "sum-over-other-ranks": elsewhere}
    return {**tensor_slips(task), **elsewhere, **slips_of_any_step(task)}


def _check_2d(answer, task: Task) -> list[Report]:
    return check_update(answer, task, _slips_2d(task), three=False)


TWO = ("data", "tensor")


@two_dimensions.requires("3 x 2 ranks end with the parts of one process's step")
def with_3_x_2_ranks_end_with_the_parts(answer, draw):
    _check_2d(answer, drawn_task(draw, _two(3, 2), order=TWO))


@two_dimensions.requires("every rank returns the mean loss of the global batch", needs_earlier=True)
def every_rank_returns_the_mean_loss(answer, draw):
    task = drawn_task(draw, _two(draw.choice([2, 3]), 1), order=TWO)
    check_losses(_check_2d(answer, task), task)


@two_dimensions.requires(
    "layers cut in three, without copies; and a single rank", needs_earlier=True
)
def layers_cut_in_three(answer, draw):
    for sizes in (_two(1, 3), _two(1, 1)):
        task = drawn_task(draw, sizes, order=TWO)
        check_losses(_check_2d(answer, task), task)


@two_dimensions.requires("gradients that were there before", needs_earlier=True)
def gradients_that_were_there_before(answer, draw):
    sizes, stale = _two(draw.choice([2, 3]), 1), draw.number(1, 2)
    _check_2d(answer, drawn_task(draw, sizes, order=TWO, stale=stale))


@two_dimensions.requires("the step of another optimizer, Adam", needs_earlier=True)
def the_step_of_another_optimizer(answer, draw):
    _check_2d(answer, drawn_task(draw, _two(draw.choice([2, 3]), 1), order=TWO, adam=True))


@two_dimensions.requires("a frozen parameter", failures={"exception": "frozen"}, needs_earlier=True)
def a_frozen_parameter(answer, draw):
    frozen = (draw.choice([*SHARED_OUT, *REPLICATED]),)
    with blaming("frozen"):
        sizes, extra = _two(draw.choice([2, 3]), 1), as_it_may_be(draw)
        _check_2d(answer, drawn_task(draw, sizes, order=TWO, frozen=frozen, **extra))


@two_dimensions.requires(
    "a mesh whose first dimension is tensor",
    failures=any_failure("by-arithmetic"),
    needs_earlier=True,
)
def a_mesh_whose_first_dimension_is_tensor(answer, draw):
    with blaming("by-arithmetic"):
        _check_2d(answer, drawn_task(draw, _two(draw.choice([2, 3]), 2), order=TWO[::-1]))
