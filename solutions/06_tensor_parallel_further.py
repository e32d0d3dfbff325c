# %% [markdown]
# # 6. Tensor parallel, further: tokens that are cut, coins, and norms over all ranks
#
# The lesson cuts the weights, and leaves the activations between the halves of a block whole on every
# rank. This notebook cuts those too: **sequence parallelism**, by hand and with PyTorch's plan. Then come two
# things that go wrong with any cut: dropout, whose coins must agree here and differ there, and
# clipping, whose norm is that of the whole model.
#
# None of it needs an answer of the lesson.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from course_utils import hardware, plots
from course_utils.launch import launch
from course_utils.lesson.equality import equal
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace, kept_for_backward, ring_bytes

hardware.report()

# %% [markdown]
# ## 1. The factory: nobody inspects what a colleague inspects
#
# At the lesson's station four workers share the instruction sheet, and each sees all of the product. Between two
# such steps the product is inspected and cleaned: a small job, which all four do to the whole product, four times
# the same. From now on each does it to a quarter of the product. When the sheet is needed again, the quarters are
# laid together; and when the results are added up, each worker adds up the own quarter only.
#
# | at the station | in PyTorch | what it is |
# |---|---|---|
# | inspecting a quarter each | norms on $t/n$ tokens | activations cut by tokens between the halves |
# | laying quarters together | all-gather | where a half begins |
# | adding up the own quarter | reduce-scatter | where a half ends |
#
# ## 2. The smallest real run: the lesson's cuts
#
# The pair of functions, the table of cuts, and `cut_half`, as in the lesson. Read on from *Sequence parallelism* if
# you come from there.


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


# %%
from course_utils.lesson.models import Attention, Block, FeedForward


def share_heads(attention: Attention) -> None:
    """Tells the attention how many heads this rank has."""
    attention.heads //= dist.get_world_size()


def tensor_parallel(block: Block) -> Block:
    """Cuts a block in place: rank r holds its share of the heads and of the hidden columns."""
    share_heads(block.attention)
    cut_half(block.attention, block.attention.out)
    cut_half(block.feed_forward, block.feed_forward.down)
    return block


def output_of_block(rank, cut):
    torch.manual_seed(0)
    block, x = Block(32, heads=4).to(hardware.device()), torch.randn(2, 6, 32)
    return cut(block)(x.to(hardware.device())).detach()


# %%
expected = launch(output_of_block, 1, lambda block: block)[0]
print("block on 2 ranks as whole:", equal(expected, launch(output_of_block, 2, tensor_parallel)))

# %% [markdown]
# ### Sequence parallelism: the same bytes, less memory
#
# One thing is not cut yet: the tensors between the halves. Every rank holds all $tW$ activations,
# and runs the same norm over all of them. But norms work on each token alone. So let each rank keep
# $t/n$ of the tokens there. This is **sequence parallelism** ([Korthikanti et al.
# 2022](https://arxiv.org/abs/2205.05198), section 4.2.2): between the halves the activations are
# cut by tokens, inside them by columns.
#
# The boundaries change. Where a half begins, an all-gather fetches the other ranks' tokens. Where
# it ends, each rank needs the sum of its own tokens only, which is a reduce-scatter. In backward
# each becomes the other.


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
# The rest of the block stays as it is. Only the pair of functions is different. The number of
# tokens in a sequence, T, has to be a multiple of the number of ranks.


# %%
def sequence_parallel(block: Block) -> Block:
    """Cuts a block in place. It takes and returns this rank's tokens, (N, T / n, W)."""
    pair = GatherSequence, ScatterSequence
    share_heads(block.attention)
    cut_half(block.attention, block.attention.out, *pair)
    cut_half(block.feed_forward, block.feed_forward.down, *pair)
    return block


def sum_gradients_of_whole_parameters(model: nn.Module) -> None:
    """Adds up, after backward, what each rank has found from its own tokens."""
    for name, parameter in model.named_parameters():
        if cut_dimension(name) is None:
            dist.all_reduce(parameter.grad)


# %% [markdown]
# The second function is new, too. A norm now sees a rank's own tokens only, and so do the biases
# that are added after the reduce-scatter. Their gradients are terms of a sum. Forget this, and
# nothing fails: the norms of the ranks drift apart. The cell compares with and without it.


# %%
def outcome(module, x):
    """The output, and the gradients of the input and of the parameters, by name."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    (y * torch.linspace(-1, 1, y.shape[-1], device=y.device)).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"output": y.detach(), "input": x.grad} | gradients


# %%
def block_by_tokens(rank, cut, repair, gradient_of=lambda parameter: parameter.grad):
    torch.manual_seed(0)
    block, x = Block(32, heads=4).to(hardware.device()), torch.randn(2, 8, 32)
    expected, ranks = outcome(block, x.to(hardware.device())), dist.get_world_size()
    cut(block).zero_grad()
    weights = torch.linspace(-1, 1, 32, device=hardware.device())  # as in `outcome`
    own = x.chunk(ranks, dim=1)[rank].to(hardware.device()).requires_grad_()
    y = block(own)
    (y * weights).sum().backward()
    if repair:
        sum_gradients_of_whole_parameters(block)
    by_tokens = {"output": y, "input": own.grad}
    right = {k: equal(expected[k].chunk(ranks, dim=1)[rank], [v]) for k, v in by_tokens.items()}
    for name, p in block.named_parameters():
        right[name] = equal(part_of(name, expected[name], rank, ranks), [gradient_of(p)])
    return right


# %%
for repair in (True, False):
    right = launch(block_by_tokens, 2, sequence_parallel, repair)[0]
    wrong = [name for name, fine in right.items() if not fine]
    print("gradients of whole parameters", "summed:" if repair else "not summed:", end=" ")
    print("all as whole" if not wrong else "wrong: " + ", ".join(wrong))

# %% [markdown]
# Exercise 6.5 is a norm of this kind.
#
# ## 3. Predict, then measure: the same bytes, less memory
#
# **Predict**, for one block and for each direction: the number of collectives, and the bytes that a
# rank hands over. A reduce-scatter takes the whole $tW$, an all-gather this rank's $tW/n$. What a rank
# hands over is not what travels: the last two rows weigh the payloads with a ring's factors from
# the lesson's section 3. An all-reduce *is* a reduce-scatter and an all-gather, so on a ring the bytes are the same.

# %% tags=["prediction"]
t, W, n = 48, 64, 4
whole = 4 * t * W  # bytes
ring = 4 * 2 * (n - 1) * whole // n  # of 4 all-reduces
predicted = {
    "tensor, calls each way": [2, 2],
    "sequence, calls each way": [4, 4],
    "tensor, bytes each way": [2 * whole, 2 * whole],
    "sequence, bytes each way": [2 * (whole + whole // n), 2 * (whole + whole // n)],
    "tensor, on a ring, from counted payload": ring,
    "sequence, on a ring, from counted payload": ring,
}


# %%
def traffic_of_block(rank, cut, tokens):
    torch.manual_seed(0)
    block = cut(Block(W, heads=8).to(hardware.device()))
    x = torch.randn(3, tokens // 3, W, device=hardware.device(), requires_grad=True)
    with Trace() as forward:
        y = block(x)
    with Trace() as backward:
        y.sum().backward()
    records = forward.record(), backward.record()
    calls, sent = [r.count() for r in records], [r.sent() for r in records]
    return calls, sent, sum(ring_bytes(record.calls) for record in records)


# %%
together = launch(traffic_of_block, n, tensor_parallel, t)[0]
by_tokens = launch(traffic_of_block, n, sequence_parallel, t // n)[0]
measured = [number for pair in zip(together, by_tokens) for number in pair]
compare(
    predicted,
    dict(zip(predicted, measured)),
    {
        "As if tokens that are cut halved what travels: a ring carries the same either way.": {
            "sequence, on a ring, from counted payload": ring // 2
        },
        "Twice the calls: each is half of an all-reduce.": {
            "sequence, on a ring, from counted payload": 2 * ring
        },
    },
)

# %% [markdown]
# And the memory. **Predict** how many numbers autograd keeps for the backward of a norm with the
# MLP behind it. The norm keeps its input, $tW$, and two numbers for each token, from mean and
# deviation. The `up` layer keeps its input, $tW$. The GELU keeps its input, $4tW$, and the `down`
# layer keeps its, $4tW$. Tensor parallelism cuts the last two. Sequence parallelism also cuts what
# the norm keeps.

# %% tags=["prediction"]
predicted = {
    "whole": 4 * (10 * t * W + 2 * t),
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
        "As if everything were cut: the norm's input and the input of `up` are whole on every rank.": {
            "tensor parallel": kept["whole"] // n
        },
        "As if everything were cut: the input of `up` is gathered, and whole on every rank.": {
            "with sequence": kept["whole"] // n
        },
    },
)

# %%
from course_utils.figures import ch06

norm, up, inner = 4 * (t * W + 2 * t), 4 * t * W, 4 * 4 * t * W
stacks = {
    "whole, 1 rank": [norm, up, inner, inner],
    f"tensor, {n} ranks": [norm, up, inner // n, inner // n],
    f"sequence, {n} ranks": [norm // n, up, inner // n, inner // n],
}
print("as counted:", [sum(stack) for stack in stacks.values()] == list(kept.values()))
figure = ch06.stacked(stacks, ["norm", "up", "GELU", "down"])
plt.show()

# %% [markdown]
# *Tensor parallelism alone leaves the two uncut pieces on the left as long as they were. With sequence
# parallelism the first of them is cut as well.*
#
# One whole tensor remains: the gathered input that `up` keeps. Megatron-LM keeps this rank's tokens
# only and gathers them once more in backward: ten all-gathers and reduce-scatters a block and step in
# place of eight, a quarter more bytes. Then everything is divided by $n$: for a block with dropout,
# 16-bit numbers and an attention that keeps its matrix (the term with $s$; FlashAttention has none), $tW(34/n + 5as/(Wn))$ bytes instead of $tW(10 + 24/n + 5as/(Wn))$
# (table 2 there; $a$ heads, $s$ tokens in a sequence).
#
# ## 4. With PyTorch: one plan more
#
# The lesson's plan cuts the layers. `CommDebugMode` counts the collectives that DTensor calls. **Predict**
# them, for that plan and for one with sequence parallelism. In that plan, `SequenceParallel` makes the norms work on
# cut tokens, `PrepareModuleInput` gathers them where a half begins, and `output_layouts=Shard(1)`
# turns the sum at its end into a reduce-scatter.

# %%
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
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


# %%
from torch.distributed.tensor import DTensor, Replicate, Shard

gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
SEQUENCE_PLAN = PLAN | {
    "norm1": SequenceParallel(),
    "attention": gather,
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "norm2": SequenceParallel(),
    "feed_forward": gather,
    "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
}


def sequence_parallel_with_pytorch(block: Block) -> Block:
    """Does what `sequence_parallel` does, with parallelize_module."""
    queries_keys_values_by_rank(block.attention)
    parallelize_module(block, mesh(), SEQUENCE_PLAN)
    share_heads(block.attention)
    return block


# %% [markdown]
# DTensors travel inside the block; `local` looks into one. The plan needs no repair after backward:
# a norm's gradient is a DTensor with the placement `Partial()`, and to ask for it whole adds it up.
# Output, gradient of the input and all gradients of parameters, compared with one process:


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


right = launch(block_by_tokens, 2, sequence_parallel_with_pytorch, False, local_gradient)
print("2 ranks, all as whole:", all(all(of_rank.values()) for of_rank in right))

# %% tags=["prediction"]
predicted = {
    "tensor, forward": {"all_reduce": 2},
    "tensor, both": {"all_reduce": 4},
    "sequence, forward": {"all_gather": 2, "reduce_scatter": 2},
    "sequence, both": {"all_gather": 4, "reduce_scatter": 4},
}

# %%
from torch.distributed.tensor.debug import CommDebugMode


def counted(comm):
    counts = {str(op).split(".")[-1]: count for op, count in comm.get_comm_counts().items()}
    short = {name.split("_into_tensor")[0].split("_tensor")[0]: c for name, c in counts.items()}
    return dict(sorted(short.items()))


def count_with_comm_debug(rank, cut, tokens):
    block = cut(Block(W, heads=8).to(hardware.device()))
    x = torch.randn(3, tokens // 3, W, device=hardware.device(), requires_grad=True)
    with CommDebugMode() as comm:
        y = block(x)
        forward = counted(comm)
        y.sum().backward()
        return forward, counted(comm)


# %%
measured = [
    *launch(count_with_comm_debug, n, tensor_parallel_with_pytorch, t)[0],
    *launch(count_with_comm_debug, n, sequence_parallel_with_pytorch, t // n)[0],
]
compare(predicted, dict(zip(predicted, measured)))

# %% [markdown]
# ## 5. Break it: coins and norms
#
# ### Dropout masks: equal here, different there
#
# Dropout throws a coin for every number. In a replicated tensor all ranks hold the same numbers, so
# their coins must agree. In a cut tensor each rank holds different columns, so their coins must differ.
# One seed for everything gets one of the two wrong. The cell asks for both: on two ranks, does the
# output after the last dropout agree? And were the hidden numbers dropped in exactly the same places
# on both ranks?


# %%
def coins(shape, generator):
    return (torch.rand(shape, generator=generator) < 0.5).to(hardware.device())


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
    names = {same_seed: "one seed", own_seed: "own seed"}
    print(f"inside {names[inside]}, outside {names[outside]}:")
    print("    ranks agree on the output:", equal(y0, [y1]), end="")
    print(", hidden columns drop alike:", torch.equal(coins0, coins1))

# %% [markdown]
# With one seed, column 0 and column 64 of the hidden tensor always fall together: the model has half
# as many independent coins as it should, and nothing fails. With a seed per rank everywhere, the
# ranks no longer hold the same output, and from here on each trains a model of its own. The last line
# is the repair: two generators, a common one for replicated tensors and one of its own for each rank.
# Megatron-LM keeps such a pair (Shoeybi et al. 2019, appendix B.2). With sequence parallelism the
# tensors between the halves are cut too, by tokens: dropout there takes the rank's own generator.
#
# ### Clipping by a local norm
#
# **Gradient clipping** scales all gradients down if their norm is too large. The norm is that of the
# *whole* gradient. `clip_grad_norm_` on a rank sees its parts only.


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
        "norm as alone, on each rank:", [abs(norm / norm_alone - 1) < 1e-5 for norm, _ in results]
    )
    (_, norm1_of_0), (_, norm1_of_1) = results
    print("after the step, ranks agree on norm1:", equal(norm1_of_0, [norm1_of_1]))
    print("and have norm1 as alone:", equal(norm1_alone, [norm1_of_0, norm1_of_1]))


norm_alone, norm1_alone = launch(clip_and_step, 1, tensor_parallel)[0]
report_clipping(launch(clip_and_step, 2, tensor_parallel))

# %% [markdown]
# Each rank finds a different norm, so each scales by a different factor, and the parameters that all
# ranks hold drift apart in the first step. Adding up the squares of the local norms is not right
# either: it counts the parameters that everybody holds once per rank. With DTensors PyTorch's
# function knows who holds what. It wants DTensors everywhere, so the cell takes the plan with
# sequence parallelism, which makes the norms DTensors too. By hand it is exercise 6.6.

# %%
report_clipping(launch(clip_and_step, 2, sequence_parallel_with_pytorch))

# %% [markdown]
# ## 6. Exercises: a norm on a part of the sequence, and a norm over all ranks
#
# Both run on real ranks, where the process group is ready. You may use the autograd functions above:
# `SumBackward.apply` (identity forward, sum over the ranks backward) and `GatherSequence.apply` (all-gather
# along dimension 1 forward, reduce-scatter backward).

# %%
from course_exercises import check, hint

# %% [markdown]
# ### 6.5 A norm on a part of the sequence (2 points)
#
# Between the cut layers every rank would do the same LayerNorm on the same tokens. With sequence
# parallelism each rank normalises its own stretch of the sequence, and the all-gather that follows
# hands the whole sequence to the column cut. Two gradients need care. The norm's weight and bias are
# copies, and each rank's copy has seen its own tokens only. And what comes back through the all-gather
# is, on each rank, the part of the gradient that *its* columns give.


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
        Backward starts from gradients (N, T, width) that differ: those of a loss are their sum
        over the ranks. It gives each rank the gradient of its own tokens, and every rank the
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
# ### 6.6 Clip by the global norm (2 points)
#
# `torch.nn.utils.clip_grad_norm_` on each rank would take the norm of what that rank holds. The ranks
# would then scale by different factors, and the model would no longer be one model. The norm must be
# that of all gradients of the whole model: every shard once, and every replicated parameter once,
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
# ## 7. See it: what stays whole
#
# The bytes that autograd keeps for a norm and an MLP, as predicted above, for more ranks: the part that is not
# cut is all that remains in the end.

# %%
ranks = [1, 2, 4, 8, 16, 32]
parts = {
    "tensor parallel": [(2 * W + 2 + 8 * W / n) / (10 * W + 2) for n in ranks],
    "tensor + sequence parallel": [(W + (W + 2) / n + 8 * W / n) / (10 * W + 2) for n in ranks],
}
figure = ch06.what_stays(ranks, parts)
plt.show()
print("32 ranks:", {name: f"{shares[-1]:.3f}" for name, shares in parts.items()})

# %% [markdown]
# *Tensor parallelism flattens at two tensors of ten. With sequence parallelism one is left, the gathered input of
# `up`.*
#
# ## 8. On a cluster
#
# * Sequence parallelism sends what tensor parallelism sends, and needs less memory: whoever has the one takes the other
#   with it. The number of tokens has to be a multiple of the ranks.
# * It is not context parallelism: there the attention itself is cut by tokens, for sequences that fit on no rank.
# * Two generators, one for replicated tensors and one for each rank: DTensor's dropout keeps them by itself.
#
# ## 9. Remember
#
# 1. Between the halves of a block each token stands alone: cut there by tokens.
# 2. An all-reduce is a reduce-scatter and an all-gather: the bytes on a ring are the same.
# 3. What sees a rank's own tokens only (norms, biases behind the sum) has gradients that must be summed.
# 4. Replicated tensors need equal coins, cut tensors different ones.
# 5. A norm counts every shard once and every copy once.
#
# **Sources**
#
# * V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022,
#   [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): section 4.2.2, table 2.
# * M. Shoeybi et al., *Megatron-LM*, 2019, [arXiv 1909.08053](https://arxiv.org/abs/1909.08053): appendix B.2, random
#   seeds.
# * PyTorch: [tensor parallelism](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html).
