"""Answers to 9.4, `best_interval`: wrong in a plausible way, or right in another."""

import math

from tests.wrong_answers import right, wrong


def _mtbf(nodes, hours):
    return hours * 3600 / nodes


def _lost(steps, mtbf, save, recovery, step):
    seconds = steps * step
    return save / seconds + (0.5 * seconds + recovery) / mtbf


def _better(ideal, mtbf, save, recovery, step):
    """The better of the whole numbers beside `ideal`, and its share, for a given mean time."""
    lower = max(1, int(ideal))
    steps = min((lower, lower + 1), key=lambda n: _lost(n, mtbf, save, recovery, step))
    return steps, _lost(steps, mtbf, save, recovery, step)


def _from_interval(seconds, nodes, hours, save, recovery, step):
    """The answer for another interval; the share is the right one for it."""
    steps = max(1, round(seconds / step))
    return steps, _lost(steps, _mtbf(nodes, hours), save, recovery, step)


@right("9.4")
def tries_them_all(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    steps = 1
    while _lost(steps + 1, mtbf, save, recovery, step) < _lost(steps, mtbf, save, recovery, step):
        steps += 1
    return steps, _lost(steps, mtbf, save, recovery, step)


@right("9.4")
def compares_by_the_geometric_mean(nodes, node_mtbf_hours, save, recovery, step):
    """n is better than n + 1 where the ideal lies below the root of n * (n + 1)."""
    mtbf = _mtbf(nodes, node_mtbf_hours)
    square = 2 * save * mtbf / step**2
    steps = max(1, math.isqrt(int(square)))
    steps += square > steps * (steps + 1)
    return steps, _lost(steps, mtbf, save, recovery, step)


@wrong("9.4", names="nodes-forgotten")
def takes_one_nodes_time(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = node_mtbf_hours * 3600
    return _better(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)


@wrong("9.4", names="nodes-multiply")
def thinks_more_nodes_last_longer(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = node_mtbf_hours * 3600 * nodes
    return _better(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)


@wrong("9.4", names="hours")
def leaves_hours(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = node_mtbf_hours / nodes
    return _better(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)


@wrong("9.4", names="no-half")
def forgets_the_two(nodes, node_mtbf_hours, save, recovery, step):
    seconds = math.sqrt(save * _mtbf(nodes, node_mtbf_hours))
    return _from_interval(seconds, nodes, node_mtbf_hours, save, recovery, step)


@wrong("9.4", names="recovery-in-interval")
def adds_the_recovery_to_the_save(nodes, node_mtbf_hours, save, recovery, step):
    seconds = math.sqrt(2 * (save + recovery) * _mtbf(nodes, node_mtbf_hours))
    return _from_interval(seconds, nodes, node_mtbf_hours, save, recovery, step)


@wrong("9.4", names="recovery-in-mtbf")
def adds_the_recovery_to_the_time_between_failures(nodes, node_mtbf_hours, save, recovery, step):
    seconds = math.sqrt(2 * save * (_mtbf(nodes, node_mtbf_hours) + recovery))
    return _from_interval(seconds, nodes, node_mtbf_hours, save, recovery, step)


@wrong("9.4", names="save-subtracted")
def takes_the_save_from_the_interval(nodes, node_mtbf_hours, save, recovery, step):
    seconds = math.sqrt(2 * save * _mtbf(nodes, node_mtbf_hours)) - save
    return _from_interval(seconds, nodes, node_mtbf_hours, save, recovery, step)


@wrong("9.4", names="recovery-per-save")
def recovers_at_every_save(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    steps, _ = _better(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)
    return steps, (save + recovery) / (steps * step) + steps * step / 2 / mtbf


@wrong("9.4", names="of-all-time")
def divides_by_work_and_losses(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    steps, lost = _better(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)
    return steps, lost / (1 + lost)


@wrong("9.4", names="in-seconds")
def returns_seconds(nodes, node_mtbf_hours, save, recovery, step):
    seconds = math.sqrt(2 * save * _mtbf(nodes, node_mtbf_hours))
    return seconds, _lost(seconds / step, _mtbf(nodes, node_mtbf_hours), save, recovery, step)


@wrong("9.4", names="not-rooted")
def forgets_the_root(nodes, node_mtbf_hours, save, recovery, step):
    seconds = 2 * save * _mtbf(nodes, node_mtbf_hours)
    return _from_interval(seconds, nodes, node_mtbf_hours, save, recovery, step)


@wrong("9.4", names="not-whole")
def returns_a_fraction(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    steps = math.sqrt(2 * save * mtbf) / step
    return steps, _lost(steps, mtbf, save, recovery, step)


@wrong("9.4", names="zero-steps")
def rounds_down_to_nothing(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    ideal = math.sqrt(2 * save * mtbf) / step
    if ideal < 1:
        return 0, _lost(ideal, mtbf, save, recovery, step)
    return _better(ideal, mtbf, save, recovery, step)


@wrong("9.4", names="zero-steps")
def divides_by_no_steps(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    ideal = math.sqrt(2 * save * mtbf) / step
    candidates = (math.floor(ideal), math.ceil(ideal))
    steps = min(candidates, key=lambda n: _lost(n, mtbf, save, recovery, step))
    return steps, _lost(steps, mtbf, save, recovery, step)


@wrong("9.4", names="rounded")
def rounds_by_the_nearest(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    ideal = math.sqrt(2 * save * mtbf) / step
    if ideal > 20:
        return _better(ideal, mtbf, save, recovery, step)
    steps = max(1, round(ideal))
    return steps, _lost(steps, mtbf, save, recovery, step)


@wrong("9.4", names="rounded")
def compares_whole_intervals(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    lower = max(1, int(math.sqrt(2 * save * mtbf) / step))
    steps = min(lower, lower + 1, key=lambda n: save / (n * step) + n * step / mtbf)
    return steps, _lost(steps, mtbf, save, recovery, step)


@wrong("9.4", names="search-ends")
def tries_the_first_ten_thousand(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    steps = min(range(1, 10_001), key=lambda n: _lost(n, mtbf, save, recovery, step))
    return steps, _lost(steps, mtbf, save, recovery, step)


@wrong("9.4", names="never-one")
def saves_after_two_steps_at_the_earliest(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = _mtbf(nodes, node_mtbf_hours)
    steps = max(2, _right_interval(nodes, node_mtbf_hours, save, recovery, step)[0])
    return steps, _lost(steps, mtbf, save, recovery, step)


def _right_interval(nodes, hours, save, recovery, step):
    mtbf = _mtbf(nodes, hours)
    return _better(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)


@wrong("9.4", names="no-saving")
def counts_failures_only(nodes, node_mtbf_hours, save, recovery, step):
    steps, share = _right_interval(nodes, node_mtbf_hours, save, recovery, step)
    return steps, share - save / (steps * step)


@wrong("9.4", names="no-recovery")
def forgets_the_recovery(nodes, node_mtbf_hours, save, recovery, step):
    return _right_interval(nodes, node_mtbf_hours, save, 0.0, step)


@wrong("9.4", names="whole-interval")
def loses_whole_intervals(nodes, node_mtbf_hours, save, recovery, step):
    steps, _ = _right_interval(nodes, node_mtbf_hours, save, recovery, step)
    return steps, save / (steps * step) + (steps * step + recovery) / _mtbf(nodes, node_mtbf_hours)


@wrong("9.4", names="kept-not-lost")
def returns_what_is_kept(nodes, node_mtbf_hours, save, recovery, step):
    steps, share = _right_interval(nodes, node_mtbf_hours, save, recovery, step)
    return steps, 1 - share


@wrong("9.4", names="percent")
def returns_percent(nodes, node_mtbf_hours, save, recovery, step):
    steps, share = _right_interval(nodes, node_mtbf_hours, save, recovery, step)
    return steps, 100 * share


@wrong("9.4", names="hours")
def takes_minutes(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = 60 * node_mtbf_hours / nodes
    return _better(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)


@wrong("9.4", names="swapped")
def share_first(nodes, node_mtbf_hours, save, recovery, step):
    return tries_them_all(nodes, node_mtbf_hours, save, recovery, step)[::-1]


@wrong("9.4", names="interval-in-steps")
def forgets_how_long_a_step_is(nodes, node_mtbf_hours, save, recovery, step):
    steps, _ = tries_them_all(nodes, node_mtbf_hours, save, recovery, step)
    return steps, _lost(steps, _mtbf(nodes, node_mtbf_hours), save, recovery, 1)


@wrong("9.4", names="share-of-one-node")
def share_of_a_node(nodes, node_mtbf_hours, save, recovery, step):
    steps, _ = tries_them_all(nodes, node_mtbf_hours, save, recovery, step)
    return steps, _lost(steps, _mtbf(1, node_mtbf_hours), save, recovery, step)


@wrong("9.4", names="share-at-ideal")
def share_before_rounding(nodes, node_mtbf_hours, save, recovery, step):
    steps, _ = tries_them_all(nodes, node_mtbf_hours, save, recovery, step)
    mtbf = _mtbf(nodes, node_mtbf_hours)
    return steps, _lost(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)
