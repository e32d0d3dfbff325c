"""Rarer wrong answers to 3.1, `average_gradients`."""

from unittest import mock

import torch
import torch.distributed as dist

from tests.wrong_answers import rarer


@rarer("3.1")
def does_not_wait(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, async_op=True)
            parameter.grad = parameter.grad / dist.get_world_size()


@rarer("3.1")
def asks_once_whether_it_is_there(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            work = dist.all_reduce(parameter.grad, async_op=True)
            if not work.is_completed():
                pass  # it will come
            parameter.grad /= dist.get_world_size()


@rarer("3.1")
def divides_what_comes_back(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = dist.all_reduce(parameter.grad) / dist.get_world_size()


@rarer("3.1")
def divides_by_the_gpus(model):
    with mock.patch("torch.cuda.device_count", return_value=0):  # as on a machine without one
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= torch.cuda.device_count()


@rarer("3.1")
def gathers_into_one_tensor(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            everyones = [torch.zeros_like(parameter)] * dist.get_world_size()
            dist.all_gather(everyones, parameter.grad)
            parameter.grad = torch.stack(everyones).mean(dim=0)


@rarer("3.1")
def swaps_with_a_partner(model):
    partner = 1 - dist.get_rank()
    for parameter in model.parameters():
        if parameter.grad is not None:
            partners = torch.empty_like(parameter)
            request = dist.isend(parameter.grad, partner)
            dist.recv(partners, partner)
            request.wait()
            parameter.grad = (parameter.grad + partners) / 2


@rarer("3.1")
def waits_for_the_last_one(model):
    work = None
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            work = dist.all_reduce(parameter.grad, async_op=True)
    if work is not None:
        work.wait()


@rarer("3.1")
def lets_rank_0_decide(model):
    for parameter in model.parameters():
        having = torch.tensor(float(parameter.grad is not None), device=parameter.device)
        dist.broadcast(having, src=0)
        if having > 0:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@rarer("3.1")
def averages_what_all_have(model):
    for parameter in model.parameters():
        having = torch.tensor(float(parameter.grad is not None), device=parameter.device)
        dist.all_reduce(having, dist.ReduceOp.MIN)
        if having > 0:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@rarer("3.1")
def makes_up_those_that_learn(model):
    """Zeros for each parameter that is not frozen, used or not."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
