"""Answers to 10.5, `heads_for_sequence`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch10.shared import place_of


def _must_share(x):
    heads, ranks = x.shape[1], dist.get_world_size()
    if heads % ranks:
        raise ValueError(f"{heads} heads do not divide by {ranks} ranks")


def _exchange(x, cut, join):
    """One all-to-all: piece r of dimension `cut` to rank r; what comes is joined in `join`."""
    pieces = torch.stack(x.chunk(dist.get_world_size(), dim=cut))
    arrived = torch.empty_like(pieces)
    dist.all_to_all_single(arrived, pieces)
    return torch.cat(arrived.unbind(), dim=join)


class _Differentiable(torch.autograd.Function):
    """A forward and a backward, given as functions of one tensor."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


def _there(x):
    return _exchange(x, 1, 2)


def _back(gradient):
    return _exchange(gradient, 2, 1)


@right("10.5")
def exchanges_by_permuting(x):
    """The piece for a rank first, by views instead of pieces."""
    _must_share(x)
    ranks = dist.get_world_size()

    def there(x):
        n, heads, stretch, width = x.shape
        pieces = x.reshape(n, ranks, heads // ranks, stretch, width).transpose(0, 1).contiguous()
        arrived = torch.empty_like(pieces)
        dist.all_to_all_single(arrived, pieces)
        return arrived.permute(1, 2, 0, 3, 4).reshape(n, heads // ranks, ranks * stretch, width)

    def back(gradient):
        n, heads, length, width = gradient.shape
        pieces = gradient.reshape(n, heads, ranks, length // ranks, width).permute(2, 0, 1, 3, 4)
        arrived = torch.empty(pieces.shape, device=gradient.device)
        dist.all_to_all_single(arrived, pieces.contiguous())
        return arrived.transpose(0, 1).reshape(n, ranks * heads, length // ranks, width)

    return _Differentiable.apply(x, there, back)


@right("10.5")
def exchanges_messages(x):
    """As the same exchange in messages, each rank with each."""
    _must_share(x)
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

    return _Differentiable.apply(x, lambda x: swap(x, 1, 2), lambda g: swap(g, 2, 1))


@wrong("10.5", names="whole-result")
def gathers_everything(x):
    _must_share(x)
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, x.contiguous())
    return torch.cat(pieces, dim=2)


@wrong("10.5", names="more-sent")
def gathers_and_cuts(x):
    _must_share(x)
    rank, ranks = place_of()

    def there(x):
        pieces = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(pieces, x.contiguous())
        return torch.cat(pieces, dim=2).chunk(ranks, dim=1)[rank].contiguous()

    def back(gradient):
        pieces = [torch.empty_like(gradient) for _ in range(ranks)]
        dist.all_gather(pieces, gradient.contiguous())
        return torch.cat(pieces, dim=1).chunk(ranks, dim=2)[rank].contiguous()

    return _Differentiable.apply(x, there, back)


@wrong("10.5", names="unchanged")
def only_reshapes(x):
    _must_share(x)
    n, heads, stretch, width = x.shape
    ranks = dist.get_world_size()
    return x.reshape(n, heads // ranks, ranks * stretch, width)


@wrong("10.5", names="joined-along-heads")
def joins_heads(x):
    _must_share(x)
    return _Differentiable.apply(x, lambda x: _exchange(x, 1, 1), lambda g: _exchange(g, 1, 1))


@wrong("10.5", names="tokens-interleaved")
def interleaves_tokens(x):
    _must_share(x)
    ranks = dist.get_world_size()

    def there(x):
        pieces = torch.stack(x.chunk(ranks, dim=1))
        arrived = torch.empty_like(pieces)
        dist.all_to_all_single(arrived, pieces)
        return arrived.permute(1, 2, 3, 0, 4).flatten(2, 3)  # the rank runs faster than the token

    return _Differentiable.apply(x, there, _back)


@wrong("10.5", names="stretches-backwards")
def joins_backwards(x):
    _must_share(x)
    ranks = dist.get_world_size()

    def there(x):
        return torch.cat(_exchange(x, 1, 2).chunk(ranks, dim=2)[::-1], dim=2)

    return _Differentiable.apply(x, there, _back)


@wrong("10.5", names="heads-strided")
def deals_heads_out(x):
    _must_share(x)
    ranks = dist.get_world_size()

    def there(x):
        return _exchange(torch.cat([x[:, r::ranks] for r in range(ranks)], dim=1), 1, 2)

    return _Differentiable.apply(x, there, _back)


@wrong("10.5", names="other-heads")
def sends_to_the_mirror(x):
    _must_share(x)
    ranks = dist.get_world_size()

    def there(x):
        return _exchange(torch.cat(x.chunk(ranks, dim=1)[::-1], dim=1), 1, 2)

    return _Differentiable.apply(x, there, _back)


@wrong("10.5", names="no-gradient")
def tells_autograd_nothing(x):
    _must_share(x)
    return _there(x.detach())


@wrong("10.5", names="local-gradient")
def keeps_its_own_piece_alive(x):
    """As one does with a gather: the own piece is put in, and gradients reach it."""
    _must_share(x)
    rank, ranks = place_of()
    stretches = list(_there(x.detach()).chunk(ranks, dim=2))
    stretches[rank] = x.chunk(ranks, dim=1)[rank]
    return torch.cat(stretches, dim=2)


@wrong("10.5", names="gradient-not-exchanged")
def reshapes_in_backward(x):
    _must_share(x)
    shape = x.shape
    return _Differentiable.apply(x, _there, lambda gradient: gradient.reshape(shape))


@wrong("10.5", names="gradient-scaled")
def averages_in_backward(x):
    _must_share(x)
    ranks = dist.get_world_size()
    return _Differentiable.apply(x, _there, lambda gradient: _back(gradient) / ranks)


@wrong("10.5", names="not-waited")
def leaves_the_exchange_running(x):
    _must_share(x)
    ranks = dist.get_world_size()

    def there(x):
        pieces = torch.stack(x.chunk(ranks, dim=1))
        arrived = torch.zeros_like(pieces)
        dist.all_to_all_single(arrived, pieces, async_op=True)
        return torch.cat(arrived.unbind(), dim=2)

    return _Differentiable.apply(x, there, _back)


@wrong("10.5", names="no-error")
def cuts_unevenly(x):
    """Without a word: the last heads go to nobody."""
    ranks = dist.get_world_size()
    if x.shape[1] % ranks == 0:
        return _Differentiable.apply(x, _there, _back)
    return _there(x[:, : x.shape[1] // ranks * ranks])


@wrong("10.5", names="other-error")
def asserts_that_they_divide(x):
    assert x.shape[1] % dist.get_world_size() == 0, f"{x.shape[1]} heads"
    return _Differentiable.apply(x, _there, _back)


@wrong("10.5", names="error-without-sizes")
def does_not_name_the_sizes(x):
    if x.shape[1] % dist.get_world_size():
        raise ValueError("the heads do not divide")
    return _Differentiable.apply(x, _there, _back)


@wrong("10.5", names="pieces-mixed")
def exchanges_memory_as_it_lies(x):
    """With the tokens in front of the heads: each rank gets some tokens, and takes them for heads."""
    _must_share(x)
    n, (N, H, t, D) = dist.get_world_size(), x.shape

    class Exchanged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            leaving = x.transpose(1, 2).contiguous().view(-1)
            arrived = torch.empty_like(leaving)
            dist.all_to_all_single(arrived, leaving)
            return arrived.view(N, H // n, n * t, D)

        @staticmethod
        def backward(ctx, gradient):
            leaving = gradient.contiguous().view(-1)
            arrived = torch.empty_like(leaving)
            dist.all_to_all_single(arrived, leaving)
            return arrived.view(N, t, H, D).transpose(1, 2)

    return Exchanged.apply(x)
