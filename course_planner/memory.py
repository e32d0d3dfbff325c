"""The bytes that a rank holds."""

from dataclasses import dataclass

from course_planner import counting
from course_planner.descriptions import RECOMPUTE, Layout, Model, Stage, one_of, require, whole
from course_planner.pipelining import in_flight


@dataclass(frozen=True)
class Convention:
    """How a source counts: bytes a parameter, and what it leaves out."""

    parameter: int
    gradient: int
    optimizer: int
    rough: bool  # matrices alone, shared out evenly; no attention scores; nothing temporary


CONVENTIONS = {
    "adam16": Convention(2, 2, 12, rough=False),
    "playbook": Convention(2, 2, 8, rough=True),
}


def model_states(
    parameters: float,
    dp: int,
    zero: int,
    optimizer_bytes: float = 12,
    gradient_bytes: float = 2,
    parameter_bytes: float = 2,
) -> float:
    """The bytes of parameters, gradients and optimizer on each of `dp` ranks.

    ZeRO (1910.02054, section 5, figure 1): with N ranks, stage 1 shards the optimizer's K bytes a
    parameter, 2 + 2 + K / N; stage 2 the gradients too, 2 + (2 + K) / N; stage 3 all of it. K = 12:
    Adam in mixed precision, a copy of the parameters and two moments, in float32; 8 for SGD with
    momentum. The paper's GB are 1e9 bytes. Not counted: padding, and what stage 3 gathers.
    """
    whole(dp=dp)
    one_of("zero", zero, range(4))
    require(
        parameters >= 1e6 or parameters == int(parameters) >= 0,
        f"parameters are counted, not in billions: write 7.5e9, not {parameters!r}.",
    )
    bytes_each = {1: optimizer_bytes, 2: gradient_bytes, 3: parameter_bytes}
    shares = [size / (dp if zero >= stage else 1) for stage, size in bytes_each.items()]
    require(min(bytes_each.values()) >= 0, f"Bytes a parameter cannot be negative: {bytes_each}.")
    return parameters * sum(shares)


def activations_per_layer(
    seq: int,
    micro_batch: int,
    width: int,
    heads: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """The bytes that one layer keeps of one micro-batch for its backward pass, on one rank.

    Korthikanti et al. (2205.05198, eq. 1 and table 2), activations of 2 bytes, dropout masks of 1:

        recompute       without sequence parallelism        with it
        "none"          s b h (10 + 24 / t + 5 a s / h t)   s b h (34 + 5 a s / h) / t
        "selective"     s b h (10 + 24 / t)                 34 s b h / t
        "full"          2 s b h                             2 s b h

    5 a s / h are attention's scores, which flash attention does not keep either. "full" keeps the
    layer's input whole, as the table has it, on every tensor rank. The paper's layer has an MLP of
    4 h with two matrices and as many KV heads as heads, and a dropout; others are near it.
    """
    one_of("recompute", recompute, RECOMPUTE)
    whole(seq=seq, micro_batch=micro_batch, width=width, heads=heads, tp=tp)
    tokens = seq * micro_batch
    if recompute == "full":
        return 2 * tokens * width
    outside = 10 * width * (1 if sequence_parallel else tp)  # norms, dropouts, inputs
    scores = 5 * heads * seq if recompute == "none" else 0
    return tokens * (outside + 24 * width + scores) / tp


def memory(
    model: Model, layout: Layout, seq: int, stage: int = 0, convention: str = "adam16"
) -> dict[str, int]:
    """The bytes of a rank of `stage` at its fullest, by kind, and their total.

    "adam16": 2 bytes for a parameter and for a gradient, 12 for the optimizer (`model_states`);
    dp x cp ranks shard. activations: what the layers keep of all the micro-batches in flight
    (2205.05198, eq. 5; on the first of p stages min(p, m) under 1F1B, 1 + (p - 1) / (p v) times as
    much with v chunks). temporary: what is held for a moment, or outside the layers
    (`_temporary`). "playbook": what the Ultra-Scale Playbook plots, whose GB are GiB: 8 bytes for
    the optimizer, matrices alone, activations of 34 s b h a layer, nothing temporary.

    Not counted: the allocator's fragments, the libraries' own buffers, float32 gradients, and the
    buffer for each micro-batch's message that `torch.distributed.pipelining` keeps up to PyTorch
    2.14 (since 2.15 it makes one when it receives; `trace` has what the installed one does).
    """
    one_of("convention", convention, CONVENTIONS)
    stages = layout.stages(model, seq)
    one_of("stage", stage, range(layout.pp))
    return held_by(model, layout, seq, stages[stage], CONVENTIONS[convention])


def held_by(
    model: Model, layout: Layout, seq: int, stage: Stage, how: Convention = CONVENTIONS["adam16"]
) -> dict[str, int]:
    """`memory` of a stage that is known."""
    held = {
        **_states(model, layout, stage, how),
        "activations": _activations(model, layout, seq, stage, how),
        "temporary": 0 if how.rough else _temporary(model, layout, seq, stage),
    }
    held = {kind: round(size) for kind, size in held.items()}
    return held | {"total": sum(held.values())}


def stage_parameters(model: Model, layout: Layout, stage: Stage) -> tuple[int, int]:
    """The parameters of a rank of `stage` before ZeRO: all but experts' MLPs, and experts' MLPs."""
    experts = counting.expert_parameters(model, layout.tp, layout.ep) if model.experts else 0
    layer = counting.layer_parameters(model, layout.tp, layout.ep) - experts
    ends = _tables(model, stage) * vocabulary(model, layout.tp)
    ends += stage.embedding * model.positions * model.width + stage.head * counting.norm(model)
    return stage.layers * layer + ends, stage.layers * experts


def _tables(model: Model, stage: Stage) -> int:
    """The embedding, and the output layer; a tied one is a copy where another stage has it."""
    shared = model.tied and stage.embedding and stage.head
    return stage.embedding + stage.head - shared


def vocabulary(model: Model, tp: int) -> int:
    """A tensor rank's part of the embedding, or of the output layer, shared out by the vocabulary."""
    return -(-model.vocab // tp) * model.width


def _states(model: Model, layout: Layout, stage: Stage, how: Convention) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer."""
    parameters = stage_parameters(model, layout, stage)
    if how.rough:
        parameters = _rough_parameters(model, layout, stage), 0
    sizes = {"parameters": how.parameter, "gradients": how.gradient, "optimizer": how.optimizer}
    return {
        kind: size * sharded(layout, *parameters, from_stage)
        for (kind, size), from_stage in zip(sizes.items(), (3, 2, 1))
    }


def sharded(layout: Layout, dense: float, experts: float, from_stage: int) -> float:
    """Of how many parameters a rank has the state that ZeRO shards from `from_stage` on: 1 the
    optimizer's, 2 the gradients', 3 their own. Experts are sharded among fewer ranks."""
    shards = layout.shards if layout.zero >= from_stage else 1
    return dense / shards + experts / max(shards // layout.ep, 1)


def _rough_parameters(model: Model, layout: Layout, stage: Stage) -> float:
    """The matrices of a stage, divided by the tensor ranks."""
    mlps = max(model.experts, 1) // layout.ep * counting.mlp_matrices(model)
    layer = counting.attention_matrices(model) + mlps
    ends = _tables(model, stage) * model.vocab * model.width
    return (stage.layers * layer + ends) / layout.tp


def layer_activations(model: Model, layout: Layout, seq: int, recompute: str) -> float:
    """The activations of one layer and micro-batch on a rank; context ranks share the sequence.

    With experts, what the MLP keeps of a token, its input and 2 bytes for each inner number, is
    kept once for each expert that the token visits.
    """
    arguments = (seq, layout.micro_batch, model.width, model.heads)
    kept = activations_per_layer(*arguments, layout.tp, layout.sequence_parallel, recompute)
    if model.experts and recompute != "full":
        entering = 2 * model.width * (1 if layout.sequence_parallel else layout.tp)
        visited = model.top_k * (entering + (6 if model.gated else 4) * model.ffn)
        instead = entering + 16 * model.width  # of the paper's one MLP
        kept += seq * layout.micro_batch * (visited - instead) / layout.tp
    return kept / layout.cp


def _activations(model: Model, layout: Layout, seq: int, stage: Stage, how: Convention) -> float:
    """What the layers of a stage keep of all its micro-batches in flight."""
    scoreless = how.rough and layout.recompute == "none"
    layer = layer_activations(model, layout, seq, "selective" if scoreless else layout.recompute)
    flight = in_flight(layout.schedule, layout.pp, layout.micro_batches, layout.chunks)
    return layer * (stage.layers / layout.chunks) * flight[stage.index]


def _temporary(model: Model, layout: Layout, seq: int, stage: Stage) -> float:
    """What is held outside the layers, or for a moment.

    2205.05198, section 4.3: the embedding's dropout masks of the micro-batches in flight, s b h / t
    each; on the last stage 4 s b h / t (1 + v / h): the last norm's and the output layer's inputs,
    and the logits in float32. With full recomputation the activations of the layer that is
    computed again; with ZeRO 2 and 3 what is not sharded yet, or not any more (`_unsharded`).
    """
    tokens = seq * layout.micro_batch * model.width / (layout.tp * layout.cp)
    flat = "1f1b" if layout.chunks > 1 else layout.schedule
    held = tokens * in_flight(flat, layout.pp, layout.micro_batches)[0] if stage.embedding else 0
    if stage.head:
        held += 4 * tokens * (1 + model.vocab / model.width)
    if layout.recompute == "full":
        held += layer_activations(model, layout, seq, "selective")
    return held + _unsharded(model, layout, stage)


def _unsharded(model: Model, layout: Layout, stage: Stage) -> float:
    """What ZeRO 2 and 3 hold whole for a moment, 2 bytes each.

    Gradients are sent once a step (`traffic`): with several micro-batches a stage's are whole until
    the last one, with one the largest piece's. Pieces are the layers and the root, which is all
    outside them. With stage 3 the root's parameters and those of the layers that are gathered: of
    two, the one that computes and the next (FSDP, 2304.11277, section 3.2), or without reshard all.
    """
    if layout.shards == 1 or layout.zero < 2:
        return 0
    layer = counting.layer_parameters(model, layout.tp, layout.ep)
    every = sum(stage_parameters(model, layout, stage))
    root = every - stage.layers * layer
    count = every if layout.micro_batches > 1 else max(layer, root)
    if layout.zero == 3:
        count += root + layer * (min(2, stage.layers) if layout.reshard else stage.layers)
    return 2 * count
