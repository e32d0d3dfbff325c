"""Exercise 6.4, `vocabulary_parallel_cross_entropy`: what it asks for, and how it is checked."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from course_exercises.authoring import (
    Exercise,
    OwnPart,
    Wrong,
    expect,
    expect_from_each,
    run,
    same,
    signs,
)
from course_exercises.authoring.ranks import (
    Sent,
    come_late,
    following,
    must_have_sent,
    must_have_waited,
)
from course_exercises.chapters.ch06.shared import (
    HANGS,
    PASSES_BY_LUCK,
    must_not_record,
    on_three,
    only_for_two,
    recorded_calls,
)
from course_utils.hardware import device
from course_utils.trace import Trace

cross_entropy = Exercise(
    "6.4",
    "vocabulary_parallel_cross_entropy",
    points=3,
    minutes=45,
    kind="stretch",
    parameters=("logits", "targets", "ignore_index"),
    hints=[
        (
            "For one token, the loss needs the largest logit, the sum of the exponentials and the "
            "target's logit. Each is one number: what does a rank know of each of them? And what must a rank "
            "know to find the target's column?"
        ),
        (
            "A maximum over all ranks, then two sums over all ranks. The rank that has the target's "
            "class gives its logit, every other one gives zero. Autograd must see the two sums, and "
            "not the maximum. A rank's first class is the number of classes on the ranks before it."
        ),
        (
            "Gather the numbers of classes. Find the row's maximum without gradient, all-reduce it with "
            "`ReduceOp.MAX`, subtract it. Sum the exponentials over the rank's classes, then over ranks with "
            "the function that adds up forward. Subtract the rank's first class from the targets, clamp them, "
            "gather, and put zero where the target is not here. Log of one sum minus the other; the mean of "
            "those that count."
        ),
    ],
    misconceptions={
        "target-logit": "All is right in your loss but the target's logit. One rank has it: the class f + i is in "
        "column i, from i = 0 to the last, where f is the rank's first class. The others add 0 to the sum over the "
        "ranks, which every rank subtracts undivided. It is lowered by the largest logit as the exponentials are.",
        "exponentials": "The sum of the exponentials is not that of all classes. All ranks lower a token's logits by "
        "the same number, the largest of all ranks, and take the exponentials; their sums are added over the ranks, "
        "in forward, and then comes the logarithm, once.",
        "who-counts": "The mean is not that over the tokens that count. Add up the losses of all whose target is "
        "not `ignore_index`, whatever rank has their class, and divide by their number. Class 0 is one like any "
        "other, and `ignore_index` may be a class.",
        "equal-parts": "With as many classes on every rank your loss is right: you take the parts for equally large. "
        "A rank's first class is the number of classes on all ranks before it, which they have to tell.",
        "lost-gradient": "The loss is right, and a part of its gradient does not get through: a sum over the ranks "
        "was made where autograd does not see it, or a rank lets only the tokens learn whose class it has.",
        "gradient-summed": "Each rank's logits are its own, and here their gradient is summed over the ranks, as that of a "
        "tensor that all ranks have. Leave out the function that sums in backward.",
        "gathers-logits": "You bring the logits themselves together. Three numbers a token are enough: the largest logit, "
        "the sum of the exponentials, and the target's logit.",
        "max-has-gradient": "The largest logit has a gradient. It cancels in the loss, but autograd on one "
        "rank sees only a part of that: take it from `logits.detach()`.",
        "large-logits": "Large logits give no finite loss, or a wrong one. Lower each token's logits by the largest "
        "of its own row on all ranks (`amax(dim=1)`, `ReduceOp.MAX`): it leaves nothing to cut off. Then take "
        "the logarithm of the sum, and subtract the target's logit: the probability itself may round to 0, whose "
        "logarithm is minus infinity.",
        "passes-by-luck": PASSES_BY_LUCK,
        "own-backward": "The loss is one term of a sum here, times a factor, beside another loss. Multiply by the "
        "gradient that your `backward` is handed, and keep in `ctx` what belongs to a call.",
    },
    failures={
        **HANGS,
        "out of bounds": "target-logit",
        "does not require grad": "cut-from-the-graph",
    },
)

IGNORED = -100
MORE = 64  # numbers that a rank may hand over besides four a token


@dataclass(frozen=True)
class _Loss:
    value: Tensor
    gradient: Tensor | None
    changed: bool
    sent: Sent


def _lost(rank, answer, own, targets, given, turned) -> _Loss:
    """`given` are further arguments. With `turned`, the logits lie in memory class by class."""
    leaf = own.clone().to(device()).requires_grad_()
    logits, targets = leaf * 1.0, targets.to(device())
    logits = logits.T.contiguous().T if turned else logits
    before = targets.clone()
    come_late(rank)
    with following() as sent:
        value = answer(logits, targets, *given)
        if torch.is_tensor(value) and value.requires_grad:
            value.backward()
    changed = not torch.equal(logits, own.to(device())) or not torch.equal(targets, before)
    value = value.detach() if torch.is_tensor(value) else value
    return _Loss(value, leaf.grad, changed, sent)


@dataclass(frozen=True)
class _Task:
    """Logits of the whole vocabulary, and what PyTorch's own cross-entropy makes of them."""

    shares: list[int]  # the ranks' numbers of classes
    logits: Tensor
    targets: Tensor
    given: tuple  # `ignore_index`, where it is handed over
    value: Tensor
    gradient: Tensor

    @property
    def ranks(self) -> int:
        return len(self.shares)

    @property
    def counts(self) -> Tensor:
        """Which tokens count, as a column."""
        ignored = self.given[0] if self.given else IGNORED
        return (self.targets != ignored).unsqueeze(1)

    def parts(self, whole: Tensor | None = None) -> list[Tensor]:
        return list((self.logits if whole is None else whole).split(self.shares, dim=1))

    def terms(self) -> tuple[Tensor, Tensor]:
        """The two terms of the gradient: the softmax, and the target's."""
        count = self.counts.sum()
        classes = torch.arange(self.logits.shape[1])
        at_target = (self.targets.unsqueeze(1) == classes) & self.counts
        return self.logits.softmax(1) * self.counts / count, at_target / count


def _task(draw, logits: Tensor, shares: list[int], ignored=(), given=()) -> _Task:
    """Targets fall on every rank, on its first class, its last and others, in random order; those of
    the tokens `ignored` do not count."""
    firsts = [sum(shares[:rank]) for rank in range(len(shares))]
    edges = firsts + [first + share - 1 for first, share in zip(firsts, shares, strict=True)]
    others = [draw.integer(0, logits.shape[1] - 1) for _ in range(len(logits))]
    targets = torch.tensor(draw.sample((edges + others)[: len(logits)], len(logits)))
    ignore_index = given[0] if given else IGNORED
    targets[list(ignored)] = ignore_index
    leaf = logits.clone().requires_grad_()
    value = nn.functional.cross_entropy(leaf, targets, ignore_index=ignore_index)
    value.backward()
    return _Task(shares, logits, targets, given, value.detach(), leaf.grad)


def _equal(draw, tokens: int, ranks: int, share: int) -> _Task:
    return _task(draw, draw.tensor(tokens, ranks * share), [share] * ranks)


def _run(answer, task: _Task, turned=False) -> list[_Loss]:
    parts = OwnPart(task.parts())
    reports = run(_lost, task.ranks, answer, parts, task.targets, task.given, turned)
    must_have_waited([report.sent.unwaited for report in reports])
    return reports


# ---- what the gradients tell of a mistake --------------------------------------------------------


def _only_the_target(task: _Task, got: Tensor) -> bool:
    """Whether all is right but the target's term: at the targets alone, or by whole ones elsewhere."""
    off = (got - task.gradient) * task.counts.sum()
    at_targets = task.terms()[1] > 0
    return same(off.masked_fill(at_targets, 0.0), torch.zeros_like(off)) or same(off, off.round())


def _only_the_exponentials(task: _Task, got: Tensor) -> bool:
    """Whether each rank's gradient is the target's term, and the exponentials of its classes by any factor."""
    rest = (got + task.terms()[1]).double()
    parts = zip(task.parts(rest), task.parts(), strict=True)
    softmax = [(own, part.double().softmax(1)) for own, part in parts]
    return all(same(own, own.sum(1, keepdim=True) * e) for own, e in softmax)


def _other_weights(task: _Task, got: Tensor) -> bool:
    """Whether each rank has the right gradient of every token that counts, times any factor."""
    pairs = zip(task.parts(got), task.parts(task.gradient), strict=True)
    factors = [
        (g, e, (g * e).sum(1, keepdim=True) / (e * e).sum(1, keepdim=True)) for g, e in pairs
    ]
    return all(
        same(torch.where(task.counts, g, 0.0), torch.where(task.counts, e * by, 0.0))
        for g, e, by in factors
    )


def _parts_of_it(task: _Task, got: Tensor) -> bool:
    """Whether each number is right, or one of the terms of which it is the sum, or nothing."""
    softmax, target = task.terms()
    ways = torch.stack([softmax - target, softmax, -target, 0 * target])
    return bool(((ways - got).abs() < 1e-5).any(dim=0).all())


def _at_the_largest(task: _Task, got: Tensor) -> bool:
    """Whether only the largest logit of each rank's part has a wrong gradient. It is no number where a rank
    has changed its maximum in place."""
    off = got - task.gradient
    largest = [nn.functional.one_hot(p.argmax(1), p.shape[1]) for p in task.parts()]
    elsewhere = off.nan_to_num(0.0).masked_fill(torch.cat(largest, dim=1) > 0, 0.0)
    return same(elsewhere, torch.zeros_like(off))


def _of_own_classes(task: _Task) -> list[Tensor]:
    """Each rank's loss, of what it has itself."""
    z, (_, target) = task.logits - task.logits.amax(1, keepdim=True), task.terms()
    pairs = zip(task.parts(z), task.parts(target), strict=True)
    weights = task.counts.squeeze(1) / task.counts.sum()
    return [(weights * part.logsumexp(1)).sum() - (part * own).sum() for part, own in pairs]


def _check_loss(answer, task: _Task, likely=None) -> None:
    """`likely` are mistakes that come before the others."""
    reports, n = _run(answer, task), task.ranks
    values, gradients = [r.value for r in reports], [r.gradient for r in reports]
    expect_from_each(values)

    def tells(sign) -> bool:
        """Of the gradient of all logits, whether a sign fits."""
        return all(g is not None for g in gradients) and sign(task, torch.cat(gradients, dim=1))

    expected = [task.value] * n
    mistakes = {
        "one-rank-only": signs(values, expected)["one-rank-only"],
        "target-logit": lambda got: tells(_only_the_target),
        "who-counts": lambda got: tells(_other_weights),
        "exponentials": lambda got: (
            tells(_only_the_exponentials) or same(got, _of_own_classes(task))
        ),
    }
    likely = likely or {}
    expect(values, expected, each="rank", what="the loss", likely=likely | mistakes)
    expected = task.parts(task.gradient)
    mistakes = {
        "cut-from-the-graph": any(g is None for g in gradients),
        "summed-again": n > 1 and [n * g for g in expected],
        "gradient-summed": len({g.shape for g in expected}) == 1 < n and [sum(expected)] * n,
        "max-has-gradient": lambda got: tells(_at_the_largest),
        "lost-gradient": lambda got: tells(_parts_of_it),
    }
    what = "the gradient of the logits"
    expect(gradients, expected, each="rank", what=what, likely=likely | mistakes)
    if any(report.changed for report in reports):
        got = "other logits or targets"
        raise Wrong("input-changed", expected="what was handed in, as before", got=got)
    must_have_sent([report.sent for report in reports])


@cross_entropy.requires("two ranks agree on the loss, and each has its logits' gradient")
def two_ranks_agree_on_the_loss(answer, draw):
    _check_loss(answer, _equal(draw, draw.integer(5, 8), 2, draw.integer(4, 7)))


@cross_entropy.requires(
    "three ranks", failures=on_three(cross_entropy.failures), needs_earlier=True
)
def three_ranks(answer, draw):
    with only_for_two():
        _check_loss(answer, _equal(draw, draw.integer(6, 9), 3, draw.integer(3, 6)))


@cross_entropy.requires("one rank; fewer tokens than ranks", needs_earlier=True)
def one_rank_and_fewer_tokens_than_ranks(answer, draw):
    _check_loss(answer, _equal(draw, draw.integer(3, 5), 1, draw.integer(4, 7)))
    many = draw.choice([3, 4])
    _check_loss(answer, _equal(draw, draw.integer(1, 2), many, draw.integer(2, 4)))


@cross_entropy.requires(
    "ranks with different numbers of classes",
    failures=dict.fromkeys(("exception", "out of bounds", "timeout", "mismatch"), "equal-parts"),
    needs_earlier=True,
)
def ranks_with_different_numbers_of_classes(answer, draw):
    for ranks in (2, 3):
        for shares in (sorted(draw.sample(range(2, 7), ranks)), [1] * (ranks - 1) + [4]):
            shares = shares[:: draw.choice([1, -1])]
            task = _task(draw, draw.tensor(draw.integer(7, 9), sum(shares)), shares)
            _check_loss(answer, task, {"equal-parts": True})


def _check_large(answer, draw, offset: float, scale: float) -> None:
    ranks, share = draw.choice([2, 3]), draw.integer(4, 6)
    logits = scale * draw.tensor(draw.integer(6, 8), ranks * share) + offset
    task = _task(draw, logits, [share] * ranks)
    reports, likely = _run(answer, task), {"large-logits": True}
    # near ten thousand, float32 itself rounds to a thousandth
    for what, got, expected in (
        ("the loss", [r.value for r in reports], [task.value] * ranks),
        ("the gradient of the logits", [r.gradient for r in reports], task.parts(task.gradient)),
    ):
        expect(got, expected, each="rank", what=what, likely=likely, tolerance=2e-3)


@cross_entropy.requires("logits of ten thousands, and minus ten thousands", needs_earlier=True)
def logits_of_ten_thousands(answer, draw):
    for offset in (1e4, -1e4):
        _check_large(answer, draw, offset, 1.0)


@cross_entropy.requires("classes that are far from likely", needs_earlier=True)
def classes_that_are_far_from_likely(answer, draw):
    _check_large(answer, draw, 0.0, 1e4)


@cross_entropy.requires(
    "a token whose target is -100 does not count",
    failures=dict.fromkeys(("out of bounds", "exception"), "who-counts"),
    needs_earlier=True,
)
def a_token_whose_target_is_100_does_not_count(answer, draw):
    _check_ignored(answer, draw, IGNORED, ())


@cross_entropy.requires(
    "another `ignore_index`, which may be a class",
    failures=dict.fromkeys(("out of bounds", "exception"), "who-counts"),
    needs_earlier=True,
)
def another_ignore_index_which_may_be_a_class(answer, draw):
    for ignored in (0, draw.integer(1, 7), -1):
        _check_ignored(answer, draw, ignored, (ignored,))


def _check_ignored(answer, draw, ignored: int, given: tuple) -> None:
    tokens, ranks = draw.integer(6, 8), draw.choice([2, 3])
    padding = draw.sample(range(tokens), 2)
    logits = draw.tensor(tokens, 4 * ranks)
    task = _task(draw, logits, [4] * ranks, padding, given)
    _check_loss(answer, task, {"who-counts": True})


def _numbers_sent(rank, answer, own, targets) -> int:
    """How many numbers a rank hands over, forward and backward."""
    logits = own.clone().to(device()).requires_grad_()
    with Trace() as trace:
        answer(logits * 1.0, targets.clone().to(device())).backward()
    return sum(call.elements for call in trace.record().calls if call.sends)


@cross_entropy.requires(
    "at most four numbers a token are handed over, and 64 more", needs_earlier=True
)
def at_most_four_numbers_a_token_are_handed(answer, draw):
    tokens, ranks = draw.integer(80, 90), draw.choice([2, 3, 4])
    task = _equal(draw, tokens, ranks, 10)
    sent = max(run(_numbers_sent, ranks, answer, OwnPart(task.parts()), task.targets))
    if sent > 4 * tokens + MORE:
        expected = f"at most {4 * tokens + MORE} numbers for {tokens} tokens"
        name = "gathers-logits" if sent >= task.parts()[0].numel() else "sends-too-much"
        raise Wrong(name, expected=expected, got=f"{sent}")


def _recorded(rank, answer, own, targets) -> list[str]:
    logits = own.clone().to(device()).requires_grad_()
    with recorded_calls() as found:
        answer(logits * 1.0, targets.to(device()))
    return found


@cross_entropy.requires("autograd knows what backward does", needs_earlier=True)
def autograd_knows_what_backward_does(answer, draw):
    task = _equal(draw, draw.integer(4, 6), draw.choice([2, 3]), 4)
    must_not_record(run(_recorded, task.ranks, answer, OwnPart(task.parts()), task.targets))


def _lost_together(rank, answer, parts, targets, factors) -> list[Tensor | None]:
    """The gradients of several logits, of the sum of their losses, each times its factor."""
    leaves = [own.clone().to(device()).requires_grad_() for own in parts]
    losses = [answer(leaf * 1.0, t.to(device())) for leaf, t in zip(leaves, targets, strict=True)]
    sum(factor * loss for factor, loss in zip(factors, losses, strict=True)).backward()
    return [leaf.grad for leaf in leaves]


@cross_entropy.requires("the loss is one term of a sum", needs_earlier=True)
def the_loss_is_one_term_of_a_sum(answer, draw):
    ranks, factors = draw.choice([2, 3]), [draw.number(0.2, 0.6), 1.0]
    tokens = draw.integer(3, 5)
    tasks = [_equal(draw, tokens, ranks, 4) for _ in factors]
    parts = [list(part) for part in zip(*(task.parts() for task in tasks), strict=True)]
    targets = [task.targets for task in tasks]
    got = run(_lost_together, ranks, answer, OwnPart(parts), targets, factors)
    scaled = [task.parts(f * task.gradient) for task, f in zip(tasks, factors, strict=True)]
    expected = [list(pair) for pair in zip(*scaled, strict=True)]
    what, likely = "the gradient of two losses' logits", {"own-backward": True}
    expect(got, expected, each="rank", what=what, likely=likely)


@cross_entropy.requires(
    "logits in double precision, and of any layout in memory",
    needs_earlier=True,
    failures={"view size is not compatible": "needs-contiguous"},
)
def logits_in_double_precision(answer, draw):
    ranks = draw.choice([2, 3])
    logits = draw.tensor(draw.integer(4, 6), 4 * ranks, dtype=torch.float64)
    task = _task(draw, logits, [4] * ranks)
    reports = _run(answer, task, turned=True)
    got = [[report.value, report.gradient] for report in reports]
    expected = [[task.value, part] for part in task.parts(task.gradient)]
    likely = {
        "other-dtype": any(t.dtype != torch.float64 for pair in got for t in pair),
        "rounded": lambda got: same(got, expected),
    }
    what = "the loss and the gradient of the logits"
    expect(got, expected, each="rank", what=what, likely=likely, tolerance=1e-10)
