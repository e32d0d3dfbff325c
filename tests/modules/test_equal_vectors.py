"""flat and the largest difference, with which the chapters compare a technique with one process."""

import pytest
import torch
from torch import nn

from course_utils.lesson.equality import (
    TOLERANCE,
    Difference,
    check_equal,
    flat,
    largest_difference,
)


def test_flat_puts_all_values_in_one_vector_without_a_graph():
    layer = nn.Linear(3, 2)
    vector = flat(layer.parameters())
    assert vector.tolist() == [*layer.weight.flatten().tolist(), *layer.bias.tolist()]
    assert not vector.requires_grad


def test_the_largest_difference_is_that_of_any_rank():
    one = torch.zeros(4)
    two = torch.tensor([0.0, -0.0525, 0.0, 0.01])
    assert largest_difference(one, [one, two]) == pytest.approx(0.0525)
    assert largest_difference(one, [torch.full((4,), float("nan")), one]) != 0


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0e+00"), (3.12e-8, "3e-08"), (0.0525, "0.052"), (12, "12")]
)
def test_rounding_has_one_digit_and_any_other_difference_two(number, text):
    assert f"{Difference(number)}" == str(Difference(number)) == text
    assert f"{Difference(number):>8}" == text.rjust(8)


@pytest.mark.parametrize("difference", [2 * TOLERANCE, float("nan")])
def test_what_must_be_equal_stops_where_it_is_not(difference):
    one = torch.zeros(4)
    assert check_equal(one, [one, one + TOLERANCE / 2]) <= TOLERANCE
    with pytest.raises(AssertionError, match="largest difference is .*, and 1e-5 is allowed"):
        check_equal(one, [one, one + difference])
