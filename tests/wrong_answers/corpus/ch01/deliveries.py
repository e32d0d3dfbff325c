"""Rarer wrong answers to 1.1, `deliveries`."""

from statistics import median

from tests.wrong_answers import rarer
from tests.wrong_answers.ch01.deliveries import way


@rarer("1.1")
def the_middle_building(minutes, truck, factories):
    return factories / median(minutes), way(minutes, truck)


@rarer("1.1")
def a_single_road(minutes, truck, factories):
    return factories / max(minutes), sum(minutes) + truck


@rarer("1.1")
def an_hour_has_sixty(minutes, truck, factories):
    return 60 * factories / max(minutes), way(minutes, truck)
