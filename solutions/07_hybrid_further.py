# %% [markdown]
# # 7. Hybrid, further: slow and fast links, coins, and how to choose a grid
#
# The lesson trains on three dimensions at once. This notebook is about what is decided around that: how
# a sum goes over two kinds of links, which ranks have to draw the same random numbers, and which sizes a
# model of 70 billion parameters gets on 64 GPUs. At its end you place the dimensions on machines.
#
# Run the parts in their order: some use what an earlier one defines. None needs an answer of the lesson.

# %% tags=["nbval-ignore-output"]
import torch
import torch.distributed as dist

from course_exercises import check, hint
from course_utils import hardware
from course_utils.launch import launch
from course_utils.lesson.equality import equal
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace, ring_bytes

hardware.report()

# %% [markdown]
# ## 1. The factory: corridors and roads
#
# Inside a building, notes go from seat to seat along a corridor: that is fast. Between sites they go by road.
# If eight workers in two buildings have to add up a long list, nobody carries the whole list along the road.
# Each building adds up first, every worker takes a part of the sum along the road to the one who has the same
# part over there, and what comes back is shared in the corridor.
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | corridor | links inside a machine | NVLink: hundreds of GB/s |
# | road | links between machines | one network adapter for each GPU, or for all: tens of GB/s |
# | add up at home, then by road | **hierarchical all-reduce** | three calls in two groups in place of one |
# | coins | random numbers | which ranks have to draw the same |
#
# ## 2. The smallest real run: a sum in three steps
#
# A data group often has several ranks in each machine. A ring through all of them sends almost
# everything twice over every link, slow ones included. A **hierarchical all-reduce** treats the two
# kinds differently:
#
# 1. reduce-scatter inside the machine: each rank has one part of the machine's sum;
# 2. all-reduce of that part between machines, with the ranks that hold the same part;
# 3. all-gather inside the machine.
#
# It is a grid again: one dimension inside a machine, one between.


# %%
from torch.distributed.device_mesh import init_device_mesh


def hierarchical_all_reduce(tensor, inside, between):
    """Adds up `tensor` over the ranks of a grid, in place; its size divides by the ranks inside."""
    parts = list(tensor.chunk(dist.get_world_size(inside)))
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts, group=inside)
    dist.all_reduce(mine, group=between)
    dist.all_gather(parts, mine, group=inside)  # the parts are views: this fills `tensor`


def groups_of_grid(between, inside):
    """This rank's group inside its machine, and the one between machines."""
    mesh = init_device_mesh(
        hardware.device().type, (between, inside), mesh_dim_names=("between", "inside")
    )
    return mesh.get_group("inside"), mesh.get_group("between")


# %%
def largest_difference(rank, between, inside):
    groups = groups_of_grid(between, inside)
    flat = torch.arange(240.0, device=hardware.device()) + rank
    in_steps = flat.clone()
    dist.all_reduce(flat)
    hierarchical_all_reduce(in_steps, *groups)
    return (flat - in_steps).abs().max().item()


for machines, ranks in ((2, 2), (2, 4), (3, 2)):
    found = launch(largest_difference, machines * ranks, machines, ranks)
    print(f"{machines} machines of {ranks} ranks: largest difference {max(found)}")

# %% [markdown]
# ## 3. Predict, then measure: two kinds of links
#
# **Predict** the bytes that each
# rank sends on rings, for a tensor of $S$ bytes on $k = 2$ machines of $g = 4$ ranks. Flat:
# $2(n-1)/n \cdot S$ with $n = 8$, and the ring leaves a machine through one rank, with all of that.
# Hierarchical: inside, $(g-1)/g \cdot S$ for each of steps 1 and 3; between, $2(k-1)/k$ of a part
# of $S/g$.

# %% tags=["prediction"]
k, g, S = 2, 4, 4 * 1024
predicted = {
    "flat, on the ring of all": 2 * (k * g - 1) * S // (k * g),
    "hierarchical, inside": 2 * (g - 1) * S // g,
    "hierarchical, between": 2 * (k - 1) * (S // g) // k,
}


# %%
def flat_or_hierarchical(rank):
    inside, between = groups_of_grid(k, g)
    numbers = torch.arange(S // 4, dtype=torch.float32, device=hardware.device()) + rank
    flat, in_steps = numbers.clone(), numbers.clone()
    with Trace() as one:
        dist.all_reduce(flat)
    with Trace() as three:
        hierarchical_all_reduce(in_steps, inside, between)
    calls = three.record().calls
    return equal(flat, [in_steps]), {
        "flat, on the ring of all": ring_bytes(one.record().calls),
        "hierarchical, inside": ring_bytes(c for c in calls if len(c.ranks) == g),
        "hierarchical, between": ring_bytes(c for c in calls if len(c.ranks) == k),
    }


results = launch(flat_or_hierarchical, k * g)
print("the same sum on all ranks:", all(same for same, _ in results))
compare(predicted, results[0][1])

# %% [markdown]
# What is counted is the payload of the real calls; `ring_bytes` multiplies it by the ring's factors.
# The rank that closes the flat ring sends 7,168 bytes over the slow link. In three steps, every rank
# sends 1,024 there, and all four at the same time: 4,096 bytes in all, where a machine has one adapter for
# its four. NCCL is
# [topology-aware](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/overview.html): it looks
# at the links and chooses its way by itself. Chapter 8 takes the three steps apart, and between them a rank
# holds its part only: HSDP, in `08_fsdp_further`.
#
# ## 4. By hand: a grid for 70 billion parameters
#
# How does one choose $d$, $p$ and $t$? A worked case: 70 billion parameters, 80 layers of width 8,192,
# sequences of 4,096 tokens, on 64 GPUs of 80 GB, 8 in a machine. Three conditions first.
#
# * $d \cdot p \cdot t = 64$, and $t$ is at most 8: a tensor group stays inside a machine.
# * $p$ divides the 80 layers, and each copy gets at least one sequence.
# * It fits. Weights, gradients and Adam's state take 16 bytes for a parameter in mixed precision (chapter 8), of
#   which a rank holds $1/(pt)$. With recomputation, what is kept for backward is the input of each layer, of
#   one sequence for each micro-batch in flight: $p$ of them times $80/p$ layers, so 5.4 GB whatever $p$ is. Take
#   70 GB as the limit.
#
# Among those that are left, time decides: a step computes, waits for the bubble of the pipeline, $(p-1)/m$ of
# the computing with $m$ micro-batches of one sequence (chapter 5), and waits for the all-reduces of the tensor
# dimension (lesson, section 3). Data and pipeline hide behind computing. What recomputation adds, a third of
# the computing and half of the all-reduces, is left out: it changes the place of none of the grids below.
# Assumed are 400 Tflop/s a GPU and rings of 250 GB/s.
#
# **Predict**, and say first what you feel: which $t$ has the fastest grid for a batch of 32 sequences, and which
# for one of 1,024?

# %% tags=["prediction"]
predicted = {"t for 32 sequences": 8, "t for 1,024 sequences": 2}

# %%
PARAMETERS, LAYERS, WIDTH, TOKENS, GPUS = 70e9, 80, 8_192, 4_096, 64


def gigabytes(p, t):
    """On a rank: 16 bytes for each of its parameters, and the inputs of layers, 2 bytes a number."""
    return (16 * PARAMETERS / (p * t) + 2 * TOKENS * WIDTH * LAYERS) / 1e9


def seconds(d, p, t, sequences):
    """Of a step: (computing, bubble, tensor)."""
    computing = 6 * PARAMETERS * sequences * TOKENS / GPUS / 400e12
    bubble = computing * (p - 1) / (sequences / d)
    activations = sequences / d * TOKENS * WIDTH * 2
    return computing, bubble, 2 * (t - 1) / t * 4 * LAYERS / p * activations / 250e9


# %%
def grids(sequences):
    """Those that fit, the fastest first."""
    tried = [(GPUS // (p * t), p, t) for p in (1, 2, 4, 8, 16) for t in (1, 2, 4, 8)]
    whole = [(d, p, t) for d, p, t in tried if d * p * t == GPUS and sequences % d == 0]
    fit = [grid for grid in whole if gigabytes(*grid[1:]) <= 70]
    return sorted(fit, key=lambda grid: sum(seconds(*grid, sequences)))


for batch in (32, 1_024):
    print(f"{batch:,} sequences:  d   p   t     GB   computing  bubble  tensor, in seconds")
    for d, p, t in grids(batch)[:4]:
        each = "  ".join(f"{part:7.1f}" for part in seconds(d, p, t, batch))
        print(f"{d:19} {p:3} {t:3} {gigabytes(p, t):6.0f}     {each}")

# %%
fastest = {name: grids(batch)[0][2] for name, batch in zip(predicted, (32, 1_024))}
compare(
    predicted,
    fastest,
    {
        "As many as a machine has: with a large batch the pipeline is the cheaper cut.": {
            "t for 1,024 sequences": 8
        },
        "As few as can be: with a small batch the bubble costs more than the all-reduces.": {
            "t for 32 sequences": 2
        },
    },
)

# %% [markdown]
# "As much tensor parallelism as a machine has GPUs" is a rule for small batches. The bubble shrinks with every
# sequence more, the all-reduces grow with it. With shards in the data dimension (chapter 8) fewer parts
# fit as well, and the question is asked anew: what are the numbers of *your* model, batch and links? And then
# measure the two or three best.
#
# ## 5. Break it: the same coins, or others
#
# Which ranks have to throw the same coins, and which have to throw others? Ask what the numbers are
# for.
#
# | what is drawn | has to differ along | has to agree along |
# |---|---|---|
# | whole initial weights, cut afterwards | nothing | everything: all cut the same model |
# | initial weights, each rank only its own part, of what a tensor group cuts | pipeline, tensor | data: copies begin alike |
# | initial weights, of what a tensor group holds whole | pipeline | data, tensor |
# | dropout of activations that a tensor group holds whole | data, pipeline | tensor |
# | dropout of columns that a tensor group has cut | data, pipeline, tensor | nothing |
# | the order of the rows in an epoch | nothing | everything: rows are dealt out from one order |
#
# A seed that differs along some dimensions only is a number made of those coordinates. **Predict**
# how many different seeds there are on the 2 x 2 x 2 grid for each line of the table.

# %% tags=["prediction"]
DIFFER = {
    "whole weights, order of rows": [],
    "weights in parts": ["pipeline", "tensor"],
    "weights held whole by a tensor group": ["pipeline"],
    "dropout, whole": ["data", "pipeline"],
    "dropout, cut": ["data", "pipeline", "tensor"],
}
predicted = {
    "whole weights, order of rows": 1,
    "weights in parts": 4,
    "weights held whole by a tensor group": 2,
    "dropout, whole": 4,
    "dropout, cut": 8,
}


# %%
def groups_of_mesh(data, pipeline, tensor):
    """The lesson's: this rank's group along each dimension."""
    names = ("data", "pipeline", "tensor")
    sizes = (data, pipeline, tensor)
    mesh = init_device_mesh(hardware.device().type, sizes, mesh_dim_names=names)
    return {name: mesh.get_group(name) for name in names}


def seed_for(groups, dimensions, base=1234):
    """A seed that differs along these dimensions, and only along them."""
    for name in dimensions:
        base = base * dist.get_world_size(groups[name]) + dist.get_rank(groups[name])
    return base


# %%
def draw_coins(rank):
    groups = groups_of_mesh(2, 2, 2)
    coins = {}
    for what, dimensions in DIFFER.items():
        generator = torch.Generator().manual_seed(seed_for(groups, dimensions))
        coins[what] = (torch.rand(32, generator=generator) < 0.5).tolist()
    return coins


# %%
coins = launch(draw_coins, 8)
compare(
    predicted,
    {what: len({tuple(of[what]) for of in coins}) for what in DIFFER},
    {
        "A seed for each rank: ranks that hold the same must draw the same.": {
            what: 8 for what, dimensions in DIFFER.items() if len(dimensions) < 3
        },
        "The same seed everywhere: parts of one thing would be copies of each other.": {
            what: 1 for what, dimensions in DIFFER.items() if dimensions
        },
    },
)

# %% [markdown]
# ## 6. Exercise: place the dimensions on machines
#
# ### 7.5 Which dimension on the fast links? (3 points)
#
# A cluster has two kinds of links: fast ones inside a machine, slow ones between machines. The
# order of the dimensions decides which groups stay inside. The last dimension's groups are
# neighbours; those of the first are far apart. Find the order that costs least.
#
# Count like this. Ranks are numbered with the last dimension of the
# order changing fastest, and fill one machine after the other. In a step, every rank sends
# `sent[name]` bytes to its group of a dimension. That takes `sent[name] / inside` seconds if *each*
# of the dimension's groups lies within one machine, else `sent[name] / between`, because a step
# waits for the slowest. The dimensions' times add up. A dimension of size 1 sends nothing.

# %%
import itertools
import math


# %% nbgrader={"grade_id": "7.5", "solution": true}
def cheapest_placement(
    sizes: dict[str, int],
    sent: dict[str, float],
    per_machine: int,
    inside: float,
    between: float,
) -> tuple[tuple[str, ...], float]:
    """Returns a cheapest order of the dimensions, slowest-changing first, and its seconds a step.

    `sizes` maps the dimensions' names to their numbers of ranks, and `sent` to the bytes that a
    rank sends a step. `per_machine` ranks are in a machine (the last machine may have fewer).
    `inside` and `between` are bytes a second within a machine and between machines. There are at
    most five dimensions; of several orders that cost the same, any will do.
    """
    ### BEGIN SOLUTION
    world_size = math.prod(sizes.values())

    def seconds(order: tuple[str, ...]) -> float:
        total, stride = 0.0, 1
        for name in reversed(order):
            apart = stride * (sizes[name] - 1)  # from a group's first rank to its last
            firsts = [r for r in range(world_size) if r // stride % sizes[name] == 0]
            fits = all(r // per_machine == (r + apart) // per_machine for r in firsts)
            if sizes[name] > 1:
                total += sent[name] / (inside if fits else between)
            stride *= sizes[name]
        return total

    best = min(itertools.permutations(sizes), key=seconds)
    return best, seconds(best)
    ### END SOLUTION


# %% nbgrader={"grade_id": "7.5-check", "grade": true, "points": 3, "locked": true}
check("7.5", cheapest_placement)

# %% [markdown]
# ## 8. On a cluster
#
# * *Which ranks share a machine* is what the launcher decides: torchrun numbers them machine by machine.
#   Print `mesh` and the host name on each rank once, before you trust a grid.
# * **`NCCL_DEBUG=INFO`** says which way NCCL has chosen for each group, rings or trees, and over which adapter.
# * *An odd machine* (7 GPUs because one is broken) makes groups that cross its border. Leave the whole
#   machine out.
# * *A change of the grid* needs another checkpoint, or one that any grid can read: chapter 8.
#
# ## 9. Remember
#
# 1. On two kinds of links, add up inside, then between, then share: the slow link carries one part for each rank.
# 2. A seed differs along the dimensions in which something *else* is drawn, and agrees along the others.
# 3. Memory says which grids are possible, the batch says which is fast: a bubble shrinks with the batch, the
#    all-reduces grow with it.
#
# **Sources**
#
# * D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM*, SC 2021, [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): section 3 how the sizes are chosen.
# * PyTorch: [DeviceMesh](https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html).
# * NVIDIA: [NCCL's environment variables](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
