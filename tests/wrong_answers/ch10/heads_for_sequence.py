"""Answers to 10.5, `heads_for_sequence`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist

from course_exercises.authoring import load_code
from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch10.shared import place_of

Swap = load_code(10, "Swap")


def must_fit(q, k):
    ranks = dist.get_world_size()
    if q.shape[1] % ranks:
        raise ValueError(f"{q.shape[1]} heads of queries do not divide by {ranks} ranks")
    if k.shape[1] % ranks and ranks % k.shape[1]:
        raise ValueError(
            f"{k.shape[1]} heads of keys and {ranks} ranks: neither divides by the other"
        )


def groups(x):
    """The heads of each rank."""
    heads, ranks = x.shape[1], dist.get_world_size()
    return [x[:, r * heads // ranks :][:, : max(heads // ranks, 1)] for r in range(ranks)]


def swap(x):
    return Swap.apply(x, 1, 2, None)


def packed(q, k, v, swap=swap, groups=groups):
    """A right answer, of which one part can be another."""
    must_fit(q, k)
    parts = [groups(x) for x in (q, k, v)]
    leaving = torch.cat([piece for of_rank in zip(*parts) for piece in of_rank], dim=1)
    return swap(leaving).split([part[0].shape[1] for part in parts], dim=1)


class Differentiable(torch.autograd.Function):
    """A forward and a backward, given as functions of one tensor."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


def exchange(x, cut, join):
    """One all-to-all: piece r of dimension `cut` to rank r; what comes is joined in `join`."""
    pieces = torch.stack(x.chunk(dist.get_world_size(), dim=cut))
    arrived = torch.empty_like(pieces)
    dist.all_to_all_single(arrived, pieces)
    return torch.cat(arrived.unbind(), dim=join)


def there(x):
    return exchange(x, 1, 2)


def back(gradient):
    return exchange(gradient, 2, 1)


@right("10.5")
def cuts_by_slices(q, k, v):
    return packed(q, k, v)


@right("10.5")
def sums_copies_by_hand(q, k, v):
    """One function of three tensors, with nothing left to autograd."""
    must_fit(q, k)
    ranks, counts = dist.get_world_size(), [x.shape[1] for x in (q, k, v)]

    class ToHeads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *own):
            pieces = [torch.cat(of_rank, dim=1) for of_rank in zip(*map(groups, own))]
            return there(torch.cat(pieces, dim=1)).split(
                [groups(x)[0].shape[1] for x in own], dim=1
            )

        @staticmethod
        def backward(ctx, *gradients):
            pieces = back(torch.cat(gradients, dim=1)).chunk(ranks, dim=1)
            parts = zip(*(piece.split([g.shape[1] for g in gradients], dim=1) for piece in pieces))
            homes = []
            for heads, of_ranks in zip(counts, parts):
                together = torch.cat(of_ranks, dim=1)
                homes.append(together.unflatten(1, (heads, -1)).sum(dim=2))
            return tuple(homes)

    return ToHeads.apply(q, k, v)


@right("10.5")
def exchanges_messages(q, k, v):
    """As the same exchange in messages, each rank with each."""
    rank, ranks = place_of()

    def swap(x, cut, join):
        leaving = [piece.contiguous() for piece in x.chunk(ranks, dim=cut)]
        arriving = [torch.empty_like(piece) for piece in leaving]
        arriving[rank] = leaving[rank]
        others = [other for other in range(ranks) if other != rank]
        messages = [dist.P2POp(dist.isend, leaving[other], other) for other in others]
        messages += [dist.P2POp(dist.irecv, arriving[other], other) for other in others]
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        return torch.cat(arriving, dim=join)

    def both(x):
        return Differentiable.apply(x, lambda x: swap(x, 1, 2), lambda g: swap(g, 2, 1))

    return packed(q, k, v, swap=both)


@wrong("10.5", names="whole-result")
def gathers_everything(q, k, v):
    must_fit(q, k)
    results = []
    for x in (q, k, v):
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, x.contiguous())
        results.append(torch.cat(pieces, dim=2))
    return results


@wrong("10.5", names="not-one-exchange")
def exchanges_three_times(q, k, v):
    """The lesson's own way, with heads that are repeated."""
    must_fit(q, k)
    copies = max(dist.get_world_size() // k.shape[1], 1)
    k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
    return tuple(map(swap, (q, k, v)))


@wrong("10.5", names="sends-too-much")
def sends_all_heads_of_keys(q, k, v):
    """Each query head gets a key head of its own."""
    must_fit(q, k)
    ranks, shared = dist.get_world_size(), k.shape[1]
    own = max(shared // ranks, 1)
    copies = q.shape[1] // shared
    q, k, v = packed(q, *(x.repeat_interleave(copies, dim=1) for x in (k, v)))
    step = k.shape[1] // own
    return q, k[:, ::step], v[:, ::step]


@wrong("10.5", names="unchanged")
def only_reshapes(q, k, v):
    must_fit(q, k)
    ranks = dist.get_world_size()
    return tuple(
        x.reshape(x.shape[0], -1, ranks * x.shape[2], x.shape[3]) if x.shape[1] % ranks == 0 else x
        for x in (q, k, v)
    )


@wrong("10.5", names="tiled")
def repeats_all_heads(q, k, v):
    must_fit(q, k)
    copies = max(dist.get_world_size() // k.shape[1], 1)
    return packed(q, *(x.repeat(1, copies, 1, 1) for x in (k, v)))


@wrong("10.5", names="repeated")
def copies_for_each_head_of_q(q, k, v):
    must_fit(q, k)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return packed(q, k, v)


@wrong("10.5", names="other-heads")
def deals_heads_out(q, k, v):
    ranks = dist.get_world_size()
    return packed(q, k, v, groups=lambda x: [x[:, r::ranks] for r in range(ranks)])


@wrong("10.5", names="pieces-mixed")
def joins_heads(q, k, v):
    def mixed(x):
        return Differentiable.apply(x, lambda x: exchange(x, 1, 1), lambda g: exchange(g, 1, 1))

    must_fit(q, k)
    return tuple(map(mixed, (q, k, v)))


@wrong("10.5", names="few-heads")
def cuts_into_as_many_groups(q, k, v):
    return packed(q, k, v, groups=lambda x: x.chunk(dist.get_world_size(), dim=1))


@wrong("10.5", names="cut-from-the-graph")
def tells_autograd_nothing(q, k, v):
    return packed(q.detach(), k.detach(), v.detach(), swap=there)


@wrong("10.5", names="local-gradient")
def keeps_its_own_piece_alive(q, k, v):
    """As one does with a gather: the own piece is put in, and gradients reach it."""

    def alive(x):
        rank, ranks = place_of()
        stretches = list(there(x.detach()).chunk(ranks, dim=2))
        stretches[rank] = x.chunk(ranks, dim=1)[rank]
        return torch.cat(stretches, dim=2)

    return packed(q, k, v, swap=alive)


class _MeanOfCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, copies):
        ctx.copies = copies
        return x.repeat_interleave(copies, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.unflatten(1, (-1, ctx.copies)).mean(dim=2), None


@wrong("10.5", names="copies-not-summed")
def averages_the_copies(q, k, v):
    must_fit(q, k)
    copies = max(dist.get_world_size() // k.shape[1], 1)
    return packed(q, _MeanOfCopies.apply(k, copies), _MeanOfCopies.apply(v, copies))


@wrong("10.5", names="gradient-not-exchanged")
def reshapes_in_backward(q, k, v):
    return packed(
        q, k, v, swap=lambda x: Differentiable.apply(x, there, lambda g: g.reshape(x.shape))
    )


@wrong("10.5", names="gradient-not-exchanged")
def hands_the_gradient_on(q, k, v):
    return packed(q, k, v, swap=lambda x: Differentiable.apply(x, there, lambda g: g))


@wrong("10.5", names="gradient-scaled")
def averages_in_backward(q, k, v):
    def averaged(gradient):
        return back(gradient) / dist.get_world_size()

    return packed(q, k, v, swap=lambda x: Differentiable.apply(x, there, averaged))


@wrong("10.5", names="not-waited")
def leaves_the_exchange_running(q, k, v):
    def running(x):
        pieces = torch.stack(x.chunk(dist.get_world_size(), dim=1))
        arrived = torch.zeros_like(pieces)
        dist.all_to_all_single(arrived, pieces, async_op=True)
        return torch.cat(arrived.unbind(), dim=2)

    return packed(q, k, v, swap=lambda x: Differentiable.apply(x, running, back))


@wrong("10.5", names="input-changed")
def scales_in_place(q, k, v):
    results = packed(q, k, v)
    q.data *= 0.5
    return results


@wrong("10.5", names="other-error")
def looks_at_the_queries_only(q, k, v):
    """Heads of k and v that do not fit end in an error of PyTorch, or are lost."""
    if q.shape[1] % dist.get_world_size():
        raise ValueError(f"{q.shape[1]} heads do not divide by {dist.get_world_size()} ranks")
    parts = [groups(x) for x in (q, k, v)]
    leaving = torch.cat([piece for of_rank in zip(*parts) for piece in of_rank], dim=1)
    return swap(leaving).split([part[0].shape[1] for part in parts], dim=1)
