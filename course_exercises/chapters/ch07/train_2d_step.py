"""Exercise 7.3, `train_2d_step`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise
from course_exercises.chapters.ch07.shared import (
    REPLICATED,
    SHARED_OUT,
    STEP,
    Task,
    any_failure,
    as_it_may_be,
    blaming,
    check_losses,
    check_update,
    drawn_task,
)

FAILURES = {
    "this rank's rows are": "other-rows",
    "is not part of group": "group-rank",
    "timeout": "not-every-rank",
    "mismatch": "not-every-rank",
}

two_dimensions = Exercise(
    "7.3",
    "train_2d_step",
    points=3,
    minutes=40,
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
    misconceptions=STEP,
    things="gradients",
    failures=FAILURES,
)


def _task(draw, dp: int, tp: int, order=("data", "tensor"), **more) -> Task:
    return drawn_task(draw, (dp, 1, tp), order=order, **more)


@two_dimensions.requires("3 x 2 ranks end with the parts of one process's step")
def with_3_x_2_ranks_end_with_the_parts(answer, draw):
    check_update(answer, _task(draw, 3, 2))


@two_dimensions.requires("every rank returns the mean loss of the global batch", needs_earlier=True)
def every_rank_returns_the_mean_loss(answer, draw):
    task = _task(draw, draw.choice([2, 3]), 1)
    check_losses(check_update(answer, task), task)


@two_dimensions.requires(
    "layers cut in three, without copies; and a single rank", needs_earlier=True
)
def layers_cut_in_three(answer, draw):
    for tp in (3, 1):
        task = _task(draw, 1, tp)
        check_losses(check_update(answer, task), task)


@two_dimensions.requires("gradients that were there before", needs_earlier=True)
def gradients_that_were_there_before(answer, draw):
    check_update(answer, _task(draw, draw.choice([2, 3]), 1, stale=draw.number(1, 2)))


@two_dimensions.requires("the step of another optimizer, Adam", needs_earlier=True)
def the_step_of_another_optimizer(answer, draw):
    check_update(answer, _task(draw, draw.choice([2, 3]), 1, adam=True))


@two_dimensions.requires("a frozen parameter", failures={"exception": "frozen"}, needs_earlier=True)
def a_frozen_parameter(answer, draw):
    frozen = (draw.choice([*SHARED_OUT, *REPLICATED]),)
    with blaming("frozen"):
        more = as_it_may_be(draw)
        check_update(answer, _task(draw, draw.choice([2, 3]), 1, frozen=frozen, **more))


@two_dimensions.requires(
    "a mesh whose first dimension is tensor",
    failures=any_failure("by-arithmetic", *FAILURES),
    needs_earlier=True,
)
def a_mesh_whose_first_dimension_is_tensor(answer, draw):
    with blaming("by-arithmetic"):
        check_update(answer, _task(draw, draw.choice([2, 3]), 2, order=("tensor", "data")))
