"""What the checks of chapter 07 compare with: the simulated step of all ranks is one process's."""

import itertools

import pytest
import torch
from torch import nn

from course_utils.checks import ch07
from course_utils.checks.compare import same
from course_utils.checks.draw import Draw

GRIDS = [(1, 1, 1), (3, 1, 1), (1, 3, 1), (1, 1, 3), (3, 2, 1), (2, 2, 2)]
SLIPS = {
    "rows": ch07._Slip(rows=ch07.NAMES),
    "forward": ch07._Slip(forward=()),
    "backward": ch07._Slip(backward=()),
    "enters": ch07._Slip(enters=2.0),
    "twice": ch07._Slip(twice=True),
    "bias inside": ch07._Slip(bias_inside=True),
    "share": ch07._Slip(share=0.5),
    "gradients": ch07._Slip(gradients=("pipeline",), divisor=2),
    "divisor": ch07._Slip(divisor=1),
    "averaged": ch07._Slip(averaged=ch07.REPLICATED),
    "again": ch07._Slip(again=1.0),
    "stale": ch07._Slip(keeps_stale=True),
    "without scale": ch07._Slip(leaves_out="scale"),
    "without relu": ch07._Slip(leaves_out="relu"),
    "without bias": ch07._Slip(leaves_out="bias"),
    "not sent back": ch07._Slip(sends_back=False),
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
    return ch07._task(Draw("0", str(sizes)), sizes, **more)


@pytest.mark.parametrize("order", list(itertools.permutations(ch07.NAMES)), ids="-".join)
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_the_simulated_step_is_that_of_one_process(sizes, order):
    task = task_of(sizes, order=order)
    gradients, loss = one_process(task)
    whole = ch07._Task(sizes, gradients, task.inputs, task.targets, task.lr, order=order)
    simulated = ch07._simulate(task)
    assert same(simulated.gradients, [whole.part(rank) for rank in range(task.ranks)])
    last = [v for r, v in enumerate(simulated.losses) if task.place(r)["pipeline"] == sizes[1] - 1]
    assert sum(last) / len(last) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("slip", SLIPS.values(), ids=SLIPS)
def test_every_slip_changes_the_step(slip):
    task = task_of((2, 2, 2), stale=1.0)
    assert not same(ch07._simulate(task, slip).gradients, ch07._simulate(task).gradients)


def test_no_two_mistakes_give_the_same_step():
    """Where the first requirements look: another name for the same numbers would be a guess."""
    for sizes, slips in (((3, 1, 2), ch07._slips_2d), ((3, 2, 1), ch07._slips_3d)):
        task = task_of(sizes, stale=1.0)
        found = {
            slug: [ch07._simulate(task, slip).gradients for slip in made]
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
            dim = ch07.SHARED_OUT.get(name)
            held = parts[0][name] if dim is None else torch.cat([p[name] for p in parts], dim)
            assert torch.equal(held, whole)
