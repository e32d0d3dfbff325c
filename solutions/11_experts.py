# %% [markdown]
# # 11. Experts: the specialist is somewhere else
#
# Every way to cut a model that you know makes each token pass through all of its parameters. A
# **mixture of experts** (MoE) does not. One layer holds many MLPs side by side, the **experts**, and
# each token goes through two of them. So the model grows with the number of experts, and the work of
# a token does not.
#
# The experts lie on different ranks: **expert parallelism**. Who needs which rank is decided anew
# for every token, in the middle of a step. In this chapter you send tokens to their experts and back,
# count the bytes, and train such a model on a grid of ranks to the parameters of a single process.
# Two mistakes that real code bases made again and again wait on the way.

# %% tags=["nbval-ignore-output"]
import functools
import math

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from course_utils import hardware
from course_utils.figures import ch11 as figures
from course_utils.launch import launch

hardware.report()

# %% [markdown]
# ## 1. The factory: specialists in different buildings
#
# Until now all workers could do everything. Now there are **specialists**, one in each building. At
# the entrance stands a **dispatcher** who looks at each product and sends two copies of it, the **pieces**, to the
# two specialists that fit it best. The pieces come back, the two results are mixed, and the product goes on.
#
# The dispatcher has favourites. At the door of each specialist is a **queue**, and it has an end: so
# much room was built, and no more. A piece that finds no place is left out. It goes on as it is.

# %%
figures.factory()
plt.show()

# %% [markdown]
# *Four specialists, four doors, four places in front of each. Specialist 1 is wanted by six pieces:
# two find no place. Specialist 2 has almost nothing to do.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | specialist | **expert** | an MLP that only some tokens pass through |
# | dispatcher | **router** | a small linear layer that scores all experts for each token |
# | piece | a pair (token, expert) | a row of the activations on its way to one expert |
# | way to the buildings | **dispatch** | an all-to-all with pieces of uneven size |
# | way back | **combine** | the same all-to-all, turned round |
# | end of the queue | **capacity** | how many pieces an expert takes in a step |
# | left out | **dropped** piece | its expert adds nothing; without both pieces a token has its residual connection only |

# %% [markdown]
# ## 2. The smallest real run: two ranks, two experts
#
# **All-to-all** is the collective in which every rank has a message for every other one. With
# `all_to_all_single` the messages lie one behind the other in a tensor, and two lists, the **splits**,
# say how many rows go to each rank and come from each. Nobody knows beforehand how many will come.
# So the first, small all-to-all tells the counts, and the second brings the pieces.


# %%
def two_buildings(rank):
    device = hardware.device()
    pieces = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], device=device)[rank]
    expert = torch.tensor([[0, 1, 1], [1, 1, 1]], device=device)[rank]
    order = expert.argsort(stable=True)  # messages lie in the order of the ranks
    send = expert.bincount(minlength=2)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send)
    arrived = torch.empty(receive.sum().item(), device=device)
    dist.all_to_all_single(arrived, pieces[order], receive.tolist(), send.tolist())
    done = 10 * arrived if rank == 0 else -arrived  # expert 0 and expert 1
    back = torch.empty_like(pieces)
    dist.all_to_all_single(back, done, send.tolist(), receive.tolist())
    result = torch.empty_like(back)
    result[order] = back  # as the pieces lay at first
    return arrived.tolist(), result.tolist()


for rank, (arrived, result) in enumerate(launch(two_buildings, 2)):
    print(f"rank {rank}: the pieces {arrived} arrive; its own results: {result}")

# %% [markdown]
# Expert 0 multiplies by ten, expert 1 changes the sign. Rank 0 works on one piece, rank 1 on five,
# though each of them had three.

# %% [markdown]
# ## 3. Predict, then measure: parameters, work and queues
#
# ### Two of many
#
# The router is a matrix of W x E numbers. It gives each token E **logits**, one for each expert. The
# k best are chosen (**top-k**; here k = 2), and the softmax over their logits says how their results
# are mixed ([Shazeer et al. 2017](https://arxiv.org/abs/1701.06538), section 2.1, without its noise).
# The gradient reaches the router through these weights, and only through them: a choice has no
# gradient.


# %%
def best_experts(logits, k):
    """The k most probable experts of each token, and their weights, which add up to 1: (T, k)."""
    best = logits.softmax(-1).topk(k)
    return best.indices, best.values / best.values.sum(-1, keepdim=True)


def run_experts(experts, pieces, chosen):
    """Sends each piece through the expert whose number it has chosen; returns the results."""
    order = chosen.argsort(stable=True)
    lengths = [(chosen == int(number)).sum().item() for number in experts]
    queues = pieces[order].split(lengths)
    results = [expert(queue) for expert, queue in zip(experts.values(), queues)]
    return torch.cat(results)[order.argsort()]


# %% [markdown]
# An expert is called even if its queue is empty. Then its gradients are zeros and not missing, which
# section 5 will be glad of.
#
# **Predict** for a layer of E experts, each the MLP of the course with $8W^2 + 5W$ parameters: how many
# parameters does it have, and how many multiplications does one token cost in forward? (A matrix
# costs a token as many as it has entries. Biases are added.)

# %% tags=["prediction"]
W, E, K = 24, 8, 2  # width, experts, experts of a token
predicted = {
    "parameters": W * E + E * (8 * W**2 + 5 * W),
    "multiplications for a token": W * E + K * 8 * W**2,
}

# %%
from torch.utils.flop_counter import FlopCounterMode

from course_utils.lesson.models import FeedForward
from course_utils.lesson.predictions import compare

torch.manual_seed(0)
router = nn.Linear(W, E, bias=False)
experts = nn.ModuleDict({str(e): FeedForward(W) for e in range(E)})
x = torch.randn(96, W) + torch.randn(W)  # tokens of a text have something in common
with FlopCounterMode(display=False) as counter:
    logits = router(x)
    choices, weights = best_experts(logits, K)
    run_experts(experts, x.repeat_interleave(K, dim=0), choices.flatten())
measured = {
    "parameters": sum(p.numel() for p in [*router.parameters(), *experts.parameters()]),
    "multiplications for a token": counter.get_total_flops() // 2 // len(x),  # and as many sums
}
all_experts = {"multiplications for a token": W * E + E * 8 * W**2}
compare(predicted, measured, {"As if each token met all experts.": all_experts})

# %% [markdown]
# Twice the experts are twice the parameters, and a token still meets two. That is all there is to the
# idea. What it costs comes now.
#
# ### Load, capacity, dropped tokens
#
# The **load** of an expert is the number of pieces that chose it. The slowest rank decides when all go
# on, and the largest load decides about memory. So many systems fix a **capacity** beforehand
# ([Lepikhin et al. 2020](https://arxiv.org/abs/2006.16668), section 2.2; [Fedus et al.
# 2021](https://arxiv.org/abs/2101.03961), section 2.2): with a **capacity factor** f, each expert takes
#
# $$C = \lceil f \cdot T k / E \rceil$$
#
# of the $Tk$ pieces. Tokens join the queues in their order, and who comes after place C is dropped.


# %%
def fits(choices, experts, capacity_factor):
    """Which pieces find a place, (T, k); tokens join the queues of their experts in their order."""
    joins = one_hot(choices.flatten(), experts)  # (T k, E)
    place = (joins.cumsum(0) * joins).sum(1) - 1  # of each piece in its queue, from 0
    return (place < capacity_factor * choices.numel() / experts).view_as(choices)


load = choices.flatten().bincount(minlength=E).tolist()
print("pieces for each expert, with a router that has learned nothing:", load)

# %% [markdown]
# **Predict** how many of the 192 pieces are dropped with a capacity factor of 1.0, and of 1.25. With
# 1.0 there are exactly as many places as pieces.

# %% tags=["prediction"]
places = {f: math.ceil(f * 192 / 8) for f in (1.0, 1.25)}  # of each expert
predicted = {
    "dropped, factor 1.0": sum(max(0, pieces - places[1.0]) for pieces in load),
    "dropped, factor 1.25": sum(max(0, pieces - places[1.25]) for pieces in load),
}

# %%
dropped = {f: (~fits(choices, E, f)).sum().item() for f in (1.0, 1.25)}
enough = {f"dropped, factor {f}": 0 for f in dropped}
compare(
    predicted,
    {f"dropped, factor {f}": count for f, count in dropped.items()},
    {"As if the average decided: each queue has its own end.": enough},
)
figures.queues(load, capacity=24, title="Capacity factor 1.0: as many places as pieces")
plt.show()

# %% [markdown]
# *A bar for each expert: what is above the dashed line is dropped, and as many places stay empty
# elsewhere.*
#
# ### The balance loss
#
# Nothing keeps a router from sending everything to its favourites, and they learn most and become
# still better. So a second loss is added ([Fedus et al. 2021](https://arxiv.org/abs/2101.03961), section
# 2.2, equations 4 to 6):
#
# $$L_b = E \sum_{e} f_e \, p_e$$
#
# with the share $f_e$ of the pieces that chose expert $e$, before any is dropped, and its mean
# probability $p_e$ over all tokens. The shares have no gradient, the probabilities have: it lowers the
# probability of experts that have a lot to do. Both are those of the *whole* batch. So the function
# takes the choices of all ranks, and each rank returns what its own tokens contribute.


# %%
def share_of_balance(logits, everyone):
    """What this rank's tokens contribute to the balance loss; `everyone`: all ranks' choices."""
    experts = logits.shape[-1]
    load = one_hot(everyone.flatten(), experts).mean(0, dtype=logits.dtype)
    probability = logits.softmax(-1).sum(0) / len(everyone)
    return experts * (load * probability).sum()


# %% [markdown]
# **Predict** $L_b$ for 4 experts and k = 1: if tokens spread evenly over all, with even probabilities,
# and if all choose the first with probability 1.

# %% tags=["prediction"]
predicted = {"spread evenly": 4 * 4 * (1 / 4 * 1 / 4), "all to the first": 4 * 1 * 1}

# %%
even, sure = torch.zeros(8, 4), torch.tensor([[100.0, 0, 0, 0]]).repeat(8, 1)
measured = {
    "spread evenly": share_of_balance(even, torch.arange(8).view(8, 1) % 4).item(),
    "all to the first": share_of_balance(sure, torch.zeros(8, 1, dtype=torch.int64)).item(),
}
compare(predicted, measured, {"The sum alone: it is multiplied by E.": {"spread evenly": 1 / 4}})

# %% [markdown]
# ## 4. By hand, then with PyTorch: a model with experts, on a grid
#
# ### One process
#
# First the layer as a single process computes it. What will be different on several ranks is in two
# attributes: `gather`, how the choices of all tokens are found, and `run`, how pieces come to their
# experts.


# %%
class MoE(nn.Module):
    """A router and its experts: (N, T, W) to (N, T, W)."""

    def __init__(self, width, experts, k, capacity_factor):
        super().__init__()
        self.k, self.capacity_factor = k, capacity_factor
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleDict({str(e): FeedForward(width) for e in range(experts)})
        self.gather = lambda choices: (choices, 0)  # those of all ranks, and where mine begin
        self.run = run_experts

    def forward(self, x):
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        choices, weights = best_experts(logits, self.k)
        everyone, first = self.gather(choices)
        self.balance = share_of_balance(logits, everyone)
        kept = fits(everyone, logits.shape[-1], self.capacity_factor)[first:][: len(tokens)]
        token, which = self.kept = kept.nonzero(as_tuple=True)
        results = self.run(self.experts, tokens[token], choices[token, which])
        weighted = weights[token, which, None] * results
        return torch.zeros_like(tokens).index_add(0, token, weighted).view_as(x)


# %% [markdown]
# The model is the language model of the course with two blocks; the second has experts. (GShard has
# them in every other layer.) The loss of a batch is its mean cross entropy, plus a hundredth of the
# balance loss, as in Switch. As in chapter 7, each rank computes its *share* of the batch's loss: the
# sum over its own tokens, divided by the tokens of the whole batch. Then gradients add up.

# %%
from course_utils.lesson import text
from course_utils.lesson.models import LanguageModel

CONTEXT, ROWS, STEPS, WIDTH, EXPERTS, BALANCE = 12, 8, 3, 24, 4, 0.01


class MixtureModel(LanguageModel):
    """Two blocks, experts in the second; returns the logits and the balance loss."""

    def __init__(self, capacity_factor=math.inf):
        super().__init__(len(text.vocabulary()), WIDTH, heads=4, layers=2, context=CONTEXT)
        self.blocks[1].feed_forward = MoE(WIDTH, EXPERTS, 2, capacity_factor)

    def forward(self, tokens):
        return super().forward(tokens), self.blocks[1].feed_forward.balance


def share_of_loss(outputs, targets, tokens, weight=BALANCE):
    """What these rows contribute to the loss of a batch of so many tokens."""
    logits, balance = outputs
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss / tokens + weight * balance


# %%
def new_model(capacity_factor=math.inf):
    torch.set_num_threads(1)  # so small a model loses time with more
    torch.manual_seed(0)
    return MixtureModel(capacity_factor).to(hardware.device())


def batch_of(step, rank=0, ranks=1):
    """Inputs and targets of this rank's rows."""
    batch = text.windows(CONTEXT, ROWS, seed=step)
    return [part.chunk(ranks)[rank].to(hardware.device()) for part in batch]


# %%
def full(tensor):
    """On the CPU; of a DTensor, all its parts together."""
    return getattr(tensor.detach(), "full_tensor", tensor.detach)().cpu()


def train(
    model, rank=0, ranks=1, finish=lambda model: None, optimizer=torch.optim.SGD, steps=STEPS
):
    """Some steps. `finish` completes the gradients. Returns parameters and last gradients."""
    # foreach=True, the default on GPUs, does not take DTensors of two meshes
    optimizer = optimizer(model.parameters(), lr=0.1, foreach=False)
    for step in range(steps):
        inputs, targets = batch_of(step, rank, ranks)
        optimizer.zero_grad()
        share_of_loss(model(inputs), targets, ROWS * CONTEXT).backward()
        finish(model)
        optimizer.step()
    return {name: (full(p), full(p.grad)) for name, p in model.named_parameters()}


# %% [markdown]
# One more look before the ranks come. Sums in another order differ in their last digits. If a
# token's second and third choice are almost equal, such a digit can flip the route, and a tiny
# difference becomes a large one. A comparison of routed models needs a **margin**, or float64. So
# measure how close any decision of this run is.

# %%
margins = []


def note_margin(router, inputs, logits):
    best = logits.topk(3).values
    margins.append((best[:, 1] - best[:, 2]).min().item())


model = new_model()
hook = model.blocks[1].feed_forward.router.register_forward_hook(note_margin)
alone = train(model)
print("second and third choice are always more than 1e-4 apart:", min(margins) > 1e-4)

# %% [markdown]
# ### Dispatch and combine
#
# Autograd has to know the all-to-all. Its backward is easy to find: a row that went from rank a to
# rank b has a gradient on b that belongs to a. So backward is the same exchange with the two lists
# of splits swapped.


# %%
class Exchange(torch.autograd.Function):
    """Rows to other ranks; in backward, their gradients the way back."""

    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ctx.way_back = receive, send, group
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.way_back), None, None, None


# %% [markdown]
# The rest is bookkeeping. With E experts on n ranks, rank r has those from $r E/n$ on. Pieces are
# sorted by the rank that they go to; the numbers of their experts travel with them; results come back
# and are put where the pieces lay.


# %%
def run_experts_of_group(group, experts, pieces, chosen, exchange=Exchange.apply):
    """As `run_experts`, where each rank of `group` has the next len(experts) of all experts."""
    home = chosen // len(experts)  # the rank in the group that has the expert
    order = home.argsort(stable=True)
    send = home.bincount(minlength=dist.get_world_size(group))
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group)
    send, receive = send.tolist(), receive.tolist()
    arrived = exchange(pieces[order], send, receive, group)  # dispatch
    wanted = exchange(chosen[order], send, receive, group)
    results = run_experts(experts, arrived, wanted)
    return exchange(results, receive, send, group)[order.argsort()]  # combine


# %% [markdown]
# `tolist()` has a price on a GPU. The splits are made there, and the host needs them as numbers before
# it can call the all-to-all. So it waits until the GPU has done all that it was told, and meanwhile
# tells it nothing new. This happens in every MoE layer and is one reason why some systems pad all
# queues to their capacity: then the splits are known beforehand, and much of what travels is empty.
#
# How many token exchanges does a layer make in a step? Dispatch and combine in forward, and each
# once more in backward. **Predict** the bytes that each of four ranks hands over, from what the router
# has chosen: `sent[r]` pieces leave rank r, `received[r]` arrive there. All are rows of W float32.

# %%
generator = torch.Generator().manual_seed(1)
x = sum(torch.randn(s, generator=generator) for s in ((8, 12, WIDTH), (WIDTH,)))
layer = new_model().blocks[1].feed_forward.cpu()
chosen = best_experts(layer.router(x), 2)[0]  # (8, 12, 2): rank r has rows 2r and 2r + 1
sent = [rows.numel() for rows in chosen.chunk(4)]
received = chosen.flatten().bincount(minlength=4).tolist()  # an expert for each of four ranks
print("pieces that a rank sends:", sent, "and receives:", received)

# %% tags=["prediction"]
predicted = {
    "token exchanges": 4,
    "bytes, rank 0": 4 * WIDTH * (2 * sent[0] + 2 * received[0]),  # 4 bytes for each number
    "bytes, rank 1": 4 * WIDTH * (2 * sent[1] + 2 * received[1]),
    "bytes, rank 2": 4 * WIDTH * (2 * sent[2] + 2 * received[2]),
    "bytes, rank 3": 4 * WIDTH * (2 * sent[3] + 2 * received[3]),
}


# %%
from course_utils.trace import Trace


def exchanges_of_layer(rank):
    layer = new_model().blocks[1].feed_forward
    own = list(layer.experts.items())[rank:][:1]
    own_rows = x.chunk(4)[rank].to(hardware.device())
    pieces = own_rows.flatten(0, 1).repeat_interleave(2, dim=0).requires_grad_()
    wanted = chosen.chunk(4)[rank].flatten().to(hardware.device())
    with Trace() as trace:
        run_experts_of_group(None, nn.ModuleDict(own), pieces, wanted).sum().backward()
    return [call.bytes for call in trace.record().calls if call.dtype == "float32"]


results = launch(exchanges_of_layer, 4)
measured = {"token exchanges": len(results[0])}
measured |= {f"bytes, rank {rank}": sum(counts) for rank, counts in enumerate(results)}
own_four = {f"bytes, rank {r}": 4 * WIDTH * 4 * sent[r] for r in range(4)}
compare(
    predicted, measured, {"As if a rank sent only its own pieces: it returns others'.": own_four}
)

# %% [markdown]
# Every rank had 48 pieces, and yet no two hand over the same: what a rank sends depends on how popular
# its experts are. (All that is handed over is counted, also what a rank keeps for itself: of evenly
# spread pieces 1/n.)
#
# ### The whole model on several ranks
#
# Two things are left. Capacity and balance are those of the whole batch, so the choices of all ranks are
# gathered. (It can be done with E numbers from each rank: exercises 11.2 and 11.4.) And each rank keeps
# its own experts and forgets the others.


# %%
def choices_of_all(choices):
    """The choices of all ranks, in their order, and where those of this rank begin."""
    everyone = [torch.empty_like(choices) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, choices)
    return torch.cat(everyone), dist.get_rank() * len(choices)


def expert_parallel(model, group):
    """Leaves each rank of `group` its own experts, under the names that they have."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for layer in [module for module in model.modules() if hasattr(module, "experts")]:
        share = len(layer.experts) // ranks
        mine = list(layer.experts.items())[rank * share :][:share]
        layer.experts = nn.ModuleDict(mine)
        layer.run = functools.partial(run_experts_of_group, group)
        layer.gather = choices_of_all
    return model


# %% [markdown]
# ### Experts x data: which gradients are added up over whom?
#
# Eight experts on 64 ranks: so there are eight copies of each. The ranks form a grid of two
# dimensions, `data` and `experts`. All ranks have rows of their own, also those of one experts' group: the
# second dimension cuts the batch like the first.
#
# * What is **not an expert** (attention, norms, the router) is on every rank, and every rank finds
#   the gradient of its own tokens. Add up over *all* ranks.
# * An **expert** has already seen the tokens of all ranks of its group: dispatch brought them, and
#   backward has summed over them. What is missing are the tokens of the other copies' groups. Add up
#   over `data` only.


# %%
def is_expert(name):
    return ".experts." in name


def add_up_gradients(model, data):
    """Sums over all ranks; for an expert over its copies, the ranks of `data`."""
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad, group=data if is_expert(name) else None)


# %%
from torch.distributed.device_mesh import init_device_mesh

from course_utils.lesson.equality import equal


def train_on_grid(rank, sizes, capacity_factor=math.inf):
    mesh = init_device_mesh(hardware.device().type, sizes, mesh_dim_names=("data", "experts"))
    model = expert_parallel(new_model(capacity_factor), mesh.get_group("experts"))
    finish = functools.partial(add_up_gradients, data=mesh.get_group("data"))
    held = train(model, rank, mesh.size(), finish)
    return held, len(model.blocks[1].feed_forward.kept[0])  # pieces of the last step


def as_alone(alone, results):
    """Whether all ranks' parameters and gradients are those of `alone`, and none is missing."""
    same = [equal(a, [b]) for held in results for n in held for a, b in zip(alone[n], held[n])]
    return all(same) and set().union(*results) == alone.keys()


for sizes in ((1, 2), (1, 4), (2, 2)):
    results = launch(train_on_grid, math.prod(sizes), sizes)
    same = as_alone(alone, [held for held, _ in results])
    print(f"data x experts = {sizes}: parameters and gradients as alone: {same}")

# %% [markdown]
# And with queues that have an end. Four ranks have to drop the same tokens as one process, so the
# number of pieces that they keep together is a good first question.

# %%
for factor in (1.25, 0.75):
    model = new_model(factor)
    alone_with_queues = train(model)
    kept = len(model.blocks[1].feed_forward.kept[0])
    results = launch(train_on_grid, 4, (2, 2), factor)
    same = as_alone(alone_with_queues, [held for held, _ in results])
    by_ranks = sum(count for _, count in results)
    print(f"factor {factor}: {kept} of 192 pieces kept, by four ranks {by_ranks}; as alone: {same}")

# %% [markdown]
# ### With PyTorch
#
# PyTorch has the pieces, and no finished layer. The first piece is the exchange with its backward:
# `all_to_all_single_autograd` takes the receiving splits first. The second is FSDP. `fully_shard`
# (chapter 8) shards each expert over its copies, and all the rest over all ranks, and does what
# `add_up_gradients` did. By default it *averages* over the ranks that it shards over: two for the
# experts, four for the rest. Our shares add up, so both divide by 1.

# %%
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard


def exchange_with_pytorch(rows, send, receive, group):
    return all_to_all_single_autograd(rows, receive, send, group)


def shard(model, experts, data, everybody):
    """FSDP for the experts over `data`, for the rest over the mesh of all ranks; all add up."""
    modules = [(expert, data) for expert in experts.values()] + [(model, everybody)]
    for module, mesh in modules:
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


# %%
def train_with_pytorch(rank, sizes):
    device = hardware.device().type
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("data", "experts"))
    model = expert_parallel(new_model(), mesh.get_group("experts"))
    layer = model.blocks[1].feed_forward
    layer.run = functools.partial(layer.run, exchange=exchange_with_pytorch)
    shard(model, layer.experts, mesh["data"], init_device_mesh(device, (mesh.size(),)))
    return train(model, rank, mesh.size())


print("as alone:", as_alone(alone, launch(train_with_pytorch, 4, (2, 2))))

# %% [markdown]
# ## 5. Break it: four ways to lose what the experts learned
#
# ### Bug hunt: an average over the copies
#
# Most training code does not add up shares. Each rank takes the *mean* loss of its own rows, and the
# gradients are *averaged*. With experts, people write the average like this. What does it do on a grid
# of 2 x 2 ranks? **Predict** by which factor the gradients are too large.


# %%
def average_gradients(model, data):
    for name, parameter in model.named_parameters():
        group = data if is_expert(name) else None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


# %% tags=["prediction"]
predicted = {"what is no expert": 1.0, "experts": 4 / 2}


# %%
def gradients_of_means(rank, finish):
    mesh = init_device_mesh(hardware.device().type, (2, 2), mesh_dim_names=("data", "experts"))
    model = expert_parallel(new_model(), mesh.get_group("experts"))
    inputs, targets = batch_of(0, rank, ranks=4)
    (4 * share_of_loss(model(inputs), targets, ROWS * CONTEXT)).backward()  # mean of its own rows
    finish(model, mesh.get_group("data"))
    return {name: p.grad.cpu() for name, p in model.named_parameters()}


def share_of_norm(held, expected, of_experts):
    """The norm of these gradients, as a multiple of what one process has."""
    names = [name for name in held if is_expert(name) == of_experts]
    norms = [sum(g[name].square().sum() for name in names) for g in (held, expected)]
    return round((norms[0] / norms[1]).sqrt().item(), 3)


# %%
model = new_model()
share_of_loss(model(batch_of(0)[0]), batch_of(0)[1], ROWS * CONTEXT).backward()
right = {name: p.grad.cpu() for name, p in model.named_parameters()}
held = {}
for of_rank in launch(gradients_of_means, 4, average_gradients):
    held |= of_rank
measured = {"what is no expert": share_of_norm(held, right, of_experts=False)}
measured |= {"experts": share_of_norm(held, right, of_experts=True)}
alike = {"As if a mean over the copies were one over all whose tokens are in it.": {"experts": 1.0}}
compare(predicted, measured, alike)

# %% [markdown]
# An expert's gradient holds the means of four ranks: two came by dispatch, two by the all-reduce. It is
# divided by two, the copies. So it is as many times too large as there are ranks in a group of experts. The
# opposite is as common: where shares are added up, as in section 4, people divide the experts' gradients
# by their group, and they become too small. The rule for means: **add up over the copies, divide by all
# ranks**. FSDP over `data` makes the very same mistake, if nobody sets its factor.
#
# It has happened in DeepSpeed ([pull request 6546](https://github.com/deepspeedai/DeepSpeed/pull/6546)),
# in Megatron's FSDP ([pull request 5956](https://github.com/NVIDIA/Megatron-LM/pull/5956)) and in a copy of
# torchtitan's layer ([PyTorch issue 160285](https://github.com/pytorch/pytorch/issues/160285)). There the loss
# curves were the same with the doubled gradients. **Predict** how far the experts move in a step, as a
# multiple of the way that they should go, with SGD and with AdamW.

# %% tags=["prediction"]
predicted = {"SGD": 2.0, "AdamW": 1.0}


# %%
def double_the_experts(model, data):
    add_up_gradients(model, data)
    for name, parameter in model.named_parameters():
        parameter.grad *= 2 if is_expert(name) else 1


def ways_of_experts(rank):
    """Squared length of the way that this rank's experts go in one step, right and doubled."""
    mesh = init_device_mesh(hardware.device().type, (2, 2), mesh_dim_names=("data", "experts"))
    lengths = {}
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        for finish in (add_up_gradients, double_the_experts):
            model = expert_parallel(new_model(), mesh.get_group("experts"))
            own = [p for name, p in model.named_parameters() if is_expert(name)]
            start = [p.detach().clone() for p in own]
            finished = functools.partial(finish, data=mesh.get_group("data"))
            train(model, rank, 4, finished, optimizer, steps=1)
            moved = sum((p - before).square().sum().item() for p, before in zip(own, start))
            lengths[optimizer.__name__, finish.__name__] = moved
    return lengths


# %%
lengths = launch(ways_of_experts, 4)
measured = {}
for name in ("SGD", "AdamW"):
    right, wrong = (
        sum(of_rank[name, finish.__name__] for of_rank in lengths)
        for finish in (add_up_gradients, double_the_experts)
    )
    measured[name] = round(math.sqrt(wrong / right), 2)
optimist = {"As if a wrong factor showed with every optimizer.": {"AdamW": 2.0}}
compare(predicted, measured, optimist)
figures.ways(measured)
plt.show()

# %% [markdown]
# *How far the experts go, right and doubled. With AdamW the two bars are alike.*
#
# Adam divides each gradient by the root of its own mean square, and a constant factor falls out. So the loss
# does not tell. What tells: SGD, a comparison of gradients, and the norm that clipping works with, which
# is too large. That is why all comparisons of the course are made with SGD.
#
# ### Each rank closes its own queues
#
# It looks like the same rule: every rank takes the capacity factor of *its own* tokens. **Predict** what
# becomes of the dropped pieces as more ranks share the same batch.

# %%
for ranks in (1, 2, 4, 8):
    kept = [fits(own, 4, 1.25) for own in chosen.chunk(ranks)]
    dropped = sum((~own).sum().item() for own in kept)
    print(f"number of ranks {ranks}: {dropped:2} of 192 pieces dropped")

# %% [markdown]
# The smaller the batch, the more uneven it is, and the more queues are too short. Nothing is wrong here
# that a test of one rank could see. But the model is another one on each number of ranks, and no comparison
# with one process holds. Many systems do it all the same, to save a call (Lepikhin et al. 2020, section
# 2.2, *local group dispatching*). Then it belongs to the settings of the run, like the batch size.
#
# ### Splits that nobody turned round
#
# On the way back the lists have to change places. Here they do not.


# %%
from course_utils.launch import RankFailure


def same_splits_twice(rank):
    send, receive = ([4, 0], [4, 3]) if rank == 0 else ([3, 1], [0, 1])
    pieces = torch.ones(4, WIDTH, device=hardware.device())
    arrived = Exchange.apply(pieces, send, receive, None)
    Exchange.apply(arrived, send, receive, None)


try:
    launch(same_splits_twice, 2)
except RankFailure as failure:
    print(str(failure).splitlines()[0].partition(" raised ")[2])

# %% [markdown]
# That is the lucky case: PyTorch compares the sum of the splits with the rows that are there. If the sums
# happen to be equal, each rank waits for other rows than come. Gloo ends such a process, NCCL promises
# nothing, and `launch` shows both lists of both ranks. The repair is one line, `receive, send`, and a habit:
# keep both lists in one object.
#
# ### A rank that has nothing to do
#
# All four tokens are rank 1's, and choose experts of rank 0. Rank 1 gets nothing to work on and goes home
# early.


# %%
def leaves_early(rank):
    send, receive = ([0, 0], [0, 4]) if rank == 0 else ([4, 0], [0, 0])
    pieces = torch.zeros(sum(send), 2**24, device=hardware.device())  # 64 MB a token
    arrived = Exchange.apply(pieces, send, receive, None)
    if len(arrived) == 0:
        return pieces  # nothing to work on
    return Exchange.apply(arrived, receive, send, None)


try:
    launch(leaves_early, 2)
except RankFailure as failure:
    print(failure)

# %% [markdown]
# Rank 1 has nothing to *work* on, but it is to receive the results of its own four tokens. The tokens are
# large here for a reason: NCCL lets a small message wait in a buffer, so that rank 0 would go on and nobody
# would notice that rank 1 lacks its results. And even a rank that neither sends nor receives is a member of the call. The same holds for gradients: an expert without a
# token has none, and an all-reduce that one rank skips stops all. That is why `run_experts` calls experts
# with empty queues.

# %% [markdown]
# ## 6. Exercises: route, queue, send, balance, average
#
# Five parts of an MoE layer, for any number of ranks. Put together they train the model of section 4, also
# where ranks have different numbers of tokens. In 11.2 to 11.4 the ranks are all ranks of the default
# group.

# %%
from torch.distributed.device_mesh import DeviceMesh

from course_exercises import check, hint

# %% [markdown]
# ### 11.1 Route, with a bias that balances (1 point)
#
# DeepSeek-V3 balances almost without a loss. Each expert has a bias, which is added to its score when the experts
# are chosen, and only then. After each step it is lowered a little for experts that had too much to do, and raised for
# the others ([DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437), section 2.1.2). How much a result counts does not
# depend on the bias, and no second loss pulls at the router. (There the scores are sigmoids. Take the softmax over the
# chosen logits, which gives the weights of section 3.)


# %% nbgrader={"grade_id": "11.1", "solution": true}
def route(logits: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Chooses k experts for each of T tokens, by their logits (T, E) plus the bias (E,) of each expert.

    Returns (choices, weights), both (T, k): the numbers of the experts with the largest logit + bias,
    int64, the largest first; and their weights, the softmax over the chosen logits without the bias.
    The gradient of the weights reaches `logits`. T may be 0. The arguments do not change.
    """
    ### BEGIN SOLUTION
    choices = (logits + bias).topk(k, dim=1).indices
    return choices, logits.gather(1, choices).softmax(dim=1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "11.1-check", "grade": true, "points": 1, "locked": true}
check("11.1", route)

# %% [markdown]
# ### 11.2 Places in the queues, over all ranks (3 points)
#
# The queues are those of the whole batch: all pieces of rank 0 stand before those of rank 1, and so on; within a
# rank, tokens in their order. `choices_of_all` gathered every choice to find the places. It is enough
# if each rank tells *one number for each expert*. Which, and what do you add up? (The check counts what you
# hand over.)


# %% nbgrader={"grade_id": "11.2", "solution": true}
def places(choices: Tensor, capacity: Tensor) -> Tensor:
    """Returns the place of each of this rank's pieces in the queue of its expert, int64 (T, k).

    `choices` are the experts' numbers, int64 (T, k); those of a token differ. `capacity`, int64 (E,),
    says how many pieces each expert takes from the whole batch. Places count from 0; a piece that finds
    none has -1. Ranks may have different numbers of tokens, also none. A rank hands over at most E
    numbers to other ranks.
    """
    ### BEGIN SOLUTION
    chosen = choices.flatten()
    marks = one_hot(chosen, len(capacity))  # (T k, E)
    counts = [torch.empty_like(capacity) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, marks.sum(0))
    before = sum(counts[: dist.get_rank()], torch.zeros_like(capacity))
    ahead = (before + marks.cumsum(0) - marks).gather(1, chosen[:, None]).squeeze(1)
    return ahead.where(ahead < capacity[chosen], -1).view_as(choices)
    ### END SOLUTION


# %% nbgrader={"grade_id": "11.2-check", "grade": true, "points": 3, "locked": true}
check("11.2", places)

# %% [markdown]
# ### 11.3 Dispatch and combine (4 points)
#
# Section 4 sent the number of its expert with every piece. If pieces come sorted by expert, counts are
# enough: how many go to each expert says both where to and for whom. What arrives is sorted by rank first
# and by expert second. Your experts want it the other way round.
#
# You may use `Exchange.apply(rows, send, receive, None)`, which knows its backward.


# %% nbgrader={"grade_id": "11.3", "solution": true}
class Dispatcher:
    """The way of this rank's pieces to the E experts of n ranks, and back; rank r has E / n from r E / n on.

    Its attribute `load`, int64 (E / n,), tells how many pieces come to each of this rank's experts.
    """

    def __init__(self, counts: Tensor) -> None:
        """`counts`, int64 (E,): how many of this rank's pieces go to each expert. All ranks call it."""
        ### BEGIN SOLUTION
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts)
        per_rank = coming.view(dist.get_world_size(), -1)  # [from rank, own expert]
        self.load = per_rank.sum(0)
        self.sent = counts.view_as(per_rank).sum(1).tolist()
        self.received = per_rank.sum(1).tolist()
        numbers = torch.arange(coming.numel(), device=counts.device) % per_rank.shape[1]
        self.by_expert = numbers.repeat_interleave(coming).argsort(stable=True)
        ### END SOLUTION

    def dispatch(self, pieces: Tensor) -> Tensor:
        """Takes this rank's pieces (P, W), sorted by expert. Returns what its own experts get, (Q, W).

        Sorted by expert, then by the rank that it comes from; within these in the order it had there.
        """
        ### BEGIN SOLUTION
        return Exchange.apply(pieces, self.sent, self.received, None)[self.by_expert]
        ### END SOLUTION

    def combine(self, results: Tensor) -> Tensor:
        """Takes the results (Q, W) in the order that `dispatch` gave; returns (P, W), as `pieces` lay.

        Gradients flow back through both.
        """
        ### BEGIN SOLUTION
        as_arrived = results[self.by_expert.argsort()]
        return Exchange.apply(as_arrived, self.received, self.sent, None)
        ### END SOLUTION


# %% nbgrader={"grade_id": "11.3-check", "grade": true, "points": 4, "locked": true}
check("11.3", Dispatcher)

# %% [markdown]
# ### 11.4 The balance loss, over all ranks (2 points)
#
# `share_of_balance` was given the choices of all ranks. Here you have your own. A product of two means over the
# batch is not the mean of the ranks' products: so one of its factors has to be known of the whole batch. One
# small collective does it, and nothing has to flow back through it.


# %% nbgrader={"grade_id": "11.4", "solution": true}
def balance_loss(logits: Tensor, choices: Tensor) -> Tensor:
    """Returns what this rank's tokens contribute to the balance loss of the whole batch, a scalar.

    `logits` (T, E) and `choices` (T, k) are those of this rank's tokens; the number T may differ between
    ranks, and be 0. Added up over all ranks, the results are E * sum(f_e * p_e) of the whole batch, and
    their gradients with respect to the logits are its gradients. A rank hands over at most E + 1 numbers.
    """
    ### BEGIN SOLUTION
    pieces_of = choices.flatten().bincount(minlength=logits.shape[1])
    dist.all_reduce(pieces_of)
    f = pieces_of.to(logits.dtype) / pieces_of.sum()
    tokens = pieces_of.sum() / choices.shape[1]
    return logits.shape[1] * (f * logits.softmax(1).sum(0)).sum() / tokens
    ### END SOLUTION


# %% nbgrader={"grade_id": "11.4-check", "grade": true, "points": 2, "locked": true}
check("11.4", balance_loss)

# %% [markdown]
# ### 11.5 Average the gradients on a grid (3 points)
#
# The repair of the bug hunt, for models as they are. Each rank has called backward on the *mean* loss of its own
# rows, and all have equally many. A parameter of an expert has `experts` among the parts of its name, as in
# `blocks.1.feed_forward.experts.3.up.weight`; the rest is the same on every rank. Some parameters are
# frozen, and an expert that nobody chose has no gradient, here or on another rank.


# %% nbgrader={"grade_id": "11.5", "solution": true}
def average_expert_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes every `.grad` the gradient of the mean loss over the rows of all ranks of `mesh`, in place.

    `mesh` has the dimensions "data" and "experts", in any order; its ranks are all ranks. Each experts'
    group has exchanged its tokens in forward and backward. A trainable parameter without a gradient
    counts as zero; one that is frozen stays without.
    """
    ### BEGIN SOLUTION
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            copies = mesh.get_group("data") if "experts" in name.split(".") else None
            dist.all_reduce(parameter.grad, group=copies)
            parameter.grad.div_(mesh.size())
    ### END SOLUTION


# %% nbgrader={"grade_id": "11.5-check", "grade": true, "points": 3, "locked": true}
check("11.5", average_expert_gradients)

# %% [markdown]
# ## 7. See it: load, capacity, links
#
# A layer with 1,024 tokens that choose two experts each. `preference` is how much the router likes the first
# experts more than the last. Three things to try:
#
# * Set the preference to 0 and lower the capacity factor to 1: even chance drops something.
# * Set the preference to 0.7. Which capacity factor drops nothing, and how many places are then empty?
# * Raise the number of experts: smaller queues, and more of them overflow.

# %%
from course_utils.lesson import explore

explore.Explorer(
    figures.load_and_capacity,
    experts=(2, 32, 8),
    preference=(0.0, 2.0, 0.5),
    capacity_factor=(0.5, 2.5, 1.25),
)

# %% [markdown]
# *At the start: the first experts overflow, the last are half empty, with the same capacity for all.*
#
# ### Which links does it take?
#
# A ring sends to a neighbour. All-to-all sends to everybody, and most of everybody is far away. The
# figure assumes machines of 8 ranks and experts that are all chosen alike: calculated, not measured.

# %%
figures.links([2, 8, 64])
plt.show()

# %% [markdown]
# *The share of a rank's pieces that stays, that crosses the machine, and that leaves it. From 2 ranks to 64,
# the bytes that a rank hands over are the same; where they go is not.*
#
# So which of the two dimensions belongs inside a machine, chapter 7's question? An example with the sizes of
# Mixtral 8x7B ([Jiang et al. 2024](https://arxiv.org/abs/2401.04088), table 1): 32 layers, width 4,096, an
# expert of 3 x 4,096 x 14,336 numbers, one of 8 experts on each rank, two experts a token. Say a rank has
# 16,384 tokens a step and a number has 2 bytes. **Predict** the two amounts.

# %% tags=["prediction"]
predicted = {
    "all-to-all, GB a step": round(32 * 4 * 16_384 * 2 * 4_096 * 2 / 1e9, 1),
    "experts' gradients, GB a step": round(32 * 3 * 4_096 * 14_336 * 2 / 1e9, 1),
}

# %%
exchanged = torch.empty(16_384 * 2, 4_096, dtype=torch.bfloat16, device="meta")
expert = torch.empty(3, 4_096, 14_336, dtype=torch.bfloat16, device="meta")
measured = {
    "all-to-all, GB a step": round(32 * 4 * exchanged.nbytes / 1e9, 1),
    "experts' gradients, GB a step": round(32 * expert.nbytes / 1e9, 1),
}
compare(predicted, measured)

# %% [markdown]
# The all-to-all is handed three times as much. On the links they come closer: 7/8 of the one leave a rank, and a ring
# of many copies sends almost twice the other (chapter 3): 30 GB, and at most 22.5. More important is who waits: the all-to-all stands in the way four times in
# each layer, and the next operation needs its result. The gradients' sum over the copies waits until backward
# is over, and hides behind it. So `experts` is the inner dimension of the mesh, inside a machine as long as the
# experts find room there, and `data` is the outer one. Where 64 or more ranks share the experts, routers
# are told to stay near: in DeepSeek-V3 a token goes to at most 4 machines ([DeepSeek-AI
# 2024](https://arxiv.org/abs/2412.19437), section 2.1.2, *node-limited routing*).

# %% [markdown]
# ## 8. On a cluster: the same grid under torchrun
#
# The script trains a small stack of MoE layers on real text, without capacity; its arguments are the sizes of
# `data` and `experts`. It runs on one process and on four. As in chapter 10, the update is written out.

# %%
from course_utils.lesson.terminal import scratch, torchrun

script = scratch() / "experts.py"
script.unlink(missing_ok=True)

# %%
# %%writefile scratch/experts.py
"""Trains a small mixture of experts: torchrun --nproc-per-node 4 experts.py 2 2"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

from course_utils.lesson import text
from course_utils.lesson.models import FeedForward

ROWS, CONTEXT, WIDTH, EXPERTS = 8, 16, 32, 4
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
sizes = tuple(map(int, sys.argv[1:3]))
mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "experts"))
data, group, per_rank = mesh.get_group("data"), mesh.get_group("experts"), EXPERTS // sizes[1]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        experts = [FeedForward(WIDTH) for _ in range(EXPERTS)]  # the same on every rank
        self.experts = nn.ModuleList(experts[dist.get_rank(group) * per_rank :][:per_rank])

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).topk(2)
        order = chosen.flatten().argsort(stable=True)
        send = chosen.flatten().bincount(minlength=EXPERTS)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=group)
        there, here = ([n.sum().item() for n in c.chunk(sizes[1])] for c in (send, receive))
        arrived = all_to_all_single_autograd(tokens[order // 2], here, there, group)
        number = torch.arange(EXPERTS, device=device) % per_rank
        by_expert = number.repeat_interleave(receive).argsort(stable=True)
        queues = arrived[by_expert].split(receive.view(-1, per_rank).sum(0).tolist())
        results = torch.cat([expert(queue) for expert, queue in zip(self.experts, queues)])
        back = all_to_all_single_autograd(results[by_expert.argsort()], there, here, group)
        mixed = back[order.argsort()].view(-1, 2, WIDTH) * weights.softmax(-1)[..., None]
        return x + mixed.sum(1).view_as(x)


torch.manual_seed(0)
layers = nn.Embedding(72, WIDTH), Experts(), Experts(), nn.Linear(WIDTH, 72)
model = nn.Sequential(*layers).to(device)
for step in range(3):
    batch = text.windows(CONTEXT, ROWS, seed=step)
    tokens, targets = (part.chunk(mesh.size())[dist.get_rank()].to(device) for part in batch)
    model.zero_grad()
    scores = model(tokens).flatten(0, 1)
    loss = nn.functional.cross_entropy(scores, targets.flatten(), reduction="sum")
    (loss / (ROWS * CONTEXT)).backward()
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad, group=data if ".experts." in name else None)
    for parameter in model.parameters():
        parameter.data -= parameter.grad  # SGD with a learning rate of 1
    dist.all_reduce(total := loss.detach())
    if dist.get_rank() == 0:
        print(f"step {step}: loss {total.item() / (ROWS * CONTEXT):.3f}")
dist.destroy_process_group()

# %%
printed = torchrun(4, script, "2", "2")
print(printed, end="")
print("the same with one process:", printed == torchrun(1, script, "1", "1"))

# %% [markdown]
# What changes there:
#
# * **Links.** With `experts` last in the mesh, and a size that divides the GPUs of a machine, every
#   all-to-all stays inside one.
# * **The host waits** for the splits in every layer. Kernels that send from the GPU without asking the host
#   (DeepEP, NVSHMEM), or padding to capacity, avoid it.
# * **Many small matrices.** A GPU wants one *grouped* product for all experts and not a loop
#   ([Gale et al. 2022](https://arxiv.org/abs/2211.15841), section 4: nothing is dropped, either).
# * **Memory follows the load.** The rank with popular experts holds the most activations, and a bad step
#   can be the one that runs out of memory.
# * **Clipping and checkpoints.** A norm adds the squares of an expert's gradient once for each expert, not
#   once for each copy. Every expert is saved once, by the ranks with data coordinate 0.
#
# ## 9. Remember
#
# 1. A token meets k of E experts. Parameters grow with E, the work of a token and the bytes that travel do
#    not.
# 2. A layer makes four token exchanges in a step. The splits come from the routing; backward swaps them.
# 3. Capacity and balance are those of the whole batch, or the model depends on the number of ranks.
# 4. Expert gradients have seen the tokens of their group. Shares: add up over the copies. Means: add up
#    over the copies, divide by *all* ranks. Adam hides it if you do not.
# 5. Every rank takes part in every exchange, with nothing to send, too. `experts` is the dimension for the
#    fast links.
#
# **Sources**
#
# * N. Shazeer et al., *Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer*, ICLR
#   2017, [arXiv 1701.06538](https://arxiv.org/abs/1701.06538): section 2.1 gating, 3.1 data and experts
#   together, 4 balancing.
# * D. Lepikhin et al., *GShard*, 2020, [arXiv 2006.16668](https://arxiv.org/abs/2006.16668): section 2.2
#   capacity, groups, auxiliary loss; algorithm 1.
# * W. Fedus, B. Zoph, N. Shazeer, *Switch Transformers*, 2021, [arXiv
#   2101.03961](https://arxiv.org/abs/2101.03961): section 2.2 capacity factor and balance loss.
# * A. Q. Jiang et al., *Mixtral of Experts*, 2024, [arXiv 2401.04088](https://arxiv.org/abs/2401.04088): section
#   2.1 and table 1.
# * DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, [arXiv
#   2412.19437](https://arxiv.org/abs/2412.19437): section 2.1.2 balancing without a loss, routing near by.
# * T. Gale et al., *MegaBlocks*, 2022, [arXiv 2211.15841](https://arxiv.org/abs/2211.15841): section 4.
# * PyTorch: [`all_to_all_single`](https://docs.pytorch.org/docs/stable/distributed.html),
#   [`fully_shard`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
