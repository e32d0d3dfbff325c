"""Exercise 6.4, `vocabulary_parallel_cross_entropy`: what it asks for, and how it is checked."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, OwnPart, Wrong, expect, expect_type, run, same
from course_exercises.authoring.ranks import come_late, following
from course_exercises.chapters.ch06.shared import (
    HANGS,
    NOT_WAITED,
    TWO_RANKS,
    check_waited,
    only_for_two,
)
from course_utils.hardware import device
from course_utils.trace import Trace

cross_entropy = Exercise(
    "6.4",
    "vocabulary_parallel_cross_entropy",
    points=3,
    minutes=45,
    kind="stretch",
    parameters=("logits", "targets"),
    hints=[
        (
            "For one token, the loss needs the largest logit, the sum of the exponentials and the "
            "target's logit. Each is one number: what does a rank know of each of them?"
        ),
        (
            "A maximum over all ranks, then two sums over all ranks. The rank that has the target's "
            "class gives its logit, every other one gives zero. Autograd must see the two sums, and "
            "not the maximum."
        ),
        (
            "Find the row's maximum without gradient, all-reduce it with `ReduceOp.MAX`, subtract it. "
            "Sum the exponentials over the rank's classes, then over ranks with the function that "
            "adds up forward. Subtract the rank's first class from the targets, clamp them, gather, "
            "and put zero where the target is not here. Log of one sum minus the other; the mean."
        ),
    ],
    misconceptions={
        "targets-not-shifted": "A target is a class of the whole vocabulary. On this rank, class "
        "r * V/n stands in column 0: subtract it, and see to the targets that are elsewhere.",
        "target-not-masked": "Ranks that do not have the target's class contribute another logit "
        "for it: theirs must count as zero.",
        "edge-classes": "A rank takes the first class of the next one for its own, or its own first class "
        "for another's: it has classes r * V/n to (r + 1) * V/n - 1, both included.",
        "own-classes-only": "The sum of the exponentials is over this rank's classes only: the sum "
        "over the ranks is missing. `SumBackward` would sum gradients, not these numbers.",
        "target-not-summed": "Only the rank that has the target's class subtracts its logit: the others "
        "need that number too.",
        "log-before-sum": "You add up logarithms. Add the sums of the exponentials over the ranks, then "
        "take the logarithm of the total.",
        "target-not-lowered": "The largest logit is subtracted in the exponentials and not from the "
        "target's logit: it cancels only if it is subtracted in both places.",
        "local-max": "Each rank subtracts its own largest logit, and then the exponentials of "
        "different ranks do not fit together. Subtract the largest of all ranks.",
        "sum-not-mean": "You return the sum over the tokens: asked is the mean.",
        "one-rank-only": "Only one rank has the loss: every rank needs it for its backward.",
        "no-tensor": "You return a Python number, for example by `.item()`: the loss has to be a tensor, "
        "from which backward can start.",
        "max-has-gradient": "The largest logit has a gradient. It cancels in the loss, but autograd on one "
        "rank sees only a part of that: take it from `logits.detach()`.",
        "cuts-the-graph": "Some gradient does not get through: a sum over the ranks was made where "
        "autograd does not see it.",
        "summed-again": "The gradient is world_size times too large: backward sums over the ranks, "
        "though every rank comes to the same loss.",
        "target-gradient-lost": "The gradient is the softmax alone. At the target's class, 1 is to be "
        "subtracted: has the target's logit lost its gradient?",
        "total-gradient-lost": "Only the target's logit has a gradient: the sum of the exponentials has "
        "lost its own.",
        "overflow": "Logits of ten thousands give no finite loss: subtract the row's largest logit "
        "before you take the exponential. `all_reduce` adds, unless you ask for `ReduceOp.MAX`.",
        "one-ranks-max": "You subtract the largest logit of one rank, and another rank's may be much larger: "
        "its exponential overflows. Take the largest of all ranks, with `ReduceOp.MAX`.",
        "cut-off": "Large logits give a finite loss, and a wrong one: you cut them off, by `clamp` or the "
        "like. Subtracting the row's largest logit changes no loss and leaves nothing to cut.",
        "one-max-for-all": "The exponentials of some tokens add up to 0: you subtract a number "
        "that is much larger than all logits of their row. Each token has its own largest logit: "
        "`amax(dim=1)`.",
        "log-of-zero": "A class that is much less likely than another has a probability that rounds to "
        "0, and log(0) is minus infinity. Take the logarithm of the sum only, and subtract the "
        "target's logit.",
        "padding-counted": "A token with the target -100 has an effect on the loss or on a gradient: it is "
        "no class, on no rank, and has no column. Leave these tokens out of the mean.",
        "divided-by-all": "The padding is not in the sum, but in the number of tokens by which you "
        "divide: divide by the number of those that count.",
        "target-left-out": "The target's logit has no effect on the loss. Shifted by the largest "
        "one it is at most 0: a maximum with the other ranks' zeros is 0. Sum over the ranks.",
        "target-averaged": "The target's logit is divided by the number of ranks: only one rank "
        "has it, and the others add zero.",
        "class-0-left-out": "Tokens with the target 0 are left out. Class 0 is one like any other: "
        "only -100 marks padding.",
        "own-tokens-only": "A rank gives a gradient only to tokens whose class it has. Every "
        "token's sum has a term from every rank.",
        "upstream-ignored": "Your backward takes the loss for the end of the graph: what comes "
        "back to it is 1 only if nothing follows. Multiply by the gradient that your `backward` is "
        "handed.",
        "changes-the-targets": "The targets that were handed in have changed: work on a new tensor, as "
        "`targets.clamp(min=0)` or `torch.where` give it.",
        "not-waited": NOT_WAITED,
        "kept-from-before": "Two losses, and then one backward: the first loss's gradient is made of what "
        "the second has left. Keep what belongs to a call in its `ctx`, not on the class or outside.",
        "other-dtype": "The logits are in double precision, and the loss does not stay so: something is "
        "float32 on the way. Take the dtype from the logits.",
        "needs-contiguous": "The logits need not lie in memory in the order of their elements, as a slice or "
        "a transposed tensor does not, and `view` then fails: `gather` and `reshape` take any layout.",
        "too-many-numbers": "More than four numbers a token are handed over. The largest logit, the sum of "
        "the exponentials and the target's logit are three; what a rank can find out from `targets` "
        "need not be sent.",
        "gathers-the-logits": "More than four numbers a token are handed over: the logits must stay "
        "where they are.",
        "changes-the-logits": "The logits that were handed in have changed: work on a new tensor.",
        "not-every-rank": "A rank leaves a sum out, for instance because it has no token's class, and the "
        "others wait for it. Every rank makes every call, with zeros where it has nothing.",
        "two-ranks": TWO_RANKS,
    },
    failures={
        **HANGS,
        "out of bounds": "targets-not-shifted",
        "does not require grad": "cuts-the-graph",
    },
)


PADDING = -100  # the target of a token that does not count


@dataclass(frozen=True)
class _Loss:
    value: Tensor
    gradient: Tensor | None
    logits_changed: bool
    targets_changed: bool
    unwaited: list[str]


def _lost(rank, answer, own, targets, turned=False) -> _Loss:
    """With `turned`, the logits lie in memory class by class."""
    leaf = own.clone().to(device()).requires_grad_()
    logits, given = leaf * 1.0, targets.clone().to(device())
    logits = logits.T.contiguous().T if turned else logits
    come_late(rank)
    with following() as sent:
        value = answer(logits, given)
        if torch.is_tensor(value) and value.requires_grad:
            value.backward()
    changed = not torch.equal(logits, own.to(device())), not torch.equal(given.cpu(), targets)
    value = value.detach() if torch.is_tensor(value) else value
    return _Loss(value, leaf.grad, *changed, sent.unwaited)


def _numbers_sent(rank, answer, own, targets) -> int:
    """How many numbers a rank hands over, forward and backward."""
    logits = own.clone().to(device()).requires_grad_()
    with Trace() as trace:
        answer(logits * 1.0, targets.clone().to(device())).backward()
    return sum(call.elements for call in trace.record().calls if call.sends)


def _lost_together(rank, answer, parts, targets, factors) -> list[Tensor | None]:
    """The gradients of several logits, of the sum of their losses, each times its factor."""
    leaves = [own.clone().to(device()).requires_grad_() for own in parts]
    losses = [answer(leaf * 1.0, t.to(device())) for leaf, t in zip(leaves, targets, strict=True)]
    sum(factor * loss for factor, loss in zip(factors, losses, strict=True)).backward()
    return [leaf.grad for leaf in leaves]


@dataclass(frozen=True)
class _LossTask:
    """Logits of the whole vocabulary, and what PyTorch's own cross-entropy makes of them."""

    logits: Tensor
    targets: Tensor
    value: Tensor
    gradient: Tensor

    def parts(self, ranks: int) -> list[Tensor]:
        return list(self.logits.chunk(ranks, dim=1))


def _loss_task(draw, logits: Tensor, ranks: int, padding=()) -> _LossTask:
    """Targets fall on every rank, on its first class, its last and others, in random order; those of
    the tokens `padding` do not count."""
    share = logits.shape[1] // ranks
    edges = [r * share + column for column in (0, share - 1) for r in range(ranks)]
    others = [draw.integer(0, logits.shape[1] - 1) for _ in range(len(logits))]
    targets = torch.tensor(draw.sample((edges + others)[: len(logits)], len(logits)))
    targets[list(padding)] = PADDING
    leaf = logits.clone().requires_grad_()
    value = nn.functional.cross_entropy(leaf, targets)
    value.backward()
    return _LossTask(logits, targets, value.detach(), leaf.grad)


def _run(answer, task: _LossTask, ranks: int, turned=False) -> list[_Loss]:
    reports = run(_lost, ranks, answer, OwnPart(task.parts(ranks)), task.targets, turned)
    check_waited([report.unwaited for report in reports])
    return reports


def _mistaken_losses(task: _LossTask, ranks: int) -> dict[str, list[list[Tensor]]]:
    """What each mistake makes of the ranks' losses, in the ways in which it can be written."""
    z, targets, parts = task.logits, task.targets, task.parts(ranks)
    share = z.shape[1] // ranks
    total, highest = z.logsumexp(1), z.amax(1)
    at_target = z.gather(1, targets.unsqueeze(1)).squeeze(1)
    firsts = [rank * share for rank in range(ranks)]

    def picked(columns: list[Tensor]) -> list[Tensor]:
        return [p.gather(1, c.unsqueeze(1)).squeeze(1) for p, c in zip(parts, columns, strict=True)]

    unmasked = [
        sum(picked([(targets - first).clamp(0, share - 1) for first in firsts])),
        sum(picked([targets % share] * ranks)),
    ]
    not_masked = [total - given for given in unmasked]
    not_masked += [total - given + (ranks - 1) * highest for given in unmasked]
    edges = []
    for start, end in (
        (1, 0),
        (-1, 0),
        (0, 1),
        (0, -1),
    ):  # one class too few or too many, at one end
        taken = [(targets >= f + start) & (targets < f + share + end) for f in firsts]
        columns = [(targets - first).clamp(0, share - 1) for first in firsts]
        logit = [torch.where(t, p, 0.0) for t, p in zip(taken, picked(columns), strict=True)]
        count = sum(t.float() for t in taken)
        edges += [total - sum(logit), total - highest - (sum(logit) - count * highest)]
    own_highest = torch.stack([part.amax(1) for part in parts])
    mixed = sum((p - m.unsqueeze(1)).exp().sum(1) for p, m in zip(parts, own_highest, strict=True))
    shifted_target = at_target - own_highest.gather(0, (targets // share).unsqueeze(0)).squeeze(0)
    local = mixed.log() - shifted_target
    own = [part.logsumexp(1) - at_target for part in parts]
    lowered = [(part - highest.unsqueeze(1)).logsumexp(1) for part in parts]
    has_it = [targets // share == rank for rank in range(ranks)]
    own_target = [torch.where(has, at_target - highest, 0.0) for has in has_it]
    return {
        "sum-not-mean": [[task.value * len(z)] * ranks],
        "target-not-masked": [[loss.mean()] * ranks for loss in not_masked],
        "edge-classes": [[loss.mean()] * ranks for loss in edges],
        "own-classes-only": [
            [loss.mean() for loss in own],
            [sum(torch.where(h, loss, 0.0) for h, loss in zip(has_it, own, strict=True)).mean()]
            * ranks,
            [(a - b).mean() for a, b in zip(lowered, own_target, strict=True)],
        ],
        "target-not-summed": [[(total - highest - given).mean() for given in own_target]],
        "log-before-sum": [[(sum(lowered) - at_target + highest).mean()] * ranks],
        "target-not-lowered": [[task.value - highest.mean()] * ranks],
        "target-left-out": [[(total - highest).mean()] * ranks],
        "target-averaged": [
            [(total - at_target / ranks).mean()] * ranks,
            [(total - highest - (at_target - highest) / ranks).mean()] * ranks,
        ],
        "class-0-left-out": [[(total - at_target)[targets > 0].mean()] * ranks],
        "local-max": [
            [local.mean()] * ranks,
            [(mixed.log() + m - at_target).mean() for m in own_highest],
        ],
    }


def _check_loss(answer, draw, tokens: int, classes: int, ranks: int) -> None:
    task = _loss_task(draw, draw.tensor(tokens, classes), ranks)
    reports = _run(answer, task, ranks)
    for report in reports:
        likely = None if report.value is None else "no-tensor"
        expect_type(report.value, Tensor, likely=likely)
    mistaken = _mistaken_losses(task, ranks)

    def gives(losses: list[list[Tensor]]) -> Callable:
        return lambda got: any(same(got, given) for given in losses)

    likely = {slug: gives(losses) for slug, losses in mistaken.items()}
    likely["one-rank-only"] = lambda got: any(same(g, task.value) for g in got)
    got = [report.value for report in reports]
    expect(got, [task.value] * ranks, each="rank", what="the loss", likely=likely)
    softmax = task.logits.softmax(1) / tokens
    expected = list(task.gradient.chunk(ranks, dim=1))
    likely = {
        "cuts-the-graph": lambda got: any(g is None for g in got),
        "summed-again": [ranks * g for g in expected],
        "target-gradient-lost": list(softmax.chunk(ranks, dim=1)),
        "total-gradient-lost": list((task.gradient - softmax).chunk(ranks, dim=1)),
        "own-tokens-only": lambda got: ranks > 1 and _only_own_tokens(task, got),
        "max-has-gradient": lambda got: (
            same(got, _through_the_maximum(task, expected)) or not _all_finite(got)
        ),  # not finite where the maximum is changed in place
    }
    got = [report.gradient for report in reports]
    expect(got, expected, each="rank", what="the gradient of the logits", likely=likely)


def _only_own_tokens(task: _LossTask, gradients: list[Tensor]) -> bool:
    """Whether no rank has a gradient for a token whose class another rank has."""
    has_it = task.targets // (task.logits.shape[1] // len(gradients))
    return not any(bool(g[has_it != rank].any()) for rank, g in enumerate(gradients))


def _all_finite(tensors: list[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _through_the_maximum(task: _LossTask, gradients: list[Tensor]) -> list[Tensor]:
    """The gradients where each rank's own largest logit has one too."""
    wrong = []
    for part, gradient in zip(task.parts(len(gradients)), gradients, strict=True):
        largest = nn.functional.one_hot(part.argmax(1), part.shape[1])
        wrong.append(gradient - largest * gradient.sum(1, keepdim=True))
    return wrong


@cross_entropy.requires("two ranks agree on the loss, and each has its logits' gradient")
def two_ranks_agree_on_the_loss(answer, draw):
    _check_loss(answer, draw, draw.integer(5, 8), 2 * draw.integer(4, 7), 2)


@cross_entropy.requires(
    "three ranks and one; fewer tokens than ranks",
    failures={"exception": "two-ranks"},
    needs_earlier=True,
)
def three_ranks(answer, draw):
    many = draw.choice([3, 4])
    with only_for_two():
        _check_loss(answer, draw, draw.integer(6, 9), 3 * draw.integer(3, 6), 3)
        _check_loss(answer, draw, draw.integer(3, 5), draw.integer(4, 7), 1)
        _check_loss(answer, draw, draw.integer(1, 2), many * draw.integer(2, 4), many)


def _manages_with_the_largest_on(rank: int, answer, task: _LossTask, ranks: int) -> bool:
    """Whether every rank has the right loss where this rank has each token's largest logit."""
    logits = task.logits.clone()
    logits[:, rank * logits.shape[1] // ranks] = logits.max() + 1.0
    value = nn.functional.cross_entropy(logits, task.targets)
    other = _LossTask(logits, task.targets, value, task.gradient)
    try:
        return same([r.value for r in _run(answer, other, ranks)], [value] * ranks, tolerance=2e-3)
    except Exception:  # noqa: BLE001 - whatever fails here, it does not manage
        return False


def _check_large(answer, draw, offset: float, scale: float, slug: str) -> None:
    ranks = draw.choice([2, 3])
    tokens, classes = draw.integer(6, 8), ranks * draw.integer(4, 6)
    task = _loss_task(draw, scale * draw.tensor(tokens, classes) + offset, ranks)
    reports = _run(answer, task, ranks)
    likely = {
        "one-max-for-all": lambda got: scale > 1 and any(value == -math.inf for value in got),
        "one-ranks-max": lambda got: (
            scale > 1
            and any(_manages_with_the_largest_on(r, answer, task, ranks) for r in (0, ranks - 1))
        ),
        slug: lambda got: not all(math.isfinite(value) for value in got),
        "cut-off": True,
    }
    got = [report.value for report in reports]
    # Near ten thousand, float32 itself rounds to a thousandth.
    expect(got, [task.value] * ranks, each="rank", what="the loss", likely=likely, tolerance=2e-3)
    likely = {slug: lambda got: not _all_finite(got), "cut-off": True}
    got, expected = [report.gradient for report in reports], task.gradient.chunk(ranks, dim=1)
    what = "the gradient of the logits"
    expect(got, list(expected), each="rank", what=what, likely=likely, tolerance=2e-3)


@cross_entropy.requires("logits of ten thousands, and minus ten thousands", needs_earlier=True)
def logits_of_ten_thousands(answer, draw):
    for offset in (1e4, -1e4):
        _check_large(answer, draw, offset, 1.0, "overflow")


@cross_entropy.requires("classes that are far from likely", needs_earlier=True)
def classes_that_are_far_from_likely(answer, draw):
    _check_large(answer, draw, 0.0, 1e4, "log-of-zero")


@cross_entropy.requires(
    "tokens with the target -100 do not count",
    failures=dict.fromkeys(("out of bounds", "exception"), "padding-counted"),
    needs_earlier=True,
)
def tokens_with_the_target_100_do_not_count(answer, draw):
    tokens, ranks = draw.integer(5, 8), draw.choice([2, 3])
    padding = draw.sample(range(tokens), 2)
    task = _loss_task(draw, draw.tensor(tokens, 4 * ranks), ranks, padding)
    reports = _run(answer, task, ranks)
    likely = {
        "divided-by-all": [task.value * (tokens - len(padding)) / tokens] * ranks,
        "padding-counted": True,
    }
    got, expected = [report.value for report in reports], [task.value] * ranks
    expect(got, expected, each="rank", what="the loss", likely=likely)
    got, expected = [report.gradient for report in reports], task.gradient.chunk(ranks, dim=1)
    what = "the gradient of the logits"
    expect(got, list(expected), each="rank", what=what, likely={"padding-counted": True})


@cross_entropy.requires("at most four numbers a token are handed over", needs_earlier=True)
def at_most_four_numbers_a_token_are_handed(answer, draw):
    tokens, ranks = draw.integer(3, 6), draw.choice([2, 3, 4])
    task = _loss_task(draw, draw.tensor(tokens, 40 * ranks), ranks)
    limit = 4 * tokens
    sent = max(run(_numbers_sent, ranks, answer, OwnPart(task.parts(ranks)), task.targets))
    if sent > limit:
        slug = "gathers-the-logits" if sent >= task.logits.numel() // ranks else "too-many-numbers"
        raise Wrong(slug, expected=f"at most {limit} numbers", got=f"{sent}")


@cross_entropy.requires("the logits and the targets stay as they are")
def the_logits_and_the_targets_stay_as_they(answer, draw):
    ranks, tokens = draw.choice([2, 3]), draw.integer(3, 5)
    padding = [draw.integer(0, tokens - 1)]
    task = _loss_task(draw, draw.tensor(tokens, 4 * ranks), ranks, padding)
    reports = _run(answer, task, ranks)
    if any(report.logits_changed for report in reports):
        raise Wrong("changes-the-logits", expected="the logits as before", got="other values")
    if any(report.targets_changed for report in reports):
        raise Wrong("changes-the-targets", expected="the targets as before", got="other values")


@cross_entropy.requires("the loss is one term of a sum", needs_earlier=True)
def the_loss_is_one_term_of_a_sum(answer, draw):
    ranks, factor = draw.choice([2, 3]), draw.number(0.2, 0.6)
    tokens = draw.integer(3, 5)
    tasks = [_loss_task(draw, draw.tensor(tokens, 4 * ranks), ranks) for _ in range(2)]
    parts = [list(part) for part in zip(*(task.parts(ranks) for task in tasks), strict=True)]
    targets = [task.targets for task in tasks]
    got = run(_lost_together, ranks, answer, OwnPart(parts), targets, [factor, 1.0])
    chunks = [task.gradient.chunk(ranks, dim=1) for task in tasks]
    expect(
        got,
        [[factor * first, second] for first, second in zip(*chunks, strict=True)],
        each="rank",
        what="the gradient of two losses' logits",
        likely={
            "upstream-ignored": [list(pair) for pair in zip(*chunks, strict=True)],
            "kept-from-before": True,
        },
    )


@cross_entropy.requires(
    "logits in double precision, and of any layout in memory",
    needs_earlier=True,
    failures={"view size is not compatible": "needs-contiguous", "exception": "other-dtype"},
)
def logits_in_double_precision(answer, draw):
    ranks = draw.choice([2, 3])
    logits = draw.tensor(draw.integer(4, 6), 4 * ranks, dtype=torch.float64)
    task = _loss_task(draw, logits, ranks)
    reports = _run(answer, task, ranks, turned=True)
    expected = [[task.value, part] for part in task.gradient.chunk(ranks, dim=1)]
    got = [[report.value, report.gradient] for report in reports]
    what, likely = "the loss and the gradient of the logits", {"other-dtype": True}
    expect(got, expected, each="rank", what=what, likely=likely, tolerance=1e-10)
