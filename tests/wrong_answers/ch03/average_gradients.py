"""Answers to 3.1, `average_gradients`: wrong in a plausible way, or right in another."""

from unittest import mock

import torch
import torch.distributed as dist

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch03.shared import exchange, neighbours


@wrong("3.1", names="sum-not-mean")
def forgets_to_divide(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


@wrong("3.1", names="divided-twice")
def divides_before_and_after(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@wrong("3.1", names="nothing-sent")
def divides_without_communicating(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()


@wrong("3.1", names="not-waited")
def does_not_wait(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, async_op=True)
            parameter.grad = parameter.grad / dist.get_world_size()


@wrong("3.1", names="added-to-own")
def adds_the_mean_to_what_is_there(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            mean = parameter.grad / dist.get_world_size()
            dist.all_reduce(mean)
            parameter.grad.add_(mean)


@wrong("3.1", names="not-waited")
def asks_once_whether_it_is_there(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            work = dist.all_reduce(parameter.grad, async_op=True)
            if not work.is_completed():
                pass  # it will come
            parameter.grad /= dist.get_world_size()


@wrong("3.1", names="unchanged")
def averages_a_copy(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()


@wrong("3.1", names="parameters-averaged")
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


@wrong("3.1", names="fixed-two")
def divides_by_two(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2


@wrong("3.1", names="rank-0s-gradient")
def broadcasts_rank_0(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.broadcast(parameter.grad, src=0)


@wrong("3.1", names="one-rank-only")
def reduces_to_rank_0(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.reduce(parameter.grad, dst=0)
            if dist.get_rank() == 0:
                parameter.grad /= dist.get_world_size()


@wrong("3.1", names="not-every-rank")
def rank_0_averages_alone(model):
    if dist.get_rank() == 0:
        for parameter in model.parameters():
            if parameter.grad is not None:
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


@wrong("3.1", names="in-place")
def divides_what_comes_back(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = dist.all_reduce(parameter.grad) / dist.get_world_size()


@wrong("3.1", names="device-count")
def divides_by_the_gpus(model):
    with mock.patch("torch.cuda.device_count", return_value=0):  # as on a machine without one
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= torch.cuda.device_count()


@wrong("3.1", names="one-tensor-listed")
def gathers_into_one_tensor(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            everyones = [torch.zeros_like(parameter)] * dist.get_world_size()
            dist.all_gather(everyones, parameter.grad)
            parameter.grad = torch.stack(everyones).mean(dim=0)


@wrong("3.1", names="none-gradient")
def asks_whether_it_is_trained(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@wrong("3.1", names="two-ranks-only")
def swaps_with_a_partner(model):
    partner = 1 - dist.get_rank()
    for parameter in model.parameters():
        if parameter.grad is not None:
            partners = torch.empty_like(parameter)
            request = dist.isend(parameter.grad, partner)
            dist.recv(partners, partner)
            request.wait()
            parameter.grad = (parameter.grad + partners) / 2


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


def averages_in_sorted_order(model):
    for _, parameter in sorted(model.named_parameters()):
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@wrong("3.1", names="not-waited")
def waits_for_the_last_one(model):
    work = None
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            work = dist.all_reduce(parameter.grad, async_op=True)
    if work is not None:
        work.wait()


@wrong("3.1", names="rounded")
def averages_in_half_precision(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.bfloat16()
            dist.all_reduce(gradient)
            parameter.grad.copy_(gradient.float() / dist.get_world_size())


@right("3.1")
def starts_all_then_waits(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()
    for gradient in gradients:
        gradient.mul_(1 / dist.get_world_size())
