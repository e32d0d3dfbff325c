"""What the answers of chapter 07 share."""

from functools import partial

import torch
import torch.distributed as dist

from course_exercises.authoring import load_code

SumBackward = load_code(7, "SumBackward")
SumForward = load_code(7, "SumForward")


NAMES = "data", "pipeline", "tensor"


def group_of(mesh, *names):
    """The group of one dimension, or the default group, of all ranks, for several."""
    return mesh.get_group(names[0]) if len(names) == 1 else dist.group.WORLD


def own_block(mesh):
    return mesh.get_local_rank("data"), mesh.get_group("data").size()


def average_over(gradients, mesh, names=("data",), divisor=None):
    group = group_of(mesh, *names)
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
        gradient /= divisor or group.size()


def average_all(part, mesh):
    average_over([p.grad for p in part.parameters() if p.grad is not None], mesh)


def forward_of(part, x, mesh, enters=SumBackward, leaves=SumForward, group=None):
    """The cut layer; what stands where it begins and ends may be another function, or another group's."""
    group = group or mesh.get_group("tensor")
    hidden = part.up(enters.apply(part.scale * x, group)).relu()
    return leaves.apply(part.down(hidden), group) + part.bias


class Untouched:
    """In the place of one of the two: nothing is sent."""

    @staticmethod
    def apply(x, group):
        return x


def bias_before_the_sum(part, x, mesh):
    tensor = mesh.get_group("tensor")
    hidden = part.up(SumBackward.apply(part.scale * x, tensor)).relu()
    return SumForward.apply(part.down(hidden) + part.bias, tensor)


def averaging_asynchronously(mesh, gradients):
    data = mesh.get_group("data")
    for gradient in gradients:
        gradient /= data.size()
    return [dist.all_reduce(g, group=data, async_op=True) for g in gradients]


class SumTwice(torch.autograd.Function):
    """As the all-reduce of torch.distributed.nn: its backward is an all-reduce too."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


without_sum_backward = partial(forward_of, enters=Untouched)
without_either = partial(forward_of, enters=Untouched, leaves=Untouched)
summing_twice = partial(forward_of, leaves=SumTwice)


def over_all_ranks(part, x, mesh):
    return forward_of(part, x, mesh, group=dist.group.WORLD)


def averaging(names, divisor=None):
    def average(part, mesh):
        average_over([p.grad for p in part.parameters()], mesh, names, divisor)

    return average


def average_replicated_only(part, mesh):
    average_over([part.scale.grad, part.bias.grad], mesh)


def average_shards_only(part, mesh):
    average_over([p.grad for p in (*part.up.parameters(), *part.down.parameters())], mesh)


def average_parameters(part, mesh):
    average_over([p.data for p in part.parameters()], mesh)


def with_zeros_for_none(part, mesh):
    for parameter in part.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average_all(part, mesh)
