"""The collectives and messages of one rank in one step."""

from collections.abc import Iterator
from dataclasses import dataclass

from course_planner import counting
from course_planner.descriptions import SCHEDULES, Layout, Model, one_of
from course_planner.memory import stage_parameters, vocabulary
from course_planner.stages import Stage, stages_of
from course_utils.comm.rings import bus_factor
from course_utils.lesson import schedules

BYTES = 2  # of an activation, a parameter, a gradient: bfloat16


@dataclass(frozen=True)
class Call:
    """`calls` equal collectives or messages of a step.

    group: "tp", "cp", "dp" (dp x cp ranks), "edp" (those among them with the same experts),
    "replicas" (those with the same shard), "ep", "pp", or "ends" (first and last stage). payload:
    bytes of ONE of them, nccl-tests' size; sent: bytes that this rank sends for ALL of them on a ring. when: "forward", "backward" or "step".
    """

    group: str
    op: str
    calls: int
    payload: int
    sent: int
    when: str


def traffic(model: Model, layout: Layout, seq: int, stage: int = 0) -> list[Call]:
    """What one rank of `stage` sends in one step, in 2-byte numbers.

    Tensor ranks: Megatron-LM (1909.08053, section 3; 2104.04473, section 3.2), two all-reduces a
    layer forward and two backward, or as many pairs of reduce-scatter and all-gather (2205.05198,
    section 4.2.2). Stages: s b h a boundary, and 1 / t of it with sequence parallelism. Context
    ranks gather keys and values (Llama 3, 2407.21783, section 3.3.2). Experts: tokens go out and
    come back (GShard, 2006.16668, section 2.2), a copy for each expert. Data ranks: ZeRO (1910.02054,
    section 7), gradients once a step, with stage 3 in every micro-batch, as FSDP2 does unless told
    not to; parameters as FSDP2 gathers them (`gatherings`); the ring's (n - 1) / n, which the paper
    takes for 1, is counted.

    Not counted: the few numbers of the loss and of the norms' gradients, padding, and the second
    gathering of a layer's input with which Megatron-LM saves memory.
    """
    stages = stages_of(model, layout, seq)
    one_of("stage", stage, range(layout.pp))
    return sent_by(model, layout, seq, stages[stage])


def sent_by(model: Model, layout: Layout, seq: int, stage: Stage) -> list[Call]:
    """`traffic` of a stage that is known."""
    parts = (_tensor, _context, _experts, _pipeline, _data)
    calls = [call for part in parts for call in part(model, layout, seq, stage)]
    return [call for call in calls if call.calls and call.sent]


def _collective(group: str, op: str, ranks: int, calls: int, payload: float, when: str) -> Call:
    sent = round(calls * payload * bus_factor(op, ranks))
    return Call(group, op, calls, round(payload), sent, when)


def _hidden(model: Model, layout: Layout, seq: int) -> int:
    """The bytes of one micro-batch's vectors on a context rank: s b h."""
    return BYTES * seq * layout.micro_batch * model.width // layout.cp


def _passes(layout: Layout, stage: Stage) -> dict[str, int]:
    """How many forward passes of a layer, and backward passes, a stage runs in a step.

    The forward pass that is computed again is counted as forward too.
    """
    once = stage.layers * layout.micro_batches
    return {"forward": once * (2 if layout.recompute == "full" else 1), "backward": once}


def _tensor(model: Model, layout: Layout, seq: int, stage: Stage) -> Iterator[Call]:
    """Two pairs a layer and pass; the embedding and the output layer have half a pair each.

    Where experts are shared out, the MLP's pair comes between the two ways of `_experts` and
    carries every token top_k times (Megatron-LM, `MoEAlltoAllTokenDispatcher`). The embedding ends
    forward in a sum, the output layer backward; there, the sequence is shared out again, and
    gathered on the other way.
    """
    size = _hidden(model, layout, seq)
    sums = {"forward": stage.embedding, "backward": stage.head}
    gathers = {"forward": stage.head, "backward": stage.embedding}
    routed = layout.ep > 1 and layout.sequence_parallel
    for when, passes in _passes(layout, stage).items():
        pairs = (1 if routed else 2) * passes
        summed = pairs + layout.micro_batches * sums[when]
        gathered = pairs + layout.micro_batches * gathers[when]
        if layout.sequence_parallel:
            yield _collective("tp", "reduce_scatter", layout.tp, summed, size, when)
            yield _collective("tp", "all_gather", layout.tp, gathered, size, when)
            for op in ("reduce_scatter", "all_gather") if routed else ():
                yield _collective("tp", op, layout.tp, passes, model.top_k * size, when)
        else:
            yield _collective("tp", "all_reduce", layout.tp, summed, size, when)


def _context(model: Model, layout: Layout, seq: int, stage: Stage) -> Iterator[Call]:
    """Keys and values of the whole sequence, and backward the sum of their gradients; with latent
    attention the numbers that they come of."""
    pairs = 2 * max(model.kv_heads // layout.tp, 1) * model.head_size
    columns = model.kv_rank + model.rotary or pairs
    payload = BYTES * seq * layout.micro_batch * columns
    ops = {"forward": "all_gather", "backward": "reduce_scatter"}
    for when, passes in _passes(layout, stage).items():
        yield _collective("cp", ops[when], layout.cp, passes, payload, when)


def _experts(model: Model, layout: Layout, seq: int, stage: Stage) -> Iterator[Call]:
    """Each token to top_k experts and back, forward and backward."""
    if not model.experts:
        return
    shared = layout.tp if layout.sequence_parallel else 1
    payload = _hidden(model, layout, seq) * model.top_k / shared
    for when, passes in _passes(layout, stage).items():
        yield _collective("ep", "all_to_all", layout.ep, 2 * passes, payload, when)


def _pipeline(model: Model, layout: Layout, seq: int, stage: Stage) -> Iterator[Call]:
    """A message a micro-batch and boundary, in both directions; chunks have more boundaries."""
    if layout.pp == 1:
        return
    payload = _hidden(model, layout, seq) // (layout.tp if layout.sequence_parallel else 1)
    ends = {"forward": stage.head, "backward": stage.embedding}  # a way's last piece sends nothing
    for when, end in ends.items():
        count = layout.micro_batches * (layout.chunks - end)
        yield Call("pp", "send", count, payload, count * payload, when)


def _data(model: Model, layout: Layout, seq: int, stage: Stage) -> Iterator[Call]:
    """Gradients and parameters, of the ranks that hold the same of them.

    FSDP handles each layer by itself, and the embedding, the last norm and the output layer as one
    more piece, the root, whose parameters it keeps until its backward pass.
    """
    dense, experts = (BYTES * count for count in stage_parameters(model, layout, stage))
    sparse = stage.layers - stage.dense
    own = BYTES * counting.expert_parameters(model, layout.tp, layout.ep) if model.experts else 0
    layers = [
        (sparse, BYTES * counting.layer_parameters(model, layout.tp, layout.ep) - own),
        (stage.dense, BYTES * counting.dense_parameters(model, layout.tp)),
    ]
    root = dense - sum(count * each for count, each in layers)
    yield from _shared(layout, stage, "dp", layout.sharding, layers, root)
    runs = layout.micro_batches if layout.pp == 1 else 1
    shard, replicas = dense / layout.sharding, layout.replicas
    yield _collective("replicas", "all_reduce", replicas, runs, shard, "backward")
    if experts:
        ranks = max(layout.shards // layout.ep, 1)
        yield from _shared(layout, stage, "edp", ranks, [(sparse, own)], 0)
    if model.tied and stage.embedding != stage.head:
        table = BYTES * vocabulary(model, layout.tp)
        yield _collective("ends", "all_reduce", 2, 1, table, "step")


def gatherings(layout: Layout, stage: Stage) -> dict[str, int]:
    """How many passes of a stage's chunks, in a step, must gather their layers' parameters first.

    FSDP2 gives them up after a forward pass (with reshard) and after a backward pass; a stage of
    torch.distributed.pipelining keeps them after a backward pass, until the next forward pass ends.
    """
    if layout.pp == 1:
        return {"forward": layout.micro_batches, "backward": layout.micro_batches * layout.reshard}
    if not layout.reshard:
        return {"forward": layout.chunks, "backward": 0}
    sizes = (layout.pp, layout.micro_batches)
    sizes += (layout.chunks,) if layout.schedule == "interleaved" else ()
    held, counts = set(), {"forward": 0, "backward": 0}
    for op in getattr(schedules, SCHEDULES[layout.schedule])(*sizes)[stage.index]:
        if op.chunk not in held and op.kind != "W":
            counts["forward" if op.kind == "F" else "backward"] += 1
            held.add(op.chunk)
        if op.kind == "F":
            held.remove(op.chunk)
    return counts


def _shared(
    layout: Layout, stage: Stage, group: str, ranks: int, layers: list[tuple[int, int]], root: int
) -> Iterator[Call]:
    """All-reduce; with ZeRO reduce-scatter and all-gather; with stage 3, piece by piece.

    layers: how many, and the bytes of one. A pipeline's stage sums up gradients once a step.
    """
    size = root + sum(count * each for count, each in layers)
    if layout.zero == 0:
        yield _collective(group, "all_reduce", ranks, 1, size, "step")
    elif layout.zero < 3:
        yield _collective(group, "reduce_scatter", ranks, 1, size, "step")
        yield _collective(group, "all_gather", ranks, 1, size, "step")
    else:
        runs = layout.micro_batches if layout.pp == 1 else 1
        for count, each in layers:
            for when, passes in gatherings(layout, stage).items():
                calls = count * passes // layout.chunks
                yield _collective(group, "all_gather", ranks, calls, each, when)
            yield _collective(group, "reduce_scatter", ranks, runs * count, each, "backward")
        yield _collective(group, "all_gather", ranks, runs, root, "forward")
        yield _collective(group, "reduce_scatter", ranks, runs, root, "backward")
