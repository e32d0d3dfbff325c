"""What the exercises of chapter 10 share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from course_exercises.authoring import Wrong, same

NOT_EVERY_RANK = (
    "The ranks wait for each other for ever: some make a call that others never make, or all send before "
    "anybody receives. Every rank makes the same n - 1 hops, and starts its send and its receive together."
)
HANGS = {"timeout": "not-every-rank", "mismatch": "not-every-rank"}
TWO_RANKS = (
    "It works on the first number of ranks and not on others: does a fixed number stand where the world size "
    "belongs, or is there a case that needs more ranks than these?"
)


@contextmanager
def only_so_many() -> Iterator[None]:
    """One number of ranks was right: what nothing else explains depends on it."""
    try:
        yield
    except Wrong as wrong:
        slug = wrong.misconception or "two-ranks"
        raise Wrong(slug, expected=wrong.expected, got=wrong.got) from None


def partial(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp over these keys."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)


def merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = ((x - lse).exp().unsqueeze(-1) for x in (lse_a, lse_b))
    return a * out_a + b * out_b, lse


def zigzag(length: int, ranks: int, rank: int) -> Tensor:
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


@dataclass(frozen=True)
class _Slip:
    """One thing that a rank gets wrong."""

    mask: str = "tokens"  # or another kind of Ring._mask
    hops: int | None = None  # fewer than n - 1
    scale: bool = True
    stays: str = ""  # "k" or "v", which the rank does not pass on


@dataclass(frozen=True)
class Ring:
    """A whole sequence, and what each rank has of it and should find."""

    ranks: int
    q: Tensor
    k: Tensor
    v: Tensor
    slope: Tensor  # the gradient of the output

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def places(self, rank: int) -> Tensor:
        return zigzag(self.length, self.ranks, rank)

    def parts(self, whole: Tensor) -> list[Tensor]:
        return [whole[:, :, self.places(rank)] for rank in range(self.ranks)]

    def own_bytes(self) -> int:
        """S: the bytes of a rank's keys, as many as of its values."""
        return self.k.numel() * self.k.element_size() // self.ranks

    def outputs(self, slip: _Slip = _Slip()) -> list[Tensor]:
        return [self._output(rank, slip) for rank in range(self.ranks)]

    def _output(self, rank: int, slip: _Slip) -> Tensor:
        mine = self.places(rank)
        hops = self.ranks - 1 if slip.hops is None else slip.hops
        senders = [(rank - hop) % self.ranks for hop in range(hops + 1)]
        theirs = torch.cat([self.places(sender) for sender in senders])
        masks = [self._mask(rank, sender, slip.mask) for sender in senders]
        q = self.q[:, :, mine] * (1 if slip.scale else self.q.shape[-1] ** 0.5)
        own = mine.repeat(len(senders))
        k, v = (
            whole[:, :, own if slip.stays == name else theirs]
            for name, whole in (("k", self.k), ("v", self.v))
        )
        return partial(q, k, v, torch.cat(masks, dim=1))[0]

    def _mask(self, rank: int, sender: int, kind: str) -> Tensor:
        """What the queries of `rank` may see of the keys of `sender`, as somebody believes it."""
        if (
            kind == "rank 0 after" and sender == 0 < rank
        ):  # takes its pages for those of a later rank
            second = torch.arange(self.length // self.ranks) >= self.length // (2 * self.ranks)
            return second.unsqueeze(1).expand(-1, len(second))
        if kind == "as blocks":
            size = self.length // self.ranks
            mine, theirs = (torch.arange(size) + r * size for r in (rank, sender))
        elif kind == "other way" and sender != rank:  # takes the pages for those of rank + hop
            mine, theirs = self.places(rank), self.places((2 * rank - sender) % self.ranks)
        elif kind == "cases swapped" and sender != rank:
            second = torch.arange(self.length // self.ranks) >= self.length // (2 * self.ranks)
            every = torch.ones_like(second)
            rows, columns = (second, every) if sender < rank else (every, ~second)
            return rows.unsqueeze(1) & columns
        else:
            mine, theirs = self.places(rank), self.places(sender)
        if kind == "chunks":
            size = self.length // (2 * self.ranks)
            mine, theirs = mine // size, theirs // size
        seen = mine.unsqueeze(1) >= theirs
        places = torch.arange(len(mine))
        if kind == "own everywhere":  # each rank's pages as if they were one's own
            return places.unsqueeze(1) >= places
        if kind == "triangle in each case" and sender != rank:  # of what was cut out for the hop
            rows = places - (0 if sender < rank else len(places) // 2)
            return seen & (rows.unsqueeze(1) >= places)
        free = {"none": True, "own only": sender != rank, "own free": sender == rank}.get(kind)
        return torch.ones_like(seen) if free else seen

    def running(self, combine: Callable) -> list[Tensor]:
        """Outputs where `combine(result, part)` takes the place of the merge, for rows that see a part."""
        outs = []
        for rank in range(self.ranks):
            q, result = self.q[:, :, self.places(rank)], None
            for hop in range(self.ranks):
                sender = (rank - hop) % self.ranks
                mask, theirs = self._mask(rank, sender, "tokens"), self.places(sender)
                part = partial(q, self.k[:, :, theirs], self.v[:, :, theirs], mask)
                if result is not None:
                    seen, new = mask.any(dim=1), combine(result, part)
                    part = (
                        torch.where(seen[:, None], new[0], result[0]),
                        torch.where(seen, new[1], result[1]),
                    )
                result = part
            outs.append(result[0])
        return outs


def ring_task(draw, ranks: int) -> Ring:
    heads, half, width = draw.integer(1, 3), draw.integer(2, 4), draw.integer(3, 6)
    shape = draw.integer(1, 2), heads, 2 * half * ranks, width
    q, k, v, slope = (draw.tensor(*shape) for _ in range(4))
    return Ring(ranks, q, k, v, slope / 2)  # the gradients are sums over many queries


def wrong_outputs(task: Ring) -> dict[str, object]:
    ranks = task.ranks
    return {
        "own-pages-only": task.outputs(_Slip(hops=0)),
        "a-hop-missing": ranks > 2 and task.outputs(_Slip(hops=ranks - 2)),
        "no-mask": task.outputs(_Slip(mask="none")),
        "own-pages-unmasked": task.outputs(_Slip(mask="own free")),
        "own-mask-only": task.outputs(_Slip(mask="own only")),
        "mask-by-chunk": task.outputs(_Slip(mask="chunks")),
        "mask-as-blocks": task.outputs(_Slip(mask="as blocks")),
        "triangle-everywhere": lambda got: any(
            same(got, task.outputs(_Slip(mask=kind)))
            for kind in ("own everywhere", "triangle in each case")
        ),
        "cases-swapped": task.outputs(_Slip(mask="cases swapped")),
        "rank-0-after": task.outputs(_Slip(mask="rank 0 after")),
        "other-way-round": task.outputs(_Slip(mask="other way")),
        "keys-and-values-parted": lambda got: any(
            same(got, task.outputs(_Slip(stays=name))) for name in "kv"
        ),
        "not-scaled": task.outputs(_Slip(scale=False)),
        "merged-by-mean": task.running(lambda one, other: ((one[0] + other[0]) / 2, other[1])),
        "added-up": task.running(lambda one, other: (one[0] + other[0], other[1])),
        "last-pages-only": task.running(lambda one, other: other),
        "first-logsumexp-only": task.running(
            lambda one, other: (merged(*one, *other)[0], one[1]),
        ),
        "not-a-number": lambda got: any(out.isnan().any() for out in got),
    }


RING = {
    "own-pages-only": "Each rank attends to its own tokens only: no pages have come, or they were not used.",
    "a-hop-missing": "One hop is missing: the pages of the last rank never come by. There are n - 1 hops.",
    "no-mask": "Queries see all keys, later ones too: the causal mask is missing.",
    "own-pages-unmasked": "A rank's own pages are seen whole. There it needs a triangle of tokens: a query does not see the "
    "tokens that come after it.",
    "own-mask-only": "Your mask holds for the rank's own tokens, and all other pages are seen whole. In a zig-zag "
    "one of every two chunks of another rank comes later.",
    "mask-by-chunk": "You mask by chunk: within its own chunk a token sees those that come after it. Use a triangle "
    "of tokens there.",
    "mask-as-blocks": "Your mask takes the tokens for those of a cut from front to back. In a zig-zag a rank has "
    "one chunk from the front and one from the back.",
    "triangle-everywhere": "The triangle of tokens is laid over the pages of other ranks too. It belongs to the rank's own "
    "pages: of another's, a query sees a chunk whole or not at all.",
    "cases-swapped": "The two cases are swapped: from a rank before you both of your chunks see the first chunk of "
    "its pages; of a rank after you only your second one sees something, and it sees both.",
    "rank-0-after": "The pages of rank 0 are taken for those of a rank after you. After h hops you have the pages of rank - h, "
    "which stands before you as long as h <= rank.",
    "keys-and-values-parted": "Of keys and values only one travels: after a hop a rank weighs the values of one rank by the keys "
    "of another. Pass both on.",
    "other-way-round": "You take the pages for those of a rank on the other side: you count hops the wrong way, or pass pages "
    "the wrong way. Pass them on to rank + 1; after h hops you then have those of rank - h.",
    "not-scaled": "Scores are divided by the root of the head's width: q.shape[-1] ** 0.5.",
    "merged-by-mean": "You average partial results. Merge them by their logsumexps, with `merged`.",
    "added-up": "You add partial results up. Each is a mean of values already: merge them by their logsumexps, with `merged`.",
    "last-pages-only": "What the last pages gave takes the place of all that was found before. Merge it with that.",
    "first-logsumexp-only": "Every merge uses the logsumexp of the first pages. A merge returns two things: keep the new "
    "logsumexp, too.",
    "not-a-number": "There is NaN in the output. A query that sees none of some pages has a logsumexp of minus "
    "infinity: begin with your own pages, and leave such pages out.",
    "not-waited": "A message is used, or left, before anybody has waited for it. Call `wait()` on all that "
    "`batch_isend_irecv` returns, before you read the pages.",
    "gathers-all-keys": "A collective brings the keys of all ranks at once. Pass them on, one neighbour to the next: "
    "no rank ever has more than its own pages and one more set.",
    "sends-too-much": "More is sent than the keys and values need. Queries and outputs stay, and there are n - 1 "
    "hops: after the last one nobody needs the pages any more.",
    "large-scores": "A tensor is larger than the scores of this rank's queries with one set of pages. Merge after each "
    "hop instead of joining pages.",
    "computes-masked-pairs": "You compute pairs of chunks that the mask leaves out, and throw them away. In a zig-zag "
    "two of four pairs remain in each hop: choose the slices, then attend.",
    "arguments-changed": "q, k or v has changed: the layer before needs it for its own backward.",
    "two-ranks": TWO_RANKS + " A rank that is alone makes no hop.",
    "not-every-rank": NOT_EVERY_RANK,
}


def plain(out):
    return out.detach() if torch.is_tensor(out) else out
