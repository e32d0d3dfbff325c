"""Plausible wrong answers, and other right ones, to the exercises of chapter 10.

Most wrong answers to 10.3, 10.4 and 10.5 are right ones with one thing written wrongly.
"""

import torch
import torch.distributed as dist

from course_utils.checks import load_code
from tests.wrong_answers import right, wrong

attend, attend_backward = load_code(10, "attend"), load_code(10, "attend_backward")
merged, pass_on = load_code(10, "merged"), load_code(10, "pass_on")


def _place():
    return dist.get_rank(), dist.get_world_size()


# ---- 10.1 merge ----------------------------------------------------------------------------------


def _weighted(out_a, share_a, out_b, share_b):
    a, b = share_a.unsqueeze(-1), share_b.unsqueeze(-1)
    return torch.where(a > 0, a * out_a, 0.0) + torch.where(b > 0, b * out_b, 0.0)


@right("10.1")
def takes_a_softmax_of_two(out_a, lse_a, out_b, lse_b):
    both = torch.stack([lse_a, lse_b])
    shares = both.softmax(dim=0).nan_to_num()  # of two minus infinities
    return _weighted(out_a, shares[0], out_b, shares[1]), both.logsumexp(dim=0)


@right("10.1")
def subtracts_the_larger(out_a, lse_a, out_b, lse_b):
    """As an online softmax does it: the maximum, and what is left to divide by."""
    highest = torch.maximum(lse_a, lse_b)
    base = torch.where(highest.isfinite(), highest, 0.0)
    a, b = (lse_a - base).exp(), (lse_b - base).exp()
    total = torch.where(a + b > 0, a + b, 1.0)
    return _weighted(out_a, a / total, out_b, b / total), (a + b).log() + base


def _shares(lse_a, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return (lse_a - lse).exp().nan_to_num(), (lse_b - lse).exp().nan_to_num(), lse


@wrong("10.1", names="no-logsumexp")
def returns_the_output(out_a, lse_a, out_b, lse_b):
    a, b, _ = _shares(lse_a, lse_b)
    return _weighted(out_a, a, out_b, b)


@wrong("10.1", names="mean")
def takes_the_mean(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


@wrong("10.1", names="sum")
def adds_the_outputs(out_a, lse_a, out_b, lse_b):
    return out_a + out_b, torch.logaddexp(lse_a, lse_b)


@wrong("10.1", names="undivided")
def does_not_divide(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.exp().unsqueeze(-1), lse_b.exp().unsqueeze(-1)
    return a * out_a + b * out_b, torch.logaddexp(lse_a, lse_b)


@wrong("10.1", names="swapped")
def swaps_the_weights(out_a, lse_a, out_b, lse_b):
    a, b, lse = _shares(lse_a, lse_b)
    return _weighted(out_a, b, out_b, a), lse


@wrong("10.1", names="linear-weights")
def weighs_by_logarithms(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.unsqueeze(-1), lse_b.unsqueeze(-1)
    return (a * out_a + b * out_b) / (a + b), torch.logaddexp(lse_a, lse_b)


@wrong("10.1", names="larger-only")
def keeps_the_larger(out_a, lse_a, out_b, lse_b):
    out = torch.where((lse_a > lse_b).unsqueeze(-1), out_a, out_b)
    return out, torch.logaddexp(lse_a, lse_b)


@wrong("10.1", names="lse-largest")
def returns_the_larger_logsumexp(out_a, lse_a, out_b, lse_b):
    a, b, _ = _shares(lse_a, lse_b)
    return _weighted(out_a, a, out_b, b), torch.maximum(lse_a, lse_b)


@wrong("10.1", names="lse-added")
def adds_logsumexps(out_a, lse_a, out_b, lse_b):
    a, b, _ = _shares(lse_a, lse_b)
    return _weighted(out_a, a, out_b, b), lse_a + lse_b


@wrong("10.1", names="lse-mean")
def averages_logsumexps(out_a, lse_a, out_b, lse_b):
    a, b, _ = _shares(lse_a, lse_b)
    return _weighted(out_a, a, out_b, b), (lse_a + lse_b) / 2


@wrong("10.1", names="not-logarithm")
def returns_the_sum_of_exponentials(out_a, lse_a, out_b, lse_b):
    a, b, lse = _shares(lse_a, lse_b)
    return _weighted(out_a, a, out_b, b), lse.exp()


@wrong("10.1", names="rows-mixed")
def forgets_the_last_dimension(out_a, lse_a, out_b, lse_b):
    a, b, lse = _shares(lse_a, lse_b)
    return a * out_a + b * out_b, lse


@wrong("10.1", names="overflow")
def takes_plain_exponentials(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.exp(), lse_b.exp()
    return _weighted(out_a, a / (a + b), out_b, b / (a + b)), (a + b).log()


@wrong("10.1", names="nothing-seen")
def multiplies_by_nothing(out_a, lse_a, out_b, lse_b):
    """0 times NaN."""
    a, b, lse = _shares(lse_a, lse_b)
    return a.unsqueeze(-1) * out_a + b.unsqueeze(-1) * out_b, lse


@wrong("10.1", names="both-empty")
def subtracts_infinities(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = ((x - lse).exp().unsqueeze(-1) for x in (lse_a, lse_b))
    return torch.where(a == 0, 0.0, a * out_a) + torch.where(b == 0, 0.0, b * out_b), lse


@wrong("10.1", names="arguments-changed")
def merges_in_place(out_a, lse_a, out_b, lse_b):
    a, b, lse = _shares(lse_a, lse_b)
    out = _weighted(out_a, a, out_b, b)
    out_a.copy_(out)
    lse_a.copy_(lse)
    return out_a, lse_a


@wrong("10.1", names="both-empty")
def takes_the_other_side(out_a, lse_a, out_b, lse_b):
    """Right but for a query that neither side has answered: it gets whatever stands in `out_b`."""
    empty_a, empty_b = (lse.isneginf().unsqueeze(-1) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = (lse_a - lse).exp(), (lse_b - lse).exp()
    out = torch.where(empty_b, out_a, _weighted(out_a, a, out_b, b))
    return torch.where(empty_a, out_b, out), lse


@wrong("10.1", names="overflow")
def limits_the_exponents(out_a, lse_a, out_b, lse_b):
    a, b = (lse.clamp(max=80).exp().unsqueeze(-1) for lse in (lse_a, lse_b))
    return (a * out_a + b * out_b) / (a + b), (a + b).log().squeeze(-1)


@wrong("10.1", names="overflow")
def subtracts_the_first(out_a, lse_a, out_b, lse_b):
    b = (lse_b - lse_a).exp()
    out = (out_a + b.unsqueeze(-1) * out_b) / (1 + b).unsqueeze(-1)
    return out, lse_a + b.log1p()


@wrong("10.1", names="not-normalised")
def forgets_to_divide_by_both(out_a, lse_a, out_b, lse_b):
    larger = torch.maximum(lse_a, lse_b)
    out = _weighted(out_a, (lse_a - larger).exp(), out_b, (lse_b - larger).exp())
    return out, torch.logaddexp(lse_a, lse_b)


@wrong("10.1", names="largest-not-added-back")
def forgets_to_add_the_larger(out_a, lse_a, out_b, lse_b):
    out, lse = subtracts_the_larger(out_a, lse_a, out_b, lse_b)
    return out, lse - torch.maximum(lse_a, lse_b)


@wrong("10.1", names="one-weight")
def weighs_whole_heads(out_a, lse_a, out_b, lse_b):
    a = torch.sigmoid(lse_a - lse_b).mean(dim=-1, keepdim=True)
    return _weighted(out_a, a, out_b, 1 - a), torch.logaddexp(lse_a, lse_b)


# ---- 10.2 zigzag_indices -------------------------------------------------------------------------


def _must_divide(length, ranks):
    if length % (2 * ranks):
        raise ValueError(f"{length} does not divide by {2 * ranks}")


@right("10.2")
def counts_from_both_ends(length, ranks, rank):
    _must_divide(length, ranks)
    size = length // (2 * ranks)
    head = torch.arange(rank * size, (rank + 1) * size)
    return torch.cat([head, (length - 1 - head).flip(0)])


@right("10.2")
def chooses_by_chunk_number(length, ranks, rank):
    _must_divide(length, ranks)
    chunk = torch.arange(length) // (length // (2 * ranks))
    return ((chunk == rank) | (chunk == 2 * ranks - 1 - rank)).nonzero().flatten()


def _chunks(length, count):
    size = length // count
    return [torch.arange(i * size, (i + 1) * size) for i in range(count)]


@wrong("10.2", names="no-tensor")
def returns_a_list(length, ranks, rank):
    return counts_from_both_ends(length, ranks, rank).tolist()


@wrong("10.2", names="wrong-dtype")
def returns_floats(length, ranks, rank):
    return counts_from_both_ends(length, ranks, rank).float()


@wrong("10.2", names="blocks")
def takes_neighbours(length, ranks, rank):
    _must_divide(length, ranks)
    return torch.cat(_chunks(length, 2 * ranks)[2 * rank : 2 * rank + 2])


@wrong("10.2", names="strided")
def deals_places_out(length, ranks, rank):
    _must_divide(length, ranks)
    return torch.arange(length)[rank::ranks]


@wrong("10.2", names="head-only")
def takes_the_head(length, ranks, rank):
    _must_divide(length, ranks)
    return _chunks(length, 2 * ranks)[rank]


@wrong("10.2", names="too-few-chunks")
def cuts_into_ranks(length, ranks, rank):
    _must_divide(length, ranks)
    chunks = _chunks(length, ranks)
    return torch.cat([chunks[rank], chunks[ranks - 1 - rank]])


@wrong("10.2", names="tail-off-by-one")
def counts_the_tail_from_one(length, ranks, rank):
    _must_divide(length, ranks)
    chunks = _chunks(length, 2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 2 - rank]])


@wrong("10.2", names="tail-off-by-one")
def indexes_one_too_far(length, ranks, rank):
    _must_divide(length, ranks)
    chunks = _chunks(length, 2 * ranks)
    return torch.cat([chunks[rank], chunks[-rank]])


@wrong("10.2", names="tail-backwards")
def mirrors_places(length, ranks, rank):
    _must_divide(length, ranks)
    head = _chunks(length, 2 * ranks)[rank]
    return torch.cat([head, length - 1 - head])


@wrong("10.2", names="tail-first")
def puts_the_tail_first(length, ranks, rank):
    _must_divide(length, ranks)
    chunks = _chunks(length, 2 * ranks)
    return torch.cat([chunks[2 * ranks - 1 - rank], chunks[rank]])


@wrong("10.2", names="other-rank")
def counts_ranks_backwards(length, ranks, rank):
    return counts_from_both_ends(length, ranks, ranks - 1 - rank)


@wrong("10.2", names="no-error")
def checks_the_ranks_only(length, ranks, rank):
    if length % ranks:
        raise ValueError(f"{length} does not divide by {ranks}")
    chunks = _chunks(length, 2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


@wrong("10.2", names="other-error")
def asserts_that_it_divides(length, ranks, rank):
    assert length % (2 * ranks) == 0, f"{length} does not divide by {2 * ranks}"
    return counts_from_both_ends(length, ranks, rank)


@wrong("10.2", names="error-without-sizes")
def does_not_say_what(length, ranks, rank):
    if length % (2 * ranks):
        raise ValueError("the sequence does not divide")
    return counts_from_both_ends(length, ranks, rank)


@wrong("10.2", names="refuses-what-divides")
def refuses_too_much(length, ranks, rank):
    if length % (2 * ranks * ranks):
        raise ValueError(f"{length} does not divide by {2 * ranks * ranks}")
    return counts_from_both_ends(length, ranks, rank)


@wrong("10.2", names="strided")
def deals_places_there_and_back(length, ranks, rank):
    _must_divide(length, ranks)
    return torch.arange(length).view(-1, 2 * ranks)[:, [rank, 2 * ranks - 1 - rank]].flatten()


@wrong("10.2", names="chunk-numbers")
def returns_chunk_numbers(length, ranks, rank):
    _must_divide(length, ranks)
    return torch.tensor([rank, 2 * ranks - 1 - rank])


@wrong("10.2", names="not-joined")
def leaves_a_table(length, ranks, rank):
    _must_divide(length, ranks)
    return torch.arange(length).view(2 * ranks, -1)[[rank, 2 * ranks - 1 - rank]]


# ---- 10.3 ring_attention -------------------------------------------------------------------------


def _places(rank, ranks, own):
    """The places of a rank's `own` tokens."""
    return counts_from_both_ends(own * ranks, ranks, rank)


def _triangle(q):
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()


class _RingOf:
    """A right ring, in which a subclass gets one thing wrong. Called like a function."""

    __name__ = "ring"

    def __call__(self, q, k, v):
        rank, ranks = _place()
        result = self.own(q, k, v)
        for hop in range(1, self.hops(ranks) + 1):
            k, v = self.turn(k, v)
            result = self.merge_in(result, q, k, v, self.earlier(rank, hop), rank, ranks, hop)
        return result[0]

    def hops(self, ranks):
        return ranks - 1

    def turn(self, k, v):
        return pass_on(k, v)

    def earlier(self, rank, hop):
        return hop <= rank

    def own(self, q, k, v):
        return attend(q, k, v, _triangle(q))

    def merge(self, one, other):
        return merged(one, other)

    def merge_in(self, result, q, k, v, earlier, rank, ranks, hop):
        half = q.shape[2] // 2
        if earlier:
            return self.merge(result, attend(q, k[:, :, :half], v[:, :, :half]))
        old = tuple(x[:, :, half:] for x in result)
        new = self.merge(old, attend(q[:, :, half:], k, v))
        return tuple(
            torch.cat([x[:, :, :half], y], dim=2) for x, y in zip(result, new, strict=True)
        )


def _function(ring, name):
    def answer(q, k, v):
        return ring(q, k, v)

    answer.__name__ = name
    return answer


def _wrong_ring(names):
    """Decorator: the ring of this class, as a wrong answer to 10.3."""

    def add(cls):
        wrong("10.3", names=names)(_function(cls(), cls.__name__))
        return cls

    return add


@right("10.3")
def merges_with_running_sums(q, k, v):
    """An online softmax: numerator, denominator and maximum, and one message for both."""
    rank, ranks = _place()
    half, pages = q.shape[2] // 2, torch.stack([k, v])
    highest = torch.full(q.shape[:3], -torch.inf, device=q.device)
    numerator, denominator = torch.zeros(q.shape, device=q.device), torch.zeros_like(highest)
    for hop in range(ranks):
        if hop:
            arriving = torch.empty_like(pages)
            messages = [
                dist.P2POp(dist.irecv, arriving, (rank - 1) % ranks),
                dist.P2POp(dist.isend, pages, (rank + 1) % ranks),
            ]
            for work in dist.batch_isend_irecv(messages):
                work.wait()
            pages = arriving
        rows = slice(half, None) if hop > rank else slice(None)
        columns = slice(half) if 0 < hop <= rank else slice(None)
        keys, values = pages[:, :, :, columns]
        scores = q[:, :, rows] @ keys.transpose(2, 3) / q.shape[3] ** 0.5
        if hop == 0:
            scores = scores.masked_fill(~_triangle(q), -torch.inf)
        top = torch.maximum(highest[:, :, rows], scores.amax(dim=3))
        old, new = (highest[:, :, rows] - top).exp(), (scores - top.unsqueeze(3)).exp()
        numerator[:, :, rows] = numerator[:, :, rows] * old.unsqueeze(3) + new @ values
        denominator[:, :, rows] = denominator[:, :, rows] * old + new.sum(dim=3)
        highest[:, :, rows] = top
    return numerator / denominator.unsqueeze(3)


@right("10.3")
def sends_ahead(q, k, v):
    """The next pages travel while the rank computes."""
    rank, ranks = _place()
    plain, result = _RingOf(), _RingOf().own(q, k, v)
    pages = torch.stack([k, v]).contiguous()
    for hop in range(1, ranks):
        coming = torch.empty_like(pages)
        messages = [
            dist.P2POp(dist.isend, pages, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, coming, (rank - 1) % ranks),
        ]
        works = dist.batch_isend_irecv(messages)
        if hop > 1:
            result = plain.merge_in(result, q, *pages, hop - 1 <= rank, rank, ranks, hop - 1)
        for work in works:
            work.wait()
        pages = coming
    if ranks > 1:
        result = plain.merge_in(result, q, *pages, ranks - 1 <= rank, rank, ranks, ranks - 1)
    return result[0]


@_wrong_ring("own-pages-only")
class NeverTurns(_RingOf):
    def hops(self, ranks):
        return 0


@_wrong_ring("a-hop-missing")
class StopsEarly(_RingOf):
    def hops(self, ranks):
        return max(ranks - 2, 0)


@_wrong_ring("no-mask")
class SeesEverything(_RingOf):
    def own(self, q, k, v):
        return attend(q, k, v)

    def merge_in(self, result, q, k, v, *where):
        return merged(result, attend(q, k, v))


@_wrong_ring("own-mask-only")
class MasksItsOwnPagesOnly(_RingOf):
    def merge_in(self, result, q, k, v, *where):
        return merged(result, attend(q, k, v))


@_wrong_ring("mask-by-chunk")
class MasksByChunk(_RingOf):
    def own(self, q, k, v):
        chunk = torch.arange(q.shape[2], device=q.device) // (q.shape[2] // 2)
        return attend(q, k, v, chunk.unsqueeze(1) >= chunk)


@_wrong_ring("mask-as-blocks")
class TakesThemForBlocks(_RingOf):
    def merge_in(self, result, q, k, v, earlier, *where):
        return merged(result, attend(q, k, v)) if earlier else result


@_wrong_ring("cases-swapped")
class SwapsTheCases(_RingOf):
    def earlier(self, rank, hop):
        return hop > rank


@_wrong_ring("other-way-round")
class TakesThemForTheNext(_RingOf):
    def merge_in(self, result, q, k, v, earlier, rank, ranks, hop):
        return super().merge_in(result, q, k, v, rank + hop >= ranks, rank, ranks, hop)


@_wrong_ring("not-scaled")
class ForgetsTheScale(_RingOf):
    def __call__(self, q, k, v):
        return super().__call__(q * q.shape[-1] ** 0.5, k, v)


@_wrong_ring("merged-by-mean")
class AveragesParts(_RingOf):
    def merge(self, one, other):
        return (one[0] + other[0]) / 2, torch.logaddexp(one[1], other[1])


@_wrong_ring("not-a-number")
class MasksWholeRows(_RingOf):
    """Rows that see nothing: minus infinity minus itself."""

    def merge_in(self, result, q, k, v, earlier, rank, ranks, hop):
        own = q.shape[2]
        mine, theirs = _places(rank, ranks, own), _places((rank - hop) % ranks, ranks, own)
        return merged(result, attend(q, k, v, (mine.unsqueeze(1) >= theirs).to(q.device)))


@_wrong_ring("computes-masked-pairs")
class MasksAll(_RingOf):
    """Right, and twice the work: rows that see nothing are put right afterwards."""

    def merge_in(self, result, q, k, v, earlier, rank, ranks, hop):
        own = q.shape[2]
        mine, theirs = _places(rank, ranks, own), _places((rank - hop) % ranks, ranks, own)
        allowed = (mine.unsqueeze(1) >= theirs).to(q.device)
        out, lse = attend(q, k, v, allowed)
        new, seen = merged(result, (out.nan_to_num(), lse)), allowed.any(dim=1)
        out = torch.where(seen.unsqueeze(1), new[0], result[0])
        return out, torch.where(seen, new[1], result[1])


@_wrong_ring("not-waited")
class DoesNotWait(_RingOf):
    def turn(self, k, v):
        rank, ranks = _place()
        arriving, leaving = torch.zeros(2, *k.shape, device=k.device), torch.stack([k, v])
        messages = [
            dist.P2POp(dist.isend, leaving, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, arriving, (rank - 1) % ranks),
        ]
        dist.batch_isend_irecv(messages)
        return arriving


@_wrong_ring("sends-too-much")
class SendsQueriesToo(_RingOf):
    def turn(self, k, v):
        return pass_on(k, v, k)[:2]


@_wrong_ring("sends-too-much")
class TurnsOnceMore(_RingOf):
    def __call__(self, q, k, v):
        out = super().__call__(q, k, v)
        if dist.get_world_size() > 1:
            pass_on(k, v)
        return out


@_wrong_ring("two-ranks")
class FixesTheHops(_RingOf):
    """The first check draws three ranks or four, and then there are two."""

    def hops(self, ranks):
        return max(ranks - 1, 2)


@_wrong_ring("arguments-changed")
class ScalesInPlace(_RingOf):
    def __call__(self, q, k, v):
        out = super().__call__(q, k, v)
        q /= 2
        return out


@wrong("10.3", names="gathers-all-keys")
def gathers_keys(q, k, v):
    rank, ranks = _place()
    everyone = [torch.empty(2, *k.shape, device=k.device) for _ in range(ranks)]
    dist.all_gather(everyone, torch.stack([k, v]))
    ring = _RingOf()
    result = ring.own(q, k, v)
    for hop in range(1, ranks):
        pages = everyone[(rank - hop) % ranks]
        result = ring.merge_in(result, q, *pages, hop <= rank, rank, ranks, hop)
    return result[0]


@wrong("10.3", names="large-scores")
def joins_pages(q, k, v):
    """The pages go round, and are all kept."""
    rank, ranks = _place()
    own, keys, values = q.shape[2], [k], [v]
    for _ in range(1, ranks):
        k, v = pass_on(k, v)
        keys.append(k)
        values.append(v)
    theirs = torch.cat([_places((rank - hop) % ranks, ranks, own) for hop in range(ranks)])
    allowed = (_places(rank, ranks, own).unsqueeze(1) >= theirs).to(q.device)
    return attend(q, torch.cat(keys, dim=2), torch.cat(values, dim=2), allowed)[0]


@wrong("10.3", names="not-every-rank")
def receives_first(q, k, v):
    """Everybody waits for a message before anybody sends one."""
    rank, ranks = _place()
    result, ring = _RingOf().own(q, k, v), _RingOf()
    for hop in range(1, ranks):
        pages = torch.empty(2, *k.shape, device=k.device)
        dist.recv(pages, (rank - 1) % ranks)
        dist.send(torch.stack([k, v]), (rank + 1) % ranks)
        k, v = pages
        result = ring.merge_in(result, q, k, v, hop <= rank, rank, ranks, hop)
    return result[0]


@_wrong_ring("rank-0-after")
class TakesRankZeroForLater(_RingOf):
    def earlier(self, rank, hop):
        return hop < rank


@_wrong_ring("own-pages-unmasked")
class MasksOtherPagesOnly(_RingOf):
    def own(self, q, k, v):
        return attend(q, k, v)


@_wrong_ring("keys-and-values-parted")
class PassesKeysOnly(_RingOf):
    def turn(self, k, v):
        return pass_on(k)[0], v


@_wrong_ring("keys-and-values-parted")
class PassesValuesOnly(_RingOf):
    def turn(self, k, v):
        return k, pass_on(v)[0]


@_wrong_ring("added-up")
class AddsParts(_RingOf):
    def merge(self, one, other):
        return one[0] + other[0], torch.logaddexp(one[1], other[1])


@_wrong_ring("last-pages-only")
class KeepsTheLastPart(_RingOf):
    def merge(self, one, other):
        return other


@_wrong_ring("first-logsumexp-only")
class KeepsTheFirstLogsumexp(_RingOf):
    def merge(self, one, other):
        return merged(one, other)[0], one[1]


@_wrong_ring("two-ranks")
class SendsToItself(_RingOf):
    """The last hop, which nobody needs, is one too many where a rank is alone."""

    def __call__(self, q, k, v):
        out = super().__call__(q, k, v)
        pass_on(k, v)
        return out


# ---- 10.4 RingAttention --------------------------------------------------------------------------


class _Right(torch.autograd.Function):
    """A right answer with one thing wrong in each subclass."""

    @staticmethod
    def forward(ctx, q, k, v):
        return _forward(ctx, q, k, v)

    @staticmethod
    def backward(ctx, gradient):
        return _backward(ctx, gradient)


def _cases(rank, ranks, half):
    """(my rows, their columns) for each hop."""
    front, back, both = slice(half), slice(half, None), slice(None)
    return [(both, both)] + [
        (both, front) if hop <= rank else (back, both) for hop in range(1, ranks)
    ]


def _forward(ctx, q, k, v, ring=_RingOf):
    made = ring()
    rank, ranks = _place()
    result, pages = made.own(q, k, v), (k, v)
    for hop in range(1, ranks):
        pages = pass_on(*pages)
        result = made.merge_in(result, q, *pages, hop <= rank, rank, ranks, hop)
    ctx.save_for_backward(q, k, v, *result)
    return result[0]


def _parts(saved, pages, gradient, rows, columns, mask, delta=None):
    """What a hop adds to the gradients of all queries and of these pages, in full size."""
    q, _, _, out, lse = saved
    delta = (gradient * out).sum(-1) if delta is None else delta
    theirs = [page[:, :, columns] for page in pages]
    mine = [x[:, :, rows] for x in (lse, gradient, delta)]
    found = attend_backward(q[:, :, rows], *theirs, mask, *mine)
    whole = [torch.zeros(q.shape, device=q.device) for _ in range(3)]
    for tensor, place, part in zip(whole, (rows, columns, columns), found, strict=True):
        tensor[:, :, place] = part
    return whole


def _added(some, others):
    return [a + b for a, b in zip(some, others, strict=True)]


def _backward(
    ctx, gradient, part=_parts, own_times=1, late=False, skip_last=False, once_more=False
):
    rank, ranks = _place()
    saved = ctx.saved_tensors
    q, pages = saved[0], saved[1:3]
    hops = _cases(rank, ranks, q.shape[2] // 2)
    d_q, *own = part(saved, pages, gradient, *hops[0], _triangle(q))
    travelling = [torch.zeros_like(x) for x in own]
    for hop, (rows, columns) in enumerate(hops[1:], start=1):
        pages = pass_on(*pages)
        if late:
            travelling = pass_on(*travelling)
        of_q, *found = part(saved, pages, gradient, rows, columns, None)
        d_q = d_q + of_q
        if not (skip_last and hop == ranks - 1):
            travelling = _added(travelling, found)
        if not late:
            travelling = pass_on(*travelling)
    if once_more and ranks > 1:
        pass_on(*pages)
    return d_q, *_added([own_times * x for x in own], travelling)


@right("10.4")
class KeepsInOneTensor(torch.autograd.Function):
    """Pages and their gradients as one tensor each, and gradients that are received in place."""

    @staticmethod
    def forward(ctx, q, k, v):
        return _forward(ctx, q, k, v)

    @staticmethod
    def backward(ctx, gradient):
        rank, ranks = _place()
        saved = ctx.saved_tensors
        pages = torch.stack(saved[1:3])
        hops = _cases(rank, ranks, saved[0].shape[2] // 2)
        d_q, own_k, own_v = _parts(saved, pages, gradient, *hops[0], _triangle(saved[0]))
        home = torch.zeros_like(pages)
        for rows, columns in hops[1:]:
            [pages] = pass_on(pages)
            of_q, *found = _parts(saved, pages, gradient, rows, columns, None)
            d_q += of_q
            [home] = pass_on(home + torch.stack(found))
        return d_q, home[0] + own_k, home[1] + own_v


@right("10.4")
class DifferentiatesEachPart(torch.autograd.Function):
    """Autograd within a rank: softmax over all keys is exp(scores - lse), lse a constant."""

    @staticmethod
    def forward(ctx, q, k, v):
        return _forward(ctx, q, k, v)

    @staticmethod
    def backward(ctx, gradient):
        def part(saved, pages, gradient, rows, columns, mask):
            q, _, _, out, lse = saved
            with torch.enable_grad():
                mine = q.detach().requires_grad_()
                theirs = [page.detach().requires_grad_() for page in pages]
                scores = mine[:, :, rows] @ theirs[0][:, :, columns].mT / q.shape[-1] ** 0.5
                if mask is not None:
                    scores = scores.masked_fill(~mask, -torch.inf)
                weights = (scores - lse[:, :, rows].unsqueeze(-1)).exp()
                # the logsumexp's own gradient is that of delta
                delta = (gradient * out).sum(-1)[:, :, rows].unsqueeze(-1)
                product = weights @ theirs[1][:, :, columns]
                loss = (product * gradient[:, :, rows]).sum() - (weights * delta).sum()
            return torch.autograd.grad(loss, (mine, *theirs))

        return _backward(ctx, gradient, part)


@wrong("10.4", names="no-autograd-function")
class IsAModule(torch.nn.Module):
    def forward(self, q, k, v):
        return _RingOf()(q, k, v)


@wrong("10.4", names="no-backward")
class GivesGradientsOfQueriesOnly(_Right):
    @staticmethod
    def backward(ctx, gradient):
        return _backward(ctx, gradient)[0], None, None


@wrong("10.4", names="mask-by-chunk")
class ForwardMasksByChunk(_Right):
    @staticmethod
    def forward(ctx, q, k, v):
        return _forward(ctx, q, k, v, MasksByChunk)


@wrong("10.4", names="merged-by-mean")
class ForwardAverages(_Right):
    @staticmethod
    def forward(ctx, q, k, v):
        return _forward(ctx, q, k, v, AveragesParts)


@wrong("10.4", names="local-key-gradients")
class LeavesGradientsWhereTheyAre(_Right):
    """Each rank keeps what its own queries give to its own pages."""

    @staticmethod
    def backward(ctx, gradient):
        saved = ctx.saved_tensors
        both = slice(None)
        _, *own = _parts(saved, saved[1:3], gradient, both, both, _triangle(saved[0]))
        return _backward(ctx, gradient)[0], *own


@wrong("10.4", names="local-query-gradient")
class DoesNotTurnInBackward(_Right):
    @staticmethod
    def backward(ctx, gradient):
        saved = ctx.saved_tensors
        both = slice(None)
        return tuple(_parts(saved, saved[1:3], gradient, both, both, _triangle(saved[0])))


@wrong("10.4", names="own-part-missing")
class ForgetsItsOwnPart(_Right):
    @staticmethod
    def backward(ctx, gradient):
        return _backward(ctx, gradient, own_times=0)


@wrong("10.4", names="own-part-twice")
class AddsItsOwnPartTwice(_Right):
    @staticmethod
    def backward(ctx, gradient):
        return _backward(ctx, gradient, own_times=2)


@wrong("10.4", names="not-home")
class PassesOnTooEarly(_Right):
    @staticmethod
    def backward(ctx, gradient):
        return _backward(ctx, gradient, late=True)


@wrong("10.4", names="last-part-missing")
class LeavesOutTheLastPart(_Right):
    @staticmethod
    def backward(ctx, gradient):
        return _backward(ctx, gradient, skip_last=True)


@wrong("10.4", names="delta-missing")
class ForgetsDelta(_Right):
    @staticmethod
    def backward(ctx, gradient):
        def part(*args):
            return _parts(*args, delta=torch.zeros_like(ctx.saved_tensors[4]))

        return _backward(ctx, gradient, part)


@wrong("10.4", names="partial-logsumexp")
class NormalisesEachPart(_Right):
    @staticmethod
    def backward(ctx, gradient):
        def part(saved, pages, gradient, rows, columns, mask):
            q, k, v, out, lse = (x.clone() for x in saved)
            theirs = [page[:, :, columns] for page in pages]
            out[:, :, rows], lse[:, :, rows] = attend(q[:, :, rows], *theirs, mask)
            return _parts((q, k, v, out, lse), pages, gradient, rows, columns, mask)

        return _backward(ctx, gradient, part)


@wrong("10.4", names="mask-lost")
class ForgetsTheMask(_Right):
    @staticmethod
    def backward(ctx, gradient):
        def part(saved, pages, gradient, rows, columns, mask):
            return _parts(saved, pages, gradient, rows, columns, None)

        return _backward(ctx, gradient, part)


@wrong("10.4", names="gradient-not-scaled")
class ForgetsToScaleBack(_Right):
    @staticmethod
    def backward(ctx, gradient):
        d_q, d_k, d_v = _backward(ctx, gradient)
        root = d_q.shape[-1] ** 0.5
        return d_q * root, d_k * root, d_v


@wrong("10.4", names="keeps-pages")
class KeepsAllPages(_Right):
    @staticmethod
    def forward(ctx, q, k, v):
        out = _forward(ctx, q, k, v)
        kept, pages = [], (k, v)
        for _ in range(1, dist.get_world_size()):
            pages = pass_on(*pages)
            kept += pages
        ctx.save_for_backward(q, k, v, out, _logsumexp(q, k, v), *kept)
        return out

    @staticmethod
    def backward(ctx, gradient):
        rank, ranks = _place()
        saved, kept = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        hops = _cases(rank, ranks, saved[0].shape[2] // 2)
        d_q, *own = _parts(saved, saved[1:3], gradient, *hops[0], _triangle(saved[0]))
        home = [torch.zeros_like(x) for x in own]
        for hop, (rows, columns) in enumerate(hops[1:]):
            pages = kept[2 * hop : 2 * hop + 2]
            of_q, *found = _parts(saved, pages, gradient, rows, columns, None)
            d_q, home = d_q + of_q, pass_on(*_added(home, found))
        return d_q, *_added(own, home)


def _logsumexp(q, k, v):
    class Notes:
        def save_for_backward(self, *tensors):
            self.saved = tensors

    notes = Notes()
    _forward(notes, q, k, v)
    return notes.saved[4]


@wrong("10.4", names="sends-too-much-back")
class TurnsThePagesHome(_Right):
    @staticmethod
    def backward(ctx, gradient):
        return _backward(ctx, gradient, once_more=True)


@wrong("10.4", names="never-sent")
class AddsUpWhatComesBy(_Right):
    @staticmethod
    def backward(ctx, gradient):
        found = []

        def part(*args):
            found.append(_parts(*args))
            return found[-1]

        d_q, *_ = _backward(ctx, gradient, part)
        return d_q, *(sum(each[which] for each in found) for which in (1, 2))


@wrong("10.4", names="last-part-only")
class PassesItsOwnPartOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        return _forward(ctx, q, k, v)

    @staticmethod
    def backward(ctx, gradient):
        rank, ranks = _place()
        saved, pages = ctx.saved_tensors, ctx.saved_tensors[1:3]
        hops = _cases(rank, ranks, saved[0].shape[2] // 2)
        d_q, *own = _parts(saved, pages, gradient, *hops[0], _triangle(saved[0]))
        home = [torch.zeros_like(x) for x in own]
        for rows, columns in hops[1:]:
            pages = pass_on(*pages)
            of_q, *found = _parts(saved, pages, gradient, rows, columns, None)
            d_q, home = d_q + of_q, pass_on(*found)  # what has come is not in it
        return d_q, *_added(own, home)


@wrong("10.4", names="k-and-v-swapped")
class SwapsKeysAndValues(_Right):
    @staticmethod
    def backward(ctx, gradient):
        d_q, d_k, d_v = _backward(ctx, gradient)
        return d_q, d_v, d_k


@wrong("10.4", names="averaged")
class AveragesOverTheRanks(_Right):
    @staticmethod
    def backward(ctx, gradient):
        d_q, d_k, d_v = _backward(ctx, gradient)
        return d_q, d_k / dist.get_world_size(), d_v / dist.get_world_size()


class _WithDelta(_Right):
    """`delta` (N, H, t) of this rank's queries is another number."""

    @classmethod
    def backward(cls, ctx, gradient):
        delta = cls.delta(gradient, *ctx.saved_tensors)
        return _backward(ctx, gradient, lambda *args: _parts(*args, delta=delta))


@wrong("10.4", names="delta-wrong")
class TakesTheMeanForDelta(_WithDelta):
    @staticmethod
    def delta(gradient, q, k, v, out, lse):
        return (gradient * out).mean(dim=-1)


@wrong("10.4", names="delta-wrong")
class ForgetsTheOutputInDelta(_WithDelta):
    @staticmethod
    def delta(gradient, q, k, v, out, lse):
        return gradient.sum(dim=-1)


@wrong("10.4", names="delta-wrong")
class TakesValuesForTheOutput(_WithDelta):
    @staticmethod
    def delta(gradient, q, k, v, out, lse):
        return (gradient * v).sum(dim=-1)


@wrong("10.4", names="first-logsumexp")
class SavesTheFirstLogsumexp(_Right):
    @staticmethod
    def backward(ctx, gradient):
        def part(saved, *rest):
            first = _RingOf().own(*saved[:3])[1]
            return _parts((*saved[:4], first), *rest)

        return _backward(ctx, gradient, part)


@wrong("10.4", names="scaled-twice")
class ScalesOnceMore(_Right):
    @staticmethod
    def backward(ctx, gradient):
        d_q, d_k, d_v = _backward(ctx, gradient)
        root = d_q.shape[-1] ** 0.5
        return d_q / root, d_k / root, d_v


@wrong("10.4", names="cases-swapped-back")
class SwapsTheCasesInBackward(_Right):
    @staticmethod
    def backward(ctx, gradient):
        half = ctx.saved_tensors[0].shape[2] // 2
        front, back, both = slice(half), slice(half, None), slice(None)

        def part(saved, pages, gradient, rows, columns, mask):
            if mask is None:
                rows, columns = (back, both) if rows == both else (both, front)
            return _parts(saved, pages, gradient, rows, columns, mask)

        return _backward(ctx, gradient, part)


# ---- 10.5 heads_for_sequence ---------------------------------------------------------------------


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
    rank, ranks = _place()

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
    rank, ranks = _place()

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
    rank, ranks = _place()
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
