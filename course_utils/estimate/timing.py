"""How long a step takes: the arithmetic of the other files, divided by rates that are reached.

A rank's work and traffic are counted; a Calibration says which share of the hardware's rates is
reached, and what comes on top. Its defaults stand for a cluster that nobody has measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from course_utils.estimate import counting
from course_utils.estimate.collectives import PASSES, collective_time
from course_utils.estimate.descriptions import Hardware, Layout, Model
from course_utils.estimate.memory import activations_per_layer, stage_parameters
from course_utils.estimate.networks import bandwidth_of, latency_of, place_of
from course_utils.estimate.pipelining import bubble
from course_utils.estimate.traffic import Call, traffic

OPTIMIZER_BYTES = 30  # Adam in mixed precision reads 16 bytes a parameter and writes 14
NINE_TENTHS = 1.645  # standard deviations to either side of a normal distribution's middle


@dataclass(frozen=True)
class Calibration:
    """What is reached of a cluster's rates.

    matrices: share of the peak that large matrix products reach. size: FLOPs of a layer's forward
    pass at which half of that is reached. attention: share of the peak in attention's core.
    memory: how often a layer's activations cross the GPU's memory in a pass. launch: seconds in
    which the CPU launches a layer's kernels, forward. intra, inter: shares of the two bandwidths.
    slowdown: the network slows as nodes^-slowdown. overlap: share of a backward pass behind which
    the data ranks' traffic hides. overheads: by schedule, the factor of all that is not modelled.
    spread: the standard deviation of a prediction's logarithm.
    """

    matrices: float = 0.7
    size: float = 2e10
    attention: float = 0.35
    memory: float = 1.5
    launch: float = 3e-4
    intra: float = 0.7
    inter: float = 0.7
    slowdown: float = 0.2
    overlap: float = 0.5
    overheads: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.25


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step; the interval in which nine of ten lie; where they go; what limits.

    parts: seconds by kind, which add up to `seconds`. limit: the kind of the largest part.
    """

    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    limit: str


@dataclass(frozen=True)
class Work:
    """What one stage does with one micro-batch: numbers that no calibration changes.

    FLOPs and bytes are of one layer's forward pass on a rank; head: FLOPs of the output layer.
    again: forward passes that the backward pass repeats, 0 or 1; scores: how often attention's core
    runs, counting backward as two; parameters: on this rank.
    """

    layers: int
    matrices: float
    attention: float
    activations: float
    head: float
    logits: float
    again: int
    scores: int
    parameters: float
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Pass:
    """Seconds of a micro-batch's way through one stage: forward, backward, and by kind."""

    forward: float
    backward: float
    weights: float
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.weights


def step_time(
    model: Model,
    layout: Layout,
    seq: int,
    hardware: Hardware,
    calibration: Calibration | None = None,
) -> StepTime:
    """How long one training step takes, and where the time goes.

    A layer's pass takes as long as its matrices, attention, memory traffic and tensor collectives
    one after the other, or as long as the CPU needs to launch them (the larger). The slowest stage
    sets the pace of the pipeline, and its bubble and hops come on top (`bubble`); so do the data
    ranks' collectives as far as no backward pass hides them, and the optimizer.
    """
    layout.check(model, seq)
    known = calibration or Calibration()
    works = [_work(model, layout, seq, stage) for stage in _kinds_of_stages(layout)]
    passes = [_pass(work, layout, hardware, known) for work in works]
    slowest = max(range(len(passes)), key=lambda number: passes[number].seconds)
    parts = {kind: layout.micro_batches * t for kind, t in passes[slowest].parts.items()}
    parts |= _pipeline(passes, works, layout, hardware, known)
    hidden = passes[slowest]
    parts |= _data(works, hidden, layout, hardware, known)
    factor = known.overheads.get(layout.schedule, 1.0)
    parts["overhead"] = sum(parts.values()) * (factor - 1)
    parts = {kind: time for kind, time in parts.items() if time}
    seconds = sum(parts.values())
    reach = math.exp(NINE_TENTHS * known.spread)
    return StepTime(seconds, seconds / reach, seconds * reach, parts, max(parts, key=parts.get))


def _kinds_of_stages(layout: Layout) -> list[int]:
    """The first stage, one in the middle, the last: the others are like the middle one."""
    return sorted({0, layout.pp // 2, layout.pp - 1})


@lru_cache(maxsize=20_000)
def _work(model: Model, layout: Layout, seq: int, stage: int) -> Work:
    """Counts what a stage does, in the terms of `flops`, `activations_per_layer` and `traffic`."""
    tokens = seq * layout.micro_batch / layout.cp
    weights = counting.attention_matrices(model, layout.tp)
    weights += max(model.top_k, 1) * counting.mlp_matrices(model) / layout.tp
    last = stage == layout.pp - 1
    shape = (seq, layout.micro_batch, model.width, model.heads, layout.tp)
    kept = activations_per_layer(*shape, layout.sequence_parallel, "selective") / layout.cp
    return Work(
        layers=layout.stage_layers(model.layers)[stage],
        matrices=2 * tokens * weights,
        attention=4 * tokens * seq * model.width / layout.tp,
        activations=kept,
        head=2 * tokens * model.vocab * model.width / layout.tp * last,
        logits=4 * tokens * model.vocab / layout.tp * last,
        scores=3 if layout.recompute == "none" else 4,
        again=int(layout.recompute == "full"),
        parameters=sum(stage_parameters(model, layout, stage)),
        calls=tuple(traffic(model, layout, seq, stage)),
    )


def _pass(work: Work, layout: Layout, hardware: Hardware, known: Calibration) -> Pass:
    """The seconds of one micro-batch in one stage.

    Backward, matrices take twice as long, for the inputs and for the weights; attention computes
    its scores again. What is recomputed is computed at the start of the backward pass.
    """
    flops = hardware.peak * known.matrices
    matrices = (work.matrices + known.size) / flops if work.matrices else 0.0
    attention = work.attention / (hardware.peak * known.attention)
    memory = known.memory * work.activations / hardware.hbm_bandwidth
    comms = {kind: _per_pass(kind, work, layout, hardware, known) for kind in ("tp", "cp", "ep")}
    communication = sum(comms.values()) / work.layers  # of a layer, forward
    gpu = matrices + attention + memory + communication
    launch = max(known.launch - gpu, 0.0)
    head = work.head / flops + known.memory * work.logits / hardware.hbm_bandwidth
    times = 3 + work.again
    parts = {
        "matrices": work.layers * times * matrices + 3 * work.head / flops,
        "attention": work.layers * work.scores * attention,
        "memory": work.layers * times * memory
        + 3 * known.memory * work.logits / hardware.hbm_bandwidth,
        "launch": work.layers * times * launch,
        "tensor": comms["tp"] * (2 + work.again),
        "context": comms["cp"] * (2 + work.again),
        "experts": comms["ep"] * (2 + work.again),
    }
    forward = work.layers * (gpu + launch) + head
    weights = work.layers * (matrices + launch) + head
    whole = sum(parts.values())
    return Pass(forward, max(whole - forward - weights, 0.0), weights, parts)


def _per_pass(kind, work: Work, layout: Layout, hardware: Hardware, known: Calibration) -> float:
    """Seconds of the collectives of one group, of one micro-batch's forward pass."""
    calls = [call for call in work.calls if call.group == kind]
    total = sum(_seconds(call, layout, hardware, known) for call in calls)
    return total / layout.micro_batches / (2 + work.again)


def _seconds(call: Call, layout: Layout, hardware: Hardware, known: Calibration) -> float:
    """Seconds of all collectives, or messages, of one kind."""
    place = place_of(call.group, layout, hardware.node)
    rate = bandwidth_of(place, hardware, known.intra, known.inter, known.slowdown)
    latency = latency_of(place, hardware)
    if call.op not in PASSES:
        return call.calls * (latency + call.payload / rate)
    return call.calls * collective_time(call.op, place.ranks, call.payload, rate, latency)


def _pipeline(passes, works, layout: Layout, hardware: Hardware, known: Calibration) -> dict:
    """The bubble of the mean stage, and the hops on the longest way through the schedule."""
    if layout.pp == 1:
        return {}
    middle = layout.pp - 2
    shares = [1, middle, 1] if len(passes) == 3 else [1, 1]
    mean = [
        sum(share * getattr(one, name) for share, one in zip(shares, passes)) / layout.pp
        for name in ("forward", "backward", "weights")
    ]
    shape = (layout.schedule, layout.pp, layout.micro_batches)
    idle = bubble(*shape, *mean, chunks=layout.chunks)
    message = max(
        (_seconds(call, layout, hardware, known) / call.calls, call.group)
        for work in works
        for call in work.calls
        if call.group == "pp"
    )[0]
    ideal = layout.micro_batches * sum(mean)
    return {
        "bubble": ideal * idle / (1 - idle),
        "messages": message * _hops(*shape, layout.chunks),
    }


@lru_cache(maxsize=20_000)
def _hops(schedule: str, p: int, m: int, chunks: int) -> float:
    """How many messages lie on the longest way, by `bubble`, where they are short."""
    hop = 1e-3
    without, idle = (bubble(schedule, p, m, hop=time, chunks=chunks) for time in (0.0, hop))
    return (idle / (1 - idle) - without / (1 - without)) * 3 * m / hop


def _data(works, one: Pass, layout: Layout, hardware: Hardware, known: Calibration) -> dict:
    """What the data ranks' collectives add, and the optimizer, on the stage with most of both."""
    worst = max(works, key=lambda work: work.parameters)
    times = {"forward": 0.0, "backward": 0.0, "step": 0.0}
    for call in worst.calls:
        if call.group in ("dp", "edp", "ends"):
            times[call.when] += _seconds(call, layout, hardware, known)
    backward = one.backward + one.weights
    if layout.zero == 3:
        window = layout.micro_batches * one.seconds
    else:
        window = backward
    total = sum(times.values())
    exposed = max(total - known.overlap * window, 0.0)
    shards = layout.shards if layout.zero else 1
    update = OPTIMIZER_BYTES * worst.parameters / shards / hardware.hbm_bandwidth
    return {"data": exposed, "optimizer": update}
