"""How long a step takes: the arithmetic of the other files, divided by rates that are reached.

A rank's work and traffic are counted; a Calibration says which share of the hardware's rates is
reached, and what comes on top. Its defaults stand for a cluster that nobody has measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from course_planner import counting
from course_planner.collectives import collective_time
from course_planner.descriptions import Hardware, Layout, Model, Stage, telling
from course_planner.memory import layer_activations, sharded, stage_parameters
from course_planner.networks import Place, latency_of, place_of
from course_planner.pipelining import bubble
from course_planner.traffic import Call, sent_by
from course_utils.comm.rings import PASSES, bus_factor

OPTIMIZER_BYTES = 30  # Adam in mixed precision reads 16 bytes a parameter and writes 14
NINE_TENTHS = 1.645  # standard deviations to either side of a normal distribution's middle
INSIDE = {"tp": "tensor", "cp": "context", "ep": "experts"}  # groups that meet in each layer
OUTSIDE = ("dp", "edp", "ends")  # and those that meet once a step, or beside the layers


@dataclass(frozen=True)
class Calibration:
    """What is reached of a cluster's rates.

    matrices: share of the peak that large matrix products reach. size: FLOPs of a layer's forward
    pass at which half of that is reached. attention: share of the peak in attention's core.
    memory: how often the bytes that a layer keeps cross the GPU's memory in a pass. launch:
    seconds in which the CPU launches a layer's forward pass. crossing: by how much more of them,
    for each tensor rank, where the pipeline's messages leave the node. intra, inter: shares of
    the two bandwidths. ring: what all-gather and reduce-scatter reach between nodes, of an
    all-reduce's rate. slowdown: the network slows as nodes^-slowdown. overlap: share of a backward
    pass behind which the data ranks' traffic hides. overheads: by schedule, the factor of all that
    is not modelled. spread: the standard deviation of a prediction's logarithm.
    """

    matrices: float = 0.7
    size: float = 2e10
    attention: float = 0.35
    memory: float = 1.5
    launch: float = 3e-4
    crossing: float = 0.05
    intra: float = 0.7
    inter: float = 0.7
    ring: float = 0.7
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
    """What a rank does: numbers that no calibration changes.

    Of one layer's forward pass over one micro-batch: FLOPs of the matrices, FLOPs of attention's
    core, bytes kept. Of the output layer: FLOPs, and bytes of the logits. inside: calls in a layer,
    by group, of a whole step and stage of `layers` layers; message: of a stage to the next. once: of
    each stage that may take longest for it, what comes once a step.
    """

    stages: tuple[Stage, ...]
    layers: int
    matrices: float
    attention: float
    activations: float
    head: float
    logits: float
    inside: tuple[Call, ...]
    message: Call | None
    once: tuple["Once", ...]


@dataclass(frozen=True)
class Once:
    """What comes once a step on a stage: the parameters that a rank updates, and calls beside the
    layers."""

    parameters: float
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Times:
    """Seconds of one micro-batch in a layer, a stage or the output layer.

    forward; backward, for the inputs; weights, for their gradients. parts: the sum, by kind.
    """

    forward: float
    backward: float
    weights: float
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward + self.weights

    def plus(self, other: "Times", layers: float = 1.0) -> "Times":
        """`layers` of this one, and the other."""
        names = self.parts | other.parts
        parts = {n: layers * self.parts.get(n, 0.0) + other.parts.get(n, 0.0) for n in names}
        return Times(
            layers * self.forward + other.forward,
            layers * self.backward + other.backward,
            layers * self.weights + other.weights,
            parts,
        )


NOTHING = Times(0.0, 0.0, 0.0, {})


def step_time(
    model: Model,
    layout: Layout,
    seq: int,
    hardware: Hardware,
    calibration: Calibration | None = None,
) -> StepTime:
    """How long one training step takes, and where the time goes.

    A layer's pass takes as long as its matrices, attention, memory traffic and collectives one
    after the other (a roofline for each, Williams et al. 2009; collectives as `collective_time`
    has them), or as long as the CPU needs to launch them, whichever is longer. The slowest stage
    sets the pace of the pipeline (`_pace`); its bubble, and the messages on the longest way
    through the schedule, come on top (`bubble`), and so do the data ranks' collectives as far as
    no backward pass hides them, and the optimizer's pass over the memory.

    Not modelled: input and checkpoints, stragglers, clocks that fall under load, collectives that
    slow the matrices beside them.
    """
    known = calibration or Calibration()
    work = _work(model, layout, seq)
    cluster = _Cluster(layout, hardware, known)
    slowest, mean = _pace(work, layout, _layer(work, cluster), _head(work, cluster))
    parts = {kind: layout.micro_batches * seconds for kind, seconds in slowest.parts.items()}
    parts |= _pipeline(work, mean, cluster)
    parts |= _once(work, slowest, cluster)
    parts["overhead"] = sum(parts.values()) * (known.overheads.get(layout.schedule, 1.0) - 1)
    parts = {kind: seconds for kind, seconds in parts.items() if seconds}
    seconds, reach = sum(parts.values()), math.exp(NINE_TENTHS * known.spread)
    return StepTime(seconds, seconds / reach, seconds * reach, parts, max(parts, key=parts.get))


@lru_cache(maxsize=20_000)
def _work(model: Model, layout: Layout, seq: int) -> Work:
    """Counts what a rank does, in the terms of `flops`, `memory` and `traffic`."""
    tokens = seq * layout.micro_batch / layout.cp
    weights = counting.attention_matrices(model, layout.tp)
    weights += max(model.top_k, 1) * counting.mlp_matrices(model) / layout.tp
    stages = layout.stages(model, seq)
    middle = stages[layout.pp // 2]
    calls = sent_by(model, layout, seq, middle)
    messages = [call for call in calls if call.group == "pp"]
    return Work(
        stages=tuple(stages),
        layers=middle.layers,
        matrices=2 * tokens * weights,
        attention=4 * tokens * seq * model.width / layout.tp,
        activations=layer_activations(model, layout, seq, "selective"),
        head=2 * tokens * model.vocab * model.width / layout.tp,
        logits=4 * tokens * model.vocab / layout.tp,
        inside=tuple(call for call in calls if call.group in INSIDE),
        message=messages[0] if messages else None,
        once=tuple(_beside(model, layout, seq, stage) for stage in telling(stages)),
    )


def _beside(model: Model, layout: Layout, seq: int, stage: Stage) -> Once:
    calls = sent_by(model, layout, seq, stage)
    updated = sharded(layout, *stage_parameters(model, layout, stage), from_stage=1)
    return Once(updated, tuple(call for call in calls if call.group in OUTSIDE))


@dataclass(frozen=True)
class _Cluster:
    """Where a layout's groups meet, and how quickly."""

    layout: Layout
    hardware: Hardware
    known: Calibration

    def flops(self) -> float:
        """FLOP/s of large matrices."""
        return self.hardware.peak * self.known.matrices

    def crosses(self) -> bool:
        """Whether a stage and the next are on different nodes."""
        return self.layout.pp > 1 and self.place("pp").nodes > 1

    def place(self, group: str) -> Place:
        return place_of(group, self.layout, self.hardware.node)

    def seconds(self, call: Call) -> float:
        """Of all collectives, or messages, of one kind."""
        return call_seconds(call, self.place(call.group), self.hardware, self.known)


def call_seconds(call: Call, place: Place, hardware: Hardware, known: Calibration) -> float:
    """Seconds of `call.calls` equal collectives or messages of a group that lies at `place`.

    A ring that leaves the node uses the network of all its GPUs there. In an all-to-all nothing is
    passed on: what leaves the node leaves by the card of the GPU that has it.
    """
    latency = latency_of(place, hardware)
    rate = known.intra * hardware.intra_bandwidth
    if place.nodes > 1:
        network = known.inter * hardware.inter_bandwidth * place.nodes**-known.slowdown
        share = known.ring if call.op in ("all_gather", "reduce_scatter") else 1.0
        cards = place.beside
        if call.op == "all_to_all":  # as busbw: of (n - 1) / n, what goes to the other nodes
            leaving = (place.nodes - 1) / place.nodes
            cards = bus_factor(call.op, place.ranks) / leaving
        rate = min(rate, cards * network * share)
    if call.op not in PASSES:
        return call.calls * (latency + call.payload / rate)
    return call.calls * collective_time(call.op, place.ranks, call.payload, rate, latency)


def _layer(work: Work, cluster: _Cluster) -> Times:
    """Seconds of one layer.

    Backward, matrices take twice as long, for the inputs and for the weights. Attention's core
    takes twice as long too, and its forward pass again if something is recomputed.
    """
    layout, hardware, known = cluster.layout, cluster.hardware, cluster.known
    again = layout.recompute == "full"
    scores = 3 if layout.recompute == "none" else 4
    matrices = (work.matrices + known.size) / cluster.flops()
    attention = work.attention / (hardware.peak * known.attention)
    memory = known.memory * work.activations / hardware.hbm_bandwidth
    comms = dict.fromkeys(INSIDE.values(), 0.0)
    for call in work.inside:
        comms[INSIDE[call.group]] += cluster.seconds(call) / layout.micro_batches / work.layers
    sent = sum(comms.values())
    one_way = matrices + attention + memory + sent / (2 + again)
    whole = (3 + again) * (matrices + memory) + scores * attention + sent
    factor = 1 + known.crossing * layout.tp * cluster.crosses()
    launch = max((3 + again) * known.launch * factor - whole, 0.0)
    forward = one_way + launch / (3 + again)
    weights = matrices + launch / (3 + again)
    parts = {
        "matrices": (3 + again) * matrices,
        "attention": scores * attention,
        "memory": (3 + again) * memory,
        **comms,
        "launch": launch,
    }
    return Times(forward, whole + launch - forward - weights, weights, parts)


def _head(work: Work, cluster: _Cluster) -> Times:
    """Seconds of the output layer and the loss, for a micro-batch."""
    matrices = work.head / cluster.flops()
    memory = cluster.known.memory * work.logits / cluster.hardware.hbm_bandwidth
    parts = {"matrices": 3 * matrices, "memory": 3 * memory}
    return Times(matrices + memory, matrices + 2 * memory, matrices, parts)


def _pace(work: Work, layout: Layout, layer: Times, head: Times) -> tuple[Times, Times]:
    """A micro-batch's time in the slowest stage, and in the mean one.

    The last stage holds the output layer, and as many layers fewer as make the slowest stage
    quickest, so maybe fewer than in `memory`; with chunks, they lie as they do there.
    """
    pp, held = layout.pp, [stage.layers for stage in work.stages]
    layers, most = sum(held), max(held)
    mean = layer.plus(head, layers)
    if pp == 1:
        return mean, mean
    choices = [(most, held[-1])]
    if layout.chunks == 1:
        choices = [(-(-(layers - last) // (pp - 1)), last) for last in range(most + 1)]
    more = head.seconds / layer.seconds  # the output layer, in layers
    most, last = min(choices, key=lambda choice: max(choice[0], choice[1] + more))
    slowest = layer.plus(head, last) if last + more > most else layer.plus(NOTHING, most)
    return slowest, mean.plus(NOTHING, 1 / pp)


def _pipeline(work: Work, mean: Times, cluster: _Cluster) -> dict[str, float]:
    """The bubble, and the messages on the longest way through the schedule."""
    layout = cluster.layout
    if work.message is None:
        return {}
    shape = (layout.schedule, layout.pp, layout.micro_batches)
    idle = bubble(*shape, mean.forward, mean.backward, mean.weights, chunks=layout.chunks)
    message = cluster.seconds(work.message) / work.message.calls
    return {
        "bubble": layout.micro_batches * mean.seconds * idle / (1 - idle),
        "messages": message * _hops(*shape, layout.chunks),
    }


@lru_cache(maxsize=20_000)
def _hops(schedule: str, p: int, m: int, chunks: int) -> float:
    """How many messages lie on the longest way, by `bubble`, where they are short.

    With more micro-batches than stages they are counted for whole rounds of p, which has a form.
    """
    hop, whole = 1e-3, -(-m // p) * p if m > p else m
    idle = [bubble(schedule, p, whole, hop=time, chunks=chunks) for time in (0.0, hop)]
    without, extra = (3 * whole * share / (1 - share) for share in idle)
    return (extra - without) / hop * m / whole


def _once(work: Work, slowest: Times, cluster: _Cluster) -> dict[str, float]:
    """What comes once a step, on the stage that takes longest for it: the data ranks' collectives,
    and the optimizer.

    Gradients hide behind the last backward pass, what FSDP gathers behind every pass.
    """
    layout, known = cluster.layout, cluster.known
    window = slowest.backward + slowest.weights
    if layout.zero == 3:
        window = layout.micro_batches * slowest.seconds
    stages = []
    for stage in work.once:
        data = sum(map(cluster.seconds, stage.calls)) - known.overlap * window
        update = OPTIMIZER_BYTES * stage.parameters / cluster.hardware.hbm_bandwidth
        stages.append({"data": max(data, 0.0), "optimizer": update})
    return max(stages, key=lambda parts: sum(parts.values()))
