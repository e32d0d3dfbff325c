# %% [markdown]
# # 12. Plan a cluster: will it fit, how long does it take, what limits it
#
# You have a number of GPUs of one kind, and a model. How do you split it? An hour of trying on a thousand GPUs costs
# a thousand GPU-hours, and much of what you would find out is arithmetic.
#
# Here the bytes and operations of all chapters come together in `course_planner`. First you predict what one rank
# holds and sends. Then you run the real program as that rank, on this machine, among a thousand ranks that do not
# exist. Then you estimate seconds, and search for the best split of four published runs and of a model of your own.

# %% tags=["nbval-ignore-output"]
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import torch
from torch import nn

import course_planner as estimate
from course_exercises import check, hint
from course_planner import Call, Hardware, Layout, Model, published
from course_planner.figures import ch12 as figures
from course_planner.figures.plans import fit, where_time_goes
from course_utils import hardware
from course_utils.launch import launch
from course_utils.lesson.explore import Explorer
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace

hardware.report()

# %% [markdown]
# ## 1. The factory: a plan before anything is rented
#
# A company wants to build a large line, and has not rented its sites yet. A planner asks three questions. Does every
# building have room for what lies in it at the fullest moment? How long does a batch take? And what takes most of
# that time: the stations, the trucks, or waiting?
#
# One building can also be rehearsed, with empty boxes. Its trucks leave empty and come back empty, but its crew
# sees every box that it has to store.

# %%
figures.factory()
plt.show()

# %% [markdown]
# *Two copies of a line with three sites each, and two buildings on each site. Trucks are fast inside a site and slow
# between sites, and the copies exchange their change notes once a step.*
#
# | new in the factory | in PyTorch | what it is |
# |---|---|---|
# | plan of the sites | `Layout` | how many ranks split what: tensor, pipeline, data, context |
# | room in a building | memory of a rank | parameters, gradients, optimizer state, activations, temporary tensors |
# | road inside a site, road between sites | `intra_bandwidth`, `inter_bandwidth` | NVLink inside a **node**, the network between nodes |
# | rehearsal with empty boxes | **trace** | the real program, with tensors that have only shapes |

# %% [markdown]
# ## 2. The smallest real run: one rank of 16,384
#
# PyTorch has what a rehearsal needs. With the **fake process group** a process acts as one rank of as many as you
# like, and every collective returns at once. A **fake tensor** has a shape and no memory. `estimate.trace` runs a
# program with both and records its calls. The program gets a mesh and a layout, and returns a function that does one
# step.


# %%
from torch.distributed.fsdp import fully_shard


def two_layers(mesh, layout):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 32768), nn.GELU(), nn.Linear(32768, 8192))
    fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    return lambda: model(torch.randn(16, 8192)).sum().backward()


traced = estimate.trace(two_layers, Layout(dp=16_384), rank=5000)
for call in traced.calls:
    print(f"{call.when}: {call.calls} {call.op} of {call.payload:,} bytes")

# %% [markdown]
# Nothing was sent, but `fully_shard` asked for everything that it would need on 16,384 GPUs: all parameters before
# forward, and the sum of their gradients after backward. It kept the parameters between the two, as it does for the
# **root**, the outermost sharded module (chapter 8).
#
# The parameters have 2,147,647,488 bytes, and half as much again is gathered. `fully_shard` shares out rows, and the
# second matrix has 8,192 of them: half of the 16,384 ranks hold one, and the others hold padding.

# %% [markdown]
# ## 3. Predict, then measure: one rank of 1,024
#
# The model has the size of GPT-3: 96 layers of width W = 12,288, a vocabulary of V = 51,200, 175 billion parameters.
# The cluster has t = 8 tensor ranks, p = 16 stages and d = 8 data ranks with FSDP, 1,024 ranks in all. A step has m =
# 16 micro-batches of one sequence of s = 2,048 tokens.

# %%
gpt = Model(layers=96, width=12_288, heads=96, vocab=51_200, tied=False, bias=False)
split = Layout(dp=8, tp=8, pp=16, zero=3, reshard=False, micro_batches=16)
print(f"{estimate.parameters(gpt):,} parameters on {split.gpus:,} ranks")

# %% [markdown]
# ### What a rank holds
#
# In mixed precision a parameter takes 2 bytes, its gradient 2, and Adam 12: a float32 copy and two averages
# ([Rajbhandari et al. 2019](https://arxiv.org/abs/1910.02054), section 3.1). Most programs today keep gradients in
# float32, which takes 2 bytes more; `estimate.memory` counts them so. A layer has $12 W^2$ parameters, an embedding
# $V W$. Tensor ranks share out every matrix, and the data ranks share out each of these parts again: with ZeRO 1 the
# optimizer state, with ZeRO 2 the gradients too, and with ZeRO 3 also the parameters.
#
# For a micro-batch of $b$ sequences, a layer keeps
#
# $$\frac{s\,b\,(34\,W + 5\,a\,s)}{t} \qquad \frac{34\,s\,b\,W}{t} \qquad 2\,s\,b\,W$$
#
# bytes of activations: without recomputation, with **selective** recomputation (the scores of $a$ heads are computed
# again, as flash attention does), and with **full** recomputation ([Korthikanti et al.
# 2022](https://arxiv.org/abs/2205.05198), table 2). Under 1F1B, stage r of p has min(m, p - r) micro-batches in
# flight (chapter 5), and keeps the activations of all of them.

# %% [markdown]
# ### 12.1 What a rank holds (3 points)
#
# Now write the arithmetic yourself, for any pipeline stage and any `layout.zero`. In this chapter's exercises a
# transformer is plain: an MLP of 4 W with two matrices, as many KV heads as heads, equally many layers in all stages,
# no biases or norms. The records `Model`, `Layout` and `Hardware` describe a run; `help(Layout)` shows their fields.
# You rewrite functions of `course_planner`, so do not call them.
#
# A table is a matrix of V x W. The embedding is a table on the first stage, the output layer one on the last. A tied
# output layer on the same stage is the embedding itself; on another stage it is a copy.


# %% nbgrader={"grade_id": "12.1", "solution": true}
def memory_of(model: Model, layout: Layout, seq: int, stage: int) -> dict[str, float]:
    """Returns the bytes of a rank of `stage`, by "parameters", "gradients", "optimizer", "activations".

    12 W^2 parameters a layer, and the tables; tensor ranks share out all of them. A parameter and a
    gradient have 2 bytes, Adam's state with its float32 copy has 12; dp ranks share out what
    `layout.zero` says (1 to 3). A layer keeps of a micro-batch of b sequences
    s b (34 W + 5 a s) / t bytes with recompute "none", 34 s b W / t with "selective", 2 s b W with
    "full" (a heads, t tensor ranks, sequence parallelism). Under 1F1B, stage r of p has min(m, p - r)
    of its m micro-batches in flight.
    """
    ### BEGIN SOLUTION
    layers, last = model.layers // layout.pp, layout.pp - 1
    tables = int(stage == 0) + int(stage == last)
    if last == 0 and model.tied:
        tables = 1
    count = (12 * layers * model.width**2 + tables * model.vocab * model.width) / layout.tp
    held = {"optimizer": 12 * count, "gradients": 2 * count, "parameters": 2 * count}
    for kind in list(held)[: layout.zero]:
        held[kind] /= layout.dp
    tokens = seq * layout.micro_batch
    inside = 34 * model.width + (5 * model.heads * seq if layout.recompute == "none" else 0)
    kept = 2 * tokens * model.width if layout.recompute == "full" else tokens * inside / layout.tp
    return held | {"activations": layers * kept * min(layout.micro_batches, layout.pp - stage)}
    ### END SOLUTION


# %% nbgrader={"grade_id": "12.1-check", "grade": true, "points": 3, "locked": true}
check("12.1", memory_of)

# %% [markdown]
# ### What a rank sends
#
# To whom does a rank of the first stage send most in a step: to the 7 other tensor ranks, to the next stage, or to
# the 7 other data ranks? Chapters 5, 6 and 8 counted all three. A number has 2 bytes. Tensor ranks use sequence
# parallelism; the embedding adds one collective to each pass. FSDP gathers once a step (`reshard=False`). In an
# all-gather or reduce-scatter, each of n ranks in a ring sends (n - 1) / n of the whole tensor.

# %% tags=["prediction"]
W, V, s, m, t, d = 12_288, 51_200, 2048, 16, 8, 8
held_by_tensor_rank = (6 * 12 * W**2 + V * W) / t  # 96 / 16 layers, and the embedding
predicted = {
    "GB to tensor ranks": round(m * (6 * 8 + 2) * 2 * s * W * (t - 1) / t / 1e9, 1),
    "GB to the next stage": round(m * 2 * s * W / t / 1e9, 1),
    "GB to data ranks": round(2 * 2 * held_by_tensor_rank * (d - 1) / d / 1e9, 1),
}

# %% [markdown]
# Now the program: attention, a layer, and the part of the model that a stage holds. None of it communicates.


# %%
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        names = "query", "key", "value", "out"
        self.size = width // heads
        for name in names:
            self.add_module(name, nn.Linear(width, width, bias=False))

    def forward(self, x):
        parts = [
            part(x).unflatten(2, (-1, self.size)) for part in (self.query, self.key, self.value)
        ]
        q, k, v = (part.transpose(1, 2) for part in parts)  # (N, H, T, W / H)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


# %%
class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


# %%
class Part(nn.Module):
    """The layers of a stage; the first stage has the embedding, the last the output layer."""

    def __init__(self, model, layout, stage):
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.width) if stage == 0 else None
        count = model.layers // layout.pp
        self.layers = nn.ModuleList(Layer(model.width, model.heads) for _ in range(count))
        last = stage == layout.pp - 1
        self.norm = nn.RMSNorm(model.width) if last else None
        self.output = nn.Linear(model.width, model.vocab, bias=False) if last else None

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.output is None else self.output(self.norm(x))


# %% [markdown]
# Next come two plans for `parallelize_module` (chapter 6), then FSDP around each layer (chapter 8).

# %%
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

GATHER = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
LAYER = {"norm1": SequenceParallel(), "attention": GATHER, "attention.out": ROWS}
LAYER |= {f"attention.{name}": COLUMNS for name in ("query", "key", "value")}
LAYER |= {"norm2": SequenceParallel(), "mlp": GATHER, "mlp.0": COLUMNS, "mlp.2": ROWS}
ENDS = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1)),
}


# %%
def part_of(mesh, layout, model, dtype):
    """What this rank holds: a stage, cut by tensor ranks, sharded by data ranks."""
    with torch.device("meta"):
        part = Part(model, layout, mesh.get_local_rank("pp")).to(dtype)
    ends = {name: how for name, how in ENDS.items() if getattr(part, name) is not None}
    parallelize_module(part, mesh["tp"], ends)
    for layer in part.layers:
        parallelize_module(layer, mesh["tp"], LAYER)
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=layout.reshard)
    fully_shard(part, mesh=mesh["dp"])
    part.to_empty(device=mesh.device_type)
    for parameter in part.parameters():
        parameter.detach().to_local().normal_(std=0.02)
    return part


# %% [markdown]
# `PipelineStage` has to know the shapes that it receives and sends. No other stage is there to tell it, so you do;
# `requires_grad=True` says that gradients come back.

# %%
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def stage_of(part, mesh, layout, model, seq, dtype):
    b, stage, stages = layout.micro_batch, mesh.get_local_rank("pp"), layout.pp
    numbers = {"dtype": dtype, "device": "meta", "requires_grad": True}
    tokens = torch.empty(b, seq, dtype=torch.int64, device="meta")
    between = torch.empty(b, seq // layout.tp, model.width, **numbers)
    logits = torch.empty(b, seq, model.vocab // layout.tp, **numbers)
    ends = {
        "input_args": tokens if stage == 0 else between,
        "output_args": logits if stage == stages - 1 else between,
    }
    device = torch.device(mesh.device_type)
    return PipelineStage(part, stage, stages, device, group=mesh.get_group("pp"), **ends)


# %%
import warnings


def program(mesh, layout, model, seq, dtype=torch.bfloat16):
    """FSDP, tensor parallelism with sequence parallelism, and 1F1B: returns a training step."""
    # the logits are a view, and nobody changes them in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    part = part_of(mesh, layout, model, dtype)
    stage = stage_of(part, mesh, layout, model, seq, dtype)
    optimizer = torch.optim.AdamW(part.parameters(), foreach=False)

    def loss(logits, targets):
        logits = DTensor.from_local(logits, mesh["tp"], [Shard(2)], run_check=False)
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = Schedule1F1B(stage, layout.micro_batches, loss_fn=loss)

    def step():
        size = layout.micro_batch * layout.micro_batches, seq
        tokens = torch.randint(model.vocab, size, device=mesh.device_type)
        with loss_parallel():
            schedule.step(*[tokens] * stage.is_first, target=tokens if stage.is_last else None)
        optimizer.step()
        optimizer.zero_grad()

    return step


# %% [markdown]
# This ordinary training program runs here as rank 0 of 1,024.

# %%
traced = estimate.trace(partial(program, model=gpt, seq=2048), split, rank=0)
sent = {
    group: sum(c.sent for c in traced.calls if c.group == group) for group in ("tp", "pp", "dp")
}
measured = {
    "GB to tensor ranks": round(sent["tp"] / 1e9, 1),
    "GB to the next stage": round(sent["pp"] / 1e9, 1),
    "GB to data ranks": round(sent["dp"] / 1e9, 1),
}
print(
    f"parameters: {traced.held['parameters'] / 1e6:.0f} MB; computed: {traced.flops / 1e12:.0f} TFLOP"
)

# %%
compare(
    predicted,
    measured,
    likely={
        "The forward pass only: backward sends as much.": {"GB to tensor ranks": 17.6},
        "The gradients only: FSDP gathers the parameters too.": {"GB to data ranks": 2.5},
        "All numbers of a micro-batch: a tensor rank sends its part of them.": {
            "GB to the next stage": 0.8
        },
    },
)

# %% [markdown]
# A layer has two all-gathers and two reduce-scatters in each pass, of $s\,b\,W$ numbers, and the embedding has one of
# each. So this rank sends seven times as much to tensor ranks as to data ranks, and 350 times as much as to the next
# stage: tensor ranks need the fastest links.

# %%
closed = estimate.traffic(gpt, split, 2048, stage=0)
seen = {(c.group, c.op, c.payload, c.when): c.calls for c in traced.calls}
found = sum(seen[c.group, c.op, c.payload, c.when] == c.calls for c in closed)
print(f"of {len(closed)} kinds of calls that the formulas give, the trace saw {found}")

# %% [markdown]
# ### 12.2 What a rank sends (3 points)
#
# Numbers have 2 bytes, and collectives use a ring. Only the layers count here, not the tables or the loss.


# %% nbgrader={"grade_id": "12.2", "solution": true}
def traffic_of(model: Model, layout: Layout, seq: int, stage: int) -> dict[str, float]:
    """Returns the bytes that a rank of `stage` sends in one step to its groups "tp", "pp" and "dp".

    Tensor ranks: a layer has two all-gathers and two reduce-scatters of s b W numbers in each pass,
    forward and backward; with recompute "full" the forward pass runs twice. Stages: for each
    micro-batch a tensor rank's part of s b W numbers to the next stage, and their gradients to the
    one before. Data ranks, of 12 W^2 / t numbers a layer: an all-reduce of the gradients, once a step,
    or with ZeRO 1 and 2 a reduce-scatter and an all-gather, which send as much. With ZeRO 3, which comes
    with pp = 1 only, every micro-batch has an all-gather of the parameters before its forward and before
    its backward pass, and a reduce-scatter of the gradients, as FSDP2 does unless told not to; with
    recompute "full" the second forward pass uses the parameters of the backward pass.
    """
    ### BEGIN SOLUTION
    t, d, m = layout.tp, layout.dp, layout.micro_batches
    layers = model.layers // layout.pp
    hidden = 2 * seq * layout.micro_batch * model.width
    collectives = 12 if layout.recompute == "full" else 8
    neighbours = (stage > 0) + (stage < layout.pp - 1)
    rounds = 3 * m if layout.zero == 3 else 2
    weights = 2 * layers * 12 * model.width**2 / t
    return {
        "tp": m * layers * collectives * hidden * (t - 1) / t,
        "pp": m * neighbours * hidden / t,
        "dp": rounds * weights * (d - 1) / d,
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "12.2-check", "grade": true, "points": 3, "locked": true}
check("12.2", traffic_of)

# %% [markdown]
# ### How often does a stage gather its parameters?
#
# With `reshard_after_forward=True`, which is plain ZeRO 3, a pass gathers a layer's parameters if they are not there,
# and a forward pass frees them afterwards. In PyTorch's pipeline a backward pass does not free them. Take a small
# pipeline with 4 stages, 8 micro-batches and 1F1B. How many all-gathers of one layer's parameters has a step in the
# first stage, and the last?

# %% tags=["prediction"]
predicted = {"first stage": 8 + 1, "last stage": 8 + 1}

# %%
small = Model(layers=4, width=256, heads=8, vocab=512, tied=False, bias=False)
given_up = Layout(dp=2, tp=2, pp=4, zero=3, micro_batches=8)
measured = {}
for name, stage in (("first stage", 0), ("last stage", 3)):
    rehearsal = estimate.trace(partial(program, model=small, seq=128), given_up, rank=4 * stage)
    gathers = [c for c in rehearsal.calls if (c.group, c.op) == ("dp", "all_gather")]
    of_layer = max(c.payload for c in gathers)
    measured[name] = sum(c.calls for c in gathers if c.payload == of_layer)

# %%
compare(
    predicted,
    measured,
    likely={
        "One for each pass: some passes find the parameters still there.": {
            "first stage": 16,
            "last stage": 16,
        },
    },
)

# %% [markdown]
# There are sixteen passes and nine gathers. A stage keeps the parameters after a backward pass until its next forward
# pass has ended, and under 1F1B most forward passes follow a backward pass. In the first stage four warm-up forward
# passes and five backward passes gather. The formula of ZeRO's paper, which has no pipeline, gives 16;
# `estimate.traffic` counts 9.

# %% [markdown]
# ## 4. By hand, then with PyTorch: real ranks, seconds, and the search
#
# ### Eight real ranks
#
# Does the rehearsal tell the truth? The same program runs on eight real processes, 2 x 2 x 2, with real tensors,
# and each records its calls. Then each rank is traced in this process, among seven ranks that do not exist.

# %%
cube = Layout(dp=2, tp=2, pp=2, zero=3, reshard=False, micro_batches=2)
train_small = partial(program, model=small, seq=128, dtype=torch.float32)


def real_calls(rank):
    torch.set_num_threads(1)
    step = train_small(estimate.mesh_of(cube, hardware.device().type), cube)
    step()
    with Trace() as record:
        step()
    return Counter((call.op, call.bytes, call.ranks) for call in record.record().calls)


# %%
same = []
for rank, real in enumerate(launch(real_calls, 8)):
    fake = estimate.trace(train_small, cube, rank).record.calls
    same.append(real == Counter((call.op, call.bytes, call.ranks) for call in fake))
print(f"ranks whose calls have the same operations, bytes and partners: {sum(same)} of 8")

# %% [markdown]
# ### 12.5 Your own script, as one rank of 1,024
#
# `mine/train.py` (9.6) trains on the ranks that there are. Let it be traced too. If you have not written it yet,
# `mine.start(12)` gives you the course's own as chapter 9 leaves it.
#
# * `program(mesh, options, vocabulary)` returns the model, its optimizer, and a function `step(inputs, targets)` that
#   trains once and returns the loss.
# * What it knows of other ranks is in the mesh, whose dimensions are "data" and "tensor".
# * `main` trains with it as before.

# %%
from course_exercises import mine

check("12.5", mine.script(12))

# %% [markdown]
# Below, your script is traced with four layers as wide as GPT-3's. Which of `own.calls` explain each difference between
# plan and script?

# %%
sizes = {"layers": 4, "width": 12_288, "heads": 96, "kv_heads": 8}
tables = {"vocab": 51_200, "positions": 2048, "tied": False}
planned = Model(**sizes, **tables, ffn=2 * 12_288, gated=True, bias=False)
many = Layout(dp=128, tp=8, zero=3)
own = mine.as_one_rank(12, many, vocabulary=51_200, context=2048, bfloat16=True, **sizes)

norms = (2 * 4 + 1) * 12_288  # whole on each tensor rank
share = ((estimate.parameters(planned) - norms) / many.tp + norms) / many.dp
rows = {"held between two steps": (12 * share, sum(own.kept.values()))}
for group, op in [(group, op) for group in ("tp", "dp") for op in ("all_gather", "reduce_scatter")]:
    rows[f"{group} {op}"] = [
        sum(call.sent for call in calls if (call.group, call.op) == (group, op))
        for calls in (estimate.traffic(planned, many, 2048), own.calls)
    ]
for what, (by_plan, by_script) in rows.items():
    print(f"{what}: {by_plan:,.0f} bytes in the plan, {by_script:,} in the script")
print(f"most while it was built: {own.building:,} bytes")

# %% [markdown]
# In the course's own, tensor ranks also gather the logits, and share out the positions, which the plan has whole.
# Gradients are float32, not bfloat16. `initialize` makes each matrix whole, so that for a moment a rank holds the
# largest one twice.

# %% [markdown]
# ### How long it takes
#
# Now divide by rates: FLOPs by FLOP/s, bytes by bandwidth, and add a latency for each message. Of things that overlap
# the longest counts; those that wait for each other add up. At the end comes the bubble. Here is the arithmetic for
# the largest model of Megatron-LM ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), table 1): 128 layers of
# width 25,600, a trillion parameters, on 3,072 A100, with t = 8, p = 64, d = 6, batches of 3,072 sequences, and full
# recomputation.

# %%
trillion = Model(layers=128, width=25_600, heads=160, vocab=51_200, positions=2048)
megatron = Layout(dp=6, tp=8, pp=64, micro_batches=512, recompute="full")
a100, h100 = published.A100, published.H100
work = estimate.flops(trillion, 2048, megatron.sequences() * 2048, "sc21") / megatron.gpus
tensor = [c for c in estimate.traffic(trillion, megatron, 2048, 1) if c.group == "tp"]
on_links = sum(c.sent for c in tensor) / a100.intra_bandwidth
idle = estimate.bubble("1f1b", 64, 512)
print(f"at the peak of {a100.peak / 1e12:.0f} TFLOP/s: {work / a100.peak:.0f} s")
print(f"on the links inside a node, {a100.intra_bandwidth / 1e9:.0f} GB/s: {on_links:.0f} s")
print(f"with a bubble of {idle:.2f}: {(work / a100.peak + on_links) / (1 - idle):.0f} s")

# %% [markdown]
# Is the last time too short or too long, and by how much? Guess first.
#
# No program reaches the peak of a data sheet, or its bandwidth. So `estimate.step_time` has five constants, such
# as the share of the peak that large matrices reach. `estimate.calibrate` fits them to steps that somebody has
# measured: here to seven rows of the paper's tables, with models of 1.7 to 175 billion parameters. The trillion is
# not among them.

# %%
rows = published.rows("Megatron SC21")
known = estimate.calibrate(rows, a100)
time = estimate.step_time(trillion, megatron, 2048, a100, known)
measured_seconds = work / 163e12  # the paper's table 1: 163 TFLOP/s a GPU, as it counts them
print("a step of the trillion:")
print(
    f"estimated: {time.seconds:.0f} s, nine times in ten between {time.low:.0f} and {time.high:.0f} s"
)
print(f"published: {measured_seconds:.0f} s")
where_time_goes({"1 T, estimated": time.parts}, "Most of a step of the trillion goes to matrices")
plt.show()

# %% [markdown]
# *The matrices take most of the step. The bubble and the collectives of the tensor ranks come next. "Messages" are
# those between stages.*
#
# The peak alone gives half of what was measured. With links and bubble, 64 s are still too short by a factor of
# 1.6. The interval comes from rows that were left out of the fit. Without rows `step_time` uses its defaults, and the
# interval is a third wider.

# %% [markdown]
# ### 12.3 How long a step takes (3 points)
#
# This exercise combines two models. The **roofline** says that a kernel takes as long as its FLOPs or as its bytes,
# whichever is longer ([Williams et al. 2009](https://doi.org/10.1145/1498765.1498785)). **Alpha-beta** says that a
# message takes a latency plus its bytes divided by a bandwidth ([Hockney
# 1994](https://doi.org/10.1016/S0167-8191%2806%2980021-9)). Work at the same time takes the maximum, and work that
# waits for other work takes the sum. This exercise gives every GPU one link between nodes; `estimate.step_time` also
# knows that a ring of whole nodes uses all of their network cards.


# %% nbgrader={"grade_id": "12.3", "solution": true}
def step_time_of(
    kernels: list[tuple[float, float]],
    calls: list[Call],
    layout: Layout,
    bubble: float,
    hardware: Hardware,
) -> float:
    """Returns the seconds of a rank's step.

    `kernels` are (FLOPs, bytes that it reads and writes), one after the other. A `Call` has a group
    ("tp", "cp", "dp", "pp"), an op, a payload in bytes, and how many `calls` of it there are. A ring of n
    ranks takes n - 1 rounds for "all_gather" and "reduce_scatter" and 2 (n - 1) for "all_reduce";
    a round takes a latency and payload / n over a bandwidth. A "send" is one round with all of its
    payload. A group lies inside a node if its size times those of the groups before it in
    `layout.order` (innermost first) is at most `hardware.node`. The calls of "dp" go on beside all
    the rest; kernels and the other calls wait for each other, and fill 1 - `bubble` of the pipeline's time.
    """
    ### BEGIN SOLUTION
    waiting, beside = 0.0, 0.0
    for flops, moved in kernels:
        waiting += max(flops / hardware.peak, moved / hardware.hbm_bandwidth)
    for call in calls:
        n, reach = getattr(layout, call.group), 1
        for name in layout.order[: layout.order.index(call.group) + 1]:
            reach *= getattr(layout, name)
        alpha, beta = hardware.intra_latency, 1 / hardware.intra_bandwidth
        if reach > hardware.node:
            alpha, beta = hardware.inter_latency, 1 / hardware.inter_bandwidth
        rounds, piece = (2 if call.op == "all_reduce" else 1) * (n - 1), call.payload / n
        if call.op == "send":
            rounds, piece = 1, call.payload
        seconds = call.calls * rounds * (alpha + beta * piece)
        if call.group == "dp":
            beside += seconds
        else:
            waiting += seconds
    return max(waiting / (1 - bubble), beside)
    ### END SOLUTION


# %% nbgrader={"grade_id": "12.3-check", "grade": true, "points": 3, "locked": true}
check("12.3", step_time_of)

# %% [markdown]
# ### Four published choices
#
# `estimate.search` gets a model, GPUs and a batch. It tries all sizes that multiply to the number of GPUs, with
# schedules, ZeRO, recomputations and micro-batches, and sorts the legal ones by seconds. Does it find what people
# chose?
#
# * Megatron's trillion, as above.
# * Llama 3 405B ([Llama team 2024](https://arxiv.org/abs/2407.21783), table 4): 8,192 H100 with 8,192 tokens of
#   context, and 16,384 H100 with 131,072 tokens and 16 context ranks.
# * torchtitan's Llama 3 8B on 8 H100: FSDP alone, two sequences a rank.
#
# Guess first: for which of the four is the published choice among the ten quickest?

# %%
llama = published.rows("Llama 3")[0].layout
titan = published.rows("torchtitan")[0]
long_context = replace(llama, dp=8, cp=16, micro_batches=16)
chosen = {
    "Megatron 1 T": (trillion, megatron, 2048, a100, known),
    "Llama 3 405B, 8k": (published.LLAMA["405B"], llama, 8192, h100, None),
    "Llama 3 405B, 131k": (published.LLAMA["405B"], long_context, 131_072, h100, None),
    "torchtitan 8B": (titan.model, titan.layout, titan.seq, titan.hardware, None),
}
plans = {}
print("quicker than the published choice:")
for name, (model, layout, seq, gpus, constants) in chosen.items():
    published_seconds = estimate.step_time(model, layout, seq, gpus, constants).seconds
    question = (model, layout.gpus, layout.sequences(), seq, gpus, constants)
    plans[name], refused = estimate.search(*question, keep=10**6)
    faster = sum(plan.time.seconds < 0.999 * published_seconds for plan in plans[name])
    more = published_seconds / plans[name][0].time.seconds - 1
    print(f"{name}: {faster} of {len(plans[name])} plans, the best by {max(more, 0):.0%}")

# %% [markdown]
# Of some 8,000 plans for 405B at 8k, four are quicker than the published one. With long context there are two. None
# is quicker by more than the error of the estimate. For 8B and the trillion, more than ten are. For 8B, the quickest
# plans keep all matrix products; torchtitan recomputes every second one.
#
# For the trillion, a third of the plans are quicker. They use what was published after 2021: selective recomputation
# with sequence parallelism (2022), ZeRO with a pipeline, zero bubble (2024). Most of the gap has one reason: they do
# not run every forward pass twice.
#
# Four runs prove little, since a search may agree with them by luck. Use a search to find the ten layouts that are
# worth an hour on the cluster.

# %% [markdown]
# ### 12.4 Search (4 points)
#
# Now answer the question of the chapter for any number of GPUs, model and batch. Your function gets a **judge**, a
# function that says what a layout needs. The judge computes for any layout, even for one that splits a head in two:
# you have to decide what is legal. The check draws clusters, and accepts a plan whose **regret** is at most 10 %: the
# share by which its step is longer than that of the best plan.


# %% nbgrader={"grade_id": "12.4", "solution": true}
def search(
    model: Model,
    gpus: int,
    batch: int,
    seq: int,
    hardware: Hardware,
    judge: Callable[[Layout], tuple[float, float]],
) -> Layout:
    """Returns the fastest legal layout; of several that are equally fast, any one.

    `judge(layout)` gives (bytes of the fullest rank, seconds of a step of `batch` sequences). You
    choose dp, tp, pp, zero (0 to 3), micro_batch, micro_batches and recompute; the rest of
    `Layout` stays as it is. Legal: dp tp pp = gpus; dp micro_batch micro_batches = batch; tp divides
    the heads and the sequence, pp the layers; zero 3 with pp = 1 only; the bytes are at most
    `hardware.hbm_bytes`. Raises ValueError, with a sentence, where no layout is legal.
    """
    ### BEGIN SOLUTION
    best, fastest = None, float("inf")
    for tp in range(1, gpus + 1):
        for pp in range(1, gpus // tp + 1):
            dp, left = divmod(gpus, tp * pp)
            if left or batch % dp or model.heads % tp or seq % tp or model.layers % pp:
                continue
            for micro_batch in range(1, batch // dp + 1):
                micro_batches, left = divmod(batch // dp, micro_batch)
                for zero in range(0 if left else 4 if pp == 1 else 3):
                    for recompute in ("none", "selective", "full"):
                        sizes = {"dp": dp, "tp": tp, "pp": pp, "zero": zero, "recompute": recompute}
                        layout = Layout(
                            **sizes, micro_batch=micro_batch, micro_batches=micro_batches
                        )
                        held, seconds = judge(layout)
                        if held <= hardware.hbm_bytes and seconds < fastest:
                            best, fastest = layout, seconds
    if best is None:
        raise ValueError(f"No layout of {gpus} GPUs is legal and fits.")
    return best
    ### END SOLUTION


# %% nbgrader={"grade_id": "12.4-check", "grade": true, "points": 4, "locked": true}
check("12.4", search)

# %% [markdown]
# ## 5. Break it: plans that are right on paper
#
# ### It fits on paper
#
# The formula of section 3 says that a layer keeps $34\,s\,b\,W/t$ bytes, and 32 without dropout masks.

# %%
on_paper = estimate.memory(gpt, replace(split, recompute="selective"), 2048, stage=0)
ratio = traced.held["activations"] / on_paper["activations"]
print(f"activations by the formula: {on_paper['activations'] / 1e9:.1f} GB")
print(
    f"activations in the trace: {traced.held['activations'] / 1e9:.0f} GB, {ratio:.1f} times as much"
)

# %% [markdown]
# The small model shows why: per token and column of the width, what is shared out halves each time the tensor ranks
# double.

# %%
sizes, kept = (2, 4, 8), []
deep, seq = replace(small, layers=16), 1024
for t in sizes:
    layout = Layout(dp=2, tp=t, pp=4, zero=3, reshard=False, micro_batches=4)
    rehearsal = estimate.trace(partial(program, model=deep, seq=seq), layout, rank=0)
    layers = deep.layers // layout.pp * 4  # of four micro-batches in flight
    kept.append(rehearsal.held["activations"] / (layers * seq * deep.width))
    print(f"{t} tensor ranks: {34 / t:5.2f} bytes a token and column on paper", end=", ")
    print(f"{kept[-1] * t / 34:.1f} times as much in the trace")
shared = (kept[0] - kept[2]) / (1 / sizes[0] - 1 / sizes[2])
whole = kept[0] - shared / sizes[0]
print(
    f"about {round(shared, -1):.0f} bytes are shared out, and {whole:.0f} are whole on every rank"
)

# %% [markdown]
# Four bytes a token and column are whole on each rank: the inputs of attention and of the MLP, 2 bytes each. They
# were gathered for the first matrix and are kept for its gradient. Megatron-LM frees them and gathers a second time
# (Korthikanti et al. 2022, section 4.2.2); `parallelize_module` keeps them. And more than 34 bytes are shared out,
# since no kernels are fused here.
#
# The formula can also be too large: sequence parallelism shares out the input of a recomputed layer. Outside the
# layers, a loss holds its logits several times, and the allocator takes more than tensors need; `estimate.memory` has
# both.
#
# ### The stage that nobody looked at
#
# Llama 3's layout for 8k context has 16 stages under interleaved 1F1B: the first and the last have 7 layers, the
# others 8. Later stages have less in flight. Which stage, counted from 0, is the fullest?

# %% tags=["prediction"]
predicted = {"fullest stage": 1}

# %%
stages = [estimate.memory(published.LLAMA["405B"], llama, 8192, stage) for stage in range(16)]
fullest = max(range(16), key=lambda stage: stages[stage]["total"])

# %%
compare(
    predicted,
    {"fullest stage": fullest},
    likely={
        "It has the most in flight, but a layer less.": {"fullest stage": 0},
        "It has the logits, but the least in flight.": {"fullest stage": 15},
    },
)

# %%
bars = {f"stage {stage}": stages[stage] for stage in (0, 1, 7, 15)}
fit(bars, h100.hbm_bytes, "The second of 16 stages is the fullest")
plt.show()
room = [h100.hbm_bytes - h["total"] + h["loss"] + h["allocator"] for h in bars.values()]
print("GB that each is short of:", *(f"{-left / 1e9:.0f}" for left in room))

# %% [markdown]
# *Stage 1 needs most: it has a layer more than stage 0, and more micro-batches in flight than stage 7. No stage fits,
# not even with a fused loss (dotted) and without what the allocator holds in reserve. The thin line is model states.*
#
# If you make room for stage 0 alone, stage 1 is still 13 GB short. The published run fitted, because its authors
# sharded gradients and freed tensors early (section 3.3.2 of the paper).

# %% [markdown]
# ### A tensor group that leaves the machine
#
# Sixteen tensor ranks need half the memory of eight. But a node has eight GPUs. The third layout below has eight
# tensor ranks again, in the wrong order: neighbours of the data group share a node, so each tensor rank is in a node of
# its own.

# %%
on_sixteen = replace(llama, tp=16, dp=32, micro_batches=64)
turned = replace(llama, order=("dp", "cp", "pp", "tp"))
steps = {}
for name, layout in {"8": llama, "16": on_sixteen, "8, far apart": turned}.items():
    step = estimate.step_time(published.LLAMA["405B"], layout, 8192, h100)
    steps[f"tensor {name}"] = step.parts
    share = step.parts["tensor"] / step.seconds
    print(f"tensor ranks {name}: {step.seconds:.0f} s, of which their collectives {share:.0%}")
where_time_goes(steps, "Tensor ranks in several nodes wait for their collectives")
plt.show()

# %% [markdown]
# *The dark bars, the matrices, are equally long. The orange ones grow: the collectives that every layer waits for.*
#
# ### Bug hunt: MFU
#
# **MFU**, model FLOPs utilisation, is the share of the peak that a run reaches, counting only the operations that the
# model needs. What is wrong in this snippet?


# %%
def mfu(model, seq, tokens_per_second):
    peak = 1979e12  # H100, from the data sheet
    per_token = 6 * estimate.parameters(model) + 12 * model.layers * seq * model.width
    return per_token * tokens_per_second / peak


print(f"{mfu(titan.model, 8192, 6667):.1%}")

# %% [markdown]
# Two things are wrong. The 1,979 TFLOP/s of the data sheet are *with sparsity*, which training does not use; without
# it they are 989. And the number of operations is a convention. torchtitan says 39 % for this run (8B on 8 GPUs,
# 6,667 tokens a second on each GPU).

# %%
for convention in ("6n+attention", "torchtitan", "causal"):
    needed = estimate.flops(titan.model, 8192, 1, convention) * 6667
    print(f"{convention}: {needed / h100.peak:.1%}")

# %% [markdown]
# The first convention counts the embedding as if it multiplied, and the second does not. The third counts only the
# half of attention that a causal mask leaves. For this run the first is 12 % larger than the third. How many times as
# large as the third is it for Llama 3 405B with 131,072 tokens of context?

# %% tags=["prediction"]
matrices, scores = 6 * 405.85e9, 12 * 126 * 16_384  # FLOPs of a token; these times the context
predicted = {
    "factor at 131k": round((matrices + scores * 131_072) / (matrices + scores * 131_072 / 2), 2)
}

# %%
measured = {}
for name, seq in (("8k", 8192), ("131k", 131_072)):
    full, half = (
        estimate.flops(published.LLAMA["405B"], seq, 1, how) for how in ("6n+attention", "causal")
    )
    measured[f"factor at {name}"] = round(full / half, 2)
print(f"for comparison, the factor with a context of 8k:\n{measured['factor at 8k']}")

# %%
compare(
    predicted,
    measured,
    likely={"As at 8k: the scores grow with the context.": {"factor at 131k": 1.04}},
)

# %% [markdown]
# With a long context, attention is no small correction. Compare tokens a second, or MFUs that were counted alike.

# %% [markdown]
# ## 6. Exercises of this chapter
#
# | exercise | points | in section |
# |---|--:|---|
# | 12.1 What a rank holds | 3 | 3 |
# | 12.2 What a rank sends | 3 | 3 |
# | 12.3 How long a step takes | 3 | 4 |
# | 12.4 Search | 4 | 4 |
# | 12.5 Your own script, as one rank of 1,024 | | 4 |

# %% [markdown]
# ## 7. See it: your model, your GPUs
#
# The explorer searches for the quickest plan on nodes of eight H100, with batches of four million tokens. Try three
# things:
#
# * 405B on 512 GPUs, with 8k and with 128k of context. How does the plan change, and what limits it?
# * 70B on 512 GPUs, with a slower and a faster network. Which parts grow, and what does the search change?
# * 70B on 8 GPUs. What is missing?

# %%
Explorer(
    figures.your_plan,
    model=["8B", "70B", "405B"],
    gpus=["8", "64", "512", "2048"],
    context=["8k", "32k", "128k"],
    network=["100 Gbit/s", "400 Gbit/s", "1600 Gbit/s"],
)

# %% [markdown]
# *At the start: 8B on 8 GPUs. Above, the fullest rank against the 79 GiB that there are; below, the seconds of a step
# by what they are spent on. "Temporary" is what is held for a moment, like gathered parameters, or outside the layers,
# like the logits. All is calculated, not measured.*
#
# Both halves of this chapter are commands too: `trace` for a file with a function `program(mesh, layout)`, and `plan`,
# which searches where you give no layout.
#
# ```
# python -m course_utils trace my_program.py --ranks 16384 --layout tp=8,pp=16,dp=128
# python -m course_utils plan --model 70B --gpus 512 --seq 8192 --batch 512 --layout tp=8,pp=8
# ```

# %% [markdown]
# ## 8. On a cluster: measure little, then plan
#
# Replace the defaults by what *your* cluster does. Each takes minutes:
#
# 1. **The links.** Run nccl-tests' `all_reduce_perf` on one node: its *busbw* is `intra_bandwidth`. Run it on two
#    nodes with *one GPU each*: its busbw is `inter_bandwidth`, the rate of one network card. (If you ran it with all
#    GPUs, divide busbw by the number of GPUs in a node.) A small all-reduce between two GPUs takes two rounds: half
#    of its time is the latency.
# 2. **A few steps.** Train three or four layouts on 1, 2 and 4 nodes, with few layers. Each is a `Row` for `calibrate`:
#    model, layout, sequence length, seconds.
# 3. **The memory.** Trace the real program with the layout that you want. Run that rank's stage on one GPU, and
#    compare with `torch.cuda.max_memory_allocated()`. The allocator's snapshot shows memory by time, and which line
#    took it: `torch.cuda.memory._record_memory_history()` before, `_dump_snapshot("step.pickle")` after, for
#    [memory_viz](https://pytorch.org/memory_viz). On CPUs chapter 8's `Meter` shows parameters and gradients.
# 4. **The slow rank.** Is a step longer than the estimate's interval? Profile all ranks, and sort them by their
#    seconds in collectives. The one with the fewest keeps the others waiting (`03_ddp_further`).
# 5. **The plan.** Search with the calibration, look at what limits the first ten plans, and try two or three.
#
# How much does a calibration narrow the interval for the trillion? Of Megatron's rows, the smallest model comes
# first: its layout splits neither tensors nor layers.

# %%
for count in (0, 1, 3, 7):
    constants = estimate.calibrate(rows[:count], a100) if count else None
    time = estimate.step_time(trillion, megatron, 2048, a100, constants)
    print(f"with {count} of the rows: between {time.low:.0f} and {time.high:.0f} s")
print(f"published: {measured_seconds:.0f} s")

# %% [markdown]
# One row makes the estimate worse, and the interval even wider: the row says nothing about tensor ranks or stages,
# and with only one row, none is left to test the fit. Calibrate with layouts that use what you plan to use. No plan
# includes slow nodes, a network that others share, or failures (chapter 9).

# %% [markdown]
# ## 9. Remember
#
# 1. Count first: 16 or 18 bytes a parameter, shared out by t, p and ZeRO, and $34\,s\,b\,W/t$ for each layer and
#    micro-batch in flight, which d does not make smaller.
# 2. A tensor rank sends in every layer, a stage once a micro-batch, a data rank once a step. Give tensor ranks the
#    fastest links.
# 3. Trace the real program. It keeps and gathers what no formula says; one rank of 16,384 fits on a laptop.
# 4. The time of a step adds up what waits, and takes the longest of what overlaps. Calibrate its constants, and state
#    the interval.
# 5. Look at every stage. Ask of each MFU how it was counted, and of which peak it is a share.
#
# **Sources**
#
# * The papers that are linked above.
# * A. Chowdhery et al., *PaLM*, 2022, [arXiv 2204.02311](https://arxiv.org/abs/2204.02311): appendix B, MFU.
# * [torchtitan](https://github.com/pytorch/torchtitan): `benchmarks`.
# * PyTorch: [snapshots of the allocator](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html).
