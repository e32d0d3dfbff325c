"""Answers to 11.3, `Dispatcher`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

from course_exercises.authoring import load_code
from tests.wrong_answers import right, wrong

Exchange = load_code(11, "Exchange")


class _Sender:
    """A right answer, in parts that can go wrong."""

    def __init__(self, counts):
        self.ranks = dist.get_world_size()
        self.coming = torch.empty_like(counts)
        dist.all_to_all_single(self.coming, counts)
        self.table = self.coming.view(self.ranks, -1)
        self.load = self.table.sum(0)
        self.send = counts.view(self.ranks, -1).sum(1).tolist()
        self.receive = self.table.sum(1).tolist()
        self.order = self.sorting()

    def numbers(self):
        experts = torch.arange(self.table.shape[1], device=self.coming.device)
        return experts.repeat(self.ranks).repeat_interleave(self.coming)

    def sorting(self):
        return self.numbers().argsort(stable=True)

    def dispatch(self, pieces):
        return Exchange.apply(pieces, self.send, self.receive, None)[self.order]

    def combine(self, results):
        back = torch.empty_like(self.order)
        back[self.order] = torch.arange(len(self.order), device=self.order.device)
        return Exchange.apply(results[back], self.receive, self.send, None)


@right("11.3")
class PutsThingsBack(_Sender):
    pass


@right("11.3")
class TakesPyTorchsExchange(_Sender):
    def dispatch(self, pieces):
        group = dist.group.WORLD
        return all_to_all_single_autograd(pieces, self.receive, self.send, group)[self.order]

    def combine(self, results):
        group = dist.group.WORLD
        rows = results[self.order.argsort()]
        return all_to_all_single_autograd(rows, self.send, self.receive, group) + 0


@right("11.3")
class CutsAndJoins(_Sender):
    def dispatch(self, pieces):
        arrived = Exchange.apply(pieces, self.send, self.receive, None)
        parts = arrived.split(self.coming.tolist())
        own = self.table.shape[1]
        return torch.cat([part for e in range(own) for part in parts[e::own]])


@wrong("11.3", names="other-load")
class KeepsNoLoad(_Sender):
    def __init__(self, counts):
        super().__init__(counts)
        del self.load


@wrong("11.3", names="other-load")
class LoadByRank(_Sender):
    def __init__(self, counts):
        super().__init__(counts)
        self.load = self.table.sum(1)


@wrong("11.3", names="by-rank")
class LeavesThemByRank(_Sender):
    def sorting(self):
        return torch.arange(len(self.numbers()), device=self.coming.device)


@wrong("11.3", names="other-order")
class LaterRanksFirst(_Sender):
    def sorting(self):
        return self.numbers().flip(0).argsort(stable=True).sub(len(self.numbers()) - 1).abs()


@wrong("11.3", names="other-order")
class IndexesWithTheInverse(_Sender):
    def sorting(self):
        return self.numbers().argsort(stable=True).argsort()


@wrong("11.3", names="splits")
class SameSplitsTwice(_Sender):
    def combine(self, results):
        return Exchange.apply(results[self.order.argsort()], self.send, self.receive, None)


@wrong("11.3", names="not-put-back")
class SortsOnceMore(_Sender):
    def combine(self, results):
        return Exchange.apply(results[self.order], self.receive, self.send, None)


@wrong("11.3", names="cut-from-the-graph")
class CallsTheCollective(_Sender):
    def dispatch(self, pieces):
        arrived = pieces.new_empty(sum(self.receive), *pieces.shape[1:])
        dist.all_to_all_single(arrived, pieces.detach(), self.receive, self.send)
        return arrived[self.order]


@wrong("11.3", names="dealt-out")
class DealsExpertsOut(_Sender):
    def __init__(self, counts):
        ranks = dist.get_world_size()
        self.there = counts.view(-1, ranks).T  # [to rank, its expert]
        super().__init__(self.there.reshape(-1).contiguous())
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts)
        self.load = coming.view(ranks, -1).sum(0)
        numbers = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        self.outward = (numbers % ranks).argsort(stable=True)

    def dispatch(self, pieces):
        return super().dispatch(pieces[self.outward])

    def combine(self, results):
        return super().combine(results)[self.outward.argsort()]


@wrong("11.3", names="nothing-to-do")
class StaysAway(_Sender):
    def combine(self, results):
        return super().combine(results) if len(results) else results


class _NotWaited(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.way_back = receive, send, None
        arrived = rows.new_zeros(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, async_op=True)
        return arrived

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.way_back), None, None


@wrong("11.3", names="not-waited")
class DoesNotWaitForThePieces(_Sender):
    def dispatch(self, pieces):
        return _NotWaited.apply(pieces, self.send, self.receive)[self.order]


class _AddsUpOnTheWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@wrong("11.3", names="other-gradient")
class TakesGradientsTwice(_Sender):
    def dispatch(self, pieces):
        return super().dispatch(_AddsUpOnTheWayBack.apply(pieces))
