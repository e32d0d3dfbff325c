"""The answer to exercise 3.4 against PyTorch's DDP, and against itself without overlap

All three train the same model in the same ranks. A round is one step of each, in an order that
rotates, every step begun together after a barrier; a step lasts as long as on the slowest rank.
The ratios are taken round by round, so that what slows the machine for a while slows all three.

Without overlap means: backward runs under no_sync(), and everything is sent afterwards.
"""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_exercises.authoring import load_answer
from course_utils.hardware import device
from course_utils.launch import launch
from tests.benchmarks.measuring import (
    met,
    of_the_slowest,
    print_table,
    ratios,
    side_by_side,
    step_seconds,
)

RANKS = 2
LAYERS, WIDTH, BATCH = 10, 1024, 128
BUCKET_MB = 8
WARM_UP, ROUNDS = 3, 25

DDP, OVERLAPPED, LATE = "torch DDP", "OverlappedDDP", "without overlap"


def measure(rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Returns the seconds of each step, by its kind."""
    timeout = 60 + 10 * rounds
    return of_the_slowest(launch(_steps, RANKS, load_answer("3.4"), rounds, timeout=timeout))


def _steps(rank: int, overlapped_ddp: type, rounds: int) -> dict[str, list[float]]:
    """Runs on a rank: the seconds of each step, by kind."""
    inputs = torch.randn(BATCH, WIDTH, device=device())
    ddp = DistributedDataParallel(_model(), bucket_cap_mb=BUCKET_MB)
    ours, late = (overlapped_ddp(_model(), BUCKET_MB * 2**20) for _ in range(2))
    kinds = {
        DDP: _step(ddp, finish=lambda: None),
        OVERLAPPED: _step(ours, ours.finish_gradient_synchronization),
        LATE: _step(late, late.finish_gradient_synchronization, late.no_sync),
    }
    candidates = {
        kind: partial(step_seconds, partial(step, inputs)) for kind, step in kinds.items()
    }
    return side_by_side(candidates, rounds, WARM_UP)


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(device())


def _step(
    model: nn.Module,
    finish: Callable[[], None],
    context: Callable[[], AbstractContextManager] = nullcontext,
) -> Callable[[torch.Tensor], None]:
    """A training step: forward and backward inside `context`, then `finish`, then the update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        with context():
            model(inputs).square().mean().backward()
        finish()
        optimizer.step()

    return step


def main() -> None:
    steps = measure()
    parameters = sum(p.numel() for p in _model().parameters())
    size = f"{RANKS} ranks, {LAYERS} layers, {parameters / 1e6:.1f} million parameters"
    times = [[kind, f"{1000 * statistics.median(seconds):.0f}"] for kind, seconds in steps.items()]
    print_table([f"{size}, batch {BATCH}", "ms a step"], times)
    pairs = ((OVERLAPPED, DDP), (OVERLAPPED, LATE), (LATE, DDP))
    spreads = {(of, to): ratios(steps, to)[of] for of, to in pairs}
    rows = [[f"{of} to {to}", spread] for (of, to), spread in spreads.items()]
    print_table(["a step's time, as a ratio", "ratio"], rows)
    ours, late = (spreads[OVERLAPPED, to].median for to in (DDP, LATE))
    print(f"- {OVERLAPPED} at most 1.1 times {DDP}: {met(ours <= 1.1)}")
    print(f"- {OVERLAPPED} faster than {LATE}: {met(late < 1)}")
    print(flush=True)


if __name__ == "__main__":
    main()
