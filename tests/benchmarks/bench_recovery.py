"""Recovery of an elastic run after a kill, by monitor interval

Two agents with one worker each train cluster/train.py, which saves after every step. A worker, or an
agent together with its worker, gets kill -9; a killed agent is started again at once. The clock runs
from the kill to the end of the next step, whoever does it. Its parts: until the worker that does the
step exists (the agents notice, and meet again); until its group stands (Python and PyTorch start);
until the step is done (the checkpoint is read). An agent counts as dead when it has not been heard for 10 s
(torchrun's default is 15 s); the other one cannot begin alone before.
"""

import tempfile
import time
from itertools import pairwise
from pathlib import Path

from tests.benchmarks.measuring import Spread, print_table
from tests.support.elastic_runs import ElasticRun, EventLog

INTERVALS = (0.1, 1, 5)  # seconds from one look of an agent at its workers to the next
ROUNDS = 3
OPTIONS = [
    *("--samples", "1600", "--batch", "16", "--width", "16", "--layers", "1"),
    *("--save-every", "1"),  # nothing has to be done again
]


def main() -> None:
    rows = []
    for what in ("worker", "node"):
        for interval in INTERVALS:
            parts = [Spread.of(seconds) for seconds in zip(*measure(what, interval))]
            rows.append([NAMES[what], interval, *parts])
    print_table(
        [
            "kill -9 to",
            "monitor interval (s)",
            "meet again (s)",
            "start (s)",
            "step (s)",
            "all (s)",
        ],
        rows,
    )


NAMES = {"worker": "a worker", "node": "an agent and its worker"}


def measure(what: str, interval: float) -> list[tuple[float, ...]]:
    """Returns for each round the seconds of the three parts, and of all."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ElasticRun(Path(folder), OPTIONS, nodes="1:2", monitor_interval=interval) as run,
    ):
        run.start_agent("a")
        run.start_agent("b")
        found = []
        for step in range(1, ROUNDS + 1):
            run.wait(lambda: _two_together(run), "both agents in one group")
            run.gate.open_to(step)
            run.wait_for_step(step)
            killed = time.time()
            if what == "worker":
                run.kill_worker("b")
            else:
                run.kill_node("b")
                run.start_agent("b")
            run.gate.open_to(step + 1)
            run.wait_for_step(step + 1)
            found.append(_parts(run, step + 1, killed))
        return found


def _two_together(run: ElasticRun) -> bool:
    log = EventLog(run.folder)
    newest = max(log.incarnations, default=None)
    return newest is not None and len(log.of(newest, "resume")) == 2


def _parts(run: ElasticRun, step: int, killed: float) -> tuple[float, ...]:
    log = EventLog(run.folder)
    name = min(name for name in log.incarnations if log.ranks_of(name, step))
    start, done = log.of(name, "start")[0], log.ranks_of(name, step)[0]
    moments = [killed, run.began(start["pid"]), start["time"], done["time"]]
    parts = [later - earlier for earlier, later in pairwise(moments)]
    return (*parts, sum(parts))
