"""Answers to 10.3, `ring_attention`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist

from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch10.shared import (
    RingOf,
    attend,
    attend_backward,
    function,
    merged,
    pass_on,
    place_of,
    triangle,
)
from tests.wrong_answers.ch10.zigzag_indices import counts_from_both_ends


def _places(rank, ranks, own):
    """The places of a rank's `own` tokens."""
    return counts_from_both_ends(own * ranks, ranks, rank)


def _as_function(cls):
    """Decorator: the ring of this class; the class itself is its `made_by`."""
    answer = function(cls(), cls.__name__)
    answer.made_by = cls
    return answer


@right("10.3")
def merges_with_running_sums(q, k, v):
    """An online softmax: numerator, denominator and maximum, and one message for both."""
    rank, ranks = place_of()
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
            scores = scores.masked_fill(~triangle(q), -torch.inf)
        top = torch.maximum(highest[:, :, rows], scores.amax(dim=3))
        old, new = (highest[:, :, rows] - top).exp(), (scores - top.unsqueeze(3)).exp()
        numerator[:, :, rows] = numerator[:, :, rows] * old.unsqueeze(3) + new @ values
        denominator[:, :, rows] = denominator[:, :, rows] * old + new.sum(dim=3)
        highest[:, :, rows] = top
    return numerator / denominator.unsqueeze(3)


@right("10.3")
def sends_ahead(q, k, v):
    """The next pages travel while the rank computes."""
    rank, ranks = place_of()
    plain, result = RingOf(), RingOf().own(q, k, v)
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


@wrong("10.3", names="own-pages-only")
@_as_function
class NeverTurns(RingOf):
    def hops(self, ranks):
        return 0


@wrong("10.3", names="a-hop-missing")
@_as_function
class StopsEarly(RingOf):
    def hops(self, ranks):
        return max(ranks - 2, 0)


@wrong("10.3", names="no-mask")
@_as_function
class SeesEverything(RingOf):
    def own(self, q, k, v):
        return attend(q, k, v)

    def merge_in(self, result, q, k, v, *where):
        return merged(result, attend(q, k, v))


@wrong("10.3", names="own-mask-only")
@_as_function
class MasksItsOwnPagesOnly(RingOf):
    def merge_in(self, result, q, k, v, *where):
        return merged(result, attend(q, k, v))


@wrong("10.3", names="mask-by-chunk")
@_as_function
class MasksByChunk(RingOf):
    def own(self, q, k, v):
        chunk = torch.arange(q.shape[2], device=q.device) // (q.shape[2] // 2)
        return attend(q, k, v, chunk.unsqueeze(1) >= chunk)


@wrong("10.3", names="mask-as-blocks")
@_as_function
class TakesThemForBlocks(RingOf):
    def merge_in(self, result, q, k, v, earlier, *where):
        return merged(result, attend(q, k, v)) if earlier else result


@wrong("10.3", names="triangle-everywhere")
@_as_function
class MasksEveryHop(RingOf):
    def merge_in(self, result, q, k, v, *where):
        return merged(result, attend(q, k, v, triangle(q)))


@wrong("10.3", names="triangle-everywhere")
@_as_function
class MasksWhatIsCutOut(RingOf):
    def merge_in(self, result, q, k, v, earlier, *where):
        half, mask = q.shape[2] // 2, triangle(q)
        if earlier:
            return merged(result, attend(q, k[:, :, :half], v[:, :, :half], mask[:, :half]))
        old = tuple(x[:, :, half:] for x in result)
        new = merged(old, attend(q[:, :, half:], k, v, mask[:half]))
        return tuple(torch.cat([x[:, :, :half], y], dim=2) for x, y in zip(result, new))


@wrong("10.3", names="cases-swapped")
@_as_function
class SwapsTheCases(RingOf):
    def earlier(self, rank, hop):
        return hop > rank


@wrong("10.3", names="other-way-round")
@_as_function
class TakesThemForTheNext(RingOf):
    def merge_in(self, result, q, k, v, earlier, rank, ranks, hop):
        return super().merge_in(result, q, k, v, rank + hop >= ranks, rank, ranks, hop)


def _passed_back(*tensors):
    """What the rank after this one has: each tensor goes to the rank before."""
    rank, ranks = place_of()
    arriving = [torch.empty_like(tensor) for tensor in tensors]
    messages = [
        dist.P2POp(call, tensor, peer % ranks)
        for sent, received in zip(tensors, arriving)
        for call, tensor, peer in (
            (dist.isend, sent.contiguous(), rank - 1),
            (dist.irecv, received, rank + 1),
        )
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return arriving


@wrong("10.3", names="other-way-round")
@_as_function
class PassesThemBack(RingOf):
    """And takes them for those of rank - hop all the same."""

    def turn(self, k, v):
        return _passed_back(k, v)


@wrong("10.3", names="not-scaled")
@_as_function
class ForgetsTheScale(RingOf):
    def __call__(self, q, k, v):
        return super().__call__(q * q.shape[-1] ** 0.5, k, v)


@wrong("10.3", names="merged-by-mean")
@_as_function
class AveragesParts(RingOf):
    def merge(self, one, other):
        return (one[0] + other[0]) / 2, torch.logaddexp(one[1], other[1])


@wrong("10.3", names="not-a-number")
@_as_function
class MasksWholeRows(RingOf):
    """Rows that see nothing: minus infinity minus itself."""

    def merge_in(self, result, q, k, v, earlier, rank, ranks, hop):
        own = q.shape[2]
        mine, theirs = _places(rank, ranks, own), _places((rank - hop) % ranks, ranks, own)
        return merged(result, attend(q, k, v, (mine.unsqueeze(1) >= theirs).to(q.device)))


@wrong("10.3", names="computes-masked-pairs")
@_as_function
class MasksAll(RingOf):
    """Right, and twice the work: rows that see nothing are put right afterwards."""

    def merge_in(self, result, q, k, v, earlier, rank, ranks, hop):
        own = q.shape[2]
        mine, theirs = _places(rank, ranks, own), _places((rank - hop) % ranks, ranks, own)
        allowed = (mine.unsqueeze(1) >= theirs).to(q.device)
        out, lse = attend(q, k, v, allowed)
        new, seen = merged(result, (out.nan_to_num(), lse)), allowed.any(dim=1)
        out = torch.where(seen.unsqueeze(1), new[0], result[0])
        return out, torch.where(seen, new[1], result[1])


@wrong("10.3", names="not-waited")
@_as_function
class DoesNotWait(RingOf):
    def turn(self, k, v):
        rank, ranks = place_of()
        arriving, leaving = torch.zeros(2, *k.shape, device=k.device), torch.stack([k, v])
        messages = [
            dist.P2POp(dist.isend, leaving, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, arriving, (rank - 1) % ranks),
        ]
        dist.batch_isend_irecv(messages)
        return arriving


@wrong("10.3", names="sends-too-much")
@_as_function
class SendsQueriesToo(RingOf):
    def turn(self, k, v):
        return pass_on(k, v, k)[:2]


@wrong("10.3", names="sends-too-much")
@_as_function
class TurnsOnceMore(RingOf):
    def __call__(self, q, k, v):
        out = super().__call__(q, k, v)
        if dist.get_world_size() > 1:
            pass_on(k, v)
        return out


@wrong("10.3", names="two-ranks")
@_as_function
class FixesTheHops(RingOf):
    """The first check draws three ranks or four, and then there are two."""

    def hops(self, ranks):
        return max(ranks - 1, 2)


@wrong("10.3", names="arguments-changed")
@_as_function
class ScalesInPlace(RingOf):
    def __call__(self, q, k, v):
        out = super().__call__(q, k, v)
        q /= 2
        return out


@wrong("10.3", names="gathers-all-keys")
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


@wrong("10.3", names="large-scores")
def joins_pages(q, k, v):
    """The pages go round, and are all kept."""
    rank, ranks = place_of()
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
    rank, ranks = place_of()
    result, ring = RingOf().own(q, k, v), RingOf()
    for hop in range(1, ranks):
        pages = torch.empty(2, *k.shape, device=k.device)
        dist.recv(pages, (rank - 1) % ranks)
        dist.send(torch.stack([k, v]), (rank + 1) % ranks)
        k, v = pages
        result = ring.merge_in(result, q, k, v, hop <= rank, rank, ranks, hop)
    return result[0]


@wrong("10.3", names="rank-0-after")
@_as_function
class TakesRankZeroForLater(RingOf):
    def earlier(self, rank, hop):
        return hop < rank


@wrong("10.3", names="own-pages-unmasked")
@_as_function
class MasksOtherPagesOnly(RingOf):
    def own(self, q, k, v):
        return attend(q, k, v)


@wrong("10.3", names="keys-and-values-parted")
@_as_function
class PassesKeysOnly(RingOf):
    def turn(self, k, v):
        return pass_on(k)[0], v


@wrong("10.3", names="keys-and-values-parted")
@_as_function
class PassesValuesOnly(RingOf):
    def turn(self, k, v):
        return k, pass_on(v)[0]


@wrong("10.3", names="added-up")
@_as_function
class AddsParts(RingOf):
    def merge(self, one, other):
        return one[0] + other[0], torch.logaddexp(one[1], other[1])


@wrong("10.3", names="last-pages-only")
@_as_function
class KeepsTheLastPart(RingOf):
    def merge(self, one, other):
        return other


@wrong("10.3", names="first-logsumexp-only")
@_as_function
class KeepsTheFirstLogsumexp(RingOf):
    def merge(self, one, other):
        return merged(one, other)[0], one[1]


@wrong("10.3", names="two-ranks")
@_as_function
class SendsToItself(RingOf):
    """The last hop, which nobody needs, is one too many where a rank is alone."""

    def __call__(self, q, k, v):
        out = super().__call__(q, k, v)
        pass_on(k, v)
        return out


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


def _forward(ctx, q, k, v, ring=RingOf):
    made = ring()
    rank, ranks = place_of()
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
    rank, ranks = place_of()
    saved = ctx.saved_tensors
    q, pages = saved[0], saved[1:3]
    hops = _cases(rank, ranks, q.shape[2] // 2)
    d_q, *own = part(saved, pages, gradient, *hops[0], triangle(q))
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
        rank, ranks = place_of()
        saved = ctx.saved_tensors
        pages = torch.stack(saved[1:3])
        hops = _cases(rank, ranks, saved[0].shape[2] // 2)
        d_q, own_k, own_v = _parts(saved, pages, gradient, *hops[0], triangle(saved[0]))
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
        return RingOf()(q, k, v)


@wrong("10.4", names="no-backward")
class GivesGradientsOfQueriesOnly(_Right):
    @staticmethod
    def backward(ctx, gradient):
        return _backward(ctx, gradient)[0], None, None


@wrong("10.4", names="mask-by-chunk")
class ForwardMasksByChunk(_Right):
    @staticmethod
    def forward(ctx, q, k, v):
        return _forward(ctx, q, k, v, MasksByChunk.made_by)


@wrong("10.4", names="merged-by-mean")
class ForwardAverages(_Right):
    @staticmethod
    def forward(ctx, q, k, v):
        return _forward(ctx, q, k, v, AveragesParts.made_by)


@wrong("10.4", names="local-key-gradients")
class LeavesGradientsWhereTheyAre(_Right):
    """Each rank keeps what its own queries give to its own pages."""

    @staticmethod
    def backward(ctx, gradient):
        saved = ctx.saved_tensors
        both = slice(None)
        _, *own = _parts(saved, saved[1:3], gradient, both, both, triangle(saved[0]))
        return _backward(ctx, gradient)[0], *own


@wrong("10.4", names="local-query-gradient")
class DoesNotTurnInBackward(_Right):
    @staticmethod
    def backward(ctx, gradient):
        saved = ctx.saved_tensors
        both = slice(None)
        return tuple(_parts(saved, saved[1:3], gradient, both, both, triangle(saved[0])))


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
        rank, ranks = place_of()
        saved, kept = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        hops = _cases(rank, ranks, saved[0].shape[2] // 2)
        d_q, *own = _parts(saved, saved[1:3], gradient, *hops[0], triangle(saved[0]))
        home = [torch.zeros_like(x) for x in own]
        for hop, (rows, columns) in enumerate(hops[1:]):
            pages = kept[2 * hop : 2 * hop + 2]
            of_q, *found = _parts(saved, pages, gradient, rows, columns, None)
            d_q, home = d_q + of_q, pass_on(*_added(home, found))
        return d_q, *_added(own, home)


@wrong("10.4", names="keeps-pages")
class KeepsThePagesOutOfSight(_Right):
    """Where `save_for_backward` does not count them."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.pages, pages = [], (k, v)
        for _ in range(1, dist.get_world_size()):
            pages = pass_on(*pages)
            ctx.pages += pages
        return _forward(ctx, q, k, v)

    @staticmethod
    def backward(ctx, gradient):
        rank, ranks = place_of()
        saved = ctx.saved_tensors
        hops = _cases(rank, ranks, saved[0].shape[2] // 2)
        d_q, *own = _parts(saved, saved[1:3], gradient, *hops[0], triangle(saved[0]))
        home = [torch.zeros_like(x) for x in own]
        for hop, (rows, columns) in enumerate(hops[1:]):
            pages = ctx.pages[2 * hop : 2 * hop + 2]
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
        rank, ranks = place_of()
        saved, pages = ctx.saved_tensors, ctx.saved_tensors[1:3]
        hops = _cases(rank, ranks, saved[0].shape[2] // 2)
        d_q, *own = _parts(saved, pages, gradient, *hops[0], triangle(saved[0]))
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
            first = RingOf().own(*saved[:3])[1]
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
