"""Rarer wrong answers to 11.5, `average_expert_gradients`."""

import torch.distributed as dist

from tests.wrong_answers import rarer
from tests.wrong_answers.ch11.average_expert_gradients import _average, _is_expert


@rarer("11.5")
def divides_by_the_experts_group(model, mesh):
    _average(model, mesh, (mesh.get_group("data"), mesh["experts"].size()))


@rarer("11.5")
def only_sums_experts(model, mesh):
    _average(model, mesh, (mesh.get_group("data"), 1))


@rarer("11.5")
def takes_the_other_group(model, mesh):
    _average(model, mesh, (mesh.get_group("experts"), mesh.size()))


@rarer("11.5")
def leaves_the_experts(model, mesh):
    for name, p in model.named_parameters():
        if p.requires_grad and not _is_expert(name):
            dist.all_reduce(p.grad)
            p.grad /= mesh.size()


@rarer("11.5")
def the_rest_over_the_experts(model, mesh):
    ranks = mesh.size()
    _average(model, mesh, (mesh.get_group("data"), ranks), (mesh.get_group("experts"), ranks))


@rarer("11.5")
def divides_by_both(model, mesh):
    divisor = mesh.size() * mesh["experts"].size()
    _average(model, mesh, (mesh.get_group("data"), divisor))
