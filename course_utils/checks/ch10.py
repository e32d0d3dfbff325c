"""The checks of chapter 10: merging partial attention, the zig-zag, ring attention forward and with its
backward, heads for sequence with an all-to-all.

Functions whose first argument is `rank` run on real ranks and only report what they saw. The
requirements know the whole sequence, compute what each rank should have, and what it has after a
mistake: `_Slip` says what a mistaken rank believes.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from course_utils.checks import Exercise, OwnPart, Wrong, expect, expect_type, run, same
from course_utils.checks.ranks import come_late, following
from course_utils.hardware import device
from course_utils.trace import Trace, kept_for_backward, largest_tensor

NOT_EVERY_RANK = (
    "The ranks wait for each other for ever: some make a call that others never make, or all send before "
    "anybody receives. Every rank makes the same n - 1 hops, and starts its send and its receive together."
)
HANGS = {"timeout": "not-every-rank", "mismatch": "not-every-rank"}
TWO_RANKS = (
    "It works on the first number of ranks and not on others: look for a fixed number where the world size "
    "belongs."
)


@contextmanager
def _only_so_many() -> Iterator[None]:
    """One number of ranks was right: what nothing else explains depends on it."""
    try:
        yield
    except Wrong as wrong:
        slug = wrong.misconception or "two-ranks"
        raise Wrong(slug, expected=wrong.expected, got=wrong.got) from None


# ---- 10.1 ----------------------------------------------------------------------------------------

merging = Exercise(
    "10.1",
    "merge",
    points=2,
    minutes=20,
    kind="first",
    parameters=("out_a", "lse_a", "out_b", "lse_b"),
    hints=[
        (
            "Each output has been divided by the sum of its own exponentials, which is e to its logsumexp. "
            "By what would it have been divided over all keys?"
        ),
        (
            "The logsumexp over all keys is log(e^lse_a + e^lse_b); `torch.logaddexp` computes it without "
            "an overflow. A partial output counts with e^(its logsumexp - the common one)."
        ),
        (
            "Give each weight a last dimension of one, so that it multiplies whole rows of the output. A "
            "query that has seen nothing has a logsumexp of minus infinity: its weight is 0, but 0 times "
            "NaN is NaN, and minus infinity minus itself is NaN too. Choose with `torch.where`."
        ),
    ],
    misconceptions={
        "no-logsumexp": "You return the output alone. The next merge needs the logsumexp as well: return "
        "both.",
        "mean": "You take the mean of the two outputs. The one that has found the larger scores counts for more.",
        "sum": "You add the two outputs. Each is a mean of values already: weigh them, with weights that add "
        "up to 1.",
        "undivided": "You multiply each output by e to its logsumexp, and do not divide by the sum of both.",
        "not-normalised": "You subtract the larger logsumexp, and do not divide by the sum of both weights: they have "
        "to add up to 1.",
        "swapped": "Each output gets the other's weight.",
        "one-weight": "All queries of a head get the same weight. Each query has found something else: its weight "
        "follows from its own two logsumexps.",
        "linear-weights": "You weigh by the logsumexps themselves. They are logarithms: the weights are their "
        "exponentials.",
        "larger-only": "You take the output of the one with the larger logsumexp. The other has found "
        "something, too.",
        "lse-largest": "The logsumexp that you return is the larger of the two. It is the logarithm of the "
        "sum of both exponentials.",
        "largest-not-added-back": "You subtract the larger logsumexp before the exponentials, and do not add it to the "
        "logarithm of their sum.",
        "lse-added": "You add the logsumexps. Their exponentials are added: log(e^a + e^b).",
        "lse-mean": "You return the mean of the logsumexps. Over all keys the sum of exponentials is larger "
        "than either: log(e^a + e^b).",
        "not-logarithm": "You return the sum of the exponentials. Asked is its logarithm.",
        "rows-mixed": "The weights have one number for each query, the outputs a row for each. Give the weights a "
        "last dimension of one, with `unsqueeze(-1)`.",
        "overflow": "e to a logsumexp of a thousand overflows. Subtract the common logsumexp, or the larger "
        "one, before the exponential.",
        "nothing-seen": "Where one side has seen no key, its logsumexp is minus infinity and its output does "
        "not count, whatever it is: the result is the other side's. 0 times NaN is NaN, so choose with "
        "`torch.where`.",
        "both-empty": "Where neither side has seen a key, the output is 0 and the logsumexp minus infinity, whatever the "
        "two outputs are. Minus infinity minus itself is NaN.",
        "arguments-changed": "An argument has changed. Make new tensors: the partial results may be needed again.",
    },
    failures={"must match the size": "rows-mixed"},
)


def _partial(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp over these keys."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)


def _two_parts(draw, scale: float = 1.0, cut: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """(out_a, lse_a, out_b, lse_b), and (out, lse) over all the keys."""
    shape = draw.integer(1, 2), draw.integer(2, 3), draw.integer(3, 5)  # N, H, t
    width, keys = draw.integer(6, 9), draw.integer(7, 9)
    q, k, v = (draw.tensor(*shape[:2], size, width) for size in (shape[2], keys, keys))
    q = scale * q
    halves = [
        *_partial(q, k[:, :, :cut], v[:, :, :cut]),
        *_partial(q, k[:, :, cut:], v[:, :, cut:]),
    ]
    return halves, list(_partial(q, k, v))


def _check_merge(answer, given: list[Tensor], expected: list[Tensor], **more) -> None:
    """Compares output and logsumexp; `more` are further likely mistakes, which go first."""
    got = answer(*(tensor.clone() for tensor in given))
    expect_type(got, (tuple, list), likely="no-logsumexp" if torch.is_tensor(got) else None)
    if len(got) != 2:
        raise Wrong(expected="an output and a logsumexp", got=f"{len(got)} values")
    out_a, lse_a, out_b, lse_b = given
    a, b, lse = (x.unsqueeze(-1) for x in (lse_a, lse_b, expected[1]))
    largest = torch.maximum(a, b)
    of_outputs = {
        **more,
        "mean": (out_a + out_b) / 2,
        "sum": out_a + out_b,
        "undivided": a.exp() * out_a + b.exp() * out_b,
        "not-normalised": (a - largest).exp() * out_a + (b - largest).exp() * out_b,
        "swapped": (b - lse).exp() * out_a + (a - lse).exp() * out_b,
        "linear-weights": (a * out_a + b * out_b) / (a + b),
        "larger-only": torch.where(a > b, out_a, out_b),
        "one-weight": lambda got: _is_one_weight(got, out_a, out_b),
    }
    of_sums = {
        **more,
        "lse-largest": torch.maximum(lse_a, lse_b),
        "largest-not-added-back": expected[1] - torch.maximum(lse_a, lse_b),
        "lse-added": lse_a + lse_b,
        "lse-mean": (lse_a + lse_b) / 2,
        "not-logarithm": expected[1].exp(),
    }
    expect(got[0], expected[0], what="the output", likely=of_outputs)
    expect(got[1], expected[1], what="the logsumexp", likely=of_sums)


def _is_one_weight(got: Tensor, out_a: Tensor, out_b: Tensor) -> bool:
    """Whether the output is w * out_a + (1 - w) * out_b, with one w for all queries of a head."""
    difference = out_a - out_b
    w = ((got - out_b) * difference).sum((-2, -1)) / difference.square().sum((-2, -1))
    return same(got, out_b + w[..., None, None] * difference)


@merging.requires("two parts of the keys give output and logsumexp over all keys")
def _(answer, draw):
    _check_merge(answer, *_two_parts(draw, cut=draw.integer(1, 3)))


@merging.requires("what is merged can be merged again, in another order")
def _(answer, draw):
    halves, (out, lse) = _two_parts(draw, cut=draw.integer(2, 4))
    _check_merge(answer, [*halves[2:], *halves[:2]], [out, lse])


@merging.requires(
    "scores in the thousands, of either sign, on both sides or on one", needs_earlier=True
)
def _(answer, draw):
    far = draw.number(2e3, 5e3)
    for shifts in ((far, far), (-far, -far), (far, 0), (0, far)):
        given, (out, lse) = _two_parts(draw)
        given = [given[0], given[1] + shifts[0], given[2], given[3] + shifts[1]]
        larger = 0 if shifts[0] > shifts[1] else 2  # beside it the other counts for nothing
        whole = (out, lse + far) if shifts[0] > 0 else (out, lse - far)
        if shifts[0] != shifts[1]:
            whole = given[larger], given[larger + 1]
        # the sums are rounded to about 3e-4 there, and so are the weights
        got = answer(*given)
        expect_type(got, (tuple, list), likely="no-logsumexp")
        expect(got[0], whole[0], what="the output", likely={"overflow": True}, tolerance=5e-3)
        expect(got[1], whole[1], what="the logsumexp", likely={"overflow": True})


@merging.requires("a query that has seen none of one part's keys", needs_earlier=True)
def _(answer, draw):
    for junk in (0.0, float("nan")):
        given, _ = _two_parts(draw)
        a, b = ([x.clone() for x in part] for part in (given[:2], given[2:]))
        a[0][:, :, 0], a[1][:, :, 0] = junk, -torch.inf
        b[0][:, :, 1], b[1][:, :, 1] = junk, -torch.inf
        whole = [x.clone() for x in _merged(*a, *b)]
        for i, other in ((0, b), (1, a)):
            whole[0][:, :, i], whole[1][:, :, i] = other[0][:, :, i], other[1][:, :, i]
        _check_merge(answer, [*a, *b], whole, **{"nothing-seen": True})


@merging.requires("a query that has seen no key at all", needs_earlier=True)
def _(answer, draw):
    for junk in (0.0, float("nan")):
        given, whole = _two_parts(draw)
        for (out, lse), value in ((given[:2], junk), (given[2:], junk), (whole, 0.0)):
            out[:, :, -1], lse[:, :, -1] = value, -torch.inf
        _check_merge(answer, given, whole, **{"both-empty": True})


def _merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = ((x - lse).exp().unsqueeze(-1) for x in (lse_a, lse_b))
    return a * out_a + b * out_b, lse


@merging.requires("the arguments stay as they are", at_home=True)
def _(answer, draw):
    given, _ = _two_parts(draw)
    before = [tensor.clone() for tensor in given]
    answer(*given)
    expect(given, before, each="argument", likely={"arguments-changed": True})


# ---- 10.2 ----------------------------------------------------------------------------------------

layout = Exercise(
    "10.2",
    "zigzag_indices",
    points=1,
    minutes=10,
    kind="first",
    parameters=("length", "ranks", "rank"),
    hints=[
        (
            "Write down the chunks 0 to 7 for four ranks. Which two does rank 0 have, which two rank 1? What do "
            "the numbers of each pair add up to?"
        ),
        (
            "There are 2 * ranks chunks of length / (2 * ranks) places each. Rank r has chunk r, and the chunk "
            "that is as far from the end as r is from the front."
        ),
        (
            "Check that the length divides. Cut `torch.arange(length)` into the chunks, take those with the "
            "numbers rank and 2 * ranks - 1 - rank, and join them in this order."
        ),
    ],
    misconceptions={
        "no-tensor": "Asked is a tensor of places: `torch.tensor` makes one of a list.",
        "blocks": "These are two neighbouring chunks, as one cuts from front to back. Under a causal mask the "
        "last rank would have most of the work.",
        "strided": "You deal single places out, one after the other. A zig-zag deals out chunks.",
        "chunk-numbers": "These are the numbers of the two chunks. Asked are the places of the tokens in them.",
        "not-joined": "The chunks are the rows of a table. Asked is one row of places: join them.",
        "head-only": "The chunk from the back is missing.",
        "tail-only": "The chunk from the front is missing.",
        "too-few-chunks": "You cut into as many chunks as there are ranks. Each rank gets two, so cut into twice as "
        "many; else the two halves of the ranks have the same places.",
        "tail-off-by-one": "The chunk from the back is one too early or too late: the last chunk has the number "
        "2 * ranks - 1, and it belongs to rank 0.",
        "tail-backwards": "The places of the chunk from the back run backwards. Only the order of chunks is "
        "mirrored: within a chunk tokens keep their order.",
        "tail-first": "The chunk from the back stands first. Asked is ascending order.",
        "other-rank": "These are the places of another rank.",
        "wrong-dtype": "Places are int64, as `torch.arange` of integers makes them.",
        "no-error": "A length that does not divide is accepted without a word, and places are lost, or chunks "
        "are unequal. Compare the remainder with zero and raise a ValueError.",
        "other-error": "A length that does not divide ends in another exception than a ValueError. An assert "
        "disappears under `python -O`, and a message from deep inside names the wrong cause.",
        "error-without-sizes": "The ValueError does not say what does not divide by what. Name the length and the "
        "number of chunks in its message.",
        "refuses-what-divides": "A length that divides into 2 * ranks chunks is refused.",
    },
    failures={"ValueError": "refuses-what-divides"},
)


def _zigzag(length: int, ranks: int, rank: int) -> Tensor:
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def _check_places(answer, length: int, ranks: int, rank: int) -> None:
    got = answer(length, ranks, rank)
    expect_type(got, Tensor, likely="no-tensor" if isinstance(got, list) else None)
    every, size = torch.arange(length), length // (2 * ranks)
    chunks, own = every.chunk(2 * ranks), _zigzag(length, ranks, rank)
    head, tail = own[:size], own[size:]
    wide = every.chunk(ranks)
    dealt = every.view(-1, 2 * ranks)  # there and back, one place at a time
    likely = {
        "not-joined": lambda got: got.ndim > 1 and same(got.flatten(), own),
        "chunk-numbers": size > 1 and torch.tensor([rank, 2 * ranks - 1 - rank]),
        "wrong-dtype": lambda got: got.dtype != torch.int64 and same(got.long(), own),
        "blocks": torch.cat(chunks[2 * rank : 2 * rank + 2]),
        "strided": lambda got: any(
            same(got, each)
            for each in (every[rank::ranks], dealt[:, [rank, 2 * ranks - 1 - rank]].flatten())
        ),
        "head-only": head,
        "tail-only": tail,
        "too-few-chunks": lambda got: same(
            got.sort().values, torch.cat([wide[rank], wide[ranks - 1 - rank]]).sort().values
        ),
        "tail-backwards": torch.cat([head, tail.flip(0)]),
        "tail-first": torch.cat([tail, head]),
        "other-rank": lambda got: any(same(got, _zigzag(length, ranks, r)) for r in range(ranks)),
        "tail-off-by-one": lambda got: same(got[:size], head),
    }
    expect(got, own, what="the places", likely=likely)


@layout.requires("the first rank has the first chunk and the last one")
def _(answer, draw):
    ranks = draw.choice([3, 4, 5])
    _check_places(answer, 2 * ranks * draw.integer(2, 5), ranks, 0)


@layout.requires("any rank of any number of ranks", failures={"exception": "tail-off-by-one"})
def _(answer, draw):
    for ranks in draw.sample([2, 3, 4, 6], 2):
        length = 2 * ranks * draw.integer(2, 5)
        for rank in range(ranks):
            _check_places(answer, length, ranks, rank)


@layout.requires("one rank has everything, and a chunk may be one token")
def _(answer, draw):
    length = 2 * draw.integer(2, 6)
    expect(answer(length, 1, 0), torch.arange(length), what="the places")
    ranks = draw.integer(2, 5)
    _check_places(answer, 2 * ranks, ranks, draw.integer(0, ranks - 1))


@layout.requires("a length that does not divide is refused with both numbers")
def _(answer, draw):
    ranks = draw.choice([2, 3, 4])
    # one that divides by the ranks, and not by twice as many
    lengths = [ranks * (2 * draw.integer(2, 5) + 1), 2 * ranks * draw.integer(2, 5) + 1]
    for length in lengths:
        numbers = ({str(length), str(2 * ranks)}, {str(length), str(ranks)})
        _check_refused(lambda length=length: answer(length, ranks, 0), numbers)


def _check_refused(call: Callable, numbers: tuple[set[str], ...]) -> None:
    """Raises Wrong unless the call ends in a ValueError that names one of the sets of numbers."""
    expected = f"a ValueError that names {' and '.join(sorted(numbers[0], key=int))}"
    try:
        call()
    except ValueError as error:
        if not any(wanted <= set(re.findall(r"\d+", str(error))) for wanted in numbers):
            raise Wrong(
                "error-without-sizes", expected=expected, got=f"ValueError: {error}"
            ) from None
        return
    except NotImplementedError:
        raise
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        raise Wrong("other-error", expected=expected, got=type(error).__name__) from None
    raise Wrong("no-error", expected=expected, got="no exception")


# ---- 10.3 and 10.4: what a mistaken rank believes ------------------------------------------------


@dataclass(frozen=True)
class _Slip:
    """One thing that a rank gets wrong."""

    mask: str = "tokens"  # or another kind of _Ring._mask
    hops: int | None = None  # fewer than n - 1
    scale: bool = True
    stays: str = ""  # "k" or "v", which the rank does not pass on


@dataclass(frozen=True)
class _Ring:
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
        return _zigzag(self.length, self.ranks, rank)

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
        return _partial(q, k, v, torch.cat(masks, dim=1))[0]

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
                part = _partial(q, self.k[:, :, theirs], self.v[:, :, theirs], mask)
                if result is not None:
                    seen, new = mask.any(dim=1), combine(result, part)
                    part = (
                        torch.where(seen[:, None], new[0], result[0]),
                        torch.where(seen, new[1], result[1]),
                    )
                result = part
            outs.append(result[0])
        return outs


def _ring_task(draw, ranks: int) -> _Ring:
    heads, half, width = draw.integer(1, 3), draw.integer(2, 4), draw.integer(3, 6)
    shape = draw.integer(1, 2), heads, 2 * half * ranks, width
    return _Ring(ranks, *(draw.tensor(*shape) for _ in range(4)))


def _wrong_outputs(task: _Ring) -> dict[str, object]:
    ranks = task.ranks
    return {
        "own-pages-only": task.outputs(_Slip(hops=0)),
        "a-hop-missing": ranks > 2 and task.outputs(_Slip(hops=ranks - 2)),
        "no-mask": task.outputs(_Slip(mask="none")),
        "own-pages-unmasked": task.outputs(_Slip(mask="own free")),
        "own-mask-only": task.outputs(_Slip(mask="own only")),
        "mask-by-chunk": task.outputs(_Slip(mask="chunks")),
        "mask-as-blocks": task.outputs(_Slip(mask="as blocks")),
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
            lambda one, other: (_merged(*one, *other)[0], one[1]),
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
    "cases-swapped": "The two cases are swapped: from a rank before you both of your chunks see the first chunk of "
    "its pages; of a rank after you only your second one sees something, and it sees both.",
    "rank-0-after": "The pages of rank 0 are taken for those of a rank after you. After h hops you have the pages of rank - h, "
    "which stands before you as long as h <= rank.",
    "keys-and-values-parted": "Of keys and values only one travels: after a hop a rank weighs the values of one rank by the keys "
    "of another. Pass both on.",
    "other-way-round": "You take the pages for those of rank + hop. They come from the rank before you, so after h "
    "hops you have those of rank - h.",
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

ring = Exercise(
    "10.3",
    "ring_attention",
    points=3,
    minutes=40,
    parameters=("q", "k", "v"),
    hints=[
        (
            "Begin with your own pages and a triangle of tokens as the mask. Then n - 1 times: pass the pages on, "
            "see whose they are, attend with what may see them, merge."
        ),
        (
            "After h hops you have the pages of rank - h, modulo n. If that rank stands before you (h <= rank), attend "
            "with all queries to the first half of its pages; else with the second half of your queries to all of them."
        ),
        (
            "Keep output and logsumexp as two tensors for all queries. In the second case only their second half "
            "changes: merge that half, and join it again with the first. No case but your own needs a mask."
        ),
    ],
    misconceptions=RING,
    failures=HANGS,
)


@dataclass(frozen=True)
class _Forward:
    out: Tensor
    unwaited: list[str]
    sent: int
    collectives: list[str]  # names of what was called beside messages
    largest: int
    flops: int
    changed: bool


def _forward(rank, answer, *parts) -> _Forward:
    q, k, v = (part.clone().to(device()) for part in parts)
    before = [x.clone() for x in (q, k, v)]
    with following() as sent:
        come_late(rank)
        out = answer(q, k, v)
    changed = not all(map(torch.equal, before, (q, k, v)))
    with Trace() as trace, largest_tensor() as largest, FlopCounterMode(display=False) as flops:
        answer(q, k, v)
    record = trace.record()
    others = sorted({call.op for call in record.calls} - {"send", "recv"})
    counted = largest.bytes, flops.get_total_flops()
    return _Forward(_plain(out), sent.unwaited, record.sent(), others, *counted, changed)


def _plain(out):
    return out.detach() if torch.is_tensor(out) else out


def _run_forward(answer, task: _Ring) -> list[_Forward]:
    """Runs and judges what must be judged before any number: messages nobody has waited for."""
    own = [OwnPart(task.parts(whole)) for whole in (task.q, task.k, task.v)]
    reports = run(_forward, task.ranks, answer, *own)
    for report in reports:
        if report.unwaited:
            raise Wrong(
                "not-waited", expected="a wait for every message", got="a message without one"
            )
        expect_type(report.out, Tensor)
    return reports


def _check_forward(answer, task: _Ring) -> list[_Forward]:
    reports = _run_forward(answer, task)
    got = [report.out for report in reports]
    expect(got, task.outputs(), each="rank", what="the output", likely=_wrong_outputs(task))
    if any(report.changed for report in reports):
        raise Wrong("arguments-changed", expected="q, k and v as before", got="other values")
    return reports


@ring.requires("queries see what the mask allows of the pages of all ranks")
def _(answer, draw):
    _check_forward(answer, _ring_task(draw, draw.choice([3, 4])))


@ring.requires("two ranks, and one", needs_earlier=True, failures={"exception": "two-ranks"})
def _(answer, draw):
    with _only_so_many():
        for ranks in (2, 1):
            _check_forward(answer, _ring_task(draw, ranks))


@ring.requires("keys and values make n - 1 hops, and nothing else is sent", needs_earlier=True)
def _(answer, draw):
    task = _ring_task(draw, draw.choice([3, 4]))
    for report in _run_forward(answer, task):
        if report.collectives:
            names = ", ".join(report.collectives)
            raise Wrong("gathers-all-keys", expected="messages to a neighbour", got=names)
        limit = 2 * (task.ranks - 1) * task.own_bytes()
        if report.sent > limit:
            raise Wrong(
                "sends-too-much", expected=f"at most {limit} bytes", got=f"{report.sent} bytes"
            )


@ring.requires(
    "scores of one set of pages at a time, and of visible pairs only", needs_earlier=True
)
def _(answer, draw):
    ranks, heads, half, width = draw.choice([3, 4]), 2, draw.choice([12, 16]), 2
    shape = 1, heads, 2 * half * ranks, width
    task = _Ring(ranks, *(draw.tensor(*shape) for _ in range(4)))
    pair = 4 * heads * half * half * width  # operations: two products
    limits = heads * (2 * half) ** 2 * 4, (4 + 2 * (ranks - 1)) * pair
    for report in _run_forward(answer, task):
        if report.largest > limits[0]:
            expected, got = f"at most {limits[0]} bytes in a tensor", f"{report.largest} bytes"
            raise Wrong("large-scores", expected=expected, got=got)
        if report.flops > limits[1]:
            expected = f"at most {limits[1] // pair} pairs of chunks"
            raise Wrong(
                "computes-masked-pairs", expected=expected, got=f"{report.flops / pair:g} pairs"
            )


# ---- 10.4 ----------------------------------------------------------------------------------------

with_backward = Exercise(
    "10.4",
    "RingAttention",
    points=4,
    minutes=60,
    kind="stretch",
    hints=[
        (
            "Forward is 10.3, and keeps q, k, v, the output and the logsumexp with `ctx.save_for_backward`. In backward "
            "the pages go round again, and each hop has the same three cases as in forward."
        ),
        (
            "`attend_backward` gives what one case adds to the gradients of q, k and v. The gradient of q stays. Those of "
            "k and v belong to the owner of the pages: add your part to what has come, then pass the sum on."
        ),
        (
            "Put the parts from your own pages aside. From hop 1 on: pass the pages, compute, add to the travelling gradients, "
            "pass these. After hop n - 1 and its pass they are home: add what you put aside. One case fills only half of the "
            "rows: write it into zeros of full size."
        ),
    ],
    misconceptions={
        **RING,
        "no-autograd-function": "Asked is a subclass of `torch.autograd.Function`, with the static methods forward and "
        "backward.",
        "no-backward": "Backward is not written yet, or gives no gradient for one of q, k and v. Return three.",
        "local-key-gradients": "The gradients of k and v have the parts of this rank's own queries only. Every later "
        "query has used these pages: the parts of the other ranks have to come home.",
        "never-sent": "The gradients of all pages that came by are added up on this rank. Those of each set of pages belong to "
        "their owner: pass them on behind the pages.",
        "last-part-only": "The parts of the ranks on the way are lost: what has come has to be added to before it is passed on.",
        "k-and-v-swapped": "The gradients of k and v are in each other's place: return those of q, k and v.",
        "averaged": "The gradients of k and v are divided by the number of ranks. They are sums over all queries, as in one process.",
        "own-part-missing": "The gradients of k and v lack the part of this rank's own queries: add it at home.",
        "own-part-twice": "The part of this rank's own queries is counted twice.",
        "not-home": "The gradients of k and v have stopped one desk before home: what a rank returns are those of the next "
        "rank's pages. Add first, then pass on, also after the last hop.",
        "last-part-missing": "The part of the last rank that saw the pages is missing: n - 1 ranks add to them.",
        "local-query-gradient": "The gradient of q comes from the rank's own pages only. Pages have to go round in backward, too.",
        "delta-missing": "The term delta is missing: softmax's backward subtracts the sum of gradient * output from every "
        "row.",
        "delta-wrong": "delta is not what it should be: of gradient * output, both of this rank's queries, the *sum* over the width.",
        "first-logsumexp": "Backward uses the logsumexp of the first pages. Save the one at the end of forward, over all keys.",
        "partial-logsumexp": "In backward you use weights of one set of pages alone. They have to be those over all keys: "
        "compute them with the logsumexp at the end of forward.",
        "mask-lost": "The causal mask is missing in backward, on the rank's own pages.",
        "cases-swapped-back": "In backward the two cases are swapped. They are those of forward, hop by hop.",
        "gradient-not-scaled": "The gradients of q and k lack the division by the root of the head's width.",
        "scaled-twice": "The gradients of q and k are divided by the root of the head's width once too often: `attend_backward` "
        "does it already.",
        "keeps-pages": "Forward keeps the pages of other ranks for backward. Keep your own: they come round again.",
        "sends-too-much-back": "Backward sends more than 4 (n - 1) times the bytes of k. Pages and their gradients make n - 1 "
        "hops each; gradients that start at hop 0 need one more.",
    },
    failures={**HANGS, "NoneType": "no-backward"},
    at_home=True,
)


@dataclass(frozen=True)
class _Both:
    forward: Tensor
    gradients: list[Tensor | None]
    kept: int
    unwaited: list[str]
    sent: int


def _both(rank, answer, q, k, v, slope) -> _Both:
    q, k, v = (part.clone().to(device()).requires_grad_() for part in (q, k, v))
    with following() as sent:
        come_late(rank)
        with kept_for_backward(nn.Module()) as kept:
            out = answer.apply(q, k, v)
        out.backward(slope.to(device()))
    gradients = [x.grad for x in (q, k, v)]
    again = answer.apply(*(x.detach().requires_grad_() for x in (q, k, v)))
    with Trace() as trace:
        again.backward(slope.to(device()))
    return _Both(out.detach(), gradients, kept.bytes, sent.unwaited, trace.record().sent())


def _run_both(answer, task: _Ring) -> list[_Both]:
    if not issubclass(answer, torch.autograd.Function):
        raise Wrong(
            "no-autograd-function", expected="a torch.autograd.Function", got=f"{answer.__name__}"
        )
    wholes = task.q, task.k, task.v, task.slope
    reports = run(_both, task.ranks, answer, *(OwnPart(task.parts(whole)) for whole in wholes))
    for report in reports:
        if report.unwaited:
            raise Wrong(
                "not-waited", expected="a wait for every message", got="a message without one"
            )
    return reports


class _Gradients:
    """dQ, dK and dV of a task, by the rank whose queries gave them and the rank of the pages."""

    def __init__(self, task: _Ring, **slip) -> None:
        """`slip`: the mistake, as `_pair` takes it."""
        self.task = task
        n = range(task.ranks)
        self.tables = [[self._pair(r, s, **slip) for s in n] for r in n]

    def _pair(self, rank, sender, mask="tokens", delta="right", lse="all", scalings=1):
        """What the queries of `rank` and the pages of `sender` give to q, k and v."""
        task = self.task
        mine, theirs = task.places(rank), task.places(sender)
        q, slope = task.q[:, :, mine], task.slope[:, :, mine]
        k, v = task.k[:, :, theirs], task.v[:, :, theirs]
        out, total = _partial(q, task.k, task.v, mine.unsqueeze(1) >= torch.arange(task.length))
        if lse == "own":
            own = task.k[:, :, mine], task.v[:, :, mine], task._mask(rank, rank, "tokens")
            total = _partial(q, *own)[1]
        elif lse == "each":
            out, total = (
                x.nan_to_num(0) for x in _partial(q, k, v, task._mask(rank, sender, mask))
            )
        scale = q.shape[-1] ** -0.5
        weights = ((q @ k.mT) * scale - total.unsqueeze(-1)).exp() * task._mask(rank, sender, mask)
        weights = weights.nan_to_num(0, posinf=0)
        deltas = {
            "right": (slope * out).sum(-1),
            "none": torch.zeros_like(total),
            "mean": (slope * out).mean(-1),
            "gradient": slope.sum(-1),
            "values": (slope * task.v[:, :, mine]).sum(-1),
        }
        d_scores = weights * (slope @ v.mT - deltas[delta].unsqueeze(-1)) * scale**scalings
        return [d_scores @ k, d_scores.mT @ q, weights.mT @ slope]

    def of_queries(self) -> list[Tensor]:
        return [sum(pair[0] for pair in row) for row in self.tables]

    def of_pages(self, which: int, rank_of: Callable[[int, int], float]) -> list[Tensor]:
        """The sum over ranks r of rank_of(r, owner) times the part of r, for each owner of pages."""
        n = range(self.task.ranks)
        return [sum(rank_of(r, owner) * self.tables[r][owner][which] for r in n) for owner in n]


def _check_both(answer, task: _Ring) -> list[_Both]:
    reports, n = _run_both(answer, task), task.ranks
    outs = [report.forward for report in reports]
    expect(outs, task.outputs(), each="rank", what="the output", likely=_wrong_outputs(task))
    right = _Gradients(task)
    slips = {
        "delta-missing": _Gradients(task, delta="none"),
        "first-logsumexp": _Gradients(task, lse="own"),
        "partial-logsumexp": _Gradients(task, lse="each"),
        "mask-lost": _Gradients(task, mask="own free"),
        "cases-swapped-back": _Gradients(task, mask="cases swapped"),
        "gradient-not-scaled": _Gradients(task, scalings=0),
        "scaled-twice": _Gradients(task, scalings=2),
    }
    of_delta = [_Gradients(task, delta=kind) for kind in ("mean", "gradient", "values")]
    got = [report.gradients[0] for report in reports]
    own_only = [right.tables[r][r][0] for r in range(n)]
    likely = {
        "no-backward": lambda got: any(g is None for g in got),
        "local-query-gradient": n > 1 and own_only,
        **{slug: slip.of_queries() for slug, slip in slips.items()},
        "delta-wrong": lambda got: any(same(got, slip.of_queries()) for slip in of_delta),
    }
    expect(got, right.of_queries(), each="rank", what="the gradient of q", likely=likely)
    for which, name in ((1, "k"), (2, "v")):
        got = [report.gradients[which] for report in reports]
        likely = {
            "no-backward": lambda got: any(g is None for g in got),
            "k-and-v-swapped": right.of_pages(3 - which, lambda r, owner: 1),
            **(_wrong_page_gradients(right, which) if n > 1 else {}),
            **{slug: slip.of_pages(which, lambda r, owner: 1) for slug, slip in slips.items()},
        }
        expected = right.of_pages(which, lambda r, owner: 1)
        expect(got, expected, each="rank", what=f"the gradient of {name}", likely=likely)
    return reports


def _wrong_page_gradients(right: _Gradients, which: int) -> dict[str, object]:
    """What the gradients of k or v are after a mistake on their way."""
    n = right.task.ranks
    own = right.of_pages(which, lambda r, owner: r == owner)
    others = right.of_pages(which, lambda r, owner: r != owner)
    whole = [a + b for a, b in zip(own, others, strict=True)]
    moved = [others[(r + 1) % n] for r in range(n)]
    back = [others[(r - 1) % n] for r in range(n)]
    last = right.of_pages(which, lambda r, owner: (r - owner) % n != n - 1)
    ends = right.of_pages(which, lambda r, owner: (r - owner) % n in (0, n - 1))
    here = [sum(right.tables[r][owner][which] for owner in range(n)) for r in range(n)]
    return {
        "local-key-gradients": own,
        "own-part-missing": others,
        "own-part-twice": [a + b for a, b in zip(own, whole, strict=True)],
        "last-part-missing": n > 2 and last,
        "last-part-only": n > 2 and ends,
        "never-sent": here,
        "averaged": [each / n for each in whole],
        "not-home": lambda got: any(
            same(got, [a + b for a, b in zip(own, wrong, strict=True)]) or same(got, wrong)
            for wrong in (moved, back, [whole[(r + 1) % n] for r in range(n)])
        ),
    }


@with_backward.requires("output and gradients of q, k and v are those of one process")
def _(answer, draw):
    _check_both(answer, _ring_task(draw, draw.choice([3, 4])))


@with_backward.requires(
    "two ranks and one", needs_earlier=True, failures={"exception": "two-ranks"}
)
def _(answer, draw):
    with _only_so_many():
        for ranks in (2, 1):
            _check_both(answer, _ring_task(draw, ranks))


@with_backward.requires("forward keeps this rank's own tensors only", needs_earlier=True)
def _(answer, draw):
    task = _ring_task(draw, draw.choice([3, 4]))
    # q, k, v, the output, a mask for each hop and the logsumexp, generously
    limit = (
        5 * task.own_bytes() + 2 * task.q.shape[1] * task.q.shape[0] * task.length // task.ranks * 4
    )
    for report in _run_both(answer, task):
        if report.kept > limit:
            raise Wrong(
                "keeps-pages", expected=f"at most {limit} bytes", got=f"{report.kept} bytes"
            )


@with_backward.requires("backward sends pages and their gradients n - 1 times", needs_earlier=True)
def _(answer, draw):
    task = _ring_task(draw, draw.choice([3, 4]))
    limit = 4 * (task.ranks - 1) * task.own_bytes()
    for report in _run_both(answer, task):
        if report.sent > limit:
            raise Wrong(
                "sends-too-much-back", expected=f"at most {limit} bytes", got=f"{report.sent} bytes"
            )


# ---- 10.5 ----------------------------------------------------------------------------------------

swapping = Exercise(
    "10.5",
    "heads_for_sequence",
    points=2,
    minutes=30,
    parameters=("x",),
    hints=[
        (
            "Cut x into n groups of heads. The r-th group is for rank r. What comes from rank s are the tokens of its stretch, "
            "for your heads: where do they belong in the result?"
        ),
        (
            "`torch.stack(x.chunk(n, dim=1))` has the group for rank r at index r; `all_to_all_single` exchanges along that "
            "dimension. Join what has come along the tokens. Autograd knows nothing of it: write an `autograd.Function`."
        ),
        (
            "Backward is the same exchange with the two dimensions changed about: cut the gradient along the tokens, send piece "
            "s to rank s, and join what comes along the heads."
        ),
    ],
    misconceptions={
        "whole-result": "You return all heads of all tokens. A rank is to have its own group of heads only.",
        "unchanged": "You return x itself, or its values in another shape: nothing has been exchanged.",
        "joined-along-heads": "What has come is joined along the heads. The pieces are stretches of the sequence: join "
        "them along dimension 2.",
        "tokens-interleaved": "The tokens are in another order: first the first token of each rank, or a view that mixes "
        "dimensions. The stretch of rank 0 comes first, then that of rank 1.",
        "pieces-mixed": "The right numbers on wrong ranks: `all_to_all_single` cuts a tensor along its *first* dimension, as it lies "
        "in memory. Stack the groups of heads along a first dimension of n.",
        "stretches-backwards": "The stretches of the sequence are in another order than the ranks.",
        "heads-strided": "Rank r has every n-th head. Asked is the r-th group of heads that lie together.",
        "other-heads": "These are another rank's heads.",
        "more-sent": "More is handed over than x: a collective that brings everything to every rank. An all-to-all sends each "
        "number to the one rank that needs it.",
        "no-gradient": "The result cannot be differentiated: collectives do not tell autograd. Write an "
        "`autograd.Function` with a backward.",
        "local-gradient": "The gradient of x has only what this rank's own piece gives. Backward has to bring the others' home.",
        "gradient-not-exchanged": "The gradient of x is in the wrong place: backward has to undo the exchange, piece by piece.",
        "gradient-scaled": "The gradient of x is n times too large or too small: each number has moved, and has not been "
        "added up or averaged.",
        "input-changed": "x has changed: the layer before needs it for its own backward.",
        "not-waited": "The exchange is used before anybody has waited for it.",
        "no-error": "Heads that do not divide are accepted without a word. Compare the remainder with zero and raise a "
        "ValueError.",
        "other-error": "Heads that do not divide end in another exception than a ValueError.",
        "error-without-sizes": "The ValueError does not say what does not divide by what. Name the heads and the ranks.",
        "refuses-what-divides": "A number of heads that divides is refused.",
        "two-ranks": TWO_RANKS,
        "not-every-rank": "Some ranks make a call that others never make, and so nobody can go on.",
    },
    failures=HANGS,
)


@dataclass(frozen=True)
class _Swapped:
    out: object
    gradient: Tensor | None
    unwaited: list[str]
    sent: int  # in the pass that sends more
    calls: list[str]  # their names
    changed: bool


def _swapped(rank, answer, x, slope) -> _Swapped:
    x = x.clone().to(device()).requires_grad_()
    before = x.detach().clone()
    slope = slope.to(device())
    with following() as sent:
        come_late(rank)
        out = answer(2 * x)  # not a leaf, as in a model
    if _fits(out, slope):
        out.backward(slope)
    changed = not torch.equal(before, x.detach())
    gradient, x.grad = x.grad, None
    with Trace() as forward:
        again = answer(2 * x)
    with Trace() as backward:
        if _fits(again, slope):
            again.backward(slope)
    records = forward.record(), backward.record()
    most = max(record.sent() for record in records)
    calls = sorted({call.op for record in records for call in record.calls})
    return _Swapped(_plain(out), gradient, sent.unwaited, most, calls, changed)


def _fits(out: object, slope: Tensor) -> bool:
    """Whether backward can start from `slope`."""
    return torch.is_tensor(out) and out.requires_grad and out.shape == slope.shape


def _check_swap(answer, draw, ranks: int) -> None:
    n, heads, stretch, width = (
        draw.integer(1, 2),
        ranks * draw.integer(2, 3),
        draw.integer(2, 4),
        draw.integer(2, 5),
    )
    x, slope = (
        draw.tensor(n, heads, ranks * stretch, width),
        draw.tensor(n, heads, ranks * stretch, width),
    )
    own, groups = list(x.chunk(ranks, dim=2)), list(x.chunk(ranks, dim=1))
    slopes = list(slope.chunk(ranks, dim=1))
    reports = run(_swapped, ranks, answer, OwnPart(own), OwnPart(slopes))
    if any(report.unwaited for report in reports):
        raise Wrong("not-waited", expected="a wait for every call", got="a call without one")
    for report in reports:
        expect_type(report.out, Tensor)
    strided = [x[:, r::ranks] for r in range(ranks)]
    likely = {
        "whole-result": [x] * ranks,
        "unchanged": lambda got: all(
            same(g.flatten(), o.flatten()) for g, o in zip(got, own, strict=True)
        ),
        "heads-strided": strided,
        "other-heads": lambda got: all(any(same(g, group) for group in groups) for g in got),
        "stretches-backwards": lambda got: all(
            same(_sorted_stretches(g, ranks), _sorted_stretches(e, ranks))
            if g.shape == e.shape
            else False
            for g, e in zip(got, groups, strict=True)
        ),
        "joined-along-heads": lambda got: all(
            g.numel() == e.numel() and g.shape != e.shape for g, e in zip(got, groups, strict=True)
        ),
        "tokens-interleaved": lambda got: all(
            g.shape == e.shape and same(g.flatten().sort().values, e.flatten().sort().values)
            for g, e in zip(got, groups, strict=True)
        ),
        "pieces-mixed": lambda got: same(
            torch.cat([g.flatten() for g in got]).sort().values, x.flatten().sort().values
        ),
    }
    got = [report.out for report in reports]
    expect(
        got,
        [2 * group for group in groups],
        each="rank",
        what="the result",
        likely=_doubled(likely),
    )
    _check_swap_gradients(reports, slope, ranks)
    limit = own[0].numel() * 4
    for report in reports:
        others = [call for call in report.calls if call not in ("all_to_all", "send", "recv")]
        if report.sent > limit or others:
            got = f"{report.sent} bytes, with {', '.join(report.calls)}"
            raise Wrong("more-sent", expected=f"at most {limit} bytes a pass, all to all", got=got)
    if any(report.changed for report in reports):
        raise Wrong("input-changed", expected="x as before", got="other values")


def _doubled(likely: dict) -> dict:
    """The answer gets 2 x: what is expected of mistakes, for half of what came."""

    def judged(value):
        if callable(value):
            return lambda got: value([g / 2 for g in got])
        return [2 * tensor for tensor in value]

    return {slug: judged(value) for slug, value in likely.items()}


def _sorted_stretches(tensor: Tensor, ranks: int) -> list[Tensor]:
    return sorted(tensor.chunk(ranks, dim=2), key=lambda piece: piece.flatten()[0].item())


def _check_swap_gradients(reports: list[_Swapped], slope: Tensor, ranks: int) -> None:
    expected = [2 * part for part in slope.chunk(ranks, dim=2)]
    local = []
    for rank, part in enumerate(expected):
        kept = torch.zeros_like(part)
        kept.chunk(ranks, dim=1)[rank].copy_(part.chunk(ranks, dim=1)[rank])
        local.append(kept)
    likely = {
        "no-gradient": lambda got: any(g is None for g in got),
        "local-gradient": ranks > 1 and local,
        "gradient-scaled": lambda got: any(
            same(got, [g * factor for g in expected]) for factor in (ranks, 1 / ranks)
        ),
        "gradient-not-exchanged": lambda got: all(
            g.shape == e.shape for g, e in zip(got, expected, strict=True)
        ),
    }
    got = [report.gradient for report in reports]
    expect(got, expected, each="rank", what="the gradient of x", likely=likely)


@swapping.requires("each rank has all tokens of its heads, and gradients come home")
def _(answer, draw):
    _check_swap(answer, draw, draw.choice([2, 3]))


@swapping.requires("four ranks and one", needs_earlier=True)
def _(answer, draw):
    with _only_so_many():
        for ranks in (4, 1):
            _check_swap(answer, draw, ranks)


def _refusal(rank, answer, x) -> tuple[str, str] | None:
    """The exception with which an answer refuses x, and its message; None where it does not."""
    try:
        answer(x.to(device()))
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        return type(error).__name__, str(error)
    return None


@swapping.requires("heads that do not divide are refused with both numbers", needs_earlier=True)
def _(answer, draw):
    ranks = draw.choice([2, 3])
    heads = ranks * draw.integer(2, 4) + 1
    expected = f"a ValueError that names {heads} and {ranks}"
    for refusal in run(_refusal, ranks, answer, draw.tensor(1, heads, 2, 2)):
        if refusal is None:
            raise Wrong("no-error", expected=expected, got="no exception")
        if refusal[0] != "ValueError":
            raise Wrong("other-error", expected=expected, got=refusal[0])
        if not {str(heads), str(ranks)} <= set(re.findall(r"\d+", refusal[1])):
            raise Wrong("error-without-sizes", expected=expected, got=f"ValueError: {refusal[1]}")
