"""Rarer wrong answers to 1.2, `idle_minutes`."""

from tests.wrong_answers import rarer
from tests.wrong_answers.ch01.idle_minutes import by_the_formula, end_of, until


@rarer("1.2")
def everybody_moves_at_once(minutes, truck, orders):
    ticks = orders + len(minutes) - 1
    return until(ticks * max(minutes) + truck * (len(minutes) - 1), minutes, orders)


@rarer("1.2")
def works_on_nothing(minutes, truck, orders):
    return until(orders * minutes[-1], minutes, orders)


@rarer("1.2")
def lets_the_first_set_the_pace_and_stops_at_zero(minutes, truck, orders):
    end = end_of(minutes, truck, orders, minutes[0])
    return [max(0.0, idle) for idle in until(end, minutes, orders)]


@rarer("1.2")
def drops_the_fractions_first(minutes, truck, orders):
    return by_the_formula([int(work) for work in minutes], int(truck), orders)


@rarer("1.2")
def names_the_buildings(minutes, truck, orders):
    return dict(enumerate(by_the_formula(minutes, truck, orders)))
