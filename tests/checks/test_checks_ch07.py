"""What the checks of chapter 07 compare with: the ranks' parts of what one process computes."""

import itertools

import pytest
import torch

from course_exercises.authoring.compare import same
from course_exercises.authoring.draw import Draw
from course_exercises.authoring.vocabulary import times, total
from course_exercises.chapters.ch07.shared import (
    NAMES,
    SHARED_OUT,
    drawn_task,
    gradients_by_rank,
    one_process,
)

GRIDS = [(1, 1, 1), (3, 1, 1), (1, 3, 1), (1, 1, 3), (3, 2, 1), (2, 2, 2)]


def task_of(sizes, **more):
    return drawn_task(Draw("0", str(sizes)), sizes, **more)


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)), ids="-".join)
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_the_mean_over_a_data_group_is_the_gradient_of_the_whole_batch(sizes, order):
    task = task_of(sizes, order=order)
    own, whole = gradients_by_rank(task, own_rows=True), gradients_by_rank(task)
    for rank in range(task.ranks):
        group = task.group(rank, "data")
        mean = times(total([own[other] for other in group]), 1 / len(group))
        assert len(group) == task.size("data") and same(mean, whole[rank])


def test_the_parts_of_all_ranks_are_the_whole_model():
    task = task_of((2, 3, 2))
    gradients, _ = one_process(task.stages, task.inputs, task.targets)
    for rank, stages in itertools.product(range(task.ranks), (task.stages, gradients)):
        place = task.place(rank)
        parts = [task.part(other, stages) for other in task.group(rank, "tensor")]
        for name, whole in stages[place["pipeline"]].items():
            dim = SHARED_OUT.get(name)
            held = parts[0][name] if dim is None else torch.cat([p[name] for p in parts], dim)
            assert torch.equal(held, whole)
