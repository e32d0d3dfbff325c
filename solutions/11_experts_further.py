# %% [markdown]
# # 11. Experts, further: capacity, queues and dropped tokens
#
# The models of the lesson drop no token. From 2020 to about 2022 most did, and older code and papers are full of it:
# an expert takes a fixed number of pieces and leaves the rest. This notebook shows what that costs, and how queues
# are counted over several ranks.
#
# It needs none of your answers from the lesson.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import one_hot

from course_exercises import check, hint
from course_utils import hardware
from course_utils.figures import ch11
from course_utils.launch import launch
from course_utils.lesson import explore
from course_utils.lesson.equality import check_equal, largest_difference
from course_utils.lesson.models import FeedForward
from course_utils.lesson.predictions import compare

hardware.report()

# %% [markdown]
# ## 1. The factory: a queue with a fixed number of places
#
# Each specialist has a fixed number of places for parts that wait. A part that finds no place goes past this
# specialist without being worked on. All queues have the same length, nobody waits long, and some parts are not
# finished.
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | places in a queue | **capacity** | how many pieces an expert takes in a step |
# | a part that goes past | **dropped** piece | its expert adds nothing to the token |
#
# ## 2. The smallest real run: the lesson's router
#
# As in the lesson, a router that has learned nothing routes 96 tokens.


# %%
def best_experts(logits, k):
    """The k most probable experts of each token, and their weights, which add up to 1: (T, k)."""
    best = logits.softmax(-1).topk(k)
    return best.indices, best.values / best.values.sum(-1, keepdim=True)


W, E, K = 24, 8, 2  # width, experts, experts of a token
torch.manual_seed(0)
router = nn.Linear(W, E, bias=False)
x = torch.randn(96, W) + torch.randn(W)  # tokens of a text have something in common
choices, weights = best_experts(router(x), K)
load = choices.flatten().bincount(minlength=E).tolist()
print("pieces of each expert:", load)

# %% [markdown]
# ## 3. Predict, then measure: what a capacity drops
#
# Compilers and TPUs want tensors of a fixed size. So systems fixed the capacity ([Lepikhin et al.
# 2020](https://arxiv.org/abs/2006.16668), section 2.2). With a **capacity factor** f it is
#
# $$C = \lceil f \cdot T k / E \rceil$$
#
# of the $Tk$ pieces. If all pieces of a token are dropped, only its residual connection is left.


# %%
def fits(choices, experts, capacity_factor):
    """Which pieces find a place, (T, k); tokens join the queues of their experts in their order."""
    joins = one_hot(choices.flatten(), experts)  # (T k, E)
    place = (joins.cumsum(0) * joins).sum(1) - 1  # of each piece in its queue, from 0
    return (place < capacity_factor * choices.numel() / experts).view_as(choices)


# %% [markdown]
# **Predict** how many of the 192 pieces above are dropped with a capacity factor of 1. Each expert then has 24 places,
# so there are exactly as many places as pieces.

# %% tags=["prediction"]
predicted = {"dropped": sum(max(0, pieces - 24) for pieces in load)}

# %%
compare(
    predicted,
    {"dropped": (~fits(choices, E, 1.0)).sum().item()},
    likely={"As if a piece could take an empty place of another expert.": {"dropped": 0}},
)

# %%
ch11.queues(load, 24, "As many places as pieces, and yet many pieces are dropped")
plt.show()
for ranks in (1, 2, 4, 8):
    kept = torch.cat([fits(own, E, 1.25) for own in choices.chunk(ranks)])
    print(f"ranks: {ranks}, dropped with a factor of 1.25: {(~kept).sum().item()}")

# %% [markdown]
# *What is above the dashed line is dropped, and as many places stay empty elsewhere.* If each rank counts its own queues,
# the result depends on the number of ranks. Many systems accepted that to save a call (GShard's *local group dispatching*).
# Queues of the whole batch give what one process gives.

# %% [markdown]
# ### 11.2 Places in the queues, over all ranks (3 points)
#
# The queues are those of the whole batch. All pieces of rank 0 stand before those of rank 1, and so on; within a rank,
# tokens stand in their order. A rank could gather the choices of all ranks and call `fits`. But it is enough if each
# rank tells the others *one number for each expert*. Which number, and what do you add up? (The check counts what you
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
# ## 4. By hand, then with PyTorch: a layer with queues
#
# The layer is the lesson's without the shared expert, and a piece without a place goes to no expert: `kept` says
# which of this rank's pieces have one.


# %%
def run_experts(experts, pieces, chosen):
    """Sends each piece through the expert whose number it has chosen; returns the results."""
    order = chosen.argsort(stable=True)
    lengths = [(chosen == int(number)).sum().item() for number in experts]
    queues = pieces[order].split(lengths)
    results = [expert(queue) for expert, queue in zip(experts.values(), queues)]
    return torch.cat(results)[order.argsort()]


def through_queues(run, experts, tokens, chosen, kept):
    """What the experts add to this rank's tokens (T, W), of those pieces that have a place."""
    choices, weights = chosen
    token, which = kept.nonzero(as_tuple=True)
    results = run(experts, tokens[token], choices[token, which])
    return torch.zeros_like(tokens).index_add(0, token, weights[token, which, None] * results)


# %%
def layer_of_ranks(rank, factor, whole_batch):
    """This rank's tokens through the layer; the queues are those of the whole batch, or its own."""
    torch.manual_seed(1)
    experts = nn.ModuleDict({str(e): FeedForward(W) for e in range(E)}).to(hardware.device())
    tokens, *chosen = [
        part.chunk(dist.get_world_size())[rank].to(hardware.device())
        for part in (x, choices, weights)
    ]
    all_choices, before = chosen[0], 0
    if whole_batch:
        of_ranks = [torch.empty_like(chosen[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, chosen[0])
        all_choices, before = torch.cat(of_ranks), rank * len(tokens)
    kept = fits(all_choices, E, factor)[before:][: len(tokens)]
    with torch.no_grad():
        return through_queues(run_experts, experts, tokens, chosen, kept)


weights = weights.detach()
whole = launch(layer_of_ranks, 1, 1.0, True)[0]
together = torch.cat(launch(layer_of_ranks, 4, 1.0, True))
print("queues of the whole batch, largest difference:", check_equal(whole, [together]))

# %% [markdown]
# PyTorch has no layer with a capacity. Where an expert must take a fixed number of rows, pad each queue to it.
#
# ## 5. Break it: each rank counts its own queue
#
# This raises no error, but the result is no longer that of one process.

# %%
own = torch.cat(launch(layer_of_ranks, 4, 1.0, False))
print("queues of each rank, largest difference:", largest_difference(whole, [own]))
alike = (own - whole).abs().amax(1) < 1e-5
print(f"tokens with the result of one process: {alike.sum().item()} of {len(alike)}")

# %% [markdown]
# ## 6. Exercises
#
# | | points | where |
# |---|---|---|
# | 11.2 Places in the queues, over all ranks | 3 | section 3 |
#
# ## 7. See it: load and capacity
#
# In the explorer 1,024 tokens choose two experts each. `preference` is how much the router prefers the first experts
# to the last. Two things to try: set no preference and a capacity factor of 1, and chance alone drops something. With
# a preference of 0.7, which capacity factor drops nothing, and how many places are then empty?

# %%
explore.Explorer(
    ch11.load_and_capacity,
    experts=(2, 32, 8),
    preference=(0.0, 2.0, 0.5),
    capacity_factor=(0.5, 2.5, 1.25),
)

# %% [markdown]
# *At the start two experts get more pieces than they have places, and the last three leave more than half of their
# places empty.*
#
# ## 8. On a cluster
#
# * Queues of equal length need no exchange of counts, and the host need not wait for them. Kernels for decoding still
#   pad to a capacity for that reason.
# * A capacity in training changes the model: how many pieces are dropped depends on the batch, and on the number of ranks
#   if each counts its own.
#
# ## 9. Remember
#
# 1. As many places as pieces still drop pieces, unless the load is even.
# 2. To count the queues of all ranks, a rank needs one number for each expert from the ranks before it.
#
# **Sources**
#
# * D. Lepikhin et al., *GShard*, 2020, [arXiv 2006.16668](https://arxiv.org/abs/2006.16668): section 2.2, algorithm 1.
# * W. Fedus et al., *Switch Transformers*, 2021, [arXiv 2101.03961](https://arxiv.org/abs/2101.03961): section 2.2.
# * T. Gale et al., *MegaBlocks*, 2022, [arXiv 2211.15841](https://arxiv.org/abs/2211.15841): why queues need no limit.
