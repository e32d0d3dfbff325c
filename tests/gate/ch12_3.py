"""12.3, `step_time_of`: answers written from the stub alone."""

ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}  # times n - 1


def is_inside(group, layout, hardware):
    """Whether a group's ranks are all in one node."""
    ranks = 1
    for name in layout.order[: layout.order.index(group) + 1]:
        ranks *= getattr(layout, name)
    return ranks <= hardware.node


def link(inside, hardware):
    """Latency and bandwidth."""
    if inside:
        return hardware.intra_latency, hardware.intra_bandwidth
    return hardware.inter_latency, hardware.inter_bandwidth


def seconds_of(call, layout, hardware, inside=is_inside):
    """All calls of a `Call`, one after the other."""
    latency, bandwidth = link(inside(call.group, layout, hardware), hardware)
    if call.op == "send":
        return call.calls * (latency + call.payload / bandwidth)
    ranks = getattr(layout, call.group)
    rounds = ROUNDS[call.op] * (ranks - 1)
    return call.calls * rounds * (latency + call.payload / ranks / bandwidth)


def compute(kernels, hardware):
    """The kernels one after the other, each on the roofline."""
    return sum(max(f / hardware.peak, b / hardware.hbm_bandwidth) for f, b in kernels)


def right(kernels, calls, layout, bubble, hardware):
    """A right answer, of which the wrong ones change a line."""
    data = sum(seconds_of(call, layout, hardware) for call in calls if call.group == "dp")
    rest = sum(seconds_of(call, layout, hardware) for call in calls if call.group != "dp")
    return max((compute(kernels, hardware) + rest) / (1 - bubble), data)


def one_roofline_for_all_kernels(kernels, calls, layout, bubble, hardware):
    """Adds up FLOPs and bytes first, and takes one maximum for the whole step."""
    flops, moved = (sum(column) for column in zip(*kernels, strict=True))
    work = max(flops / hardware.peak, moved / hardware.hbm_bandwidth)
    data = sum(seconds_of(call, layout, hardware) for call in calls if call.group == "dp")
    rest = sum(seconds_of(call, layout, hardware) for call in calls if call.group != "dp")
    return max((work + rest) / (1 - bubble), data)


def counts_each_record_once(kernels, calls, layout, bubble, hardware):
    """Takes a `Call` for one call, and forgets its number."""
    data = sum(
        seconds_of(call, layout, hardware) / call.calls for call in calls if call.group == "dp"
    )
    rest = sum(
        seconds_of(call, layout, hardware) / call.calls for call in calls if call.group != "dp"
    )
    return max((compute(kernels, hardware) + rest) / (1 - bubble), data)


def looks_at_the_size_of_the_group_alone(kernels, calls, layout, bubble, hardware):
    """Takes a group for inside if it has at most as many ranks as a node, wherever they are."""

    def small(group, layout, hardware):
        return getattr(layout, group) <= hardware.node

    data = sum(seconds_of(call, layout, hardware, small) for call in calls if call.group == "dp")
    rest = sum(seconds_of(call, layout, hardware, small) for call in calls if call.group != "dp")
    return max((compute(kernels, hardware) + rest) / (1 - bubble), data)


def adds_the_bubble(kernels, calls, layout, bubble, hardware):
    """Multiplies by 1 + bubble, as if the bubble were a share of the work, not of the time."""
    data = sum(seconds_of(call, layout, hardware) for call in calls if call.group == "dp")
    rest = sum(seconds_of(call, layout, hardware) for call in calls if call.group != "dp")
    return max((compute(kernels, hardware) + rest) * (1 + bubble), data)


def lets_everything_wait(kernels, calls, layout, bubble, hardware):
    """Adds the data ranks' calls to the rest, though they go on beside it."""
    data = sum(seconds_of(call, layout, hardware) for call in calls if call.group == "dp")
    rest = sum(seconds_of(call, layout, hardware) for call in calls if call.group != "dp")
    return (compute(kernels, hardware) + rest) / (1 - bubble) + data


def all_reduce_in_one_go_round(kernels, calls, layout, bubble, hardware):
    """Gives an all-reduce n - 1 rounds: its reduce-scatter and no all-gather."""

    def seconds(call):
        both = call.op == "all_reduce"
        return seconds_of(call, layout, hardware) / (2 if both else 1)

    data = sum(seconds(call) for call in calls if call.group == "dp")
    rest = sum(seconds(call) for call in calls if call.group != "dp")
    return max((compute(kernels, hardware) + rest) / (1 - bubble), data)


def stretches_the_data_ranks_too(kernels, calls, layout, bubble, hardware):
    """Divides the longer of the two by 1 - bubble, also where that is the data ranks' time."""
    data = sum(seconds_of(call, layout, hardware) for call in calls if call.group == "dp")
    rest = sum(seconds_of(call, layout, hardware) for call in calls if call.group != "dp")
    return max(compute(kernels, hardware) + rest, data) / (1 - bubble)


def one_latency_a_call(kernels, calls, layout, bubble, hardware):
    """Counts the latency once for a collective, and not in each round."""

    def seconds(call):
        if call.op == "send":
            return seconds_of(call, layout, hardware)
        latency, _ = link(is_inside(call.group, layout, hardware), hardware)
        rounds = ROUNDS[call.op] * (getattr(layout, call.group) - 1)
        return seconds_of(call, layout, hardware) - call.calls * (rounds - 1) * latency

    data = sum(seconds(call) for call in calls if call.group == "dp")
    rest = sum(seconds(call) for call in calls if call.group != "dp")
    return max((compute(kernels, hardware) + rest) / (1 - bubble), data)


ANSWERS = {
    "12.3": [
        one_roofline_for_all_kernels,
        counts_each_record_once,
        looks_at_the_size_of_the_group_alone,
        adds_the_bubble,
        lets_everything_wait,
        all_reduce_in_one_go_round,
        stretches_the_data_ranks_too,
        one_latency_a_call,
    ]
}
