"""Exercise 2.3, `gather`: what it asks for, and how it is checked."""

import contextlib
import itertools

import torch

from course_exercises.authoring import Exercise, Wrong, expect, same
from course_exercises.chapters.ch02.shared import ASKED_FOR_GPUS, CPU, META, NO_GPU, MetaComesBack

gather = Exercise(
    "2.3",
    "gather",
    points=2,
    minutes=20,
    kind="stretch",
    parameters=("outputs", "device"),
    hints=[
        (
            "Begin with plain tensors. The chunks may have different numbers of rows, so they have to "
            "be joined along an existing dimension."
        ),
        (
            "For a dict, a tuple or a list the task repeats itself for each entry: gather the entry of "
            "all workers. A function may call itself. `zip(*outputs)` brings the workers' entries "
            "together."
        ),
        (
            "Look at the first output. A dict: gather each key over all workers. A tuple or list: "
            "gather each position. A tensor without dimensions: stack. Any other tensor: concatenate, "
            "after moving everything to the device."
        ),
    ],
    misconceptions={
        "stacked": "`torch.stack`, and `vstack` for vectors, make a new dimension for the workers "
        "and work for equal chunks only. Concatenate along the rows that are there.",
        "reshaped": "The rows have lost their shape, or stand side by side. Join the outputs as they are, along "
        "dimension 0.",
        "made-one": "You made one output of the workers', by a mean or a sum. They belong to different rows: keep "
        "all of them. Of numbers too: chunks may have different sizes, and a mean of means is not the mean.",
        "not-joined": "You return the workers' outputs as they are. Put them together into one "
        "tensor.",
        "rows-lost": "Rows or numbers of some workers are missing. The workers may have different numbers of rows: "
        "keep all.",
        "wrong-order": "The rows are not in the order of the workers.",
        "not-moved": "The result is not on the device that was asked for.",
        "moved-too-late": "The workers' outputs lie on different devices, and `cat` and `stack` want "
        "theirs on one: move each output first, then join.",
        "structure": "A model may return a tuple, a list or a dict, with more of these in it. Gather each entry, and "
        "keep the structure of one output: a dict stays a dict, a tuple a tuple, a list a list.",
        "scalars": "Tensors without dimensions cannot be concatenated. Make a vector of them, of a single worker's "
        "number too, and keep them tensors: `torch.stack`.",
        "asked-for-gpus": ASKED_FOR_GPUS,
    },
    things="outputs",
)


def _map(function, value):
    """The same containers with what the function makes of each tensor."""
    if isinstance(value, dict):
        return {key: _map(function, entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(function, entry) for entry in value)
    return function(value) if isinstance(value, torch.Tensor) else type(value).__name__


def _moved(outputs, device):
    return _map(lambda tensor: tensor.to(device), outputs)


def _devices(outputs):
    return _map(lambda tensor: str(tensor.device), outputs)


def _untouched(now, before) -> bool:
    """Whether containers hold the same tensors as before."""
    if not isinstance(before, (dict, list, tuple)):
        return now is before
    if type(now) is not type(before) or len(now) != len(before):
        return False
    if isinstance(before, dict):
        return all(key in now and _untouched(now[key], before[key]) for key in before)
    return all(map(_untouched, now, before))


def _form(value):
    """The structure of outputs."""
    return _map(lambda tensor: "a tensor", value)


def _gathered(answer, outputs, expected, **likely):
    given = _map(lambda tensor: tensor, outputs)
    got = answer(given, CPU)
    if not _untouched(given, outputs):
        raise Wrong("input-changed", expected="the outputs as they were", got="other entries")
    likely = {slug.replace("_", "-"): value for slug, value in likely.items()}
    expect(got, expected, likely=likely)
    return got


@gather.requires(
    "equal chunks: the rows of all workers, in order",
    failures={**NO_GPU, "not implemented for CPU": "torchs-own"},
)
def equal_chunks_the_rows_of_all_workers(answer, draw):
    rows, width = draw.integer(2, 4), draw.integer(2, 5)
    parts = [draw.tensor(rows, width) for _ in range(draw.integer(2, 4))]
    _gathered(
        answer,
        parts,
        torch.cat(parts),
        stacked=lambda got: got.dim() == 3,
        reshaped=lambda got: got.dim() == 1 or same(got, torch.cat(parts, dim=1)),
        made_one=lambda got: any(same(got, sum(parts) / n) for n in (1, len(parts))),
        not_joined=lambda got: isinstance(got, (list, tuple)),
        rows_lost=lambda got: any(torch.equal(got, part) for part in parts),
        wrong_order=lambda got: torch.equal(
            got.flatten().sort().values, torch.cat(parts).flatten().sort().values
        ),
    )


SIDE_BY_SIDE = dict.fromkeys(("except in dimension 1", "except in dimension 2"), "reshaped")


@gather.requires(
    "chunks of different sizes, one or four workers",
    failures={**SIDE_BY_SIDE, "RuntimeError": "stacked"},
)
def chunks_of_different_sizes(answer, draw):
    size, width = draw.integer(2, 5), draw.integer(2, 4)
    for sizes in ((size, size, size, draw.integer(1, size - 1)), (size + 1,), (1, size)):
        parts = [draw.tensor(rows, 2, width) for rows in sizes]
        fewer = lambda got, sizes=sizes: len(got) < sum(sizes)
        _gathered(answer, parts, torch.cat(parts), rows_lost=fewer)
    numbers = [draw.tensor(1) for _ in range(draw.integer(2, 4))]  # one row of one number
    _gathered(answer, numbers, torch.cat(numbers), stacked=lambda got: got.dim() == 2)
    classes = [draw.integers(rows) for rows in (size, size + 1)]
    other = lambda got: got.dtype != torch.int64
    _gathered(answer, classes, torch.cat(classes), other_dtype=other)


@gather.requires(
    "tuples, lists and dicts, also nested",
    failures={
        **SIDE_BY_SIDE,
        "Sizes of tensors must match": "stacked",
        "stack expects each tensor to be equal size": "stacked",
        "TypeError": "structure",
        "AttributeError": "structure",
        "KeyError": "structure",
    },
)
def tuples_lists_and_dicts_also_nested(answer, draw):
    width, sizes = draw.integer(2, 5), draw.sample(range(1, 5), draw.integer(2, 3))
    tensors = [[draw.tensor(n, width), draw.tensor(n, 2), draw.tensor(n)] for n in sizes]
    nests = (
        lambda logits, hidden, mask: {"logits": logits, "hidden": (hidden, [mask])},
        lambda logits, hidden, mask: (logits, {"hidden": hidden, "more": [{"mask": mask}]}),
    )
    for nest in nests:
        expected = nest(*map(torch.cat, zip(*tensors)))
        outputs = [nest(*own) for own in tensors]
        other = lambda got, expected=expected: _form(got) != _form(expected)
        got = _gathered(answer, outputs, expected, structure=other)
        if other(got):  # equal in value
            raise Wrong("structure", expected=expected, got=got)


@gather.requires(
    "tensors without dimensions become a vector",
    failures={"RuntimeError": "scalars", "ValueError": "scalars"},
)
def tensors_without_dimensions_become_a_vector(answer, draw):
    losses = list(draw.tensor(draw.integer(3, 5)))
    _gathered(
        answer,
        losses,
        torch.stack(losses),
        made_one=lambda got: got.numel() == 1,
        scalars=lambda got: got.dim() != 1,
        rows_lost=lambda got: got.numel() < len(losses),
    )
    _gathered(answer, losses[:1], torch.stack(losses[:1]), scalars=lambda got: got.dim() == 0)
    outputs = [{"loss": loss, "rows": draw.tensor(draw.integer(1, 3), 2)} for loss in losses]
    for own in (outputs, outputs[:1]):
        rows = torch.cat([output["rows"] for output in own])
        expected = {"loss": torch.stack(losses[: len(own)]), "rows": rows}
        _gathered(answer, own, expected, scalars=lambda got: got["loss"].dim() == 0)


@gather.requires(
    "the result is on the device that was asked for",
    needs_earlier=True,
    failures={
        "not on the expected device": "moved-too-late",
        "cannot be called on meta": "cut-from-the-graph",
    },
    seconds=30,  # see 2.2
    at_home=True,
)
def the_result_is_on_the_device_that_was(answer, draw):
    sizes = draw.sample(range(1, 5), draw.integer(2, 3))
    rows = [draw.tensor(count, 3) for count in sizes]
    losses = list(draw.tensor(len(rows)))
    both = [{"rows": part, "more": (loss, [part])} for part, loss in zip(rows, losses)]
    cases = ((META, [CPU] * 3), (META, [META, CPU, CPU]), (CPU, [CPU, META, META]), (META, [CPU]))
    for (device, places), outputs in itertools.product(cases, (rows, losses, both)):
        parts = [_moved(output, place) for output, place in zip(outputs, places)]
        got = None
        # in a thread of the answer's own, what comes back from meta still raises: it was moved
        with MetaComesBack(), contextlib.suppress(NotImplementedError):
            got = answer(parts, device)
        if got is None:
            continue
        places, wanted = _devices(got), _devices(_moved(parts[0], device))
        expect(places, wanted, what="the device", likely={"not-moved": True})


@gather.requires("gradients flow back to every worker", needs_earlier=True, at_home=True)
def gradients_flow_back_to_every_worker(answer, draw):
    sizes = draw.sample(range(1, 5), draw.integer(2, 4))
    parts = [draw.tensor(rows, 2).requires_grad_() for rows in sizes]
    weights = draw.tensor(sum(sizes), 2)
    got = answer(parts, CPU)
    if not got.requires_grad:
        raise Wrong("cut-from-the-graph", expected="a result with a history", got="one without")
    (got * weights).sum().backward()
    likely = {"cut-from-the-graph": all(part.grad is None for part in parts)}
    expect([part.grad for part in parts], list(weights.split(sizes)), each="worker", likely=likely)
    losses = [draw.tensor(1)[0].requires_grad_() for _ in sizes]
    got, weights = _gathered(answer, losses, torch.stack(losses)), draw.tensor(len(sizes))
    if not got.requires_grad:
        expected = "a vector with a history, of tensors without dimensions"
        raise Wrong("cut-from-the-graph", expected=expected, got="one without")
    (got * weights).sum().backward()
    likely = {"cut-from-the-graph": all(loss.grad is None for loss in losses)}
    expect([loss.grad for loss in losses], list(weights), each="worker", likely=likely)
