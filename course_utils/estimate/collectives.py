"""What a ring sends for a collective, and how long it takes."""

from course_utils.estimate.descriptions import latency_of, one_of, rate, require, whole

# How many of a ring's rounds send a piece of 1/n of the payload: n - 1 for each pass around it.
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def bus_factor(op: str, ranks: int) -> float:
    """The share of the payload that each rank sends: passes (n - 1) / n.

    nccl-tests, doc/PERFORMANCE.md: what turns algbw into busbw. Thakur, Rabenseifner, Gropp 2005,
    sections 4.1 to 4.3. The payload is nccl-tests' size, the larger of input and output: of an
    all-gather what a rank holds afterwards, of a reduce-scatter what it holds before.
    """
    one_of("op", op, PASSES)
    whole(ranks=ranks)
    return PASSES[op] * (ranks - 1) / ranks


def collective_time(
    op: str, ranks: int, payload: float, bandwidth: float, latency: float = 0.0
) -> float:
    """The seconds that a ring of `ranks` takes for `payload` bytes, as `bus_factor` counts them.

    bandwidth: B/s, nccl-tests' busbw. latency: seconds of each of the ring's passes (n - 1) rounds,
    Hockney's alpha. Switches that reduce by themselves (NVLS, SHARP) are faster than this.
    """
    require(payload >= 0, f"payload is in bytes and cannot be {payload!r}.")
    rate("bandwidth", bandwidth, "B/s")
    latency_of("latency", latency)
    rounds = bus_factor(op, ranks) * ranks
    return rounds * latency + bus_factor(op, ranks) * payload / bandwidth
