"""A transformer's training step for `estimate.trace`, and for real ranks: one program, any layout.

`Decoder` has the shapes of `estimate.Model` without biases: RMS norms, a gated MLP, fewer KV heads,
an output layer of its own. Tensor ranks split it with `parallelize_module` and share out the
sequence; context ranks gather keys and values (chapter 10's GatherTokens); expert ranks exchange
tokens (chapter 11's Exchange); FSDP2 shards each layer; stages run in a schedule of PyTorch's.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from course_exercises.authoring import load_code
from course_planner import Layout, Model
from course_utils.trace.meters import local

GatherTokens, Exchange = load_code(10, "GatherTokens"), load_code(11, "Exchange")
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


class Attention(nn.Module):
    """Causal attention with fewer KV heads; `context` is a group whose ranks share the sequence."""

    def __init__(self, model: Model, context: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.size, self.context = model.width // model.heads, context
        self.query = nn.Linear(model.width, model.width, bias=False)
        self.key = nn.Linear(model.width, model.kv_heads * self.size, bias=False)
        self.value = nn.Linear(model.width, model.kv_heads * self.size, bias=False)
        self.out = nn.Linear(model.width, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        if self.context is not None:
            both = torch.cat([k, v], dim=1)
            k, v = GatherTokens.apply(both, self.context).chunk(2, dim=1)
        times = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(times, dim=1) for part in (k, v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=self.context is None)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.size)).transpose(1, 2)  # (N, H, T, D)


class Gated(nn.Module):
    """An MLP of three matrices."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(model.width, model.ffn, bias=False)
        self.up = nn.Linear(model.width, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Some of the experts; each takes its best tokens, so that all sizes are known beforehand.

    Expert choice (Zhou et al. 2022, 2202.09368, section 3.2): of n tokens an expert takes n k / E.
    """

    def __init__(self, model: Model, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.model, self.group = model, group
        self.router = nn.Linear(model.width, model.experts, bias=False)
        share = model.experts // group.size()
        self.own = _Each([Gated(model) for _ in range(share)])

    def forward(self, x: Tensor) -> Tensor:
        tokens, ranks = x.flatten(0, 1), self.group.size()
        taken = len(tokens) * self.model.top_k // self.model.experts
        weights, chosen = self.router(tokens).softmax(-1).t().topk(taken)  # (E, taken)
        splits = [chosen.numel() // ranks] * ranks
        arrived = Exchange.apply(tokens[chosen.flatten()], splits, splits, self.group)
        # by the rank that sent them, the expert here, the token
        queues = arrived.view(ranks, -1, taken, arrived.size(-1)).transpose(0, 1).flatten(1, 2)
        results = self.own(queues).unflatten(1, (ranks, taken)).transpose(0, 1)
        back = Exchange.apply(results.reshape_as(arrived), splits, splits, self.group)
        weighted = weights.flatten().unsqueeze(1) * back
        return torch.zeros_like(tokens).index_add(0, chosen.flatten(), weighted).view_as(x)


class _Each(nn.Module):
    """Experts, each with its own row of queues."""

    def __init__(self, experts: list[Gated]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, queues: Tensor) -> Tensor:
        return torch.stack([expert(queue) for expert, queue in zip(self.experts, queues)])


class Layer(nn.Module):
    def __init__(self, model: Model, groups: dict[str, dist.ProcessGroup]) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(model.width)
        self.attention = Attention(model, groups.get("cp"))
        self.norm2 = nn.RMSNorm(model.width)
        self.mlp = Experts(model, groups["ep"]) if model.experts else Gated(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Piece(nn.Module):
    """Some of a decoder's layers; the first piece has the embedding, the last norm and output."""

    def __init__(self, model: Model, groups: dict, layers: int, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.width) if first else None
        self.layers = nn.ModuleList(Layer(model, groups) for _ in range(layers))
        self.norm = nn.RMSNorm(model.width) if last else None
        self.output = nn.Linear(model.width, model.vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.output is None else self.output(self.norm(x))


ENDS = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1)),
}
LAYER = {
    "norm1": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "norm2": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    **{f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}


def decoder(
    mesh: DeviceMesh, layout: Layout, model: Model, seq: int, dtype: torch.dtype = torch.float32
) -> Callable[[], Tensor | None]:
    """The program: `functools.partial(decoder, model=..., seq=...)` is one for `estimate.trace`."""
    meshes = _meshes(mesh, layout)
    groups = {name: meshes[name].get_group() for name in ("cp", "ep") if name in meshes}
    pieces = [
        _piece(model, layout, meshes, groups, mesh.get_local_rank("pp") + chunk * layout.pp, dtype)
        for chunk in range(layout.chunks)
    ]
    parameters = [p for piece in pieces for p in piece.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)
    run = _whole if layout.pp == 1 else _pipelined
    train = run(pieces, mesh, layout, model, seq, dtype)

    def step() -> None:
        tokens = torch.randint(
            model.vocab, (layout.micro_batch * layout.micro_batches, seq // layout.cp)
        )
        with loss_parallel() if layout.tp > 1 else nullcontext():
            train(tokens)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _meshes(mesh: DeviceMesh, layout: Layout) -> dict[str, DeviceMesh]:
    """Those of more than one rank, and "shards": data and context ranks together."""
    meshes = {name: mesh[name] for name in ("tp", "cp", "pp") if getattr(layout, name) > 1}
    meshes["shards"] = mesh["dp", "cp"]._flatten("shards") if layout.cp > 1 else mesh["dp"]
    if layout.ep > 1:  # here, all ranks are data ranks
        sizes = (layout.dp // layout.ep, layout.ep)
        experts = init_device_mesh("cpu", sizes, mesh_dim_names=("edp", "ep"))
        meshes |= {"edp": experts["edp"], "ep": experts["ep"]}
    return meshes


def _piece(model, layout, meshes, groups, index: int, dtype) -> Piece:
    """Piece `index` of the decoder, as this rank holds it."""
    pieces = layout.pp * layout.chunks
    layers = layout.stage_layers(model.layers)[index % layout.pp] // layout.chunks
    with torch.device("meta"):
        piece = Piece(model, groups, layers, index == 0, index == pieces - 1).to(dtype)
    if layout.tp > 1:
        ends = {name: how for name, how in ENDS.items() if getattr(piece, name) is not None}
        parallelize_module(piece, meshes["tp"], ends)
        for layer in piece.layers:
            parallelize_module(layer, meshes["tp"], LAYER)
    how = {"mesh": meshes["shards"], "reshard_after_forward": layout.reshard}
    for layer in piece.layers:
        if model.experts:
            fully_shard(layer.mlp.own, **how | {"mesh": meshes["edp"]})
        fully_shard(layer, **how)
    fully_shard(piece, mesh=meshes["shards"])  # the root is kept until its backward pass
    piece.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in piece.parameters():
            local(parameter).normal_(std=0.02)
    return piece


def _loss(mesh: DeviceMesh, layout: Layout) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if layout.tp > 1:
            logits = DTensor.from_local(logits, mesh["tp"], [Shard(2)], run_check=False)
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    return loss


def _whole(pieces, mesh, layout, model, seq, dtype) -> Callable[[Tensor], None]:
    """All layers on this rank; micro-batches one after another, each with its reduce-scatters."""
    (piece,), loss = pieces, _loss(mesh, layout)

    def train(tokens: Tensor) -> None:
        for part in tokens.chunk(layout.micro_batches):
            loss(piece(part), part).backward()

    return train


def _pipelined(pieces, mesh, layout, model, seq, dtype) -> Callable[[Tensor], None]:
    """Stages that know beforehand what comes and goes."""
    stage, last = mesh.get_local_rank("pp"), layout.pp * layout.chunks - 1
    shape = (layout.micro_batch, seq // layout.cp // layout.tp, model.width)
    between = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    shape = (layout.micro_batch, seq // layout.cp, model.vocab // layout.tp)
    logits = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    tokens = torch.empty(shape[:2], dtype=torch.int64, device="meta")
    stages = []
    for chunk, piece in enumerate(pieces):
        index = stage + chunk * layout.pp
        ends = tokens if index == 0 else between, logits if index == last else between
        stages.append(
            PipelineStage(
                piece,
                index,
                last + 1,
                torch.device("cpu"),
                input_args=ends[0],
                output_args=ends[1],
                group=mesh.get_group("pp"),
            )
        )
    schedule = SCHEDULES[layout.schedule](
        stages if layout.schedule == "interleaved" else stages[0],
        layout.micro_batches,
        loss_fn=_loss(mesh, layout),
    )

    def train(tokens: Tensor) -> None:
        given = [tokens] if stage == 0 else []
        schedule.step(*given, target=tokens if stage == layout.pp - 1 else None)

    return train
