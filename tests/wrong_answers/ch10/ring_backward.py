"""Answers to 10.4, `RingAttention`: wrong in a plausible way, or right in another."""

import torch
import torch.distributed as dist

from course_exercises.authoring import load_code
from tests.wrong_answers import right, wrong
from tests.wrong_answers.ch10.ring_attention import AveragesParts, DoesNotWait
from tests.wrong_answers.ch10.shared import (
    RingOf,
    attend,
    attend_backward,
    pass_on,
    place_of,
    start,
    triangle,
    wait_for,
    zigzag,
)

Ring = load_code(10, "Ring")


class Right(torch.autograd.Function):
    """A right answer with one thing wrong in each subclass."""

    @staticmethod
    def forward(ctx, q, k, v):
        return forward(ctx, q, k, v)

    @staticmethod
    def backward(ctx, gradient):
        return backward(ctx, gradient)


def cases(rank, ranks, half):
    """(my rows, their columns) for each hop."""
    front, back, both = slice(half), slice(half, None), slice(None)
    return [(both, both)] + [
        (both, front) if hop <= rank else (back, both) for hop in range(1, ranks)
    ]


def forward(ctx, q, k, v, ring=RingOf):
    class Keeping(ring):
        def __call__(self, q, k, v):
            self.whole = None
            return super().__call__(q, k, v)

        def own(self, *given):
            self.whole = super().own(*given)
            return self.whole

        def merge_in(self, *given):
            self.whole = super().merge_in(*given)
            return self.whole

    made = Keeping()
    made(q, k, v)
    ctx.save_for_backward(q, k, v, *made.whole)
    return made.whole[0]


def parts_of(saved, pages, gradient, rows, columns, mask, delta=None):
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


def added(some, others):
    return [a + b for a, b in zip(some, others, strict=True)]


def backward(
    ctx, gradient, part=parts_of, send=added, own_times=1, pass_gradients=pass_on, ring=RingOf
):
    """`send` makes what is passed on of what has come and of what was found here."""
    rank, ranks = place_of()
    saved = ctx.saved_tensors
    q, hops = saved[0], cases(rank, ranks, saved[0].shape[2] // 2)
    travelling = [torch.zeros_like(q) for _ in range(2)]
    for hop, pages in enumerate(ring().come_by(*saved[1:3])):
        of_q, *found = part(saved, pages, gradient, *hops[hop], None if hop else triangle(q))
        if hop == 0:
            d_q, own = of_q, found
        else:
            d_q, travelling = d_q + of_q, pass_gradients(*send(travelling, found))
    return d_q, *added([own_times * x for x in own], travelling)


@right("10.4")
class KeepsInOneTensor(Right):
    """Pages and their gradients as one tensor each; gradients are under way while it computes, too."""

    @staticmethod
    def backward(ctx, gradient):
        rank, ranks = place_of()
        saved = ctx.saved_tensors
        pages = torch.stack(saved[1:3])
        hops = cases(rank, ranks, saved[0].shape[2] // 2)
        d_q, home, own, of_home = torch.zeros_like(saved[0]), torch.zeros_like(pages), None, []
        for hop, (rows, columns) in enumerate(hops):
            if hop < ranks - 1:
                [coming], works = start(pages)
            mask = None if hop else triangle(saved[0])
            of_q, *found = parts_of(saved, pages, gradient, rows, columns, mask)
            d_q += of_q
            wait_for(of_home)
            if hop == 0:
                own = torch.stack(found)
            else:
                [home], of_home = start(home + torch.stack(found))
            if hop < ranks - 1:
                wait_for(works)
                pages = coming
        wait_for(of_home)
        return d_q, home[0] + own[0], home[1] + own[1]


@right("10.4")
class DifferentiatesEachPart(Right):
    """Autograd within a rank: softmax over all keys is exp(scores - lse), lse a constant."""

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

        return backward(ctx, gradient, part)


class WaitsForEachHop(RingOf):
    def come_by(self, k, v):
        yield k, v
        for _ in range(dist.get_world_size() - 1):
            k, v = pass_on(k, v)
            yield k, v


class UsesWhatIsToCome(RingOf):
    def come_by(self, k, v):
        yield k, v
        for _ in range(dist.get_world_size() - 1):
            (k, v), works = start(k, v)
            yield k, v
            wait_for(works)


@wrong("10.4", names="not-beside")
class AsksTheLesson(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        return Ring.forward(ctx, q, k, v, zigzag, None)

    @staticmethod
    def backward(ctx, gradient):
        return Ring.backward(ctx, gradient)[:3]


# As in 10.3.
@wrong("10.4", names="used-early", on_nccl="not-waited")
class UsesPagesEarlyInBackward(Right):
    @staticmethod
    def backward(ctx, gradient):
        return backward(ctx, gradient, ring=UsesWhatIsToCome)


@wrong("10.4", names="not-waited")
class DoesNotWaitInBackward(Right):
    @staticmethod
    def backward(ctx, gradient):
        return backward(ctx, gradient, ring=DoesNotWait.made_by)


@wrong("10.4", names="ranks-wait")
class PassesFromTheSecondRankOn(Right):
    """Rank 0 thinks that it has nothing to pass on."""

    @staticmethod
    def backward(ctx, gradient):
        def unless_first(*tensors):
            return pass_on(*tensors) if dist.get_rank() else tensors

        return backward(ctx, gradient, pass_gradients=unless_first)


@wrong("10.4", names="other-number")
class PassesGradientsToItself(Right):
    """They start at hop 0, and need n hops; a rank that is alone sends to itself."""

    @staticmethod
    def backward(ctx, gradient):
        d_q, *others = backward(ctx, gradient)
        pass_on(*others)
        return d_q, *others


@wrong("10.4", names="no-function")
class IsAModule(torch.nn.Module):
    def forward(self, q, k, v):
        return RingOf()(q, k, v)


@wrong("10.4", names="no-function")
class GivesGradientsOfQueriesOnly(Right):
    @staticmethod
    def backward(ctx, gradient):
        return backward(ctx, gradient)[0]


@wrong("10.4", names="wrong-output")
class ForwardAverages(Right):
    @staticmethod
    def forward(ctx, q, k, v):
        return forward(ctx, q, k, v, AveragesParts.made_by)


@wrong("10.4", names="local-query-gradient")
class DoesNotTurnInBackward(Right):
    @staticmethod
    def backward(ctx, gradient):
        saved, both = ctx.saved_tensors, slice(None)
        return tuple(parts_of(saved, saved[1:3], gradient, both, both, triangle(saved[0])))


@wrong("10.4", names="wrong-delta")
class ForgetsDelta(Right):
    @staticmethod
    def backward(ctx, gradient):
        def part(*args):
            return parts_of(*args, delta=torch.zeros_like(ctx.saved_tensors[4]))

        return backward(ctx, gradient, part)


@wrong("10.4", names="wrong-weights")
class NormalisesEachPart(Right):
    @staticmethod
    def backward(ctx, gradient):
        def part(saved, pages, gradient, rows, columns, mask):
            q, k, v, out, lse = (x.clone() for x in saved)
            theirs = [page[:, :, columns] for page in pages]
            out[:, :, rows], lse[:, :, rows] = attend(q[:, :, rows], *theirs, mask)
            return parts_of((q, k, v, out, lse), pages, gradient, rows, columns, mask)

        return backward(ctx, gradient, part)


@wrong("10.4", names="wrong-case-back")
class ForgetsTheMask(Right):
    @staticmethod
    def backward(ctx, gradient):
        def part(saved, pages, gradient, rows, columns, mask):
            return parts_of(saved, pages, gradient, rows, columns, None)

        return backward(ctx, gradient, part)


@wrong("10.4", names="wrong-scale")
class ScalesOnceMore(Right):
    @staticmethod
    def backward(ctx, gradient):
        d_q, d_k, d_v = backward(ctx, gradient)
        root = d_q.shape[-1] ** 0.5
        return d_q / root, d_k / root, d_v


@wrong("10.4", names="k-and-v-swapped")
class SwapsKeysAndValues(Right):
    @staticmethod
    def backward(ctx, gradient):
        d_q, d_k, d_v = backward(ctx, gradient)
        return d_q, d_v, d_k


@wrong("10.4", names="own-part")
class ForgetsItsOwnPart(Right):
    @staticmethod
    def backward(ctx, gradient):
        return backward(ctx, gradient, own_times=0)


@wrong("10.4", names="not-home")
class PassesOnTooEarly(Right):
    """What was found here is added to what comes next, and so to the pages of another rank."""

    @staticmethod
    def backward(ctx, gradient):
        found_here = []

        def late(travelling, found):
            found_here.append(found)
            return travelling

        def then_added(*tensors):
            return added(pass_on(*tensors), found_here[-1])

        return backward(ctx, gradient, send=late, pass_gradients=then_added)


@wrong("10.4", names="mean-not-sum")
class AveragesOverTheRanks(Right):
    @staticmethod
    def backward(ctx, gradient):
        d_q, d_k, d_v = backward(ctx, gradient)
        return d_q, d_k / dist.get_world_size(), d_v / dist.get_world_size()


@wrong("10.4", names="keeps-pages")
class KeepsAllPages(Right):
    @staticmethod
    def forward(ctx, q, k, v):
        out = forward(ctx, q, k, v)
        others = list(RingOf().come_by(k, v))[1:]
        ctx.save_for_backward(*ctx.to_save, *(page for pages in others for page in pages))
        return out

    @staticmethod
    def backward(ctx, gradient):
        class OfItsOwn:
            saved_tensors = ctx.saved_tensors[:5]

        return backward(OfItsOwn, gradient)


@wrong("10.4", names="keeps-pages")
class KeepsThePagesOutOfSight(Right):
    """Where `save_for_backward` does not count them."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.pages = list(WaitsForEachHop().come_by(k, v))
        return forward(ctx, q, k, v)

    @staticmethod
    def backward(ctx, gradient):
        class Kept(RingOf):
            def come_by(self, k, v):
                return iter(ctx.pages)

        return backward(ctx, gradient, ring=Kept)


@wrong("10.4", names="sends-too-much")
class TurnsThePagesHome(Right):
    @staticmethod
    def backward(ctx, gradient):
        gradients = backward(ctx, gradient)
        if dist.get_world_size() > 1:
            pass_on(*ctx.saved_tensors[1:3])
        return gradients
