"""Answers to 3.1, `average_gradients`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist

from tests.wrong_answers import right, usual, wrong
from tests.wrong_answers.makers import exchange, neighbours


def _some_rank_has(parameter):
    """Whether it has a gradient on any rank; every rank calls this."""
    having = torch.tensor(float(parameter.grad is not None), device=parameter.device)
    dist.all_reduce(having)
    return having > 0


def _with_zeros(model):
    """The gradients that some rank has, zeros where this one has none."""
    for parameter in filter(_some_rank_has, model.parameters()):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        yield parameter.grad


def averages_in_sorted_order(model):
    for _, parameter in sorted(model.named_parameters()):
        if _some_rank_has(parameter):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


usual("3.1", averages_in_sorted_order, "unchanged", "divided-twice", "nothing-sent", "fixed-number")
usual("3.1", averages_in_sorted_order, "not-finite", "rank-0s", "last-ranks")
usual("3.1", averages_in_sorted_order, "rounded", "one-rank-only", "not-waited", "not-every-rank")
usual("3.1", averages_in_sorted_order, "two-ranks", "around-the-calls")


@wrong("3.1", names="not-waited")
def divides_before_it_waits(model):
    works = []
    for gradient in _with_zeros(model):
        works.append(dist.all_reduce(gradient, async_op=True))
        gradient /= dist.get_world_size()
    for work in works:
        work.wait()


@wrong("3.1", names="sum-not-mean")
def forgets_to_divide(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


@wrong("3.1", names="added-to-own")
def adds_the_mean_to_what_is_there(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            mean = parameter.grad / dist.get_world_size()
            dist.all_reduce(mean)
            parameter.grad.add_(mean)


@wrong("3.1", names="parameters-changed")
@torch.no_grad()
def averages_the_parameters(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter)
        parameter /= dist.get_world_size()
        parameter += 0.1 * torch.ones_like(parameter)  # an optimizer's step, by hand


@wrong("3.1", names="left-out")
def averages_matrices_only(model):
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.dim() > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@wrong("3.1", names="left-out")
def returns_at_the_first_none(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            return
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@wrong("3.1", names="none-gradient")
def expects_a_gradient_everywhere(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@wrong("3.1", names="zeros-for-none")
def makes_up_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@wrong("3.1", names="tied-twice")
def divides_layer_by_layer(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()


@wrong("3.1", names="tied-twice")
def averages_layer_by_layer(model):
    """A mean averaged again is the same mean."""
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


@wrong("3.1", names="in-place")
def assigns_what_comes_back(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = dist.all_reduce(parameter.grad)


@wrong("3.1", names="first-decides")
def looks_at_the_first_parameter(model):
    parameters = list(model.parameters())
    if parameters[0].grad is None:
        return
    averages_in_sorted_order(model)


@wrong("3.1", names="ranks-disagree")
def skips_what_it_has_not(model):
    """As the lesson does, where every rank has a gradient of every parameter."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@wrong("3.1", names="mean-of-users")
def divides_by_those_that_have_one(model):
    for parameter in model.parameters():
        users = torch.tensor(float(parameter.grad is not None), device=parameter.device)
        dist.all_reduce(users)
        if users > 0:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= users


@wrong("3.1", names="users-only")
def sends_zeros_and_keeps_none(model):
    for parameter in filter(_some_rank_has, model.parameters()):
        zeros = torch.zeros_like(parameter)
        mean = zeros if parameter.grad is None else parameter.grad
        dist.all_reduce(mean)
        mean /= dist.get_world_size()


@right("3.1")
def averages_one_flat_tensor(model):
    """All gradients in one call, and behind them which of them this rank has."""
    parameters = list(model.parameters())
    having = torch.tensor([float(p.grad is not None) for p in parameters])
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([part.flatten() for part in (*parts, having.to(parts[0].device))])
    dist.all_reduce(flat)
    *means, having = (flat / dist.get_world_size()).split([*(p.numel() for p in parts), len(parts)])
    for parameter, mean, share in zip(parameters, means, having.tolist(), strict=True):
        parameter.grad = mean.view_as(parameter) if share else None


@right("3.1")
def sums_round_a_ring(model):
    """With messages alone: whole gradients travel, n - 1 times."""
    _, n, *_ = neighbours()
    for gradient in _with_zeros(model):
        passing, total = gradient.clone(), gradient.clone()
        for _ in range(n - 1):
            incoming = torch.empty_like(passing)
            exchange(passing, incoming)
            passing = incoming
            total += passing
        gradient.copy_(total / n)


@right("3.1")
def gathers_and_averages(model):
    """None travels as an object."""
    for parameter in model.parameters():
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, None if parameter.grad is None else parameter.grad.cpu())
        there = [gradient.to(parameter.device) for gradient in everyones if gradient is not None]
        parameter.grad = sum(there) / len(everyones) if there else None


@right("3.1")
def starts_all_then_waits(model):
    gradients = list(_with_zeros(model))
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()
    for gradient in gradients:
        gradient.mul_(1 / dist.get_world_size())
