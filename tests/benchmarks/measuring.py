"""Times of several candidates, taken side by side, as ratios in a Markdown table.

A round runs each candidate once, in an order that rotates; ratios are taken round by round. What
slows the machine for a while then slows all candidates, and the ratios stay.
"""

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from course_utils.hardware import device
from tests.benchmarks.apart import Hung


@dataclass(frozen=True)
class Spread:
    """The median of some numbers and their quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(*statistics.quantiles(values, n=4))

    def __str__(self) -> str:
        digits = 2 if self.median >= 0.01 else 4
        low, median, high = (f"{x:.{digits}f}" for x in (self.low, self.median, self.high))
        return f"{median} ({low} to {high})"


def side_by_side(
    candidates: dict[str, Callable[[], float | None]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Returns the seconds of each candidate in each round, after some rounds to warm up.

    A candidate that measures itself returns its seconds. One that raises Hung is not run again, and
    is left out.
    """
    seconds = {name: [] for name in candidates}
    order = list(candidates)
    for number in range(warm_up + rounds):
        for name in [name for name in order if name in seconds]:
            start = time.perf_counter()
            try:
                own = candidates[name]()
            except Hung:
                del seconds[name]
                continue
            if number >= warm_up:
                seconds[name].append(own or time.perf_counter() - start)
        order = order[1:] + order[:1]
    return seconds


def step_seconds(step: Callable[[], None]) -> float:
    """Returns, on a rank, how long `step` takes that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    step()
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(step: Callable[[], None]) -> int:
    """Returns how much more memory this rank had allocated within `step`, at most, than before it.

    On the CPU these are the allocations that PyTorch's profiler hears of.
    """
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _without_stderr(), profiler:  # its library reports there that it starts and stops
        step()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    return max(itertools.accumulate(event["args"]["Bytes"] for event in changes))


@contextmanager
def _without_stderr() -> Iterator[None]:
    """What this process writes to file descriptor 2 is lost."""
    before = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def of_the_slowest(reports: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Returns the seconds of each candidate in each round on the rank that took longest."""
    return {
        name: [max(times) for times in zip(*(report[name] for report in reports), strict=True)]
        for name in reports[0]
    }


def ratios(seconds: dict[str, list[float]], to: str) -> dict[str, Spread]:
    """Returns each candidate's time as a multiple of that of the candidate `to`."""
    return {
        name: Spread.of([a / b for a, b in zip(times, seconds[to], strict=True)])
        for name, times in seconds.items()
    }


def print_table(head: list[str], rows: list[list[object]]) -> None:
    """Prints a table in Markdown; all columns but the first are numbers."""
    print("| " + " | ".join(head) + " |")
    print("|---" + "|--:" * (len(head) - 1) + "|")
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    print()


def met(reached: bool) -> str:
    """Returns how a target ended, for the end of its line."""
    return "met" if reached else "NOT MET"
