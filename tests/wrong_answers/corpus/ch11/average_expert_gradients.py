"""Rarer wrong answers to 11.5, `average_expert_gradients`."""

from tests.wrong_answers import rarer
from tests.wrong_answers.ch11.average_expert_gradients import _average


@rarer("11.5")
def only_sums_experts(model, mesh):
    _average(model, mesh, (mesh.get_group("data"), 1))


@rarer("11.5")
def takes_the_other_group(model, mesh):
    _average(model, mesh, (mesh.get_group("experts"), mesh.size()))


@rarer("11.5")
def divides_by_both(model, mesh):
    divisor = mesh.size() * mesh["experts"].size()
    _average(model, mesh, (mesh.get_group("data"), divisor))
