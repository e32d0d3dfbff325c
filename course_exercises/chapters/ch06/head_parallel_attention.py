"""Exercise 6.3, `HeadParallelAttention`: what it asks for, and how it is checked."""

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, Wrong, expect, run, same, signs
from course_exercises.authoring.ranks import (
    Sent,
    come_late,
    following,
    must_have_sent,
    must_have_waited,
)
from course_exercises.chapters.ch06.shared import (
    HANGS,
    KEEPS_A_CALL,
    MORE_THAN_ITS_SHARE,
    REFUSES,
    anywhere,
    check_nothing_whole,
    check_refusal,
    check_sent,
    loss_of,
    must_be_as_before,
    on_three,
    only_for_two,
    own_bytes,
    same_and_learning,
)
from course_utils.hardware import device
from course_utils.lesson.models import GroupedAttention

attention = Exercise(
    "6.3",
    "HeadParallelAttention",
    points=3,
    minutes=50,
    kind="stretch",
    parameters=("full",),
    hints=[
        (
            "Write down the rows of `full.qkv.weight` for 4 heads of queries and 2 of keys and values: first "
            "all queries, then all keys, then all values. Which rows does rank 1 of 2 need?"
        ),
        (
            "Three blocks of rows, one from each part, and the first is the longest. If you put the rows of "
            "rank 0 first, then those of rank 1, a plain column cut does the rest. The output projection meets "
            "the heads of queries in the order of its input features: a plain row cut."
        ),
        (
            "Split the row numbers into the three parts, `chunk` each for the ranks, and join the blocks rank "
            "by rank. Build a linear layer with the rows in this order and cut it by columns. Inside a rank, "
            "the attention is as in `full`, with fewer heads of both kinds, as wide as before."
        ),
    ],
    misconceptions={
        "other-rows": "A rank holds other rows of `full.qkv` than those of its heads. They are its block of the "
        "queries, its block of the keys and its block of the values: split these three parts first, which are not "
        "equally long, and cut each by itself. The bias has the same rows as the weight.",
        "laid-out": "A rank's heads are not read as they are laid out: first the queries of heads / n heads, "
        "then the keys of kv_heads / n, then as many values. View each as (heads, head_width) before you "
        "`transpose(1, 2)`, since attention runs over the last dimension but one, and transpose back before you "
        "flatten. Head h of the queries goes with head h // (heads / kv_heads) of the keys.",
        "mask": "A token attends to later ones, or not to itself. `full` is causal: each attends to itself and to "
        "those before it, no more and no less.",
        "wrong-scale": "The scores are scaled by another width than the head's. A head is as wide on a "
        "rank as in the whole layer: only their number is smaller.",
        "output-not-cut-to-match": "The output projection does not fit what the rank's heads give. They "
        "are some of its *input* features: cut dimension 1 of `full.out.weight`, in the order of the heads.",
        "bias-once": "A bias is missing, or counts once per rank. That of `full.qkv` is cut with its rows; that "
        "of `full.out` is added once, after the sum over the ranks.",
        "x-gradient": "No rank has the whole gradient of x: each has the term of its own heads. Send x through the function "
        "that sums in backward before queries, keys and values are made of it.",
        "several-sums": "x enters the cut region several times, and each time its gradient is summed. Send it once through "
        "the function that sums in backward, before all that is made of it.",
        "wrong-after-a-step": "Output and input gradient are right, but a step of SGD leads elsewhere: a "
        "parameter's gradient is wrong, or it is none of the module's. Look at the bias of the output projection "
        "too: every rank adds all of it, after the sum.",
        "keeps-a-call": KEEPS_A_CALL,
        "more-than-its-share": MORE_THAN_ITS_SHARE,
    },
    failures={
        **HANGS,
        "does not require grad": "cut-from-the-graph",
        "is invalid for input of size": "laid-out",
        "don't multiply up to the size": "laid-out",
        "split_sizes to sum": "laid-out",
        "shapes cannot be multiplied": "output-not-cut-to-match",
    },
)

LEARNING_RATE = 0.02


@dataclass(frozen=True)
class _Attended:
    y: Tensor
    x_gradient: Tensor | None
    others: list[Tensor | str]  # for `_others`: the output, or the exception there
    y_after: Tensor  # after a step of SGD
    held: int  # bytes of parameters
    full_changed: bool
    full_learns: bool  # does the step change `full`?
    sent: Sent


def _others(x: Tensor) -> list[Tensor]:
    """More tokens behind those of x, other samples, and the last token alone."""
    longer = torch.cat([x, x.flip(2)], dim=1)
    return [longer, torch.cat([longer, -longer]), x[:, -1:]]


def _step(model: nn.Module) -> None:
    """A step of SGD by hand: it does not mind a parameter without gradient."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= LEARNING_RATE * parameter.grad


def _attended(rank, answer, full, x, slope) -> _Attended:
    given = copy.deepcopy(full).to(device())
    model = answer(given)
    changed = not same_and_learning(given, full)
    x = x.clone().to(device()).requires_grad_()
    come_late(rank)
    with following() as sent:
        y = model(x)
        loss_of(y, slope).backward()
    others = [_output(model, other) for other in _others(x.detach())]
    _step(model)
    learns = not changed and not same_and_learning(given, full)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    held = sum(storage.nbytes() for storage in storages.values())
    after = model(x).detach()
    return _Attended(y.detach(), x.grad, others, after, held, changed, learns, sent)


def _output(model: nn.Module, x: Tensor) -> Tensor | str:
    try:
        return model(x).detach()
    except Exception as error:  # noqa: BLE001 - that it fails for this x tells the mistake
        return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class _Task:
    ranks: int
    full: GroupedAttention
    x: Tensor
    slope: Tensor
    y: Tensor
    x_gradient: Tensor
    y_after: Tensor

    def rows(self) -> list[Tensor]:
        """Each rank's rows of qkv."""
        f = self.full
        sizes = [heads * f.head_width for heads in (f.heads, f.kv_heads, f.kv_heads)]
        parts = torch.arange(sum(sizes)).split(sizes)
        return [torch.cat(blocks) for blocks in zip(*(part.chunk(self.ranks) for part in parts))]


def _task(draw, ranks: int, heads: int, kv_heads: int, dtype=torch.float32) -> _Task:
    torch.manual_seed(draw.seed())
    full = GroupedAttention(heads * draw.choice([3, 4, 5, 6]), heads, kv_heads).to(dtype)
    samples, tokens, width = draw.integer(1, 3), draw.integer(4, 7), full.qkv.in_features
    x = 2 * draw.tensor(samples, tokens, width, dtype=dtype)
    # the gradients are sums over all tokens: small enough that a step leaves the outputs near 1
    slope = draw.tensor(*x.shape, dtype=dtype) / (samples * tokens) ** 0.5
    trained, leaf = copy.deepcopy(full), x.clone().requires_grad_()
    y = trained(leaf)
    (y * slope).sum().backward()
    _step(trained)
    after = trained(x).detach()
    return _Task(ranks, full, x, slope, y.detach(), leaf.grad, after)


def _grouped(draw, ranks: int, dtype=torch.float32) -> _Task:
    """With several heads of both kinds to each rank."""
    kv_heads = ranks * 2
    return _task(draw, ranks, kv_heads * draw.choice([2, 3]), kv_heads, dtype)


def _mixed(qkv: Tensor, full: GroupedAttention, ranks=1, order=(0, 1, 2), **how) -> Tensor:
    """The results (N, T, width / ranks) of a rank's heads, before the output projection."""
    heads, kv_heads = full.heads // ranks, full.kv_heads // ranks
    by_head = qkv.unflatten(-1, (-1, full.head_width)).transpose(1, 2)
    parts = by_head.split([heads, kv_heads, kv_heads], dim=1)
    q, k, v = (parts[i] for i in order)
    how = {"is_causal": True} | how
    y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)
    return y.transpose(1, 2).flatten(2)


def _of_own_heads(task: _Task) -> tuple[list[Tensor], list[Tensor]]:
    """What each rank's heads give, the bias of `out` added, and for x's gradient."""
    full, n, outputs, gradients = task.full, task.ranks, [], []
    for rows, columns in zip(task.rows(), full.out.weight.chunk(n, dim=1), strict=True):
        x = task.x.clone().requires_grad_()
        qkv = nn.functional.linear(x, full.qkv.weight[rows], full.qkv.bias[rows])
        y = nn.functional.linear(_mixed(qkv, full, n), columns, full.out.bias)
        gradients.append(torch.autograd.grad((y * task.slope).sum(), x)[0])
        outputs.append(y.detach())
    return outputs, gradients


@torch.no_grad()
def _given_by(task: _Task) -> dict:
    """What the mistakes give that a few outputs tell."""
    full, n, bias = task.full, task.ranks, task.full.out.bias
    qkv, width = full.qkv(task.x), full.out.in_features
    t = task.x.shape[1]
    not_itself = torch.ones(t, t, dtype=torch.bool).tril(-1)
    shifted = full.out(_mixed(qkv, full, is_causal=False, attn_mask=not_itself))
    scales = 1 / math.sqrt(width), 1 / math.sqrt(width / n), 1.0
    no_bias = full.out(_mixed(qkv - full.qkv.bias, full))
    return {
        "bias-once": anywhere([task.y - bias, task.y + (n - 1) * bias, no_bias, no_bias - bias]),
        "wrong-scale": anywhere([full.out(_mixed(qkv, full, scale=s)) for s in scales]),
        "laid-out": anywhere([full.out(_mixed(qkv, full, order=(0, 2, 1)))]),
        "mask": lambda got: same([g[:, 1:] for g in got], [shifted[:, 1:]] * n),
    }


def _manages(answer, task: _Task) -> bool:
    """Whether every rank has the right output for another task, which tells where a mistake is."""
    try:
        return same([r.y for r in _run(answer, task)], [task.y] * task.ranks)
    except Exception:  # noqa: BLE001 - whatever fails here, it does not manage
        return False


@torch.no_grad()
def _with_equal_columns(task: _Task) -> _Task:
    """A task whose output projection does not tell its input features apart."""
    full = copy.deepcopy(task.full)
    full.out.weight[:] = full.out.weight.mean(1, keepdim=True)
    return replace(task, full=full, y=full(task.x))


def _run(answer, task: _Task) -> list[_Attended]:
    reports = run(_attended, task.ranks, answer, task.full, task.x, task.slope)
    must_have_waited([report.sent.unwaited for report in reports])
    return reports


def _numbers_held(rank, answer, full) -> Tensor:
    """All numbers of this rank's parameters, in whatever order and shapes."""
    model = answer(copy.deepcopy(full).to(device()))
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


def _check_rows(answer, task: _Task) -> None:
    """Raises Wrong where a rank has numbers of other rows of qkv in place of its own. Which layers and names
    they stand in is the answer's own affair."""
    held = run(_numbers_held, task.ranks, answer, task.full)
    for rank, (numbers, rows) in enumerate(zip(held, task.rows(), strict=True)):
        for name, whole in task.full.qkv.named_parameters():
            there = torch.isin(whole.detach().unsqueeze(-1), numbers).flatten(1).float().mean(1)
            own, others = there[rows].mean(), there.sum() - there[rows].sum()
            if own < 0.9 and others > 0.1 * len(rows):  # a few numbers may be equal by chance
                found = (there > 0.9).nonzero().flatten().tolist()
                expected = f"rows {_ranges(rows.tolist())} of `full.qkv.{name}` on rank {rank}"
                raise Wrong("other-rows", expected=expected, got=f"rows {_ranges(found)}")


def _ranges(numbers: list[int]) -> str:
    """Row numbers for a reader: "0-5, 12-14"."""
    starts = [i for i in numbers if i - 1 not in numbers]
    ends = [i for i in numbers if i + 1 not in numbers]
    return ", ".join(f"{a}-{b}" for a, b in zip(starts, ends, strict=True)) or "of none"


def _check(answer, draw, task: _Task) -> None:
    n = task.ranks
    _check_rows(answer, task)
    reports = _run(answer, task)
    must_be_as_before(any(report.full_changed for report in reports))
    own, own_gradients = _of_own_heads(task)
    got, expected = [report.y for report in reports], [task.y] * n
    given = _given_by(task)

    def alone(got: list[Tensor]) -> bool:
        """Whether no token sees another."""
        return all(same(r.y[:, -1:], r.others[2]) for r in reports)

    def later(got: list[Tensor]) -> bool:
        """Whether the tokens behind x have an effect."""
        return not all(same(r.others[0][:, : r.y.shape[1]], r.y) for r in reports)

    likely = {
        "bias-once": given["bias-once"],
        "wrong-scale": given["wrong-scale"],
        "laid-out": lambda got: (
            given["laid-out"](got) or alone(got) or _manages(answer, _task(draw, n, n, n))
        ),
        "mask": lambda got: given["mask"](got) or later(got),
        "output-not-cut-to-match": lambda got: _manages(answer, _with_equal_columns(task)),
        **signs(own, expected),
    }
    expect(got, expected, each="rank", what="the output", likely=likely)
    with torch.no_grad():
        outputs = [[task.full(other) for other in _others(task.x)]] * n
    got, likely = [report.others for report in reports], {"keeps-a-call": True}
    expect(got, outputs, each="rank", what="the output for another x", likely=likely)
    must_have_sent([report.sent for report in reports])
    got, expected = [report.x_gradient for report in reports], [task.x_gradient] * n
    likely = {
        "cut-from-the-graph": any(g is None for g in got),
        "x-gradient": n > 1 and own_gradients,
        **signs(own_gradients, expected),
    }
    expect(got, expected, each="rank", what="the gradient of x", likely=likely)
    got, likely = [report.y_after for report in reports], {"wrong-after-a-step": True}
    what = "the output after a step of SGD"
    expect(got, [task.y_after] * n, each="rank", what=what, likely=likely, tolerance=1e-4)


@attention.requires("two ranks with several heads each give the whole attention", failures=REFUSES)
def two_ranks_with_several_heads_each(answer, draw):
    _check(answer, draw, _grouped(draw, 2))


@attention.requires("three ranks", failures=on_three(attention.failures), needs_earlier=True)
def three_ranks(answer, draw):
    with only_for_two():
        _check(answer, draw, _grouped(draw, 3))


@attention.requires(
    "one rank; one head of keys to each rank; as many heads of keys as of queries",
    needs_earlier=True,
)
def one_rank_and_one_head_of_keys_to_each(answer, draw):
    _check(answer, draw, _grouped(draw, 1))
    ranks = draw.choice([2, 4])
    _check(answer, draw, _task(draw, ranks, 2 * ranks, ranks))
    _check(answer, draw, _task(draw, 2, 4, 4))


@attention.requires("each rank holds the parameters of its heads alone", needs_earlier=True)
def each_rank_holds_the_parameters_of_its_heads(answer, draw):
    task = _grouped(draw, draw.choice([2, 3, 4]))
    qkv, out = task.full.qkv, task.full.out
    cut = sum(map(own_bytes, (qkv.weight, qkv.bias, out.weight)))
    limit = cut // task.ranks + own_bytes(out.bias)
    reports = _run(answer, task)
    held = max(report.held for report in reports)
    if held > limit:
        expected = f"{limit} bytes of parameters on each rank"
        raise Wrong("more-than-its-share", expected=expected, got=f"{held} bytes")
    if any(report.full_learns for report in reports):
        expected, got = "memory of its own", "a step of the layer changes `full`"
        raise Wrong("more-than-its-share", expected=expected, got=got)
    check_nothing_whole(answer, task.full, task.ranks)


@attention.requires("one all-reduce of the input's size each way", needs_earlier=True)
def one_all_reduce_of_the_input_size_each(answer, draw):
    task = _grouped(draw, draw.choice([2, 3, 4]))
    sizes = own_bytes(task.x), own_bytes(task.x)
    check_sent(answer, task.ranks, task.full, task.x, task.slope, sizes, several="several-sums")


def _dtypes(rank, answer, full) -> set[torch.dtype]:
    return {p.dtype for p in answer(copy.deepcopy(full).to(device())).parameters()}


@attention.requires("a layer in double precision", needs_earlier=True)
def a_layer_in_double_precision(answer, draw):
    task = _grouped(draw, draw.choice([2, 3]), torch.float64)
    what, likely = "the parameters' dtype", {"other-dtype": True}
    found = run(_dtypes, task.ranks, answer, task.full)
    expect(found, [{torch.float64}] * task.ranks, each="rank", what=what, likely=likely)
    got = [[report.y, report.x_gradient] for report in _run(answer, task)]
    expected = [[task.y, task.x_gradient]] * task.ranks
    likely = {"other-dtype": any(t.dtype != torch.float64 for pair in got for t in pair)}
    likely["rounded"] = lambda got: same(got, expected)
    what = "the output and the gradient of x"
    expect(got, expected, each="rank", what=what, likely=likely, tolerance=1e-10)


@attention.requires("heads of keys that do not divide: a ValueError with both numbers")
def heads_of_keys_that_do_not_divide(answer, draw):
    # those of queries divide, and the width; the second time there are fewer heads of keys than ranks
    for ranks, heads, kv_heads in ((4, 12, 6), (4, 8, 2)):
        width = heads * draw.choice([2, 4])
        check_refusal(answer, GroupedAttention(width, heads, kv_heads), ranks, kv_heads)
