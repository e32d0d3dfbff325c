"""The answer to exercise 8.4 against PyTorch's fully_shard

Both train the same model in the same ranks, each layer a unit that is gathered by itself. A round is
one step of each, with its update, in an order that rotates, every step begun together after a
barrier; a step lasts as long as on the slowest rank. The ratios are taken round by round.

The peak is the most that a rank has at a time: what it holds between steps (parameters and the
optimizer's state), and what a step allocates beyond that. Median of several steps.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from course_exercises.authoring import load_answer
from course_utils.hardware import device
from course_utils.launch import launch
from course_utils.plots import human_bytes
from course_utils.trace import memory_ledger
from tests.benchmarks.measuring import (
    met,
    of_the_slowest,
    peak_bytes,
    print_table,
    ratios,
    side_by_side,
    step_seconds,
)

RANKS = 2
LAYERS, WIDTH, BATCH = 10, 1024, 128
WARM_UP, ROUNDS, PEAKS = 3, 25, 7
OURS, TORCH = "MiniFSDP", "fully_shard"

Step = Callable[[], None]
Bytes = dict[str, int]


def measure(rounds: int = ROUNDS) -> tuple[dict[str, list[float]], Bytes, Bytes]:
    """Returns, by kind, the seconds of each step, and what a rank holds and has at its peak."""
    reports = launch(_run, RANKS, load_answer("8.4"), rounds, timeout=60 + 10 * rounds)
    seconds, held, peak = zip(*reports, strict=True)
    return of_the_slowest(list(seconds)), _largest(held), _largest(peak)


def _largest(reports: tuple[Bytes, ...]) -> Bytes:
    return {kind: max(report[kind] for report in reports) for kind in reports[0]}


def _run(rank: int, mini_fsdp: type, rounds: int) -> tuple:
    """Runs on a rank."""
    torch.set_num_threads(1)
    inputs = torch.randn(BATCH, WIDTH, device=device())
    ours, torchs = mini_fsdp(_model()), _sharded(_model())
    trainings = {
        OURS: _Training(ours, inputs, ours.finish_gradient_synchronization),
        TORCH: _Training(torchs, inputs, lambda: None),
    }
    candidates = {kind: partial(step_seconds, own.step) for kind, own in trainings.items()}
    seconds = side_by_side(candidates, rounds, WARM_UP)
    held = {kind: own.held() for kind, own in trainings.items()}
    peak = {kind: held[kind] + own.peak() for kind, own in trainings.items()}
    return seconds, held, peak


class _Training:
    """A model with its optimizer; `finish` comes between backward and update."""

    def __init__(self, model: nn.Module, inputs: Tensor, finish: Step) -> None:
        self.model, self.inputs, self.finish = model, inputs, finish
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(self) -> None:
        self.model(self.inputs).square().mean().backward()
        self.finish()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self) -> int:
        return sum(memory_ledger(self.model, self.optimizer).values())

    def peak(self) -> int:
        return statistics.median_low(peak_bytes(self.step) for _ in range(PEAKS))


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(device())


def _sharded(model: nn.Sequential) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def main() -> None:
    seconds, held, peak = measure()
    parameters = sum(p.numel() for p in _model().parameters())
    size = f"{RANKS} ranks, {LAYERS} layers, {parameters / 1e6:.1f} million parameters"
    rows = [
        [
            kind,
            f"{1000 * statistics.median(seconds[kind]):.0f}",
            human_bytes(held[kind]),
            human_bytes(peak[kind]),
        ]
        for kind in seconds
    ]
    head = [f"{size}, batch {BATCH}", "ms a step", "held between steps", "peak"]
    print_table(head, rows)
    spread = ratios(seconds, to=TORCH)[OURS]
    more = peak[OURS] / peak[TORCH]
    ratio = [[f"{OURS} to {TORCH}", spread, f"{more:.2f}"]]
    print_table(["a step, as a ratio", "time", "peak"], ratio)
    print(f"- {OURS} at most 1.2 times {TORCH}: {met(spread.median <= 1.2)}")
    print(f"- peak bytes at most 1.1 times {TORCH}'s: {met(more <= 1.1)}")
    print(flush=True)


if __name__ == "__main__":
    main()
