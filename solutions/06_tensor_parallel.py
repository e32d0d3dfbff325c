# %% [markdown]
# # 6. Tensor parallel: one station, several buildings
#
# Chapters 4 and 5 cut a model between its layers. This chapter cuts the layers themselves. Every rank holds a part of
# every weight matrix, all ranks work on the same tokens at the same time, and a few collectives put the parts
# together. This is **tensor parallelism**.
#
# You write both kinds of cut layers, attention on several ranks, and a loss over a cut vocabulary. At the end you cut
# your own training script.

# %% tags=["nbval-ignore-output"]
import warnings
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear

from course_exercises import check, hint
from course_utils import hardware
from course_utils.figures import ch06
from course_utils.launch import launch
from course_utils.lesson import explore, text
from course_utils.lesson.equality import check_equal, flat, largest_difference
from course_utils.lesson.models import (
    Attention,
    Block,
    FeedForward,
    GroupedAttention,
    LanguageModel,
)
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace, ring_bytes

hardware.report()

# %% [markdown]
# ## 1. The factory: one station, several buildings
#
# So far a station of the line stood in one building. Now look at a single station. Its part of the blueprint has
# grown so large that no building can hold it, or its work takes so long that the whole line waits.
#
# So several buildings share the station. Each holds a part of every sheet of the station's blueprint. All of the
# material goes to every building, and each produces a partial result as large as the full one. A round of trucks adds
# the partial results up, and every building gets the sum.
#
# Every station needs such rounds, so buildings that share a station should be close together.

# %%
figure = ch06.one_station()
plt.show()

# %% [markdown]
# *Each building has a quarter of two sheets of the blueprint. Its partial result is as large as the whole one.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | buildings that share a station | **tensor-parallel group** | the ranks that share one copy of each layer |
# | a building's part of the blueprint | **shard** of a weight | the piece that a rank holds |
# | material that every building has | **replicated** activations | the same tensor on every rank |
# | partial results | **partial** activations | the true tensor is the sum over the ranks |
# | half-finished parts, different in each building | **sharded** activations | each rank has different columns, or tokens |

# %% [markdown]
# ## 2. The smallest real run: half an MLP on each of two ranks
#
# An **MLP** is two matrices with a function between them: `gelu(x @ A) @ B`. Rank 0 takes the left half of A's
# columns and the upper half of B's rows, rank 1 takes the other halves. One all-reduce gives both ranks the result.


# %%
def half_an_mlp_each(rank):
    torch.manual_seed(0)  # the same numbers on both ranks
    x, A, B = torch.randn(3, 4), torch.randn(4, 16), torch.randn(16, 4)
    mine = slice(8 * rank, 8 * rank + 8)
    partial = (gelu(x @ A[:, mine]) @ B[mine]).to(hardware.device())
    dist.all_reduce(partial)  # adds up what the two ranks have
    return check_equal(gelu(x @ A) @ B, [partial.cpu()])


for rank, difference in enumerate(launch(half_an_mlp_each, 2)):
    print(f"rank {rank}: largest difference from the whole MLP: {difference}")

# %% [markdown]
# Why these halves? And what does backward do?

# %% [markdown]
# ## 3. Predict, then measure: what a cut sends
#
# ### Two ways to cut a matrix
#
# The product $Y = XA$ can be cut in two ways ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), section 3).
#
# * **Column cut:** each rank has some columns of $A$. It needs all of $X$, and gets some columns of $Y$, finished.
# * **Row cut:** each rank has some rows of $A$. It needs only the matching columns of $X$, and gets a term of a sum:
#   $Y = X_0 A_0 + X_1 A_1$.

# %%
figure = ch06.two_cuts()
plt.show()

# %% [markdown]
# *Colours and numbers say which rank has a piece. Above, every rank reads all of X. Below, each reads its columns of
# X and produces one term, as large as Y; no rank has the sum.*
#
# `nn.Linear` stores the transpose of $A$, with the shape (out, in). A column cut of $A$ cuts dimension 0 of `weight`,
# and the bias with it. A row cut cuts dimension 1, and the bias stays whole. From here on, the rows and columns of a
# *weight* are those that PyTorch stores; *column cut* and *row cut* still refer to $A$.
#
# Between the two matrices of an MLP stands the GELU. It is not linear, so partial results must be added up before it.
# It acts on each number alone, so columns may stay where they are.
#
# **Predict.** Section 2 took one collective. How many does forward take if A is cut in rows and B in columns, and the
# result has to be whole on every rank? And back to section 2: if four ranks share the MLP instead of two, so that
# each has half of the work, by what factor does the number of bytes that a rank hands to collectives change?

# %% tags=["prediction"]
predicted = {"collectives, row then column": 2, "bytes a rank hands over, 4 ranks against 2": 1.0}


# %%
def columns(matrix):
    return matrix.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


def rows(matrix):
    return matrix.chunk(dist.get_world_size(), dim=0)[dist.get_rank()]


def column_then_row(x, A, B):
    y = gelu(x @ columns(A)) @ rows(B)
    dist.all_reduce(y)
    return y


def row_then_column(x, A, B):
    hidden = columns(x) @ rows(A)
    dist.all_reduce(hidden)
    y = gelu(hidden) @ columns(B)
    pieces = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, y)
    return torch.cat(pieces, dim=1)


# %%
def costs(rank, mlp):
    torch.manual_seed(0)
    shapes = (24, 32), (32, 128), (128, 32)
    x, A, B = (torch.randn(s).div(s[0] ** 0.5).to(hardware.device()) for s in shapes)
    with Trace() as trace:
        y = mlp(x, A, B)
    check_equal(gelu(x @ A) @ B, [y])
    return trace.record().count(), trace.record().sent()


count, _ = launch(costs, 2, row_then_column)[0]
(_, sent), (_, sent_by_four) = (launch(costs, n, column_then_row)[0] for n in (2, 4))

# %%
compare(
    predicted,
    dict(zip(predicted, (count, sent_by_four / sent))),
    likely={
        "There is a sum before the GELU, and B's columns give columns, which are gathered.": {
            "collectives, row then column": 1
        },
        "The work halves, but each rank's partial result is as large as the whole one.": {
            "bytes a rank hands over, 4 ranks against 2": 0.5
        },
    },
)

# %% [markdown]
# If A is cut in rows and B in columns, forward takes a sum before the GELU and a gather at the end. So cut the first
# matrix in columns and the second in rows. The second number is the price of a finer cut: each rank computes and
# holds less, but hands over as much as before, the whole result of $tW$ numbers for $t$ tokens of width $W$.
#
# ### What a ring carries
#
# In an all-reduce of $S$ bytes, a ring sends $2(n-1)/n \cdot S$ from each rank (chapter 3). An all-reduce has two
# halves: a reduce-scatter sends $(n-1)/n \cdot S$, and an all-gather whose *result* has $S$ bytes sends as much.

# %% [markdown]
# ## 4. By hand, then with PyTorch: a block, then a whole model
#
# ### Backward through a column cut
#
# Autograd works within one process. With a column cut, every rank has used all of $x$, so the gradient of $x$ is a
# sum over the ranks, and each rank computes only its own term. At this boundary forward has nothing to do, and
# backward has to add up:


# %%
class SumBackward(torch.autograd.Function):
    """Identity in forward, all-reduce in backward: where a replicated tensor enters a cut region."""

    @staticmethod
    def forward(ctx, whole):
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # others may hold it too
        dist.all_reduce(gradient)
        return gradient


# %% [markdown]
# ### 6.1 A column cut as a layer (2 points)
#
# Write the column cut as a layer: each rank computes a block of the output features. Every rank has the whole input,
# so forward sends nothing. Backward has to send something, because each rank's weights contribute to the gradient of
# every input feature.
#
# `full` is the whole layer, with the same values on every rank: build your part from it and do not keep it. The
# process group is ready, so `dist.get_rank()` and `dist.get_world_size()` work. Remember two things:
#
# * A slice is a **view**: it lies in the memory of the whole matrix and keeps all of it alive. It is also not always
#   **contiguous** (its numbers next to each other in memory), as collectives require. The shard needs memory of its
#   own.
# * The input may also bypass your layer, as in a residual connection. Leave the gradient on that path unchanged.


# %% nbgrader={"grade_id": "6.1", "solution": true}
class ColumnParallelLinear(nn.Module):
    """One rank's block of the output features of the linear layer `full`.

    Of n ranks, rank r has the r-th of n equal blocks of consecutive output features. Its only
    parameters are `weight` (out/n, in) and `bias` (out/n,), or None where `full.bias` is None. They
    have `full`'s dtype and are contiguous, in memory of their own and of exactly their size; `full`
    does not change. Raises ValueError with both numbers in its message where n does not divide
    `full.out_features`.
    """

    def __init__(self, full: nn.Linear) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if full.out_features % world_size:
            raise ValueError(
                f"{full.out_features} output features cannot be shared out evenly by {world_size} ranks."
            )
        self.weight = nn.Parameter(full.weight.detach().chunk(world_size)[rank].clone())
        self.bias = None
        if full.bias is not None:
            self.bias = nn.Parameter(full.bias.detach().chunk(world_size)[rank].clone())
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        """Returns this rank's (..., out/n) for x (..., in), which is the same on every rank.

        Sends nothing forward. Backward makes one all-reduce of x's size, so that every rank has
        the whole gradient of x, as far as it comes through this layer.
        """
        ### BEGIN SOLUTION
        return nn.functional.linear(SumBackward.apply(x), self.weight, self.bias)
        ### END SOLUTION


# %% nbgrader={"grade_id": "6.1-check", "grade": true, "points": 2, "locked": true}
check("6.1", ColumnParallelLinear)

# %% [markdown]
# ### Forward out of a row cut
#
# A row cut ends with partial results, and forward adds them up. Here backward has nothing to do: a term's gradient is
# the gradient of the sum, which every rank has already. The two functions mirror each other. They are a **conjugate
# pair**, which Shoeybi et al. call $f$ (above) and $g$ (below).


# %%
class SumForward(torch.autograd.Function):
    """All-reduce in forward, identity in backward: where partial sums leave a cut region."""

    @staticmethod
    def forward(ctx, partial):
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# %% [markdown]
# ### 6.2 A row cut as a layer (2 points)
#
# Now the other cut. Each rank has a block of the *input* features, as a column cut leaves them, and the weights for
# them. It computes a partial sum of every output feature; the sum over the ranks is the output. The bias belongs to
# the output: every rank holds all of it, it is added once, and its gradient is that of the whole layer on every rank.
# If it were not, the ranks' copies of the bias would drift apart.


# %% nbgrader={"grade_id": "6.2", "solution": true}
class RowParallelLinear(nn.Module):
    """One rank's block of the input features of the linear layer `full`.

    Of n ranks, rank r has the r-th of n equal blocks of consecutive input features. Its only
    parameters are `weight` (out, in/n) and `bias` (out,), or None where `full.bias` is None. They
    have `full`'s dtype and are contiguous, in memory of their own and of exactly their size; `full`
    does not change. Raises ValueError with both numbers in its message where n does not divide
    `full.in_features`.
    """

    def __init__(self, full: nn.Linear) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if full.in_features % world_size:
            raise ValueError(
                f"{full.in_features} input features cannot be shared out evenly by {world_size} ranks."
            )
        self.weight = nn.Parameter(full.weight.detach().chunk(world_size, dim=1)[rank].clone())
        self.bias = None if full.bias is None else nn.Parameter(full.bias.detach().clone())
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        """Returns the whole output (..., out), on every rank, for this rank's x (..., in/n).

        Forward makes one all-reduce of the output's size. Backward sends nothing: every rank comes
        to the same loss, and so has the gradient of the whole output already.
        """
        ### BEGIN SOLUTION
        output = SumForward.apply(nn.functional.linear(x, self.weight))
        return output if self.bias is None else output + self.bias
        ### END SOLUTION


# %% nbgrader={"grade_id": "6.2-check", "grade": true, "points": 2, "locked": true}
check("6.2", RowParallelLinear)

# %% [markdown]
# ### Cut the weights
#
# The lesson itself cuts modules in place, with hooks, as PyTorch does. `part_of` says what a rank holds of a
# parameter. An MLP has the layers `up` and `down`, an attention `qkv` and `out`. Attention's matrix `qkv` has the
# rows of all queries, then all keys, then all values; each third is cut by itself.


# %%
IN_DIMENSION_0 = ("qkv.weight", "qkv.bias", "up.weight", "up.bias")  # column cuts
VOCABULARY = ("token.weight", "position.weight", "head.weight")  # cut by rows, see below


def cut_dimension(name):
    """The dimension along which the parameter `name` is cut; None: every rank holds all of it."""
    if name.endswith(IN_DIMENSION_0 + VOCABULARY):
        return 0
    return 1 if name.endswith(("out.weight", "down.weight")) else None


def part_of(name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns a copy of what `rank` holds of the parameter `name`."""
    dim = cut_dimension(name)
    if dim is None:
        return whole.detach().clone()
    sections = whole.detach().chunk(3) if "qkv" in name else [whole.detach()]
    return torch.cat([section.chunk(ranks, dim)[rank] for section in sections], dim)


# %% [markdown]
# `cut_half` cuts an MLP or an attention, and puts $f$ and $g$ around it. The last layer leaves its bias out; the hook
# adds it once, after the sum.


# %%
def cut_half(half: nn.Module, last: nn.Linear) -> None:
    """Cuts a module that ends with the layer `last`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, parameter in half.named_parameters():
        parameter.data = part_of(name, parameter, rank, ranks)
    last.forward = lambda x: linear(x, last.weight)
    half.register_forward_pre_hook(lambda module, inputs: SumBackward.apply(*inputs))
    half.register_forward_hook(lambda module, inputs, y: SumForward.apply(y) + last.bias)


def cut_mlp(mlp: FeedForward) -> None:
    cut_half(mlp, mlp.down)


# %% [markdown]
# To compare, each rank runs the whole module, cuts it, and runs it again.


# %%
def outcome(module, x):
    """The output, and the gradients of the input and of the parameters, by name."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    (y * torch.linspace(-1, 1, y.shape[-1], device=y.device)).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"output": y.detach(), "input": x.grad} | gradients


def whole_and_cut(rank, make, cut):
    """This rank's parts of the outcome of the whole module, and what the cut one gives."""
    torch.manual_seed(0)
    module, x = make().to(hardware.device()), torch.randn(2, 6, 32).to(hardware.device())
    whole = outcome(module, x)
    cut(module)
    got, ranks = outcome(module, x), dist.get_world_size()
    return {name: part_of(name, whole[name], rank, ranks) for name in got}, got


def show_difference(what, make, cut):
    for n in (2, 4):
        pairs = launch(whole_and_cut, n, make, cut)
        found = [check_equal(flat(a.values()), [flat(b.values())]) for a, b in pairs]
        print(f"{what} on {n} ranks: largest difference of output and gradients {max(found)}")


show_difference("MLP", lambda: FeedForward(32), cut_mlp)

# %% [markdown]
# ### Attention: whole heads
#
# Attention has two matrices as well: `qkv` makes queries, keys and values, and `out` mixes what the heads have found.
# Each head works by itself, on its own columns. So a rank takes whole heads, and the part of `out` that reads them:
# column, then row. In **grouped-query attention** several heads of queries share one head of keys and values, and
# stay on its rank.

# %%
figure = ch06.heads()
plt.show()

# %% [markdown]
# *Four heads of queries share two of keys and values. Cut in two at the dashed line, the stored matrix would give
# rank 0 all queries and no keys.*
#
# The number of ranks has to divide the number of heads of keys. GPT-2 has 12 heads; on 8 GPUs it fails with *shape
# ... is invalid for input of size ...* ([an issue](https://github.com/karpathy/build-nanogpt/issues/17)).


# %%
def cut_attention(attention: Attention) -> None:
    attention.heads //= dist.get_world_size()
    cut_half(attention, attention.out)


show_difference("attention", lambda: Attention(32, heads=4), cut_attention)

# %% [markdown]
# ### 6.3 Grouped attention, a few heads to each rank (3 points)
#
# `full` is a `GroupedAttention`, with `full.heads` heads of queries and `full.kv_heads` of keys and values, all
# `full.head_width` wide. The rows of `full.qkv` are the queries of all heads, then the keys, then the values. Head h
# of the queries goes with head h // (heads // kv_heads) of the keys and values.
#
# Here the queries' section of `qkv` is the largest, and each head of queries must be on the same rank as its keys.
# `GroupedAttention` is causal, and `scaled_dot_product_attention(..., is_causal=True, enable_gqa=True)` takes fewer
# heads of keys than of queries. You may use your own answers to 6.1 and 6.2.


# %% nbgrader={"grade_id": "6.3", "solution": true}
class HeadParallelAttention(nn.Module):
    """One rank's heads of the grouped attention `full`.

    Of n ranks, rank r has the r-th of n equal blocks of consecutive heads, of queries as of keys and values,
    and parameters for them alone: n ranks together hold those of `full`, and only the bias of `full.out` is held
    more than once. They have `full`'s dtype, in memory of their own; `full` does not change. Raises ValueError with
    both numbers in its message where n does not divide `full.kv_heads`.
    """

    def __init__(self, full: GroupedAttention) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        import copy

        world_size = dist.get_world_size()
        if full.kv_heads % world_size:
            raise ValueError(
                f"{full.kv_heads} heads of keys cannot be shared out by {world_size} ranks."
            )
        self.head_width = full.head_width
        self.heads, self.kv_heads = full.heads // world_size, full.kv_heads // world_size
        sizes = [heads * full.head_width for heads in (full.heads, full.kv_heads, full.kv_heads)]
        parts = torch.arange(sum(sizes)).split(sizes)
        # for each rank its queries, keys and values: a plain column cut does the rest
        by_rank = zip(*(part.chunk(world_size) for part in parts))
        regrouped = torch.cat([block for blocks in by_rank for block in blocks])
        qkv = copy.deepcopy(full.qkv)
        qkv.weight.data, qkv.bias.data = qkv.weight.data[regrouped], qkv.bias.data[regrouped]
        self.qkv, self.out = ColumnParallelLinear(qkv), RowParallelLinear(full.out)
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        """Returns `full(x)`, on every rank, for x (N, T, width), the same on every rank.

        One all-reduce of x's size forward, one backward. Every rank has the whole gradient of x.
        """
        ### BEGIN SOLUTION
        heads = self.qkv(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))
        ### END SOLUTION


# %% nbgrader={"grade_id": "6.3-check", "grade": true, "points": 3, "locked": true}
check("6.3", HeadParallelAttention)

# %% [markdown]
# ### A whole block: four collectives
#
# A transformer's **block** is an attention and an MLP, each with a norm before it and its input added after it. In
# the norms and additions every rank does the same.


# %%
def tensor_parallel(block: Block) -> Block:
    """Cuts a block in place: rank r holds its share of the heads and of the hidden columns."""
    cut_attention(block.attention)
    cut_mlp(block.feed_forward)
    return block


show_difference("block", lambda: Block(32, heads=4), tensor_parallel)

# %%
figure = ch06.block()
plt.show()

# %% [markdown]
# *Coloured boxes are cut between the two ranks; in grey ones both do the same. The orange bars are the
# boundaries, the only places where ranks communicate.*
#
# The upper path is the block that you have just run: two all-reduces in forward and two in backward, of $tW$ numbers
# each. On a ring they send $8 tW (n-1)/n$ numbers ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section
# 3.2). Of the $12W^2 + 13W$ parameters all but $6W$ are cut.
#
# Many MLPs have three matrices: `w2(silu(w1(x)) * w3(x))` (SwiGLU). Give `w1` and `w3` a column cut, at the same
# places, and `w2` a row cut. There is still one $f$ and one $g$.
#
# ### With PyTorch: DTensor and a plan
#
# A **DTensor** knows how it is cut. It has a **mesh** of devices and, for each dimension of the mesh, a
# **placement**: `Shard(dim)`, `Replicate()` or `Partial()`. An operation on DTensors works out the placement of its
# result, and calls a collective where one is needed.
#
# `parallelize_module` takes a module, a mesh and a **plan**, which gives layers a **style** by name. It turns their
# parameters into DTensors and puts hooks around them. `ColwiseParallel` takes a replicated input and gives columns;
# `RowwiseParallel` takes columns and gives the sum.

# %%
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

PLAN = {
    "attention.qkv": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "feed_forward.up": ColwiseParallel(),
    "feed_forward.down": RowwiseParallel(),
}


def mesh():
    return init_device_mesh(hardware.device().type, (dist.get_world_size(),))


# %% [markdown]
# With separate matrices `wq`, `wk` and `wv`, as in Llama and in your script, the plan cuts whole heads. Our `qkv`
# holds all three, and `ColwiseParallel` would cut straight through it: of two ranks, rank 0 would get all queries and
# half of the keys. So its rows are reordered first. The attention also has to know that it has fewer heads now.


# %%
def own_heads(attention: Attention) -> None:
    """Reorders the rows of qkv, rank 0's queries, keys and values first, and counts one rank's heads."""
    ranks = dist.get_world_size()
    for name, parameter in attention.qkv.named_parameters():
        parts = [part_of(f"qkv.{name}", parameter, rank, ranks) for rank in range(ranks)]
        parameter.data = torch.cat(parts)
    attention.heads //= ranks


def tensor_parallel_with_pytorch(block: Block, plan=PLAN) -> Block:
    """Does what `tensor_parallel` does, with parallelize_module."""
    own_heads(block.attention)
    return parallelize_module(block, mesh(), plan)


# %% [markdown]
# ### Sequence parallelism: the plan that people use
#
# One thing is not cut yet. Between the halves every rank holds all $tW$ activations, and runs the same norms over
# them. But a norm works on each token alone, so each rank can keep $t/n$ of the tokens there: **sequence
# parallelism** ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), section 4.2.2), the lower path in the
# picture of the block. Where a half begins, an all-gather fetches the other tokens. Where it ends, a rank needs the
# sum for its own tokens only: a reduce-scatter.
#
# In the plan, `SequenceParallel` is a norm on a rank's own tokens, `PrepareModuleInput` is the all-gather, and
# `output_layouts=Shard(1)` makes a reduce-scatter of the sum.

# %%
gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
SEQUENCE_PLAN = PLAN | {
    "norm1": SequenceParallel(),
    "attention": gather,
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "norm2": SequenceParallel(),
    "feed_forward": gather,
    "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
}


# %% [markdown]
# **Predict** for one block, forward and backward together: the first plan calls four collectives; how many does the
# second call? And by what factor do the bytes on a ring change?

# %% tags=["prediction"]
predicted = {
    "collectives, with sequence": 8,
    "bytes on a ring, times": 1.0,
}


# %%
def traffic(rank, plan, tokens):
    block = tensor_parallel_with_pytorch(Block(32, heads=4).to(hardware.device()), plan)
    x = torch.randn(2, tokens, 32, device=hardware.device(), requires_grad=True)
    with Trace() as trace:
        block(x).sum().backward()
    calls = trace.record().calls
    return len(calls), ring_bytes(calls)


calls, on_ring = launch(traffic, 4, PLAN, 8)[0]  # tokens of a sequence

calls_with_sequence, on_ring_with_sequence = launch(traffic, 4, SEQUENCE_PLAN, 2)[0]

# %%
compare(
    predicted,
    dict(zip(predicted, (calls_with_sequence, on_ring_with_sequence / on_ring))),
    likely={
        "Twice the calls, but each is half of an all-reduce.": {"bytes on a ring, times": 2.0},
        "The tokens are gathered again before each half.": {"bytes on a ring, times": 0.5},
    },
)

# %% [markdown]
# There are twice the calls for the same bytes, and each rank holds less, so most people use both together. The
# further notebook cuts the sequence by hand and counts the memory.
#
# ### The embedding and the loss: cut by vocabulary
#
# The first and the last matrix of a language model have a row for each word of the **vocabulary**, and are cut by
# words. The **embedding** looks up rows: a rank that does not have a word contributes zeros, and the sum over the
# ranks is the row. The **head** is a column cut: each rank gets the logits of its own words.

# %%
figure = ch06.vocabulary()
plt.show()

# %% [markdown]
# *Left, only rank 1 has the row of word 20. Right, each rank keeps its logits, and reduces them to a few numbers for
# each token.*
#
# Gathered logits would often be the largest tensor of all. The loss of a token with logits $z$ and target $y$ does
# not need them in one place. With $m = \max_j z_j$, which keeps the exponentials from overflowing, it is
#
# $$-\log\frac{e^{z_y}}{\sum_j e^{z_j}} = \log \sum_j e^{z_j - m} + m - z_y .$$
#
# **Predict** for 4,096 words on 4 ranks: how many numbers per token does a rank hand over in forward, so that all
# know the loss? And in backward, until each has the gradient of its own 1,024 logits?

# %% tags=["prediction"]
predicted = {"numbers a token in forward": 3, "numbers a token in backward": 0}


# %%
def numbers_of_loss(rank, tokens=20, words=4_096):
    torch.manual_seed(0)
    logits, targets = torch.randn(tokens, words), torch.randint(words, (tokens,))
    logits, targets = logits.to(hardware.device()), targets.to(hardware.device())
    cut = distribute_tensor(logits, mesh(), [Shard(1)]).requires_grad_()
    with loss_parallel():
        with Trace() as forward:
            loss = cross_entropy(cut, targets)
        with Trace() as backward:
            loss.backward()
    difference = check_equal(cross_entropy(logits, targets), [loss.detach().full_tensor()])
    sent = [sum(call.elements for call in trace.record().calls) for trace in (forward, backward)]
    return difference, [numbers // tokens for numbers in sent]


difference, numbers = launch(numbers_of_loss, 4)[0]
print("largest difference of the loss:", difference)

# %%
compare(
    predicted,
    dict(zip(predicted, numbers)),
    likely={
        "Those are all of the rank's logits; no other rank needs them.": {
            "numbers a token in forward": 1_024
        },
        "The gradient of a logit is its softmax, less one at the target, and the rank has all it needs.": {
            "numbers a token in backward": 3
        },
    },
)

# %% [markdown]
# Inside `loss_parallel()`, PyTorch's `cross_entropy` exchanges the maximum, the sum of the exponentials and the
# target's log-probability, in place of 1,024 logits.

# %% [markdown]
# ### 6.4 A cross-entropy over a shared vocabulary (3 points)
#
# For one token with logits $z_j$ and target $y$, the loss is $\log \sum_j e^{z_j} - z_y$. Each rank has the logits of
# its own words. $e^{z}$ overflows in float32 from $z = 89$ on, so first subtract the token's largest logit over all
# ranks. It cancels out, so it needs no gradient.
#
# Two things are new. The ranks' parts of the vocabulary follow each other, but one may have more words than another,
# and a rank knows only the size of its own part. And as in PyTorch, a target may be **`ignore_index`**: such a token
# counts neither in the sum nor in the number of tokens that the sum is divided by.


# %% nbgrader={"grade_id": "6.4", "solution": true}
def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100
) -> Tensor:
    """Returns the mean cross-entropy over the tokens that count, the same scalar on every rank.

    `logits` (N, V_r) are those of this rank's V_r classes, at least one, which follow those of the ranks before
    it. `targets` (N,) int64 are classes of the whole vocabulary, the same on every rank. A token whose target is
    `ignore_index`, which may be a class too, does not count; at least one token counts. As
    `nn.functional.cross_entropy(all_logits, targets, ignore_index=ignore_index)`, in the logits' dtype, and as
    stable: logits may be in the tens of thousands.
    Backward gives each rank the gradient of its own logits; `logits` and `targets` do not change.
    A rank hands over at most four numbers a token and 64 more, forward and backward together.
    """
    ### BEGIN SOLUTION
    share, rank = logits.shape[1], dist.get_rank()
    own = torch.tensor([share], device=logits.device)
    shares = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, own)
    column = targets - sum(shares[:rank], torch.zeros_like(own))
    highest = logits.detach().amax(dim=1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    shifted = logits - highest.unsqueeze(1)
    log_total = SumForward.apply(shifted.exp().sum(dim=1)).log()
    is_mine = (column >= 0) & (column < share)
    picked = shifted.gather(1, column.clamp(0, share - 1).unsqueeze(1)).squeeze(1)
    at_target = SumForward.apply(torch.where(is_mine, picked, 0.0))
    return (log_total - at_target)[targets != ignore_index].mean()
    ### END SOLUTION


# %% nbgrader={"grade_id": "6.4-check", "grade": true, "points": 3, "locked": true}
check("6.4", vocabulary_parallel_cross_entropy)

# %% [markdown]
# ### A language model, trained
#
# Now train a whole model with sequence parallelism, on the story that comes with the course. Its vocabulary is 72
# characters. Embeddings are cut by words with `RowwiseParallel(input_layouts=Replicate())`; that of the positions has
# no batch dimension, hence its `Shard(0)`. Without `loss_parallel`, the head would have `output_layouts=Replicate()`.

# %%
MODEL_PLAN = {f"blocks.*.{name}": style for name, style in SEQUENCE_PLAN.items()} | {
    "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}


def tensor_parallel_model_with_pytorch(model: LanguageModel) -> LanguageModel:
    """Cuts a whole language model in place. Its head then gives DTensors of logits."""
    for block in model.blocks:
        own_heads(block.attention)
    return parallelize_module(model, mesh(), MODEL_PLAN)


# %% [markdown]
# `train` takes three steps of SGD, with or without a cut. `local` looks into a DTensor.


# %%
def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(rank, cut):
    torch.manual_seed(0)
    model = LanguageModel(len(text.vocabulary()), width=32, heads=4, layers=2, context=32)
    model = cut(model.to(hardware.device()))
    # foreach=True, the default on GPUs, does not take DTensors and plain tensors in one model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        inputs, targets = (part.to(hardware.device()) for part in text.windows(32, 8, seed=step))
        with loss_parallel():
            cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: local(p.detach()) for name, p in model.named_parameters()}


# %%
alone = launch(train, 1, lambda model: model)[0]
for n in (2, 4):
    differences = []
    for rank, parts in enumerate(launch(train, n, tensor_parallel_model_with_pytorch)):
        expected = flat(part_of(name, alone[name], rank, n) for name in parts)
        differences.append(check_equal(expected, [flat(parts.values())]))
    print(f"{n} ranks: largest difference of all parameters {max(differences)}")

# %% [markdown]
# That is the contract of the course with a new condition: the ranks' parts *together* are the parameters of the
# single process.

# %% [markdown]
# ## 5. Break it: three cuts that run and are wrong
#
# ### Without f
#
# Two MLPs follow one another, and somebody has forgotten that $f$ adds up in backward. **Predict:** how many of the
# four weight matrices still get the right gradient?

# %% tags=["prediction"]
predicted = {"right gradients of 4": 2}


# %%
def cut_without_f(mlps):
    SumBackward.backward = staticmethod(lambda ctx, gradient: gradient)  # on this rank only
    for mlp in mlps:
        cut_mlp(mlp)


def two_mlps():
    return nn.Sequential(FeedForward(32), FeedForward(32))


whole, got = launch(whole_and_cut, 2, two_mlps, cut_without_f)[0]
differences = {name: largest_difference(whole[name], [got[name]]) for name in whole}
right = sum(differences[name] <= 1e-5 for name in whole if name.endswith("weight"))

# %%
compare(predicted, {"right gradients of 4": right})

# %%
for name, difference in differences.items():
    print(f"{name:13} {difference}")

# %% [markdown]
# The output is right, and so are the gradients of the last MLP. In the first MLP, each rank has one term of the
# gradient, and nobody adds them up. So compare *gradients* with one process, not only outputs.
#
# ### A fused matrix, cut as it is
#
# What if the rows of `qkv` are not reordered?


# %%
def without_reordering(block):
    block.attention.heads //= dist.get_world_size()
    return parallelize_module(block, mesh(), PLAN)


@torch.no_grad()
def output_difference(rank, cut):
    torch.manual_seed(0)
    block, x = Block(32, heads=4).to(hardware.device()), torch.randn(2, 8, 32)
    expected = block(x.to(hardware.device()))
    return largest_difference(expected, [cut(block)(x.to(hardware.device()))])


for cut in (tensor_parallel_with_pytorch, without_reordering):
    print(f"{cut.__name__}: largest difference {launch(output_difference, 2, cut)[0]}")

# %% [markdown]
# There is no error, because all shapes fit. But rank 0 uses rows of queries as keys: this is another model. The same
# happens to `w1` and `w3` fused into one matrix.
#
# ### Bug hunt: a slip of the pen in a plan
#
# [PyTorch's own tutorial](https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html) had a plan with the key
# `feed_foward.w1`. Read the keys below. Is the output right, and what does each rank hold?

# %%
SLIP = {"feed_foward.up": ColwiseParallel(), "feed_foward.down": RowwiseParallel()}


def with_slip(block):
    with warnings.catch_warnings(action="ignore"):
        parallelize_module(block, mesh(), SLIP)
    print("`up` has the shape", tuple(block.feed_forward.up.weight.shape))
    return block


print("largest difference:", launch(output_difference, 2, with_slip)[0])

# %% [markdown]
# `feed_foward` lacks an `r`. No layer has that name, so none is cut: every rank holds all 128 rows. The output is
# right, so no comparison finds the slip. Only a warning does, since [pull request
# 157182](https://github.com/pytorch/pytorch/pull/157182); the cell above hides it. So count what a rank holds, too.

# %% [markdown]
# ## 6. Exercises
#
# | exercise | points | section |
# |---|---|---|
# | 6.1 A column cut as a layer | 2 | 4, after *Backward through a column cut* |
# | 6.2 A row cut as a layer | 2 | 4, after *Forward out of a row cut* |
# | 6.3 Grouped attention, a few heads to each rank | 3 | 4, after *Attention: whole heads* |
# | 6.4 A cross-entropy over a shared vocabulary | 3 | 4, after *The embedding and the loss* |
# | 6.7 Your own script, with cut layers | | 8 |
#
# 6.5 and 6.6 are in the further notebook.

# %% [markdown]
# ## 7. See it: how far does it pay to cut?
#
# A block of GPT-3's width ($W$ = 12,288, $s$ = 2,048 tokens in a sequence, 16-bit numbers) takes $24 t W^2 + 4 t s W$
# operations in forward and twice that in backward (Narayanan et al. 2021, appendix). The times are simulated, with
# assumed speeds: 150 TFLOP/s ($150 \cdot 10^{12}$ floating-point operations a second) for a GPU, 250 GB/s for a ring
# inside a machine of 8 GPUs, and between machines 25 GB/s with one network adapter per machine, or 200 GB/s with one
# per GPU.


# %%
def seconds_of_block(n, W=12_288, tokens=2_048, flops=150e12, inside=250e9, between=25e9):
    """Computing and communicating, forward and backward; the ring is as fast as its slowest link."""
    compute = 3 * (24 * tokens * W**2 + 4 * tokens**2 * W) / n / flops
    bandwidth = inside if n <= 8 else between
    return compute, 4 * 2 * (n - 1) / n * tokens * W * 2 / bandwidth


explore.Explorer(
    partial(ch06.block_times, seconds_of_block),
    width=(1_024, 16_384, 12_288),
    tokens=(512, 8_192, 2_048),
)

# %% [markdown]
# *With one adapter a machine, 16 ranks are slower than 8. With one adapter a GPU, they are faster. In a narrower
# block, communication overtakes computation at fewer ranks.*
#
# Without the scores of attention, the ratio of the two times is simple. For a GPU of $F$ operations a second, links
# of $B$ bytes a second and numbers of 2 bytes, communication takes $\frac{2}{9}\,(n - 1)\,F / (W B)$ times as long as
# computation. The tokens cancel out: a larger batch does not help, a wider model does.

# %%
for W in (2_048, 4_096, 8_192, 16_384):  # at 400 TFLOP/s, with links of 450 GB/s
    shares = [f"{n} ranks {2 / 9 * (n - 1) * 400e12 / (W * 450e9):.0%}" for n in (2, 4, 8)]
    print(f"width {W:6}: communication per computation on", ", ".join(shares))

# %% [markdown]
# To keep communication below a fifth of computation, so that overlapping can hide it, take at most $1 + 0.9\,W B / F$
# ranks. Between machines, with a ninth of that bandwidth, even two ranks need a width of nearly 9,000.
#
# The model leaves out the latency of each hop, and matrix products that get too small to fill a GPU. In measurements
# on 64 GPUs, each with an adapter, 8 ranks, the size of a machine, were best (Narayanan et al. 2021, section 5.4.1,
# figure 13).

# %% [markdown]
# ## 8. On a cluster: your own script
#
# * The group mostly stays inside a machine, because each layer waits for its collectives. Libraries cut these into
#   pieces that overlap with the products (in PyTorch: asynchronous tensor parallelism, through *symmetric memory*,
#   which other GPUs read directly).
# * Between machines there is data parallelism or a pipeline, in a second dimension of the mesh:
#   `init_device_mesh("cuda", (machines, 8), mesh_dim_names=("data", "tensor"))`.

# %% [markdown]
# ### 6.7 Your own script, with cut layers
#
# `mine/train.py` (3.6) copies the whole model to every rank. Give it the option `--tensor`, the number of ranks that
# share each layer; with `--tensor 1`, the default, it does what it did before. If you have no script, `mine.start(6)`
# gives you the course's, as after chapter 3.
#
# * With `--tensor 2`, 4 ranks are two groups of two. A group is one copy of the model: its two ranks train on the
#   same windows, and the groups split the batch.
# * `parallelize_module` cuts the embeddings, wq, wk, wv and wo, w1, w2 and w3, and the output. The two heads of keys
#   and values allow two tensor ranks, not four.
# * `DistributedDataParallel(model)` does not take a model that is cut. Average the gradients between the groups
#   yourself, as in 3.1.
# * The final parameters and the log equal those of a run on one rank, and `model.pt` holds whole tensors.
#
# Section 4 shows a plan that also cuts the sequence, as most people run it. You may do so here.

# %%
from course_exercises import mine

check("6.7", mine.script(6))

# %% [markdown]
# ## 9. Remember
#
# 1. A column cut needs the whole input and gives columns; a row cut takes columns and gives terms of a sum. Column,
#    then row, needs one all-reduce in forward.
# 2. Autograd knows one process only. Where a tensor enters a cut region, $f$ adds up in backward. Where the result
#    leaves it, $g$ adds up in forward.
# 3. A block has four all-reduces of $tW$ numbers, however many ranks there are: a finer cut leaves less work for each
#    rank and no less to send.
# 4. Sequence parallelism also cuts the activations between the halves, and sends the same bytes on a ring.
# 5. A forgotten $f$, a fused matrix cut as it is, a misspelt plan: all run without an error. Compare outputs *and*
#    gradients with one process, and count what a rank holds.
#
# **Sources**
#
# * M. Shoeybi et al., *Megatron-LM*, 2019, [arXiv 1909.08053](https://arxiv.org/abs/1909.08053): section 3.
# * D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, SC 2021,
#   [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): sections 3.2 and 5.4.1, appendix.
# * V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022,
#   [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): section 4.2.
# * J. Ainslie et al., *GQA*, EMNLP 2023, [arXiv 2305.13245](https://arxiv.org/abs/2305.13245).
# * PyTorch: [tensor parallelism](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html),
#   [DTensor](https://docs.pytorch.org/docs/stable/distributed.tensor.html).
