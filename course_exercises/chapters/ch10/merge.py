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
        expect(given, before, each="argument", likely={"arguments-changed": True})
