# %% [markdown]
# # 11. Experts: every token chooses two of many layers
#
# So far every token passed through all parameters. In a **mixture of experts** (MoE) a layer holds many MLPs side by
# side, the **experts**, and a token goes through two of them. More experts make the model larger, but not the work for a
# token.
#
# The experts lie on different ranks: **expert parallelism**. In the middle of a step tokens are sent to the ranks of
# their experts, and the results come back. You write the router, the exchange, the balance loss and the sum of the
# gradients. In the end a grid of ranks reaches the parameters of one process.

# %% tags=["nbval-ignore-output"]
import math
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy, one_hot

from course_exercises import check, hint
from course_utils import hardware
from course_utils.figures import ch11
from course_utils.launch import launch
from course_utils.lesson import text
from course_utils.lesson.equality import check_equal, flat, largest_difference
from course_utils.lesson.models import FeedForward, LanguageModel
from course_utils.lesson.predictions import compare
from course_utils.lesson.terminal import scratch, torchrun
from course_utils.trace import Trace

hardware.report()

# %% [markdown]
# ## 1. The factory: specialists in different buildings
#
# So far every half-finished part passed through all stations of the line. Now one station exists in several versions,
# the **specialists**. Each has a blueprint of its own and stands in a different building. In front of them a
# **dispatcher** looks at each part and picks the two specialists that suit it best. Trucks take the part to both. The
# two results come back, are added up, and the part goes on.
#
# A popular specialist has a long queue, and all the others wait until it is empty.

# %%
ch11.factory()
plt.show()

# %% [markdown]
# *Six parts with two specialists each make twelve pieces of work. Specialist 1 gets six of them.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | specialist | **expert** | an MLP that only some tokens pass through |
# | dispatcher | **router** | a small linear layer that scores all experts for each token |
# | a part on its way to one specialist | **piece** | a pair (token, expert): a token has two |
# | trucks to the specialists, and back | **dispatch** and **combine** | two all-to-alls |
# | length of a queue | **load** | the number of pieces that chose an expert |

# %% [markdown]
# ## 2. The smallest real run: two ranks, two experts
#
# In an **all-to-all** every rank has a different message for every rank. `all_to_all_single` wants the messages
# one behind the other in one tensor. Two lists, the **splits**, say how many rows go to each rank and how many come
# from each. Nobody knows the second list beforehand. So a first, small all-to-all exchanges the counts, and a second
# one brings the pieces.


# %%
def two_ranks(rank):
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
    results = torch.empty_like(back)
    results[order] = back  # as the pieces lay at first
    return arrived.tolist(), results.tolist()


for rank, (arrived, results) in enumerate(launch(two_ranks, 2)):
    print(f"rank {rank} works on {arrived}; the results of its own pieces are {results}")

# %% [markdown]
# Expert 0 multiplies by ten, expert 1 changes the sign. Each rank had three pieces, but rank 0 works on one and rank 1
# on five.

# %% [markdown]
# ## 3. Predict, then measure: parameters, load and balance
#
# ### Two of many
#
# The router is a matrix of W x E numbers. It gives each token E **logits**, one for each expert. The k best are
# chosen (**top-k**; here k = 2). The softmax over their logits gives the weights with which their results are added
# up ([Shazeer et al. 2017](https://arxiv.org/abs/1701.06538), section 2.1, without its noise). A choice has no
# gradient, so from the model's loss the router learns through these weights only.


# %%
def best_experts(logits, k):
    """The k most probable experts of each token, and their weights, which add up to 1: (T, k)."""
    best = logits.softmax(-1).topk(k)
    return best.indices, best.values / best.values.sum(-1, keepdim=True)


# %% [markdown]
# The language model *Mixtral 8x7B* has 32 layers with 8 experts of 176 million parameters each.
# Everything else, such as attention and embeddings, has 1.6 billion in all. That makes 32 x 8 x 0.176 + 1.6 = 47
# billion parameters, not the 56 that the name suggests, since only the MLPs exist eight times. A token meets two experts
# in each layer and everything else: 13 billion (Jiang et al. 2024, abstract). With twice as many experts it would still
# be 13 billion. The price is that tokens have to travel, and that the work is spread unevenly.
#
# Later models have more and smaller experts, and their recipes differ:
#
# | | Mixtral 8x7B (2024) | DeepSeek-V3 (2024) | Qwen3-235B (2025) |
# |---|---|---|---|
# | experts in a layer, chosen by a token | 8, 2 | 256, 8 | 128, 8 |
# | **shared expert**, which every token meets | none | 1 | none |
# | weights | softmax over the chosen | sigmoids, divided by their sum | softmax over the chosen |
# | balance | a loss | a bias, and a very small loss | a loss over the whole batch |
#
# None of them drops a token. Until about 2022 most systems did: compilers and TPUs wanted tensors of a fixed size, so
# an expert took a fixed number of pieces, its *capacity*. Products of many sizes in one call (section 4) made that
# needless. The further notebook has it.
#
# ### Load
#
# Here a router that has learned nothing routes 96 tokens.

# %%
W, E, K = 24, 8, 2  # width, experts, experts of a token
torch.manual_seed(0)
router = nn.Linear(W, E, bias=False)
x = torch.randn(96, W) + torch.randn(W)  # tokens of a text have something in common
choices, weights = best_experts(router(x), K)
load = choices.flatten().bincount(minlength=E).tolist()
print("pieces of each expert:", load)

# %% [markdown]
# An even load would be 24 pieces. If each expert is on a rank of its own, all ranks wait for the one with the largest
# load, which also stores the most activations. In training it gets worse: an expert with more tokens learns more, and is
# chosen even more often. There are two remedies.

# %% [markdown]
# ### 11.1 Route, with a bias that balances (1 point)
#
# DeepSeek-V3 balances almost without a loss. Each expert has a bias, which is added to its logits when the experts are
# chosen, and only then. After each step the bias of an expert with too much work is lowered a little, and the others
# are raised ([DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437), section 2.1.2). The weight of a result does not
# depend on the bias. (DeepSeek-V3 scores with sigmoids. Take the softmax over the chosen logits, as above.)


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
# ### Balance without a loss
#
# The bias learns by counting, not from a gradient. In each step the ranks add up how many pieces chose each expert. Where
# it was more than an even load, the bias goes down by a small number; elsewhere it goes up. Here are DeepSeek-V3's
# sigmoids, with 64 experts of which a token chooses 8.


# %%
MANY, EIGHT = 64, 8


def eight_of_many(scores, bias):
    """The experts with the largest score + bias, and their weights, from the scores alone: (T, 8)."""
    choices = (scores + bias).argsort(dim=-1, descending=True)[:, :EIGHT]
    chosen = scores.take_along_dim(choices, dim=-1)
    return choices, chosen / chosen.sum(-1, keepdim=True)


# %%
def balanced_by_bias(rank, together=True, steps=100, rate=0.01):
    """The largest load in the first and in the last step, 1 if even; the bias; numbers sent in a step."""
    exact = {"dtype": torch.float64}  # no digit decides a route
    torch.manual_seed(0)
    router, bias, common = torch.randn(W, MANY, **exact), torch.zeros(MANY, **exact), torch.randn(W)
    largest = []
    with Trace() as trace:
        for _ in range(steps):
            tokens = (common + torch.randn(256, W)).to(**exact).chunk(dist.get_world_size())[rank]
            choices, _ = eight_of_many((tokens @ router / W**0.5).sigmoid(), bias)
            counts = choices.flatten().bincount(minlength=MANY).to(hardware.device())
            if together:
                dist.all_reduce(counts)
            largest.append(counts.max().item() / counts.double().mean().item())
            bias -= rate * (counts - counts.double().mean()).sign().cpu()
    return largest[0], largest[-1], bias, sum(c.elements for c in trace.record().calls) // steps


# %% [markdown]
# **Predict** how many numbers a rank hands over in a step, so that four ranks find the bias of one process.

# %% tags=["prediction"]
predicted = {"numbers a step": 64}

# %%
[one] = launch(balanced_by_bias, 1)
four = launch(balanced_by_bias, 4)
print(f"largest load, 1 if even: {one[0]:.1f} at first, {one[1]:.1f} after 100 steps")
print("bias of 4 ranks, largest difference:", check_equal(one[2], [bias for _, _, bias, _ in four]))
apart = [bias for _, _, bias, _ in launch(balanced_by_bias, 4, together=False)]
print("each rank counts its own:", largest_difference(one[2], apart))

# %%
compare(
    predicted,
    {"numbers a step": four[0][3]},
    likely={
        "As if the choices were gathered: counts are enough.": {"numbers a step": 512},
    },
)

# %% [markdown]
# No gradient pulls at the router for the sake of balance. If each rank counts its own tokens only, every rank ends with
# a bias of its own, and the same token is routed differently on different ranks.

# %% [markdown]
# ### The balance loss
#
# The other remedy is a second loss ([Fedus et al. 2021](https://arxiv.org/abs/2101.03961), section 2.2):
#
# $$L_b = E \sum_{e} f_e \, p_e$$
#
# Here $f_e$ is the share of the pieces that chose expert $e$, and $p_e$ is its mean probability over all tokens. If
# both are even, the loss is 1. With k = 1 and all tokens sure of the same expert it is E. The shares have no
# gradient, but the probabilities do: the loss lowers the probabilities of overloaded experts.
#
# Both are computed over the *whole* batch. If each rank balanced its own few sequences, every expert would have to
# serve every kind of text, and none could specialise ([Qiu et al. 2025](https://arxiv.org/abs/2501.11873)). So the
# function takes the choices of all ranks and returns what this rank's tokens contribute.


# %%
def share_of_balance(logits, all_choices):
    """What this rank's tokens contribute to the balance loss, given the choices of all ranks."""
    experts = logits.shape[-1]
    load = one_hot(all_choices.flatten(), experts).mean(0, dtype=logits.dtype)
    probability = logits.softmax(-1).sum(0) / len(all_choices)
    return experts * (load * probability).sum()


# %% [markdown]
# ### 11.4 The balance loss, over all ranks (2 points)
#
# `share_of_balance` was given the choices of all ranks. Here you have only your own. The product of two means over the
# batch is not the mean of the ranks' products, so one of the two factors has to be that of the whole batch. One small
# collective is enough, and no gradient has to flow back through it.


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
# ## 4. By hand, then with PyTorch: a model with experts, on a grid
#
# ### One process
#
# First the layer as one process computes it. Two of its attributes are replaced on several ranks: `gather` finds the
# choices of all ranks, and `run` brings the pieces to their experts and back. An expert is called even if its queue is
# empty. Its gradients are then zeros and not missing, so that its rank can join in when they are added up.


# %%
def run_experts(experts, pieces, chosen):
    """Sends each piece through the expert whose number it has chosen; returns the results."""
    order = chosen.argsort(stable=True)
    lengths = [(chosen == int(number)).sum().item() for number in experts]
    queues = pieces[order].split(lengths)
    results = [expert(queue) for expert, queue in zip(experts.values(), queues)]
    return torch.cat(results)[order.argsort()]


# %%
class MoE(nn.Module):
    """A router, its experts and a shared expert: (N, T, W) to (N, T, W)."""

    def __init__(self, width, experts, k):
        super().__init__()
        self.k = k
        self.router, self.shared = nn.Linear(width, experts, bias=False), FeedForward(width)
        self.experts = nn.ModuleDict({str(e): FeedForward(width) for e in range(experts)})
        self.gather = lambda choices: choices  # those of all ranks
        self.run = run_experts

    def forward(self, x):
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        choices, weights = best_experts(logits, self.k)
        self.balance = share_of_balance(logits, self.gather(choices))
        pieces = tokens.repeat_interleave(self.k, dim=0)  # none is dropped
        results = self.run(self.experts, pieces, choices.flatten())
        mixed = (weights[:, :, None] * results.view(*choices.shape, -1)).sum(1)
        return (self.shared(tokens) + mixed).view_as(x)


# %% [markdown]
# The model is the course's language model with two blocks; the second has experts. The loss of a batch is its mean cross
# entropy plus a hundredth of the balance loss. Each rank computes its *share*: the sum over its own tokens, divided by
# the tokens of the whole batch. So the gradients of the ranks add up.

# %%
CONTEXT, ROWS, STEPS, WIDTH, EXPERTS, BALANCE = 12, 8, 3, 24, 4, 0.01


class MixtureModel(LanguageModel):
    """Two blocks, experts in the second; returns the logits and the balance loss."""

    def __init__(self):
        super().__init__(len(text.vocabulary()), WIDTH, heads=4, layers=2, context=CONTEXT)
        self.blocks[1].feed_forward = MoE(WIDTH, EXPERTS, 2)

    def forward(self, tokens):
        return super().forward(tokens), self.blocks[1].feed_forward.balance


def share_of_loss(outputs, targets, tokens, weight=BALANCE):
    """What these rows contribute to the loss of a batch of so many tokens."""
    logits, balance = outputs
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss / tokens + weight * balance


# %%
def new_model():
    torch.set_num_threads(1)  # a model as small as this one loses time with more
    torch.manual_seed(0)
    return MixtureModel().to(hardware.device())


def batch_of(step, rank=0, ranks=1):
    """Inputs and targets of this rank's rows."""
    batch = text.windows(CONTEXT, ROWS, seed=step)
    return [part.chunk(ranks)[rank].to(hardware.device()) for part in batch]


def full(tensor):
    """On the CPU; of a DTensor, all its parts together."""
    return getattr(tensor.detach(), "full_tensor", tensor.detach)().cpu()


# %%
def train(model, rank=0, ranks=1, finish=lambda model: None, steps=STEPS):
    """Some steps. `finish` completes the gradients. Returns parameters and last gradients."""
    # foreach=True, the default on GPUs, does not take DTensors of two meshes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(steps):
        inputs, targets = batch_of(step, rank, ranks)
        optimizer.zero_grad()
        share_of_loss(model(inputs), targets, ROWS * CONTEXT).backward()
        finish(model)
        optimizer.step()
    return {name: (full(p), full(p.grad)) for name, p in model.named_parameters()}


alone = train(new_model())

# %% [markdown]
# One warning before you compare. Sums taken in a different order differ in their last digits. If a token's second and
# third choice have almost the same logit, such a digit can change the route, and a tiny difference becomes a large
# one. A comparison needs a **margin** between the two, or float64.
#
# ### Dispatch and combine
#
# Autograd has to know how to differentiate the all-to-all. A row that went from rank a to rank b has a gradient on b
# that belongs to a. So backward is the same exchange with the two lists of splits swapped.


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
# With E experts on n ranks, rank r has the E / n experts from number rE / n on. Pieces are sorted by the rank that they
# go to. The numbers of their experts travel with them, and the results come back to where the pieces lay. A rank that
# sends nothing or gets nothing makes the same calls, because the others wait for it.


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
# ### 11.3 Dispatch and combine (4 points)
#
# `run_experts_of_group` sends with every piece the number of its expert. If pieces come sorted by expert, counts are
# enough: how many go to each expert says both where they go and for whom they are. What arrives is sorted by rank
# first and by expert second. Your experts want it the other way round.
#
# You may use `Exchange.apply(rows, send, receive, None)`, which knows its backward. The ranks are all ranks of the
# default group.


# %% nbgrader={"grade_id": "11.3", "solution": true}
class Dispatcher:
    """Takes this rank's pieces to the E experts of n ranks and back; rank r has experts r E / n to (r + 1) E / n - 1.

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

        The rows are sorted by expert, then by the rank that they come from; those of a rank keep their order.
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
# ### The whole model on several ranks
#
# Each rank keeps its own experts and forgets the others. The shared expert is on every rank, as the router is. A rank
# gathers the choices of all ranks for the balance loss. (11.4 needs only E numbers from each rank.)


# %%
def choices_of_all(choices):
    """The choices of all ranks, in their order."""
    of_ranks = [torch.empty_like(choices) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, choices)
    return torch.cat(of_ranks)


def expert_parallel(model, group):
    """Leaves each rank of `group` its own experts, under the names that they have."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for layer in [module for module in model.modules() if hasattr(module, "experts")]:
        share = len(layer.experts) // ranks
        mine = list(layer.experts.items())[rank * share :][:share]
        layer.experts = nn.ModuleDict(mine)
        layer.run = partial(run_experts_of_group, group)
        layer.gather = choices_of_all
    return model


# %% [markdown]
# Four ranks share a layer of 4 experts, and then one of 8. Each rank has 24 tokens, and a token chooses 2 experts.
# **Predict** how many all-to-alls of tokens a rank calls for one layer in a step, forward and backward. By which factor
# do the bytes that all ranks together hand over change with 8 experts (1 means that they stay the same)?

# %% tags=["prediction"]
predicted = {"all-to-alls of tokens": 4, "bytes with 8 experts": 1.0}


# %%
def tokens_sent(rank, experts):
    """In a step of one layer: the bytes that this rank hands over, for each all-to-all of tokens."""
    torch.manual_seed(0)
    layer = expert_parallel(MoE(WIDTH, experts, 2).to(hardware.device()), None)
    torch.manual_seed(rank)
    x = torch.randn(2, 12, WIDTH).to(hardware.device()).requires_grad_()
    with Trace() as trace:
        layer(x).sum().backward()
    return [call.bytes for call in trace.record().calls if call.dtype == "float32"]


sent = {experts: launch(tokens_sent, 4, experts) for experts in (4, 8)}
with_4, with_8 = (sum(map(sum, by_rank)) for by_rank in sent.values())
measured = {"all-to-alls of tokens": len(sent[4][0]), "bytes with 8 experts": with_8 / with_4}
for rank, calls in enumerate(sent[4]):
    print(f"rank {rank} hands over, in bytes:", *calls)

# %%
compare(
    predicted,
    measured,
    likely={
        "Forward only. The gradients take the same ways back.": {"all-to-alls of tokens": 2},
        "As if every token went to every expert: it makes two pieces, whatever E is.": {
            "bytes with 8 experts": 2.0
        },
    },
)

# %% [markdown]
# The calls are dispatch, combine, and the backward of both. A piece is one row, whatever E is. In two of the calls a rank
# sends its own 48 pieces, and in the other two as many as its experts were given. So a rank with popular experts sends
# more.
#
# ### Experts x data: which gradients are added up over which ranks?
#
# With 8 experts, one on a rank, 64 ranks hold eight copies of each. The ranks form a grid of two dimensions, `data`
# and `experts`. Both cut the batch: every rank has rows of its own.
#
# * What is **not an expert** (attention, norms, the router) is on every rank, with the gradient of that rank's tokens.
#   It is added up over *all* ranks.
# * An **expert** has already seen the tokens of its whole group: dispatch brought them. Those of the other groups are
#   missing, so its gradient is added up over `data` only.


# %%
def is_expert(name):
    return ".experts." in name


def add_up_gradients(model, data):
    """Sums over all ranks; for an expert over its copies, the ranks of `data`."""
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad, group=data if is_expert(name) else None)


def add_up_everything(model, data):
    """The same without a difference between experts and the rest."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


# %%
def train_on_grid(rank, sizes, finish=add_up_gradients):
    mesh = init_device_mesh(hardware.device().type, sizes, mesh_dim_names=("data", "experts"))
    model = expert_parallel(new_model(), mesh.get_group("experts"))
    return train(model, rank, mesh.size(), partial(finish, data=mesh.get_group("data")))


def difference(whole, results, measure=check_equal):
    """The largest one between any rank's parameters and gradients and those of one process."""
    assert set().union(*results) == whole.keys()  # every parameter is on some rank
    differences = []
    for held in results:
        expected = flat(t for name in held for t in whole[name])
        differences.append(measure(expected, [flat(t for pair in held.values() for t in pair)]))
    return max(differences)


# %%
for sizes in ((1, 2), (1, 4), (2, 2)):
    results = launch(train_on_grid, math.prod(sizes), sizes)
    print(f"data x experts = {sizes}: largest difference", difference(alone, results))
wrong = launch(train_on_grid, 4, (2, 2), add_up_everything)
found = difference(alone, wrong, largest_difference)
print("all gradients added up over all ranks: largest difference", found)

# %% [markdown]
# The last run adds up the gradients of *different* experts. They have the same shape, so nothing complains.
#
# ### With PyTorch
#
# PyTorch has the parts of such a layer, but not the layer. `all_to_all_single_autograd` is the exchange with its
# backward; it takes the receiving splits first. (A functional *sum* has a backward, too, which is not always the
# right one: 06 further, section 5.) `fully_shard` (chapter 8) cuts the experts over their copies and everything else
# over all ranks. A list of modules becomes one unit, so all experts of a rank take one all-gather. By default
# `fully_shard` *averages* gradients over the ranks that it cuts over: two for the experts, four for the rest. Our
# losses are shares that add up, so both divide by 1.

# %%
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard


def exchange_with_pytorch(rows, send, receive, group):
    return all_to_all_single_autograd(rows, receive, send, group)


def shard(model, experts, data, everybody):
    """FSDP for the experts, as one unit, over `data`; for the rest over all ranks; all add up."""
    own = [*experts.values()]
    fully_shard(own, mesh=data)
    fully_shard(model, mesh=everybody)
    for unit in (own[0], model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


# %%
def train_with_pytorch(rank, sizes):
    device = hardware.device().type
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("data", "experts"))
    model = expert_parallel(new_model(), mesh.get_group("experts"))
    layer = model.blocks[1].feed_forward
    layer.run = partial(layer.run, exchange=exchange_with_pytorch)
    shard(model, layer.experts, mesh["data"], init_device_mesh(device, (mesh.size(),)))
    return train(model, rank, mesh.size())


results = launch(train_with_pytorch, 4, (2, 2))
print("largest difference from one process:", difference(alone, results))

# %% [markdown]
# [torchtitan](https://github.com/pytorch/torchtitan/pull/1324) borrows the `experts` ranks from the data ranks, too.
# But it stacks the experts of a rank in one tensor for each matrix, so that `fully_shard` meets one parameter and not
# one for each expert, and multiplies all of them in one **grouped product**, given rows sorted by expert and where
# each queue ends.

# %%
from torch.nn.functional import gelu, grouped_mm


class StackedExperts(nn.Module):
    """The experts of a rank; each of their matrices and biases is one tensor (E / n, ...)."""

    def __init__(self, experts):
        super().__init__()
        for layer in ("up", "down"):
            parts = [getattr(expert, layer) for expert in experts]
            matrices = torch.stack([part.weight.detach().T for part in parts])
            setattr(self, f"{layer}_weight", nn.Parameter(matrices))
            biases = torch.stack([part.bias.detach() for part in parts])
            setattr(self, f"{layer}_bias", nn.Parameter(biases))

    def forward(self, queues, lengths):
        """All queues, one behind the other, through their experts; a queue may be empty."""
        ends = lengths.cumsum(0, dtype=torch.int32)
        up_bias, down_bias = (
            b.repeat_interleave(lengths, 0) for b in (self.up_bias, self.down_bias)
        )
        hidden = gelu(grouped_mm(queues, self.up_weight, offs=ends) + up_bias)
        return grouped_mm(hidden, self.down_weight, offs=ends) + down_bias


# %%
def run_stacked(stacked, pieces, chosen):
    """As `run_experts`, without a loop over the experts."""
    order = chosen.argsort(stable=True)
    lengths = chosen.bincount(minlength=len(stacked.up_bias))
    return stacked(pieces[order], lengths)[order.argsort()]


torch.manual_seed(0)
experts = nn.ModuleDict({str(e): FeedForward(W) for e in range(MANY)})
stacked = StackedExperts(experts.values())
choices, _ = eight_of_many(torch.rand(40, MANY), torch.linspace(1, 0, MANY))
pieces = torch.randn(40 * EIGHT, W)
outputs = [
    run(of, pieces, choices.flatten())
    for run, of in ((run_experts, experts), (run_stacked, stacked))
]
for output in outputs:
    output.square().sum().backward()
one_by_one = torch.stack([expert.up.weight.grad.T for expert in experts.values()])
print("experts that nobody chose:", MANY - len(choices.unique()))
print("outputs, largest difference:", check_equal(outputs[0], [outputs[1]]))
print("gradients, largest difference:", check_equal(one_by_one, [stacked.up_weight.grad]))

# %% [markdown]
# ## 5. Break it: averages on a grid
#
# ### Bug hunt: mean losses, averaged gradients
#
# Most training code does not add up shares. Each rank takes the *mean* loss of its own rows, and the gradients are
# *averaged*. With experts one often sees the function below. **Predict** for a grid of 2 x 2 ranks the experts'
# gradients as a multiple of the right ones (1 means that they are right).


# %%
def average_gradients(model, data):
    for name, parameter in model.named_parameters():
        group = data if is_expert(name) else None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


# %% tags=["prediction"]
predicted = {"experts": 2.0}


# %%
def gradients_of_means(rank, finish):
    mesh = init_device_mesh(hardware.device().type, (2, 2), mesh_dim_names=("data", "experts"))
    model = expert_parallel(new_model(), mesh.get_group("experts"))
    inputs, targets = batch_of(0, rank, ranks=4)
    (4 * share_of_loss(model(inputs), targets, ROWS * CONTEXT)).backward()  # mean of its own rows
    finish(model, mesh.get_group("data"))
    return {name: p.grad.cpu() for name, p in model.named_parameters()}


def norm_of_experts(gradients):
    return flat(g for name, g in gradients.items() if is_expert(name)).norm().item()


# %%
right = {name: gradient for name, (_, gradient) in train(new_model(), steps=1).items()}
averaged = {}
for held in launch(gradients_of_means, 4, average_gradients):
    averaged |= held
measured = {"experts": round(norm_of_experts(averaged) / norm_of_experts(right), 2)}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if only two ranks' tokens were in it: dispatch has brought those of two more.": {
            "experts": 1.0
        },
        "As if nothing were divided: the sum over the two copies is.": {"experts": 4.0},
    },
)

# %% [markdown]
# An expert's gradient holds the means of four ranks: two came by dispatch, two by the all-reduce. It was divided by the
# two copies, so it is too large by the size of an experts' group. `fully_shard` over `data` makes the same mistake
# unless somebody sets its factor.
#
# This happened in [DeepSpeed](https://github.com/deepspeedai/DeepSpeed/pull/6546), in [Megatron's
# FSDP](https://github.com/NVIDIA/Megatron-LM/pull/5956) and in a [copy of torchtitan's
# layer](https://github.com/pytorch/pytorch/issues/160285). In this last one the loss curves looked right all the
# same.
#
# Adam divides a constant factor away (chapter 3). SGD shows it, and so do a comparison of gradients and the norm that
# clipping uses, which is too large.

# %% [markdown]
# ### 11.5 Average the gradients on a grid (3 points)
#
# Repair `average_gradients` so that it works for real models. Each rank has called backward on the *mean* loss of its
# own rows, and all have equally many. A parameter of an expert has `experts` among the parts of its name, as in
# `blocks.1.feed_forward.experts.3.up.weight`; everything else is the same on every rank. Some parameters are frozen. An
# expert that nobody chose may have no gradient, here or on another rank.


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
# ## 6. Exercises
#
# | | points | where |
# |---|---|---|
# | 11.1 Route, with a bias that balances | 1 | section 3, after the load |
# | 11.4 The balance loss, over all ranks | 2 | section 3, after the balance loss |
# | 11.3 Dispatch and combine | 4 | section 4, after the exchange |
# | 11.5 Average the gradients on a grid | 3 | section 5, after the bug hunt |
#
# Put together, your answers train the model of section 4, the first three also where ranks have different numbers of
# tokens. 11.2 is in the further notebook.

# %% [markdown]
# ## 7. See it: links
#
# In a ring each rank sends to its neighbour. In an all-to-all it sends to everybody. The figure is calculated for
# experts on 2, 8 and 64 ranks, in machines of 8, all chosen equally often.

# %%
ch11.links([2, 8, 64])
plt.show()

# %% [markdown]
# *A rank hands the same number of bytes to the call in all three cases. Only their destinations differ.*
#
# So which dimension belongs inside a machine (chapter 7)? Ask who waits. The all-to-all stands in the way four times
# in each layer, because the next operation needs its result. The sum of the gradients can hide behind backward. So
# `experts` is the inner dimension and `data` the outer one. Where the experts do not fit into one machine, the router
# is limited to a few machines: in DeepSeek-V3 a token goes to at most 4 machines (sections 2.1.2 and 4.2,
# *node-limited routing*).

# %% [markdown]
# ## 8. On a cluster: the same grid under torchrun
#
# The script trains a small stack of MoE layers on the course's story. Its arguments are the sizes of
# `data` and `experts`.

# %%
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
for processes, sizes in ((4, ("2", "2")), (1, ("1", "1"))):
    print("data x experts =", " x ".join(sizes))
    print(torchrun(processes, script, *sizes), end="")

# %% [markdown]
# On a cluster these things change:
#
# * **Links.** With `experts` last in the mesh, and a size that divides the GPUs of a machine, every all-to-all stays
#   inside one.
# * **The host waits** in every layer, because `tolist()` needs the splits that the GPU computes. Kernels that send
#   from the GPU without asking the host (some of DeepEP's) avoid it. So does padding every queue to its capacity.
# * **Many small matrices.** On a GPU a grouped product is much faster than the loop over experts
#   ([Gale et al. 2022](https://arxiv.org/abs/2211.15841), section 4).
# * **Norms and checkpoints.** Each expert counts once, not once for each copy.

# %% [markdown]
# ## 9. Remember
#
# 1. A token meets k of E experts. Parameters grow with E. The work for a token and the bytes that travel do not.
# 2. A layer makes four exchanges of tokens in a step. The splits come from the router, and backward swaps them.
# 3. Today no piece is dropped. A bias or a loss balances the load. Both count the load of the whole batch: otherwise
#    the result depends on the number of ranks.
# 4. An expert's gradient already holds the tokens of its group. Add it up over the copies only. If losses are means,
#    divide it by the number of *all* ranks. Adam hides a wrong factor.
# 5. Every rank takes part in every exchange, also with nothing to send. `experts` is the dimension for the fast links.
#
# **Sources**
#
# * N. Shazeer et al., *Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer*, 2017: sections
#   2.1, 3.1 and 4.
# * W. Fedus et al., *Switch Transformers*, 2021: section 2.2.
# * A. Q. Jiang et al., *Mixtral of Experts*, 2024, [arXiv 2401.04088](https://arxiv.org/abs/2401.04088): table 1.
# * DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024: sections 2.1.2 and 4.2.
# * Qwen Team, *Qwen3 Technical Report*, 2025, [arXiv 2505.09388](https://arxiv.org/abs/2505.09388): section 2.
# * Z. Qiu et al., *Demons in the Detail: On Implementing Load Balancing Loss*, 2025.
# * T. Gale et al., *MegaBlocks*, 2022: section 4.
# * PyTorch: [`all_to_all_single`](https://docs.pytorch.org/docs/stable/distributed.html),
#   [`fully_shard`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
