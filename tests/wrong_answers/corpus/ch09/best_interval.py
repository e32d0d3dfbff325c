"""Rarer wrong answers to 9.4, `best_interval`."""

import math

from tests.wrong_answers import rarer
from tests.wrong_answers.ch09.best_interval import _best, _lost, _with_share, _with_steps


@rarer("9.4")
def takes_one_nodes_time(nodes, node_mtbf_hours, save, recovery, step):
    return _best(3600 * node_mtbf_hours, save, recovery, step)


@rarer("9.4")
@_with_steps
def returns_seconds(mtbf, save, recovery, step):
    return math.sqrt(2 * save * mtbf)


@rarer("9.4")
@_with_steps
def rounds_by_the_nearest(mtbf, save, recovery, step):
    return max(1, round(math.sqrt(2 * save * mtbf) / step))


@rarer("9.4")
@_with_steps
def rounds_down_to_nothing(mtbf, save, recovery, step):
    ideal = math.sqrt(2 * save * mtbf) / step
    return 0 if ideal < 1 else _best(mtbf, save, recovery, step)[0]


@rarer("9.4")
@_with_steps
def saves_after_two_steps_at_the_earliest(mtbf, save, recovery, step):
    return max(2, _best(mtbf, save, recovery, step)[0])


@rarer("9.4")
@_with_share
def divides_by_work_and_losses(steps, mtbf, save, recovery, step):
    lost = _lost(steps, mtbf, save, recovery, step)
    return lost / (1 + lost)
