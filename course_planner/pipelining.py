"""The bubble of a pipeline, in which a rank has nothing to do; and what is in flight in it."""

from functools import lru_cache

from course_planner.descriptions import SCHEDULES, check_chunks, one_of, require, whole
from course_utils.lesson import schedules


def bubble(
    schedule: str,
    p: int,
    m: int,
    forward: float = 1.0,
    backward: float = 1.0,
    weights: float = 1.0,
    hop: float = 0.0,
    chunks: int = 1,
) -> float:
    """The idle share of the WHOLE step, between 0 and 1: extra / (m T + extra).

    A step is the longest time from a rank's first op to its last (zero bubble's "cost"). Of the
    ideal time m T the bubble is bubble / (1 - bubble), which Megatron-LM prints: (p - 1) / m. T is
    forward + backward + weights: the times of a micro-batch in one stage, with all its chunks;
    backward is the gradient of the inputs, weights that of the weights, and 1F1B does both
    together. hop: the time from an op's end to the start of the next stage's, in the same unit.

    extra: GPipe (1811.06965, section 2.3), Megatron-LM (2104.04473, section 2.2), zero bubble
    (2401.10241, table 2), plus the hops on the longest way through the schedule; zero bubble prints
    rates with them (table 5) and no form. Where no form holds, as with fewer micro-batches than
    fill the pipeline, the schedule is simulated.
    """
    one_of("schedule", schedule, SCHEDULES)
    whole(p=p, m=m, chunks=chunks)
    times = {"forward": forward, "backward": backward, "weights": weights, "hop": hop}
    require(min(times.values()) >= 0, f"Times cannot be negative: {times}.")
    ideal = m * (forward + backward + weights)
    require(ideal > 0, "A micro-batch that takes no time leaves no share to speak of.")
    check_chunks(schedule, p, m, chunks)
    extra = _extra(schedule, p, m, chunks, forward, backward + weights, weights, hop)
    return extra / (ideal + extra)


@lru_cache(maxsize=4096)  # a search has few of them, and many layouts of each
def in_flight(schedule: str, p: int, m: int, chunks: int = 1) -> tuple[int, ...]:
    """The most micro-batches, times chunks, whose activations each of p stages keeps at once."""
    return tuple(schedules.peak_in_flight_of(SCHEDULES[schedule], p, m, chunks))


def _extra(schedule, p, m, chunks, forward, backward, weights, hop) -> float:
    """The idle time of a step, by its form or, where none holds, by simulation."""
    name = SCHEDULES[schedule]
    usual = weights <= forward and forward + backward >= 3 * weights  # the paper's forms hold
    hops = _hops(schedule, p, m, chunks, usual) if p > 1 and hop else 0
    idle = schedules.bubble_time_of(name, p, m, chunks, forward, backward, weights)
    if idle is not None and hops is not None:
        return idle + hop * hops
    order = getattr(schedules, name)(p, m)
    simulation = schedules.simulate(order, forward, backward, weights, hop)
    return simulation.step - simulation.work


def _hops(schedule: str, p: int, m: int, chunks: int, usual: bool) -> float | None:
    """How many hops the longest way has; None where that has no form.

    They reproduce zero bubble's table 5. For interleaving the course's simulation, whose messages
    keep to the order of `schedules.interleaved`, has p more.
    """
    zero_bubble = usual and m > p
    forms = {
        "gpipe": 2 * (p - 1),
        "1f1b": 2 * (p - 1) * m // p + 2 * (p - 1) - 2 if m % p == 0 else None,
        "interleaved": 2 * p * chunks - p - 2,
        "zb-h1": 4 * (p - 1) if zero_bubble else None,
        "zb-h2": 2 * (p - 1) if zero_bubble else None,
    }
    return forms[schedule]
