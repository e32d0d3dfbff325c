"""Exercise 10.1, `merge`: what it asks for, and how it is checked."""

import torch
from torch import Tensor

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.chapters.ch10.shared import merged, partial

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
        "no-logsumexp": "Return both, the output and the logsumexp: the next merge needs it as well.",
        "not-normalised": "You add the two outputs with weights that do not add up to 1. Each is a mean of values already: "
        "the weights are e to each logsumexp, divided by the sum of both.",
        "other-weights": "You mix the two outputs with other weights than theirs. Each query has its own two, e to each logsumexp, divided "
        "by the sum of both: the side that has found larger scores counts for more, and the other for something, too.",
        "other-logsumexp": "Your logsumexp is not that of all keys. It is the logarithm of the sum of both exponentials, "
        "log(e^a + e^b), and larger than either. What is subtracted before the exponentials is added to the logarithm.",
        "rows-mixed": "The weights have one number for each query, the outputs a row for each. Give the weights a "
        "last dimension of one, with `unsqueeze(-1)`.",
        "overflow": "Your result fails for logsumexps in the thousands: e to a thousand overflows, and e to minus a thousand "
        "is 0. Subtract the common logsumexp, or the larger one, before the exponential.",
        "nothing-seen": "Your result is wrong where one side has seen no key. Its logsumexp is minus infinity, and its output "
        "does not count, whatever it is: return the other side's. 0 times NaN is NaN, so choose with `torch.where`.",
        "both-empty": "Your result is wrong where neither side has seen a key. The output is 0 and the logsumexp minus "
        "infinity, whatever the two outputs are. Minus infinity minus itself is NaN.",
    },
    failures={"must match the size": "rows-mixed"},
)


def _two_parts(draw, scale: float = 1.0, cut: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """(out_a, lse_a, out_b, lse_b), and (out, lse) over all the keys."""
    shape = draw.integer(1, 2), draw.integer(2, 3), draw.integer(3, 5)  # N, H, t
    width, keys = draw.integer(6, 9), draw.integer(7, 9)
    q, k, v = (draw.tensor(*shape[:2], size, width) for size in (shape[2], keys, keys))
    q = scale * q
    halves = [
        *partial(q, k[:, :, :cut], v[:, :, :cut]),
        *partial(q, k[:, :, cut:], v[:, :, cut:]),
    ]
    return halves, list(partial(q, k, v))


def _check_merge(answer, given: list[Tensor], expected: list[Tensor], **more) -> None:
    """Compares output and logsumexp; `more` are further likely mistakes, which go first."""
    got = _both(answer(*(tensor.clone() for tensor in given)))
    weights = {
        "not-normalised": lambda got: not _add_up_to_one(_weights(got, given[0], given[2])),
        "other-weights": lambda got: _add_up_to_one(_weights(got, given[0], given[2])),
    }
    expect(got[0], expected[0], what="the output", likely=more | weights)
    expect(got[1], expected[1], what="the logsumexp", likely=more | {"other-logsumexp": True})


def _both(got: object) -> tuple[Tensor, Tensor]:
    expect_type(got, (tuple, list), likely="no-logsumexp" if torch.is_tensor(got) else None)
    if len(got) != 2:
        raise Wrong("no-logsumexp", expected="an output and a logsumexp", got=got)
    return got


def _weights(got: Tensor, out_a: Tensor, out_b: Tensor) -> Tensor:
    """The two numbers of each query with which the outputs have been added; raises where there are none."""
    outputs, got = torch.stack([out_a, out_b], dim=-1).double(), got.double().unsqueeze(-1)
    weights = torch.linalg.lstsq(outputs, got).solution
    if not same(outputs @ weights, got):
        raise ValueError("no sum of the two")
    return weights


def _add_up_to_one(weights: Tensor) -> bool:
    sums = weights.sum(-2)
    return same(sums, torch.ones_like(sums), 1e-4)


@merging.requires("two parts of the keys give output and logsumexp over all keys")
def two_parts_of_the_keys_give_output(answer, draw):
    _check_merge(answer, *_two_parts(draw, cut=draw.integer(1, 3)))


@merging.requires("what is merged can be merged again, in another order")
def what_is_merged_can_be_merged_again(answer, draw):
    halves, (out, lse) = _two_parts(draw, cut=draw.integer(2, 4))
    _check_merge(answer, [*halves[2:], *halves[:2]], [out, lse])


@merging.requires(
    "scores in the thousands, of either sign, on both sides or on one", needs_earlier=True
)
def scores_in_the_thousands(answer, draw):
    far, overflow = draw.number(2e3, 5e3), {"overflow": True}
    for shifts in ((far, far), (-far, -far), (far, 0), (0, far)):
        given, (out, lse) = _two_parts(draw)
        given = [given[0], given[1] + shifts[0], given[2], given[3] + shifts[1]]
        larger = 0 if shifts[0] > shifts[1] else 2  # beside it the other counts for nothing
        whole = (out, lse + far) if shifts[0] > 0 else (out, lse - far)
        if shifts[0] != shifts[1]:
            whole = given[larger], given[larger + 1]
        # the sums are rounded to about 3e-4 there, and so are the weights
        got = _both(answer(*given))
        expect(got[0], whole[0], what="the output", likely=overflow, tolerance=5e-3)
        expect(got[1], whole[1], what="the logsumexp", likely=overflow)


@merging.requires("a query that has seen none of one part's keys", needs_earlier=True)
def a_query_that_has_seen_none(answer, draw):
    for junk in (0.0, float("nan")):
        given, _ = _two_parts(draw)
        a, b = ([x.clone() for x in part] for part in (given[:2], given[2:]))
        a[0][:, :, 0], a[1][:, :, 0] = junk, -torch.inf
        b[0][:, :, 1], b[1][:, :, 1] = junk, -torch.inf
        whole = [x.clone() for x in merged(*a, *b)]
        for i, other in ((0, b), (1, a)):
            whole[0][:, :, i], whole[1][:, :, i] = other[0][:, :, i], other[1][:, :, i]
        _check_merge(answer, [*a, *b], whole, **{"nothing-seen": True})


@merging.requires("a query that has seen no key at all", needs_earlier=True)
def a_query_that_has_seen_no_key_at(answer, draw):
    for junk in (0.0, float("nan")):
        given, whole = _two_parts(draw)
        for (out, lse), value in ((given[:2], junk), (given[2:], junk), (whole, 0.0)):
            out[:, :, -1], lse[:, :, -1] = value, -torch.inf
        _check_merge(answer, given, whole, **{"both-empty": True})


@merging.requires("the arguments stay as they are", at_home=True)
def the_arguments_stay_as_they_are(answer, draw):
    for unseen in (False, True):
        given, _ = _two_parts(draw)
        if unseen:  # by the first query on one side, by the second on the other
            for query, (out, lse) in enumerate((given[:2], given[2:])):
                out[:, :, query], lse[:, :, query] = torch.nan, -torch.inf
        before = [tensor.clone() for tensor in given]
        answer(*given)
        expect(given, before, each="argument", likely={"input-changed": True})
