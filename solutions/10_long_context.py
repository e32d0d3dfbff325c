# %% [markdown]
# # 10. Long context: one sequence in several buildings
#
# Every chapter so far has cut a batch or a model. In attention, all tokens of a sequence were still on one rank. But
# twice as many tokens need at least twice the room for activations and four times the work in attention, and at some
# length they no longer fit. In **context parallelism** each rank has some tokens of every sequence, in every layer.
#
# Norms, MLPs and the output layer treat each token alone. Attention does not. You learn three ways to compute it,
# forward and backward, count what each one sends, and train a language model on cut sequences.

# %% tags=["nbval-ignore-output"]
from collections.abc import Iterator
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from course_exercises import check, hint
from course_utils import hardware
from course_utils.figures import ch10 as figures
from course_utils.launch import launch
from course_utils.lesson import explore, text
from course_utils.lesson.equality import check_equal, flat, largest_difference
from course_utils.lesson.models import LanguageModel
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace, largest_tensor, on_a_ring

hardware.report()

# %% [markdown]
# ## 1. The factory: questions stay, cards travel
#
# An order has so many parts that no building has room for all of them, so each building takes some. Nearly every
# station works on one part at a time and notices nothing. But one station compares each part with all parts before it,
# and most of these are in other buildings.
#
# So each part gets a question, and a card that describes it. The questions stay. The cards of a building go by truck
# to the next one, and then on to the one after that. Each building notes what its questions have found so far, and how
# well it fitted. When all cards have gone round, every question has its answer, and no building ever had to keep more
# than two sets of cards.

# %%
figures.buildings()
plt.show()

# %% [markdown]
# *In each round of trucks the cards go one building further.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | order with many parts | a sequence of $T$ tokens | one row of the batch; each of $n$ ranks has $t = T/n$ tokens of it |
# | questions | **queries** $Q$ | one for each token and head |
# | cards | **keys** $K$ and **values** $V$ | what a query is compared with, and what it collects |
# | cards that go round | **ring attention** | $n - 1$ hops to the next rank |
# | how well it fitted | **logsumexp** of the scores | one number for each query and head |

# %% [markdown]
# ## 2. The smallest real run: two ranks, one exchange
#
# A query's **scores** are its products with the keys, divided by the square root of the head's width. Their softmax
# gives weights, and the output is the sum of the values with these weights. `attend` computes that over *some* of the
# keys. It also returns the logsumexp: the logarithm of the sum of exponentials by which the softmax has divided. The
# mask `allowed` says which query may see which key.


# %%
def attend(q, k, v, allowed=None):
    """The output (..., t, D) and the logsumexp of the scores (..., t), over these keys only."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


q, v = torch.ones(1, 1), torch.tensor([[8.0], [4.0], [2.0], [0.0]])
k = torch.tensor([[3.0], [1.0], [1.0], [0.0]])  # the scores, too: the query is 1
for name, keys in {"keys 0 and 1": slice(0, 2), "keys 2 and 3": slice(2, 4)}.items():
    out, lse = attend(q, k[keys], v[keys])
    print(f"{name}: output {out.item():.1f}, sum of exponentials {lse.exp().item():.1f}")

# %% [markdown]
# **Predict** the output over all four keys from these two lines, to one decimal.

# %% tags=["prediction"]
predicted = {"output over all four keys": 6.7}

# %%
compare(
    predicted,
    {"output over all four keys": round(attend(q, k, v)[0].item(), 1)},
    likely={
        "The plain mean. The sum of the first half is six times as large, so its output counts "
        "six times as much.": {"output over all four keys": 4.5}
    },
)

# %% [markdown]
# Take two such results over different keys, $(o_a, \ell_a)$ and $(o_b, \ell_b)$. Each has divided by a sum of its own,
# $e^{\ell_a}$ or $e^{\ell_b}$. Undo that, add, and divide by the sum of both:
#
# $$o = \frac{e^{\ell_a} o_a + e^{\ell_b} o_b}{e^{\ell_a} + e^{\ell_b}}, \qquad
# \ell = \log\left(e^{\ell_a} + e^{\ell_b}\right).$$
#
# This is exact, and the result can be merged again, so attention can be computed in any number of pieces and in any
# order ([Milakov and Gimelshein 2018](https://arxiv.org/abs/1805.02867), section 3). Scores of trained models can
# reach the hundreds, and $e^{100}$ overflows in float32. So compute with differences: $e^{\ell_a - \ell}$ is at most
# 1.

# %% [markdown]
# ### 10.1 Merge two partial results (2 points)
#
# Write the formula as real scores need it: exact, stable, and right where one side, or both, has seen no key at all.
# Such a side has a logsumexp of minus infinity, and its output may be anything.


# %% nbgrader={"grade_id": "10.1", "solution": true}
def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output and logsumexp over the keys of both partial results.

    `out_a`, `out_b` (..., t, D) and `lse_a`, `lse_b` (..., t) come from attention over two disjoint sets
    of keys. Logsumexps may be in the thousands, or minus infinity for a query that has seen none of a
    set's keys; its output there, which may be NaN, does not count. Where both are minus infinity, the
    output is 0. The arguments do not change.
    """
    ### BEGIN SOLUTION
    lse = torch.logaddexp(lse_a, lse_b)
    out = torch.zeros_like(out_a)
    for o, own in ((out_a, lse_a), (out_b, lse_b)):
        seen = own.isfinite()[..., None]
        share = torch.exp(own - lse)[..., None]
        out = out + torch.where(seen, share * o, 0.0)
    return out, lse
    ### END SOLUTION


# %% nbgrader={"grade_id": "10.1-check", "grade": true, "points": 2, "locked": true}
check("10.1", merge)

# %% [markdown]
# ### The same on two ranks
#
# The lesson's own `merged` is for queries that have seen a key on both sides. Two ranks have four of the eight tokens
# each. There is no mask yet. A rank attends to the keys of each rank, then merges.


# %%
def merged(one, other):
    """The result over two sets of keys, from the results (output, logsumexp) over each."""
    outs, lses = (torch.stack(both) for both in zip(one, other))
    total = lses.logsumexp(dim=0)
    weights = (lses - total).exp().unsqueeze(-1)
    return (weights * outs).sum(dim=0), total


# %%
torch.manual_seed(0)
q, k, v = torch.randn(3, 8, 4)


def half_the_tokens_each(rank):
    """The output of this rank's four queries, over all eight keys."""
    own_q, own_k, own_v = (part.chunk(2)[rank].to(hardware.device()) for part in (q, k, v))
    gathered_parts = [torch.empty(2, 4, 4, device=own_q.device) for _ in range(2)]
    dist.all_gather(gathered_parts, torch.stack([own_k, own_v]))
    out, _ = merged(*(attend(own_q, *keys_and_values) for keys_and_values in gathered_parts))
    return out.cpu()


whole, _ = attend(q, k, v)
halves = torch.cat(launch(half_the_tokens_each, 2))
print("largest difference from one process:", check_equal(whole, [halves]))

# %% [markdown]
# ## 3. Predict, then measure: an unfair mask, and what travels
#
# ### Who has work under a causal mask?
#
# In a language model a token sees itself and the tokens before it: a **causal mask**. Cut the sequence into $2n$
# **chunks** and give rank $r$ the chunks $2r$ and $2r + 1$, as one cuts a text from front to back. A query in chunk
# $i$ sees all keys of the chunks before it and, on average, half of those in its own.
#
# **Predict** for 4 ranks: how many times the first rank's work does the last rank do? Count pairs of chunks. A chunk
# with itself is half a pair.

# %% tags=["prediction"]
predicted = {"last rank's work, times the first's": 7.0}

# %%
n = 4


def blocks(rank, ranks):
    """The numbers of this rank's two chunks."""
    return [2 * rank, 2 * rank + 1]


def visible(mine, theirs):
    """Which of my two chunks sees which of theirs: (mine, theirs, is it the same chunk?)."""
    both = [(i, j) for i in range(2) for j in range(2)]
    return [(i, j, mine[i] == theirs[j]) for i, j in both if mine[i] >= theirs[j]]


def pairs(rank, layout):
    """The pairs of chunks that one of 4 ranks computes; a chunk with itself is half a pair."""
    found = [pair for other in range(n) for pair in visible(layout(rank, n), layout(other, n))]
    return sum(0.5 if same else 1 for *_, same in found)


measured = {"last rank's work, times the first's": pairs(3, blocks) / pairs(0, blocks)}

# %%
compare(
    predicted,
    measured,
    likely={
        "All ranks have equally many tokens, but the last ones are compared with more.": {
            "last rank's work, times the first's": 1.0
        },
        "Half of a chunk's pair with itself is masked.": {
            "last rank's work, times the first's": 5.0
        },
    },
)

# %%
figures.shares(n)
plt.show()

# %% [markdown]
# *Left, all ranks wait for the last one. Right, each has one chunk from the front and one from the back.*
#
# The cut at the right is the **zig-zag**: rank $r$ has chunk $r$ and its mirror image, chunk $2n - 1 - r$ ([Zhu
# 2024](https://github.com/zhuzilin/ring-flash-attention); PyTorch says *head-tail*). With the keys of each other
# rank, a rank then computes two pairs of chunks, so all ranks have the same work at every moment. *Striped
# attention*, which deals out single tokens, is almost as fair ([Brandon et al.
# 2023](https://arxiv.org/abs/2311.09431)).


# %%
def zigzag(rank, ranks):
    return [rank, 2 * ranks - 1 - rank]


# %% [markdown]
# ### 10.2 The tokens of a rank in a zig-zag, of packed documents (1 point)
#
# Several documents are often packed into one sequence, one after another. No query sees another document, so a
# zig-zag over all of them would not share the work out evenly: each document needs its own. Cut each into $2n$
# chunks. Rank $r$ gets the $r$-th from the front and the $r$-th from the back.


# %% nbgrader={"grade_id": "10.2", "solution": true}
def zigzag_indices(lengths: list[int], ranks: int, rank: int) -> Tensor:
    """Returns the places in the sequence, int64 in ascending order, of the tokens that `rank` has.

    The sequence has documents of `lengths` tokens, one after another. Of each document the rank has
    chunks `rank` and `2 * ranks - 1 - rank` of `2 * ranks` equal chunks. Raises ValueError, naming the
    length and `2 * ranks`, where that does not divide a length.
    """
    ### BEGIN SOLUTION
    own, start = [], 0
    for length in lengths:
        if length % (2 * ranks) != 0:
            raise ValueError(f"{length} tokens do not divide into {2 * ranks} chunks.")
        pieces = torch.arange(start, start + length).view(2 * ranks, -1)
        own.append(pieces[[rank, -1 - rank]].flatten())
        start += length
    return torch.cat(own)
    ### END SOLUTION


# %% nbgrader={"grade_id": "10.2-check", "grade": true, "points": 1, "locked": true}
check("10.2", zigzag_indices)

# %% [markdown]
# ### Ring attention, forward
#
# In **ring attention** ([Liu et al. 2023](https://arxiv.org/abs/2310.01889), section 3) queries stay, and keys and
# values go to the next rank, $n - 1$ times. After each of these hops a rank attends to what has come and merges. It
# leaves out the pairs of chunks that the mask hides. It begins with its own keys, so every query has seen at least
# itself.
#
# If all ranks send first and none receives, they can wait for each other for ever (chapter 5). `batch_isend_irecv`
# starts both together.


# %%
def pass_on(*tensors, group=None):
    """Sends tensors to the next rank of the group, and returns those of the rank before."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    leaving = [tensor.contiguous() for tensor in tensors]
    arriving = [torch.empty_like(tensor) for tensor in leaving]
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    messages = [dist.P2POp(dist.isend, t, group=group, group_peer=after) for t in leaving]
    messages += [dist.P2POp(dist.irecv, t, group=group, group_peer=before) for t in arriving]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return arriving


# %%
def triangle(size, device):
    """The causal mask of a chunk with itself."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril()


def in_chunks(x):
    """A rank's tokens (N, H, t, ...) as two chunks (2, N, H, t / 2, ...)."""
    return torch.stack(x.chunk(2, dim=2))


def ring_forward(q, k, v, layout, group=None):
    """Output and logsumexp of this rank's queries (N, H, t, D), over the keys of all ranks."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    q, k, v = map(in_chunks, (q, k, v))
    mask, results = triangle(q.shape[3], q.device), {}
    for hop in range(ranks):
        if hop > 0:
            k, v = pass_on(k, v, group=group)
        for i, j, same in visible(layout(rank, ranks), layout((rank - hop) % ranks, ranks)):
            part = attend(q[i], k[j], v[j], mask if same else None)
            results[i] = merged(results[i], part) if i in results else part
    return [torch.cat(halves, dim=2) for halves in zip(results[0], results[1])]


# %% [markdown]
# ### 10.3 Ring attention, forward, that hides its hops (3 points)
#
# Write this ring for the zig-zag alone. There it has a simple form. Seen from rank $r$, the keys of a rank $j$ fall
# into three cases: $j = r$, with a mask; $j < r$, where both of your chunks see its first chunk and none its second;
# and $j > r$, where your second chunk sees both of its chunks, and your first none.
#
# Your ring also computes while keys and values travel: `pass_on` only waits for them. Start a hop, attend to the keys
# that are here, and only then wait for the next ones.


# %% nbgrader={"grade_id": "10.3", "solution": true}
def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns the output (N, H, t, D) of this rank's queries under the causal mask of the sequence.

    q, k, v (N, H, t, D) are this rank's t = T / n tokens in zig-zag, as in 10.2; t is even. Keys and values
    go round the ring in n - 1 hops, and a rank sends nothing else. Each hop is under way while the
    rank attends to the keys that it has. No rank gathers all keys, and no tensor of scores is larger
    than (N, H, t, t). Whole pairs of chunks that the mask leaves out are not computed: after the
    rank's own, 2 pairs in each hop. The arguments do not change. All ranks are in the default group.
    """
    ### BEGIN SOLUTION
    me, n, half = dist.get_rank(), dist.get_world_size(), q.shape[2] // 2

    def come_by(kv: Tensor) -> Iterator[Tensor]:
        """The keys and values of one rank after the other; the next ones are under way meanwhile."""
        for _ in range(1, n):
            coming = torch.empty_like(kv)
            send = dist.P2POp(dist.isend, kv, (me + 1) % n)
            works = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, coming, (me - 1) % n)])
            yield kv
            for work in works:
                work.wait()
            kv = coming
        yield kv

    place = torch.arange(q.shape[2], device=q.device)  # ascending, so the mask is a triangle
    for hop, kv in enumerate(come_by(torch.stack([k, v]))):
        if hop == 0:
            out, lse = attend(q, *kv, place[:, None] >= place)
        elif hop <= me:  # from a rank before me
            out, lse = merged((out, lse), attend(q, *kv[:, :, :, :half]))
        else:
            seen = merged((out[:, :, half:], lse[:, :, half:]), attend(q[:, :, half:], *kv))
            out = torch.cat([out[:, :, :half], seen[0]], dim=2)
            lse = torch.cat([lse[:, :, :half], seen[1]], dim=2)
    return out
    ### END SOLUTION


# %% nbgrader={"grade_id": "10.3-check", "grade": true, "points": 3, "locked": true}
check("10.3", ring_attention)

# %% [markdown]
# ### Two rivals: all keys at once, or all tokens of some heads
#
# * **All-gather.** Each rank gets all keys and values at once, as in Llama 3 ([Llama Team
#   2024](https://arxiv.org/abs/2407.21783), section 3.3.2). The queries of all ranks have used a rank's keys, so in
#   backward the gradient of these keys is a sum over the ranks: a reduce-scatter.
# * **By heads.** Each rank gets *all tokens of some heads*. An **all-to-all**, in which every rank sends a piece to
#   every other rank, turns $t$ tokens of all heads into $T$ tokens of $H/n$ heads: for queries, for keys, for values,
#   and the other way for the outputs. This is **Ulysses** ([Jacobs et al. 2023](https://arxiv.org/abs/2309.14509),
#   section 3).
#
# Now tokens lie rank by rank, not in the order of the sequence. So the mask comes from their `positions`: a query sees
# the keys that stand no later than itself in the sequence.


# %%
def positions(layout, rank, ranks, length):
    """The places in the sequence of a rank's tokens, in the order in which it has them."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[number] for number in layout(rank, ranks)])


def mask_for(mine, layout, ranks, length):
    """Which of the tokens `mine` may see which of all tokens, these rank by rank."""
    theirs = torch.cat([positions(layout, r, ranks, length) for r in range(ranks)])
    return (mine.unsqueeze(1) >= theirs).to(hardware.device())


# %%
class GatherTokens(torch.autograd.Function):
    """All tokens from each rank's own, (N, H, t, D) to (N, H, T, D); backward sums and cuts."""

    @staticmethod
    def forward(ctx, own, group):
        ctx.group = group
        pieces = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, own, group=group)
        return torch.cat(pieces, dim=2)

    @staticmethod
    def backward(ctx, gradient):
        pieces = gradient.chunk(dist.get_world_size(ctx.group), dim=2)
        mine = torch.empty_like(pieces[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter(mine, [piece.contiguous() for piece in pieces], group=ctx.group)
        return mine, None


def gathered(q, k, v, layout, group=None):
    """Attention with all keys and values on every rank."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    k, v = (GatherTokens.apply(own.contiguous(), group) for own in (k, v))
    mine = positions(layout, rank, ranks, k.shape[2])
    return attend(q, k, v, mask_for(mine, layout, ranks, k.shape[2]))[0]


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


def by_heads(q, k, v, layout, group=None):
    """Attention with all tokens of some heads on every rank."""
    ranks, length = dist.get_world_size(group), q.shape[2] * dist.get_world_size(group)
    q, k, v = (Swap.apply(part, 1, 2, group) for part in (q, k, v))
    places = torch.cat([positions(layout, r, ranks, length) for r in range(ranks)])
    out, _ = attend(q, k, v, mask_for(places, layout, ranks, length))
    return Swap.apply(out, 2, 1, group)


# %% [markdown]
# ### 10.5 Heads for sequence, with grouped heads (2 points)
#
# Improve the first step of Ulysses: from some tokens of all heads to all tokens of some heads. `by_heads` makes three
# all-to-alls, for queries, keys and values. One is enough. Besides, today's models have fewer heads of keys and
# values than of queries (**grouped-query attention**), often fewer than there are ranks. Then a head is sent to each
# rank whose queries it serves. You may use `Swap`.


# %% nbgrader={"grade_id": "10.5", "solution": true}
def heads_for_sequence(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns all tokens of this rank's heads, as q, k and v (N, heads of this rank, T, D).

    q (N, H, T / n, D), k and v (N, G, T / n, D) are this rank's tokens, the r-th of n equal stretches.
    Each head of k and v serves H / G heads of q that lie together. Rank r gets the r-th of n equal groups
    of q's heads, and of k and v the heads that serve these: the r-th of n groups or, where G < n, one
    head, which goes to n / G ranks. Raises ValueError, naming both numbers, where n does not divide H, or
    where neither of n and G divides the other.

    Backward gives each rank the gradients of its own q, k and v. One all-to-all in forward, one in
    backward, of no more heads than the ranks need; the arguments do not change.
    """
    ### BEGIN SOLUTION
    n, shared = dist.get_world_size(), k.shape[1]
    if q.shape[1] % n:
        raise ValueError(f"{q.shape[1]} heads of queries do not divide by {n} ranks.")
    if shared % n and n % shared:
        raise ValueError(f"{shared} heads of keys and {n} ranks: neither divides the other.")
    copies = max(n // shared, 1)  # autograd adds up their gradients
    wholes = q, k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
    groups = [x.chunk(n, dim=1) for x in wholes]
    leaving = torch.cat([part for of_rank in zip(*groups) for part in of_rank], dim=1)
    return Swap.apply(leaving, 1, 2, None).split([part[0].shape[1] for part in groups], dim=1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "10.5-check", "grade": true, "points": 2, "locked": true}
check("10.5", heads_for_sequence)

# %% [markdown]
# ### What leaves a rank, and what it holds
#
# Call $S$ the bytes of a rank's keys. Its values, queries and outputs have as many. If the all-gather runs on a ring,
# every rank sends all keys and values but those of the next rank, $2S(n-1)$ bytes.
#
# **Predict** what leaves each of 4 ranks in forward, compared with that (1 means as much). In an all-to-all a rank
# keeps one piece of $n$, and sends each other piece once.

# %% tags=["prediction"]
predicted = {"ring": 1.0, "by heads": 0.5}

# %%
heads, tokens, width = 4, 256, 8  # a head is 8 wide
S = heads * tokens // n * width * 4


def leaving(record):
    """What a rank sends, of all that it hands over (chapter 3)."""
    return round(sum(on_a_ring(call)[1] for call in record.calls))


def own_part(rank, ranks=n, layout=zigzag, grad=False):
    """This rank's queries, keys and values, and their places in the sequence."""
    torch.manual_seed(0)
    whole = torch.randn(3, 1, heads, tokens, width)
    mine = positions(layout, rank, ranks, tokens)
    return [part.to(hardware.device()).requires_grad_(grad) for part in whole[:, :, :, mine]], mine


def bytes_and_scores(rank, ways):
    """What leaves this rank in forward, and the bytes of the largest tensor that it makes."""
    (q, k, v), _ = own_part(rank)
    results = {}
    for name, attention in ways.items():
        with Trace() as trace, largest_tensor() as largest:
            attention(q, k, v, zigzag)
        results[name] = leaving(trace.record()), largest.bytes
    return results


# %%
forward_ways = {"ring": ring_forward, "all-gather": gathered, "by heads": by_heads}
in_forward = launch(bytes_and_scores, n, forward_ways)[0]
sent = {name: count for name, (count, _) in in_forward.items()}
measured = {name: sent[name] / sent["all-gather"] for name in ("ring", "by heads")}

# %%
compare(
    predicted,
    measured,
    likely={
        "The keys and values of all ranks pass through every rank in a ring, too.": {"ring": 0.33},
        "Queries have to travel too, and outputs back.": {"by heads": 0.25},
        "Four tensors in place of two, but of each a rank sends only three quarters.": {
            "by heads": 2.0
        },
    },
)

# %% [markdown]
# The ring sends what the all-gather sends, but in pieces. So it saves memory, not bytes, and it can save time, because
# the next keys can travel while a rank computes (exercise 10.3). By heads, $4S(n-1)/n$ bytes leave a rank. They become
# *fewer* with more ranks, since $S$ is the $n$-th part of all keys.
#
# ### The scores that are never made
#
# Attention over $T$ tokens has $H \cdot T^2$ scores. For 131,072 tokens and 32 heads they take 2 TiB in float32, in
# each layer. Here one process would hold 1,048,576 bytes of them. With an all-gather one of 4 ranks holds a quarter:
# it has a quarter of the queries. **Predict** the bytes of the largest tensor of scores in our ring.

# %% tags=["prediction"]
predicted = {"ring": 16_384}

# %%
compare(
    predicted,
    {"ring": in_forward["ring"][1]},
    likely={
        "A rank of the ring has a quarter of the queries, and attends to a quarter of the keys at a "
        "time.": {"ring": 1_048_576 // 4},
        "Our ring attends chunk by chunk, and a chunk is half of a rank's tokens.": {
            "ring": 1_048_576 // 16
        },
    },
)

# %% [markdown]
# The ring divides these bytes by $4n^2$, the others by $n$ (by heads, a rank has $H/n$ heads). A **fused kernel**
# such as FlashAttention never writes the scores to memory: it does inside a GPU, tile by tile, what the ring does
# between GPUs. Then $K$ and $V$ are what remains: all of them with an all-gather, a part in the ring.

# %% [markdown]
# ## 4. By hand, then with PyTorch: backward, a model, and a plan
#
# ### Backward by hand
#
# Autograd knows nothing of messages, so the ring needs a backward of its own. Forward has kept only each rank's own
# tensors. **Predict** what leaves a rank of the ring in backward, compared with forward.

# %% tags=["prediction"]
predicted = {"backward, times forward": 2.0}

# %% [markdown]
# Take one pair of chunks, with weights $P$, the gradient $dO$ of the output, and $\delta$, the sum over the width of
# $dO \circ O$. $D$ is the width of a head, $dS$ the gradient of the scores (Dao et al. 2022, appendix B.2):
#
# $$dV = P^\top dO, \qquad dS = P \circ (dO\, V^\top - \delta), \qquad
# dQ = dS\, K / \sqrt{D}, \qquad dK = dS^\top Q / \sqrt{D}.$$
#
# $P$ is computed again, with the *final* logsumexp, so it is what it would be over all keys. Then the pairs need no
# merge: their gradients add up.


# %%
def attend_backward(q, k, v, allowed, lse, d_out, delta):
    """The gradients of q, k and v that this pair of chunks gives."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    weights = (scores - lse.unsqueeze(-1)).exp()
    if allowed is not None:
        weights = weights * allowed
    d_scores = weights * (d_out @ v.mT - delta.unsqueeze(-1)) / q.shape[-1] ** 0.5
    return d_scores @ k, d_scores.mT @ q, weights.mT @ d_out


# %% [markdown]
# $dQ$ stays with the queries. $dK$ and $dV$ arise on every rank that the keys visit, and have to come home. So they
# travel behind their keys: each rank adds its part to what has come, and passes the sum on.

# %%
figures.travels(n)
plt.show()

# %% [markdown]
# *Above, whose keys and values a rank has at each hop; below, framed, the gradient to which it adds its part.* The
# gradient of rank 0 begins on rank 1 and is home after $n - 1$ hops. There rank 0 adds its own part.


# %%
def add_and_pass(travelling, found, group):
    """Adds this rank's part to the gradients that are here, then sends them behind their keys."""
    return pass_on(*(a + b for a, b in zip(travelling, found)), group=group)


def ring_backward(q, k, v, out, lse, d_out, layout, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    delta = (d_out * out).sum(dim=-1)
    q, k, v, lse, d_out, delta = map(in_chunks, (q, k, v, lse, d_out, delta))
    mask, d_q = triangle(q.shape[3], q.device), torch.zeros_like(q)
    travelling = torch.zeros_like(k), torch.zeros_like(v)
    for hop in range(ranks):
        if hop > 0:
            k, v = pass_on(k, v, group=group)
        d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
        for i, j, same in visible(layout(rank, ranks), layout((rank - hop) % ranks, ranks)):
            queries = lse[i], d_out[i], delta[i]
            parts = attend_backward(q[i], k[j], v[j], mask if same else None, *queries)
            for whole, part in zip((d_q[i], d_k[j], d_v[j]), parts):
                whole += part
        if hop == 0:
            at_home = d_k, d_v
        else:
            travelling = add_and_pass(travelling, (d_k, d_v), group)
    d_k, d_v = (a + b for a, b in zip(at_home, travelling))
    return tuple(torch.cat(x.unbind(), dim=2) for x in (d_q, d_k, d_v))


# %%
class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, layout, group):
        out, lse = ring_forward(q, k, v, layout, group)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.place = layout, group
        return out

    @staticmethod
    def backward(ctx, d_out):
        return *ring_backward(*ctx.saved_tensors, d_out, *ctx.place), None, None


def ring(q, k, v, layout, group=None):
    """Attention of this rank's queries to the keys of all ranks of the group."""
    return Ring.apply(q, k, v, layout, group)


# %% [markdown]
# ### 10.4 Ring attention with its backward (4 points)
#
# Write your ring of 10.3 as an `autograd.Function`. Forward keeps what backward needs, but not the other ranks' keys
# and values: they come round a second time, and their gradients follow them home. The hops of keys and values are
# hidden in both passes. You may use `attend`, `merged`, `attend_backward` and `pass_on`.


# %% nbgrader={"grade_id": "10.4", "solution": true}
class RingAttention(torch.autograd.Function):
    """Called as `RingAttention.apply(q, k, v)`; the arguments and the result are those of 10.3."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns the output (N, H, t, D), and keeps this rank's own tensors for backward.

        Each hop of keys and values is under way while the rank attends to those that it has.
        """
        ### BEGIN SOLUTION
        me, n, half = dist.get_rank(), dist.get_world_size(), q.shape[2] // 2

        def come_by(kv: Tensor) -> Iterator[Tensor]:
            for _ in range(1, n):
                coming = torch.empty_like(kv)
                send = dist.P2POp(dist.isend, kv, (me + 1) % n)
                works = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, coming, (me - 1) % n)])
                yield kv
                for work in works:
                    work.wait()
                kv = coming
            yield kv

        ctx.come_by = come_by
        front, back, both = slice(half), slice(half, None), slice(None)
        place = torch.arange(2 * half, device=q.device)
        ctx.cases = [(both, both, place[:, None] >= place)]  # my rows, their columns, the mask
        for hop in range(1, n):
            ctx.cases.append((both, front, None) if hop <= me else (back, both, None))
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
        for (rows, columns, seen), kv in zip(ctx.cases, come_by(torch.stack([k, v]))):
            new = attend(q[:, :, rows], *kv[:, :, :, columns], seen)
            old = out[:, :, rows], lse[:, :, rows]
            out[:, :, rows], lse[:, :, rows] = merged(old, new)
        ctx.save_for_backward(q, k, v, out, lse)
        return out
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and v, (N, H, t, D) each, from that of the output.

        A rank sends at most 4 (n - 1) times the bytes of k. Hops of keys and values are under way as in
        forward.
        """
        ### BEGIN SOLUTION
        q, k, v, out, lse = ctx.saved_tensors
        of_rows = lse, gradient, (gradient * out).sum(dim=-1)
        d_q, coming = torch.zeros_like(q), torch.zeros_like(torch.stack([k, v]))
        for hop, kv in enumerate(ctx.come_by(torch.stack([k, v]))):
            rows, columns, seen = ctx.cases[hop]
            theirs, found = kv[:, :, :, columns], torch.zeros_like(kv)
            parts = attend_backward(q[:, :, rows], *theirs, seen, *(x[:, :, rows] for x in of_rows))
            d_q[:, :, rows] += parts[0]
            found[:, :, :, columns] = torch.stack(parts[1:])
            if hop == 0:
                own = found  # added last, at home
            else:
                [coming] = pass_on(coming + found)
        return d_q, *(own + coming)
        ### END SOLUTION


# %% nbgrader={"grade_id": "10.4-check", "grade": true, "points": 4, "locked": true}
check("10.4", RingAttention)

# %% [markdown]
# ### Three ways against one process
#
# Now compare output, $dQ$, $dK$ and $dV$ of each way with those of one process, and count the bytes of backward.


# %%
def equality_and_bytes(rank, ways, difference=check_equal, **replaced):
    """For each way the differences of output, dQ, dK and dV, and what leaves this rank in backward."""
    globals().update(replaced)  # of this rank only: its process ends with the cell
    ranks, results = dist.get_world_size(), {}
    whole, everywhere = own_part(0, 1, blocks, grad=True)
    d_out = whole[0].detach().cos()  # any gradient of the output, the same on every rank
    expected, _ = attend(*whole, mask_for(everywhere, blocks, 1, tokens))
    expected.backward(d_out)
    for name, attention in ways.items():
        parts, mine = own_part(rank, ranks, zigzag, grad=True)
        out = attention(*parts, zigzag)
        with Trace() as trace:
            out.backward(d_out[:, :, mine])
        both = zip((expected, *(x.grad for x in whole)), (out, *(x.grad for x in parts)))
        results[name] = [difference(a[:, :, mine], [b]) for a, b in both], leaving(trace.record())
    return results


# %%
ways = {"ring": ring, "all-gather": gathered, "by heads": by_heads}
for ranks in (1, 2, n):
    results = launch(equality_and_bytes, ranks, ways)
    for name in ways:
        worst = max(difference for result in results for difference in result[name][0])
        print(f"ranks: {ranks}  {name:10}  largest difference from one process: {worst}")
in_backward = {name: count for name, (_, count) in results[0].items()}
measured = {"backward, times forward": in_backward["ring"] / sent["ring"]}

# %%
compare(
    predicted,
    measured,
    likely={
        "Keys and values go round again, and their gradients have to come home.": {
            "backward, times forward": 1.0
        }
    },
)

# %%
for name, count in sorted(in_backward.items()):
    shares = f"{sent[name] / S:g} S and {count / S:g} S"
    print(f"{name:10} sends {sent[name]} bytes in forward and {count} in backward: {shares}")

# %% [markdown]
# Which way should you take?
#
# | way | leaves a rank, both passes | holds at once | limit |
# |---|---|---|---|
# | all-gather | $4S(n-1)$ | $K$ and $V$ of all tokens, until backward | memory of $K$ and $V$ |
# | by heads | $8S(n-1)/n$ | all tokens of $H/n$ heads | $n$ must divide the heads of queries |
# | ring | $6S(n-1)$ | its own keys and values, and two more sets | each hop has to hide behind computing |
#
# With grouped-query attention there are few heads of keys, so the all-gather and the ring send less. By heads, if
# there are more ranks than heads of keys, several ranks get copies of one head (exercise 10.5). The ways can be
# combined: by heads inside a machine, a ring between machines (*USP*, in the further notebook). The computing of a
# hop grows with $t^2$ and its bytes with $t$, so above some length the hops cost no time (Liu et al. 2023, section
# 3).
#
# ### A language model on cut sequences
#
# Two parts of a model know where a token stands. The position embedding numbers tokens from 0 on: give it this rank's
# `positions`. And attention is replaced.


# %%
def attention_of_part(module, mix, x):
    """`Attention.forward` of models.py, with another way to bring tokens together."""
    parts = module.qkv(x).unflatten(2, (3, module.heads, module.head_width))
    q, k, v = parts.permute(2, 0, 3, 1, 4)
    return module.out(mix(q, k, v).transpose(1, 2).flatten(2))


def for_part(model, mine, mix):
    """Changes a language model in place: it takes the tokens `mine` of each window only."""
    model.position.register_forward_pre_hook(lambda module, inputs: (mine.to(hardware.device()),))
    for block in model.blocks:
        block.attention.forward = partial(attention_of_part, block.attention, mix)
    return model


# %% [markdown]
# The targets are the tokens shifted by one, and the next token may lie on another rank. So shift first, then cut
# tokens and targets with the *same* positions. All ranks have equally many tokens, so gradients are averaged as in
# chapter 3.

# %%
CONTEXT, WINDOWS, STEPS = 32, 8, 5


def new_model():
    torch.set_num_threads(1)  # so small a model loses time with more
    torch.manual_seed(0)
    model = LanguageModel(len(text.vocabulary()), width=32, heads=4, layers=2, context=CONTEXT)
    return model.to(hardware.device())


def train(model, part):
    """Trains on what `part` picks of each batch: this rank's rows and tokens."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        batch = text.windows(CONTEXT, WINDOWS, seed=step)
        inputs, targets = (part(x).to(hardware.device()) for x in batch)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        average(*(p.grad for p in model.parameters()))
        optimizer.step()
    return flat(model.parameters())


def average(*tensors):
    for tensor in tensors if dist.is_initialized() else ():
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


# %% [markdown]
# On a mesh of data x context, each context group runs its own ring. The gradient has terms from all ranks, so it is
# averaged over both dimensions.


# %%
def train_cut(rank, attention, data, context, places=positions):
    """The parameters after training on a mesh of data x context ranks."""
    names = ("data", "context")
    mesh = init_device_mesh(hardware.device().type, (data, context), mesh_dim_names=names)
    row, place = mesh.get_coordinate()
    mine = positions(zigzag, place, context, CONTEXT)
    mix = partial(attention, layout=zigzag, group=mesh.get_group("context"))
    model = for_part(new_model(), places(zigzag, place, context, CONTEXT), mix)
    return train(model, lambda x: x.chunk(data)[row][:, mine])


# %%
one_process = train(new_model(), lambda x: x)
for data, context, name in [(1, 4, "ring"), *((2, 2, name) for name in ways)]:
    trained = launch(train_cut, data * context, ways[name], data, context)
    difference = check_equal(one_process, trained)
    print(f"data {data} x context {context}, {name:10}  largest difference: {difference}")

# %% [markdown]
# ### With PyTorch: a plan
#
# PyTorch's context parallelism is experimental, with private names. A style for `parallelize_module` (chapter 6)
# wraps the module that attends; `_context_parallel_shard` cuts the tensors, by head and tail only with a load
# balancer. With `SDPA` it needs a kernel that knows cut sequences, as those for GPUs do. On CPUs the cell ends with
# *does not have a sharding strategy registered*.

# %% tags=["nbval-ignore-output"]
from torch.distributed.tensor.experimental import _attention as experimental
from torch.distributed.tensor.parallel import parallelize_module


class Causal(torch.nn.Module):
    def forward(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def with_pytorch(rank):
    """By how much this rank's output differs from one process; or the error."""
    torch.manual_seed(0)
    mesh = init_device_mesh(hardware.device().type, (2,))
    parts = [*torch.randn(3, 1, heads, 16, width).to(hardware.device())]
    *own, whole = experimental._context_parallel_shard(mesh, [*parts, Causal()(*parts)], [2] * 4)
    kind = experimental._ContextParallel.AttentionType.SDPA
    style = experimental._ContextParallel(seq_dim=2, attention_type=kind)
    experimental._enable_context_parallel_dispatcher()
    try:
        return largest_difference(whole, [parallelize_module(Causal(), mesh, style)(*own)])
    except RuntimeError as error:  # NotImplementedError is one, too
        return f"{type(error).__name__}: {error}"


print(launch(with_pytorch, 2)[0])

# %% [markdown]
# Older code has the context manager `context_parallel`, which replaces `scaled_dot_product_attention` inside
# `torch.nn.functional`. A script that has imported that function by name keeps the original: each rank attends to its
# own tokens only, without an error.

# %% [markdown]
# ## 5. Break it: two mistakes that run to the end
#
# Only a comparison with one process shows them.
#
# ### Gradients that come home late
#
# In backward a rank adds its part to the gradients that are here and *then* sends them. Below, the two steps are
# swapped: a rank sends first and then adds its part to what has come.
#
# **Predict** how many of the four results (output, $dQ$, $dK$, $dV$) are still right.

# %% tags=["prediction"]
predicted = {"results that are right": 2}


# %%
def pass_then_add(travelling, found, group):
    return [a + b for a, b in zip(pass_on(*travelling, group=group), found)]


runs = launch(equality_and_bytes, n, {"ring": ring}, largest_difference, add_and_pass=pass_then_add)
worst = [max(of_ranks) for of_ranks in zip(*(run["ring"][0] for run in runs))]
measured = {"results that are right": sum(difference <= 1e-5 for difference in worst)}

# %%
compare(
    predicted,
    measured,
    likely={
        "The gradient of the queries never travels.": {"results that are right": 1},
        "Forward has no gradients to pass on.": {"results that are right": 0},
    },
)

# %%
for name, difference in zip(("output", "dQ", "dK", "dV"), worst):
    print(f"{name:6}  largest difference from one process: {difference}")

# %% [markdown]
# At the end each gradient is one rank short of its home. Output and $dQ$ are right, so a test of the output alone
# passes. A comparison of gradients also led to a report of wrong $dQ$, $dK$ and $dV$ in Megatron-LM ([issue
# 1464](https://github.com/NVIDIA/Megatron-LM/issues/1464)). Compare all four.
#
# ### Bug hunt: two lines that look harmless
#
# Each rank runs these lines of a training script on its own tokens. What do they do to a zig-zag of two ranks? Find an
# answer before you run the cell.
#
# ```python
# hidden = embedding(tokens) + position(torch.arange(tokens.shape[1]))
# loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
# ```


# %%
wrong = launch(train_cut, 2, ring, 1, 2, lambda *_: torch.arange(CONTEXT // 2))
print("trained with these numbers, largest difference:", largest_difference(one_process, wrong))
for rank in range(2):
    mine = positions(zigzag, rank, 2, 8).tolist()
    print(f"rank {rank}: tokens {mine}, numbered {list(range(4))}, and next come {mine[1:]}")

# %% [markdown]
# Rank 0 gives token 6 the position 2, and teaches that after token 1 comes token 6. The model learns both. Make
# positions and labels from the whole sequence, then cut.

# %% [markdown]
# ## 6. Exercises
#
# | | points | where |
# |---|---|---|
# | 10.1 Merge two partial results | 2 | section 2 |
# | 10.2 The tokens of a rank in a zig-zag, of packed documents | 1 | section 3 |
# | 10.3 Ring attention, forward, that hides its hops | 3 | section 3 |
# | 10.5 Heads for sequence, with grouped heads | 2 | section 3 |
# | 10.4 Ring attention with its backward | 4 | section 4 |
#
# `hint("10.1")` gives the next hint for 10.1.

# %% [markdown]
# ## 7. See it: fair shares, bytes and scores
#
# Choose a cut, the ranks, and the tokens of each, for 32 heads of width 128 in 16 bits. With blocks, add ranks: the
# share of the time in which they compute falls towards a half. With the zig-zag it stays at 100 %. Double the tokens:
# the bytes double, and the scores grow fourfold.

# %%
explore.Explorer(
    figures.explored, layout=["blocks", "zig-zag"], ranks=(1, 8, 4), tokens=(1024, 16384, 4096)
)

# %% [markdown]
# *At the start, ranks compute for 57 % of the time. The ring sends as much as the all-gather, but its scores take
# far less room.* Computed with the formulas of section 3, not measured.

# %% [markdown]
# ## 8. On a cluster: documents, links and shards
#
# * **Several documents in one window.** The mask ends at their borders, and a cut by position alone is no longer fair.
#   PyTorch has a load balancer that deals out each document by itself.
# * **Where to place the group.** A ring's hop goes to a neighbour and can hide behind computing, so the group may
#   reach over several machines. An all-to-all talks to all ranks and should stay inside one.
# * **What stays.** Parameters, gradients and optimizer state are whole on every rank. FSDP shards them over all ranks
#   of data x context (chapter 8).

# %% [markdown]
# ## 9. Remember
#
# 1. Attention over some keys is an output and a logsumexp. Two of them merge exactly, in any order.
# 2. In a ring, queries stay and keys and values make $n - 1$ hops. Their gradients follow them home.
# 3. A causal mask makes a cut from front to back unfair. The zig-zag is fair.
# 4. Ring and all-gather send the same in forward, $2S(n-1)$. The ring saves memory. By heads the bytes shrink with
#    $n$, and the heads set the limit.
# 5. Tokens, positions and shifted labels are cut by the same list. Compare output, $dQ$, $dK$ *and* $dV$.
#
# **Sources**, beside those linked above
#
# * T. Dao et al., *FlashAttention*, 2022, [arXiv 2205.14135](https://arxiv.org/abs/2205.14135): section 3.1 tiles,
#   appendix B.2 backward.
# * PyTorch: [context parallel tutorial](https://docs.pytorch.org/tutorials/unstable/context_parallel.html).
