"""Stages of the learner's own script: exercises whose answer is a file that `torchrun` starts.

A check runs the file as torchrun would, on a text that it has drawn, and looks at what the ranks do: the windows
that they read, their optimizer's steps and parameters, what they save and log.
"""

import builtins
import contextlib
import json
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from course_exercises.authoring.compare import Wrong, expect
from course_exercises.authoring.draw import Draw
from course_exercises.authoring.framework import Exercise, run
from course_exercises.authoring.patience import PatientSampling
from course_exercises.authoring.ranks import kill_in_a_write
from course_exercises.sources import versions
from course_run import script
from course_utils.comm import private
from course_utils.launch import RankFailure

EPOCHS, BATCH, CONTEXT = 2, 8, 6  # of the runs in a check
# So many windows that the last ones of an epoch fill no batch, on 1, 2 and 4 ranks as many, and that neither they nor
# those held out divide by the ranks.
_WINDOWS = 47, 49
_HUGE = 1e6  # what a gradient is after a step, so that one that is not set back shows
_TORN = 10_000  # bytes of a file at which it is torn: less than what a rank saves, and more than it prints


# Of what a script has at any stage.
SENTENCES = {
    "no-group": "Nothing has called `dist.init_process_group()`, which comes before all that needs the ranks.",
    "adds-up": "The gradients of a step are still there in the next, and are added to its own. Call "
    "`optimizer.zero_grad()` once a step, before its first backward pass.",
    "learns-nothing": "No step of the optimizer has found a gradient: nothing has called `backward` before it.",
    "refused-options": "Your script refuses the options that it is started with: what it says stands below. Keep those "
    "that it had, and add what this stage asks for.",
    "no-log": "The log is not there, or a line of it is no JSON. Rank 0 writes it, and no other rank.",
    "not-saved": "Nobody saves the model: at the end there is neither `model.pt` nor a checkpoint of "
    "torch.distributed.checkpoint in the folder `checkpoint`.",
    "parts-saved": "What is saved are parts of the parameters. Gather each with `full_tensor()`, on all ranks, and let "
    "rank 0 save the whole ones.",
}
FAILURES = {
    "sys.exit(2)": "refused-options",
    "process group has not been initialized": "no-group",
    "timeout": "not-every-rank",
    "mismatch": "not-every-rank",
}


class Stage(Exercise):
    """What the learner's script is to do after a chapter."""

    def __init__(
        self,
        id: str,
        *,
        minutes: int,
        hints: Sequence[str],
        misconceptions: Mapping[str, str],
        failures: Mapping[str, str] | None = None,
        further: bool = False,
        runs: "type[Script] | None" = None,
    ) -> None:
        """`runs`: what its requirements get, where that is more than a `Script`."""
        super().__init__(
            id,
            "script",
            points=0,
            minutes=minutes,
            hints=hints,
            misconceptions=SENTENCES | misconceptions,
            failures=FAILURES | (failures or {}),
            things="parameters",
            at_home=True,
        )
        self.chapter, self.further = int(id.split(".")[0]), further
        self.own = list(misconceptions)
        self.runs = runs or Script

    @property
    def version(self) -> Path:
        """The course's own."""
        return versions.version(self.chapter, self.further)

    def misfit(self, answer: Any) -> tuple[str, str] | None:
        if isinstance(answer, str | Path) and Path(answer).is_file():
            return None
        text = f"there is no file {answer}; script = mine.script({self.chapter}) makes one"
        return "wrong-kind", text

    def begun(self, answer: Any) -> bool:
        """Not while it is one of the course's own versions from before this chapter."""
        if not isinstance(answer, str | Path) or not Path(answer).is_file():
            return True
        chapters = range(2, self.chapter + self.further)
        earlier = {versions.version(chapter).read_text() for chapter in chapters}
        return Path(answer).read_text() not in earlier

    def prepared(self, answer: Any) -> "Script":
        return self.runs(Path(answer))


@dataclass(frozen=True)
class OnRank:
    """What one rank has done."""

    batches: list[Tensor]  # the inputs that its DataLoaders gave, (windows, characters) each
    stepped: list[Tensor]  # of these the last one before each of its optimizer's steps
    gradient: Tensor  # of all its parameters, before the first of these steps
    synced: list[bool]  # of each forward pass through DDP, whether its gradients travel
    adds_up: bool  # whether a step's gradients have those of the step before in them
    fresh: bool  # whether its optimizer had no state at the first step, or one of zeros
    parameters: list[
        Tensor
    ]  # of its optimizer, after the last step: this rank's parts, where they are cut
    moves_the_model: bool  # whether its optimizer's parameters are in modules that compute
    largest: int  # numbers of the largest parameter that was ever made with memory, a part's where it is a part
    shardings: int  # calls of fully_shard
    saves: int  # calls of torch.save
    prints: int  # calls of print
    logs: bool  # whether it opened log.jsonl to write
    backwards: int  # calls of backward
    unsynced: int  # calls of set_requires_gradient_sync(False)
    computed: int  # the most windows in one forward pass of an embedding, in training
    recomputes: bool  # whether a module computes again within a backward pass
    groups: int  # calls of init_process_group
    group_left: bool
    peaks: dict[
        str, int
    ]  # of a metered life: bytes of its tensors at the "start", in "training", at the "end"


@dataclass(frozen=True)
class Ran:
    """A run of the script: what each rank has done, and what is in the folder afterwards."""

    ranks: list[OnRank]
    log: list[dict]
    model: dict[str, Tensor]
    checkpoint: dict[
        str, Tensor
    ]  # what torch.distributed.checkpoint finds in the folder "checkpoint"


@dataclass(frozen=True)
class Life:
    """A start of the script, and its end: after so many steps rank 1, or the only one, gets a signal. With SIGXFSZ
    rank 0 is killed while it writes its next large file. A metered one tells what its ranks held, and no gradient."""

    ranks: int
    after: int | None = None
    signal: int = signal.SIGKILL
    metered: bool = False

    @property
    def struck(self) -> int:
        """The rank."""
        return 0 if self.signal == signal.SIGXFSZ else min(1, self.ranks - 1)


@dataclass
class Script:
    """The learner's file, and its runs in this check: with the same lives and options it is run once."""

    path: Path
    _text: str = ""
    # Of different lengths, each with its own first letters.
    _sentences: list[str] = field(default_factory=list)
    _runs: dict[tuple, list[Ran | None]] = field(default_factory=dict)

    def on(self, ranks: int, draw: Draw, **options: int) -> Ran:
        """Runs it on so many ranks with further options, on one text for all."""
        [ran] = self.lives(draw, Life(ranks), **options)
        return ran

    def lives(self, draw: Draw, *lives: Life, **options: int) -> list[Ran | None]:
        """Starts it again and again with one folder; None for a life that a signal has cut off."""
        self._draw(draw)
        asked = *lives, *sorted(options.items())
        if asked not in self._runs:
            with tempfile.TemporaryDirectory() as folder:
                text = ".".join(self._sentences) if options.get("sentences") else self._text
                Path(folder, "text.txt").write_text(text)
                Path(folder, "out").mkdir()
                ran = [self._live(Path(folder), life, options) for life in lives]
                self._runs[asked] = ran
        return self._runs[asked]

    def _draw(self, draw: Draw) -> None:
        letters = "abcdefghijklmnopqrstuvwxyz"
        if not self._text:
            length = draw.choice(_WINDOWS) * CONTEXT + 1 - len(letters)
            self._text = letters + "".join(draw.choice(letters) for _ in range(length))
            starts = draw.sample(["".join(three) for three in product(letters, repeat=3)], 46)
            ends = ["".join(draw.choice(letters) for _ in range(1 + i * i % 13)) for i in range(46)]
            self._sentences = [f"{start}{end}" for start, end in zip(starts, ends, strict=True)]

    def _live(self, folder: Path, life: Life, options: dict[str, int]) -> Ran | None:
        out = folder / "out"
        given = {"text": folder / "text.txt", "out": out, "epochs": EPOCHS, "batch": BATCH}
        given |= {"context": CONTEXT, "width": 16, "layers": 1, "heads": 4, "kv-heads": 2}
        given |= {"rate": 0.1} | options
        try:
            done = run(_followed, life.ranks, [str(self.path), *flags(given)], life, timeout=60.0)
        except RankFailure as failure:
            if life.after is None or failure.kind != "signal":
                raise
            return None
        if life.after is not None:  # it has left by itself
            return Ran(done, [], {}, {})
        model = _model(out)
        return Ran(done, _log(out / "log.jsonl"), model, _checkpoint(out / "checkpoint", model))

    @property
    def learned(self) -> int:
        """The windows that it learns from; those after them are held out."""
        return self.number * 9 // 10

    @property
    def number(self) -> int:
        """The windows of the text."""
        return (len(self._text) - 1) // CONTEXT

    def trained_on(self, ran: Ran) -> list[list[list[int]]]:
        """By rank, the windows of each batch in training."""
        read = [[self.windows(batch) for batch in rank.batches] for rank in ran.ranks]
        return [[each for each in mine if max(each) < self.learned] for mine in read]

    @property
    def sentences_in_batches(self) -> int:
        """The sentences that it learns from, without the last ones, which fill no batch."""
        return len(self._sentences) * 9 // 10 // BATCH * BATCH

    def sentences_learned(self, rank: OnRank) -> list[int]:
        """The numbers of the sentences that a rank has read in training, in order."""
        letters = sorted(set(".".join(self._sentences)))
        starts = [sentence[:3] for sentence in self._sentences]
        rows = [row for batch in rank.batches for row in batch[:, :3].tolist()]
        read = [starts.index("".join(letters[token] for token in row)) for row in rows]
        return [i for i in read if i < len(starts) * 9 // 10]

    def steps(self, ran: Ran) -> list[list[int]]:
        """The windows of each step, those of all ranks together, in order."""
        together = [torch.cat(batches) for batches in zip(*(rank.stepped for rank in ran.ranks))]
        return [sorted(self.windows(batch)) for batch in together]

    def windows(self, batch: Tensor) -> list[int]:
        """The numbers of the windows in a batch."""
        letters = sorted(set(self._text))
        cut = [self._text[i * CONTEXT : (i + 1) * CONTEXT] for i in range(self.number)]
        return [cut.index("".join(letters[token] for token in row)) for row in batch.tolist()]


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as a command line has them: --micro-batch=4, or --bfloat16 for one that is True."""
    named = ((name.replace("_", "-"), value) for name, value in options.items())
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in named]


def trains_as_before(script: Script, draw: Draw, **options: int) -> None:
    """The first requirement of a stage: one rank runs it to the end, in a process group, with gradients of its own
    in each step."""
    [alone] = script.on(1, draw, **options).ranks
    expect(alone.groups, 1, what="groups made", likely={"no-group": 0})
    if not alone.backwards:
        raise Wrong("learns-nothing", expected="gradients in a step", got="none")
    if alone.adds_up:
        raise Wrong("adds-up", expected="the gradients of each step alone", got="a sum over steps")


def must_be_whole(ran: Ran, alone: Ran) -> None:
    """Raises where what was saved has other shapes than one rank saves."""
    for name in (name for name in alone.model if name in ran.model):
        got, expected = (tuple(each.model[name].shape) for each in (ran, alone))
        if got != expected:
            raise Wrong(
                "parts-saved", expected=f"shape {expected}   ({name!r})", got=f"shape {got}"
            )


def _log(path: Path) -> list[dict]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        got = f"{type(error).__name__}: {error}".partition(": '/")[0]
        raise Wrong("no-log", expected="log.jsonl, with a line of JSON an epoch", got=got) from None


def _model(out: Path) -> dict[str, Tensor]:
    """What is in model.pt; without it, what is in the checkpoint."""
    path = out / "model.pt"
    if not path.exists():
        with contextlib.suppress(Exception, dcp.CheckpointException):
            saved = dcp.FileSystemReader(out / "checkpoint").read_metadata().state_dict_metadata
            empty = {n.removeprefix("model."): torch.empty(part.size) for n, part in saved.items()}
            return _checkpoint(out / "checkpoint", empty)
        raise Wrong("not-saved", expected="model.pt in the folder of --out", got="no such file")
    try:
        model = torch.load(path, weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001 - whatever a file raises that holds more than tensors
        raise Wrong(
            "parts-saved", expected="a dict of whole tensors", got="something else"
        ) from None
    if any(isinstance(value, DTensor) for value in model.values()):
        raise Wrong("parts-saved", expected="whole tensors in model.pt", got="DTensors")
    return model


def _checkpoint(folder: Path, model: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of one process; nothing where there is none, or one without these names."""
    loaded = {"model": {name: torch.full_like(value, torch.nan) for name, value in model.items()}}
    if not (folder / ".metadata").exists():
        return {}
    with contextlib.suppress(Exception, dcp.CheckpointException), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
        return loaded["model"]
    return {}


def _followed(rank: int, arguments: list[str], life: Life) -> OnRank:
    """In a rank: runs the script, and returns what it has done."""
    optimizers, batches, stepped, fresh, gradients, synced, made = [], [], [], [], [], [], [0]
    computed, recomputed, adding, logs, computing = [0], [], [], [], set()
    phases = _Phases(life.metered)

    def before_step(optimizer: Optimizer, *_) -> None:
        if not life.metered:  # in which nothing may be made
            adding.append(
                any(_part(each.grad).abs().ge(_HUGE / 2).any() for each in _learning(optimizer))
            )
        if not fresh and not _of_zeros(optimizer):
            if not life.metered:
                of_rank = [_part(each.grad).flatten() for each in _learning(optimizer)]
                gradients.append(torch.cat([torch.empty(0), *of_rank]))
            states = [value for state in optimizer.state.values() for value in state.values()]
            moments = (_part(value) for value in states if isinstance(value, Tensor))
            fresh.append(not any(moment.any() for moment in moments if moment.dim()))

    def on_step(optimizer: Optimizer, *_) -> None:
        if _of_zeros(optimizer):
            return
        optimizers.append(optimizer)
        stepped.append(batches[-1])
        for each in _learning(optimizer):
            each.grad.fill_(_HUGE)
        phases.end("training")
        if rank == life.struck and len(stepped) == life.after:
            _strike(life.signal)

    def on_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if not parameter.is_meta:
            made.append(_part(parameter).numel())

    def on_forward(module: nn.Module, inputs: tuple) -> None:
        computing.update(map(id, module.parameters(recurse=False)))
        if private.backward_task.value() != -1:
            recomputed.append(True)
        elif isinstance(module, nn.Embedding) and torch.is_grad_enabled() and inputs[0].dim() > 1:
            computed.append(len(inputs[0]))

    def on_event(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).endswith("log.jsonl") and arguments[1] != "r":
            logs.append(True)

    with ExitStack() as following:
        registered = nn.modules.module.register_module_parameter_registration_hook(on_parameter)
        following.callback(registered.remove)
        following.enter_context(_noting_batches(batches, phases))
        save = following.enter_context(_counted(torch, "save"))
        prints = following.enter_context(_counted(builtins, "print"))
        sys.addaudithook(on_event)  # in a process of its own, which ends with the script
        backward = following.enter_context(_counted(torch.autograd, "backward"))
        group = following.enter_context(_counted(dist, "init_process_group"))
        shard = following.enter_context(_counted(fsdp, "fully_shard"))
        sync = following.enter_context(_counted(fsdp.FSDPModule, "set_requires_gradient_sync"))
        hook = nn.modules.module.register_module_forward_pre_hook(on_forward)
        following.callback(hook.remove)
        following.callback(register_optimizer_step_pre_hook(before_step).remove)
        following.callback(register_optimizer_step_post_hook(on_step).remove)
        following.enter_context(_noting_forward(synced))
        following.enter_context(phases.meter)
        os.environ["OMP_NUM_THREADS"] = (
            "1"  # as torchrun sets it; so small a model loses time with more
        )
        script.execute(rank, arguments)
        phases.end("end")
    groups = optimizers[-1].param_groups if optimizers else []
    held = [each for group in groups for each in group["params"] if not each.is_meta]
    return OnRank(
        batches,
        stepped,
        gradients[0] if gradients else torch.empty(0),
        synced,
        any(adding),
        fresh == [True],
        [_part(parameter) for parameter in held],
        moves_the_model={id(each) for each in held} <= computing,
        largest=max(made),
        shardings=len(shard),
        saves=len(save),
        prints=len(prints),
        logs=bool(logs),
        backwards=len(backward),
        unsynced=sum(False in arguments for arguments in sync),
        computed=max(computed),
        recomputes=bool(recomputed),
        groups=len(group),
        group_left=not dist.is_initialized(),
        peaks=phases.peaks,
    )


class _Phases:
    """The peak of a rank's tensors in each phase of a metered life."""

    def __init__(self, metered: bool) -> None:
        self.meter = PatientSampling() if metered else contextlib.nullcontext()
        self.peaks: dict[str, int] = {}

    def end(self, phase: str) -> None:
        """What was held since the last call belongs to this phase."""
        if isinstance(self.meter, PatientSampling):
            self.peaks[phase] = max(self.peaks.get(phase, 0), self.meter.peak)
            self.meter.peak = self.meter.held()


@contextmanager
def _counted(owner: Any, name: str) -> Iterator[list[tuple]]:
    """A list with an item for each call: the arguments that are a bool. A Mock would keep all, and what they hold."""
    calls, plain = [], getattr(owner, name)

    def counting(*given, **named):
        calls.append(tuple(value for value in (*given, *named.values()) if isinstance(value, bool)))
        return plain(*given, **named)

    with mock.patch.object(owner, name, counting):
        yield calls


def _strike(number: int) -> None:
    """This process gets a signal now; of SIGXFSZ see kill_in_a_write."""
    if number == signal.SIGXFSZ:
        kill_in_a_write(_TORN)
    else:
        os.kill(os.getpid(), number)


def _of_zeros(optimizer: Optimizer) -> bool:
    """Whether it is the step with which get_state_dict makes an optimizer's state."""
    learning = _learning(optimizer)
    return bool(learning) and not any(_part(each.grad).any() for each in learning)


def _learning(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that have a gradient."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return [each for each in parameters if each.grad is not None]


def _part(parameter: Tensor) -> Tensor:
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return own.detach().cpu().clone()


@contextmanager
def _noting_batches(batches: list[Tensor], phases: _Phases) -> Iterator[None]:
    plain = DataLoader.__iter__

    def noting(loader):
        if not batches:
            phases.end("start")
        for batch in plain(loader):
            batches.append(batch[0].clone())
            yield batch

    with mock.patch.object(DataLoader, "__iter__", noting):
        yield


def _noting_forward(synced: list[bool]) -> AbstractContextManager:
    plain = DistributedDataParallel.forward

    def noting(model, *inputs, **options):
        if torch.is_grad_enabled():
            synced.append(model.require_backward_grad_sync)
        return plain(model, *inputs, **options)

    return mock.patch.object(DistributedDataParallel, "forward", noting)
