# %% [markdown]
# # 10. Long context, further: by heads and in a ring at once
#
# The lesson cuts attention in a ring or by heads. Large runs do both: by heads inside a machine, where an all-to-all
# is quick, and in a ring between machines, which can hide its hops. This is **unified sequence parallelism** (USP,
# [Fang and Zhao 2024](https://arxiv.org/abs/2405.07719)). Megatron's name for it is `a2a+p2p`.
#
# It needs none of your answers from the lesson.

# %% tags=["nbval-ignore-output"]
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_exercises import check, hint
from course_utils import hardware
from course_utils.launch import launch
from course_utils.lesson.equality import check_equal, largest_difference
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace, on_a_ring

hardware.report()

# %% [markdown]
# ## 1. The factory: subjects inside, cards outside
#
# The buildings of a site first share the questions and cards out by subject. Each then has the questions and cards of
# its whole site, but only on its own subjects. From site to site the cards go round as before: each building sends
# its cards to the building with the same subjects on the next site.
#
# ## 2. The smallest real run: the lesson's two ways
#
# These are the lesson's functions. Only the hop differs: it is an autograd function whose backward sends gradients
# back. That is shorter than the lesson's backward by hand, but autograd keeps the keys of every hop until backward.


# %%
def attend(q, k, v, allowed=None):
    """The output (..., t, D) and the logsumexp of the scores (..., t), over these keys only."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def merged(one, other):
    """The result over two sets of keys, from the results (output, logsumexp) over each."""
    outs, lses = (torch.stack(both) for both in zip(one, other))
    total = lses.logsumexp(dim=0)
    weights = (lses - total).exp().unsqueeze(-1)
    return (weights * outs).sum(dim=0), total


# %%
def zigzag(rank, ranks):
    return [rank, 2 * ranks - 1 - rank]


def visible(mine, theirs):
    """Which of my two chunks sees which of theirs: (mine, theirs, is it the same chunk?)."""
    both = [(i, j) for i in range(2) for j in range(2)]
    return [(i, j, mine[i] == theirs[j]) for i, j in both if mine[i] >= theirs[j]]


def positions(layout, rank, ranks, length):
    """The places in the sequence of a rank's tokens, in the order in which it has them."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[number] for number in layout(rank, ranks)])


# %%
class Hop(torch.autograd.Function):
    """Sends a tensor to the next rank of the group; in backward, the gradient to the one before."""

    @staticmethod
    def forward(ctx, x, group, step=1):
        ctx.way_back = group, -step
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        arriving = torch.empty_like(x)
        to, source = (rank + step) % ranks, (rank - step) % ranks
        messages = [dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=to)]
        messages += [dist.P2POp(dist.irecv, arriving, group=group, group_peer=source)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return arriving

    @staticmethod
    def backward(ctx, gradient):
        return Hop.apply(gradient.contiguous(), *ctx.way_back), None, None


# %%
class Swap(torch.autograd.Function):
    """Cuts a tensor along one dimension, sends piece i to rank i, and joins along another what comes."""

    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.way_back = join, cut, group
        pieces = torch.cat(x.unsqueeze(0).chunk(dist.get_world_size(group), dim=cut + 1))
        arrived = torch.empty_like(pieces)
        dist.all_to_all_single(arrived, pieces, group=group)
        return torch.cat(arrived.unbind(), dim=join)

    @staticmethod
    def backward(ctx, gradient):
        return Swap.apply(gradient, *ctx.way_back), None, None, None


# %%
def triangle(size, device):
    """The causal mask of a chunk with itself."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril()


def in_chunks(x):
    """A rank's tokens (N, H, t, ...) as two chunks (2, N, H, t / 2, ...)."""
    return torch.stack(x.chunk(2, dim=2))


def ring(q, k, v, layout, group=None):
    """Attention of this rank's queries (N, H, t, D) to the keys of all ranks of the group."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    q, k, v = map(in_chunks, (q, k, v))
    mask, results = triangle(q.shape[3], q.device), {}
    for hop in range(ranks):
        if hop > 0:
            k, v = Hop.apply(torch.stack([k, v]), group)
        for i, j, same in visible(layout(rank, ranks), layout((rank - hop) % ranks, ranks)):
            part = attend(q[i], k[j], v[j], mask if same else None)
            results[i] = merged(results[i], part) if i in results else part
    return torch.cat([results[0][0], results[1][0]], dim=2)


# %% [markdown]
# ## 3. Predict, then measure: a mesh of ring x heads
#
# The ranks of a row share the heads out. After this swap a rank has all tokens of its row, but only some heads. Their
# keys and values go round the ring of its column. So a place in the zig-zag belongs to a whole row, whose ranks cut
# its tokens once more.


# %%
def by_both(q, k, v, layout, mesh):
    """Attention with `Swap` inside each row of the mesh, and a ring along its columns."""
    row, column = mesh.get_group("heads"), mesh.get_group("ring")
    q, k, v = (Swap.apply(part, 1, 2, row) for part in (q, k, v))
    return Swap.apply(ring(q, k, v, layout, column), 2, 1, row)


heads, tokens, width = 4, 64, 8  # a head is 8 wide
S = heads * tokens // 4 * width * 4  # the bytes of a rank's keys


def tokens_of(mesh):
    """The places of this rank's tokens in the sequence."""
    (rings, row), (place, piece) = mesh.shape, mesh.get_coordinate()
    return positions(zigzag, place, rings, tokens).chunk(row)[piece]


# %%
def outcomes(rank, shape, mine_of=tokens_of, difference=check_equal):
    """The differences of output, dQ, dK and dV from one process, and what leaves this rank in forward."""
    device = hardware.device().type
    mesh = init_device_mesh(device, shape, mesh_dim_names=("ring", "heads"))
    torch.manual_seed(0)
    whole = [x.to(device).requires_grad_() for x in torch.randn(3, 1, heads, tokens, width)]
    expected, _ = attend(*whole, triangle(tokens, device))
    expected.sin().sum().backward()
    mine = mine_of(mesh)
    parts = [x.detach()[:, :, mine].requires_grad_() for x in whole]
    with Trace() as trace:
        out = by_both(*parts, zigzag, mesh)
    out.sin().sum().backward()
    both = zip((expected, *(x.grad for x in whole)), (out, *(x.grad for x in parts)))
    sent = round(sum(on_a_ring(call)[1] for call in trace.record().calls))
    return [difference(a[:, :, mine], [b]) for a, b in both], sent


# %% [markdown]
# **Predict** what leaves each of 2 x 2 ranks in forward, in multiples of $S$, the bytes of its own keys. For the heads,
# each of $u$ ranks swaps four tensors, of which a $u$-th part stays with it. In a ring of $r$, keys and values make
# $r - 1$ hops.

# %% tags=["prediction"]
u, r = 2, 2
predicted = {"S in forward": 4 * (u - 1) / u + 2 * (r - 1)}

# %%
for shape in ((4, 1), (1, 4), (2, 2)):
    found = launch(outcomes, 4, shape)
    worst = max(difference for differences, _ in found for difference in differences)
    print(f"ring x heads = {shape}: {found[0][1] / S:g} S leave a rank, largest difference {worst}")

# %%
compare(
    predicted,
    {"S in forward": found[0][1] / S},
    likely={
        "The swaps alone: keys and values also make a hop.": {"S in forward": 2.0},
        "As if a rank had twice the bytes after the swap: it has half of the heads.": {
            "S in forward": 6.0
        },
    },
)

# %% [markdown]
# Four ranks in a ring alone send 6 S, by heads alone 3 S, and together 4 S. Of the 4 S only the 2 S of the hops leave
# the machine, and they can hide behind computing. The number of heads limits the row (chapter 10), not the whole
# group.
#
# ## 5. Break it: a zig-zag of single ranks
#
# What if each of the four ranks takes its own place in a zig-zag of four, as the lesson's ring does?


# %%
def of_single_ranks(mesh):
    return positions(zigzag, dist.get_rank(), dist.get_world_size(), tokens)


wrong = launch(outcomes, 4, (2, 2), of_single_ranks, largest_difference)
names = ("output", "dQ", "dK", "dV")
for name, of_ranks in zip(names, zip(*(differences for differences, _ in wrong))):
    print(f"{name:6}  largest difference from one process: {max(of_ranks)}")

# %% [markdown]
# All shapes fit. But after the swap a rank of the first row has chunks 0, 7, 1 and 6 of eight, in this order, and the
# ring's mask takes them for the first and the last quarter, each in its order. So tokens see some that come after
# them.
#
# ## 6. Exercise: a rank's share of the batch
#
# ### 10.6 Tokens, labels and positions of a rank (2 points)
#
# A language model learns to name the next token. Where the sequence is cut, the token after a chunk is on another
# rank, so a model that shifts the labels itself has a wrong one at the end of every chunk, or none, and nothing
# fails. The same holds for positions: a rank that counts from 0 makes the rotary embeddings of other positions. So
# tokens, labels and positions are cut together, before the model.


# %% nbgrader={"grade_id": "10.6", "solution": true}
def rank_batch(
    ids: torch.Tensor, mesh: tuple[int, int], place: int, piece: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns tokens (N, t), labels (N, t) and positions (t,) of one rank, all int64.

    `ids` (N, T) are the whole sequences, and `mesh` is (ring, heads): the rank has coordinate `place`
    along the ring and `piece` along the heads, and t = T / (ring * heads) tokens, dealt out as in
    section 3. The label of a token is the one that comes after it in the whole sequence; the last
    token of each sequence has -100, which `cross_entropy` leaves out. The position is the place in
    the whole sequence, from 0. T is a multiple of 2 * ring * heads, and `ids` is not changed.
    """
    ### BEGIN SOLUTION
    own = positions(zigzag, place, mesh[0], ids.shape[1]).chunk(mesh[1])[piece]
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    return ids[:, own], labels[:, own], own
    ### END SOLUTION


# %% nbgrader={"grade_id": "10.6-check", "grade": true, "points": 2, "locked": true}
check("10.6", rank_batch)

# %% [markdown]
# The mean of the loss is over all tokens that count, and the rank with the end of the sequences has one fewer in
# each. Sum the losses, all-reduce sum and number together, and divide after that, as for uneven batches in chapter 3.
#
# ## 9. Remember
#
# 1. Both cuts work at once: by heads inside a machine, and in a ring between machines.
# 2. A row of ranks has one place in the zig-zag, and its ranks cut the row's tokens once more.
# 3. Labels are shifted before the sequence is cut, and positions are those of the whole sequence.
