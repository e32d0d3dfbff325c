"""Exercise 3.4, `OverlappedDDP`: what it asks for, and how it is checked."""

import copy
import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from course_exercises.authoring import Exercise, Wrong, expect, run, same, signs
from course_exercises.authoring.forbidden import called
from course_exercises.authoring.ranks import (
    Sent,
    come_late,
    following,
    must_have_sent,
    must_have_waited,
)
from course_exercises.authoring.vocabulary import times, total
from course_exercises.chapters.ch03.shared import (
    Frozen,
    Gradients,
    Plan,
    Tied,
    Unused,
    drawn_plan,
    gradients,
    plain,
    state,
)
from course_utils.comm.fair import FairClock
from course_utils.hardware import device


class _Sometimes(nn.Module):
    """A layer that rank 0 does not use and the others do, one that only the last rank uses, and
    between them one that nobody uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.sometimes = nn.Linear(width, width)
        self.never = nn.Linear(width, width)
        self.rarely = nn.Linear(width, width)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        if dist.get_rank() > 0:
            x = self.sometimes(x)
        if dist.get_rank() == dist.get_world_size() - 1:
            x = self.rarely(x)
        return self.last(x)


class _Tower(nn.Module):
    """Equal layers; tells when backward has all gradients but the first layer's."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.before_first_gradient = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if i == 0:
                x.register_hook(lambda _: self.before_first_gradient())
        return x


overlapping = Exercise(
    "3.4",
    "OverlappedDDP",
    points=5,
    minutes=240,
    kind="stretch",
    hints=[
        (
            "Begin without overlap: broadcast in `__init__`, and average everything in "
            "`finish_gradient_synchronization`. When that is right, move the all-reduces into hooks."
        ),
        (
            "Fill the buckets with the trainable parameters in reverse order. Register one hook per "
            "parameter; it counts down how many gradients its bucket still misses. At zero, the "
            "gradients go into one flat tensor and its all-reduce starts with `async_op=True`; keep the "
            "work handle, and call its `wait()` in `finish_gradient_synchronization` only."
        ),
        (
            "A bucket may start only after all the buckets before it, so that the ranks agree on the "
            "order; `finish_gradient_synchronization` starts those that never filled, with zeros for "
            "what is missing, waits for all, writes the means back and resets the counters. To know "
            "whether any rank used a parameter, let one number per parameter travel in the bucket. "
            "`no_sync` sets a flag at which the hooks return at once."
        ),
    ],
    misconceptions={
        "no-module": "`model.module` is the module that was wrapped: call `super().__init__()`, then "
        "keep the module under that name.",
        "start": "The ranks do not all start from rank 0's values: averaged gradients keep equal models equal, but "
        "never make them equal. Broadcast in `__init__` every parameter, a frozen one too, and every buffer.",
        "buffers": "The parameters agree and the buffers do not. Broadcast all of `module.buffers()` too; a state dict "
        "leaves out some of them.",
        "hook-too-early": "A hook found no gradient in `.grad`. `register_hook` runs before the "
        "gradient gets there; `register_post_accumulate_grad_hook` runs after.",
        "no-handle": "An all_reduce without `async_op=True` waits at once and returns None: there is "
        "nothing to wait for later, and no overlap.",
        "first-step-only": "The first step is right and a later one is not. Reset the counters and "
        "the work handles in `finish_gradient_synchronization`, and remember that "
        "`zero_grad()` throws `.grad` away: the next backward puts a new tensor there.",
        "starts-at-the-end": "No all-reduce had started when backward reached the first layer: "
        "there is no overlap. Start a bucket's all-reduce in the hook that completes it, and fill the "
        "buckets in the order in which backward comes by: the last layer first.",
        "waits-in-backward": "A rank's backward stops until another rank gets there. Start the "
        "all-reduce with `async_op=True`, and wait in `finish_gradient_synchronization` only.",
        "buckets": "Gradients are to travel in buckets of up to `bucket_bytes` bytes. An all-reduce for every "
        "parameter costs its fixed time as often; one for all cannot start before backward has ended.",
        "no-context-manager": "`with model.no_sync():` needs a context manager: a method that yields "
        "once, with `@contextmanager` above it.",
        "sends-in-no-sync": "Something is sent inside `no_sync()`. There the hooks must return "
        "at once, and `.grad` just adds up.",
        "silent-for-good": "The hooks stay silent after `no_sync()`, or after an exception in its block, so all "
        "communication waits for `finish_gradient_synchronization`. Switch them on in a `finally:` after "
        "`try: yield`.",
        "nested": "Where one `no_sync()` stands inside another, the end of the inner one switches "
        "the hooks on in the middle of the outer one. Keep what was before, and put that back.",
        "error-swallowed": "An exception inside `no_sync()` does not come out again, so the training goes "
        "on as if nothing had happened. Clean up in `finally:`, and catch nothing.",
        "accumulated": "Only the last micro-batch's gradient was averaged: what was added up inside `no_sync()` is "
        "gone, or stays this rank's own. Average `parameter.grad`, in which backward has added everything up.",
        "frozen-hook": "A frozen parameter needs no gradient, and PyTorch takes no hook on it. Leave "
        "it out of the buckets, but broadcast it.",
        "bucket-never-full": "A parameter that the loss did not use has no gradient: its `.grad` is None, its hook "
        "is never called, and its bucket never fills. Start what has not started, with zeros for what is missing, "
        "in `finish_gradient_synchronization`.",
        "order-differs": "The ranks' buckets do not match. A rank that does not use a layer fills its buckets in "
        "another order, or one not at all; then different buckets are added up, or the ranks wait for each other. "
        "Start them in one fixed order on every rank, and those that did not fill in "
        "`finish_gradient_synchronization`.",
        "used-elsewhere": "A parameter that this rank did not use, and another did, has no gradient "
        "here, so the ranks' parameters drift apart. Its gradient is the mean with a zero for this "
        "rank.",
        "users-only": "You divide by the number of ranks that used the parameter. A rank that did "
        "not use it counts, with a zero: divide by the world size.",
    },
    things="gradients",
    failures={
        "has no attribute 'wait'": "no-handle",
        "'NoneType'": "hook-too-early",  # where every parameter has a gradient
        "timeout": "not-every-rank",
        "mismatch": "not-every-rank",
    },
)


def _initial(rank, answer, plan: Plan, frozen=False) -> tuple[dict, dict, bool]:
    """The state of a module with buffers, before and after construction, and whether PyTorch's own
    was constructed."""
    torch.manual_seed(plan.seed + rank)
    layers = nn.Linear(5, plan.width), nn.BatchNorm1d(plan.width), nn.Linear(plan.width, 3)
    module = nn.Sequential(*layers).to(device())
    module[0].requires_grad_(not frozen)
    module[1](plan.batch())  # moves BatchNorm's buffers
    module[2].register_buffer("unsaved", torch.randn(3, device=device()), persistent=False)
    before = _whole_state(module)
    with called(DistributedDataParallel.__init__) as forbidden:
        model = answer(module)
    return before, {} if forbidden else _whole_state(model.module), bool(forbidden)


def _whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and all buffers, also those that `state_dict` leaves out."""
    return state(module) | {name: tensor.clone() for name, tensor in module.named_buffers()}


def _must_be_own(forbidden: bool) -> None:
    if forbidden:
        raise Wrong("torchs-own", expected="your own", got="DistributedDataParallel")


def _check_start(answer, draw, frozen=False) -> None:
    ranks = draw.integer(2, 3)
    reports = run(_initial, ranks, answer, drawn_plan(draw), frozen)
    before, got, forbidden = zip(*reports, strict=True)
    _must_be_own(any(forbidden))
    likely = {"buffers": partial(_parameters_agree, wanted=before[0]), "start": True}
    expect(list(got), [before[0]] * ranks, each="rank", likely=likely)


def _parameters_agree(got: list[dict], wanted: dict) -> bool:
    """Whether the parameters are right: of these modules all that is called weight or bias."""
    parameters = [name for name in wanted if name.endswith(("weight", "bias"))]
    return all(same(each[name], wanted[name]) for each in got for name in parameters)


@overlapping.requires(
    "every rank starts with rank 0's parameters and buffers",
    failures={"AttributeError": "no-module"},
)
def every_rank_starts_with_rank_0_parameters(answer, draw):
    _check_start(answer, draw)


@dataclass(frozen=True)
class _Steps:
    """For each step of training: the local gradients of each micro-batch, and what came."""

    local: list[list[Gradients]]
    got: list[Gradients]
    forbidden: bool  # was DistributedDataParallel constructed meanwhile?
    sent: Sent


def _steps(rank, answer, make, plan: Plan, bucket_bytes, micro_batches, keep_zeros) -> _Steps:
    """Three steps with a twin beside the model; all but the last micro-batch under no_sync."""
    module = plan.build(make)
    twin = copy.deepcopy(module)
    local, got = [], []
    with called(DistributedDataParallel.__init__) as forbidden, following() as sent:
        model = answer(module, bucket_bytes=bucket_bytes)
        torch.manual_seed(plan.seed + 1 + rank)
        for _ in range(3):
            batches = [plan.batch() for _ in range(micro_batches)]
            for batch in batches[:-1]:
                with model.no_sync():
                    model(batch).square().sum().backward()
            loss = model(batches[-1]).square().sum()
            come_late(rank)
            loss.backward()
            model.finish_gradient_synchronization()
            got.append(gradients(module))
            local.append([_gradient_of(twin, batch) for batch in batches])
            module.zero_grad(set_to_none=not keep_zeros)
    return _Steps(local, got, bool(forbidden), sent)


def _gradient_of(twin: nn.Module, batch: Tensor) -> Gradients:
    twin.zero_grad()
    twin(batch).square().sum().backward()
    return gradients(twin)


def _check_steps(
    answer,
    draw,
    make,
    ranks,
    bucket_bytes,
    likely=None,
    otherwise=None,
    micro_batches=1,
    keep_zeros=False,
) -> None:
    """Compares the gradients after each step with the mean over the ranks of what each added up.

    `likely` maps a mistake to a function of (what came, the ranks' added up gradients); `otherwise` is the
    mistake to name where none fits.
    """
    how = (bucket_bytes, micro_batches, keep_zeros)
    reports = run(_steps, ranks, answer, make, drawn_plan(draw), *how)
    _must_be_own(any(report.forbidden for report in reports))
    must_have_waited([report.sent.unwaited for report in reports])
    for step in range(3):
        local = [total(report.local[step]) for report in reports]
        last = [report.local[step][-1] for report in reports]
        got = [report.got[step] for report in reports]
        expected = [_mean(local)] * ranks
        own_and_last = [
            total([own, times(end, -1), _mean(last)]) for own, end in zip(local, last, strict=True)
        ]
        mistakes = {
            **{slug: mistake(got, local) for slug, mistake in (likely or {}).items()},
            "first-step-only": step > 0,
            "accumulated": micro_batches > 1
            and (same(got, [_mean(last)] * ranks) or same(got, own_and_last)),
            **signs(local, expected),
            **({otherwise: True} if otherwise else {}),
        }
        expect(got, expected, each="rank", what=f"step {step + 1}", likely=mistakes)
    must_have_sent([report.sent for report in reports])


def _mean(parts: list[Gradients]) -> Gradients:
    return times(total(parts), 1 / len(parts))


@overlapping.requires("after each of three steps every rank has the mean gradients")
def after_each_of_three_steps_every_rank_has(answer, draw):
    _check_steps(answer, draw, plain, 2, 25 * 2**20)


@overlapping.requires("three ranks do, with small buckets, also where zero_grad leaves zeros")
def three_ranks_do(answer, draw):
    _check_steps(answer, draw, plain, 3, 64)
    _check_steps(answer, draw, plain, 1, 64, keep_zeros=True)


@dataclass(frozen=True)
class _Backward:
    """What one rank saw of a backward pass through the tower."""

    started_early: int  # all-reduces that had started when backward reached the first layer
    sizes: list[int]  # bytes of each all-reduce that carries gradients
    partner_got_through: bool  # rank 1: did rank 0 reach its first layer alone?
    error_came: bool  # did the exception that ended a block come out of it?


class _Interrupted(Exception):
    """What ends a block before its end."""


def _tower_backward(
    rank,
    answer,
    plan: Plan,
    layers: int,
    bucket_layers: float,
    mark: Path | None = None,
    after_no_sync: bool = False,
    interrupted: bool = False,
) -> _Backward:
    """One step after a first one, through a tower, with room for `bucket_layers` in a bucket. With
    `mark`, a file, rank 1 begins backward only when rank 0 has come through its own as far as the
    first layer, which makes the file; or after a while. The step may follow a backward pass under
    no_sync, one that an exception may have ended."""
    module = plan.build(partial(_Tower, layers=layers))
    model = answer(module, bucket_bytes=int(bucket_layers * _layer_bytes(plan)))
    inputs = plan.batch()
    model(inputs).sum().backward()
    model.finish_gradient_synchronization()
    module.zero_grad()
    error_came = False
    if after_no_sync:
        try:
            with model.no_sync():
                model(inputs).sum().backward()
                if interrupted:
                    raise _Interrupted
        except _Interrupted:
            error_came = True
    waits, signals = mark is not None and rank == 1, mark is not None and rank == 0
    with following() as sent:
        early = []

        def first_layer() -> None:
            early.append(len(sent.calls))
            if signals:
                mark.touch()

        loss = model(inputs).sum()
        module.before_first_gradient = first_layer
        came = _appears(mark) if waits else True
        loss.backward()
        model.finish_gradient_synchronization()
    sizes = [call.bytes for call in sent.calls if call.bytes >= _layer_bytes(plan) // 2]
    return _Backward(early[0], sizes, came, error_came)


def _layer_bytes(plan: Plan) -> int:
    return 4 * plan.width**2


def _tower(draw) -> tuple[Plan, int]:
    """The plan of a tower, and its number of layers."""
    return Plan(draw.seed(), draw.integer(12, 20), draw.integer(3, 6)), draw.integer(6, 9)


def _appears(path: Path, seconds: float = 5.0) -> bool:
    """Waits for a file of another rank; the seconds in which a rank gets no processor do not count."""
    clock = FairClock(os.getppid())  # of the server, whose children all ranks are
    while not path.exists() and seconds > 0:
        time.sleep(0.005)
        seconds -= clock.passed()
    return path.exists()


@overlapping.requires("all-reduces start while backward still runs")
def all_reduces_start_while_backward_still_runs(answer, draw):
    reports = run(_tower_backward, draw.integer(2, 3), answer, *_tower(draw), 2)
    if not all(report.started_early for report in reports):
        raise Wrong(
            "buckets" if len(reports[0].sizes) == 1 else "starts-at-the-end",
            expected="at least one all-reduce before the first layer's gradient",
            got="none",
        )


@overlapping.requires(
    "backward does not wait for the other ranks", needs_earlier=True, at_home=True
)
def backward_does_not_wait_for_the_other_ranks(answer, draw):
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "rank_0_is_at_its_first_layer"
        reports = run(_tower_backward, 2, answer, *_tower(draw), 2, mark)
    if not reports[1].partner_got_through:
        raise Wrong(
            "waits-in-backward",
            expected="rank 0 gets to its first layer while rank 1 has not begun backward",
            got="rank 0 waits",
        )


@overlapping.requires("gradients travel in buckets of bucket_bytes")
def gradients_travel_in_buckets_of_bucket_bytes(answer, draw):
    plan, layers = _tower(draw)
    whole = _layer_bytes(plan)
    for limit in (2, 3, 2.75):
        sizes, bucket = run(_tower_backward, 2, answer, plan, layers, limit)[0].sizes, int(limit)
        too_large = 2 * max(sizes, default=0) > (2 * bucket + 1) * whole
        if too_large or len(sizes) == 1 or len(sizes) >= layers:
            _wrong_buckets(f"a bucket for every {bucket} of {layers} equal layers", sizes)
    sizes = run(_tower_backward, 2, answer, plan, layers, 100)[0].sizes
    if len(sizes) > 2:
        _wrong_buckets("one bucket where everything fits in", sizes)


def _wrong_buckets(expected: str, sizes: list[int]) -> None:
    raise Wrong("buckets", expected=expected, got=f"all-reduces of {sizes} bytes")


def _calls_in_no_sync(rank, answer, plan: Plan) -> int:
    model = answer(plan.build(plain), bucket_bytes=64)
    inputs = plan.batch()
    with following() as sent:
        for _ in range(2):
            with model.no_sync():
                model(inputs).sum().backward()
    return len(sent.calls)


@overlapping.requires(
    "no_sync() sends nothing",
    failures={"TypeError": "no-context-manager", "AttributeError": "no-context-manager"},
)
def no_sync_sends_nothing(answer, draw):
    ranks = draw.integer(2, 3)
    calls = run(_calls_in_no_sync, ranks, answer, drawn_plan(draw))
    expect(
        calls, [0] * ranks, each="rank", what="number of calls", likely={"sends-in-no-sync": True}
    )


@overlapping.requires("the backward after no_sync() averages the whole sum")
def the_backward_after_no_sync_averages_the_whole(answer, draw):
    ranks, micro_batches = draw.integer(2, 3), draw.integer(2, 4)
    _check_steps(answer, draw, plain, ranks, 128, micro_batches=micro_batches)
    tower = _tower(draw)
    # who never starts early has been told so by another line
    before = run(_tower_backward, 2, answer, *tower, 2)
    starts_early = all(report.started_early for report in before)
    for interrupted in (False, True):
        reports = run(_tower_backward, 2, answer, *tower, 2, None, True, interrupted)
        if starts_early and not all(report.started_early for report in reports):
            expected = "all-reduces that start while backward runs, as before no_sync()"
            got = f"none, after {'an exception' if interrupted else 'the end'} of its block"
            raise Wrong("silent-for-good", expected=expected, got=got)
        if interrupted and not all(report.error_came for report in reports):
            raise Wrong("error-swallowed", expected="the exception of the block", got="none")


def _calls_after_an_inner_no_sync(rank, answer, plan: Plan) -> int:
    model = answer(plan.build(plain), bucket_bytes=64)
    inputs = plan.batch()
    with following() as sent, model.no_sync():
        for _ in range(2):  # a helper that does not know that it is called inside one
            with model.no_sync():
                model(inputs).sum().backward()
            model(inputs).sum().backward()
    return len(sent.calls)


@overlapping.requires(
    "no_sync() within no_sync()", failures={"exception": "nested"}, needs_earlier=True
)
def no_sync_within_no_sync(answer, draw):
    calls = run(_calls_after_an_inner_no_sync, 2, answer, drawn_plan(draw))
    expect(calls, [0, 0], each="rank", what="number of calls", likely={"nested": True})


@overlapping.requires(
    "a frozen parameter is broadcast and then left alone",
    failures=dict.fromkeys(("'NoneType'", "exception"), "frozen-hook"),
)
def a_frozen_parameter_is_broadcast_and_then_left(answer, draw):
    _check_start(answer, draw, frozen=True)
    _check_steps(answer, draw, Frozen, draw.integer(2, 3), 128)


@overlapping.requires("a tied parameter is averaged once")
def a_tied_parameter_is_averaged_once(answer, draw):
    for bucket_bytes in (64, 2**20):
        ranks = draw.integer(2, 3)
        _check_steps(answer, draw, Tied, ranks, bucket_bytes, otherwise="tied-twice")


@overlapping.requires(
    "an unused parameter keeps no gradient, and the others are averaged",
    failures={
        "'NoneType'": "bucket-never-full",
        "exception": "bucket-never-full",
        "timeout": "bucket-never-full",
    },
)
def an_unused_parameter_keeps_no_gradient(answer, draw):
    def still_local(got, local):
        return any(same(g["last.weight"], own["last.weight"]) for g, own in zip(got, local))

    likely = {"bucket-never-full": still_local}
    _check_steps(answer, draw, Unused, draw.integer(2, 3), 2**20, likely)


@overlapping.requires(
    "a parameter that only some ranks used is averaged with zeros for the others",
    failures=dict.fromkeys(
        ("'NoneType'", "exception", "timeout", "mismatch", "signal"), "order-differs"
    ),
    needs_earlier=True,
)
def a_parameter_that_only_some_ranks_used_is(answer, draw):
    def missing(got, local):
        """Whether all is right but for a gradient that only this rank lacks."""
        means = {name: mean for name, mean in _mean(local).items() if mean is not None}
        pairs = [(own[name], mean) for own in got for name, mean in means.items()]
        right = all(came is None or same(came, mean) for came, mean in pairs)
        return right and any(came is None for came, _ in pairs)

    def divided_by_users(got, local):
        used = [g["sometimes.weight"] for g in local if g["sometimes.weight"] is not None]
        return same(got[-1]["sometimes.weight"], sum(used) / len(used))

    likely = {"used-elsewhere": missing, "users-only": divided_by_users}
    for bucket_bytes in (64, 2**20):
        ranks = draw.integer(3, 4)
        _check_steps(answer, draw, _Sometimes, ranks, bucket_bytes, likely, "order-differs")
