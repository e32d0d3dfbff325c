"""What the exercises of chapter 06 share."""

import copy
import gc
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_exercises.authoring import Wrong, expect, run, same
from course_exercises.authoring.ranks import described
from course_utils.comm.intercept import listening
from course_utils.hardware import device
from course_utils.trace import Record, Trace

HANGS = {"timeout": "not-every-rank", "mismatch": "not-every-rank"}
REFUSES = {"ValueError": "other-error"}
MORE_THAN_ITS_SHARE = (
    "Your layer keeps more in memory than this rank's share, or shares memory with `full`, so that a step of one "
    "changes the other. An attribute, a list, a copy or a view into the whole matrix keeps all of it alive. Keep "
    "`clone()`s of this rank's blocks, and nothing else."
)
KEEPS_A_CALL = (
    "Your layer is right for one input and not for another one after it: it keeps something of an earlier call, "
    "such as a mask, a size, or the tensor of a sum. Make in `forward` what depends on x."
)
PASSES_BY_LUCK = (
    "You sum a tensor that autograd records, with a call of which it knows nothing. The gradient passes as it is, which "
    "happens to be right here: PyTorch warns that this is deprecated, and will refuse it. Use an autograd function, "
    "which says what backward does."
)


def on_three(failures: Mapping[str, str]) -> dict[str, str]:
    """An exercise's `failures`, where two ranks were right with the like."""
    return dict.fromkeys(("exception", *failures), "two-ranks") | HANGS


@contextmanager
def only_for_two() -> Iterator[None]:
    """Two ranks were right with the like: what is wrong now depends on their number."""
    try:
        yield
    except Wrong as wrong:
        raise Wrong("two-ranks", expected=wrong.expected, got=wrong.got) from None


@contextmanager
def recorded_calls() -> Iterator[list[str]]:
    """The calls that are handed a tensor which autograd records, but for a maximum: it needs no gradient."""
    found = []

    def on_call(name: str, arguments: dict) -> None:
        kind, payload = described(name, arguments)
        reduction = arguments.get("reduce_op")
        if reduction is not None and reduction.op() == dist.ReduceOp.MAX.value:
            return
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in payload):
            found.append(kind)

    with listening(on_call):
        yield found


def must_not_record(found: list[list[str]]) -> None:
    """Raises where a rank made such a call."""
    what, likely = "calls with a tensor that autograd records", {"passes-by-luck": True}
    expect(found, [[]] * len(found), each="rank", what=what, likely=likely)


def by_block(tensor: Tensor | None, dim: int | None, ranks: int) -> list[Tensor | None]:
    """What each rank has of a tensor that is cut in `dim`, or whole on every rank."""
    whole = tensor is None or dim is None
    return [tensor] * ranks if whole else list(tensor.chunk(ranks, dim))


def own_bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def loss_of(y: Tensor, slope: Tensor) -> Tensor:
    """A loss for which `slope` is the gradient of y. An output of another shape, which the
    requirement will see, gets any loss."""
    return (y * slope.to(device())).sum() if y.shape == slope.shape else y.sum()


def anywhere(values: list) -> Callable:
    """A sign: whether every rank has one of these."""
    return lambda got: any(same(got, [value] * len(got)) for value in values)


def same_and_learning(given: nn.Module, full: nn.Module) -> bool:
    """Whether an answer has left the layer that it was `given` as `full` is: values, and none frozen."""
    learning = [[p.requires_grad for p in layer.parameters()] for layer in (given, full)]
    return learning[0] == learning[1] and same(list(given.parameters()), list(full.parameters()))


def must_be_as_before(changed: bool) -> None:
    if changed:
        got = "other values in it, or frozen ones"
        raise Wrong("input-changed", expected="`full` as before", got=got)


# ---- sizes that do not divide --------------------------------------------------------------------


def _refusal(rank, answer, full) -> str | None:
    """The exception, and its message, with which an answer refuses a layer; None where it does not."""
    try:
        answer(copy.deepcopy(full).to(device()))
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        return f"{type(error).__name__}: {error}"
    return None


def check_refusal(answer, full: nn.Module, ranks: int, size: int) -> None:
    """Raises Wrong unless every rank refuses with a ValueError that names the size and the ranks."""
    for refusal in run(_refusal, ranks, answer, full):
        name, _, message = (refusal or "no exception").partition(":")
        named = {str(size), str(ranks)} <= set(re.findall(r"\d+", message))
        if name != "ValueError" or not named:
            expected = f"a ValueError that names {size} and {ranks}"
            raise Wrong("other-error", expected=expected, got=refusal or "no exception")


def sizes_that_do_not_divide(draw) -> tuple[int, int]:
    """A number of ranks, and a size that leaves any remainder."""
    ranks = draw.choice([2, 3, 4])
    return ranks, ranks * draw.integer(2, 6) + draw.integer(1, ranks - 1)


# ---- memory --------------------------------------------------------------------------------------


def _kept_alive(rank, answer, full) -> int:
    """The bytes of the largest tensor, no parameter of the layer, that lives on when the layer is
    made and the `full` that it was made from is gone."""
    before = _living()
    given = copy.deepcopy(full).to(device())
    layer = answer(given)
    del given
    gc.collect()
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    new = {key: kept for key, kept in _living().items() if key not in before and key not in own}
    return max((kept.nbytes() for kept in new.values()), default=0)


def _living() -> dict[int, torch.UntypedStorage]:
    """The memory of all living tensors of real numbers, by its address. A storage in this dict keeps
    its memory, so that no later one can be taken for it."""
    found = (t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter, nn.Buffer))
    storages = [t.untyped_storage() for t in found if t.is_floating_point()]
    return {storage.data_ptr(): storage for storage in storages}


def check_nothing_whole(answer, full: nn.Module, ranks: int) -> None:
    """Raises Wrong where a rank keeps a tensor as large as the smallest matrix of `full`."""
    whole = min(own_bytes(p) for p in full.parameters() if p.dim() > 1)
    kept = max(run(_kept_alive, ranks, answer, full))
    if kept >= whole:
        expected = "the rank's own parameters, and nothing of `full`"
        raise Wrong("more-than-its-share", expected=expected, got=f"{kept} bytes more")


# ---- what is sent --------------------------------------------------------------------------------


def _traced(rank, answer, full, x, slope) -> tuple[Record, Record]:
    """What a rank's layer sends forward, and backward."""
    layer = answer(copy.deepcopy(full).to(device()))
    x = x.clone().to(device()).requires_grad_()
    with Trace() as forward:
        y = layer(x)
    with Trace() as backward:
        loss_of(y, slope).backward()
    return forward.record(), backward.record()


def check_sent(
    answer, ranks: int, full: nn.Module, x, slope, sizes: tuple[int, int], several="sends-too-much"
) -> None:
    """Raises Wrong where more than this many bytes are handed over each way, in several calls, or in
    another one than an all-reduce; `several` is the name of several all-reduces backward."""
    for records in run(_traced, ranks, answer, full, x, slope):
        for way, record, size in zip(("forward", "backward"), records, sizes, strict=True):
            calls = [call.op for call in record.calls]
            if record.sent() > size or len(calls) > 1 or set(calls) - {"all_reduce"}:
                expected = f"one all_reduce of {size} bytes {way}" if size else f"nothing {way}"
                got = f"{record.sent()} bytes in {len(calls)} calls: {', '.join(calls[:3])}"
                sums = way == "backward" and len(calls) > 1 and set(calls) == {"all_reduce"}
                raise Wrong(several if sums else "sends-too-much", expected=expected, got=got)
