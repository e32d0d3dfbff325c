"""11.5, `average_expert_gradients`: answers written from the stub alone."""

import torch
import torch.distributed as dist


def right(model, mesh):
    """A right answer, of which the wrong ones change a line."""
    data = mesh.get_group("data")
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=data if "experts" in name.split(".") else None)
        parameter.grad /= mesh.size()


def averages_all_alike(model, mesh):
    """Averages every gradient over all ranks, as DDP would: different experts are mixed."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def divides_by_the_group(model, mesh):
    """Takes the mean over the group that it summed over, for experts the data group: too large."""
    data = mesh.get_group("data")
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        group = data if "experts" in name.split(".") else dist.group.WORLD
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


def skips_what_has_no_gradient(model, mesh):
    """Leaves out the collective where its own gradient is None, though another rank has one."""
    data = mesh.get_group("data")
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        dist.all_reduce(parameter.grad, group=data if "experts" in name.split(".") else None)
        parameter.grad /= mesh.size()


def looks_for_the_letters(model, mesh):
    """Looks for "experts" anywhere in the name, not among its parts."""
    data = mesh.get_group("data")
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=data if "experts" in name else None)
        parameter.grad /= mesh.size()


def takes_data_for_the_first_dimension(model, mesh):
    """Takes the group of the mesh's first dimension for that of the data."""
    data = mesh.get_group(0)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=data if "experts" in name.split(".") else None)
        parameter.grad /= mesh.size()


def fills_in_frozen_ones_too(model, mesh):
    """Gives zeros to every parameter without a gradient, also to those that are frozen."""
    data = mesh.get_group("data")
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=data if "experts" in name.split(".") else None)
        parameter.grad /= mesh.size()


def takes_experts_for_finished(model, mesh):
    """Divides the experts' gradients, and sums none: as if a group's exchange reached all ranks."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if "experts" not in name.split("."):
            dist.all_reduce(parameter.grad)
        parameter.grad /= mesh.size()


def averages_the_rest_over_data_only(model, mesh):
    """Averages also the router and the rest over the data group alone: experts' ranks differ."""
    data = mesh.get_group("data")
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=data)
        ranks = mesh.size() if "experts" in name.split(".") else dist.get_world_size(data)
        parameter.grad /= ranks


ANSWERS = {
    "11.5": [
        averages_all_alike,
        divides_by_the_group,
        skips_what_has_no_gradient,
        looks_for_the_letters,
        takes_data_for_the_first_dimension,
        fills_in_frozen_ones_too,
        takes_experts_for_finished,
        averages_the_rest_over_data_only,
    ]
}
