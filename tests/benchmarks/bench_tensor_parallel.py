"""The hand-written tensor-parallel block of chapter 6 against parallelize_module

Both train the same transformer blocks in the same ranks. A round is one step of each, with its
update, in an order that rotates, every step begun together after a barrier; a step lasts as long
as on the slowest rank. The ratios are taken round by round.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from course_exercises.authoring import load_code
from course_utils.hardware import device
from course_utils.launch import launch
from course_utils.lesson.models import Block
from tests.benchmarks.measuring import (
    met,
    of_the_slowest,
    print_table,
    ratios,
    side_by_side,
    step_seconds,
)

RANKS = 2
BLOCKS, WIDTH, HEADS = 4, 256, 8
ROWS, TOKENS = 8, 64
WARM_UP, ROUNDS = 3, 40
BY_HAND, TORCH = "by hand", "parallelize_module"
CUTS = {BY_HAND: "tensor_parallel", TORCH: "tensor_parallel_with_pytorch"}


def measure(rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Returns the seconds of each step, by its kind."""
    cuts = {kind: load_code(6, name) for kind, name in CUTS.items()}
    return of_the_slowest(launch(_steps, RANKS, cuts, rounds, timeout=60 + 5 * rounds))


def _steps(rank: int, cuts: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Runs on a rank: the seconds of each step, by kind."""
    torch.manual_seed(0)
    inputs = torch.randn(ROWS, TOKENS, WIDTH, device=device())
    candidates = {kind: _step(cut, inputs) for kind, cut in cuts.items()}
    return side_by_side(candidates, rounds, WARM_UP)


def _step(cut: Callable[[Block], Block], inputs: Tensor) -> Callable[[], float]:
    """Returns a training step, which returns its seconds."""
    torch.manual_seed(0)
    blocks = [cut(Block(WIDTH, HEADS).to(device())) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return partial(step_seconds, step)


def main() -> None:
    steps = measure()
    spread = ratios(steps, to=TORCH)[BY_HAND]
    size = f"{RANKS} ranks, {BLOCKS} blocks of width {WIDTH}, {ROWS} x {TOKENS} tokens"
    rows = [[kind, f"{1000 * statistics.median(seconds):.0f}"] for kind, seconds in steps.items()]
    print_table([size, "ms a step"], rows)
    print_table(["a step's time, as a ratio", "ratio"], [[f"{BY_HAND} to {TORCH}", spread]])
    print(f"- {BY_HAND} at most 1.0 times {TORCH}: {met(spread.median <= 1.0)}")
    print(flush=True)


if __name__ == "__main__":
    main()
