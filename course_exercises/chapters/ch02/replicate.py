"""Exercise 2.2, `replicate`: what it asks for, and how it is checked."""

import copy
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import nn

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.chapters.ch02.shared import (
    ASKED_FOR_GPUS,
    CPU,
    META,
    MODES,
    NO_GPU,
    Awkward,
    Counting,
    Moody,
    Plain,
    gradients_of,
    make,
    moody,
)
from course_utils.comm.fair import FairClock

replicate = Exercise(
    "2.2",
    "replicate",
    points=4,
    minutes=75,
    kind="stretch",
    parameters=("model", "devices"),
    hints=[
        (
            "Worker 0 uses the tensors of the model itself: what is the least that you have to do for it? "
            "The others need copies that remember where they came from."
        ),
        (
            "`tensor.to(device, copy=True)` copies and keeps the connection for the gradient. "
            "`named_parameters()` names a tied parameter once, and `functional_call` then ties it "
            "again. Do not forget `named_buffers()`."
        ),
        (
            "Replica 0 is the model. For each other device, copy all parameters and buffers into a "
            "dictionary, and return a function that runs `functional_call` with a module of its own "
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
        "asked-for-gpus": ASKED_FOR_GPUS,
        "not-replicas": "Return a list with one replica per device, functions or modules that can be called with a "
        "batch; a dictionary of tensors cannot.",
        "gradients-lost": "A helper's gradients never arrive in the model. A deep copy, a state "
        "dict, `nn.Parameter` and `.detach()` cut the connection; `.to(device, copy=True)` and "
        "`.clone()` keep it.",
        "gradients-not-summed": "The gradients of the replicas are to be summed in the model, for the loss divides "
        "by the number of rows already. Here some are averaged, or take the place of what other replicas have "
        "brought.",
        "one-backward-pass": "The replicas can be used for one backward pass only: how you copied them "
        "keeps values that the first pass frees. `.to(device, copy=True)` and `.clone()` keep none.",
        "gradients-cleared": "The gradients that the model had before are gone. Only its caller knows "
        "when they are not needed any more.",
        "gradients-again": "The gradients of an earlier backward pass come a second time. A copy that "
        "is a leaf keeps its own `.grad`: hand it on and clear it, or copy so that the history stays.",
        "not-moved": "Some of a helper's parameters or buffers, frozen ones perhaps, are not on its device. (`meta` "
        "is a second device that every machine has.)",
        "late-binding": "All replicas use the tensors of the last device: a function made in a loop "
        "looks its variables up when it is called. Bind them with `partial` or a default argument.",
        "no-copies": "A helper computes with the model's own tensors. It needs copies, also where "
        "its device is that of the model: `.to(device)` alone copies nothing there.",
        "head-office-copied": "Replica 0 must be the model itself, and you made a copy of it or of its buffers: only "
        "in the original do changes of buffers stay.",
        "copied-late": "The copies are made when a replica is called, not when you replicate.",
        "tied-once": "Of two tied layers only one uses your copy: either tie_weights is False, or "
        'your copy of the module is not tied any more. `.to("meta")` unties layers.',
        "buffers-shared": "A change that a helper makes to a buffer reached the model, or another helper. Every "
        "replica has copies of its own, also where the device is the same.",
        "shared-frame": "Two threads run `functional_call` on one module, and each overwrites the "
        "other's tensors. Give every replica a module of its own: `copy.deepcopy(model)`.",
        "one-at-a-time": "The replicas wait for each other, so two threads cannot run at once.",
        "frozen-thawed": "A frozen parameter, or its copy, asks for a gradient. A copy by "
        "`.to(device, copy=True)` stays as frozen as its original.",
    },
    at_home=True,
)


def _replicas(answer, model, devices):
    replicas = answer(model, devices)
    expect_type(replicas, (list, tuple), likely="not-replicas" if replicas is not None else None)
    for replica in replicas:
        expect_type(replica, Callable, likely="not-replicas")
    expect(len(replicas), len(devices), what="replicas", likely={"not-replicas": True})
    return list(replicas)


def _summed(model: nn.Module, batches, factors=None) -> dict[str, torch.Tensor]:
    """The gradients that the model gets from all batches, run one after the other."""
    twin = copy.deepcopy(model)
    for batch, factor in zip(batches, factors or [1.0] * len(batches)):
        (factor * twin(batch).pow(2).sum()).backward()
    return gradients_of(twin)


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
def every_replica_gives_the_outputs_of_the_model(answer, draw):
    model = make(Plain, draw)
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
        _check_modes(answer, draw, moody(draw, *modes))


def _check_modes(answer, draw, model: Moody) -> None:
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


@replicate.requires(
    "the gradients of all replicas are summed in the model",
    failures={"backward through the graph a second time": "one-backward-pass"},
)
def the_gradients_of_all_replicas_are_summed(answer, draw):
    model = make(Plain, draw)
    workers = draw.integer(3, 4)
    batches = [draw.tensor(rows, model.width) for rows in draw.sample(range(1, 6), workers)]
    expected = _summed(model, batches)
    only_first = _summed(model, batches[:1])
    replicas = _replicas(answer, model, [CPU] * workers)
    _run_backward(replicas, batches)
    alone = [_summed(model, [batch]) for batch in batches]
    averaged = {name: gradient / workers for name, gradient in expected.items()}
    helpers = {
        name: only_first[name] + (gradient - only_first[name]) / workers
        for name, gradient in expected.items()
    }
    expect(
        gradients_of(model),
        expected,
        what="the gradient",
        likely={
            "gradients-lost": lambda got: not got or same(got, only_first),
            "gradients-not-summed": lambda got: (
                same(got, averaged) or same(got, helpers) or _of_some(alone, got)
            ),
        },
    )
    before = {name: gradient.clone() for name, gradient in gradients_of(model).items()}
    _replicas(answer, model, [CPU] * workers)
    what, likely = "the gradient after another call", {"gradients-cleared": True}
    expect(gradients_of(model), before, what=what, likely=likely)
    model.zero_grad()
    _run_backward(replicas, batches)
    what, likely = "the gradient of a second backward pass", {"gradients-again": True}
    expect(gradients_of(model), expected, what=what, likely=likely)


def _of_some(alone, got) -> bool:
    """Whether each gradient is the sum of those that some of the replicas give alone."""
    some = [c for n in range(1, len(alone)) for c in itertools.combinations(alone, n)]
    return all(
        any(same(gradient, sum(each[name] for each in few)) for few in some)
        for name, gradient in got.items()
    )


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
def each_helper_computes_on_its_own_device(answer, draw):
    devices = [CPU, META, CPU, *draw.sample((CPU, META), draw.integer(0, 2))]
    for kind in (Plain, Counting):
        model = make(kind, draw)
        next(model.children()).requires_grad_(False)  # frozen parameters lie there too
        here = draw.tensor(3, model.width)
        replicas = _replicas(answer, model, devices)
        if any(replica is replicas[0] for replica in replicas[1:]):
            raise Wrong("same-model", expected="a replica for each device", got="one, repeated")
        if not _runs_on(replicas[0], here) and _runs_on(replicas[0], here.to(META)):
            raise Wrong("late-binding", expected="replica 0 on the CPU", got="replica 0 on meta")
        for i, device in enumerate(devices):
            if not _runs_on(replicas[i], here.to(device)):
                late = all(_runs_on(replica, here) for replica in replicas) and kind is Plain
                raise Wrong(
                    "late-binding" if late and _same_tensors(replicas, here) else "not-moved",
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
def replica_0_uses_the_model_own_tensors(answer, draw):
    model = make(Plain, draw)
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
def tied_parameters_stay_tied(answer, draw):
    model = make(Awkward, draw)
    batches = [
        draw.tensor(rows, model.width) for rows in draw.sample(range(1, 6), draw.integer(2, 4))
    ]
    expected = _summed(model, batches)
    replicas = _replicas(answer, model, [CPU] * len(batches))
    outputs = [replica(batch) for replica, batch in zip(replicas, batches)]
    sum(output.pow(2).sum() for output in outputs).backward()
    expect(
        gradients_of(model),
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

    model.requires_grad_(False)
    first, second = _replicas(answer, model, [CPU] * 2)
    if second(batches[0]).requires_grad or first(batches[0]).requires_grad:
        raise Wrong("frozen-thawed", expected="outputs of a frozen model", got="a graph")


def _first_users(output: torch.Tensor, parameter: nn.Parameter) -> int:
    """How many operations in the history of a tensor use a parameter directly."""
    return sum(
        any(getattr(edge, "variable", None) is parameter for edge, _ in node.next_functions)
        for node in _history(output)
    )


@replicate.requires("changes of buffers: replica 0's stay, the helpers' are lost")
def changes_of_buffers(answer, draw):
    model = make(Counting, draw)
    first = draw.tensor(draw.integer(2, 5), model.width).abs()
    second = draw.tensor(3, model.width) + 5
    untouched = copy.deepcopy(model)
    replicas = _replicas(answer, model, [CPU] * draw.integer(3, 4))
    replicas[-1](second)
    expect(
        model.rows.item(), 0.0, what="rows after the helper", likely={"buffers-shared": lambda g: g}
    )
    replicas[0](10 * first)
    expect(
        model.rows.item(),
        float(len(first)),
        what="rows after replica 0",
        likely={"head-office-copied": lambda g: not g},
    )
    with torch.no_grad():
        expected, late = untouched(first), copy.deepcopy(model)(first)
    what, likely = "another helper after both", {"copied-late": late, "buffers-shared": True}
    expect(replicas[1](first).detach(), expected, what=what, likely=likely)


@replicate.requires("two threads run two replicas at the same time", needs_earlier=True)
def two_threads_run_two_replicas_at_the_same(answer, draw):
    model = make(Plain, draw)
    batch = draw.tensor(draw.integer(2, 5), model.width)
    replicas = _replicas(answer, model, [CPU, CPU, META])
    with torch.no_grad():
        before = model(batch)
        for parameter in model.parameters():
            parameter.mul_(2.0)
        after = model(batch)
    first, helper, elsewhere = _at_once(replicas, [batch, batch, batch.to(META)])
    likely = {"shared-frame": True}
    expect([first, helper], [after, before], each="replica", likely=likely)
    expect(str(elsewhere.device), str(META), what="the device of replica 2", likely=likely)


def _at_once(replicas, batches) -> list:
    """The outputs of the replicas, each called in a thread of its own: the forward passes of Plain
    begin together and end together, so that all compute while all frames are in use. They get three
    seconds to meet, without those in which they have no processor."""
    barrier = threading.Barrier(len(replicas))

    def call(replica, batch):
        try:
            return replica(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is named below
            barrier.abort()  # the others need not wait
            return error

    Plain.gate = barrier.wait
    try:
        with ThreadPoolExecutor(len(replicas)) as threads:
            outputs = [threads.submit(call, *each) for each in zip(replicas, batches)]
            clock, left = FairClock(), 3.0
            while wait(outputs, timeout=0.1).not_done and left > 0:
                left -= clock.passed()
            barrier.abort()  # who has not come by now never will
    finally:
        Plain.gate = None
    outputs = [output.result() for output in outputs]
    errors = [output for output in outputs if isinstance(output, Exception)]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise Wrong("shared-frame", expected="outputs of all replicas", got=error)
    if errors:
        expected, got = "all replicas at work", "one waits for another"
        raise Wrong("one-at-a-time", expected=expected, got=got)
    return outputs
