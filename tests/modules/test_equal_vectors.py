"""flat and equal, with which the chapters compare a technique with one process."""

import torch
from torch import nn

from course_utils.lesson.equality import TOLERANCE, equal, flat


def test_flat_puts_all_values_in_one_vector_without_a_graph():
    layer = nn.Linear(3, 2)
    vector = flat(layer.parameters())
    assert vector.tolist() == [*layer.weight.flatten().tolist(), *layer.bias.tolist()]
    assert not vector.requires_grad


def test_equal_looks_at_every_rank():
    one = torch.zeros(4)
    assert equal(one, [one, one + TOLERANCE / 2])
    assert not equal(one, [one, one - 2 * TOLERANCE])


def test_nan_equals_nothing():
    assert not equal(torch.zeros(2), [torch.tensor([0.0, float("nan")])])
