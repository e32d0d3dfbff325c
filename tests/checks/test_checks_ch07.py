"""What the checks of chapter 07 compare with: the simulated step of all ranks is one process's."""

import itertools

import pytest
import torch
from torch import nn

from course_exercises.authoring.compare import same
from course_exercises.authoring.draw import Draw
from course_exercises.chapters.ch07.shared import (
    NAMES,
    REPLICATED,
    SHARED_OUT,
    Slip,
    Task,
    _simulate,
    drawn_task,
)
from course_exercises.chapters.ch07.train_2d_step import _slips_2d
from course_exercises.chapters.ch07.train_3d_step import _slips_3d

GRIDS = [(1, 1, 1), (3, 1, 1), (1, 3, 1), (1, 1, 3), (3, 2, 1), (2, 2, 2)]
SLIPS = {
    "rows": Slip(rows=NAMES),
    "forward": Slip(forward=()),
    "backward": Slip(backward=()),
    "enters": Slip(enters=2.0),
    "twice": Slip(twice=True),
    "bias inside": Slip(bias_inside=True),
    "share": Slip(share=0.5),
    "gradients": Slip(gradients=("pipeline",), divisor=2),
    "divisor": Slip(divisor=1),
    "averaged": Slip(averaged=REPLICATED),
    "again": Slip(again=1.0),
    "stale": Slip(keeps_stale=True),
    "without scale": Slip(leaves_out="scale"),
    "without relu": Slip(leaves_out="relu"),
    "without bias": Slip(leaves_out="bias"),
    "not sent back": Slip(sends_back=False),
}


def one_process(task):
    """The gradients and the loss of the whole model on the whole batch, stage by stage."""
    stages = [
        {name: value.clone().requires_grad_() for name, value in values.items()}
        for values in task.stages
    ]
    x = task.inputs
    for stage in stages:
        up = nn.functional.linear(x * stage["scale"], stage["up.weight"], stage["up.bias"])
        x = nn.functional.linear(up.relu(), stage["down.weight"]) + stage["bias"]
    loss = nn.functional.mse_loss(x, task.targets)
    loss.backward()
    gradients = [{name: value.grad for name, value in stage.items()} for stage in stages]
    return gradients, loss.item()


def task_of(sizes, **more):
    return drawn_task(Draw("0", str(sizes)), sizes, **more)


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)), ids="-".join)
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_the_simulated_step_is_that_of_one_process(sizes, order):
    task = task_of(sizes, order=order)
    gradients, loss = one_process(task)
    whole = Task(sizes, gradients, task.inputs, task.targets, task.lr, order=order)
    simulated = _simulate(task)
    assert same(simulated.gradients, [whole.part(rank) for rank in range(task.ranks)])
    last = [v for r, v in enumerate(simulated.losses) if task.place(r)["pipeline"] == sizes[1] - 1]
    assert sum(last) / len(last) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("slip", SLIPS.values(), ids=SLIPS)
def test_every_slip_changes_the_step(slip):
    task = task_of((2, 2, 2), stale=1.0)
    assert not same(_simulate(task, slip).gradients, _simulate(task).gradients)


def test_no_two_mistakes_give_the_same_step():
    """Where the first requirements look: another name for the same numbers would be a guess."""
    for sizes, slips in (((3, 1, 2), _slips_2d), ((3, 2, 1), _slips_3d)):
        task = task_of(sizes, stale=1.0)
        found = {
            slug: [_simulate(task, slip).gradients for slip in made]
            for slug, made in slips(task).items()
        }
        for (one, first), (other, second) in itertools.combinations(found.items(), 2):
            assert not any(same(a, b) for a in first for b in second), f"{one} and {other}"


def test_the_parts_of_all_ranks_are_the_whole_model():
    task = task_of((2, 3, 2))
    for rank in range(task.ranks):
        place = task.place(rank)
        parts = [task.part(other) for other in task.group(rank, "tensor")]
        for name, whole in task.stages[place["pipeline"]].items():
            dim = SHARED_OUT.get(name)
            held = parts[0][name] if dim is None else torch.cat([p[name] for p in parts], dim)
            assert torch.equal(held, whole)
