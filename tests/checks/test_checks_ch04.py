"""The reasoning inside chapter 04's checks: best cuts, lists that mislead, watched moves."""

from itertools import combinations, pairwise
from random import Random

import pytest
import torch
from torch import nn

from course_exercises.authoring import Wrong
from course_exercises.chapters.ch04.balanced_cuts import MISLEADING
from course_exercises.chapters.ch04.repaired_conv_net import _shapes
from course_exercises.chapters.ch04.shared import best_cuts, watched_moves
from tests.wrong_answers.corpus.ch04.balanced_cuts import RULES


def slowest(costs, cuts):
    return max(sum(costs[a:b]) for a, b in pairwise([0, *cuts, len(costs)]))


def every_cut(costs, stages):
    return combinations(range(1, len(costs)), stages - 1)


@pytest.mark.parametrize("seed", range(40))
def test_best_cuts_are_those_that_trying_all_finds(seed):
    random = Random(seed)
    costs = [random.choice([0, 1, 2, 5, 9, 0.25]) for _ in range(random.randint(1, 9))]
    for stages in range(1, len(costs) + 1):
        best = min(slowest(costs, cuts) for cuts in every_cut(costs, stages))
        cuts = best_cuts(costs, stages)
        assert len(cuts) == stages - 1
        assert sorted(set(cuts) | {0, len(costs)}) == [0, *cuts, len(costs)]
        assert slowest(costs, cuts) == best


@pytest.mark.parametrize("costs, stages", MISLEADING)
@pytest.mark.parametrize("rule", RULES)
def test_every_simple_rule_is_misled(rule, costs, stages):
    for factor in range(1, 10):
        scaled = [factor * cost for cost in costs]
        assert slowest(scaled, rule(scaled, stages)) > slowest(scaled, best_cuts(scaled, stages))


def test_a_convolution_with_inputs_from_another_device_is_noticed():
    """PyTorch itself lets it run."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, device="meta"))
    images = torch.zeros(1, 3, 8, 8)
    with watched_moves(), pytest.raises(Wrong, match="not-moved"):
        model(images)
    with watched_moves(), pytest.raises(Wrong, match="not-moved"):
        model(images.to("meta"))
    model(images)  # nobody watches any more


@pytest.mark.parametrize("size", [(16, 16), (19, 30), (25, 12)])
def test_the_shapes_of_the_convolutional_model_are_those_of_its_layers(size):
    convolution = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3)
    pooling = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
    assert _shapes(size)[2] == (512, pooling(convolution(torch.zeros(1, 3, *size)))[0].numel())
