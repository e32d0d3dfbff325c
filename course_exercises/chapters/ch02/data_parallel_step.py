"""Exercise 2.4, `data_parallel_step`: what it asks for, and how it is checked."""

import contextlib
import copy
import itertools
from collections import Counter
from functools import partial
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.authoring.forbidden import called
from course_exercises.chapters.ch02.shared import (
    ASKED_FOR_GPUS,
    CPU,
    META,
    MODES,
    NO_GPU,
    Awkward,
    Counting,
    MetaComesBack,
    Plain,
    Sized,
    gradients_of,
    make,
    moody,
)

step = Exercise(
    "2.4",
    "data_parallel_step",
    points=4,
    minutes=40,
    kind="core",
    parameters=("model", "optimizer", "loss_fn", "images", "labels", "devices"),
    hints=[
        (
            "Write down the moves as comments and fill them in one by one. Which of them need a "
            "line for each worker, and which happen once?"
        ),
        (
            "Compute the loss once, from the outputs of all workers, put together on devices[0]. "
            "`functional_call` runs the model with a copy of its tensors; the copies must keep their "
            "history (`.to(device, copy=True)`)."
        ),
        (
            "For each chunk: the tensors (none for worker 0, copies for a helper), functional_call, "
            "the output moved to devices[0]. Then concatenate, loss, clear old gradients, backward, "
            "update, and return the loss as a number."
        ),
    ],
    misconceptions={
        "step-per-chunk": "You call `optimizer.step()` more than once. All chunks belong to one step: one loss, one "
        "update.",
        "mean-of-chunks": "Each chunk counts the same in your gradients, whatever its number of rows. Compute one "
        "loss, the mean over all rows, or weigh each chunk's loss by its share of the rows.",
        "chunk-losses": "Your gradients are too large or too small by the number of chunks or workers. The loss is "
        "one mean over all rows: do not add the chunks' mean losses, and do not divide by the number of workers.",
        "rows-lost": "Some rows never reached the loss. Put the outputs of all workers together; the last chunk may "
        "be smaller.",
        "helpers-lost": "Only the chunk of worker 0 reached the gradients. The helpers' copies must keep their "
        "connection to the model, or their gradients must be added to the model's.",
        "wrong-labels": "The outputs meet the labels of other rows: keep the chunks in their order.",
        "update": "The gradients are right and the parameters are not those that the optimizer makes of them, for "
        "instance as they were, or moved twice as far. Leave the update to `optimizer.step()`, called once.",
        "one-chunks-loss": "You return the loss of one chunk. The loss of the step is the mean over all rows.",
        "wrong-loss": "Return the mean loss over all rows from before the update: the one that you called backward "
        "on.",
        "runs-again": "Rows go through the model more than once. Return the loss that the gradients came from; it "
        "needs no second forward pass.",
        "loss-not-a-number": "Return the loss as a number: `loss.item()`.",
        "gradients-cleared": "The gradients are gone after the step. Clear them before backward, "
        "not after the update.",
        "first-step-kept": "The first step is right and the second is not: something of the first is "
        "still in use. Copy the parameters anew in every step.",
        "chunks": "The chunks are not those of `torch.chunk(len(devices))`, one for each worker.",
        "buffers": "A helper has changed the model's buffers. It must run with copies of them.",
        "buffers-lost": "Worker 0's changes of the buffers are lost. Worker 0 runs the model itself, not a copy.",
        "other-mode": "The model, or a helper's copy of it, is not in the mode in which the model was handed in: with "
        "BatchNorm or dropout the outputs differ between training and evaluation. A deep copy keeps "
        "the mode of every part; leave it as it is.",
        "tied-once": "Of two tied layers only one uses your copy: your copy of the module is not tied any more. "
        '`.to("meta")` unties layers; a plain `copy.deepcopy(model)` keeps them tied.',
        "not-moved": "A forward call computes with tensors on the wrong device: its rows, its "
        "parameters and its buffers belong on the device of its worker.",
        "not-brought-back": "What a worker made stays on its device, and has to meet the rest on that of the model: "
        "the outputs on devices[0], where the labels are, and gradients beside the parameters.",
        "own-loss": "The loss is not the one of `loss_fn`: call what you were handed.",
        "asked-for-gpus": ASKED_FOR_GPUS,
        "awkward": "A tied, frozen or unused parameter is treated wrongly. One without a gradient "
        "has `grad` None.",
    },
    things="gradients",
    failures={"ValueError": "tied-twice", "device type could not be determined": "torchs-own"},
    at_home=True,
)


class _Watched(nn.Module):
    """Runs a model and notes the rows of each forward call, whoever makes it, and the devices."""

    calls: ClassVar[list[int]] = []
    devices: ClassVar[list[set[str]]] = []

    def __init__(self, model: Sized) -> None:
        super().__init__()
        self.model = model
        _Watched.calls, _Watched.devices = [], []

    def forward(self, x):
        _Watched.calls.append(len(x))
        tensors = (x, *self.model.parameters(), *self.model.buffers())
        _Watched.devices.append({str(tensor.device) for tensor in tensors})
        return self.model(x)


def _after_step(model, batch, loss_fn, rate):
    """Parameters, gradients and loss of one step of a copy of the model on a batch; the gradients
    of the model itself are not touched."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    images, labels = batch
    loss = loss_fn(twin(images), labels)
    loss.backward()
    torch.optim.SGD(twin.parameters(), lr=rate).step()
    return dict(twin.named_parameters()), gradients_of(twin), loss.item()


def _batch(draw, model: Sized, rows: int):
    """Images and labels."""
    return draw.tensor(rows, model.width), draw.integers(rows, low=0, high=model.classes - 1)


def _gradient_of(model, loss_of):
    """The gradients that a mistaken loss would give to a copy of the model."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    loss_of(twin).backward()
    return gradients_of(twin)


def _check_step(answer, draw, kind, rows, workers, old_gradients=False, loss_fn=F.cross_entropy):
    """One step of the answer against the same step with the whole batch."""
    model = make(kind, draw)
    images, labels = _batch(draw, model, rows)
    watched, rate = _Watched(model), draw.number(0.05, 0.2)
    likely = _likely(watched, images, labels, workers, loss_fn)
    right = likely.pop("right")
    if old_gradients:
        for parameter in watched.parameters():
            parameter.grad = draw.tensor(*parameter.shape)
        old = gradients_of(watched)
        likely["old-gradients"] = {name: right[name] + old[name] for name in old}
    parameters, _, loss = _after_step(watched, (images, labels), loss_fn, rate)
    with torch.no_grad():
        chunks = zip(images.chunk(workers), labels.chunk(workers))
        losses = [loss_fn(watched(x), y).item() for x, y in chunks]
    optimizer, steps = torch.optim.SGD(watched.parameters(), lr=rate), []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    _Watched.calls.clear()
    with called(nn.DataParallel.__init__, nn.parallel.data_parallel) as forbidden:
        got = answer(watched, optimizer, loss_fn, images, labels, [CPU] * workers)
    if forbidden:
        raise Wrong("torchs-own", expected="a step of your own", got=forbidden[0])
    if len(steps) > 1:
        got = f"{len(steps)} of them"
        raise Wrong("step-per-chunk", expected="one optimizer.step()", got=got)
    calls = sorted(_Watched.calls)
    if calls == [rows] and workers > 1:
        got = f"1 call with {rows} rows"
        raise Wrong("chunks", expected=f"{workers} forward calls", got=got)
    gradients = gradients_of(watched)
    if not gradients:
        raise Wrong("gradients-cleared", expected="the gradients of this step", got="none")
    expect(gradients, right, what="the gradient", likely=likely)
    sizes = sorted(len(chunk) for chunk in images.chunk(workers))
    again = {"runs-again": sum(calls) > rows and Counter(sizes) <= Counter(calls)}
    expect(calls, sizes, what="rows of the forward calls", likely={**again, "chunks": True})
    now = {name: p.detach() for name, p in watched.named_parameters()}
    expect(now, parameters, what="the parameter", likely={"update": True})
    expect_type(got, (float, int), likely="loss-not-a-number" if got is not None else None)
    likely = {"one-chunks-loss": lambda got: any(same(got, one) for one in losses)}
    expect(got, loss, what="the loss", likely={**likely, "wrong-loss": True})


def _likely(model, images, labels, workers, loss_fn):
    """The gradients that each mistake would give, and those of the right step."""
    chunks = list(zip(images.chunk(workers), labels.chunk(workers)))
    floor = max(len(images) // workers, 1) * workers
    means = lambda m: torch.stack([loss_fn(m(x), y) for x, y in chunks])

    def helpers_detached(m):
        with torch.no_grad():
            others = [m(x) for x, _ in chunks[1:]]
        return loss_fn(torch.cat([m(chunks[0][0]), *others]), labels)

    calls = {
        "right": lambda m: loss_fn(m(images), labels),
        "helpers-lost": helpers_detached,
        "mean-of-chunks": lambda m: means(m).mean(),
        "own-loss": lambda m: F.cross_entropy(m(images), labels),
    }
    if loss_fn is F.cross_entropy:
        del calls["own-loss"]
    gradients = {slug: _gradient_of(model, loss_of) for slug, loss_of in calls.items()}
    combined = [
        _gradient_of(model, loss_of)
        for loss_of in (
            lambda m: means(m).sum(),
            lambda m: loss_fn(m(images), labels) / workers,
        )
    ]
    fewer = [*chunks, (images[:floor], labels[:floor])]
    some = [_gradient_of(model, lambda m, x=x, y=y: loss_fn(m(x), y)) for x, y in fewer]
    gradients["chunk-losses"] = lambda got: any(same(got, each) for each in combined)
    gradients["rows-lost"] = lambda got: any(same(got, each) for each in some)
    gradients["wrong-labels"] = partial(_in_another_order, copy.deepcopy(model), chunks, loss_fn)
    return gradients


def _in_another_order(model, chunks, loss_fn, got) -> bool:
    """Whether these are the gradients where the outputs of the chunks are in any other order."""
    labels = torch.cat([y for _, y in chunks])

    def loss_of(m, order):
        return loss_fn(torch.cat([m(x) for x, _ in order]), labels)

    orders = itertools.permutations(chunks)
    return any(same(got, _gradient_of(model, partial(loss_of, order=o))) for o in orders)


@step.requires(
    "12 rows on 3 workers: the step of the big batch",
    failures={**NO_GPU, "ValueError": "tied-twice"},
)
def with_12_rows_on_3_workers(answer, draw):
    _check_step(answer, draw, Plain, 12, 3)


@step.requires("chunks of different sizes, and fewer rows than workers")
def chunks_of_different_sizes(answer, draw):
    for rows, workers in (
        draw.choice([(13, 4), (10, 4), (14, 4), (7, 3), (13, 5)]),  # the last chunk is smaller
        draw.choice([(5, 4), (6, 4), (9, 4), (7, 5)]),  # and there are fewer chunks than workers
        draw.choice([(2, 3), (2, 4), (3, 5)]),
        (draw.integer(5, 9), 1),
    ):
        _check_step(answer, draw, Plain, rows, workers)


@step.requires("gradients of an earlier step do not count")
def gradients_of_an_earlier_step_do_not_count(answer, draw):
    _check_step(answer, draw, Plain, draw.integer(7, 11), draw.integer(2, 4), old_gradients=True)
    _check_two_steps(answer, draw)


def _check_two_steps(answer, draw):
    """Two steps of one model and one optimizer, which keeps something between them."""
    model = make(Plain, draw)
    twin, workers, rate = copy.deepcopy(model), draw.integer(2, 4), draw.number(0.05, 0.2)
    optimizer, usual = (
        torch.optim.SGD(each.parameters(), lr=rate, momentum=0.9) for each in (model, twin)
    )
    for number in ("first", "second"):
        images, labels = _batch(draw, model, workers * draw.integer(2, 4))
        answer(model, optimizer, F.cross_entropy, images, labels, [CPU] * workers)
        usual.zero_grad()
        F.cross_entropy(twin(images), labels).backward()
        usual.step()
        what = f"of the {number} of two steps with momentum"
        likely = {"first-step-kept": number == "second"}
        expect(gradients_of(model), gradients_of(twin), what="the gradient " + what, likely=likely)
        now, right = ({n: p.detach() for n, p in each.named_parameters()} for each in (model, twin))
        likely = {"update": True}
        expect(now, right, what="the parameter " + what, likely=likely)


@step.requires("any loss_fn that is a mean over the rows", needs_earlier=True)
def any_loss_fn_that_is_a_mean_over(answer, draw):
    smooth = partial(F.cross_entropy, label_smoothing=draw.number(0.2, 0.5))
    _check_step(answer, draw, Plain, draw.integer(7, 11), draw.integer(2, 4), loss_fn=smooth)


@step.requires(
    "tied, frozen and unused parameters",
    failures={"RuntimeError": "tied-once", "'NoneType'": "awkward"},
    needs_earlier=True,
)
def tied_frozen_and_unused_parameters(answer, draw):
    model = make(Awkward, draw)
    images, labels = _batch(draw, model, draw.integer(7, 11))
    for parameter in model.parameters():  # of an earlier step, which used all of them
        parameter.grad = draw.tensor(*parameter.shape)
    parameters, gradients, _ = _after_step(model, (images, labels), F.cross_entropy, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answer(model, optimizer, F.cross_entropy, images, labels, [CPU] * draw.integer(2, 4))
    likely = {"zeros-for-none": lambda got: got.keys() > gradients.keys(), "awkward": True}
    expect(gradients_of(model), gradients, what="the gradient", likely=likely)
    now = {name: p.detach() for name, p in model.named_parameters()}
    expect(now, parameters, what="the parameter", likely={"awkward": True})


@step.requires("BatchNorm: every chunk in the mode that the model is in", needs_earlier=True)
def batchnorm_every_chunk_in_the_mode(answer, draw):
    for modes in MODES:
        model, workers = moody(draw, *modes), draw.integer(2, 4)
        images, labels = _batch(draw, model, 3 * workers - 1)
        before = model.modes()

        def chunk_by_chunk(m, images=images, labels=labels, workers=workers):
            return F.cross_entropy(torch.cat([m(x) for x in images.chunk(workers)]), labels)

        right = _gradient_of(model, chunk_by_chunk)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        answer(model, optimizer, F.cross_entropy, images, labels, [CPU] * workers)
        expect(gradients_of(model), right, what="the gradient", likely={"other-mode": True})
        expect(model.modes(), before, what="training, of each module", likely={"other-mode": True})


@step.requires("changes of buffers: worker 0's stay, the helpers' are lost", needs_earlier=True)
def changes_of_buffers(answer, draw):
    model = make(Counting, draw)
    images, labels = _batch(draw, model, draw.integer(7, 11))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workers = draw.integer(2, 4)
    answer(model, optimizer, F.cross_entropy, images, labels, [CPU] * workers)
    first = float(len(images.chunk(workers)[0]))
    expect(
        model.rows.item(),
        first,
        what="the rows that the model counted",
        likely={"buffers": lambda got: got > first, "buffers-lost": True},
    )


@step.requires(
    "each worker computes on its own device, and the outputs meet on devices[0]",
    needs_earlier=True,
    failures={"not on the expected device": "not-brought-back"},
    seconds=30,  # see 2.2
)
def each_worker_computes_on_its_own_device(answer, draw):
    devices = [CPU, META, META, CPU][: draw.integer(2, 4)]
    model = make(Counting, draw)
    model.layer.bias.requires_grad_(False)
    images, labels = _batch(draw, model, 2 * len(devices))
    model = _Watched(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(outputs, labels):
        if outputs.device != labels.device:
            raise Wrong("not-brought-back", expected="outputs on the CPU", got="outputs on meta")
        return F.cross_entropy(outputs, labels)

    try:
        # in a thread of the answer's own, what comes back from meta still raises: it was moved
        with MetaComesBack(), contextlib.suppress(NotImplementedError):
            answer(model, optimizer, loss_fn, images, labels, devices)
    finally:  # what has been seen explains more than an exception that came of it
        wanted = Counter(map(str, devices))
        found = Counter(" and ".join(sorted(places)) for places in _Watched.devices)
        if found - wanted:
            expected = f"the forward calls on {', '.join(map(str, devices))}"
            got = f"calls on {', '.join(found.elements())}"
            raise Wrong("not-moved", expected=expected, got=got)
