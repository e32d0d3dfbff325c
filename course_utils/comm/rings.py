"""What a ring sends for a collective: of a formula, of a recorded call, of a traced one."""

# How many of a ring's rounds send a piece of 1/n of the payload: n - 1 for each pass around it.
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def bus_factor(op: str, ranks: int) -> float:
    """The share of the payload that each rank sends: passes (n - 1) / n.

    nccl-tests, doc/PERFORMANCE.md: what turns algbw into busbw. Thakur, Rabenseifner, Gropp 2005,
    sections 4.1 to 4.3. The payload is nccl-tests' size, the larger of input and output: of an
    all-gather what a rank holds afterwards, of a reduce-scatter what it holds before.
    """
    if op not in PASSES:
        raise ValueError(f"op is one of {', '.join(PASSES)}, not {op!r}.")
    return PASSES[op] * (ranks - 1) / ranks
