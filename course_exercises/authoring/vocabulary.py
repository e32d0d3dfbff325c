"""The mistakes of the subject: a name, a sentence and, where values show it, a sign for each.

Every exercise knows them all, under these names; it says in the plural what its values are ("gradients"), and
adds the few mistakes that its own subject has. A sign looks at values alone, by rank: what came, what was
expected, and what each rank had of its own. A sentence says what was seen, and a cause as a cause, since other
causes may lead to the same values. The page docs/checks.md shows how an exercise uses them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from course_exercises.authoring.compare import Wrong, expect_type, same

NEARLY = 0.01  # how far half precision may take a number away, as a part of it


@dataclass(frozen=True)
class Values:
    """What is known of an exercise's values, a list by rank each: what every rank had of its own, what is
    expected of it, and what the call before was to give. A rank's part may be a tensor, a number, None, or
    lists and dicts of these."""

    own: Sequence
    expected: Sequence
    before: Sequence | None = None

    @property
    def ranks(self) -> int:
        return len(self.expected)

    @cached_property
    def total(self) -> Any:
        return total(self.own)

    @cached_property
    def wants_mean(self) -> bool:
        return same(self.expected, self.everywhere(times(self.total, 1 / self.ranks)))

    @cached_property
    def wants_sum(self) -> bool:
        return same(self.expected, self.everywhere(self.total))

    def everywhere(self, value: Any) -> list:
        return [value] * self.ranks

    def divided(self, got: Sequence, by: float) -> bool:
        """Whether every rank has the sum over the ranks, divided by a number."""
        return same(got, self.everywhere(times(self.total, 1 / by)))


Sign = Callable[[Sequence, Values], bool]


@dataclass(frozen=True)
class Mistake:
    """A mistake; in its sentence `{things}` stands for what the exercise calls its values."""

    name: str
    sentence: str
    sign: Sign | None = None


def combined(function: Callable[[list], Any], values: Sequence) -> Any:
    """Values of one form made into one: at each place `function` of the list of what stands there, without
    None; None where nothing else stands."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: combined(function, [value[key] for value in values]) for key in first}
    if isinstance(first, list | tuple):
        return [combined(function, parts) for parts in zip(*values, strict=True)]
    there = [value for value in values if value is not None]
    return function(there) if there else None


def total(values: Sequence) -> Any:
    """The sum over the ranks."""
    return combined(sum, values)


def times(value: Any, factor: float) -> Any:
    """All numbers in a value, times a factor."""
    return combined(lambda parts: parts[0] * factor, [value])


def _leaves(value: Any) -> list:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return [value]
    return [leaf for part in value for leaf in _leaves(part)]


def _pairs(got: Sequence, other: Sequence) -> list[tuple]:
    """What stands at the same places of both."""
    return list(zip(_leaves(got), _leaves(other), strict=True))


def _zeros_for_none(got: Sequence, known: Values) -> bool:
    """Whether all is right, but that something stands where nothing belongs."""
    pairs = _pairs(got, known.expected)
    right = all(same(g, e) for g, e in pairs if e is not None)
    return right and any(g is not None and e is None for g, e in pairs)


def _no_gradient(got: Sequence, known: Values) -> bool:
    """Whether all is right, but that nothing stands where something belongs."""
    pairs = _pairs(got, known.expected)
    right = all(same(g, e) for g, e in pairs if g is not None)
    return right and any(g is None and e is not None for g, e in pairs)


def _none_in_places(got: Sequence, known: Values) -> bool:
    pairs = [(g, e) for g, e in _pairs(got, known.expected) if e is not None]
    inside = all(isinstance(part, Mapping | list | tuple) for part in got)
    return inside and all(g is None for g, _ in pairs)


def _not_finite(got: Sequence, known: Values) -> bool:
    numbers = [torch.as_tensor(leaf) for leaf in _leaves(got) if leaf is not None]
    return not all(number.isfinite().all() for number in numbers)


def _rank_0s(got: Sequence, known: Values) -> bool:
    return known.ranks > 1 and any(
        same(got, known.everywhere(times(known.own[0], 1 / n))) for n in (1, known.ranks)
    )


def _divided_by_another(got: Sequence, known: Values) -> bool:
    others = [n for n in range(2, 9) if n != known.ranks]
    return known.wants_mean and any(known.divided(got, by=n) for n in others)


def _another_reduction(got: Sequence, known: Values) -> bool:
    def reduced(by: Callable[[Tensor], Tensor]) -> Any:
        return combined(lambda parts: by(torch.stack(parts)), known.own)

    ways = [
        lambda t: t.amax(dim=0),
        lambda t: t.amin(dim=0),
        lambda t: (t.amax(dim=0) + t.amin(dim=0)) / 2,
        lambda t: t.median(dim=0).values,
        lambda t: t.quantile(0.5, dim=0),
    ]
    return known.ranks > 1 and any(same(got, known.everywhere(reduced(way))) for way in ways)


def _one_rank_only(got: Sequence, known: Values) -> bool:
    right = [same(g, e) for g, e in zip(got, known.expected, strict=True)]
    return known.ranks > 1 and sum(right) == 1


def _left_out(got: Sequence, known: Values) -> bool:
    own = _leaves(known.own)
    pairs = _pairs(got, known.expected)
    return all(same(g, e) or same(g, o) for (g, e), o in zip(pairs, own, strict=True))


def _added_to_own(got: Sequence, known: Values) -> bool:
    pairs = zip(known.own, known.expected, strict=True)
    return same(got, [total(pair) for pair in pairs])


def _rounded_down(got: Sequence, known: Values) -> bool:
    down = [combined(lambda p: torch.floor(torch.as_tensor(p[0])), [e]) for e in known.expected]
    return all(same(g, d) for g, d in zip(got, down, strict=True))


def _other_dtype(got: Sequence, known: Values) -> bool:
    pairs = _pairs(got, known.expected)
    return all(same(g.to(e.dtype), e, NEARLY) for g, e in pairs) and any(
        g.dtype != e.dtype for g, e in pairs
    )


def _shape_lost(got: Sequence, known: Values) -> bool:
    return all(same(g.flatten(), e.flatten()) for g, e in _pairs(got, known.expected))


def _one_number(got: Sequence, known: Values) -> bool:
    """Whether each rank has a single number where more belong, or the same one at all places."""
    pairs = _pairs(got, known.expected)
    return all(
        g.dim() == 0 < e.dim() or (e.numel() > 1 and (g == g.flatten()[0]).all()) for g, e in pairs
    )


def _other_rank(got: Sequence, known: Values) -> bool:
    """Whether every rank has what belongs to some rank, and no two the same."""
    owners = [[i for i, e in enumerate(known.expected) if same(g, e)] for g in got]
    return all(owners) and len({owner[0] for owner in owners}) == known.ranks


# What explains more stands before what explains less: the first whose sign fits is named.
MISTAKES = [
    # ---- signs on values ----
    Mistake(
        "zeros-for-none",
        "A parameter that should have no gradient has one. A `.grad` of zeros is not the same as None: weight "
        "decay and momentum would move the parameter.",
        _zeros_for_none,
    ),
    Mistake(
        "in-place",
        "There is None where your {things} belong. `dist.all_reduce` works in place and returns None: the result "
        "stands in the tensor that you gave it. Do not assign what it returns, and do not compute with it.",
        _none_in_places,
    ),
    Mistake(
        "no-gradient",
        "There is None where some of your {things} belong. A parameter has no gradient that is frozen, or used "
        "under `detach()` or `torch.no_grad()`.",
        _no_gradient,
    ),
    Mistake(
        "kept-from-before",
        "The result is that of the call before. Compute it anew in every call: a loop calls with other values each "
        "time.",
        lambda got, known: known.before is not None and same(got, known.before),
    ),
    Mistake(
        "old-gradients",
        "What an earlier step or call has left is still in your {things}. Clear it first.",
        lambda got, known: (
            known.before is not None
            and same(got, [total(both) for both in zip(known.before, known.expected, strict=True)])
        ),
    ),
    Mistake(
        "sum-not-mean",
        "Your {things} are too large by a factor of the number of ranks. `all_reduce` adds, and the division is "
        "yours: once, by `dist.get_world_size()`.",
        lambda got, known: known.wants_mean and known.divided(got, by=1),
    ),
    Mistake(
        "summed-again",
        "Your {things} are too large by a factor of the number of ranks, as after one sum over the ranks too many: "
        "each of them had the whole already.",
        lambda got, known: (
            known.ranks > 1 and same(got, [times(e, known.ranks) for e in known.expected])
        ),
    ),
    Mistake(
        "mean-not-sum",
        "Your {things} are divided by the number of ranks. Their sum was wanted.",
        lambda got, known: known.wants_sum and known.divided(got, by=known.ranks),
    ),
    Mistake(
        "unchanged",
        "Each rank still has its own {things}. Either nothing was exchanged, or the result was not returned or "
        "written back.",
        lambda got, known: same(got, known.own),
    ),
    Mistake(
        "added-to-own",
        "Each rank has the right {things} added to its own, which are still there. Let them take the place of "
        "its own: `copy_`, not `add_` or `+=`.",
        _added_to_own,
    ),
    Mistake(
        "not-finite",
        "Some of your {things} are infinite or not a number, as after a division by zero. Rank 0's number is 0, and "
        "a machine may have no GPU. `dist.get_world_size()` tells how many ranks there are.",
        _not_finite,
    ),
    Mistake(
        "nothing-sent",
        "Each rank has divided its own {things} by the number of ranks, and the others' are not in them. The sum "
        "over the ranks is missing, or was not there yet.",
        lambda got, known: same(got, [times(own, 1 / known.ranks) for own in known.own]),
    ),
    Mistake(
        "divided-twice",
        "Your {things} are as many times too small as there are ranks, as after two divisions by their number.",
        lambda got, known: known.wants_mean and known.divided(got, by=known.ranks**2),
    ),
    Mistake(
        "fixed-number",
        "You have the sum over the ranks, divided by another number than there are ranks. `dist.get_world_size()` "
        "tells their number.",
        _divided_by_another,
    ),
    Mistake(
        "rank-0s",
        "All ranks have rank 0's {things}, perhaps divided, as after a broadcast from it. The other ranks' play no "
        "part.",
        _rank_0s,
    ),
    Mistake(
        "last-ranks",
        "All ranks have the last rank's {things}, which may be the largest. That comes from a broadcast by it, from "
        "`ReduceOp.MAX`, or from `[tensor] * n`, which is one tensor, listed n times: each arrival overwrites the one "
        "before.",
        lambda got, known: same(got, known.everywhere(known.own[-1])),
    ),
    Mistake(
        "other-rank",
        "Each rank has {things} that belong to another rank.",
        _other_rank,
    ),
    Mistake(
        "rounded-down",
        "Your {things} are rounded, as `//`, `int` and `round` do: divide with `/`, and keep the result as it is.",
        _rounded_down,
    ),
    Mistake(
        "one-number",
        "Each rank has a single number. The ranks' {things} are combined place by place, so that their shape "
        "stays.",
        _one_number,
    ),
    Mistake(
        "shape-lost",
        "The numbers are right and their shape is gone. Give your {things} the shape of what was handed in.",
        _shape_lost,
    ),
    Mistake(
        "other-dtype",
        "Your {things} have another dtype than what was handed in.",
        _other_dtype,
    ),
    Mistake(
        "rounded",
        "Your {things} are only nearly right, as after a smaller dtype on the way.",
        lambda got, known: same(got, known.expected, NEARLY),
    ),
    Mistake(
        "one-rank-only",
        "The result is right on one rank only. `reduce` and `gather` deliver to one rank, `all_reduce` and "
        "`all_gather` to all of them.",
        _one_rank_only,
    ),
    Mistake(
        "left-out",
        "Some {things} are right, and others are still the rank's own: a loop leaves some out, or a rank takes no "
        "part.",
        _left_out,
    ),
    Mistake(
        "another-reduction",
        "You have the largest of the ranks' {things}, the smallest, or what lies in the middle. The mean is their "
        "sum, divided by the number of ranks.",
        _another_reduction,
    ),
    # ---- what else a check sees, or an exception tells ----
    Mistake(
        "not-waited",
        "You go on before a call that you started has ended. `isend`, `irecv` and, with `async_op=True`, a "
        "collective return at once: call `wait()` on what they return before you use or return their tensor.",
    ),
    Mistake(
        "not-every-rank",
        "Every rank has to call a collective, or none. Here a rank did not call it, and the others wait: look for "
        "an `if` or a `return` that depends on the rank.",
    ),
    Mistake(
        "two-ranks",
        "This works on two ranks and fails on more: look for a 2, a partner, a half, or an `else` that means rank "
        "1, where the world size belongs.",
    ),
    Mistake(
        "no-such-rank",
        "There is no such rank. The numbers go round: the rank after the last is rank 0, (rank + 1) % n, and the "
        "one before rank 0 is the last, (rank - 1) % n.",
    ),
    Mistake(
        "one-rank-returns",
        "Some ranks end without a `return`. Every rank has to return its {things}.",
    ),
    Mistake(
        "not-a-tensor",
        "Return a tensor. `.item()`, `float()` and `tolist()` make Python's numbers of it.",
    ),
    Mistake(
        "input-changed",
        "Your function changes what it was handed, which the caller still uses. Calls that end in `_`, `+=`, "
        "collectives and receives write into the tensor that you give them: give them one of your own.",
    ),
    Mistake(
        "list-changed",
        "Your function changes a list that it was handed, and the caller goes on with it. `sort`, `pop` and `append` "
        "do that: take slices, or work on a copy, `list(...)` or `sorted(...)`.",
    ),
    Mistake(
        "mode-changed",
        "A module is used, or left, in another mode than it came in, training or evaluation. `train()` and `eval()` "
        "set all of its parts, of which one may be in evaluation mode all the time: leave the modes as they are.",
    ),
    Mistake(
        "parameters-changed",
        "The parameters have changed, which is the optimizer's part, later. Here only the {things} change.",
    ),
    Mistake(
        "none-gradient",
        "A frozen or unused parameter has no gradient: its `.grad` is None. Skip it, on every rank alike.",
    ),
    Mistake(
        "tied-twice",
        "A tied parameter, one tensor in two layers, is treated twice. `parameters()` and `named_parameters()` "
        "yield it once; a walk over the layers, or a state dict, meets it twice.",
    ),
    Mistake(
        "needs-contiguous",
        "`send` and `recv` need contiguous memory, and so may `view`. A tensor that is transposed, or cut out of a larger "
        "one, is often not contiguous, and `empty_like` may keep its layout. Work on `tensor.contiguous()`, and copy the "
        "result back where the caller's tensor has to change.",
    ),
    Mistake(
        "cut-from-the-graph",
        "Gradients do not flow all the way back. `.detach()`, `.data`, `.item()`, `torch.tensor(...)`, `no_grad` and "
        "the plain collectives cut the connection; `.to`, slices, `cat` and `stack` keep it.",
    ),
    Mistake(
        "sends-too-much",
        "More is sent than needed, which the right result does not show: the check counts calls and bytes.",
    ),
    Mistake(
        "other-error",
        "Sizes that do not divide are to be refused with a ValueError, raised on purpose before anything else goes "
        "wrong; its message names what does not divide by what. Sizes that divide are not refused.",
    ),
    Mistake(
        "around-the-calls",
        "The {things} came to a rank by another way than the calls of `torch.distributed`, such as a file. On a cluster "
        "ranks have no memory and no folder in common: send what they exchange.",
    ),
    Mistake(
        "torchs-own",
        "You use what PyTorch has for this. Here you write it yourself.",
    ),
]


def sentences(things: str) -> dict[str, str]:
    """The sentence of each mistake, for an exercise whose values are called `things`."""
    return {each.name: each.sentence.format(things=things) for each in MISTAKES}


def signs(
    own: Sequence, expected: Sequence, before: Sequence | None = None
) -> dict[str, Callable[[Sequence], bool]]:
    """All signs on these values, in their order, as `expect` takes them: `expect(got, expected,
    likely=signs(own, expected))`. Each argument is a list by rank, as in Values."""
    known = Values(own, expected, before)
    return {each.name: partial(each.sign, known=known) for each in MISTAKES if each.sign}


def expect_from_each(
    results: Sequence, kind: type | tuple[type, ...] = Tensor, likely: str | None = "not-a-tensor"
) -> None:
    """Raises Wrong unless every rank has returned a `kind`; `likely` names the mistake of another type."""
    if any(result is None for result in results) and any(r is not None for r in results):
        raise Wrong("one-rank-returns", expected="a result from every rank", got="None from some")
    for result in results:
        expect_type(result, kind, likely=None if result is None else likely)
