# %% [markdown]
# # 7. Hybrid: three dimensions at once
#
# You know three ways to use several ranks. **Data parallelism** gives each rank its own rows (chapter 3), a
# **pipeline** its own layers (chapter 5), and **tensor parallelism** a part of every layer (chapter 6). Each has a
# limit: a large model cannot be copied to every rank, a pipeline needs many micro-batches, and tensor parallelism
# needs the fast links inside one machine. Large models are trained with all three together.
#
# The new question is *who talks to whom*: every rank belongs to three groups, and each call goes to one of them. When a
# call goes to the wrong group, the shapes still fit and nothing complains.
#
# By the end you will have trained a language model on 2 x 2 x 2 = 8 ranks to the same parameters as in one process,
# and will know what each group sends and which needs the fast links.

# %% tags=["nbval-ignore-output"]
import math
from argparse import Namespace
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy, gelu

from course_exercises import check, hint
from course_exercises.mine.train_06 import Transformer
from course_utils import hardware
from course_utils.figures import ch07
from course_utils.launch import launch
from course_utils.lesson import text
from course_utils.lesson.equality import check_equal, flat, largest_difference
from course_utils.lesson.explore import Explorer
from course_utils.lesson.predictions import compare
from course_utils.lesson.terminal import scratch, torchrun
from course_utils.trace import Trace
from course_utils.trace.meters import local  # this rank's part of a DTensor, or the tensor itself

hardware.report()

# %% [markdown]
# ## 1. The factory: two sites, four buildings each
#
# The company now has two sites, and each runs a whole line on its own half of the material. The first stations of a
# line stand in one pair of buildings and the last stations in another; trucks carry the half-finished parts between
# them. The two buildings of a pair share their stations: each does half of the work, and they add up the results. So
# each building exchanges with three others, for three different reasons.

# %%
figure = ch07.sites()
plt.show()

# %% [markdown]
# *Each building is a rank. Pink joins two buildings that share their stations, orange leads to the next stations of the
# line, and blue joins two buildings that do the same work on different material.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | which of the lines a building belongs to | coordinate in **data** | which rows of the batch a rank sees |
# | its stations along the line | coordinate in **pipeline** | which layers a rank holds |
# | its share of each station | coordinate in **tensor** | which part of each layer a rank holds |
# | buildings that exchange for one reason | process group | the ranks that differ in one coordinate only |
# | site plan | **device mesh** | all ranks in a grid, with names for its dimensions |

# %% [markdown]
# ## 2. The smallest real run: four ranks, two dimensions
#
# The MLP of chapter 6 is cut between the two ranks of a tensor group, and each of the two tensor groups has half of
# the rows. The sum over the hidden columns runs in the tensor group. The sum of the gradients runs in the data group,
# whose ranks hold the same part of the matrices.
#
# `new_group` makes a process group out of some ranks. *All* ranks make all groups, in the same order, even those that
# they do not belong to. (`07_hybrid_further` shows what happens otherwise.)


# %%
def batch_and_matrices():
    torch.manual_seed(0)  # the same numbers on all ranks
    shapes = (6, 4), (4, 16), (16, 4)
    return [torch.randn(shape, device=hardware.device()) / shape[0] ** 0.5 for shape in shapes]


def four_ranks(rank):
    tensor_groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    data_groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    data, tensor = divmod(rank, 2)  # the rank's coordinates
    x, A, B = batch_and_matrices()
    hidden = gelu(x.chunk(2)[data] @ A.chunk(2, dim=1)[tensor])  # half the rows, half the columns
    y = hidden @ B.chunk(2)[tensor]
    dist.all_reduce(y, group=tensor_groups[data])  # over the hidden columns
    gradient = 2 * hidden.T @ y  # of this half of B, for the sum of squares of y
    dist.all_reduce(gradient, group=data_groups[tensor])  # over the rows
    return gradient.cpu()


# %%
x, A, B = batch_and_matrices()
whole = 2 * gelu(x @ A).T @ (gelu(x @ A) @ B)
halves = launch(four_ranks, 4)
copies = [torch.cat(halves[:2]), torch.cat(halves[2:])]
print("largest difference from one process:", check_equal(whole.cpu(), copies))

# %% [markdown]
# Each rank saw half of the rows, held half of each matrix, and ended with the whole batch's gradient of its half of
# B.

# %% [markdown]
# ## 3. Predict, then measure: groups, bytes and links
#
# ### Ranks as coordinates
#
# There are $d \cdot p \cdot t$ ranks for $d$ copies of the model (data), $p$ stages (pipeline) and $t$ parts of each
# layer (tensor). A rank's coordinates $i_d$, $i_p$ and $i_t$ are counted from 0, and the last one changes fastest:
#
# $$\text{rank} = (i_d \cdot p + i_p) \cdot t + i_t .$$
#
# The order matters because machines are filled with consecutive ranks: 0 to 7 are the 8 GPUs of the first machine.
# Ranks that differ only in the last coordinate are neighbours, so the last dimension should be the one that needs the
# fastest links. You will see why that is tensor.
#
# A group of a dimension is a row of the grid along that dimension: its coordinate varies, and the others stay the
# same.

# %%
figure = ch07.grid(2, 2, 2, chosen=5)
plt.show()

# %% [markdown]
# *Each frame is a copy of the model, with its stages side by side and the parts of a layer one under the other. Rank 5
# has the coordinates (1, 0, 1). It shares a group with each of the three coloured ranks, and none with the white ones.*

# %% [markdown]
# ### 7.1 The groups of any grid, by arithmetic (2 points)
#
# A group of a dimension holds the ranks that differ in that coordinate *only*. Each dimension puts every rank into
# exactly one group. Large models have up to five dimensions (the others are context and experts), and their best
# order depends on the machines (7.5). So take any dimensions, in any order, and find their groups by integer
# arithmetic. You will need it again when a log file says that rank 37 waits and you ask which ranks it waits for. The
# order of the groups counts too: every rank calls `new_group` for every group, so all ranks need the same list.


# %% nbgrader={"grade_id": "7.1", "solution": true}
def groups_of(sizes: dict[str, int]) -> dict[str, list[list[int]]]:
    """Returns all groups of a grid of ranks, by dimension.

    `sizes` maps the names of one or more dimensions to their sizes, the slowest first: from rank to rank the
    coordinate in the last dimension changes fastest. The result has the same names. A group is a list of ranks
    in ascending order; the groups of a dimension are in ascending order of their first ranks. A
    dimension of size 1 has groups of one rank. The sizes are at least 1.
    """
    ### BEGIN SOLUTION
    ranks, stride, groups = math.prod(sizes.values()), 1, {}
    for name, size in reversed(sizes.items()):  # from the fastest to the slowest
        firsts = [rank for rank in range(ranks) if rank // stride % size == 0]
        groups[name] = [[first + i * stride for i in range(size)] for first in firsts]
        stride *= size
    return groups
    ### END SOLUTION


# %% nbgrader={"grade_id": "7.1-check", "grade": true, "points": 2, "locked": true}
check("7.1", groups_of)

# %% [markdown]
# ### 7.2 Coordinates of a rank, and back (1 point)
#
# This is the same arithmetic as a small class, for the grid of this lesson: the rank with the coordinates (d, p, t) has
# the number (d * pp + p) * tp + t, where `dp`, `pp` and `tp` are the sizes. The class has to refuse what is not in the
# grid. Python's `//` and `%` give coordinates for rank -1 or rank 100 without complaint, and a message that goes to a
# wrong rank is hard to find later.


# %% nbgrader={"grade_id": "7.2", "solution": true}
class RankGrid:
    """A grid of dp * pp * tp ranks."""

    def __init__(self, dp: int, pp: int, tp: int) -> None:
        ### BEGIN SOLUTION
        self.sizes = dp, pp, tp
        ### END SOLUTION

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Returns (d, p, t) of a rank; raises ValueError for a rank outside the grid."""
        ### BEGIN SOLUTION
        dp, pp, tp = self.sizes
        if not 0 <= rank < dp * pp * tp:
            raise ValueError(f"rank {rank} is outside a grid of {dp * pp * tp} ranks")
        return rank // (pp * tp), rank // tp % pp, rank % tp
        ### END SOLUTION

    def rank(self, d: int, p: int, t: int) -> int:
        """Returns the rank at these coordinates; raises ValueError if one is outside the grid."""
        ### BEGIN SOLUTION
        _, pp, tp = self.sizes
        for coordinate, size in zip((d, p, t), self.sizes):
            if not 0 <= coordinate < size:
                raise ValueError(f"coordinate {coordinate} is outside 0 to {size - 1}")
        return (d * pp + p) * tp + t
        ### END SOLUTION


# %% nbgrader={"grade_id": "7.2-check", "grade": true, "points": 1, "locked": true}
check("7.2", RankGrid)

# %% [markdown]
# ### Groups by hand
#
# Below are the lines of the 2 x 2 x 2 grid. Your answer to 7.1 gives them for any grid.


# %%
def groups_by_hand(lines):
    """Returns this rank's group along each dimension. All ranks call it, with the same lines."""
    mine = {}
    for name, groups in lines.items():
        for ranks in groups:
            group = dist.new_group(ranks)  # every rank makes every group
            if dist.get_rank() in ranks:
                mine[name] = group  # and keeps the one that it belongs to
    return mine


def members(rank, make_groups, *arguments):
    groups = make_groups(*arguments)
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


LINES = {
    "data": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "pipeline": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
}
by_hand = launch(members, 8, groups_by_hand, LINES)
print("the groups of rank 5:", by_hand[5])

# %% [markdown]
# Each rank calls `new_group` twelve times and belongs to three of the groups. The calls return **handles**, the only
# way to use a group, so a rank has to keep its three. Inside a group the ranks are numbered from 0:
# `dist.get_rank(group)` is the coordinate along that dimension.
#
# ### DeviceMesh: the same, with names
#
# `init_device_mesh` makes the grid and all its groups in one call, and `mesh.get_group("tensor")` returns a handle.

# %%
DIMENSIONS = ("data", "pipeline", "tensor")


def groups_of_mesh(data, pipeline, tensor):
    """Returns this rank's group along each dimension, from a DeviceMesh."""
    sizes = (data, pipeline, tensor)
    mesh = init_device_mesh(hardware.device().type, sizes, mesh_dim_names=DIMENSIONS)
    return {name: mesh.get_group(name) for name in DIMENSIONS}


of_mesh = launch(members, 8, groups_of_mesh, 2, 2, 2)
agreeing = sum(mesh == hand for mesh, hand in zip(of_mesh, by_hand))
print(f"ranks that have the same groups as by hand: {agreeing} of 8")

# %% [markdown]
# ### What each dimension sends
#
# In a step, **tensor** all-reduces the activations of all tokens of a copy, four times in each block (chapter 6).
# **Pipeline** sends the same activations to the next stage once, and their gradients back (chapter 5). **Data**
# all-reduces the gradients of the parameters that the rank holds (chapter 3). On a ring of $n$ ranks, an all-reduce
# sends $2(n-1)/n$ times what a rank hands over.
#
# **Predict:** a tensor group of 2 ranks becomes one of 4, with as many copies and stages as before, so that every
# rank computes half as much. By what factor do the bytes that a rank sends to its tensor group and to its data group
# change?

# %% tags=["prediction"]
predicted = {"tensor": 1.5, "data": 0.5}


# %%
def bytes_of_step(sizes, layers, width, tokens, parameters, number=2, neighbours=2):
    """What a rank with `neighbours` pipeline neighbours sends, on rings: {dimension: bytes}."""
    d, p, t = sizes
    activations = tokens / d * width * number  # of one copy
    return {
        "data": 2 * (d - 1) / d * parameters / (p * t) * number,
        "pipeline": min(p - 1, neighbours) * activations,
        "tensor": 2 * (t - 1) / t * 4 * layers / p * activations,
    }


GPT_145B = {"layers": 80, "width": 12_288, "tokens": 2_304 * 2_048, "parameters": 145.6e9}
two, four = (bytes_of_step((24, 8, t), **GPT_145B) for t in (2, 4))

# %%
compare(
    predicted,
    {name: round(four[name] / two[name], 6) for name in predicted},
    likely={
        "That follows the work, but each rank has a part of every sum, and the sum keeps its size.": {
            "tensor": 0.5
        },
        "That follows the number of ranks, but a ring of n sends 2 (n - 1) / n of the tensor.": {
            "tensor": 2.0
        },
    },
)

# %% [markdown]
# Parameters are cut, so the data group gets half as much. Activations are not: every rank of the group takes part in
# the same sums, and a longer ring sends more. Finer cuts make tensor parallelism more expensive while there is less
# to compute.
#
# The sizes are those of a model of 145.6 billion parameters that Narayanan et al.
# ([2021](https://arxiv.org/abs/2104.04473), table 1) trained on 1,536 GPUs, with $d = 24$ and $p = t = 8$. (Their
# recomputation and interleaved stages are left out.) How long do the bytes take? Assume 250 GB/s for a GPU inside a
# machine and 25 GB/s between machines: one adapter of 200 Gb/s for each GPU, as in their cluster.

# %%
inside, between = 250e9, 25e9  # bytes a second
for name, sent in bytes_of_step((24, 8, 8), **GPT_145B).items():
    print(f"{name:9} {sent / 1e9:6.1f} GB: {sent / inside:6.2f} s inside a machine,", end=" ")
    print(f"{sent / between:6.2f} s if the group is spread over machines")

# %% [markdown]
# Spread over machines, tensor would take 13.5 s, and the others under half a second. Besides the bytes, it matters who
# waits for a call.
#
# | dimension | calls in a step | what a call carries | who waits |
# |---|---|---|---|
# | tensor | four per block and micro-batch | activations of a micro-batch | the next layer, every time |
# | pipeline | two per boundary and micro-batch | the same, or their gradients | the next stage, if it has nothing else to do |
# | data | one per bucket, once in a step | gradients | the optimizer; backward can hide most of it |
#
# So tensor belongs inside a machine, pipeline between machines, and data anywhere. Llama 3 was trained with the
# dimensions in the order tensor, context (chapter 10), pipeline, data, from the innermost to the outermost
# ([Grattafiori et al. 2024](https://arxiv.org/abs/2407.21783), section 3.3.2).

# %% [markdown]
# ## 4. By hand, then with PyTorch: two dimensions, then three
#
# ### The tensor dimension: chapter 6 with a group
#
# Only the ranks of a tensor group share a block. So the pair of functions from chapter 6 takes the group as an
# argument and hands it to `all_reduce`.


# %%
class SumBackward(torch.autograd.Function):
    """Identity in forward; backward adds up the gradients over `group`."""

    @staticmethod
    def forward(ctx, whole, group):
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


# %%
class SumForward(torch.autograd.Function):
    """Adds up the partial results over `group` in forward; identity in backward."""

    @staticmethod
    def forward(ctx, partial, group):
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


# %% [markdown]
# ### 7.3 A step in two dimensions: data and tensor (3 points)
#
# The whole model is `y = down(relu(up(scale * x))) + bias` with the loss `nn.functional.mse_loss(y, targets)`, and your
# rank holds a **part** of it:
#
# | attribute of `part` | shape | on the T ranks of a tensor group |
# |---|---|---|
# | `scale`, a parameter | (width,) | the same on each |
# | `up`, an `nn.Linear` | width to hidden / T | each has its own output features, with their bias |
# | `down`, an `nn.Linear` without bias | hidden / T to width | each has the input features that belong to them |
# | `bias`, a parameter | (width,) | the same on each |
#
# The ranks of a data group hold the same part and work on different rows of the global batch. `read_inputs(i, n)` and
# `read_targets(i, n)` read the i-th of n equal blocks of its rows (i from 0). Read what your rank works on, and no
# more: the data dimension exists to share out the reading, too.
#
# Ask the mesh for sizes, coordinates and groups by the names of its dimensions, which may come in any order. You may
# use `SumBackward.apply(x, group)` and `SumForward.apply(x, group)`.


# %% nbgrader={"grade_id": "7.3", "solution": true}
def train_2d_step(
    part: nn.Module,
    read_inputs: Callable[[int, int], Tensor],
    read_targets: Callable[[int, int], Tensor],
    mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer,
) -> float:
    """One step of training on the global batch; returns its mean loss, the same on every rank.

    `mesh` has the dimensions "data" and "tensor", in any order. `read_inputs(i, n)` and
    `read_targets(i, n)` return (rows / n, width). Afterwards every rank's part has the values that
    one process with the whole model and the whole batch would have after `optimizer.step()`. A
    parameter may be frozen, and `.grad` may still hold the gradients of an earlier step.
    """
    ### BEGIN SOLUTION
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    block, blocks = mesh.get_local_rank("data"), data.size()
    inputs, targets = read_inputs(block, blocks), read_targets(block, blocks)
    hidden = part.up(SumBackward.apply(part.scale * inputs, tensor)).relu()
    y = SumForward.apply(part.down(hidden), tensor) + part.bias
    loss = nn.functional.mse_loss(y, targets)
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    averaged = [p.grad for p in part.parameters() if p.grad is not None] + [loss]
    for value in averaged:
        dist.all_reduce(value, group=data)
        value /= blocks
    optimizer.step()
    return loss.item()
    ### END SOLUTION


# %% nbgrader={"grade_id": "7.3-check", "grade": true, "points": 3, "locked": true}
check("7.3", train_2d_step)

# %% [markdown]
# ### The job
#
# The model is that of chapter 6's script: separate matrices for queries, keys and values, grouped heads, SwiGLU. It
# has four blocks of width 32, and a batch is 8 windows of 16 characters. `alone` is the model that one process trains
# on the whole batch.

# %%
CONTEXT, ROWS, STEPS, RATE = 16, 8, 3, 0.5
SIZES = Namespace(width=32, heads=4, kv_heads=2, layers=4, context=CONTEXT)


def new_model() -> nn.Module:
    torch.set_num_threads(1)  # so small a model loses time with more
    torch.manual_seed(0)  # the same start on every rank
    return Transformer(len(text.vocabulary()), SIZES).to(hardware.device())


def batches():
    for step in range(STEPS):
        yield [part.to(hardware.device()) for part in text.windows(CONTEXT, ROWS, seed=step)]


# %% [markdown]
# The loss of a batch is the mean over its tokens. Here each rank takes the *sum* over the tokens that it sees and
# divides by the number of tokens in the *whole* batch. Then the ranks' shares add up to the loss, and their gradients
# add up to the gradient, however the rows are distributed and in however many micro-batches.


# %%
def share_of_loss(logits, targets, tokens=ROWS * CONTEXT):
    """What these rows contribute to the mean loss of a batch of `tokens` tokens."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens


def train(model, step):
    """Three steps of SGD. `step` leaves gradients in the model and returns the loss."""
    # foreach=True, the default on GPUs, does not take DTensors and plain tensors in one model
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        losses.append(step(inputs, targets))
        optimizer.step()
    return losses


# %%
alone = new_model()


def alone_step(inputs, targets):
    loss = share_of_loss(alone(inputs), targets)
    loss.backward()
    return loss.item()


losses_alone = train(alone, alone_step)
print("losses of one process:", *(f"{loss:.3f}" for loss in losses_alone))

# %% [markdown]
# ### With PyTorch: one mesh, an API for each dimension
#
# `parallelize_module` takes `mesh["tensor"]`, and `PipelineStage` takes the group of `mesh["pipeline"]`. For the data
# dimension there are DDP and, for models with DTensors, `fully_shard` (chapter 8); here the sum is written by hand.
#
# Each stage has its share of the blocks; the first also has the embeddings, the last the final norm and the head. Every
# rank builds this small model from one seed and keeps its part. Chapter 8 builds a large one in parts.


# %%
class Stage(nn.Module):
    """The layers of the model that one rank of a pipeline group holds, under their own names."""

    def __init__(self, model: nn.Module, group) -> None:
        super().__init__()
        here, stages = dist.get_rank(group), dist.get_world_size(group)
        own = torch.arange(len(model.blocks)).tensor_split(stages)[here]
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in own.tolist()})
        self.first, self.last = here == 0, here == stages - 1
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.last:
            self.norm, self.output = model.norm, model.output

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.output(self.norm(x)) if self.last else x


# %% [markdown]
# The plan cuts attention and MLP as in chapter 6. `PrepareModuleInput` makes one DTensor of the input of attention:
# without it, backward would sum its gradients from `wq`, `wk` and `wv` in three calls.

# %%
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

ENTRY = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
PLAN = {f"blocks.*.{half}": PrepareModuleInput(**ENTRY) for half in ("attention", "feed_forward")}
PLAN |= {f"blocks.*.attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
PLAN |= {f"blocks.*.feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
PLAN |= {"blocks.*.attention.wo": RowwiseParallel(), "blocks.*.feed_forward.w2": RowwiseParallel()}


# %%
def own_rows(batch: Tensor, group) -> Tensor:
    return batch.tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


def sum_gradients(model: nn.Module, group) -> None:
    """The slow way: one small call for each parameter, after backward."""
    for parameter in model.parameters():
        dist.all_reduce(local(parameter.grad), group=group)


def pipeline_of(stage, group, loss_fn=share_of_loss):
    """GPipe with two micro-batches, on this rank's line of the grid."""
    here, stages = dist.get_rank(group), dist.get_world_size(group)
    own = PipelineStage(stage, here, stages, hardware.device(), group=group)
    return ScheduleGPipe(own, n_microbatches=2, loss_fn=loss_fn, scale_grads=False)  # shares add up


# %% [markdown]
# In a step, the *data* coordinate chooses the rows, so that all ranks of a copy work on the same ones. (`rows_by` and
# `sum_over` are set wrong in section 5.)


# %%
def on_grid(sizes, rows_by="data", sum_over="data"):
    """This rank's part of the model, a step that leaves its gradients, and the groups."""
    mesh = init_device_mesh(hardware.device().type, sizes, mesh_dim_names=DIMENSIONS)
    groups = {name: mesh.get_group(name) for name in DIMENSIONS} | {"all ranks": dist.group.WORLD}
    stage = Stage(new_model(), groups["pipeline"])
    parallelize_module(stage, mesh["tensor"], PLAN)
    schedule = pipeline_of(stage, groups["pipeline"])

    def step(inputs, targets):
        inputs, targets = (own_rows(part, groups[rows_by]) for part in (inputs, targets))
        rows = [inputs] if stage.first else []  # later stages receive activations
        losses = []  # of the micro-batches, on the last stage
        schedule.step(*rows, target=targets, losses=losses)
        sum_gradients(stage, groups[sum_over])
        return sum(loss.item() for loss in losses)  # this rank's share

    return stage, step, groups


# %%
def put_together(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def held_by(model):
    """Each parameter's value and last gradient by name, put together over the tensor group."""
    named = model.named_parameters()
    return {name: [put_together(p.detach()), put_together(p.grad)] for name, p in named}


def train_on_grid(rank, sizes, *wrong):
    stage, step, _ = on_grid(sizes, *wrong)
    return train(stage, step), held_by(stage)


def beside_one_process(results):
    """What all ranks should hold, and what they hold: two vectors."""
    whole, held = held_by(alone), [held for _, held in results]
    assert {name for names in held for name in names} == whole.keys(), "a parameter is missing"
    expected = flat(each for names in held for name in names for each in whole[name])
    return expected, flat(each for names in held for pair in names.values() for each in pair)


# %%
for sizes in ((2, 1, 2), (2, 2, 1), (2, 2, 2)):
    expected, found = beside_one_process(launch(train_on_grid, math.prod(sizes), sizes))
    print(f"{sizes}: largest difference from one process: {check_equal(expected, [found])}")

# %% [markdown]
# Up to eight processes with three kinds of groups end with the parameters and gradients of one process.
#
# **Predict:** on the grid of eight, the batch gets twice as many rows. By what factor do the bytes that a rank hands
# over to its tensor group and to its data group change?

# %% tags=["prediction"]
predicted = {"tensor": 2.0, "data": 1.0}


# %%
def calls_of_step(rank, rows):
    """(dimension, bytes handed over) of this rank's calls, in their order."""
    _, step, groups = on_grid((2, 2, 2))
    batch = [part.to(hardware.device()) for part in text.windows(CONTEXT, rows)]
    step(*batch)  # the first one also exchanges the shapes of the activations
    with Trace() as trace:
        step(*batch)
    lines = {name: set(dist.get_process_group_ranks(group)) for name, group in groups.items()}
    calls = []
    for call in trace.record().calls:
        dimension = next(name for name in lines if set(call.ranks) <= lines[name])
        calls.append((dimension, call.bytes if call.sends else 0))
    return calls


def bytes_to(name, calls):
    return sum(count for dimension, count in calls if dimension == name)


few, many = (launch(calls_of_step, 8, rows)[5] for rows in (ROWS, 2 * ROWS))  # of rank 5

# %%
compare(
    predicted,
    {name: bytes_to(name, many) / bytes_to(name, few) for name in predicted},
    likely={
        "That follows the rows, but there are as many gradients as parameters, whatever the batch.": {
            "data": 2.0
        },
        "That follows the parameters, but the sums inside a block are over activations.": {
            "tensor": 1.0
        },
    },
)

# %%
figure = ch07.calls_of_step([name for name, _ in few], rank=5)
plt.show()
for name in DIMENSIONS:
    print(f"{name:9} {bytes_to(name, few):7,} bytes for 8 rows, {bytes_to(name, many):7,} for 16")

# %% [markdown]
# *Each bar is a call of rank 5. Tensor calls fill the two forward and the two backward passes, a pipeline call ends
# each forward and begins each backward, and data calls come at the end only.*
#
# Activations grow with the tokens, and gradients do not. Data has so many calls because `sum_gradients` has no
# buckets. DDP has them and overlaps them with backward. Around a stage, DDP has to wait for the last micro-batch:
# `PipelineStage` holds it back with `no_sync()` until then.

# %% [markdown]
# ### 7.4 A step in three dimensions (4 points)
#
# Now write it by hand. The model of 7.3 gets longer and is cut into stages, each of them one `part` as in 7.3. On 2 x
# 2 x 2 ranks, each process holds a quarter of the model and sees half of the batch.
#
# The first stage reads inputs, the last one reads targets and computes the loss. In between, activations go to the next
# stage and their gradients come back, between ranks that differ in the pipeline coordinate only. A receiver needs a
# tensor of the right shape: `shape` is that of the activations between the stages, for the rows of one rank. One
# micro-batch is enough here.
#
# Mind the rank numbers. `dist.send(x, dst=...)` takes a *global* rank, even if you pass a group; `group_dst=` takes a
# number within the group. `recv` and `broadcast` have `group_src=`.


# %% nbgrader={"grade_id": "7.4", "solution": true}
def train_3d_step(
    part: nn.Module,
    read_inputs: Callable[[int, int], Tensor],
    read_targets: Callable[[int, int], Tensor],
    shape: tuple[int, int],
    mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer,
) -> float:
    """One step of training on the global batch; returns its mean loss, the same on every rank.

    `part` is this rank's part of stage p of the model, where p is its coordinate in "pipeline"; a
    pipeline may have one stage. Only the first stage reads inputs, and only the last one targets.
    `mesh` has the dimensions "data", "pipeline" and "tensor", in any order. `shape` is (rows,
    width) of the activations between two stages, float32, on `hardware.device()`. The rest is as
    in `train_2d_step`.
    """
    ### BEGIN SOLUTION
    data, pipeline, tensor = (mesh.get_group(name) for name in ("data", "pipeline", "tensor"))
    block, stage = mesh.get_local_rank("data"), mesh.get_local_rank("pipeline")
    is_first, is_last = stage == 0, stage == pipeline.size() - 1
    if is_first:
        x = read_inputs(block, data.size())
    else:
        x = torch.empty(shape, device=hardware.device())
        dist.recv(x, group=pipeline, group_src=stage - 1)
        x.requires_grad_()
    scaled = SumBackward.apply(x * part.scale, tensor)
    y = part.bias + SumForward.apply(part.down(part.up(scaled).relu()), tensor)
    optimizer.zero_grad()
    mean_loss = torch.zeros((), device=hardware.device())
    if is_last:
        loss = nn.functional.mse_loss(y, read_targets(block, data.size()))
        loss.backward()
        mean_loss += loss.detach()
    else:
        dist.send(y.detach(), group=pipeline, group_dst=stage + 1)
        gradient = torch.empty_like(y)
        dist.recv(gradient, group=pipeline, group_src=stage + 1)
        y.backward(gradient)
    if not is_first:
        dist.send(x.grad, group=pipeline, group_dst=stage - 1)
    gradients = [p.grad for p in part.parameters() if p.grad is not None]
    for tensor_to_average in (*gradients, mean_loss):
        dist.all_reduce(tensor_to_average, group=data)
        tensor_to_average /= data.size()
    optimizer.step()
    dist.broadcast(mean_loss, group=pipeline, group_src=pipeline.size() - 1)
    return mean_loss.item()
    ### END SOLUTION


# %% nbgrader={"grade_id": "7.4-check", "grade": true, "points": 4, "locked": true}
check("7.4", train_3d_step)

# %% [markdown]
# ## 5. Break it: calls to the wrong ranks
#
# ### Bug hunt: a setup that keeps nothing
#
# You will find this function on the web as *simple hybrid parallelism*. (There it begins with `init_process_group`,
# which `launch` has called here.) Its lists of ranks are right. What is missing?


# %%
def setup_hybrid_parallelism():
    global_world_size = dist.get_world_size()
    model_parallel_size = 2
    data_parallel_size = global_world_size // model_parallel_size
    for i in range(data_parallel_size):
        ranks = list(range(i * model_parallel_size, (i + 1) * model_parallel_size))
        dist.new_group(ranks=ranks)
    for i in range(model_parallel_size):
        ranks = list(range(i, global_world_size, model_parallel_size))
        dist.new_group(ranks=ranks)
    return dist.get_rank(), global_world_size, model_parallel_size, data_parallel_size


# %%
def sum_after_that_setup(rank):
    setup_hybrid_parallelism()
    total = torch.tensor(10**rank, device=hardware.device())  # a digit for each rank
    dist.all_reduce(total)
    return total.item()


print("the sum on each rank:", launch(sum_after_that_setup, 4))

# %% [markdown]
# The function drops the handles, so no rank can use the groups. All that is left is `all_reduce` without a group, and
# the digits of the sum show that all four ranks took part. Rank 0 shares its part of the model with rank 2 only, so
# 101 would be right. With gradients, each half of a matrix would be updated with the gradients of both halves.
#
# ### The wrong mesh dimension for the gradients
#
# One word is wrong: gradients are summed over `tensor` instead of `data`. Both groups have two ranks, and a gradient
# has the same shape in both. Does it run? Does the loss fall? How would you find the mistake?


# %%
def report(rows_by, sum_over):
    results = launch(train_on_grid, 4, (2, 1, 2), rows_by, sum_over)
    expected, found = beside_one_process(results)
    matrix = [held["blocks.0.feed_forward.w1.weight"][0].cpu() for _, held in results]
    norm = [held["norm.weight"][0].cpu() for _, held in results]
    print(f"rows by {rows_by}, gradients over {sum_over}:")
    print("    rank 0's share of the loss:", *(f"{loss:.3f}" for loss in results[0][0]))
    print("    difference from one process:", largest_difference(expected, [found]))
    print(
        "    largest difference of a matrix between the two copies:",
        largest_difference(matrix[0], [matrix[2]]),
    )
    print("    in a tensor group, of a norm:", largest_difference(norm[0], [norm[1]]))


report(rows_by="data", sum_over="data")
report(rows_by="data", sum_over="tensor")

# %% [markdown]
# The loss falls, as it often does with wrong gradients. Each half of a cut matrix was changed by the gradients of
# both halves, and the rows of the other copy never counted. A comparison with one process finds it. In a large run,
# compare sums of the parameters: they must be equal on ranks that differ in the data coordinate only.
#
# ### A batch that differs inside a tensor group
#
# A `DistributedSampler` without further arguments shares rows out by global rank. That was right in chapter 3. Here
# ranks 0 and 1 hold two halves of the *same* model.

# %%
report(rows_by="all ranks", sum_over="data")

# %% [markdown]
# Each rank sees a quarter of the rows now, so rank 0's share is half as large. The ranks of a tensor group add up
# halves of results for different rows, so the training is wrong again. This time the copies agree, and the norms in a
# tensor group, which should be identical, drift apart. The sampler needs the size and the coordinate of the *data*
# dimension: `DistributedSampler(rows, num_replicas=mesh["data"].size(), rank=mesh["data"].get_local_rank())`. A
# pipeline has the same trap: its last stage needs the targets of the rows that its first stage reads.
#
# ### Global rank or group rank
#
# On a 2 x 1 x 2 grid, the data groups are [0, 2] and [1, 3]. The copy with data coordinate 1 has loaded a checkpoint
# and sends it to the other: `dist.broadcast(number, src=1, group=data_group)`. Each rank's number is its own rank at
# first. **Predict** the number that rank 3 holds afterwards.

# %% tags=["prediction"]
predicted = {"rank 3 holds": 1}


# %%
def tell_the_copy(rank, source):
    group = groups_of_mesh(2, 1, 2)["data"]
    number = torch.tensor(rank, device=hardware.device())
    try:
        dist.broadcast(number, group=group, **source)
    except ValueError as error:
        return f"{type(error).__name__}: {str(error).split(' <')[0]}"
    return number.item()


by_global_rank = launch(tell_the_copy, 4, {"src": 1})

# %%
compare(
    predicted,
    {"rank 3 holds": by_global_rank[3]},
    likely={
        "That is the member with data coordinate 1, rank 3 itself; but src is a global rank.": {
            "rank 3 holds": 3
        }
    },
)

# %%
by_group_rank = launch(tell_the_copy, 4, {"group_src": 1})
print("what each rank holds afterwards, or the error that it gets:")
for rank in range(4):
    print(
        f"rank {rank}: src=1 gives {by_global_rank[rank]}, group_src=1 gives {by_group_rank[rank]}"
    )

# %% [markdown]
# `src` is a *global* rank, even with `group=`. The first data group does not contain global rank 1, so you get an
# error, which is the lucky case. In the second group, global rank 1 is the *first* member. It has no checkpoint, and
# it overwrites the rank that has one. `group_src` counts inside the group. `send` and `recv` have the same trap: a
# pipeline that passes stage numbers as global ranks is right only on a 1 x p x 1 grid. On a larger one it raises an
# error (with `group=`), or hangs (without).

# %% [markdown]
# ## 6. Exercises: place the ranks, then train on them
#
# | exercise | points | where it stands |
# |---|---|---|
# | 7.1 The groups of any grid, by arithmetic | 2 | section 3, after *Ranks as coordinates* |
# | 7.2 Coordinates of a rank, and back | 1 | after 7.1 |
# | 7.3 A step in two dimensions: data and tensor | 3 | section 4, after *The tensor dimension* |
# | 7.4 A step in three dimensions | 4 | section 4, after *With PyTorch* |
# | 7.5 Which dimension on the fast links? | 3 | `07_hybrid_further` |

# %% [markdown]
# ## 7. See it: the grid of ranks
#
# The explorer shows what a rank sends to its three groups in a step of a model of 7.5 billion parameters (the third in
# table 1 of Narayanan et al. 2021), by the formulas of section 3. Try three things:
#
# * Set tensor to 2, then to 4: it sends *more*, although every rank computes less.
# * Increase data: tensor and pipeline send less, because a copy has fewer tokens.
# * Find the grids in which the pipeline group spans several machines of 8 ranks and the tensor group does not.

# %%
GPT_7_5B = {"layers": 36, "width": 4_096, "tokens": 512 * 2_048, "parameters": 7.5e9}


def draw_grid_and_bytes(data, pipeline, tensor, rank):
    rank = min(rank, data * pipeline * tensor - 1)  # the last one, where the grid is smaller
    stage = rank // tensor % pipeline
    neighbours = (stage > 0) + (stage < pipeline - 1)
    sent = bytes_of_step((data, pipeline, tensor), **GPT_7_5B, neighbours=neighbours)
    return ch07.grid_and_bytes((data, pipeline, tensor), rank, sent)


Explorer(draw_grid_and_bytes, data=(1, 4, 2), pipeline=(1, 4, 2), tensor=(1, 4, 4), rank=(0, 63, 5))

# %% [markdown]
# *At the start, rank 5 is in the second stage of the first of two copies. Its tensor group is its column, its pipeline
# group is its row, and its data group continues in the other frame.*

# %% [markdown]
# ## 8. On a cluster: the same grid under torchrun
#
# The script trains the model of section 4 on the grid that its arguments give. Data has to divide the 8 rows of a
# batch, pipeline is at most 4 and at most 8 / data, and tensor is 1 or 2, as there are two heads of keys. Below it
# runs on four processes; try `1 2 2` and `1 4 1`, and `2 2 2` on eight.

# %%
script = scratch() / "hybrid.py"
script.unlink(missing_ok=True)

# %%
# %%writefile scratch/hybrid.py
"""Trains a small language model on a grid: torchrun --nproc-per-node 8 hybrid.py 2 2 2"""

import os
import sys
from argparse import Namespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from course_exercises.mine.train_06 import Transformer
from course_utils.lesson import text
from course_utils.trace.meters import local

ROWS, CONTEXT, LAYERS = 8, 16, 4
ROWWISE = ("attention.wo", "feed_forward.w2")
COLWISE = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
PLAN = {f"*.{name}": ColwiseParallel() for name in COLWISE}
PLAN |= {f"*.{name}": RowwiseParallel() for name in ROWWISE}

sizes = tuple(map(int, sys.argv[1:4]))
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "pipeline", "tensor"))
data, pipeline = mesh.get_group("data"), mesh.get_group("pipeline")
copy, stage = mesh.get_local_rank("data"), mesh.get_local_rank("pipeline")
first, last = stage == 0, stage == sizes[1] - 1

torch.manual_seed(0)  # the same model on every rank; each keeps its part
options = Namespace(width=32, heads=4, kv_heads=2, layers=LAYERS, context=CONTEXT)
whole = Transformer(len(text.vocabulary()), options)


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = whole.tokens, whole.positions

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions.weight


layers = [whole.blocks[i] for i in torch.arange(LAYERS).tensor_split(sizes[1])[stage]]
module = nn.Sequential(*[Embeddings()] * first, *layers, *[whole.norm, whole.output] * last)
parallelize_module(module.to(device), mesh["tensor"], PLAN)


def share_of_loss(out, targets):
    return cross_entropy(out.flatten(0, 1), targets.flatten(), reduction="sum") / (ROWS * CONTEXT)


own = PipelineStage(module, stage, sizes[1], device, group=pipeline)
schedule = Schedule1F1B(own, ROWS // sizes[0], loss_fn=share_of_loss, scale_grads=False)
optimizer = torch.optim.SGD(module.parameters(), lr=0.5, foreach=False)
for step in range(3):
    optimizer.zero_grad()
    batch = text.windows(CONTEXT, ROWS, seed=step)
    tokens, targets = (part.chunk(sizes[0])[copy].to(device) for part in batch)
    rows, losses = [tokens] if first else [], []
    schedule.step(*rows, target=targets, losses=losses)
    for parameter in module.parameters():
        dist.all_reduce(local(parameter.grad), group=data)
    optimizer.step()
    loss = sum(losses, torch.zeros((), device=device)).detach()
    dist.all_reduce(loss, group=data)
    if last and dist.get_rank() == dist.get_world_size() - 1:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()


# %%
print(torchrun(4, script, "2", "1", "2"), end="")
print("losses of one process:", *(f"{loss:.3f}" for loss in losses_alone))

# %% [markdown]
# What changes on a cluster:
#
# * **The order of the dimensions.** torchrun numbers the ranks machine by machine. If `tensor` is last in the mesh and
#   divides the GPUs of a machine, every tensor group is inside one.
# * **Who prints and who saves.** Only the last stage knows the loss. A checkpoint needs every part once: the ranks
#   with data coordinate 0 write it, or `torch.distributed.checkpoint` does (chapter 8).
# * **The gradient norm.** To clip gradients, sum the squares over the tensor group for parameters that are cut, then
#   over the pipeline group for all, and not over the data group, whose ranks hold the same gradients.
# * **The order of calls.** Each group has its own communicator in NCCL. Two ranks that call two groups in different
#   orders can wait for each other for ever.
# * **The bubble.** With a fixed batch, more copies leave fewer micro-batches for each pipeline.

# %% [markdown]
# ## 9. Remember
#
# 1. A rank is a point of a grid: data says which rows it sees, pipeline which layers it holds, and tensor which part of
#    them. A group is a line of the grid.
# 2. Every rank makes every group, in the same order, and keeps its handles. A DeviceMesh does both.
# 3. A tensor group exchanges activations four times in each block, a pipeline once for each boundary and direction, and
#    a data group gradients once in a step. So tensor comes last in the mesh and gets the fastest links.
# 4. Divide the summed loss by the tokens of the whole batch. Then losses and gradients add up over the data group.
# 5. A call in the wrong group raises no error, as the shapes fit. Compare with one process, and check that copies
#    agree.
#
# **Sources**
#
# * D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, SC 2021,
#   [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): sections 3.2, 3.3 and 5, table 1.
# * A. Grattafiori et al., *The Llama 3 Herd of Models*, 2024, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783):
#   section 3.3.2 and table 4.
# * PyTorch: [DeviceMesh](https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html),
#   [pipelining](https://docs.pytorch.org/docs/stable/distributed.pipelining.html), [tensor
#   parallelism](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html).
