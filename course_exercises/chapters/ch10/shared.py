"""What the exercises of chapter 10 share."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from course_exercises.authoring import Wrong, same
from course_exercises.authoring.ranks import SeenCall, Sent, must_have_waited
from course_utils.comm import private

# What goes wrong with the messages of a ring, forward and backward.
MESSAGES = {
    "ranks-wait": "Your ranks wait for each other for ever: some make a call that others never make, or all receive, or "
    "all send, before anybody does the other. Every rank makes the same hops, and starts its send and its receive together.",
    "used-early": "You read or write a tensor into which keys are still on their way. Keep two: use the keys that you "
    "have, let the next ones come into another tensor, and change over after `wait()`.",
    "not-beside": "In at least one hop nothing is computed while the keys are under way. Start to pass keys on before "
    "you use them, and wait for the next ones after that.",
    "other-number": "Your answer is right on one number of ranks and not on another. Look for a fixed number where the "
    "world size belongs. With two ranks there is one hop, and a rank that is alone makes none.",
}
HANGS = {"timeout": "ranks-wait", "mismatch": "ranks-wait"}
PRODUCTS = "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"


@contextmanager
def only_so_many() -> Iterator[None]:
    """One number of ranks was right: what nothing else explains depends on it."""
    try:
        yield
    except Wrong as wrong:
        slug = wrong.misconception or "other-number"
        raise Wrong(slug, expected=wrong.expected, got=wrong.got) from None


class Meanwhile(private.dispatch_mode.value):
    """Within the block, notes how many bytes this rank receives while products of matrices are computed, together
    and beside one at most, and whether anybody reads or writes a tensor before what it receives has come."""

    def __init__(self, sent: Sent) -> None:
        super().__init__()
        self.used_early, self.most = False, 0
        self._sent, self._beside = sent, {}

    @property
    def bytes(self) -> int:
        return _bytes(self._beside.values())

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        coming = [call for call in self._sent.open_calls() if call.kind == "recv"]
        if operator.name() in PRODUCTS or "attention" in operator.name():
            self._beside |= {id(call): call for call in coming}
            self.most = max(self.most, _bytes(coming))
        if coming and not operator.is_view and not operator.name().endswith("_like"):
            given = private.tree_leaves((args, kwargs))
            self.used_early |= any(_overlap(t, call) for t in given for call in coming)
        return private.below.of(operator)(*args, **kwargs)


def _bytes(calls: Iterable[SeenCall]) -> int:
    return sum(tensor.nbytes for call in calls for tensor in call.payload)


def _overlap(value: object, call: SeenCall) -> bool:
    """Whether a value is a tensor with memory that a call fills."""
    if type(value) is not Tensor or not value.numel():
        return False
    start, end = _extent(value)
    return any(start < e and s < end for s, e in map(_extent, call.payload))


def _extent(tensor: Tensor) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def must_have_come(reports: list) -> None:
    """Judges what must be judged before any number: whether messages had come when they were used."""
    must_have_waited([report.unwaited for report in reports])
    for rank, report in enumerate(reports):
        if report.used_early:
            expected, got = "a wait() before a tensor is used", f"rank {rank} uses one before"
            raise Wrong("used-early", expected=expected, got=got)


def must_run_beside(received: list[int], expected: int) -> None:
    """`received`: the bytes that came to each rank while it computed."""
    for got in received:
        if got < expected:
            beside = "received while a rank computes"
            raise Wrong("not-beside", expected=f"{expected} bytes {beside}", got=f"{got} bytes")


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


Sees = Callable[[int, int], Tensor]  # which queries of a rank see which keys of another


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

    def sees(self, rank: int, sender: int) -> Tensor:
        return self.places(rank).unsqueeze(1) >= self.places(sender)

    def outputs(self, sees: Sees | None = None, **slip) -> list[Tensor]:
        return [self._output(rank, sees or self.sees, **slip) for rank in range(self.ranks)]

    def _output(
        self,
        rank: int,
        sees: Sees,
        hops: int | None = None,  # fewer than n - 1
        again: Tensor | None = None,  # the own keys come once more, under this mask
        stays: str = "",  # "k" or "v", which the rank does not pass on
        scale: float = 1.0,
    ) -> Tensor:
        mine = self.places(rank)
        senders = [
            (rank - hop) % self.ranks for hop in range(self.ranks if hops is None else hops + 1)
        ]
        masks = [sees(rank, sender) for sender in senders]
        if again is not None:
            senders, masks = [*senders, rank], [*masks, again]
        theirs, own = (
            torch.cat([self.places(sender) for sender in senders]),
            mine.repeat(len(senders)),
        )
        k, v = (
            whole[:, :, own if stays == name else theirs]
            for name, whole in (("k", self.k), ("v", self.v))
        )
        return partial(self.q[:, :, mine] * scale, k, v, torch.cat(masks, dim=1))[0]

    def running(self, combine: Callable, where: Callable[[int, int], bool]) -> list[Tensor]:
        """Outputs where `combine(result, part)` takes the place of the merge of rank and sender `where` it is so."""
        outs = []
        for rank in range(self.ranks):
            q, result = self.q[:, :, self.places(rank)], None
            for hop in range(self.ranks):
                sender = (rank - hop) % self.ranks
                mask, theirs = self.sees(rank, sender), self.places(sender)
                part = partial(q, self.k[:, :, theirs], self.v[:, :, theirs], mask)
                if result is not None:
                    new = combine(result, part) if where(rank, sender) else merged(*result, *part)
                    seen = mask.any(dim=1)
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


def halves(task: Ring) -> tuple[Tensor, Tensor, Tensor]:
    """Of the tokens of a rank: (t, t) a triangle, and which queries and which keys are in its second chunk."""
    at = torch.arange(task.length // task.ranks)
    second, every = at >= len(at) // 2, torch.ones(len(at), len(at), dtype=torch.bool)
    return every.tril(), every & second[:, None], every & second


def wrong_masks(task: Ring) -> list[Sees]:
    triangle, late_rows, late_columns = halves(task)
    every, half, sees = triangle | True, len(triangle) // 2, task.sees
    cut_out = every.tril(-half)  # where the second half of the queries is numbered from 0
    return [
        lambda r, s: every,
        lambda r, s: every if r == s else sees(r, s),
        lambda r, s: sees(r, s) if r == s else every,
        lambda r, s: late_rows | ~late_columns if r == s else sees(r, s),  # by chunk
        lambda r, s: triangle,
        lambda r, s: sees(r, s) & (triangle if s <= r else cut_out),
        lambda r, s: triangle & (late_rows == late_columns) if r == s else sees(r, s),
    ]


def wrong_cases(task: Ring) -> list[Sees]:
    triangle, late_rows, late_columns = halves(task)
    every, n, sees = triangle | True, task.ranks, task.sees

    def only(before: bool, mask: Tensor) -> Sees:
        """Of ranks that stand before, or after, only these of the pairs that are seen."""
        return lambda r, s: sees(r, s) & mask if r != s and (s < r) == before else sees(r, s)

    return [
        lambda r, s: triangle if r == s else every & (s < r),  # as cut from front to back
        lambda r, s: triangle if r == s else late_rows if s < r else ~late_columns,  # swapped
        lambda r, s: late_rows if s == 0 < r else sees(r, s),  # h < rank in place of h <= rank
        lambda r, s: triangle if r == s else sees(r, (2 * r - s) % n),  # the other way round
        *(only(before=True, mask=mask) for mask in (late_rows, ~late_rows)),
        *(only(before=False, mask=mask) for mask in (late_columns, ~late_columns)),
        lambda r, s: every if s < r else sees(r, s),  # both chunks of a rank before, and after
        lambda r, s: every if s > r else sees(r, s),
    ]


def any_of(values: Callable[[], Iterator]) -> Callable[[list], bool]:
    """A sign: whether what came is one of these values, which are made where it is asked."""
    return lambda got: any(same(got, value) for value in values())


def plain(out):
    return out.detach() if torch.is_tensor(out) else out
