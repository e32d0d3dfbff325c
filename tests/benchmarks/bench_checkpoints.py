"""Saving and resuming a sharded training, in three formats

Parts by hand: each rank writes its own file, in the format of exercise 8.5; whoever resumes reads all
of them and reshards. torch.distributed.checkpoint: the chapter's `save` and `resume`. One file: rank 0
gathers everything and writes it with the answer to exercise 9.1. All three write parameters and
momentum of the same model, and wait until the bytes are on the disk. A round is one of each, in an
order that rotates, begun together after a barrier; it lasts as long as on the slowest rank. Files that
were just written are read from memory, so resuming is quicker here than after a restart of the machine.
"""

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from course_exercises.authoring import load_answer, load_code
from course_utils.hardware import device
from course_utils.launch import launch
from tests.benchmarks.measuring import (
    of_the_slowest,
    print_table,
    ratios,
    side_by_side,
    step_seconds,
)

SAVED_BY, RESUMED_BY = 2, (2, 4)
LAYERS, WIDTH = 10, 1024
ROUNDS = 9
PARTS, TORCH, FILE = "parts by hand", "torch.distributed.checkpoint", "one file"

Times = dict[str, list[float]]


class Parts:
    """Of a MiniFSDP; a file for each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "parts"
        self.checkpoint_of, self.restore = load_code(8, "checkpoint_of"), load_code(8, "restore")
        self.mini_fsdp, self.reshard = load_answer("8.4"), load_answer("8.5")

    def shard(self, model: nn.Module) -> nn.Module:
        return self.mini_fsdp(model)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / f"{dist.get_rank()}.pt", "wb") as file:
            torch.save(self.checkpoint_of(model, optimizer), file)
            os.fsync(file.fileno())
        dist.barrier()

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        parts = [torch.load(path, weights_only=True) for path in self.folder.iterdir()]
        self.restore(model, optimizer, self.reshard(parts, dist.get_world_size())[dist.get_rank()])


class Distributed:
    """Of a model of fully_shard; a file for each rank, and one that says what lies where."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "distributed"
        self.chapters_save, self.chapters_resume = load_code(8, "save"), load_code(8, "resume")

    def shard(self, model: nn.Module) -> nn.Module:
        return _fully_sharded(model)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        # FileSystemWriter waits for the disk: its default is sync_files=True
        self.chapters_save(model, optimizer, self.folder)

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.chapters_resume(model, optimizer, self.folder)


class OneFile:
    """Of a model of fully_shard; rank 0 has all of it for a moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "file"
        self.checkpoints = load_answer("9.1")
        self.whole = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def shard(self, model: nn.Module) -> nn.Module:
        return _fully_sharded(model)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer, options=self.whole)
        state = {"model": model_state, "optimizer": optimizer_state}
        self.checkpoints(self.folder).save(1, state)

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        _, state = self.checkpoints(self.folder).load()
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.whole,
        )


FORMATS = {PARTS: Parts, TORCH: Distributed, FILE: OneFile}


def _fully_sharded(model: nn.Module) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def measure(rounds: int = ROUNDS) -> tuple[Times, dict[int, Times]]:
    """Returns the seconds of each save, and those of each resume by the number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        formats = {kind: make(Path(folder)) for kind, make in FORMATS.items()}
        saved = _launched(_saves, SAVED_BY, formats, rounds)
        return saved, {n: _launched(_resumes, n, formats, rounds) for n in RESUMED_BY}


def _launched(function: Callable, ranks: int, formats: dict, rounds: int) -> Times:
    return of_the_slowest(launch(function, ranks, formats, rounds, timeout=60 + 60 * rounds))


def _saves(rank: int, formats: dict, rounds: int) -> Times:
    """Runs on a rank; each save finds no earlier one."""
    trainings = {kind: _training(own) for kind, own in formats.items()}

    def save(kind: str) -> float:
        if rank == 0:
            shutil.rmtree(formats[kind].folder, ignore_errors=True)
        return step_seconds(partial(formats[kind].save, *trainings[kind]))

    return side_by_side({kind: partial(save, kind) for kind in formats}, rounds)


def _resumes(rank: int, formats: dict, rounds: int) -> Times:
    """Runs on a rank."""
    steps = {kind: partial(own.resume, *_training(own)) for kind, own in formats.items()}
    return side_by_side({kind: partial(step_seconds, step) for kind, step in steps.items()}, rounds)


def _training(own) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that is sharded as `own` format wants it, after a step."""
    torch.set_num_threads(1)
    model = own.shard(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(device())


def main() -> None:
    saved, resumed = measure()
    parameters = sum(p.numel() for p in _model().parameters())
    columns = {f"saved by {SAVED_BY}": saved} | {f"resumed by {n}": t for n, t in resumed.items()}
    rows = [
        [kind, *(f"{statistics.median(times[kind]):.2f}" for times in columns.values())]
        for kind in FORMATS
    ]
    print_table([f"{parameters / 1e6:.1f} million parameters, seconds", *columns], rows)
    spreads = [ratios(times, to=TORCH) for times in columns.values()]
    rows = [[f"{kind} to {TORCH}", *(s[kind] for s in spreads)] for kind in (PARTS, FILE)]
    print_table(["as a ratio", *columns], rows)
    print(flush=True)


if __name__ == "__main__":
    main()
