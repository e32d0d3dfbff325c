"""Rarer wrong answers to 12.2, `traffic_of`."""

from tests.wrong_answers import rarer
from tests.wrong_answers.ch12.traffic_of import _traffic


@rarer("12.2")
def takes_the_last_but_one_for_the_last(model, layout, seq, stage):
    neighbours = (stage > 0) + (stage < layout.pp - 2)
    return _traffic(model, layout, seq, stage, ways=neighbours)


@rarer("12.2")
def sends_both_ways(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, ways=2 if layout.pp > 1 else 0)


@rarer("12.2")
def gathers_once_a_step(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, rounds=3 if layout.zero == 3 else 2)


@rarer("12.2")
def gathers_for_the_second_forward_pass(model, layout, seq, stage):
    gathers = 3 if layout.recompute == "full" else 2
    rounds = (1 + gathers) * layout.micro_batches if layout.zero == 3 else 2
    return _traffic(model, layout, seq, stage, rounds=rounds)


@rarer("12.2")
def recomputes_selectively_with_collectives(model, layout, seq, stage):
    return _traffic(model, layout, seq, stage, passes=2 if layout.recompute == "none" else 3)
