# %% [markdown]
# # 10. Long context: one document, several desks
#
# Every chapter so far has cut a batch or a model. Where the tokens of one document meet, in attention, they were
# always on one rank. That ends when the document becomes long: each token looks at all tokens before it, so twice the
# length means twice the activations and four times the work of attention. This chapter cuts the document
# itself. Each rank has some of the tokens, of every layer. That is **context parallelism**.
#
# Norms, MLPs, embedding and head work on each token alone, so they do not notice. Only attention does.
# At the end you have written attention over a cut sequence in three ways, forward and backward; you know
# what each sends, and why a fair cut is not from front to back. And a language model trained on four
# ranks, with cut sequences, has the parameters of one process.

# %% tags=["nbval-ignore-output"]
from collections.abc import Iterator

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor

from course_utils import hardware
from course_utils.figures import ch10 as figures
from course_utils.launch import launch
from course_utils.lesson.equality import equal

hardware.report()

# %% [markdown]
# ## 1. The factory: questions stay, pages travel
#
# A document has to be read that is too long for any desk. So it is cut, and each desk at a round table gets
# some of its pages. For each line of its own pages a desk has a question, and the answer may stand on any
# earlier page: on its own desk, or on another.
#
# Nobody can see all pages at once. So each desk keeps its questions, and passes its pages to the desk on the
# right. New pages come from the left. The desk notes for each question what it has found, and how well it
# fitted, and passes the pages on. When all pages have gone round, every question has its answer, and no desk
# has ever held more than two sets of pages.

# %%
figures.table()
plt.show()

# %% [markdown]
# *The questions stay at their desks; the pages go round the table, one desk at a time.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | document | a sequence of $T$ tokens | one row of the batch |
# | desk | **rank** | it has $t = T/n$ of the tokens, in every layer |
# | questions | **queries** $Q$ | one for each token, (heads, $t$, width of a head) |
# | pages | **keys** $K$ and **values** $V$ | what a query is compared with, and what it collects |
# | passing pages on | **ring attention** | $n - 1$ hops to the neighbour |
# | how well it fitted | **logsumexp** of the scores | one number for each query and head |

# %% [markdown]
# ## 2. The smallest real run: two ranks, one exchange
#
# A query's **scores** are its products with all keys, divided by the root of the head's width. The weights
# are the softmax of the scores, the output is the sum of the values with these weights. `attend` computes
# that over *some* keys, and returns a second number for each query, the logarithm of the sum of the
# exponentials that it has divided by. `allowed` is a mask: which query may see which key.


# %%
def weights_of(q, k, allowed=None):
    """Softmax weights (..., t, s) of queries (..., t, D) for keys (..., s, D), and the logsumexp."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    return (scores - lse.unsqueeze(-1)).exp(), lse


def attend(q, k, v, allowed=None):
    """The output (..., t, D) and the logsumexp of the scores (..., t), over these keys only."""
    weights, lse = weights_of(q, k, allowed)
    return weights @ v, lse


# %% [markdown]
# Take two such results over different keys, $(o_a, \ell_a)$ and $(o_b, \ell_b)$. What is the output over all
# the keys? Each has divided by its own sum, $e^{\ell_a}$ or $e^{\ell_b}$. Undo that, add, and divide by the
# sum of both:
#
# $$o = \frac{e^{\ell_a} o_a + e^{\ell_b} o_b}{e^{\ell_a} + e^{\ell_b}}, \qquad
# \ell = \log\left(e^{\ell_a} + e^{\ell_b}\right).$$
#
# That is no approximation, and the result can be merged again. It is why attention can be computed in any
# number of pieces, in any order (Milakov and Gimelshein 2018, section 3; FlashAttention does it with tiles
# inside a GPU). Scores of a trained model reach the hundreds, and $e^{100}$ overflows in float32. So compute
# with differences: $e^{\ell_a - \ell}$ is at most 1.


# %%
def merged(one, other):
    """The result over two sets of keys, from the results (out, lse) over each."""
    outs, lses = (torch.stack(both) for both in zip(one, other))
    total = lses.logsumexp(dim=0)
    shares = (lses - total).exp().unsqueeze(-1)
    return (shares * outs).sum(dim=0), total


q, v = torch.ones(1, 1), torch.tensor([[8.0], [4.0], [2.0], [0.0]])
k = torch.tensor([3.0, 1.0, 1.0, 0.0]).unsqueeze(1)  # the scores, since the query is 1
first, second = attend(q, k[:2], v[:2]), attend(q, k[2:], v[2:])
for name, result in {
    "keys 0 and 1": first,
    "keys 2 and 3": second,
    "the two merged": merged(first, second),
    "all four keys": attend(q, k, v),
}.items():
    print(f"{name:14}  output {result[0].item():.3f}, logsumexp {result[1].item():.3f}")

# %% [markdown]
# The first half counts for more, though both have two keys: its logsumexp is larger by 1.8, so its weight is
# six times as large. A plain mean of the two outputs would be wrong, and section 5 shows how far.
#
# Now on two ranks. Each has half of the tokens, and no mask yet. Each attends to its own keys, fetches the
# other's, attends to those, and merges.


# %%
def half_the_tokens_each(rank):
    torch.manual_seed(0)  # the same numbers on both ranks
    q, k, v = torch.randn(3, 8, 4).to(hardware.device())
    mine = slice(4 * rank, 4 * rank + 4)
    result = attend(q[mine], k[mine], v[mine])
    everyones = [torch.empty(2, 4, 4, device=q.device) for _ in range(2)]
    dist.all_gather(everyones, torch.stack([k[mine], v[mine]]))
    result = merged(result, attend(q[mine], *everyones[1 - rank]))
    whole, _ = attend(q, k, v)
    return equal(whole[mine], [result[0]])


launch(half_the_tokens_each, 2)

# %% [markdown]
# ## 3. Predict, then measure: an unfair mask, and what travels
#
# ### One hop
#
# In a ring each rank sends to the next and receives from the one before, in each hop. If all ranks send
# first and nobody receives, they can wait for each other for ever (chapter 5). `batch_isend_irecv` starts
# both together. Two tensors between the same ranks arrive in the order in which they left.


# %%
def pass_on(*tensors, group=None):
    """Hands tensors to the next rank of the group, and returns those of the rank before."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    leaving = [tensor.contiguous() for tensor in tensors]
    arriving = [torch.empty_like(tensor) for tensor in leaving]
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    messages = [dist.P2POp(dist.isend, t, group=group, group_peer=after) for t in leaving]
    messages += [dist.P2POp(dist.irecv, t, group=group, group_peer=before) for t in arriving]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return arriving


# %% [markdown]
# ### Who has work under a causal mask?
#
# In a language model a token sees itself and the tokens before it: a **causal mask**. Cut the sequence into
# $2n$ **chunks**, two for each rank. A query in chunk $i$ sees all of chunk $j$ if $j < i$, nothing of it if
# $j > i$, and a half if $i = j$. So chunk $i$ costs $i + \frac12$ pairs of chunks.
#
# **Predict** the pairs that each of 4 ranks computes, if rank $r$ has the chunks $2r$ and $2r + 1$, as one
# would cut a document from front to back. Then for the **zig-zag**: rank $r$ has chunk $r$ from the front and
# its mirror image, chunk $2n - 1 - r$, from the back. (Zhu 2024 calls it that; PyTorch says *head-tail*.)

# %% tags=["prediction"]
n = 4
predicted = {
    "blocks": [2 * r + 0.5 + 2 * r + 1 + 0.5 for r in range(n)],
    "zig-zag": [r + 0.5 + 2 * n - 1 - r + 0.5 for r in range(n)],
}


# %%
def blocks(rank, ranks):
    return [2 * rank, 2 * rank + 1]


def zigzag(rank, ranks):
    return [rank, 2 * ranks - 1 - rank]


def visible(mine, theirs):
    """Which of my two chunks sees which of theirs: (mine, theirs, on the diagonal?)."""
    places = [(i, j) for i in range(2) for j in range(2) if mine[i] >= theirs[j]]
    return [(i, j, mine[i] == theirs[j]) for i, j in places]


def count_pairs(rank, layout):
    """The numbers of the chunks go round, and each rank counts what it would compute."""
    mine = layout(rank, n)
    theirs, pairs = torch.tensor(mine).to(hardware.device()), 0
    for hop in range(n):
        if hop > 0:
            [theirs] = pass_on(theirs)
        pairs += sum(0.5 if half else 1 for *_, half in visible(mine, theirs.tolist()))
    return pairs


# %%
from course_utils.lesson.predictions import compare

compare(
    predicted,
    {"blocks": launch(count_pairs, n, blocks), "zig-zag": launch(count_pairs, n, zigzag)},
    likely={
        "All ranks have as many tokens, and not as much to compare them with.": {
            "blocks": [8.0] * n
        },
        "Half of a chunk's pair with itself is masked.": {"blocks": [3, 7, 11, 15]},
    },
)

# %%
figures.shares(n)
plt.show()

# %% [markdown]
# *Cut from front to back, the last rank computes seven times as much as the first, and all wait for it. The
# zig-zag gives every rank the same.* In every hop, too, a rank has two pairs: with its own pages one whole and two
# halves, with all others two whole ones. ([Brandon et al. 2023](https://arxiv.org/abs/2311.09431) deal out single tokens,
# every $n$-th to a rank: *striped attention*, almost as fair.)
#
# ### Ring attention, forward
#
# Now the ring itself ([Liu et al. 2023](https://arxiv.org/abs/2310.01889), section 3). Queries stay; keys and
# values come by, $n - 1$ hops. After each hop the rank attends with each of its chunks to what that chunk may
# see, and merges. A pair that the mask leaves out is never computed. A rank begins with its own chunks, so
# every query has seen at least itself, and no logsumexp is minus infinity.


# %%
def triangle(size, device):
    """The causal mask of a chunk with itself."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril()


def ring_forward(q, k, v, layout, group=None):
    """Output and logsumexp of this rank's queries (N, H, t, D), over the keys of all ranks."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    queries, results = q.chunk(2, dim=2), {}
    mask = triangle(queries[0].shape[2], q.device)
    for hop in range(ranks):
        if hop > 0:
            k, v = pass_on(k, v, group=group)
        sender = (rank - hop) % ranks  # whose pages these are
        keys, values = k.chunk(2, dim=2), v.chunk(2, dim=2)
        for i, j, half in visible(layout(rank, ranks), layout(sender, ranks)):
            part = attend(queries[i], keys[j], values[j], mask if half else None)
            results[i] = merged(results[i], part) if i in results else part
    outs, lses = zip(results[0], results[1])
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


# %% [markdown]
# The other way to see all keys is to ask for them at once: one all-gather, as the Llama 3 team did (Llama
# Team 2024, section 3.3.2). A third one: if each rank had *all tokens of some heads*, it could attend as
# usual. An **all-to-all** of queries, keys and values turns $t$ tokens of all heads into all tokens of $H/n$
# heads, and another one turns the outputs back. That is **Ulysses** ([Jacobs et al.
# 2023](https://arxiv.org/abs/2309.14509), section 3).
#
# **Predict** the bytes that leave a rank in one forward pass. $S$ are the bytes of this rank's keys, as
# many as of its values, queries and outputs. A ring needs $n - 1$ hops, and so does an all-gather on a ring:
# each piece passes every rank. In an all-to-all a rank keeps one piece of $n$ and sends the others, once.

# %% tags=["prediction"]
heads, tokens, width = 4, 256, 8  # a head is 8 wide
S = heads * tokens // n * width * 4
predicted = {
    "ring": 2 * S * (n - 1),
    "all-gather": 2 * S * (n - 1),
    "by heads": 4 * S * (n - 1) // n,
}

# %% [markdown]
# To measure it we need all three. Here are the other two. Both use a layout, too: with an all-gather, the
# zig-zag is as fair as in the ring. The mask comes from `positions`, the places of a rank's tokens in
# the document: a query sees a key that stands no later than itself, *wherever* the two lie now.


# %%
def positions(layout, rank, ranks, length):
    """The places in the document of a rank's tokens, in the order in which it has them."""
    size = length // (2 * ranks)
    return torch.cat([torch.arange(c * size, (c + 1) * size) for c in layout(rank, ranks)])


def mask_for(mine, layout, ranks, length):
    """Which of the tokens `mine` may see which of all tokens, these rank by rank."""
    theirs = torch.cat([positions(layout, r, ranks, length) for r in range(ranks)])
    return (mine.unsqueeze(1) >= theirs).to(hardware.device())


# %% [markdown]
# The all-gather needs a backward. A rank's keys have served the queries of all ranks, so their gradient is a sum
# over the ranks: a reduce-scatter, which brings each rank the sum for its own tokens. For the rest, autograd
# differentiates `attend` as it stands.


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
    length = k.shape[2]
    mine = positions(layout, rank, ranks, length)
    return attend(q, k, v, mask_for(mine, layout, ranks, length))[0]


# %% [markdown]
# By heads: `Swap` cuts in one dimension, sends piece $i$ to rank $i$, and joins what comes in another. Its backward
# is the same with the two dimensions changed about.


# %%
class Swap(torch.autograd.Function):
    """Cuts a tensor in one dimension, sends piece i to rank i, and joins what comes in another."""

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
    everyone = torch.cat([positions(layout, r, ranks, length) for r in range(ranks)])
    out, _ = attend(q, k, v, mask_for(everyone, layout, ranks, length))
    return Swap.apply(out, 2, 1, group)


# %% [markdown]
# A `Trace` counts what a rank *hands over* to a call (chapter 3). `leaving` makes of it what leaves the rank:
# a message as it is, $n - 1$ times the input of an all-gather, $(n-1)/n$ of the input of an all-to-all or
# of a reduce-scatter.

# %%
from course_utils.trace import Trace


def leaving(record):
    factor = {
        "send": 1,
        "all_gather": n - 1,
        "all_to_all": (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
    }
    return int(sum(factor[op] * record.sent(op) for op in factor))


def own_part(rank, ranks=n, layout=zigzag, grad=False):
    """This rank's queries, keys and values, and its place in the document."""
    torch.manual_seed(0)
    whole = torch.randn(3, 1, heads, tokens, width)
    mine = positions(layout, rank, ranks, tokens)
    return [part.to(hardware.device()).requires_grad_(grad) for part in whole[:, :, :, mine]], mine


def bytes_in_forward(rank, ways):
    (q, k, v), _ = own_part(rank)
    sent = {}
    for name, attention in ways.items():
        with Trace() as trace:
            attention(q, k, v, zigzag)
        sent[name] = leaving(trace.record())
    return sent


# %%
ways = {"ring": ring_forward, "all-gather": gathered, "by heads": by_heads}
sent = launch(bytes_in_forward, n, ways)
compare(
    predicted,
    sent[0],
    likely={
        "A ring saves memory, not bytes: every page passes every rank there, too.": {"ring": 2 * S},
        "Only keys and values: queries have to go too, and outputs back.": {
            "by heads": 2 * S * (n - 1) // n
        },
    },
)
print("the same on all ranks:", all(each == sent[0] for each in sent))

# %% [markdown]
# Did you expect the ring to send less than the all-gather? It sends the same, in pieces. What it saves is
# memory, and what it can gain is time: the next pages may travel while the rank computes. (Ours waits first, which is
# easier to read. To hide a hop, start it before `attend` and wait after it: exercise 10.3.) Only the way by heads
# gets cheaper with more ranks: $S$ is the $n$-th part of the whole sequence's keys, and its factor stays below 4.
#
# ### The scores that are never made
#
# Attention over $T$ tokens has $H \cdot T^2$ scores. For 131,072 tokens and 32 heads that are 2 TiB in float32,
# for one layer. **Predict** the bytes of the largest scores that a rank has at once: in one process, with
# all keys gathered ($t$ queries), by heads ($H/n$ heads), and in our ring (two chunks of $T/2n$).

# %% tags=["prediction"]
predicted = {
    "one process": heads * tokens**2 * 4,
    "all-gather": heads * (tokens // n) * tokens * 4,
    "by heads": heads // n * tokens**2 * 4,
    "ring": heads * (tokens // (2 * n)) ** 2 * 4,
}

# %%
from course_utils.trace import largest_tensor


def scores_of(rank, ways):
    (q, k, v), _ = own_part(rank, dist.get_world_size())
    scores = {}
    for name, attention in ways.items():
        with largest_tensor() as largest:
            attention(q, k, v, zigzag)
        scores[name] = largest.bytes
    return scores


measured = launch(scores_of, n, ways)[0] | launch(scores_of, 1, {"one process": gathered})[0]
compare(
    predicted,
    measured,
    likely={
        "A rank has a part of the queries, and of the keys.": {"ring": heads * tokens**2 * 4 // n}
    },
)

# %% [markdown]
# The ring divides by $4n^2$, the other two by $n$. A **fused kernel** such as FlashAttention never writes
# scores to memory at all: it does inside a GPU, tile by tile, what the ring does between GPUs. With one, the
# scores drop out of this table, and what remains is $K$ and $V$: whole with an all-gather, a part in the ring.
#
# ## 4. By hand, then with PyTorch: backward, a model, and `context_parallel`
#
# ### Backward: the gradients follow their pages
#
# Autograd knows nothing of messages, so the ring needs a backward of its own. Of one pair of chunks, with
# weights $P$, the gradient $dO$ of the output, and $\delta$, the sum over the width of $dO \cdot O$
# (Dao et al. 2022, appendix B.2; $D$ is the width of a head):
#
# $$dV = P^\top dO, \qquad dS = P \circ (dO\, V^\top - \delta), \qquad
# dQ = dS\, K / \sqrt{D}, \qquad dK = dS^\top Q / \sqrt{D}.$$
#
# $P$ is not kept but computed again, with the *final* logsumexp, so that it is what it would be over all
# keys. Then each pair is independent of all others, and no merge is needed: gradients add up.


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
# $dQ$ stays where the queries are. $dK$ and $dV$ are found on every rank that the pages visit, and have to get
# home. So they travel behind their pages: rank $r$ adds its part to what has come and passes it on. Start at
# hop 0 with the rank's own part, and the gradients need $n$ hops to come home. Start at hop 1, on the first
# *other* desk, and they need $n - 1$; the home rank adds its own part last.

# %%
figures.travels(n)
plt.show()

# %% [markdown]
# *Above, the pages that a rank has at each hop; below, framed, the gradient that it adds to. A gradient
# appears one hop after its pages have left home, and the last column is home.*


# %%
def pages_backward(queries, k, v, pairs, mask):
    """Gradients of all queries and of these pages; `queries`: (q, lse, d_out, delta), chunked."""
    d_q, d_k, d_v = (torch.zeros_like(k) for _ in range(3))
    for i, j, half in pairs:
        q, lse, d_out, delta = (part[i] for part in queries)
        keys, values = k.chunk(2, dim=2)[j], v.chunk(2, dim=2)[j]
        found = attend_backward(q, keys, values, mask if half else None, lse, d_out, delta)
        for whole, place, part in zip((d_q, d_k, d_v), (i, j, j), found):
            whole.chunk(2, dim=2)[place].add_(part)
    return d_q, d_k, d_v


# %%
def ring_backward(q, k, v, out, lse, d_out, layout, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    queries = [x.chunk(2, dim=2) for x in (q, lse, d_out, (d_out * out).sum(-1))]
    mask, mine = triangle(q.shape[2] // 2, q.device), layout(rank, ranks)
    d_q, own_k, own_v = pages_backward(queries, k, v, visible(mine, mine), mask)
    d_k, d_v = torch.zeros_like(own_k), torch.zeros_like(own_v)
    for hop in range(1, ranks):
        k, v = pass_on(k, v, group=group)
        pairs = visible(mine, layout((rank - hop) % ranks, ranks))
        parts = pages_backward(queries, k, v, pairs, mask)
        d_q, d_k, d_v = (a + b for a, b in zip((d_q, d_k, d_v), parts))
        d_k, d_v = pass_on(d_k, d_v, group=group)  # to where the pages are next; at the end, home
    return d_q, d_k + own_k, d_v + own_v


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
# **Predict** what leaves a rank in backward. The ring sends the pages a second time, since nobody kept them,
# and their gradients. The all-gather's backward is a reduce-scatter of the gradients of *all* keys and values,
# $nS$ each. By heads, four tensors go back the way they came.

# %% tags=["prediction"]
predicted = {
    "ring": 4 * S * (n - 1),
    "all-gather": 2 * S * (n - 1),
    "by heads": 4 * S * (n - 1) // n,
}


# %%
def equality_and_bytes(rank, ways):
    ranks, results = dist.get_world_size(), {}
    whole, everywhere = own_part(0, 1, blocks, grad=True)
    slope = whole[0].detach().cos()  # any gradient of the output, the same on every rank
    expected, _ = attend(*whole, mask_for(everywhere, blocks, 1, tokens))
    expected.backward(slope)
    for name, attention in ways.items():
        parts, mine = own_part(rank, ranks, zigzag, grad=True)
        out = attention(*parts, zigzag)
        with Trace() as trace:
            out.backward(slope[:, :, mine])
        pairs = zip((expected, *(x.grad for x in whole)), (out, *(x.grad for x in parts)))
        right = all(equal(a[:, :, mine], [b]) for a, b in pairs)
        results[name] = right, leaving(trace.record())
    return results


# %%
ways = {"ring": ring, "all-gather": gathered, "by heads": by_heads}
runs = [launch(equality_and_bytes, ranks, ways) for ranks in (1, 2, n)]
for name in ways:
    right = all(results[name][0] for run in runs for results in run)
    print(f"{name:10} on 1, 2 and {n} ranks: output, dQ, dK and dV as in one process: {right}")
measured = {name: sent for name, (_, sent) in runs[-1][0].items()}
compare(predicted, measured, likely={"The pages go round again.": {"ring": 2 * S * (n - 1)}})

# %% [markdown]
# So forward and backward together, the ring sends $6S(n-1)$, the all-gather $4S(n-1)$. Which one to take?
#
# | way | leaves a rank, both passes | holds at once | limit |
# |---|---|---|---|
# | all-gather | $4S(n-1)$ | $K$ and $V$ of all tokens, until backward | memory of $K$ and $V$ |
# | by heads | $8S(n-1)/n$ | all tokens of $H/n$ heads | $n$ must divide the heads of queries |
# | ring | $6S(n-1)$ | own pages and one more set | each hop has to hide behind computing |
#
# With fewer heads of keys than of queries (grouped-query attention) $S$ of the keys is small, which favours the
# all-gather. By heads, ranks in excess of the heads of keys get copies of them, and the bytes of keys shrink no further
# (exercise 10.5). A hop is hidden if computing takes longer than sending. With $c$ tokens on a rank, computing grows
# with $c^2$, sending with $c$: above some length the ring's hops cost no time (Liu et al. 2023, section 3, *arithmetic
# intensity*).
#
# ### A language model on cut sequences
#
# What else has to change in a model? Two things know where a token stands. The position embedding gets
# numbers from 0 on, so give it this rank's `positions`. And attention is replaced. All else works token by token.

# %%
from functools import partial

from course_utils.lesson import text
from course_utils.lesson.models import LanguageModel


def attention_of_part(module, mix, x):
    """`Attention.forward` of models.py, with another way to bring tokens together."""
    n, t, _ = x.shape
    parts = module.qkv(x).view(n, t, 3, module.heads, module.head_width)
    q, k, v = parts.permute(2, 0, 3, 1, 4)
    return module.out(mix(q, k, v).transpose(1, 2).flatten(2))


def for_part(model, mine, mix):
    """Changes a language model in place: it takes the tokens `mine` of each window only."""
    model.position.register_forward_pre_hook(lambda module, inputs: (mine.to(hardware.device()),))
    for block in model.blocks:
        block.attention.forward = partial(attention_of_part, block.attention, mix)
    return model


# %% [markdown]
# The targets are the tokens shifted by one, and a neighbour may lie on another rank. So shift first, then cut
# tokens and targets with the *same* positions. Each rank has as many tokens as the others, so the mean
# of the ranks' mean losses is the loss; gradients are averaged over all ranks, as in chapter 3.

# %%
CONTEXT, WINDOWS, STEPS = 32, 8, 5


def new_model():
    torch.set_num_threads(1)  # so small a model loses time with more
    torch.manual_seed(0)
    model = LanguageModel(len(text.vocabulary()), width=32, heads=4, layers=2, context=CONTEXT)
    return model.to(hardware.device())


# %%
def train(model, part):
    """Five steps. `part` picks this rank's rows and tokens; gradients are averaged over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        tokens, targets = (
            part(x).to(hardware.device()) for x in text.windows(CONTEXT, WINDOWS, step)
        )
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        average(loss.detach(), *(p.grad for p in model.parameters()))
        optimizer.step()
    return loss.item()


def average(*tensors):
    for tensor in tensors if dist.is_initialized() else ():
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


# %% [markdown]
# On a mesh of two dimensions, data x context, the ring runs in a rank's context group. The gradient has terms
# from all four ranks: different rows, different tokens. So it is averaged over both dimensions.

# %%
from torch.distributed.device_mesh import init_device_mesh

from course_utils.lesson.equality import flat


def train_cut(rank, data, context, ways):
    """The parameters after training with each way, on a mesh of data x context ranks."""
    mesh = init_device_mesh(
        hardware.device().type, (data, context), mesh_dim_names=("data", "context")
    )
    row, place, group = *mesh.get_coordinate(), mesh.get_group("context")
    mine = positions(zigzag, place, context, CONTEXT)
    trained = {}
    for name, attention in ways.items():
        model = for_part(new_model(), mine, partial(attention, layout=zigzag, group=group))
        train(model, lambda x: x.chunk(data)[row][:, mine])
        trained[name] = flat(model.parameters())
    return trained


# %%
alone = new_model()
loss_alone = train(alone, lambda x: x)
print(f"one process: the loss after {STEPS} steps is {loss_alone:.3f}")
for data, context, chosen in ((1, 2, {"ring": ring}), (1, 4, {"ring": ring}), (2, 2, ways)):
    results = launch(train_cut, data * context, data, context, chosen)
    for name in chosen:
        same = equal(flat(alone.parameters()), [trained[name] for trained in results])
        print(f"data {data} x context {context}, {name:10}: as one process: {same}")

# %% [markdown]
# ### With PyTorch: `context_parallel`
#
# PyTorch's own API is a context manager, still called experimental. Inside it the `buffers` are this rank's
# part, cut by head and tail, and `scaled_dot_product_attention` is replaced by one for cut sequences. It merges
# part by part as our ring does. But all pages come in one all-gather, in backward once more, and only their
# gradients go round, unless `set_rotate_method("alltoall")` (of `torch.distributed.tensor.experimental`) has
# asked for hops. It leans on kernels that return the logsumexp. Those for GPUs have a rule for cut sequences; the one for CPUs has none, and there the
# cell below ends with *does not have a sharding strategy registered*. With two GPUs it computes.

# %% tags=["nbval-ignore-output"]
from torch.distributed.tensor.experimental import context_parallel


def with_pytorch(rank, attention):
    """The context manager's output against that of one process; or its error."""
    torch.manual_seed(0)
    device, dtype = hardware.device(), torch.float32
    mesh = init_device_mesh(device.type, (2,))
    q, k, v = torch.randn(3, 1, heads, 16, width).to(device, dtype)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    try:
        with context_parallel(mesh, buffers=[q, k, v, whole], buffer_seq_dims=[2] * 4):
            out = attention(q, k, v, is_causal=True)
            return f"tokens here: {out.shape[2]}, as one process: {equal(whole, [out])}"
    except RuntimeError as error:  # NotImplementedError is one, too
        return f"{type(error).__name__}: {error}"


launch(
    with_pytorch,
    2,
    lambda *qkv, **how: torch.nn.functional.scaled_dot_product_attention(*qkv, **how),
)[0]

# %% [markdown]
# What can be compared everywhere is the cut. PyTorch's list of tokens, in the order in which the ranks get
# them, is our zig-zag: the course's tests hold the two against each other.

# %% [markdown]
# ## 5. Break it: six mistakes that run to the end
#
# None of the following raises an error. What shows them is the comparison with one process: the first three
# and the last print it, and the course's tests make it for the two between, after training. In the first
# three one function of the ring is written in another way.


# %%
def far_off(rank, replaced):
    """The largest difference to one process, in the output and in dQ, dK and dV; ring, 4 ranks."""
    globals().update(replaced)  # of this rank only: its process ends with the cell
    parts, mine = own_part(rank, n, zigzag, grad=True)
    whole, everywhere = own_part(0, 1, blocks, grad=True)
    expected, _ = attend(*whole, mask_for(everywhere, blocks, 1, tokens))
    out = ring(*parts, zigzag)
    for result in (expected, out):
        result.square().sum().backward()
    pairs = zip((expected, *(x.grad for x in whole)), (out, *(x.grad for x in parts)))
    return [(a[:, :, mine] - b).abs().max().item() for a, b in pairs]


def show_difference(**replaced):
    worst = [max(ranks) for ranks in zip(*launch(far_off, n, replaced))]
    for name, distance in zip(("output", "dQ", "dK", "dV"), worst):
        print(
            f"{name:6} "
            + ("as in one process" if distance < 1e-4 else f"off by up to {distance:.2f}")
        )


# %% [markdown]
# ### A merge without rescaling
#
# The mean of two outputs, as if each had found as much. It would be right if all scores were the same.

# %%
show_difference(
    merged=lambda one, other: ((one[0] + other[0]) / 2, torch.logaddexp(one[1], other[1]))
)

# %% [markdown]
# Everything that comes later is wrong, too: the gradients use the output.
#
# ### A mask by chunk instead of by token
#
# "A chunk sees itself and the chunks before it." True for chunks, and wrong for tokens: within its own chunk
# a token now sees those that come *after* it. A language model can then read the next token off instead of
# predicting it: its training loss can only look better for it.

# %%
show_difference(
    triangle=lambda size, device: torch.ones(size, size, dtype=torch.bool, device=device)
)

# %% [markdown]
# ### Gradients that are sent home late
#
# In backward a rank has to add its part to the gradients that are with it, and *then* pass them on. Here the
# two lines are swapped. Every gradient lags one more hop behind its pages, and at the end it lies one desk
# before its home. Predict which of the four numbers are wrong.


# %%
def late_backward(q, k, v, out, lse, d_out, layout, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    queries = [x.chunk(2, dim=2) for x in (q, lse, d_out, (d_out * out).sum(-1))]
    mask, mine = triangle(q.shape[2] // 2, q.device), layout(rank, ranks)
    d_q, own_k, own_v = pages_backward(queries, k, v, visible(mine, mine), mask)
    d_k, d_v = torch.zeros_like(own_k), torch.zeros_like(own_v)
    for hop in range(1, ranks):
        k, v = pass_on(k, v, group=group)
        d_k, d_v = pass_on(d_k, d_v, group=group)  # too early: this rank's part is not in it
        pairs = visible(mine, layout((rank - hop) % ranks, ranks))
        parts = pages_backward(queries, k, v, pairs, mask)
        d_q, d_k, d_v = (a + b for a, b in zip((d_q, d_k, d_v), parts))
    return d_q, d_k + own_k, d_v + own_v


show_difference(ring_backward=late_backward)

# %% [markdown]
# The output and $dQ$ are right, so a test of the output alone passes. For Megatron-LM somebody reported wrong $dQ$, $dK$
# and $dV$ as soon as context parallelism was on ([issue 1464](https://github.com/NVIDIA/Megatron-LM/issues/1464)): it was
# a comparison of gradients that told. Compare all four.
#
# ### Bug hunt: positions and labels
#
# Two lines from a training script, of which each looks harmless. The model numbers its tokens itself, as it
# always did, `torch.arange(t)`. And the labels are made where the loss is, by shifting the tokens that are
# here by one. What do they do to a zig-zag of two ranks? Find an answer before you run the cell.


# %%
def positions_and_labels(rank):
    """What this rank's tokens are told to be, and what they are told comes next, in a document of 8."""
    mine = positions(zigzag, rank, 2, 8)
    numbered = torch.arange(len(mine))  # as `LanguageModel.forward` has it
    shifted = mine.roll(-1)  # labels from the tokens that are here; the last one has to be left out
    return mine.tolist(), numbered.tolist(), (mine + 1).tolist()[:-1], shifted.tolist()[:-1]


for rank, (mine, numbered, following, shifted) in enumerate(launch(positions_and_labels, 2)):
    print(f"rank {rank}: has tokens {mine}, and numbers them {numbered}")
    print(f"        after them come {following}, and its labels are {shifted}")

# %% [markdown]
# Rank 0 has tokens 0, 1, 6 and 7. It calls token 6 number 2, and teaches that after token 1 comes token 6.
# The model learns both, on every sequence. Make positions and labels from the whole sequence, then cut.
#
# ### Bug hunt: a name that was imported too early
#
# `context_parallel` replaces `scaled_dot_product_attention` in the module where it lives. A script that says
# `from torch.nn.functional import scaled_dot_product_attention` at its top has the old one in its hands.

# %%
from torch.nn.functional import scaled_dot_product_attention as imported_early


def with_early_import(rank):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, 16, width).to(hardware.device())
    whole = imported_early(q, k, v, is_causal=True)
    mesh = init_device_mesh(hardware.device().type, (2,))
    with context_parallel(mesh, buffers=[q, k, v, whole], buffer_seq_dims=[2] * 4):
        return equal(whole, [imported_early(q, k, v, is_causal=True)])


right = launch(with_early_import, 2)
print("no error; as one process, on each rank:", right)

# %% [markdown]
# No error, no message on the ring, and each rank attends to its own tokens only. Libraries that keep the function
# under a name of their own do the same. If the API is in use, count the calls of one step (`Trace`): zero is
# an alarm.

# %% [markdown]
# ## 6. Exercises: write the ring yourself
#
# The parts of ring attention, from the smallest to the whole, and one of its rivals. All ranks are in the
# default group. `hint("10.1")` gives the next hint. You may use functions of this chapter, such as
# `attend`, `attend_backward` and `Swap`.

# %%
from course_exercises import check, hint

# %% [markdown]
# ### 10.1 Merge two partial results (2 points)
#
# The formula of section 2, as it has to be for real scores: exact, stable, and right if one of the two has seen
# no key at all. Then its logsumexp is minus infinity, and its output may be anything.


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
# ### 10.2 The tokens of a rank in a zig-zag (1 point)
#
# Cut the document into $2n$ chunks. Rank $r$ gets the $r$-th from the front and the $r$-th from the back.


# %% nbgrader={"grade_id": "10.2", "solution": true}
def zigzag_indices(length: int, ranks: int, rank: int) -> Tensor:
    """Returns the places, int64 (length / ranks,), of the tokens that `rank` has, in ascending order.

    They are chunks `rank` and `2 * ranks - 1 - rank` of `2 * ranks` equal chunks of the places 0 to
    `length - 1`. Raises ValueError, naming both numbers, where `length` does not divide by `2 * ranks`.
    """
    ### BEGIN SOLUTION
    if length % (2 * ranks) != 0:
        raise ValueError(f"{length} tokens do not divide into {2 * ranks} chunks.")
    pieces = torch.arange(length).view(2 * ranks, -1)
    return pieces[[rank, -1 - rank]].flatten()
    ### END SOLUTION


# %% nbgrader={"grade_id": "10.2-check", "grade": true, "points": 1, "locked": true}
check("10.2", zigzag_indices)

# %% [markdown]
# ### 10.3 Ring attention, forward, that hides its hops (3 points)
#
# The ring of section 3, for the zig-zag alone. There it has a simple form. Seen from rank $r$, the pages of
# a rank $j$ fall into three cases: $j = r$, with a mask; $j < r$, where both of your chunks see its first chunk and
# none its second; and $j > r$, where your second chunk sees both of its chunks, and your first none.
#
# And this ring does not stand still while pages travel. `pass_on` waits. Yours starts a hop, attends to the pages that
# it has, and then waits for the next ones.


# %% nbgrader={"grade_id": "10.3", "solution": true}
def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns the output (N, H, t, D) of this rank's queries under the causal mask of the document.

    q, k, v (N, H, t, D) are this rank's t = T / n tokens in zig-zag, as in 10.2; t is even. Keys and values
    go round the ring in n - 1 hops: a rank sends at most 2 (n - 1) times the bytes of k. Each hop is
    under way while the rank attends to the pages that it has. No rank gathers all keys, and no tensor
    of scores is larger than (N, H, t, t). Whole pairs of chunks that the mask leaves out are not
    computed: after the rank's own, 2 pairs in each hop. The arguments do not change.
    """
    ### BEGIN SOLUTION
    me, n, half = dist.get_rank(), dist.get_world_size(), q.shape[2] // 2

    def come_by(pages: Tensor) -> Iterator[Tensor]:
        """The pages of one rank after the other; the next ones are under way meanwhile."""
        for _ in range(1, n):
            coming = torch.empty_like(pages)
            send = dist.P2POp(dist.isend, pages, (me + 1) % n)
            works = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, coming, (me - 1) % n)])
            yield pages
            for work in works:
                work.wait()
            pages = coming
        yield pages

    place = torch.arange(q.shape[2], device=q.device)  # ascending, so the mask is a triangle
    for hop, pages in enumerate(come_by(torch.stack([k, v]))):
        if hop == 0:
            out, lse = attend(q, *pages, place[:, None] >= place)
        elif hop <= me:  # from a rank before me
            out, lse = merged((out, lse), attend(q, *pages[:, :, :, :half]))
        else:
            seen = merged((out[:, :, half:], lse[:, :, half:]), attend(q[:, :, half:], *pages))
            out = torch.cat([out[:, :, :half], seen[0]], dim=2)
            lse = torch.cat([lse[:, :, :half], seen[1]], dim=2)
    return out
    ### END SOLUTION


# %% nbgrader={"grade_id": "10.3-check", "grade": true, "points": 3, "locked": true}
check("10.3", ring_attention)

# %% [markdown]
# ### 10.4 Ring attention with its backward (4 points)
#
# The same as an `autograd.Function`. Forward keeps what backward needs, which is not the other ranks' pages: they
# come round a second time. The gradients of keys and values follow one hop behind. Hops of pages are hidden in both
# passes.


# %% nbgrader={"grade_id": "10.4", "solution": true}
class RingAttention(torch.autograd.Function):
    """Called as `RingAttention.apply(q, k, v)`; the arguments and the result are those of 10.3."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns the output (N, H, t, D), and keeps this rank's own tensors for backward.

        Each hop of pages is under way while the rank attends to those that it has.
        """
        ### BEGIN SOLUTION
        me, n, half = dist.get_rank(), dist.get_world_size(), q.shape[2] // 2

        def come_by(pages: Tensor) -> Iterator[Tensor]:
            for _ in range(1, n):
                coming = torch.empty_like(pages)
                send = dist.P2POp(dist.isend, pages, (me + 1) % n)
                works = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, coming, (me - 1) % n)])
                yield pages
                for work in works:
                    work.wait()
                pages = coming
            yield pages

        ctx.come_by = come_by
        front, back, both = slice(half), slice(half, None), slice(None)
        place = torch.arange(2 * half, device=q.device)
        ctx.cases = [(both, both, place[:, None] >= place)]  # my rows, their columns, the mask
        for hop in range(1, n):
            ctx.cases.append((both, front, None) if hop <= me else (back, both, None))
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
        for (rows, columns, seen), pages in zip(ctx.cases, come_by(torch.stack([k, v]))):
            new = attend(q[:, :, rows], *pages[:, :, :, columns], seen)
            old = out[:, :, rows], lse[:, :, rows]
            out[:, :, rows], lse[:, :, rows] = merged(old, new)
        ctx.save_for_backward(q, k, v, out, lse)
        return out
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and v, (N, H, t, D) each, from that of the output.

        A rank sends at most 4 (n - 1) times the bytes of k. Hops of pages are under way as in forward.
        """
        ### BEGIN SOLUTION
        q, k, v, out, lse = ctx.saved_tensors
        of_rows = lse, gradient, (gradient * out).sum(dim=-1)
        d_q, coming = torch.zeros_like(q), torch.zeros_like(torch.stack([k, v]))
        for hop, pages in enumerate(ctx.come_by(torch.stack([k, v]))):
            rows, columns, seen = ctx.cases[hop]
            theirs, found = pages[:, :, :, columns], torch.zeros_like(pages)
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
# ### 10.5 Heads for sequence, with grouped heads (2 points)
#
# Ulysses' first step: this rank has some tokens of all heads, and wants all tokens of some heads. `by_heads` needs an
# all-to-all each for queries, keys and values. One is enough. And today's models have fewer heads of keys and values
# than of queries (**grouped-query attention**), often fewer than there are ranks: a head is then sent to each rank
# whose queries it serves.


# %% nbgrader={"grade_id": "10.5", "solution": true}
def heads_for_sequence(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns all tokens of this rank's heads, as q, k and v (N, heads of this rank, T, D).

    q (N, H, T / n, D), k and v (N, G, T / n, D) are this rank's tokens, the r-th of n equal stretches.
    Each head of k and v serves H / G heads of q that lie together. Rank r gets the r-th of n equal groups
    of q's heads, and of k and v the heads that serve these: the r-th of n groups or, where G < n, one
    head, which goes to n / G ranks. Raises ValueError, naming both numbers, where n does not divide H, or
    where of n and G neither divides the other.

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
# ## 7. See it: fair shares, bytes and scores
#
# Choose a layout, a number of ranks and the tokens of each rank. Three things to try:
#
# * Add ranks in blocks, and watch the share of the time in which ranks compute fall towards a half.
# * Take the zig-zag: it is 100 % for any number of ranks.
# * Double the tokens: the bytes double, the scores of the all-gather grow fourfold.

# %%
from course_utils.lesson import explore

explore.Explorer(
    figures.explored, layout=["blocks", "zig-zag"], ranks=(1, 8, 4), tokens=(1024, 16384, 4096)
)

# %% [markdown]
# *At the start: four ranks in blocks. The last rank has seven times the pairs of the first, and on average ranks
# compute for 57 % of the time that the slowest takes.*
#
# And the figure to remember, for a sequence of 131,072 tokens, 32 heads of width 128, in float32:

# %%
figures.compared(131_072, 32, 128, [2, 4, 8, 16, 32, 64])
plt.show()

# %% [markdown]
# *Left: ring and all-gather send the same, which approaches the whole sequence, 4 GiB of keys and values, as
# ranks are added; by heads it gets less, and ends at 32 ranks, since there are 32 heads. Right: without a fused kernel only the ring's scores
# shrink with the square of the ranks.* Computed from the formulas of section 3, not measured.
#
# ## 8. On a cluster: the same model under torchrun
#
# The script trains the model of section 4 on a mesh of data x context, in Llama 3's way: with an all-gather, which
# takes the fewest lines. It imports nothing from this notebook. SGD with momentum is written out: `torch.optim` loads
# PyTorch's compiler at its first step, which on a CPU costs each rank as much as starting does.

# %%
from course_utils.lesson.terminal import scratch, torchrun

script = scratch() / "context_parallel.py"
script.unlink(missing_ok=True)

# %%
# %%writefile scratch/context_parallel.py
"""Trains a small language model on cut sequences. Start it with torchrun; argument: context ranks."""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from course_utils.lesson import text
from course_utils.lesson.models import LanguageModel

CONTEXT, WINDOWS = 32, 8
context, ranks = int(sys.argv[1]), int(os.environ["WORLD_SIZE"])
local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
device = "cuda" if torch.cuda.device_count() >= local_ranks else "cpu"
if device == "cuda":
    torch.cuda.set_device(local_rank)
mesh = init_device_mesh(device, (ranks // context, context), mesh_dim_names=("data", "context"))
row, place, group = *mesh.get_coordinate(), mesh.get_group("context")
chunks = torch.arange(CONTEXT).chunk(2 * context)
cuts = [torch.cat([chunks[r], chunks[2 * context - 1 - r]]) for r in range(context)]
mine, everyones = cuts[place].to(device), torch.cat(cuts).to(device)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own):
        pieces = [torch.empty_like(own) for _ in range(context)]
        dist.all_gather(pieces, own, group=group)
        return torch.cat(pieces, dim=2)

    @staticmethod
    def backward(ctx, gradient):
        pieces = [piece.contiguous() for piece in gradient.chunk(context, dim=2)]
        dist.reduce_scatter(total := torch.empty_like(pieces[0]), pieces, group=group)
        return total


def attention(module, x):
    parts = module.qkv(x).unflatten(2, (3, module.heads, module.head_width))
    q, k, v = parts.permute(2, 0, 3, 1, 4)
    k, v = Gather.apply(k.contiguous()), Gather.apply(v.contiguous())
    out = scaled_dot_product_attention(q, k, v, attn_mask=mine.unsqueeze(1) >= everyones)
    return module.out(out.transpose(1, 2).flatten(2))


torch.manual_seed(0)
model = LanguageModel(len(text.vocabulary()), width=32, heads=4, layers=2, context=CONTEXT)
model.to(device)
model.position.register_forward_pre_hook(lambda module, inputs: (mine,))
for block in model.blocks:
    block.attention.forward = partial(attention, block.attention)
momenta = [torch.zeros_like(parameter) for parameter in model.parameters()]
for step in range(5):
    pair = text.windows(CONTEXT, WINDOWS, seed=step)
    tokens, targets = (x.chunk(ranks // context)[row].to(device)[:, mine] for x in pair)
    model.zero_grad()
    loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    for tensor in (loss.data, *(p.grad for p in model.parameters())):
        dist.all_reduce(tensor)
        tensor /= ranks
    for parameter, momentum in zip(model.parameters(), momenta):
        parameter.data -= 0.1 * momentum.mul_(0.9).add_(parameter.grad)
if dist.get_rank() == 0:
    print(f"loss after 5 steps: {loss.item():.3f}")
dist.destroy_process_group()


# %%
printed = torchrun(4, script, "2")
print(printed, end="")
print("as one process:", printed == f"loss after {STEPS} steps: {loss_alone:.3f}\n")

# %% [markdown]
# What changes there:
#
# * **The data loader cuts.** Each rank reads the whole window and keeps its part, or reads only that; either way
#   all ranks of a context group need the *same* windows.
# * **Documents in one window.** If several are packed into one sequence, the mask ends at their borders, and a
#   cut by position alone is no longer fair. PyTorch has a balancer for each document.
# * **Where to place it.** A ring's hop goes to a neighbour and can hide behind computing, so its group may reach
#   over several machines; an all-to-all talks to everybody and stays inside. Chapter 7's question again.
# * **What stays.** Parameters, gradients and optimizer are whole on every rank. FSDP shards them over data x
#   context together (chapter 8): for it, a context rank is one more reader of other tokens.

# %% [markdown]
# ## 9. Remember
#
# 1. Attention over some keys is an output and a logsumexp. Two of them merge exactly, in any order.
# 2. In a ring queries stay and pages travel $n - 1$ hops; gradients of pages follow one hop behind.
# 3. A causal mask makes a cut from front to back unfair. The zig-zag is fair, in every hop.
# 4. Ring and all-gather send the same in forward, $2S(n-1)$; a ring saves memory. By heads the bytes shrink with $n$,
#    and the heads set the limit.
# 5. Positions, tokens and shifted labels are cut by the same list. Compare output, $dQ$, $dK$ *and* $dV$.
#
# **Sources**
#
# * H. Liu, M. Zaharia, P. Abbeel, *Ring Attention with Blockwise Transformers for Near-Infinite Context*, 2023,
#   [arXiv 2310.01889](https://arxiv.org/abs/2310.01889): section 3 the ring and when it hides.
# * S. A. Jacobs et al., *DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
#   Transformer Models*, 2023, [arXiv 2309.14509](https://arxiv.org/abs/2309.14509): section 3
#   the all-to-all and its bytes.
# * Llama Team, *The Llama 3 Herd of Models*, 2024, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783): section
#   3.3.2 the all-gather, and chunks from both ends.
# * M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, 2018,
#   [arXiv 1805.02867](https://arxiv.org/abs/1805.02867): section 3 the merge.
# * T. Dao et al., *FlashAttention*, 2022, [arXiv 2205.14135](https://arxiv.org/abs/2205.14135): section 3.1 tiles,
#   appendix B.2 backward.
# * W. Brandon et al., *Striped Attention: Faster Ring Attention for Causal Transformers*, 2023, [arXiv
#   2311.09431](https://arxiv.org/abs/2311.09431).
# * Z. Zhu, [ring-flash-attention](https://github.com/zhuzilin/ring-flash-attention), 2024: the zig-zag.
# * PyTorch: [context parallel
#   tutorial](https://docs.pytorch.org/tutorials/unstable/context_parallel.html).
