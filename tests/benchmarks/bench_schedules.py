"""The simulator of pipeline schedules at 256 stages and 4,096 micro-batches

Making is the schedule as data; simulating includes the check that it is legal. Seconds are processor
time of one core. The time per op beside that of 64 stages and 1,024 micro-batches, a sixteenth of
the ops, shows that the time grows with the number of ops and nothing else.
"""

import time
from functools import partial

from course_utils.lesson.schedules import (
    gpipe,
    interleaved,
    one_forward_one_backward,
    simulate,
    zb_h1,
    zb_h2,
)
from tests.benchmarks.measuring import Spread, met, print_table

STAGES, MICRO_BATCHES = 256, 4096
SMALLER = 4  # each of the two is divided by it
ROUNDS = 3
LIMIT = 5.0  # seconds, for a schedule of two million ops
CANDIDATES = {
    "GPipe": gpipe,
    "1F1B": one_forward_one_backward,
    "interleaved, 2 chunks": partial(interleaved, chunks=2),
    "ZB-H1": zb_h1,
    "ZB-H2": zb_h2,
}


def main() -> None:
    rows, slowest = [], {}
    for name, make in CANDIDATES.items():
        large = [_run(make, STAGES, MICRO_BATCHES) for _ in range(ROUNDS)]
        small = [_run(make, STAGES // SMALLER, MICRO_BATCHES // SMALLER) for _ in range(ROUNDS)]
        making, simulating, ops = (Spread.of(list(column)) for column in zip(*large))
        growth = Spread.of([(a[1] / a[2]) / (b[1] / b[2]) for a, b in zip(large, small)])
        rows.append([name, f"{ops.median / 1e6:.1f}", making, simulating, growth])
        slowest[name] = making.median + simulating.median
    print_table(
        ["schedule", "million ops", "making (s)", "simulating (s)", "time per op, 16x"], rows
    )
    for name in ("GPipe", "1F1B"):
        print(f"- {name} made and simulated within {LIMIT:.0f} s: {met(slowest[name] <= LIMIT)}")
    print(flush=True)


def _run(make, stages: int, micro_batches: int) -> tuple[float, float, int]:
    """Returns the seconds of making and of simulating a schedule, and the number of its ops."""
    start = time.process_time()
    schedule = make(stages, micro_batches)
    made = time.process_time()
    simulate(schedule)
    return made - start, time.process_time() - made, sum(map(len, schedule))


if __name__ == "__main__":
    main()
