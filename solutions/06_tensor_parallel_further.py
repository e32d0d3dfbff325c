# %% [markdown]
# # 6. Tensor parallel, further: sequence parallelism by hand, three matrices, dropout, and norms
#
# The lesson shows sequence parallelism as a plan. Here you see what it does, by hand, and how much memory it saves.
# Then come an MLP of three matrices, and things that go wrong with any cut. A sum may have the wrong backward. Dropout
# has to drop the same numbers on all ranks in one place, and different ones in another. Clipping needs the norm of
# all gradients.
#
# None of it needs an answer from the lesson.

# %% tags=["nbval-ignore-output"]
import warnings

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import linear, silu
from torch.nn.parallel import DistributedDataParallel

from course_exercises import check, hint
from course_utils import hardware
from course_utils.figures import ch06
from course_utils.launch import launch
from course_utils.lesson.equality import check_equal, flat, largest_difference
from course_utils.lesson.models import Attention, Block, FeedForward
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace, kept_for_backward, memory_ledger

hardware.report()

# %% [markdown]
# ## 1. The factory: each building inspects a quarter
#
# Four buildings share a station, and all of the material goes to each. Before the station, the material is inspected,
# and all four buildings inspect all of it. From now on, each inspects a quarter. Where the station begins, the
# quarters are put together. Where it ends, each building gets the sum for its own quarter only.
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | inspecting a quarter each | norms on $t/n$ tokens | activations cut by tokens between the halves |
# | putting the quarters together | all-gather | where a half begins |
# | the sum for a quarter | reduce-scatter | where a half ends |
#
# ## 2. The smallest real run: the lesson's cuts
#
# These are the lesson's two functions, $f$ and $g$, and its cuts in place. `cut_half` now takes the pair of functions
# that it puts around a half, the attention or the MLP.


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


# %%
def cut_dimension(name):
    """The dimension along which the parameter `name` is cut; None: every rank holds all of it."""
    if name.endswith(("qkv.weight", "qkv.bias", "up.weight", "up.bias")):
        return 0
    return 1 if name.endswith(("out.weight", "down.weight")) else None


def part_of(name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns a copy of what `rank` holds of the parameter `name`."""
    dim = cut_dimension(name)
    if dim is None:
        return whole.detach().clone()
    sections = whole.detach().chunk(3) if "qkv" in name else [whole.detach()]
    return torch.cat([section.chunk(ranks, dim)[rank] for section in sections], dim)


def cut_half(half: nn.Module, last: nn.Linear, enter=SumBackward, leave=SumForward) -> None:
    """Cuts a module that ends with the layer `last`, and joins the parts with `enter`, `leave`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, parameter in half.named_parameters():
        parameter.data = part_of(name, parameter, rank, ranks)
    last.forward = lambda x: linear(x, last.weight)
    half.register_forward_pre_hook(lambda module, inputs: enter.apply(*inputs))
    half.register_forward_hook(lambda module, inputs, y: leave.apply(y) + last.bias)


# %%
def tensor_parallel(block: Block) -> Block:
    """Cuts a block in place: rank r holds its share of the heads and of the hidden columns."""
    block.attention.heads //= dist.get_world_size()
    cut_half(block.attention, block.attention.out)
    cut_half(block.feed_forward, block.feed_forward.down)
    return block


def output_of_block(rank, cut):
    torch.manual_seed(0)
    block, x = Block(32, heads=4).to(hardware.device()), torch.randn(2, 6, 32)
    return cut(block)(x.to(hardware.device())).detach()


expected = launch(output_of_block, 1, lambda block: block)[0]
print("largest difference:", check_equal(expected, launch(output_of_block, 2, tensor_parallel)))

# %% [markdown]
# ### Sequence parallelism: two other functions at the boundaries
#
# Between the halves each rank keeps $t/n$ of the tokens ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198),
# section 4.2.2). Where a half begins, an all-gather fetches the other tokens; where it ends, a reduce-scatter gives
# each rank the sum for its own.


# %%
def gather_tokens(piece):
    """(N, T / n, W) from every rank to (N, T, W) on every rank."""
    pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, piece)
    return torch.cat(pieces, dim=1)


def sum_tokens(partial):
    """(N, T, W), one term on every rank, to this rank's tokens of the sum, (N, T / n, W)."""
    pieces = [piece.contiguous() for piece in partial.chunk(dist.get_world_size(), dim=1)]
    mine = torch.empty_like(pieces[0])
    dist.reduce_scatter(mine, pieces)
    return mine


# %% [markdown]
# In backward, each of the two becomes the other.


# %%
class GatherSequence(torch.autograd.Function):
    """All-gather along the tokens in forward, reduce-scatter in backward."""

    @staticmethod
    def forward(ctx, piece):
        return gather_tokens(piece.contiguous())

    @staticmethod
    def backward(ctx, gradient):
        return sum_tokens(gradient)


class ScatterSequence(torch.autograd.Function):
    """Reduce-scatter along the tokens in forward, all-gather in backward."""

    @staticmethod
    def forward(ctx, partial):
        return sum_tokens(partial)

    @staticmethod
    def backward(ctx, gradient):
        return gather_tokens(gradient.contiguous())


# %% [markdown]
# The rest of the block stays as it is. But a norm now sees only a rank's own tokens, as do the biases added after the
# reduce-scatter. Their gradients are terms, to be added up over the ranks after backward.


# %%
def sequence_parallel(block: Block) -> Block:
    """Cuts a block in place. It takes and returns this rank's tokens, (N, T / n, W)."""
    pair = GatherSequence, ScatterSequence
    block.attention.heads //= dist.get_world_size()
    cut_half(block.attention, block.attention.out, *pair)
    cut_half(block.feed_forward, block.feed_forward.down, *pair)
    return block


def sum_gradients_of_whole_parameters(model: nn.Module) -> None:
    """Adds up, after backward, what each rank has found from its own tokens."""
    for name, parameter in model.named_parameters():
        if cut_dimension(name) is None:
            dist.all_reduce(parameter.grad)


# %% [markdown]
# If you forget that sum, no error tells you. The cells below compare output and gradients with and without it, and
# later those of PyTorch's plan, which are DTensors.


# %%
def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """The gradient of what this rank holds of a parameter."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor):  # it may be cut in another way than its parameter
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


def outcome(module, x, after_backward):
    """The output, and the gradients of the input and of the parameters, by name."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    (y * torch.linspace(-1, 1, y.shape[-1], device=y.device)).sum().backward()
    after_backward(module)
    gradients = {name: local_gradient(p) for name, p in module.named_parameters()}
    return {"output": y.detach(), "input": x.grad} | gradients


# %%
def nothing(block):
    pass


def whole_and_by_tokens(rank, cut, after_backward):
    """This rank's parts of the outcome of the whole block, and what it finds with its own tokens."""
    torch.manual_seed(0)
    block, x = Block(32, heads=4).to(hardware.device()), torch.randn(2, 8, 32)
    ranks, x = dist.get_world_size(), x.to(hardware.device())
    whole = outcome(block, x, nothing)
    for name in ("output", "input"):
        whole[name] = whole[name].chunk(ranks, dim=1)[rank]
    got = outcome(cut(block), x.chunk(ranks, dim=1)[rank], after_backward)
    return {name: part_of(name, whole[name], rank, ranks) for name in got}, got


whole, summed = launch(
    whole_and_by_tokens, 2, sequence_parallel, sum_gradients_of_whole_parameters
)[0]
_, not_summed = launch(whole_and_by_tokens, 2, sequence_parallel, nothing)[0]
print("largest difference, summed:", check_equal(flat(whole.values()), [flat(summed.values())]))
for name in whole:
    if (difference := largest_difference(whole[name], [not_summed[name]])) > 1e-5:
        print(f"not summed, {name}: {difference}")

# %% [markdown]
# ### 6.5 A norm on a part of the sequence (2 points)
#
# Each rank normalises its own stretch of the sequence, and the all-gather that follows hands the whole sequence to
# the column cut. Two gradients need care. The norm's weight and bias are copies, and each rank's copy has seen its
# own tokens only. And what comes back through the all-gather is, on each rank, the part of the gradient that *its*
# columns give.
#
# You may use the autograd functions above: `SumBackward.apply` (identity forward, sum over the ranks backward) and
# `GatherSequence.apply` (all-gather along dimension 1 forward, reduce-scatter backward).


# %% nbgrader={"grade_id": "6.5", "solution": true}
class SequenceParallelNorm(nn.Module):
    """LayerNorm on this rank's tokens, then an all-gather of the sequence.

    `norm` is the same on every rank and is kept as `self.norm`; it has no other parameters. Where it is
    frozen, its parameters stay without gradients.
    """

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        self.norm = norm
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised whole sequence (N, T, width), the same on every rank.

        x (N, T/n, width) are this rank's tokens: rank r has the r-th of n equal stretches.
        Backward starts from gradients (N, T, width) that differ between the ranks; the loss's gradient
        is their sum. It gives each rank the gradient of its own tokens, and every rank the
        gradients of the norm's parameters for all tokens.
        """
        ### BEGIN SOLUTION
        weight, bias = SumBackward.apply(self.norm.weight), SumBackward.apply(self.norm.bias)
        y = nn.functional.layer_norm(x, self.norm.normalized_shape, weight, bias, self.norm.eps)
        return GatherSequence.apply(y)
        ### END SOLUTION


# %% nbgrader={"grade_id": "6.5-check", "grade": true, "points": 2, "locked": true}
check("6.5", SequenceParallelNorm)

# %% [markdown]
# ## 3. Predict, then measure: less memory
#
# A norm with the MLP behind it keeps these inputs for backward. The norm keeps $tW$ numbers, and two more for each
# token, its mean and its scale. `up` keeps $tW$, the GELU $4tW$, and `down` $4tW$.
#
# **Predict** the bytes, 4 a number, on each of 4 ranks with tensor parallelism, and with sequence parallelism as
# well. Which of these tensors are cut?

# %% tags=["prediction"]
t, W, n = 48, 64, 4
predicted = {
    "tensor parallel": 4 * (2 * t * W + 2 * t + 8 * t * W // n),
    "with sequence": 4 * (t * W + (t * W + 2 * t) // n + 8 * t * W // n),
}


# %%
def kept_by_mlp(rank, cut, tokens):
    block = cut(Block(W, heads=8).to(hardware.device()))
    x = torch.randn(3, tokens // 3, W, device=hardware.device())
    with kept_for_backward(block) as kept:
        block.feed_forward(block.norm2(x))
    return kept.bytes


kept = {
    "whole": launch(kept_by_mlp, 1, lambda block: block, t)[0],
    "tensor parallel": launch(kept_by_mlp, n, tensor_parallel, t)[0],
    "with sequence": launch(kept_by_mlp, n, sequence_parallel, t // n)[0],
}

# %%
compare(
    predicted,
    kept,
    {
        "As if all were cut: the norm's input and the input of `up` are whole on every rank.": {
            "tensor parallel": kept["whole"] // n
        },
        "As if all were cut: the input of `up` is gathered, and whole on every rank.": {
            "with sequence": kept["whole"] // n
        },
    },
)

# %% [markdown]
# One whole tensor remains: the gathered input that `up` keeps. Megatron-LM keeps a rank's own tokens only and gathers
# once more in backward: ten all-gathers and reduce-scatters a block and step in place of eight, a quarter more bytes.
# Then everything is divided by $n$. For a block with dropout, 16-bit numbers and an attention that keeps its matrix
# (the term with $s$; FlashAttention has none), that makes $tW(34/n + 5as/(Wn))$ bytes in place of $tW(10 + 24/n +
# 5as/(Wn))$ (Korthikanti et al., table 2; $a$ heads, $s$ tokens in a sequence).
#
# ## 4. With PyTorch: the gradients of the norms
#
# Here is the lesson's plan, compared with one process. It needs no sum after backward: a norm's gradient is a DTensor
# with the placement `Partial()`, which is summed where it is used.

# %%
gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
SEQUENCE_PLAN = {
    "norm1": SequenceParallel(),
    "attention": gather,
    "attention.qkv": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "norm2": SequenceParallel(),
    "feed_forward": gather,
    "feed_forward.up": ColwiseParallel(),
    "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
}


def mesh():
    return init_device_mesh(hardware.device().type, (dist.get_world_size(),))


# %%
def own_heads(attention: Attention) -> None:
    """Reorders the rows of qkv, rank 0's queries, keys and values first, and counts one rank's heads."""
    ranks = dist.get_world_size()
    for name, parameter in attention.qkv.named_parameters():
        parts = [part_of(f"qkv.{name}", parameter, rank, ranks) for rank in range(ranks)]
        parameter.data = torch.cat(parts)
    attention.heads //= ranks


def sequence_parallel_with_pytorch(block: Block) -> Block:
    """Does what `sequence_parallel` does, with parallelize_module."""
    own_heads(block.attention)
    return parallelize_module(block, mesh(), SEQUENCE_PLAN)


whole, got = launch(whole_and_by_tokens, 2, sequence_parallel_with_pytorch, nothing)[0]
print("largest difference:", check_equal(flat(whole.values()), [flat(got.values())]))

# %% [markdown]
# ### Three matrices, one entrance
#
# The MLP of Llama and of most models since has three matrices (SwiGLU). `w1` and `w3` are cut in columns at the same
# places, so that each rank multiplies columns that belong together, and `w2` in rows.


# %%
class Gated(nn.Module):
    """An MLP with a gate: w2(silu(w1(x)) * w3(x))."""

    def __init__(self, width, hidden):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


THREE = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
ENTER_ONCE = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())


def gated(rank, plan):
    """The difference of this rank's parts of output and gradients; the all-reduces of a step."""
    torch.manual_seed(0)
    mlp, x = Gated(32, 96).to(hardware.device()), torch.randn(2, 6, 32).to(hardware.device())
    whole = outcome(mlp, x, nothing)
    mlp = parallelize_module(mlp, mesh(), plan)
    with Trace() as trace:
        got = outcome(mlp, x, nothing)
    for name in ("w1.weight", "w3.weight", "w2.weight"):
        whole[name] = whole[name].chunk(dist.get_world_size(), int(name == "w2.weight"))[rank]
    sums = [call.bytes for call in trace.record().calls if call.op == "all_reduce"]
    return check_equal(flat(whole.values()), [flat(got.values())]), sum(sums) // (4 * x.numel())


# %% [markdown]
# The plan `THREE` names the three layers. **Predict** how many all-reduces of $tW$ numbers a step has, forward and
# backward. And how many, if the *module* has an entry as well, which makes its input a DTensor before `w1` and `w3`?

# %% tags=["prediction"]
predicted = {"an entry for each layer": 3, "and one for the module": 2}

# %%
plans = [THREE, {"": ENTER_ONCE} | THREE]
runs = [launch(gated, 2, plan) for plan in plans]
print("largest difference:", max(difference for run in runs for difference, _ in run))
measured = dict(zip(predicted, (run[0][1] for run in runs)))

# %%
compare(
    predicted,
    measured,
    likely={
        "One f and one g, as by hand: but each layer's style has its own f.": {
            "an entry for each layer": 2
        },
    },
)

# %% [markdown]
# Each `ColwiseParallel` puts its own $f$ in front of its layer, and each adds up a gradient of $x$. With one entry for
# the module the two gradients are added on the rank first, and once over the ranks. It is the same for `wq`, `wk` and
# `wv`, where the plan without an entry has four all-reduces in place of two.
#
# ## 5. Break it: a sum, dropout, norms, and two things that are no cut
#
# ### A sum that autograd knows
#
# $g$ is a sum in forward and nothing in backward. Two all-reduces look like shorter ways to write it. The
# *functional* one, which returns a new tensor, has a backward since PyTorch 2.11. The one in place has none. A rank's
# part counts once in the sum, so its gradient should be 1. **Predict** both on 4 ranks.

# %% tags=["prediction"]
predicted = {"functional": 4.0, "in place": 1.0}


# %%
def functional(part):
    return functional_collectives.all_reduce(part, "sum", dist.group.WORLD)


def in_place(part):
    whole = part.clone()
    dist.all_reduce(whole)
    return whole


def gradient_of_part(rank, add_up):
    """The gradient of one number of this rank's part, where the loss is the sum of all parts."""
    part = torch.ones(3, device=hardware.device(), requires_grad=True)
    with warnings.catch_warnings(action="ignore"):
        add_up(part).sum().backward()
    return part.grad[0].item()


# %%
found = [launch(gradient_of_part, 4, add_up)[0] for add_up in (functional, in_place)]

# %%
compare(
    predicted,
    dict(zip(predicted, found)),
    likely={
        "As if its backward were nothing: it is a sum over the ranks.": {"functional": 1.0},
        "As if autograd saw the collective: it sees the clone only.": {"in place": 4.0},
    },
)

# %% [markdown]
# The backward of a functional sum is a sum, which is right where each rank has a loss of its own. Here all ranks
# compute the same loss, so four equal gradients are added up: the gradient is too large by the number of ranks, and
# Adam hides it. The sum in place gives 1 by luck: PyTorch warns that *an autograd kernel was not registered*, and that
# this use will be removed. Write $g$ as an `autograd.Function`, or use DTensors.
#
# ### Dropout masks: equal here, different there
#
# Dropout tosses a coin for every number. In a replicated tensor all ranks hold the same numbers, so their coins must
# agree. In a cut tensor each rank holds different columns, so their coins must differ. One seed for everything gets
# one of the two wrong.


# %%
def coins(shape, generator):
    return (torch.rand(shape, generator=generator) < 0.5).to(hardware.device())


@torch.no_grad()
def mlp_with_dropout(rank, seed_inside, seed_outside):
    """An MLP with dropout on its hidden columns, cut, and on its output, replicated."""
    torch.manual_seed(0)
    mlp, x = FeedForward(32).to(hardware.device()), torch.randn(4, 32).to(hardware.device())
    inside, outside = (torch.Generator().manual_seed(s[rank]) for s in (seed_inside, seed_outside))
    cut_half(mlp, mlp.down)
    hidden_coins = coins((4, 64), inside)
    mlp.up.register_forward_hook(lambda module, inputs, hidden: hidden * hidden_coins * 2)
    return mlp(x) * coins((4, 32), outside) * 2, hidden_coins


same_seed, own_seed = (7, 7), (8, 9)
for inside, outside in [(same_seed, same_seed), (own_seed, own_seed), (own_seed, same_seed)]:
    (y0, coins0), (y1, coins1) = launch(mlp_with_dropout, 2, inside, outside)
    names = {same_seed: "one seed", own_seed: "a seed for each rank"}
    print(f"inside {names[inside]}, outside {names[outside]}:")
    print("    difference between the ranks' outputs:", largest_difference(y0, [y1]))
    print(f"    hidden coins that are alike: {(coins0 == coins1).float().mean():.0%}")

# %% [markdown]
# With one seed, columns 0 and 64 of the hidden tensor always drop together: the model has half as many independent
# coins as it should. With a seed per rank everywhere, the ranks no longer hold the same output, and each trains a
# model of its own. The third way is right: a common generator for replicated tensors, and each rank's own for cut
# tensors. Megatron-LM keeps both (Shoeybi et al. 2019, appendix B.2); DTensor's dropout has the same effect. With
# sequence parallelism the tensors between the halves are cut too, so dropout there takes the rank's own generator.
#
# ### Clipping by a local norm
#
# **Gradient clipping** scales all gradients down if their norm is too large. The norm is that of the *whole*
# gradient. `clip_grad_norm_` on a rank sees only that rank's parts.


# %%
def clip_and_step(rank, cut, max_norm=1.0):
    torch.manual_seed(0)
    block, x = cut(Block(32, heads=4).to(hardware.device())), torch.randn(2, 8, 32)
    if cut is sequence_parallel_with_pytorch:  # it takes this rank's tokens
        x = x.chunk(dist.get_world_size(), dim=1)[rank]
    y = block(x.to(hardware.device()))
    (y * torch.linspace(-1, 1, 32, device=y.device)).sum().backward()
    # foreach=False: the quicker way of PyTorch 2.11 leaves gradients alone that are partial sums
    norm = nn.utils.clip_grad_norm_(block.parameters(), max_norm, foreach=False)
    torch.optim.SGD(block.parameters(), lr=1.0, foreach=False).step()
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return norm.item(), local(block.norm1.weight).detach()


# %%
def report_clipping(results):
    print(
        "norm on each rank, as a share of one process's:",
        [f"{norm / norm_alone:.3f}" for norm, _ in results],
    )
    (_, of_rank_0), (_, of_rank_1) = results
    print("norm1 after the step, between the ranks:", largest_difference(of_rank_0, [of_rank_1]))
    print("and from one process:", largest_difference(norm1_alone, [of_rank_0, of_rank_1]))


norm_alone, norm1_alone = launch(clip_and_step, 1, tensor_parallel)[0]
report_clipping(launch(clip_and_step, 2, tensor_parallel))

# %% [markdown]
# Each rank finds a different norm and scales by a different factor, so the parameters that all ranks hold drift apart
# in the first step. Adding up the squares of the local norms is not right either: it counts the replicated parameters
# once per rank. With DTensors, PyTorch's function knows what each rank holds. Every parameter must be a DTensor, so
# the cell below uses the plan with sequence parallelism, where those of the layer norms are, too.

# %%
report_clipping(launch(clip_and_step, 2, sequence_parallel_with_pytorch))

# %% [markdown]
# ### 6.6 Clip by the global norm (2 points)
#
# The norm must be that of all gradients of the whole model: every shard once, and every replicated parameter once,
# though each rank has a copy.


# %% nbgrader={"grade_id": "6.6", "solution": true}
def clip_gradient_norm(
    sharded: list[nn.Parameter], replicated: list[nn.Parameter], max_norm: float
) -> float:
    """Scales all gradients so that the norm of the whole model's is at most `max_norm`, in place.

    `sharded` are this rank's shards: other ranks have other values, and some may have a gradient on
    one rank and none on another, or no elements. `replicated` have the same gradient on every rank.
    Returns the 2-norm of all gradients before clipping, to the last digit the same number on every
    rank. Leaves gradients alone where that norm is at most `max_norm`; a `.grad` that is None stays
    None.
    """
    ### BEGIN SOLUTION
    shards = [parameter.grad for parameter in sharded if parameter.grad is not None]
    copies = [parameter.grad for parameter in replicated if parameter.grad is not None]
    squares = torch.zeros((), device=hardware.device())
    for gradient in shards:
        squares += gradient.square().sum()
    dist.all_reduce(squares)
    for gradient in copies:
        squares += gradient.square().sum()
    norm = squares.sqrt().item()
    if norm > max_norm:
        for gradient in shards + copies:
            gradient *= max_norm / norm
    return norm
    ### END SOLUTION


# %% nbgrader={"grade_id": "6.6-check", "grade": true, "points": 2, "locked": true}
check("6.6", clip_gradient_norm)

# %% [markdown]
# ### Bug hunt: two things called tensor parallelism
#
# In tutorials you will find a model in `DistributedDataParallel` under the heading *Tensor Parallelism*, with the
# remark *creating a large layer that can be split*, and next to it the line `tp_fc = RowwiseParallel(fc)`. Which part
# of the layer does a rank hold in each case?


# %%
def large_layer(rank):
    layer = nn.Linear(1000, 1000).to(hardware.device())
    DistributedDataParallel(layer)
    return memory_ledger(layer)["parameters"]


def repaired(rank):
    fc = nn.Linear(2048, 2048).to(hardware.device())
    parallelize_module(fc, mesh(), RowwiseParallel(input_layouts=Replicate()))
    return tuple(local(fc.weight).shape)


print("DDP, bytes on each rank:", launch(large_layer, 2))
try:
    tp_fc = RowwiseParallel(nn.Linear(2048, 2048))
except TypeError as error:
    print(error)
print("in a plan, weights of shapes", launch(repaired, 2))

# %% [markdown]
# DDP splits nothing: 4,004,000 bytes are the whole layer. It is data parallelism. `RowwiseParallel` is no layer and
# wraps none: it is a style, an entry of a plan for `parallelize_module`. By default it expects an input cut in
# columns; this input is whole.

# %% [markdown]
# ## 6. Exercises
#
# | exercise | points | stands in |
# |---|---|---|
# | 6.5 A norm on a part of the sequence | 2 | 2, after *Sequence parallelism* |
# | 6.6 Clip by the global norm | 2 | 5, after *Clipping by a local norm* |

# %% [markdown]
# ## 7. See it: what stays whole
#
# The figure shows the bytes counted in section 3, by the layers that keep them.

# %%
norm, up, inner = 4 * (t * W + 2 * t), 4 * t * W, 4 * 4 * t * W
stacks = {
    "whole, 1 rank": [norm, up, inner, inner],
    f"tensor, {n} ranks": [norm, up, inner // n, inner // n],
    f"sequence, {n} ranks": [norm // n, up, inner // n, inner // n],
}
assert [sum(stack) for stack in stacks.values()] == list(kept.values())
figure = ch06.stacked(stacks, ["norm", "up", "GELU", "down"])
plt.show()

# %% [markdown]
# *Tensor parallelism alone leaves the first two pieces as long as they were. With sequence parallelism only the input
# of `up` stays whole.*
#
# ## 8. On a cluster
#
# * Sequence parallelism sends as much as tensor parallelism alone and keeps less, so use both together. The number of
#   tokens has to be a multiple of the number of ranks.
# * It is not context parallelism, in which attention itself is cut by tokens (chapter 10).
# * Whole logits are large: 128,000 numbers for each token of Llama 3. Besides cutting the vocabulary, one can compute
#   head and loss for some tokens at a time. `nn.LinearCrossEntropyLoss` does it with
#   `options=nn.LinearCrossEntropyOptions()` (since PyTorch 2.13).
#
# ## 9. Remember
#
# 1. Between the halves of a block each token stands alone, so the activations can be cut by tokens there.
# 2. What sees only a rank's own tokens (norms, biases after the sum) has gradients that must be summed.
# 3. In dropout, replicated tensors need equal coins, and cut tensors different ones.
# 4. In the norm of all gradients, count each shard once, and each replicated parameter once, not once per copy.
#
# **Sources**
#
# * V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022,
#   [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): section 4.2.2, table 2.
# * M. Shoeybi et al., *Megatron-LM*, 2019, [arXiv 1909.08053](https://arxiv.org/abs/1909.08053): appendix B.2, random
#   seeds.
# * PyTorch: [tensor parallelism](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html).
