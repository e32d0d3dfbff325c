"""Answers to 10.3, `ring_attention`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch10.shared import (
    RingOf,
    attend,
    function,
    merged,
    pass_on,
    place_of,
    ring_forward,
    start,
    triangle,
    wait_for,
    zigzag,
)
from tests.wrong_answers.ch10.zigzag_indices import both_ends


def places(rank, ranks, own):
    """The places of a rank's `own` tokens."""
    return both_ends(own * ranks, ranks, rank)


@right("10.3")
def merges_with_running_sums(q, k, v):
    """An online softmax: numerator, denominator and maximum, and one message for both."""
    rank, ranks = place_of()
    half, coming, works = q.shape[2] // 2, torch.stack([k, v]), []
    highest = torch.full(q.shape[:3], -torch.inf, device=q.device)
    numerator, denominator = torch.zeros(q.shape, device=q.device), torch.zeros_like(highest)
    for hop in range(ranks):
        wait_for(works)
        pages = coming
        if hop < ranks - 1:
            [coming], works = start(pages)
        rows = slice(half, None) if hop > rank else slice(None)
        columns = slice(half) if 0 < hop <= rank else slice(None)
        keys, values = pages[:, :, :, columns]
        scores = q[:, :, rows] @ keys.transpose(2, 3) / q.shape[3] ** 0.5
        if hop == 0:
            scores = scores.masked_fill(~triangle(q), -torch.inf)
        top = torch.maximum(highest[:, :, rows], scores.amax(dim=3))
        old, new = (highest[:, :, rows] - top).exp(), (scores - top.unsqueeze(3)).exp()
        numerator[:, :, rows] = numerator[:, :, rows] * old.unsqueeze(3) + new @ values
        denominator[:, :, rows] = denominator[:, :, rows] * old + new.sum(dim=3)
        highest[:, :, rows] = top
    return numerator / denominator.unsqueeze(3)


@right("10.3")
def has_two_buffers(q, k, v):
    """Two sets of pages in one tensor."""
    rank, ranks = place_of()
    ring, buffers = RingOf(), torch.empty(2, 2, *k.shape, device=k.device)
    buffers[0, 0], buffers[0, 1] = k, v
    for hop in range(ranks):
        here, there = buffers[hop % 2], buffers[(hop + 1) % 2]
        works = []
        if hop < ranks - 1:
            receive = dist.P2POp(dist.irecv, there, (rank - 1) % ranks)
            send = dist.P2POp(dist.isend, here, (rank + 1) % ranks)
            works = dist.batch_isend_irecv([receive, send])
        if hop == 0:
            result = ring.own(q, *here)
        else:
            result = ring.merge_in(result, q, *here, hop <= rank, rank, ranks, hop)
        wait_for(works)
    return result[0]


@wrong("10.3", names="not-beside")
def asks_the_lesson(q, k, v):
    return ring_forward(q, k, v, zigzag)[0]


# NCCL's rules refuse a tensor that is used early before the check looks at it.
@wrong("10.3", names="used-early", on_nccl="not-waited")
@function
class ReadsWhatIsOnItsWay(RingOf):
    """It waits after it has attended, and attends to what is to come."""

    def come_by(self, k, v):
        yield k, v
        for _ in range(dist.get_world_size() - 1):
            (k, v), works = start(k, v)
            yield k, v
            wait_for(works)


@wrong("10.3", names="used-early", on_nccl="not-waited")
def receives_into_the_pages_in_use(q, k, v):
    rank, ranks = place_of()
    ring, pages, works = RingOf(), torch.stack([k, v]), []
    for hop in range(ranks):
        wait_for(works)
        if hop < ranks - 1:
            send = dist.P2POp(dist.isend, pages.clone(), (rank + 1) % ranks)
            receive = dist.P2POp(dist.irecv, pages, (rank - 1) % ranks)
            works = dist.batch_isend_irecv([send, receive])
        if hop == 0:
            result = ring.own(q, *pages)
        else:
            result = ring.merge_in(result, q, *pages, hop <= rank, rank, ranks, hop)
    return result[0]


@wrong("10.3", names="not-waited")
@function
class DoesNotWait(RingOf):
    def start(self, k, v):
        return start(k, v)[0], []


@wrong("10.3", names="ranks-wait")
def receives_first(q, k, v):
    """Everybody waits for a message before anybody sends one."""
    rank, ranks = place_of()
    result, ring = RingOf().own(q, k, v), RingOf()
    for hop in range(1, ranks):
        pages = torch.empty(2, *k.shape, device=k.device)
        dist.recv(pages, (rank - 1) % ranks)
        dist.send(torch.stack([k, v]), (rank + 1) % ranks)
        k, v = pages
        result = ring.merge_in(result, q, k, v, hop <= rank, rank, ranks, hop)
    return result[0]


@wrong("10.3", names="other-number")
@function
class TurnsHomeInTheEnd(RingOf):
    """The last hop, which nobody needs, goes to itself where a rank is alone."""

    def __call__(self, q, k, v):
        out = super().__call__(q, k, v)
        pass_on(k, v)
        return out


@wrong("10.3", names="wrong-hops")
@function
class NeverTurns(RingOf):
    def hops(self, ranks):
        return 0


@wrong("10.3", names="wrong-hops")
@function
class TurnsOnceMore(RingOf):
    def hops(self, ranks):
        return ranks


@wrong("10.3", names="wrong-mask")
@function
class MasksByChunk(RingOf):
    def own(self, q, k, v):
        chunk = torch.arange(q.shape[2], device=q.device) // (q.shape[2] // 2)
        return attend(q, k, v, chunk.unsqueeze(1) >= chunk)


@wrong("10.3", names="wrong-mask")
@function
class MasksWhatIsCutOut(RingOf):
    def merge_in(self, result, q, k, v, earlier, *where):
        half, mask = q.shape[2] // 2, triangle(q)
        if earlier:
            return merged(result, attend(q, k[:, :, :half], v[:, :, :half], mask[:, :half]))
        old = tuple(x[:, :, half:] for x in result)
        new = merged(old, attend(q[:, :, half:], k, v, mask[:half]))
        return tuple(torch.cat([x[:, :, :half], y], dim=2) for x, y in zip(result, new))


@wrong("10.3", names="wrong-case")
@function
class SeesAllOfEarlierRanks(RingOf):
    """Takes a rank before it for one whose tokens all lie before its own."""

    def merge_in(self, result, q, k, v, earlier, *where):
        if earlier:
            return merged(result, attend(q, k, v))
        return super().merge_in(result, q, k, v, earlier, *where)


@wrong("10.3", names="wrong-case")
@function
class PassesThemBack(RingOf):
    """And takes them for those of rank - hop all the same."""

    def start(self, k, v):
        return start(k, v, to_the_left=True)


@wrong("10.3", names="keys-and-values-parted")
@function
class PassesKeysOnly(RingOf):
    def start(self, k, v):
        coming, works = start(k)
        return (*coming, v), works


@wrong("10.3", names="not-scaled")
@function
class ForgetsTheScale(RingOf):
    def __call__(self, q, k, v):
        return super().__call__(q * q.shape[-1] ** 0.5, k, v)


@wrong("10.3", names="not-merged")
@function
class AveragesParts(RingOf):
    def merge(self, one, other):
        return (one[0] + other[0]) / 2, torch.logaddexp(one[1], other[1])


@wrong("10.3", names="not-merged")
@function
class AveragesOutputs(RingOf):
    def merge(self, one, other):
        return (one[0] + other[0]) / 2, one[1]


@wrong("10.3", names="not-a-number")
@function
class MasksWholeRows(RingOf):
    """Rows that see nothing: minus infinity minus itself."""

    def merge_in(self, result, q, k, v, earlier, rank, ranks, hop):
        own = q.shape[2]
        mine, theirs = places(rank, ranks, own), places((rank - hop) % ranks, ranks, own)
        return merged(result, attend(q, k, v, (mine.unsqueeze(1) >= theirs).to(q.device)))


@wrong("10.3", names="masked-pairs")
@function
class MasksAll(RingOf):
    """Right, and twice the work: rows that see nothing are put right afterwards."""

    def merge_in(self, result, q, k, v, earlier, rank, ranks, hop):
        own = q.shape[2]
        mine, theirs = places(rank, ranks, own), places((rank - hop) % ranks, ranks, own)
        allowed = (mine.unsqueeze(1) >= theirs).to(q.device)
        out, lse = attend(q, k, v, allowed)
        new, seen = merged(result, (out.nan_to_num(), lse)), allowed.any(dim=1)
        out = torch.where(seen.unsqueeze(1), new[0], result[0])
        return out, torch.where(seen, new[1], result[1])


@wrong("10.3", names="sends-too-much")
@function
class SendsQueriesToo(RingOf):
    def start(self, k, v):
        coming, works = start(k, v, k)
        return coming[:2], works


@wrong("10.3", names="input-changed")
@function
class ScalesInPlace(RingOf):
    def __call__(self, q, k, v):
        out = super().__call__(q, k, v)
        q /= 2
        return out


@wrong("10.3", names="all-at-once")
def gathers_keys(q, k, v):
    rank, ranks = place_of()
    everyone = [torch.empty(2, *k.shape, device=k.device) for _ in range(ranks)]
    dist.all_gather(everyone, torch.stack([k, v]))
    ring = RingOf()
    result = ring.own(q, k, v)
    for hop in range(1, ranks):
        pages = everyone[(rank - hop) % ranks]
        result = ring.merge_in(result, q, *pages, hop <= rank, rank, ranks, hop)
    return result[0]


@wrong("10.3", names="all-at-once")
@function
class JoinsPages(RingOf):
    """The pages go round while it looks at its own, and are all kept."""

    def __call__(self, q, k, v):
        rank, ranks = place_of()
        kept = [(k, v) for k, v in self.come_by(k, v) if self.own(q, k, v)]
        keys, values = (torch.cat(each, dim=2) for each in zip(*kept))
        own = q.shape[2]
        theirs = torch.cat([places((rank - hop) % ranks, ranks, own) for hop in range(ranks)])
        allowed = (places(rank, ranks, own).unsqueeze(1) >= theirs).to(q.device)
        return attend(q, keys, values, allowed)[0]
