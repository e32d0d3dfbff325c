"""Exercise 2.3, `gather`: what it asks for, and how it is checked."""

import torch

from course_utils.authoring import Exercise, Wrong, expect, expect_type
from course_utils.exercises.ch02.shared import ASKED_FOR_GPUS, CPU, META, NO_GPU, MetaComesBack

gather = Exercise(
    "2.3",
    "gather",
    points=2,
    minutes=15,
    kind="core",
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
        "flattened": "The rows have lost their shape: join the outputs as they are.",
        "columns": "You joined the outputs side by side. Join them along dimension 0, the rows.",
        "averaged": "You averaged the workers' outputs. They belong to different rows: keep all of "
        "them.",
        "summed": "You added the workers' outputs. They belong to different rows: keep all of them.",
        "not-joined": "You return the workers' outputs as they are. Put them together into one "
        "tensor.",
        "wrong-order": "The rows are not in the order of the workers.",
        "first-only": "You return the output of one worker. The rows of the others are lost.",
        "not-moved": "The result is not on the device that was asked for.",
        "moved-too-late": "The workers' outputs lie on different devices, and `cat` and `stack` want "
        "theirs on one: move each output first, then join.",
        "asked-for-gpus": ASKED_FOR_GPUS,
        "torchs-own": "PyTorch's own gather knows GPUs only. Here you write it, for any devices.",
        "cut-from-the-graph": "The result has no history, so no gradient flows back to the workers.",
        "no-nests": "A model may return a tuple, a list or a dict: gather each entry of it, and "
        "keep the structure.",
        "structure-lost": "The result must have the structure of one output: a dict stays a dict, "
        "a tuple a tuple, a list a list.",
        "scalars-fail": "Tensors without dimensions cannot be concatenated. Make a vector of them.",
        "scalars-lost": "Numbers of some workers are missing in the vector: one for each of them.",
        "one-worker": "One worker is no special case: its number becomes a vector of one number.",
        "rows-lost": "Rows are missing. The workers may have different numbers of rows: keep all.",
        "other-dtype": "The result has another dtype than the outputs. Classes and positions must stay "
        "whole numbers.",
        "outputs-changed": "Your function changes the list of outputs that it was handed. Make a new "
        "one.",
        "scalars-averaged": "You made one number of the workers' numbers. Return all of them as a "
        "vector: chunks may have different sizes, and a mean of means is not the mean.",
    },
)


def _gathered(answer, outputs, expected, **likely):
    given = list(outputs)
    got = answer(given, CPU)
    if any(now is not before for now, before in zip(given, outputs)):
        raise Wrong("outputs-changed", expected="the list as it was", got="other entries")
    likely = {slug.replace("_", "-"): value for slug, value in likely.items()}
    expect(got, expected, likely=likely)
    return got


@gather.requires(
    "equal chunks: the rows of all workers, in order",
    failures={**NO_GPU, "not implemented for CPU": "torchs-own"},
)
def _(answer, draw):
    rows, width = draw.integer(2, 4), draw.integer(2, 5)
    parts = [draw.tensor(rows, width) for _ in range(draw.integer(2, 4))]
    _gathered(
        answer,
        parts,
        torch.cat(parts),
        stacked=lambda got: got.dim() == 3,
        flattened=lambda got: got.dim() == 1,
        columns=torch.cat(parts, dim=1),
        averaged=torch.stack(parts).mean(dim=0),
        summed=torch.stack(parts).sum(dim=0),
        not_joined=lambda got: isinstance(got, (list, tuple)),
        first_only=lambda got: any(torch.equal(got, part) for part in parts),
        wrong_order=lambda got: torch.equal(
            got.flatten().sort().values, torch.cat(parts).flatten().sort().values
        ),
    )


SIDE_BY_SIDE = dict.fromkeys(("except in dimension 1", "except in dimension 2"), "columns")


@gather.requires(
    "chunks of different sizes, one or four workers",
    failures={**SIDE_BY_SIDE, "RuntimeError": "stacked"},
)
def _(answer, draw):
    size, width = draw.integer(2, 5), draw.integer(2, 4)
    for sizes in ((size, size, size, draw.integer(1, size - 1)), (size + 1,), (1, size)):
        parts = [draw.tensor(rows, 2, width) for rows in sizes]
        fewer = lambda got, sizes=sizes: len(got) < sum(sizes)
        _gathered(answer, parts, torch.cat(parts), rows_lost=fewer)
    classes = [draw.integers(rows) for rows in (size, size + 1)]
    other = lambda got: got.dtype != torch.int64
    _gathered(answer, classes, torch.cat(classes), other_dtype=other)


@gather.requires(
    "tuples, lists and dicts, also nested",
    failures={
        **SIDE_BY_SIDE,
        "Sizes of tensors must match": "stacked",
        "TypeError": "no-nests",
        "AttributeError": "no-nests",
        "KeyError": "no-nests",
    },
)
def _(answer, draw):
    width = draw.integer(2, 5)
    outputs = [
        {"logits": draw.tensor(rows, width), "hidden": (draw.tensor(rows, 2), [draw.tensor(rows)])}
        for rows in draw.sample(range(1, 5), draw.integer(2, 3))
    ]
    expected = {
        "logits": torch.cat([output["logits"] for output in outputs]),
        "hidden": (
            torch.cat([output["hidden"][0] for output in outputs]),
            [torch.cat([output["hidden"][1][0] for output in outputs])],
        ),
    }
    got = _gathered(answer, outputs, expected, structure_lost=lambda got: type(got) is not dict)
    for part, kind in ((got["hidden"], tuple), (got["hidden"][1], list)):
        expect_type(part, kind, likely="structure-lost")


@gather.requires(
    "tensors without dimensions become a vector",
    failures={"RuntimeError": "scalars-fail", "ValueError": "scalars-fail"},
)
def _(answer, draw):
    losses = list(draw.tensor(draw.integer(3, 5)))
    _gathered(
        answer,
        losses,
        torch.stack(losses),
        scalars_averaged=lambda got: got.numel() == 1,
        scalars_fail=lambda got: got.dim() != 1,
        scalars_lost=lambda got: got.numel() < len(losses),
    )
    _gathered(answer, losses[:1], torch.stack(losses[:1]), one_worker=lambda got: got.dim() == 0)


@gather.requires(
    "the result is on the device that was asked for",
    needs_earlier=True,
    failures={"not on the expected device": "moved-too-late"},
    seconds=30,  # see 2.2
    at_home=True,
)
def _(answer, draw):
    rows = draw.sample(range(1, 5), draw.integer(2, 3))
    for device, places in ((META, [CPU] * 3), (META, [META, CPU, CPU]), (CPU, [CPU, META, META])):
        parts = [draw.tensor(count, 3).to(place) for count, place in zip(rows, places)]
        with MetaComesBack():
            got = answer(parts, device)
        expect(str(got.device), str(device), what="the device", likely={"not-moved": True})


@gather.requires("gradients flow back to every worker", needs_earlier=True, at_home=True)
def _(answer, draw):
    sizes = draw.sample(range(1, 5), draw.integer(2, 4))
    parts = [draw.tensor(rows, 2).requires_grad_() for rows in sizes]
    weights = draw.tensor(sum(sizes), 2)
    got = answer(parts, CPU)
    if not got.requires_grad:
        raise Wrong("cut-from-the-graph", expected="a result with a history", got="one without")
    (got * weights).sum().backward()
    expect([part.grad for part in parts], list(weights.split(sizes)), each="worker")
    losses = [draw.tensor(1)[0].requires_grad_() for _ in sizes]
    got, weights = _gathered(answer, losses, torch.stack(losses)), draw.tensor(len(sizes))
    if not got.requires_grad:
        expected = "a vector with a history, of tensors without dimensions"
        raise Wrong("cut-from-the-graph", expected=expected, got="one without")
    (got * weights).sum().backward()
    likely = {"cut-from-the-graph": all(loss.grad is None for loss in losses)}
    expect([loss.grad for loss in losses], list(weights), each="worker", likely=likely)
