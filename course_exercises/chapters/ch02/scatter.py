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
        "rest-lost": "Rows are missing: when the number of devices does not divide the batch, the "
        "rest has to go somewhere.",
        "larger-last": "The sizes are right and their order is not: the larger chunks come first.",
        "too-many-chunks": "There are more chunks than devices: no device is left for the last.",
        "one-by-one": "Every row became a chunk. A chunk holds the rows of a whole device.",
        "rest-on-one": "The whole rest went to one worker. Give one row more to as many workers "
        "as the rest has rows.",
        "rows-dealt-like-cards": "The rows are dealt out like cards. Each chunk must hold "
        "neighbouring rows, so that gather can put them together in their order.",
        "everyone-gets-all": "Each worker got the whole batch, so all of them would do the same "
        "work.",
        "size-for-count": "You made chunks of len(devices) rows. The number of chunks is "
        "len(devices); the number of rows follows from it.",
        "columns": "You split the features of each row. Split along dimension 0, the rows.",
        "empty-chunks": "There are chunks without rows. A replica cannot do anything with them.",
        "fails-when-small": "With fewer rows than devices there is one row a chunk, and fewer "
        "chunks than devices.",
        "not-moved": "A chunk is not on its device: chunk i belongs on devices[i]. (`meta` is a "
        "second device that every machine has.)",
        "cut-from-the-graph": "The chunks are cut off from the batch: no gradient flows back. "
        "`.to` and slices keep the connection, `.detach` and `.data` do not.",
        "not-a-list": "Return a list with one tensor per chunk.",
        "reshaped": "A row has lost its shape. Cut between the rows, and leave each as it is.",
        "other-dtype": "The chunks have another dtype than the batch. Labels must stay whole numbers: "
        "cut and move, nothing else.",
        "devices-merged": "A device may stand in the list several times. Each time it is a worker of "
        "its own, with a chunk of its own.",
        "batch-changed": "Your function changes the batch that it was handed. Whether it wants a "
        "gradient is the caller's decision: cut and move, nothing else.",
        "needs-contiguous": "A batch may be transposed or cut out of a larger tensor, and `view` refuses "
        "some of these. Cutting between rows needs no new shape.",
        "devices-changed": "Your function changes the list of devices that it was handed, and the "
        "caller goes on with it.",
        "asked-for-gpus": ASKED_FOR_GPUS,
        "torchs-own": "PyTorch's own scatter knows GPUs only, and it divides as `torch.chunk` "
        "does. Here you write it, for any devices.",
    },
    failures={
        "Expected a non cpu device": "torchs-own",
        "IndexError": "too-many-chunks",
        "is invalid for input of size": "rest-lost",
        "view size is not compatible": "needs-contiguous",
        "can require gradients": "batch-changed",
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
        raise Wrong("devices-changed", expected=str(devices), got=str(given))
    expect_type(chunks, (list, tuple), likely="not-a-list" if chunks is not None else None)
    for chunk in chunks:
        expect_type(chunk, torch.Tensor, likely="not-a-list")
    return list(chunks)


def _sizes(chunks) -> str:
    """The numbers of rows of the chunks, in words."""
    return f"chunks of {', '.join(str(len(c)) if c.dim() else 'no' for c in chunks)} rows"


def _check_scatter(answer, batch, workers):
    chunks = _chunks(answer, batch, [CPU] * workers)
    rows, count = len(batch), min(len(batch), workers)
    expected = list(batch.split(_even(rows, workers)))
    sizes = [len(chunk) for chunk in chunks if chunk.dim()]
    expect(
        _sizes(chunks),
        _sizes(expected),
        what=f"{rows} rows on {workers} devices",
        likely={
            "one-by-one": len(chunks) == rows > count,
            "reshaped": any(chunk.dim() != batch.dim() for chunk in chunks),
            "columns": any(chunk.shape[1:] != batch.shape[1:] for chunk in chunks),
            "everyone-gets-all": _sizes([batch] * workers),
            "devices-merged": _sizes(chunks) == _sizes([batch]),
            "size-for-count": any(
                _sizes(chunks) == _sizes(batch.split(workers)[:count]) for count in (workers, rows)
            ),
            "empty-chunks": any(chunk.numel() == 0 for chunk in chunks),
            "chunks-like-torch": _sizes(batch.chunk(workers)),
            "too-many-chunks": len(chunks) > workers,
            "rest-lost": sum(sizes) < rows,
            "larger-last": sorted(sizes, reverse=True) == _even(rows, workers),
            "rest-on-one": sum(sizes) == rows and sizes.count(rows // count) == count - 1,
        },
    )
    expect(
        chunks,
        expected,
        each="chunk",
        likely={
            "rows-dealt-like-cards": [batch[i::workers] for i in range(count)],
            "reshaped": any(chunk.shape[1:] != batch.shape[1:] for chunk in chunks),
            "other-dtype": any(chunk.dtype != batch.dtype for chunk in chunks),
        },
    )


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
    likely = {"batch-changed": True}
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
