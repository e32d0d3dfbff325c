"""The hand-written pipeline engine of chapter 5 against torch.distributed.pipelining

All candidates train the same model in the same ranks: one stage each, with the same micro-batches
and the same loss. A round is one step of each, with its update, in an order that rotates, every
step begun together after a barrier; a step lasts as long as on the slowest rank. The ratios are
taken round by round.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss

from course_exercises.authoring import load_code
from course_utils.hardware import device
from course_utils.launch import launch
from course_utils.lesson import schedules
from tests.benchmarks.measuring import (
    met,
    of_the_slowest,
    print_table,
    ratios,
    side_by_side,
    step_seconds,
)

RANKS = 2
LAYERS, WIDTH = 8, 512
BATCH, MICRO_BATCHES = 512, 8
WARM_UP, ROUNDS = 3, 40
PAIRS = {
    "GPipe": (schedules.gpipe, ScheduleGPipe),
    "1F1B": (schedules.one_forward_one_backward, Schedule1F1B),
}


def measure(rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Returns the seconds of each step, by its kind."""
    engine = load_code(5, "Pipeline"), load_code(5, "samples")
    return of_the_slowest(launch(_steps, RANKS, *engine, rounds, timeout=60 + 5 * rounds))


def _steps(rank: int, engine: type, samples: Callable, rounds: int) -> dict[str, list[float]]:
    """Runs on a rank: the seconds of each step, by kind."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(2, BATCH, WIDTH, device=device())
    steps = {}
    for name, (make_schedule, torch_schedule) in PAIRS.items():
        pieces = _pieces()
        own = engine(
            [pieces[rank]],
            make_schedule(RANKS, MICRO_BATCHES),
            samples(pieces, inputs[: BATCH // MICRO_BATCHES]),
            mse_loss,
        )
        steps[_ours(name)] = _training(pieces[rank], partial(own.step, inputs, targets))
        piece = _pieces()[rank]
        stage = PipelineStage(piece, rank, RANKS, device())
        schedule = torch_schedule(stage, MICRO_BATCHES, loss_fn=mse_loss)
        steps[_torchs(name)] = _training(piece, _torch_step(schedule, rank, inputs, targets))
    candidates = {kind: partial(step_seconds, step) for kind, step in steps.items()}
    return side_by_side(candidates, rounds, WARM_UP)


def _pieces() -> list[nn.Module]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    model, size = nn.Sequential(*layers).to(device()), LAYERS // RANKS
    return [model[first : first + size] for first in range(0, LAYERS, size)]


def _torch_step(schedule, rank: int, inputs: Tensor, targets: Tensor) -> Callable[[], object]:
    if rank == 0:
        return partial(schedule.step, inputs)
    return partial(schedule.step, target=targets)


def _training(piece: nn.Module, gradients: Callable[[], object]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(piece.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        gradients()
        optimizer.step()

    return step


def _ours(name: str) -> str:
    return f"{name}, by hand"


def _torchs(name: str) -> str:
    return f"{name}, torch"


def main() -> None:
    steps = measure()
    size = f"{RANKS} ranks, {LAYERS} layers of {WIDTH}, batch {BATCH} in {MICRO_BATCHES}"
    spreads = {name: ratios(steps, to=_torchs(name))[_ours(name)] for name in PAIRS}
    rows = [
        [name, *(f"{1000 * statistics.median(steps[kind(name)]):.0f}" for kind in (_ours, _torchs))]
        + [spreads[name]]
        for name in PAIRS
    ]
    print_table([size, "by hand, ms a step", "torch, ms a step", "ratio"], rows)
    for name, spread in spreads.items():
        print(f"- {name} by hand at most 1.1 times torch's: {met(spread.median <= 1.1)}")
    print(flush=True)


if __name__ == "__main__":
    main()
