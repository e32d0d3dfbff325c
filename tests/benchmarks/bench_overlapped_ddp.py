"""The answer to exercise 3.4 against PyTorch's DDP, and against itself without overlap

All three train the same model in the same ranks. A round is one step of each, in an order that
rotates, every step begun together after a barrier; a step lasts as long as on the slowest rank.
The ratios are taken round by round, so that what slows the machine for a while slows all three.

Without overlap means: backward runs under no_sync(), and everything is sent afterwards.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_utils.checks import load_answer
from course_utils.hardware import device
from course_utils.launch import launch
from tests.benchmarks.measuring import Spread, met, print_table

RANKS = 2
LAYERS, WIDTH, BATCH = 10, 1024, 128
BUCKET_MB = 8
WARM_UP, ROUNDS = 3, 25

DDP, OVERLAPPED, LATE = "torch DDP", "OverlappedDDP", "without overlap"


@dataclass(frozen=True)
class Ratio:
    """The median of a time ratio, and the interquartile range of its rounds."""

    of: str
    to: str
    median: float
    low: float
    high: float


def measure(rounds: int = ROUNDS) -> tuple[dict[str, float], list[Ratio]]:
    """Returns the median seconds of a step by its kind, and the ratios between the kinds."""
    timeout = 60 + 10 * rounds
    reports = launch(_steps, RANKS, load_answer("3.4"), rounds, timeout=timeout)
    steps = {
        kind: [max(times) for times in zip(*(report[kind] for report in reports), strict=True)]
        for kind in reports[0]
    }
    pairs = ((OVERLAPPED, DDP), (OVERLAPPED, LATE), (LATE, DDP))
    medians = {kind: statistics.median(times) for kind, times in steps.items()}
    return medians, [_ratio(steps, *pair) for pair in pairs]


def _ratio(steps: dict[str, list[float]], of: str, to: str) -> Ratio:
    ratios = [a / b for a, b in zip(steps[of], steps[to], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return Ratio(of, to, median, low, high)


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
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    order = list(kinds)
    for number in range(WARM_UP + rounds):
        for kind in order:
            seconds = _timed(partial(kinds[kind], inputs))
            if number >= WARM_UP:
                times[kind].append(seconds)
        order = order[1:] + order[:1]
    return times


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(device())


def _timed(step: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


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
    medians, ratios = measure()
    parameters = sum(p.numel() for p in _model().parameters())
    size = f"{RANKS} ranks, {LAYERS} layers, {parameters / 1e6:.1f} million parameters"
    times = [[kind, f"{1000 * seconds:.0f}"] for kind, seconds in medians.items()]
    print_table([f"{size}, batch {BATCH}", "ms a step"], times)
    spreads = [[f"{r.of} to {r.to}", Spread(r.low, r.median, r.high)] for r in ratios]
    print_table(["a step's time, as a ratio", "ratio"], spreads)
    ours, late = ratios[0].median, ratios[1].median
    print(f"- {OVERLAPPED} at most 1.1 times {DDP}: {met(ours <= 1.1)}")
    print(f"- {OVERLAPPED} faster than {LATE}: {met(late < 1)}")
    print(flush=True)


if __name__ == "__main__":
    main()
