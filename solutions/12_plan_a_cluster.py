# %% [markdown]
# # 12. Plan a cluster: will it fit, how long does it take, what limits it
#
# "I have so many GPUs of this kind and a model of that size. How do I split it?" People rent the GPUs and try. An
# hour of a thousand of them is a thousand GPU-hours, and much of what they find out is arithmetic.
#
# You know all of it: each chapter has counted bytes and operations. Here they come together in
# `course_planner`. First you predict what one rank holds, sends and computes. Then you run the real
# program as that rank, on this machine, among a thousand ranks that are not there. Then come the seconds. At the
# end you put the question to three published runs, and to your own model.

# %% tags=["nbval-ignore-output"]
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import torch
from torch import nn

import course_planner as estimate
from course_planner import Call, Hardware, Layout, Model, published
from course_planner.figures import ch12 as figures
from course_planner.figures.plans import fit, where_time_goes
from course_utils import hardware, plots

hardware.report()

# %% [markdown]
# ## 1. The factory: a plan before anything is rented
#
# A company will build a large product, and the site is not rented yet. The **planner** has a sheet of paper and three
# questions. Is there floor space in every hall for the material that lies there at the worst moment? How long
# does a day's work take? And what makes it so long: the machines, the conveyors, the road, or waiting?
#
# The planner knows one more trick. A single hall can be rehearsed, with a crew and empty boxes. Trucks leave
# full of nothing and come back full of nothing, but the crew sees every box that it has to put somewhere.

# %%
figures.factory()
plt.show()

# %% [markdown]
# *Two lines of three buildings with two halls each. Conveyors are fast, roads are slow, and the lines
# compare what they have learned once a day.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | product | `Model` | layers, their width, heads, vocabulary |
# | site | `Hardware` | FLOP/s, memory, GPUs in a machine, links inside and between |
# | the planner's sheet | `Layout` | how many ranks split what: tensor, pipeline, data, context |
# | floor space of a hall | memory of a rank | parameters, gradients, optimizer, activations, and what is held for a moment |
# | conveyor, road | `intra_` and `inter_bandwidth` | NVLink in a **node** (a machine), the network between nodes |
# | rehearsal with empty boxes | **trace** | the real program, with tensors that have shapes only |

# %% [markdown]
# ## 2. The smallest real run: one rank of 16,384
#
# PyTorch has both halves of the rehearsal. With the **fake process group** a process is one rank of as many as
# it likes, and every collective is over at once. A **fake tensor** has a shape and no memory. `estimate.trace` puts
# both under a program and notes what passes. The program gets a mesh and a layout, and returns its step.


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
# Nobody has 16,384 GPUs here, and nothing was sent. But `fully_shard` believed it, and asked for what it needs: all
# parameters before forward, and their gradients' sum after backward. It kept the parameters, since a module
# that nothing else wraps is the **root** (chapter 8).
#
# One thing no formula would have told: the parameters have 2,147,647,488 bytes, and half as much again is gathered.
# `fully_shard` shares out rows, and the second matrix has 8,192: half of the 16,384 ranks hold one, the others padding.

# %% [markdown]
# ## 3. Predict, then measure: one rank of 1,024
#
# A model of the size of GPT-3: 96 layers of width W = 12,288, a vocabulary of V = 51,200. It has 175 billion
# parameters. The cluster: t = 8 tensor ranks, p = 16 stages, d = 8 data ranks with FSDP, 1,024 in all. A step has m = 16
# micro-batches of one sequence of s = 2,048 tokens.

# %%
gpt = Model(layers=96, width=12_288, heads=96, vocab=51_200, tied=False, bias=False)
split = Layout(dp=8, tp=8, pp=16, zero=3, reshard=False, micro_batches=16)
print(f"{estimate.parameters(gpt):,} parameters on {split.gpus:,} ranks")

# %% [markdown]
# **What it holds.** In mixed precision a parameter has 2 bytes, its gradient 2, and Adam 12: a float32 copy
# and two averages ([Rajbhandari et al. 2019](https://arxiv.org/abs/1910.02054), section 3.1). A layer has $12 W^2$ of
# them, an embedding $V W$. Stages have layers of their own, tensor ranks share out every matrix, and ZeRO shares
# out the rest among the data ranks: stage 1 the optimizer, 2 the gradients too, 3 the parameters too.
#
# Activations are another matter. For a micro-batch of $b$ sequences a layer keeps
#
# $$\frac{s\,b\,(34\,W + 5\,a\,s)}{t} \qquad \frac{34\,s\,b\,W}{t} \qquad 2\,s\,b\,W$$
#
# bytes without recomputation, with **selective** recomputation (attention's scores of $a$ heads are computed again, as flash attention
# does), and with **full** recomputation ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), table 2). Under 1F1B
# stage r of p has min(m, p - r) micro-batches in flight (chapter 5), and keeps all of theirs.
#
# **What it sends**, of $s\,b\,W$ numbers in 2 bytes: with sequence parallelism (chapter 6) a layer has two all-gathers and two
# reduce-scatters in each pass; the embedding has one of each more. A stage sends its part of one
# micro-batch's numbers at a time. FSDP gathers the parameters and scatters the gradients. A ring of n ranks sends (n - 1) / n of
# each.
#
# **What it computes.** A matrix costs a token 2 operations a weight forward and 4 backward. Attention's two products cost
# $4\,s\,W$ forward. Backward they cost twice that, and flash attention first computes the scores again: $2\,s\,W$ more.
#
# **Predict** for a rank of the first stage, and before you calculate: to whom does it send most, to the 7 tensor
# ranks, to the next stage, or to the 7 data ranks that hold the same layers?

# %% tags=["prediction"]
W, V, s, m, t, d = 12_288, 51_200, 2048, 16, 8, 8
held_by_tensor_rank = (6 * 12 * W**2 + V * W) / t  # 96 / 16 layers, and the embedding
predicted = {
    "parameters, MB": round(2 * held_by_tensor_rank / d / 1e6),
    "GB to tensor ranks": round(m * (6 * 8 + 2) * 2 * s * W * (t - 1) / t / 1e9, 1),
    "GB to the next stage": round(m * 2 * s * W / t / 1e9, 1),
    "GB to data ranks": round(2 * 2 * held_by_tensor_rank * (d - 1) / d / 1e9, 1),
    "TFLOP": round(m * s * 6 * (72 * W**2 + 14 * s * W) / t / 1e12),
}

# %% [markdown]
# Now the program. Attention, an MLP, a layer, and the part of the model that a stage has: nothing in it knows of ranks.


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
# Two plans for `parallelize_module` (chapter 6), then FSDP around each layer (chapter 8).

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
# A stage of PyTorch's pipelining is told what will come and go. Where no other stage is there to tell it,
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
# It is an ordinary training program, and here it is rank 0 of 1,024. The trace takes a few seconds.

# %%
from course_utils.lesson.predictions import compare

traced = estimate.trace(partial(program, model=gpt, seq=2048), split, rank=0)
sent = {
    group: sum(c.sent for c in traced.calls if c.group == group) for group in ("tp", "pp", "dp")
}
measured = {
    "parameters, MB": round(traced.held["parameters"] / 1e6),
    "GB to tensor ranks": round(sent["tp"] / 1e9, 1),
    "GB to the next stage": round(sent["pp"] / 1e9, 1),
    "GB to data ranks": round(sent["dp"] / 1e9, 1),
    "TFLOP": round(traced.flops / 1e12),
}
scores_once = round(m * s * 6 * (72 * W**2 + 12 * s * W) / t / 1e12)
likely = {
    "As if backward kept the scores: flash attention computes them again.": {"TFLOP": scores_once}
}
compare(predicted, measured, likely)

# %% [markdown]
# The 175 billion parameters are a third of a gigabyte for this rank, and what it sends to its tensor ranks is
# seven times what it sends to its data ranks and 350 times what the next stage gets. That is all one needs to
# know about who sits on the fast links. `estimate.traffic` has the same formulas; call by call they are what the
# trace saw, to the byte.

# %%
closed = estimate.traffic(gpt, split, 2048, stage=0)
seen = {(c.group, c.op, c.payload, c.when): c.calls for c in traced.calls}
print(all(seen[c.group, c.op, c.payload, c.when] == c.calls for c in closed))

# %% [markdown]
# ### How often does a stage gather its parameters?
#
# `reshard_after_forward=True` is the plain ZeRO 3: a layer's parameters are gathered for a pass and given up. Now a small
# pipeline, 4 stages and 8 micro-batches, 1F1B. **Predict** how many all-gathers of one layer's parameters a step has.

# %% tags=["prediction"]
predicted = {"first stage": 8 + 1, "last stage": 8 + 1}

# %%
small = Model(layers=8, width=256, heads=8, vocab=512, tied=False, bias=False)
given_up = Layout(dp=2, tp=2, pp=4, zero=3, micro_batches=8)
measured = {}
for name, stage in (("first stage", 0), ("last stage", 3)):
    rehearsal = estimate.trace(partial(program, model=small, seq=128), given_up, rank=4 * stage)
    gathers = [c for c in rehearsal.calls if (c.group, c.op) == ("dp", "all_gather")]
    of_layers = max(c.payload for c in gathers)
    measured[name] = sum(c.calls for c in gathers if c.payload == of_layers) // 2  # two layers
each_pass = {name: 2 * 8 for name in measured}
compare(predicted, measured, {"One for every pass: not all of them find them gone.": each_pass})

# %% [markdown]
# Sixteen passes, nine gathers. A stage keeps the parameters after a backward pass until its next forward pass
# has ended, and under 1F1B a forward pass mostly follows a backward one. ZeRO's paper knows no pipeline, and its formula
# says 16. The program says 9, and that is how `estimate.traffic` came to count it.

# %% [markdown]
# ## 4. By hand, then with PyTorch: real ranks, seconds, and the search
#
# ### Eight real ranks
#
# Is a rehearsal worth anything? Here is the same program on eight real processes, 2 x 2 x 2, with real tensors.
# Each of them records its calls; then each is traced, in this process, among seven ranks that are not there.

# %%
from collections import Counter

from course_utils.launch import launch
from course_utils.trace import Trace

cube = Layout(dp=2, tp=2, pp=2, zero=3, reshard=False, micro_batches=4)
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
print("the same calls with the same bytes and ranks:", same)

# %% [markdown]
# ### How long it takes
#
# Now divide by rates. FLOPs by FLOP/s, bytes by bandwidth, and a latency for each message. What happens at
# the same time is a maximum, what waits for each other is a sum, and the bubble comes on top. By hand, for the largest model of
# Megatron-LM ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), table 1): 128 layers of width 25,600, a trillion
# parameters, on 3,072 A100; t = 8, p = 64, d = 6, batches of 3,072 sequences, everything recomputed.

# %%
trillion = Model(layers=128, width=25_600, heads=160, vocab=51_200, positions=2048)
megatron = Layout(dp=6, tp=8, pp=64, micro_batches=512, recompute="full")
a100, h100 = published.A100, published.H100
work = estimate.flops(trillion, 2048, megatron.sequences() * 2048, "sc21") / megatron.gpus
tensor = [c for c in estimate.traffic(trillion, megatron, 2048, 1) if c.group == "tp"]
conveyor = sum(c.sent for c in tensor) / a100.intra_bandwidth
idle = estimate.bubble("1f1b", 64, 512)
print(f"at the peak of {a100.peak / 1e12:.0f} TFLOP/s: {work / a100.peak:.0f} s")
print(f"on the links inside a machine: {conveyor:.0f} s")
print(f"with a bubble of {idle:.2f}: {(work / a100.peak + conveyor) / (1 - idle):.0f} s")

# %% [markdown]
# **Predict** whether that is too short or too long, and by how much.
#
# No program reaches the peak of a data sheet, or the bandwidth. So `estimate.step_time` has a dozen constants: the share of the
# peak that large matrices reach, the size at which they reach half of it, shares of the bandwidths, the time that the CPU needs to
# launch a layer. `estimate.calibrate` fits them to steps that somebody has measured. Here: seven rows of
# the paper's tables, 1.7 to 175 billion parameters. The trillion is not among them.

# %%
rows = published.rows("Megatron SC21")
known = estimate.calibrate(rows, a100)
time = estimate.step_time(trillion, megatron, 2048, a100, known)
measured_seconds = work / 163e12  # the paper's table 1: 163 TFLOP/s a GPU, as it counts them
print(
    f"largest model of the {len(rows)} rows: {max(map(estimate.parameters, (r.model for r in rows))):,}"
)
print(
    f"estimated: {time.seconds:.0f} s, nine times in ten between {time.low:.0f} and {time.high:.0f} s"
)
print(f"published: {measured_seconds:.0f} s; inside: {time.low < measured_seconds < time.high}")
where_time_goes({"1 T, estimated": time.parts}, "Megatron's trillion on 3,072 A100")
plt.show()

# %% [markdown]
# *Most of it is matrices. Then come the bubble and the tensor ranks' messages. What the data ranks send hardly
# shows.*
#
# The peak alone gives half of what was measured. With conveyor and bubble, the 64 s are still too short, by a factor of 1.6. Without measured rows the defaults are used, and the interval is honest about it: it
# is five times as wide.
#
# ### Three published choices
#
# Now the other direction. `estimate.search` is told a model, GPUs and a batch, and tries all sizes that multiply
# to the GPUs, all schedules, recomputations and micro-batches. It refuses what is not legal or needs more than nine tenths of the
# memory, and sorts the rest by seconds. Does it find what people chose?
#
# * Megatron's trillion, as above.
# * Llama 3 405B ([Llama team 2024](https://arxiv.org/abs/2407.21783), table 4): 8,192 H100 with 8,192 tokens of
#   context, t = 8, p = 16, d = 64; and 16,384 H100 with 131,072 tokens, t = 8, c = 16 context ranks, p = 16, d = 8.
# * torchtitan's table of Llama 3 8B on 8 H100: FSDP alone, two sequences a rank.
#
# **Predict**, before you run it: for which of the four is the published choice among the ten best? Most people say: for the newest,
# they had the best engineers.

# %%
llama = published.rows("Llama 3")[0].layout
titan = published.rows("torchtitan")[0]
long_context = replace(llama, dp=8, cp=16, micro_batches=16)
large_memory = replace(h100, hbm_bytes=96 * 10**9)  # torchtitan's H100 have 96 GB
chosen = {
    "Megatron 1 T": (trillion, megatron, 2048, a100, known),
    "Llama 3 405B, 8k": (published.LLAMA["405B"], llama, 8192, h100, None),
    "Llama 3 405B, 131k": (published.LLAMA["405B"], long_context, 131_072, h100, None),
    "torchtitan 8B": (titan.model, titan.layout, titan.seq, large_memory, None),
}
plans = {}
for name, (model, layout, seq, gpus, constants) in chosen.items():
    own = estimate.step_time(model, layout, seq, gpus, constants).seconds
    question = (model, layout.gpus, layout.sequences(), seq, gpus, constants)
    plans[name], refused = estimate.search(*question, keep=10**6)
    faster = sum(plan.time.seconds < 0.999 * own for plan in plans[name])
    more = own / plans[name][0].time.seconds - 1
    print(
        f"{name}: {faster} of {len(plans[name])} plans are quicker, the best by {max(more, 0):.0%}"
    )

# %%
for name, found in plans.items():
    model, layout, seq, gpus, _ = chosen[name]
    held = [estimate.memory(model, layout, seq, stage)["total"] for stage in range(layout.pp)]
    full = max(held) / gpus.hbm_bytes
    print(f"{name}, published: stage {held.index(max(held))} fills {full:.0%} of a GPU")
    print(f"    published  {estimate.described(layout)}")
    print(f"    found      {estimate.described(found[0].layout)}")

# %% [markdown]
# At 8k 3 of some 2,700 are quicker, by no more than the estimate's own error; all of them keep t = 8. With long
# context none is quicker. For 8B on 8 GPUs it is FSDP without anything else.
#
# But three of the four fill more than a GPU, by the formula, so the search itself refuses them; and they ran. The fullest
# stage of Llama's pipelines is the second: it has a layer more than the first. The paper's section 3.3.2 tells how its
# authors changed the schedule and freed each stage's inputs and outputs early, to save just that memory. The formula is for a
# GPT's layer, and knows nothing of it.
#
# And the trillion? Hundreds of plans are quicker, by far. They use what came later: selective recomputation with
# sequence parallelism (2022), ZeRO beside a pipeline, zero bubble (2024). So ask again with what there was in 2021.

# %%
old = [
    plan
    for plan in plans["Megatron 1 T"]
    if plan.layout.recompute == "full"
    and plan.layout.zero < 3
    and plan.layout.cp == 1
    and plan.layout.schedule in ("1f1b", "interleaved")
]
own = time.seconds
quicker = [plan for plan in old if plan.time.seconds < 0.999 * own]
print(f"with the means of 2021: {len(quicker)} of {len(old)} plans are quicker")
print(f"the best by {own / old[0].time.seconds - 1:.0%}: {estimate.described(old[0].layout)}")

# %% [markdown]
# What is left is mostly interleaving, with its smaller bubble. Most of the gap between 2021 and now is one thing: not
# to compute every layer twice.
#
# These rows prove little by themselves. A search that agrees with three famous runs may do so by luck, and where
# it fails we know too: runs that stall for reasons which no layout shows. Use it to find the ten layouts that are worth an
# hour on the cluster, not the one.

# %% [markdown]
# ## 5. Break it: plans that are right on paper
#
# ### It fits on paper
#
# Section 3's formula says what a layer keeps: $34\,s\,b\,W/t$. The trace has seen what this program keeps.

# %%
on_paper = estimate.memory(gpt, replace(split, recompute="selective"), 2048, stage=0)
ratio = traced.held["activations"] / on_paper["activations"]
print(f"activations by the formula: {on_paper['activations'] / 1e9:.1f} GB")
print(
    f"activations in the trace: {traced.held['activations'] / 1e9:.0f} GB, {ratio:.1f} times as much"
)

# %% [markdown]
# Nothing is broken. To see where it comes from, trace the small model with more and more tensor ranks. What is
# shared out halves; what is not, stays.

# %%
sizes, kept = (2, 4, 8), []
deep, seq = replace(small, layers=16), 1024
for t in sizes:
    layout = Layout(dp=2, tp=t, pp=4, zero=3, reshard=False, micro_batches=4)
    rehearsal = estimate.trace(partial(program, model=deep, seq=seq), layout, rank=0)
    layers = deep.layers // layout.pp * 4  # of four micro-batches in flight
    kept.append(rehearsal.held["activations"] / (layers * seq * deep.width))
shared = (kept[0] - kept[2]) / (1 / sizes[0] - 1 / sizes[2])
whole = kept[0] - shared / sizes[0]
for t, amount in zip(sizes, kept):
    print(f"{t} tensor ranks: {34 / t:5.2f} bytes a token and column on paper", end=", ")
    print(f"{amount * t / 34:.1f} times as much in the trace")
print(f"as if some {round(shared, -1):.0f} were shared out, and {whole:.0f} whole on every rank")

# %% [markdown]
# Four bytes are whole on each rank: the input of attention and that of the MLP, in 2 bytes each, which were gathered for
# the first matrix and are kept for its gradient. Megatron-LM throws them away and gathers a second time (Korthikanti et
# al. 2022, section 4.2.2). `parallelize_module` keeps them. And what is shared out is more than 34, since nothing
# here is fused. With eight tensor ranks that makes the difference between a plan and an out-of-memory.
# The trace finds it here. On the cluster it is found after an hour in the queue.
#
# It goes the other way too. torchtitan trained 405B on 512 GPUs of 96 GB and printed 82.5 GiB.

# %%
row = next(row for row in published.rows("torchtitan") if row.name == "tt.T5.1f1b")
needs = estimate.memory(row.model, row.layout, row.seq, stage=0)
shared_inputs = needs["activations"] / row.layout.tp
print(f"by the formula: {needs['total'] / 1e9:.0f} GB")
print(
    f"with inputs shared out: {(needs['total'] - needs['activations'] + shared_inputs) / 1e9:.0f} GB"
)
print(f"measured: {82.5 * 2**30 / 1e9:.0f} GB")

# %% [markdown]
# Korthikanti's table keeps a recomputed layer's input whole on every tensor rank. With sequence parallelism it is shared out, so the
# formula refuses what ran. Shared out, it says two thirds of what was measured: no formula knows the allocator's fragments, float32 gradients, or
# what a library holds. Leave a tenth of the memory free, and trace.
#
# ### The stage that nobody looked at
#
# Under 1F1B the first stage has most in flight. So people check the first stage. **Predict** which stage of Llama 3's
# 8k layout is the fullest. (126 layers on 16 stages: the first and the last have 7, the others 8.)

# %% tags=["prediction"]
predicted = {"fullest stage": 1}

# %%
stages = [estimate.memory(published.LLAMA["405B"], llama, 8192, stage) for stage in range(16)]
fullest = max(range(16), key=lambda stage: stages[stage]["total"])
first_in_flight = {"As if all stages had as many layers.": {"fullest stage": 0}}
compare(predicted, {"fullest stage": fullest}, first_in_flight)
bars = {f"stage {stage}": stages[stage] for stage in (0, 1, 7, 15)}
fit(bars, h100.hbm_bytes, "Llama 3 405B at 8k, stages of 7 and of 8 layers")
plt.show()

# %% [markdown]
# *Three of the four are above the line, stage 1 by most: it has a layer more than stage 0, and more in flight than
# stage 7. The last keeps the fewest, and has the logits.*
#
# The formula says that this layout does not fit. It ran: they gave up tensors early that would not be needed
# again, and only so did without recomputation (section 3.3.2). Whoever makes room for stage 0 alone is still
# 9 GB short on stage 1. The last stage has its own surprise: the **logits**, $4\,s\,b\,V/t$ bytes in float32, that no
# layer counts.

# %%
for vocab in (32_000, 128_256):
    alone = Layout(dp=8, zero=3, recompute="full")
    held = estimate.memory(replace(published.LLAMA["8B"], vocab=vocab), alone, 32_768)
    logits = 4 * 32_768 * vocab
    print(
        f"8B, 32k context, vocabulary {vocab:,}: logits {logits / 1e9:.1f} GB of {held['total'] / 1e9:.1f} GB"
    )

# %% [markdown]
# ### A tensor group that leaves the machine
#
# Sixteen tensor ranks need half the memory of eight. But a machine has eight GPUs. The third line has eight of them
# again, in the wrong order: neighbours in the data group sit together, so each tensor rank is in another machine.

# %%
on_sixteen = replace(llama, tp=16, dp=32, micro_batches=64)
turned = replace(llama, order=("dp", "cp", "pp", "tp"))
steps = {}
for name, layout in {"8": llama, "16": on_sixteen, "8, far apart": turned}.items():
    step = estimate.step_time(published.LLAMA["405B"], layout, 8192, h100)
    steps[f"tensor {name}"] = step.parts
    share = step.parts["tensor"] / step.seconds
    print(f"tensor ranks {name}: {step.seconds:.0f} s, of which their messages {share:.0%}")
where_time_goes(steps, "Llama 3 405B at 8k: where the tensor ranks sit")
plt.show()

# %% [markdown]
# *The dark bar, matrices, stays as long as it is. What grows is orange: the collectives that every layer waits for.*
#
# All three are correct programs, and they end with the same parameters. A profile would show waiting, and nobody could
# tell for what. The planner could.
#
# ### Bug hunt: MFU
#
# **MFU**, model FLOPs utilisation, is the share of the peak that a run reaches, with the operations that the model
# needs. This snippet is of a kind that one finds everywhere. What is wrong?


# %%
def mfu(model, seq, tokens_per_second):
    peak = 1979e12  # H100, from the data sheet
    per_token = 6 * estimate.parameters(model) + 12 * model.layers * seq * model.width
    return per_token * tokens_per_second / peak


print(f"{mfu(titan.model, 8192, 6667):.1%}")

# %% [markdown]
# Two things. The data sheet's 1,979 TFLOP/s are *with sparsity*, which nobody trains with: it is 989. And the
# operations are a choice. torchtitan says 39 % for this run (8B on 8 GPUs, compiled, 6,667 tokens a second and GPU).

# %%
for convention in ("6n+attention", "torchtitan", "causal"):
    needed = estimate.flops(titan.model, 8192, 1, convention) * 6667
    print(f"{convention}: {needed / h100.peak:.1%}")

# %% [markdown]
# The first counts the embedding as if it multiplied, the second does not, the third counts only the half of
# attention that a causal mask leaves. Same run, same second. **Predict** by which factor the first is larger than
# the third for Llama 3 405B, with 8,192 and with 131,072 tokens of context. (405.85 billion parameters, 126 layers, width
# 16,384.) Is attention a correction?

# %% tags=["prediction"]
matrices, scores = 6 * 405.85e9, 12 * 126 * 16_384  # FLOPs of a token; these times the context
predicted = {
    "8k": round((matrices + scores * 8192) / (matrices + scores * 8192 / 2), 2),
    "131k": round((matrices + scores * 131_072) / (matrices + scores * 131_072 / 2), 2),
}

# %%
measured = {}
for name, seq in (("8k", 8192), ("131k", 131_072)):
    full, half = (
        estimate.flops(published.LLAMA["405B"], seq, 1, how) for how in ("6n+attention", "causal")
    )
    measured[name] = round(full / half, 2)
compare(predicted, measured, {"As if attention hardly counted.": {"131k": measured["8k"]}})

# %% [markdown]
# At 8k it is 4 %, at 131k two fifths. Never compare two MFUs before you know how each was counted; compare
# tokens a second. And of Megatron's 163 TFLOP/s above a quarter is the forward pass that was computed a second time.

# %% [markdown]
# ## 6. Exercises: hold, send, time, search
#
# Now you write the arithmetic, for plain transformers: an MLP of 4 W with two matrices, as many KV heads as heads, and
# stages with equally many layers. Biases and norms are left out. The records `Model`, `Layout` and `Hardware` are there to be
# read; the functions of `course_planner` are what you replace, so they are forbidden in your answers.

# %%
from collections.abc import Callable

from course_exercises import check, hint

# %% [markdown]
# ### 12.1 What a rank holds (3 points)
#
# The arithmetic of section 3, for any stage and any ZeRO. A table is a matrix of V x W: the embedding is on the first stage, the
# output layer on the last. A tied output layer on the same stage is the embedding itself, and on another stage a copy.


# %% nbgrader={"grade_id": "12.1", "solution": true}
def memory_of(model: Model, layout: Layout, seq: int, stage: int) -> dict[str, float]:
    """Returns the bytes that a rank of `stage` holds, by "parameters", "gradients", "optimizer", "activations".

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
# ### 12.2 What a rank sends (3 points)
#
# Numbers of 2 bytes, collectives on a ring. Only the layers count here, and neither the tables nor the loss.


# %% nbgrader={"grade_id": "12.2", "solution": true}
def traffic_of(model: Model, layout: Layout, seq: int, stage: int) -> dict[str, float]:
    """Returns the bytes that a rank of `stage` sends in one step to its groups "tp", "pp" and "dp".

    Tensor ranks: a layer has two all-gathers and two reduce-scatters of s b W numbers in each pass,
    forward and backward; with recompute "full" the forward pass runs twice. Stages: for each
    micro-batch a tensor rank's part of s b W numbers to the next stage, and their gradients to the
    one before. Data ranks, of 12 W^2 / t numbers a layer: an all-reduce of the gradients, once a step,
    or with ZeRO 1 and 2 its two halves. With ZeRO 3, which comes with pp = 1 only, a reduce-scatter of the
    gradients once a step, and an all-gather of the parameters before every forward and every backward
    pass of a micro-batch; with recompute "full" the second forward pass uses those of the backward pass.
    """
    ### BEGIN SOLUTION
    t, d, m = layout.tp, layout.dp, layout.micro_batches
    layers = model.layers // layout.pp
    hidden = 2 * seq * layout.micro_batch * model.width
    collectives = 12 if layout.recompute == "full" else 8
    neighbours = (stage > 0) + (stage < layout.pp - 1)
    rounds = 1 + 2 * m if layout.zero == 3 else 2
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
# ### 12.3 How long a step takes (3 points)
#
# Two models in one. The **roofline** says that a kernel takes as long as its FLOPs or as its bytes, whichever is longer
# ([Williams et al. 2009](https://doi.org/10.1145/1498765.1498785)). **Alpha-beta** says that a message takes a latency and its
# bytes over a bandwidth ([Hockney 1994](https://doi.org/10.1016/S0167-8191%2806%2980021-9)). What goes on at the same time is a maximum, what waits
# for each other is a sum. That is most of the art.


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
# ### 12.4 Search (4 points)
#
# The question of the chapter: N GPUs, a model, a batch. Your answer gets a **judge**, a function that tells what a layout needs. It
# computes, and asks no questions: also for a layout that splits a head in two. What is legal is your business. The check takes
# clusters that it draws, and accepts a plan whose **regret** is at most 10 %: the share by which the step is longer than with the best one.


# %% nbgrader={"grade_id": "12.4", "solution": true}
def search(
    model: Model,
    gpus: int,
    batch: int,
    seq: int,
    hardware: Hardware,
    judge: Callable[[Layout], tuple[float, float]],
) -> Layout:
    """Returns the fastest legal layout, of several that are equally fast any one.

    `judge(layout)` gives (bytes of the fullest rank, seconds of a step of `batch` sequences). To be
    chosen are dp, tp, pp, zero (0 to 3), micro_batch, micro_batches and recompute; the rest of
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
# ## 7. See it: your model, your GPUs
#
# The search, on H100 with eight in a machine and batches of four million tokens. Three things to try:
#
# * 405B on 512 GPUs, with 8k of context and with 128k. What becomes of the plan, and what is the limit?
# * 70B on 512 GPUs, with a slower network. Which parts grow, and what does the search change?
# * 70B on 8 GPUs. What is refused, and for which reason?

# %%
from course_utils.lesson import explore

explore.Explorer(
    figures.your_plan,
    model=["70B", "405B", "8B"],
    gpus=["512", "2048", "64", "8"],
    context=["8k", "32k", "128k"],
    network=["400 Gbit/s", "100 Gbit/s", "1600 Gbit/s"],
)

# %% [markdown]
# *At the start: a plan for 70B on 512 GPUs. Above, its fullest rank against the 80 GB; below, the seconds of a step by
# what they are spent on. "Temporary" is what is held for a moment, like a layer's gathered parameters, or outside the
# layers, like the logits. Calculated, not measured.*
#
# For a model of your own, three lines do the same: a `Model`, a `Hardware`, and `search`.

# %%
mine = Model(layers=48, width=6144, heads=48, vocab=64_000, kv_heads=8, gated=True, bias=False)
found, refused = estimate.search(mine, 128, 512, 4096, h100, keep=3)
print(f"{estimate.parameters(mine) / 1e9:.1f} billion parameters on 128 GPUs")
for plan in found:
    print(
        f"{plan.time.seconds:.2f} s, {plan.memory['total'] / 1e9:.0f} GB, {plan.limit}: {estimate.described(plan.layout)}"
    )
print("refused:", dict(refused.most_common(3)))

# %% [markdown]
# Both halves of this chapter are commands too. The first traces a file of yours that has a function `program(mesh, layout)`, as
# `two_layers` of section 2 is one; the second searches. Each prints a table, draws with `--picture` and writes JSON with `--json`, and
# `--help` says the rest.
#
# ```
# python -m course_utils trace my_program.py --ranks 16384 --layout tp=8,pp=16,dp=128
# python -m course_utils plan --model 70B --gpus 512 --seq 8192 --batch 512 --hardware H100
# ```
#
# ## 8. On a cluster: measure little, then plan
#
# On a cluster you can replace the defaults by what *that* cluster does. In this order, each in minutes:
#
# 1. **The links.** nccl-tests' `all_reduce_perf` on one node and on two: its *busbw* is `intra_bandwidth` and
#    `inter_bandwidth`, its time for small messages the latency.
# 2. **A few steps.** Train some steps of three or four layouts on 1, 2 and 4 nodes, with few layers. Each is a `Row`:
#    model, layout, sequence length, seconds. `calibrate` takes them, and the interval becomes narrow.
# 3. **The memory.** Trace the real program with the layout that you want, and run that rank's stage on one GPU; compare
#    `torch.cuda.max_memory_allocated()`. The difference is what no formula knows.
# 4. **The plan.** Search with the calibration, take the first ten, look at what limits each, and try two or three.
#
# How much does a calibration narrow it? Here with no row, one, three and seven of Megatron's, for the trillion. The
# smallest model comes first: no tensor ranks, no stages.

# %%
for count in (0, 1, 3, 7):
    constants = estimate.calibrate(rows[:count], a100) if count else None
    time = estimate.step_time(trillion, megatron, 2048, a100, constants)
    inside = time.low < measured_seconds < time.high
    print(
        f"with {count} of the rows: between {time.low:.0f} and {time.high:.0f} s; published inside: {inside}"
    )

# %% [markdown]
# One row makes the interval narrow, and wrong: it had nothing to say about tensor ranks or stages, and the fit does
# not know that. Calibrate with layouts that use what you plan to use.
#
# What changes there:
#
# * **Nodes differ.** The slowest GPU sets the pace of all, and clocks fall when they are hot. A plan knows neither.
# * **The network is shared.** Between thousands of nodes it is slower than between two, by an amount that only a measurement tells.
# * **Leave room.** The allocator's fragments, NCCL's buffers and the framework's own copies take a tenth.
# * **Failures.** At 16,384 GPUs one comes every few hours (chapter 9). What counts in the end is the tokens of a week.
#
# ## 9. Remember
#
# 1. Count first: 16 bytes a parameter, shared out by t, p and ZeRO; $34\,s\,b\,W/t$ a layer and micro-batch in flight; nobody shares
#    out activations over d.
# 2. A tensor rank sends in every layer, a stage once a micro-batch, a data rank once a step. That is their order on the
#    links, from fast to slow.
# 3. Trace the real program. It keeps and gathers what no formula says, and one rank of 16,384 fits on a laptop.
# 4. Time is a sum of maxima with constants. Calibrate them, and say the interval.
# 5. Look at every stage, and ask of each MFU how it was counted, and of which peak.
#
# **Sources**
#
# * S. Rajbhandari et al., *ZeRO*, 2019, [arXiv 1910.02054](https://arxiv.org/abs/1910.02054): section 3.1 memory, 5
#   stages, 7 traffic.
# * V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022, [arXiv
#   2205.05198](https://arxiv.org/abs/2205.05198): table 2, section 4.2.2.
# * D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, 2021,
#   [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): table 1, equations 2 and 3.
# * Llama team, *The Llama 3 Herd of Models*, 2024, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783): section 3.3.2, table 4.
# * A. Chowdhery et al., *PaLM*, 2022, [arXiv 2204.02311](https://arxiv.org/abs/2204.02311): appendix B, MFU.
# * S. Williams, A. Waterman, D. Patterson, *Roofline*, 2009, [doi 10.1145/1498765.1498785](https://doi.org/10.1145/1498765.1498785).
# * [torchtitan](https://github.com/pytorch/torchtitan): `benchmarks`.
# * PyTorch: [`fully_shard`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html),
#   [`torch.distributed.pipelining`](https://docs.pytorch.org/docs/stable/distributed.pipelining.html).
