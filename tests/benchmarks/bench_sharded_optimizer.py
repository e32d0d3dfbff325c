"""The answer to exercise 8.2 against PyTorch's ZeroRedundancyOptimizer

Both keep Adam's state for a share of the parameters on each rank; plain Adam, with all of it on
every rank, is the yardstick. They update the same model from the same gradients in the same ranks.
A round is one update of each, in an order that rotates, begun together after a barrier; an update
lasts as long as on the slowest rank. The ratios are taken round by round.
"""

import statistics
from functools import partial

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from course_exercises.authoring import load_answer
from course_utils.hardware import device
from course_utils.launch import launch
from course_utils.plots import human_bytes
from course_utils.trace import memory_ledger
from tests.benchmarks.measuring import (
    met,
    of_the_slowest,
    print_table,
    ratios,
    side_by_side,
    step_seconds,
)

RANKS = 2
LAYERS, WIDTH = 10, 1024
WARM_UP, ROUNDS = 3, 25
OURS, TORCH, PLAIN = "ShardedOptimizer", "ZeroRedundancyOptimizer", "plain Adam"


def measure(rounds: int = ROUNDS) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Returns, by kind, the seconds of each update, and the bytes of state on each rank."""
    reports = launch(_run, RANKS, load_answer("8.2"), rounds, timeout=60 + 10 * rounds)
    seconds, states = zip(*reports, strict=True)
    return of_the_slowest(list(seconds)), {k: [state[k] for state in states] for k in states[0]}


def _run(rank: int, sharded_optimizer: type, rounds: int) -> tuple:
    """Runs on a rank."""
    torch.set_num_threads(1)
    models = {kind: _model() for kind in (OURS, TORCH, PLAIN)}
    parameters = {kind: list(model.parameters()) for kind, model in models.items()}
    optimizers = {
        OURS: sharded_optimizer(parameters[OURS], torch.optim.Adam, lr=1e-3),
        TORCH: ZeroRedundancyOptimizer(parameters[TORCH], torch.optim.Adam, lr=1e-3),
        PLAIN: torch.optim.Adam(parameters[PLAIN], lr=1e-3),
    }
    candidates = {kind: partial(step_seconds, own.step) for kind, own in optimizers.items()}
    seconds = side_by_side(candidates, rounds, WARM_UP)
    # what holds the state is the optimizer inside; Adam's count of steps is 4 bytes a parameter
    return seconds, {kind: _state_bytes(own, models[kind]) for kind, own in optimizers.items()}


def _model() -> nn.Module:
    """With gradients, as backward and their average over the ranks would leave them."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(device())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def _state_bytes(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's own
    return memory_ledger(model, inner)["optimizer"]


def main() -> None:
    seconds, states = measure()
    parameters = sum(p.numel() for p in _model().parameters())
    size = f"{RANKS} ranks, {LAYERS} layers, {parameters / 1e6:.1f} million parameters"
    rows = [
        [
            kind,
            f"{1000 * statistics.median(seconds[kind]):.0f}",
            *map(human_bytes, (min(states[kind]), max(states[kind]))),
        ]
        for kind in seconds
    ]
    print_table([size, "ms an update", "least state on a rank", "most"], rows)
    spread = ratios(seconds, to=TORCH)[OURS]
    print_table(["an update's time, as a ratio", "ratio"], [[f"{OURS} to {TORCH}", spread]])
    most = max(states[OURS]) / max(states[TORCH])
    print(f"- most state on a rank at most 1.1 times {TORCH}'s: {met(most <= 1.1)}")
    print(flush=True)


if __name__ == "__main__":
    main()
