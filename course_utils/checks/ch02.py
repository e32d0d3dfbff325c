"""The checks of chapter 02: scatter, replicate, gather, the whole step, and six broken set-ups.

Two devices exist on every machine: the CPU, which may stand for several workers, and `meta`, whose
tensors have no values. On `meta` a check sees where a tensor lies, on the CPU what is in it.
"""

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from course_utils import hardware
from course_utils.checks import Exercise, Wrong, expect, expect_type, same
from course_utils.checks.forbidden import called
from course_utils.hardware import Machine, Setup

CPU, META = torch.device("cpu"), torch.device("meta")
aten = torch.ops.aten

# What every exercise about devices can meet on a machine without a GPU.
ASKED_FOR_GPUS = (
    "Here your code asks for this machine's GPUs. The devices to use are the ones it was handed, "
    "which may be CPUs: count that list, and move with `.to(device)`."
)
NO_GPU = dict.fromkeys(
    (
        "Found no NVIDIA driver",  # .cuda() and "cuda:0", with PyTorch for CUDA
        "not compiled with CUDA",  # the same, with PyTorch for CPUs
        "chunk expects `chunks` to be greater than 0",  # with torch.cuda.device_count()
        "number of sections must be larger than 0",
        "by zero",
    ),
    "asked-for-gpus",
)

# ---- 2.1 scatter ---------------------------------------------------------------------------------

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
def _(answer, draw):
    _check_scatter(answer, draw.tensor(12, draw.integer(2, 5)), 3)


@scatter.requires("sizes that do not divide: images, labels, 1 to 5 devices")
def _(answer, draw):
    # the rest has at least two rows, and torch.chunk gives other sizes
    rows, workers = draw.choice([(6, 4), (7, 5), (8, 5), (10, 4), (13, 5)])
    _check_scatter(answer, draw.tensor(rows, 2, draw.integer(3, 5)), workers)
    _check_scatter(answer, draw.tensor(workers + 1, 2), workers)
    _check_scatter(answer, draw.integers(3 * draw.integer(2, 5) + 2), 3)
    for workers in draw.sample((1, 2, 4, 5), 4):
        _check_scatter(answer, draw.tensor(draw.integer(2, 4) * workers + 1, 2), workers)


@scatter.requires(
    "fewer rows than devices: one row each, no empty chunk",
    failures=dict.fromkeys(("IndexError", "exception"), "fails-when-small"),
)
def _(answer, draw):
    _check_scatter(answer, draw.tensor(1, 4), draw.integer(2, 4))
    rows = draw.integer(2, 4)
    _check_scatter(answer, draw.tensor(rows, 3), rows + draw.integer(1, 3))


@scatter.requires("chunk i is on devices[i]", needs_earlier=True)
def _(answer, draw):
    devices = draw.choice([[CPU, META, META], [META, META, CPU, CPU], [CPU, META, CPU, META]])
    chunks = _chunks(answer, draw.tensor(2 * len(devices), 2), devices)
    expect(
        [str(chunk.device) for chunk in chunks],
        [str(device) for device in devices],
        what="the devices of the chunks",
        likely={"not-moved": True},
    )


@scatter.requires("gradients flow back into the batch", needs_earlier=True, at_home=True)
def _(answer, draw):
    rows, workers = draw.integer(7, 11), draw.integer(3, 5)
    batch = draw.tensor(rows, 2).requires_grad_()
    chunks = _chunks(answer, batch, [CPU] * workers)
    factors = [draw.number(1, 2) for _ in chunks]
    total = sum(factor * chunk.sum() for factor, chunk in zip(factors, chunks))
    if not total.requires_grad:
        raise Wrong("cut-from-the-graph", expected="chunks with a history", got="chunks without")
    total.backward()
    sizes = _even(rows, workers)
    parts = [torch.full((size, 2), factor) for size, factor in zip(sizes, factors)]
    expect(batch.grad, torch.cat(parts), what="the gradient of the batch")


# ---- 2.2 replicate -------------------------------------------------------------------------------

replicate = Exercise(
    "2.2",
    "replicate",
    points=4,
    minutes=30,
    kind="stretch",
    parameters=("model", "devices"),
    hints=[
        (
            "Worker 0 is the head office: what is the least that you have to do for it? The others "
            "need copies that remember where they came from."
        ),
        (
            "`tensor.to(device, copy=True)` copies and keeps the connection for the gradient. "
            "`named_parameters()` names a tied parameter once, and `functional_call` then ties it "
            "again. Do not forget `named_buffers()`."
        ),
        (
            "Replica 0 is the model. For each other device, copy all parameters and buffers into a "
            "dictionary, and return a function that runs `functional_call` with a frame of its own "
            "(a deep copy of the model) and this dictionary."
        ),
    ],
    misconceptions={
        "other-outputs": "A replica computes with other values than the model has now. Copy the "
        "model's own parameters; a new model of the same class has new ones.",
        "other-mode": "A replica computes in another mode than the model has: with BatchNorm or dropout "
        "the outputs are others in training and in evaluation. A deep copy keeps the mode of every "
        "part; leave it as it is.",
        "same-model": "Your replicas are one and the same model. `model.to(device)` moves the model "
        "itself and returns it: afterwards it is on the last device only.",
        "torchs-own": "PyTorch's own replicate knows GPUs only. Here you write it, for any devices.",
        "asked-for-gpus": ASKED_FOR_GPUS,
        "not-callable": "Return functions or modules that can be called with a batch; a dictionary "
        "of tensors cannot.",
        "wrong-count": "Return a list with one replica per device.",
        "gradients-lost": "A helper's gradients never arrive in the model. A deep copy, a state "
        "dict, `nn.Parameter` and `.detach()` cut the connection; `.to(device, copy=True)` and "
        "`.clone()` keep it.",
        "gradients-averaged": "The gradients of the replicas are averaged. They must be summed: the "
        "loss divides by the number of rows already.",
        "not-moved": "A helper's parameters are not on its device. (`meta` is a second device that "
        "every machine has.)",
        "buffers-forgotten": "A helper's buffers are not on its device. Copy the buffers too.",
        "late-binding": "All replicas use the tensors of the last device: a function made in a loop "
        "looks its variables up when it is called. Bind them with `partial` or a default argument.",
        "no-copies": "A helper computes with the model's own tensors. It needs copies, also where "
        "its device is that of the model: `.to(device)` alone copies nothing there.",
        "head-office-copied": "Replica 0 is a copy, made when you replicated. It must be the "
        "original: only then do changes of its buffers stay.",
        "copied-late": "The copies are made when a replica is called, not when you replicate.",
        "tied-twice": "A tied parameter stands twice among your tensors. `named_parameters()` "
        "names it once, and `functional_call` ties the second name by itself.",
        "tied-once": "Of two tied layers only one uses your copy: either tie_weights is False, or "
        'your frame is not tied any more. `.to("meta")` unties layers.',
        "buffers-lost": "A change that replica 0 makes to a buffer must reach the model.",
        "buffers-shared": "A change that a helper makes to a buffer reached the model: copy the "
        "buffers, also where the device is the same.",
        "shared-frame": "Two threads run `functional_call` on one module, and each overwrites the "
        "other's tensors. Give every replica a frame of its own: `copy.deepcopy(model)`.",
        "one-at-a-time": "The replicas wait for each other, so two threads cannot run at once.",
        "frozen-thawed": "A frozen parameter got a gradient.",
        "gradients-again": "The gradients of an earlier backward pass come a second time. A copy that "
        "is a leaf keeps its own `.grad`: hand it on and clear it, or copy so that the history stays.",
        "helpers-share": "Two helpers on one device change the same buffers. Every replica has copies "
        "of its own.",
    },
    at_home=True,
)


class _Sized(nn.Module):
    """A model for rows of `width` numbers and labels below `classes`."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.width, self.classes = width, classes


class _Plain(_Sized):
    """Two layers; passes a gate, if one is set, before and after it computes."""

    gate: Callable[[], object] | None = None

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__(width, classes)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, classes)

    def forward(self, x):
        gate = _Plain.gate or (lambda: None)
        gate()
        output = self.second(torch.tanh(self.first(x)))
        gate()
        return output


class _Counting(_Sized):
    """A layer with two buffers, one of which is not saved; a forward pass changes both in place."""

    def __init__(self, width: int, _: int, classes: int) -> None:
        super().__init__(width, classes)
        self.layer = nn.Linear(width, classes)
        self.register_buffer("rows", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(width), persistent=False)

    def forward(self, x):
        self.rows += len(x)
        self.largest.copy_(torch.maximum(self.largest, x.detach().amax(dim=0)))
        return self.layer(x - 0.1 * self.largest)


class _Awkward(_Sized):
    """Two tied layers, a frozen one and one that is not used."""

    def __init__(self, width: int, _: int, classes: int) -> None:
        super().__init__(width, classes)
        self.into, self.again = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.again.weight = self.into.weight
        self.frozen = nn.Linear(width, classes).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.frozen(self.again(torch.tanh(self.into(x))))


class _Moody(_Sized):
    """Computes otherwise in training than in evaluation."""

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__(width, classes)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, classes)
        self.norm = nn.BatchNorm1d(hidden)

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x))))

    def modes(self) -> list[bool]:
        return [module.training for module in self.modules()]


# Whether the model, and its BatchNorm, are in training: a frozen one often is not.
MODES = (True, True), (False, False), (True, False)


def _moody(draw, training: bool, norm: bool) -> _Moody:
    model = _make(_Moody, draw).train(training)
    model.norm.train(norm)
    return model


def _make(kind: type[_Sized], draw) -> _Sized:
    """A model with fresh sizes and parameters."""
    model = kind(draw.integer(3, 6), draw.integer(3, 6), draw.integer(3, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * draw.tensor(*parameter.shape))
    return model


def _replicas(answer, model, devices):
    replicas = answer(model, devices)
    expect_type(replicas, (list, tuple), likely="wrong-count" if replicas is not None else None)
    for replica in replicas:
        expect_type(replica, Callable, likely="not-callable")
    expect(len(replicas), len(devices), what="replicas", likely={"wrong-count": True})
    return list(replicas)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by name; a parameter without one is left out."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _summed(model: nn.Module, batches, factors=None) -> dict[str, torch.Tensor]:
    """The gradients that the model gets from all batches, run one after the other."""
    twin = copy.deepcopy(model)
    for batch, factor in zip(batches, factors or [1.0] * len(batches)):
        (factor * twin(batch).pow(2).sum()).backward()
    return _gradients(twin)


def _run_backward(replicas, batches):
    sum(replica(batch).pow(2).sum() for replica, batch in zip(replicas, batches)).backward()


@replicate.requires(
    "every replica gives the outputs of the model",
    failures={
        **NO_GPU,
        "Expected a non cpu device": "torchs-own",
        "required positional argument": "other-outputs",  # of the constructor of a new model
    },
)
def _(answer, draw):
    model = _make(_Plain, draw)
    for workers in (1, draw.integer(2, 4)):
        replicas = _replicas(answer, model, [CPU] * workers)
        for replica in replicas:
            batch = draw.tensor(draw.integer(1, 4), model.width)
            with torch.no_grad():
                expect(
                    replica(batch),
                    model(batch),
                    what="the outputs",
                    likely={"other-outputs": True},
                )
    for modes in MODES:
        _check_modes(answer, draw, _moody(draw, *modes))


def _check_modes(answer, draw, model: _Moody) -> None:
    """The replicas must compute in the model's mode, and leave the model in it."""
    before, twin = model.modes(), copy.deepcopy(model)
    replicas = _replicas(answer, model, [CPU] * 3)
    expect(model.modes(), before, what="training, of each module", likely={"other-mode": True})
    for replica in replicas:
        batch = draw.tensor(draw.integer(2, 4), model.width)
        with torch.no_grad():
            expected = copy.deepcopy(twin)(batch)
            what = "the outputs of a model with BatchNorm"
            expect(replica(batch), expected, what=what, likely={"other-mode": True})


@replicate.requires("the gradients of all replicas are summed in the model")
def _(answer, draw):
    model = _make(_Plain, draw)
    workers = draw.integer(3, 4)
    batches = [draw.tensor(rows, model.width) for rows in draw.sample(range(1, 6), workers)]
    expected = _summed(model, batches)
    only_first = _summed(model, batches[:1])
    replicas = _replicas(answer, model, [CPU] * workers)
    _run_backward(replicas, batches)
    averaged = {name: gradient / workers for name, gradient in expected.items()}
    helpers = {
        name: only_first[name] + (gradient - only_first[name]) / workers
        for name, gradient in expected.items()
    }
    expect(
        _gradients(model),
        expected,
        what="the gradient",
        likely={
            "gradients-lost": lambda got: not got or same(got, only_first),
            "gradients-averaged": lambda got: same(got, averaged) or same(got, helpers),
        },
    )
    model.zero_grad()
    _run_backward(replicas, batches)
    what, likely = "the gradient of a second backward pass", {"gradients-again": True}
    expect(_gradients(model), expected, what=what, likely=likely)


def _runs_on(replica, batch) -> bool:
    with torch.no_grad():
        try:
            return replica(batch).device == batch.device
        except (RuntimeError, NotImplementedError):
            return False


# The first computation on `meta` in a process loads a part of PyTorch, which takes seconds.
@replicate.requires(
    "each helper computes on its own device, buffers too",
    needs_earlier=True,
    seconds=30,
    failures={"NotImplementedError": "same-model"},  # model.to(CPU) after model.to(META)
)
def _(answer, draw):
    devices = [CPU, META, CPU, *draw.sample((CPU, META), draw.integer(0, 2))]
    for kind, slug in ((_Plain, "not-moved"), (_Counting, "buffers-forgotten")):
        model = _make(kind, draw)
        here = draw.tensor(3, model.width)
        replicas = _replicas(answer, model, devices)
        if any(replica is replicas[0] for replica in replicas[1:]):
            raise Wrong("same-model", expected="a replica for each device", got="one, repeated")
        if not _runs_on(replicas[0], here) and _runs_on(replicas[0], here.to(META)):
            raise Wrong("late-binding", expected="replica 0 on the CPU", got="replica 0 on meta")
        for i, device in enumerate(devices):
            if not _runs_on(replicas[i], here.to(device)):
                late = all(_runs_on(replica, here) for replica in replicas) and slug == "not-moved"
                raise Wrong(
                    "late-binding" if late and _same_tensors(replicas, here) else slug,
                    expected=f"replica {i} computes with tensors on {device}",
                    got="some of its tensors are elsewhere",
                )


def _same_tensors(replicas, batch) -> bool:
    """Whether two helpers compute with the same copies."""
    first, second = replicas[1](batch), replicas[2](batch)
    return _copies_behind(first) == _copies_behind(second) != set()


def _copies_behind(output: torch.Tensor) -> set:
    """The copy operations in the history of a tensor."""
    return {node for node in _history(output) if node.name().startswith(("ToCopy", "Clone"))}


def _history(output: torch.Tensor) -> set:
    """The operations that a tensor came from."""
    seen, todo = set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [edge for edge, _ in node.next_functions]
    return seen


@replicate.requires(
    "replica 0 uses the model's own tensors, the helpers copies made at once", needs_earlier=True
)
def _(answer, draw):
    model = _make(_Plain, draw)
    batch = draw.tensor(draw.integer(2, 5), model.width)
    replicas = _replicas(answer, model, [CPU] * draw.integer(2, 4))
    with torch.no_grad():
        before = model(batch)
        for parameter in model.parameters():
            parameter.add_(1.0)
        after = model(batch)
        first, *helpers = [replica(batch) for replica in replicas]
    expect(first, after, what="replica 0", likely={"head-office-copied": before})
    for output in helpers:
        late = _copies_behind(replicas[1](batch)) != set()
        mistake = "copied-late" if late else "no-copies"
        expect(output, before, what="a helper", likely={mistake: after})


@replicate.requires(
    "tied parameters stay tied, frozen ones frozen",
    failures={"ValueError": "tied-twice", "RuntimeError": "tied-once"},
    needs_earlier=True,
)
def _(answer, draw):
    model = _make(_Awkward, draw)
    batches = [
        draw.tensor(rows, model.width) for rows in draw.sample(range(1, 6), draw.integer(2, 4))
    ]
    expected = _summed(model, batches)
    replicas = _replicas(answer, model, [CPU] * len(batches))
    outputs = [replica(batch) for replica, batch in zip(replicas, batches)]
    sum(output.pow(2).sum() for output in outputs).backward()
    expect(
        _gradients(model),
        expected,
        what="the gradient",
        likely={
            "frozen-thawed": lambda got: any(name.startswith("frozen") for name in got),
            "tied-once": lambda got: got.keys() == expected.keys(),
        },
    )
    for output in outputs[1:]:
        copies = _first_users(output, model.into.weight)
        if copies > 1:
            raise Wrong("tied-twice", expected="one copy of the tied weight", got=f"{copies}")


def _first_users(output: torch.Tensor, parameter: nn.Parameter) -> int:
    """How many operations in the history of a tensor use a parameter directly."""
    return sum(
        any(getattr(edge, "variable", None) is parameter for edge, _ in node.next_functions)
        for node in _history(output)
    )


@replicate.requires("changes of buffers: replica 0's stay, the helpers' are lost")
def _(answer, draw):
    model = _make(_Counting, draw)
    first, second = draw.tensor(draw.integer(2, 5), model.width), draw.tensor(3, model.width) + 5
    replicas = _replicas(answer, model, [CPU] * draw.integer(3, 4))
    with torch.no_grad():
        expected = copy.deepcopy(model)(first)
    replicas[-1](second)
    expect(
        model.rows.item(), 0.0, what="rows after the helper", likely={"buffers-shared": lambda g: g}
    )
    what, likely = "another helper after the first one", {"helpers-share": True}
    expect(replicas[1](first).detach(), expected, what=what, likely=likely)
    replicas[0](first)
    expect(
        model.rows.item(),
        float(len(first)),
        what="rows after replica 0",
        likely={"buffers-lost": lambda g: not g},
    )


@replicate.requires("two threads run two replicas at the same time", needs_earlier=True)
def _(answer, draw):
    model = _make(_Plain, draw)
    batch = draw.tensor(draw.integer(2, 5), model.width)
    replicas = _replicas(answer, model, [CPU] * 2)
    with torch.no_grad():
        before = model(batch)
        for parameter in model.parameters():
            parameter.mul_(2.0)
        after = model(batch)
    try:
        with _both_inside(), ThreadPoolExecutor(2) as threads:
            outputs = list(threads.map(lambda replica: replica(batch), replicas))
    except threading.BrokenBarrierError:
        raise Wrong(
            "one-at-a-time", expected="both replicas at work", got="one waits for the other"
        ) from None
    expect(outputs, [after, before], each="replica", likely={"shared-frame": True})


@contextlib.contextmanager
def _both_inside():
    """Makes two forward passes of _Plain begin together and end together, so that both compute
    while both frames are in use."""
    _Plain.gate = threading.Barrier(2, timeout=3).wait
    try:
        yield
    finally:
        _Plain.gate = None


# ---- 2.3 gather ----------------------------------------------------------------------------------

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
        with _MetaComesBack():
            got = answer(parts, device)
        expect(str(got.device), str(device), what="the device", likely={"not-moved": True})


class _MetaComesBack(TorchDispatchMode):
    """Lets tensors and numbers come from `meta` to the CPU, as zeros."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        source = args[1] if function is aten.copy_.default else args[0] if args else None
        if torch.is_tensor(source) and source.is_meta:
            if function is aten._local_scalar_dense.default:
                return 0.0
            if function is aten._to_copy.default and str(kwargs.get("device")) == "cpu":
                dtype = kwargs.get("dtype") or source.dtype
                return torch.zeros(source.shape, dtype=dtype)
            if function is aten.copy_.default and not args[0].is_meta:
                return args[0].zero_()
        return function(*args, **kwargs)


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


# ---- 2.4 the whole step --------------------------------------------------------------------------

step = Exercise(
    "2.4",
    "data_parallel_step",
    points=4,
    minutes=30,
    kind="core",
    parameters=("model", "optimizer", "loss_fn", "images", "labels", "devices"),
    hints=[
        (
            "Write down the six moves as comments and fill them in one by one. Which of them need a "
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
        "step-per-chunk": "You update after every chunk, so the next chunk meets other parameters. "
        "All chunks belong to one step: one loss, one backward, one update.",
        "divided-by-workers": "Your gradients are divided by the number of workers. The loss is the "
        "mean over the rows already.",
        "one-chunk-only": "Only one chunk reached the loss. Put the outputs of all workers together.",
        "wrong-labels": "The outputs meet the labels of other rows: keep the chunks in their order.",
        "two-updates": "The parameters moved twice as far: call the optimizer once.",
        "other-update": "The gradients are right and the parameters are not those that the optimizer "
        "makes of them: leave the update to `optimizer.step()`.",
        "runs-again": "Rows went through the model more than once. The loss to return is the one that "
        "you called backward on, from before the update.",
        "no-update": "The parameters have not changed: the optimizer takes the step.",
        "old-gradients": "Gradients of an earlier step are still in the sum. Clear them before "
        "backward.",
        "gradients-cleared": "The gradients are gone after the step. Clear them before backward, "
        "not after the update.",
        "one-device": "The whole batch went through one forward call. Divide it into chunks, one a "
        "worker.",
        "other-chunks": "The chunks are not those of torch.chunk(len(devices)).",
        "mean-of-means": "You averaged the losses of the chunks. The chunks have different sizes, so "
        "this is not the mean over the rows: compute one loss from all outputs.",
        "losses-summed": "Your gradients are as many times too large as there are chunks: each chunk's "
        "loss is a mean already, and you added these means.",
        "helpers-lost": "Only the chunk of worker 0 reached the gradients. The helpers' copies must "
        "keep their connection to the model (no deep copy, no detach).",
        "rows-lost": "Some rows were left out: the last chunk may be smaller.",
        "buffers-shared": "A helper changed the model's buffers. It must use copies of them.",
        "buffers-lost": "Worker 0 must run the model itself: its changes of buffers are kept.",
        "other-mode": "The model, or a helper's frame, is in another mode than the model came in: with "
        "BatchNorm or dropout the outputs are others in training and in evaluation. A deep copy keeps "
        "the mode of every part; leave it as it is.",
        "tied-once": "Of two tied layers only one uses your copy: your frame is not tied any more. "
        '`.to("meta")` unties layers; a plain `copy.deepcopy(model)` keeps them tied.',
        "not-moved": "A forward call computes with tensors on the wrong device: its rows, its "
        "parameters and its buffers belong on the device of its worker.",
        "not-brought-back": "The outputs stay on their workers' devices. The loss wants them on "
        "devices[0], where the labels are.",
        "torchs-own": "You let nn.DataParallel do it. Here you write the step: chunks, copies, one loss, "
        "backward, update.",
        "own-loss": "The loss is not the one of `loss_fn`: call what you were handed.",
        "asked-for-gpus": ASKED_FOR_GPUS,
        "wrong-loss": "The number returned must be the mean loss over all rows, before the update.",
        "loss-not-a-number": "Return the loss as a number: `loss.item()`.",
        "tied-twice": "A tied parameter stands twice among your tensors. `named_parameters()` "
        "names it once, and `functional_call` ties the second name by itself.",
        "awkward": "A tied, frozen or unused parameter is treated wrongly. One without a gradient "
        "has `grad` None.",
    },
    failures={"ValueError": "tied-twice", "device type could not be determined": "torchs-own"},
    at_home=True,
)


class _Watched(nn.Module):
    """Runs a model and notes the rows of each forward call, whoever makes it, and the devices."""

    calls: ClassVar[list[int]] = []
    devices: ClassVar[list[set[str]]] = []

    def __init__(self, model: _Sized) -> None:
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
    return dict(twin.named_parameters()), _gradients(twin), loss.item()


def _batch(draw, model: _Sized, rows: int):
    """Images and labels."""
    return draw.tensor(rows, model.width), draw.integers(rows, low=0, high=model.classes - 1)


def _gradient_of(model, loss_of):
    """The gradients that a mistaken loss would give to a copy of the model."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    loss_of(twin).backward()
    return _gradients(twin)


def _check_step(answer, draw, kind, rows, workers, old_gradients=False, loss_fn=F.cross_entropy):
    """One step of the answer against the same step with the whole batch."""
    model = _make(kind, draw)
    images, labels = _batch(draw, model, rows)
    watched, rate = _Watched(model), draw.number(0.05, 0.2)
    likely = _likely(watched, images, labels, workers, rate, loss_fn)
    right = likely.pop("right")
    if old_gradients:
        for parameter in watched.parameters():
            parameter.grad = draw.tensor(*parameter.shape)
        old = _gradients(watched)
        likely["old-gradients"] = {name: right[name] + old[name] for name in old}
    parameters, _, loss = _after_step(watched, (images, labels), loss_fn, rate)
    start = {name: p.detach().clone() for name, p in watched.named_parameters()}
    optimizer = torch.optim.SGD(watched.parameters(), lr=rate)
    _Watched.calls.clear()
    with called(nn.DataParallel.__init__, nn.parallel.data_parallel) as forbidden:
        got = answer(watched, optimizer, loss_fn, images, labels, [CPU] * workers)
    if forbidden:
        raise Wrong("torchs-own", expected="a step of your own", got=forbidden[0])
    calls = sorted(_Watched.calls)
    if calls == [rows] and workers > 1:
        raise Wrong(
            "one-device", expected=f"{workers} forward calls", got=f"1 call with {rows} rows"
        )
    gradients = _gradients(watched)
    if not gradients:
        raise Wrong("gradients-cleared", expected="the gradients of this step", got="none")
    expect(gradients, right, what="the gradient", likely=likely)
    sizes = sorted(len(chunk) for chunk in images.chunk(workers))
    again = {"runs-again": sum(calls) > rows and Counter(sizes) <= Counter(calls)}
    expect(calls, sizes, what="rows of the forward calls", likely={**again, "other-chunks": True})
    now = {name: p.detach() for name, p in watched.named_parameters()}
    twice = {name: 2 * p.detach() - start[name] for name, p in parameters.items()}
    mistakes = {"no-update": start, "two-updates": twice, "other-update": True}
    expect(now, parameters, what="the parameter", likely=mistakes)
    expect_type(got, (float, int), likely="loss-not-a-number" if got is not None else None)
    expect(got, loss, what="the loss", likely={"wrong-loss": True})


def _likely(model, images, labels, workers, rate, loss_fn):
    """The gradients that each mistake would give, and those of the right step."""
    chunks = list(zip(images.chunk(workers), labels.chunk(workers)))
    floor = max(len(images) // workers, 1) * workers
    means = lambda m: torch.stack([loss_fn(m(x), y) for x, y in chunks])

    def last_of_many_steps(m, weighted=False):
        optimizer = torch.optim.SGD(m.parameters(), lr=rate)
        for x, y in chunks:
            loss = loss_fn(m(x), y) * (len(x) / len(images) if weighted else 1)
            if y is chunks[-1][1]:
                return loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def helpers_detached(m):
        with torch.no_grad():
            others = [m(x) for x, _ in chunks[1:]]
        return loss_fn(torch.cat([m(chunks[0][0]), *others]), labels)

    calls = {
        "right": lambda m: loss_fn(m(images), labels),
        "mean-of-means": lambda m: means(m).mean(),
        "losses-summed": lambda m: means(m).sum(),
        "step-per-chunk": last_of_many_steps,
        "divided-by-workers": lambda m: loss_fn(m(images), labels) / workers,
        "helpers-lost": helpers_detached,
        "wrong-labels": lambda m: loss_fn(torch.cat([m(x) for x, _ in reversed(chunks)]), labels),
        "own-loss": lambda m: F.cross_entropy(m(images), labels),
        "rows-lost": lambda m: loss_fn(m(images[:floor]), labels[:floor]),
    }
    if loss_fn is F.cross_entropy:
        del calls["own-loss"]
    gradients = {slug: _gradient_of(model, loss_of) for slug, loss_of in calls.items()}
    last = gradients["step-per-chunk"]
    weighted = _gradient_of(model, partial(last_of_many_steps, weighted=True))
    gradients["step-per-chunk"] = lambda got: same(got, last) or same(got, weighted)
    ones = [_gradient_of(model, lambda m, x=x, y=y: loss_fn(m(x), y)) for x, y in chunks]
    gradients["one-chunk-only"] = lambda got: any(same(got, one) for one in ones)
    return gradients


@step.requires(
    "12 rows on 3 workers: the step of the big batch",
    failures={**NO_GPU, "ValueError": "tied-twice"},
)
def _(answer, draw):
    _check_step(answer, draw, _Plain, 12, 3)


@step.requires("chunks of different sizes, and fewer rows than workers")
def _(answer, draw):
    for rows, workers in (
        draw.choice([(13, 4), (10, 4), (14, 4), (7, 3), (13, 5)]),  # the last chunk is smaller
        draw.choice([(5, 4), (6, 4), (9, 4), (7, 5)]),  # and there are fewer chunks than workers
        draw.choice([(2, 3), (2, 4), (3, 5)]),
        (draw.integer(5, 9), 1),
    ):
        _check_step(answer, draw, _Plain, rows, workers)


@step.requires("gradients of an earlier step do not count")
def _(answer, draw):
    _check_step(answer, draw, _Plain, draw.integer(7, 11), draw.integer(2, 4), old_gradients=True)


@step.requires("any loss_fn that is a mean over the rows", needs_earlier=True)
def _(answer, draw):
    smooth = partial(F.cross_entropy, label_smoothing=draw.number(0.2, 0.5))
    _check_step(answer, draw, _Plain, draw.integer(7, 11), draw.integer(2, 4), loss_fn=smooth)


@step.requires(
    "tied, frozen and unused parameters", failures={"RuntimeError": "tied-once"}, needs_earlier=True
)
def _(answer, draw):
    model = _make(_Awkward, draw)
    images, labels = _batch(draw, model, draw.integer(7, 11))
    parameters, gradients, _ = _after_step(model, (images, labels), F.cross_entropy, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answer(model, optimizer, F.cross_entropy, images, labels, [CPU] * draw.integer(2, 4))
    expect(_gradients(model), gradients, what="the gradient", likely={"awkward": True})
    now = {name: p.detach() for name, p in model.named_parameters()}
    expect(now, parameters, what="the parameter", likely={"awkward": True})


@step.requires("BatchNorm: every chunk in the mode that the model is in", needs_earlier=True)
def _(answer, draw):
    for modes in MODES:
        model, workers = _moody(draw, *modes), draw.integer(2, 4)
        images, labels = _batch(draw, model, 3 * workers - 1)
        before = model.modes()

        def chunk_by_chunk(m, images=images, labels=labels, workers=workers):
            return F.cross_entropy(torch.cat([m(x) for x in images.chunk(workers)]), labels)

        right = _gradient_of(model, chunk_by_chunk)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        answer(model, optimizer, F.cross_entropy, images, labels, [CPU] * workers)
        expect(_gradients(model), right, what="the gradient", likely={"other-mode": True})
        expect(model.modes(), before, what="training, of each module", likely={"other-mode": True})


@step.requires("changes of buffers: worker 0's stay, the helpers' are lost", needs_earlier=True)
def _(answer, draw):
    model = _make(_Counting, draw)
    images, labels = _batch(draw, model, draw.integer(7, 11))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workers = draw.integer(2, 4)
    answer(model, optimizer, F.cross_entropy, images, labels, [CPU] * workers)
    first = float(len(images.chunk(workers)[0]))
    expect(
        model.rows.item(),
        first,
        what="the rows that the model counted",
        likely={"buffers-shared": lambda got: got > first, "buffers-lost": lambda got: got == 0},
    )


@step.requires(
    "each worker computes on its own device, and the outputs meet on devices[0]",
    needs_earlier=True,
    failures={"not on the expected device": "not-brought-back"},
    seconds=30,  # see 2.2
)
def _(answer, draw):
    devices = [CPU, META, META, CPU][: draw.integer(2, 4)]
    model = _make(_Counting, draw)
    images, labels = _batch(draw, model, 2 * len(devices))
    model = _Watched(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(outputs, labels):
        if outputs.device != labels.device:
            raise Wrong("not-brought-back", expected="outputs on the CPU", got="outputs on meta")
        return F.cross_entropy(outputs, labels)

    try:
        # in a thread of the answer's own, what comes back from meta still raises: it was moved
        with _MetaComesBack(), contextlib.suppress(NotImplementedError):
            answer(model, optimizer, loss_fn, images, labels, devices)
    finally:  # what has been seen explains more than an exception that came of it
        wanted = Counter(map(str, devices))
        found = Counter(" and ".join(sorted(places)) for places in _Watched.devices)
        if found - wanted:
            expected = f"the forward calls on {', '.join(map(str, devices))}"
            got = f"calls on {', '.join(found.elements())}"
            raise Wrong("not-moved", expected=expected, got=got)


# ---- 2.5 diagnose --------------------------------------------------------------------------------

diagnosis = Exercise(
    "2.5",
    "diagnose",
    points=3,
    minutes=15,
    kind="core",
    parameters=("machine", "setup"),
    hints=[
        (
            "Start with the machine: compare the GPUs of the driver, those that the variable shows "
            "(`machine.selected()`), and those that CUDA gave to the process."
        ),
        (
            "`visible` None means not set: nothing is hidden. Fewer entries accepted than listed means "
            "that one of them is wrong. Only then ask about the loop: who is called, where is the "
            "batch, how many chunks does `torch.chunk` make of it."
        ),
        (
            "Ask in this order: did CUDA start with another number than the variable shows now; are "
            "fewer entries accepted than listed; fewer shown than the driver has; is there another "
            "wrapper; is the batch on the CPU; are there fewer chunks than GPUs. Otherwise healthy."
        ),
    ],
    misconceptions={
        "not-a-name": "Return one of the names from the description, as a string.",
        "unset-is-none": "`visible` is None where the variable is not set. Ask for that before you "
        "split it.",
        "not-started-is-none": "`started_gpus` is None as long as CUDA has not started. Ask for that "
        "before you compare it with a number.",
        "unset-hides": "A variable that is not set hides nothing: all GPUs are visible.",
        "characters-counted": "From the eleventh GPU on, a number has two characters: split the variable "
        "at its commas and count the entries.",
        "reads-on": "CUDA reads the list only up to the first entry that is no GPU. The variable is "
        "not short, it is wrong.",
        "trusts-the-variable": "The variable says one thing now, but CUDA read it when it started in "
        "this process. Compare with `started_gpus`.",
        "partial-unseen": "The variable is right in itself, but the driver has more GPUs.",
        "wrapper-unseen": "A wrapper exists somewhere, but `setup.wrappers` is what the loop calls.",
        "inputs-unseen": "Look where the batch is.",
        "larger-is-enough": "A batch larger than the number of GPUs can still leave some idle: "
        "torch.chunk makes chunks of ceil(batch / GPUs) rows. Count the chunks.",
        "batch-unseen": "The batch is smaller than the number of GPUs.",
        "busy-after-all": "torch.chunk makes as many chunks of this batch as there are GPUs: all of "
        "them work, also where the last chunk is smaller.",
        "always-ill": "Nothing is wrong here, and you found something.",
        "asked-the-doctor": "You asked `hardware.doctor`. Here you are the doctor: decide from the "
        "fields of machine and setup.",
    },
    failures={
        "not supported between instances of": "not-started-is-none",
        "'NoneType'": "unset-is-none",
    },
)

NAMES = {
    "visible-partial",
    "visible-wrong",
    "visible-late",
    "wrapped-late",
    "inputs-on-cpu",
    "batch-too-small",
    "healthy",
}


def _good(draw, gpus: int, **change) -> Setup:
    """A training loop with which all GPUs work, and what is changed in it."""
    fields = {
        "wrappers": ("DataParallel",),
        "model_device": "cuda:0",
        "batch_size": gpus * draw.integer(4, 60),
        "batch_device": "cuda:0",
    }
    return Setup(**(fields | change))


def _list(numbers) -> str:
    return ",".join(map(str, numbers))


def _shuffled(draw, gpus: int) -> str:
    """A variable that names all GPUs."""
    return _list(draw.sample(range(gpus), gpus))


def _check_case(answer, machine, setup, cause, **likely):
    """The answer must name `cause`; `likely` maps a misconception to the names that it gives."""
    with called(hardware.doctor) as forbidden:
        got = answer(machine, setup)
    if forbidden:
        expected = "a decision from the fields"
        raise Wrong("asked-the-doctor", expected=expected, got="hardware.doctor")
    if got is None:
        raise Wrong(None, expected=repr(cause), got="None")
    expect_type(got, str, likely="not-a-name")
    if got not in NAMES:
        raise Wrong("not-a-name", expected="a name from the description", got=repr(got))
    names = {slug.replace("_", "-"): value for slug, value in likely.items()}
    expect(got, cause, what=_describe(machine, setup), likely=names)


def _describe(m: Machine, s: Setup) -> str:
    parts = [f"{m.driver_gpus} GPUs, visible={m.visible!r}, started_gpus={m.started_gpus}"]
    if m.torch_gpus == m.driver_gpus:
        parts.append(f"wrappers={s.wrappers}, batch of {s.batch_size} on {s.batch_device}")
    return "; ".join(parts)


@diagnosis.requires("a variable that leaves GPUs out", at_home=True)
def _(answer, draw):
    gpus = draw.integer(3, 8)
    for count in (1, gpus - 1):
        visible = _list(sorted(draw.sample(range(gpus), count)))
        for started in (None, count):
            machine = Machine(driver_gpus=gpus, visible=visible, started_gpus=started)
            _check_case(answer, machine, _good(draw, count), "visible-partial", partial_unseen=True)


@diagnosis.requires("a variable that names a GPU that does not exist")
def _(answer, draw):
    for gpus in (2, draw.integer(3, 8)):
        for absent in (gpus, gpus + draw.integer(1, 3)):  # the numbers end at gpus - 1
            machine = Machine(driver_gpus=gpus, visible=_list([*range(gpus - 1), absent, gpus - 1]))
            _check_case(answer, machine, _good(draw, gpus - 1), "visible-wrong", reads_on=True)


@diagnosis.requires("a variable that was changed after CUDA had started")
def _(answer, draw):
    gpus = draw.integer(3, 8)
    everything = _list(range(gpus))
    for visible in (everything, None, "0"):  # more than at the start, and fewer
        started = draw.integer(1 if visible != "0" else 2, gpus - 1)
        machine = Machine(driver_gpus=gpus, visible=visible, started_gpus=started)
        setup = _good(draw, started)
        _check_case(answer, machine, setup, "visible-late", trusts_the_variable=True)


@diagnosis.requires("a loop that calls the bare model")
def _(answer, draw):
    gpus = draw.integer(2, 8)
    setup = _good(draw, gpus, wrappers=(), other_wrapper=True)
    _check_case(
        answer,
        Machine(driver_gpus=gpus),
        setup,
        "wrapped-late",
        unset_hides=lambda got: got.startswith("visible"),
        wrapper_unseen=True,
    )


@diagnosis.requires("a batch on the CPU")
def _(answer, draw):
    gpus = draw.integer(2, 8)
    setup = _good(draw, gpus, batch_device="cpu")
    machine = Machine(driver_gpus=gpus, started_gpus=draw.choice([None, gpus]))
    _check_case(
        answer,
        machine,
        setup,
        "inputs-on-cpu",
        unset_hides=lambda got: got.startswith("visible"),
        inputs_unseen=True,
    )


@diagnosis.requires("a batch with fewer chunks than GPUs")
def _(answer, draw):
    gpus = draw.integer(3, 8)
    small = _good(draw, gpus, batch_size=draw.integer(1, gpus - 1))
    _check_case(
        answer,
        Machine(driver_gpus=gpus),
        small,
        "batch-too-small",
        unset_hides=lambda got: got.startswith("visible"),
        batch_unseen=True,
    )
    for batch_size in (gpus + 1, 2 * (gpus - 1)):  # the latter leaves one GPU without a chunk
        uneven = _good(draw, gpus, batch_size=batch_size)
        _check_case(
            answer, Machine(driver_gpus=gpus), uneven, "batch-too-small", larger_is_enough="healthy"
        )


@diagnosis.requires("healthy set-ups, with and without the variable")
def _(answer, draw):
    few, many = draw.integer(2, 8), draw.integer(12, 16)
    for gpus, machine in (
        (few, Machine(driver_gpus=few)),
        (few, Machine(driver_gpus=few, visible=_shuffled(draw, few), started_gpus=few)),
        (many, Machine(driver_gpus=many, visible=_shuffled(draw, many), started_gpus=many)),
    ):
        for batch_size in (gpus, gpus * draw.integer(2, 9), gpus * gpus + gpus - 1):
            setup = _good(draw, gpus, batch_size=batch_size)
            _check_case(
                answer,
                machine,
                setup,
                "healthy",
                unset_hides=lambda got, m=machine: m.visible is None and got.startswith("visible"),
                characters_counted=lambda got, n=gpus: n > 10 and got.startswith("visible"),
                busy_after_all="batch-too-small",
                always_ill=True,
            )
