"""Answers to 9.4, `best_interval`: wrong in a plausible way, or right in another."""

import math

from tests.wrong_answers import right, wrong


def _lost(steps, mtbf, save, recovery, step):
    seconds = steps * step
    return save / seconds + (0.5 * seconds + recovery) / mtbf


def _best(mtbf, save, recovery, step):
    """The interval that loses least, and its share, where the job fails every `mtbf` seconds."""
    lower = max(1, int(math.sqrt(2 * save * mtbf) / step))
    steps = min((lower, lower + 1), key=lambda n: _lost(n, mtbf, save, recovery, step))
    return steps, _lost(steps, mtbf, save, recovery, step)


def _with_steps(chosen):
    """An answer that chooses the steps otherwise; its share is the right one for them."""

    def answer(nodes, node_mtbf_hours, save, recovery, step):
        mtbf = 3600 * node_mtbf_hours / nodes
        steps = chosen(mtbf, save, recovery, step)
        return steps, _lost(max(steps, 1e-9), mtbf, save, recovery, step)

    answer.__name__ = chosen.__name__
    return answer


def _with_share(share):
    """An answer that is right but for its share: another function of what is known."""

    def answer(nodes, node_mtbf_hours, save, recovery, step):
        mtbf = 3600 * node_mtbf_hours / nodes
        steps, _ = _best(mtbf, save, recovery, step)
        return steps, share(steps, mtbf, save, recovery, step)

    answer.__name__ = share.__name__
    return answer


@right("9.4")
def tries_them_all(nodes, node_mtbf_hours, save, recovery, step):
    mtbf = 3600 * node_mtbf_hours / nodes
    steps = 1
    while _lost(steps + 1, mtbf, save, recovery, step) < _lost(steps, mtbf, save, recovery, step):
        steps += 1
    return steps, _lost(steps, mtbf, save, recovery, step)


@right("9.4")
@_with_steps
def compares_by_the_geometric_mean(mtbf, save, recovery, step):
    """n is better than n + 1 where the ideal lies below the root of n * (n + 1)."""
    square = 2 * save * mtbf / step**2
    steps = max(1, math.isqrt(int(square)))
    return steps + (square > steps * (steps + 1))


@wrong("9.4", names="one-node")
def thinks_more_nodes_last_longer(nodes, node_mtbf_hours, save, recovery, step):
    return _best(3600 * node_mtbf_hours * nodes, save, recovery, step)


@wrong("9.4", names="units")
def leaves_hours(nodes, node_mtbf_hours, save, recovery, step):
    return _best(node_mtbf_hours / nodes, save, recovery, step)


@wrong("9.4", names="no-minimum")
@_with_steps
def adds_the_recovery_to_the_save(mtbf, save, recovery, step):
    return max(1, round(math.sqrt(2 * (save + recovery) * mtbf) / step))


@wrong("9.4", names="no-minimum")
@_with_steps
def forgets_the_root(mtbf, save, recovery, step):
    return round(2 * save * mtbf / step)


@wrong("9.4", names="search-ends")
@_with_steps
def tries_the_first_ten_thousand(mtbf, save, recovery, step):
    return min(range(1, 10_001), key=lambda n: _lost(n, mtbf, save, recovery, step))


@wrong("9.4", names="not-whole")
@_with_steps
def returns_a_fraction(mtbf, save, recovery, step):
    return math.sqrt(2 * save * mtbf) / step


@wrong("9.4", names="other-side")
@_with_steps
def compares_whole_intervals(mtbf, save, recovery, step):
    lower = max(1, int(math.sqrt(2 * save * mtbf) / step))
    return min(lower, lower + 1, key=lambda n: save / (n * step) + n * step / mtbf)


@wrong("9.4", names="one-step")
@_with_steps
def divides_by_no_steps(mtbf, save, recovery, step):
    lower = int(math.sqrt(2 * save * mtbf) / step)
    return min(lower, lower + 1, key=lambda n: _lost(n, mtbf, save, recovery, step))


@wrong("9.4", names="swapped")
def share_first(nodes, node_mtbf_hours, save, recovery, step):
    return tries_them_all(nodes, node_mtbf_hours, save, recovery, step)[::-1]


@wrong("9.4", names="share-at-ideal")
@_with_share
def share_before_rounding(steps, mtbf, save, recovery, step):
    return _lost(math.sqrt(2 * save * mtbf) / step, mtbf, save, recovery, step)


@wrong("9.4", names="not-the-share")
@_with_share
def loses_whole_intervals(steps, mtbf, save, recovery, step):
    return save / (steps * step) + (steps * step + recovery) / mtbf
