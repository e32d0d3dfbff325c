"""Plausible wrong answers, and other right ones, to the exercises of chapter 11."""

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import one_hot

from course_utils.checks import load_code
from tests.wrong_answers import right, wrong

Exchange = load_code(11, "Exchange")

# ---- 11.1 route ----------------------------------------------------------------------------------


@right("11.1")
def masks_with_minus_infinity(logits, k):
    choices = logits.argsort(dim=1, descending=True)[:, :k]
    masked = torch.full_like(logits, float("-inf")).scatter(1, choices, logits.gather(1, choices))
    return choices, masked.softmax(1).gather(1, choices)


@right("11.1")
def normalises_probabilities(logits, k):
    best = logits.softmax(1).topk(k)
    return best.indices, best.values / best.values.sum(1, keepdim=True)


@wrong("11.1", names="swapped")
def weights_first(logits, k):
    best = logits.topk(k)
    return best.values.softmax(1), best.indices


@wrong("11.1", names="not-a-pair")
def returns_the_weights(logits, k):
    return logits.topk(k).values.softmax(1)


@wrong("11.1", names="softmax-over-all")
def probabilities_of_the_best(logits, k):
    best = logits.softmax(1).topk(k)
    return best.indices, best.values


@wrong("11.1", names="raw-logits")
def logits_of_the_best(logits, k):
    best = logits.topk(k)
    return best.indices, best.values


@wrong("11.1", names="divided-by-the-sum")
def divides_logits(logits, k):
    best = logits.topk(k)
    return best.indices, best.values / best.values.sum(1, keepdim=True)


@wrong("11.1", names="softmax-over-tokens")
def softmax_of_the_other_dimension(logits, k):
    best = logits.topk(k)
    return best.indices, best.values.softmax(0)


@wrong("11.1", names="masked-with-zero")
def masks_with_zero(logits, k):
    best = logits.topk(k)
    masked = torch.zeros_like(logits).scatter(1, best.indices, best.values)
    return best.indices, masked.softmax(1).gather(1, best.indices)


@wrong("11.1", names="smallest")
def sorts_ascending(logits, k):
    choices = logits.argsort(dim=1)[:, :k]
    return choices, logits.gather(1, choices).softmax(1)


@wrong("11.1", names="by-number")
def sorts_by_number(logits, k):
    choices = logits.topk(k).indices.sort().values
    return choices, logits.gather(1, choices).softmax(1)


@wrong("11.1", names="other-dimension")
def experts_choose_tokens(logits, k):
    best = logits.topk(k, dim=0)
    return best.indices, best.values.softmax(0)


@wrong("11.1", names="no-gradient")
def detaches(logits, k):
    best = logits.detach().topk(k)
    return best.indices, best.values.softmax(1)


@wrong("11.1", names="fixed-k")
def always_two(logits, k):
    best = logits.topk(2)
    return best.indices, best.values.softmax(1)


@wrong("11.1", names="no-tokens")
def stacks_tokens(logits, k):
    best = [row.topk(k) for row in logits]
    return torch.stack([b.indices for b in best]), torch.stack([b.values.softmax(0) for b in best])


@wrong("11.1", names="other-order")
def weighs_in_order_of_number(logits, k):
    choices = logits.topk(k).indices
    return choices, logits.gather(1, choices.sort().values).softmax(1)


@wrong("11.1", names="softmax-twice")
def softmax_of_probabilities(logits, k):
    best = logits.softmax(1).topk(k)
    return best.indices, best.values.softmax(1)


@wrong("11.1", names="sigmoid")
def normalises_sigmoids(logits, k):
    best = logits.topk(k)
    gates = best.values.sigmoid()
    return best.indices, gates / gates.sum(1, keepdim=True)


@wrong("11.1", names="column-for-each-expert")
def weighs_every_expert(logits, k):
    choices = logits.topk(k).indices
    masked = torch.full_like(logits, float("-inf")).scatter(1, choices, logits.gather(1, choices))
    return choices, masked.softmax(1)


@wrong("11.1", names="column-for-each-expert")
def marks_the_chosen(logits, k):
    best = logits.topk(k)
    return one_hot(best.indices, logits.shape[1]).sum(1), best.values.softmax(1)


@wrong("11.1", names="smallest-first")
def takes_the_end_of_an_argsort(logits, k):
    choices = logits.argsort(1)[:, logits.shape[1] - k :]
    return choices, logits.gather(1, choices).softmax(1)


# ---- 11.2 places ---------------------------------------------------------------------------------


def _places(choices, capacity, before, own=lambda marks: marks.cumsum(0) - marks, limit=0):
    """The places, where `before(counts, rank)` stand in front of this rank's pieces."""
    chosen = choices.flatten()
    marks = one_hot(chosen, len(capacity))
    counts = [torch.zeros_like(capacity) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, marks.sum(0))
    start = before(torch.stack(counts), dist.get_rank())
    place = (start + own(marks)).gather(1, chosen[:, None]).flatten()
    place = place.where(place < capacity[chosen] + limit, -1)
    return place.view_as(choices)


def _earlier(counts, rank):
    return counts[:rank].sum(0)


@right("11.2")
def gathers_into_one_tensor(choices, capacity):
    chosen = choices.reshape(-1)
    counts = torch.zeros_like(capacity).index_add(0, chosen, torch.ones_like(chosen))
    table = torch.empty(dist.get_world_size() * len(capacity), dtype=torch.int64)
    table = table.to(choices.device)
    dist.all_gather_into_tensor(table, counts)
    next_place = table.view(-1, len(capacity))[: dist.get_rank()].sum(0)
    places = torch.empty_like(chosen)
    for i, expert in enumerate(chosen.tolist()):
        places[i] = next_place[expert]
        next_place[expert] += 1
    places[places >= capacity[chosen]] = -1
    return places.view_as(choices)


@right("11.2")
def sums_up_in_a_table(choices, capacity):
    marks = one_hot(choices, len(capacity)).flatten(0, 1)
    table = marks.new_zeros(dist.get_world_size(), len(capacity))
    table[dist.get_rank()] = marks.sum(0)
    counts = [torch.empty_like(capacity) for _ in table]
    dist.all_gather(counts, table[dist.get_rank()].clone())
    before = torch.stack(counts).cumsum(0)[dist.get_rank()] - marks.sum(0)
    place = ((before + marks.cumsum(0)) * marks).sum(1) - 1
    return torch.where(place < capacity[choices.flatten()], place, -1).view_as(choices)


@wrong("11.2", names="own-queue")
def counts_own_pieces(choices, capacity):
    return _places(choices, capacity, lambda counts, rank: 0)


@wrong("11.2", names="inclusive")
def counts_own_rank_too(choices, capacity):
    return _places(choices, capacity, lambda counts, rank: counts[: rank + 1].sum(0))


@wrong("11.2", names="later-ranks")
def counts_later_ranks(choices, capacity):
    return _places(choices, capacity, lambda counts, rank: counts[rank + 1 :].sum(0))


@wrong("11.2", names="all-experts")
def counts_all_experts(choices, capacity):
    return _places(choices, capacity, lambda counts, rank: counts[:rank].sum())


@wrong("11.2", names="from-one")
def starts_at_one(choices, capacity):
    place = _places(choices, capacity, _earlier)
    return place.where(place < 0, place + 1)


@wrong("11.2", names="one-too-many")
def at_most_the_capacity(choices, capacity):
    return _places(choices, capacity, _earlier, limit=1)


@wrong("11.2", names="not-dropped")
def drops_nothing(choices, capacity):
    return _places(choices, capacity, _earlier, limit=10_000)


@wrong("11.2", names="backwards")
def last_tokens_first(choices, capacity):
    return _places(
        choices, capacity, _earlier, own=lambda marks: marks.flip(0).cumsum(0).flip(0) - marks
    )


@wrong("11.2", names="local-capacity")
def drops_by_its_own_queue(choices, capacity):
    marks = one_hot(choices.flatten(), len(capacity))
    own = ((marks.cumsum(0) * marks).sum(1) - 1).view_as(choices)
    places = _places(choices, capacity, _earlier, limit=10_000)
    return places.where(own < capacity[choices], -1)


@wrong("11.2", names="one-capacity")
def takes_the_first_capacity(choices, capacity):
    return _places(choices, capacity[:1].repeat(len(capacity)), _earlier)


@wrong("11.2", names="first-choices-first")
def serves_first_choices_first(choices, capacity):
    marks = one_hot(choices, len(capacity)).transpose(0, 1)  # (k, T, E)
    counts = [torch.empty(marks.shape[0], len(capacity), dtype=torch.int64).to(choices.device)]
    counts = [torch.empty_like(counts[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, marks.sum(1).contiguous())
    table = torch.stack(counts)
    start = table.sum(0).cumsum(0) - table.sum(0) + table[: dist.get_rank()].sum(0)
    place = ((start[:, None] + marks.cumsum(1)) * marks).sum(2).T - 1
    return place.where(place < capacity[choices], -1)


@wrong("11.2", names="one-queue")
def numbers_all_pieces(choices, capacity):
    counts = torch.tensor([choices.numel()], device=choices.device)
    table = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
    dist.all_gather(table, counts)
    first = sum(table[: dist.get_rank()], torch.zeros_like(counts))
    place = (first + torch.arange(choices.numel(), device=choices.device)).view_as(choices)
    return place.where(place < capacity[choices], -1)


@wrong("11.2", names="too-many-numbers")
def gathers_all_choices(choices, capacity):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, choices.tolist())
    flat = torch.tensor([e for rank in everyone for token in rank for e in token])
    marks = one_hot(flat.to(choices.device), len(capacity))
    place = (marks.cumsum(0) * marks).sum(1) - 1
    first = sum(len(rank) for rank in everyone[: dist.get_rank()]) * choices.shape[1]
    place = place[first:][: choices.numel()].view_as(choices)
    return place.where(place < capacity[choices], -1)


@wrong("11.2", names="empty-rank")
def stays_away_without_tokens(choices, capacity):
    return _places(choices, capacity, _earlier) if len(choices) else choices


@wrong("11.2", names="shared-capacity")
def shares_the_capacity_out(choices, capacity):
    share, chosen = capacity // dist.get_world_size(), choices.flatten()
    marks = one_hot(chosen, len(capacity))
    own = (marks.cumsum(0) - marks).gather(1, chosen[:, None]).view_as(choices)
    places = _places(choices, torch.full_like(capacity, 10_000), _earlier)
    return places.where(own < share[choices], -1)


@wrong("11.2", names="shared-capacity")
def counts_what_ranks_keep_of_a_share(choices, capacity):
    share = capacity // dist.get_world_size()
    return _places(choices, capacity, lambda counts, rank: counts[:rank].minimum(share).sum(0))


@wrong("11.2", names="other-shape")
def leaves_them_flat(choices, capacity):
    return _places(choices, capacity, _earlier).flatten()


@wrong("11.2", names="not-minus-one")
def puts_the_dropped_last(choices, capacity):
    places = _places(choices, torch.full_like(capacity, 10_000), _earlier)
    return places.minimum(capacity[choices] - 1)


@wrong("11.2", names="not-minus-one")
def marks_the_dropped_with_the_capacity(choices, capacity):
    places = _places(choices, torch.full_like(capacity, 10_000), _earlier)
    return places.minimum(capacity[choices])


@wrong("11.2", names="first-choices-first")
def serves_own_first_choices_first(choices, capacity):
    """Rank by rank as it should be, and within a rank all first choices in front."""
    columns = _places(choices.T.contiguous(), capacity, _earlier)
    return columns.T


@wrong("11.2", names="along-the-experts")
def counts_along_the_experts(choices, capacity):
    return _places(choices, capacity, _earlier, own=lambda marks: marks.cumsum(1) - marks)


@wrong("11.2", names="not-waited")
def does_not_wait_for_the_counts(choices, capacity):
    chosen = choices.flatten()
    marks = one_hot(chosen, len(capacity))
    counts = [torch.zeros_like(capacity) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, marks.sum(0), async_op=True)
    start = torch.stack(counts)[: dist.get_rank()].sum(0)
    place = (start + marks.cumsum(0) - marks).gather(1, chosen[:, None]).flatten()
    return place.where(place < capacity[chosen], -1).view_as(choices)


# ---- 11.3 Dispatcher -----------------------------------------------------------------------------


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


@wrong("11.3", names="no-load")
class KeepsNoLoad(_Sender):
    def __init__(self, counts):
        super().__init__(counts)
        del self.load


@wrong("11.3", names="load-sent")
class LoadOfWhatItSends(_Sender):
    def __init__(self, counts):
        super().__init__(counts)
        self.load = self.table[dist.get_rank()]


@wrong("11.3", names="load-by-rank")
class LoadByRank(_Sender):
    def __init__(self, counts):
        super().__init__(counts)
        self.load = self.table.sum(1)


@wrong("11.3", names="by-rank")
class LeavesThemByRank(_Sender):
    def sorting(self):
        return torch.arange(len(self.numbers()), device=self.coming.device)


@wrong("11.3", names="unstable")
class LaterRanksFirst(_Sender):
    def sorting(self):
        return self.numbers().flip(0).argsort(stable=True).sub(len(self.numbers()) - 1).abs()


@wrong("11.3", names="splits")
class SameSplitsTwice(_Sender):
    def combine(self, results):
        return Exchange.apply(results[self.order.argsort()], self.send, self.receive, None)


@wrong("11.3", names="not-put-back")
class DoesNotUndoTheSorting(_Sender):
    def combine(self, results):
        return Exchange.apply(results, self.receive, self.send, None)


@wrong("11.3", names="not-put-back")
class SortsOnceMore(_Sender):
    def combine(self, results):
        return Exchange.apply(results[self.order], self.receive, self.send, None)


@wrong("11.3", names="no-gradient")
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


@wrong("11.3", names="stays-away")
class StaysAway(_Sender):
    def combine(self, results):
        return super().combine(results) if len(results) else results


@wrong("11.3", names="load-not-by-expert")
class LoadOfAllExperts(_Sender):
    def __init__(self, counts):
        super().__init__(counts)
        self.load = self.table.sum()


@wrong("11.3", names="load-not-by-expert")
class LoadByRankAndExpert(_Sender):
    def __init__(self, counts):
        super().__init__(counts)
        self.load = self.coming


@wrong("11.3", names="not-by-expert")
class LastExpertFirst(_Sender):
    def sorting(self):
        return self.numbers().argsort(stable=True, descending=True)


@wrong("11.3", names="not-by-expert")
class IndexesWithTheInverse(_Sender):
    def sorting(self):
        return self.numbers().argsort(stable=True).argsort()


@wrong("11.3", names="splits")
class ReadsTheTableByColumns(_Sender):
    """The counts that come are taken for a table with a row for each expert."""

    def __init__(self, counts):
        super().__init__(counts)
        self.receive = self.coming.view(-1, self.ranks).sum(0).tolist()


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


@wrong("11.3", names="nothing-to-do")
class HasNothingToSend(_Sender):
    """A rank without pieces leaves dispatch before the exchange, and takes part in combine."""

    def dispatch(self, pieces):
        return super().dispatch(pieces) if len(pieces) else pieces


# ---- 11.4 balance_loss ---------------------------------------------------------------------------


def _f(choices, experts, dtype=torch.float32, over_all=True):
    counts = choices.flatten().bincount(minlength=experts)
    if over_all:
        dist.all_reduce(counts)
    return counts.to(dtype), counts.sum()


@right("11.4")
def reduces_counts_as_floats(logits, choices):
    counts = one_hot(choices, logits.shape[1]).float().sum((0, 1))
    dist.all_reduce(counts)
    p = logits.softmax(1).sum(0) / (counts.sum() / choices.shape[1])
    return logits.shape[1] * torch.dot(counts / counts.sum(), p)


@right("11.4")
def weighs_each_token(logits, choices):
    counts, tokens = torch.zeros(logits.shape[1]).to(logits.device), torch.tensor(len(choices))
    counts = counts.index_add(0, choices.flatten(), torch.ones(choices.numel()).to(logits.device))
    numbers = torch.cat([counts, tokens[None].float().to(logits.device)])
    dist.all_reduce(numbers)
    f = numbers[:-1] / numbers[:-1].sum()
    return (logits.softmax(1) @ f).sum() * len(f) / numbers[-1]


@wrong("11.4", names="own-shares")
def shares_of_its_own(logits, choices):
    counts, pieces = _f(choices, logits.shape[1], over_all=False)
    return (
        logits.shape[1]
        * (counts / pieces * logits.softmax(1).mean(0)).sum()
        / dist.get_world_size()
    )


@wrong("11.4", names="own-shares")
def mean_of_the_ranks_losses(logits, choices):
    counts, pieces = _f(choices, logits.shape[1], over_all=False)
    loss = logits.shape[1] * (counts / pieces * logits.softmax(1).mean(0)).sum()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size() + loss - loss.detach()


@wrong("11.4", names="own-mean")
def mean_over_own_tokens(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    return logits.shape[1] * (counts / pieces * logits.softmax(1).mean(0)).sum()


@wrong("11.4", names="whole-on-each-rank")
def whole_loss_on_each_rank(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    part = logits.softmax(1).sum(0) * choices.shape[1] / pieces
    whole = part.detach().clone()
    dist.all_reduce(whole)
    return logits.shape[1] * (counts / pieces * (whole + part - part.detach())).sum()


@wrong("11.4", names="without-e")
def forgets_the_factor(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    return (counts / pieces * logits.softmax(1).sum(0)).sum() * choices.shape[1] / pieces


@wrong("11.4", names="k-times")
def shares_of_tokens(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    tokens = pieces / choices.shape[1]
    return logits.shape[1] * (counts / tokens * logits.softmax(1).sum(0)).sum() / tokens


@wrong("11.4", names="divided-by-ranks")
def averages_over_ranks(logits, choices):
    return reduces_counts_as_floats(logits, choices) / dist.get_world_size()


@wrong("11.4", names="logits")
def forgets_the_softmax(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    return logits.shape[1] * (counts / pieces * logits.sum(0)).sum() * choices.shape[1] / pieces


@wrong("11.4", names="no-gradient")
def takes_numbers(logits, choices):
    return reduces_counts_as_floats(logits.detach(), choices)


@wrong("11.4", names="unequal")
def multiplies_by_the_ranks(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    tokens = len(choices) * dist.get_world_size()
    return logits.shape[1] * (counts / pieces * logits.softmax(1).sum(0)).sum() / tokens


@wrong("11.4", names="empty-rank")
def part_of_a_mean(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    share = choices.numel() / pieces
    return logits.shape[1] * (counts / pieces * logits.softmax(1).mean(0)).sum() * share


@wrong("11.4", names="too-many-numbers")
def tells_every_probability(logits, choices):
    numbers = torch.cat([_marks(choices, logits.shape[1]), logits.softmax(1).sum(0)[None]])
    dist.all_reduce(numbers.detach().clone())
    return reduces_counts_as_floats(logits, choices)


def _marks(choices, experts):
    return one_hot(choices.flatten(), experts).sum(0)[None].float()


@wrong("11.4", names="divided-by-pieces")
def divides_by_pieces(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    return logits.shape[1] * (counts / pieces * logits.softmax(1).sum(0)).sum() / pieces


@wrong("11.4", names="softmax-over-tokens")
def softmax_of_each_expert(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    tokens = pieces / choices.shape[1]
    return logits.shape[1] * (counts / pieces * logits.softmax(0).sum(0)).sum() / tokens


@wrong("11.4", names="soft-shares")
def multiplies_probabilities(logits, choices):
    _, pieces = _f(choices, logits.shape[1])
    tokens, own = pieces / choices.shape[1], logits.softmax(1).sum(0)
    everyone = own.detach().clone()
    dist.all_reduce(everyone)
    return logits.shape[1] * (everyone / tokens * own).sum() / tokens


@wrong("11.4", names="first-choices")
def counts_first_choices(logits, choices):
    counts, tokens = _f(choices[:, 0], logits.shape[1])
    return logits.shape[1] * (counts / tokens * logits.softmax(1).sum(0)).sum() / tokens


@wrong("11.4", names="not-a-scalar")
def leaves_the_experts_apart(logits, choices):
    counts, pieces = _f(choices, logits.shape[1])
    tokens = pieces / choices.shape[1]
    return logits.shape[1] * (counts / pieces * logits.softmax(1).sum(0)) / tokens


@wrong("11.4", names="unequal")
def averages_the_ranks_shares(logits, choices):
    f = one_hot(choices.flatten(), logits.shape[1]).float().mean(0)
    tokens = f.new_full((), len(logits))
    dist.all_reduce(f)
    dist.all_reduce(tokens)
    f = f / dist.get_world_size()
    return logits.shape[1] * (f * logits.softmax(1).sum(0)).sum() / tokens


@wrong("11.4", names="not-waited")
def does_not_wait_for_the_sum(logits, choices):
    counts = choices.flatten().bincount(minlength=logits.shape[1])
    dist.all_reduce(counts, async_op=True)
    tokens = counts.sum() / choices.shape[1]
    return logits.shape[1] * (counts / counts.sum() * logits.softmax(1).sum(0)).sum() / tokens


# ---- 11.5 average_expert_gradients ---------------------------------------------------------------


def _is_expert(name):
    return "experts" in name.split(".")


def _average(model, mesh, expert, other=None, missing=True, is_expert=_is_expert):
    """`expert` and `other` are pairs (group, divisor)."""
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.grad is None and missing:
            p.grad = torch.zeros_like(p)
        group, divisor = expert if is_expert(name) else other or (None, mesh.size())
        dist.all_reduce(p.grad, group=group)
        p.grad /= divisor


@right("11.5")
def divides_first(model, mesh):
    data = mesh.get_group("data")
    for name, p in model.named_parameters():
        if p.requires_grad:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad / mesh.size()
            dist.all_reduce(gradient, group=data if ".experts." in f".{name}" else None)
            p.grad = gradient


@right("11.5")
def one_flat_buffer_for_each_kind(model, mesh):
    for kind, group in ((True, mesh.get_group("data")), (False, dist.group.WORLD)):
        own = [p for n, p in model.named_parameters() if _is_expert(n) is kind and p.requires_grad]
        for p in own:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        flat = torch.cat([p.grad.flatten() for p in own])
        dist.all_reduce(flat, group=group)
        for p, part in zip(own, flat.split([p.numel() for p in own])):
            p.grad.copy_(part.view_as(p) / mesh.size())


@wrong("11.5", names="mean-over-copies")
def mean_over_the_copies(model, mesh):
    _average(model, mesh, (mesh.get_group("data"), mesh["data"].size()))


@wrong("11.5", names="divided-by-the-group")
def divides_by_the_experts_group(model, mesh):
    _average(model, mesh, (mesh.get_group("data"), mesh["experts"].size()))


@wrong("11.5", names="not-divided")
def only_sums(model, mesh):
    _average(model, mesh, (mesh.get_group("data"), 1), (None, 1))


@wrong("11.5", names="not-divided")
def only_sums_experts(model, mesh):
    _average(model, mesh, (mesh.get_group("data"), 1))


@wrong("11.5", names="experts-over-everybody")
def averages_everything_over_all(model, mesh):
    _average(model, mesh, (None, mesh.size()))


@wrong("11.5", names="experts-over-their-group")
def takes_the_other_group(model, mesh):
    _average(model, mesh, (mesh.get_group("experts"), mesh.size()))


@wrong("11.5", names="experts-left-alone")
def leaves_the_experts(model, mesh):
    for name, p in model.named_parameters():
        if p.requires_grad and not _is_expert(name):
            dist.all_reduce(p.grad)
            p.grad /= mesh.size()


@wrong("11.5", names="others-over-data")
def everything_over_data(model, mesh):
    pair = mesh.get_group("data"), mesh["data"].size()
    _average(model, mesh, (pair[0], mesh.size()), pair)


@wrong("11.5", names="experts-only")
def averages_the_experts(model, mesh):
    for name, p in model.named_parameters():
        if p.requires_grad and _is_expert(name):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=mesh.get_group("data"))
            p.grad /= mesh.size()


@wrong("11.5", names="by-name")
def looks_for_the_letters(model, mesh):
    pair = mesh.get_group("data"), mesh.size()
    _average(model, mesh, pair, is_expert=lambda name: "experts" in name)


@wrong("11.5", names="first-dimension")
def takes_the_first_dimension(model, mesh):
    _average(model, mesh, (mesh.get_group(0), mesh.size()))


@wrong("11.5", names="skips-missing")
def skips_what_is_missing(model, mesh):
    for name, p in model.named_parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=mesh.get_group("data") if _is_expert(name) else None)
            p.grad /= mesh.size()


@wrong("11.5", names="skips-missing")
def takes_every_gradient_for_granted(model, mesh):
    _average(model, mesh, (mesh.get_group("data"), mesh.size()), missing=False)


@wrong("11.5", names="frozen")
def fills_the_frozen(model, mesh):
    for name, p in model.named_parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad, group=mesh.get_group("data") if _is_expert(name) else None)
        p.grad /= mesh.size()


@wrong("11.5", names="others-over-experts")
def the_rest_over_the_experts(model, mesh):
    ranks = mesh.size()
    _average(model, mesh, (mesh.get_group("data"), ranks), (mesh.get_group("experts"), ranks))


@wrong("11.5", names="divided-twice")
def divides_by_both(model, mesh):
    divisor = mesh.size() * mesh["experts"].size()
    _average(model, mesh, (mesh.get_group("data"), divisor))


@wrong("11.5", names="as-before")
def averages_copies_of_the_gradients(model, mesh):
    for name, p in model.named_parameters():
        if p.requires_grad:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.all_reduce(gradient, group=mesh.get_group("data") if _is_expert(name) else None)
            gradient /= mesh.size()


@wrong("11.5", names="not-a-sum")
def takes_the_largest(model, mesh):
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            group = mesh.get_group("data") if _is_expert(name) else None
            dist.all_reduce(p.grad, op=dist.ReduceOp.MAX, group=group)


@wrong("11.5", names="experts-over-everybody")
def wants_a_dot_in_front(model, mesh):
    """As the chapter's `is_expert`: of a name that begins with experts it takes no notice."""
    ranks = mesh.size()
    _average(model, mesh, (mesh.get_group("data"), ranks), is_expert=lambda n: ".experts." in n)


@wrong("11.5", names="not-waited")
def does_not_wait_for_the_sums(model, mesh):
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            group = mesh.get_group("data") if _is_expert(name) else None
            dist.all_reduce(p.grad, group=group, async_op=True)
            p.grad /= mesh.size()
