"""Exercise 6.3, `HeadParallelAttention`: what it asks for, and how it is checked."""

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, Wrong, expect, run, same
from course_exercises.authoring.ranks import come_late, following
from course_exercises.chapters.ch06.shared import (
    BOTH_CUTS,
    GATHERED_TO_ADD,
    HANGS,
    IN_PIECES,
    NOT_EVERY_RANK,
    NOT_WAITED,
    REFUSAL,
    TWO_RANKS,
    WHOLE_KEPT_ALIVE,
    check_nothing_whole,
    check_refusal,
    check_sent,
    check_waited,
    loss_of,
    only_for_two,
    own_bytes,
    same_and_learning,
    traced,
)
from course_utils.hardware import device
from course_utils.lesson.models import Attention

attention = Exercise(
    "6.3",
    "HeadParallelAttention",
    points=3,
    minutes=50,
    kind="stretch",
    parameters=("full",),
    hints=[
        (
            "Write down the rows of `full.qkv.weight` for 4 heads: first all queries, then all keys, "
            "then all values. Which rows does rank 1 of 2 need?"
        ),
        (
            "Three blocks of rows, one from each part. If you put the rows of rank 0 first, then "
            "those of rank 1, a plain column cut does the rest. The output projection meets the "
            "heads in the order of its input features: a plain row cut."
        ),
        (
            "View the row numbers as (3, ranks, features of a rank), swap the first two dimensions, "
            "flatten: the order of rows in which every rank's are together. Build a linear layer "
            "with the rows in this order and cut it by columns. Inside a rank, the attention is as "
            "in `full`, with fewer heads of the same width."
        ),
    ],
    misconceptions={
        "cut-across-the-parts": "The rows of `full.qkv` are cut into equal runs, so that one rank has "
        "mostly queries and another mostly values. Cut each of the three parts, and give a rank its "
        "block of every one.",
        "bias-across-the-parts": "The weight of `full.qkv` is cut by heads, its bias is not: it too "
        "holds the queries', then the keys', then the values' numbers. Cut it as the weight.",
        "parts-inside-heads": "The rank's rows are its queries, then its keys, then its values. You "
        "read them as if each head had its three parts together: split off the parts first.",
        "heads-first": "You take the rows of `full.qkv` as query, key and value of one head after another. "
        "They are all queries, then all keys, then all values.",
        "parts-swapped": "Queries, keys and values have changed places: the rows of `full.qkv` are those of "
        "all queries, then all keys, then all values.",
        "other-heads": "The queries, keys and values are those of other heads than the output projection "
        "expects. Rank r of n has the r-th of n blocks of consecutive heads, in both.",
        "heads-in-another-order": "The results are right, and the heads are not those asked: rank r of n "
        "has the r-th of n blocks of consecutive heads. Who puts the ranks' parts together, for a "
        "checkpoint, would get the heads in another order.",
        "other-bias-rows": "The weight of `full.qkv` is cut rightly, and its bias is not: with a bias of "
        "zero your result is right. Take the same rows of the bias as of the weight.",
        "heads-laid-out": "With one head on each rank your result is right, with several it is not: they "
        "are cut or viewed in another order than theirs. Within queries, keys and values a head's "
        "features lie together: (heads, head_width), and only then `transpose(1, 2)`.",
        "whole-kept-alive": WHOLE_KEPT_ALIVE,
        "global-heads": "You view with the numbers of the whole layer. A rank has full.heads / n heads, "
        "and so width / n features after attention; only the width of a head is as before.",
        "heads-mixed": "After attention the dimensions are (N, heads, T, head_width). Put the heads beside "
        "their features, with `transpose(1, 2)`, before you flatten: a reshape alone mixes tokens.",
        "attends-over-heads": "Heads attend to heads: attention runs over the last dimension but one, and "
        "that has to be T. Hand over (N, heads, T, head_width).",
        "output-not-cut-to-match": "The output projection does not fit what the rank's heads give. They "
        "are some of its *input* features: cut dimension 1 of `full.out.weight`, in the order of "
        "the heads.",
        "wrong-scale": "The scores are scaled by another width than the head's. A head is as wide on a "
        "rank as in the whole layer: only their number is smaller.",
        "not-causal": "Tokens attend to later ones: `full` is causal.",
        "mask-shifted": "The mask is one place off: a token attends to itself and to those before "
        "it, no more and no less.",
        "partial-output": "Each rank returns what its own heads give: the sum over the ranks is "
        "missing.",
        "bias-per-rank": "The bias of `full.out` is added once per rank: add it after the sum over "
        "the ranks.",
        "cuts-the-graph": "No gradient gets through: the sum over the ranks was made where autograd "
        "does not see it.",
        "input-gradient-local": "Each rank has the part of x's gradient that its own heads give: the "
        "parts must be added in backward.",
        "summed-again": "The gradient of x is world_size times too large: backward sums over the "
        "ranks once too often.",
        "wrong-after-a-step": "Output and input gradient are right, but a step of SGD leads "
        "elsewhere: a parameter's gradient is wrong. Look at the bias of the output projection: "
        "every rank adds all of it, after the sum.",
        "bias-lost": "The bias of `full.qkv`, or that of `full.out`, is missing from your result.",
        "kept-from-before": "The layer is right for one x and not for one of another size: it keeps "
        "something of an earlier call, such as the mask. Make in `forward` what depends on x.",
        "other-dtype": BOTH_CUTS["other-dtype"],
        "shares-memory": BOTH_CUTS["shares-memory"],
        "full-changed": "Your `__init__` changes `full` itself, which belongs to the caller: cut, regroup or "
        "freeze a copy.",
        "holds-too-much": "A rank holds more than its heads' share of the parameters: does it keep a "
        "whole matrix, or a view into one?",
        "sends-too-much": "More bytes are sent than one all-reduce of x's size each way. Queries, keys "
        "and values come from the same x: sum its gradient once.",
        "in-pieces": IN_PIECES,
        "gathered-to-add": GATHERED_TO_ADD,
        "not-waited": NOT_WAITED,
        "not-every-rank": NOT_EVERY_RANK,
        "two-ranks": TWO_RANKS,
        **REFUSAL,
    },
    failures={
        **HANGS,
        "does not require grad": "cuts-the-graph",
        "is invalid for input of size": "global-heads",
        "don't multiply up to the size": "global-heads",
        "shapes cannot be multiplied": "output-not-cut-to-match",
    },
)

LEARNING_RATE = 0.1


@dataclass(frozen=True)
class _Attended:
    y: Tensor
    x_gradient: Tensor | None
    y_other: Tensor | str  # for an x of another size, or the exception there
    y_after: Tensor  # after a step of SGD
    held: int  # bytes of parameters
    full_changed: bool
    full_learns: bool  # does the step change `full`?
    unwaited: list[str]


def _step(model: nn.Module) -> None:
    """A step of SGD by hand: it does not mind a parameter without gradient."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= LEARNING_RATE * parameter.grad


def _attended(rank, answer, full, x, slope, other) -> _Attended:
    given = copy.deepcopy(full).to(device())
    model = answer(given)
    changed = not same_and_learning(given, full)
    x = x.clone().to(device()).requires_grad_()
    come_late(rank)
    with following() as sent:
        y = model(x)
        loss_of(y, slope).backward()
    y_other = _output(model, other.to(device()))
    _step(model)
    learns = not changed and not same_and_learning(given, full)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    held = sum(storage.nbytes() for storage in storages.values())
    after = model(x).detach()
    return _Attended(y.detach(), x.grad, y_other, after, held, changed, learns, sent.unwaited)


def _output(model: nn.Module, x: Tensor) -> Tensor | str:
    try:
        return model(x).detach()
    except Exception as error:  # noqa: BLE001 - that it fails for this x tells the mistake
        return f"{type(error).__name__}: {error}"


def _by_head(qkv: Tensor, heads: int, causal=True, scale=None) -> Tensor:
    """Each head's results (N, heads, T, head_width), from qkv (N, T, 3 * width)."""
    n, t, _ = qkv.shape
    q, k, v = qkv.view(n, t, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def _attend(qkv: Tensor, heads: int, causal=True, scale=None) -> Tensor:
    """All heads' results (N, T, width), before the output projection."""
    return _by_head(qkv, heads, causal, scale).transpose(1, 2).flatten(2)


def _attend_over_heads(qkv: Tensor, heads: int, ranks: int, causal: bool) -> Tensor:
    """(N, T, width), where the heads of a rank take the place of the tokens."""
    n, t, _ = qkv.shape
    parts = qkv.view(n, t, 3, ranks, heads // ranks, -1).permute(2, 0, 1, 3, 4, 5)
    return nn.functional.scaled_dot_product_attention(*parts, is_causal=causal).flatten(2)


def _rows_of_ranks(full: Attention, ranks: int) -> Tensor:
    """(rank, its rows): queries, keys and values of its heads."""
    rows = torch.arange(full.qkv.out_features).view(3, ranks, -1)
    return rows.transpose(0, 1).flatten(1)


def _dealt_out(full: Attention, ranks: int) -> Tensor:
    """As `_rows_of_ranks`, where rank r has every n-th head."""
    rows = torch.arange(full.qkv.out_features).view(3, -1, ranks, full.head_width)
    return rows.movedim(2, 0).flatten(1)


def _in_place_of(wanted: Tensor, taken: Tensor) -> Tensor:
    """The rows of the whole layer, if each rank takes rows `taken` where `wanted` were right."""
    rows = torch.empty(wanted.numel(), dtype=torch.int64)
    rows[wanted.flatten()] = taken.flatten()
    return rows


@torch.no_grad()
def _mistaken_attention(full: Attention, x: Tensor, ranks: int) -> dict[str, list[Tensor]]:
    """What each mistake makes of the ranks' outputs."""
    qkv, heads, width = full.qkv(x), full.heads, full.head_width * full.heads
    wanted = _rows_of_ranks(full, ranks)
    runs = torch.arange(3 * width).view(ranks, -1)
    by_head = wanted.view(ranks, heads // ranks, 3, -1).transpose(1, 2)
    heads_first = runs.view(ranks, heads // ranks, 3, -1).transpose(1, 2).flatten(1)
    by_rank = _by_head(qkv, heads).chunk(ranks, dim=1)
    others = [wanted[:1].expand(ranks, -1), _dealt_out(full, ranks)]
    bias = full.qkv.bias
    bias_in_runs = qkv - bias + bias[_in_place_of(wanted, runs)]
    results = {
        "cut-across-the-parts": [_attend(qkv[..., _in_place_of(wanted, runs)], heads)],
        "bias-across-the-parts": [_attend(bias_in_runs, heads)],
        "bias-lost": [_attend(qkv - bias, heads)],
        "parts-inside-heads": [_attend(qkv[..., _in_place_of(wanted, by_head)], heads)],
        "heads-first": [_attend(qkv[..., _in_place_of(wanted, heads_first)], heads)],
        "parts-swapped": [
            _attend(torch.cat([qkv.chunk(3, dim=-1)[part] for part in order], dim=-1), heads)
            for order in list(itertools.permutations(range(3)))[1:]
        ],
        "other-heads": [_attend(qkv[..., _in_place_of(wanted, rows)], heads) for rows in others],
        "heads-mixed": [torch.cat([y.reshape(*x.shape[:2], -1) for y in by_rank], dim=-1)],
        "attends-over-heads": [
            _attend_over_heads(qkv, heads, ranks, causal) for causal in (True, False)
        ],
        "not-causal": [_attend(qkv, heads, causal=False)],
        "wrong-scale": [
            _attend(qkv, heads, scale=scale)
            for scale in (1 / math.sqrt(width), 1 / math.sqrt(width / ranks), 1.0)
        ],
    }
    outputs = {slug: [full.out(y) for y in given] for slug, given in results.items()}
    for y in (_attend(qkv, heads), _attend(qkv - bias, heads)):
        outputs["bias-lost"].append(full.out(y) - full.out.bias)
    return outputs


@torch.no_grad()
def _partial_outputs(full: Attention, x: Tensor, ranks: int) -> list[Tensor]:
    parts = _attend(full.qkv(x), full.heads).chunk(ranks, dim=-1)
    return [y @ w.T for y, w in zip(parts, full.out.weight.chunk(ranks, dim=1), strict=True)]


@dataclass(frozen=True)
class _AttentionTask:
    ranks: int
    full: Attention
    x: Tensor
    other: Tensor  # more tokens, and other samples
    slope: Tensor
    y: Tensor
    x_gradient: Tensor
    y_other: Tensor
    y_after: Tensor


def _attention_task(draw, ranks: int, heads: int, dtype=torch.float32) -> _AttentionTask:
    torch.manual_seed(draw.seed())
    full = Attention(width=heads * draw.choice([3, 4, 5, 6]), heads=heads).to(dtype)
    samples, tokens, width = draw.integer(1, 3), draw.integer(4, 7), full.qkv.in_features
    x = 2 * draw.tensor(samples, tokens, width, dtype=dtype)
    other = draw.tensor(samples + 1, tokens + draw.integer(1, 3), width, dtype=dtype)
    # the gradients are sums over all tokens: small enough that a step leaves the outputs near 1
    slope = draw.tensor(*x.shape, dtype=dtype) / (samples * tokens) ** 0.5
    trained, leaf = copy.deepcopy(full), x.clone().requires_grad_()
    y = trained(leaf)
    (y * slope).sum().backward()
    y_other = trained(other).detach()
    _step(trained)
    after = trained(x).detach()
    return _AttentionTask(ranks, full, x, other, slope, y.detach(), leaf.grad, y_other, after)


def _numbers_held(rank, answer, full) -> Tensor:
    """All numbers of this rank's parameters, in whatever order and shapes."""
    model = answer(copy.deepcopy(full).to(device()))
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


def _check_own_heads(answer, task: _AttentionTask) -> None:
    """Raises Wrong where most of a rank's numbers are those of another rank's heads. Which layers and
    names they stand in is the answer's own affair."""
    weights = task.full.qkv.weight.detach()
    held = run(_numbers_held, task.ranks, answer, task.full)
    for rank, (numbers, rows) in enumerate(zip(held, _rows_of_ranks(task.full, task.ranks))):
        own = torch.isin(weights[rows], numbers).float().mean().item()
        others = torch.isin(weights, numbers).float().mean().item() * task.ranks - own
        if own < 0.9 and others > 0.1:  # a few numbers of single precision may be equal by chance
            raise Wrong(
                "heads-in-another-order",
                expected=f"block {rank} of {task.ranks} of the heads on rank {rank}",
                got="heads of other blocks",
            )


def _run_attention(answer, task: _AttentionTask) -> list[_Attended]:
    own = task.full, task.x, task.slope, task.other
    reports = run(_attended, task.ranks, answer, *own)
    check_waited([report.unwaited for report in reports])
    return reports


def _manages(answer, task: _AttentionTask) -> bool:
    """Whether every rank has the right output for another task, which tells where a mistake is."""
    try:
        return same([r.y for r in _run_attention(answer, task)], [task.y] * task.ranks)
    except Exception:  # noqa: BLE001 - whatever fails here, it does not manage
        return False


@torch.no_grad()
def _without_qkv_bias(task: _AttentionTask) -> _AttentionTask:
    full = copy.deepcopy(task.full)
    full.qkv.bias.zero_()
    return replace(task, full=full, y=full(task.x))


@torch.no_grad()
def _with_a_head_each(task: _AttentionTask) -> _AttentionTask:
    full = copy.deepcopy(task.full)
    full.heads, full.head_width = task.ranks, full.out.in_features // task.ranks
    return replace(task, full=full, y=full(task.x))


@torch.no_grad()
def _with_equal_columns(task: _AttentionTask) -> _AttentionTask:
    """A task whose output projection does not tell its input features apart."""
    full = copy.deepcopy(task.full)
    full.out.weight[:] = full.out.weight.mean(1, keepdim=True)
    return replace(task, full=full, y=full(task.x))


@torch.no_grad()
def _with_a_shifted_mask(full: Attention, x: Tensor) -> list[Tensor]:
    """The outputs where a token does not see itself, or sees one too many; the first token's and the
    last one's depend on how that is written."""
    qkv = full.qkv(x)
    q, k, v = qkv.view(*x.shape[:2], 3, full.heads, -1).permute(2, 0, 3, 1, 4)
    all_pairs = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    heads = [
        nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=all_pairs.tril(by))
        for by in (-1, 1)
    ]
    return [full.out(y.transpose(1, 2).flatten(2)) for y in heads]


def _check_attention(answer, task: _AttentionTask) -> None:
    n, bias = task.ranks, task.full.out.bias.detach()
    partial = _partial_outputs(task.full, task.x, n)
    mistaken = _mistaken_attention(task.full, task.x, n)

    def gives(outputs: list[Tensor]) -> Callable:
        return lambda got: any(same(got, [output] * n) for output in outputs)

    likely = {
        **{slug: gives(outputs) for slug, outputs in mistaken.items()},
        "partial-output": lambda got: same(got, partial) or same(got, [p + bias for p in partial]),
        "bias-per-rank": [task.y + (n - 1) * bias] * n,
        "other-bias-rows": lambda got: _manages(answer, _without_qkv_bias(task)),
        "heads-laid-out": lambda got: _manages(answer, _with_a_head_each(task)),
        "mask-shifted": lambda got: any(
            same([g[:, 1:-1] for g in got], [output[:, 1:-1]] * n)
            for output in _with_a_shifted_mask(task.full, task.x)
        ),
        "output-not-cut-to-match": lambda got: _manages(answer, _with_equal_columns(task)),
    }
    reports = _run_attention(answer, task)
    got = [report.y for report in reports]
    expect(got, [task.y] * n, each="rank", what="the output", likely=likely)
    if any(report.full_changed for report in reports):
        got = "other values in it, or frozen ones"
        raise Wrong("full-changed", expected="`full` as before", got=got)
    got, likely = [report.y_other for report in reports], {"kept-from-before": True}
    expect(got, [task.y_other] * n, each="rank", what="the output for another x", likely=likely)
    likely = {
        "cuts-the-graph": lambda got: any(g is None for g in got),
        "summed-again": [n * task.x_gradient] * n,
        "input-gradient-local": lambda got: same(sum(got), task.x_gradient, tolerance=1e-4),
    }
    got = [report.x_gradient for report in reports]
    expect(got, [task.x_gradient] * n, each="rank", what="the gradient of x", likely=likely)
    expect(
        [report.y_after for report in reports],
        [task.y_after] * n,
        each="rank",
        what="the output after a step of SGD",
        likely={"wrong-after-a-step": True},
        tolerance=1e-4,
    )


@attention.requires("two ranks with two heads each give the whole attention")
def two_ranks_with_two_heads_each_give(answer, draw):
    _check_attention(answer, _attention_task(draw, 2, 4))


@attention.requires(
    "three ranks and one; one head to each rank",
    failures=dict.fromkeys(("exception", *attention.failures), "two-ranks") | HANGS,
    needs_earlier=True,
)
def three_ranks(answer, draw):
    alone = draw.choice([2, 4])
    with only_for_two():
        _check_attention(answer, _attention_task(draw, 3, draw.choice([6, 9])))
        _check_attention(answer, _attention_task(draw, 1, draw.integer(2, 4)))
        _check_attention(answer, _attention_task(draw, alone, alone))


@attention.requires("each rank holds the parameters of its heads alone", needs_earlier=True)
def each_rank_holds_the_parameters_of_its_heads(answer, draw):
    ranks = draw.choice([2, 3, 4])
    task = _attention_task(draw, ranks, ranks * draw.choice([2, 3]))
    qkv, out = task.full.qkv, task.full.out
    cut = sum(map(own_bytes, (qkv.weight, qkv.bias, out.weight)))
    limit = cut // task.ranks + own_bytes(out.bias)
    reports = _run_attention(answer, task)
    held = max(report.held for report in reports)
    if held > limit:
        raise Wrong("holds-too-much", expected=f"{limit} bytes on each rank", got=f"{held} bytes")
    if any(report.full_learns for report in reports):
        got = "a step of the layer changes `full`"
        raise Wrong("shares-memory", expected="parameters in memory of their own", got=got)
    _check_own_heads(answer, task)
    check_nothing_whole(answer, task.full, ranks)


@attention.requires("one all-reduce of the input's size each way", needs_earlier=True)
def one_all_reduce_of_the_input_size_each(answer, draw):
    ranks = draw.choice([2, 3, 4])
    task = _attention_task(draw, ranks, ranks * draw.choice([1, 2]))
    size = own_bytes(task.x)
    for records in run(traced, ranks, answer, task.full, task.x, task.slope):
        check_sent(*records, (size, size))


@attention.requires(
    "a layer in double precision", needs_earlier=True, failures={"exception": "other-dtype"}
)
def a_layer_in_double_precision(answer, draw):
    ranks = draw.choice([2, 3])
    task = _attention_task(draw, ranks, 2 * ranks, torch.float64)
    expected = [[task.y, task.x_gradient]] * ranks
    got = [[report.y, report.x_gradient] for report in _run_attention(answer, task)]
    what, likely = "the output and the gradient of x", {"other-dtype": True}
    expect(got, expected, each="rank", what=what, likely=likely, tolerance=1e-10)


@attention.requires("12 heads on 8 ranks: a ValueError with both numbers")
def with_12_heads_on_8_ranks(answer, draw):
    # the width divides: only the heads do not
    check_refusal(answer, Attention(width=12 * draw.choice([2, 4, 6]), heads=12), 8, 12)
