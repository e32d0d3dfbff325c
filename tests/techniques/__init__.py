"""The techniques of the course, for tests/chapters/test_equality.py.

Each trains a job on one or more ranks.

A technique is a function `(rank, job) -> Trained` that runs on every rank: it returns what the rank
holds, under the names of the whole model. The parts of all ranks are compared with one process, which
runs on a rank too, with one thread, and together they must be complete. The files of this folder
decorate theirs with `@technique`; one file holds what one family of techniques needs. They are
pickled by value, so ranks need not import them. Code of the chapters comes by `load_code` and
`load_answer`, never as a second copy. `@mistake` marks one that goes wrong: the contract has to see it.

Ranks like (4, 2, 1) mean that the training is interrupted: 4 ranks train the first part of the
batches, 2 the next, 1 the last. All they have of each other lies in the job's folder. These jobs
have momentum, so that a state of the optimizer that got lost shows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_utils.hardware import device

LEARNING_RATE = 0.5


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over all rows, or over all tokens of all rows."""
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Job:
    """What to train on: global batches, the same for all techniques."""

    make_model: Callable[[], nn.Module]
    batches: list[tuple[Tensor, Tensor]]  # images (N, 1, 28, 28) or tokens (N, T); targets
    loss: Callable[[Tensor, Tensor], Tensor] = mean_loss
    momentum: float = 0.0
    folder: Path | None = None  # of the checkpoints, if the training is interrupted

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make_model().to(device())


@dataclass(frozen=True)
class Trained:
    """What a rank ends with, by the names of the whole model: all of it, or the part it holds."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None] | None  # of the last step; None if this rank missed it


Run = Callable[[int, Job], Trained]
Ranks = int | tuple[int, ...]  # how many train; a tuple: one number after the other


@dataclass(frozen=True)
class Technique:
    run: Run
    ranks: tuple["Ranks", ...]  # numbers of ranks to try
    jobs: tuple[str, ...]  # names of jobs to try


TECHNIQUES: dict[str, Technique] = {}
MISTAKES: dict[str, Technique] = {}


def technique(ranks: Iterable[Ranks], jobs: Iterable[str], name: str = "") -> Callable[[Run], Run]:
    """Adds a function to the techniques, under its own name or another."""
    return _adds_to(TECHNIQUES, ranks, jobs, name)


def mistake(ranks: Iterable[Ranks], jobs: Iterable[str], name: str = "") -> Callable[[Run], Run]:
    """Adds a function to what must not equal one process."""
    return _adds_to(MISTAKES, ranks, jobs, name)


def _adds_to(table, ranks, jobs, name) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        key = name or run.__name__
        assert key not in table, f"two techniques are called {key}"
        table[key] = Technique(run, tuple(ranks), tuple(jobs))
        return run

    return add


def sgd(model: nn.Module, momentum: float = 0.0) -> torch.optim.SGD:
    # foreach=True, the default on GPUs, does not take DTensors and plain tensors in one model
    return torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum, foreach=False)


def alone(rank: int, job: Job) -> Trained:
    """The single process on the whole batch: what all techniques must equal."""
    model = job.model()
    optimizer = sgd(model, job.momentum)
    for inputs, targets in job.batches:
        optimizer.zero_grad()
        job.loss(model(inputs.to(device())), targets.to(device())).backward()
        optimizer.step()
    return trained(model)


def train_all(rank: int, run: Run, jobs: dict[str, Job]) -> dict[str, Trained]:
    """Runs on a rank: one launch for all jobs of a technique."""
    torch.set_num_threads(1)  # on busy cores, two threads make small models many times slower
    return {name: run(rank, job) for name, job in jobs.items()}


def trained(model: nn.Module, held: nn.Module | None = None) -> Trained:
    """The parameters of `model`, or only those that the part `held` of it shares with it."""
    own = {id(p) for p in (held or model).parameters()}
    named = {name: p for name, p in model.named_parameters() if id(p) in own}
    return Trained(
        {name: p.detach().cpu().clone() for name, p in named.items()},
        {name: None if p.grad is None else p.grad.cpu().clone() for name, p in named.items()},
    )
