# %% [markdown]
# # 7. Hybrid: three dimensions at once
#
# You know three ways to use several ranks. **Data parallelism** gives each rank other rows
# (chapter 3), a **pipeline** gives each rank other layers (chapter 5), **tensor parallelism** gives
# each rank a part of every layer (chapter 6). Each has a limit. Copies of a model that does not fit
# help nobody. A pipeline needs many micro-batches. A tensor-parallel group wants to stay inside one
# machine. Large models are trained with all three together.
#
# Nothing new is computed in this chapter. What is new is the question *who talks to whom*. Every
# rank belongs to three groups, one for each dimension, and each call goes to one of them. Pick the
# wrong one and the shapes still fit.
#
# At the end you have trained a language model on 2 x 2 x 2 = 8 ranks, with the parameters of a
# single process. You know what each of the three groups sends, because you predicted it and counted
# it, and you can say which of them needs the fast links. What goes beyond that (a sum in three steps for two
# kinds of links, seeds for each dimension, and how to choose a grid) is in `07_hybrid_further`.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu

from course_exercises import check, hint
from course_utils import hardware, plots
from course_utils.figures import ch07
from course_utils.launch import RankFailure, launch
from course_utils.lesson import text
from course_utils.lesson.equality import equal
from course_utils.lesson.predictions import compare

hardware.report()

# %% [markdown]
# ## 1. The factory: sites, buildings and seats
#
# The company has grown. It has two **sites**, each with a whole production line of its own, and
# each site makes half of the orders. A line runs through two **buildings**, and trucks carry the
# half-made products from one to the next. In each building two workers share a station: they have
# two **seats**, and each holds one half of the station's instruction sheet.
#
# So every worker has an address: site, building, seat. And every worker talks to three kinds of
# colleagues.
#
# * With the neighbour at the same station, all the time: they add up their partial results.
# * With the colleague at the same seat in the next building, once per box: the truck.
# * With the colleague at the same place in the other site, once a day. Both hold the same half
#   sheet. They compare what they want to change and make the same change, or their sheets drift
#   apart.

# %%
figure = ch07.sites()
plt.show()

# %% [markdown]
# *Two sites, each with two buildings, each with two workers: eight ranks. Pink lines join the
# workers of one station, orange arrows follow the line of buildings, and blue arrows join the
# workers who hold the same half sheet in both sites; two of the four pairs are drawn.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | site | **data** coordinate | which rows of the batch a rank sees |
# | building | **pipeline** coordinate | which layers a rank holds |
# | seat | **tensor** coordinate | which part of each layer a rank holds |
# | address | coordinates of a rank | three numbers that say the same as the rank |
# | colleagues in one direction | **process group** | the ranks that differ in one coordinate only |
# | floor plan | **device mesh** | all ranks in a grid, with names for its dimensions |

# %% [markdown]
# ## 2. The smallest real run: four ranks, two dimensions
#
# Two sites, and two workers at one station. The MLP of chapter 6 is cut between the two ranks of a
# **team**, and each team has half of the rows. The sum over the hidden columns goes to the team,
# the sum of the gradients to the other **copy** of the same part.
#
# `new_group` makes a **process group** out of some ranks. All ranks have to make all groups, also
# those that they are not in, in the same order. Section 5 shows why.


# %%
def four_ranks(rank):
    teams = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # all ranks make all four groups,
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # in the same order
    site, seat = divmod(rank, 2)
    torch.manual_seed(0)  # the same numbers on all ranks
    x, A, B = (torch.randn(s, device=hardware.device()) for s in ((6, 4), (4, 16), (16, 4)))
    expected = 2 * gelu(x @ A).T @ (gelu(x @ A) @ B)  # gradient of the sum of squares, to B
    hidden = gelu(x.chunk(2)[site] @ A.chunk(2, dim=1)[seat])  # half the rows, half the columns
    y = hidden @ B.chunk(2)[seat]
    dist.all_reduce(y, group=teams[site])  # over the hidden columns
    gradient = 2 * hidden.T @ y  # of our half of B, from our rows
    dist.all_reduce(gradient, group=copies[seat])  # over the rows
    return torch.allclose(gradient, expected.chunk(2)[seat], rtol=1e-4, atol=1e-4)


print("gradient as in one process, on each rank:", launch(four_ranks, 4))

# %% [markdown]
# Two calls, two groups. Each rank saw half of the rows and held half of each matrix, and has the
# whole batch's gradient of its half.

# %% [markdown]
# ## 3. Predict, then measure: groups, bytes and links
#
# ### Ranks as coordinates
#
# There are $d \cdot p \cdot t$ ranks for $d$ copies (data), $p$ stages (pipeline) and $t$ parts of
# each layer (tensor). Number them as you count: the last digit runs fastest. The last dimension
# here is the tensor one, so
#
# $$\text{rank} = (i_d \cdot p + i_p) \cdot t + i_t .$$
#
# Why this order? Machines are filled with neighbouring ranks: ranks 0 to 7 sit in the first machine
# of 8 GPUs. Ranks that differ only in the last coordinate are neighbours, so the dimension that
# needs the fastest links comes last. You will see below that this is tensor.
#
# A group along a dimension: let that coordinate run and keep the others. In the grid of all ranks
# it is one line.

# %%
figure = ch07.grid(2, 2, 2, chosen=5)
plt.show()

# %% [markdown]
# *The grid of 2 x 2 x 2 ranks: a frame for each copy of the model, its stages side by side, the
# parts of a layer one under the other. Rank 5 has the coordinates (1, 0, 1). Rank 1 differs in
# data, rank 7 in pipeline, rank 4 in tensor; with the other four it never speaks.*
#
# ### Groups by hand
#
# **Predict**, for rank 5 of 2 x 2 x 2 ranks: its coordinates and its three groups. How many groups
# are there in all? (For each dimension, one for each choice of the other two coordinates.)

# %% tags=["prediction"]
d, p, t = 2, 2, 2
predicted = {
    "coordinates": (1, 0, 1),
    "data group": [1, 5],
    "pipeline group": [5, 7],
    "tensor group": [4, 5],
    "groups in all": p * t + d * t + d * p,
}


# %%
DIMENSIONS = ("data", "pipeline", "tensor")


def lines_of_grid(data, pipeline, tensor):
    """{dimension: the lines of ranks along it}, for all ranks."""
    grid = torch.arange(data * pipeline * tensor).view(data, pipeline, tensor)
    return {
        name: grid.movedim(axis, -1).flatten(0, 1).tolist() for axis, name in enumerate(DIMENSIONS)
    }


def groups_by_hand(data, pipeline, tensor):
    """Returns this rank's group along each dimension. All ranks call it, with the same sizes."""
    mine = {}
    for name, lines in lines_of_grid(data, pipeline, tensor).items():
        for line in lines:
            group = dist.new_group(line)  # every rank, for every line
            if dist.get_rank() in line:
                mine[name] = group  # and keeps the one that it is in
    return mine


# %%
def coordinates(groups):
    """A rank's number inside a group is its coordinate along that dimension."""
    return tuple(dist.get_rank(group) for group in groups.values())


def members(groups):
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


def ask_for_address(rank, make_groups, *sizes):
    groups = make_groups(*sizes)
    return coordinates(groups), members(groups)


address, lines = launch(ask_for_address, 8, groups_by_hand, d, p, t)[5]
measured = {"coordinates": address} | {f"{name} group": line for name, line in lines.items()}
measured["groups in all"] = sum(map(len, lines_of_grid(d, p, t).values()))
compare(predicted, measured)

# %% [markdown]
# `lines_of_grid` lets PyTorch do the counting: `movedim` puts one dimension last, and each row is a
# group. In exercise 7.1 you do it with arithmetic, for any dimensions. Look at what `groups_by_hand` returns: three
# **handles**. A handle is the only way to speak to a group, so it has to be kept.
#
# Inside a group the ranks have numbers of their own, from 0. `dist.get_rank(group)` tells them: it
# is the coordinate along that dimension. From here on a rank needs nothing but its three handles.
#
# ### DeviceMesh: the same, with names
#
# `init_device_mesh` makes the grid and all its groups in one call. `mesh["tensor"]` is the line of
# this rank along a dimension, `get_group` its handle. The cell makes both, for every grid of 4, of
# 6 and of 8 ranks, and compares.


# %%
from torch.distributed.device_mesh import init_device_mesh


def groups_of_mesh(data, pipeline, tensor):
    """Returns this rank's group along each dimension, from a DeviceMesh."""
    sizes = (data, pipeline, tensor)
    mesh = init_device_mesh(hardware.device().type, sizes, mesh_dim_names=DIMENSIONS)
    return {name: mesh.get_group(name) for name in DIMENSIONS}


def grids_of(ranks):
    """All (data, pipeline, tensor) with that many ranks."""
    sizes = range(1, ranks + 1)
    return [(a, b, c) for a in sizes for b in sizes for c in sizes if a * b * c == ranks]


# %%
def same_groups(rank):
    by_hand, of_mesh = (
        [ask_for_address(rank, make, *sizes) for sizes in grids_of(dist.get_world_size())]
        for make in (groups_by_hand, groups_of_mesh)
    )
    return by_hand == of_mesh


for ranks in (4, 6, 8):
    # groups that send nothing, 147 by hand for 8 ranks: NCCL would connect each, and keep memory for it
    same = all(launch(same_groups, ranks, backend="gloo"))
    print(f"{ranks} ranks, {len(grids_of(ranks)):2} grids: the same groups and coordinates: {same}")

# %% [markdown]
# ### What each dimension sends
#
# Now the bytes of one step, handed over by one rank. The model has $L$ blocks of width $W$, in
# stages of $L/p$. A copy gets $T$ of the batch's tokens, in micro-batches. $P$ is the number of
# parameters of the whole model.
#
# * **Tensor:** four all-reduces in each block, of all tokens (chapter 6, section 4): $4 \cdot (L/p)
#   \cdot TW$ numbers. Micro-batches change the number of calls, not the sum.
# * **Pipeline:** each boundary is crossed by the activations and later by their gradients (chapter
#   5, section 3): $TW$ numbers for each direction in which the rank has a neighbour.
# * **Data:** one sum of all gradients that the rank holds (chapter 3): about $P/(pt)$ numbers.
#
# A ring of $n$ ranks sends $2(n-1)/n$ times what is handed to an all-reduce, a message is sent
# once. Put numbers in. Narayanan et al. ([2021](https://arxiv.org/abs/2104.04473), table 1) trained
# a model of 145.6 billion parameters on 1,536 GPUs: $t = 8$, $p = 8$, and so $d = 24$; 80 layers of
# width 12,288, 2,304 sequences of 2,048 tokens in a batch. Three things that the run did besides
# are not counted here: it recomputed activations, which repeats the all-reduces of forward; it interleaved
# its stages (chapter 5), which gives the pipeline more boundaries; and each rank of a tensor group sent
# only its eighth of what crosses a boundary, which the receivers put together inside their machine. With
# 2 bytes for a number:


# %%
def bytes_of_step(sizes, layers, width, tokens, parameters, number=2, neighbours=2):
    """Sent by a rank with so many neighbours in its line, on rings: {dimension: bytes}."""
    d, p, t = sizes
    activations = tokens / d * width * number  # of one copy
    return {
        "data": 2 * (d - 1) / d * parameters / (p * t) * number,
        "pipeline": min(p - 1, neighbours) * activations,
        "tensor": 2 * (t - 1) / t * 4 * layers / p * activations,
    }


GPT_145B = {"layers": 80, "width": 12_288, "tokens": 2_304 * 2_048, "parameters": 145.6e9}
per_step = bytes_of_step((24, 8, 8), **GPT_145B)
for name, count in per_step.items():
    print(f"{name:9} {count / 1e9:6.1f} GB per step and rank")
for name in ("data", "pipeline"):
    print(f"tensor sends {per_step['tensor'] / per_step[name]:.0f} times as much as {name}")

# %% [markdown]
# **Predict**, and say first what you feel. A tensor group of 2 becomes one of 4, with as many copies and
# stages as before: every rank computes half as much. By which factor does what a rank sends in a step
# change, in each dimension?

# %% tags=["prediction"]
predicted = {"tensor": 1.5, "pipeline": 1.0, "data": 0.5}

# %%
two, four = (bytes_of_step((24, 8, t), **GPT_145B) for t in (2, 4))
compare(
    predicted,
    {name: round(four[name] / two[name], 6) for name in predicted},
    {
        "As half of the work: each rank has a part of every sum, and the sum keeps its size.": {
            "tensor": 0.5,
            "pipeline": 0.5,
        },
        "As the ranks of the group: a ring of n sends 2 (n - 1) / n of the tensor.": {
            "tensor": 2.0
        },
    },
)

# %% [markdown]
# Parameters are cut, so data sends half. Activations are not: every rank of the group takes part in the
# same sums, and a longer ring sends more. Cutting finer makes tensor parallelism dearer for each rank while
# there is less to compute.
#
# How long does it take? The next figure is simulated, with the speeds that chapter 6 assumed: a
# ring with 250 GB/s inside a machine, with 25 GB/s between machines.

# %%
figure = ch07.links(per_step)
plt.show()

# %% [markdown]
# *Three pairs of bars: on fast links above, on slow links, striped, below. Data and pipeline stay
# under half a second on slow links; tensor takes 13.5 seconds there.*
#
# The bytes are one reason. The other is who waits.
#
# | dimension | calls per step | who waits for it | where it belongs |
# |---|---|---|---|
# | tensor | four per block and micro-batch, large | the next layer, every time; nothing hides it | inside a machine |
# | pipeline | two per boundary and micro-batch, small | the next stage; other micro-batches hide it | between machines |
# | data | one per parameter or bucket, once a step | the optimizer only; backward hides it | anywhere, the farthest |
#
# So ranks are ordered from the dimension that needs the most to the one that needs the least. Llama
# 3 was trained in the order tensor, context, pipeline, data, from the innermost to the outermost
# ([Grattafiori et al. 2024](https://arxiv.org/abs/2407.21783), section 3.3.2); *context* is one
# more way to cut activations.
#
# A data group often has several ranks in each machine and lies on both kinds of links. What it can do with
# that is in `07_hybrid_further`.

# %% [markdown]
# ## 4. By hand, then with PyTorch: two dimensions, then three
#
# ### The job
#
# The language model of the course, small: four blocks of width 32, windows of 16 characters. A
# batch is 8 windows, and all ranks can read all of it; each takes its own rows. Every variant
# trains for three steps of SGD and is compared with `alone`, one process on the whole batch.

# %%
from course_utils.lesson.models import LanguageModel

CONTEXT, ROWS, STEPS, LEARNING_RATE = 16, 8, 3, 0.1
WIDTH, LAYERS, VOCABULARY = 32, 4, len(text.vocabulary())


def new_model() -> LanguageModel:
    torch.set_num_threads(1)  # so small a model loses time with more
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY, WIDTH, heads=4, layers=LAYERS, context=CONTEXT)
    return model.to(hardware.device())


def batches():
    for step in range(STEPS):
        inputs, targets = text.windows(CONTEXT, ROWS, seed=step)
        yield inputs.to(hardware.device()), targets.to(hardware.device())


# %%
def train(model, step):
    """Three steps of SGD. `step` computes the gradients and returns a loss."""
    # foreach=True, the default on GPUs, does not take DTensors and plain tensors in one model
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        losses.append(step(model, inputs, targets))
        optimizer.step()
    return losses


# %% [markdown]
# One decision makes everything below simpler. The loss of a batch is the mean over its tokens. Each
# rank takes the *sum* over the tokens that it sees and divides by the number of tokens in the
# *whole* batch. Then the parts of the loss add up to the loss, and the gradients add up to the
# gradient, however the rows are shared out and in however many micro-batches.


# %%
from torch.nn.functional import cross_entropy


def share_of_loss(logits, targets, tokens):
    """What these rows contribute to the mean loss of a batch of so many tokens."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens


def alone_step(model, inputs, targets):
    loss = share_of_loss(model(inputs), targets, targets.numel())
    loss.backward()
    return loss.item()


alone = new_model()
losses_alone = train(alone, alone_step)

# %% [markdown]
# ### The tensor dimension: chapter 6 with a group
#
# Chapter 6 cut the blocks between *all* ranks. Now only the ranks of a tensor group share a block.
# So the pair of functions gets one more argument, the group, and hands it to `all_reduce`. The rest
# is what you know: queries, keys, values and `up` are cut in columns, `out` and `down` in rows, and
# the bias of the last layer is added after the sum.


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


# %%
CUTS = {"qkv.weight": 0, "qkv.bias": 0, "out.weight": 1}
CUTS |= {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def cut_dimension(name: str) -> int | None:
    """The dimension along which the parameter `name` is cut; None: every rank has all of it."""
    return CUTS.get(".".join(name.split(".")[-2:]))


def part_of(name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """A copy of what rank `rank` of a tensor group holds of the parameter `name`."""
    dim = cut_dimension(name)
    if dim is None:
        return whole.detach().clone()
    sections = whole.detach().chunk(3 if "qkv" in name else 1)  # queries, keys, values
    return torch.cat([section.chunk(ranks, dim)[rank] for section in sections], dim)


# %%
from torch.nn.functional import linear


def cut_half(half, last, group):
    """Cuts attention or MLP, which ends with the layer `last`, over the group."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for name, parameter in list(half.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        part = part_of(name, parameter, rank, ranks)
        setattr(half.get_submodule(owner), attribute, nn.Parameter(part))
    last.forward = lambda x: linear(x, last.weight)
    half.register_forward_pre_hook(lambda module, inputs: SumBackward.apply(*inputs, group))
    half.register_forward_hook(lambda module, _, y: SumForward.apply(y, group) + last.bias)


def cut_blocks(model: LanguageModel, group) -> LanguageModel:
    """Cuts all blocks in place; embeddings, norms and head stay whole on every rank."""
    for block in model.blocks:
        block.attention.heads //= dist.get_world_size(group)
        cut_half(block.attention, block.attention.out, group)
        cut_half(block.feed_forward, block.feed_forward.down, group)
    return model


# %% [markdown]
# The embedding and the head could be cut as well (chapter 6, section 4). They stay whole here, to
# keep the chapter short.
#
# ### Data x tensor, four ranks
#
# A step in two dimensions. The rows are chosen by the *data* coordinate, so both ranks of a tensor
# group see the same ones. The model's own hooks speak to the tensor group. The gradients are added
# up over the data group.


# %%
def own_rows(batch: Tensor, group) -> Tensor:
    return batch.tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


def add_up_gradients(model: nn.Module, group) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)


def whole_step(model, inputs, targets, groups):
    """Data x tensor. Returns this rank's share of the loss, and leaves whole-batch gradients."""
    logits = model(own_rows(inputs, groups["data"]))
    loss = share_of_loss(logits, own_rows(targets, groups["data"]), targets.numel())
    loss.backward()
    add_up_gradients(model, groups["data"])
    return loss.detach()


def loss_over(group, loss):
    """The loss of the whole batch, from the shares of a data group."""
    dist.all_reduce(loss, group=group)
    return loss.item()


# %%
def held_by(model):
    """What a rank ends with: each parameter's value and last gradient, by name."""
    named = model.named_parameters()
    return {name: torch.stack([p.detach(), p.grad]).cpu() for name, p in named}


def train_data_tensor(rank, sizes):
    groups = groups_by_hand(*sizes)
    model = cut_blocks(new_model(), groups["tensor"])
    losses = train(model, lambda *work: loss_over(groups["data"], whole_step(*work, groups)))
    return coordinates(groups), losses, held_by(model)


# %%
def as_alone(results, tensor, uncut=" "):
    """Whether losses, parameters and gradients of all ranks are those of the single process.

    uncut: a word in the names of parameters that the tensor group holds whole, besides the usual.
    """
    whole, seen, same = dict(alone.named_parameters()), set(), True
    for (_, _, t), losses, held in results:
        same &= equal(torch.tensor(losses_alone), [torch.tensor(losses)])
        for name, got in held.items():
            cut = (0, 1) if uncut in name else (t, tensor)
            pair = (part_of(name, each, *cut) for each in (whole[name], whole[name].grad))
            same &= equal(torch.stack(list(pair)).cpu(), [got])
        seen |= held.keys()
    return same and seen == whole.keys()  # and no parameter is missing


for sizes in ((2, 1, 2), (1, 1, 4), (4, 1, 1)):
    same = as_alone(launch(train_data_tensor, 4, sizes), tensor=sizes[2])
    print(f"data x pipeline x tensor = {sizes}: losses, parameters, gradients as alone: {same}")

# %% [markdown]
# The same code is pure tensor parallelism on a 1 x 1 x 4 grid and pure data parallelism on 4 x 1 x
# 1.
#
# ### Data x pipeline, four ranks
#
# A stage is a part of the model: the first has the embeddings, the last the final norm and the
# head, each its share of the blocks. The parameters keep the names that they have in the whole
# model.


# %%
class Stage(nn.Module):
    """The layers of a language model that one rank of a pipeline group holds."""

    def __init__(self, model: LanguageModel, group) -> None:
        super().__init__()
        here, stages = dist.get_rank(group), dist.get_world_size(group)
        own = torch.arange(len(model.blocks)).tensor_split(stages)[here]
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in own.tolist()})
        self.first, self.last = here == 0, here == stages - 1
        self.width = model.token.embedding_dim  # of what comes in and goes out
        if self.first:
            self.token, self.position = model.token, model.position
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


# %% [markdown]
# The step is the plain schedule of chapter 5: all micro-batches forward, then all backward. `send`
# and `recv` go to the neighbours *in the pipeline group*. `group_dst` and `group_src` are numbers
# inside the group, so the neighbour of stage $i$ is $i + 1$ whatever its global rank is.


# %%
def pipelined_step(stage, inputs, targets, groups, micro_batches=2):
    """Data x pipeline. Returns this rank's share of the loss, and leaves whole-batch gradients."""
    line = groups["pipeline"]
    here = dist.get_rank(line)
    mine = [own_rows(part, groups["data"]).chunk(micro_batches) for part in (inputs, targets)]
    loss, kept = torch.zeros((), device=targets.device), []
    for x, y in zip(*mine):
        if not stage.first:
            x = torch.empty(*y.shape, stage.width, device=y.device)
            dist.recv(x, group=line, group_src=here - 1)
            x.requires_grad_()
        out = stage(x)
        if stage.last:
            out = share_of_loss(out, y, targets.numel())
            loss += out.detach()
        else:
            dist.send(out.detach(), group=line, group_dst=here + 1)
        kept.append((x, out))
    for x, out in kept:
        gradient = None  # the loss needs none
        if not stage.last:
            gradient = torch.empty_like(out)
            dist.recv(gradient, group=line, group_src=here + 1)
        out.backward(gradient)
        if not stage.first:
            dist.send(x.grad, group=line, group_dst=here - 1)
    add_up_gradients(stage, groups["data"])
    return loss


# %% [markdown]
# Only the last stage knows the loss. To have it everywhere takes two calls in two groups: over the
# data group the shares add up (the other stages add zeros), then the last stage of each line tells
# its line. The ranks of a tensor group need nothing: they have computed the same.


# %%
def loss_on_all(loss, groups):
    """The loss of the whole batch on every rank, from the shares of the last stages."""
    line = groups["pipeline"]
    dist.all_reduce(loss, group=groups["data"])
    dist.broadcast(loss, group=line, group_src=dist.get_world_size(line) - 1)
    return loss.item()


def train_data_pipeline(rank, sizes):
    groups = groups_by_hand(*sizes)
    stage = Stage(new_model(), groups["pipeline"])
    losses = train(stage, lambda *work: loss_on_all(pipelined_step(*work, groups), groups))
    return coordinates(groups), losses, held_by(stage)


for sizes in ((2, 2, 1), (1, 4, 1)):
    same = as_alone(launch(train_data_pipeline, 4, sizes), tensor=1)
    print(f"data x pipeline x tensor = {sizes}: losses, parameters, gradients as alone: {same}")

# %% [markdown]
# ### All three, eight ranks
#
# The third dimension costs one line. The model is cut between the ranks of a tensor group first,
# and then a stage takes its layers from the cut model. The hooks of the blocks know their group,
# the step does not notice.


# %%
def train_three_dimensions(rank, sizes, make_groups=groups_by_hand):
    groups = make_groups(*sizes)
    stage = Stage(cut_blocks(new_model(), groups["tensor"]), groups["pipeline"])
    losses = train(stage, lambda *work: loss_on_all(pipelined_step(*work, groups), groups))
    return coordinates(groups), losses, held_by(stage)


for make_groups in (groups_by_hand, groups_of_mesh):
    results = launch(train_three_dimensions, 8, (2, 2, 2), make_groups)
    print(f"{make_groups.__name__}: 8 ranks as alone: {as_alone(results, tensor=2)}")

# %% [markdown]
# Eight processes, three kinds of groups, and the parameters of one process. (A real model would not
# be built whole on every rank and then cut; chapter 8 builds it in parts.)
#
# ### Which call goes to which group
#
# **Predict** how often rank 0 calls each group in one step, and how many bytes it hands over, on
# two grids of four ranks and on the one of eight. For the calls: the tensor group gets four
# all-reduces for each block and micro-batch, the pipeline group a send for each neighbour and
# micro-batch, the data group one all-reduce for each tensor of parameters. For its bytes, count
# what a rank holds. A block has $12 W^2 + 13 W$ parameters in 12 tensors, of which $12 W^2 + 7 W$
# numbers are cut. The first stage has the two embeddings as well, $(V + C) W$ numbers in 2 tensors,
# and the last one the norm and the head, $(2 + V) W$ numbers in 3 tensors.


# %%
def predicted_step(sizes, stage=0, micro_batches=2):
    """(how many, bytes handed over) of a step in each group of more than one rank."""
    d, p, t = sizes
    first, last = stage == 0, stage == p - 1
    micro_batches = micro_batches if p > 1 else 1
    activations, blocks = ROWS // d * CONTEXT * WIDTH, LAYERS // p
    held = blocks * ((12 * WIDTH**2 + 7 * WIDTH) // t + 6 * WIDTH)
    held += first * (VOCABULARY + CONTEXT) * WIDTH + last * (2 + VOCABULARY) * WIDTH
    neighbours = (not first) + (not last)
    everything = {
        "data: all_reduce": (12 * blocks + 2 * first + 3 * last, 4 * held),
        "pipeline: send": (neighbours * micro_batches, 4 * neighbours * activations),
        "tensor: all_reduce": (4 * blocks * micro_batches, 4 * 4 * blocks * activations),
    }
    return {name: each for (name, each), n in zip(everything.items(), sizes) if n > 1}


GRIDS = [(2, 1, 2), (2, 2, 1), (2, 2, 2)]
predicted = {
    f"{sizes} {name}": each for sizes in GRIDS for name, each in predicted_step(sizes).items()
}


# %%
from course_utils.trace import Trace, memory_ledger


def by_dimension(record, groups):
    """{"dimension: call": (how many, bytes handed over)}, by the ranks that take part."""
    counts = {}
    for call in record.calls:
        if call.sends:
            lines = members(groups).items()
            name = next(name for name, line in lines if set(call.ranks) <= set(line))
            number, sent = counts.get(f"{name}: {call.op}", (0, 0))
            counts[f"{name}: {call.op}"] = number + 1, sent + call.bytes
    return counts


# %%
def count_step(rank, sizes):
    groups = groups_by_hand(*sizes)
    model = cut_blocks(new_model(), groups["tensor"]) if sizes[2] > 1 else new_model()
    model = Stage(model, groups["pipeline"]) if sizes[1] > 1 else model
    step = pipelined_step if sizes[1] > 1 else whole_step
    with Trace() as trace:
        step(model, *next(batches()), groups)
    return by_dimension(trace.record(), groups), coordinates(groups), memory_ledger(model)


# %%
measured, ledgers, all_as_predicted = {}, {}, True
for sizes in GRIDS:
    counts = launch(count_step, sizes[0] * sizes[1] * sizes[2], sizes)
    measured |= {f"{sizes} {name}": each for name, each in counts[0][0].items()}
    ledgers[sizes] = counts[0][2]
    for count, (_, stage, _), _ in counts:
        all_as_predicted &= count == predicted_step(sizes, stage)
compare(predicted, measured)
print("all ranks of all grids, each with its own stage:", all_as_predicted)

# %% [markdown]
# A second dimension takes work off the first: with two stages a rank has half of the blocks, so
# tensor sends half as many bytes, though in as many calls, since there are two micro-batches now.
# What goes to the data group are the gradients of all that a rank holds. So the bytes there are
# also the bytes of parameters, and of gradients, on that rank:

# %%
ledgers = {"one process": memory_ledger(alone)} | {str(s): held for s, held in ledgers.items()}
plots.memory(list(ledgers.values()), list(ledgers), title="Parameters and gradients on rank 0")
plt.show()
held_as_sent = all(
    ledgers[str(s)]["gradients"] == measured[f"{s} data: all_reduce"][1] for s in GRIDS
)
print("gradients held = bytes handed to the data group:", held_as_sent)

# %% [markdown]
# *The bars are named (data, pipeline, tensor). Pipeline and tensor each cut what a rank holds to
# about a half; data cuts nothing. What exceeds a half is the embeddings and the head, which only some
# stages have and tensor leaves whole.*
#
# In section 3 tensor sent far more than data. In this small model they send nearly the same: the 64
# tokens of a copy make few activations for many parameters. With more tokens tensor and pipeline
# grow, and data stays. The figure lets the tokens grow, by the formulas of section 3.

# %%
tokens = [2**i for i in range(4, 16)]
small = {"layers": LAYERS, "width": WIDTH, "number": 4}
small["parameters"] = sum(parameter.numel() for parameter in alone.parameters())
sent = [bytes_of_step((2, 2, 2), tokens=2 * each, **small) for each in tokens]
figure = ch07.tokens_grow(tokens, sent, ours=64)
plt.show()

# %% [markdown]
# *Bytes that a rank of the 2 x 2 x 2 grid sends in a step. The line for data is flat; those for
# tensor and pipeline rise side by side. Tensor crosses data close to our batch, and leaves it far
# behind.*
#
# ### The gradient norm across groups
#
# To clip gradients you need the norm of the whole model's gradient (`06_tensor_parallel_further`, section 5). Each
# rank has a part of it. **Predict:** over which groups do the squares have to be added up, and for
# which parameters?
#
# * Over the tensor group: for the cut parameters. The whole ones are the same on all ranks there
#   and count once.
# * Over the pipeline group: for everything, since stages hold different layers.
# * Over the data group: nothing. After `add_up_gradients` all copies have the same gradient.


# %%
def gradient_norm(model, groups):
    """The 2-norm of the whole model's gradient, the same number on every rank."""
    cut, whole = torch.zeros(2, device=hardware.device())
    for name, parameter in model.named_parameters():
        square = parameter.grad.square().sum()
        if cut_dimension(name) is None:
            whole += square
        else:
            cut += square
    dist.all_reduce(cut, group=groups["tensor"])
    total = cut + whole
    dist.all_reduce(total, group=groups["pipeline"])
    return total.sqrt().item()


# %%
def norms(rank):
    groups = groups_of_mesh(2, 2, 2)
    stage = Stage(cut_blocks(new_model(), groups["tensor"]), groups["pipeline"])
    pipelined_step(stage, *next(batches()), groups)
    right = gradient_norm(stage, groups)
    own = nn.utils.get_total_norm([p.grad for p in stage.parameters()]).item()
    squares = torch.tensor(own**2, device=hardware.device())
    dist.all_reduce(squares)  # over all ranks: copies and whole parameters several times
    return right, own, squares.sqrt().item()


# %%
model = new_model()
alone_step(model, *next(batches()))
expected = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
names = ("over the right groups", "local", "over all ranks")
for name, found in zip(names, zip(*launch(norms, 8))):
    same = all(abs(norm / expected - 1) < 1e-5 for norm in found)
    print(f"norm {name}: as alone on all ranks: {same}")

# %% [markdown]
# ### With PyTorch: one mesh, three takers
#
# PyTorch has an API for each dimension, and each takes its part of the mesh: `parallelize_module`
# takes `mesh["tensor"]`, `PipelineStage` the group of `mesh["pipeline"]`. For the data dimension
# there are DDP and, for models with DTensors, `fully_shard`, the subject of chapter 8. Until then
# the sum stays by hand, over the local part of each gradient. The plan cuts the MLPs and leaves
# attention whole, because its fused matrix needs the reordering of chapter 6.

# %%
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from course_utils.trace.meters import local  # this rank's part of a DTensor, or the tensor itself

PLAN = {
    "blocks.*.feed_forward.up": ColwiseParallel(),
    "blocks.*.feed_forward.down": RowwiseParallel(),
}

# %%
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def schedule_of(stage, line):
    """The schedule of chapter 5's GPipe on this rank's line of the mesh."""
    here, stages, group = line.get_local_rank(), line.size(), line.get_group()
    return ScheduleGPipe(
        PipelineStage(stage, here, stages, hardware.device(), group=group),
        n_microbatches=2,
        loss_fn=lambda logits, targets: share_of_loss(logits, targets, ROWS * CONTEXT),
        scale_grads=False,  # the shares add up already
    )


def scheduled_step(stage, inputs, targets, schedule, groups):
    shares = []
    rows = [own_rows(inputs, groups["data"])] if stage.first else []
    labels = own_rows(targets, groups["data"])
    schedule.step(*rows, **({"target": labels, "losses": shares} if stage.last else {}))
    for parameter in stage.parameters():
        dist.all_reduce(local(parameter.grad), group=groups["data"])
    return loss_on_all(sum(shares, torch.zeros((), device=targets.device)).detach(), groups)


# %%
def train_with_pytorch(rank, sizes):
    mesh = init_device_mesh(hardware.device().type, sizes, mesh_dim_names=DIMENSIONS)
    groups = {name: mesh.get_group(name) for name in DIMENSIONS}
    stage = Stage(new_model(), groups["pipeline"])
    parallelize_module(stage, mesh["tensor"], PLAN)
    schedule = schedule_of(stage, mesh["pipeline"])
    losses = train(stage, lambda *work: scheduled_step(*work, schedule, groups))
    named = stage.named_parameters()
    held = {name: torch.stack([local(p.detach()), local(p.grad)]).cpu() for name, p in named}
    return coordinates(groups), losses, held


results = launch(train_with_pytorch, 8, (2, 2, 2))
print("with PyTorch: 8 ranks as alone:", as_alone(results, tensor=2, uncut="attention"))

# %% [markdown]
# ## 5. Break it: five ways to talk to the wrong people
#
# ### Bug hunt: a setup that keeps nothing
#
# The web article *PyTorch Model Parallelism* closes with this function, *simple hybrid parallelism*. It calls
# `init_process_group` first, which `launch` has done here, and asks for the backend `nccl`. Its
# lists of ranks are right. What is missing?


# %%
def setup_hybrid_parallelism():
    global_rank = dist.get_rank()
    global_world_size = dist.get_world_size()
    model_parallel_size = 2
    data_parallel_size = global_world_size // model_parallel_size
    for i in range(data_parallel_size):
        ranks = list(range(i * model_parallel_size, (i + 1) * model_parallel_size))
        dist.new_group(ranks=ranks)
    for i in range(model_parallel_size):
        ranks = list(range(i, global_world_size, model_parallel_size))
        dist.new_group(ranks=ranks)
    return global_rank, global_world_size, model_parallel_size, data_parallel_size


# %% [markdown]
# `new_group` returns the handle, and nobody keeps it. The groups exist, and no one can call them.
# What does a user of this function write to add up gradients over the data dimension? The only
# thing left: `all_reduce` without a group. **Predict** for the MLP of section 2 on 4 ranks, cut
# between two: does it run, and what is in the gradient of `B` afterwards?


# %%
def without_handles(rank):
    _, _, parts, _ = setup_hybrid_parallelism()
    site, seat = divmod(rank, parts)
    torch.manual_seed(0)
    x, A = (torch.randn(s) for s in ((6, 4), (4, 16)))
    whole = gelu(x @ A).T @ torch.ones(6, 4)  # gradient of the sum of all outputs, to B
    hidden = gelu(x.chunk(2)[site] @ A.chunk(2, dim=1)[seat])
    gradient = (hidden.T @ torch.ones(3, 4)).to(hardware.device())
    dist.all_reduce(gradient)
    upper, lower = whole.chunk(2)
    mine, gradient = whole.chunk(2)[seat], gradient.cpu()
    return {
        "has the right shape": gradient.shape == mine.shape,
        "has the right numbers": torch.allclose(gradient, mine, rtol=1e-4, atol=1e-4),
        "is the sum of both halves": torch.allclose(gradient, upper + lower, rtol=1e-4, atol=1e-4),
    }


results = launch(without_handles, 4)
for claim in results[0]:
    print(f"the gradient {claim}: {[of_rank[claim] for of_rank in results]}")

# %% [markdown]
# It runs, and both halves of the matrix get the same gradient, the sum of the two. Rows 0 to 7
# learn what rows 8 to 15 should have learned. The repair is in `groups_by_hand`: keep the handle of
# your own group in each dimension, and pass it to every call.
#
# ### Groups created in different orders
#
# Why must every rank make every group, in the same order? The ranks of a new group find each other
# through a common store, under the number of the group: the first that a rank makes is number 1,
# the next number 2. Suppose rank 1 makes its two groups in the other order.


# %%
def own_order(rank):
    lists = [[0, 1], [1, 2]] if rank != 1 else [[1, 2], [0, 1]]
    for ranks in lists:
        dist.new_group(ranks)


try:
    launch(own_order, 3, backend="gloo")  # NCCL makes a group in another way, all ranks at once
except RankFailure as failure:
    print(failure)

# %% [markdown]
# As number 1, rank 0 makes the group [0, 1] and is its first member. Rank 1 makes [1, 2] and is its
# first member, too. Both wait for a second member of group 1, and nobody is that. `launch` says why,
# because it compares which groups the ranks make. Under torchrun they stand there until the time
# limit, half an hour with gloo.
#
# That was luck. Here rank 0 makes the columns of the grid first, the other three the rows. Each
# then sends $10^{\text{rank}}$ through its groups, so that the digits of a sum tell who is in it.
# **Predict** what rank 0 gets over its row [0, 1]; 11 would be right.


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
    launch(crossed_lines, 4, backend="gloo")
except RankFailure as failure:
    print(failure)

# %% [markdown]
# All four ranks came to their end, with sums. That `launch` refuses them nevertheless is its own
# doing; torchrun says nothing. What rank 0 calls its row is number 3 there, and number 3 of the others is
# the column [0, 2]: rank 0's row is wired to rank 2, its column to rank 1. Rank 1 thinks that it
# adds up its row, and gets the right sum by accident, because rank 0 answers with the same number
# in both calls. With tensors it would get a gradient where it expects activations. The repair: one
# function that makes all groups, in an order that does not depend on the rank, or
# `init_device_mesh`.
#
# ### The wrong mesh dimension for the gradients
#
# The next one is a single word: the gradients are added up over `tensor` instead of `data`. Both
# groups have two ranks, and a gradient has the same shape on both. **Predict:** does it run? Does
# the loss fall? How would you find it?


# %%
def agree(tensor, group):
    """Whether all ranks of a group hold the same tensor."""
    lowest, highest = tensor.clone(), tensor.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return torch.equal(lowest, highest)


# %%
def train_carelessly(rank, rows_by, sum_over):
    groups = groups_of_mesh(2, 1, 2) | {"all ranks": dist.group.WORLD}
    model = cut_blocks(new_model(), groups["tensor"])

    def step(model, inputs, targets):
        logits = model(own_rows(inputs, groups[rows_by]))
        loss = share_of_loss(logits, own_rows(targets, groups[rows_by]), targets.numel())
        loss.backward()
        add_up_gradients(model, groups[sum_over])
        return loss_over(groups[rows_by], loss.detach())

    losses = train(model, step)
    part, norm = model.blocks[0].feed_forward.up.weight.data, model.norm.weight.data
    alike = {
        "the loss falls": losses[-1] < losses[0],
        "copies hold the same part of a matrix": agree(part, groups["data"]),
        "tensor groups hold the same norm": agree(norm, groups["tensor"]),
    }
    place = tuple(dist.get_rank(groups[name]) for name in DIMENSIONS)
    return alike, (place, losses, held_by(model))


# %%
def report(rows_by, sum_over):
    results = launch(train_carelessly, 4, rows_by, sum_over)
    print(f"rows by {rows_by}, gradients over {sum_over}:")
    for claim in results[0][0]:
        print(f"    {claim}: {all(alike[claim] for alike, _ in results)}")
    print("    as alone:", as_alone([trained for _, trained in results], tensor=2))


report(rows_by="data", sum_over="data")
report(rows_by="data", sum_over="tensor")

# %% [markdown]
# The loss falls, as it does with most wrong gradients. Each half of a cut matrix was changed by the
# gradients of both halves, and the rows of the other copy never count. Two things give it away. The
# comparison with one process does, where the model is small enough for one. And a check that costs
# a few bytes in any run: after a step, ranks that differ in their data coordinate only must hold
# exactly the same parameters. `agree` needs two all-reduces; on a large model, give it a sum
# instead of the tensor.
#
# ### A batch that differs inside a tensor group
#
# A `DistributedSampler` without arguments deals rows out by global rank: each of four ranks gets a
# quarter. That was right in chapter 3. Here the ranks 0 and 1 hold two halves of the *same* model.
# **Predict** what comes of it.

# %%
report(rows_by="all ranks", sum_over="data")

# %% [markdown]
# The ranks of a tensor group add up halves of results for different rows. No shape is wrong, and
# the loss still falls. This time the copies agree, and the tensor groups do not: their norms, which
# should be one and the same, drift apart. The repair: the sampler gets the sizes of the *data*
# dimension, `DistributedSampler(data, num_replicas=mesh["data"].size(),
# rank=mesh["data"].get_local_rank())`. A pipeline has the same trap: its last stage needs the
# targets of the rows that its first stage reads.
#
# ### Global rank or group rank
#
# A rank has a number in the world and another one in each of its groups. `dist.broadcast(src=...)`,
# `send(dst=...)` and `recv(src=...)` want the *global* one, also when `group=` is given. Suppose
# the copy with data coordinate 1 has loaded a checkpoint and tells the other copy. The data groups
# are [0, 2] and [1, 3]. **Predict** for each rank whose number it holds after `src=1`.


# %%
def tell_the_copy(rank, source):
    group = groups_of_mesh(2, 1, 2)["data"]
    number = torch.tensor(rank, device=hardware.device())
    try:
        dist.broadcast(number, group=group, **source)
    except ValueError as error:
        return f"{type(error).__name__}: {str(error).split(' <')[0]}"
    return f"has the number of rank {number.item()}"


for source in ({"src": 1}, {"group_src": 1}):
    print(source)
    for rank, outcome in enumerate(launch(tell_the_copy, 4, source)):
        print(f"    rank {rank}: {outcome}")

# %% [markdown]
# In one group global rank 1 does not exist: an error, the lucky case. In the other it does exist,
# and is the *first* member. The copy with the checkpoint gets overwritten by the one without. With
# `group_src` the number is one inside the group, and both groups do what was meant.
#
# The same with `send` and `recv`, in a pipeline that was tried with one copy and then got a second
# one. Stage numbers were global ranks then. The lines are [0, 1] and [2, 3] now.


# %%
def pass_on(rank):
    stage = dist.get_rank(groups_of_mesh(2, 2, 1)["pipeline"])
    x = torch.full((4,), float(rank), device=hardware.device())
    if stage == 0:
        dist.send(x, dst=stage + 1)
    else:
        dist.recv(x, src=stage - 1)


try:
    launch(pass_on, 4)
except RankFailure as failure:
    print(failure)

# %% [markdown]
# Ranks 0 and 1 do what they did before. Rank 2 sends to rank 1, who wants nothing from it, and rank
# 3 waits for rank 0, who has sent everything to rank 1. Write `group_dst=stage + 1, group=line`, as
# in section 4, or translate with `dist.get_global_rank(line, stage + 1)`.

# %% [markdown]
# ## 6. Exercises: place the ranks, then train on them
#
# Four parts of a hybrid training run, from the numbers of its ranks to a step on all of them. (7.5, the machines
# that they stand on, is in `07_hybrid_further`.) 7.3 and 7.4 run on real ranks with small layers, and are compared
# with one process that holds the whole model and the whole batch.

# %%
import math
from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh

# %% [markdown]
# ### 7.1 The groups of any grid, by arithmetic (2 points)
#
# A group of a dimension holds the ranks that differ in that coordinate *only*. Each dimension puts
# every rank into exactly one group. Section 3 had three dimensions in one order, and let torch find the groups.
# Large models have four or five, such as context and experts, and which of them changes fastest depends on
# the machines (7.5). So take any of them, in any order, and find their groups with whole numbers alone: that is how
# you will see them in a log file, where rank 37 waits and you ask for whom. The order of the groups counts too:
# `new_group` is called for every group by every rank, so all ranks need the same list.


# %% nbgrader={"grade_id": "7.1", "solution": true}
def groups_of(sizes: dict[str, int]) -> dict[str, list[list[int]]]:
    """Returns all groups of a grid of ranks, by dimension.

    `sizes` has the sizes of one or more dimensions by their names, the slowest first: from rank to rank the
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
# The same arithmetic as a small class, for the lesson's grid: the rank with the coordinates (d, p, t) has the number
# (d * pp + p) * tp + t, where `dp`, `pp` and `tp` are the sizes. Tensor changes fastest, data slowest.
# The class has to refuse what is not in the grid: Python's `//` and `%` give coordinates for rank -1 or rank 100
# without a word, and the message that goes to a wrong rank is hard to find later.


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
# ### 7.3 A step in two dimensions: data and tensor (3 points)
#
# Now train. The whole model is `y = down(relu(up(scale * x))) + bias` with the loss
# `nn.functional.mse_loss(y, targets)`, and your rank holds a **part** of it:
#
# | attribute of `part` | shape | on the ranks of a tensor group |
# |---|---|---|
# | `scale`, a parameter | (width,) | the same on each |
# | `up`, an `nn.Linear` | width to hidden / T | each has its own output features, with their bias |
# | `down`, an `nn.Linear` without bias | hidden / T to width | each has the input features that belong to them |
# | `bias`, a parameter | (width,) | the same on each |
#
# The ranks of a data group hold the same part and work on different rows of the global batch.
# `read_inputs(i, n)` and `read_targets(i, n)` read the i-th of n equal blocks of its rows. Read
# what your rank works on, and no more: reading is what the data dimension shares out.
#
# Ask the mesh for sizes, coordinates and groups, by the names of its dimensions; which of them
# comes first is its own affair. You may use `SumBackward.apply(x, group)` and
# `SumForward.apply(x, group)`.


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
    parameter may be frozen; what stands in `.grad` before plays no part.
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
# ### 7.4 A step in three dimensions (4 points)
#
# The model gets longer and is cut into stages; each stage is one `part` as above, cut between the
# ranks of a tensor group. So the model is sharded in two ways, and the data is distributed as well:
# on 2 x 2 x 2 ranks, each process holds a quarter of the model and sees half of the batch.
#
# The first stage reads inputs, the last one reads targets and computes the loss. In between,
# activations go to the next stage and their gradients come back, between ranks that differ in the
# pipeline coordinate only. A receiver needs a tensor of the right shape: `shape` is that of the
# activations between the stages, for the rows of one rank. One micro-batch is enough here.
#
# Mind the numbers. `dist.send(x, dst=...)` takes a *global* rank, also where you pass a group;
# `group_dst=` takes a number within the group. `recv` and `broadcast` have `group_src=`.


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
    pipeline may have one stage. Only the first stage reads inputs, only the last one targets.
    `mesh` has the dimensions "data", "pipeline" and "tensor", in any
    order. `shape` is (rows, width) of the activations between two stages, float32, on
    `hardware.device()`. The rest is as in `train_2d_step`.
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
# ## 7. See it: the grid of ranks
#
# The explorer draws a grid of up to 4 x 4 x 4 ranks and lights up the three groups of one of them.
# Below stand the bytes that this rank sends in a step of a model of 7.5 billion parameters (36
# layers, width 4,096, 512 sequences of 2,048 tokens, 2 bytes for each number; the third model of
# table 1 in Narayanan et al. 2021), by the formulas of section 3, so without recomputation and with
# one stage a rank, and whether the group fits into a machine of 8. (For a rank that the grid does
# not have, its last one is lit up.) Three things to try:
#
# * Set tensor to 2, then to 4: it sends *more*, though every rank computes less.
# * Turn data up: tensor and pipeline shrink, because a copy has fewer tokens.
# * Find the grids in which the pipeline's neighbours sit in other machines and tensor does not.

# %%
from course_utils.lesson import explore

GPT_7_5B = {"layers": 36, "width": 4_096, "tokens": 512 * 2_048, "parameters": 7.5e9}


def draw_grid_and_bytes(data, pipeline, tensor, rank):
    sizes = data, pipeline, tensor
    rank = min(rank, data * pipeline * tensor - 1)
    stage = rank // tensor % pipeline
    neighbours = (stage > 0) + (stage < pipeline - 1)
    own = {
        name: next(line for line in lines if rank in line)
        for name, lines in lines_of_grid(*sizes).items()
    }
    sent = bytes_of_step(sizes, **GPT_7_5B, neighbours=neighbours)
    return ch07.grid_and_bytes(sizes, rank, own, sent)


explore.Explorer(
    draw_grid_and_bytes, data=(1, 4, 2), pipeline=(1, 4, 2), tensor=(1, 4, 4), rank=(0, 63, 5)
)

# %% [markdown]
# *At the start: two copies, each with two stages of four parts. Rank 5, in black, is one of the
# second stage of the first copy. Its tensor group stands in its column, its pipeline group in its
# row, its data group in the other frame.*

# %% [markdown]
# ## 8. On a cluster: the same grid under torchrun
#
# The script takes the three sizes as arguments and trains the model of section 4 with PyTorch's own
# API. The product of the sizes has to be the number of processes; data has to divide the 8 rows of a
# batch; each stage needs at least one of the 4 blocks; and a copy at least as many rows as stages, since
# each row is a micro-batch, and `Schedule1F1B` wants one for each stage. Below it runs on four; try `1 2 2`
# and `1 4 1`, and `2 2 2` on eight.

# %%
from course_utils.lesson.terminal import scratch, torchrun

script = scratch() / "hybrid.py"
script.unlink(missing_ok=True)

# %%
# %%writefile scratch/hybrid.py
"""Trains a small language model on a grid: torchrun --nproc-per-node 8 hybrid.py 2 2 2"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from course_utils.lesson import text
from course_utils.lesson.models import LanguageModel
from course_utils.trace.meters import local

PLAN = {"*.feed_forward.up": ColwiseParallel(), "*.feed_forward.down": RowwiseParallel()}
ROWS, CONTEXT = 8, 16

sizes = tuple(map(int, sys.argv[1:4]))
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "pipeline", "tensor"))
copy, stage = mesh["data"].get_local_rank(), mesh["pipeline"].get_local_rank()
first, last = stage == 0, stage == sizes[1] - 1

torch.manual_seed(0)  # the same model on every rank; each keeps its part
whole = LanguageModel(len(text.vocabulary()), width=32, heads=4, layers=4, context=CONTEXT)


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = whole.token, whole.position

    def forward(self, tokens):
        return self.token(tokens) + self.position.weight


own = torch.arange(len(whole.blocks)).tensor_split(sizes[1])[stage]
layers = [whole.blocks[i] for i in own.tolist()]
layers = [Embeddings()] * first + layers + [whole.norm, whole.head] * last
module = nn.Sequential(*layers).to(device)
parallelize_module(module, mesh["tensor"], PLAN)


def share_of_loss(out, targets):
    return cross_entropy(out.flatten(0, 1), targets.flatten(), reduction="sum") / (ROWS * CONTEXT)


schedule = Schedule1F1B(
    PipelineStage(module, stage, sizes[1], device, group=mesh["pipeline"].get_group()),
    n_microbatches=ROWS // sizes[0],  # a row each
    loss_fn=share_of_loss,
    scale_grads=False,
)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)
for step in range(3):
    optimizer.zero_grad()
    batch = text.windows(CONTEXT, ROWS, seed=step)
    tokens, targets = (part.chunk(sizes[0])[copy].to(device) for part in batch)
    losses = []
    schedule.step(*[tokens] * first, **({"target": targets, "losses": losses} if last else {}))
    for parameter in module.parameters():
        dist.all_reduce(local(parameter.grad), group=mesh["data"].get_group())
    optimizer.step()
    loss = sum(losses, torch.zeros((), device=device)).detach()
    dist.all_reduce(loss, group=mesh["data"].get_group())
    if last and dist.get_rank() == dist.get_world_size() - 1:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()


# %%
printed = torchrun(4, script, "2", "1", "2")
print(printed, end="")
expected = [f"step {step}: loss {loss:.3f}" for step, loss in enumerate(losses_alone)]
print("as the single process of section 4:", printed.splitlines() == expected)

# %% [markdown]
# What changes there:
#
# * **The order of the dimensions.** torchrun numbers the ranks machine by machine. With `tensor`
#   last in the mesh, and a size that divides the GPUs of a machine, every tensor group is inside
#   one machine.
# * **Who reads which data.** One reader for each data coordinate; all ranks of a copy take the same
#   rows.
# * **Who prints and who saves.** Rank 0 does not know the loss: the last stage does. A checkpoint
#   needs every part once, so the ranks with data coordinate 0 write, or
#   `torch.distributed.checkpoint`, which knows about DTensors (chapter 8).
# * **NCCL and the order of calls.** Each group has its own communicator. Two ranks that call
#   two groups in different orders can wait for each other for ever.
# * **The data dimension** overlaps with backward in DDP and in `fully_shard`; both take
#   `mesh["data"]`.
# * **The bubble and the batch.** More copies leave fewer rows for each, so fewer micro-batches for
#   its pipeline (chapter 5). A global batch that is fixed limits the copies times the
#   micro-batches of each.

# %% [markdown]
# ## 9. Remember
#
# 1. A rank is a point of a grid: data says which rows, pipeline which layers, tensor which part of
#    them. A group is a line of the grid.
# 2. Every rank makes every group, in the same order, and keeps its own handles; or one DeviceMesh.
# 3. Tensor sends activations four times per block, pipeline once per boundary and direction, data
#    the gradients once per step. Tensor belongs on the fastest links, so it comes last in the mesh.
# 4. Parts of the loss and of the gradient add up: divide by the tokens of the whole batch, then sum
#    over data. A norm sums squares over tensor for what is cut, over pipeline for everything, over
#    data not.
# 5. A call in the wrong group has the right shape. Compare with one process, and check that copies
#    agree.
#
# **Sources**
#
# * D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM*, SC 2021, [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): sections 3.2 and
#   3.3 how the dimensions meet and what each sends, table 1 sizes.
# * A. Grattafiori et al., *The Llama 3 Herd of Models*, 2024, [arXiv
#   2407.21783](https://arxiv.org/abs/2407.21783): section 3.3.2 and table 4, four dimensions and
#   their order.
# * PyTorch: [process groups](https://docs.pytorch.org/docs/stable/distributed.html),
#   [DeviceMesh](https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html),
#   [pipelining](https://docs.pytorch.org/docs/stable/distributed.pipelining.html), [tensor
#   parallelism](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html).
