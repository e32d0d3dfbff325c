# %% [markdown]
# # 6. Tensor parallel: one station, several workers
#
# Chapters 4 and 5 cut a model between its layers. That fails where a single layer is too large, or
# where one batch has to be done sooner, and more batches per hour do not help. This chapter cuts the
# layers themselves. Every rank holds a part of every weight matrix, all ranks work on the same
# tokens at the same time, and a few collectives put the parts together. This is **tensor
# parallelism**.
#
# At the end you have cut a transformer block by hand: its MLP, its attention, its embedding and its
# loss. You know how many bytes each cut sends and how many it saves, because you predicted both and
# counted them. And you have done it again with PyTorch's own API, with the same result.
#
# What goes beyond that is in `06_tensor_parallel_further`: activations cut by tokens (sequence
# parallelism), dropout, and clipping.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear

from course_utils import hardware, plots
from course_utils.launch import launch
from course_utils.lesson.equality import equal, flat
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace, memory_ledger

hardware.report()

# %% [markdown]
# ## 1. The factory: one station, several workers
#
# In chapter 5 each building had its own stations, and products travelled from one to the next. Now
# look at one station. Its instruction sheet has become so large that no worker can hold it, or its
# step takes so long that the whole line waits for it.
#
# So several workers stand at this one station. The sheet is cut, and each worker holds a part. A
# product arrives, and every worker sees all of it. Each does what their part of the sheet says.
# What they have made are parts of one result. They add them up, and then the product moves on.
#
# They have to agree several times for every product. Workers who talk that much stand side by side:
# in one building, not in two cities.

# %%
from course_utils.figures import ch06

figure = ch06.one_station()
plt.show()

# %% [markdown]
# *The same product goes to all four workers. Each holds some columns of the sheet's first page and
# the same rows of the second, and makes a partial result, as large as the whole one. They are added
# up, and every worker gets the sum.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | worker | **rank** | one process with its own device |
# | instruction sheet | weight matrix | each rank holds a part of it, a **shard** |
# | product that every worker sees | activations, **replicated** | every rank holds the same tensor |
# | partial results | activations, **partial** | the true tensor is the sum over the ranks |
# | half-made pieces, one at each worker | activations, **sharded** | each rank holds different columns, or different tokens |
# | adding up | **all-reduce** | partial becomes replicated |
# | workers of one station | **tensor-parallel group** | the ranks that share one copy of the model |

# %% [markdown]
# ## 2. The smallest real run: two ranks, one MLP
#
# An **MLP** is two matrices with a function between them: `gelu(x @ A) @ B`. Rank 0 takes the left
# half of A's columns and the upper half of B's rows, rank 1 the others. One all-reduce puts the
# result together.


# %%
def half_an_mlp_each(rank):
    torch.manual_seed(0)  # the same numbers on both ranks
    x, A, B = torch.randn(3, 4), torch.randn(4, 16), torch.randn(16, 4)
    mine = slice(8 * rank, 8 * rank + 8)
    partial = (gelu(x @ A[:, mine]) @ B[mine]).to(hardware.device())
    dist.all_reduce(partial)  # adds up what the two ranks have
    return equal((gelu(x @ A) @ B), [partial.cpu()])


launch(half_an_mlp_each, 2)

# %% [markdown]
# Both ranks end with the whole result, and for its own part each needs only half of either matrix.
# The rest of the chapter is about three questions. Why these halves? What about backward? And what is
# there in a real model besides an MLP?

# %% [markdown]
# ## 3. Predict, then measure: what each cut sends
#
# ### Two ways to cut a matrix
#
# $Y = XA$ can be cut in two ways ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), section
# 3).
#
# * **Column cut:** $A = [A_0\; A_1]$. Then $Y = [XA_0\; XA_1]$. Each rank needs all of $X$ and gets
#   some columns of $Y$, finished.
# * **Row cut:** $A = \begin{bmatrix} A_0 \\ A_1 \end{bmatrix}$. Then $Y = X_0A_0 + X_1A_1$, where
#   $X = [X_0\; X_1]$. Each rank needs some columns of $X$ only, and gets a partial sum of all of
#   $Y$.
#
# A trap lies in the names. `nn.Linear` stores the transposed matrix: `weight` has the shape (out,
# in). So a column cut of $A$ cuts the *rows* of `weight`, dimension 0, and the bias with it. A row
# cut of $A$ cuts dimension 1, and the bias stays whole. In this chapter "column" and "row" speak of
# $A$, as the papers and PyTorch's class names do.

# %%
figure = ch06.two_cuts()
plt.show()

# %% [markdown]
# *A colour and a number for each rank. Above, the column cut: every rank needs all of X, and makes its own
# columns of Y. Below, the row cut: each needs only its columns of X, and makes a full sheet that is one
# term of Y.*
#
# ### Why column and then row
#
# An MLP has two matrices, so there are four ways to cut it. Between the two stands the GELU. It is
# not linear: $\text{gelu}(a + b) \ne \text{gelu}(a) + \text{gelu}(b)$, so a partial sum must be
# added up before it. But it acts on each number alone, so it does not mind cut columns.
#
# **Predict** what a rank hands to collectives in forward, for $t$ tokens of width $W$, a hidden
# width of $4W$ and $n$ ranks, if the result is to be whole on every rank.
#
# * column, column: the second matrix needs all hidden columns, so gather them, $4tW/n$ from each
#   rank; the result is in columns, gather again, $tW/n$.
# * row, row: sum before the GELU, $4tW$; sum after the second matrix, $tW$.
# * row, column: sum, $4tW$; gather, $tW/n$.
# * column, row: the hidden columns that a rank has made are the ones that its rows of the second
#   matrix need. One sum at the end, $tW$.

# %% tags=["prediction"]
t, W, n = 24, 32, 2  # tokens, width, ranks
predicted = {  # a list for each: the bytes of each call, in their order; a float32 has 4
    "column, column": [4 * t * W // n * 4, t * W // n * 4],
    "row, row": [4 * t * W * 4, t * W * 4],
    "row, column": [4 * t * W * 4, t * W // n * 4],
    "column, row": [t * W * 4],
}


# %%
def multiply(x, matrix, cut):
    """Multiplies with this rank's part of `matrix`; x is whole, or already this rank's columns."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if cut == "column":
        return x @ matrix.chunk(ranks, dim=1)[rank]
    rows = matrix.chunk(ranks, dim=0)[rank]
    own_columns = x if x.shape[1] == len(rows) else x.chunk(ranks, dim=1)[rank]
    return own_columns @ rows


def made_whole(y, cut):
    if cut == "row":
        dist.all_reduce(y)
        return y
    columns = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(columns, y)
    return torch.cat(columns, dim=1)


# %%
def cut_mlp(rank, first, second):
    generator = torch.Generator().manual_seed(0)
    shapes = (t, W), (W, 4 * W), (4 * W, W)
    x, A, B = (torch.randn(s, generator=generator).to(hardware.device()) for s in shapes)
    with Trace() as trace:
        hidden = multiply(x, A, first)
        if (first, second) != ("column", "row"):
            hidden = made_whole(hidden, first)
        y = made_whole(multiply(gelu(hidden), B, second), second)
    expected = gelu(x @ A) @ B
    right = torch.allclose(y, expected, rtol=1e-4, atol=1e-3)
    return right, [call.bytes for call in trace.record().calls]


results = {name: launch(cut_mlp, n, *name.split(", "))[0] for name in predicted}
print("all four right:", all(right for right, _ in results.values()))
compare(predicted, {name: handed_over for name, (_, handed_over) in results.items()})

# %% [markdown]
# Column, then row needs one collective, and on 2 ranks it hands over the fewest bytes. (On 8 ranks
# "column, column" hands over less. That is the payload; what a ring makes of it comes next, and there
# column, then row wins on any number of ranks.) From here on every pair of matrices is cut this way.
#
# ### Memory, and what a ring carries
#
# The MLP's matrices, their gradients and the optimizer's state are cut by $n$. What is not cut: $x$
# and the result, which every rank holds whole. The cut buys memory with communication, in every
# layer, in forward and in backward.
#
# A rank hands $S$ bytes to an all-reduce. A ring then sends $2(n-1)/n \cdot S$ from each rank
# (chapter 3, section 3). A reduce-scatter of $S$ bytes sends $(n-1)/n \cdot S$, and so does an
# all-gather whose *result* has $S$ bytes: each piece of $S/n$ makes $n - 1$ hops round the ring.
# For the two cuts above that makes $2(n-1)/n$ times the result's bytes for column, row, and
# $5(n-1)/n$ for column, column: two gathers, of $4tW$ and of $tW$.

# %% [markdown]
# ## 4. By hand, then with PyTorch: a block and a whole model
#
# ### What backward needs: a pair of functions
#
# Autograd works within a process. It does not know that the other ranks' partial results contain
# your `x` too. Take the column cut: every rank used all of $x$, so the gradient of $x$ is the *sum*
# of what the ranks find. Here is what happens without help.


# %%
def gradient_without_help(rank):
    torch.manual_seed(0)
    device = hardware.device()
    x, A, B = (torch.randn(s).to(device) for s in ((3, 4), (4, 16), (16, 4)))
    x.requires_grad_()
    (gelu(x @ A) @ B).sum().backward()
    expected, x.grad = x.grad, None
    mine = slice(8 * rank, 8 * rank + 8)
    (gelu(x @ A[:, mine]) @ B[mine]).sum().backward()
    partial = x.grad.clone()
    dist.all_reduce(x.grad)
    return equal(expected, [partial]), equal(expected, [x.grad])


for rank, (own, summed) in enumerate(launch(gradient_without_help, 2)):
    print(f"rank {rank}: its gradient of x is right: {own}, the sum over the ranks is: {summed}")

# %% [markdown]
# So two boundaries need a function with a backward of its own. Where a replicated tensor enters the
# cut region, forward does nothing and backward adds up. Where the partial results leave it, forward
# adds up, and backward does nothing: the sum's gradient is each term's gradient. The two mirror each
# other, a **conjugate pair**; the paper calls them $f$ and $g$.


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
# ### Cut the weights
#
# Which weight of a block is cut how? `part_of` answers for any rank, without any process group. It
# returns a copy: a slice alone is a view and would keep the whole matrix in memory.

# %%
CUT_DIMENSION = {  # of the tensor as nn.Linear and nn.Embedding store it: (out, in), (rows, width)
    "up.weight": 0,
    "up.bias": 0,
    "down.weight": 1,
    "qkv.weight": 0,
    "qkv.bias": 0,
    "out.weight": 1,
    "token.weight": 0,
    "head.weight": 0,
}


def cut_dimension(name):
    """The dimension along which the parameter `name` is cut; None: every rank holds all of it."""
    return next((dim for end, dim in CUT_DIMENSION.items() if name.endswith(end)), None)


# %%
def part_of(name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns a copy of what `rank` holds of the parameter `name`."""
    dim = cut_dimension(name)
    if dim is None:
        return whole.detach().clone()
    sections = whole.chunk(3) if "qkv" in name else [whole]  # queries, keys, values: cut each
    size, rest = divmod(sections[0].shape[dim], ranks)
    if rest:
        raise ValueError(f"{name}: {sections[0].shape[dim]} does not divide by {ranks} ranks.")
    return torch.cat([s.detach().narrow(dim, rank * size, size) for s in sections], dim)


# %% [markdown]
# `cut_half` takes one half of a block, its MLP or its attention, and changes it in place: each
# parameter becomes this rank's part, and two hooks put the pair around the module. One detail is the
# bias of the last layer. Each rank computes a partial sum, and a bias inside it would be added once
# per rank. So the layer leaves it out, and the hook adds it once, after the sum.


# %%
def cut_parameters(module: nn.Module) -> None:
    """Replaces each parameter of `module` by the part that this rank holds."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, parameter in list(module.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        part = part_of(name, parameter, rank, ranks)
        setattr(module.get_submodule(owner), attribute, nn.Parameter(part, parameter.requires_grad))


def cut_half(inner: nn.Module, last: nn.Linear, enter=SumBackward, leave=SumForward) -> None:
    """Cuts a module that ends with the layer `last`, and joins the parts with `enter`, `leave`."""
    cut_parameters(inner)
    last.forward = lambda x: linear(x, last.weight)
    inner.register_forward_pre_hook(lambda module, inputs: enter.apply(*inputs))
    inner.register_forward_hook(lambda module, inputs, y: leave.apply(y) + last.bias)


# %% [markdown]
# The MLP is cut as in section 2. The next cell compares the output, the gradient of the input and
# all gradients of parameters with those of the whole MLP. For the comparison the whole gradients are
# cut with the same `part_of`.


# %%
def outcome(module, x):
    """The output, and the gradients of the input and of the parameters, by name."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    (y * torch.linspace(-1, 1, y.shape[-1], device=y.device)).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"output": y.detach(), "input": x.grad} | gradients


def same_when_cut(rank, make, cut):
    """Whether `make()`, cut, has on this rank what the whole module has."""
    torch.manual_seed(0)
    module, x = make().to(hardware.device()), torch.randn(2, 6, 32).to(hardware.device())
    expected = outcome(module, x)
    cut(module)
    got, ranks = outcome(module, x), dist.get_world_size()
    return all(equal(part_of(name, expected[name], rank, ranks), [got[name]]) for name in got)


# %%
from course_utils.lesson.models import Attention, Block, FeedForward


def cut_feed_forward(feed_forward: FeedForward) -> None:
    cut_half(feed_forward, feed_forward.down)


def count_of_ranks(n: int) -> str:
    return "1 rank" if n == 1 else f"{n} ranks"


for n in (1, 2, 4):
    same = launch(same_when_cut, n, lambda: FeedForward(32), cut_feed_forward)
    print(f"MLP on {count_of_ranks(n)}: output and all gradients as whole: {all(same)}")

# %% [markdown]
# You can write this now as two layers: exercises 6.1 and 6.2 ask for `ColumnParallelLinear` and
# `RowParallelLinear`, the names under which you meet these cuts in Megatron-LM and elsewhere. Nothing
# that follows is needed for them.
#
# ### Attention: each rank takes some heads
#
# In **attention** each token has a query, compares it with the keys of itself and the tokens before
# it, and adds up their values, weighted by how well the keys match. Several **heads** do so side by
# side, each with some of the columns. Attention has two matrices as well. The first makes queries,
# keys and values, the second mixes what the heads have found. Between them stands the attention
# itself, which is not linear either. But each head works alone: it uses its own columns of the
# queries, keys and values and nothing of the other heads. So cut by heads: rank $r$ holds the
# columns that make *its* heads' queries, keys and values, and the rows of the second matrix that
# read its heads. Column, then row, one sum.
#
# The rows of `qkv.weight` are all queries, then all keys, then all values. That is why `part_of`
# takes a part of each of the three. A plain cut would give rank 0 of 2 all the queries and half of
# the keys; you meet that again below, with PyTorch.


# %%
def share_heads(attention: Attention) -> None:
    """Tells the attention how many heads this rank has."""
    heads, rest = divmod(attention.heads, dist.get_world_size())
    if rest:
        raise ValueError(f"{attention.heads} heads do not divide by {dist.get_world_size()} ranks.")
    attention.heads = heads


def cut_attention(attention: Attention) -> None:
    share_heads(attention)
    cut_half(attention, attention.out)


for n in (1, 2, 4):
    same = launch(same_when_cut, n, lambda: Attention(32, heads=4), cut_attention)
    print(f"attention on {count_of_ranks(n)}: output and all gradients as whole: {all(same)}")

# %% [markdown]
# ### A whole block: four collectives
#
# A transformer's **block** is attention and MLP, each with a layer norm before it and its input
# added after it. Norms and additions run on the replicated activations, on every rank the same.


# %%
def tensor_parallel(block: Block) -> Block:
    """Cuts a block in place: rank r holds its share of the heads and of the hidden columns."""
    cut_attention(block.attention)
    cut_feed_forward(block.feed_forward)
    return block


for n in (1, 2, 4):
    same = launch(same_when_cut, n, lambda: Block(32, heads=4), tensor_parallel)
    print(f"block on {count_of_ranks(n)}: output and all gradients as whole: {all(same)}")

# %% [markdown]
# The gradients of the norms are right on every rank without any help: all ranks have computed the
# same ones from the same tensors.
#
# **Predict** for $t = 48$ tokens of width $W = 64$ on 4 ranks: how many collectives does the block
# call in forward and in backward, and how many bytes does this rank hand over? How many bytes of
# parameters does it hold? A whole block has $12 W^2 + 13 W$ parameters. Of those, the matrices and
# the biases of `qkv` (3W) and `up` (4W) are cut; the two norms (4W) and the biases of `out` and
# `down` (2W) are not.

# %% tags=["prediction"]
t, W, n = 48, 64, 4
predicted = {
    "collectives in forward": 2,  # one for each half
    "collectives in backward": 2,
    "bytes in forward": 2 * t * W * 4,
    "bytes in backward": 2 * t * W * 4,
    "parameter bytes": 4 * ((12 * W * W + 7 * W) // n + 6 * W),
    "gradient bytes": 4 * ((12 * W * W + 7 * W) // n + 6 * W),
}


# %%
def costs_of_block(rank, cut):
    torch.manual_seed(0)
    block = cut(Block(W, heads=8).to(hardware.device()))
    x = torch.randn(3, t // 3, W, device=hardware.device(), requires_grad=True)
    with Trace() as forward:
        y = block(x)
    with Trace() as backward:
        y.sum().backward()
    passes = {"forward": forward.record(), "backward": backward.record()}
    counts = {f"collectives in {name}": record.count() for name, record in passes.items()}
    sent = {f"bytes in {name}": record.sent() for name, record in passes.items()}
    ledger = memory_ledger(block)
    held = {"parameter bytes": ledger["parameters"], "gradient bytes": ledger["gradients"]}
    return counts | sent | held


# %%
costs = launch(costs_of_block, n, tensor_parallel)
likely = {
    "Those are numbers: a float32 has 4 bytes.": {
        "bytes in forward": 6_144,
        "bytes in backward": 6_144,
    },
    "That is what a ring sends. Counted is what the rank hands over.": {
        "bytes in forward": 36_864,
        "bytes in backward": 36_864,
    },
    "The norms and the biases of `out` and `down` are not cut.": {
        "parameter bytes": 49_984,
        "gradient bytes": 49_984,
    },
}
compare(predicted, costs[0], likely)
print("the same on all ranks:", all(cost == costs[0] for cost in costs))

# %% [markdown]
# Four all-reduces of $tW$ numbers per block and step, however many ranks there are. On a ring each
# sends $2(n-1)/n$ of that, together $8\,tW\,(n-1)/n$ numbers: the formula of [Narayanan et al.
# 2021](https://arxiv.org/abs/2104.04473), section 3.2. And nothing hides these collectives here. In
# chapter 3 the gradients travelled while backward went on. In forward the next layer needs the sum;
# in backward a library can start it, and compute the weight's gradient meanwhile.

# %%
ledgers = []
for ranks in (1, 2, 4):
    cost = launch(costs_of_block, ranks, tensor_parallel)[0]
    kinds = {"parameters": cost["parameter bytes"], "gradients": cost["gradient bytes"]}
    ledgers.append(kinds)
plots.memory(ledgers, ["1 rank", "2 ranks", "4 ranks"], title="A block's memory on each rank")
plt.show()

# %% [markdown]
# *Parameters and gradients of the block on each rank. With every doubling of the ranks the bar
# becomes almost half as long; the small rest, norms and two biases, stays.*
#
# ### The embedding and the loss: cut by vocabulary
#
# In a language model the largest matrices are often the first and the last: one row for each word
# of the vocabulary. Both are cut by **vocabulary**: rank $r$ knows the words from $rV/n$ on.
#
# The **embedding** looks up rows. A rank that does not know a word contributes zeros, and the sum
# over the ranks is the row.

# %%
from torch.nn.functional import embedding


class CutEmbedding(nn.Module):
    """Looks up the rows of a table that is cut by rows between the ranks."""

    def __init__(self, whole: nn.Embedding) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(part_of("token.weight", whole.weight, rank, ranks))
        self.first = rank * len(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        row = tokens - self.first
        known = (row >= 0) & (row < len(self.weight))
        rows = embedding(row.where(known, 0), self.weight)
        return SumForward.apply(rows * known.unsqueeze(-1))


# %% [markdown]
# The **head** turns each token into $V$ logits, cut in columns: each rank has $V/n$ logits of every
# token. To gather them would take $tV$ numbers on every rank, often the largest tensor of all. The
# loss does not need them. For a token with logits $z$ and target $y$ it is
#
# $$-\log\frac{e^{z_y}}{\sum_j e^{z_j}} = \log \sum_j e^{z_j} - z_y .$$
#
# The logarithm of a sum of exponentials can be computed in parts: each rank reduces its own logits
# to one number for each token, and the logsumexp of these $n$ numbers is that of all logits. So a
# rank tells the others one number per token instead of $V/n$. The target's logit comes from the one
# rank that has it. `torch.logsumexp` subtracts the maximum before it exponentiates, so nothing
# overflows.


# %%
def loss_from_cut_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy of (t, V / n) logits of this rank's words, (t,) targets."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = logits.logsumexp(dim=1)
    everyone = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(everyone, own.detach())
    everyone[rank] = own  # through this one the gradient reaches our logits
    normaliser = torch.stack(everyone).logsumexp(dim=0)
    words = torch.arange(rank * logits.shape[1], (rank + 1) * logits.shape[1], device=own.device)
    hit = targets[:, None] == words
    return (normaliser - SumForward.apply(logits.where(hit, 0).sum(dim=1))).mean()


# %% [markdown]
# **Predict** the bytes that a rank hands over for the loss of $t$ tokens in forward: two float32
# numbers for each token. Backward sends nothing. Gathering the logits would take $V/n$ numbers for
# each. The logits below are large on purpose: $e^{1000}$ overflows.

# %% tags=["prediction"]
t, V, n = 20, 4096, 4
predicted = {
    "bytes for the loss": 2 * t * 4,
    "bytes in its backward": 0,
    "bytes to gather the logits": V // n * t * 4,
}


# %%
def cut_loss(rank):
    generator = torch.Generator().manual_seed(0)
    logits = 1000 * torch.randn(t, V, generator=generator)
    targets = torch.randint(V, (t,), generator=generator).to(hardware.device())
    logits = logits.to(hardware.device()).requires_grad_()
    expected = cross_entropy(logits, targets)
    expected.backward()
    mine = logits.detach().chunk(n, dim=1)[rank].clone().requires_grad_()
    with Trace() as trace:
        loss = loss_from_cut_logits(mine, targets)
    with Trace() as backward:
        loss.backward()
    sent = trace.record().sent(), backward.record().sent(), mine.nbytes
    gradient = torch.allclose(mine.grad, logits.grad.chunk(n, dim=1)[rank], atol=1e-6)
    return torch.allclose(loss, expected), gradient, sent


same_loss, same_gradient, sent = launch(cut_loss, n)[0]
print("loss and gradient as from whole logits:", same_loss and same_gradient)
compare(
    predicted,
    dict(zip(predicted, sent)),
    likely={"Those are numbers: a float32 has 4 bytes.": dict(zip(predicted, (40, 0, 20_480)))},
)

# %% [markdown]
# Exercise 6.4 is this loss for parts of different sizes, with tokens that do not count.
#
# ### A language model, trained
#
# Now everything together: embedding, blocks, head and loss, on the story that comes with the
# course. The vocabulary is its 72 characters. A vocabulary that does not divide is padded with words
# that never occur (Shoeybi et al. 2019, section 5.1). Their logits have to be set to minus infinity: a
# logit of 0 takes its share of the softmax. Embedding, blocks and head are cut; the
# position table and the norms are small and stay whole. Embedding and head are cut by the same
# words, so a model that ties the two stays tied.

# %%
from course_utils.lesson import text
from course_utils.lesson.models import LanguageModel

CONTEXT, WINDOWS, STEPS, LEARNING_RATE = 32, 8, 3, 0.1
VOCABULARY = len(text.vocabulary())  # 72, so it divides by 2, 4 and 8


def new_model() -> LanguageModel:
    torch.set_num_threads(1)  # so small a model loses time with more
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY, width=32, heads=4, layers=2, context=CONTEXT)
    return model.to(hardware.device())


def batches():
    for step in range(STEPS):
        inputs, targets = text.windows(CONTEXT, WINDOWS, seed=step)
        yield inputs.to(hardware.device()), targets.flatten().to(hardware.device())


# %%
def tensor_parallel_model(model: LanguageModel) -> LanguageModel:
    """Cuts a whole language model in place. Its head then gives this rank's logits only."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tied = model.head.weight is model.token.weight
    model.token = CutEmbedding(model.token)
    for block in model.blocks:
        tensor_parallel(block)
    own_words = nn.Parameter(part_of("head.weight", model.head.weight, rank, ranks))
    model.head.weight = model.token.weight if tied else own_words
    model.head.register_forward_pre_hook(lambda module, inputs: SumBackward.apply(*inputs))
    return model


# %%
def train(model, loss_function):
    """Three steps of SGD. Returns the losses; the model keeps its parameters and gradients."""
    # foreach=True, the default on GPUs, does not take DTensors and plain tensors in one model
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = loss_function(model(inputs).flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parts_of_model(model, rank, ranks):
    """Each parameter and its gradient, or the parts of both that `rank` would hold."""
    named = list(model.named_parameters())
    values = [part_of(name, p, rank, ranks) for name, p in named]
    gradients = [part_of(name, p.grad, rank, ranks) for name, p in named]
    return flat(values), flat(gradients)


# %%
alone = new_model()
losses_alone = train(alone, cross_entropy)


def train_cut(rank):
    model = tensor_parallel_model(new_model())
    losses = train(model, loss_from_cut_logits)
    return losses, flat(model.parameters()), flat(p.grad for p in model.parameters())


def as_alone(results):
    """Compares the losses, parameters and last gradients of all ranks with the single process."""
    claims = {"losses": True, "parameters": True, "gradients": True}
    results = list(results)
    for rank, (losses, values, gradients) in enumerate(results):
        expected_values, expected_gradients = parts_of_model(alone, rank, len(results))
        claims["losses"] &= equal(torch.tensor(losses_alone), [torch.tensor(losses)])
        claims["parameters"] &= equal(expected_values, [values])
        claims["gradients"] &= equal(expected_gradients, [gradients])
    return claims


# %%
for n in (1, 2, 4):
    print(f"{count_of_ranks(n)} as alone:", as_alone(launch(train_cut, n)))

# %% [markdown]
# That is the contract of the course (chapter 3, section 4), with a new condition: the parts
# together are the parameters of the single process. No rank ever held the whole model's gradients,
# or all logits.
#
# **Predict** what a step of this model sends, for $t$ tokens and $L$ blocks. Forward: two all-reduces
# of $tW$ numbers in each block, one more for the embedding, and the two small calls of the loss.
# Backward: two in each block, and one where the head, a column cut, hands its gradient back.

# %% tags=["prediction"]
t, W, L, C, n = WINDOWS * CONTEXT, 32, 2, CONTEXT, 4
predicted = {
    "all-reduces of t W in forward": 2 * L + 1,
    "all-reduces of t W in backward": 2 * L + 1,
    "other calls in forward": 2,
    "other calls in backward": 0,
    "bytes in forward": 4 * ((2 * L + 1) * t * W + 2 * t),
    "bytes in backward": 4 * (2 * L + 1) * t * W,
}


# %%
def costs_of_step(rank):
    """What one step of the cut model sends, and what this rank holds after it."""
    model = tensor_parallel_model(new_model())
    optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = next(batches())
    with Trace() as forward:
        loss = loss_from_cut_logits(model(inputs).flatten(0, 1), targets)
    with Trace() as backward:
        loss.backward()
    optimizer.step()
    large, other, sent = {}, {}, {}
    for name, trace in [("forward", forward), ("backward", backward)]:
        calls = [(call.op, call.elements) for call in trace.record().calls]
        large[f"all-reduces of t W in {name}"] = calls.count(("all_reduce", t * W))
        other[f"other calls in {name}"] = len(calls) - calls.count(("all_reduce", t * W))
        sent[f"bytes in {name}"] = trace.record().sent()
    return large | other | sent, memory_ledger(model, optimizer)


costs = {ranks: launch(costs_of_step, ranks) for ranks in (2, 4)}
compare(predicted, costs[n][0][0])
print("the same on all ranks:", all(cost == costs[n][0] for cost in costs[n]))

# %% [markdown]
# And the memory of the whole model, trained with Adam. **Predict** it for 2 and 4 ranks. The blocks'
# matrices, the embedding and the head are cut, $L(12W^2 + 7W) + 2VW$ numbers; the rest of the blocks,
# the position table of $C$ rows and the last norm are whole, $(6L + C + 2)W$. Adam keeps two numbers
# for each parameter, and for each tensor of parameters a step count of 4 bytes. A block has 12
# tensors, the rest of the model 5.

# %% tags=["prediction"]
in_parts, whole = L * (12 * W**2 + 7 * W) + 2 * VOCABULARY * W, (6 * L + C + 2) * W  # numbers
predicted = {
    "parameters, 2 ranks": 4 * (in_parts // 2 + whole),
    "gradients, 2 ranks": 4 * (in_parts // 2 + whole),
    "optimizer, 2 ranks": 2 * 4 * (in_parts // 2 + whole) + 4 * (12 * L + 5),
    "parameters, 4 ranks": 4 * (in_parts // 4 + whole),
    "gradients, 4 ranks": 4 * (in_parts // 4 + whole),
    "optimizer, 4 ranks": 2 * 4 * (in_parts // 4 + whole) + 4 * (12 * L + 5),
}

# %%
ledgers = {ranks: costs[ranks][0][1] for ranks in (2, 4)}
measured = {
    f"{kind}, {ranks} ranks": ledger[kind]
    for ranks, ledger in ledgers.items()
    for kind in ("parameters", "gradients", "optimizer")
}
compare(predicted, measured)

# %% [markdown]
# The fourth kind, the activations, is cut in the further notebook, by tokens. What attention keeps for backward is left
# out there: it depends on the kernel that computes it, and so on the device.

# %% [markdown]
# ### With PyTorch: DTensor and a plan
#
# A **DTensor** is a tensor that knows how it is cut. It has a **mesh** of devices and, for each
# dimension of the mesh, a **placement**: `Shard(dim)`, `Replicate()` or `Partial()`. Operations on
# DTensors compute the placement of the result and call a collective where one is needed.
#
# `parallelize_module` takes a module, a mesh and a **plan** that names what becomes of each layer.
# It cuts the parameters into DTensors and puts hooks around the layers, as you did by hand.
# `ColwiseParallel` takes a replicated input and gives columns, `RowwiseParallel` takes columns and
# gives the sum.

# %%
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
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


# %%
def queries_keys_values_by_rank(attention: Attention) -> None:
    """Reorders the rows of qkv: rank 0's queries, keys and values first, then rank 1's."""
    ranks = dist.get_world_size()
    for name, parameter in attention.qkv.named_parameters():
        parts = [part_of(f"qkv.{name}", parameter, rank, ranks) for rank in range(ranks)]
        parameter.data = torch.cat(parts)


def tensor_parallel_with_pytorch(block: Block) -> Block:
    """Does what `tensor_parallel` does, with parallelize_module."""
    queries_keys_values_by_rank(block.attention)
    parallelize_module(block, mesh(), PLAN)
    share_heads(block.attention)
    return block


# %% [markdown]
# Two lines more than the documentation shows. `ColwiseParallel` cuts the rows of `qkv.weight` into
# $n$ runs of neighbours and knows nothing of queries and keys. So the rows are reordered first. And
# the attention has to know that it has fewer heads now; nobody tells it. What happens without the
# first line:


# %%
def block_with_pytorch(rank, reorder=True):
    torch.manual_seed(0)
    block, x = Block(32, heads=4).to(hardware.device()), torch.randn(2, 8, 32)
    x = x.to(hardware.device())
    expected = block(x)
    if reorder:
        tensor_parallel_with_pytorch(block)
    else:
        parallelize_module(block, mesh(), PLAN)
        share_heads(block.attention)
    return equal(expected, [block(x)])


print("2 ranks, rows reordered: output as whole:", all(launch(block_with_pytorch, 2)))
print("2 ranks, rows as they are: output as whole:", any(launch(block_with_pytorch, 2, False)))

# %% [markdown]
# No error, but a different model. Remember this one when you parallelize somebody's fused projection.
# Many models have one in their MLP too: `down(act(gate(x)) * up(x))`, with `gate` and `up` in one
# matrix. Cut each of the two, as queries, keys and values here.

# %% [markdown]
# ### The whole model with PyTorch
#
# For the model, the plan also names the embedding and the head. `RowwiseParallel` on an
# `nn.Embedding` cuts its rows, the words. The head keeps its logits in columns, as a DTensor, and
# inside `loss_parallel()` the usual `cross_entropy` works on them without gathering.
#
# DTensors travel inside the model; `local` looks into one.

# %%
from torch.distributed.tensor import DTensor, Replicate, Shard


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """The gradient of what this rank holds of a parameter."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor):  # it may be cut in another way than its parameter
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


# %%
MODEL_PLAN = {f"blocks.*.{name}": style for name, style in PLAN.items()} | {
    "token": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}


def tensor_parallel_model_with_pytorch(model: LanguageModel) -> LanguageModel:
    """Does what `tensor_parallel_model` does, with parallelize_module."""
    for block in model.blocks:
        queries_keys_values_by_rank(block.attention)
        share_heads(block.attention)
    return parallelize_module(model, mesh(), MODEL_PLAN)


# %%
from torch.distributed.tensor.parallel import loss_parallel


def train_with_pytorch(rank):
    model = tensor_parallel_model_with_pytorch(new_model())
    with loss_parallel():
        losses = train(model, cross_entropy)
    values = flat(local(p) for p in model.parameters())
    gradients = flat(local_gradient(p) for p in model.parameters())
    return losses, values, gradients, model.token.weight.grad.placements


for n in (1, 2, 4):
    *results, placements = zip(*launch(train_with_pytorch, n))
    print(f"{count_of_ranks(n)} as alone:", as_alone(zip(*results)))
print("the embedding's weight is cut by rows, its gradient is", placements[0])

# %% [markdown]
# The same model again. The last line is a surprise. PyTorch cuts the embedding's weight, but every
# rank gets its gradient whole, and with a large vocabulary that is much memory. `CutEmbedding` keeps
# the gradient of its own rows only. (So it is in torch 2.14 and 2.15; look at your version.)

# %% [markdown]
# ### Who holds what
#
# A picture of one block on 4 ranks. The ranks draw it themselves. Each number of each parameter is
# replaced by its own position, then the block is cut on real ranks. What a rank has afterwards says
# which positions it holds.


# %%
def positions_held(rank, cut):
    block = Block(32, heads=8)
    for parameter in block.parameters():
        parameter.data = torch.arange(parameter.numel()).reshape(parameter.shape).float()
    block = cut(block.to(hardware.device()))
    return {name: local(p.detach()).flatten().long() for name, p in block.named_parameters()}


def holders(cut, ranks=4):
    """For each parameter a matrix: the rank that holds each number, or `ranks` if all do."""
    held = launch(positions_held, ranks, cut)
    result = {}
    for name, parameter in Block(32, heads=8).named_parameters():
        holder = torch.full((parameter.numel(),), -1)
        for rank in range(ranks):
            seen = holder[held[rank][name]] >= 0
            holder[held[rank][name]] = torch.where(seen, ranks, rank)
        result[name] = holder.view(len(parameter), -1)
    return result


# %%
by_hand, with_pytorch = holders(tensor_parallel), holders(tensor_parallel_with_pytorch)
print("every number has a holder:", all((h >= 0).all() for h in by_hand.values()))
print(
    "by hand and with PyTorch the same:",
    all(map(torch.equal, by_hand.values(), with_pytorch.values())),
)

# %%
figure = ch06.block_of(by_hand)
plt.show()

# %% [markdown]
# *Each matrix is drawn as PyTorch stores it, its bias as a narrow strip at its right. `qkv` and `up`
# are cut into rows, `qkv` three times, for queries, keys and values. `out` and `down` are cut into
# columns. Norms and the biases of `out` and `down` are grey: every rank holds them.*
#
# ## 5. Break it: three bug hunts and three mistakes
#
# ### Bug hunt: a wrapper called tensor parallelism
#
# The web article *PyTorch Model Parallelism* shows this under the heading *Tensor Parallelism with
# torch.nn.parallel.DistributedDataParallel*, with the remark *creating a large layer that can be
# split*. Before you run it: which part of the layer does each rank hold? What does forward send?

# %%
from torch.nn.parallel import DistributedDataParallel as DDP


class LargeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.large_layer = nn.Linear(1000, 1000)

    def forward(self, x):
        return self.large_layer(x)


def run_model(rank):
    model = LargeModel().to(hardware.device())
    ddp_model = DDP(model)
    input_tensor = torch.randn(20, 1000).to(hardware.device())
    with Trace() as trace:
        output = ddp_model(input_tensor)
    shape = tuple(output.shape)
    return f"output {shape}, holds {memory_ledger(model)['parameters']:,} bytes, " + (
        f"sent {trace.record().sent()} bytes in forward"
    )


for rank, line in enumerate(launch(run_model, 2)):
    print(f"rank {rank}: {line}")

# %% [markdown]
# Nothing is split. 4,004,000 bytes are the whole layer: 1,000 x 1,000 weights and 1,000 biases of 4
# bytes. Both ranks hold all of it, and each computes a whole output from an input of its own. This
# is data parallelism, chapter 3. If the layer does not fit on one GPU, it does not fit on two. Cut
# in columns, each rank would hold half:


# %%
def run_cut_model(rank):
    layer = LargeModel().large_layer
    part = part_of("up.weight", layer.weight, rank, 2), part_of("up.bias", layer.bias, rank, 2)
    return sum(tensor.nbytes for tensor in part)


print("bytes on each rank:", launch(run_cut_model, 2))

# %% [markdown]
# ### Bug hunt: a style used as a layer
#
# The same article goes on with *nn.parallel.DistributedTensorParallel (New API)* and this function.
# What is `tp_fc`?


# %%
def tensor_parallel_example(rank):
    fc = nn.Linear(2048, 2048)
    tp_fc = RowwiseParallel(fc)
    inp = torch.randn(32, 2048).to(hardware.device())
    return tp_fc(inp).shape


def first_line(function):
    try:
        return function()
    except (TypeError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


print(launch(lambda rank: first_line(lambda: tensor_parallel_example(rank)), 2)[0])
print(launch(lambda rank: first_line(lambda: RowwiseParallel()(torch.ones(32, 2048))), 2)[0])
print(
    "there is an nn.parallel.DistributedTensorParallel:",
    hasattr(nn.parallel, "DistributedTensorParallel"),
)

# %% [markdown]
# The class does not wrap a layer and is no layer. It is a **style**: an entry of a plan, without a
# weight of its own. And no class has the name in the heading. The repair is a mesh and
# `parallelize_module`. By default `RowwiseParallel` expects that the input is cut in columns
# already; this one is whole, and has to be the same on both ranks.


# %%
def repaired_example(rank):
    torch.manual_seed(0)
    fc, inp = nn.Linear(2048, 2048).to(hardware.device()), torch.randn(32, 2048)
    inp = inp.to(hardware.device())
    expected = fc(inp)
    tp_fc = parallelize_module(fc, mesh(), RowwiseParallel(input_layouts=Replicate()))
    return equal(expected, [tp_fc(inp)]), tuple(local(tp_fc.weight).shape)


for rank, (same, shape) in enumerate(launch(repaired_example, 2)):
    print(f"rank {rank}: output as whole: {same}, holds a weight of shape {shape}")

# %% [markdown]
# ### Bug hunt: a slip of the pen in a plan
#
# A plan with the key `feed_foward.w1` has stood in [PyTorch's own
# tutorial](https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html). Read the keys below. What
# does each rank hold, and is the output right?

# %%
import warnings

SLIP = {"feed_foward.up": ColwiseParallel(), "feed_foward.down": RowwiseParallel()}


def with_slip(rank):
    torch.manual_seed(0)
    block, x = Block(32, heads=4).to(hardware.device()), torch.randn(2, 8, 32)
    expected = block(x.to(hardware.device()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize_module(block, mesh(), SLIP)
    said = sum("feed_foward" in str(warning.message) for warning in caught)
    same = equal(expected, [block(x.to(hardware.device()))])
    return said, same, tuple(local(block.feed_forward.up.weight).shape)


said, same, shape = launch(with_slip, 2)[0]
print(f"no error, but {said} warnings that name such a key; output as whole: {same}")
print("a rank holds a weight `up` of shape", shape)

# %% [markdown]
# `feed_foward` has lost an `r`. No layer has that name, so none is cut: every rank holds all 128 rows
# and computes everything. The output is right, so no comparison of outputs sees it. Only a warning
# tells, since [pull request 157182](https://github.com/pytorch/pytorch/pull/157182). Count what a
# rank holds. With only one of the two keys wrong, the shapes do not fit, and forward fails.

# %% [markdown]
# ### The bias, added once per rank
#
# The obvious way to write a row cut: give each rank a smaller `nn.Linear`, and sum their outputs.
# Each of these layers adds its bias. **Predict** the error on 4 ranks.


# %%
def careless_cut(feed_forward):
    cut_parameters(feed_forward)  # and the last layer keeps its bias
    feed_forward.register_forward_pre_hook(lambda module, inputs: SumBackward.apply(*inputs))
    feed_forward.register_forward_hook(lambda module, inputs, y: SumForward.apply(y))


def error_of_careless_cut(rank):
    torch.manual_seed(0)
    whole, x = FeedForward(32).to(hardware.device()), torch.randn(2, 6, 32)
    expected = outcome(whole, x.to(hardware.device()))
    careless_cut(whole)
    got, bias = outcome(whole, x.to(hardware.device())), whole.down.bias
    error = got["output"] - expected["output"]
    three_too_many = equal(error, [(3 * bias).expand_as(error)])
    return three_too_many, equal(expected["down.bias"], [got["down.bias"]])


error, gradient = launch(error_of_careless_cut, 4)[0]
print("the error is three times the bias:", error)
print("the gradient of the bias is right:", gradient)

# %% [markdown]
# Many models start with biases of zero. Then the first output is right, and the error grows as the
# bias learns. Only a comparison after some steps shows it. The repair is in `cut_half`: add the
# bias after the sum.
#
# ### Twelve heads on eight ranks
#
# The smallest GPT-2 has 12 heads, and many machines have 8 GPUs
# ([issue 17 of build-nanogpt](https://github.com/karpathy/build-nanogpt/issues/17)). The width
# divides by 8, the heads do not. The first function below rounds down. The second one "repairs" the
# error by making the heads as wide as the shapes want.


# %%
def rounded_down(attention):
    cut_half(attention, attention.out)
    attention.heads = 12 // dist.get_world_size()  # 1


def made_to_fit(attention):
    rounded_down(attention)
    attention.head_width = 48 // dist.get_world_size()  # 6; the heads of the model are 4 wide


def attention_as_whole(rank, cut):
    torch.manual_seed(0)
    attention, x = Attention(48, heads=12).to(hardware.device()), torch.randn(2, 6, 48)
    expected = attention(x.to(hardware.device()))
    cut(attention)
    return f"runs, output as whole: {equal(expected, [attention(x.to(hardware.device()))])}"


for cut in (rounded_down, made_to_fit, cut_attention):
    results = launch(lambda rank, cut: first_line(lambda: attention_as_whole(rank, cut)), 8, cut)
    print(f"{cut.__name__} on 8 ranks:", results[0])
print("cut_attention on 6 ranks:", launch(attention_as_whole, 6, cut_attention)[0])

# %% [markdown]
# The first raises an error about a shape. The second runs, with 8 heads that are each one and a
# half heads of the model. No error, but a different output: a different model. `cut_attention`
# refuses with a sentence. Take a number of ranks that divides the heads, or a model with a
# different number of heads.
#
# The same with keys: models with *grouped-query attention* have fewer heads of keys and values than
# of queries. On more ranks than there are such heads, a head of keys is held by several ranks, and
# its gradient is the sum over them, since each copy has seen its own queries only.
#
# ### A shard that is a view
#
# A row cut takes columns of the stored matrix: `weight.chunk(2, dim=1)[rank]`. That is a **view**:
# it has the right shape, lies in the memory of the whole matrix, and its numbers are not neighbours
# there. It is not **contiguous**. **Predict:** how many bytes does it keep alive? What does
# `all_reduce` make of it?


# %%
def shard_as_view(rank, shard_of):
    weight = torch.arange(24.0).view(4, 6).to(hardware.device())
    expected = weight[:, :3] + weight[:, 3:]
    shard = shard_of(weight.chunk(2, dim=1)[rank])
    kept = shard.untyped_storage().nbytes()
    try:
        dist.all_reduce(shard)
        right = torch.equal(shard, expected)
    except ValueError:  # NCCL refuses
        right = False
    return kept, right


for name, shard_of in [("view", lambda shard: shard), ("copy", Tensor.clone)]:
    kept, right = launch(shard_as_view, 2, shard_of)[0]
    print(f"{name}: a shard of 48 bytes keeps {kept} bytes, all_reduce is right: {right}")

# %% [markdown]
# The view keeps the whole matrix, so the cut saves no memory. And gloo reads 12 neighbouring numbers
# from where the shard begins, which are other numbers than the shard's, and writes the sum there: a
# wrong result without an error. NCCL raises `Tensors must be contiguous`. The repair is the copy,
# once, when the weight is cut.

# %% [markdown]
# ## 6. Exercises: write the cuts yourself

# %% [markdown]
# Four parts of a tensor-parallel transformer, from a single cut matrix to a loss over a cut vocabulary (6.5
# and 6.6 are in the further notebook). Every answer runs on real ranks, and the check counts what they
# send. Wherever your code runs, the process group is ready: `dist.get_rank()` and `dist.get_world_size()` work. `full`, where an
# exercise hands it to you, is the whole layer, with the same values on every rank: build your part
# from it and do not keep it. You may use the chapter's autograd functions: `SumBackward.apply` (identity
# forward, sum over the ranks backward) and `SumForward.apply` (the reverse).

# %%
from course_exercises import check, hint
from course_utils.lesson.models import GroupedAttention

# %% [markdown]
# ### 6.1 A column cut as a layer (2 points)
#
# Cut a linear layer so that each rank computes a block of its output features. `nn.Linear` stores its
# weight as (out, in), so that a block of the matrix's columns is a block of the weight's rows. Every
# rank has the whole input. Forward needs no word from the others. Backward does: each rank's weights
# contribute to the gradient of every input feature.
#
# Two things to think of. The shard must be memory of its own: a view keeps the whole matrix alive. And
# the input may go another way too, past your layer, as in a residual connection; what comes back that
# way is no business of yours.


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
# ### 6.2 A row cut as a layer (2 points)
#
# Now the other cut. Each rank has a block of the *input* features, as a column cut leaves them, and the
# weights for them. It computes a partial sum of every output feature; the sum over the ranks is the
# output. The bias belongs to the output: every rank holds all of it, it counts once, and its gradient
# is the whole layer's on every rank. Otherwise the ranks' copies drift apart.


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
# ### 6.3 Grouped attention, a few heads to each rank (3 points)
#
# In **grouped-query attention** several heads of queries share one head of keys and values, so that there is
# less to keep when a model writes text. `full` is a `course_utils.lesson.models.GroupedAttention`, with
# `full.heads` heads of queries and `full.kv_heads` of keys and values, all `full.head_width` wide. The rows of
# `full.qkv` are the queries of all heads, then the keys, then the values. Head h of the queries goes with head
# h // (heads // kv_heads) of the keys and values.
#
# As in section 4, each rank has a few heads, but what is cut there by thirds has parts of two sizes here, and
# each head of queries has to meet its keys. `scaled_dot_product_attention(..., enable_gqa=True)` takes fewer
# heads of keys than of queries. You may use your own answers to 6.1 and 6.2.


# %% nbgrader={"grade_id": "6.3", "solution": true}
class HeadParallelAttention(nn.Module):
    """One rank's heads of the grouped attention `full`.

    Of n ranks, rank r has the r-th of n equal blocks of consecutive heads, of queries as of keys and values,
    and parameters for them alone: n ranks together hold those of `full`, and only the bias of `full.out` more
    than once. They have `full`'s dtype, in memory of their own; `full` does not change. Raises ValueError with
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
# ### 6.4 A cross-entropy over a shared vocabulary (3 points)
#
# The head of a language model is a column cut too: each rank has the logits of its part of the
# vocabulary. For one token with logits $z_j$ and target $t$, the loss is
#
# $$\log \sum_j e^{z_j} - z_t .$$
#
# Gathering the logits first would send what is often the largest tensor of all. Two or three numbers a
# token are enough. And $e^{z}$ overflows in float32 from $z = 89$ on: subtract the row's largest
# logit first, the same one on every rank. It cancels, and so it needs no gradient.
#
# Two things are new compared with section 4. The head is not tied to the embedding, and so need not be cut
# as it is: the ranks' parts follow each other, but one may have more classes than another, and a rank knows its
# own number only. And as in PyTorch a target may be **`ignore_index`**: such a token does not count, neither in
# the sum nor in the number by which the mean divides.


# %% nbgrader={"grade_id": "6.4", "solution": true}
def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100
) -> Tensor:
    """Returns the mean cross-entropy over the tokens that count, the same scalar on every rank.

    `logits` (N, V_r) are those of this rank's V_r classes, one at least, which follow those of the ranks before
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
# ## 7. See it: who holds what, who sends what
#
# The explorer cuts one matrix of a model that is 840 wide, a number that divides by 1 to 8. Choose
# the matrix and the cut, and add workers. The lines under the picture say what each rank holds, and
# what forward and backward send. Three things to try:
#
# * Cut `MLP up` in columns and `MLP down` in rows: nothing is sent between the two.
# * Add ranks and watch the bytes of an all-reduce: what a rank holds shrinks, what it hands over
#   does not.
# * Add tokens: the weights stay, the bytes on the wire grow.

# %%
SHAPES = {
    "MLP up": (840, 3360),
    "MLP down": (3360, 840),
    "attention qkv": (840, 2520),
    "attention out": (840, 840),
}


def names_and_sends(cut, n, whole_x, whole_y):
    """The three matrices' titles, what forward and backward send, and the activations held."""
    nothing = "nothing; there is one rank"
    if cut == "columns":
        names = ["X, whole on every rank", "A", "Y, in columns"]
        sends = "nothing; Y stays in columns", f"all-reduce of X's gradient, {whole_x:,.1f} KiB"
        held = f"X {whole_x:,.1f} KiB, Y {whole_y / n:,.1f} KiB"
    else:
        names = ["X, in columns", "A", "Y, a term of a sum on each rank"]
        sends = f"all-reduce of Y, {whole_y:,.1f} KiB", "nothing; X's gradient comes in columns"
        held = f"X {whole_x / n:,.1f} KiB, Y {whole_y:,.1f} KiB"
    return names, sends if n > 1 else (nothing, nothing), held


# %%
from course_utils.lesson import explore


def draw_who(matrix, cut, world_size, tokens):
    (rows, columns), KiB, n = SHAPES[matrix], 4 / 1024, world_size
    whole_x, whole_y = tokens * rows * KiB, tokens * columns * KiB
    names, (forward, backward), held = names_and_sends(cut, n, whole_x, whole_y)
    lines = [
        f"{matrix}, {rows:,} x {columns:,}, {tokens} tokens, float32",
        f"each rank holds: {rows * columns // n * KiB / 1024:.2f} MiB of A; {held}",
        f"forward sends:  {forward}",
        f"backward sends:  {backward}",
    ]
    return ch06.one_cut(n, cut, names, lines)


explore.Explorer(
    draw_who,
    matrix=list(SHAPES),
    cut=["columns", "rows"],
    world_size=(1, 8, 4),
    tokens=(1, 128, 32),
)

# %% [markdown]
# *At the start: MLP up, cut in columns for four ranks. Every rank sees all of X and makes a quarter
# of Y's columns. Forward sends nothing; backward sums X's gradient.*
#
# And the figure to remember: how far does it pay to cut? A block of GPT-3's size ($W$ = 12,288, a
# sequence of 2,048 tokens, 16-bit numbers) computes $24 t W^2 + 4 t s W$ operations in forward
# and twice that in backward (Narayanan et al. 2021, appendix). The times below are simulated,
# with assumed speeds: GPUs that do 150 TFLOP/s (1 TFLOP/s is $10^{12}$ floating-point operations
# per second), a ring with 250 GB/s inside a machine of 8 GPUs and with 25 GB/s between machines.


# %%
def seconds_of_block(n, W=12_288, tokens=2_048, flops=150e12, inside=250e9, between=25e9):
    """Computing and communicating, forward and backward; the ring is as fast as its slowest link."""
    compute = 3 * (24 * tokens * W**2 + 4 * tokens**2 * W) / n / flops
    bandwidth = inside if n <= 8 else between
    return compute, 4 * 2 * (n - 1) / n * tokens * W * 2 / bandwidth


sizes = [1, 2, 4, 8, 16, 32]
compute, communicate = zip(*(seconds_of_block(n) for n in sizes))
figure = ch06.block_times(sizes, compute, communicate)
plt.show()
for n, a, b in zip(sizes, compute, communicate):
    print(
        f"{count_of_ranks(n):>8}: {1e3 * (a + b):5.1f} ms, {b / (a + b):3.0%} of it communication"
    )

# %% [markdown]
# *The violet part halves with every doubling. The orange part stays small, until the ring leaves
# the machine at 16: then the whole bar grows again, and 32 ranks take as long as 8.* How high that
# step is, is the assumption of 25 GB/s, which is one network adapter. Machines with an adapter for each
# GPU have eight times as much, and then `seconds_of_block(16, between=200e9)` falls further. The model
# leaves out what still speaks for 8: the latency of every hop, and products that get too small to fill a
# GPU. In a measurement on 64 GPUs with a model of 162 billion parameters, 8 ranks were the best number, the
# size of a machine (Narayanan et al. 2021, section 5.4.1, figure 13).
#
# ## 8. On a cluster: the same model under torchrun
#
# The script trains the language model of section 4 with `parallelize_module`. `init_device_mesh`
# starts the process group; the mesh has a name now, because on a cluster it gets a second dimension.
# The attention stays whole here, to keep the script short.

# %%
from course_utils.lesson.terminal import scratch, torchrun

script = scratch() / "tensor_parallel.py"
script.unlink(missing_ok=True)

# %%
# %%writefile scratch/tensor_parallel.py
"""Trains a small language model, cut between all ranks. Start it with torchrun."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

from course_utils.lesson import text
from course_utils.lesson.models import LanguageModel

PLAN = {
    "token": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.feed_forward.up": ColwiseParallel(),
    "blocks.*.feed_forward.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}

local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
device = "cuda" if torch.cuda.device_count() >= local_ranks else "cpu"
if device == "cuda":
    torch.cuda.set_device(local_rank)
ranks = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("tensor",))

torch.manual_seed(0)  # the same model on every rank
model = LanguageModel(len(text.vocabulary()), width=32, heads=4, layers=2, context=32).to(device)
parallelize_module(model, mesh["tensor"], PLAN)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for step in range(3):
    tokens, targets = (part.to(device) for part in text.windows(32, 8, seed=step))  # the same, too
    with loss_parallel():
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    whole_loss = loss.full_tensor().item()  # on every rank: it may be a collective
    if dist.get_rank() == 0:
        print(f"step {step}: loss {whole_loss:.3f}")
dist.destroy_process_group()

# %%
printed = torchrun(2, script)
print(printed, end="")
expected = [f"step {step}: loss {loss:.3f}" for step, loss in enumerate(losses_alone)]
print("as the single process of section 4:", printed.splitlines() == expected)

# %% [markdown]
# What changes there:
#
# * **All ranks of the group read the same batch.** In chapter 3 each rank read its own. Give the
#   ranks different batches here, and their parts no longer belong together.
# * **The group stays inside a machine**, where links are fast. Between machines, use data
#   parallelism or a pipeline; chapter 7 combines them. The mesh is then
#   `init_device_mesh("cuda", (machines, 8), mesh_dim_names=("data", "tensor"))`, and
#   `mesh["tensor"]` is the part for this chapter.
# * **Nothing hides the all-reduces** by itself. Libraries cut them into pieces that overlap with the
#   matrix products; PyTorch calls it asynchronous tensor parallelism.
# * **The random numbers.** Each rank needs a common generator and one of its own, as the further notebook
#   shows.
# * **Checkpoints** hold parts. `torch.distributed.checkpoint` saves DTensors from all ranks and loads
#   them for another number of ranks.

# %% [markdown]
# ### 6.7 Your own script, with cut layers
#
# `mine/train.py` (3.6) copies the whole model to every rank. Give it the option `--tensor`, the number of ranks that
# share each layer; with `--tensor 1`, the default, it does what it did. If you have not written it, `mine.start(6)` gives
# you the course's own as chapter 3 leaves it.
#
# * The other ranks are data ranks: 4 ranks with `--tensor 2` are two groups of two. A group is one model: its two ranks
#   train on the same windows, and the groups share the batch out.
# * `parallelize_module` cuts the embeddings, wq, wk, wv and wo, w1, w2 and w3, and the output. The two heads of keys and
#   values allow two tensor ranks, not four.
# * `DistributedDataParallel` does not take a model that is cut. Average the gradients yourself, as in 3.1.
# * The parameters end as on one rank, the log is that of one rank, and `model.pt` holds whole tensors.
#
# `06_tensor_parallel_further` also cuts the sequence between the layers, as most people run it. You may do so here.

# %%
from course_exercises import mine

check("6.7", mine.script(6))

# %% [markdown]
# ## 9. Remember
#
# 1. A column cut needs the whole input and gives columns; a row cut takes columns and gives terms of
#    a sum. Column, then row, needs one all-reduce.
# 2. Autograd knows one process. Where a replicated tensor enters a cut region, backward sums; where
#    terms leave it, forward sums.
# 3. A block takes two all-reduces in forward and two in backward, of $tW$ numbers each, however many
#    ranks there are. So the group stays where links are fast.
# 4. The weights are cut, the activations between the halves are not: every rank holds all $tW$ of them.
#    (Sequence parallelism, in the further notebook, cuts those too.)
# 5. Most mistakes run without an error: a bias per rank, a fused matrix cut in the wrong place,
#    a slip of the pen in a plan. Compare with one process.
#
# **Sources**
#
# * M. Shoeybi et al., *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
#   Parallelism*, 2019, [arXiv 1909.08053](https://arxiv.org/abs/1909.08053): section 3 the cuts, the
#   functions f and g, embedding and loss; appendix B.2 random numbers.
# * D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM*, SC 2021, [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): section 3.2 bytes,
#   section 5.4.1 tensor against pipeline parallelism, appendix operations.
# * V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022,
#   [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): section 4.2 tensor and sequence
#   parallelism, table 2.
# * J. Ainslie et al., *GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints*,
#   EMNLP 2023, [arXiv 2305.13245](https://arxiv.org/abs/2305.13245): grouped-query attention.
# * PyTorch: [tensor
#   parallelism](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html),
#   [DTensor](https://docs.pytorch.org/docs/stable/distributed.tensor.html),
#   [extending autograd](https://docs.pytorch.org/docs/stable/notes/extending.html),
#   [tutorial](https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html).
