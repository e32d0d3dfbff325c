"""The bytes that a rank holds, and whether they fit."""

from collections.abc import Mapping

from course_planner import counting
from course_planner.descriptions import RECOMPUTE, Hardware, Layout, Model, one_of, require, whole
from course_planner.pipelining import in_flight
from course_planner.stages import Stage, stages_of, telling

LOGITS = 12  # bytes of a logit in the loss's backward pass: probability and two gradients, of 4
FUSED = 4  # by a fused loss, as flash-attention's or Liger's: the logit and its gradient
HELD_BACK = 0.09  # of what tensors have, and SPARE bytes: taken by the allocator, and in no tensor
SPARE = 2**29
AVOIDED = ("loss", "allocator")  # kinds without which a run ends all the same


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
        "half"          s b h (4 + 9 / t)                   13 s b h / t
        "full"          2 s b h                             2 s b h / t

    5 a s / h are attention's scores, which flash attention does not keep either. "half" keeps the
    layer's input, attention's output and half of the matrices' (torchtitan's selective); "full" the
    layer's input, which the table has whole: with sequence parallelism it is shared out too. The
    paper's layer has an MLP of 4 h with two matrices, as many KV heads as heads, and a dropout.
    """
    one_of("recompute", recompute, RECOMPUTE)
    whole(seq=seq, micro_batch=micro_batch, width=width, heads=heads, tp=tp)
    model = Model(1, width, heads, 1, head_dim=width // heads)
    layout = Layout(tp=tp, micro_batch=micro_batch, sequence_parallel=sequence_parallel)
    return layer_activations(model, layout, seq, recompute)


def layer_activations(model: Model, layout: Layout, seq: int, recompute: str) -> float:
    """`activations_per_layer` of any model; context ranks share out the sequence.

    Whole on each tensor rank, or shared out with sequence parallelism: norms' inputs, matrices'
    inputs, and the two dropout masks of models with biases. Shared out: queries, keys, values,
    attention's output, and of the MLP what goes into its activation function and comes out, with a
    gate both factors and the product. A token's vectors in an MLP are kept for each that it visits.
    RMS norms, of models with a gate, keep 6 bytes a number in place of 2: they compute in float32
    (transformers' LlamaRMSNorm, and torch.nn.RMSNorm before it had a kernel of its own).
    """
    tokens, h = seq * layout.micro_batch / layout.cp, model.width
    outside = (10 if model.bias else 16 if model.gated else 8) * h
    outside += 4 * (model.query_rank + model.kv_rank)  # latent numbers, and normalised
    heads, pairs = model.heads * model.score_size, model.kv_heads * model.score_size
    mlps, inner = counting.mlps_visited(model), (2 if model.gated else 1) * model.ffn
    inside = 4 * heads + 4 * pairs + mlps * 4 * inner
    outside += 2 * h * (mlps - 1)
    if recompute == "full":
        outside, inside = 2 * h, 0
    elif recompute == "half":
        outside, inside = 2 * h + (1 + mlps) * h, 3 * heads + 2 * pairs + mlps * inner
    elif recompute == "none":
        inside += 5 * model.heads * seq
    return tokens * (outside * (1 if layout.sequence_parallel else layout.tp) + inside) / layout.tp


def memory(model: Model, layout: Layout, seq: int, stage: int = 0) -> dict[str, int]:
    """The bytes of a rank of `stage` at its fullest, by kind, and their total.

    As PyTorch's programs hold them: in mixed precision with float32 gradients (`_bytes_each`), on
    dp x cp ranks that shard. activations: what the layers keep of all the micro-batches in flight
    (2205.05198, eq. 5; on the first of p stages min(p, m) under 1F1B, 1 + (p - 1) / (p v) times as
    much with v chunks). temporary: what is held for a moment, or outside the layers (`_temporary`), with
    a fused loss; loss: what PyTorch's own has on top. allocator: what it has taken of the GPU, and no
    tensor has.

    Not counted: the libraries' own buffers (`fits`), and the buffer for each micro-batch's message
    that `torch.distributed.pipelining` keeps up to PyTorch 2.14 (since 2.15 it makes one when it
    receives; `trace` has what the installed one does).
    """
    stages = stages_of(model, layout, seq)
    one_of("stage", stage, range(layout.pp))
    return held_by(model, layout, seq, stages[stage])


def fullest(model: Model, layout: Layout, seq: int) -> dict[str, int]:
    """The memory of the stage that needs most."""
    stages = telling(stages_of(model, layout, seq))
    return max((held_by(model, layout, seq, s) for s in stages), key=tensors)


def fits(held: Mapping[str, int], hardware: Hardware) -> bool:
    """Whether a rank's tensors, by kind, fit its GPU."""
    return tensors(held) <= hardware.hbm_bytes


def tensors(held: Mapping[str, int]) -> int:
    """What must have room: not what a fused loss saves, nor what the allocator holds back, which it
    gives back before it fails."""
    return held["total"] - sum(held.get(kind, 0) for kind in AVOIDED)


def held_by(model: Model, layout: Layout, seq: int, stage: Stage) -> dict[str, int]:
    """`memory` of a stage that is known."""
    parameters = stage_parameters(model, layout, stage)
    held = {
        kind: size * sharded(layout, *parameters, from_stage)
        for (kind, size), from_stage in zip(_bytes_each(layout).items(), (3, 2, 1))
    }
    held["activations"] = _activations(model, layout, seq, stage)
    held["temporary"], held["loss"] = _temporary(model, layout, seq, stage)
    held["allocator"] = SPARE + HELD_BACK * sum(held.values())
    held = {kind: round(size) for kind, size in held.items()}
    return held | {"total": sum(held.values())}


def _bytes_each(layout: Layout) -> dict[str, int]:
    """Bytes of a parameter: Megatron-LM's, 2 + 4 + 12; FSDP2's, whose shards are the float32 copy."""
    if layout.zero == 3:
        return {"parameters": 4, "gradients": layout.gradient_bytes, "optimizer": 8}
    return {"parameters": 2, "gradients": layout.gradient_bytes, "optimizer": 12}


def stage_parameters(model: Model, layout: Layout, stage: Stage) -> tuple[int, int]:
    """The parameters of a rank of `stage` before ZeRO: all but experts' MLPs, and experts' MLPs."""
    experts = counting.expert_parameters(model, layout.tp, layout.ep) if model.experts else 0
    layer = counting.layer_parameters(model, layout.tp, layout.ep) - experts
    sparse = stage.layers - stage.dense
    ends = _tables(model, stage) * vocabulary(model, layout.tp)
    ends += stage.embedding * model.positions * model.width + stage.head * counting.norm(model)
    ends += stage.dense * counting.dense_parameters(model, layout.tp)
    return sparse * layer + ends, sparse * experts


def _tables(model: Model, stage: Stage) -> int:
    """The embedding, and the output layer; a tied one is a copy where another stage has it."""
    shared = model.tied and stage.embedding and stage.head
    return stage.embedding + stage.head - shared


def vocabulary(model: Model, tp: int) -> int:
    """A tensor rank's part of the embedding, or of the output layer, shared out by the vocabulary."""
    return -(-model.vocab // tp) * model.width


def sharded(layout: Layout, dense: float, experts: float, from_stage: int) -> float:
    """Of how many parameters a rank has the state that ZeRO shards from `from_stage` on: 1 the
    optimizer's, 2 the gradients', 3 their own. Experts are sharded among fewer ranks."""
    shards = layout.sharding if layout.zero >= from_stage else 1
    return dense / shards + experts / max(shards // layout.ep, 1)


def _activations(model: Model, layout: Layout, seq: int, stage: Stage) -> float:
    """What the layers of a stage keep of all its micro-batches in flight."""
    layer = layer_activations(model, layout, seq, layout.recompute)
    flight = in_flight(layout.schedule, layout.pp, layout.micro_batches, layout.chunks)
    return layer * (stage.layers / layout.chunks) * flight[stage.index]


def _temporary(model: Model, layout: Layout, seq: int, stage: Stage) -> tuple[float, float]:
    """What is held outside the layers, or for a moment; and what a loss that is not fused adds to it.

    With biases the embedding's dropout masks of the micro-batches in flight, s b h / t each (2205.05198, section
    4.3); what ZeRO 2 and 3 have whole (`_unsharded`); and the larger of two moments of a backward
    pass: the loss's, with the norm's and the output layer's inputs and FUSED or LOGITS bytes a logit,
    and a layer's, with its gradients and activations that are computed again.
    """
    tokens = seq * layout.micro_batch / (layout.tp * layout.cp)
    flat = "1f1b" if layout.chunks > 1 else layout.schedule
    flight = in_flight(flat, layout.pp, layout.micro_batches)[0] if stage.embedding else 0
    again = 0.0
    if layout.recompute in ("full", "half"):
        again = layer_activations(model, layout, seq, "selective")
    masks = tokens * model.width * flight * model.bias
    gradients, kept = _unsharded(model, layout, stage)
    fused, plain = (
        max(again + gradients, stage.head * tokens * (4 * model.width + logit * model.vocab))
        for logit in (FUSED, LOGITS)
    )
    return masks + fused + kept, plain - fused


def _unsharded(model: Model, layout: Layout, stage: Stage) -> tuple[float, float]:
    """What ZeRO 2 and 3 hold whole: a layer's gradients in its backward pass, and what lasts longer.

    Of a layer, gradients as autograd makes them and the float32 copy that is sent; of the root, which
    is all outside the layers, gradients that wait for its last. FSDP2 reduces in every micro-batch, a
    pipeline only in the last one, until when all of a stage's are whole. With stage 3 also, of 2 bytes,
    the root's parameters and those of the layers that are gathered: of two, the one that computes and
    the next (FSDP, 2304.11277, section 3.2), or without reshard all.
    """
    if layout.sharding == 1 or layout.zero < 2:
        return 0, 0
    layer = counting.layer_parameters(model, layout.tp, layout.ep)
    every = sum(stage_parameters(model, layout, stage))
    root = max(every - stage.layers * layer, 0)
    waiting = layout.pp > 1 and layout.micro_batches > 1
    size = layout.gradient_bytes
    gradients, kept = (0, size * every) if waiting else ((2 + size) * layer, 2 * root)
    if layout.zero == 2:
        return gradients, kept
    layers = min(2, stage.layers) if layout.reshard else stage.layers
    return gradients, kept + 2 * (root + layers * layer)
