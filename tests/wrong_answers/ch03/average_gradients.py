"""Answers to 3.1, `average_gradients`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist

from tests.wrong_answers import right, usual, wrong
from tests.wrong_answers.makers import exchange, neighbours


def averages_in_sorted_order(model):
    for _, parameter in sorted(model.named_parameters()):
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


usual("3.1", averages_in_sorted_order, "unchanged", "divided-twice", "nothing-sent", "fixed-number")
usual("3.1", averages_in_sorted_order, "not-finite", "rank-0s", "last-ranks")
usual("3.1", averages_in_sorted_order, "rounded", "one-rank-only", "not-waited", "not-every-rank")
usual("3.1", averages_in_sorted_order, "two-ranks")


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


@right("3.1")
def averages_one_flat_tensor(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = (flat / dist.get_world_size()).split([g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


@right("3.1")
def sums_round_a_ring(model):
    """With messages alone: whole gradients travel, n - 1 times."""
    _, n, *_ = neighbours()
    for parameter in model.parameters():
        if parameter.grad is not None:
            passing, total = parameter.grad.clone(), parameter.grad.clone()
            for _ in range(n - 1):
                incoming = torch.empty_like(passing)
                exchange(passing, incoming)
                passing = incoming
                total += passing
            parameter.grad.copy_(total / n)


@right("3.1")
def gathers_and_averages(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            everyones = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(everyones, parameter.grad)
            parameter.grad = torch.stack(everyones).mean(dim=0)


@wrong("3.1", names="first-decides")
def looks_at_the_first_parameter(model):
    parameters = list(model.parameters())
    if parameters[0].grad is None:
        return
    averages_in_sorted_order(model)


@right("3.1")
def starts_all_then_waits(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()
    for gradient in gradients:
        gradient.mul_(1 / dist.get_world_size())
