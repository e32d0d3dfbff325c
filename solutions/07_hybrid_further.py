# %% [markdown]
# # 7. Hybrid, further: two kinds of links, seeds, and how to choose a grid
#
# The lesson trains on three dimensions at once. This notebook is about the decisions around that: how a sum travels
# over two kinds of links, which grid suits a model of 70 billion parameters on 64 GPUs, and which ranks draw the same
# random numbers. At the end you place the dimensions on machines.
#
# Run the parts in order: some use what an earlier one defines. None needs an answer from the lesson.

# %% tags=["nbval-ignore-output"]
import torch
import torch.distributed as dist

from course_exercises import check, hint
from course_utils import hardware
from course_utils.launch import RankFailure, launch
from course_utils.lesson.equality import check_equal
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace, ring_bytes

hardware.report()

# %% [markdown]
# ## 1. The factory: short ways and long roads
#
# Trucks between two buildings of one site take a short way, and trucks between sites take a long road. If all
# buildings have to add up a long list, no building sends the whole list along the road. Each site adds up first,
# every building sends one part of the sum to the building that has the same part on the other site, and the results
# are shared on each site.
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | short way on a site | links inside a machine | NVLink: hundreds of GB/s |
# | long road between sites | links between machines | one network adapter for each GPU, or for all: tens of GB/s |
# | add up on each site first | **hierarchical all-reduce** | three calls in two groups in place of one |
#
# ## 2. The smallest real run: a sum in three steps
#
# A data group often has several ranks in each machine. A ring through all of them sends nearly twice the tensor over
# every link, slow ones included. A **hierarchical all-reduce** treats the two kinds of links differently:
#
# 1. reduce-scatter inside the machine: each rank has one part of the machine's sum;
# 2. all-reduce of that part between machines, with the ranks that hold the same part;
# 3. all-gather inside the machine.
#
# The ranks form a grid again, with one dimension inside a machine and one between machines.


# %%
from torch.distributed.device_mesh import init_device_mesh


def hierarchical_all_reduce(tensor, inside, between):
    """Adds up `tensor` over the ranks of a grid, in place; its size is a multiple of the ranks inside."""
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
def both_ways(rank, between, inside):
    groups = groups_of_grid(between, inside)
    flat = torch.arange(240.0, device=hardware.device()) + rank
    in_steps = flat.clone()
    dist.all_reduce(flat)
    hierarchical_all_reduce(in_steps, *groups)
    return flat.cpu(), in_steps.cpu()


for machines, ranks in ((2, 2), (2, 4), (3, 2)):
    flat, in_steps = zip(*launch(both_ways, machines * ranks, machines, ranks))
    print(f"{machines} machines of {ranks} ranks: {check_equal(flat[0], in_steps)} apart")

# %% [markdown]
# ## 3. Predict, then measure: two kinds of links
#
# A tensor of 4,096 bytes is summed over 2 machines of 4 ranks. **Predict** how many bytes a rank sends to the other
# machine: in a flat ring of all eight, where one rank of each machine has its neighbour in the other machine; and in
# three steps, where every rank has a partner there.

# %% tags=["prediction"]
k, g, S = 2, 4, 4 * 1024
predicted = {"flat, the rank at the border": 7_168, "in three steps, every rank": 1_024}


# %%
def flat_or_hierarchical(rank):
    inside, between = groups_of_grid(k, g)
    numbers = torch.arange(S // 4, dtype=torch.float32, device=hardware.device()) + rank
    with Trace() as one:
        dist.all_reduce(numbers.clone())
    with Trace() as three:
        hierarchical_all_reduce(numbers, inside, between)
    calls = three.record().calls
    return {
        "flat, on the ring of all": ring_bytes(one.record().calls),
        "hierarchical, inside": ring_bytes(c for c in calls if len(c.ranks) == g),
        "hierarchical, between": ring_bytes(c for c in calls if len(c.ranks) == k),
    }


sent = launch(flat_or_hierarchical, k * g)[0]
measured = dict(zip(predicted, (sent["flat, on the ring of all"], sent["hierarchical, between"])))

# %%
compare(
    predicted,
    measured,
    likely={
        "The whole tensor once; an all-reduce on a ring of n sends 2 (n - 1) / n of it.": {
            "flat, the rank at the border": 4_096
        },
        "The whole tensor; but a rank has only its quarter to exchange.": {
            "in three steps, every rank": 4_096
        },
    },
)

# %% [markdown]
# On a flat ring of $n = 8$ every rank sends $2(n-1)/n$ of the $S$ bytes. On $k$ machines of $g$ ranks, a rank sends
# $(g-1)/g \cdot S$ in each of the steps 1 and 3, and $2(k-1)/k$ of its part $S/g$ between machines: here 1,024 bytes,
# and all four ranks do so at the same time. NCCL is
# [topology-aware](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/overview.html): it looks at the links and
# chooses its own routes. Chapter 8 separates the three steps, and between them a rank holds only its part: HSDP, in
# `08_fsdp_further`.
#
# ## 4. By hand: a grid for 70 billion parameters
#
# How does one choose $d$ (data), $p$ (pipeline) and $t$ (tensor)? Take this case: 70 billion parameters, 80 layers of
# width 8,192, sequences of 4,096 tokens, on 64 GPUs of 80 GB, 8 in a machine. There are three conditions.
#
# * $d \cdot p \cdot t = 64$, and $t$ is at most 8, so that a tensor group stays inside a machine.
# * $p$ divides the 80 layers, and each copy gets at least one sequence.
# * The model fits. Weights, gradients and Adam's state take 16 bytes for a parameter in mixed precision (chapter 8),
#   of which a rank holds $1/(pt)$. With recomputation, a rank keeps the inputs of $80/p$ layers for $p$ sequences in
#   flight: 5.4 GB for any $p$. The limit is 70 GB.
#
# Among the grids that are left, time decides. A step computes, waits for the pipeline's bubble, which is $(p-1)/m$ of
# the computing with $m$ micro-batches of one sequence (chapter 5), and waits for the all-reduces of the tensor
# dimension. The sum over data is listed but not added: it can run beside backward, which is two thirds of the
# computing. Pipeline messages, each no larger than one of tensor's many all-reduces, and the work of recomputation
# are left out. The assumed speeds are 400 TFLOP/s a GPU, 250 GB/s for rings inside a machine, and 25 GB/s between
# machines.
#
# **Predict:** which $t$ does the fastest grid have for a batch of 32 sequences, and which for one of 1,024?

# %% tags=["prediction"]
predicted = {"t for 32 sequences": 8, "t for 1,024 sequences": 2}

# %%
PARAMETERS, LAYERS, WIDTH, TOKENS, GPUS = 70e9, 80, 8_192, 4_096, 64


def gigabytes(p, t):
    """On a rank: 16 bytes for each of its parameters, and the inputs of layers, 2 bytes a number."""
    return (16 * PARAMETERS / (p * t) + 2 * TOKENS * WIDTH * LAYERS) / 1e9


def seconds(d, p, t, sequences):
    """Of a step: (computing, bubble, tensor, data)."""
    computing = 6 * PARAMETERS * sequences * TOKENS / GPUS / 400e12
    bubble = computing * (p - 1) / (sequences / d)
    activations = sequences / d * TOKENS * WIDTH * 2
    tensor = 2 * (t - 1) / t * 4 * LAYERS / p * activations / 250e9
    return computing, bubble, tensor, 2 * (d - 1) / d * 2 * PARAMETERS / (p * t) / 25e9


# %%
def grids(sequences):
    """Those that fit, the fastest first."""
    tried = [(GPUS // (p * t), p, t) for p in (1, 2, 4, 8, 16) for t in (1, 2, 4, 8)]
    whole = [(d, p, t) for d, p, t in tried if d * p * t == GPUS and sequences % d == 0]
    fit = [grid for grid in whole if gigabytes(*grid[1:]) <= 70]
    return sorted(fit, key=lambda grid: sum(seconds(*grid, sequences)[:3]))


# %%
compare(
    predicted,
    {name: grids(batch)[0][2] for name, batch in zip(predicted, (32, 1_024))},
    likely={
        "As many as a machine has: with a large batch the pipeline is the cheaper cut.": {
            "t for 1,024 sequences": 8
        },
        "As few as can be: with a small batch the bubble costs more than the all-reduces.": {
            "t for 32 sequences": 2
        },
    },
)

# %%
for batch in (32, 1_024):
    print(
        f"{batch:,} sequences:  d   p   t     GB   computing  bubble   tensor  (data), in seconds"
    )
    for d, p, t in grids(batch)[:4]:
        each = "  ".join(f"{part:7.1f}" for part in seconds(d, p, t, batch))
        print(f"{d:19} {p:3} {t:3} {gigabytes(p, t):6.0f}     {each}")

# %% [markdown]
# "As much tensor parallelism as a machine has GPUs" is a rule for small batches. With a larger batch the bubble takes
# a smaller share of the step, while the all-reduces grow with the batch. The sum over data fits beside backward in
# all these grids. Once the data dimension shards the parameters too (chapter 8), the model fits with smaller $p$ and
# $t$, and you have to choose again. In any case, measure the two or three best grids.
#
# ## 5. Break it: groups in another order, and the wrong seeds
#
# ### Groups created in different orders
#
# The ranks of a new group find each other in a common store under the number of the group: the first group that a
# rank makes is number 1, the next is number 2. Below, rank 0 makes the columns of a 2 x 2 grid first, and the others
# make the rows first. Rank $r$ puts in $10^r$. What will rank 0 get over its row [0, 1], where 11 is right?


# %%
def crossed_lines(rank):
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    groups = {}
    for ranks in columns + rows if rank == 0 else rows + columns:
        groups[tuple(ranks)] = dist.new_group(ranks)
    for ranks in sorted(groups):
        if rank in ranks:
            total = torch.tensor(10**rank)
            dist.all_reduce(total, group=groups[ranks])
            print(f"over {list(ranks)}: {total.item():4}")


try:
    launch(crossed_lines, 4, backend="gloo")  # NCCL makes a group in another way, all ranks at once
except RankFailure as failure:
    print(failure)

# %% [markdown]
# All ranks finished, and both of rank 0's sums are wrong. Only `launch` compares which groups the ranks make;
# torchrun says nothing. Rank 0's row is its third group, and the third group of the others is the column [0, 2], so
# its row connects it to rank 2. With other lists, a rank waits in `new_group` until the time limit, half an hour with
# gloo. To repair it, make all groups in the same order on every rank, in one function or with `init_device_mesh`.
#
# ### Seeds: the same random numbers, or others
#
# Which ranks have to draw the same random numbers depends on what the numbers are for.
#
# | what is drawn | has to differ along | has to agree along |
# |---|---|---|
# | whole initial weights, cut afterwards | nothing | everything: all cut the same model |
# | initial weights that a tensor group cuts, each rank only its own part | pipeline, tensor | data: copies begin alike |
# | initial weights that a tensor group holds whole | pipeline | data, tensor |
# | dropout of activations that a tensor group holds whole | data, pipeline | tensor |
# | dropout of columns that a tensor group has cut | data, pipeline, tensor | nothing |
# | the order of the rows in an epoch | nothing | everything: rows are dealt out from one order |
#
# A seed that differs along some dimensions only is computed from those coordinates. **Predict** how many different
# seeds there are on the 2 x 2 x 2 grid for the second and the fourth row of the table.

# %% tags=["prediction"]
DIFFER = {
    "whole weights, order of rows": [],
    "weights in parts": ["pipeline", "tensor"],
    "weights held whole by a tensor group": ["pipeline"],
    "dropout, whole": ["data", "pipeline"],
    "dropout, cut": ["data", "pipeline", "tensor"],
}
predicted = {"weights in parts": 4, "dropout, whole": 4}


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
def draw_numbers(rank):
    groups = groups_of_mesh(2, 2, 2)
    drawn = {}
    for what, dimensions in DIFFER.items():
        generator = torch.Generator().manual_seed(seed_for(groups, dimensions))
        drawn[what] = torch.rand(4, generator=generator).tolist()
    return drawn


# %%
drawn = launch(draw_numbers, 8)
different = {what: len({tuple(of[what]) for of in drawn}) for what in DIFFER}

# %%
compare(
    predicted,
    different,
    likely={
        "A seed for each rank: ranks that hold the same must draw the same.": {
            "weights in parts": 8,
            "dropout, whole": 8,
        },
        "The same seed everywhere: parts of one thing would be copies of each other.": {
            "weights in parts": 1,
            "dropout, whole": 1,
        },
    },
)

# %%
print("different draws among eight ranks:")
for what, number in different.items():
    print(f"{what:36} {number}")

# %% [markdown]
# ## 6. Exercise: place the dimensions on machines
#
# ### 7.5 Which dimension on the fast links? (3 points)
#
# A cluster has fast links inside a machine and slow ones between machines. The order of the dimensions decides which
# groups stay inside: the ranks of a group are neighbours in the last dimension, and far apart in the first. Find the
# order that costs least.
#
# Count like this. Ranks are numbered with the last dimension of the order changing fastest, and fill one machine
# after the other. In a step, every rank sends `sent[name]` bytes within its group along `name`. That takes
# `sent[name] / inside` seconds if *each* of the dimension's groups lies within one machine, else `sent[name] /
# between`, because a step waits for the slowest group. The dimensions' times add up. A dimension of size 1 sends
# nothing.

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
# * *Which ranks share a machine* is decided by the launcher: torchrun numbers them machine by machine. Print `mesh` and
#   the host name on each rank once, before you trust a grid.
# * **`NCCL_DEBUG=INFO`** says which routes NCCL has chosen for each group, rings or trees, and over which adapter.
# * *An odd machine* (7 GPUs because one is broken) makes groups that cross its border. Leave the whole machine out.
# * *A change of the grid* needs a converted checkpoint, or one that any grid can read: chapter 8.
#
# ## 9. Remember
#
# 1. On two kinds of links, add up inside, then between, then share: a rank sends only its part over the slow link.
# 2. A seed differs along the dimensions along which the numbers must differ, and is the same along the others.
# 3. Memory says which grids are possible, and the batch says which one is fast: as it grows, the bubble's share
#    shrinks and the all-reduces grow.
#
# **Sources**
#
# * D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, SC 2021,
#   [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): section 3 (how to choose the sizes).
# * PyTorch: [DeviceMesh](https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html).
# * NVIDIA: [NCCL's environment variables](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
