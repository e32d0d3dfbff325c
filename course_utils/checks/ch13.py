"""The checks of chapter 13: a training within a budget, a loop that loses nothing, and a plan.

`Training` is judged by what it does on real ranks: parameters, momentum and loss of one process, the
peak of its memory, its bytes. `train` gets a training that notes what it is handed, dies at a step
or in the middle of a save, and is started again. `plan` is judged by its regret.
"""

import copy
import json
import math
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from course_utils import estimate
from course_utils.checks import Exercise, Wrong, expect, expect_type, run, same
from course_utils.estimate import Hardware, Layout, Model
from course_utils.hardware import device
from course_utils.launch import RankFailure
from course_utils.meters import Sampling
from course_utils.models import ResidualNet
from course_utils.trace import Call, Trace

# ---- 13.1 ----------------------------------------------------------------------------------------

training = Exercise(
    "13.1",
    "Training",
    points=6,
    minutes=60,
    kind="core",
    parameters=("model",),
    hints=[
        (
            "Choose the split first: chapter 8's `fully_shard`, chapter 6's columns and rows, or shards by hand. Then ask of "
            "each: whose rows does a rank compute, and who adds up what?"
        ),
        (
            "Make it equal to one process before you make it small. A share's loss is the sum over its rows, divided by "
            "the rows of the whole batch. Whatever averages over ranks divides once more."
        ),
        (
            "With FSDP: shard each block, then the model, so that one block is whole at a time. Multiply the loss with the "
            "ranks, since FSDP averages. The state's tensors are DTensors: `full_tensor` on all ranks, and "
            "`distribute_tensor` on the way back; momentum is in `optimizer.state`."
        ),
    ],
    misconceptions={
        "sum-not-mean": "Your gradients are as many times too large as there are ranks: the sum over ranks of what "
        "each has divided by its own share's rows.",
        "divided-twice": "Your gradients are divided by the ranks once too often: FSDP and DDP average already.",
        "own-share-only": "The ranks end with different parameters: each has learned from its own share only.",
        "mean-of-means": "You average the means of the shares. Where a batch does not divide, a row of a small share counts more: "
        "divide by the rows of the global batch.",
        "rows-left-out": "Rows of the batch are left out where they do not divide by the ranks.",
        "no-momentum": "That is SGD without momentum.",
        "forgets-gradients": "The gradients of earlier steps are still there: set them to zero, or to None, after each step.",
        "loss-of-share": "The loss is that of a rank's own share. Asked is that of the global batch, on every rank.",
        "loss-is-a-sum": "The loss is a sum over rows or ranks. Asked is the mean over all rows of the global batch.",
        "other-keys": 'The state has two dicts, "model" and "momentum", each with the names of the model\'s parameters.',
        "own-part": "The state has a rank's own part of a tensor. Whole ones are asked, that any number of ranks can load.",
        "one-rank-has-it": "The state is on one rank only. Every rank returns it.",
        "a-dtensor": "The state has DTensors, which are of this group of ranks: `full_tensor` makes plain ones.",
        "not-a-copy": "A state that was handed out changes with the next step: its tensors are those of the model. Copy "
        "them.",
        "momentum-missing": "The momentum in the state is all zeros. `optimizer.state` has it, as `momentum_buffer`.",
        "momentum-not-loaded": "After `load_state_dict` the momentum begins anew: the run goes on, and is another one.",
        "model-not-loaded": "After `load_state_dict` the parameters are still those of the new model.",
        "not-every-rank": "Not every rank makes the same calls, and the others wait. One with no rows, where a batch is smaller than the "
        "number of ranks, takes part in every collective too.",
        "copies": "Each rank keeps parameters and momentum whole: plain data parallelism, which the budget rules out.",
        "parameters-whole": "Between two steps a rank still holds all parameters whole, its own or those of the model that was handed "
        "over. Shards of the momentum alone (ZeRO 1) are not enough.",
        "all-at-once": "Between two steps a rank holds its part only, but in a step too much is whole at the same time. Make one block "
        "whole at a time: `fully_shard` for each block, and not for the model alone.",
        "too-many-bytes": "The result is right and small enough, and a rank sends more than the budget. Gather each block's "
        "parameters once forward and once backward, and reduce-scatter gradients instead of gathering them.",
    },
    failures={"timeout": "not-every-rank", "mismatch": "not-every-rank"},
)

RATE, MOMENTUM = 0.1, 0.9
MEMORY, BYTES = 2.0, 3.2  # the budget: times the parameters' bytes, and times (n - 1) / n of them


@dataclass(frozen=True)
class _Task:
    """A model by its sizes and seed, and the batches of its steps by their numbers of rows."""

    width: int
    blocks: int
    seed: int
    batches: tuple[int, ...]

    def model(self) -> ResidualNet:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return ResidualNet(self.width, self.blocks)

    def data(self) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        return [
            (torch.randn(n, 49, generator=generator), torch.randint(10, (n,), generator=generator))
            for n in self.batches
        ]


@dataclass
class _Trained:
    losses: list[float] = field(default_factory=list)
    state: object = None
    first_changed: bool = False  # a state that was handed out, with later steps


def _trained(rank, answer, task: _Task, loaded: dict | None = None) -> _Trained:
    """Takes the steps of `task`, from `loaded` where that is given."""
    torch.set_num_threads(1)
    made, report = answer(task.model().to(device())), _Trained()
    if loaded is not None:
        made.load_state_dict(copy.deepcopy(loaded))
    first = kept = None
    for images, labels in task.data():
        report.losses.append(made.step(images.to(device()), labels.to(device())))
        if first is None:
            first = made.state_dict()
            kept = copy.deepcopy(_plain(first))
    report.first_changed = not same(_plain(first), kept)
    report.state = _plain(made.state_dict())
    return report


def _plain(state):
    """The state, with a word in the place of what no process can hand to another."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, Tensor) and type(state) not in (Tensor, torch.nn.Parameter):
        return type(state).__name__
    return state.detach().cpu() if isinstance(state, Tensor) else state


Weigh = Callable[[int, int], Tensor]  # rows and the number of the step: how much each row counts


def _evenly(rows: int, step: int) -> Tensor:
    return torch.full((rows,), 1 / rows)


def _alone(
    task: _Task,
    weigh: Weigh = _evenly,
    momentum: float = MOMENTUM,
    loaded: dict | None = None,
    forgets: bool = False,
) -> tuple[list[float], dict]:
    """What one process gives: the losses and the state."""
    model = task.model()
    parameters = dict(model.named_parameters())
    velocity = {name: torch.zeros_like(p) for name, p in parameters.items()}
    if loaded is not None:
        for name, parameter in parameters.items():
            parameter.data.copy_(loaded["model"][name])
            velocity[name].copy_(loaded["momentum"][name])
    losses, before = [], [0.0] * len(parameters)
    for step, (images, labels) in enumerate(task.data()):
        each = cross_entropy(model(images), labels, reduction="none")
        losses.append(each.mean().item())
        gradients = torch.autograd.grad((each * weigh(len(labels), step)).sum(), model.parameters())
        if forgets:
            gradients = before = [old + new for old, new in zip(before, gradients)]
        with torch.no_grad():
            for (name, parameter), gradient in zip(parameters.items(), gradients):
                velocity[name].mul_(momentum).add_(gradient)
                parameter.sub_(RATE * velocity[name])
    state = {"model": {n: p.detach() for n, p in parameters.items()}, "momentum": velocity}
    return losses, state


def _shares(rows: int, ranks: int) -> list[list[Tensor]]:
    """Ways in which people share out rows: one after the other, in turn, and in equal pieces."""
    places = torch.arange(rows)
    return [
        list(places.tensor_split(ranks)),
        [places[rank::ranks] for rank in range(ranks)],
        list(places.chunk(ranks)),
    ]


def _of_means(way: int, ranks: int) -> Weigh:
    def weigh(rows: int, step: int) -> Tensor:
        weights = torch.zeros(rows)
        for share in _shares(rows, ranks)[way]:
            weights[share] = 1 / max(1, len(share)) / ranks
        return weights

    return weigh


def _without_the_rest(ranks: int, divided_by_all: bool) -> Weigh:
    def weigh(rows: int, step: int) -> Tensor:
        used = rows // ranks * ranks
        return (torch.arange(rows) < used) / (rows if divided_by_all else max(1, used))

    return weigh


def _scaled(factor: float) -> Weigh:
    return lambda rows, step: _evenly(rows, step) * factor


def _slips(task: _Task, ranks: int, loaded: dict | None = None) -> dict:
    """The states that mistakes end with."""
    slips: dict[str, object] = {
        "sum-not-mean": ranks > 1 and _alone(task, _scaled(ranks), loaded=loaded)[1],
        "divided-twice": ranks > 1 and _alone(task, _scaled(1 / ranks), loaded=loaded)[1],
        "no-momentum": lambda got: same(
            got["model"], _alone(task, momentum=0.0, loaded=loaded)[1]["model"]
        ),
        "forgets-gradients": _alone(task, loaded=loaded, forgets=True)[1],
    }
    means = [_alone(task, _of_means(way, ranks), loaded=loaded)[1] for way in range(3)]
    rests = [_alone(task, _without_the_rest(ranks, all), loaded=loaded)[1] for all in (True, False)]
    slips["mean-of-means"] = lambda got: any(same(got, s) for s in means)
    slips["rows-left-out"] = lambda got: any(same(got, s) for s in rests)
    return slips


def _judge_form(reports: list[_Trained], right: dict) -> None:
    """Whether the states are whole, plain and everywhere."""
    there = [report.state for report in reports if isinstance(report.state, dict) and report.state]
    if there and len(there) < len(reports):
        raise Wrong("one-rank-has-it", expected="a state on every rank", got=f"on {len(there)}")
    for report in reports:
        expect_type(report.state, dict)
        if {k: set(v) for k, v in report.state.items() if isinstance(v, dict)} != {
            kind: set(tensors) for kind, tensors in right.items()
        }:
            raise Wrong("other-keys", expected='"model" and "momentum"', got=report.state)
        for kind, tensors in right.items():
            for name, tensor in tensors.items():
                got, what = report.state[kind][name], f"{name} of {kind}"
                if isinstance(got, str):
                    raise Wrong("a-dtensor", expected=f"a plain tensor   ({what})", got="a DTensor")
                expect_type(got, Tensor)
                if got.shape != tensor.shape:
                    fewer = got.numel() < tensor.numel()
                    shape = f"shape {tuple(tensor.shape)}   ({what})"
                    raise Wrong(
                        "own-part" if fewer else None, expected=shape, got=f"{tuple(got.shape)}"
                    )


def _judge_states(reports: list[_Trained], task: _Task, loaded: dict | None = None) -> None:
    ranks = len(reports)
    _, right = _alone(task, loaded=loaded)
    _judge_form(reports, right)
    if any(not same(report.state, reports[0].state) for report in reports):
        raise Wrong("own-share-only", expected="the same parameters on all ranks", got="others")
    slips = _slips(task, ranks, loaded)
    zeros = {name: torch.zeros_like(p) for name, p in right["momentum"].items()}
    if loaded is not None:
        slips["momentum-not-loaded"] = _alone(task, loaded=loaded | {"momentum": zeros})[1]
        slips["model-not-loaded"] = lambda got: any(
            same(got["model"], _alone(task, loaded=start)[1]["model"])
            for start in (None, {**loaded, "model": _first(task)})
        )
    slips["momentum-missing"] = lambda got: (
        same(got["model"], right["model"]) and same(got["momentum"], zeros)
    )
    expect(reports[0].state, right, likely=slips)


def _first(task: _Task) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in task.model().named_parameters()}


def _judge_losses(reports: list[_Trained], task: _Task) -> None:
    ranks, (right, _) = len(reports), _alone(task)
    sums = [rows * loss for rows, loss in zip(task.batches, right)]
    differ = any(not same(report.losses, reports[0].losses) for report in reports)
    likely = {
        "loss-is-a-sum": lambda got: any(
            same(got, other) for other in (sums, [ranks * loss for loss in right])
        ),
        "loss-of-share": differ,
    }
    for report in reports:
        expect(report.losses, right, what="the losses", likely=likely)


def _task(draw, batches: tuple[int, ...], blocks: int | None = None) -> _Task:
    return _Task(12 * draw.integer(1, 3), blocks or draw.integer(1, 3), draw.seed(), batches)


@training.requires("batches that divide: parameters, momentum and loss of one process")
def _(answer, draw):
    ranks = draw.choice([2, 3])
    task = _task(draw, (ranks * draw.integer(2, 4), ranks * draw.integer(5, 7)))
    _judge(run(_trained, ranks, answer, task), task)


@training.requires("batches that do not divide, on four ranks")
def _(answer, draw):
    ends = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    task = _task(draw, (4 * draw.integer(2, 4) + ends[0], 4 * draw.integer(5, 6) + ends[1]))
    _judge(run(_trained, 4, answer, task), task)


@training.requires("one rank alone, and fewer rows than ranks")
def _(answer, draw):
    task = _task(draw, (draw.integer(3, 9), 2))
    for ranks in (1, 3):
        _judge(run(_trained, ranks, answer, task), task)


def _judge(reports: list[_Trained], task: _Task) -> None:
    _judge_states(reports, task)
    _judge_losses(reports, task)


@training.requires("a state that is a copy, and goes on with any number of ranks")
def _(answer, draw):
    ranks, before = draw.choice([2, 3]), _task(draw, (5, 7, 9))
    _, state = _alone(before)
    task = replace(before, batches=(draw.integer(6, 9), draw.integer(4, 5)), seed=draw.seed())
    for count in (ranks, 1):  # one alone needs to gather nothing, and may hand out what it has
        reports = run(_trained, count, answer, task, state)
        _judge_states(reports, task, state)
        if any(report.first_changed for report in reports):
            got = "one that follows the model"
            raise Wrong("not-a-copy", expected="a state that stays", got=got)


def _measured(rank, answer, task: _Task) -> tuple[int, int, float]:
    """The peak of a step in bytes, what is held after it, and what this rank sends in it."""
    torch.set_num_threads(1)
    made = answer(task.model().to(device()))
    [first, second, third] = [(i.to(device()), l.to(device())) for i, l in task.data()]
    made.step(*first)
    made.step(*second)
    with Sampling() as memory, Trace() as trace:
        made.step(*third)
    return memory.peak, Sampling().held(), sum(map(_sent, trace.record().calls))


def _sent(call: Call) -> float:
    """The bytes that a ring sends from this rank."""
    n = len(call.ranks)
    factors = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_gather": n - 1}
    return call.bytes * factors.get(call.op, 1) if call.sends else 0.0


@training.requires(
    "on four ranks, at most twice the parameters' bytes held and few sent", needs_earlier=True
)
def _(answer, draw):
    task = _Task(36, draw.integer(10, 12), draw.seed(), (21, 23, 22))
    reports = run(_measured, 4, answer, task)
    size = 4 * sum(p.numel() for p in task.model().parameters())
    peak, rest, sent = (max(column) for column in zip(*reports))
    if peak > MEMORY * size:
        whole = (
            "copies" if rest > 1.8 * size else "parameters-whole" if rest > size else "all-at-once"
        )
        got = f"{peak / size:.2f} P, and {rest / size:.2f} P after the step"
        raise Wrong(whole, expected=f"a peak of at most {MEMORY} P", got=got)
    if sent > BYTES * size * 3 / 4:
        got = f"{sent / (size * 3 / 4):.2f} (n - 1) / n P"
        raise Wrong("too-many-bytes", expected=f"at most {BYTES} (n - 1) / n P sent", got=got)


# ---- 13.2 ----------------------------------------------------------------------------------------

loop = Exercise(
    "13.2",
    "train",
    points=4,
    minutes=40,
    kind="core",
    at_home=True,  # its folder is the answer's own
    parameters=("training", "images", "labels", "folder", "steps", "batch", "every"),
    hints=[
        (
            "What does the next step depend on? That, and nothing else, has to be in the file. And what of it belongs to "
            "a rank?"
        ),
        (
            "The number of steps done says it all: which epoch, which place in it. The order of an epoch comes from a "
            "generator with the epoch's number as its seed."
        ),
        (
            "At the start: from the newest file to the oldest, take the first whose checksum is right, load the state, and "
            "go on at its number of steps. In the loop: all ranks call `state_dict`, rank 0 writes under another "
            "name, flushes, renames, removes all but the last few; then all wait at a barrier."
        ),
    ],
    misconceptions={
        "share-on-each-rank": "The ranks hand different rows to `step`. Each hands over the whole global batch; sharing it "
        "out is the training's business.",
        "wrong-labels": "The labels are not those of the rows.",
        "global-batch-size": "A step takes another number of rows than `batch`, which is that of all ranks together.",
        "left-over-lost": "What is left over at the end of an epoch is not used. The last step of an epoch takes it, however few "
        "rows it has.",
        "used-twice": "A row is used twice in an epoch, perhaps to fill up the last batch.",
        "not-shuffled": "The rows come in their own order.",
        "same-order": "Every epoch has the same order.",
        "other-steps": "Another number of steps is made than asked.",
        "folder-missing": "The folder is not there at first: make it, with `parents=True` and `exist_ok=True`.",
        "from-zero": "The second life begins at the first step: it finds no checkpoint, or looks for none.",
        "older-checkpoint": "The second life goes on from an older checkpoint than the newest: more than `every` steps are "
        "done again.",
        "position-lost": "The state is loaded, and the rows begin at the start of the epoch again. Some are used twice, and others never.",
        "state-not-loaded": "The rows go on in the right place, and the training is a new one: load its state.",
        "one-step-off": "The second life skips a step, or does one twice. Save how many steps are done, and save it after the step.",
        "another-order": "The second life has another order of rows. It may depend on the epoch only, not on what was drawn "
        "before, and not on the ranks.",
        "one-rank-saves": "Some ranks wait for others that do not come. `state_dict` is called by all ranks, also where one alone "
        "writes, and so is a barrier.",
        "in-place": "A save that was killed has spoilt what was there, or is taken for a checkpoint. Write under another name, and rename "
        "when all is written.",
        "no-fallback": "The newest file is damaged, and the run does not go on from the one before.",
        "byte-unnoticed": "A byte of the newest file has changed, and it is loaded. `torch.load` does not notice: compare a checksum of your "
        "own.",
        "last-not-saved": "After the last step there is no checkpoint: a life that begins later does steps again.",
        "trains-on": "All steps are done, and another life makes more.",
    },
    failures={
        "timeout": "one-rank-saves",
        "mismatch": "one-rank-saves",
        "FileNotFoundError": "folder-missing",
    },
)

STATE = 20_000  # numbers in a state: a file that can be torn in the middle
TORN = 20_000  # bytes of a file at which it is torn: less than a state, compressed or cut in two


@dataclass(frozen=True)
class _Run:
    """A run of the loop: what it is asked for."""

    rows: int
    batch: int
    steps: int
    every: int
    folder: Path

    @property
    def in_an_epoch(self) -> int:
        return -(-self.rows // self.batch)


class _Noting:
    """A training that notes what it is handed. Its state follows from all that it got, in its order.

    `dies` is the step before which the last rank is killed; `torn` the save during which a rank is,
    whichever writes.
    """

    def __init__(self, notes: Path, dies: int | None, torn: int | None) -> None:
        self.notes, self.dies, self.torn = notes, dies, torn
        self.steps = self.saves = 0
        self.value = torch.linspace(1, 2, STATE)

    def step(self, images: Tensor, labels: Tensor) -> float:
        dist.barrier()
        if self.steps == self.dies and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == self.dies:
            dist.barrier()  # nobody goes on without the one that is killed
        self.steps += 1
        rows = [round(row) for row in images[:, 0].tolist()]
        with (self.notes / str(dist.get_rank())).open("a") as file:
            print(json.dumps([rows, labels.tolist()]), file=file)
        self.value = _followed(self.value, rows)
        return 0.0

    def state_dict(self) -> dict:
        dist.barrier()
        self.saves += 1
        if self.saves == self.torn:
            _kill_in_a_write(TORN)
        return {"model": {"value": self.value.clone()}, "momentum": {}}

    def load_state_dict(self, state: dict) -> None:
        self.value = state["model"]["value"].clone()


def _followed(value: Tensor, rows: list[int]) -> Tensor:
    """Halves what was, and adds what depends on the rows."""
    return value / 2 + sum((n + 1) * row for n, row in enumerate(rows)) / 1000


def _kill_in_a_write(size: int) -> None:
    """The system kills this process when a file of it grows beyond `size` bytes."""
    import resource  # not on Windows, where this is not called

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file of this death
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _live(rank, answer, asked: _Run, notes: Path, dies: int | None, torn: int | None) -> float:
    """A life of the loop. Returns what the training's state has become."""
    torch.set_num_threads(1)
    noting = _Noting(notes, dies, torn)
    images = torch.arange(asked.rows, dtype=torch.float32).unsqueeze(1).expand(-1, 49).clone()
    labels = torch.arange(asked.rows) * 10
    answer(noting, images, labels, asked.folder, asked.steps, asked.batch, asked.every)
    return noting.value[0].item()


@dataclass(frozen=True)
class _Life:
    """What was handed over: for each rank, for each step, the rows. None: the life was cut off."""

    rows: list[list[list[int]]]
    labels_fit: bool
    value: float | None


def _lived(
    answer, ranks: int, asked: _Run, dies: int | None = None, torn: int | None = None
) -> _Life:
    notes = Path(tempfile.mkdtemp(dir=asked.folder.parent))
    value = None
    try:
        value = run(_live, ranks, answer, asked, notes, dies, torn)[0]
    except RankFailure as failure:
        if failure.kind != "signal" or (dies is None and torn is None):
            raise
    lines = [
        [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for path in (notes / str(rank) for rank in range(ranks))
    ]
    fit = all(labels == [10 * row for row in rows] for own in lines for rows, labels in own)
    return _Life([[rows for rows, _ in own] for own in lines], fit, value)


def _asked(draw, parent: str, **fixed) -> _Run:
    batch = draw.integer(4, 6)
    rows = batch * draw.integer(3, 4) + draw.integer(1, batch - 1)
    every = draw.choice([2, 3])
    steps = 4 * -(-rows // batch) + 3
    given = {"rows": rows, "batch": batch, "steps": steps, "every": every} | fixed
    return _Run(**given, folder=Path(parent, "runs", "mine"))


def _prepared(parent: str) -> None:
    Path(parent, "runs").mkdir()


def _judge_rows(life: _Life, asked: _Run) -> None:
    """A whole life, from the first step to the last."""
    first = life.rows[0]
    if any(own != first for own in life.rows):
        raise Wrong("share-on-each-rank", expected="the same rows on all ranks", got="others")
    if not life.labels_fit:
        raise Wrong("wrong-labels", expected="the labels of the rows", got="others")
    epoch = [row for rows in first[: asked.in_an_epoch] for row in rows]
    if first and len(first[0]) != asked.batch:
        raise Wrong("global-batch-size", expected=f"{asked.batch} rows", got=f"{len(first[0])}")
    if len(first) < asked.in_an_epoch:
        raise Wrong("other-steps", expected=f"{asked.steps} steps", got=f"{len(first)}")
    second = [row for rows in first[asked.in_an_epoch : 2 * asked.in_an_epoch] for row in rows]
    if len(set(epoch)) < len(epoch):
        all_there = all(len(set(rows)) == asked.rows for rows in (epoch, second))
        slug = "used-twice" if all_there else "left-over-lost"
        raise Wrong(slug, expected=f"{asked.rows} rows, each once an epoch", got=f"{len(epoch)}")
    expect(sorted(epoch), list(range(asked.rows)), what="the rows of the first epoch")
    if epoch == sorted(epoch):
        raise Wrong("not-shuffled", expected="a shuffled order", got="0, 1, 2, ...")
    expect(sorted(second), list(range(asked.rows)), what="the rows of the second epoch")
    if second == epoch:
        raise Wrong("same-order", expected="another order in the second epoch", got="the same")
    if len(first) != asked.steps:
        raise Wrong("other-steps", expected=f"{asked.steps} steps", got=f"{len(first)}")


def _value_after(rows: list[list[int]]) -> float:
    value = torch.linspace(1, 2, STATE)[:1]
    for batch in rows:
        value = _followed(value, batch)
    return value.item()


def _judge_resumed(life: _Life, whole: list[list[int]], start: int, in_an_epoch: int) -> None:
    """A life that goes on at step `start` of what an undisturbed one does."""
    got = life.rows[0]
    if any(own != got for own in life.rows):
        raise Wrong("share-on-each-rank", expected="the same rows on all ranks", got="others")
    expected = f"to go on at step {start}"
    if got != whole[start:]:
        begins = next((n for n, rows in enumerate(whole) if got and got[0] == rows), None)
        as_before = begins is not None and got == whole[begins : begins + len(got)]
        if got[: len(whole) - start] == whole[start:]:
            slug = "other-steps"
        elif len(got) == len(whole):
            slug = "from-zero"
        elif as_before and abs(begins - start) == 1:
            slug = "one-step-off"
        elif as_before and got == whole[begins:]:
            slug = "older-checkpoint"
        elif as_before and begins in (0, start - start % in_an_epoch):
            slug = "position-lost"
        else:
            slug = "another-order"
        raise Wrong(slug, expected=expected, got=f"{len(got)} steps, the first with {got[:1]}")
    right = _value_after(whole)
    likely = {"state-not-loaded": lambda value: same(value, _value_after(whole[start:]))}
    expect(life.value, right, what="the state at the end", likely=likely)


@loop.requires("each row once an epoch, in another order each time, the same batch on every rank")
def _(answer, draw):
    ranks = draw.choice([2, 3])
    with tempfile.TemporaryDirectory() as parent:
        _prepared(parent)
        asked = _asked(draw, parent)
        _judge_rows(_lived(answer, ranks, asked), asked)


@loop.requires("killed between two saves, and started again")
def _(answer, draw):
    _kill_and_go_on(answer, draw, before=2, after=2)


@loop.requires("started again with another number of ranks", needs_earlier=True)
def _(answer, draw):
    before, after = draw.choice([(1, 3), (3, 1), (3, 2)])
    _kill_and_go_on(answer, draw, before, after)


def _kill_and_go_on(answer, draw, before: int, after: int) -> None:
    with tempfile.TemporaryDirectory() as parent:
        _prepared(parent)
        asked = _asked(draw, parent)
        whole = _whole(answer, asked)
        # from 10 on, because names of files may be sorted as text; and inside an epoch, because at its
        # first steps several mistakes go on with the same rows
        starts = range(0, asked.steps - asked.every + 1, asked.every)
        start = draw.choice([n for n in starts if n >= 10 and n % asked.in_an_epoch > 1])
        _lived(answer, before, asked, dies=start + draw.integer(1, asked.every - 1))
        _judge_resumed(_lived(answer, after, asked), whole, start, asked.in_an_epoch)


def _whole(answer, asked: _Run) -> list[list[int]]:
    """What an undisturbed life on one rank hands over, in a folder of its own."""
    return _lived(answer, 1, replace(asked, folder=asked.folder.with_name("undisturbed"))).rows[0]


@loop.requires(
    "killed in the middle of a save",
    failures={"exception": "in-place", "EOFError": "in-place", "RuntimeError": "in-place"},
    needs_earlier=True,
)
def _(answer, draw):
    if not hasattr(signal, "SIGXFSZ"):  # Windows cannot kill at a byte
        return
    with tempfile.TemporaryDirectory() as parent:
        _prepared(parent)
        asked = _asked(draw, parent)
        whole, torn = _whole(answer, asked), draw.choice([2, 3])
        _lived(answer, 2, asked, torn=torn)
        start = (torn - 1) * asked.every
        life = _lived(answer, 2, asked)
        if life.rows[0] == whole:
            raise Wrong("in-place", expected=f"to go on at step {start}", got="a new beginning")
        _judge_resumed(life, whole, start, asked.in_an_epoch)


@loop.requires(
    "the newest file cut, or a byte of it changed",
    failures={"exception": "no-fallback", "RuntimeError": "no-fallback", "EOFError": "no-fallback"},
    needs_earlier=True,
)
def _(answer, draw):
    for damage in (_cut, _one_bit):
        with tempfile.TemporaryDirectory() as parent:
            _prepared(parent)
            asked = _asked(draw, parent)
            whole, dies = _whole(answer, asked), 3 * asked.every + 1
            _lived(answer, 2, asked, dies=dies)
            files = [path for path in asked.folder.rglob("*") if path.is_file()]
            large = [path for path in files if path.stat().st_size > TORN]
            newest = max(large, key=lambda path: path.stat().st_mtime_ns)
            newest.write_bytes(damage(newest.read_bytes()))
            life = _lived(answer, 2, asked)
            if life.rows[0] == whole[3 * asked.every :]:
                raise Wrong("byte-unnoticed", expected="the one before", got="the damaged one")
            if life.rows[0] == whole:
                raise Wrong("no-fallback", expected="the one before", got="a new beginning")
            _judge_resumed(life, whole, 2 * asked.every, asked.in_an_epoch)


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _one_bit(content: bytes) -> bytes:
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@loop.requires("nothing more to do when all steps are done", needs_earlier=True)
def _(answer, draw):
    with tempfile.TemporaryDirectory() as parent:
        _prepared(parent)
        asked = _asked(draw, parent, every=4)
        asked = replace(asked, steps=4 * (asked.steps // 4) + draw.choice([1, 2, 3]))
        [done] = _lived(answer, 1, asked).rows
        more = _lived(answer, draw.choice([1, 2]), asked).rows[0]
        if more:
            slug = "last-not-saved" if more == done[-len(more) :] else "trains-on"
            raise Wrong(slug, expected="no step", got=f"{len(more)} steps")


# ---- 13.3 ----------------------------------------------------------------------------------------

planning = Exercise(
    "13.3",
    "plan",
    points=3,
    minutes=20,
    kind="first",
    parameters=("model", "gpus", "batch", "seq", "hardware", "node_days", "disk"),
    hints=[
        "Two questions, one after the other: first the layout, for the seconds of a step, then the interval, in steps.",
        (
            "`estimate.search` gives the fastest layouts that fit. For the interval write down C, the seconds of a save, "
            "and M, the seconds between two failures of the whole job, each with its unit."
        ),
        (
            "C is 14 bytes times the parameters over `disk`. M is that of a node over the number of nodes, which is GPUs over "
            "those of a node. The root of 2 C M is in seconds: divide by those of a step, and round."
        ),
    ],
    misconceptions={
        "not-a-pair": "Asked are two things: a `Layout`, and a whole number of steps.",
        "gpus": "The layout is for another number of GPUs.",
        "batch": "The layout has another global batch: dp x micro_batch x micro_batches sequences.",
        "illegal": "The model cannot be split like this: `Layout.check` says why.",
        "does-not-fit": "The fullest rank holds more than 90 % of a GPU's memory.",
        "least-memory": "That is the layout with the least memory. Memory is a limit, and not the aim.",
        "data-only": "Only data ranks: their traffic goes through the network, and all states or gathers with it. Tensor ranks in a "
        "machine and stages between machines make it smaller.",
        "tensor-leaves-node": "The tensor group is larger than a node, and its traffic, the largest of all, goes through "
        "the network.",
        "slow": "It is legal and fits, and there is a faster one.",
        "one-node": "Your interval is that for one node. A job fails with the first of its nodes: divide the time between failures "
        "by their number.",
        "gpus-for-nodes": "You divide the time between failures by the GPUs. It is nodes that fail.",
        "seconds-not-steps": "The interval is in seconds. Asked are steps.",
        "other-unit": "A time is in days or hours where the others are in seconds.",
        "parameters-only": "A checkpoint with 2 bytes a parameter has no optimizer in it: 14.",
        "saved-by-all": "`disk` is what all ranks have together: a checkpoint takes its bytes over it, however many write.",
        "steps-not-whole": "The interval is a whole number of steps, at least 1.",
        "bad-interval": "Another interval loses less.",
    },
)
REGRET, MARGIN = 0.10, 0.9


@dataclass(frozen=True)
class _Order:
    """What `plan` gets."""

    model: Model
    gpus: int
    batch: int
    seq: int
    hardware: Hardware
    node_days: float
    disk: float

    def arguments(self) -> tuple:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    def losses(self, layout: Layout) -> tuple[Callable[[int], float], Callable[..., float]]:
        """The share of time that is lost, by the steps between two saves; and the best number of
        them, with a slip in its arithmetic."""
        step = estimate.step_time(self.model, layout, self.seq, self.hardware).seconds
        parameters = estimate.parameters(self.model)

        def best(size=14, nodes=self.gpus / self.hardware.node, seconds=86_400, disk=self.disk):
            return math.sqrt(2 * size * parameters / disk * self.node_days * seconds / nodes) / step

        save = 14 * parameters / self.disk
        mtbf = self.node_days * 86_400 / (self.gpus / self.hardware.node)
        return lambda steps: save / (steps * step) + steps * step / 2 / mtbf, best


@lru_cache(maxsize=8)
def _fastest(*cluster) -> float:
    plans, _ = estimate.search(*cluster, keep=1)
    return plans[0].time.seconds


@lru_cache(maxsize=8)
def _smallest(order: _Order) -> int:
    """The least bytes of any layout that is searched."""
    roomy = replace(order.hardware, hbm_bytes=10**15)
    plans, _ = estimate.search(*order.arguments()[:4], roomy, keep=10**6)
    return min(plan.memory["total"] for plan in plans)


def _fullest(order: _Order, layout: Layout) -> int:
    stages = layout.telling_stages(order.model.layers)
    return max(estimate.memory(order.model, layout, order.seq, s)["total"] for s in stages)


def _drawn(draw) -> _Order:
    """A cluster on which tensor ranks and stages matter, and a failure every few hours."""
    heads = draw.choice([48, 56, 64])
    model = Model(draw.choice([40, 48]), 128 * heads, heads, 51_200, tied=False, bias=False)
    gpus = draw.choice([512, 1024])
    links = {"intra_bandwidth": draw.integer(200, 400) * 1e9, "intra_latency": 5e-6}
    links |= {"inter_bandwidth": draw.integer(8, 14) * 1e9, "inter_latency": 15e-6}
    hardware = Hardware(draw.integer(300, 500) * 1e12, 40 * 10**9, 2e12, 8, **links)
    more = {"node_days": float(draw.integer(40, 90)), "disk": draw.integer(2, 5) * 1e9}
    return _Order(model, gpus, 4 * gpus, 2048, hardware, **more)


def _check_layout(order: _Order, got) -> None:
    if not isinstance(got, tuple) or len(got) != 2 or not isinstance(got[0], Layout):
        raise Wrong(None if got is None else "not-a-pair", expected="(Layout, steps)", got=got)
    layout = got[0]
    if layout.gpus != order.gpus:
        raise Wrong("gpus", expected=order.gpus, got=layout.gpus)
    if layout.sequences() != order.batch:
        raise Wrong("batch", expected=f"{order.batch} sequences", got=layout.sequences())
    try:
        layout.check(order.model, order.seq)
    except ValueError as error:
        raise Wrong("illegal", expected="a legal layout", got=str(error)) from None
    held, limit = _fullest(order, layout), MARGIN * order.hardware.hbm_bytes
    if held > limit:
        expected = f"at most {limit / 1e9:.0f} GB"
        raise Wrong("does-not-fit", expected=expected, got=f"{held / 1e9:.1f} GB")
    seconds = estimate.step_time(order.model, layout, order.seq, order.hardware).seconds
    best = _fastest(*order.arguments()[:5])
    if seconds > (1 + REGRET) * best:
        slug = "slow"
        if held <= 1.001 * _smallest(order):
            slug = "least-memory"
        elif layout.tp > order.hardware.node:
            slug = "tensor-leaves-node"
        elif layout.dp == order.gpus:
            slug = "data-only"
        expected = f"at most {100 * REGRET:.0f} % more than {best:.3g} s"
        raise Wrong(slug, expected=expected, got=f"{seconds:.3g} s")


def _check_interval(order: _Order, got) -> None:
    layout, steps = got
    lost, best = order.losses(layout)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise Wrong("steps-not-whole", expected="a whole number of steps", got=steps)
    least = min(lost(max(1, math.floor(best()))), lost(math.ceil(best())))
    if lost(steps) <= (1 + REGRET) * least:
        return
    seconds = estimate.step_time(order.model, layout, order.seq, order.hardware).seconds
    slips = {
        "one-node": best(nodes=1),
        "gpus-for-nodes": best(nodes=order.gpus),
        "seconds-not-steps": best() * seconds,
        "parameters-only": best(size=2),
        "saved-by-all": best(disk=order.disk * order.gpus),
        "other-unit": max(1.0, best(seconds=24)),
    }
    found = [slug for slug, value in slips.items() if abs(steps - value) <= 1]
    if steps <= max(1.0, best(seconds=1)) + 1:
        found.append("other-unit")
    got = f"{steps} steps, {lost(steps):.1%} lost"
    raise Wrong(
        (*found, "bad-interval")[0], expected=f"{round(best())} steps, {least:.1%} lost", got=got
    )


@planning.requires("a layout that is legal, fits, and is fast", seconds=60)
def _(answer, draw):
    order = _drawn(draw)
    _check_layout(order, answer(*order.arguments()))


@planning.requires("the interval between two checkpoints", seconds=120, needs_earlier=True)
def _(answer, draw):
    order = _drawn(draw)
    for disk in (order.disk, 1e7 * order.disk):  # with the second, a save is over in no time
        asked = replace(order, disk=disk)
        got = answer(*asked.arguments())
        _check_layout(asked, got)
        _check_interval(asked, got)
