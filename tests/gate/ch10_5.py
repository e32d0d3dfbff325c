"""10.5, `heads_for_sequence`: answers written from the stub alone."""

import torch
import torch.distributed as dist


def require_whole_groups(heads, ranks):
    if heads % ranks:
        raise ValueError(f"{heads} heads do not divide by {ranks} ranks.")


def to_heads(x):
    """(N, H, T / n, D) of each rank becomes (N, H / n, T, D)."""
    ranks = dist.get_world_size()
    batch, heads, tokens, width = x.shape
    groups = x.view(batch, ranks, heads // ranks, tokens, width).movedim(1, 0).contiguous()
    received = torch.empty_like(groups)
    dist.all_to_all_single(received, groups)
    return received.movedim(0, 2).reshape(batch, heads // ranks, ranks * tokens, width)


def to_sequence(x):
    """(N, H / n, T, D) of each rank becomes (N, H, T / n, D)."""
    ranks = dist.get_world_size()
    batch, heads, tokens, width = x.shape
    pieces = x.reshape(batch, heads, ranks, tokens // ranks, width).movedim(2, 0).contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return received.movedim(0, 1).reshape(batch, ranks * heads, tokens // ranks, width)


class Right(torch.autograd.Function):
    """A right answer, without its ValueError."""

    @staticmethod
    def forward(ctx, x):
        return to_heads(x.contiguous())

    @staticmethod
    def backward(ctx, gradient):
        return to_sequence(gradient)


def right(x):
    """A right answer, of which the wrong ones change a piece."""
    require_whole_groups(x.shape[1], dist.get_world_size())
    return Right.apply(x)


def knows_no_backward(x):
    """Calls the collective on the tensor itself: what comes in is no part of the graph."""
    require_whole_groups(x.shape[1], dist.get_world_size())
    return to_heads(x.contiguous())


class InMemoryOrder(torch.autograd.Function):
    """Cuts the gradient into n pieces as it lies in memory."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return to_heads(x.contiguous())

    @staticmethod
    def backward(ctx, gradient):
        batch, heads, tokens, width = ctx.shape
        pieces = gradient.contiguous().view(dist.get_world_size(), -1)
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces)
        return received.view(batch, heads, tokens, width)


def sends_the_gradient_in_the_order_it_lies(x):
    """Cuts the gradient in memory order, by heads, where the way back has to cut it by tokens."""
    require_whole_groups(x.shape[1], dist.get_world_size())
    return InMemoryOrder.apply(x)


class NotPutTogether(torch.autograd.Function):
    """Reads what came in as if the ranks' stretches lay behind each other for each head."""

    @staticmethod
    def forward(ctx, x):
        ranks = dist.get_world_size()
        batch, heads, tokens, width = x.shape
        groups = x.reshape(batch, ranks, heads // ranks, tokens, width).movedim(1, 0).contiguous()
        received = torch.empty_like(groups)
        dist.all_to_all_single(received, groups)
        return received.view(batch, heads // ranks, ranks * tokens, width)

    @staticmethod
    def backward(ctx, gradient):
        return to_sequence(gradient)


def forgets_to_permute_what_came(x):
    """Reshapes (n, N, H / n, t, D) to (N, H / n, T, D) without moving the first dimension."""
    require_whole_groups(x.shape[1], dist.get_world_size())
    return NotPutTogether.apply(x)


class Gathered(torch.autograd.Function):
    """Gathers all heads of all tokens, and keeps its own."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2).chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        return to_sequence(gradient)


def gathers_and_takes_its_heads(x):
    """Uses an all-gather, which brings n times what is needed, in place of the all-to-all."""
    require_whole_groups(x.shape[1], dist.get_world_size())
    return Gathered.apply(x)


def asserts_that_the_heads_divide(x):
    """Refuses heads that do not divide with an `assert`, which is no ValueError and has no numbers."""
    assert x.shape[1] % dist.get_world_size() == 0, "heads do not divide"
    return Right.apply(x)


class Strided(torch.autograd.Function):
    """Deals the heads out one by one, in both directions."""

    @staticmethod
    def forward(ctx, x):
        ranks = dist.get_world_size()
        batch, heads, tokens, width = x.shape
        groups = x.reshape(batch, heads // ranks, ranks, tokens, width).transpose(1, 2)
        return to_heads(groups.reshape(x.shape))

    @staticmethod
    def backward(ctx, gradient):
        ranks = dist.get_world_size()
        back = to_sequence(gradient)
        batch, heads, tokens, width = back.shape
        groups = back.view(batch, ranks, heads // ranks, tokens, width).transpose(1, 2)
        return groups.reshape(back.shape)


def takes_every_nth_head(x):
    """Gives rank r the heads r, r + n and so on, not the r-th equal group of neighbours."""
    require_whole_groups(x.shape[1], dist.get_world_size())
    return Strided.apply(x)


class Averaged(torch.autograd.Function):
    """Divides the gradients by the number of ranks."""

    @staticmethod
    def forward(ctx, x):
        return to_heads(x.contiguous())

    @staticmethod
    def backward(ctx, gradient):
        return to_sequence(gradient) / dist.get_world_size()


def averages_the_gradients(x):
    """Divides in backward by n, as if the gradients of n ranks had been added up."""
    require_whole_groups(x.shape[1], dist.get_world_size())
    return Averaged.apply(x)


class TokensInTurns(torch.autograd.Function):
    """Puts the ranks' tokens in turns: the first of each rank, then the second of each."""

    @staticmethod
    def forward(ctx, x):
        ranks = dist.get_world_size()
        batch, heads, tokens, width = x.shape
        groups = x.reshape(batch, ranks, heads // ranks, tokens, width).movedim(1, 0).contiguous()
        received = torch.empty_like(groups)
        dist.all_to_all_single(received, groups)
        return received.movedim(0, 3).reshape(batch, heads // ranks, ranks * tokens, width)

    @staticmethod
    def backward(ctx, gradient):
        ranks = dist.get_world_size()
        batch, heads, tokens, width = gradient.shape
        stretches = gradient.reshape(batch, heads, tokens // ranks, ranks, width).transpose(2, 3)
        return to_sequence(stretches.reshape(gradient.shape))


def interleaves_the_tokens(x):
    """Moves the dimension of ranks behind the tokens, so that neighbours are those of n ranks."""
    require_whole_groups(x.shape[1], dist.get_world_size())
    return TokensInTurns.apply(x)


ANSWERS = {
    "10.5": [
        knows_no_backward,
        sends_the_gradient_in_the_order_it_lies,
        forgets_to_permute_what_came,
        gathers_and_takes_its_heads,
        asserts_that_the_heads_divide,
        takes_every_nth_head,
        averages_the_gradients,
        interleaves_the_tokens,
    ]
}
