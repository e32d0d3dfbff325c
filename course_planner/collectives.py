"""How long a ring takes for a collective."""

from course_planner.descriptions import latency_of, rate, require, whole
from course_utils.comm.rings import bus_factor


def collective_time(
    op: str, ranks: int, payload: float, bandwidth: float, latency: float = 0.0
) -> float:
    """The seconds that a ring of `ranks` takes for `payload` bytes, as `bus_factor` counts them.

    bandwidth: B/s, nccl-tests' busbw. latency: seconds of each of the ring's passes (n - 1) rounds,
    Hockney's alpha. Switches that reduce by themselves (NVLS, SHARP) are faster than this.
    """
    whole(ranks=ranks)
    require(payload >= 0, f"payload is in bytes and cannot be {payload!r}.")
    rate("bandwidth", bandwidth, "B/s")
    latency_of("latency", latency)
    rounds = bus_factor(op, ranks) * ranks
    return rounds * latency + bus_factor(op, ranks) * payload / bandwidth
