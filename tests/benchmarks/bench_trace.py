"""estimate.trace: 405 billion parameters on 16,384 ranks, in a process of its own

Llama 3 405B on 8 tensor ranks, 16 stages and 128 data ranks, 16 micro-batches of 8,192 tokens.
The vocabulary is 131,072, so that tensor and data ranks share it out without padding.
"""

import re
import resource
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import course_planner as estimate
from course_planner import Layout, Model, Trace, published
from tests.benchmarks.measuring import met, print_table
from tests.support.traced_programs import decoder

MODEL = replace(published.LLAMA["405B"], vocab=131_072)
LAYOUT = Layout(dp=128, tp=8, pp=16, zero=3, micro_batches=16)
SEQ = 8192
SECONDS, BYTES = 90.0, 1.5e9


@dataclass(frozen=True)
class Measured:
    """A trace of a rank of `stage`; bytes: the most memory that this process ever had."""

    stage: int
    trace: Trace
    bytes: int

    def as_calculated(self, layout: Layout) -> bool:
        """Whether calls, bytes and FLOPs are those of the closed form, to the last digit.

        The norms' and the loss's few numbers are all-reduced among tensor ranks, and left out.
        """
        counted = {c for c in self.trace.calls if (c.group, c.op) != ("tp", "all_reduce")}
        calls = set(estimate.traffic(MODEL, layout, SEQ, self.stage))
        return counted == calls and self.trace.flops == flops_of(MODEL, layout, SEQ, self.stage)


def flops_of(model: Model, layout: Layout, seq: int, stage: int) -> int:
    """Of a rank of `stage`: 6 a weight and token; attention's core has 2 products forward and 5
    backward, where flash attention computes the scores again."""
    tokens = seq * layout.micro_batch * layout.micro_batches
    layers = layout.stage_layers(model.layers)[stage]
    weights = estimate.counting.matrices_visited(model)
    head = 6 * model.vocab * model.width if stage == layout.pp - 1 else 0
    return tokens * (layers * (6 * weights + 14 * seq * model.width) + head) // layout.tp


def measure(layout: Layout, stage: int) -> Measured:
    """Traces a rank of `stage`: stages are outermost."""
    program = partial(decoder, model=MODEL, seq=SEQ, dtype=torch.bfloat16)
    trace = estimate.trace(program, layout, stage * layout.gpus // layout.pp)
    return Measured(stage, trace, most_memory())


def most_memory() -> int:
    """The most bytes of memory that this program has had. On Linux ru_maxrss may be that of the process from which
    it was started (getrusage(2) lives on through exec); VmHWM begins anew."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    [size] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(size)


def main() -> None:
    found = [measure(LAYOUT, stage) for stage in (0, LAYOUT.pp - 1)]
    rows = [
        [
            f"rank of stage {one.stage}",
            f"{one.trace.seconds:.0f}",
            f"{one.bytes / 1e9:.2f}",
            f"{one.trace.flops / 1e15:.2f}",
            f"{sum(call.sent for call in one.trace.calls) / 1e9:.0f}",
            "yes" if one.as_calculated(LAYOUT) else "NO",
        ]
        for one in found
    ]
    head = ["16,384 ranks", "s", "GB of the process", "PFLOP", "GB sent", "as calculated"]
    print_table(head, rows)
    slowest, fullest = max(one.trace.seconds for one in found), max(one.bytes for one in found)
    exact = all(one.as_calculated(LAYOUT) for one in found)
    print(f"- traced in at most {SECONDS:.0f} s: {met(slowest <= SECONDS)}")
    print(f"- in at most {BYTES / 1e9} GB: {met(fullest <= BYTES)}")
    print(f"- calls, bytes and FLOPs to the last digit: {met(exact)}", flush=True)


if __name__ == "__main__":
    main()
