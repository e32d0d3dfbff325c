"""Exercise 2.1, `scatter`: what it asks for, and how it is checked."""

import torch

from course_exercises.authoring import Exercise, Wrong, expect, expect_type
from course_exercises.chapters.ch02.shared import ASKED_FOR_GPUS, CPU, META, NO_GPU

scatter = Exercise(
    "2.1",
    "scatter",
    points=2,
    minutes=10,
    kind="first",
    parameters=("batch", "devices"),
    hints=[
        (
            "First decide how many chunks there are, then how many rows each of them gets. Try 5 rows "
            "on 4 devices on paper."
        ),
        (
            "Every chunk gets rows // chunks rows, and the first rows % chunks of them get one more. "
            "`torch.Tensor` has a method that splits like this."
        ),
        (
            "There are as many chunks as devices, or as many as rows where there are fewer rows. "
            "Split along dimension 0 as evenly as possible, and move chunk i to device i with `.to`."
        ),
    ],
    misconceptions={
        "chunks-like-torch": "`torch.chunk` fills the first chunks to the brim and leaves little "
        "or nothing for the last. The sizes may differ by one row at most.",
        "chunk-sizes": "There are to be as many chunks as devices in the list, or as rows where these are fewer, and "
        "together they have every row once. Each has rows // chunks rows, and the first rows % chunks of them one "
        "more.",
        "rows-dealt-like-cards": "The rows are dealt out like cards. Each chunk must hold "
        "neighbouring rows, so that gather can put them together in their order.",
        "reshaped": "A row has lost its shape. Cut between the rows, along dimension 0, and leave each as it is.",
        "fails-when-small": "With fewer rows than devices there is one row a chunk, and fewer "
        "chunks than devices.",
        "not-moved": "A chunk is not on its device: chunk i belongs on devices[i]. (`meta` is a "
        "second device that every machine has.)",
        "not-a-list": "Return a list with one tensor per chunk.",
        "asked-for-gpus": ASKED_FOR_GPUS,
    },
    things="chunks",
    failures={
        "Expected a non cpu device": "torchs-own",
        "IndexError": "chunk-sizes",
        "is invalid for input of size": "chunk-sizes",
        "view size is not compatible": "needs-contiguous",
        "can require gradients": "input-changed",
    },
)


def _even(rows: int, workers: int) -> list[int]:
    """Sizes of as equal chunks as possible."""
    chunks = min(rows, workers)
    return [rows // chunks + (i < rows % chunks) for i in range(chunks)]


def _chunks(answer, batch, devices):
    given = list(devices)
    chunks = answer(batch, given)
    if given != devices:
        raise Wrong("input-changed", expected=str(devices), got=str(given))
    expect_type(chunks, (list, tuple), likely="not-a-list" if chunks is not None else None)
    for chunk in chunks:
        expect_type(chunk, torch.Tensor, likely="not-a-list")
    return list(chunks)


def _sizes(chunks) -> str:
    """The numbers of rows of the chunks, in words."""
    return f"rows by chunk: {', '.join(str(len(c)) if c.dim() else 'none' for c in chunks)}"


def _check_scatter(answer, batch, workers):
    chunks = _chunks(answer, batch, [CPU] * workers)
    rows, count = len(batch), min(len(batch), workers)
    expected = list(batch.split(_even(rows, workers)))
    likely = {
        "reshaped": any(chunk.shape[1:] != batch.shape[1:] for chunk in chunks),
        "chunks-like-torch": _sizes(batch.chunk(workers)),
        "chunk-sizes": True,
    }
    what = f"{rows} rows on {workers} devices"
    expect(_sizes(chunks), _sizes(expected), what=what, likely=likely)
    likely = {
        "rows-dealt-like-cards": [batch[i::workers] for i in range(count)],
        "other-dtype": any(chunk.dtype != batch.dtype for chunk in chunks),
        "reshaped": any(chunk.shape[1:] != batch.shape[1:] for chunk in chunks),
    }
    expect(chunks, expected, each="chunk", likely=likely)


@scatter.requires("12 rows on 3 devices give chunks of 4 rows, in order", failures=NO_GPU)
def with_12_rows_on_3_devices_give_chunks(answer, draw):
    _check_scatter(answer, draw.tensor(12, draw.integer(2, 5)), 3)


@scatter.requires("sizes that do not divide: images, labels, 1 to 5 devices")
def sizes_that_do_not_divide(answer, draw):
    # the rest has at least two rows, and torch.chunk gives other sizes
    rows, workers = draw.choice([(6, 4), (7, 5), (8, 5), (10, 4), (13, 5)])
    _check_scatter(answer, draw.tensor(rows, 2, draw.integer(3, 5)), workers)
    _check_scatter(answer, draw.tensor(workers + 1, 2), workers)
    _check_scatter(answer, draw.integers(3 * draw.integer(2, 5) + 2), 3)
    _check_scatter(answer, draw.tensor(2, 3, rows).transpose(0, 2), workers)  # not contiguous
    for workers in draw.sample((1, 2, 4, 5), 4):
        _check_scatter(answer, draw.tensor(draw.integer(2, 4) * workers + 1, 2), workers)


@scatter.requires(
    "fewer rows than devices: one row each, no empty chunk",
    failures=dict.fromkeys(("IndexError", "exception"), "fails-when-small"),
)
def fewer_rows_than_devices(answer, draw):
    _check_scatter(answer, draw.tensor(1, 4), draw.integer(2, 4))
    rows = draw.integer(2, 4)
    _check_scatter(answer, draw.tensor(rows, 3), rows + draw.integer(1, 3))


@scatter.requires("chunk i is on devices[i]", needs_earlier=True)
def chunk_i_is_on_devices_i(answer, draw):
    more = draw.choice([[CPU, META, META], [META, META, CPU, CPU], [CPU, META, CPU, META]])
    fewer_rows, single = ([META, CPU, CPU], 2), ([META], 3)
    for devices, rows in ((more, 2 * len(more)), fewer_rows, single):
        chunks = _chunks(answer, draw.tensor(rows, 2), devices)
        expect(
            [str(chunk.device) for chunk in chunks],
            [str(device) for device in devices[:rows]],
            what="the devices of the chunks",
            likely={"not-moved": True},
        )


def _with_history(answer, batch, devices):
    chunks = _chunks(answer, batch, devices)
    if not all(chunk.requires_grad for chunk in chunks):
        raise Wrong("cut-from-the-graph", expected="chunks with a history", got="chunks without")
    return chunks


@scatter.requires("gradients flow back into the batch", needs_earlier=True, at_home=True)
def gradients_flow_back_into_the_batch(answer, draw):
    rows, workers = draw.integer(7, 11), draw.integer(3, 5)
    batch = draw.tensor(rows, 2)
    _chunks(answer, batch, [CPU] * workers)
    likely = {"input-changed": True}
    expect(batch.requires_grad, False, what="requires_grad of the batch", likely=likely)
    batch.requires_grad_()
    _with_history(answer, batch, [CPU, META])
    chunks = _with_history(answer, batch, [CPU] * workers)
    factors = [draw.number(1, 2) for _ in chunks]
    sum(factor * chunk.sum() for factor, chunk in zip(factors, chunks)).backward()
    sizes = _even(rows, workers)
    parts = [torch.full((size, 2), factor) for size, factor in zip(sizes, factors)]
    likely = {"cut-from-the-graph": batch.grad is None}
    expect(batch.grad, torch.cat(parts), what="the gradient of the batch", likely=likely)
