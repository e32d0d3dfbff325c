"""How long a step takes: the arithmetic of the other files, divided by rates that are reached.

A rank's work and traffic are counted; a Calibration says which share of the hardware's rates is
reached. Its defaults stand for a cluster that nobody has measured.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from course_planner import counting
from course_planner.descriptions import Hardware, Layout, Model
from course_planner.memory import LOGITS, layer_activations, sharded, stage_parameters
from course_planner.networks import Place, latency_of, place_of
from course_planner.pipelining import bubble
from course_planner.stages import Stage, stages_of, telling
from course_planner.traffic import Call, sent_by
from course_utils.comm.rings import PASSES, bus_factor

OPTIMIZER_BYTES = 30  # Adam in mixed precision reads 16 bytes a parameter and writes 14
NINE_TENTHS = 1.645  # standard deviations to either side of a normal distribution's middle
INSIDE = {"tp": "tensor", "cp": "context", "ep": "experts"}  # groups that meet in each layer
OUTSIDE = ("dp", "edp", "replicas", "ends")  # and those that meet once a step, or beside the layers

SMALL = 2e10  # FLOPs of a layer's forward pass at which its matrices reach half of their rate
EXPERT = 0.25  # of SMALL, for each expert on a rank, whose products are smaller still
SHORT = 500  # tokens of a sequence at which FlashAttention-2 reaches half of its rate (2307.08691, figure 5)
MOVED = 1.5  # how often the bytes that a layer keeps cross the GPU's memory in a pass
LAUNCH = 4e-4  # seconds in which the CPU launches a layer's forward pass
CALL = 4e-4  # and one collective or message, as nanotron's tensor ranks do whatever their number
BUCKET = 25 * 2**20  # bytes of the gradients that DistributedDataParallel sends together
AGAIN = {"half": 0.5, "full": 1.0}  # of a forward pass's matrices, by what is recomputed
SCORES = {"none": 3.0, "selective": 3.5, "half": 3.5, "full": 4.5}  # passes of attention's core


@dataclass(frozen=True)
class Calibration:
    """What is reached of a cluster's rates; each is a share, between 0 and 1.

    matrices: of the peak, by large matrix products; attention: of what its instructions can
    reach (`Hardware.flash`), by the causal half of its core in long sequences. intra, inter: of the
    two bandwidths. overlap: of the data ranks' traffic, what may hide behind computing; the rest
    slows it down. spread: the standard deviation of a prediction's logarithm.
    """

    matrices: float = 0.63
    attention: float = 0.3
    intra: float = 0.7
    inter: float = 0.7
    overlap: float = 0.7
    spread: float = 0.2


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

    Of one layer's forward pass over one micro-batch: FLOPs of the matrices, and those that small ones
    cost more; FLOPs of attention's core, for short sequences too; bytes kept. Of the output layer: FLOPs, and bytes of the logits. inside: calls in a layer,
    by group, of a whole step and stage of `layers` layers; message: of a stage to the next. once: of
    each stage that may take longest for it, what comes once a step.
    """

    stages: tuple[Stage, ...]
    layers: int
    matrices: float
    small: float
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
    after the other (a roofline for each, Williams et al. 2009; `call_seconds`), or as long as the CPU needs to launch them, whichever is longer. The slowest stage
    sets the pace of the pipeline (`_pace`); its bubble, and the messages on the longest way
    through the schedule, come on top (`bubble`), and so do the data ranks' collectives as far as
    no backward pass hides them, and the optimizer's pass over the memory.

    Not modelled: input and checkpoints, stragglers, clocks that fall under load, collectives that
    slow the matrices beside them.
    """
    known = calibration or Calibration()
    work = _work(model, layout, seq)
    cluster = _Cluster(layout, hardware, known, max(model.top_k, 1))
    slowest, mean = _pace(work, _layer(work, cluster), _head(work, cluster))
    parts = {kind: layout.micro_batches * seconds for kind, seconds in slowest.parts.items()}
    parts |= _pipeline(work, mean, cluster)
    parts |= _once(work, slowest, cluster)
    parts = {kind: seconds for kind, seconds in parts.items() if seconds}
    seconds, reach = sum(parts.values()), math.exp(NINE_TENTHS * known.spread)
    return StepTime(seconds, seconds / reach, seconds * reach, parts, max(parts, key=parts.get))


@lru_cache(maxsize=20_000)
def _work(model: Model, layout: Layout, seq: int) -> Work:
    """Counts what a rank does, in the terms of `flops`, `memory` and `traffic`."""
    tokens = seq * layout.micro_batch / layout.cp
    weights = counting.attention_matrices(model, layout.tp)
    weights += counting.mlps_visited(model) * counting.mlp_matrices(model) / layout.tp
    stages = stages_of(model, layout, seq)
    middle = stages[(layout.pp - 1) // 2]
    experts = model.experts // layout.ep
    calls = sent_by(model, layout, seq, middle)
    messages = [call for call in calls if call.group == "pp"]
    return Work(
        stages=tuple(stages),
        layers=middle.layers,
        matrices=2 * tokens * weights,
        small=SMALL * (1 + EXPERT * experts),
        attention=2 * tokens * (seq + SHORT) * model.heads * model.score_size / layout.tp,
        activations=layer_activations(model, layout, seq, "selective"),
        head=2 * tokens * model.vocab * model.width / layout.tp,
        logits=LOGITS * tokens * model.vocab / layout.tp,
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
    copies: int

    def flops(self) -> float:
        """FLOP/s of large matrices."""
        return self.hardware.peak * self.known.matrices

    def seconds(self, call: Call) -> float:
        """Of all collectives, or messages, of one kind."""
        place = place_of(call.group, self.layout, self.hardware.node)
        return call_seconds(call, place, self.hardware, self.known, self.copies)

    def latencies(self, call: Call) -> float:
        """Of the buckets of a call, but the first."""
        place = place_of(call.group, self.layout, self.hardware.node)
        return max(call.payload / BUCKET - 1, 0) * latency_of(call.op, place, self.hardware)


def call_seconds(
    call: Call, place: Place, hardware: Hardware, known: Calibration, copies: int = 1
) -> float:
    """Seconds of `call.calls` equal collectives or messages of a group that lies at `place`.

    A ring that leaves the node uses the network of all its GPUs there. In an all-to-all nothing is
    passed on: what leaves the node leaves by the card of the GPU that has it, of a token's `copies`
    one to each node (DeepSeek-V3, 2412.19437, section 3.2.2).
    """
    rate = known.intra * hardware.intra_bandwidth
    if place.nodes > 1:
        cards = place.beside
        if call.op == "all_to_all":  # as busbw: of (n - 1) / n, what goes to the other nodes
            others = (place.nodes - 1) * (1 - (1 - 1 / place.nodes) ** copies)
            cards = bus_factor(call.op, place.ranks) / (others / copies)
        rate = min(rate, cards * known.inter * hardware.inter_bandwidth)
    sent = bus_factor(call.op, place.ranks) if call.op in PASSES else 1
    return call.calls * (latency_of(call.op, place, hardware) + sent * call.payload / rate)


def _layer(work: Work, cluster: _Cluster) -> Times:
    """Seconds of one layer.

    Backward, matrices take twice as long, for the inputs and for the weights. Attention's core takes
    two and a half times as long, since flash attention computes the scores again.
    """
    layout, hardware, known = cluster.layout, cluster.hardware, cluster.known
    again, scores = AGAIN.get(layout.recompute, 0.0), SCORES[layout.recompute]
    matrices = (work.matrices + work.small) / cluster.flops()
    attention = work.attention / (hardware.flash * hardware.peak * known.attention)
    memory = MOVED * work.activations / hardware.hbm_bandwidth
    comms, calls = dict.fromkeys(INSIDE.values(), 0.0), 0.0
    for call in work.inside:
        comms[INSIDE[call.group]] += cluster.seconds(call) / layout.micro_batches / work.layers
        calls += call.calls / layout.micro_batches / work.layers
    sent = sum(comms.values())
    one_way = matrices + attention + memory + sent / (2 + again)
    whole = (3 + again) * (matrices + memory) + scores * attention + sent
    launch = max((3 + again) * LAUNCH + calls * CALL - whole, 0.0)
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
    memory = MOVED * work.logits / cluster.hardware.hbm_bandwidth
    parts = {"matrices": 3 * matrices, "memory": 3 * memory}
    return Times(matrices + memory, matrices + 2 * memory, matrices, parts)


def _pace(work: Work, layer: Times, head: Times) -> tuple[Times, Times]:
    """A micro-batch's time in the slowest stage, and in the mean one."""
    last = work.stages[-1]
    fullest = max(stage.layers for stage in work.stages)
    stages = [layer.plus(NOTHING, fullest), layer.plus(head, last.layers)]
    mean = layer.plus(head, sum(stage.layers for stage in work.stages))
    return max(stages, key=lambda times: times.seconds), mean.plus(NOTHING, 1 / len(work.stages))


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

    Gradients hide behind the last backward pass, what FSDP gathers behind every pass. Without FSDP
    they go in buckets, of which each takes the latency of a call; waiting slows nothing down.
    """
    layout, known = cluster.layout, cluster.known
    window = slowest.backward + slowest.weights
    if layout.zero == 3:
        window = layout.micro_batches * slowest.seconds
    in_buckets, stages = layout.pp == 1 and layout.zero < 3, []
    for stage in work.once:
        data = sum(map(cluster.seconds, stage.calls))
        latencies = sum(map(cluster.latencies, stage.calls)) if in_buckets else 0.0
        data = max(data + latencies - window, (1 - known.overlap) * data)
        update = OPTIMIZER_BYTES * stage.parameters / cluster.hardware.hbm_bandwidth
        stages.append({"data": data, "optimizer": update})
    return max(stages, key=lambda parts: sum(parts.values()))
