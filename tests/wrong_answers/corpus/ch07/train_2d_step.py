"""Rarer wrong answers to 7.3, `train_2d_step`."""

from functools import partial

import torch.distributed as dist

from tests.wrong_answers import rarer
from tests.wrong_answers.ch07.shared import (
    SumBackward,
    SumForward,
    average_all,
    average_over,
    forward_of,
    without_sum_backward,
)
from tests.wrong_answers.ch07.train_2d_step import _train_2d, never_clears_gradients


@rarer("7.3")
def averages_over_all_what_is_partial(*given):
    """The mean over all ranks of partial gradients is too small by the size of the tensor group."""

    def average(part, mesh):
        average_all(part, mesh)
        average_over([part.scale.grad], mesh, ("tensor",))

    return _train_2d(*given, forward=without_sum_backward, average=average)


@rarer("7.3")
def sums_replicated_gradients_again(*given):
    def average(part, mesh):
        average_all(part, mesh)
        average_over([part.scale.grad, part.bias.grad], mesh, ("tensor",), divisor=1)

    return _train_2d(*given, average=average)


@rarer("7.3")
def sums_where_it_enters(*given):
    return _train_2d(*given, forward=partial(forward_of, enters=SumForward, leaves=SumBackward))


@rarer("7.3")
def averages_on_the_first_of_each_team(*given):
    def average(part, mesh):
        if mesh.get_local_rank("tensor") == 0:
            average_all(part, mesh)

    return _train_2d(*given, average=average)


@rarer("7.3")
def clears_what_learns(part, read_inputs, read_targets, mesh, optimizer):
    for parameter in part.parameters():
        if parameter.requires_grad:
            parameter.grad = None
    return never_clears_gradients(part, read_inputs, read_targets, mesh, optimizer)


@rarer("7.3")
def reduces_the_loss_to_one_rank(part, read_inputs, read_targets, mesh, optimizer):
    def mean_loss(loss, mesh):
        loss, data = loss.detach().clone(), mesh.get_group("data")
        dist.reduce(loss, group=data, group_dst=0)
        return loss.item() / data.size()

    return _train_2d(part, read_inputs, read_targets, mesh, optimizer, mean_loss=mean_loss)
